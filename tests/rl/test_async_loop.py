"""The asynchronous loop: bounds and order on a scripted engine, equality and resume on a real model."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal, assert_array_less

from posttrain.batch import model_inputs
from posttrain.cluster.cluster import Cluster
from posttrain.cluster.reference import Reference
from posttrain.cluster.sync import ColocatedReplica, Shared
from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.errors import ConfigError, RunError
from posttrain.metrics import Timer
from posttrain.reward.rubric import Reward, Rubric
from posttrain.rl import async_loop
from posttrain.rl.async_loop import AsyncLoop, AsyncSettings
from posttrain.rl.collector import RolloutCollector
from posttrain.rl.sampler import IssuedGroup, Sampler, Source
from posttrain.rl.step import StepResult, rl_step
from posttrain.rollout.engine import NativeEngine
from posttrain.rollout.trajectory import Trajectory
from posttrain.rollout.types import Completion, SamplingParams
from posttrain.runtime.event_loop import run_async
from posttrain.train.checkpoint import Checkpointer
from tests.often import often
from tests.rl.helpers import InOrder, example
from tests.rl.test_step import GROUP, ROW, World, params_of
from tests.tiny import sgd

PER_STEP = 3
PROMPTS = [f"{n}+{n % 7}=" for n in range(40)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("bytes")


@pytest.fixture(scope="module")
def world(tokenizer: Tokenizer) -> World:
    return one_world(tokenizer)


def one_world(tokenizer: Tokenizer) -> World:
    """One trainer and one engine, and so one set of programs, for all runs."""
    world = World(tokenizer, optimizer=sgd(0.5), old_logps="trainer")
    world.settings = replace(world.settings, stale=True)
    engine = NativeEngine(
        world.trainer.model, slots=8, max_length=ROW, decode_steps=2, tokenizer_decode=tokenizer.decode
    )
    world.sampler = replace(world.sampler, engine=engine)
    return world


def settings(**changes: Any) -> AsyncSettings:
    plain: dict[str, Any] = {"max_staleness": 1, "in_flight": False, "in_turns": False, "stall_s": 60.0}
    plain["in_rounds"] = not changes.get("in_flight", False)
    return AsyncSettings(**plain | {"num_versions": 1000} | changes)


class Scripted:
    """Engine of a few slots whose tokens each take some time, under the version of the moment."""

    def __init__(self, slots: int, delays: Iterator[float]):
        self.version, self.delays = 0, delays
        self._slots = asyncio.Semaphore(slots)

    async def generate(self, prompt: Sequence[int], params: SamplingParams) -> Completion:
        async with self._slots:
            versions = []
            for _ in range(params.key[0] % 3 + 1):
                versions.append(self.version)
                await asyncio.sleep(next(self.delays))
        zeros = (0.0,) * len(versions)
        tokens = (params.key[1] % 250,) * len(versions)
        return Completion(
            tokens=tokens,
            logps=zeros,
            kept_logps=zeros,
            truncation_logps=zeros,
            stop="length",
            weights_versions=tuple(versions),
        )

    def update_weights(self, model: Any, version: int) -> None:
        self.version = version

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Slow(Sampler):
    """Sampler whose environment takes some time before every sample, and answers after a first turn."""

    delays: Iterator[float]
    turns: int = 1

    async def rollout(self, group: IssuedGroup, sample: int) -> Trajectory:
        for _ in range(self.turns - 1):
            await asyncio.sleep(next(self.delays))
            pending = self.pending(group, sample)
            await self.engine.generate(pending.prompt, pending.params)
        await asyncio.sleep(next(self.delays))
        return await super().rollout(group, sample)


def jitter(seed: int, longest_s: float) -> Iterator[float]:
    draw = random.Random(seed)
    return (draw.random() ** 4 * longest_s for _ in count())


class ScriptedRun:
    """Loop on a scripted engine, with a learning half that only takes its time."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch, way: AsyncSettings, slots: int, seed: int):
        delays = jitter(seed, 2e-3)
        self.learned: list[list[Trajectory]] = []
        self.learned_at: list[float] = []

        async def timed(completions: Sequence[str]) -> list[float]:
            await asyncio.sleep(next(delays))
            return [1.0 for _ in completions]

        def learn(cluster: Any, algorithm: Any, acted: Any, *_: Any) -> StepResult:
            assert acted.version == cluster.version
            self.learned.append([sample for group in acted.groups_P for sample in group])
            time.sleep(next(delays))
            self.learned_at.append(time.perf_counter())
            return StepResult(metrics={}, groups_P=acted.groups_P, rewards=acted.rewards, advantages_PG=None, parts=())

        monkeypatch.setattr(async_loop, "learn", learn)
        self.engine = Scripted(slots, delays)
        sampler = Slow(**vars(world.sampler) | {"engine": self.engine}, delays=delays)
        self._world, self._way = world, way
        self.start(acting(sampler, Rubric([Reward(function=timed, weight=1.0, timeout_s=60.0)])))

    def start(self, act: RolloutCollector) -> None:
        world, self.collector = self._world, act
        cluster = Cluster(world.trainer, self.engine, Shared(world.trainer), reference=None)
        self.loop = AsyncLoop(cluster, world.algorithm, act, world.settings, self._way)

    def run(self, steps: int) -> list[StepResult]:
        with self.loop:
            return [self.loop.step(Timer()) for _ in range(steps)]


