"""PolicyLoss against TRL's GRPO and RLOO trainers: values, gradients and metrics, in float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.batch import Batch, TokenStats
from posttrain.losses.importance import ImportanceSampling
from posttrain.losses.policy import RLOO, PolicyLoss
from posttrain.losses.reduce import ConstantLength, Reduction, sequence_mean, token_mean
from posttrain.tree import Mean, Metric, replace

RTOL = 1e-6
NUM_CASES = 98

REDUCTIONS: dict[str, Callable[[int], Reduction]] = {
    "grpo": lambda _: sequence_mean,
    "bnpo": lambda _: token_mean,
    "dapo": lambda _: token_mean,
    "dr_grpo": ConstantLength,
}


def why_not_covered(args: dict[str, Any]) -> str | None:
    """What a case needs beyond `PolicyLoss`."""
    if args["loss_type"] not in REDUCTIONS:
        return "another surrogate: " + args["loss_type"]
    if args["off_policy_mask_threshold"] is not None:
        return "masking of off-policy sequences"
    if args["top_entropy_quantile"] != 1.0:
        return "masking of tokens of low entropy"
    return None


NOT_COVERED = {
    "another surrogate: cispo": 8,
    "another surrogate: sapo": 8,
    "another surrogate: luspo": 6,
    "another surrogate: vespo": 4,
    "masking of off-policy sequences": 3,
    "masking of tokens of low entropy": 4,
}


def test_all_cases_are_accounted_for(golden: Callable[..., Any]) -> None:
    cases = golden("grpo").cases
    reasons = Counter(why_not_covered(case["args"]) for case in cases)
    covered = reasons.pop(None)
    assert len(cases) == NUM_CASES
    assert dict(reasons) == NOT_COVERED
    assert covered == NUM_CASES - sum(NOT_COVERED.values()) == 65


def policy_loss(args: dict[str, Any]) -> PolicyLoss:
    return PolicyLoss(
        clip_low=args["epsilon"],
        clip_high=args["epsilon"] if args["epsilon_high"] is None else args["epsilon_high"],
        reduce=REDUCTIONS[args["loss_type"]](args["max_completion_length"]),
        ratio="token" if args["importance_sampling_level"] == "token" else "sequence_mean",
        dual_clip=args["delta"],
        kl_coef=args["beta"],
        kl_bias_correction=args["use_bias_correction_kl"],
        entropy_coef=args["entropy_coef"],
        importance=importance_sampling(args["importance_sampling_ratio"]),
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
    if args["loss_type"] == "dapo":
        return args["num_items_in_batch"] * (steps / args["steps_per_generation"] if args["training_mode"] else 1)
    return (
        steps
        * {
            "grpo": num_rows,
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
    return Batch(
        tokens=zeros,
        positions=zeros,
        segments=zeros + 1,
        loss_weight=mask,
        old_logps=arrays["in/old_per_token_logps"] if args["use_old"] else arrays["in/per_token_logps"],
        behaviour_logps=arrays["in/sampling_per_token_logps"],
        ref_logps=arrays["in/ref_per_token_logps"],
        advantages=advantages if advantages.ndim == 2 else np.broadcast_to(advantages[:, None], mask.shape),
    )


@pytest.mark.parametrize("loss_type", REDUCTIONS)
def test_grpo(golden: Callable[..., Any], loss_type: str) -> None:
    data = golden("grpo")
    for case in data.cases:
        if case["args"]["loss_type"] == loss_type and why_not_covered(case["args"]) is None:
            check_grpo(case, data.arrays)


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
    by_rows = args["loss_type"] in ("grpo", "dr_grpo")
    if args["gradient_accumulation_steps"] == 1 and not (by_rows and args["fully_masked_rows"]):
        np.testing.assert_allclose(out.loss.weight, denominator, rtol=1e-12, err_msg=name)
    check_metrics(case, out.metrics)


def check_metrics(case: dict[str, Any], metrics: Mapping[str, Metric]) -> None:
    names = {"entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"}
    # TRL's `kl` is the corrected one where the correction is on; ours is always that of the samples.
    if case["args"].get("beta") and not case["args"]["use_bias_correction_kl"]:
        names.add("kl")
    for name in names:
        np.testing.assert_allclose(
            metrics[name].value(), case["metrics"][name], rtol=1e-5, err_msg=f"{case['name']}: {name}"
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
