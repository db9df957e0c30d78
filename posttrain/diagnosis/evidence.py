"""Evidence of a stage, as its run's folder holds it: settings, metrics, evaluations, records, and how the reward scores
the data's own answers. Read without JAX."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.config import ModelSection, TrainSection
from posttrain.config.yaml_file import load_recorded
from posttrain.data.sources import load_rows
from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.diagnosis.answers import CONFIG, Answers, no_answers
from posttrain.diagnosis.score_answers import score_answers
from posttrain.errors import ConfigError
from posttrain.tracking.records import read_lines, read_metrics, read_samples

WARNINGS = "warnings.jsonl"
MAX_RECORDS = 16
"""Records that are read: the first, the last and some between, so that large runs take seconds too."""
MAX_ROWS = 4096
"""Rows of a dataset that are read."""
PART = 5
"""A change is that from the first to the last fifth of the steps."""
LEAST_STEPS = 3
"""Least steps of such a part."""
RECENT, GAP, EARLIER, LEAST_EARLIER = 8, 12, 40, 8
"""A recent change: mean of the last steps against that of earlier ones, apart by steps in which it may have begun."""


@dataclass(frozen=True)
class Change:
    """Change of the mean of a metric, also in standard errors (`z`), from `before` to `after`."""

    before: float
    after: float
    z: float
    steps: int
    """Steps of each of the two means."""

    @property
    def by(self) -> float:
        return self.after - self.before

    def rises(self, least: float, z: float = 4.0) -> bool:
        return self.by >= least and self.z >= z

    def falls(self, least: float, z: float = 4.0) -> bool:
        return -self.by >= least and self.z <= -z

    def __str__(self) -> str:
        return f"{self.before:.3g} -> {self.after:.3g} (z {self.z:+.1f})"


@dataclass(frozen=True, kw_only=True)
class RecordedSample:
    """Sample of a recorded step."""

    step: int
    group: int
    row: int
    """Row number in the dataset."""
    reward: float
    """NaN: none."""
    stop: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    """Sampled tokens."""

    @property
    def is_cut(self) -> bool:
        from posttrain.rollout.trajectory import is_cut

        return is_cut(self.stop)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Evidence of one stage up to its last step. What is expensive is made at its first use, once."""

    name: str
    """Name of the stage, such as `0-rl`."""
    kind: str
    """Kind of the stage, such as `rl`."""
    section: TrainSection
    model: ModelSection
    steps: Sequence[Mapping[str, Any]] = ()
    """Metrics of the training steps, in order."""
    evaluations: Sequence[Mapping[str, Any]] = ()
    """Metrics with the names `eval/...`, in order, with their `step`."""
    samples: Sequence[Mapping[str, Any]] = ()
    """Rows of `samples.jsonl`."""
    result: Mapping[str, Any] = field(default_factory=dict)
    """Evaluations `before` and `after` and their `difference`, of a stage that is done; else what it has so far."""
    warnings: Sequence[Mapping[str, Any]] = ()
    """Causes that the run has told so far, as lines of `warnings.jsonl`."""
    read_records: Callable[[], Sequence[RecordedSample]] = tuple
    read_answers: Callable[[Sequence[int]], Answers] = no_answers
    """Scores of the data's own answers, of these rows if there are any."""
    read_rows: Callable[[bool], Sequence[Mapping[str, Any]]] = lambda held_out: ()
    """First rows of the training data, or of the held-out data."""
    read_tokenizer: Callable[[], Tokenizer | None] = lambda: None
    read_source_tokenizer: Callable[[], Tokenizer | None] = lambda: None

    @cached_property
    def records(self) -> Sequence[RecordedSample]:
        """Samples of recorded steps: the first, the last and some between."""
        return self.read_records()

    @cached_property
    def answers(self) -> Answers:
        """Right answers of the data, and other rows' answers, as the reward functions score them."""
        return self.read_answers(sorted({sample.row for sample in self.records}))

    @cached_property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """First rows of the training data; none where it cannot be read."""
        return self.read_rows(False)

    @cached_property
    def held_out_rows(self) -> Sequence[Mapping[str, Any]]:
        """First rows of `eval_dataset`; none without it, or where it cannot be read."""
        return self.read_rows(True)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        return self.read_tokenizer()

    @cached_property
    def source_tokenizer(self) -> Tokenizer | None:
        """Tokenizer of the model that the stage began with, and the form of the prompts it was trained on."""
        return self.read_source_tokenizer()

    @property
    def num_steps(self) -> int:
        """Number of the last step."""
        return int(self.steps[-1]["step"]) if self.steps else 0

    def column(self, name: str) -> np.ndarray:
        """Values of a metric by step; NaN where there is none."""
        return np.asarray([_number(line.get(name)) for line in self.steps], np.float64)

    def mean(self, name: str, steps: slice = slice(None)) -> float:
        """Mean over some steps; NaN without any value."""
        return nan_mean(self.column(name)[steps])

    @property
    def part(self) -> int:
        """Number of steps in the first and in the last part."""
        return max(LEAST_STEPS, len(self.steps) // PART)

    def change(self, name: str) -> Change | None:
        """Change from the first to the last part; None with fewer steps than two parts, or without values there."""
        values, part = self.column(name), self.part
        if len(values) < 2 * LEAST_STEPS:
            return None
        part = min(part, len(values) // 2)
        errors = self.column(f"{name}_stderr")
        return _change(values[:part], values[-part:], errors[:part], errors[-part:])

    def recent_change(self, name: str) -> Change | None:
        """Change from earlier steps to the last ones; None before there are enough of both."""
        values = self.column(name)
        values = values[np.isfinite(values)]
        earlier, recent = values[: -RECENT - GAP][-EARLIER:], values[-RECENT:]
        return None if len(earlier) < LEAST_EARLIER else _change(earlier, recent)

    def grows(self, name: str, least: float) -> Change | None:
        """Growth of a metric by at least so much, over the stage or lately; None without it."""
        changes = (self.change(name), self.recent_change(name))
        return next((one for one in changes if one is not None and one.rises(least)), None)

    def text_of(self, sample: RecordedSample) -> str:
        """Text of a sample; its tokens without a tokenizer."""
        if self.tokenizer is None:
            return " ".join(map(str, sample.tokens))
        return self.tokenizer.decode(sample.tokens)

    def groups(self, records: Sequence[RecordedSample] | None = None) -> list[list[RecordedSample]]:
        """Recorded samples by group."""
        found: dict[tuple[int, int], list[RecordedSample]] = {}
        for sample in self.records if records is None else records:
            found.setdefault((sample.step, sample.group), []).append(sample)
        return list(found.values())

    def late_records(self, share: float = 1 / 3) -> list[RecordedSample]:
        """Recorded samples of the last part of the steps."""
        after = self.num_steps * (1 - share)
        return [sample for sample in self.records if sample.step > after]


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def nan_mean(values: np.ndarray) -> float:
    """Mean of the numbers among values; NaN without any."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else math.nan


def _change(
    before: np.ndarray, after: np.ndarray, first_errors: np.ndarray | None = None, last_errors: np.ndarray | None = None
) -> Change | None:
    before, after = before[np.isfinite(before)], after[np.isfinite(after)]
    if len(before) < 2 or len(after) < 2:
        return None
    # Few steps may be alike by chance: the spread of both parts counts, and the error that each step states.
    spread = math.hypot(float(before.std(ddof=1)), float(after.std(ddof=1))) / math.sqrt(2)
    error = spread * math.sqrt(1 / len(before) + 1 / len(after))
    if first_errors is not None and last_errors is not None:
        stated = [nan_mean(np.square(errors)) / len(errors) for errors in (first_errors, last_errors) if len(errors)]
        error = max(error, math.sqrt(sum(one for one in stated if not math.isnan(one))))
    first, last = float(before.mean()), float(after.mean())
    error = max(error, 1e-3 * (abs(first) + 1e-6))
    return Change(first, last, (last - first) / error, len(before))


def read_evidence(run: Path) -> list[Evidence]:
    """Evidence of each stage of a run that has begun. ConfigError for a folder that is no run."""
    run = run.expanduser().resolve()
    if not (run / CONFIG).is_file():
        raise ConfigError(f"{run}: is no run: it has no {CONFIG}; give the output folder of a run")
    config = load_recorded(run / CONFIG)
    lines, samples, warnings = read_metrics(run), read_samples(run), read_warnings(run)
    found = []
    for number, section in enumerate(config.stages):
        for folder in run.glob(f"{number}-*"):
            rows = [[line for line in each if line.get("stage") == folder.name] for each in (lines, samples, warnings)]
            found.append(
                stage_evidence(
                    run,
                    folder.name,
                    section,
                    kind=section.kind,
                    model=config.model,
                    lines=rows[0],
                    samples=rows[1],
                    warnings=rows[2],
                )
            )
    return found


def read_warnings(run: Path) -> list[dict[str, Any]]:
    """Causes that a run has told so far."""
    return list(read_lines(run / WARNINGS))


def stage_evidence(
    run: Path,
    name: str,
    section: TrainSection,
    *,
    kind: str,
    model: ModelSection,
    lines: Sequence[Mapping[str, Any]],
    samples: Sequence[Mapping[str, Any]] = (),
    warnings: Sequence[Mapping[str, Any]] = (),
) -> Evidence:
    """Evidence of a stage from its lines of metrics; the rest is read from the folder on use."""
    folder = run / name
    return Evidence(
        name=name,
        kind=kind,
        section=section,
        model=model,
        steps=[line for line in lines if "loss" in line or "reward" in line or "grad_norm" in line],
        evaluations=[line for line in lines if any(key.startswith("eval/") for key in line)],
        samples=samples,
        result=_result(folder),
        warnings=warnings,
        read_records=partial(_read_records, folder / "trajectories"),
        read_answers=partial(score_answers, run, name, section),
        read_rows=partial(_read_rows, section),
        read_tokenizer=partial(_first_tokenizer, (str(folder / "model"), *_sources(folder, model))),
        read_source_tokenizer=partial(_first_tokenizer, _sources(folder, model)),
    )


def _result(folder: Path) -> dict[str, Any]:
    if (folder / "result.json").is_file():
        found: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        return found
    names = [name for name in ("before", "after") if (folder / f"{name}.json").is_file()]
    return {name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in names}


def _sources(folder: Path, model: ModelSection) -> tuple[str, ...]:
    """Places of the tokenizer of the stage's first model, the likeliest first."""
    file = folder / "source.json"
    source = json.loads(file.read_text(encoding="utf-8")).get("name") if file.is_file() else None
    return tuple(str(one) for one in (source, model.tokenizer, model.path) if one is not None)


def _first_tokenizer(names: Sequence[str]) -> Tokenizer | None:
    for name in names:
        # A hub id is not asked for: the folder of a run tells by itself.
        if name == "bytes" or Path(name).expanduser().is_dir():
            try:
                return load_tokenizer(name)
            except ConfigError:
                continue
    return None


def _read_rows(section: TrainSection, held_out: bool) -> list[Mapping[str, Any]]:
    datasets = section.datasets if not held_out else [] if section.eval_dataset is None else [section.eval_dataset]
    found: list[Mapping[str, Any]] = []
    for dataset in datasets:
        try:
            rows = load_rows(dataset)
            found += [rows[row] for row in range(min(len(rows), MAX_ROWS))]
        except Exception:  # the data may be gone, or a loader of the user's own may fail: then nothing is said of it
            continue
    return found


def _read_records(folder: Path) -> list[RecordedSample]:
    # Only stages that sample have records, and load what reads them.
    if not folder.is_dir():
        return []
    from posttrain.rollout.records import file_of, recorded_steps

    steps = recorded_steps(folder)
    if len(steps) > MAX_RECORDS:
        steps = [steps[round(place)] for place in np.linspace(0, len(steps) - 1, MAX_RECORDS)]
    found: list[RecordedSample] = []
    for step in steps:
        try:
            found += _read_record(file_of(folder, step), step)
        except (FileNotFoundError, ConfigError):
            continue  # a live run has removed it, or another version wrote it
    return found


def _read_record(file: Path, step: int) -> list[RecordedSample]:
    from posttrain.rollout.records import read_rollouts, read_tokens

    tokens = read_tokens(file)
    return [
        RecordedSample(
            step=step,
            group=one.group,
            row=one.row,
            reward=math.nan if one.reward is None else one.reward,
            stop=one.stop,
            prompt=tuple(tokens[one.group, one.sample][0].tokens[: one.prompt_tokens].tolist()),
            tokens=tuple(
                token for part in tokens[one.group, one.sample] for token in part.tokens[part.sampled].tolist()
            ),
        )
        for one in read_rollouts(file)
    ]
