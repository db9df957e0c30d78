"""Samples: the text continues the prompt, long ones take little memory, and none that was aborted is learned from."""

from __future__ import annotations

import asyncio
import gc
import random
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.config import GrammarSection, SamplingSection
from posttrain.data.chat import Renderer
from posttrain.data.grammar import GrammarCompiler
from posttrain.data.tokenizer import load_tokenizer
from posttrain.rl.sampler import (
    IssuedGroup,
    PendingRollout,
    RolloutAborted,
    Sampler,
    collect,
    sampling_params,
)
from posttrain.rollout.engine import NativeEngine
from posttrain.rollout.request import Request
from posttrain.rollout.scheduler import Scheduler
from posttrain.runtime.event_loop import run_async
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
        tokenizer=tokenizer,
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


def test_samples_begin_together_however_long_their_grammar_takes(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities change by rounding with what is computed at the same time. Turned red by a `collect` that does
    not prepare, by a `generate` that does not submit at once."""
    draw, start, plan, begun = random.Random(0), GrammarCompiler.start, Scheduler.plan, list[list[tuple[int, int]]]()

    def slow(*given: Any) -> Any:
        time.sleep(0.02 * draw.random())
        return start(*given)

    def spied(self: Scheduler) -> Any:
        planned = plan(self)
        begun.append([row.request.params.key for row in self.running.values()])
        return planned

    monkeypatch.setattr(GrammarCompiler, "start", slow)
    monkeypatch.setattr(Scheduler, "plan", spied)
    constrained = sampler.sampling.model_copy(
        update={"ignore_eos": False, "stop_token_ids": (), "grammar": GrammarSection(regex="[a-z]{1,9}")}
    )
    sampler = replace(sampler, sampling=constrained)
    groups = [numbered(index) for index in range(6)]
    run_async(collect(sampler, groups, GROUP))
    assert begun[0] == [sampler.params(group.number, sample).key for group in groups for sample in range(GROUP)]


def test_an_aborted_sample_is_no_answer(sampler: Sampler) -> None:
    engine = sampler.engine
    assert isinstance(engine, NativeEngine)

    async def abort_all() -> None:
        groups = asyncio.ensure_future(collect(sampler, [numbered(0)], GROUP))
        while engine.num_free == engine.slots:
            await asyncio.sleep(0)
        assert engine.abort() == GROUP
        with pytest.raises(RolloutAborted, match="aborted after .* cannot be trained on"):
            await groups

    asyncio.run(abort_all())


def test_a_prompt_is_tokenised_once(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its samples begin with the example's tokens."""
    asked = sampler.pending(numbered(2), 0)
    assert asked.prompt == sampler.renderer.prompt(numbered(2).example.messages)
    monkeypatch.setattr(Renderer, "prompt", None)
    (group,) = asyncio.run(collect(sampler, [numbered(2)], GROUP))
    assert all(list(sample.tokens[: len(asked.prompt)]) == list(asked.prompt) for sample in group)


def test_long_samples_take_little_memory(sampler: Sampler) -> None:
    """Of 512 samples of 8,192 tokens those under way and those that are done are below 200 MB: 34 bytes a token."""
    count = 1 << 15
    request = Request(prompt=(1,), params=sampler.params(0, 0))
    draw = np.random.default_rng(0)
    tracemalloc.start()
    try:
        for values in (request.tokens, request.versions):
            values.extend(draw.integers(1000, 1 << 17, count).tolist())
        for values in (request.logps, request.kept_logps, request.truncation_logps):
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
    assert under_way < 24 * count and held < 34 * count
