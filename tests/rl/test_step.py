"""Whole RL steps on a real model: on-policy identities, the reference, learning, compilations, evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from posttrain.cluster.cluster import Cluster, Role
from posttrain.config import LoRA, OptimizerSection, SamplingSection
from posttrain.data.chat import Renderer
from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.errors import ConfigError
from posttrain.evaluation.rollouts import evaluate
from posttrain.metrics import Timer, to_host
from posttrain.rl.algorithms import ALGORITHMS, make_algorithm
from posttrain.rl.rewards import Reward, Rubric
from posttrain.rl.sampler import Sampler, collect
from posttrain.rl.step import StepResult, StepSettings, check_agreement, rl_step
from posttrain.rl.types import Example
from posttrain.rollout.engine import NativeEngine
from posttrain.runtime.run_async import run_async
from posttrain.train.optim import make_optimizer
from posttrain.train.trainer import Trainer
from posttrain.weights.lora import attach_lora
from tests.tiny import WINDOW, shake, tiny_model

GROUP, NEW, ROW = 4, 8, 16


def even_share(completions: Sequence[str]) -> list[float]:
    """Share of even characters: every group of a random model is mixed."""
    return [sum(ord(c) % 2 == 0 for c in text) / max(len(text), 1) for text in completions]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("bytes")


def sgd(rate: float) -> optax.GradientTransformation:
    """The rate is an argument of the compiled step and not a constant in it: one program serves all tests."""
    return optax.inject_hyperparams(optax.sgd)(learning_rate=rate)


class World:
    """Cluster, sampler and algorithm over a tiny model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        algorithm: str = "grpo",
        lora: bool = False,
        optimizer: Any = None,
        reward: Any = even_share,
        recompute: bool = False,
        **sampling: Any,
    ):
        model = tiny_model(num_layers=2, windows=(WINDOW,), vocab_size=tokenizer.vocab_size, initializer_range=0.1)
        if lora:
            attach_lora(model, LoRA(rank=4), seed=0)
        settings = SamplingSection(max_tokens=NEW, **sampling)
        self.algorithm = make_algorithm(algorithm, max_tokens=NEW)
        self.trainer = Trainer(
            model,
            self.algorithm.loss,
            optimizer or sgd(0.0),
            temperature=settings.temperature or 1.0,
            max_grad_norm=1.0,
            micro_batch_rows=4,
        )
        engine = NativeEngine(
            model, slots=8, max_length=ROW, decode_steps=8, tokenizer_decode=tokenizer.decode, version=0
        )
        self.cluster = Cluster(self.trainer, engine, keep_reference=True)
        renderer = Renderer(tokenizer, False)
        self.sampler = Sampler(engine=engine, renderer=renderer, sampling=settings, max_prompt_tokens=ROW - NEW, seed=7)
        self.rubric = Rubric([Reward(function=reward, weight=1.0, timeout_s=60.0)])
        self.settings = StepSettings(
            group_size=GROUP, row_tokens=ROW, num_rows=3 * GROUP, recompute_old_logps=recompute
        )

    def step(self, prompts: Sequence[str] = ("1+1=", "2*", "a long")) -> StepResult:
        call = rl_step(
            self.cluster, self.algorithm, self.rubric, self.sampler, examples(prompts), self.settings, Timer()
        )
        return run_async(call)


def examples(prompts: Sequence[str]) -> list[Example]:
    return [
        Example(index=i, row={"prompt": p}, messages=[{"role": "user", "content": p}], length=len(p), plain=True)
        for i, p in enumerate(prompts)
    ]


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_first_update_has_ratio_1_and_kl_0_for_every_token(
    tokenizer: Tokenizer, lora: bool, temperature: float
) -> None:
    world = World(tokenizer, lora=lora, temperature=temperature)
    outcome = world.step()
    batch, sampled = outcome.batch, outcome.batch.loss_weight > 0
    assert sampled.sum() > 20
    trainer, reference = world.cluster.logps(Role.ACTOR, batch), world.cluster.logps(Role.REFERENCE, batch)
    assert_allclose(np.exp(trainer - batch.sampler_logps)[sampled], 1.0, atol=1e-4)
    assert_array_equal(trainer, reference)
    assert world.trainer.num_programs == 2, "the step, and one for the statistics of both roles"
    metrics = to_host(outcome.metrics)
    assert abs(metrics["kl"]) < 1e-6
    assert abs(metrics["approx_kl"]) < 1e-6
    assert_allclose(metrics["ratio/mean"], 1.0, atol=1e-4)
    assert metrics["grad_norm"] > 1e-4
    assert metrics["update_skipped"] == 0