def acting(sampler: Sampler, rubric: Rubric, issued: int = 0) -> RolloutCollector:
    examples = [example(n, text) for n, text in enumerate(PROMPTS * 20)]
    source = Source(InOrder(), examples)
    return RolloutCollector(
        sampler=sampler,
        rubric=rubric,
        source=source,
        group_size=GROUP,
        groups_per_step=PER_STEP,
        steps_per_version=1,
    )


@pytest.mark.few(2)
@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("staleness", often((0, 1, 2, 4), 0, 2))
def test_groups_are_learned_from_in_order_and_within_the_bound(
    world: World, monkeypatch: pytest.MonkeyPatch, staleness: int, in_flight: bool
) -> None:
    """Turned red by: steps that take whoever is first; groups begun one step too early; a hand-over without a drain."""
    steps = 12
    mixed = 0
    for seed, slots in enumerate((1, 4, 64)):
        way = settings(max_staleness=staleness, in_flight=in_flight, num_versions=steps)
        run = ScriptedRun(world, monkeypatch, way, slots, seed)
        run.run(steps)
        numbers = [sample.group for samples in run.learned for sample in samples[::GROUP]]
        assert numbers == list(range(steps * PER_STEP))
        assert run.collector.source.issued == steps * PER_STEP, "none is begun for steps after the last"
        for step, samples in enumerate(run.learned):
            versions = {version for sample in samples for version in sample.versions if version >= 0}
            assert step - staleness <= min(versions) and max(versions) <= step
            mixed += len(versions) > 1
            if not in_flight:
                assert versions == {max(0, step - staleness)}
    assert (mixed > 0) == (in_flight and staleness > 0)


def test_seconds_of_trainer_and_sampler_add_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second is somebody's: bounds by the clock at both sides of it, with no tolerance for a busy machine."""
    run, told, returned = ScriptedRun(world, monkeypatch, settings(), 4, 0), [], []
    before = time.perf_counter()
    with run.loop:
        entered = time.perf_counter()
        for _ in range(5):
            told.append(run.loop.step(Timer()).metrics)
            returned.append(time.perf_counter())
    trainer = [one["async/wait_for_rollouts_s"] + one["async/learn_s"] + one["async/between_steps_s"] for one in told]
    sampler = [one["async/sample_s"] + one["async/wait_for_trainer_s"] for one in told]
    np.testing.assert_allclose(trainer, sampler)
    assert_array_less(np.asarray(run.learned_at) - entered, np.cumsum(trainer))
    assert_array_less(np.cumsum(trainer), np.asarray(returned) - before)
    assert all(0 <= one[f"async/idle_ratio/{who}"] <= 1 for one in told for who in ("trainer", "sampler"))
    assert all(one["async/wait_for_trainer_s"] >= 0 for one in told)
    assert told[0]["async/in_flight"] == 2 * PER_STEP and told[1]["async/in_flight"] >= PER_STEP


