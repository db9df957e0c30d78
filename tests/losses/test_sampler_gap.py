"""Gap of sampler and trainer: every metric against NumPy over the tokens, in one row or many, fresh or stale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.losses.sampler_gap import THIRDS, sampler_gap
from posttrain.tree import EDGES, Quantile, added, replace

pytestmark = pytest.mark.fast

APART, PACKED = ([[0], [1], [2], [3], [4], [5]], 12), ([[0, 1], [2, 3, 4], [5]], 24)


@pytest.mark.parametrize("layout", [APART, PACKED], ids=["apart", "packed"])
@pytest.mark.parametrize("stale", [False, True])
def test_metrics_are_those_of_the_tokens(sequences: Any, lay_out: Callable[..., Any], layout: Any, stale: bool) -> None:
    rows = lay_out(sequences, *layout)
    batch, trainer, mask = rows.batch, np.asarray(rows.stats.logps), rows.batch.loss_weight > 0
    staleness = np.zeros(batch.shape, np.int32)
    if stale:
        staleness[0] = 1
        batch = replace(batch, staleness=staleness)
    found = {name: m.value() for name, m in sampler_gap(rows.stats, batch, jnp.asarray(mask)).items()}
    fresh = mask & (staleness == 0)
    signed = (trainer - batch.sampler_logps).astype(np.float64)
    gap = np.abs(signed)
    third = np.full(batch.shape, -1)
    for row, segments in enumerate(np.asarray(batch.segments)):
        for segment in set(segments[segments > 0]):
            places = np.flatnonzero((segments == segment) & mask[row])
            third[row, places] = 3 * np.arange(len(places)) // max(len(places), 1)
    expected = {
        "mean": gap[fresh].mean(),
        "signed": signed[fresh].mean(),
        "max": gap[fresh].max(),
        "outliers": (gap[fresh] > 0.5).mean(),
    }
    for name, value in expected.items():
        assert found[f"sampling/logp_difference/{name}"] == pytest.approx(value, rel=1e-5, abs=1e-7), name
    for number, name in enumerate(THIRDS):
        assert found[name] == pytest.approx(gap[fresh & (third == number)].mean(), rel=1e-5), name
    assert found["sampling/kl"] == pytest.approx((np.expm1(signed) - signed)[fresh].mean(), rel=1e-4)
    largest = np.quantile(gap[fresh], 0.99, method="inverted_cdf")
    assert largest / 1.22 < found["sampling/logp_difference/p99"] < largest * 1.22
    assert ("sampling/logp_difference/stale_mean" in found) == stale


@pytest.mark.parametrize("scale", [1e-6, 1e-2, 3.0])
def test_the_quantile_is_within_a_bucket_and_exact_over_parts(scale: float) -> None:
    values = np.abs(np.random.default_rng(0).normal(0, scale, 5000)).astype(np.float32)
    counts = np.arange(5000) % 7 > 0
    whole = Quantile.of(jnp.asarray(values[None]), jnp.asarray(counts[None]), share=0.99)
    exact = np.quantile(values[counts], 0.99)
    assert whole.value() == pytest.approx(exact, rel=0.05)
    parts = [
        Quantile.of(jnp.asarray(values[None, part]), jnp.asarray(counts[None, part]), share=0.99)
        for part in (slice(0, 17), slice(17, 3000), slice(3000, None))
    ]
    assert (
        added(added(parts[0], parts[1]), parts[2]).value() == whole.value() == (parts[0] + parts[1] + parts[2]).value()
    )


def test_the_ends_of_the_quantile() -> None:
    def of(*values: float, counts: bool = True) -> float:
        return Quantile.of(jnp.asarray([values]), jnp.full((1, len(values)), counts), share=0.99).value()

    assert np.isnan(of(1.0, counts=False))
    assert of(0.0, 0.0) == 0.0
    assert of(1e9) == of(float("nan"), 0.0) == pytest.approx(float(EDGES[-1]))
