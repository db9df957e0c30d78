"""Dynamic sampling: waves of groups until enough are useful, whatever the engine's timing; short at the bound."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from posttrain.config import SamplingSection
from posttrain.config.locator import user_object
from posttrain.data.chat import Renderer
from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.errors import ConfigError
from posttrain.metrics import Timer, to_host
from posttrain.reward.function import Reward
from posttrain.reward.rubric import Rubric
from posttrain.reward.types import Rewards
from posttrain.rl.algorithms import GroupFilter, filter_of, is_mixed
from posttrain.rl.collector import Refill, RolloutCollector, ScoredRollouts
from posttrain.rl.metrics import group_metrics
from posttrain.rl.sampler import Sampler
from posttrain.rl.step import compute_advantages, rl_step
from posttrain.rollout.engine import NativeEngine
from posttrain.rollout.types import Completion, SamplingParams
from posttrain.runtime.event_loop import run_async
from tests.often import often
from tests.rl.helpers import collector, example, groups, make_algorithm
from tests.rl.test_step import GROUP, World, params_of
from tests.tiny import sgd, tiny_model

WANTED, NEW = 4, 12
ALGORITHM = make_algorithm("grpo", max_tokens=NEW)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("bytes")


@pytest.fixture(scope="module")
def sampler(tokenizer: Tokenizer) -> Sampler:
    engine = NativeEngine(
        tiny_model(num_layers=1, windows=(None,), vocab_size=tokenizer.vocab_size),
        slots=12,
        max_length=48,
        decode_steps=2,
        tokenizer_decode=tokenizer.decode,
    )
    return Sampler(
        engine=engine,
        renderer=Renderer(tokenizer, False),
        sampling=SamplingSection(max_tokens=NEW, ignore_eos=True, stop_token_ids=tuple(range(0, 260, 9))),
        max_prompt_tokens=24,
        seed=3,
    )


def rubric(mixed: Callable[[int], bool]) -> Rubric:
    """Different rewards in the groups of these numbers, else all 0; each logs the number of its group."""

    def scripted(trajectories: Sequence[Any], log_metric: Any, log_extra: Any, **_: Any) -> list[float | None]:
        for one in trajectories:
            log_metric("group", one.group)
        log_extra("group", [one.group for one in trajectories])
        return [float(one.sample > 0 and mixed(one.group)) for one in trajectories]

    return Rubric([Reward(function=scripted, weight=1.0, timeout_s=60.0)])


def acting(sampler: Sampler, mixed: Callable[[int], bool], limit: int, **changes: Any) -> RolloutCollector:
    plain = collector(sampler, rubric(mixed), [example(n, "ab" * (n % 5 + 1)) for n in range(64)], 2)
    refill = Refill(limit=limit, keep=is_mixed)
    return replace(plain, groups_per_step=WANTED, refill=refill, pass_above=0.5, **changes)


def run(step: RolloutCollector, version: int = 0) -> ScoredRollouts:
    return run_async(step(version, "step", Timer()))


def numbers(acted: ScoredRollouts) -> list[int]:
    return [group[0].group for group in acted.groups_P]


@pytest.mark.thorough
def test_missing_groups_are_begun_in_waves(sampler: Sampler) -> None:
    """Of groups 0 to 3 two are mixed, of 4 and 5 one, then 6 is not and 7 is."""
    useful = {0, 3, 4, 7}
    step = acting(sampler, useful.__contains__, limit=3)
    acted = run(step)
    assert numbers(acted) == list(range(8)) and step.source.issued == 8
    assert acted.useful_P is not None and acted.useful_P.tolist() == [n in useful for n in range(8)]
    assert acted.metrics["sampling/refill/waves"] == 3 and acted.metrics["sampling/refill/short"] == 0
    assert acted.metrics["sampling/refill/groups"] == len(acted.groups_P) - WANTED
    assert (acted.metrics["frac_mixed"], acted.metrics["frac_all_bad"]) == (0.5, 0.5)
    assert acted.metrics["pass_rate"] == 4 / 16
    # Rewards of four calls are those of one.
    assert acted.rewards.metrics["rewards/scripted/group"].value() == 3.5
    assert acted.rewards.extras["group"] == [n for n in range(8) for _ in range(2)]
    again = run(step)
    assert numbers(again)[:4] == [8, 9, 10, 11], "the next step goes on with the next prompts"


@pytest.mark.thorough
def test_a_short_step_says_so(sampler: Sampler) -> None:
    """Numbers 1, 4, 9, ... are mixed: two of the first four and one of the first wave's."""
    for limit, kept, issued in ((1, [0, 1, 4], 6), (2, [0, 1, 4], 7), (5, [0, 1, 4, 9], 10)):
        step = acting(sampler, lambda n: round(n**0.5) ** 2 == n, limit=limit)
        acted = run(step)
        signal = compute_advantages(ALGORITHM, acted, None)
        assert [group[0].group for group in signal.kept_P] == kept
        assert acted.metrics["sampling/refill/short"] == WANTED - len(kept)
        assert step.source.issued == issued == WANTED + acted.metrics["sampling/refill/groups"]
        assert acted.metrics["sampling/refill/waves"] <= limit


class Delayed:
    """An engine whose completions come in another order."""

    def __init__(self, engine: Any, seed: int):
        self._engine, self._draw = engine, np.random.default_rng(seed)

    async def generate(self, prompt: Sequence[int], params: SamplingParams) -> Completion:
        await asyncio.sleep(self._draw.random() * 0.02)
        made: Completion = await self._engine.generate(prompt, params)
        await asyncio.sleep(self._draw.random() * 0.02)
        return made

    def update_weights(self, model: Any, version: int) -> None: ...

    def close(self) -> None: ...


