"""Losses of answers that are compared against TRL's DPO, KTO, CPO and ORPO trainers: values, gradients, metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.batch import Batch, TokenStats
from posttrain.losses.preference import KINDS, KTOLoss, PreferenceLoss
from posttrain.losses.reference_free import CPOLoss, ORPOLoss, SimPOLoss
from tests.often import often
from tests.oracles import token_stats_reference

WEIGHTED = "sigmoid_wpo"
"""The case of TRL's `use_weighting`, which `test_wpo` has."""


def rows_of(sequences: list[dict[str, np.ndarray]], per_row: int) -> tuple[np.ndarray, Batch]:
    """Sequences laid one after another, `per_row` in a row; the log-probabilities and the batch."""
    count = -(-len(sequences) // per_row)
    width = max(sum(len(s["logps"]) for s in sequences[r * per_row :][:per_row]) for r in range(count))
    names = ("logps", "ref_logps", "loss_weight", "roles", "segments", "positions")
    arrays = {name: np.zeros((count, width)) for name in names}
    for number, one in enumerate(sequences):
        row, start = number // per_row, 0
        for before in sequences[row * per_row : number]:
            start += len(before["logps"])
        place = slice(start, start + len(one["logps"]))
        values = one | {"segments": number % per_row + 1, "positions": np.arange(len(one["logps"]))}
        for name in names:
            arrays[name][row, place] = values[name]
    integers = {name: arrays.pop(name).astype(np.int32) for name in ("roles", "segments", "positions")}
    return arrays.pop("logps"), Batch(tokens=np.zeros((count, width), np.int32), **arrays, **integers)


def dpo_sequences(arrays: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Chosen and rejected in turn; TRL's first row half is chosen. The column that it shifts away comes back as 0."""
    mask = arrays["in/completion_mask"].astype(float)
    half = len(mask) // 2

    def one(row: int, role: int) -> dict[str, np.ndarray]:
        padded = {
            name: np.pad(arrays[f"in/{key}_per_token_logps"][row], (1, 0))
            for name, key in (("logps", "policy"), ("ref_logps", "ref"))
        }
        return {**padded, "loss_weight": mask[row], "roles": np.full(len(mask[row]), role)}

    return [one(row, role) for pair in range(half) for row, role in ((pair, 1), (pair + half, -1))]


def dpo_loss(args: dict[str, Any]) -> PreferenceLoss:
    kinds = tuple(args["loss_type"])
    fields: dict[str, Any] = {"kinds": kinds, "beta": args["beta"], "label_smoothing": args["label_smoothing"]}
    if args.get("loss_weights"):
        fields["weights"] = tuple(args["loss_weights"])
    if args.get("ld_alpha") is not None:
        fields["tail_weight"] = args["ld_alpha"]
    if args.get("f_divergence_type", "reverse_kl") != "reverse_kl":
        fields |= {"divergence": args["f_divergence_type"], "alpha": args["f_alpha_divergence_coef"]}
    if "discopop" in kinds:
        fields["temperature"] = args["discopop_tau"]
    return PreferenceLoss(**fields)


Outcome = tuple[float, np.ndarray, dict[str, float]]


def outcomes(calls: list[tuple[Any, np.ndarray, Batch]]) -> list[Outcome]:
    """Value, gradient and metrics of losses on log-probabilities, as one program: compiling each takes longer."""

    def value(logps: jax.Array, loss: Any, batch: Batch) -> Any:
        out = loss(TokenStats(logps=logps), batch)
        return out.loss.total / out.loss.weight, out.metrics

    def every(all_logps: list[jax.Array]) -> Any:
        return [
            jax.value_and_grad(value, has_aux=True)(logps, loss, batch)
            for logps, (loss, _, batch) in zip(all_logps, calls, strict=True)
        ]

    with jax.enable_x64(True):
        found = jax.device_get(jax.jit(every)([jnp.asarray(logps) for _, logps, _ in calls]))
    return [(float(loss), grad, {k: mean.value() for k, mean in m.items()}) for (loss, m), grad in found]


def check_metrics(case: dict[str, Any], metrics: dict[str, float], skip: tuple[str, ...] = ()) -> None:
    names = [n for n in case.get("metrics", {}) if n.startswith(("rewards/", "logps/")) and n not in skip]
    for name in names:
        np.testing.assert_allclose(
            metrics[name], case["metrics"][name], rtol=2e-5, atol=1e-7, err_msg=f"{case['name']}: {name}"
        )


PACKED = ("ipo_beta0.5", "aot_ls0.15", "sigmoid_ld0.4", "ipo_ld0.4", "mpo_sigmoid_bco_sft")
"""Cases that are also computed with all pairs in one row."""


@pytest.mark.parametrize("again", often([False, True], False))
def test_dpo(golden: Callable[..., Any], again: bool) -> None:
    """Every kind and every setting; and again with another beta."""
    data = golden("dpo")
    sequences = dpo_sequences(data.arrays)
    covered = [case for case in data.cases if case["name"] != WEIGHTED]
    assert len(covered) == len(data.cases) - 1 == 46
    assert {kind for case in covered for kind in case["args"]["loss_type"]} == set(KINDS)
    part = [case for case in covered if case["name"].endswith("_beta0.5") == again]
    checked = [(case, 2) for case in part] + [(case, 8) for case in part if case["name"] in PACKED]
    found = outcomes([(dpo_loss(case["args"]), *rows_of(sequences, per_row)) for case, per_row in checked])
    for (case, _), (loss, grad, metrics) in zip(checked, found, strict=True):
        tolerance = 1e-5 if "float32" in case["source"] else 1e-6
        np.testing.assert_allclose(loss, case["loss"], rtol=tolerance, err_msg=case["name"])
        check_metrics(case, metrics)
        reference = data.arrays[f"out/{case['name']}/dlogps"]
        order = [row for pair in range(len(reference) // 2) for row in (pair, pair + len(reference) // 2)]
        expected = np.pad(reference[order], ((0, 0), (1, 0)))
        np.testing.assert_allclose(
            grad.reshape(expected.shape), expected, rtol=tolerance * 10, atol=1e-9, err_msg=case["name"]
        )


def test_wpo(golden: Callable[..., Any]) -> None:
    """Pairs weighted by how probable the policy itself finds them; the weights have no gradient."""
    data = golden("dpo")
    case = next(case for case in data.cases if case["name"] == WEIGHTED)
    loss = PreferenceLoss(beta=case["args"]["beta"], use_weighting=True)
    logps, batch = rows_of(dpo_sequences(data.arrays), 2)
    of_squares = {**data.arrays, "in/policy_per_token_logps": data.arrays["in/log_sum_sq_probs"]}
    squares, _ = rows_of(dpo_sequences(of_squares), 2)

    def value(logps: jax.Array) -> jax.Array:
        out = loss(TokenStats(logps=logps, log_squares=jnp.asarray(squares)), batch).loss
        return out.total / out.weight

    with jax.enable_x64(True):
        found, grad = jax.device_get(jax.value_and_grad(value)(jnp.asarray(logps)))
    np.testing.assert_allclose(found, case["loss"], rtol=1e-6)
    reference = data.arrays[f"out/{WEIGHTED}/dlogps"]
    order = [row for pair in range(len(reference) // 2) for row in (pair, pair + len(reference) // 2)]
    expected = np.pad(reference[order], ((0, 0), (1, 0)))
    np.testing.assert_allclose(grad.reshape(expected.shape), expected, rtol=1e-5, atol=1e-9)


def trl_score(ratio: np.ndarray, divergence: str, alpha: float | None) -> np.ndarray:
    """`chosen_scores` and `rejected_scores` of TRL 1.16, `DPOTrainer._compute_loss`."""
    if divergence == "forward_kl":
        return 1 - np.exp(-ratio)
    if divergence == "js_divergence":
        return np.log(2) - np.logaddexp(0, -ratio)
    if alpha is not None:
        return (np.exp((alpha - 1) * ratio) - 1) / (alpha - 1)
    return ratio


@pytest.mark.parametrize(
    ("divergence", "alpha"), [("forward_kl", None), ("js_divergence", None), ("alpha_divergence", 0.5)]
)
def test_divergences_with_several_kinds(golden: Callable[..., Any], divergence: Any, alpha: float | None) -> None:
    """As in TRL: kinds that compare both answers see the divergence, those that judge each answer the log-ratio."""
    data = golden("dpo")
    logps, batch = rows_of(dpo_sequences(data.arrays), 2)
    weight = np.asarray(batch.loss_weight)
    ratios = np.where(weight > 0, logps - np.asarray(batch.ref_logps), 0) * np.sign(np.asarray(batch.roles))
    segments = np.asarray(batch.segments)
    chosen, rejected = ((ratios * (segments == s)).sum(axis=1) * sign for s, sign in ((1, 1), (2, -1)))
    lengths = [((weight > 0) & (segments == s)).sum(axis=1) for s in (1, 2)]
    scored = [trl_score(x, divergence, alpha) for x in (chosen, rejected)]
    b = 0.2
    delta = scored[0] - scored[1]

    def log_sigmoid(x: np.ndarray) -> np.ndarray:
        return -np.logaddexp(0, -x)

    def sigmoid(x: np.ndarray) -> np.ndarray:
        return np.exp(log_sigmoid(x))

    expected = {
        "sigmoid": -log_sigmoid(b * delta),
        "sigmoid_norm": -log_sigmoid(b * (scored[0] / lengths[0] - scored[1] / lengths[1])),
        "nca_pair": -log_sigmoid(b * chosen) - 0.5 * log_sigmoid(-b * chosen) - 0.5 * log_sigmoid(-b * rejected),
        "bco_pair": -log_sigmoid(b * chosen) - log_sigmoid(-b * rejected),
        "sppo_hard": (chosen - 0.5 / b) ** 2 + (rejected + 0.5 / b) ** 2,
        "apo_zero": 1 - sigmoid(b * chosen) + sigmoid(b * rejected),
        "apo_down": sigmoid(b * chosen) + 1 - sigmoid(b * (chosen - rejected)),
    }
    with jax.enable_x64(True):
        for kind, values in expected.items():
            kinds = ("sigmoid",) if kind == "sigmoid" else ("sigmoid", kind)
            weights = (1.0,) if kind == "sigmoid" else (0.5, 1.0)
            loss = PreferenceLoss(kinds=kinds, weights=weights, beta=b, divergence=divergence, alpha=alpha)
            out = loss(TokenStats(logps=jnp.asarray(logps)), batch).loss
            other = 0.0 if kind == "sigmoid" else 0.5 * expected["sigmoid"].mean()
            found = float(out.total / out.weight)
            np.testing.assert_allclose(found, other + values.mean(), rtol=1e-6, err_msg=kind)


def kto_sequences(case: dict[str, Any], arrays: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Each answer, and after it the prompt with another answer."""

    def one(row: int, role: int, mask: str, policy: str, ref: str) -> dict[str, np.ndarray]:
        weight = arrays[f"in/{mask}"][row].astype(float)
        logps, ref_logps = (np.pad(arrays[f"in/{name}"][row], (1, 0)) for name in (policy, ref))
        return {
            "logps": logps,
            "ref_logps": ref_logps,
            "loss_weight": weight,
            "roles": np.full(len(weight), role),
        }

    answer = ("completion_mask", "policy_per_token_logps", "ref_per_token_logps")
    other = ("KL_completion_mask", "KL_per_token_logps", case["args"]["KL_ref"])
    return [
        one(row, role, *names)
        for row, label in enumerate(case["args"]["label"])
        for role, names in ((1 if label else -1, answer), (2, other))
    ]


def test_kto(golden: Callable[..., Any]) -> None:
    data = golden("kto")
    calls = []
    for case in data.cases:
        args = case["args"]
        loss = KTOLoss(
            kind=args["loss_type"],
            beta=args["beta"],
            desirable_weight=args["desirable_weight"],
            undesirable_weight=args["undesirable_weight"],
        )
        calls += [(loss, *rows_of(kto_sequences(case, data.arrays), per_row)) for per_row in (1, 3)]
    for number, (value, grad, metrics) in enumerate(outcomes(calls)):
        case = data.cases[number // 2]
        np.testing.assert_allclose(value, case["loss"], rtol=1e-6, err_msg=case["name"])
        check_metrics(case, metrics, skip=("rewards/margins",))
        if case["args"]["loss_type"] == "kto":
            np.testing.assert_allclose(metrics["kl"], case["metrics"]["kl"], rtol=1e-6)
        grads = grad.reshape(2 * len(case["args"]["label"]), -1)
        expected = np.pad(data.arrays[f"out/{case['name']}/dlogps"], ((0, 0), (1, 0)))
        np.testing.assert_allclose(grads[::2], expected, rtol=1e-5, atol=1e-9, err_msg=case["name"])
        assert not grads[1::2].any(), "the KL has no gradient"


def free_loss(name: str, args: dict[str, Any]) -> Any:
    if name.startswith("orpo"):
        return ORPOLoss(beta=args["beta"])
    common = {"beta": args["beta"], "label_smoothing": args["label_smoothing"], "nll_coef": args["cpo_alpha"]}
    if args["loss_type"] == "simpo":
        return SimPOLoss(gamma=args["simpo_gamma"], alpha=args["alpha"], **common)
    return CPOLoss(kind=args["loss_type"], **common)


def test_reference_free(golden: Callable[..., Any]) -> None:
    data = golden("cpo_simpo_orpo")
    rows = data.arrays["in/input_ids"].shape[0]
    order = [row for pair in range(rows // 2) for row in (pair, pair + rows // 2)]
    tokens, mask, labels, logits = (
        data.arrays[f"in/{name}"][order] for name in ("input_ids", "attention_mask", "labels", "logits")
    )
    lengths = mask.sum(axis=1)
    names = {"tokens": np.int32, "segments": np.int32, "positions": np.int32, "loss_weight": float, "roles": np.int32}
    width = int((lengths[::2] + lengths[1::2]).max())
    arrays = {name: np.zeros((rows // 2, width), dtype) for name, dtype in names.items()}
    packed = np.zeros((rows // 2, width, logits.shape[-1]))
    for number in range(rows):
        start, length = (0 if number % 2 == 0 else lengths[number - 1]), lengths[number]
        place = (number // 2, slice(start, start + length))
        arrays["tokens"][place] = tokens[number, :length]
        arrays["segments"][place] = number % 2 + 1
        arrays["positions"][place] = np.arange(length)
        answer = labels[number, :length] != -100
        arrays["loss_weight"][place] = answer
        arrays["roles"][place] = np.where(answer, 1 - 2 * (number % 2), 0)
        packed[place] = logits[number, :length]
    # ORPO's likelihood is that of prompts as well.
    prompts = (arrays["positions"] > 0) & (arrays["segments"] == 1)
    batches = {
        "": Batch(**arrays),
        "orpo": Batch(**arrays | {"loss_weight": np.maximum(arrays["loss_weight"], prompts)}),
    }

    def value(logits: jax.Array, loss: Any) -> Any:
        batch = batches["orpo" if isinstance(loss, ORPOLoss) else ""]
        stats = token_stats_reference(logits, jnp.asarray(batch.tokens), jnp.asarray(batch.segments), temperature=1.0)
        out = loss(TokenStats(logps=stats.logps), batch)
        return out.loss.total / out.loss.weight, out.metrics

    def every(logits: jax.Array) -> Any:
        losses = [free_loss(case["name"], case["args"]) for case in data.cases]
        return [jax.value_and_grad(value, has_aux=True)(logits, loss) for loss in losses]

    with jax.enable_x64(True):
        made = jax.device_get(jax.jit(every)(jnp.asarray(packed)))
    for case, ((found, means), grad) in zip(data.cases, made, strict=True):
        np.testing.assert_allclose(found, case["loss"], rtol=1e-5, err_msg=case["name"])
        metrics = {name: mean.value() for name, mean in means.items()}
        averaged = case["name"].startswith("orpo") or case["args"].get("loss_type") in ("ipo", "simpo")
        # TRL's logps are those that its loss takes: means over tokens in some; ours are sums in all.
        check_metrics(case, metrics, skip=("logps/chosen", "logps/rejected") if averaged else ())
        for name in ("log_odds_ratio", "log_odds_chosen"):
            if name in case["metrics"]:
                np.testing.assert_allclose(metrics[name], case["metrics"][name], rtol=1e-5)
        if case["args"].get("cpo_alpha", 1.0) > 0:
            np.testing.assert_allclose(metrics["nll"], case["metrics"]["nll_loss"], rtol=1e-5)
        expected = data.arrays[f"out/{case['name']}/dlogits"][order]
        for number in range(rows):
            start, length = (0 if number % 2 == 0 else lengths[number - 1]), lengths[number]
            got = grad[number // 2, start : start + length]
            np.testing.assert_allclose(got, expected[number, :length], rtol=1e-4, atol=1e-7, err_msg=case["name"])
