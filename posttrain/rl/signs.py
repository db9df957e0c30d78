"""Signs of reward hacking in the samples of one step: length, repetition, copies of the prompt, answers told by it, and
passes that a verifier refutes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from posttrain.reward.lab.cases import ANSWER_COLUMNS
from posttrain.reward.types import Rewards
from posttrain.rollout.trajectory import Example, Group

NGRAM_TOKENS = 4
MAX_READ = 128
"""Maximum number of samples of a step whose tokens are read for repetition and copies."""
MAX_TOKENS = 4096
"""Tokens of a sample that are read."""
LEAST_ANSWER, LONGEST_ANSWER = 2, 40
"""Characters of answers that are looked for in prompts; shorter ones stand there by chance."""
HASH = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Sums of products of deviations from the group's mean, of which correlations of several steps are made."""

    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0
    count: int = 0
    """Samples less groups."""

    @property
    def correlation(self) -> float:
        """Correlation within groups; 0 without any deviation."""
        scale = np.sqrt(self.xx * self.yy)
        return float(self.xy / scale) if scale > 0 else 0.0

    @property
    def values(self) -> tuple[float, float, float, int]:
        return self.xx, self.xy, self.yy, self.count


def added(sums: Sequence[Sums]) -> Sums:
    """Sums of several steps."""
    return Sums(
        xx=sum(one.xx for one in sums),
        xy=sum(one.xy for one in sums),
        yy=sum(one.yy for one in sums),
        count=sum(one.count for one in sums),
    )


def within_groups(x_PG: Float[np.ndarray, "P G"], y_PG: Float[np.ndarray, "P G"]) -> Sums:
    """Products of deviations within groups, over the samples where both are numbers."""
    xx = xy = yy = 0.0
    count = 0
    for x, y in zip(x_PG, y_PG, strict=True):
        valid = ~(np.isnan(x) | np.isnan(y))
        if valid.sum() < 2:
            continue
        dx, dy = x[valid] - x[valid].mean(), y[valid] - y[valid].mean()
        xx, xy, yy = xx + float(dx @ dx), xy + float(dx @ dy), yy + float(dy @ dy)
        count += int(valid.sum()) - 1
    return Sums(xx=xx, xy=xy, yy=yy, count=count)


def lengths_of(groups_P: Sequence[Group]) -> Float[np.ndarray, "P G"]:
    """Number of sampled tokens of each sample."""
    return np.asarray([[float(sample.num_sampled) for sample in group] for group in groups_P])


def read_tokens(groups_P: Sequence[Group]) -> tuple[Float[np.ndarray, "P G"], Float[np.ndarray, "P G"]]:
    """Share of each sample's n-grams that it repeats, and share that its prompt has; NaN for samples not read."""
    shape = len(groups_P), len(groups_P[0])
    repeated_PG, copied_PG = np.full(shape, np.nan), np.full(shape, np.nan)
    per_group = max(1, min(shape[1], MAX_READ // shape[0]))
    for p, group in enumerate(groups_P[:MAX_READ]):
        prompt = _ngrams(group[0].example.prompt_tokens)
        for g, sample in enumerate(group[:per_group]):
            ngrams = _ngrams(sample.completion_tokens[:MAX_TOKENS])
            if ngrams.size:
                repeated_PG[p, g] = 1 - len(np.unique(ngrams)) / len(ngrams)
                copied_PG[p, g] = float(np.isin(ngrams, prompt).mean())
            else:
                repeated_PG[p, g] = copied_PG[p, g] = 0.0
    return repeated_PG, copied_PG


def _ngrams(tokens: Sequence[int]) -> np.ndarray:
    """Hashes of the n-grams of tokens."""
    ids = np.asarray(tokens, np.uint64)
    if len(ids) < NGRAM_TOKENS:
        return ids[:0]
    found = np.zeros(len(ids) - NGRAM_TOKENS + 1, np.uint64)
    for offset in range(NGRAM_TOKENS):
        found = found * HASH + ids[offset : offset + len(found)] + np.uint64(1)
    return found


class TellingPrompts:
    """Prompts that contain the answer of their row, each looked at once."""

    def __init__(self) -> None:
        self._known: dict[int, bool] = {}

    def __call__(self, groups_P: Sequence[Group]) -> np.ndarray:
        """True for groups whose prompt contains the answer."""
        return np.asarray([self._tells(group[0].example) for group in groups_P], bool)

    def _tells(self, example: Example) -> bool:
        if example.index not in self._known:
            answer = answer_text(example.row)
            fits = answer is not None and LEAST_ANSWER <= len(answer) <= LONGEST_ANSWER
            prompt = " ".join(str(message["content"]) for message in example.messages)
            self._known[example.index] = fits and re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", prompt) is not None  # type: ignore[type-var]
        return self._known[example.index]


def answer_text(row: Mapping[str, Any]) -> str | None:
    """Right answer of a row, if a column with a usual name holds a text or a number."""
    nested = row.get("reward_model")
    given = [nested.get("ground_truth")] if isinstance(nested, Mapping) else []
    given += [row.get(name) for name in ANSWER_COLUMNS]
    found = next((value for value in given if isinstance(value, str | int | float)), None)
    return None if found is None else str(found).strip()


def mean_of(values: np.ndarray) -> float:
    """Mean of the numbers among values; NaN without any."""
    return float(np.nanmean(values)) if values.size and not np.isnan(values).all() else float("nan")


def part_mean(rewards: Rewards, names: Sequence[str]) -> float:
    """Sum of the means of some rewards; NaN without any."""
    return float(sum(mean_of(rewards.parts_PG[name]) for name in names)) if names else float("nan")
