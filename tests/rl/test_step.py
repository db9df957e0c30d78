"""Whole RL steps on a real model: on-policy identities, the reference, learning, compilations, evaluation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from posttrain.batch import Batch
from posttrain.cluster.cluster import Cluster
from posttrain.cluster.reference import Reference
from posttrain.cluster.sync import Shared
from posttrain.config import ALGORITHMS, AdamW, LoRA, SamplingSection
from posttrain.data.chat import Renderer
from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.errors import ConfigError, RunError
from posttrain.evaluation.rollouts import evaluate_prompts
from posttrain.losses.ratios import ImportanceSampling
from posttrain.metrics import Timer, to_host
from posttrain.reward.function import Reward
from posttrain.reward.rubric import Rubric
from posttrain.rl.agreement import EXACT, ROUNDED, SamplerGate, check_agreement
from posttrain.rl.assemble import assemble
from posttrain.rl.metrics import sample_metrics
from posttrain.rl.sampler import IssuedGroup, Sampler, collect
from posttrain.rl.step import StepResult, has_signal, rl_step
from posttrain.rollout.engine import NativeEngine
from posttrain.rollout.trajectory import Example
from posttrain.runtime.event_loop import run_async
from posttrain.train.objective import TrainSettings
from posttrain.train.trainer import Trainer
from posttrain.train.transformations import make_optimizer
from posttrain.weights.lora import attach_lora
from posttrain.weights.quantize import quantize_model
from posttrain.weights.state import ModelWeights
from tests.often import often
from tests.oracles import sample_reference
from tests.rl.helpers import collector, example, make_algorithm, step_settings, trajectory
from tests.tiny import WINDOW, forward, sgd, shake, tiny_model

GROUP, NEW, ROW = 4, 8, 16


def even_share(completions: Sequence[str]) -> list[float]:
    """Share of even characters: every group of a random model is mixed."""
    return [sum(ord(c) % 2 == 0 for c in text) / max(len(text), 1) for text in completions]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("bytes")


class World:
    """Cluster, sampler and algorithm over a tiny model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        algorithm: str = "grpo",
        lora: bool = False,
        dtype: Any = jnp.float32,
        optimizer: Any = None,
        reward: Any = even_share,
        old_logps: Any = "self",
        importance: ImportanceSampling | None = None,
        updates: int = 1,
        epochs: int = 1,
        **sampling: Any,
    ):
        self.issued = 0
        model = tiny_model(
            num_layers=2, windows=(WINDOW,), vocab_size=tokenizer.vocab_size, initializer_range=0.1, dtype=dtype
        )
        if lora:
            attach_lora(model, LoRA(rank=4), seed=0)
        settings = SamplingSection(max_tokens=NEW, **sampling)
        self.algorithm = make_algorithm(algorithm, max_tokens=NEW)
        self.algorithm = replace(self.algorithm, loss=replace(self.algorithm.loss, importance=importance))
        self.trainer = Trainer(
            model,
            self.algorithm.loss,
            make_optimizer(optimizer, 100, model=model) if isinstance(optimizer, AdamW) else optimizer or sgd(0.0),
            TrainSettings(
                temperature=settings.temperature or 1.0,
                max_grad_norm=1.0,
                micro_batch_rows=4,
                skip_update=SamplerGate(rounding=EXACT if dtype == jnp.float32 else ROUNDED),
            ),
        )
        engine = NativeEngine(
            model, slots=8, max_length=ROW, decode_steps=8, tokenizer_decode=tokenizer.decode, version=0
        )
        self.cluster = Cluster(self.trainer, engine, Shared(self.trainer), reference=Reference(self.trainer))
        renderer = Renderer(tokenizer, False)
        self.sampler = Sampler(engine=engine, renderer=renderer, sampling=settings, max_prompt_tokens=ROW - NEW, seed=7)
        self.rubric = Rubric([Reward(function=reward, weight=1.0, timeout_s=60.0)])
        rows = 3 // updates * GROUP
        self.settings = step_settings(
            row_tokens=ROW, num_rows=rows, updates=updates, epochs=epochs, old_logps=old_logps
        )

    def step(self, prompts: Sequence[str] = ("1+1=", "2*", "a long")) -> StepResult:
        acting = collector(self.sampler, self.rubric, examples(prompts), GROUP, issued=self.issued)
        result = run_async(rl_step(self.cluster, self.algorithm, acting, self.settings, Timer()))
        self.issued = acting.source.issued
        return result


def examples(prompts: Sequence[str]) -> list[Example]:
    return [example(i, p) for i, p in enumerate(prompts)]


