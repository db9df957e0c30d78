"""Engines, requests and comparisons for the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from posttrain.models.decoder import Decoder
from posttrain.rollout.native import NativeEngine
from posttrain.rollout.types import Completion, SamplingParams, sample_key

LENGTH = 64
VOCABULARY = 512


def make_engine(model: Decoder, **changes: Any) -> NativeEngine:
    settings = {"slots": 4, "max_length": LENGTH, "decode_steps": 5, "tokenizer_decode": text_of} | changes
    return NativeEngine(model, **settings)


def text_of(tokens: Sequence[int]) -> str:
    return "".join(f"<{token}>" for token in tokens)


def params(sample: int = 0, **changes: Any) -> SamplingParams:
    settings: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "stop_token_ids": ()}
    return SamplingParams(**settings | {"key": sample_key(0, 0, 0, sample)} | changes)


def requests(number: int, **changes: Any) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCABULARY, length).tolist() for length in rng.integers(1, 36, number)]
    prompts[1] = prompts[1][:1]
    limits = rng.integers(1, 28, number)
    limits[2] = 1
    return prompts, [params(i, **{"max_tokens": int(limits[i])} | changes) for i in range(number)]


def assert_same(got: Completion, expected: Completion) -> None:
    assert got.tokens == expected.tokens
    assert (got.stop, got.weights_versions) == (expected.stop, expected.weights_versions)
    np.testing.assert_allclose(got.logps, expected.logps, atol=1e-5)
    np.testing.assert_allclose(got.kept_logps, expected.kept_logps, atol=1e-5)
