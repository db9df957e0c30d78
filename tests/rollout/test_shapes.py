"""The shapes that programs are compiled for: `prompts` and `decodes` name those that occur, and no other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import pytest

from posttrain.metrics import CompileCounter
from posttrain.rollout.blocks import BLOCK
from posttrain.rollout.engine import NativeEngine
from posttrain.rollout.programs import Expected, Range, Shapes
from posttrain.rollout.scheduler import MIN_SHARED, PROMPT_CHUNK
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


def by_blocks(lengths: Range) -> Sequence[int]:
    """One of each number of blocks, on which shapes depend, and the last."""
    return [*range(lengths.shortest, lengths.longest, BLOCK), lengths.longest] if lengths.longest > 0 else []


def pieces(prefix: int) -> Iterator[tuple[int, int]]:
    """What a scheduler may read of a sequence: from its start, or after what others have read of it, chunk by chunk."""
    for shared in (0, *range(MIN_SHARED, prefix, BLOCK)):
        for start in range(shared, prefix, PROMPT_CHUNK):
            yield start, min(start + PROMPT_CHUNK, prefix)


@pytest.mark.parametrize(
    ("max_length", "reads"),
    [
        *[(n, Range(1, n - 2)) for n in (2, 16, 17, 64, 66, 67, 129, 130, 208, 256, 1000, 1025, 2048)],
        *[(256, reads) for reads in (Range(3, 11), Range(20, 63), Range(33, 66), Range(70, 70), Range(200, 254))],
        *[(2048, reads) for reads in (Range(5, 600), Range(570, 570), Range(577, 577), Range(1100, 1101))],
    ],
)
def test_the_prompt_shapes_are_those_that_occur(max_length: int, reads: Range) -> None:
    shapes = Shapes(slots=8, lanes=1, max_length=max_length, steps=8)
    occurring = {shapes.prompt(*piece) for prefix in by_blocks(reads) for piece in pieces(prefix)}
    assert Counter(shapes.prompts(reads)) == Counter(occurring)


@pytest.mark.parametrize(
    ("max_length", "positions"),
    [*[(n, Range(1, n - 1)) for n in (2, 129, 130, 208, 1025, 4096)], (1025, Range(129, 256)), (1025, Range(60, 600))],
)
def test_the_decode_shapes_are_those_that_occur(max_length: int, positions: Range) -> None:
    shapes = Shapes(slots=40, lanes=1, max_length=max_length, steps=8)
    for tail in (False, True):
        occurring = {
            shapes.decode(running, length, tail=tail)
            for running in range(1, shapes.slots + 1)
            for length in by_blocks(positions)
        }
        assert Counter(shapes.decodes(positions, tail=tail)) == Counter(occurring)


def test_what_requests_read_and_hold() -> None:
    e = Expected(params=params(max_tokens=20), shortest=5, longest=40)
    assert (e.reads(64, rereads=False), e.reads(64, rereads=True)) == (Range(4, 39), Range(4, 58))
    assert (e.positions(8, 64), e.positions(32, 64)) == (Range(12, 59), Range(24, 59))
    short = Expected(params=params(max_tokens=1), longest=1)
    assert (*short.reads(64, rereads=True), *short.positions(8, 64)) == (1, 0, 1, 1)
    whatever = Expected(params=params(max_tokens=20))
    assert (whatever.reads(64, rereads=False), whatever.positions(8, 64)) == (Range(1, 62), Range(8, 63))


@pytest.mark.thorough
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
    engine.warm_up([Expected(params=p)])
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
