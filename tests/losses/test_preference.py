"""Properties of losses on judged answers: what is masked, packed or split does not matter; what is missing is said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.batch import Batch, BatchLoss, LossOutput, ScoreStats, TokenStats
from posttrain.losses.kto import KTOLoss
from posttrain.losses.preference import PreferenceLoss
from posttrain.losses.reference_free import CPOLoss, ORPOLoss, SimPOLoss
from posttrain.losses.reward_model import BradleyTerryLoss, ProcessLoss
from posttrain.tree import replace
from tests.losses.conftest import read_golden

ROLES = (1, -1, 1, -1, 1, -1)
EVERY = {
    "dpo": PreferenceLoss(),
    "several": PreferenceLoss(kinds=("ipo", "bco_pair"), weights=(0.5, 2.0), tail_weight=0.5),
    "simpo": SimPOLoss(),
    "cpo without nll": CPOLoss(nll_coef=0.0),
    "apo_zero_unpaired": KTOLoss(kind="apo_zero_unpaired"),
    "bradley_terry": BradleyTerryLoss(center_coef=0.1),
    "process": ProcessLoss(),
}
WHOLE = {
    "aot": PreferenceLoss(kinds=("aot",)),
    "aot_unpaired": PreferenceLoss(kinds=("aot_unpaired",), label_smoothing=0.1),
    "sft": PreferenceLoss(kinds=("sigmoid", "sft")),
    "kto": KTOLoss(),
    "cpo": CPOLoss(),
    "orpo": ORPOLoss(),
}


def sequences(count: int = 6) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    made = []
    for number, (prompt, answer) in enumerate([(2, 3), (2, 5), (1, 4), (1, 2), (3, 2), (3, 6)][:count]):
        answers = np.arange(prompt + answer) >= prompt
        logps = -rng.exponential(1.0, prompt + answer)
        role = ROLES[number]
        made.append(
            {
                "logps": logps,
                "ref_logps": logps + rng.normal(0, 0.5, logps.shape),
                "loss_weight": answers * 1.0,
                "roles": answers * role,
                "margins": answers * 0.3 * (role == 1),
            }
        )
    return made


def lay_out(made: Sequence[dict[str, np.ndarray]], layout: Sequence[Sequence[int]], width: int = 34) -> Any:
    """Statistics and batch with these sequences in these rows."""
    names = ("logps", "ref_logps", "loss_weight", "roles", "margins", "segments", "positions")
    arrays = {name: np.zeros((len(layout), width)) for name in names}
    for row, numbers in enumerate(layout):
        start = 0
        for segment, number in enumerate(numbers, start=1):
            place = slice(start, start + len(made[number]["logps"]))
            values = made[number] | {"segments": segment, "positions": np.arange(place.stop - start)}
            for name in names:
                arrays[name][row, place] = values[name]
            start = place.stop
    integers = {name: arrays.pop(name).astype(np.int32) for name in ("roles", "segments", "positions")}
    logps = jnp.asarray(arrays.pop("logps"))
    return logps, Batch(tokens=np.zeros(logps.shape, np.int32), **integers, **arrays)


def apply(loss: Any, logps: jax.Array, batch: Batch) -> LossOutput:
    scored = isinstance(loss, BradleyTerryLoss | ProcessLoss)
    return loss(ScoreStats(scores=logps) if scored else TokenStats(logps=logps), batch)


def value(loss: Any, made: Any, layout: Any) -> Any:
    """Mean loss, its weight, and the gradient of each sequence in turn."""

    def total(logps: jax.Array, batch: Batch) -> Any:
        out = apply(loss, logps, batch).loss
        return out.total / out.weight, out.weight

    logps, batch = lay_out(made, layout)
    (mean, weight), gradient = jax.value_and_grad(total, has_aux=True)(logps, batch)
    parts = {}
    for row, numbers in enumerate(layout):
        start = 0
        for number in numbers:
            parts[number] = np.asarray(gradient[row, start : start + len(made[number]["logps"])])
            start += len(made[number]["logps"])
    return float(mean), float(weight), np.concatenate([parts[number] for number in sorted(parts)])


PACKED, APART = [[0, 1, 2, 3, 4, 5]], [[4, 5], [0, 1], [2, 3], []]


@pytest.mark.parametrize("name", [*EVERY, *WHOLE])
def test_packing_does_not_matter(name: str) -> None:
    loss = (EVERY | WHOLE)[name]
    assert (isinstance(loss, BatchLoss) and loss.needs_whole_batch) == (name in WHOLE)
    with jax.enable_x64(True):
        packed, apart = value(loss, sequences(), PACKED), value(loss, sequences(), APART)
    for one, other in zip(packed, apart, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
    assert np.abs(packed[2]).sum() > 0


@pytest.mark.parametrize("name", EVERY)
def test_splits_add_up(name: str) -> None:
    """For losses over the whole batch the trainer sees to it: tests/test_preference_e2e.py."""
    with jax.enable_x64(True):
        logps, batch = lay_out(sequences(), APART)
        whole = apply(EVERY[name], logps, batch)
        parts = [
            apply(EVERY[name], logps[part], jax.tree.map(lambda x, part=part: x[part], batch))
            for part in (slice(0, 1), slice(1, 4))
        ]
        for metric, mean in {"loss": whole.loss, **whole.metrics}.items():
            halves = [out.loss if metric == "loss" else out.metrics[metric] for out in parts]
            added = halves[0] + halves[1]
            np.testing.assert_allclose((added.total, added.weight), (mean.total, mean.weight), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["dpo", "aot", "orpo", "kto"])
def test_masked_is_removed(name: str) -> None:
    """A pair without weights may hold anything."""
    loss, made = (EVERY | WHOLE)[name], sequences()
    for number in (2, 3):
        made[number]["loss_weight"] = np.zeros_like(made[number]["logps"])
        made[number]["logps"] = np.full_like(made[number]["logps"], -np.inf)
    rest = [*made[:2], *made[4:]]
    with jax.enable_x64(True):
        masked, removed = value(loss, made, PACKED), value(loss, rest, [[0, 1, 2, 3]])
    assert np.isfinite(masked[2]).all()
    np.testing.assert_allclose(masked[:2], removed[:2], rtol=1e-9)


def test_reward_goldens() -> None:
    data = read_golden("reward")
    scores, margin = data.arrays["in/scores"][:, 0], data.arrays["in/margin"]
    half = len(margin)
    order = [row for pair in range(half) for row in (pair, pair + half)]
    with jax.enable_x64(True):
        for case in data.cases:
            loss = BradleyTerryLoss(center_coef=case["args"].get("center_rewards_coefficient") or 0.0)
            made = [
                {
                    # Only the last token's score counts.
                    "logps": np.array([9.0, scores[row]]),
                    "ref_logps": np.zeros(2),
                    "loss_weight": np.array([0.0, 1.0]),
                    "roles": np.array([0, 1 if row < half else -1]),
                    "margins": np.array([0.0, margin[row] if case["args"]["margin"] and row < half else 0.0]),
                }
                for row in order
            ]
            mean, weight, gradient = value(loss, made, [[2 * pair, 2 * pair + 1] for pair in range(half)])
            np.testing.assert_allclose(mean, case["loss"], rtol=1e-6, err_msg=case["name"])
            expected = data.arrays[f"out/{case['name']}/dscores"][order, 0]
            np.testing.assert_allclose(gradient[1::2], expected, rtol=1e-5, atol=1e-12)
            assert weight == half and not gradient[::2].any()


def test_what_is_missing() -> None:
    logps, batch = lay_out(sequences(), PACKED)
    for loss in (PreferenceLoss(), KTOLoss(), ORPOLoss(), BradleyTerryLoss(), ProcessLoss()):
        with pytest.raises(ValueError, match="roles is None"):
            apply(loss, logps, replace(batch, roles=None))
    for loss in (PreferenceLoss(), KTOLoss()):
        with pytest.raises(ValueError, match="ref_logps is None"):
            apply(loss, logps, replace(batch, ref_logps=None))
    with pytest.raises(ValueError, match="margins is None"):
        apply(BradleyTerryLoss(), logps, replace(batch, margins=None))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kinds": ("sigmoidal",)}, "did you mean 'sigmoid'"),
        ({"kinds": ()}, "at least one"),
        ({"kinds": ("ipo", "sft"), "weights": (1.0,)}, "one number for each"),
        ({"label_smoothing": 0.5}, "in \\[0, 0.5\\)"),
        ({"divergence": "alpha_divergence"}, "belongs to divergence=alpha_divergence"),
        ({"alpha": 0.5}, "belongs to divergence=alpha_divergence"),
        ({"temperature": 0.1}, "without the kind discopop"),
    ],
)
def test_what_is_wrong_with_settings(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PreferenceLoss(**fields)
