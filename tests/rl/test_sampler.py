"""Partial rollouts: samples that a step leaves go on at a later one, and none that was aborted is learned from."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.config import SamplingSection
from posttrain.data.chat import Renderer
from posttrain.data.tokenizer import load_tokenizer
from posttrain.errors import ConfigError
from posttrain.rl.sampler import (
    IssuedGroup,
    PendingRollout,
    RolloutAborted,
    Sampler,
    collect,
    collect_some,
    due_groups,
    resumable,
    sampling_params,
)
from posttrain.rollout.engine import NativeEngine
from posttrain.rollout.request import Request
from tests.environments.helpers import completion
from tests.rl.helpers import example
from tests.tiny import tiny_model

pytestmark = pytest.mark.fast

NEW, GROUP = 24, 2


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    tokenizer = load_tokenizer("bytes")
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
        # Samples of many lengths: 9 tokens on average.
        sampling=SamplingSection(max_tokens=NEW, ignore_eos=True, stop_token_ids=tuple(range(0, 260, 9))),
        max_prompt_tokens=24,
        seed=3,
    )


def numbered(index: int, version: int = 0) -> IssuedGroup:
    return IssuedGroup(number=index, example=example(index, "ab" * (index + 1)), version=version)


def test_samples_that_are_left_go_on_at_a_later_step(sampler: Sampler) -> None:
    """Of six groups three are enough; the others come later, with the tokens that they would have had at once."""
    groups = [numbered(i) for i in range(6)]
    expected = asyncio.run(collect(sampler, groups, GROUP))
    engine = sampler.engine
    assert isinstance(engine, NativeEngine)

    async def steps() -> None:
        early, left = await collect_some(sampler, groups, GROUP, 0, min_groups=3, per_step=3, max_staleness=1)
        assert len(early) == len(left) == 3 and engine.num_free == engine.slots
        stops = {begun.stop for group in left for begun in group.completions.values()}
        assert "abort" in stops
        again = await collect_some(sampler, groups, GROUP, 0, min_groups=3, per_step=3, max_staleness=1)
        assert again == (early, left), "it does not depend on what was sampled before"
        engine.update_weights(engine._loaded.source.model, 1)
        late, none = await collect_some(sampler, left, GROUP, 1, min_groups=6, per_step=6, max_staleness=1)
        assert none == []
        by_index = {group[0].example.index: group for group in [*early, *late]}
        assert [[t.tokens for t in by_index[i]] for i in range(6)] == [[t.tokens for t in group] for group in expected]
        versions = {version for group in late for t in group for version in t.versions}
        assert versions == {-1, 0, 1}

    asyncio.run(steps())


@pytest.mark.parametrize("skips", [True, False])
def test_the_text_continues_the_prompt(shared: Path, skips: bool) -> None:
    """The first space, and with `skip_special_tokens: false` the special tokens, except for that which stops."""
    tokenizer = load_tokenizer(shared / "models" / "stories260k")
    sampling = SamplingSection(max_tokens=9, stop=("<unk>",), skip_special_tokens=skips)
    prompt = tokenizer.encode("def f(a):\n")
    told = tokenizer.encode("def f(a):\n  return a<s>")[len(prompt) :]
    params = sampling_params(sampling, tokenizer, (0, 0))
    one = replace(example(0, "x"), prompt_tokens=prompt)
    pending = PendingRollout(
        group=IssuedGroup(number=0, example=one, version=0),
        sample=0,
        prompt=prompt,
        params=params,
        renderer=Renderer(tokenizer, False),
    )
    for end in (*tokenizer.stop_ids, *tokenizer.encode("<unk>")):
        assert end in params.ends
        made = pending.finish(completion([*told, end]))
        assert made.text == made.messages[-1]["content"] == "  return a" + ("" if skips else "<s>")


@pytest.mark.parametrize("max_staleness", [1, 3])
@pytest.mark.parametrize("waves", [(), (1,), (2, 1)], ids=["none", "one", "two"])
def test_no_group_waits_longer_than_the_bound(max_staleness: int, waves: tuple[int, ...]) -> None:
    """Steps that return two groups of all that are begun, of which an adversary finishes the newest that it may; then
    in waves as many as are begun anew."""
    waiting: list[int] = []
    waited = []
    for step in range(30):
        for count in (2, *(waves if step % 3 else ())):
            waiting += [step] * (2 * max_staleness + count - len(waiting))
            due = due_groups(waiting, step, 2, max_staleness)
            allowed = [
                chosen
                for chosen in combinations(range(len(waiting)), count)
                if all(sum(i < oldest for i in chosen) >= least for oldest, least in due)
            ]
            whole = max(allowed)
            waited += [step - waiting[i] for i in whole]
            waiting = [begun for i, begun in enumerate(waiting) if i not in whole]
    assert max(waited) == max_staleness and min(waited) == 0


def test_a_step_waits_for_the_groups_that_are_due(sampler: Sampler) -> None:
    """The slowest group, left at step 0, is returned by the step that the bound names; before, the first that ends."""
    groups = [numbered(i, version=1) for i in range(6)]

    async def steps() -> None:
        found = await collect(sampler, groups, GROUP)
        longest = [max(t.num_sampled for t in group) for group in found]
        slow = max(range(6), key=longest.__getitem__)
        waiting = [numbered(slow), *(one for one in groups if one.number != slow)]
        for max_staleness, due in ((2, False), (1, True)):
            found, _ = await collect_some(
                sampler, waiting, GROUP, 1, min_groups=1, per_step=1, max_staleness=max_staleness
            )
            assert [group[0].example.index == slow for group in found] == [due]

    asyncio.run(steps())


def test_an_aborted_sample_is_no_answer(sampler: Sampler) -> None:
    engine = sampler.engine
    assert isinstance(engine, NativeEngine)

    async def abort_all() -> None:
        groups = asyncio.ensure_future(collect(sampler, [numbered(0)], GROUP))
        while engine.num_free == engine.slots:
            await asyncio.sleep(0)
        assert engine.abort() == GROUP
        with pytest.raises(RolloutAborted, match="use collect_some"):
            await groups

    asyncio.run(abort_all())


def test_an_engine_that_cannot_go_on(sampler: Sampler) -> None:
    class Plain:
        async def generate(self, prompt: Any, params: Any) -> Any: ...

        def update_weights(self, model: Any, version: int) -> None: ...

        def close(self) -> None: ...

    with pytest.raises(ConfigError, match="oversample_prompts: Plain has no generate_some"):
        asyncio.run(
            collect_some(
                replace(sampler, engine=Plain()), [numbered(0)], GROUP, 0, min_groups=1, per_step=1, max_staleness=1
            )
        )
    assert resumable(sampler.engine) is sampler.engine


def test_a_prompt_is_tokenised_once(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its samples begin with the example's tokens."""
    asked = sampler.pending(numbered(2), 0)
    assert asked.prompt == sampler.renderer.prompt(numbered(2).example.messages)
    monkeypatch.setattr(Renderer, "prompt", None)
    (group,) = asyncio.run(collect(sampler, [numbered(2)], GROUP))
    assert all(list(sample.tokens[: len(asked.prompt)]) == list(asked.prompt) for sample in group)


def test_long_samples_take_little_memory(sampler: Sampler) -> None:
    """Of 512 samples of 8,192 tokens those under way and those that are done are below 200 MB: 24 bytes a token."""
    count = 1 << 15
    request = Request(prompt=(1,), params=sampler.params(0, 0))
    draw = np.random.default_rng(0)
    tracemalloc.start()
    try:
        for values in (request.tokens, request.versions):
            values.extend(draw.integers(1000, 1 << 17, count).tolist())
        for values in (request.logps, request.kept_logps):
            values.extend(draw.standard_normal(count).tolist())
        under_way, _ = tracemalloc.get_traced_memory()
        request.finish("length")
        done = sampler.pending(numbered(0), 0).finish(request.future.result())
        del request
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert done.num_sampled == count
    assert under_way < 24 * count and held < 30 * count
