"""PolicyLoss against TRL's GRPO, GMPO and RLOO trainers: values, gradients and metrics, in float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.batch import Batch, TokenStats
from posttrain.losses.policy import GMPO, RLOO, PolicyLoss
from posttrain.losses.ratios import ImportanceSampling
from posttrain.losses.reduce import ConstantLength, Reduction, sequence_mean, sequence_total, token_mean
from posttrain.losses.surrogates import CISPOObjective, Clip, SAPOObjective, Surrogate, VESPOObjective
from posttrain.rl.step import top_entropy
from posttrain.tree import Mean, Metric, replace
from tests.often import often

RTOL = 1e-6
NUM_CASES = 98

REDUCTIONS: dict[str, Callable[[int], Reduction]] = {
    "grpo": lambda _: sequence_mean,
    "bnpo": lambda _: token_mean,
    "dapo": lambda _: token_mean,
    "dr_grpo": ConstantLength,
    "cispo": lambda _: token_mean,
    "sapo": lambda _: sequence_mean,
    "luspo": lambda _: sequence_total,
    "vespo": lambda _: token_mean,
}


def why_not_covered(args: dict[str, Any]) -> str | None:
    """What keeps a case from being ours."""
    if args["loss_type"] == "luspo" and (args["importance_sampling_level"] == "token" or args["beta"]):
        return "mean over padding: the reference counts masked tokens where values differ within a sequence"
    if args["entropy_coef"] and args["top_entropy_quantile"] < 1:
        return "the reference's entropy bonus is a mean over the tokens of high entropy alone"
    return None


NOT_COVERED = {
    "mean over padding: the reference counts masked tokens where values differ within a sequence": 5,
    "the reference's entropy bonus is a mean over the tokens of high entropy alone": 1,
}


def test_all_cases_are_accounted_for(golden: Callable[..., Any]) -> None:
    cases = golden("grpo").cases
    reasons = Counter(why_not_covered(case["args"]) for case in cases)
    covered = reasons.pop(None)
    assert len(cases) == NUM_CASES
    assert dict(reasons) == NOT_COVERED
    assert covered == NUM_CASES - sum(NOT_COVERED.values()) == 92


def surrogate_of(args: dict[str, Any]) -> Surrogate:
    match args["loss_type"]:
        case "cispo":
            return CISPOObjective()
        case "sapo":
            return SAPOObjective(positive=args["sapo_temperature_pos"], negative=args["sapo_temperature_neg"])
        case "vespo":
            return VESPOObjective(
                k_positive=args["vespo_k_pos"],
                rate_positive=args["vespo_lambda_pos"],
                k_negative=args["vespo_k_neg"],
                rate_negative=args["vespo_lambda_neg"],
            )
    return Clip()


def policy_loss(args: dict[str, Any]) -> PolicyLoss:
    high = args["epsilon"] if args["epsilon_high"] is None else args["epsilon_high"]
    return PolicyLoss(
        clip_low=args["epsilon"],
        # The reference's bound of CISPO is that of the ratio itself.
        clip_high=high - 1 if args["loss_type"] == "cispo" else high,
        reduce=REDUCTIONS[args["loss_type"]](args["max_completion_length"]),
        surrogate=surrogate_of(args),
        ratio="token" if args["importance_sampling_level"] == "token" else "sequence_mean",
        dual_clip=args["delta"],
        kl_coef=args["beta"],
        kl_bias_correction=args["use_bias_correction_kl"],
        entropy_coef=args["entropy_coef"],
        importance=importance_sampling(args["importance_sampling_ratio"]),
        off_policy_mask=args["off_policy_mask_threshold"],
    )


def importance_sampling(name: str | None) -> ImportanceSampling | None:
    """The settings of `is_LEVEL_BOUND_LOW_HIGH`, as the cases name them."""
    if name is None:
        return None
    _, level, bound, low, high = name.split("_")
    of_level: Any = {"token": "token", "sequence": "sequence_sum"}[level]
    return ImportanceSampling(
        level=of_level, bound=cast(Any, bound), low=None if low == "None" else float(low), high=float(high)
    )


def trl_denominator(args: dict[str, Any], num_rows: int, num_tokens: float) -> float:
    """What TRL divides a micro-batch's sum by: all rows (also fully masked ones), and the accumulation steps."""
    steps = args["gradient_accumulation_steps"] if args["training_mode"] else 1
    if args["loss_type"] in ("dapo", "cispo", "vespo"):
        return args["num_items_in_batch"] * (steps / args["steps_per_generation"] if args["training_mode"] else 1)
    return (
        steps
        * {
            "grpo": num_rows,
            "sapo": num_rows,
            "luspo": num_rows,
            "bnpo": num_tokens,
            "dr_grpo": num_rows * args["max_completion_length"],
        }[args["loss_type"]]
    )


