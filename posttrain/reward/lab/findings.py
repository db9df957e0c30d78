"""Faults of reward functions, from their values on cases whose right order is known, and faults that show in sampled
groups before training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.reward.lab.cases import Kind
from posttrain.reward.lab.measure import Measured
from posttrain.reward.types import Rewards
from posttrain.rollout.trajectory import Group

TOLERANCE = 1e-6
LONG_GAIN = 0.2
"""Share of the distance from wrong to right answers that words alone may earn."""
CHANCE = 0.3
"""Share of rows whose prompt, or a list of answers, may end in the right answer by chance."""
SLOW_S = 0.5
"""Longest time of a call with one sample."""
MAX_CUT = 0.5
"""Largest share of samples that may be cut at the maximum of tokens."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Fault of a reward function with its remedy."""

    code: str
    """Word for the kind of fault, such as `sign`."""
    text: str
    remedy: str


def findings_of(measured: Measured) -> list[Finding]:
    """All faults, the gravest first. Values are compared only where the function gives any."""
    found = list(_failures(measured))
    valid = measured.values[~np.isnan(measured.values)]
    if not valid.size:
        if not found:
            found.append(
                Finding(
                    code="never",
                    text="gives None for every completion, so no sample has a reward",
                    remedy="return a number where the function applies; check the column that it looks at",
                )
            )
        return found
    found += [finding for check in CALLS for finding in check(measured)]
    if np.ptp(valid) <= TOLERANCE:
        return [*found, _constant(measured, float(valid[0]))]
    checks = GRADED if measured.graded else UNGRADED
    return found + [finding for check in checks for finding in check(measured)]


def _failures(measured: Measured) -> Iterator[Finding]:
    errors = [error for error in measured.failures if error.kind == "error"]
    timeouts = [error for error in measured.failures if error.kind == "timeout"]
    counts = [error for error in errors if "one value per completion" in error.error]
    if counts:
        yield Finding(
            code="batch",
            text=f"{counts[0].error} ({_kinds(measured, counts)})",
            remedy="return a value, or None, for every completion, in their order",
        )
    elif errors:
        yield Finding(
            code="error",
            text=f"fails on {len(errors)} of {len(measured.cases)} completions ({_kinds(measured, errors)}): "
            f"{errors[0].error}",
            remedy="return 0 (or None, where it does not apply) for text that it cannot read",
        )
    if timeouts:
        yield Finding(
            code="timeout",
            text=f"gives no answer for {len(timeouts)} of {len(measured.cases)} completions "
            f"({_kinds(measured, timeouts)}): {timeouts[0].error}",
            remedy="bound its loops, regular expressions and requests",
        )


def _kinds(measured: Measured, errors: Sequence[object]) -> str:
    kinds = dict.fromkeys(measured.cases[error.sample].kind for error in errors)  # type: ignore[attr-defined]
    if len(kinds) == len({case.kind for case in measured.cases}):
        return "all kinds"
    names = [kind.value for kind in kinds]
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _constant(measured: Measured, value: float) -> Finding:
    return Finding(
        code="constant",
        text=f"gives {value:g} for right, wrong, empty and absurd completions alike",
        remedy="print what it extracts from a golden answer; where it wants a form that the dataset's answers lack, "
        "give that form: --golden '<answer>{answer}</answer>'",
    )


def _random(measured: Measured) -> Iterator[Finding]:
    again = measured.unequal.get("again", [])
    if again:
        yield Finding(
            code="random",
            text=f"gives other values when called again, for {len(again)} of {len(measured.cases)} completions",
            remedy="remove random numbers and module state, sort sets, and let a judge answer at temperature 0",
        )


def _batch(measured: Measured) -> Iterator[Finding]:
    slow = [note for note in measured.notes if ": took " in note]
    failed = [note for note in measured.notes if note not in slow]
    if failed:
        yield Finding(
            code="batch",
            text=failed[0].partition(": ")[2],
            remedy="return one value per completion, in their order, for any number of completions",
        )
    elif "again" not in measured.unequal and (changed := measured.unequal.get("in another order")):
        yield Finding(
            code="batch",
            text=f"gives other values in another order, for {len(changed)} of {len(measured.cases)} completions",
            remedy="let a value depend on its own completion only; groups are compared by the algorithm",
        )


def _slow(measured: Measured) -> Iterator[Finding]:
    slow = [note for note in measured.notes if ": took " in note]
    last = float(np.percentile(measured.times_s, 99)) if measured.times_s else 0.0
    if slow or last > SLOW_S:
        yield Finding(
            code="slow",
            text=slow[0].partition(": ")[2] if slow else f"takes up to {last:.2g} s for one completion",
            remedy="make it async for requests, cache: true for repeated ones, or compile what it parses",
        )


