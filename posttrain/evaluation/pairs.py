"""Preference and reward-model evaluation: loss, preferred ratio, calibration; 95 % intervals clustered by prompt."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from posttrain.batch import Batch, BatchLoss, ScoreStats, TokenStats, model_inputs
from posttrain.data.pair_examples import PairExamples, all_rows
from posttrain.losses.pairs import PairedSequences, pairs_of, sequences_of
from posttrain.losses.reward_model import reward_pairs
from posttrain.metrics import merge, to_host
from posttrain.statistics import Interval, difference_of_ratios, mean_interval, prompt_numbers, ratio_interval
from posttrain.tracking.console import progress_bar
from posttrain.train.trainer import Trainer
from posttrain.tree import Mean, concatenated, replace

Record = dict[str, Any]
Stats = TokenStats | ScoreStats
CALIBRATION_BINS = 10


class PairEvaluation:
    """PairEvaluation of held-out preference units; its programs are compiled once and serve every pass."""

    def __init__(self, trainer: Trainer, loss: Any, units: PairExamples, complete: Callable[[Batch], Batch]):
        self._trainer, self._units, self._complete = trainer, units, complete
        self._whole = isinstance(loss, BatchLoss) and loss.needs_whole_batch
        self._unit_sums, self._prompt = UnitSums(loss), functools.cache(units.prompt)
        self._loss, self._compared = jax.jit(loss), jax.jit(_compared)

    def __call__(self) -> Record:
        """One pass: metrics, and for every pair in the order of the data `preferred`, whether the model prefers the
        chosen answer: gives it the greater log-probability, or the greater score; and the key of its prompt."""
        units = self._units
        totals: dict[str, Mean] = {}
        parts: list[tuple[Stats, Batch]] = []
        sums: list[UnitTotals] = []
        margins: dict[int, float] = {}
        steps: list[np.ndarray] = []
        with progress_bar(f"evaluating {len(units):,} held-out units of {units.rows.name}", len(units)) as advance:
            for rows, unit in all_rows(units):
                batch = self._complete(rows)
                stats, batch = self._stats(batch), batch.without_images()
                if self._whole:
                    parts.append((stats, batch))
                else:
                    totals = merge(totals, self._totals(stats, batch))
                sums.append(self._unit_sums(stats, batch, unit))
                if units.kind == "steps":
                    steps.append(_steps(stats, batch))
                else:
                    margins |= _by_unit(batch, unit, *jax.device_get(self._compared(stats, batch)))
                advance(len(np.unique(unit[np.asarray(batch.segments) > 0])))
        if self._whole:
            totals = self._totals(*concatenated(parts))
        whole = UnitTotals.concatenated(sums)
        metrics = {f"eval/{name}": value for name, value in to_host(with_margins(totals)).items()}
        metrics |= unit_intervals(whole, self._prompts(whole.units), totals)
        if steps:
            metrics["eval/calibration/ece"] = calibration_error(np.concatenate(steps))
        if not margins:
            return {"metrics": metrics}
        preferred, of_pairs = self._preferred(margins)
        prompts = [self._prompt(number) for number in sorted(margins)]
        return {"metrics": metrics | of_pairs, "preferred": preferred, "prompts": prompts}

    def _preferred(self, margins: Mapping[int, float]) -> tuple[list[float], dict[str, float]]:
        """Return for each pair whether the chosen answer is preferred, and the metrics of that."""
        numbers = np.asarray(sorted(margins))
        ordered = np.asarray([margins[number] for number in numbers])
        outcomes = (ordered > 0).astype(float)
        interval = share_or_ratio_interval(outcomes, np.ones(len(outcomes)), self._prompts(numbers))
        ends = {"": interval.mean, "_low": interval.low, "_high": interval.high}
        metrics = {f"eval/preferred_ratio{end}": value for end, value in ends.items()}
        if self._units.margins:
            metrics["eval/calibration/ece"] = calibration_error(ordered)
        return outcomes.tolist(), metrics

    def _prompts(self, units: Int[np.ndarray, " N"]) -> Int[np.ndarray, " N"]:
        """Return the prompt number of each unit."""
        return prompt_numbers([self._prompt(int(unit)) for unit in units])

    def _totals(self, stats: Stats, batch: Batch) -> dict[str, Mean]:
        """The loss and its means, whose parts are those of units."""
        output = self._loss(stats, batch)
        return {"loss": output.loss, **{name: m for name, m in output.metrics.items() if isinstance(m, Mean)}}

    def _stats(self, batch: Batch) -> Stats:
        """Compute the statistics that a loss reads, as host arrays."""
        inputs = model_inputs(batch)
        if self._trainer.model.config.scalar_head:
            return ScoreStats(scores=jnp.asarray(self._trainer.scores(inputs)))
        return self._trainer.stats(inputs)


def with_margins(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Add `rewards/margins` as the difference of both means, for losses on unpaired answers."""
    if "rewards/margins" in metrics or not {"rewards/chosen", "rewards/rejected"} <= metrics.keys():
        return dict(metrics)
    chosen, rejected = (metrics[f"rewards/{side}"] for side in ("chosen", "rejected"))
    # A side that is missing leaves no margin: NaN.
    return {**metrics, "rewards/margins": chosen.total / chosen.weight - rejected.total / rejected.weight}


