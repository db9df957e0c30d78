"""Online preference: pairs of the policy's own samples, their rows, and a step on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from posttrain.batch import Batch, TokenStats
from posttrain.cluster.cluster import Cluster
from posttrain.cluster.reference import Reference
from posttrain.cluster.sync import Shared
from posttrain.config import LoRA, SamplingSection
from posttrain.data.chat import Renderer
from posttrain.data.tokenizer import load_tokenizer
from posttrain.losses.pairs import pairs_of, sequences_of
from posttrain.losses.preference import PreferenceLoss
from posttrain.metrics import Timer, to_host
from posttrain.reward.function import Reward
from posttrain.reward.rubric import Rubric
from posttrain.rl.assemble import assemble_pairs
from posttrain.rl.online_dpo import (
    OnlineLoss,
    PairSettings,
    best_and_worst,
    online_step,
    pairs_of_groups,
    without_equal,
)
from posttrain.rl.sampler import Sampler
from posttrain.rl.step import StepResult
from posttrain.rollout.engine import NativeEngine
from posttrain.runtime.event_loop import run_async
from posttrain.train.objective import TrainSettings
from posttrain.train.trainer import Trainer
from posttrain.weights.lora import attach_lora
from tests.rl.helpers import collector, trajectory
from tests.rl.test_step import examples
from tests.tiny import sgd, tiny_model

ROW, NEW, GROUP, BETA = 64, 8, 4, 0.5
PROMPTS = ("1+1=", "2*", "a long")


def test_best_and_worst_of_a_group() -> None:
    nan = np.nan
    rewards = np.asarray([[1, 3, 2, 3], [1, 1, 0, 0], [2, 2, 2, 2], [nan, 1, nan, 0], [nan, 1, nan, nan], [nan] * 4])
    roles = best_and_worst(rewards.astype(np.float32))
    assert_array_equal(roles[0], [-1, 1, 0, 0])
    assert_array_equal(roles[1], [1, 0, -1, 0])
    assert_array_equal(roles[3], [0, 1, 0, -1])
    assert not roles[[2, 4, 5]].any()
    groups = [[trajectory(sample=g) for g in range(4)] for _ in roles]
    found = [(chosen.sample, rejected.sample) for chosen, rejected in pairs_of_groups(groups, roles)]
    assert found == [(1, 0), (0, 2), (1, 3)]


def test_equal_samples_are_no_pair() -> None:
    """Two samples with the same tokens, which a noisy judge scores apart."""
    same = [trajectory(tokens=[1, 2, 3], num_prompt=1, sample=g) for g in range(2)]
    other = [same[0], trajectory(tokens=[1, 2, 4], num_prompt=1, sample=1)]
    roles = best_and_worst(np.asarray([[0.1, 0.9], [0.1, 0.9]], np.float32))
    assert_array_equal(without_equal([same, other], roles), [[0, 0], [-1, 1]])


def test_a_pair_stands_side_by_side_in_one_row() -> None:
    chosen = trajectory(tokens=[1, 2, 3], num_prompt=1)
    rejected = trajectory(tokens=[1, 5], num_prompt=1, sample=1)
    other = (trajectory(tokens=[7, 8], num_prompt=1), trajectory(tokens=[7, 9, 9], num_prompt=1, sample=1))
    pairs = [(chosen, rejected), other]
    batch = assemble_pairs(pairs, row_tokens=8, num_rows=2, groups_P=pairs, share_prompts=False)
    assert_array_equal(batch.tokens, [[1, 2, 3, 1, 5, 0, 0, 0], [7, 8, 7, 9, 9, 0, 0, 0]])
    assert_array_equal(batch.positions, [[0, 1, 2, 0, 1, 0, 0, 0], [0, 1, 0, 1, 2, 0, 0, 0]])
    assert_array_equal(batch.segments, [[1, 1, 1, 2, 2, 0, 0, 0], [1, 1, 2, 2, 2, 0, 0, 0]])
    assert batch.roles is not None and batch.sampler_logps is not None
    assert_array_equal(batch.roles, [[0, 1, 1, 0, -1, 0, 0, 0], [0, 1, 0, -1, -1, 0, 0, 0]])
    assert_array_equal(batch.loss_weight, np.abs(batch.roles))
    assert_allclose(batch.sampler_logps, -0.5 * np.abs(batch.roles))
    assert batch.advantages is None and batch.ref_logps is None


def test_the_prompt_of_a_pair_stands_in_its_row_once() -> None:
    """All but its last token, which each answer has before it; a prompt of one token is not shared."""
    chosen = trajectory(tokens=[1, 2, 3, 4], num_prompt=3)
    rejected = trajectory(tokens=[1, 2, 3, 5, 6], num_prompt=3, sample=1)
    short = (trajectory(tokens=[7, 8], num_prompt=1), trajectory(tokens=[7, 9], num_prompt=1, sample=1))
    pairs = [short, (chosen, rejected)]
    batch = assemble_pairs(pairs, row_tokens=12, num_rows=2, groups_P=pairs, share_prompts=True)
    assert_array_equal(batch.tokens[0], [7, 8, 7, 9, 1, 2, 3, 4, 3, 5, 6, 0])
    assert_array_equal(batch.positions[0], [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 4, 0])
    assert_array_equal(batch.segments[0], [1, 1, 2, 2, 4, 4, 5, 5, 6, 6, 6, 0])
    assert batch.parents is not None and batch.roles is not None and not batch.segments[1].any()
    assert_array_equal(batch.parents[0], [0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 0])
    assert_array_equal(batch.roles[0], [0, 1, 0, -1, 0, 0, 0, 1, 0, -1, -1, 0])
    assert_array_equal(batch.loss_weight, np.abs(batch.roles))


def test_the_loss_sees_every_pair_once() -> None:
    """Each token's own number as its log-probability: the sums say which tokens a loss takes for a pair."""
    draw, number = np.random.default_rng(0), iter(range(1, 10_000))

    def sample(which: int) -> Any:
        return trajectory(tokens=[next(number) for _ in range(draw.integers(2, 9))], sample=which)

    pairs = [(sample(0), sample(1)) for _ in range(9)]
    batch = assemble_pairs(pairs, row_tokens=24, num_rows=9, groups_P=pairs, share_prompts=False)
    found = pairs_of(sequences_of(TokenStats(logps=jnp.asarray(batch.tokens, jnp.float32)), batch))
    valid = np.asarray(found.valid)
    sums = zip(np.asarray(found.chosen.logps)[valid], np.asarray(found.rejected.logps)[valid], strict=True)
    expected = sorted((sum(c.completion_tokens), sum(r.completion_tokens)) for c, r in pairs)
    assert sorted((int(c), int(r)) for c, r in sums) == expected
    assert (np.asarray(batch.segments).max(axis=1) > 2).any() and not np.asarray(batch.segments)[-1].any()


