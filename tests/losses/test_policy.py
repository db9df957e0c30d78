"""PolicyLoss by property: packing, masking, order and splits change nothing; presets are what their papers say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, reduce
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.batch import Batch, LossOutput, TokenStats
from posttrain.losses.policy import (
    CISPO,
    DAPO,
    GMPO,
    GRPO,
    GSPO,
    GSPO_TOKEN,
    LUSPO,
    RLOO,
    SAPO,
    VESPO,
    PolicyLoss,
    dr_grpo,
)
from posttrain.losses.ratios import ImportanceSampling, k1, k2
from posttrain.losses.reduce import ConstantLength, sequence_mean, token_mean
from posttrain.tree import added, added_up, replace

LOSSES = {
    "grpo": GRPO,
    "dr_grpo": dr_grpo(16),
    "dapo": DAPO,
    "gspo": GSPO,
    "rloo": RLOO,
    "all_terms": replace(
        GRPO, dual_clip=1.5, kl_coef=0.1, kl_estimator=k2, kl_bias_correction=True, entropy_coef=0.01, reduce=token_mean
    ),
    "importance": replace(DAPO, importance=ImportanceSampling(level="sequence_mean", bound="mask", low=0.9, high=1.2)),
    "gspo_token": GSPO_TOKEN,
    "luspo": LUSPO,
    "cispo": replace(CISPO, clip_high=0.2),
    "sapo": SAPO,
    "vespo": replace(VESPO, importance=ImportanceSampling()),
    "gmpo": replace(GMPO, clip_high=0.3),
    "rejected": replace(DAPO, importance=ImportanceSampling(bound="reject", low=0.4, high=1.8), off_policy_mask=0.1),
}
APART = [[0], [1], [2], [3], [4], [5]]
MIXED = [[0, 1], [2, 3, 4], [5]]
FEW = ("grpo", "gspo", "all_terms", "gmpo", "rejected")
"""One of each way to reduce, to bound and to weight."""
every_loss = pytest.mark.parametrize(
    "loss",
    [pytest.param(loss, id=name, marks=() if name in FEW else pytest.mark.thorough) for name, loss in LOSSES.items()],
)


@pytest.fixture(scope="module")
def rows_of(lay_out: Callable[..., Any]) -> Callable[..., Any]:
    """Rows of one shape, with empty ones, so that a loss is compiled once."""
    return lambda sequences, layout: lay_out(sequences, [*layout, *[[]] * (len(APART) - len(layout))], 24)


@cache
def program(loss: PolicyLoss) -> Callable[..., Any]:
    def total(logps: jax.Array, stats: TokenStats, batch: Batch) -> Any:
        out = loss(replace(stats, logps=logps), batch)
        return out.loss.total, out

    return jax.jit(jax.grad(total, has_aux=True))


def run(loss: PolicyLoss, rows: Any) -> tuple[LossOutput, np.ndarray]:
    """The output and the gradient of its total by log-probs."""
    grad, out = program(loss)(rows.stats.logps, rows.stats, rows.batch)
    return out, np.asarray(grad)


def assert_same_outputs(actual: LossOutput, expected: LossOutput) -> None:
    assert set(actual.metrics) == set(expected.metrics)
    for name, metric in {**actual.metrics, "loss": actual.loss}.items():
        other = expected.loss if name == "loss" else expected.metrics[name]
        numbers = [np.concatenate([np.ravel(x) for x in jax.tree.leaves(one)]) for one in (metric, other)]
        np.testing.assert_allclose(*numbers, rtol=2e-6, atol=2e-6, err_msg=name)


def assert_same_gradient(one: tuple[np.ndarray, Any], other: tuple[np.ndarray, Any], indices: Sequence[int]) -> None:
    for index in indices:
        here, there = one[1].where[index], other[1].where[index]
        np.testing.assert_allclose(one[0][here], other[0][there], rtol=1e-6, atol=1e-6)


@pytest.mark.few(3)
@every_loss
def test_packed_is_apart(
    sequences: Any, lay_out: Callable[..., Any], rows_of: Callable[..., Any], loss: PolicyLoss
) -> None:
    """Nor does the shape of the batch matter."""
    apart, packed = rows_of(sequences, APART), lay_out(sequences, [[3, 0], [5, 1, 4], [2]], 30)
    expected, expected_grad = run(loss, apart)
    actual, grad = run(loss, packed)
    assert np.abs(grad).max() > 1e-3
    assert_same_outputs(actual, expected)
    assert_same_gradient((grad, packed), (expected_grad, apart), range(6))


@every_loss
@pytest.mark.parametrize("split", [[2, 4], pytest.param([1] * 6, marks=pytest.mark.thorough)])
def test_any_split_and_order_of_rows(
    sequences: Any, rows_of: Callable[..., Any], loss: PolicyLoss, split: list[int]
) -> None:
    whole = rows_of(sequences, APART)
    expected, expected_grad = run(loss, whole)
    order = [4, 2, 5, 0, 3, 1]
    outputs, starts = [], np.cumsum([0, *split])
    for start, stop in pairwise(starts):
        rows = [[i] for i in order[start:stop]]
        part = rows_of(sequences, rows)
        out, grad = run(loss, part)
        outputs.append(out)
        assert_same_gradient((grad, part), (expected_grad, whole), order[start:stop])
    assert_same_outputs(reduce(added, outputs), expected)
    assert_same_outputs(added_up(jax.tree.map(lambda *one: jnp.stack(one), *outputs)), expected)


@every_loss
def test_masked_is_removed(sequences: Any, rows_of: Callable[..., Any], loss: PolicyLoss) -> None:
    masked = [dict(sequence) for sequence in sequences]
    for index in (1, 4):
        masked[index]["loss_weight"] = np.zeros_like(masked[index]["loss_weight"])
    with_masked = rows_of(masked, MIXED)
    removed = rows_of(sequences, [[0], [2, 3], [5]])
    actual, grad = run(loss, with_masked)
    expected, expected_grad = run(loss, removed)
    assert_same_outputs(actual, expected)
    assert_same_gradient((grad, with_masked), (expected_grad, removed), [0, 2, 3, 5])
    assert not grad[with_masked.where[1]].any()


@every_loss
def test_masked_tokens_may_hold_anything(sequences: Any, rows_of: Callable[..., Any], loss: PolicyLoss) -> None:
    rows = rows_of(sequences, MIXED)
    masked = rows.batch.loss_weight == 0
    poison = np.resize(np.asarray([np.nan, np.inf, -np.inf, 1e38], np.float32), masked.shape)

    def poisoned(x: Any) -> jax.Array:
        return jnp.where(masked, poison, x)

    names = ("sampler_logps", "behaviour_logps", "old_logps", "ref_logps", "advantages")
    batch = replace(rows.batch, **{name: poisoned(vars(rows.batch)[name]) for name in names})
    stats = replace(rows.stats, logps=poisoned(rows.stats.logps), entropy=poisoned(rows.stats.entropy))
    actual, grad = run(loss, replace(rows, stats=stats, batch=batch))
    expected, expected_grad = run(loss, rows)
    assert_same_outputs(actual, expected)
    np.testing.assert_array_equal(grad, expected_grad)


@every_loss
def test_without_old_logps_the_gradient_is_the_plain_policy_gradient(
    sequences: Any, rows_of: Callable[..., Any], loss: PolicyLoss
) -> None:
    """Bitwise ratio 1 and nothing clipped, however far the sampler's log-probabilities are: rounding in bfloat16."""
    rows = rows_of(sequences, MIXED)
    logps = rows.stats.logps
    plain = replace(loss, entropy_coef=0.0, importance=None, off_policy_mask=None)
    gradients = []
    for noise in (0.0, 6e-3, 0.3):
        sampler = logps + np.random.default_rng(1).normal(0, noise, logps.shape).astype(np.float32)
        batch = replace(rows.batch, sampler_logps=sampler, old_logps=None, ref_logps=logps)
        out, grad = run(plain, replace(rows, batch=batch))
        assert out.metrics["ratio/mean"].value() == 1.0
        for name in {"kl", "approx_kl", "clip_ratio/region_mean"} & out.metrics.keys():
            assert out.metrics[name].value() == 0.0, name
        assert (out.metrics["sampling/logp_difference/max"].value() > 0) == (noise > 0)
        gradients.append(grad)
    np.testing.assert_array_equal(gradients[0], gradients[1])
    np.testing.assert_array_equal(gradients[0], gradients[2])
    # -A of each token; a mean over the sequence divides it by the sequence's tokens.
    divided = loss.reduce is sequence_mean and loss.ratio != "sequence_sum"
    for place in rows.where.values():
        weight = rows.batch.loss_weight[place]
        expected = -rows.batch.advantages[place] * weight / (weight.sum() if divided else 1.0)
        np.testing.assert_allclose(gradients[0][place], expected, rtol=1e-5, atol=1e-7)


