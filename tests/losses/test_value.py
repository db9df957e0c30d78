"""ValueLoss by formula and property; values are those before a token."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.batch import Batch, ScoreStats
from posttrain.losses.value import ValueLoss, values_before
from posttrain.train.objective import TrainSettings
from posttrain.train.trainer import Trainer
from posttrain.tree import added, replace
from posttrain.weights.scalar_head import with_scalar_head
from tests.tiny import sgd, tiny_model

SEGMENTS = np.asarray([[1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 0, 0]], np.int32)
WEIGHT = np.asarray([[0, 1, 1, 0, 1, 1, 0], [0, 0, 1, 0, 1, 0, 0]], np.float32)


def random_batch() -> tuple[ScoreStats, Batch]:
    draw = np.random.default_rng(0)
    scores, returns, old = (draw.normal(size=SEGMENTS.shape).astype(np.float32) for _ in range(3))
    zeros = np.zeros_like(SEGMENTS)
    batch = Batch(tokens=zeros, positions=zeros, segments=SEGMENTS, loss_weight=WEIGHT, returns=returns, old_values=old)
    return ScoreStats(scores=jnp.asarray(scores)), batch


def test_values_are_of_the_token_before() -> None:
    scores = jnp.arange(14, dtype=jnp.float32).reshape(2, 7) + 1
    expected = [[0, 1, 2, 0, 4, 5, 0], [0, 8, 9, 10, 11, 0, 13]]
    np.testing.assert_array_equal(values_before(scores, jnp.asarray(SEGMENTS)), expected)


def test_no_value_reads_its_token() -> None:
    """Through a model: another token changes values after it alone, in its own sequence."""
    model = tiny_model(num_layers=1, windows=(None,))
    with_scalar_head(model, seed=0)
    trainer = Trainer(
        model, ValueLoss(), sgd(0.0), TrainSettings(temperature=1.0, max_grad_norm=1.0, micro_batch_rows=None)
    )
    _, batch = random_batch()
    tokens = np.random.default_rng(0).integers(1, 100, SEGMENTS.shape).astype(np.int32)
    positions = np.asarray([[0, 1, 2, 0, 1, 2, 0], [0, 1, 2, 3, 4, 0, 0]], np.int32)

    def values(tokens: np.ndarray) -> np.ndarray:
        scores = trainer.scores(replace(batch, tokens=tokens, positions=positions))
        return np.asarray(values_before(jnp.asarray(scores), jnp.asarray(SEGMENTS)))

    before = values(tokens)
    for row, t, changed in [(0, 1, [2]), (0, 4, [5]), (1, 2, [3, 4])]:
        other = tokens.copy()
        other[row, t] += 1
        moved = np.abs(values(other) - before) > 1e-6
        assert np.argwhere(moved).tolist() == [[row, place] for place in changed]


def test_by_formula() -> None:
    stats, batch = random_batch()
    out = ValueLoss(clip=0.2)(stats, batch)
    scores, losses, clipped = np.asarray(stats.scores), [], []
    for row, t in zip(*np.nonzero(WEIGHT), strict=True):
        value, target, old = scores[row, t - 1], batch.returns[row, t], batch.old_values[row, t]
        plain, bounded = (value - target) ** 2, (np.clip(value, old - 0.2, old + 0.2) - target) ** 2
        losses.append(max(plain, bounded) / 2)
        clipped.append(bounded > plain)
    assert 0 < np.mean(clipped) < 1
    np.testing.assert_allclose(out.loss.value(), np.mean(losses), rtol=1e-6)
    np.testing.assert_allclose(out.metrics["critic/vf_clipfrac"].value(), np.mean(clipped), rtol=1e-6)
    free = ValueLoss(clip=None)(stats, replace(batch, old_values=None))
    assert free.loss.value() <= out.loss.value() and free.metrics["critic/vf_clipfrac"].value() == 0


def test_rows_add_up_and_masked_tokens_may_hold_anything() -> None:
    stats, batch = random_batch()

    def gradient(stats: ScoreStats, batch: Batch) -> Any:
        def total(scores: jax.Array) -> Any:
            out = ValueLoss()(ScoreStats(scores=scores), batch)
            return out.loss.total, out

        return jax.grad(total, has_aux=True)(stats.scores)

    grad, whole = gradient(stats, batch)
    rows = [gradient(*jax.tree.map(lambda x, i=i: x[i : i + 1], (stats, batch))) for i in range(2)]
    np.testing.assert_allclose(np.concatenate([g for g, _ in rows]), grad, rtol=1e-6)
    np.testing.assert_allclose(added(rows[0][1], rows[1][1]).loss.total, whole.loss.total, rtol=1e-6)
    poison = replace(
        batch,
        returns=np.where(WEIGHT > 0, batch.returns, np.nan),
        old_values=np.where(WEIGHT > 0, batch.old_values, np.inf),
    )
    dirty, out = gradient(stats, poison)
    np.testing.assert_array_equal(dirty, grad)
    assert np.isfinite(out.loss.total)
    # The last score of a sequence is of no token's context.
    assert not np.asarray(grad)[0, [2, 5]].any()


def test_what_is_missing_is_named() -> None:
    stats, batch = random_batch()
    with pytest.raises(ValueError, match=r"batch\.returns is None"):
        ValueLoss()(stats, replace(batch, returns=None))
    with pytest.raises(ValueError, match=r"batch\.old_values is None"):
        ValueLoss()(stats, replace(batch, old_values=None))
    with pytest.raises(ValueError, match="must be positive"):
        ValueLoss(clip=0.0)
