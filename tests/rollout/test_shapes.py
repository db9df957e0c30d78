"""The shapes that programs are compiled for: `prompts` and `decodes` name those that occur, and no other."""

from __future__ import annotations

from collections import Counter

import jax.numpy as jnp
import pytest

from posttrain.metrics import CompileCounter
from posttrain.rollout.blocks import BLOCK
from posttrain.rollout.native import NativeEngine
from posttrain.rollout.scheduler import PROMPT_CHUNK
from posttrain.rollout.shapes import Shapes
from posttrain.weights.load import init_model
from tests.rollout.engines import params

TINY = {
    "model_type": "qwen3",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize("max_length", [2, 16, 17, 64, 129, 130, 208, 256, 1000, 1025, 2048, 4096])
def test_the_prompt_shapes_are_those_that_occur(max_length: int) -> None:
    shapes = Shapes(slots=8, lanes=1, max_length=max_length, steps=8)
    # A prompt of max_length - 1 tokens and one new token; the newest token is read by decoding.
    longest = max_length - 2
    occurring = {
        shapes.prompt(start, end)
        for start in range(0, longest, BLOCK)
        # Shapes change after a multiple of a block only.
        for end in {*range(start + 1, longest + 1, BLOCK), longest}
        if end - start <= PROMPT_CHUNK
    }
    assert Counter(shapes.prompts()) == Counter(occurring)


@pytest.mark.parametrize("max_length", [2, 129, 130, 208, 1025, 4096])
def test_the_decode_shapes_are_those_that_occur(max_length: int) -> None:
    shapes = Shapes(slots=40, lanes=1, max_length=max_length, steps=8)
    for tail in (False, True):
        occurring = {
            shapes.decode(running, positions, tail=tail)
            for running in range(1, shapes.slots + 1)
            for positions in {*range(1, max_length, BLOCK), max_length - 1}
        }
        assert Counter(shapes.decodes(tail)) == Counter(occurring)


@pytest.mark.parametrize("max_length", [256, pytest.param(2048, marks=pytest.mark.thorough)])
def test_nothing_is_compiled_after_the_warm_up(max_length: int) -> None:
    """Prompts of every shape, alone and behind prefixes that others have read."""
    engine = NativeEngine(
        init_model(TINY, dtype=jnp.float32, seed=0),
        slots=1,
        max_length=max_length,
        decode_steps=4,
        tokenizer_decode=None,
    )
    p = params(max_tokens=2)
    engine.warm_up([p])
    compiled, counter = len(engine.programs), CompileCounter()
    beginning = [7] * 1100
    prompts = [beginning[:n] for n in (64, 250, 1100)]
    prompts += [[*beginning[:prefix], 9, *range(own)] for prefix in (64, 250, 500) for own in (20, 59)]
    prompts += [[*beginning[:64], *[n % 50] * n] for n in (1, 129, 170, 190, 193, 600, 1900)]
    prompts += [[n % 64] * n for n in (1, 16, 17, 40, 100, 200, 254, 300, 513, 2046)]
    for prompt in prompts:
        if len(prompt) + p.max_tokens <= max_length:
            engine.generate_all([prompt], [p])
    assert len(engine.programs) == compiled
    assert counter.metrics()["perf/compilations"] == 0
    counter.close()
