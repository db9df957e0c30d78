"""Properties of losses on judged answers: what is masked, packed or split does not matter; what is missing is said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.batch import Batch, BatchLoss, LossOutput, ScoreStats, TokenStats
from posttrain.evaluation.pairs import UnitSums, UnitTotals, unit_intervals
from posttrain.losses.preference import KTOLoss, PreferenceLoss
from posttrain.losses.reference_free import CPOLoss, ORPOLoss, SimPOLoss
from posttrain.losses.reward_model import BradleyTerryLoss, ProcessLoss
from posttrain.stages.preference import PREFERENCE_LOSSES, REWARD_LOSSES
from posttrain.statistics import mean_interval, ratio_interval
from posttrain.tree import Mean, replace
from tests.losses.conftest import read_golden
from tests.often import often

ROLES = (1, -1, 1, -1, 1, -1)
SMOOTHING = {"exo_pair": 0.1, "robust": 0.2}
FORMS = {
    "several": PreferenceLoss(kinds=("ipo", "bco_pair"), weights=(0.5, 2.0), tail_weight=0.5),
    "cdpo": PreferenceLoss(label_smoothing=0.1),
    "sigmoid_norm smoothed": PreferenceLoss(kinds=("sigmoid_norm",), label_smoothing=0.1),
    "forward_kl": PreferenceLoss(divergence="forward_kl"),
    "js_divergence": PreferenceLoss(kinds=("hinge",), divergence="js_divergence"),
    "alpha_divergence": PreferenceLoss(kinds=("ipo",), divergence="alpha_divergence", alpha=0.5),
    "wpo": PreferenceLoss(use_weighting=True),
    "aot smoothed": PreferenceLoss(kinds=("aot",), label_smoothing=0.1),
    "with sft": PreferenceLoss(kinds=("sigmoid", "sft"), weights=(1.0, 0.5), use_weighting=True),
    "kto weighted": KTOLoss(desirable_weight=1.3, undesirable_weight=0.7),
    "cpo without nll": CPOLoss(nll_coef=0.0),
    "cpo_hinge without nll": CPOLoss(kind="hinge", nll_coef=0.0),
    "simpo smoothed": SimPOLoss(label_smoothing=0.1),
    "alphapo": SimPOLoss(alpha=0.25),
    "cpo_simpo": SimPOLoss(nll_coef=0.5),
    "centred": BradleyTerryLoss(center_coef=0.1),
}
"""Losses with other settings than their defaults."""


def named(kind: str) -> Any:
    """The loss that a configuration means by a kind."""
    made, fixed = (PREFERENCE_LOSSES | REWARD_LOSSES)[kind]
    return made(**fixed, **({"label_smoothing": SMOOTHING[kind]} if kind in SMOOTHING else {}))


LOSSES = {kind: named(kind) for kind in (*PREFERENCE_LOSSES, *REWARD_LOSSES)} | FORMS
FEW = ("sigmoid", "aot", "bradley_terry", "process", "several", "orpo", "kto")
"""One of each form; others have the same code around another formula."""
WHOLE = {n for n, x in LOSSES.items() if isinstance(x, BatchLoss) and x.needs_whole_batch}
"""Those that compare, or average over, a whole batch; the trainer then calls them once."""
PROMPTS = {n for n, x in LOSSES.items() if x.needs.prompts}


def sequences(name: str = "") -> list[dict[str, np.ndarray]]:
    """Three pairs; of their answers KTO takes the last two for those to other prompts."""
    rng = np.random.default_rng(1)
    made = []
    for number, (prompt, answer) in enumerate([(4, 3), (4, 5), (1, 4), (1, 2), (3, 2), (3, 6)]):
        answers = np.arange(prompt + answer) >= prompt
        logps = -rng.exponential(1.0, prompt + answer)
        role = 2 if name.startswith("kto") and number > 3 else ROLES[number]
        made.append(
            {
                "logps": logps,
                "ref_logps": logps + rng.normal(0, 0.5, logps.shape),
                "log_squares": 0.3 * logps,
                "loss_weight": (answers | (name in PROMPTS and role == 1)) * 1.0,
                "roles": answers * role,
                "margins": answers * 0.3 * (role == 1),
            }
        )
    return made


def lay_out(made: Sequence[dict[str, np.ndarray]], layout: Sequence[Sequence[int]], width: int = 38) -> Any:
    """Statistics and batch with these sequences in these rows."""
    names = ("logps", "log_squares", "ref_logps", "loss_weight", "roles", "margins", "segments", "positions")
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
    stats = TokenStats(**{name: jnp.asarray(arrays.pop(name)) for name in ("logps", "log_squares")})
    return stats, Batch(tokens=np.zeros(stats.logps.shape, np.int32), **integers, **arrays)


def apply(loss: Any, stats: TokenStats, batch: Batch) -> LossOutput:
    return loss(given_to(loss, stats), batch)


def given_to(loss: Any, stats: TokenStats) -> TokenStats | ScoreStats:
    return ScoreStats(scores=stats.logps) if isinstance(loss, BradleyTerryLoss | ProcessLoss) else stats


def value(loss: Any, made: Any, layout: Any) -> Any:
    """Mean loss, its weight, and the gradient of each sequence in turn."""

    stats, batch = lay_out(made, layout)

    def total(logps: jax.Array) -> Any:
        out = apply(loss, replace(stats, logps=logps), batch).loss
        return out.total / out.weight, out.weight

    (mean, weight), gradient = jax.value_and_grad(total, has_aux=True)(stats.logps)
    parts = {}
    for row, numbers in enumerate(layout):
        start = 0
        for number in numbers:
            parts[number] = np.asarray(gradient[row, start : start + len(made[number]["logps"])])
            start += len(made[number]["logps"])
    return float(mean), float(weight), np.concatenate([parts[number] for number in sorted(parts)])


few_losses = pytest.mark.parametrize("name", often(LOSSES, *FEW))

PACKED, APART = [[0, 1, 2, 3, 4, 5], [], [], []], [[4, 5], [0, 1], [2, 3], []]
REST = [[0, 1, 2, 3], [], [], []]
"""Of one shape, whose programs are compiled once."""


@pytest.mark.few(4)
@few_losses
def test_packing_does_not_matter(name: str) -> None:
    loss, made = LOSSES[name], sequences(name)
    with jax.enable_x64(True):
        packed, apart = value(loss, made, PACKED), value(loss, made, APART)
    for one, other in zip(packed, apart, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
    assert np.abs(packed[2]).sum() > 0


@few_losses
def test_splits_add_up(name: str) -> None:
    """Every metric, and the loss if it does not ask for the whole batch; of that the trainer sees to it, see
    tests/train/test_preference_e2e.py."""
    loss = LOSSES[name]
    with jax.enable_x64(True):
        made = sequences(name)
        halves = ([[4, 5], [], [], []], [[0, 1], [2, 3], [], []])
        whole, *parts = (apply(loss, *lay_out(made, layout)) for layout in (APART, *halves))
        summed = {} if name in WHOLE else {"loss": (whole.loss, *(part.loss for part in parts))}
        summed |= {metric: (mean, *(part.metrics[metric] for part in parts)) for metric, mean in whole.metrics.items()}
        for mean, first, second in summed.values():
            added = first + second
            np.testing.assert_allclose((added.total, added.weight), (mean.total, mean.weight), rtol=1e-9, atol=1e-12)


@pytest.mark.few(4)
@few_losses
def test_sums_of_units(name: str) -> None:
    """What the intervals of an evaluation come from: the sum over units is the metric of the batch, in any packing."""
    loss = LOSSES[name]
    alone = loss.needs.rows in ("answers", "answers_and_others", "steps")

    def sums(layout: Sequence[Sequence[int]]) -> UnitTotals:
        stats, batch = lay_out(sequences(name), layout)
        units = np.zeros(batch.shape, np.int32)
        for row, numbers in enumerate(layout):
            for segment, number in enumerate(numbers, start=1):
                units[row][batch.segments[row] == segment] = number if alone else number // 2
        return UnitSums(loss)(given_to(loss, stats), batch, units)

    with jax.enable_x64(True):
        packed, apart = sums(PACKED), sums(APART)
        whole = apply(loss, *lay_out(sequences(name), PACKED))
    np.testing.assert_array_equal(np.sort(packed.units), np.arange(6 if alone else 3))
    # The KL of KTO is at least 0, of each answer as of all.
    expected = {metric: mean for metric, mean in whole.metrics.items() if metric != "kl"}
    expected |= {} if name in WHOLE else {"loss": whole.loss}
    assert packed.metrics.keys() == apart.metrics.keys() == {"loss", *whole.metrics} >= {"rewards/chosen"}
    told = unit_intervals(packed, np.arange(len(packed.units)), {"loss": whole.loss, **whole.metrics})
    counted = {metric for metric, mean in expected.items() if float(mean.weight)}
    assert {f"eval/{metric}_low" for metric in counted} <= told.keys()
    for metric, mean in expected.items():
        np.testing.assert_allclose(packed.metrics[metric].sum(axis=1), (mean.total, mean.weight), rtol=1e-9, atol=1e-12)
        by_unit = [one.metrics[metric][:, np.argsort(one.units)] for one in (packed, apart)]
        np.testing.assert_allclose(*by_unit, rtol=1e-9, atol=1e-12)


@few_losses
def test_masked_is_removed(name: str) -> None:
    """A pair without weights may hold anything, in the loss, its gradient and its metrics."""
    loss, made = LOSSES[name], sequences(name)
    for number in (2, 3):
        made[number]["loss_weight"] = np.zeros_like(made[number]["logps"])
        made[number]["logps"] = np.full_like(made[number]["logps"], -np.inf)
    rest = [*made[:2], *made[4:]]
    with jax.enable_x64(True):
        masked, removed = value(loss, made, PACKED), value(loss, rest, REST)
        both = [apply(loss, *lay_out(*given)).metrics for given in ((made, PACKED), (rest, REST))]
    assert np.isfinite(masked[2]).all()
    np.testing.assert_allclose(masked[:2], removed[:2], rtol=1e-9)
    assert both[0].keys() == both[1].keys()
    for metric, mean in both[1].items():
        np.testing.assert_allclose(
            (both[0][metric].total, both[0][metric].weight), (mean.total, mean.weight), rtol=1e-9
        )


@pytest.mark.parametrize("side", [2, 3])
def test_a_pair_of_which_one_answer_has_no_weight_is_none(side: int) -> None:
    made = sequences()
    made[side]["loss_weight"] = np.zeros_like(made[side]["logps"])
    with jax.enable_x64(True):
        found = value(PreferenceLoss(), made, PACKED)
        expected = value(PreferenceLoss(), [*made[:2], *made[4:]], REST)
    np.testing.assert_allclose(found[:2], expected[:2], rtol=1e-9)


def test_intervals_by_prompt() -> None:
    """Units of one prompt are added up first; what does not add up, or is of one prompt alone, has no interval."""
    rng = np.random.default_rng(0)
    totals, weights = rng.normal(size=12), np.ones(12)
    prompts = np.repeat([3, 1, 2], 4)
    outcomes = (totals > 0).astype(float)
    given = {"rewards/chosen": totals, "rewards/accuracies": outcomes, "loss": totals}
    whole = {name: Mean(total=values.sum() + (name == "loss"), weight=12.0) for name, values in given.items()}
    sums = UnitTotals(np.arange(12), {name: np.stack([values, weights]) for name, values in given.items()})
    found = unit_intervals(sums, prompts, whole)
    by_hand = ratio_interval(totals.reshape(3, 4).sum(axis=1), [4, 4, 4])
    assert found["eval/rewards/chosen_low"] == pytest.approx(by_hand.low)
    assert found["eval/rewards/chosen_high"] == pytest.approx(by_hand.high)
    assert 0 <= found["eval/rewards/accuracies_low"] < outcomes.mean() < found["eval/rewards/accuracies_high"] <= 1
    assert found.keys() == {f"eval/rewards/{n}_{end}" for n in ("chosen", "accuracies") for end in ("low", "high")}
    alone = unit_intervals(sums, np.arange(12), whole)
    assert alone["eval/rewards/accuracies_low"] == mean_interval(outcomes).low != found["eval/rewards/accuracies_low"]
    assert unit_intervals(sums, np.zeros(12, int), whole).keys() == {
        f"eval/rewards/accuracies_{e}" for e in ("low", "high")
    }


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
                    "log_squares": np.zeros(2),
                    "loss_weight": np.array([0.0, 1.0]),
                    "roles": np.array([0, 1 if row < half else -1]),
                    "margins": np.array([0.0, margin[row] if case["args"]["margin"] and row < half else 0.0]),
                }
                for row in order
            ]
            mean, weight, gradient = value(loss, made, [[*range(6)], [*range(6, 2 * half)], [], []])
            np.testing.assert_allclose(mean, case["loss"], rtol=1e-6, err_msg=case["name"])
            expected = data.arrays[f"out/{case['name']}/dscores"][order, 0]
            np.testing.assert_allclose(gradient[1::2], expected, rtol=1e-5, atol=1e-12)
            assert weight == half and not gradient[::2].any()


def test_what_is_missing() -> None:
    stats, batch = lay_out(sequences(), PACKED)
    for loss in (PreferenceLoss(), KTOLoss(), ORPOLoss(), BradleyTerryLoss(), ProcessLoss()):
        with pytest.raises(ValueError, match="roles is None"):
            apply(loss, stats, replace(batch, roles=None))
    for loss in (PreferenceLoss(), KTOLoss()):
        with pytest.raises(ValueError, match="ref_logps is None"):
            apply(loss, stats, replace(batch, ref_logps=None))
    with pytest.raises(ValueError, match="margins is None"):
        apply(BradleyTerryLoss(), stats, replace(batch, margins=None))


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
