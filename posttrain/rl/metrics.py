"""Metrics of online steps (completion lengths, rewards, staleness, kept probability mass), and guards that abort a run:
sampler and trainer disagree (a veto inside the step), or samples have no rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array

from posttrain.environments.turns import UNFINISHED, limit_of
from posttrain.errors import RunError
from posttrain.losses.sampler_gap import OUTLIER_NATS
from posttrain.reward.types import Rewards
from posttrain.rollout.trajectory import Group, Trajectory
from posttrain.statistics import standard_error
from posttrain.tree import Max, Mean


def rollout_metrics(groups_P: Sequence[Group], rewards: Rewards, version: int) -> dict[str, Mean | float]:
    """Metrics of a step's samples and their rewards."""
    return {**sample_metrics(groups_P, version), **(_reward_metrics(rewards) if rewards.parts_PG else {})}


def sample_metrics(groups_P: Sequence[Group], version: int) -> dict[str, float]:
    """Metrics of a step's samples. `sampling/staleness/*`: versions of the weights since a token was sampled."""
    samples = [trajectory for group in groups_P for trajectory in group]
    lengths = np.asarray([sample.num_sampled for sample in samples])
    clipped = np.asarray([sample.stop == "length" for sample in samples])
    ended = lengths[~clipped]
    return {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(clipped.mean()),
        "completions/mean_terminated_length": float(ended.mean()) if ended.size else float("nan"),
        "completions/num_tokens": float(lengths.sum()),
        "sampling/kept_mass/mean": _kept_mass(samples),
        **_staleness(samples, version),
        **_env_metrics(samples),
    }


def _reward_metrics(rewards: Rewards) -> dict[str, Mean | float]:
    total_PG = rewards.total_PG
    std_P = _std_of_groups(total_PG)
    failed = {kind: sum(e.kind == kind for e in rewards.errors) for kind in ("error", "timeout")}
    metrics: dict[str, Mean | float] = {
        "reward": _nanmean(total_PG),
        "reward_stderr": standard_error(total_PG),
        "reward_std": _nanmean(std_P),
        "frac_reward_zero_std": _nanmean(np.where(np.isnan(std_P), np.nan, std_P == 0.0)),
        "rewards/invalid": float(np.isnan(total_PG).mean()),
        "rewards/errors": failed["error"] / total_PG.size,
        "rewards/timeouts": failed["timeout"] / total_PG.size,
    }
    for name, part in rewards.parts_PG.items():
        metrics[f"rewards/{name}/mean"] = _nanmean(part)
        metrics[f"rewards/{name}/std"] = float(np.nanstd(part)) if not np.isnan(part).all() else float("nan")
    return metrics | dict(rewards.metrics)


def _nanmean(values: np.ndarray) -> float:
    return float(np.nanmean(values)) if not np.isnan(values).all() else float("nan")


def _std_of_groups(total_PG: np.ndarray) -> np.ndarray:
    """Standard deviation (n - 1) within each group; NaN where fewer than two rewards are valid."""
    std = np.full(len(total_PG), np.nan)
    for index, row in enumerate(total_PG):
        valid = row[~np.isnan(row)]
        if valid.size > 1:
            # Equal rewards give exactly 0 despite the rounding of their mean.
            std[index] = 0.0 if valid.min() == valid.max() else valid.std(ddof=1)
    return std


def _env_metrics(samples: Sequence[Trajectory]) -> dict[str, float]:
    """Means over samples of turns, failures and the environment's own metrics; none without an environment."""
    turns = np.asarray([sum(len(row.turns) for row in sample.rows) for sample in samples])
    if not turns.any():
        return {}
    names = sorted({name for sample in samples for name in sample.metrics})
    own = {f"env/{name}": float(np.mean([s.metrics.get(name, 0.0) for s in samples])) for name in names}
    limits = [limit_of(sample) for sample in samples]
    own["env/unfinished"] = float(np.mean([limit is not None for limit in limits]))
    own |= {f"env/unfinished_{name}": float(np.mean([limit == name for limit in limits])) for name in UNFINISHED}
    ends = {"errors": "env_error", "timeouts": "env_timeout", "max_turns_ratio": "max_turns"}
    shares = {f"env/{name}": float(np.mean([s.stop == stop for s in samples])) for name, stop in ends.items()}
    return {"env/turns": float(turns.mean()), **shares, **own}


