"""Metrics of online steps: completion lengths, rewards, staleness, kept probability mass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from posttrain.rl.types import Group, Rewards, Trajectory
from posttrain.statistics import standard_error


def rollout_metrics(groups_P: Sequence[Group], rewards: Rewards, step: int) -> dict[str, float]:
    """Metrics of a step's samples and their rewards."""
    return sample_metrics(groups_P, step) | (_reward_metrics(rewards) if rewards.parts_PG else {})


def sample_metrics(groups_P: Sequence[Group], step: int) -> dict[str, float]:
    """Metrics of a step's samples. `sampling/staleness/mean`: weight updates since a token was sampled."""
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
        "sampling/staleness/mean": _staleness(samples, step),
    }


def _reward_metrics(rewards: Rewards) -> dict[str, float]:
    total_PG = rewards.total_PG
    std_P = _std_of_groups(total_PG)
    failed = {kind: sum(e.kind == kind for e in rewards.errors) for kind in ("error", "timeout")}
    metrics = {
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


def _staleness(samples: Sequence[Trajectory], step: int) -> float:
    versions = np.concatenate([np.asarray(s.versions)[np.asarray(s.sampled)] for s in samples])
    return float((step - versions).mean()) if versions.size else 0.0


def _kept_mass(samples: Sequence[Trajectory]) -> float:
    kept = np.concatenate([np.asarray(s.kept_logps)[np.asarray(s.sampled)] for s in samples])
    return float(np.exp(kept).mean()) if kept.size else float("nan")
