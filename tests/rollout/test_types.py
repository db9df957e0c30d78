"""Sampling parameters refuse what cannot be; keys are stable and all differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from posttrain.rollout.types import SamplingParams, sample_key


def test_sample_key_is_stable() -> None:
    assert sample_key(0, 0, 0, 0) == (1242697157, 2705436554)
    assert sample_key(1, 2, 3, 4) == (2766578667, 3537935141)


def test_sample_keys_differ_and_are_well_mixed() -> None:
    keys = [sample_key(seed, step, p, g) for seed in range(2) for step in range(8) for p in range(32) for g in range(8)]
    assert len(set(keys)) == len(keys)
    ones = np.unpackbits(np.asarray(keys, np.uint32).view(np.uint8).reshape(len(keys), -1), axis=1).mean(axis=0)
    assert np.abs(ones - 0.5).max() < 5 * 0.5 / np.sqrt(len(keys))


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
    ],
)
def test_values_out_of_range_are_named(change: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"max_tokens": 4, "temperature": 1.0, "stop_token_ids": (), "key": (0, 0)}
    (name,) = change
    with pytest.raises(ValueError, match=rf"sampling\.{name}="):
        SamplingParams(**settings | change)
