from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from posttrain.kernels.attention import attention

SCALE = 0.3


def reference(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, positions: np.ndarray, segments: np.ndarray, window: int | None
) -> np.ndarray:
    """One query, one head and one key at a time, float64."""
    out = np.zeros(q.shape)
    rows, length, heads, _ = q.shape
    group = heads // k.shape[1]
    for b, t, n in np.ndindex(rows, length, heads):
        seen = [
            s
            for s in range(length)
            if segments[b, s] == segments[b, t]
            and positions[b, s] <= positions[b, t]
            and (window is None or positions[b, t] - positions[b, s] < window)
        ]
        weights = np.exp([SCALE * np.dot(q[b, t, n], k[b, n // group, s]) for s in seen])
        out[b, t, n] = sum(w * v[b, n // group, s] for w, s in zip(weights, seen, strict=True)) / weights.sum()
    return out


def arrays(length: int = 12) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = [(2, length, 4, 8), (2, 2, length, 8), (2, 2, length, 8)]
    q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    return q, k, v


SEGMENTS = np.asarray([[1] * 5 + [2] * 4 + [0] * 3, [1] * 12], np.int32)
POSITIONS = np.asarray([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 0, 0], list(range(12))], np.int32)


def run(q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None, dtype: type = jnp.float32) -> np.ndarray:
    inputs = (jnp.asarray(x, dtype) for x in (q, k, v))
    p, s = jnp.asarray(POSITIONS), jnp.asarray(SEGMENTS)
    out = attention(*inputs, q_positions=p, k_positions=p, q_segments=s, k_segments=s, window=window, scale=SCALE)
    assert out.dtype == dtype
    return np.asarray(out, np.float32)


@pytest.mark.parametrize("window", [None, 1, 3])
def test_against_a_loop(window: int | None) -> None:
    q, k, v = arrays()
    expected = reference(q, k, v, POSITIONS, SEGMENTS, window)
    assert_allclose(run(q, k, v, window), expected, atol=2e-6)
    assert_allclose(run(q, k, v, window, jnp.bfloat16), expected, atol=3e-2)


def test_masked_is_removed() -> None:
    q, k, v = arrays()
    expected = run(q, k, v, None)
    # What no query of a segment sees may hold anything at all.
    k[0, :, 9:], v[0, :, 9:] = 1e6, 1e6
    got = run(q, k, v, None)
    assert_array_equal(got[0, :9], expected[0, :9])
    assert np.isfinite(got).all()


def test_large_logits_do_not_overflow() -> None:
    q, k, v = arrays()
    assert_allclose(run(1e4 * q, k, v, None)[1, 0], run(q, k, v, None)[1, 0], atol=1e-6)
    assert np.isfinite(run(1e4 * q, k, v, None)).all()