def test_the_sampler_is_compared_with_the_trainer_on_fresh_tokens(sequences: Any, rows_of: Callable[..., Any]) -> None:
    """Whatever the proximal policy is; older tokens have a mean of their own, and no part in the others."""
    rows = rows_of(sequences, APART)
    assert np.abs(run(DAPO, rows)[1] - run(DAPO, replace(rows, batch=replace(rows.batch, old_logps=None)))[1]).max() > 0
    gap = np.abs(rows.stats.logps - rows.batch.sampler_logps)
    sampled = rows.batch.loss_weight > 0
    stale = np.zeros(rows.batch.shape, np.int32)
    stale[:3] = 2
    for staleness in (None, stale):
        out, _ = run(DAPO, replace(rows, batch=replace(rows.batch, staleness=staleness)))
        counted = sampled & (True if staleness is None else staleness == 0)
        found = {name: out.metrics[f"sampling/logp_difference/{name}"].value() for name in ("mean", "max", "outliers")}
        expected = {"mean": gap[counted].mean(), "max": gap[counted].max(), "outliers": (gap[counted] > 0.5).mean()}
        assert found == pytest.approx(expected, rel=1e-5) and 0 < expected["outliers"] < 0.5
        if staleness is not None:
            old = out.metrics["sampling/logp_difference/stale_mean"].value()
            assert old == pytest.approx(gap[sampled & (staleness > 0)].mean(), rel=1e-5)


