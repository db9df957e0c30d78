"""SFT losses against the golden and by property."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.batch import Batch, TokenStats
from posttrain.kernels.logits.chunk_stats import Terms
from posttrain.kernels.logits.token_stats import token_stats
from posttrain.losses.sft import DFTLoss, SFTLoss
from posttrain.tree import Mean, replace

pytestmark = pytest.mark.fast

LOSSES = {"nll": SFTLoss(), "dft": DFTLoss()}
CASES = ["nll", "nll_num_items37", "dft", "dft_num_items37"]
SMOOTHED = ["label_smoothing0.1", "label_smoothing0.2"]


def test_all_cases_are_accounted_for(golden: Callable[..., Any]) -> None:
    assert {case["name"] for case in golden("sft_dft").cases} == {*CASES, *SMOOTHED}


@pytest.mark.parametrize("name", SMOOTHED)
def test_label_smoothing(golden: Callable[..., Any], name: str) -> None:
    """transformers' `LabelSmoother`, from logits whose place t predicts token t + 1."""
    data = golden("sft_dft")
    case = next(case for case in data.cases if case["name"] == name)
    logits, labels = jnp.asarray(data.arrays["in/ls_logits"], jnp.float32), data.arrays["in/ls_labels"]
    tokens = np.where(labels < 0, 0, labels).astype(np.int32)
    ones = np.ones_like(tokens)
    batch = Batch(tokens=tokens, positions=ones, segments=ones, loss_weight=(labels >= 0).astype(np.float32))
    # As a first token has no prediction, its weight would be in the denominator alone.
    batch = replace(batch, loss_weight=np.where(np.arange(tokens.shape[1])[None] == 0, 0.0, batch.loss_weight))
    vocab = logits.shape[-1]

    def value(logits: jax.Array) -> Any:
        stats = token_stats(
            lambda x: x,
            logits,
            tokens,
            ones,
            temperature=1.0,
            vocab_size=vocab,
            only=jnp.asarray(batch.loss_weight) > 0,
            terms=Terms(mean_over=vocab),
        )
        loss = SFTLoss(case["args"]["epsilon"])(stats, batch).loss
        return loss.total / loss.weight

    loss, grad = jax.jit(jax.value_and_grad(value))(logits)
    np.testing.assert_allclose(loss, case["loss"], rtol=1e-5)
    np.testing.assert_allclose(grad, data.arrays[f"out/{name}/dlogits"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_golden(golden: Callable[..., Any], name: str) -> None:
    data = golden("sft_dft")
    case = next(case for case in data.cases if case["name"] == name)
    mask = data.arrays["in/label_mask"].astype(np.float64)
    # The reference divides by the labels of the whole accumulation window: the other micro-batches add weight here.
    others = (case["args"]["num_items_in_batch"] or mask.sum()) - mask.sum()
    zeros = np.zeros(mask.shape, np.int32)
    with jax.enable_x64(True):
        batch = Batch(tokens=zeros, positions=zeros, segments=zeros + 1, loss_weight=mask)

        def value(logps: jax.Array) -> Any:
            out = LOSSES[case["args"]["loss_type"]](TokenStats(logps=logps), batch)
            loss = out.loss + Mean(total=0.0, weight=others)
            return loss.total / loss.weight

        loss, grad = jax.value_and_grad(value)(jnp.asarray(data.arrays["in/per_token_logps"]))
    np.testing.assert_allclose(loss, case["loss"], rtol=1e-6)
    np.testing.assert_allclose(grad, data.arrays[f"out/{name}/dlogps"], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", ["nll", "dft"])
def test_packed_is_apart_and_masked_tokens_do_not_matter(
    sequences: Any, lay_out: Callable[..., Any], name: str
) -> None:
    packed = lay_out(sequences, [[0, 1], [2, 3, 4], [5]], 24)
    apart = lay_out(sequences, [[i] for i in range(6)], 12)

    def total(logps: jax.Array, rows: Any) -> Any:
        return LOSSES[name](replace(rows.stats, logps=logps), rows.batch).loss.total

    poisoned = jnp.where(packed.batch.loss_weight > 0, packed.stats.logps, jnp.nan)
    value, grad = jax.value_and_grad(total)(poisoned, packed)
    expected, expected_grad = jax.value_and_grad(total)(apart.stats.logps, apart)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for index, (row, place) in packed.where.items():
        other_row, other_place = apart.where[index]
        np.testing.assert_allclose(grad[row, place], expected_grad[other_row, other_place], rtol=1e-6)


def test_metrics(sequences: Any, lay_out: Callable[..., Any]) -> None:
    rows = lay_out(sequences, [[0, 1, 2], [3, 4, 5]], 30)
    metrics = LOSSES["dft"](rows.stats, rows.batch).metrics
    weight = rows.batch.loss_weight
    np.testing.assert_allclose(metrics["nll"].value(), -np.sum(weight * rows.stats.logps) / weight.sum(), rtol=1e-5)
    np.testing.assert_allclose(
        metrics["entropy"].value(), np.sum(weight * rows.stats.entropy) / weight.sum(), rtol=1e-5
    )
    without = LOSSES["dft"](replace(rows.stats, entropy=None), rows.batch).metrics
    assert set(without) == {"nll"}