def issued(prompts: Sequence[str]) -> list[IssuedGroup]:
    return [IssuedGroup(number=n, example=one, version=0) for n, one in enumerate(examples(prompts))]


@pytest.mark.parametrize(("lora", "temperature"), often([(False, 0.7), (True, 0.7), (True, 1.0)], (False, 0.7)))
def test_first_update_has_ratio_1_and_kl_0_for_every_token(
    tokenizer: Tokenizer, lora: bool, temperature: float
) -> None:
    """Where samples are truncated, too: pi / pi_behaviour of a token is the mass of the tokens that could be drawn."""
    world = World(tokenizer, lora=lora, temperature=temperature, importance=ImportanceSampling(), top_p=0.8)
    outcome = world.step()
    batch, sampled = outcome.batch, outcome.batch.loss_weight > 0
    assert sampled.sum() > 20
    trainer, reference = world.cluster.actor.logps(batch), world.cluster.reference.logps(batch)
    assert_allclose(np.exp(trainer - batch.sampler_logps)[sampled], 1.0, atol=1e-4)
    assert_array_equal(trainer, reference)
    assert world.trainer.num_programs == 2, "the step, and one for the statistics of both roles"
    metrics = to_host(outcome.metrics)
    assert abs(metrics["kl"]) < 1e-6
    assert abs(metrics["approx_kl"]) < 1e-6
    assert_allclose(metrics["ratio/mean"], 1.0, atol=1e-4)
    assert metrics["grad_norm"] > 1e-4
    assert metrics["update_skipped"] == 0
    kept = np.concatenate([np.asarray(s.kept_logps)[s.sampled] for group in outcome.groups_P for s in group])
    # The same tokens, in the order of the rows.
    assert_allclose(np.sort((batch.sampler_logps - batch.behaviour_logps)[sampled]), np.sort(kept), atol=1e-5)
    mean = metrics["sampling/importance_sampling_ratio/mean"]
    assert_allclose(mean, metrics["sampling/kept_mass/mean"], rtol=1e-4)
    assert 0.7 < mean < 0.95
    assert metrics["sampling/importance_sampling_ratio/out_of_bounds"] == 0


PENALTIES: dict[str, Any] = {"repetition_penalty": 1.6, "frequency_penalty": 0.4, "logit_bias": {40: 1.0, 60: -2.0}}


@pytest.mark.parametrize("truncation", [{}, {"top_k": 100, "top_p": 0.8, "min_p": 0.002}], ids=["whole", "truncated"])
def test_kept_mass_is_that_of_truncation_alone(tokenizer: Tokenizer, truncation: dict[str, float]) -> None:
    """Penalties, biases and quantised weights move mass, which is not cut: float64 logits of the sampling model say
    what truncation keeps of what they leave."""
    world = World(tokenizer, temperature=0.7, **PENALTIES, **truncation)
    model = world.trainer.model
    quantized = tiny_model(
        num_layers=2, windows=(WINDOW,), vocab_size=tokenizer.vocab_size, initializer_range=0.1, dtype=jnp.float32
    )
    ModelWeights(quantized).write(ModelWeights(model).read())
    quantize_model(quantized, "int8")
    engine = NativeEngine(
        quantized, slots=8, max_length=ROW, decode_steps=8, tokenizer_decode=tokenizer.decode, version=0
    )
    sampler = replace(world.sampler, engine=engine)
    groups = run_async(collect(sampler, issued(["1+1=", "a long"]), GROUP))
    masses = []
    for one in itertools.chain(*groups):
        logits = np.asarray(forward(quantized, jnp.asarray([one.tokens]))[0], np.float64)
        params = sampler.params(one.group, one.sample)
        prompt, sampled = np.split(np.asarray(one.tokens), [one.sampled.index(True)])
        for at in range(len(sampled)):
            *_, truncation_logp = sample_reference(logits[len(prompt) + at - 1], 0.5, params, prompt, sampled[:at])
            masses.append(np.exp(truncation_logp))
    expected = np.mean(masses) if truncation else 1.0
    assert not truncation or 0.2 < expected < 0.9
    assert_allclose(sample_metrics(groups, 0)["sampling/kept_mass/mean"], expected, rtol=1e-5)
    kept = np.concatenate([np.asarray(one.kept_logps)[one.sampled] for one in itertools.chain(*groups)])
    assert abs(np.exp(kept).mean() / expected - 1) > 0.02, "what penalties do is in kept_logps"


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", ["gspo", "rloo"])
def test_no_sequence_is_clipped_on_policy_in_bfloat16(tokenizer: Tokenizer, algorithm: str) -> None:
    """Sampler and trainer round differently: enough to clip sequences, were the sampler's numbers the old policy's."""
    clipped = {}
    for old_logps in ("self", "sampler"):
        world = World(tokenizer, algorithm=algorithm, old_logps=old_logps, dtype=jnp.bfloat16)
        metrics = to_host(world.step().metrics)
        clipped[old_logps] = metrics["clip_ratio/region_mean"]
        assert metrics["sampling/logp_difference/mean"] > 1e-3
        assert old_logps == "sampler" or metrics["ratio/mean"] == 1.0
    assert clipped["self"] == 0 and (clipped["sampler"] > 0.1 or algorithm == "rloo")


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "ppo"])
def test_every_algorithm_moves_the_weights(tokenizer: Tokenizer, algorithm: str) -> None:
    """That with a critic: tests/cluster/test_critic.py."""
    world = World(tokenizer, algorithm=algorithm, optimizer=sgd(0.1), old_logps="trainer")
    before = jax.tree.map(np.asarray, world.trainer.weights)
    outcome = world.step()
    assert outcome.batch.old_logps is not None
    after = world.trainer.weights
    assert max(np.abs(np.asarray(after[path]) - before[path]).max() for path in before) > 1e-5


