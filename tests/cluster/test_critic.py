"""Critic: values of contexts alone, learned from returns, resumed with the actor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from posttrain.batch import Batch
from posttrain.cluster.cluster import Cluster, Critic
from posttrain.cluster.reference import Reference
from posttrain.cluster.sync import Shared
from posttrain.config import AdamW
from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.metrics import to_host
from posttrain.train.objective import TrainSettings
from posttrain.train.trainer import Trainer
from posttrain.train.transformations import make_optimizer
from posttrain.tree import replace
from posttrain.weights.scalar_head import add_scalar_head
from tests.rl.helpers import make_algorithm
from tests.rl.test_step import NEW, World, params_of
from tests.tiny import WINDOW, sgd, tiny_model


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("bytes")


def by_prompt(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """Half of the reward is known with the prompt, the other half with the first character."""
    return [
        0.5 * (prompt[0] == "1") + 0.5 * (ord(text[0]) % 2 if text else 0)
        for prompt, text in zip(prompts, completions, strict=True)
    ]


def value_model(tokenizer: Tokenizer, rate: float) -> Trainer:
    model = tiny_model(num_layers=2, windows=(WINDOW,), vocab_size=tokenizer.vocab_size, initializer_range=0.1)
    add_scalar_head(model, seed=1)
    loss = make_algorithm("ppo", max_tokens=NEW).critic.loss
    optimizer = make_optimizer(AdamW(learning_rate=rate), 1000, model=model)
    return Trainer(model, loss, optimizer, TrainSettings(temperature=1.0, max_grad_norm=1.0, micro_batch_rows=4))


def world_with_critic(tokenizer: Tokenizer, *, rate: float, warmup: int = 0, **changes: Any) -> World:
    world = World(tokenizer, algorithm="ppo", reward=by_prompt, **changes)
    critic = Critic(value_model(tokenizer, rate), warmup=warmup, own_tower=False)
    world.trainer.companions["critic"] = critic
    world.cluster = Cluster(
        world.trainer, world.cluster.engine, Shared(world.trainer), reference=Reference(world.trainer), critic=critic
    )
    return world


def test_values_read_the_context_alone(tokenizer: Tokenizer) -> None:
    """Another token t changes the values after it, and neither its own nor one before."""
    critic = Critic(value_model(tokenizer, 1e-3), warmup=0, own_tower=False)
    draw = np.random.default_rng(0)
    tokens = draw.integers(1, 200, (1, 12)).astype(np.int32)
    segments, positions = np.ones_like(tokens), np.arange(12, dtype=np.int32)[None]
    weight = (positions > 3).astype(np.float32)
    batch = Batch(tokens=tokens, positions=positions, segments=segments, loss_weight=weight)
    before = critic.values(batch)
    for t in (4, 7, 11):
        changed = tokens.copy()
        changed[0, t] += 1
        after = critic.values(replace(batch, tokens=changed))
        assert_allclose(after[0, : t + 1], before[0, : t + 1], atol=1e-6)
        assert t == 11 or np.abs(after[0, t + 1 :] - before[0, t + 1 :]).max() > 1e-4


@pytest.mark.thorough
def test_the_critic_learns_values(tokenizer: Tokenizer) -> None:
    world = world_with_critic(tokenizer, rate=1e-2)
    told = [to_host(world.step().metrics) for _ in range(40)]
    assert told[0]["critic/explained_var"] < 0.2
    assert np.mean([one["critic/explained_var"] for one in told[-5:]]) > 0.5
    assert told[-1]["critic/loss"] < told[0]["critic/loss"] / 2


@pytest.mark.thorough
def test_warm_up_leaves_the_actor_alone_and_a_resumed_run_is_the_same(tokenizer: Tokenizer) -> None:
    worlds = [world_with_critic(tokenizer, rate=1e-3, warmup=1, optimizer=sgd(0.1)) for _ in range(2)]
    first, second = worlds
    start = params_of(first.trainer)
    told = to_host(first.step().metrics)
    assert told["update_skipped"] == 1 and told["critic/update_skipped"] == 0
    for path, array in params_of(first.trainer).items():
        assert_array_equal(array, start[path], err_msg=path)
    state = jax.tree.map(np.asarray, first.trainer.state())
    first.step()
    assert any((array != start[path]).any() for path, array in params_of(first.trainer).items())
    second.trainer.restore(jax.tree.map(jax.numpy.asarray, state), 1)
    second.cluster.version, second.issued = 1, 3
    second.cluster.sync_weights(second.cluster.version)
    second.step()
    assert second.cluster.critic.trainer.step_number == first.cluster.critic.trainer.step_number == 2
    for one, other in zip(*(jax.tree.leaves(world.trainer.state()) for world in worlds), strict=True):
        assert_array_equal(one, other)
