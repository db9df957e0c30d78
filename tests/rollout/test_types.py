"""Sampling parameters refuse what cannot be; keys are stable and all differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from posttrain.rollout.types import SamplingParams, before_stop, first_completed, sample_key, text_of

pytestmark = pytest.mark.fast


def test_sample_key_is_stable() -> None:
    assert sample_key(0, 0, 0, 0) == (1242697157, 2705436554)
    assert sample_key(1, 2, 3, 4) == (2766578667, 3537935141)


def test_sample_keys_differ_and_are_well_mixed() -> None:
    keys = [sample_key(seed, step, p, g) for seed in range(2) for step in range(8) for p in range(32) for g in range(8)]
    assert len(set(keys)) == len(keys)
    ones = np.unpackbits(np.asarray(keys, np.uint32).view(np.uint8).reshape(len(keys), -1), axis=1).mean(axis=0)
    assert np.abs(ones - 0.5).max() < 5 * 0.5 / np.sqrt(len(keys))


SETTINGS: dict[str, Any] = {"max_tokens": 4, "temperature": 1.0, "stop_token_ids": (9,), "key": (0, 0)}


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 1.0},
        {"stop": ("",)},
        {"stop_token_ids": (-1,)},
        {"key": (0, 2**32)},
        {"repetition_penalty": 0.0},
        {"presence_penalty": float("inf")},
        {"frequency_penalty": float("nan")},
        {"logit_bias": {-1: 0.0}},
        {"logit_bias": {3: float("nan")}},
        {"logit_bias": {3: float("inf")}},
        {"logit_bias": dict.fromkeys(range(301), 1.0)},
        {"allowed_token_ids": ()},
        {"top_logps": 21},
    ],
)
def test_values_out_of_range_are_named(change: dict[str, Any]) -> None:
    (name,) = change
    with pytest.raises(ValueError, match=rf"sampling\.{name}="):
        SamplingParams(**SETTINGS | change)


def test_a_token_must_be_left() -> None:
    forbidden = {3: float("-inf"), 4: float("-inf")}
    with pytest.raises(ValueError, match=r"sampling\.allowed_token_ids="):
        SamplingParams(**SETTINGS, allowed_token_ids=(3, 4), logit_bias=forbidden)
    SamplingParams(**SETTINGS, allowed_token_ids=(3, 5), logit_bias=forbidden)


def test_what_is_plain_and_what_ends() -> None:
    plain = SamplingParams(**SETTINGS)
    assert plain.is_plain
    assert plain.ends == plain.stop_token_ids == (9,)
    assert replace(plain, ignore_eos=True).ends == ()
    changes: list[dict[str, Any]] = [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"logit_bias": {1: 1.0}},
        {"allowed_token_ids": (1,)},
        {"top_logps": 1},
    ]
    assert not any(replace(plain, **change).is_plain for change in changes)
    assert hash(replace(plain, logit_bias={1: 2.0})) == hash(plain)


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