@pytest.mark.thorough
@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_the_reference_stays_while_the_actor_learns(tokenizer: Tokenizer, lora: bool) -> None:
    optimizer = AdamW(learning_rate=1e-2 if lora else 2e-2)
    world = World(tokenizer, lora=lora, optimizer=optimizer)
    first = world.step()
    reference = world.cluster.reference.logps(first.batch)
    rewards = [float(first.rewards.total_PG.mean())]
    for _ in range(11 if lora else 29):
        rewards.append(float(world.step().rewards.total_PG.mean()))
    assert_array_equal(world.cluster.reference.logps(first.batch), reference)
    assert np.abs(world.cluster.actor.logps(first.batch) - reference).max() > 1e-2
    # An adapter moves a model with random embeddings too slowly to see it here.
    assert lora or np.mean(rewards[-8:]) > np.mean(rewards[:8]) + 0.1


def test_twenty_steps_compile_each_program_once(tokenizer: Tokenizer, own_programs: None) -> None:
    world = World(tokenizer)
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
    together = run_async(collect(world.sampler, issued(["1+1=", "2*"]), GROUP, done.append))
    assert done == [1] * 2 * GROUP
    alone = run_async(collect(world.sampler, issued(["1+1="]), 1))
    assert alone[0][0].tokens == together[0][0].tokens
    assert len({tuple(s.completion_tokens) for s in together[0]}) == GROUP
    later = run_async(collect(world.sampler, [replace(issued(["1+1="])[0], number=4)], 1))
    assert later[0][0].tokens != alone[0][0].tokens


def test_a_prompt_that_is_too_long_is_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="row 0: its prompt has 21 tokens, more than max_prompt_tokens=8"):
        World(tokenizer).step(["x" * 20])


def test_evaluation_repeats_itself_and_has_an_interval(tokenizer: Tokenizer) -> None:
    world = World(tokenizer)
    greedy = replace(world.sampler, sampling=world.sampler.sampling.model_copy(update={"temperature": 0.0}))
    first, second = (
        run_async(evaluate_prompts(greedy, world.rubric, examples(["1", "22", "333"]), step=0)) for _ in range(2)
    )
    assert [g[0].text for g in first.groups_P] == [g[0].text for g in second.groups_P]
    assert first.interval.low <= first.interval.mean <= first.interval.high
    assert first.metrics()["eval/reward"] == first.interval.mean
    # As published sets do: each prompt in many rows, which say no more about prompts that are not there.
    many = run_async(evaluate_prompts(greedy, world.rubric, [*examples(["1", "22", "333"] * 10)], step=0))
    assert vars(many.interval) == pytest.approx(vars(first.interval), rel=1e-3) and many.interval.n == 3
    assert len(many.prompts) == 30 and len(set(many.prompts)) == 3

    def fails(completions: list[str]) -> list[float]:
        raise ValueError("of the user")

    failing = Rubric([Reward(function=fails, weight=1.0, timeout_s=60.0)])
    why = "no sample of eval_dataset has a valid reward: reward fails: no value for 3 of 3 samples; .*of the user"
    with pytest.raises(ConfigError, match=why):
        run_async(evaluate_prompts(greedy, failing, examples(["1", "22", "333"]), step=0))


def params_of(trainer: Trainer) -> dict[str, np.ndarray]:
    return {path: np.array(array) for path, array in trainer.params.items()}


