"""Metrics of online steps, and the error of steps without any reward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float

from posttrain.errors import RunError
from posttrain.reward.types import Rewards
from posttrain.rl.advantages import is_mixed
from posttrain.rollout.trajectory import LIMITS, Group, Trajectory
from posttrain.statistics import prompt_numbers, standard_error
from posttrain.tree import Mean

ERRORS = {"error": "rewards/errors", "timeout": "rewards/timeouts"}
"""Metrics of failed reward functions, by `RewardError.kind`."""


def rollout_metrics(groups_P: Sequence[Group], rewards: Rewards, version: int) -> dict[str, Mean | float]:
    """Metrics of a step's samples and their rewards."""
    return {**sample_metrics(groups_P, version), **(_reward_metrics(groups_P, rewards) if rewards.parts_PG else {})}


def sample_metrics(groups_P: Sequence[Group], version: int) -> dict[str, float]:
    """Metrics of a step's samples. `sampling/staleness/*`: versions of the weights since a token was sampled."""
    samples = [trajectory for group in groups_P for trajectory in group]
    lengths = np.asarray([sample.num_sampled for sample in samples])
    clipped = np.asarray([sample.is_cut for sample in samples])
    ended = lengths[~clipped]
    return {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(clipped.mean()),
        "completions/mean_terminated_length": float(ended.mean()) if ended.size else float("nan"),
        "completions/num_tokens": float(lengths.sum()),
        **_image_metrics(samples),
        "sampling/kept_mass/mean": _kept_mass(samples),
        **_staleness(samples, version),
        **_env_metrics(samples),
    }


def _image_metrics(samples: Sequence[Trajectory]) -> dict[str, float]:
    """Mean numbers of pictures and of their tokens in a sample; none of text."""
    images = [row.images for sample in samples for row in sample.rows if row.images is not None]
    if not images:
        return {}
    grids = [grid for one in images for grid in one.grids]
    tokens = sum(grid.rows * grid.columns for grid in grids)
    return {"images/mean_count": len(grids) / len(samples), "images/mean_tokens": tokens / len(samples)}


def _reward_metrics(groups_P: Sequence[Group], rewards: Rewards) -> dict[str, Mean | float]:
    total_PG = rewards.total_PG
    std_P = _std_of_groups(total_PG)
    # Samples, each once: several functions may fail on one.
    failed = {kind: len({(e.prompt, e.sample) for e in rewards.errors if e.kind == kind}) for kind in ERRORS}
    metrics: dict[str, Mean | float] = {
        "reward": _nanmean(total_PG),
        "reward_stderr": standard_error(total_PG, prompt_numbers([group[0].example.prompt_key for group in groups_P])),
        "reward_std": _nanmean(std_P),
        "frac_reward_zero_std": _nanmean(np.where(np.isnan(std_P), np.nan, std_P == 0.0)),
        "rewards/invalid": float(np.isnan(total_PG).mean()),
        **{name: failed[kind] / total_PG.size for kind, name in ERRORS.items()},
    }
    for name, part in rewards.parts_PG.items():
        if not np.isnan(part).all():
            metrics |= {f"rewards/{name}/mean": float(np.nanmean(part)), f"rewards/{name}/std": float(np.nanstd(part))}
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
    own["env/unfinished"] = float(np.mean([sample.limit is not None for sample in samples]))
    own |= {f"env/unfinished_{name}": float(np.mean([s.limit == name for s in samples])) for name in LIMITS}
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
    kept = _sampled(samples, "truncation_logps")
    return float(np.exp(kept).mean()) if kept.size else float("nan")


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


def group_metrics(rewards_PG: Float[np.ndarray, "P G"], pass_above: float) -> dict[str, float]:
    """Shares of groups with different rewards (`frac_mixed`), and with equal ones above `pass_above` or not
    (`frac_all_good`, `frac_all_bad`), which add up to 1; `pass_rate` of the samples. Samples and groups without a
    reward do not count."""
    valid_PG = ~np.isnan(rewards_PG)
    known_P = valid_PG.any(axis=1)
    if not known_P.any():
        return dict.fromkeys(("frac_mixed", "frac_all_good", "frac_all_bad", "pass_rate"), float("nan"))
    mixed_P = is_mixed(rewards_PG)
    passed_PG = valid_PG & (rewards_PG > pass_above)
    good_P = ~mixed_P & passed_PG.any(axis=1)
    return {
        "frac_mixed": float(mixed_P[known_P].mean()),
        "frac_all_good": float(good_P[known_P].mean()),
        "frac_all_bad": float((~mixed_P & ~good_P)[known_P].mean()),
        "pass_rate": float(passed_PG[valid_PG].mean()),
    }


def refill_metrics(useful_of_waves: Sequence[Bool[np.ndarray, " W"]], wanted: int) -> dict[str, float]:
    """Waves after the first groups, groups begun in them, and useful groups that are still missing."""
    return {
        "sampling/refill/waves": float(len(useful_of_waves) - 1),
        "sampling/refill/groups": float(sum(map(len, useful_of_waves[1:]))),
        "sampling/refill/short": float(wanted - sum(int(useful.sum()) for useful in useful_of_waves)),
    }
