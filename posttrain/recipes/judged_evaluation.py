"""Held-out judged answers: the loss, and for every pair which answer is preferred, with intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from posttrain.batch import Batch, LossOutput, ScoreStats, TokenStats
from posttrain.console import progress_bar
from posttrain.data.comparisons import Units, all_rows
from posttrain.losses.pairs import Pairs, pairs_of, sequences_of
from posttrain.losses.reward_model import reward_pairs
from posttrain.metrics import merge, to_host
from posttrain.reference import model_inputs
from posttrain.statistics import mean_interval
from posttrain.trainer import Trainer
from posttrain.tree import Mean

Record = dict[str, Any]


def evaluate(trainer: Trainer, loss: Any, units: Units, complete: Callable[[Batch], Batch]) -> Record:
    """One pass: metrics, and `preferred`, for every pair in the order of the data whether the model prefers the chosen
    answer: gives it the greater log-probability, or the greater score."""

    @jax.jit
    def judge(stats: TokenStats | ScoreStats, batch: Batch) -> tuple[LossOutput, Bool[Any, "B S"], Float[Any, "B S"]]:
        pairs = _pairs(stats, batch)
        return loss(stats, batch), pairs.valid, pairs.chosen.logps - pairs.rejected.logps

    totals: dict[str, Mean] = {}
    margins: dict[int, float] = {}
    with progress_bar(f"evaluating {len(units):,} held-out units of {units.rows.name}", len(units)) as advance:
        for batch, unit in all_rows(units):
            batch = complete(batch)
            output, valid, differences = jax.device_get(judge(stats_of(trainer, batch), batch))
            totals = merge(totals, {"loss": output.loss, **output.metrics})
            found = _by_unit(batch, unit, valid, differences)
            margins |= found
            advance(len(np.unique(unit[np.asarray(batch.segments) > 0])))
    record: Record = {"metrics": _metrics(totals)}
    if margins:
        record["preferred"] = [float(margins[index] > 0) for index in sorted(margins)]
        record["metrics"] |= _interval("eval/preferred_ratio", record["preferred"])
    return record


def stats_of(trainer: Trainer, batch: Batch) -> TokenStats | ScoreStats:
    """What a loss reads, of host rows."""
    inputs = model_inputs(batch)
    if trainer.model.config.scalar_head:
        return ScoreStats(scores=jnp.asarray(trainer.scores(inputs)))
    stats = trainer.stats(inputs)
    return TokenStats(logps=jnp.asarray(stats.logps), entropy=jnp.asarray(stats.entropy))


def metrics_of(record: Record) -> Mapping[str, float]:
    metrics: Mapping[str, float] = record["metrics"]
    return metrics


def _pairs(stats: TokenStats | ScoreStats, batch: Batch) -> Pairs:
    return pairs_of(sequences_of(stats, batch)) if isinstance(stats, TokenStats) else reward_pairs(stats, batch)


def _metrics(totals: Mapping[str, Mean]) -> dict[str, float]:
    metrics = {f"eval/{name}": value for name, value in to_host(totals).items()}
    accuracy = totals.get("rewards/accuracies")
    if accuracy is not None:
        right, count = round(float(accuracy.total)), round(float(accuracy.weight))
        metrics |= _interval("eval/rewards/accuracies", [1.0] * right + [0.0] * (count - right))
    return metrics


def _interval(name: str, outcomes: list[float]) -> dict[str, float]:
    """A share with its 95 % interval."""
    found = mean_interval(outcomes)
    return {name: found.mean, f"{name}_low": found.low, f"{name}_high": found.high}


def _by_unit(batch: Batch, unit: np.ndarray, valid: np.ndarray, values: np.ndarray) -> dict[int, float]:
    """The value of each pair by the number of its unit."""
    segments = np.asarray(batch.segments)
    return {
        int(unit[row, int(np.argmax(segments[row] == segment))]): float(values[row, segment])
        for row, segment in zip(*np.nonzero(valid), strict=True)
    }