def _sampled(samples: Sequence[Trajectory], name: str) -> np.ndarray:
    """Values of all sampled tokens."""
    rows = [row for sample in samples for row in sample.rows]
    return np.concatenate([np.asarray(getattr(row, name))[np.asarray(row.sampled, bool)] for row in rows])


def _staleness(samples: Sequence[Trajectory], version: int) -> dict[str, float]:
    ages = version - _sampled(samples, "versions")
    mean, largest = (float(ages.mean()), float(ages.max())) if ages.size else (0.0, 0.0)
    return {"sampling/staleness/mean": mean, "sampling/staleness/max": largest}


def _kept_mass(samples: Sequence[Trajectory]) -> float:
    kept = _sampled(samples, "kept_logps")
    return float(np.exp(kept).mean()) if kept.size else float("nan")


LIMITS = {
    "sampling/logp_difference/mean": 0.1,
    "sampling/logp_difference/outliers": 0.01,
    "sampling/logp_difference/max": 10.0,
}
"""Maximum difference of sampler and trainer log-probabilities over tokens sampled with the current weights: mean in
nats, share of tokens beyond `OUTLIER_NATS` (bounds the 99th percentile), and maximum in nats. Typical means: 1e-6 in
float32, 5e-3 to 1.3e-2 in bfloat16; with 260,000 parameters 0.02 in int8 and 0.06 in fp8."""


def sampler_disagrees(metrics: Mapping[str, object]) -> Array:
    """Compare a loss's metrics with `LIMITS`. NaN exceeds every limit; missing metrics pass.

    Traceable, for `Trainer(refuse=sampler_disagrees)`: such a step changes no weights.
    """
    within = jnp.ones((), bool)
    for name, limit in LIMITS.items():
        if name in metrics:
            within &= _value(metrics[name]) <= limit
    return ~within


def check_agreement(metrics: Mapping[str, object], step: int, diagnosis: Callable[[], str] | None = None) -> None:
    """Raise RunError with the measured differences if `sampler_disagrees`. Reads from the device.

    `diagnosis`: names the likely cause.
    """
    if not bool(sampler_disagrees(metrics)):
        return
    mean, outliers, largest = (float(_value(metrics[name])) for name in LIMITS)
    raise RunError(
        f"step {step}: sampler and trainer disagree by {mean:.3f} nats per token on average, by more than "
        f"{OUTLIER_NATS} on {outliers:.1%} of the tokens, by {largest:.1f} at most (limits: "
        f"{', '.join(f'{limit:g}' for limit in LIMITS.values())}); the weights are those before the step. "
        + ("Look for stale weights or another temperature in the engine" if diagnosis is None else _told(diagnosis))
    )


def _told(diagnosis: Callable[[], str]) -> str:
    """Diagnosis in words; its own failure must not hide the error that it explains."""
    try:
        return f"Likely cause: {diagnosis()}"
    except Exception as error:
        return f"The diagnosis of the cause failed: {type(error).__name__}: {error}"


def _value(metric: object) -> Array:
    """Value of a metric; 0 without any counted token."""
    if isinstance(metric, Mean):
        return jnp.asarray(metric.total) / jnp.where(jnp.asarray(metric.weight) > 0, metric.weight, 1.0)
    assert isinstance(metric, Max)
    return jnp.asarray(metric.largest)


class NoRewardGuard:
    """Raises RunError after `limit` consecutive steps with no valid reward.

    A single such step may be chance if functions apply to some rows only. Runs without reward functions learn from
    teachers and are not guarded.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._steps = 0

    def check(self, step: int, rewards: Rewards) -> None:
        none_PG = np.isnan(rewards.total_PG)
        for error in rewards.errors:
            none_PG[error.prompt, error.sample] = True  # including samples whose reward comes from `on_error`
        self._steps = self._steps + 1 if rewards.parts_PG and none_PG.all() else 0
        if self._steps >= self._limit:
            first = next(iter(rewards.errors), None)
            why = "the functions return None: they do not apply"
            if first is not None:
                why = f"reward {first.function}: {first.error}"
            raise RunError(
                f"step {step}: no sample has a reward for {self._steps} consecutive steps, so there is no training "
                f"signal ({why}); check that the rewards apply to the rows of dataset"
            )