@pytest.mark.parametrize("truncation", [{"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.05}])
def test_truncated_sampling_keeps_the_ratio_at_1(tokenizer: Tokenizer, truncation: dict[str, Any]) -> None:
    world = World(tokenizer, **truncation)
    outcome = world.step()
    metrics = to_host(outcome.metrics)
    assert_allclose(metrics["ratio/mean"], 1.0, atol=1e-4)
    assert metrics["sampling/kept_mass/mean"] < 0.999


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_every_algorithm_moves_the_weights(tokenizer: Tokenizer, algorithm: str) -> None:
    world = World(tokenizer, algorithm=algorithm, optimizer=sgd(0.1), recompute=algorithm == "gspo")
    before = jax.tree.map(np.asarray, world.trainer.weights)
    outcome = world.step()
    assert (outcome.batch.old_logps is not None) == (algorithm == "gspo")
    after = world.trainer.weights
    assert max(np.abs(np.asarray(after[path]) - before[path]).max() for path in before) > 1e-5


@pytest.mark.parametrize("lora", [False, True])
def test_the_reference_stays_while_the_actor_learns(tokenizer: Tokenizer, lora: bool) -> None:
    optimizer = make_optimizer(OptimizerSection(learning_rate=1e-2 if lora else 2e-2), 100)
    world = World(tokenizer, lora=lora, optimizer=optimizer)
    first = world.step()
    reference = world.cluster.logps(Role.REFERENCE, first.batch)
    rewards = [float(first.rewards.total_PG.mean())]
    for _ in range(11 if lora else 29):
        rewards.append(float(world.step().rewards.total_PG.mean()))
    assert_array_equal(world.cluster.logps(Role.REFERENCE, first.batch), reference)
    assert np.abs(world.cluster.logps(Role.ACTOR, first.batch) - reference).max() > 1e-2
    # An adapter moves a model with random embeddings too slowly to see it here.
    assert lora or np.mean(rewards[-8:]) > np.mean(rewards[:8]) + 0.1


def test_twenty_steps_compile_each_program_once(tokenizer: Tokenizer) -> None:
    world = World(tokenizer, optimizer=sgd(0.01))
    draw = np.random.default_rng(0)
    counts = []
    for _ in range(20):
        prompts = ["".join(draw.choice(list("0123456789+*="), draw.integers(1, 7))) for _ in range(3)]
        world.step(prompts)
        counts.append((world.trainer.num_programs, len(world.cluster.engine.programs)))
    assert counts[-1] == counts[4]
    assert counts[-1][0] == 2
    assert counts[-1][1] <= 3


def test_samples_without_a_valid_reward_are_left_out(tokenizer: Tokenizer) -> None:
    def picky(completions: Sequence[str]) -> list[float | None]:
        return [None if i == 5 else float(i) for i in range(len(completions))]

    outcome = World(tokenizer, reward=picky).step()
    invalid = outcome.groups_P[1][1]
    assert np.isnan(outcome.rewards.total_PG[1, 1])
    total = sum(len(s.tokens) for group in outcome.groups_P for s in group) - len(invalid.tokens)
    assert (outcome.batch.segments > 0).sum() == total
    assert_allclose(to_host(outcome.metrics)["rewards/invalid"], 1 / 12)


def test_samples_do_not_depend_on_company_and_differ_within_a_group(tokenizer: Tokenizer) -> None:
    world = World(tokenizer)
    done: list[int] = []
    together = run_async(collect(world.sampler, examples(["1+1=", "2*"]), GROUP, 3, done.append))
    assert done == [1] * 2 * GROUP
    alone = run_async(collect(world.sampler, examples(["1+1="]), 1, 3))
    assert alone[0][0].tokens == together[0][0].tokens
    assert len({tuple(s.completion_tokens) for s in together[0]}) == GROUP
    later = run_async(collect(world.sampler, examples(["1+1="]), 1, 4))
    assert later[0][0].tokens != alone[0][0].tokens


def test_a_prompt_that_is_too_long_is_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="row 0: its prompt has 21 tokens, more than max_prompt_tokens=8"):
        World(tokenizer).step(["x" * 20])


def test_evaluation_repeats_itself_and_has_an_interval(tokenizer: Tokenizer) -> None:
    world = World(tokenizer)
    greedy = replace(world.sampler, sampling=world.sampler.sampling.model_copy(update={"temperature": 0.0}))
    first, second = (run_async(evaluate(greedy, world.rubric, examples(["1", "22", "333"]))) for _ in range(2))
    assert [g[0].text for g in first.groups_P] == [g[0].text for g in second.groups_P]
    assert first.interval.low <= first.interval.mean <= first.interval.high
    assert first.metrics()["eval/reward"] == first.interval.mean


def test_a_sampler_that_disagrees_with_the_trainer_stops_the_run(tokenizer: Tokenizer) -> None:
    good = to_host(World(tokenizer).step().metrics)
    check_agreement(good, 1)
    stale = World(tokenizer)
    shake(stale.trainer.model, seed=1, stddev=0.3)  # the engine still has the weights of before
    bad = to_host(stale.step().metrics)
    with pytest.raises(RuntimeError, match="step 1: sampler and trainer disagree by"):
        check_agreement(bad, 1)
