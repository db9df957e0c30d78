"""Source of groups: numbered prompts, in the order of a dataset or drawn by a curriculum of pass rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from posttrain.rl.sampler import IssuedGroup
from posttrain.rollout.trajectory import Example, Group
from posttrain.rollout.types import sample_key


@runtime_checkable
class PromptStream(Protocol):
    """Endless places in a list of examples, with a position to resume from."""

    def __next__(self) -> int: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


class Source:
    """Stream of groups over the prompts of a dataset, in its order or drawn by a curriculum."""

    def __init__(self, prompts: PromptStream, examples: Sequence[Example], curriculum: Curriculum | None = None):
        self._prompts, self._examples, self._curriculum = prompts, examples, curriculum
        self._by_row = {example.index: example for example in examples}
        self._places = {} if curriculum is None else {example.index: n for n, example in enumerate(examples)}
        self.issued = 0
        """Number of groups begun since the start of the run."""

    def take(self, count: int, version: int) -> list[IssuedGroup]:
        """Begin `count` new groups under a version of the weights."""
        numbers = range(self.issued, self.issued + count)
        self.issued += count
        places = [next(self._prompts) for _ in numbers] if self._curriculum is None else self._curriculum.draw(numbers)
        return [
            IssuedGroup(number=number, example=self._examples[place], version=version)
            for number, place in zip(numbers, places, strict=True)
        ]

    def example(self, row: int) -> Example:
        """Example of a row of the dataset."""
        return self._by_row[row]

    def seen(self, group: Group, rewards_G: Float[np.ndarray, " G"]) -> None:
        """Take note of the rewards of a finished group, for the curriculum."""
        if self._curriculum is not None:
            self._curriculum.seen(self._places[group[0].example.index], rewards_G)

    def metrics(self) -> dict[str, float]:
        """Metrics of the curriculum since the last call; none without one."""
        return {} if self._curriculum is None else self._curriculum.metrics()

    def state(self) -> dict[str, Any]:
        state = {"prompts": self._prompts.state(), "issued": self.issued}
        return state if self._curriculum is None else {**state, "curriculum": self._curriculum.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self._prompts.restore(state["prompts"])
        if self._curriculum is not None:
            self._curriculum.restore(state["curriculum"])
        self.issued = state["issued"]


DRAWS = 2
"""Stream of random keys, see `sample_key`; those of samples are 0 and 1."""
UNSEEN = 0.5
"""Pass rate of a prompt without a scored group."""


class Curriculum:
    """Draws of prompts, each by the run's seed and the number of its group, from pools of pass rates.

    `pools`: rising bounds from 0 to 1. `shares`: of each pool in the draws. `decay`: weight of the earlier pass rate in
    the moving average. A prompt under way, begun but not scored, is not drawn again unless all are.
    """

    def __init__(
        self,
        num_prompts: int,
        *,
        pools: Sequence[float],
        shares: Sequence[float],
        decay: float,
        pass_above: float,
        seed: int,
    ):
        self._bounds, self._shares = np.asarray(pools[1:-1], np.float64), np.asarray(shares, np.float64)
        self._decay, self._pass_above, self._seed = decay, pass_above, seed
        self.rates = np.full(num_prompts, np.nan)
        """Pass rate of each prompt; NaN: no group scored."""
        self._under_way = np.zeros(num_prompts, bool)
        self._drawn = np.zeros(len(shares), np.int64)

    def draw(self, numbers: Sequence[int]) -> list[int]:
        """Draw the prompt of each of the groups with these numbers. Prompts drawn are under way."""
        pool_of = self._pools()
        free = [np.flatnonzero((pool_of == pool) & ~self._under_way) for pool in range(len(self._shares))]
        return [self._draw(number, free) for number in numbers]

    def seen(self, prompt: int, rewards_G: Float[np.ndarray, " G"]) -> None:
        """Update the pass rate of a prompt by a scored group. Without a valid reward it stays."""
        self._under_way[prompt] = False
        valid = rewards_G[~np.isnan(rewards_G)]
        if valid.size:
            rate, before = float((valid > self._pass_above).mean()), self.rates[prompt]
            self.rates[prompt] = rate if np.isnan(before) else self._decay * before + (1 - self._decay) * rate

    def metrics(self) -> dict[str, float]:
        """Share of all prompts in each pool, share of each pool in the draws since the last call, and share of prompts
        with a scored group."""
        counts = np.bincount(self._pools(), minlength=len(self._shares))
        drawn, self._drawn = self._drawn, np.zeros_like(self._drawn)
        return {
            **{f"curriculum/pool_{pool}": float(count / len(self.rates)) for pool, count in enumerate(counts)},
            **{f"curriculum/drawn_{pool}": float(count / max(drawn.sum(), 1)) for pool, count in enumerate(drawn)},
            "curriculum/seen": float((~np.isnan(self.rates)).mean()),
        }

    def state(self) -> dict[str, Any]:
        seen = np.flatnonzero(~np.isnan(self.rates))
        return {
            "seen": seen.tolist(),
            "rates": self.rates[seen].tolist(),
            "under_way": np.flatnonzero(self._under_way).tolist(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.rates[:], self._under_way[:] = np.nan, False
        self.rates[state["seen"]] = state["rates"]
        self._under_way[state["under_way"]] = True

    def _pools(self) -> Int[np.ndarray, " N"]:
        """Pool of each prompt."""
        return np.searchsorted(self._bounds, np.where(np.isnan(self.rates), UNSEEN, self.rates), side="right")

    def _draw(self, number: int, free: list[Int[np.ndarray, " M"]]) -> int:
        first, second = (word / 2**32 for word in sample_key(self._seed, DRAWS, number, 0))
        weights = self._shares * [len(prompts) > 0 for prompts in free]
        if not weights.any():
            # Pools with a share are empty or under way: any other prompt, in the end one that is under way.
            weights = np.asarray([float(len(prompts)) for prompts in free])
        if not weights.any():
            return int(second * len(self.rates))
        below = np.cumsum(weights)
        pool = min(int(np.searchsorted(below, first * below[-1], side="right")), int(np.flatnonzero(weights)[-1]))
        place = int(second * len(free[pool]))
        prompt = int(free[pool][place])
        free[pool] = np.delete(free[pool], place)
        self._under_way[prompt] = True
        self._drawn[pool] += 1
        return prompt