def calibration_error(margins: Float[np.ndarray, " N"]) -> float:
    """Expected calibration error of sigmoid(|margin|) as the probability that the margin's sign is right.

    Ten bins between 1/2 and 1. arXiv:1706.04599 eq. 3.
    """
    confidence, right = 1 / (1 + np.exp(-np.abs(margins.astype(np.float64)))), margins > 0
    bins = np.minimum((2 * confidence - 1) * CALIBRATION_BINS, CALIBRATION_BINS - 1).astype(int)
    gaps = np.bincount(bins, weights=confidence - right, minlength=CALIBRATION_BINS)
    return float(np.abs(gaps).sum() / len(margins))


def _compared(stats: Stats, batch: Batch) -> tuple[Bool[Any, "B S"], Float[Any, "B S"]]:
    """Return which pairs are valid, and the margin of each chosen answer."""
    pairs: PairedSequences = (
        pairs_of(sequences_of(stats, batch)) if isinstance(stats, TokenStats) else reward_pairs(stats, batch)
    )
    return pairs.valid, pairs.chosen.logps - pairs.rejected.logps


def _steps(stats: Stats, batch: Batch) -> np.ndarray:
    """Return the score of each labelled step, negated where the label is wrong."""
    assert isinstance(stats, ScoreStats)
    return (np.asarray(stats.scores) * np.sign(np.asarray(batch.roles)))[np.asarray(batch.loss_weight) > 0]


def _by_unit(batch: Batch, unit: np.ndarray, valid: np.ndarray, values: np.ndarray) -> dict[int, float]:
    """Map the unit number of each pair to its value."""
    segments = np.asarray(batch.segments)
    return {
        int(unit[row, int(np.argmax(segments[row] == segment))]): float(values[row, segment])
        for row, segment in zip(*np.nonzero(valid), strict=True)
    }


class UnitTotals(NamedTuple):
    """Numbers of N units, and the totals and weights of each metric."""

    units: Int[np.ndarray, " N"]
    metrics: Mapping[str, Float[np.ndarray, "2 N"]]

    @classmethod
    def concatenated(cls, parts: Sequence[UnitTotals]) -> UnitTotals:
        metrics = {name: np.concatenate([part.metrics[name] for part in parts], axis=1) for name in parts[0].metrics}
        return cls(np.concatenate([part.units for part in parts]), metrics)


