"""Partial rollouts: samples that a step leaves go on at a later one, and none that was aborted is learned from."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from posttrain.config import SamplingSection
from posttrain.data.chat import Renderer
from posttrain.data.tokenizer import load_tokenizer
from posttrain.errors import ConfigError
from posttrain.rl.sampler import Aborted, Sampler, collect, collect_some, resumable
from posttrain.rl.types import Example
from posttrain.rollout.engine import NativeEngine
from tests.tiny import tiny_model

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


def example(index: int) -> Example:
    text = "ab" * (index + 1)
    return Example(index=index, row={}, messages=[{"role": "user", "content": text}], length=len(text), plain=True)


def test_samples_that_are_left_go_on_at_a_later_step(sampler: Sampler) -> None:
    """Of six groups three are enough; the others come later, with the tokens that they would have had at once."""
    examples = [example(i) for i in range(6)]
    expected = asyncio.run(collect(sampler, examples, GROUP, 0))
    engine = sampler.engine
    assert isinstance(engine, NativeEngine)

    async def steps() -> None:
        early, left = await collect_some(sampler, examples, GROUP, 0, enough=3)
        assert len(early) == len(left) == 3 and engine.num_free == engine.slots
        stops = {begun.stop for group in left for begun in group.completions.values()}
        assert "abort" in stops
        again = await collect_some(sampler, examples, GROUP, 0, enough=3)
        assert again == (early, left), "it does not depend on what was sampled before"
        engine.update_weights(engine._loaded.source.model, 1)
        late, none = await collect_some(sampler, [], GROUP, 1, enough=6, carried=left)
        assert none == []
        by_index = {group[0].example.index: group for group in [*early, *late]}
        assert [[t.tokens for t in by_index[i]] for i in range(6)] == [[t.tokens for t in group] for group in expected]
        versions = {version for group in late for t in group for version in t.versions}
        assert versions == {-1, 0, 1}

    asyncio.run(steps())


def test_an_aborted_sample_is_no_answer(sampler: Sampler) -> None:
    engine = sampler.engine
    assert isinstance(engine, NativeEngine)

    async def abort_all() -> None:
        groups = asyncio.ensure_future(collect(sampler, [example(0)], GROUP, 0))
        while engine.num_free == engine.slots:
            await asyncio.sleep(0)
        assert engine.abort() == GROUP
        with pytest.raises(Aborted, match="use collect_some"):
            await groups

    asyncio.run(abort_all())


def test_an_engine_that_cannot_go_on(sampler: Sampler) -> None:
    class Plain:
        async def generate(self, prompt: Any, params: Any) -> Any: ...

        def update_weights(self, model: Any, version: int) -> None: ...

        def close(self) -> None: ...

    with pytest.raises(ConfigError, match="prompts_ahead: Plain has no generate_some"):
        asyncio.run(collect_some(replace(sampler, engine=Plain()), [example(0)], GROUP, 0, enough=1))
    assert resumable(sampler.engine) is sampler.engine
