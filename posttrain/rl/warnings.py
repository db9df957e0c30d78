"""Warnings about steps without a training signal, once each: equal rewards, samples that are cut, rewards that follow
length alone, conversations that end too early."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from posttrain.environments.types import UNFINISHED, limit_of
from posttrain.reward.types import Rewards
from posttrain.rl.signs import Sums, added, lengths_of, within_groups
from posttrain.rollout.trajectory import Group

STEPS = 3
"""Consecutive steps before a warning."""
MAX_CUT = 0.5
LENGTH_ALONE = 0.9
"""Least correlation of rewards and lengths within groups."""
LEAST_SAMPLES = 24
"""Least samples, less groups, of a correlation."""


class SignalWarnings:
    """Warnings of a stage; each is given once. `max_tokens`: of a completion. `scored`: the stage has rewards.
    `converses`: samples are conversations, of which only those that end too early are told."""

    def __init__(self, *, max_tokens: int, scored: bool, converses: bool):
        self._max_tokens, self._scored, self._converses = max_tokens, scored, converses
        self._equal = self._cut = 0
        self._sums: deque[Sums] = deque(maxlen=STEPS)
        self._given: set[str] = set()

    def observe(self, groups_P: Sequence[Group], rewards: Rewards) -> list[str]:
        """New warnings after a step."""
        samples = [sample for group in groups_P for sample in group]
        ends = [limit_of(sample) if self._converses else sample.stop for sample in samples]
        cut = float(np.mean([end in ("length", *UNFINISHED) for end in ends]))
        self._cut = self._cut + 1 if cut > MAX_CUT else 0
        line = self._unfinished_line(ends) if self._converses else self._cut_line(cut)
        found = {"cut": line if self._cut >= STEPS else None}
        if self._scored and not self._converses:
            total_PG = np.asarray(rewards.total_PG, np.float64)
            self._equal = self._equal + 1 if _equal_within(total_PG) else 0
            self._sums.append(within_groups(lengths_of(groups_P), total_PG))
            found["equal"] = self._equal_line(rewards) if self._equal >= STEPS else None
            found["length"] = self._length_line()
        new = {name: line for name, line in found.items() if line is not None and name not in self._given}
        self._given |= set(new)
        return list(new.values())

    def _cut_line(self, cut: float) -> str:
        return (
            f"{cut:.0%} of the samples are cut at sampling.max_tokens={self._max_tokens}, for {STEPS} steps: their "
            "answers are missing, and most rewards are those of unfinished text; raise sampling.max_tokens, or see in "
            "the samples why they do not end"
        )

    def _unfinished_line(self, ends: Sequence[str | None]) -> str:
        shares = {limit: ends.count(limit) / len(ends) for limit in UNFINISHED if limit in ends}
        causes = ", ".join(f"{share:.0%} at {self._named(limit)}" for limit, share in shares.items())
        return (
            f"{sum(shares.values()):.0%} of the conversations end before the environment is done, for {STEPS} steps "
            f"({causes}): a turn that is cut is the last of its conversation, and these have the reward `unfinished`; "
            "raise the limit, or see in the samples why they do not end"
        )

    def _named(self, limit: str) -> str:
        return f"sampling.max_tokens={self._max_tokens}" if limit == "max_tokens" else limit

    def _equal_line(self, rewards: Rewards) -> str:
        total_PG = rewards.total_PG
        valid = total_PG[~np.isnan(total_PG)]
        parts = ", ".join(f"{name} {_span(part)}" for name, part in rewards.parts_PG.items())
        where = (
            "the prompts are too easy or too hard for this model, or its samples are alike"
            if valid.min() < valid.max()
            else "read the samples, and try the functions with posttrain reward"
        )
        return (
            f"no group has different rewards, for {STEPS} steps, so nothing is learned from them: reward "
            f"{_span(total_PG)} ({parts}); {where}"
        )

    def _length_line(self) -> str | None:
        sums = added(self._sums)
        if len(self._sums) < STEPS or sums.count < LEAST_SAMPLES or abs(sums.correlation) < LENGTH_ALONE:
            return None
        side = "longer" if sums.correlation > 0 else "shorter"
        return (
            f"within groups the reward follows the length of the samples alone (correlation {sums.correlation:.2f} "
            f"over {STEPS} steps), so {side} ones are learned, whatever they say; try the functions with posttrain "
            "reward"
        )


def _equal_within(total_PG: np.ndarray) -> bool:
    """Tell whether no group has two different rewards; False without any reward."""
    valid = [row[~np.isnan(row)] for row in total_PG]
    return any(row.size for row in valid) and all(np.ptp(row) == 0 for row in valid if row.size)


def _span(values: np.ndarray) -> str:
    valid = values[~np.isnan(values)]
    if not valid.size:
        return "None"
    low, high = float(valid.min()), float(valid.max())
    return f"{low:g}" if low == high else f"{low:.3g} to {high:.3g}"
