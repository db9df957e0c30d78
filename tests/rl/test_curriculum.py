"""Curriculum: shares of pools in the draws, pass rates, and a state that resumes bitwise."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from posttrain.rl.sampler import Curriculum, Source
from tests.rl.helpers import InOrder, example, trajectory

pytestmark = pytest.mark.fast

POOLS, SHARES = (0.0, 0.2, 0.8, 1.0), (0.1, 0.6, 0.3)


def curriculum(num_prompts: int, **changes: Any) -> Curriculum:
    plain: dict[str, Any] = {"pools": POOLS, "shares": SHARES, "decay": 0.5, "pass_above": 0.5, "seed": 3}
    return Curriculum(num_prompts, **plain | changes)


class Learner:
    """A learner that passes a prompt with a chance that grows each time it sees it."""

    def __init__(self, num_prompts: int):
        self._draw = np.random.default_rng(0)
        self._chance = self._draw.beta(0.5, 0.7, num_prompts)

    def rewards(self, prompt: int) -> np.ndarray:
        chance = self._chance[prompt]
        self._chance[prompt] = min(1.0, chance + 0.02)
        return (self._draw.random(8) < chance).astype(np.float32)


def test_draws_have_the_shares_of_the_pools() -> None:
    """Within three standard deviations over 3,000 draws; shares of empty pools go to the others."""
    made, learner = curriculum(300), Learner(300)
    observed, expected, variance = np.zeros(3), np.zeros(3), np.zeros(3)
    first_metrics = made.metrics()
    assert first_metrics["curriculum/pool_1"] == 1 and first_metrics["curriculum/seen"] == 0
    for step in range(300):
        rates = np.where(np.isnan(made.rates), 0.5, made.rates)
        pools = np.digitize(rates, POOLS[1:-1])
        weights = np.asarray(SHARES) * [(pools == pool).any() for pool in range(3)]
        chances = weights / weights.sum()
        prompts = made.draw(range(10 * step, 10 * step + 10))
        assert len({*prompts}) == 10, "a prompt under way is not drawn again"
        # A pool that these ten draws may empty would have other chances.
        if min((pools == pool).sum() for pool in range(3)) >= 10:
            observed += np.bincount(pools[prompts], minlength=3)
            expected += 10 * chances
            variance += 10 * chances * (1 - chances)
        for prompt in prompts:
            made.seen(prompt, learner.rewards(prompt))
    assert expected.sum() > 2000
    assert (np.abs(observed - expected) < 3 * np.sqrt(variance)).all(), (observed, expected)
    found = made.metrics()
    assert sum(found[f"curriculum/pool_{pool}"] for pool in range(3)) == pytest.approx(1)
    assert sum(found[f"curriculum/drawn_{pool}"] for pool in range(3)) == pytest.approx(1)
    assert found["curriculum/seen"] > 0.9


def test_a_draw_depends_on_seed_number_and_pass_rates_alone() -> None:
    """However many are drawn at once; a resumed run draws the same."""
    together, apart, other = curriculum(50), curriculum(50), curriculum(50, seed=4)
    assert together.draw(range(7, 13)) == [apart.draw([n])[0] for n in range(7, 13)] != other.draw(range(7, 13))
    learner = Learner(50)
    for prompt in np.flatnonzero(together._under_way)[:4]:
        together.seen(int(prompt), learner.rewards(int(prompt)))
    resumed = curriculum(50)
    resumed.restore(json.loads(json.dumps(together.state())))
    assert_array_equal(resumed.rates, together.rates)
    assert resumed.draw(range(13, 60)) == together.draw(range(13, 60))


def test_the_pass_rate_is_a_moving_average() -> None:
    made = curriculum(3, decay=0.75)
    rewards = np.asarray([1.0, 0.6, 0.5, np.nan], np.float32)
    made.seen(1, rewards)
    assert made.rates[1] == pytest.approx(2 / 3), "the first group alone; a reward of pass_above does not pass"
    made.seen(1, np.zeros(4, np.float32))
    assert made.rates[1] == pytest.approx(0.5)
    made.seen(2, np.full(4, np.nan))
    assert np.isnan(made.rates[[0, 2]]).all(), "no valid reward"
    made.seen(1, np.ones(4, np.float32))
    made.rates[:] = 0.2, 0.8, 1.0
    assert made._pools().tolist() == [1, 2, 2], "a bound belongs to the pool above it"


def test_pools_without_a_free_prompt() -> None:
    """Their shares go to the others; then any prompt is drawn, in the end one that is under way."""
    made = curriculum(6, shares=(0.5, 0.5, 0.0))
    made.rates[:] = 0.0, 0.0, 0.5, 1.0, 1.0, 1.0
    assert sorted(made.draw(range(3))) == [0, 1, 2]
    assert sorted(made.draw(range(3, 6))) == [3, 4, 5], "of a pool whose share is 0, as no other is left"
    assert all(0 <= prompt < 6 for prompt in made.draw(range(6, 20)))


def test_the_source_draws_and_keeps_the_state() -> None:
    examples = [example(3 * n, f"{n}") for n in range(20)]
    source, resumed = (Source(InOrder(), examples, curriculum(20)) for _ in range(2))
    groups = source.take(6, version=0)
    assert len({group.example.index for group in groups}) == 6
    for group in groups[:4]:
        one = trajectory(prompt="a")
        object.__setattr__(one, "example", group.example)
        source.seen([one, one], np.ones(2, np.float32))
    assert source.metrics()["curriculum/pool_2"] == 4 / 20
    resumed.restore(json.loads(json.dumps(source.state())))
    assert resumed.take(10, version=1) == source.take(10, version=1)
    assert Source(InOrder(), examples).metrics() == {}