@pytest.mark.thorough
def test_a_sampler_that_disagrees_with_the_trainer_stops_the_run(tokenizer: Tokenizer) -> None:
    """Also far below any limit of rounding: the gap of the first step is remembered, and restored."""
    stale = World(tokenizer, optimizer=sgd(0.1))
    first = stale.step().metrics
    check_agreement(first, 1)
    assert to_host(first)["sampling/logp_difference/limit"] == pytest.approx(EXACT)
    resumed = World(tokenizer, optimizer=sgd(0.1))
    resumed.trainer.restore(jax.tree.map(jnp.copy, stale.trainer.state()), 1)
    resumed.cluster.sync_weights(resumed.cluster.version)
    for world, stddev in ((stale, 0.3), (resumed, 0.002)):
        shake(world.trainer.model, seed=1, stddev=stddev)  # the engine still has the weights of before
        before = params_of(world.trainer)
        metrics = world.step().metrics
        assert to_host(metrics)["update_skipped"] == 1
        for path, array in world.trainer.params.items():
            assert_array_equal(array, before[path], err_msg=path)
        with pytest.raises(RunError, match="step 2: sampler and trainer disagree by .* mean .* of 0.001,"):
            check_agreement(metrics, 2)
    assert EXACT < to_host(metrics)["sampling/logp_difference/mean"] < 0.05


@pytest.mark.thorough
def test_the_gate_judges_fresh_tokens_by_mean_outliers_and_maximum(tokenizer: Tokenizer) -> None:
    """A veto leaves the weights bitwise; tokens of older weights have a reason to differ."""
    world = World(tokenizer, optimizer=sgd(0.1))
    batch = world.step().batch
    own = world.cluster.actor.logps(batch)
    sampled = np.argwhere(batch.loss_weight > 0)
    draw = np.random.default_rng(0)

    def changed(count: int, nats: float, stale: bool = False) -> Batch:
        """The first `count` tokens differ by so much; `stale`: they are the old ones, else others are."""
        order = draw.permutation(sampled)
        logps, staleness = own.copy(), np.zeros(batch.shape, np.int32)
        logps[tuple(order[:count].T)] += nats
        staleness[tuple((order[:count] if stale else order[-5:]).T)] = 1
        return replace(batch, sampler_logps=logps, staleness=staleness)

    few = len(sampled) // 20
    assert few >= 3
    refused = {
        "mean": changed(len(sampled) - 5, 0.2),
        "one nat on 5 %, whose mean is within": changed(few, 1.0),
        "one token": changed(1, 11.0),
        "all old ones": changed(len(sampled), 3.0, stale=True),
        "NaN": changed(1, np.nan),
        "inf": changed(1, -np.inf),
    }
    before = params_of(world.trainer)
    for name, bad in refused.items():
        metrics = world.trainer.step(bad)
        assert to_host(metrics)["update_skipped"] == 1, name
        for path, array in world.trainer.params.items():
            assert_array_equal(array, before[path], err_msg=name)
        with pytest.raises(RunError, match=r"the weights are those before the step"):
            check_agreement(metrics, 1)
    for good in (lambda: changed(few, 5e-3), lambda: changed(few, 3.0, stale=True)):
        before = params_of(world.trainer)
        metrics = world.trainer.step(good())
        check_agreement(metrics, 1)
        assert to_host(metrics)["update_skipped"] == 0
        assert any((np.asarray(array) != before[path]).any() for path, array in world.trainer.params.items())
        own = world.cluster.actor.logps(batch)


@pytest.mark.parametrize("policy", often(("skip", "update"), "skip"))
def test_a_step_without_a_mixed_group(tokenizer: Tokenizer, policy: Any) -> None:
    """Adam's moments and weight decay move no weight, and the step counts all the same."""
    alike = [False]

    def reward(completions: Sequence[str]) -> list[float]:
        return [0.1] * len(completions) if alike[0] else even_share(completions)

    optimizer = AdamW(learning_rate=1e-2, weight_decay=0.1)
    world = World(tokenizer, optimizer=optimizer, reward=reward)
    world.settings = replace(world.settings, zero_advantage=policy)
    assert to_host(world.step().metrics)["advantages/abs_max"] > 0.1
    alike[0] = True
    before = jax.tree.map(np.array, world.trainer.state())
    metrics = to_host(world.step().metrics)
    same = jax.tree.leaves(jax.tree.map(np.array_equal, before, jax.tree.map(np.asarray, world.trainer.state())))
    assert metrics["advantages/abs_max"] == 0 and metrics["frac_reward_zero_std"] == 1
    assert world.trainer.step_number == 2
    skips = policy == "skip"
    assert metrics["update_skipped"] == skips
    assert all(same) == skips


