"""Comparison of runs: curves on one plot with intervals over seeds, settings that differ, and tests over the prompts
or sequences that runs share."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.config import RunConfig, SequenceSection
from posttrain.config.yaml_file import diff_config, dump_config, stage_settings
from posttrain.errors import ConfigError, did_you_mean
from posttrain.evaluation.sequences import PROMPTS, SEQUENCES, sequence_differences
from posttrain.results.result import RunResult, attach
from posttrain.runs.folder import NO_EFFECT
from posttrain.runtime.files import digest
from posttrain.statistics import Interval, PairedDifference, mean_interval, paired_difference, prompt_numbers
from posttrain.tracking.notebook import MAX_POINTS, text_curve
from posttrain.tracking.records import points
from posttrain.tracking.steps import LAYOUTS

COLORS = ("#3b7dd8", "#d8703b", "#3ba55d", "#a55dc4", "#c4a13b", "#3bb8c4", "#c43b6e", "#7a7a7a")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 280, 52, 12, 26, 24
CODE, INPUTS = "code.json", "inputs.json"
Curve = Sequence[tuple[int, Interval]]


@dataclass(frozen=True, kw_only=True)
class SeedGroup:
    """Runs that differ by their seed alone."""

    label: str
    runs: Sequence[RunResult]
    configs: Sequence[RunConfig]
    curves: Mapping[str, Curve]
    """Mean over seeds at each step that all of them have, by metric."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison:
    """Groups of runs, their curves and differences; SVG in a notebook, a table in a terminal."""

    groups: Sequence[SeedGroup]
    settings: Mapping[str, Sequence[Any]]
    """Settings that differ, each with its value in every group."""
    paired: Mapping[str, Mapping[str, PairedDifference]]
    """By the label of a group after the first, and by metric: the difference from the first group over the prompts or
    sequences that both were evaluated on at their end, as means of their seeds."""

    unit: str = "shared prompts"
    """Unit of these differences."""

    def save(self, path: str | Path) -> Path:
        """Write the curves as `.svg`, one below the other, or as `.html`. ConfigError for another ending."""
        path = Path(path)
        if path.suffix not in (".svg", ".html"):
            raise ConfigError(f"compare: {path}: give a file that ends with .svg or .html")
        path.write_text(self._svg() if path.suffix == ".svg" else self._repr_html_(), encoding="utf-8")
        return path

    @property
    def metrics(self) -> list[str]:
        return list(dict.fromkeys(name for group in self.groups for name in group.curves))

    def _plots(self) -> list[str]:
        return [plot(name, {g.label: g.curves[name] for g in self.groups if name in g.curves}) for name in self.metrics]

    def _svg(self) -> str:
        plots, total = self._plots(), HEIGHT * len(self.metrics)
        inner = "".join(f'<g transform="translate(0,{HEIGHT * number})">{one}</g>' for number, one in enumerate(plots))
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{total}" font-family="sans-serif" '
            f'font-size="11">{inner}</svg>\n'
        )

    def _repr_html_(self) -> str:
        return f"{self._svg()}<pre>{escape(repr(self))}</pre>"

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Describe groups, settings that differ, last values and tests."""
        width = max(len(group.label) for group in self.groups)
        lines = []
        for group in self.groups:
            seeds = ", ".join(str(config.seed) for config in group.configs)
            names = ", ".join(str(run.output) for run in group.runs)
            lines.append(f"{group.label:<{width}}  {'seeds' if len(group.runs) > 1 else 'seed'} {seeds}: {names}")
        for run in (run for group in self.groups for run in group.runs if not run.finished):
            lines.append(f"{run.output} is not finished: {run.state}; its values are those so far")
        for name, values in self.settings.items():
            lines.append(f"{name}: " + "; ".join(f"{g.label} {v}" for g, v in zip(self.groups, values, strict=True)))
        for metric in self.metrics:
            lines.append(metric)
            for group in self.groups:
                curve = group.curves.get(metric, ())
                last = f"  {shown(curve[-1][1])} at step {curve[-1][0]}" if curve else ""
                lines.append(f"  {group.label:<{width}}  {text_curve([(s, i.mean) for s, i in curve])}{last}")
        for label, found in self.paired.items():
            for metric, one in found.items():
                chance = "p < 0.001" if one.p_value < 0.001 else f"p = {one.p_value:.3f}"
                lines.append(
                    f"{metric}, {label} less {self.groups[0].label} over {one.n} {self.unit}: {one.mean:+.4g} "
                    f"[{one.low:+.4g}, {one.high:+.4g}], {chance}"
                )
        return lines


def shown(interval: Interval) -> str:
    """Mean of seeds with its interval; a single seed has none."""
    if interval.n < 2:
        return f"{interval.mean:.4g}"
    return f"{interval.mean:.4g} [{interval.low:.4g}, {interval.high:.4g}] over {interval.n} seeds"


def compare(*runs: str | Path | RunResult, metrics: Sequence[str] = (), stage: str | None = None) -> Comparison:
    """Compare runs: those whose settings and code differ by the seed alone are one group, with means and 95 % intervals
    over seeds.

    `metrics`: by default the main one of the stage, and its held-out value. `stage`: by default the last of each run.
    ConfigError for fewer than two runs, for two with the same settings and seed, and for a metric that none has.
    """
    results = [one if isinstance(one, RunResult) else attach(one) for one in runs]
    if len(results) < 2:
        raise ConfigError("compare: give two runs or more")
    configs = [result.config for result in results]
    places = [_place(result, stage) for result in results]
    kinds = sorted({config.stages[place].kind for config, place in zip(configs, places, strict=True)})
    if len(kinds) > 1:
        raise ConfigError(f"compare: stages of kinds {', '.join(kinds)}; name one that all runs have (stage)")
    members: dict[str, list[int]] = {}
    for number, (result, config) in enumerate(zip(results, configs, strict=True)):
        members.setdefault(_identity(result, config), []).append(number)
    chosen = list(metrics) or _headlines(results, places, kinds[0])
    groups = []
    for number, own in enumerate(members.values()):
        seeds = [configs[one].seed for one in own]
        if len(set(seeds)) < len(seeds):
            again = ", ".join(str(results[one].output) for one in own)
            raise ConfigError(f"compare: {again}: runs of the same settings and seed are one run; give it once")
        rows = [_rows(results[one], places[one]) for one in own]
        curves = {name: curve for name in chosen if (curve := over_seeds([points(r, name) for r in rows]))}
        label = chr(ord("A") + number) if number < 26 else f"G{number}"
        own_runs = [results[one] for one in own]
        groups.append(SeedGroup(label=label, runs=own_runs, configs=[configs[one] for one in own], curves=curves))
    for name in chosen:
        if not any(name in group.curves for group in groups):
            known = {key for r, place in zip(results, places, strict=True) for row in _rows(r, place) for key in row}
            raise ConfigError(f"compare: no run has the metric {name!r}{did_you_mean(name, known)}")
    own_places = [places[results.index(group.runs[0])] for group in groups]
    values = [_evaluated(group, place) for group, place in zip(groups, own_places, strict=True)]
    paired = {group.label: _differences(values[0], own) for group, own in zip(groups[1:], values[1:], strict=True)}
    unit = Comparison.unit
    if not any(values):
        sums = [_sequences(group, place) for group, place in zip(groups, own_places, strict=True)]
        paired = {g.label: _sequence_differences(sums[0], own) for g, own in zip(groups[1:], sums[1:], strict=True)}
        unit = "prompts of held-out sequences"
    paired = {label: found for label, found in paired.items() if found}
    return Comparison(groups=groups, settings=_settings(groups), paired=paired, unit=unit)


def _place(result: RunResult, stage: str | None) -> int:
    if stage is None:
        begun = [row["stage"] for row in result.metrics]
        return list(result.stages).index(begun[-1]) if begun else len(result.stages) - 1
    if stage not in result.stages:
        raise ConfigError(
            f"compare: {result.output} has no stage {stage!r} ({', '.join(result.stages)})"
            f"{did_you_mean(stage, result.stages)}"
        )
    return list(result.stages).index(stage)


def _rows(result: RunResult, place: int) -> list[dict[str, Any]]:
    return [row for row in result.metrics if row["stage"] == result.stages[place]]


def _identity(result: RunResult, config: RunConfig) -> str:
    """Settings, code and inputs of a run but for its seed, and for what has no effect."""
    same = config.model_copy(
        update={"seed": 0, "tensorboard": True, "trackers": (), "metrics_server": None, "profile": None}
    )
    files = [file for name in (CODE, INPUTS) if (file := result.output / name).is_file()]
    texts = [dump_config(same), *(file.read_text(encoding="utf-8") for file in files)]
    # Rows and templates given in Python lie in the run's own folder.
    return "\0".join(texts).replace(config.output, "").replace(str(result.output), "")


def _headlines(results: Sequence[RunResult], places: Sequence[int], kind: str) -> list[str]:
    main = LAYOUTS[kind].headline
    named = {key for result, place in zip(results, places, strict=True) for row in _rows(result, place) for key in row}
    main = main if main in named or "distill/kl" not in named else "distill/kl"
    return [main, *(name for name in (f"eval/{main}",) if name in named)]


def over_seeds(curves: Sequence[Sequence[tuple[int, float]]]) -> Curve:
    """Mean and 95 % interval over seeds at each step where all of them have a finite value."""
    by_step = [{step: value for step, value in curve if math.isfinite(value)} for curve in curves]
    steps = sorted(set.intersection(*(set(one) for one in by_step)))
    return [(step, _over([one[step] for one in by_step])) for step in steps]


def _over(values: Sequence[float]) -> Interval:
    """Student's interval over seeds, of shares too: a seed is one observation of its mean, not an outcome."""
    if len(values) == 1 or len(set(values)) == 1:
        return Interval(values[0], values[0], values[0], len(values))
    shift = 2.0  # off the outcomes 0 and 1, for which the interval would be Wilson's
    found = mean_interval(np.asarray(values) + shift)
    return Interval(found.mean - shift, found.low - shift, found.high - shift, found.n)