def test_metrics_that_the_batch_cannot_give_are_absent(sequences: Any, rows_of: Callable[..., Any]) -> None:
    rows = rows_of(sequences, APART)
    bare = replace(
        rows,
        stats=replace(rows.stats, entropy=None),
        batch=replace(rows.batch, ref_logps=None, sampler_logps=None),
    )
    full, _ = run(DAPO, rows)
    out, _ = run(DAPO, bare)
    gap = {name for name in full.metrics if name.startswith("sampling/")}
    assert set(full.metrics) - set(out.metrics) == {"kl", "entropy", *gap} and len(gap) == 10


@pytest.mark.parametrize("difference", [500.0, -500.0])
@pytest.mark.parametrize("loss", [GRPO, GSPO, RLOO, CISPO, SAPO, VESPO, GMPO], ids=lambda loss: repr(loss.surrogate))
def test_extreme_ratios_stay_finite(
    sequences: Any, rows_of: Callable[..., Any], loss: PolicyLoss, difference: float
) -> None:
    """Of every sign of the advantage."""
    rows = rows_of(sequences, APART)
    batch = replace(
        rows.batch,
        old_logps=rows.stats.logps + difference,
        ref_logps=rows.stats.logps + difference,
        advantages=np.broadcast_to(np.float32([[1], [-1], [0]] * 2), rows.batch.shape),
    )
    out, grad = run(loss, replace(rows, batch=batch))
    assert np.isfinite(out.loss.total)
    assert np.isfinite(grad).all()