def as_batch(arrays: dict[str, np.ndarray], args: dict[str, Any]) -> Batch:
    mask = arrays["in/completion_mask"].astype(np.float64)
    if args["tool_mask"]:
        mask = mask * arrays["in/tool_mask"]
    if args["fully_masked_rows"]:
        mask[args["fully_masked_rows"]] = 0.0
    advantages = arrays[f"in/{args['advantages']}"]
    zeros = np.zeros(mask.shape, np.int32)
    old = arrays["in/old_per_token_logps"] if args["use_old"] else arrays["in/per_token_logps"]
    weighs = args["importance_sampling_ratio"] is not None
    batch = Batch(
        tokens=zeros,
        positions=zeros,
        segments=zeros + 1,
        loss_weight=mask,
        old_logps=old,
        behaviour_logps=arrays["in/sampling_per_token_logps"] if weighs else old,
        ref_logps=arrays["in/ref_per_token_logps"],
        advantages=advantages if advantages.ndim == 2 else np.broadcast_to(advantages[:, None], mask.shape),
    )
    if args["top_entropy_quantile"] == 1.0:
        return batch
    (kept,), _ = top_entropy([batch], [arrays["in/entropies"]], args["top_entropy_quantile"])
    return kept


@pytest.mark.parametrize("loss_type", often(REDUCTIONS, "grpo", "dapo", "dr_grpo"))
def test_grpo(golden: Callable[..., Any], loss_type: str) -> None:
    data = golden("grpo")
    for case in data.cases:
        if case["args"]["loss_type"] == loss_type and why_not_covered(case["args"]) is None:
            check_grpo(case, data.arrays)


def test_without_its_bonus_the_case_of_an_entropy_bonus_is_covered(golden: Callable[..., Any]) -> None:
    data = golden("grpo")
    (case,) = [c for c in data.cases if c["name"] == "grpo_entropy_bonus_top_entropy"]
    args = {**case["args"], "entropy_coef": 0.0}
    with jax.enable_x64(True):
        logps = jnp.asarray(data.arrays["in/per_token_logps"])
        out = policy_loss(args)(TokenStats(logps=logps), as_batch(data.arrays, args))
    np.testing.assert_allclose(out.loss.value(), case["metrics"]["policy_loss"], rtol=RTOL)


