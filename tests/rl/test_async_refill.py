"""Dynamic sampling ahead of the trainer: the waves of a step are those of the synchronous one, whatever takes long."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.errors import ConfigError
from posttrain.metrics import Timer, to_host
from posttrain.reward.rubric import Reward, Rubric
from posttrain.rl.advantages import is_mixed
from posttrain.rl.async_loop import AsyncLoop, AsyncSettings
from posttrain.rl.collector import Refill
from posttrain.rl.sampler import Curriculum, Source
from posttrain.rl.step import StepResult
from posttrain.train.checkpoint import Checkpointer
from tests.often import often
from tests.rl.helpers import InOrder, example
from tests.rl.test_async_loop import (
    PER_STEP,
    PROMPTS,
    Run,
    ScriptedRun,
    assert_same,
    jitter,
    one_world,
    settings,
    tokens_of,
)
from tests.rl.test_step import World, params_of

LIMIT = 2
TIMED = ("timing_s/", "async/", "memory/", "sync/", "step_time", "perf/")


@pytest.fixture(scope="module")
def world() -> World:
    tokenizer: Tokenizer = load_tokenizer("bytes")
    return one_world(tokenizer)


def halves(trajectories: Sequence[Any], **_: Any) -> list[float]:
    """Passes with a chance by prompt: some groups are mixed, some not."""
    return [float((sum(t.tokens) + t.sample) % 8 < t.example.index % 9) for t in trajectories]


class Refilled(Run):
    """Run with dynamic sampling and a curriculum."""

    def __init__(
        self, world: World, way: AsyncSettings, delays: Iterator[float] | None = None, *, updates: int = 1
    ) -> None:
        super().__init__(world, way, delays)
        examples = [example(n, text) for n, text in enumerate(PROMPTS)]
        curriculum = Curriculum(
            len(examples), pools=(0.0, 0.3, 0.7, 1.0), shares=(0.2, 0.6, 0.2), decay=0.5, pass_above=0.5, seed=5
        )
        rubric = Rubric([Reward(function=halves, weight=1.0, timeout_s=60.0)])
        source = Source(InOrder(), examples, curriculum)
        refill = Refill(limit=LIMIT, keep=is_mixed)
        self.collector = replace(self.collector, rubric=rubric, source=source, refill=refill, pass_above=0.5)
        self.settings = replace(self.settings, updates=updates)
        self.loop = AsyncLoop(self.cluster, self.algorithm, self.collector, self.settings, way)


def told(results: Sequence[StepResult]) -> list[dict[str, float]]:
    """Metrics of steps, without those of time."""
    return [
        {name: value for name, value in to_host(result.metrics).items() if not name.startswith(TIMED)}
        for result in results
    ]


def assert_told(found: Sequence[StepResult], wanted: Sequence[StepResult]) -> None:
    for ours, theirs in zip(told(found), told(wanted), strict=True):
        assert ours.keys() == theirs.keys()
        np.testing.assert_array_equal(list(ours.values()), list(theirs.values()))


def numbers_of(results: Sequence[StepResult]) -> list[list[int]]:
    return [[group[0].group for group in result.groups_P] for result in results]


@pytest.mark.thorough
@pytest.mark.parametrize("updates", often((1, 2), 2))
def test_without_staleness_it_is_the_synchronous_refill(world: World, updates: int) -> None:
    """Bitwise, with the same draws and metrics. Turned red by: a wave begun before the rewards of the one before are
    taken note of; metrics of the curriculum read at another time."""
    plain = Refilled(world, settings(), updates=updates)
    wanted, params = plain.in_step(4), params_of(world.trainer)
    run = Refilled(world, settings(max_staleness=0), updates=updates)
    found = run.steps(4)
    assert numbers_of(found) == numbers_of(wanted) and tokens_of(found) == tokens_of(wanted)
    assert_told(found, wanted)
    assert_same(params_of(world.trainer), params)
    assert run.collector.source.state() == plain.collector.source.state()
    waves = [line["sampling/refill/waves"] for line in told(found)]
    assert max(waves) == LIMIT and {len(result.parts) for result in found} == {updates}


@pytest.mark.thorough
def test_what_is_sampled_depends_on_no_clock(world: World) -> None:
    """Also how many groups each step begins, and which prompts the curriculum draws for them."""
    found = []
    for seed in range(3):
        run = Refilled(world, settings(max_staleness=2), jitter(seed, 0.02 * seed))
        results = run.steps(5)
        for step, result in enumerate(results):
            versions = {v for group in result.groups_P for s in group for v in s.versions if v >= 0}
            assert versions == {max(0, step - 2)}, "every wave of a step is sampled by one version"
        found.append((results, run.collector.source.state(), params_of(world.trainer)))
    for results, source, params in found[1:]:
        assert tokens_of(results) == tokens_of(found[0][0]) and source == found[0][1]
        assert_told(results, found[0][0])
        assert_same(params, found[0][2])
    drawn = [{group[0].example.index for group in result.groups_P} for result in found[0][0]]
    assert len(set().union(*drawn)) > PER_STEP


@pytest.mark.few(1)
@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("staleness", often((0, 1, 3), 1))
def test_each_group_comes_once_and_within_the_bound(
    world: World, monkeypatch: pytest.MonkeyPatch, staleness: int, in_flight: bool
) -> None:
    """Of the groups of a scripted engine every third is useful."""
    steps = 8
    for seed, slots in enumerate((1, 4, 64)):
        way = settings(max_staleness=staleness, in_flight=in_flight, num_versions=steps)
        run = ScriptedRun(world, monkeypatch, way, slots, seed)

        def third(trajectories: Sequence[Any], **_: Any) -> list[float]:
            return [float(one.group % 3 == 0 and one.sample == 0) for one in trajectories]

        rubric = Rubric([*run.collector.rubric.rewards, Reward(function=third, weight=1.0, timeout_s=60.0)])
        run.start(replace(run.collector, rubric=rubric, refill=Refill(limit=LIMIT, keep=is_mixed)))
        results = run.run(steps)
        numbers = numbers_of(results)
        assert sorted(n for step in numbers for n in step) == list(range(run.collector.source.issued))
        for step, (result, samples) in enumerate(zip(results, run.learned, strict=True)):
            useful = [number for number in numbers[step] if number % 3 == 0]
            assert len(useful) <= PER_STEP <= len(numbers[step]) and numbers[step] == sorted(numbers[step])
            versions = {version for sample in samples for version in sample.versions if version >= 0}
            assert step - staleness <= min(versions) and max(versions) <= step
            if not in_flight:
                assert versions == {max(0, step - staleness)}
            assert result.rewards.total_PG.shape[0] == len(numbers[step])


@pytest.mark.thorough
@pytest.mark.parametrize("in_flight", [False, True])
def test_a_run_resumes_from_its_state(world: World, tmp_path: Path, in_flight: bool) -> None:
    """In the middle it ends as never stopped, bitwise without `in_flight`, else with each group once. Turned red by:
    rewards of which the curriculum takes note twice, or not at all."""
    way = settings(max_staleness=2, in_flight=in_flight, in_turns=in_flight)
    whole = Refilled(world, way)
    wanted, params = whole.steps(6), params_of(world.trainer)
    killed = Refilled(world, way)
    with killed.loop, Checkpointer(tmp_path) as checkpointer:
        first = [killed.loop.step(Timer()) for _ in range(3)]
        host = {
            "source": killed.collector.source.state(),
            "ahead": killed.loop.state(),
            "version": killed.cluster.version,
        }
        checkpointer.save(3, world.trainer.state(), host)
        checkpointer.wait()
        killed.loop.step(Timer())
    resumed = Refilled(world, way)
    with Checkpointer(tmp_path) as checkpointer:
        state, host = checkpointer.restore(3, world.trainer.state())
    world.trainer.restore(state, 3)
    resumed.collector.source.restore(host["source"])
    resumed.cluster.version = host["version"]
    resumed.cluster.sync_weights(resumed.cluster.version)
    resumed.loop.restore(host["ahead"])
    rest = [*first, *resumed.steps(3)]
    numbers = [number for step in numbers_of(rest) for number in step]
    assert len({*numbers}) == len(numbers) and {*numbers} <= {*range(resumed.collector.source.issued)}
    if not in_flight:
        assert numbers_of(rest) == numbers_of(wanted) and tokens_of(rest) == tokens_of(wanted)
        assert_told(rest, wanted)
        assert_same(params_of(world.trainer), params)
        assert json.dumps(resumed.collector.source.state()) == json.dumps(whole.collector.source.state())


def test_a_filter_that_fails_ends_the_step(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a wave of a later step, and without a deadlock."""
    run, calls = ScriptedRun(world, monkeypatch, settings(max_staleness=1), 64, 0), count()

    def keep(rewards_PG: np.ndarray) -> np.ndarray:
        if next(calls) == 4:
            raise ConfigError("refill.keep: no more")
        return np.ones(len(rewards_PG), bool)

    rubric = Rubric([Reward(function=halves, weight=1.0, timeout_s=60.0)])
    run.start(replace(run.collector, rubric=rubric, refill=Refill(limit=1, keep=keep)))
    with pytest.raises(ConfigError, match="no more"):
        run.run(6)
