"""Metrics of online steps (completion lengths, rewards, staleness, kept probability mass), and guards that abort a run:
sampler and trainer disagree (a veto inside the step), or samples have no rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jax import Array

from posttrain.environments.types import UNFINISHED, limit_of
from posttrain.errors import RunError
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


GAP = "sampling/logp_difference"
LIMITS = {f"{GAP}/mean": 0.1, f"{GAP}/outliers": 0.01, f"{GAP}/max": 10.0, f"{GAP}/stale_mean": 1.0}
"""Maximum difference of sampler and trainer log-probabilities: mean in nats over tokens sampled with the current
weights, share of those beyond `OUTLIER_NATS` (bounds the 99th percentile), their maximum, and the mean over tokens of
earlier weights, which are expected to differ. Typical means: 1e-6 in float32, 5e-3 to 1.3e-2 in bfloat16; with 260,000
parameters 0.02 in int8 and 0.06 in fp8."""
LIMIT = f"{GAP}/limit"
"""Maximum of the mean in this run, see `SamplerGate`."""
MAX_GROWTH = 20.0
"""Maximum mean as a multiple of that of the first step, whose weights are known to be equal."""
ONE_SIDED, ONE_SIDED_NATS = 0.8, 5e-3
"""Share of the mean that its sign may not explain, where it is above these nats: rounding has no sign."""
LEAST_TOKENS, LEAST_SIGMAS = 10, 8.0
"""Tokens, and standard errors of the signed mean, below which its sign may be chance."""
LEAST_STALE = 16
"""Tokens of earlier weights that are judged as a mean; fewer are judged as if there were so many."""


@dataclass(frozen=True)
class SamplerGate:
    """Veto on updates where `sampler_disagrees`, for `TrainSettings.skip_update`.

    The mean over fresh tokens may be at most `MAX_GROWTH` times that of the first step, which is remembered: later
    weights that do not reach the sampler whole stay below any limit that rounding in 16 or 8 bits leaves room for.
    """

    rounding: float
    """Mean in nats that is never refused for its growth: rounding, such as `EXACT` or `ROUNDED`."""

    def start(self) -> np.ndarray:
        return np.asarray(np.nan, np.float32)

    def __call__(self, metrics: Mapping[str, object], memory: Array) -> tuple[Array, Array, Mapping[str, Array]]:
        mean = metrics.get(f"{GAP}/mean")
        if not isinstance(mean, Mean):
            return jnp.zeros((), bool), memory, {}
        first = jnp.where(jnp.isnan(memory) & (jnp.asarray(mean.weight) > 0), _value(mean), memory)
        allowed = jnp.maximum(MAX_GROWTH * first, self.rounding)
        highest = LIMITS[f"{GAP}/mean"]
        told = {LIMIT: jnp.where(jnp.isnan(first), highest, jnp.minimum(allowed, highest)).astype(jnp.float32)}
        return sampler_disagrees({**metrics, **told}), first.astype(jnp.float32), told


EXACT, ROUNDED = 1e-3, 0.05
"""`SamplerGate.rounding` where sampler and trainer compute in float32 with equal weights, and elsewhere: in lower
precision the first step may have samples of which the model is certain, without any rounding."""


def sampler_disagrees(metrics: Mapping[str, object]) -> Array:
    """Compare a loss's metrics with `LIMITS`, and the mean with that of `SamplerGate`. True also where differences have
    one sign: only one of the two knows a truncation or a bias. NaN exceeds every limit; missing metrics pass.
    """
    within = jnp.ones((), bool)
    for name, limit in _limits(metrics).items():
        within &= _value(metrics[name], LEAST_STALE if name.endswith("/stale_mean") else 1) <= limit
    return ~within | _one_sided(metrics)


def _limits(metrics: Mapping[str, object]) -> dict[str, Any]:
    """Limits of the metrics that are there."""
    own = {f"{GAP}/mean": metrics[LIMIT]} if LIMIT in metrics else {}
    return {name: limit for name, limit in {**LIMITS, **own}.items() if name in metrics}


def _one_sided(metrics: Mapping[str, object]) -> Array:
    names = [f"{GAP}/{name}" for name in ("mean", "signed", "square")]
    if not all(name in metrics for name in names):
        return jnp.zeros((), bool)
    mean, signed, square = (_value(metrics[name]) for name in names)
    weight = jnp.asarray(cast(Mean, metrics[names[0]]).weight)
    beyond_chance = weight * signed**2 >= LEAST_SIGMAS**2 * (square - signed**2)
    large = (mean >= ONE_SIDED_NATS) & (weight >= LEAST_TOKENS)
    return large & (jnp.abs(signed) >= ONE_SIDED * mean) & beyond_chance


def check_agreement(metrics: Mapping[str, object], step: int, diagnosis: Callable[[], str] | None = None) -> None:
    """Raise RunError with the measured differences if `sampler_disagrees`. Reads from the device.

    `diagnosis`: names the likely cause.
    """
    if not bool(sampler_disagrees(metrics)):
        return
    found = {name: (float(_value(metrics[name])), float(limit)) for name, limit in _limits(metrics).items()}
    told = [f"{name.removeprefix(f'{GAP}/')} {value:.3g} of {limit:.3g}" for name, (value, limit) in found.items()]
    if bool(_one_sided(metrics)):
        signed = float(_value(metrics[f"{GAP}/signed"]))
        told.append(f"nearly all {'below' if signed > 0 else 'above'} the trainer's: signed {signed:+.3g}")
    average, _ = max((found[name] for name in found if name.endswith("mean")), key=lambda pair: pair[0] / pair[1])
    raise RunError(
        f"step {step}: sampler and trainer disagree by {average:.3g} nats per token on average (differences and their "
        f"limits: {', '.join(told)}); the weights are those before the step. "
        + ("Look for stale weights or another temperature in the engine" if diagnosis is None else _told(diagnosis))
    )


def _told(diagnosis: Callable[[], str]) -> str:
    """Diagnosis in words; its own failure must not hide the error that it explains."""
    try:
        return f"Likely cause: {diagnosis()}"
    except Exception as error:
        return f"The diagnosis of the cause failed: {type(error).__name__}: {error}"


def _value(metric: object, least_weight: int = 1) -> Array:
    """Value of a metric; 0 without any counted token, and as of `least_weight` where it counts fewer."""
    if isinstance(metric, Mean):
        return jnp.asarray(metric.total) / jnp.maximum(jnp.asarray(metric.weight), least_weight)
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
