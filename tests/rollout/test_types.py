"""Sampling parameters refuse what cannot be; keys are stable and all differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from posttrain.rollout.types import SamplingParams, sample_key

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