def test_what_is_missing_is_named(sequences: Any, rows_of: Callable[..., Any]) -> None:
    rows = rows_of(sequences, APART)
    missing = [
        (GRPO, {"ref_logps": None}, r"batch\.ref_logps is None but kl_coef=0\.04 needs it"),
        (DAPO, {"advantages": None}, r"batch\.advantages is None"),
        (
            LOSSES["importance"],
            {"behaviour_logps": None},
            r"batch\.behaviour_logps is None but importance sampling needs it",
        ),
    ]
    for loss, absent, message in missing:
        with pytest.raises(ValueError, match=message):
            loss(rows.stats, replace(rows.batch, **absent))
    with pytest.raises(ValueError, match=r"stats\.entropy is None but entropy_coef=0\.1 needs it"):
        replace(DAPO, entropy_coef=0.1)(replace(rows.stats, entropy=None), rows.batch)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"clip_low": 0.0}, "must be positive"),
        ({"dual_clip": 1.1}, "dual_clip=1.1 must be at least"),
        ({"kl_coef": -0.1}, "must not be negative"),
        ({"surrogate": CISPO.surrogate, "dual_clip": 1.5}, "dual_clip=1.5 has no effect on the surrogate CISPO"),
        ({"surrogate": GMPO.surrogate, "ratio": "sequence_mean"}, "use ratio: token"),
        ({"off_policy_mask": 0.0}, "must be positive"),
        ({"kl_estimator": k1, "kl_bias_correction": False}, "the gradient of k1 is 0 in expectation"),
    ],
)
def test_bad_values(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(GRPO, **fields)


def test_gspo_token_is_gspo_with_a_gradient_per_token(sequences: Any, rows_of: Callable[..., Any]) -> None:
    """Equal in value; equal in the sum over a sequence of the gradient, where the advantage is the sequence's."""
    rows = rows_of(sequences, APART)
    loose = {"clip_low": 0.5, "clip_high": 0.5}
    (gspo, grad), (token, by_token) = run(replace(GSPO, **loose), rows), run(replace(GSPO_TOKEN, **loose), rows)
    np.testing.assert_allclose(token.loss.total, gspo.loss.total, rtol=1e-6)
    np.testing.assert_allclose(by_token, grad, rtol=1e-5, atol=1e-7)
    # With advantages per token each gradient is of its own.
    uneven = replace(rows, batch=replace(rows.batch, advantages=rows.batch.advantages * (1 + rows.batch.positions)))
    (_, grad), (_, by_token) = run(replace(GSPO, **loose), uneven), run(replace(GSPO_TOKEN, **loose), uneven)
    assert np.abs(by_token - grad).max() > 0.01


def test_off_policy_mask(sequences: Any, rows_of: Callable[..., Any]) -> None:
    """Sequences of negative advantage, farther from the sampler than the threshold, have no gradient."""
    rows = rows_of(sequences, APART)
    mask = rows.batch.loss_weight > 0
    gap = np.where(mask, rows.batch.behaviour_logps - rows.stats.logps, 0.0).sum(axis=1) / mask.sum(axis=1)
    negative = rows.batch.advantages.min(axis=1) < 0
    dropped = negative & (gap > 0.1)
    assert dropped.any() and (negative & ~dropped).any() and (gap[~negative] > 0.1).any()
    out, grad = run(replace(DAPO, off_policy_mask=0.1), rows)
    plain = run(DAPO, rows)[1]
    np.testing.assert_array_equal(grad[dropped], 0.0)
    np.testing.assert_array_equal(grad[~dropped], plain[~dropped])
    assert np.abs(plain[dropped]).max() > 0
    share = mask[dropped].sum() / mask.sum()
    assert out.metrics["sampling/off_policy_masked"].value() == pytest.approx(share)


BOUNDED: dict[str, PolicyLoss] = {
    **LOSSES,
    "dual_clip": replace(GRPO, dual_clip=1.4, kl_coef=0.0),
    "gspo_dual_clip": replace(GSPO, clip_low=0.1, clip_high=0.1, dual_clip=1.2),
    "cispo_low": replace(CISPO, clip_high=0.1),
}


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("seed", range(3))
def test_clip_ratio_is_the_share_without_a_gradient_or_with_a_capped_weight(name: str, seed: int) -> None:
    """Masks against autodiff and against a float64 computation of the weights; with `clip_ratio/*` their shares."""
    loss = replace(BOUNDED[name], kl_coef=0.0, entropy_coef=0.0, importance=None, off_policy_mask=None)
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 9, 6)
    width = int(lengths.max()) + 1
    weight = (np.arange(width) > 0) & (np.arange(width) <= lengths[:, None])
    old = np.where(weight, draw.normal(-2, 0.3, weight.shape), 0.0).astype(np.float32)
    logps = np.where(weight, old + draw.normal(0, 0.5, weight.shape), 0.0).astype(np.float32)
    # One sign of the advantage in a sample, where its tokens share a ratio.
    signs = draw.choice([-1.0, 1.0], (6, 1)) if loss.ratio != "token" else draw.choice([-1.0, 1.0], weight.shape)
    advantages = np.where(weight, signs * draw.uniform(0.2, 2.0, weight.shape), 0.0).astype(np.float32)
    batch = Batch(
        tokens=np.zeros(weight.shape, np.int32),
        positions=np.broadcast_to(np.arange(width, dtype=np.int32), weight.shape),
        segments=np.ones(weight.shape, np.int32),
        loss_weight=weight.astype(np.float32),
        old_logps=old,
        advantages=advantages,
    )
    tokens = loss.tokens(TokenStats(logps=jnp.asarray(logps)), batch)
    output = loss.surrogate(tokens.terms)
    gradient = jax.grad(lambda x: loss.tokens(TokenStats(logps=x), batch).loss.sum())(jnp.asarray(logps))
    without = np.any([np.asarray(mask) for mask in output.zero_gradient.values()] or [np.zeros_like(weight)], axis=0)
    np.testing.assert_array_equal(without & weight, (np.asarray(gradient) == 0) & weight)

    capped = np.zeros_like(weight) if output.capped is None else np.asarray(output.capped)
    if name.startswith("cispo"):
        ratio = np.exp(logps.astype(np.float64) - old)
        np.testing.assert_array_equal(capped, weight & (np.minimum(ratio, 1 + loss.clip_high) < ratio))
        assert (capped & (advantages < 0)).any()
    metrics = loss(TokenStats(logps=jnp.asarray(logps)), batch).metrics
    shares = {key: one.value() for key, one in metrics.items() if key.startswith("clip_ratio/")}
    changed = (without | capped) & weight
    by_sample = [row[counted].mean() for row, counted in zip(changed, weight, strict=True)]
    expected = changed[weight].mean() if loss.ratio == "token" else np.mean(by_sample)
    assert shares == {} if name in ("sapo", "vespo") else shares["clip_ratio/region_mean"] == pytest.approx(expected)
    assert sum(v for key, v in shares.items() if "region" not in key) == pytest.approx(shares.get(REGION, 0.0))
    assert ("clip_ratio/dual_mean" in shares) == (loss.dual_clip is not None)


REGION = "clip_ratio/region_mean"


def test_presets() -> None:
    assert (GRPO.reduce, GRPO.kl_coef, GRPO.clip_low, GRPO.clip_high) == (sequence_mean, 0.04, 0.2, 0.2)
    assert (DAPO.reduce, DAPO.kl_coef, DAPO.clip_low, DAPO.clip_high) == (token_mean, 0.0, 0.2, 0.28)
    assert (GSPO.ratio, GSPO.clip_low, GSPO.clip_high) == ("sequence_mean", 3e-4, 4e-4)
    assert [x.kl_bias_correction for x in (GRPO, DAPO, RLOO, GSPO)] == [True, True, True, False]
    assert (RLOO.ratio, RLOO.reduce, RLOO.kl_coef) == ("sequence_sum", sequence_mean, 0.0)
    assert dr_grpo(128).reduce == ConstantLength(128)
    assert len({*LOSSES.values(), dr_grpo(16), replace(GRPO)}) == len(LOSSES)