def test_what_is_sampled_depends_on_no_clock(sampler: Sampler) -> None:
    found = []
    for seed in (None, 0, 1):
        engine = sampler.engine if seed is None else Delayed(sampler.engine, seed)
        step = acting(replace(sampler, engine=engine), lambda n: n % 3 == 1, limit=4)
        acted = [run(step), run(step)]
        tokens = [[[sample.tokens for sample in group] for group in one.groups_P] for one in acted]
        found.append((tokens, [one.useful_P.tolist() for one in acted if one.useful_P is not None]))
    assert len(found[0][1]) == 2 and all(one == found[0] for one in found)


@pytest.mark.parametrize("zero_advantage", often(("skip", "update"), "skip"))
def test_a_step_without_a_useful_group_changes_nothing(
    tokenizer: Tokenizer, own_programs: None, zero_advantage: Any
) -> None:
    world = World(tokenizer, optimizer=sgd(0.1), old_logps="trainer")
    prompts = [example(n, "1+1=") for n in range(16)]
    step = collector(world.sampler, world.rubric, prompts, GROUP)
    wanted = {"groups_per_step": 3}
    none = replace(step, refill=Refill(limit=2, keep=lambda rewards: np.zeros(len(rewards), bool)), **wanted)
    before = params_of(world.trainer)
    settings = replace(world.settings, zero_advantage=zero_advantage)
    result = run_async(rl_step(world.cluster, world.algorithm, none, settings, Timer()))
    metrics = to_host(result.metrics)
    assert metrics["update_skipped"] == 1 and metrics["groups/kept"] == 0 and metrics["groups/filtered"] == 9
    assert result.advantages_PG is not None and np.isnan(result.advantages_PG).all()
    for path, array in world.trainer.params.items():
        assert_array_equal(array, before[path], err_msg=path)
    filtered = replace(world.algorithm, filter=lambda rewards: np.zeros(len(rewards), bool))
    result = run_async(rl_step(world.cluster, filtered, replace(none, refill=None), settings, Timer()))
    metrics = to_host(result.metrics)
    assert metrics["update_skipped"] == 1 and metrics["groups/kept"] == 0 and metrics["groups/filtered"] == 3
    for path, array in world.trainer.params.items():
        assert_array_equal(array, before[path], err_msg=path)
    # The same shapes as of a whole step: one program.
    some = replace(none, refill=Refill(limit=1, keep=lambda rewards: np.arange(len(rewards)) % 2 == 0))
    result = run_async(rl_step(world.cluster, world.algorithm, some, settings, Timer()))
    metrics = to_host(result.metrics)
    assert metrics["update_skipped"] == 0 and metrics["groups/kept"] == 3 and metrics["groups/filtered"] == 1
    assert world.trainer.num_programs == 2


def test_rewards_of_several_calls_are_joined() -> None:
    def picky(completions: Sequence[str], log_metric: Any, log_extra: Any) -> list[float | None]:
        if "boom" in completions:
            raise ValueError("boom")
        log_metric("length", len(completions[0]))
        if len(completions) > 2:
            log_extra("text", list(completions))
        return [None if text == "none" else float(len(text)) for text in completions]

    made = Rubric([Reward(function=picky, weight=2.0, timeout_s=60.0)])
    texts = [[["a", "bb"], ["ccc", "none"]], [["d", "boom"]], [["ee", "f"]]]
    whole = [group for part in texts for group in part]

    async def score() -> Any:
        return Rewards.concatenated([await made.score(groups(part)) for part in texts]), await made.score(groups(whole))

    parts, once = run_async(score())
    assert_array_equal(parts.total_PG, once.total_PG)
    assert_array_equal(parts.parts_PG["picky"], once.parts_PG["picky"])
    assert [(e.prompt, e.sample) for e in parts.errors] == [(e.prompt, e.sample) for e in once.errors] == [(2, 1)]
    assert parts.metrics["rewards/picky/length"].value() == pytest.approx(4 / 3), (
        "of the calls that succeeded, by samples"
    )
    assert parts.extras == {"text": ["a", "bb", "ccc", "none", None, None, None, None]}


def test_shares_of_groups_add_up() -> None:
    nan = np.nan
    rewards = np.asarray([[0, 1], [1, 1], [0, 0], [nan, 1], [nan, nan], [0.4, 0.4]])
    found = group_metrics(rewards, pass_above=0.5)
    assert found == pytest.approx({"frac_mixed": 0.2, "frac_all_good": 0.4, "frac_all_bad": 0.4, "pass_rate": 4 / 9})
    assert group_metrics(rewards, pass_above=0.3)["frac_all_good"] == pytest.approx(0.6)
    assert all(np.isnan(value) for value in group_metrics(np.full((2, 2), nan), 0.5).values())


OWN = """
high = lambda r: r.mean(axis=1) > 0.6
each = lambda r: r
numbers = lambda r: r.sum(axis=1)
one = lambda r: True
"""


def test_a_filter_of_ones_own_is_checked(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)

    def keep(name: str) -> GroupFilter:
        return filter_of(user_object(f"own.py:{name}", tmp_path), "refill.keep", group_size=2)

    assert keep("high")(np.asarray([[0.0, 1.0], [1.0, 1.0]])).tolist() == [False, True]
    for wrong in ("each", "numbers", "one"):
        with pytest.raises(ConfigError, match=f"refill.keep: own.py:{wrong} must return true or false for each of the"):
            keep(wrong)
