"""Gap of sampler and trainer: every metric against NumPy over the tokens, in one row or many, fresh or stale."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.batch import Batch, TokenStats
from posttrain.losses.ratios import THIRDS, sampler_gap
from posttrain.rl.agreement import EXACT, GAP, LIMIT, ROUNDED, SamplerGate, sampler_disagrees
from posttrain.tree import EDGES, Mean, Quantile, added, replace

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
        "square": np.square(gap[fresh]).mean(),
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


DRAW = np.random.default_rng(0)
JUDGED: dict[str, tuple[np.ndarray, int, bool]] = {
    "rounding of bfloat16": (DRAW.normal(0, 0.016, 96), 0, False),
    "8 bits": (DRAW.normal(0, 0.07, 96), 0, False),
    "one odd token": (np.append(np.full(199, 1e-4), 4.0), 0, False),
    "few tokens": (np.full(6, 0.02), 0, False),
    "normalised after top-p": (-DRAW.uniform(0.0, 0.0513, 96), 0, True),
    "a constant, as of a cached head": (np.full(12, 0.05), 0, True),
    "moved by updates": (DRAW.normal(0, 0.3, 96), 2, False),
    "one old token": (np.full(1, 9.0), 1, False),
    "3 nats, all old": (np.full(12, -3.0), 1, True),
    "old and not finite": (np.append(np.zeros(20), np.nan), 1, True),
}
"""Differences of the tokens, their staleness, and whether the update is refused."""


@jax.jit
def judged(batch: Batch, logps: Any, sampled: Any) -> Any:
    return sampler_disagrees(sampler_gap(TokenStats(logps=logps), batch, sampled))


@pytest.mark.parametrize("case", JUDGED)
def test_small_lies_are_told_from_rounding(case: str) -> None:
    difference, staleness, refused = JUDGED[case]
    # Tokens without weight make the cases of one shape, whose programs are compiled once.
    sampled = np.arange(200)[None] < len(difference)
    ones, zeros = np.ones((1, 200), np.int32), np.zeros((1, 200), np.float32)
    sampler_logps = zeros.copy()
    sampler_logps[sampled] -= difference.astype(np.float32)
    batch = Batch(
        tokens=ones,
        positions=ones,
        segments=ones,
        loss_weight=sampled.astype(np.float32),
        sampler_logps=sampler_logps,
        staleness=ones * staleness,
    )
    assert bool(judged(batch, zeros, sampled)) == refused


def test_the_gate_remembers_the_first_gap() -> None:
    """Limits of the mean: rounding at least, 20 times the first mean, and that of all runs; steps without fresh tokens
    change nothing."""

    def gap(mean: float, count: float = 8.0) -> dict[str, Any]:
        return {f"{GAP}/mean": Mean(total=mean * count, weight=count)}

    def judged(gate: SamplerGate, *steps: dict[str, Any]) -> list[tuple[bool, float]]:
        memory, made = jnp.asarray(gate.start()), []
        for metrics in steps:
            refused, memory, told = gate(metrics, memory)
            made.append((bool(refused), round(float(told[LIMIT]), 6)))
        return made

    exact, rounded = SamplerGate(rounding=EXACT), SamplerGate(rounding=ROUNDED)
    assert judged(exact, gap(7e-7), gap(9e-4), gap(0.016)) == [(False, EXACT), (False, EXACT), (True, EXACT)]
    assert judged(exact, gap(0.0, 0.0), gap(1e-3), gap(0.021)) == [(False, 0.1), (False, 0.02), (True, 0.02)]
    assert judged(rounded, gap(1e-4), gap(0.04), gap(0.06)) == [(False, ROUNDED), (False, ROUNDED), (True, ROUNDED)]
    assert judged(rounded, gap(0.06), gap(0.09), gap(0.11)) == [(False, 0.1), (False, 0.1), (True, 0.1)]
    assert bool(exact({}, jnp.float32(1e-7))[0]) is False and exact({}, jnp.float32(1e-7))[2] == {}


quantile = jax.jit(partial(Quantile.of, share=0.99))


@pytest.mark.parametrize("scale", [1e-6, 1e-2, 3.0])
def test_the_quantile_is_within_a_bucket_and_exact_over_parts(scale: float) -> None:
    values = np.abs(np.random.default_rng(0).normal(0, scale, 5000)).astype(np.float32)
    counts = np.arange(5000) % 7 > 0
    whole = quantile(values[None], counts[None])
    exact = np.quantile(values[counts], 0.99)
    assert whole.value() == pytest.approx(exact, rel=0.05)
    # Of one shape: elsewhere nothing counts.
    places, starts = np.arange(5000), (0, 17, 3000, 5000)
    parts = [quantile(values[None], (counts & (a <= places) & (places < b))[None]) for a, b in pairwise(starts)]
    assert (
        added(added(parts[0], parts[1]), parts[2]).value() == whole.value() == (parts[0] + parts[1] + parts[2]).value()
    )


def test_the_ends_of_the_quantile() -> None:
    def of(*values: float, counts: bool = True) -> float:
        return Quantile.of(jnp.asarray([values]), jnp.full((1, len(values)), counts), share=0.99).value()

    assert np.isnan(of(1.0, counts=False))
    assert of(0.0, 0.0) == 0.0
    assert of(1e9) == of(float("nan"), 0.0) == pytest.approx(float(EDGES[-1]))
