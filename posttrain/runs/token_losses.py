"""Loss of a recorded RL step, token by token: log-probabilities, ratios and shares that add up to the step's loss."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from posttrain.batch import Batch, TokenStats
from posttrain.errors import ConfigError
from posttrain.losses.policy import PolicyLoss
from posttrain.losses.reduce import Reduction
from posttrain.rl.store import Recorded, read_record
from posttrain.runs.finished import find_stage
from posttrain.runs.replay import replay
from posttrain.stages.online import TRAJECTORIES
from posttrain.train.trainer import Trainer

Columns = dict[str, np.ndarray]
PLACE = ("update", "group", "sample", "part", "position")
"""Columns that name a token: the update of the step, its sample, token sequence of the sample, position in it."""


@dataclass(frozen=True, kw_only=True)
class TokenLosses:
    """Loss of each token of a step. A token is in several updates if the step has several epochs."""

    columns: Columns
    """`PLACE`, then `weight`, `advantage`, `logp`, `old_logp`, `ref_logp` (NaN: none), `entropy` (NaN: none), `ratio`,
    `clipped` (-1 at the lower bound, 1 at the upper), `loss`, `share`."""
    loss: float
    """Loss of the step as replayed; the sum of `share`."""
    logged: float
    """Loss of the step as the run logged it."""


@dataclass(frozen=True, kw_only=True)
class _Update:
    batch: Batch
    values: Columns
    """Arrays [B, T]; `total` is what each token adds to the sum of the loss."""
    weight: float


def token_losses(run: str | Path, step: int) -> TokenLosses:
    """Replay step `step` of an RL stage (see `replay`) and return the loss of each token.

    ConfigError where the step cannot be replayed, and for a loss of one's own.
    """
    updates: list[_Update] = []
    found = replay(run, step, observe=lambda *seen: updates.append(_observed(*seen)))
    output, name = find_stage(Path(run))
    recorded = read_record(output / name / TRAJECTORIES, step)
    weight = sum(update.weight for update in updates)
    parts = [part for number, update in enumerate(updates) for part in _sequences(number, update, recorded, weight)]
    if not parts:
        raise ConfigError(f"view: step {step} has no sample in its loss; look at another step")
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return TokenLosses(columns=columns, loss=found.metrics["loss"], logged=found.logged.get("loss", float("nan")))


def shares(reduce: Reduction, values: Float[np.ndarray, "B T"], batch: Batch) -> tuple[Float[np.ndarray, "B T"], float]:
    """Part of each token in the total of a reduction, and the reduction's weight. Reductions are linear in their
    values: a token's part is its value times the derivative of the total."""
    weight, segments = jnp.asarray(batch.loss_weight), jnp.asarray(batch.segments)
    of_samples = None if batch.sample_shares is None else jnp.asarray(batch.sample_shares)
    slope = jax.grad(lambda x: reduce(x, weight, segments, of_samples).total)(jnp.asarray(values))
    reduced = reduce(jnp.asarray(values), weight, segments, of_samples)
    return np.asarray(slope, np.float64) * values, float(reduced.weight)


def _observed(loss: Any, trainer: Trainer, batch: Batch) -> _Update:
    """Loss of each token of an update, under the weights before it."""
    if not isinstance(loss, PolicyLoss):
        raise ConfigError(
            f"view: {type(loss).__name__} is a loss of your own; only a PolicyLoss is known token by token"
        )
    kept = list[TokenStats]()
    trainer.evaluate([batch], each=lambda _, stats: kept.append(stats))
    (stats,) = kept
    tokens = loss.tokens(stats, batch)
    mask = np.asarray(tokens.terms.mask)

    def masked(values: object) -> np.ndarray:
        return np.where(mask, np.asarray(values, np.float32), np.float32(0))

    per_token = masked(tokens.loss)
    total, weight = shares(loss.reduce, per_token, batch)
    bounds = loss.surrogate.clipped(tokens.terms)
    clipped = np.zeros(mask.shape) if bounds is None else np.asarray(bounds[1], int) - np.asarray(bounds[0], int)
    absent = np.full(mask.shape, np.nan, np.float32)
    values = {
        "weight": np.asarray(batch.loss_weight, np.float32),
        "advantage": masked(tokens.terms.advantages),
        "logp": np.asarray(stats.logps, np.float32),
        "old_logp": masked(tokens.proximal),
        "ref_logp": absent if batch.ref_logps is None else masked(batch.ref_logps),
        "entropy": absent if stats.entropy is None else np.asarray(stats.entropy, np.float32),
        "ratio": masked(tokens.terms.ratio),
        "clipped": clipped.astype(np.int8),
        "loss": per_token,
        "total": total,
    }
    return _Update(batch=batch, values=values, weight=weight)


def _sequences(number: int, update: _Update, recorded: Recorded, weight: float) -> Iterator[Columns]:
    """Columns of each sequence of an update's batch, with its place in the record."""
    place_of = _places(recorded)
    batch = update.batch
    tokens, segments = np.asarray(batch.tokens), np.asarray(batch.segments)
    logps, advantages = np.asarray(batch.sampler_logps, np.float32), np.asarray(batch.advantages)
    for row in range(segments.shape[0]):
        for segment in range(1, int(segments[row].max(initial=0)) + 1):
            where = np.flatnonzero(segments[row] == segment)
            learned = np.asarray(batch.loss_weight)[row, where] > 0
            mean = float(advantages[row, where][learned].mean()) if learned.any() else 0.0
            group, sample, part = place_of(_key(tokens[row, where], logps[row, where]), mean)
            columns = {name: array[row, where] for name, array in update.values.items()}
            named = {"update": number, "group": group, "sample": sample, "part": part}
            yield {
                **{name: np.full(len(where), value, np.int64) for name, value in named.items()},
                "position": np.arange(len(where), dtype=np.int32),
                **{name: array for name, array in columns.items() if name != "total"},
                "share": columns["total"] / weight if weight else columns["total"] * 0,
            }


def _places(recorded: Recorded) -> Callable[[bytes, float], tuple[int, int, int]]:
    """Lookup of a packed sequence's group, sample and part by its tokens and their log-probabilities. Equal sequences
    are told apart by their advantage; each is found once."""
    known: dict[bytes, list[tuple[float, tuple[int, int, int]]]] = defaultdict(list)
    for p, group in enumerate(recorded.groups_P):
        for g, sample in enumerate(group):
            advantage = 0.0 if recorded.advantages_PG is None else float(recorded.advantages_PG[p, g])
            for part, one in enumerate(sample.rows):
                sampled = np.asarray(one.sampled, bool)
                key = _key(one.tokens, np.where(sampled, np.asarray(one.logps, np.float32), np.float32(0)))
                known[key].append((advantage, (sample.group, sample.sample, part)))

    def place_of(key: bytes, advantage: float) -> tuple[int, int, int]:
        left = known[key]
        best = min(range(len(left)), key=lambda i: np.nan_to_num(abs(left[i][0] - advantage), nan=np.inf))
        return left.pop(best)[1]

    return place_of


def _key(tokens: Sequence[int] | np.ndarray, logps: np.ndarray) -> bytes:
    return np.asarray(tokens, np.int32).tobytes() + np.asarray(logps, np.float32).tobytes()