def _sign(measured: Measured) -> Iterator[Finding]:
    pairs = _pairs(measured, Kind.OTHER)
    worse = [right < wrong - TOLERANCE for right, wrong in pairs]
    if worse and sum(worse) > len(worse) / 2:
        yield Finding(
            code="sign",
            text=f"gives wrong answers more than right ones in {sum(worse)} of {len(worse)} rows",
            remedy="change the sign: a higher reward is better",
        )


def _golden(measured: Measured) -> Iterator[Finding]:
    low = [right <= wrong + TOLERANCE for right, wrong in _pairs(measured, Kind.OTHER)]
    if low and any(low) and not any(_sign(measured)):
        yield Finding(
            code="golden",
            text=f"gives the golden answer no more than a wrong one in {sum(low)} of {len(low)} rows, such as "
            f"{_example(measured, Kind.GOLDEN, Kind.OTHER)}",
            remedy="print what it extracts from both; if the answers lack the form that it wants, give it: "
            "--golden '<answer>{answer}</answer>'",
        )


Check = Callable[[Measured], Iterator[Finding]]


def _accepts(code: str, kind: Kind, remedy: str, chance: float = 0.0) -> Check:
    """Check that a completion of a kind gets less than the golden answer. `chance`: share of rows in which it may hold
    the answer by chance."""

    def check(measured: Measured) -> Iterator[Finding]:
        better = _preferred(measured)
        pairs = [(row, right, wrong) for row, right, wrong in _rows(measured, kind) if row in better]
        full = [row for row, right, wrong in pairs if wrong >= right - TOLERANCE]
        if full and len(full) > chance * len(pairs):
            yield Finding(
                code=code,
                text=f"gives {kind.value} full reward in {len(full)} of {len(pairs)} rows, such as "
                f"{_text(measured, full[0], kind)} for {_text(measured, full[0], Kind.GOLDEN)}",
                remedy=remedy,
            )

    return check


def _rejects(code: str, kind: Kind, remedy: str) -> Check:
    """Check that a harmless change costs nothing."""

    def check(measured: Measured) -> Iterator[Finding]:
        better = _preferred(measured)
        pairs = [(row, right, other) for row, right, other in _rows(measured, kind) if row in better]
        lost = [row for row, right, other in pairs if other < right - TOLERANCE]
        if lost:
            yield Finding(
                code=code,
                text=f"gives {kind.value} less than the answer itself in {len(lost)} of {len(pairs)} rows",
                remedy=remedy,
            )

    return check


def _length(measured: Measured) -> Iterator[Finding]:
    """Find wrong answers that gain by words before them."""
    right, wrong = measured.of(Kind.GOLDEN), measured.of(Kind.OTHER)
    for kind in (Kind.OTHER_LONGER, Kind.REPEATED):
        found = measured.of(kind)
        rows = [row for row in found if row in right and row in wrong]
        gains = [row for row in rows if found[row] - wrong[row] > LONG_GAIN * abs(right[row] - wrong[row]) + TOLERANCE]
        if gains and len(gains) > len(rows) / 2:
            mean = float(np.mean([found[row] - wrong[row] for row in gains]))
            yield Finding(
                code="length",
                text=f"gives {mean:.3g} more to {kind.value} than to the answer, in {len(gains)} of {len(rows)} rows",
                remedy="pay for the answer, not for words; bound or remove the part that grows with length",
            )
            return


def _growth(measured: Measured) -> Iterator[Finding]:
    """Find a function without an answer whose value grows with every word."""
    rows = [measured.of(kind) for kind in (Kind.OTHER, Kind.OTHER_LONG, Kind.OTHER_LONGER)]
    shared = [row for row in rows[0] if all(row in found for found in rows)]
    grows = [row for row in shared if rows[0][row] + TOLERANCE < rows[1][row] < rows[2][row] - TOLERANCE]
    if grows and len(grows) > len(shared) / 2:
        short, long = (float(np.mean([found[row] for row in grows])) for found in (rows[0], rows[2]))
        yield Finding(
            code="length",
            text=f"grows with length alone, from {short:.3g} to {long:.3g} with many words before the same text",
            remedy="bound it, as rewards/length.py does; a policy writes as much as it is paid for",
        )


def _rows(measured: Measured, kind: Kind) -> list[tuple[int, float, float]]:
    """Row, value of the golden answer, value of the kind."""
    right, other = measured.of(Kind.GOLDEN), measured.of(kind)
    return [(row, right[row], other[row]) for row in other if row in right]