def _evaluated(group: SeedGroup, place: int) -> dict[str, dict[str, float]]:
    """Value of each prompt in the last evaluation by metric, the mean over seeds; only prompts that all seeds have."""
    found: dict[str, list[dict[str, float]]] = {}
    for run in group.runs:
        file = run.output / run.stages[place] / "result.json"
        after = json.loads(file.read_text(encoding="utf-8")).get("after", {}) if file.is_file() else {}
        if "samples" not in after or "prompts" not in after:
            return {}
        for name in (None, *after["sets"]):
            one = after if name is None else after["sets"][name]
            for metric, values in one["values"].items():
                key = f"eval/{metric}" if name is None else f"eval/{name}/{metric}"
                found.setdefault(key, []).append(_by_prompt(one["prompts"], values))
    whole = {key: each for key, each in found.items() if len(each) == len(group.runs)}
    shared = {key: set.intersection(*(set(one) for one in each)) for key, each in whole.items()}
    return {
        key: {text: sum(one[text] for one in each) / len(each) for text in shared[key]} for key, each in whole.items()
    }


def _sequences(group: SeedGroup, place: int) -> tuple[Any, dict[str, np.ndarray]]:
    """Held-out dataset, and the sums of each sequence in the last evaluation, means over seeds; none where seeds saw
    other sequences."""
    each = []
    for run in group.runs:
        file = run.output / run.stages[place] / "result.json"
        after = json.loads(file.read_text(encoding="utf-8")).get("after", {}) if file.is_file() else {}
        each.append({name: np.asarray(sums) for name, sums in after.get(SEQUENCES, {}).items()})
    same = all(_same_sequences(one, each[0]) for one in each)
    section = group.configs[0].stages[place]
    held_out = section.eval_dataset if isinstance(section, SequenceSection) else None
    if not same:
        return held_out, {}
    means = {name: np.mean([one[name] for one in each], axis=0) for name in each[0] if name != PROMPTS}
    return held_out, means | {name: each[0][name] for name in (PROMPTS,) if name in each[0]}


