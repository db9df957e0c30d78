"""Reward `env` of a sample: what its environment gave its turns."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.rollout.trajectory import Trajectory

ENV_REWARD = "env"


class EnvFailure(Exception):
    """Failure of a sample's environment, as an error of the reward `env`."""

    def __str__(self) -> str:
        return str(self.args[0])


def env_rewards(trajectories: Sequence[Trajectory]) -> list[float | EnvFailure | None]:
    """Sum of the rewards of each sample's turns; None without any, and the failure of an environment that failed."""
    return [EnvFailure(one.error) if one.error is not None else turns_total(one) for one in trajectories]


def turns_total(trajectory: Trajectory) -> float | None:
    """Sum of the rewards of the turns; None if no turn has one."""
    given = [turn.reward for row in trajectory.rows for turn in row.turns if turn.reward is not None]
    return float(sum(given)) if given else None