def check_grpo(case: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    args, name = case["args"], case["name"]
    batch = as_batch(arrays, args)
    denominator = trl_denominator(args, batch.shape[0], float(np.sum(batch.loss_weight)))
    with jax.enable_x64(True):

        def value(logps: jax.Array) -> Any:
            out = policy_loss(args)(TokenStats(logps=logps, entropy=jnp.asarray(arrays["in/entropies"])), batch)
            return out.loss.total / denominator, out

        (loss, out), grad = jax.value_and_grad(value, has_aux=True)(jnp.asarray(arrays["in/per_token_logps"]))
    np.testing.assert_allclose(loss, case["loss"], rtol=RTOL, err_msg=name)
    np.testing.assert_allclose(grad, arrays[f"out/{name}/dlogps"], rtol=RTOL, atol=1e-12, err_msg=name)
    # Our own weight is the denominator, but for sequences without any token, which we do not count.
    by_rows = args["loss_type"] in ("grpo", "sapo", "luspo", "dr_grpo")
    if args["gradient_accumulation_steps"] == 1 and not (by_rows and args["fully_masked_rows"]):
        np.testing.assert_allclose(out.loss.weight, denominator, rtol=1e-12, err_msg=name)
    check_metrics(case, out.metrics)


def check_metrics(case: dict[str, Any], metrics: Mapping[str, Metric]) -> None:
    args, expected = case["args"], case["metrics"]
    names = {
        name: name for name in ("entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")
    }
    # TRL's `kl` is the corrected one where the correction is on; ours is always that of the samples.
    if args.get("beta") and not args.get("use_bias_correction_kl"):
        names["kl"] = "kl"
    # TRL counts neither weights that CISPO caps at negative advantages nor tokens without a gradient by `delta`.
    if "cispo_clip_ratio" in expected:
        assert metrics["clip_ratio/high_mean"].value() >= expected["cispo_clip_ratio"] * (1 - 1e-5)
    if "clip_ratio/dual_mean" in metrics:
        region = metrics["clip_ratio/region_mean"].value() - metrics["clip_ratio/dual_mean"].value()
        metrics = {**metrics, "clip_ratio/region_mean": Mean(total=region, weight=1.0)}
    for ours, theirs in names.items():
        # Tokens of low entropy have no advantage, so that they are not clipped.
        if theirs in expected and not (theirs.startswith("clip") and args.get("top_entropy_quantile", 1.0) < 1):
            np.testing.assert_allclose(
                metrics[ours].value(), expected[theirs], rtol=1e-5, err_msg=f"{case['name']}: {ours}"
            )


def test_more_micro_batches_add_weight(golden: Callable[..., Any]) -> None:
    """TRL's token count of a whole generation batch is our sum of the micro-batches' weights."""
    data = golden("grpo")
    case = next(case for case in data.cases if case["name"] == "dapo_grad_accum4")
    with jax.enable_x64(True):
        batch = as_batch(data.arrays, case["args"])
        loss = policy_loss(case["args"])(TokenStats(logps=jnp.asarray(data.arrays["in/per_token_logps"])), batch).loss
        tokens_elsewhere = case["args"]["num_items_in_batch"] - np.sum(batch.loss_weight)
        value = (loss + Mean(total=0.0, weight=tokens_elsewhere)).value()
    np.testing.assert_allclose(value, case["loss"], rtol=RTOL)


@pytest.mark.parametrize("name", ["gmpo", "gmpo_beta"])
def test_gmpo(golden: Callable[..., Any], name: str) -> None:
    data = golden("gmpo")
    assert {case["name"] for case in data.cases} == {"gmpo", "gmpo_beta"}
    case = next(case for case in data.cases if case["name"] == name)
    args, arrays = case["args"], data.arrays
    mask = arrays["in/completion_mask"].astype(np.float64)
    zeros = np.zeros(mask.shape, np.int32)
    batch = Batch(
        tokens=zeros,
        positions=zeros,
        segments=zeros + 1,
        loss_weight=mask,
        old_logps=arrays["in/old_per_token_logps"],
        ref_logps=arrays["in/ref_per_token_logps"],
        advantages=np.broadcast_to(arrays["in/advantages"][:, None], mask.shape),
    )
    gmpo = replace(
        GMPO,
        clip_low=args["epsilon_low"],
        clip_high=args["epsilon_high"],
        kl_coef=args["beta"],
        kl_bias_correction=False,
    )
    with jax.enable_x64(True):

        def value(logps: jax.Array) -> Any:
            out = gmpo(TokenStats(logps=logps), batch)
            return out.loss.total / out.loss.weight, out

        (loss, out), grad = jax.value_and_grad(value, has_aux=True)(jnp.asarray(arrays["in/per_token_logps"]))
    np.testing.assert_allclose(loss, case["loss"], rtol=RTOL)
    np.testing.assert_allclose(grad, arrays[f"out/{name}/dlogps"], rtol=RTOL, atol=1e-12)
    check_metrics({**case, "metrics": {k: v for k, v in case["metrics"].items() if k != "entropy"}}, out.metrics)


UNKNOWN = "is_nan_sampling_token_truncate_1.2"
"""The reference gives weight 1 to tokens of unknown log-probability; here such a step is refused."""


def test_vllm_is(golden: Callable[..., Any]) -> None:
    data = golden("vllm_is")
    assert len(data.cases) == 13
    old, sampling, mask = (
        data.arrays[f"in/{name}"] for name in ("old_per_token_logps", "sampling_per_token_logps", "completion_mask")
    )
    for case in data.cases:
        if case["name"] == UNKNOWN:
            continue
        importance = importance_sampling(case["name"])
        assert importance is not None
        with jax.enable_x64(True):
            weights, metrics = importance(
                jnp.asarray(old), jnp.asarray(sampling), jnp.asarray(mask > 0), jnp.ones(mask.shape, jnp.int32)
            )
        expected = np.broadcast_to(data.arrays[case["output"]], mask.shape)
        kept = mask > 0
        np.testing.assert_allclose(np.asarray(weights)[kept], expected[kept], rtol=RTOL, err_msg=case["name"])
        limit = importance.high
        assert limit is not None
        # TRL's metrics are those of the weights, ours of the ratios.
        if importance.bound == "truncate":
            largest = min(metrics["sampling/importance_sampling_ratio/max"].value(), limit)
            name = "sampling/importance_sampling_ratio/max"
            np.testing.assert_allclose(largest, case["metrics"][name], rtol=1e-5, err_msg=case["name"])


@pytest.mark.parametrize("name", ["default", "asym"])
def test_rloo(golden: Callable[..., Any], name: str) -> None:
    data = golden("rloo")
    assert {case["name"] for case in data.cases} == {"default", "asym"}
    case = next(case for case in data.cases if case["name"] == name)
    mask = data.arrays["in/completion_mask"].astype(np.float64)
    zeros = np.zeros(mask.shape, np.int32)
    batch = Batch(
        tokens=zeros,
        positions=zeros,
        segments=zeros + 1,
        loss_weight=mask,
        # The reference keeps the sum of each sequence; any tokens with that sum are the same to a sequence-level ratio.
        old_logps=mask * (data.arrays["in/old_logps"] / mask.sum(axis=1))[:, None],
        advantages=np.broadcast_to(data.arrays["in/advantages"][:, None], mask.shape),
    )
    rloo = replace(RLOO, clip_low=case["args"]["epsilon_low"], clip_high=case["args"]["epsilon_high"])
    with jax.enable_x64(True):

        def value(logps: jax.Array) -> Any:
            out = rloo(TokenStats(logps=logps, entropy=jnp.asarray(data.arrays["in/entropies"])), batch)
            return out.loss.total / out.loss.weight, out

        (loss, out), grad = jax.value_and_grad(value, has_aux=True)(jnp.asarray(data.arrays["in/per_token_logps"]))
    np.testing.assert_allclose(loss, case["loss"], rtol=RTOL)
    np.testing.assert_allclose(grad, data.arrays[f"out/{name}/dlogps"], rtol=RTOL, atol=1e-12)
    check_metrics(case, out.metrics)
