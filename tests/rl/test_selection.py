"""What a step learns from: samples that are not cut, tokens of high entropy over the whole batch."""

from __future__ import annotations

from dataclasses import replace as changed

import numpy as np
import pytest

from posttrain.batch import Batch
from posttrain.rl.step import not_cut, top_entropy
from tests.rl.helpers import trajectory

pytestmark = pytest.mark.fast


def test_samples_that_were_cut() -> None:
    stops = [["stop", "length"], ["abort", "stop"]]
    groups = [[changed(trajectory(tokens=[1, 2]), stop=stop) for stop in row] for row in stops]
    assert not_cut(groups).tolist() == [[True, False], [True, True]]


def rows(entropies: np.ndarray, weight: np.ndarray) -> Batch:
    zeros = np.zeros(entropies.shape, np.int32)
    return Batch(
        tokens=zeros,
        positions=zeros,
        segments=zeros + 1,
        loss_weight=weight,
        advantages=np.where(weight > 0, 1.5, 0.0).astype(np.float32),
    )


def test_tokens_of_high_entropy() -> None:
    """The same tokens for any split of the batch; prompts have no part in the quantile."""
    draw = np.random.default_rng(0)
    entropies = draw.exponential(1.0, (6, 9)).astype(np.float32)
    entropies[3:] *= 3  # so that a quantile of each part would be another
    weight = (draw.random((6, 9)) < 0.7).astype(np.float32)
    entropies[weight == 0] = 100.0
    whole = rows(entropies, weight)
    (kept,), least = top_entropy([whole], [entropies], 0.2)
    found = np.sort(entropies[weight > 0])
    expected = (entropies >= least) & (weight > 0)
    assert expected.sum() == pytest.approx(0.2 * found.size, abs=1)
    np.testing.assert_array_equal(kept.advantages, np.where(expected, 1.5, 0.0))
    np.testing.assert_array_equal(kept.loss_weight, weight)
    for cuts in ([3], [1, 4], [1, 2, 3, 4, 5]):
        parts = [rows(e, w) for e, w in zip(np.split(entropies, cuts), np.split(weight, cuts), strict=True)]
        made, same = top_entropy(parts, np.split(entropies, cuts), 0.2)
        assert same == least
        np.testing.assert_array_equal(np.concatenate([np.asarray(part.advantages) for part in made]), kept.advantages)
    with pytest.raises(ValueError, match="top_entropy=1.0 must be above 0 and below 1"):
        top_entropy([whole], [entropies], 1.0)
