"""Rollout routing replay, arXiv:2510.11370: the trainer uses the experts that the sampler used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from posttrain.batch import Batch
from posttrain.cluster.cluster import Cluster
from posttrain.cluster.reference import Reference
from posttrain.cluster.sync import Shared
from posttrain.config import SamplingSection
from posttrain.data.chat import Renderer
from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.metrics import Timer, to_host
from posttrain.reward.function import Reward
from posttrain.reward.rubric import Rubric
from posttrain.rl.assemble import assemble
from posttrain.rl.sampler import Sampler
from posttrain.rl.step import StepResult, rl_step
from posttrain.rollout.engine import NativeEngine
from posttrain.runtime.event_loop import run_async
from posttrain.train.objective import TrainSettings
from posttrain.train.trainer import Trainer
from tests.mixtures import mixture_config, mixture_model
from tests.rl.helpers import collector, example, make_algorithm, step_settings, trajectory
from tests.tiny import sgd

GROUP, NEW, ROW = 4, 10, 20


def even_share(completions: Sequence[str]) -> list[float]:
    return [sum(ord(c) % 2 == 0 for c in text) / max(len(text), 1) for text in completions]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("bytes")


class World:
    """One step of a mixture of experts, with its cluster. `dtype`: of the sampler; the trainer computes in float32."""

    def __init__(self, tokenizer: Tokenizer, dtype: Any):
        config = mixture_config(vocab_size=tokenizer.vocab_size)
        model = mixture_model(config)
        algorithm = make_algorithm("grpo", max_tokens=NEW)
        trainer = Trainer(
            model, algorithm.loss, sgd(0.0), TrainSettings(temperature=1.0, max_grad_norm=1.0, micro_batch_rows=4)
        )
        engine = NativeEngine(
            mixture_model(config, dtype=dtype),
            slots=4 * GROUP,
            max_length=ROW,
            decode_steps=NEW,
            tokenizer_decode=tokenizer.decode,
            record_routing=True,
        )
        self.cluster = Cluster(trainer, engine, Shared(trainer), reference=Reference(trainer))
        prompts = ("1+1=", "2*", "a long", "xyz")
        examples = [example(i, p) for i, p in enumerate(prompts)]
        sampler = Sampler(
            engine=engine,
            renderer=Renderer(tokenizer, False),
            sampling=SamplingSection(max_tokens=NEW),
            max_prompt_tokens=ROW - NEW,
            seed=7,
        )
        rubric = Rubric([Reward(function=even_share, weight=1.0, timeout_s=60.0)])
        settings = step_settings(row_tokens=ROW, num_rows=len(prompts) * GROUP)
        step = rl_step(self.cluster, algorithm, collector(sampler, rubric, examples, GROUP), settings, Timer())
        self.outcome: StepResult = run_async(step)

    def gaps(self, batch: Batch) -> np.ndarray:
        """How far the trainer's log-probabilities are from the sampler's."""
        difference = self.cluster.actor.logps(batch) - batch.sampler_logps
        return np.abs(difference[np.asarray(batch.loss_weight) > 0])


@pytest.mark.thorough
def test_the_first_update_has_ratio_1_in_float32(tokenizer: Tokenizer) -> None:
    world = World(tokenizer, jnp.float32)
    batch, metrics = world.outcome.batch, to_host(world.outcome.metrics)
    assert batch.experts is not None
    assert batch.experts.shape == (*batch.shape, 2, 3)
    assert (np.asarray(batch.experts)[batch.segments == 0] == -1).all()
    assert world.gaps(batch).max() < 1e-4
    assert_allclose(metrics["ratio/mean"], 1.0, atol=1e-4)
    assert abs(metrics["kl"]) < 1e-6
    assert metrics["moe/replaced_ratio"] == 0


@pytest.mark.thorough
def test_replay_keeps_the_ratio_near_1_where_rounding_changes_the_routing(tokenizer: Tokenizer) -> None:
    """The sampler in bfloat16: the trainer's own routers would choose other experts for some tokens."""
    world = World(tokenizer, jnp.bfloat16)
    batch, metrics = world.outcome.batch, to_host(world.outcome.metrics)
    assert 0 < metrics["moe/replaced_ratio"] < 0.1
    replayed, own = world.gaps(batch), world.gaps(replace(batch, experts=None))
    assert_allclose(metrics["ratio/mean"], 1.0, atol=0.02)
    assert replayed.mean() < 0.9 * own.mean()
    assert replayed.max() < own.max()

    assert batch.experts is not None
    shifted = np.where(np.asarray(batch.experts) < 0, -1, (np.asarray(batch.experts) + 1) % 8)
    other = replace(batch, experts=shifted)
    assert world.gaps(other).mean() > 10 * replayed.mean()
    # The reference, here the same weights, has a router of its own.
    reference = world.cluster.reference.logps(other)
    assert_array_equal(reference, world.cluster.actor.logps(replace(batch, experts=None)))
    assert np.abs(reference - world.cluster.actor.logps(batch)).max() > 1e-3


def test_experts_are_packed_with_their_tokens() -> None:
    draw = np.random.default_rng(0)
    group = [
        replace(trajectory(tokens=list(range(1, n + 1)), sample=n), experts=draw.integers(0, 8, (n, 2, 3), np.int16))
        for n in (3, 4, 5)
    ]
    batch = assemble(
        [group], np.ones((1, 3), np.float32), np.asarray([[True, False, True]]), like=group[0], row_tokens=9, num_rows=2
    )
    assert batch.experts is not None
    assert_array_equal(batch.experts[0, :3], group[0].experts)
    assert_array_equal(batch.experts[0, 3:8], group[2].experts)
    assert (batch.experts[0, 8:] == -1).all() and len(batch.experts) == 1
    plain, one = trajectory(), np.ones((1, 1))
    assert assemble([[plain]], one, one > 0, like=plain, row_tokens=9, num_rows=2).experts is None
