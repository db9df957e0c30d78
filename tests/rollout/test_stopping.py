"""A stop string is found at the token that completes it, however the tokens arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from posttrain.rollout.stopping import before_stop, first_completed, text_of

pytestmark = pytest.mark.fast

Decode = Callable[[Sequence[int]], str]
VOCABULARY = ["a", "b", "ab", "", "é", "ba"]


def decode(tokens: Sequence[int]) -> str:
    return "".join(VOCABULARY[token] for token in tokens)


def found_from_the_start(decode: Decode, tokens: Sequence[int], stops: Sequence[str]) -> int | None:
    ends = (n for n in range(1, len(tokens) + 1) if any(stop in decode(tokens[:n]) for stop in stops))
    return next(ends, None)


def found_as_they_arrive(
    decode: Decode, tokens: Sequence[int], stops: Sequence[str], rng: np.random.Generator
) -> int | None:
    arrived, found = 0, None
    while found is None and arrived < len(tokens):
        num_new = min(int(rng.integers(1, 6)), len(tokens) - arrived)
        arrived += num_new
        found = first_completed(decode, tokens[:arrived], num_new, stops)
    return found


@pytest.mark.parametrize("stops", [("aba",), ("bbab", "éa"), ("abababab",)])
def test_equals_decoding_from_the_start(stops: tuple[str, ...]) -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(100):
        tokens = rng.integers(0, len(VOCABULARY), 12).tolist()
        expected = found_from_the_start(decode, tokens, stops)
        hits += expected is not None
        assert found_as_they_arrive(decode, tokens, stops, rng) == expected
    assert 5 < hits < 100


def test_characters_of_several_tokens() -> None:
    """Bytes as tokens: where decoding starts within a character, its pieces are no characters."""

    def decode_bytes(tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(500):
        tokens = list("".join(rng.choice(list("ayé😀x"), 10)).encode())
        stops = ["".join(rng.choice(list("ayé😀x"), rng.integers(1, 4)))]
        expected = found_from_the_start(decode_bytes, tokens, stops)
        hits += expected is not None
        assert found_as_they_arrive(decode_bytes, tokens, stops, rng) == expected
    assert 100 < hits < 400


@pytest.mark.parametrize("name", ["qwen3", "mistral-7b-instruct"])
def test_real_tokenizers(shared: Path, name: str) -> None:
    """Text in several scripts, stops anywhere in it, also where a token holds more than the stop's end."""
    tokenizer = tokenizers.Tokenizer.from_file(str(shared / "tokenizers" / name / "tokenizer.json"))
    rng = np.random.default_rng(0)
    text = "The answer, she wrote: \n\n```python\nreturn x[0]```  naïve 😀👩‍🚀 日本語です.\tDone!</answer> bye"
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    beyond = 0
    for _ in range(60):
        start = int(rng.integers(0, len(text)))
        stops = [text[start : start + int(rng.integers(1, 9))]]
        expected = found_from_the_start(tokenizer.decode, tokens, stops)
        assert found_as_they_arrive(tokenizer.decode, tokens, stops, rng) == expected is not None
        written = tokenizer.decode(tokens[:expected])
        shown = before_stop(written, stops)
        assert stops[0] not in shown
        assert written.startswith(shown + stops[0])
        beyond += written != shown + stops[0]
    assert beyond > 5


def test_the_text_of_a_sample() -> None:
    assert text_of(decode, [0, 1, 5], (5,), ()) == "ab"
    assert text_of(decode, [0, 1, 5], (0,), ()) == "abba"
    assert text_of(decode, [0, 1, 2, 5], (5,), ("ba",)) == "a"
    assert text_of(decode, [], (5,), ("a",)) == ""