def _pairs(measured: Measured, kind: Kind) -> list[tuple[float, float]]:
    return [(right, other) for _, right, other in _rows(measured, kind)]


def _preferred(measured: Measured) -> set[int]:
    """Rows whose golden answer gets more than another row's; all rows where there are none of these."""
    rows = _rows(measured, Kind.OTHER)
    if not rows:
        return set(measured.of(Kind.GOLDEN))
    return {row for row, right, wrong in rows if right > wrong + TOLERANCE}


def _example(measured: Measured, first: Kind, second: Kind) -> str:
    row = next(row for row, right, wrong in _rows(measured, second) if right <= wrong + TOLERANCE)
    return f"{_text(measured, row, first)} and {_text(measured, row, second)}"


def _text(measured: Measured, row: int, kind: Kind) -> str:
    """Text of the case whose value is that of its kind and row, see `Measured.of`."""
    cases = zip(measured.cases, measured.values, strict=True)
    of_kind = [(case.text, value) for case, value in cases if case.row == row and case.kind is kind]
    text, _ = max(of_kind, key=lambda one: -math.inf if np.isnan(one[1]) else float(one[1]))
    return repr(text if len(text) <= 40 else f"...{text[-37:]}")


BOUNDARIES = "compare the whole number, not a part of the text: parse it, or use word boundaries"
CALLS: Sequence[Check] = (_random, _batch, _slow)
GRADED: Sequence[Check] = (
    _sign,
    _golden,
    _accepts("tolerance", Kind.NEXT, "compare numbers exactly, or with a tolerance below 1"),
    _accepts("substring", Kind.PREFIXED, BOUNDARIES),
    _accepts("substring", Kind.SUFFIXED, BOUNDARIES),
    _accepts("leak", Kind.TOLD, "look for the answer in the completion only, not in the prompt"),
    _accepts("leak", Kind.ECHO, "demand the answer in a form that the prompt does not have", CHANCE),
    _accepts("hedge", Kind.HEDGED, "read one final answer, such as the last number or the last box", CHANCE),
    _accepts("repetition", Kind.REPEATED, "pay for an answer once, however often it is written; bound what is counted"),
    _accepts("empty", Kind.EMPTY, "return 0 without an answer"),
    _accepts("absurd", Kind.ABSURD, "return 0 for text without a readable answer"),
    _rejects("whitespace", Kind.SPACE, "strip the text before it is compared"),
    _rejects("whitespace", Kind.NEWLINE, "strip the text before it is compared"),
    _rejects("case", Kind.CASE, "compare .casefold() of both"),
    _length,
)
UNGRADED: Sequence[Check] = (_growth,)


def sample_findings(groups_P: Sequence[Group], rewards: Rewards) -> list[Finding]:
    """Reasons not to train on such samples."""
    found = []
    cut = cut_ratio(groups_P)
    if cut > MAX_CUT:
        longest = max(sample.num_sampled for group in groups_P for sample in group)
        found.append(
            Finding(
                code="cut",
                text=f"{cut:.0%} of the samples are cut at {longest} tokens, before their end",
                remedy="raise sampling.max_tokens (and row_tokens), or see that the model ends its turn with a stop "
                "token",
            )
        )
    total_PG = rewards.total_PG
    valid = total_PG[~np.isnan(total_PG)]
    if not valid.size:
        found.append(
            Finding(
                code="never",
                text="no sample has a reward" + (f": {rewards.errors[0].error}" if rewards.errors else ""),
                remedy="try the functions with posttrain reward",
            )
        )
    elif valid.min() == valid.max():
        found.append(
            Finding(
                code="constant",
                text=f"every one of {valid.size} samples has the reward {valid[0]:g}",
                remedy="read the samples; try the functions with posttrain reward",
            )
        )
    elif not num_mixed(total_PG):
        found.append(
            Finding(
                code="unmixed",
                text=f"in none of {len(total_PG)} groups do rewards differ, so there is nothing to compare",
                remedy="use easier or harder prompts, a larger group_size, or sampling.temperature=1",
            )
        )
    return found


def cut_ratio(groups_P: Sequence[Group]) -> float:
    """Share of samples cut at the maximum of tokens."""
    return float(np.mean([sample.is_cut for group in groups_P for sample in group]))


def num_mixed(total_PG: np.ndarray) -> int:
    """Number of groups with different rewards."""
    return sum(bool(np.ptp(row[~np.isnan(row)]) > 0) for row in total_PG if not np.isnan(row).all())
