"""Sampling parameters refuse what cannot be; keys are stable and all differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.data.tokenizer import load_tokenizer
from posttrain.rollout.types import Decode, SamplingParams, first_completed, sample_key, text_of

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


VOCABULARY = ["a", "b", "ab", "", "é", "ba"]


def decode(tokens: Sequence[int], skip_special_tokens: bool = True, *, after: Sequence[int] = ()) -> str:
    return "".join(VOCABULARY[token] for token in tokens)


def stopped_by(stops: Sequence[str]) -> SamplingParams:
    return SamplingParams(**SETTINGS, stop=tuple(stops))


def found_from_the_start(
    decode: Decode, tokens: Sequence[int], stops: Sequence[str], prompt: Sequence[int] = ()
) -> int | None:
    ends = (n for n in range(1, len(tokens) + 1) if any(stop in decode(tokens[:n], after=prompt) for stop in stops))
    return next(ends, None)


def found_as_they_arrive(
    decode: Decode, tokens: Sequence[int], stops: Sequence[str], rng: np.random.Generator, prompt: Sequence[int] = ()
) -> int | None:
    arrived, found = 0, None
    while found is None and arrived < len(tokens):
        num_new = min(int(rng.integers(1, 6)), len(tokens) - arrived)
        arrived += num_new
        found = first_completed(decode, [*prompt, *tokens[:arrived]], len(prompt), num_new, stopped_by(stops))
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

    def decode_bytes(tokens: Sequence[int], skip_special_tokens: bool = True, *, after: Sequence[int] = ()) -> str:
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


@pytest.mark.parametrize("name", ["tokenizers/qwen3", "tokenizers/mistral-7b-instruct", "models/stories260k"])
def test_real_tokenizers(shared: Path, name: str) -> None:
    """Text in several scripts after a prompt, stops anywhere in it, also at its first space, and where a token holds
    more than the stop's end."""
    tokenizer = load_tokenizer(shared / name)
    rng = np.random.default_rng(0)
    prompt = tokenizer.encode("Q: 日")
    text = " The answer, she wrote: \n\n```python\nreturn x[0]```  naïve 😀👩‍🚀 日本語です.\tDone!</answer> bye"
    tokens = tokenizer.encode("Q: 日" + text)[len(prompt) :]
    assert tokenizer.decode(tokens, after=prompt) == text
    beyond = 0
    for start in (0, *rng.integers(0, len(text), 40).tolist()):
        stops = [text[start : start + int(rng.integers(1, 9))]]
        expected = found_from_the_start(tokenizer.decode, tokens, stops, prompt)
        assert found_as_they_arrive(tokenizer.decode, tokens, stops, rng, prompt) == expected is not None
        written = tokenizer.decode(tokens[:expected], after=prompt)
        shown = text_of(tokenizer.decode, prompt, tokens[:expected], stopped_by(stops))
        assert stops[0] not in shown
        assert written.startswith(shown + stops[0])
        beyond += written != shown + stops[0]
    assert beyond > 5 or "stories" in name  # its tokens are short


def test_a_stop_string_that_is_a_special_token() -> None:
    byte_tokenizer = load_tokenizer("bytes")
    plain = SamplingParams(**SETTINGS | {"stop_token_ids": byte_tokenizer.stop_ids})
    (start,) = byte_tokenizer.encode("<|im_start|>")
    given = plain.stopped_at(["<|im_start|>", "\n\n"], byte_tokenizer)
    assert (given.stop, given.ends) == (("\n\n",), (*byte_tokenizer.stop_ids, start))
    sampled = [*byte_tokenizer.encode("ab"), start]
    assert text_of(byte_tokenizer.decode, [1], sampled, given) == "ab"
    with pytest.raises(ValueError, match=r"sampling\.stop='<\|im_start\|>user': contains the special token <\|im_st"):
        plain.stopped_at(["<|im_start|>user"], byte_tokenizer)
    seen = replace(plain, skip_special_tokens=False).stopped_at(["<|im_start|>user"], byte_tokenizer)
    sampled = [*sampled, *byte_tokenizer.encode("user"), 1]
    assert first_completed(byte_tokenizer.decode, [1, *sampled], 1, 3, seen) == len(sampled) - 1
    assert text_of(byte_tokenizer.decode, [1], sampled[:-2], seen) == "ab<|im_start|>use"


def test_the_text_of_a_sample() -> None:
    for tokens, ends, stops, text in (
        ([0, 1, 5], (5,), (), "ab"),
        ([0, 1, 5], (0,), (), "abba"),
        ([0, 1, 2, 5], (5,), ("ba",), "a"),
        ([], (5,), ("a",), ""),
    ):
        assert text_of(decode, [], tokens, replace(stopped_by(stops), stop_token_ids=ends)) == text