def test_rounded_advantages_are_no_signal() -> None:
    """A user's mean of equal rewards may be rounded; NaN is not hidden."""
    rewards, one = np.full((1, 1), 0.7, np.float32), trajectory()
    batch = assemble([[one]], rewards, rewards > 0, like=one, row_tokens=4, num_rows=1)
    for advantage, signal in {0.0: False, 1e-8: False, 1e-5: True, np.nan: True}.items():
        changed = replace(batch, advantages=np.full(batch.shape, advantage, np.float32))
        assert has_signal(changed, rewards) == signal, advantage
    taught = replace(batch, advantages=np.full(batch.shape, 1e-9, np.float32))
    assert has_signal(taught, rewards * np.nan), "of teachers alone"


@pytest.mark.thorough
def test_clocks_of_several_updates(tokenizer: Tokenizer, own_programs: None) -> None:
    """Three parts in two epochs are six updates and one version; the next groups are those of a run with one update."""
    several = World(tokenizer, updates=3, epochs=2, old_logps="trainer", optimizer=sgd(0.0))
    single = World(tokenizer, old_logps="trainer", optimizer=sgd(0.0))
    for number in range(2):
        first, second = several.step(), single.step()
        keys = [[[s.tokens for s in group] for group in result.groups_P] for result in (first, second)]
        assert keys[0] == keys[1]
        assert (several.trainer.step_number, single.trainer.step_number) == (6 * (number + 1), number + 1)
        assert several.cluster.version == single.cluster.version == number + 1
        versions = {v for group in first.groups_P for s in group for v in s.versions}
        assert versions == {-1, number}
        assert to_host(first.metrics)["num_tokens"] == to_host(second.metrics)["num_tokens"], "once, as in one epoch"
        assert to_host(first.metrics)["perf/tflops"] > 1.9 * to_host(second.metrics)["perf/tflops"]
    assert len(first.parts) == 3 and {part.shape for part in first.parts} == {(GROUP, ROW)}
    assert several.trainer.num_programs == 4, "a step and one for the statistics of each shape"


def test_later_updates_keep_the_policy_before_the_first_as_the_old_one(tokenizer: Tokenizer) -> None:
    world = World(tokenizer, updates=3, epochs=2, old_logps="trainer", optimizer=sgd(0.05))
    result = world.step()
    metrics, fresh = to_host(result.metrics), World(tokenizer)
    for part in result.parts:
        sampled = part.loss_weight > 0
        before = fresh.cluster.actor.logps(part)
        assert_allclose(part.old_logps[sampled], before[sampled], atol=1e-5)
        assert np.abs(world.cluster.actor.logps(part) - before)[sampled].max() > 1e-2
    assert metrics["approx_kl"] > 1e-5 and metrics["sampling/logp_difference/stale_mean"] > 1e-3
    assert metrics["sampling/logp_difference/mean"] < 1e-4, "of the tokens of the first update alone"


@pytest.mark.thorough
def test_a_veto_of_the_first_update_ends_the_others(tokenizer: Tokenizer) -> None:
    world = World(tokenizer, updates=3, old_logps="trainer", optimizer=sgd(0.1))
    shake(world.trainer.model, seed=1, stddev=0.3)
    before = params_of(world.trainer)
    metrics = world.step().metrics
    for path, array in world.trainer.params.items():
        assert_array_equal(array, before[path], err_msg=path)
    with pytest.raises(RunError, match="sampler and trainer disagree.*those before the step. Look for stale weights"):
        check_agreement(metrics, 1)


@pytest.mark.parametrize(("updates", "epochs"), [(1, 3), (3, 1)])
def test_updates_that_move_the_weights_too_far_are_named(tokenizer: Tokenizer, updates: int, epochs: int) -> None:
    """Not the engine, whose tokens of equal weights agree; a diagnosis of the engine is not asked for."""
    world = World(tokenizer, updates=updates, epochs=epochs, old_logps="trainer", optimizer=sgd(3e3))
    metrics = world.step().metrics
    assert to_host(metrics)["sampling/logp_difference/mean"] < EXACT

    def asked() -> str:
        raise AssertionError("the engine has the right weights")

    with pytest.raises(RunError, match=r"stale_mean .* tokens of equal weights agree .*learning_rate, update_epochs"):
        check_agreement(metrics, 1, asked)


def test_several_updates_need_old_logps() -> None:
    with pytest.raises(ValueError, match="old_logps=self with updates=2 and epochs=1"):
        step_settings(row_tokens=8, num_rows=8, updates=2)
