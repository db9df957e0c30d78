"""Teachers in reinforcement learning: what they add to an advantage, and what is measured of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from posttrain.batch import Batch, TokenStats
from posttrain.cluster.cluster import Cluster
from posttrain.cluster.reference import FrozenModel
from posttrain.cluster.sync import Shared
from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.evaluation.at_k import interval_over_prompts
from posttrain.kernels.logits.divergence import Divergence, divergence
from posttrain.losses.policy import DISTILL
from posttrain.metrics import to_host
from posttrain.rl.step import merged
from posttrain.rl.teachers import TeacherKL, add_teachers, distances
from posttrain.rollout.trajectory import Example, Trajectory
from tests.rl.test_step import World


@pytest.mark.thorough
def test_the_expected_gradient_is_that_of_the_reverse_kl() -> None:
    """Each of 7 tokens in a row of its own, counted as often as the student draws it."""
    draw = np.random.default_rng(0)
    student, teacher = (jnp.asarray(draw.normal(size=7), jnp.float32) for _ in range(2))
    own, other = np.asarray(jax.nn.log_softmax(student)), np.asarray(jax.nn.log_softmax(teacher))

    def column(x: Any) -> np.ndarray:
        return np.stack([np.zeros(7), np.asarray(x)], axis=1).astype(np.float32)

    ones = np.ones((7, 2), np.int32)
    batch = Batch(
        tokens=np.stack([np.zeros(7), np.arange(7)], axis=1).astype(np.int32),
        positions=ones,
        segments=ones,
        loss_weight=column(np.exp(own)),
        sampler_logps=column(own),
        advantages=column(np.zeros(7)),
    )
    taught, metrics = add_teachers(batch, column(other), coef=1.0)

    def policy(logits: jax.Array) -> jax.Array:
        logps = jnp.stack([jnp.zeros(7), jax.nn.log_softmax(logits)], axis=1)
        output = DISTILL(TokenStats(logps=logps, entropy=jnp.zeros((7, 2))), taught)
        return output.loss.total / output.loss.weight

    def reverse_kl(logits: jax.Array) -> jax.Array:
        kind = Divergence(beta=1.0, temperature=1.0)
        return divergence(logits[None, None], teacher[None, None], kind)[0, 0]

    assert_allclose(jax.grad(policy)(student), jax.grad(reverse_kl)(student), rtol=1e-4, atol=1e-6)
    assert_allclose(metrics["distill/kl"].value(), reverse_kl(student), rtol=1e-5)
    assert_allclose(metrics["distill/teacher_perplexity"].value(), np.exp(-np.sum(np.exp(own) * other)), rtol=1e-5)
    twice, _ = add_teachers(taught, column(other), coef=2.0)
    assert_allclose(twice.advantages, 3 * np.asarray(taught.advantages), rtol=1e-5)


def test_perplexities_over_several_updates_are_of_all_tokens() -> None:
    """Not a mean of perplexities; a part without sampled tokens adds nothing."""
    draw = np.random.default_rng(1)
    parts, all_logps = [], []
    for count in (5, 2, 0):
        logps = np.where(np.arange(6) < count, draw.normal(size=6) - 2, 0.0)[None].astype(np.float32)
        weight = (np.arange(6) < count)[None].astype(np.float32)
        ones = np.ones((1, 6), np.int32)
        batch = Batch(
            tokens=ones,
            positions=ones,
            segments=ones,
            loss_weight=weight,
            sampler_logps=logps,
            advantages=np.zeros((1, 6), np.float32),
        )
        parts.append(add_teachers(batch, 2 * logps, coef=1.0)[1])
        all_logps.append(logps[0, :count].astype(np.float64))
    metrics, mean = to_host(merged(parts)), np.concatenate(all_logps).mean()
    assert_allclose(metrics["distill/student_perplexity"], np.exp(-mean), rtol=1e-6)
    assert_allclose(metrics["distill/teacher_perplexity"], np.exp(-2 * mean), rtol=1e-6)
    assert_allclose(metrics["distill/kl"], -mean, rtol=1e-6)


class Says:
    """A teacher that gives every token the same log-probability."""

    def __init__(self, logp: float):
        self.logp = logp

    def logps(self, batch: Batch) -> np.ndarray:
        return np.full(batch.shape, self.logp, np.float32)


def sample(number: int, length: int, **row: Any) -> Trajectory:
    return Trajectory(
        group=0,
        example=Example(index=number, row=row, messages=[], prompt_tokens=(), plain=True),
        sample=0,
        messages=[],
        text="",
        tokens=list(range(2 + length)),
        sampled=[False] * 2 + [True] * length,
        logps=[0.0] * 2 + [-1.0 - number] * length,
        kept_logps=[0.0] * (2 + length),
        truncation_logps=[0.0] * (2 + length),
        stop="stop",
        versions=[0] * (2 + length),
    )


def test_distances_belong_to_samples_and_teachers_to_rows() -> None:
    teachers = [Says(-3.0), Says(-5.0)]
    groups = [[sample(0, 2, first=1.0)], [sample(1, 5, first=0.25)], [sample(2, 1, first=0.0)]]

    def shares(example: Example) -> np.ndarray:
        first = example.row["first"]
        return np.asarray([first, 1 - first], np.float32)

    found = distances(teachers, groups, shares, row_tokens=7)
    assert_allclose(found[:, 0], [-1 + 3, -2 + (0.25 * 3 + 0.75 * 5), -3 + 5])
    interval = interval_over_prompts(found, np.arange(len(found)))
    assert interval.low < interval.mean < interval.high and interval.mean == pytest.approx(found.mean())
    assert_allclose(distances(teachers[:1], groups, None, row_tokens=7)[:, 0], [2, 1, 0])
    with pytest.raises(ValueError, match="the batch has no teacher_weights"):
        distances(teachers, groups, None, row_tokens=7)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("bytes")


def test_a_teacher_that_is_the_student_changes_no_advantage(tokenizer: Tokenizer) -> None:
    world = World(tokenizer, algorithm="distill", temperature=0.7)
    model = world.trainer.model
    frozen = FrozenModel(model, world.trainer.mesh, temperature=0.7, rows=4)
    world.cluster = Cluster(
        world.trainer, world.cluster.engine, Shared(world.trainer), reference=None, teachers=[frozen]
    )
    world.settings = replace(world.settings, teaching=TeacherKL(coef=1.0, shares=None))
    both = world.step()
    metrics = {name: metric for name, metric in both.metrics.items() if name.startswith("distill/")}
    assert abs(metrics["distill/kl"].value()) < 1e-4
    sampled = both.batch.loss_weight > 0
    teacher, actor = (one.logps(both.batch) for one in (world.cluster.teachers, world.cluster.actor))
    assert_allclose(teacher[sampled], actor[sampled], atol=1e-5)
    assert np.abs(both.batch.advantages).max() > 0.05, "the rewards still count"
