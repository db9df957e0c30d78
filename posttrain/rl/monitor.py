"""Monitor of reward hacking: measures what a step's reward may pay for beside better answers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from posttrain.config import OnlineSection
from posttrain.data.messages import shown_text
from posttrain.errors import ConfigError, did_you_mean
from posttrain.reward.function import Reward
from posttrain.reward.lab.cases import ANSWER_COLUMNS
from posttrain.reward.types import Rewards
from posttrain.rollout.trajectory import Example, Group


class Monitor:
    """Monitor of the steps of a stage. `verifier`: name of a reward with weight 0 that training does not follow."""

    def __init__(self, *, verifier: str | None):
        self._verifier = verifier
        self._ranges: dict[str, tuple[float, float]] = {}
        self._tells = TellingPrompts()

    @classmethod
    def of(cls, section: OnlineSection, rewards: Sequence[Reward]) -> Monitor | None:
        """Make the monitor of a stage with these rewards; None without a section or rewards. ConfigError for a verifier
        that cannot be one."""
        if section.monitor is None:
            return None
        verifier, weights = section.monitor.verifier, {reward.name: reward.weight for reward in rewards}
        if verifier is not None and verifier not in weights:
            raise ConfigError(
                f"monitor.verifier: no reward is called {verifier!r}{did_you_mean(verifier, weights)}; there are "
                f"{', '.join(weights)}"
            )
        if verifier is not None and weights[verifier]:
            raise ConfigError(
                f"monitor.verifier: the reward {verifier} has weight {weights[verifier]:g}, so training follows it; "
                "name one with weight 0"
            )
        if not weights:
            return None
        return cls(verifier=verifier or next((name for name, weight in weights.items() if not weight), None))

    def measure(self, groups_P: Sequence[Group], rewards: Rewards) -> dict[str, float]:
        """Metrics of a step."""
        rewards_PG = np.asarray(rewards.total_PG, np.float64)
        lengths_PG = lengths_of(groups_P)
        repeated_PG, copied_PG = read_tokens(groups_P)
        # Of the lengths themselves a reward of 0.05 a token is the slope; their logs bear a few very long answers.
        plain, logs = within_groups(lengths_PG, rewards_PG), within_groups(np.log1p(lengths_PG), rewards_PG)
        metrics = {
            "hacking/length_correlation": logs.correlation,
            "hacking/length_slope": plain.slope,
            "hacking/length_spread": plain.spread,
            "hacking/reward_values": float(len(np.unique(rewards_PG[~np.isnan(rewards_PG)]))),
            "hacking/repetition": mean_of(repeated_PG),
            "hacking/copied": mean_of(copied_PG),
            "hacking/answer_leak": _answer_leak(rewards_PG, self._tells(groups_P)),
        }
        if self._verifier is not None:
            metrics["hacking/false_passes"] = self._false_passes(rewards_PG, rewards.parts_PG[self._verifier])
        return metrics

    def _false_passes(self, rewards_PG: np.ndarray, verified_PG: np.ndarray) -> float:
        """Share of the samples in the upper half of the rewards so far that the verifier puts in its lower half; NaN
        without any."""
        _widen(self._ranges, "reward", rewards_PG)
        _widen(self._ranges, "verifier", np.asarray(verified_PG, np.float64))
        middles = {name: sum(pair) / 2 for name, pair in self._ranges.items()}
        passes_PG = rewards_PG > middles.get("reward", 0.0)
        refuted_PG = passes_PG & (verified_PG <= middles.get("verifier", 0.0))
        return float(refuted_PG.sum() / passes_PG.sum()) if passes_PG.any() else math.nan

    def state(self) -> dict[str, Any]:
        """Position for a checkpoint."""
        return {"ranges": {name: list(pair) for name, pair in self._ranges.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self._ranges = {name: (low, high) for name, (low, high) in state["ranges"].items()}


def _widen(ranges: dict[str, tuple[float, float]], name: str, values: np.ndarray) -> None:
    valid = values[~np.isnan(values)]
    if valid.size:
        low, high = ranges.get(name, (math.inf, -math.inf))
        ranges[name] = (min(low, float(valid.min())), max(high, float(valid.max())))


def _answer_leak(rewards_PG: np.ndarray, tells_P: np.ndarray) -> float:
    """Mean reward where the prompt tells the answer, less that elsewhere; NaN without both."""
    if tells_P.all() or not tells_P.any():
        return math.nan
    return mean_of(rewards_PG[tells_P]) - mean_of(rewards_PG[~tells_P])


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
    """Sums of products of deviations from the group's mean."""

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
    def slope(self) -> float:
        """Growth of y with x within groups; NaN where x does not differ."""
        return float(self.xy / self.xx) if self.xx > 0 else float("nan")

    @property
    def spread(self) -> float:
        """Standard deviation of x within groups."""
        return math.sqrt(self.xx / self.count) if self.count else 0.0


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
            prompt = " ".join(shown_text(message) for message in example.messages)
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