def test_no_pair_makes_an_empty_batch() -> None:
    batch = assemble_pairs([], row_tokens=8, num_rows=2, groups_P=[[trajectory()]], share_prompts=False)
    assert batch.shape == (2, 8) and not np.asarray(batch.loss_weight).any() and batch.roles is not None


def test_the_metrics_of_sampling_stand_beside_those_of_the_loss() -> None:
    pair = (trajectory(tokens=[1, 2, 3]), trajectory(tokens=[1, 4], sample=1))
    made = assemble_pairs([pair], row_tokens=8, num_rows=1, groups_P=[pair], share_prompts=False)
    batch = Batch(**{**vars(made), "ref_logps": np.full((1, 8), -0.6, np.float32)})
    inner = PreferenceLoss(kinds=("sigmoid", "sft"))
    stats = TokenStats(logps=jnp.full((1, 8), -0.75))
    loss = OnlineLoss(pairs=inner)
    output, alone = jax.jit(lambda: (loss(stats, batch), inner(stats, batch)))()
    assert_allclose(output.loss.value(), alone.loss.value(), rtol=1e-6)
    assert alone.metrics.keys() < output.metrics.keys()
    assert_allclose(output.metrics["sampling/logp_difference/mean"].value(), 0.25, rtol=1e-6)
    assert loss.needs_whole_batch and not OnlineLoss(pairs=PreferenceLoss()).needs_whole_batch


def even(completion_tokens: Sequence[Sequence[int]], **_: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in tokens) / len(tokens) for tokens in completion_tokens]


