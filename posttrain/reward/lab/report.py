"""Report of the reward lab: values by kind of completion, times, disagreement, a line for each finding, and sampled
groups in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from posttrain.reward.lab.cases import Kind
from posttrain.reward.lab.findings import Finding, cut_ratio, num_mixed
from posttrain.reward.lab.measure import Measured
from posttrain.reward.types import Rewards
from posttrain.rollout.trajectory import Group

SHOWN = (
    Kind.GOLDEN,
    Kind.OTHER,
    Kind.EMPTY,
    Kind.ECHO,
    Kind.ABSURD,
    Kind.HEDGED,
    Kind.SPACE,
    Kind.CASE,
    Kind.PERIOD,
    Kind.BOLD,
    Kind.GOLDEN_LONG,
    Kind.OTHER_LONGER,
    Kind.REPEATED,
    Kind.CORRECTED,
)
"""Kinds with a line of their own."""
WIDTH = 41
TEXT_CHARS = 160
NUM_SHOWN = 4


def report(measured: Sequence[Measured], findings: Sequence[Sequence[Finding]]) -> Iterator[str]:
    """Lines of the report on several functions."""
    for one, found in zip(measured, findings, strict=True):
        yield from _table(one)
        yield from finding_lines(one.name, found)
        if not found:
            yield f"{one.name}: no findings"
        yield ""
    for first, second in combinations(measured, 2):
        yield _disagreement(first, second)


def finding_lines(name: str, findings: Sequence[Finding]) -> list[str]:
    """One line per finding, with its remedy."""
    return [f"{name}: {finding.code.upper()}: {finding.text}; {finding.remedy}" for finding in findings]


def _table(measured: Measured) -> Iterator[str]:
    values = measured.values[~np.isnan(measured.values)]
    yield f"{measured.name}: {len(measured.cases)} completions of {len(measured.rows)} rows"
    if not values.size:
        return
    for kind in SHOWN:
        of_kind = np.asarray(list(measured.of(kind).values()))
        if of_kind.size:
            yield f"  {kind.value:<{WIDTH}} {of_kind.mean():8.3g}  ({of_kind.min():.3g} to {of_kind.max():.3g})"
    distinct = len(np.unique(values))
    yield f"  {'all':<{WIDTH}} {values.mean():8.3g}  ({values.min():.3g} to {values.max():.3g}, {distinct} values)"
    yield f"  {'spread within a row':<{WIDTH}} {_spread(measured):8.3g}"
    if measured.times_s:
        middle, last = np.percentile(measured.times_s, (50, 99)) * 1e3
        yield f"  {'time of one completion':<{WIDTH}} {middle:8.3g}  ms, p99 {last:.3g} ms"


def _spread(measured: Measured) -> float:
    """Mean standard deviation of values within a row: advantages come from this."""
    rows = np.asarray([case.row for case in measured.cases])
    found = [measured.values[(rows == row) & ~np.isnan(measured.values)] for row in range(len(measured.rows))]
    return float(np.mean([values.std() for values in found if values.size]))


def _disagreement(first: Measured, second: Measured) -> str:
    """Share of pairs of completions of a row that two functions put in opposite orders."""
    rows = np.asarray([case.row for case in first.cases])
    opposite = same = 0
    example = None
    for row in range(len(first.rows)):
        numbers = np.flatnonzero((rows == row) & ~np.isnan(first.values) & ~np.isnan(second.values))
        one, two = (np.sign(np.subtract.outer(m.values[numbers], m.values[numbers])) for m in (first, second))
        opposite += int((one * two < 0).sum()) // 2
        same += int((one * two > 0).sum()) // 2
        if example is None and (one * two < 0).any():
            high, low = (int(numbers[index]) for index in np.argwhere((one > 0) & (two < 0))[0])
            example = f"; {first.name} prefers {_name(first, high)}, {second.name} {_name(first, low)}"
    share = opposite / max(opposite + same, 1)
    return f"{first.name} and {second.name}: opposite order in {share:.0%} of pairs{example or ''}"


def _name(measured: Measured, number: int) -> str:
    return measured.cases[number].kind.value


def describe_samples(groups_P: Sequence[Group], rewards: Rewards) -> Iterator[str]:
    """Lines about the samples: counts, rewards, then the best and the worst of a few groups."""
    total_PG = rewards.total_PG
    lengths = [sample.num_sampled for group in groups_P for sample in group]
    yield (
        f"{len(groups_P)} prompts x {total_PG.shape[1]} samples: {np.mean(lengths):.0f} tokens on average, "
        f"{cut_ratio(groups_P):.0%} cut; {num_mixed(total_PG)} groups with different rewards"
    )
    for name, part in [("reward", total_PG), *rewards.parts_PG.items()]:
        valid = part[~np.isnan(part)]
        if valid.size:
            within = np.mean([row[~np.isnan(row)].std() for row in part if not np.isnan(row).all()])
            yield (
                f"  {name}: mean {valid.mean():.3g}, {valid.min():.3g} to {valid.max():.3g}, "
                f"deviation within groups {within:.3g}"
            )
    for error in list({error.function: error for error in rewards.errors}.values()):
        yield f"  {error.function}: failed on a sample: {error.error}"
    for index in np.argsort([-_range(row) for row in total_PG], kind="stable")[:NUM_SHOWN].tolist():
        row, group = total_PG[index], groups_P[index]
        yield f"prompt: {_short(str(group[0].answer.example.messages[-1]['content']))}"
        order = np.argsort(np.where(np.isnan(row), np.inf, -row), kind="stable")
        for sample in dict.fromkeys((int(order[0]), int(order[-1]))):
            yield f"  {row[sample]:8.3g}  {_short(group[sample].answer.text)}"


def _range(row: np.ndarray) -> float:
    valid = row[~np.isnan(row)]
    return float(np.ptp(valid)) if valid.size else 0.0


def _short(text: str) -> str:
    plain = "".join(character if character.isprintable() else "·" for character in " ".join(text.split()))
    return plain if len(plain) <= TEXT_CHARS else f"{plain[: TEXT_CHARS - 40]} ... {plain[-34:]}"