def _same_sequences(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    """Tell whether evaluations are of sequences with the same numbers of tokens, in order."""
    return np.array_equal(one.get("weight", ()), other.get("weight", ()))


def _sequence_differences(
    first: tuple[Any, Mapping[str, np.ndarray]], other: tuple[Any, Mapping[str, np.ndarray]]
) -> dict[str, PairedDifference]:
    """Differences over the same sequences: those of one dataset with the same numbers of tokens, in order."""
    (dataset, before), (other_dataset, after) = first, other
    if PROMPTS not in before or PROMPTS not in after:
        return {}
    if dataset != other_dataset or len(before.get("weight", ())) < 2 or not _same_sequences(before, after):
        return {}
    found = sequence_differences({SEQUENCES: before}, {SEQUENCES: after})
    return {metric: PairedDifference(**one) for metric, one in found.items()}


def _by_prompt(prompts: Sequence[str], values: Sequence[float | None]) -> dict[str, float]:
    """Mean value of each unit, see `prompt_numbers`; those without a value are left out."""
    numbers = prompt_numbers(prompts).tolist()
    alone = len(set(prompts)) < len(set(numbers))
    by_prompt: dict[str, list[float]] = {}
    for number, prompt, value in zip(numbers, prompts, values, strict=True):
        if value is not None:
            by_prompt.setdefault(f"{prompt} {number}" if alone else prompt, []).append(value)
    return {prompt: sum(own) / len(own) for prompt, own in by_prompt.items()}


def _differences(
    first: Mapping[str, Mapping[str, float]], other: Mapping[str, Mapping[str, float]]
) -> dict[str, PairedDifference]:
    found = {}
    for metric in first.keys() & other.keys():
        shared = sorted(first[metric].keys() & other[metric].keys())
        if len(shared) > 1:
            before, after = ([one[metric][text] for text in shared] for one in (first, other))
            found[metric] = paired_difference(before, after)
    return {metric: found[metric] for metric in first if metric in found}


def _settings(groups: Sequence[SeedGroup]) -> dict[str, list[Any]]:
    """Settings that differ between groups, by dotted name, and their values; `code` where user code does, and
    `versions.NAME` where those of the last calls do."""
    first = groups[0].configs[0]
    keys = dict.fromkeys(
        key
        for group in groups[1:]
        for key in diff_config(first, group.configs[0])
        if key.partition(".")[0] not in (*NO_EFFECT, "seed")
    )
    flat = [_flat(group.configs[0]) for group in groups]
    found = {key: [_setting(one, key) for one in flat] for key in keys}
    for name, file in {"code": CODE, "data": INPUTS}.items():
        digests = [_digest_of(group.runs[0], file) for group in groups]
        found |= {name: digests} if len(set(digests)) > 1 else {}
    made_by = [dict(calls[-1]) if (calls := group.runs[0].versions) else {} for group in groups]
    for name in dict.fromkeys(name for one in made_by for name in one):
        numbers = [one.get(name, "-") for one in made_by]
        found |= {f"versions.{name}": numbers} if len(set(numbers)) > 1 else {}
    return found


def _setting(flat: Mapping[str, Any], name: str) -> Any:
    """Value of a setting, or those of a section that another group lacks."""
    own = {key.removeprefix(f"{name}."): value for key, value in flat.items() if key.startswith(f"{name}.")}
    return flat.get(name, own or "-")


def _flat(config: RunConfig) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for number in range(len(config.stages)):
        own = stage_settings(config, number)
        flat |= own | {f"stages.{number}.{key}": value for key, value in own.items()}
    return flat


def _digest_of(result: RunResult, name: str) -> str:
    file = result.output / name
    return digest(file.read_text(encoding="utf-8"), 8) if file.is_file() else "-"


def plot(name: str, curves: Mapping[str, Curve]) -> str:
    """Curves of one metric as parts of an SVG: lines of means, and bands of intervals."""
    thinned = {label: curve[:: max(1, math.ceil(len(curve) / MAX_POINTS))] for label, curve in curves.items()}
    every = [point for curve in thinned.values() for point in curve]
    ends = [end for _, i in every for end in (i.mean, i.low, i.high) if math.isfinite(end)]
    low, high = min(ends), max(ends)
    first, last = min(step for step, _ in every), max(step for step, _ in every)
    pad = (high - low) * 0.05 or max(abs(low), 1.0) * 0.05
    low, high = low - pad, high + pad

    def place(step: int, value: float) -> str:
        x = LEFT + (WIDTH - LEFT - RIGHT) * (step - first) / max(last - first, 1)
        y = TOP + (HEIGHT - TOP - BOTTOM) * (high - min(max(value, low), high)) / (high - low)
        return f"{x:.1f},{y:.1f}"

    bottom = HEIGHT - BOTTOM
    parts = [
        f'<text x="{LEFT}" y="16" font-weight="bold" fill="currentColor">{escape(name)}</text>',
        f'<path d="M{LEFT} {TOP}V{bottom}H{WIDTH - RIGHT}" fill="none" stroke="currentColor" opacity="0.3"/>',
        f'<text x="{LEFT - 4}" y="{TOP + 8}" text-anchor="end" fill="currentColor">{high:.3g}</text>',
        f'<text x="{LEFT - 4}" y="{bottom}" text-anchor="end" fill="currentColor">{low:.3g}</text>',
        f'<text x="{LEFT}" y="{HEIGHT - 8}" fill="currentColor">{first}</text>',
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end" fill="currentColor">step {last}</text>',
    ]
    for number, (label, curve) in enumerate(thinned.items()):
        color = COLORS[number % len(COLORS)]
        if any(i.n > 1 for _, i in curve):
            band = [place(s, i.high) for s, i in curve] + [place(s, i.low) for s, i in reversed(curve)]
            parts.append(f'<polygon points="{" ".join(band)}" fill="{color}" opacity="0.18"/>')
        line = " ".join(place(step, i.mean) for step, i in curve)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        x = WIDTH - RIGHT - 26 * (len(thinned) - number - 1)
        parts.append(f'<text x="{x}" y="16" text-anchor="end" fill="{color}">{escape(label)}</text>')
    return "".join(parts)