class World:
    """A tiny model that samples, is compared with its start, and learns."""

    def __init__(self, *, lora: bool = False, share: bool = True, reward: Callable[..., Any] = even, rate: float = 0.5):
        self.share = share
        tokenizer = load_tokenizer("bytes")
        model = tiny_model(num_layers=2, windows=(None,), vocab_size=tokenizer.vocab_size, initializer_range=0.1)
        if lora:
            attach_lora(model, LoRA(rank=4), seed=0)
        loss = OnlineLoss(pairs=PreferenceLoss(beta=BETA))
        self.trainer = Trainer(
            model, loss, sgd(rate), TrainSettings(temperature=0.8, max_grad_norm=1.0, micro_batch_rows=1)
        )
        engine = NativeEngine(
            model, slots=8, max_length=ROW // 2, decode_steps=8, tokenizer_decode=tokenizer.decode, version=0
        )
        self.cluster = Cluster(self.trainer, engine, Shared(self.trainer), reference=Reference(self.trainer))
        self.sampler = Sampler(
            engine=engine,
            renderer=Renderer(tokenizer, False),
            sampling=SamplingSection(max_tokens=NEW, temperature=0.8),
            max_prompt_tokens=ROW // 2 - NEW,
            seed=7,
        )
        self.rubric = Rubric([Reward(function=reward, weight=1.0, timeout_s=60.0)])

    def step(self) -> tuple[StepResult, dict[str, float]]:
        settings = PairSettings(row_tokens=ROW, num_rows=len(PROMPTS), share_prompts=self.share)
        acting = collector(self.sampler, self.rubric, examples(PROMPTS), GROUP)
        call = online_step(self.cluster, acting, settings, Timer())
        outcome = run_async(call)
        return outcome, to_host(outcome.metrics)

    def score(self, tokens: Sequence[int], num_prompt: int, weights: Any) -> float:
        """The log-probability of one completion, alone in its row."""
        length = len(tokens)
        row = np.zeros((3, 1, ROW), np.int32)
        row[0, 0, :length], row[1, 0, :length], row[2, 0, :length] = tokens, np.arange(length), 1
        weight = np.zeros((1, ROW), np.float32)
        weight[0, num_prompt:length] = 1
        batch = Batch(tokens=row[0], positions=row[1], segments=row[2], loss_weight=weight)
        return float((np.asarray(self.trainer.stats(batch, weights).logps) * weight).sum())


@pytest.mark.parametrize(("lora", "share"), [(False, True), pytest.param(True, False, marks=pytest.mark.thorough)])
def test_a_step_is_dpo_on_the_best_and_the_worst_against_the_start(lora: bool, share: bool) -> None:
    """At first policy and reference are one; then the loss is the one of every pair scored sequence by sequence,
    whether their prompts stand in the row once or twice."""
    world = World(lora=lora, share=share)
    start = jax.tree.map(jnp.copy, world.trainer.weights)
    first, metrics = world.step()
    assert_allclose(metrics["loss"], np.log(2), rtol=1e-5)
    assert metrics["rewards/accuracies"] == 0 and abs(metrics["kl"]) < 1e-6
    assert metrics["sampling/logp_difference/mean"] < 1e-4 and metrics["grad_norm"] > 0
    assert (first.batch.parents is not None and first.batch.parents.any()) == share
    kept = first.batch.ref_logps
    programs = world.trainer.num_programs

    before = jax.tree.map(jnp.copy, world.trainer.weights)
    outcome, metrics = world.step()
    losses, margins = [], []
    assert outcome.roles_PG is not None
    for chosen, rejected in pairs_of_groups(outcome.groups_P, outcome.roles_PG):
        ratios = [
            world.score(s.tokens, len(s.tokens) - s.num_sampled, before)
            - world.score(s.tokens, len(s.tokens) - s.num_sampled, start)
            for s in (chosen, rejected)
        ]
        margins.append(BETA * (ratios[0] - ratios[1]))
        losses.append(np.log1p(np.exp(-margins[-1])))
    assert len(losses) >= 2
    assert_allclose(metrics["loss"], np.mean(losses), rtol=1e-4)
    assert_allclose(metrics["rewards/margins"], np.mean(margins), atol=1e-5)
    assert abs(metrics["loss"] - np.log(2)) > 1e-4
    assert_allclose(world.cluster.reference.logps(first.batch), kept, atol=1e-5)
    assert programs + 2 >= world.trainer.num_programs
    assert {"reward", "reward_std", "rewards/even/mean", "completions/mean_length", "sampling/kept_mass/mean"} < set(
        metrics
    )


@pytest.mark.thorough
def test_ties_are_left_out_and_counted() -> None:
    """One prompt's samples are all alike, one's have no reward; where all are alike nothing changes."""

    def judged(prompts: Sequence[str], completion_tokens: Sequence[Sequence[int]]) -> list[float | None]:
        values = even(completion_tokens)
        return [{"2*": 1.0, "a long": None}.get(p, v) for p, v in zip(prompts, values, strict=True)]

    world = World(reward=judged)
    outcome, metrics = world.step()
    assert outcome.roles_PG is not None and outcome.roles_PG.any(axis=1).tolist() == [True, False, False]
    assert_allclose(metrics["frac_ties"], 2 / 3)
    assert (np.asarray(outcome.batch.segments).max(axis=1) == [3, 0, 0]).all() and metrics["update_skipped"] == 0

    world.rubric = Rubric([Reward(function=lambda prompts: [0.5] * len(prompts), weight=1.0, timeout_s=60.0)])
    before = jax.tree.map(np.asarray, world.trainer.params)
    _, metrics = world.step()
    assert metrics["frac_ties"] == 1 and metrics["update_skipped"] == 1
    jax.tree.map(assert_array_equal, before, jax.tree.map(np.asarray, world.trainer.params))