def test_reward_models_score_a_whole_step(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their rows are padded to a step, and their programs may not run beside the engine's."""
    run, calls = ScriptedRun(world, monkeypatch, settings(), 64, 0), []

    def model(samples: Sequence[Trajectory]) -> list[float]:
        calls.append([sample.group for sample in samples])
        return [float(sample.group) for sample in samples]

    rewards = [*run.collector.rubric.rewards, Reward(function=model, weight=1.0, timeout_s=None)]
    run.start(replace(run.collector, rubric=Rubric(rewards)))
    results = run.run(3)
    assert calls == [[n for n in range(s * PER_STEP, (s + 1) * PER_STEP) for _ in range(GROUP)] for s in range(3)]
    assert [result.rewards.total_PG[0, 0] for result in results] == [1.0, 4.0, 7.0]


def test_a_stall_names_the_groups_and_what_they_await(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.runtime.event_loop.WATCH_S", 0.05)
    run = ScriptedRun(world, monkeypatch, settings(stall_s=0.3, max_staleness=0), 64, 0)

    async def silent(prompt: Any, params: Any) -> Any:
        await asyncio.sleep(60.0)

    monkeypatch.setattr(run.engine, "generate", silent)
    with pytest.raises(RunError, match=r"nothing was sampled or scored for 0.3 s: groups 0-2 await the engine; look"):
        run.run(1)


def test_a_failure_ends_the_step(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of a group of a later step."""
    run = ScriptedRun(world, monkeypatch, settings(), 64, 0)
    whole = run.engine.generate
    calls = count()

    async def failing(prompt: Any, params: Any) -> Any:
        if next(calls) == PER_STEP * GROUP + 5:
            raise ConfigError("the engine has no more")
        return await whole(prompt, params)

    monkeypatch.setattr(run.engine, "generate", failing)
    with pytest.raises(ConfigError, match="the engine has no more"):
        run.run(3)


class Run:
    """Run from the first weights on, by an asynchronous loop or in step."""

    def __init__(self, world: World, way: AsyncSettings, delays: Iterator[float] | None = None):
        self.trainer, self.algorithm, self.settings = world.trainer, world.algorithm, world.settings
        if not hasattr(world, "first"):
            world.first = jax.tree.map(jnp.copy, world.trainer.state())  # type: ignore[attr-defined]
        self.trainer.restore(jax.tree.map(jnp.copy, world.first), 0)  # type: ignore[attr-defined]
        ahead = way.max_staleness > 0 and not way.in_flight
        replica = ColocatedReplica(self.trainer) if ahead else Shared(self.trainer)
        self.cluster = Cluster(self.trainer, world.sampler.engine, replica, reference=Reference(self.trainer))
        self.cluster.sync_weights(self.cluster.version)
        slow = None if delays is None else Slow(**vars(world.sampler), delays=delays, turns=2)
        self.collector = acting(world.sampler if slow is None else slow, world.rubric)
        self.loop = AsyncLoop(self.cluster, self.algorithm, self.collector, self.settings, way)

    def steps(self, count: int) -> list[StepResult]:
        with self.loop:
            return [self.loop.step(Timer()) for _ in range(count)]

    def in_step(self, count: int) -> list[StepResult]:
        return [
            run_async(rl_step(self.cluster, self.algorithm, self.collector, self.settings, Timer()))
            for _ in range(count)
        ]


def assert_same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    for path, array in wanted.items():
        assert_array_equal(found[path], array, err_msg=path)


def tokens_of(results: Sequence[StepResult]) -> list[list[int]]:
    return [list(sample.tokens) for result in results for group in result.groups_P for sample in group]


def test_without_staleness_it_is_the_step(world: World) -> None:
    """Turned red by: groups of the next step begun before the hand-over."""
    run = Run(world, settings(max_staleness=0))
    tokens, params, programs = tokens_of(run.steps(3)), params_of(world.trainer), world.trainer.num_programs
    plain = Run(world, settings())
    assert tokens_of(plain.in_step(3)) == tokens
    assert_same(params_of(world.trainer), params)
    assert world.trainer.num_programs == programs


def test_without_in_flight_a_run_does_not_depend_on_time(world: World) -> None:
    """Turned red by: a hand-over before all are sampled. Turns in rounds: tests/rl/test_rounds.py."""
    found = []
    for seed in range(2):
        results = Run(world, settings(max_staleness=2), jitter(seed, 0.02 * seed)).steps(4)
        versions = [{v for group in r.groups_P for s in group for v in s.versions if v >= 0} for r in results]
        assert versions == [{0}, {0}, {0}, {1}]
        logps = [list(sample.logps) for result in results for group in result.groups_P for sample in group]
        found.append((tokens_of(results), logps, params_of(world.trainer)))
    for tokens, logps, params in found[1:]:
        assert tokens == found[0][0] and logps == found[0][1]
        assert_same(params, found[0][2])


def test_every_token_has_the_version_that_sampled_it(world: World) -> None:
    """Before the weights change within a sample, its log-probabilities are those of a forward pass under its version.
    Turned red by: versions stamped when a sample begins; an engine that goes on during the update."""
    run = Run(world, settings(in_flight=True, in_turns=True))
    weights, changed = [jax.tree.map(jnp.copy, world.trainer.weights)], 0
    with run.loop:
        for step in range(5):
            result = run.loop.step(Timer())
            weights.append(jax.tree.map(jnp.copy, world.trainer.weights))
            batch, samples = result.batch, [sample for group in result.groups_P for sample in group]
            inputs = model_inputs(batch)
            scored = [np.asarray(world.trainer.stats(inputs, w).logps) for w in weights[:-1]]
            for sample in samples:
                versions = [v for v in sample.versions if v >= 0]
                assert step - 1 <= min(versions) and versions == sorted(versions) and max(versions) <= step
                changed += len({*versions}) > 1
                row, start = place_of(batch, sample)
                first = [at for at, v in enumerate(sample.versions) if v == versions[0]]
                own = scored[versions[0]][row, start + first[0] : start + first[-1] + 1]
                np.testing.assert_allclose(own, np.asarray(sample.logps)[first], atol=1e-4)
    assert changed > 0


def place_of(batch: Any, sample: Trajectory) -> tuple[int, int]:
    """Row and position of a sample in a batch."""
    tokens, segments = np.asarray(batch.tokens), np.asarray(batch.segments)
    for row in range(len(tokens)):
        for segment in range(1, segments[row].max() + 1):
            at = np.flatnonzero(segments[row] == segment)
            if tokens[row, at].tolist() == list(sample.tokens):
                return row, int(at[0])
    raise AssertionError("the sample is in no row")


@pytest.mark.few(1)
@pytest.mark.parametrize("in_flight", [False, True])
def test_a_run_resumes_from_its_state(world: World, tmp_path: Path, in_flight: bool) -> None:
    """A checkpoint holds the groups that are ahead: bitwise without `in_flight`, else the same groups in the same
    order. Turned red by: the source's position saved ahead of the queue; samples under way that begin anew."""
    way = settings(in_flight=in_flight, in_turns=in_flight)
    wanted = tokens_of(Run(world, way).steps(4))
    whole, killed = params_of(world.trainer), Run(world, way)
    first: list[Any] = []
    with killed.loop, Checkpointer(tmp_path) as checkpointer:
        # With `in_flight` until a step ends while samples are under way, which is a matter of time.
        while len(first) < 2 or (in_flight and len(first) < 20 and not host["ahead"]["turns"]["turns"]):
            first.append(killed.loop.step(Timer()))
            source, ahead = killed.collector.source.state(), killed.loop.state()
            host = {"source": source, "ahead": ahead, "version": killed.cluster.version}
        checkpointer.save(len(first), world.trainer.state(), host)
        checkpointer.wait()
        killed.loop.step(Timer())
    resumed = Run(world, way)
    with Checkpointer(tmp_path) as checkpointer:
        state, host = checkpointer.restore(len(first), world.trainer.state())
    world.trainer.restore(state, len(first))
    resumed.collector.source.restore(host["source"])
    resumed.cluster.version = host["version"]
    resumed.cluster.sync_weights(resumed.cluster.version)
    resumed.loop.restore(host["ahead"])
    rest = resumed.steps(2)
    numbers = [group[0].group for result in [*first, *rest] for group in result.groups_P]
    assert numbers == list(range((len(first) + 2) * PER_STEP))
    if not in_flight:
        assert tokens_of([*first, *rest]) == wanted
        assert_same(params_of(world.trainer), whole)
    samples = {
        resumed.collector.sampler.params(sample.group, sample.sample).key: sample
        for result in rest
        for group in result.groups_P
        for sample in group
    }
    start, turns = 0, host["ahead"]["turns"]
    assert bool(turns["turns"]) == in_flight
    for turn in turns["turns"]:
        # What was sampled before the checkpoint is the beginning of what is learned from.
        sample, before, end = samples[tuple(turn["key"])], len(turn["prompt"]), start + turn["length"]
        for name, values in (("tokens", sample.tokens), ("weights_versions", sample.versions)):
            assert list(values)[before : before + turn["length"]] == turns["tokens"][name][start:end].tolist()
        start = end


def test_the_engine_rests_between_steps(world: World) -> None:
    """Evaluations use it from another event loop, and change no sample of training."""
    Run(world, settings()).steps(3)
    wanted, run = params_of(world.trainer), Run(world, settings())
    params = run.collector.sampler.params(10**6, 0)
    with run.loop:
        for _ in range(3):
            run.loop.step(Timer())
            run.loop.settle()
            run_async(run.cluster.engine.generate([5, 6, 7], params))
            run.cluster.engine.forget_prompts()
    assert_same(params_of(world.trainer), wanted)


@dataclass(frozen=True, kw_only=True)
class Behind(Sampler):
    """Sampler whose environment answers only when the step before has learned."""

    learned: Sequence[Any]

    async def rollout(self, group: IssuedGroup, sample: int) -> Trajectory:
        while len(self.learned) < group.number // PER_STEP:
            await asyncio.sleep(1e-3)
        return await super().rollout(group, sample)


@pytest.mark.parametrize("staleness", [1, 2])
def test_latency_of_environments_is_hidden(world: World, monkeypatch: pytest.MonkeyPatch, staleness: int) -> None:
    """With weights in flight environments wait beside the update before theirs; a run that waited for them stalls."""
    monkeypatch.setattr("posttrain.runtime.event_loop.WATCH_S", 0.05)
    way = settings(max_staleness=staleness, in_flight=True, in_turns=True, stall_s=20.0)
    run = ScriptedRun(world, monkeypatch, way, 64, 0)
    behind = Behind(**vars(world.sampler) | {"engine": run.engine}, learned=run.learned)
    run.start(acting(behind, run.collector.rubric))
    assert len(run.run(6)) == 6