class UnitSums:
    """Metrics of a loss for each unit: those of a batch in which only this unit has weights."""

    def __init__(self, loss: Any):
        self._loss = loss
        self._at = jax.jit(self._at_place)

    def __call__(self, stats: Stats, batch: Batch, units: Int[np.ndarray, "B T"]) -> UnitTotals:
        """Sum over each unit of a batch, with one program for any number of units; `units` numbers them."""
        real = np.asarray(batch.segments) > 0
        places = np.cumsum((np.diff(units, axis=1, prepend=-1) != 0) & real, axis=1) * real
        inputs, totals = jax.device_put((stats, batch, places)), []
        measured = jax.device_get([self._at(*inputs, place) for place in range(1, int(places.max()) + 1)])
        for place, means in enumerate(measured, start=1):
            there = (places == place).any(axis=1)
            first = (places == place).argmax(axis=1)
            sums = {name: np.stack([mean.total, mean.weight])[:, there] for name, mean in means.items()}
            totals.append(UnitTotals(units[there, first[there]], sums))
        return UnitTotals.concatenated(totals)

    def _at_place(
        self, stats: Stats, batch: Batch, places: Int[Array, "B T"], place: Int[Array, ""]
    ) -> dict[str, Mean]:
        """Metrics of the unit at this place in each row."""
        weight = jnp.where(places == place, jnp.asarray(batch.loss_weight), 0.0)

        def of_row(row_stats: Stats, row: Batch) -> dict[str, Mean]:
            output = self._loss(*jax.tree.map(lambda x: jnp.asarray(x)[None], (row_stats, row)))
            return {"loss": output.loss, **output.metrics}

        return jax.vmap(of_row)(stats, replace(batch, loss_weight=weight))


def unit_intervals(sums: UnitTotals, prompts: Int[np.ndarray, " N"], totals: Mapping[str, Mean]) -> dict[str, float]:
    """Interval bounds of each metric that is a sum over units, and of `rewards/margins` as a difference of two means.

    `prompts`: prompt number of each unit. `totals`: the metrics of all units at once. Metrics that are no sums over
    units, such as a loss that compares across the batch, have no interval; nor have metrics of a single prompt, or of a
    model that has diverged.
    """
    known = {name: both for name, both in sums.metrics.items() if _adds_up(both, totals[name])}
    intervals = {name: share_or_ratio_interval(both[0], both[1], prompts) for name, both in known.items()}
    sides = [known[name] for name in ("rewards/chosen", "rewards/rejected") if name in known]
    if "rewards/margins" not in sums.metrics and len(sides) == 2:
        intervals["rewards/margins"] = difference_of_ratios(*(_by_prompt(x, prompts) for side in sides for x in side))
    return {
        f"eval/{name}_{end}": value
        for name, interval in intervals.items()
        for end, value in (("low", interval.low), ("high", interval.high))
        if np.isfinite(value)
    }


def share_or_ratio_interval(totals: np.ndarray, weights: np.ndarray, prompts: Int[np.ndarray, " N"]) -> Interval:
    """Interval of sum(totals) / sum(weights): Wilson's for a share of units with prompts of their own."""
    share = np.isin(totals, (0.0, 1.0)).all() and (weights == 1).all()
    if share and len(np.unique(prompts)) in (1, len(prompts)):
        return mean_interval(totals, prompts)
    interval = ratio_interval(totals, weights, prompts)
    is_share = ((totals >= 0) & (totals <= weights)).all()
    return replace(interval, low=max(interval.low, 0.0), high=min(interval.high, 1.0)) if is_share else interval


def _adds_up(parts: Float[np.ndarray, "2 N"], whole: Mean) -> bool:
    total, weight = to_host({"total": whole.total, "weight": whole.weight}).values()
    size = np.abs(parts).sum(axis=1)
    exact = np.abs(parts.sum(axis=1) - (total, weight)) <= 1e-4 * size
    return bool(np.isfinite(parts).all() and (parts[1] >= 0).all() and size[1] > 0 and exact.all())


def _by_prompt(values: np.ndarray, prompts: Int[np.ndarray, " N"]) -> np.ndarray:
    return np.bincount(np.unique(prompts, return_inverse=True)[1], weights=values)
