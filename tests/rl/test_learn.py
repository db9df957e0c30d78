"""Learning from scored groups: overlong filter, KL in the reward, tokens of high entropy, rewards by part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.metrics import to_host
from posttrain.reward.function import Reward
from posttrain.reward.rubric import Rubric
from posttrain.rl.advantages import decoupled
from posttrain.rl.step import EntropyControl, reward_penalties
from posttrain.rl.teachers import distances
from tests.rl.helpers import make_algorithm, trajectory
from tests.rl.test_step import NEW, World, even_share
from tests.tiny import sgd, shake


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("bytes")


def with_algorithm(world: World, name: str, **settings: Any) -> World:
    """The same loss, so that the trainer's program serves."""
    world.algorithm = replace(make_algorithm(name, max_tokens=NEW, **settings), loss=world.algorithm.loss)
    return world


def test_truncated_samples_have_no_loss_but_a_place_in_the_baseline(tokenizer: Tokenizer) -> None:
    world = World(tokenizer, ignore_eos=True, stop_token_ids=tuple(range(0, 250, 9)))
    masked = with_algorithm(world, "grpo", truncated="mask").step()
    assert_array_equal(masked.advantages_PG, world.algorithm.advantage(masked.rewards.total_PG))
    cut = [sample.stop == "length" for group in masked.groups_P for sample in group]
    assert 0 < sum(cut) < len(cut)
    lengths = [sample.num_sampled for group in masked.groups_P for sample in group if sample.stop != "length"]
    assert (masked.batch.loss_weight > 0).sum() == sum(lengths)


@pytest.mark.thorough
def test_kl_in_the_reward(tokenizer: Tokenizer) -> None:
    """The penalty of a sample is the sum over its tokens, and enters before the advantage."""
    plain = World(tokenizer)
    world = with_algorithm(World(tokenizer), "grpo", kl_in="reward", kl_coef=0.05)
    for one in (plain, world):
        shake(one.trainer.model, seed=1, stddev=0.05)
        one.cluster.sync_weights(one.cluster.version)
    expected, found = plain.step(), world.step()
    batch = expected.batch
    sampled = batch.loss_weight > 0
    k1 = np.where(sampled, batch.sampler_logps - world.cluster.reference.logps(batch), 0.0)
    # The metric is k3, as where the loss has the KL; the penalty is k1.
    k3 = np.expm1(-np.asarray(k1, np.float64)) + k1
    assert_allclose(to_host(found.metrics)["kl"], k3.sum() / sampled.sum(), rtol=1e-4)
    assert_allclose(to_host(expected.metrics)["kl"], k3.sum() / sampled.sum(), rtol=1e-4)
    assert np.abs(k1[sampled]).max() > 1e-2
    sums: dict[tuple[int, ...], float] = {}
    for row in range(len(batch.tokens)):
        for segment in range(1, batch.segments[row].max() + 1):
            inside = batch.segments[row] == segment
            sums[tuple(batch.tokens[row, inside])] = -0.05 * k1[row, inside].sum()
    penalties = np.asarray([[sums[tuple(sample.tokens)] for sample in group] for group in found.groups_P])
    assert_array_equal(found.rewards.total_PG, expected.rewards.total_PG)
    rewards = found.rewards.total_PG + penalties.astype(np.float32)
    assert_allclose(found.advantages_PG, world.algorithm.advantage(rewards), atol=1e-4)
    # No sample has a token: every environment failed at its start.
    empty = [[trajectory(num_prompt=3), trajectory(num_prompt=3)]]
    zeros, measured = reward_penalties(world.cluster, world.algorithm, empty, row_tokens=8, num_rows=2)
    assert_array_equal(zeros, [[0.0, 0.0]])
    assert np.isnan(to_host(measured)["kl"]) and np.isnan(distances([], empty, None, 8)).all()


@pytest.mark.thorough
def test_only_tokens_of_high_entropy_have_an_advantage(tokenizer: Tokenizer) -> None:
    world = with_algorithm(World(tokenizer), "grpo", top_entropy=0.25)
    result = world.step()
    batch, sampled = result.batch, result.batch.loss_weight > 0
    entropy = np.asarray(world.cluster.actor.stats(batch).entropy)
    learned = batch.advantages != 0
    assert 0 < learned.sum() <= np.ceil(0.25 * sampled.sum()) + 1
    assert entropy[learned].min() >= to_host(result.metrics)["entropy/threshold"] - 1e-6
    whole = World(tokenizer).step().batch
    assert_allclose(batch.advantages[learned], whole.advantages[learned])


@pytest.mark.thorough
def test_advantages_of_single_rewards(tokenizer: Tokenizer) -> None:
    """GDPO gets rewards by name, with their weights."""

    def length(completions: list[str]) -> list[float]:
        return [float(len(text)) for text in completions]

    world = with_algorithm(World(tokenizer, optimizer=sgd(0.0)), "gdpo")
    world.rubric = Rubric(
        [Reward(function=even_share, weight=1.0, timeout_s=60.0), Reward(function=length, weight=0.5, timeout_s=60.0)]
    )
    result = world.step()
    expected = decoupled(result.rewards.parts_PG, {"even_share": 1.0, "length": 0.5}, np.zeros((3, 4)))
    assert_allclose(result.advantages_PG, expected, atol=1e-6)
    assert np.abs(expected).max() > 0.5


@pytest.mark.thorough
def test_the_entropy_bonus_follows_its_target(tokenizer: Tokenizer) -> None:
    """A target above the entropy raises the coefficient step by step, one below it ends the bonus; both resume."""
    high, low = (EntropyControl(target=target, start=0.01, step=0.005) for target in (100.0, 0.01))
    world = World(tokenizer, optimizer=sgd(0.0))
    for control, expected in ((high, [0.01, 0.015, 0.02]), (low, [0.01, 0.0, 0.0])):
        world.settings = replace(world.settings, entropy=control)
        told = [to_host(world.step().metrics) for _ in range(3)]
        assert_allclose([one["entropy/coef"] for one in told], expected, atol=1e-9)
    again = EntropyControl(target=100.0, start=0.0, step=0.005)
    again.restore(high.state())
    assert again.coef == high.coef == pytest.approx(0.025)


@pytest.mark.thorough
def test_the_coefficient_of_the_batch_is_that_of_the_loss(tokenizer: Tokenizer) -> None:
    world = World(tokenizer, optimizer=sgd(0.0))
    batch = world.step().batch
    stats = jax.tree.map(jnp.asarray, world.cluster.actor.stats(batch))
    own = replace(world.algorithm.loss, entropy_coef=0.02)(stats, batch).loss.value()
    control = EntropyControl(target=100.0, start=0.02, step=0.005)
    found = world.algorithm.loss(stats, control.added_to(batch)).loss.value()
    assert_allclose(found, own, rtol=1e-6)
    assert abs(own - world.algorithm.loss(stats, batch).loss.value()) > 1e-3
