"""Training signal of a step: groups to learn from, their advantages, and the batches of its updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from posttrain.batch import Batch
from posttrain.rl.act import Acted
from posttrain.rl.algorithms import Algorithm
from posttrain.rl.assemble import Shares, TurnValues, assemble
from posttrain.rl.selection import ended
from posttrain.rl.turns import rewards_at_ends, turn_advantages
from posttrain.rollout.trajectory import Group

ROUNDING = 1e-6
"""Advantages up to this share of the largest reward count as 0: the mean of equal rewards may be rounded."""


@dataclass(frozen=True, kw_only=True)
class Signal:
    """Groups to learn from, with their advantages; with a critic, rewards in place of advantages."""

    kept_P: Sequence[Group]
    rewards_PG: Float[np.ndarray, "Q G"]
    advantages_PG: Float[np.ndarray, "Q G"]
    learned_PG: Bool[np.ndarray, "Q G"]
    """Samples in the loss: with a reward and an advantage, and not left out as truncated."""
    turns_PG: TurnValues | None = None
    """Advantages by token, or with a critic rewards; None: one advantage for each sample."""
    chained: bool = False
    """True if the rewards become returns over all rows of a sample."""


def signal_of(algorithm: Algorithm, acted: Acted, penalties_PG: Float[np.ndarray, "P G"] | None) -> Signal:
    """Groups that refill or the algorithm keeps, in the order of their numbers, and the advantages of their samples.
    Refill may keep none. `penalties_PG`: added to rewards."""
    if penalties_PG is None:
        penalties_PG = np.zeros_like(acted.rewards.total_PG)
    rewards_PG = acted.rewards.total_PG + penalties_PG
    useful_P = algorithm.kept(acted.rewards.total_PG) if acted.useful_P is None else acted.useful_P
    order = sorted(map(int, np.flatnonzero(useful_P)), key=lambda index: acted.groups_P[index][0].group)
    kept_P, rewards_PG = [acted.groups_P[index] for index in order], rewards_PG[order]
    advantages_PG = rewards_PG
    if kept_P:
        parts_PG = {name: part[order] for name, part in acted.rewards.parts_PG.items()}
        lengths_PG = np.asarray([[sample.num_sampled for sample in group] for group in kept_P])
        advantages_PG = algorithm.advantages(rewards_PG, parts_PG, acted.weights, lengths_PG, penalties_PG[order])
    learned_PG = ~np.isnan(rewards_PG) & ~np.isnan(advantages_PG)
    if algorithm.truncated == "mask" and kept_P:
        learned_PG &= ended(kept_P)
    turns_PG = None
    if algorithm.critic is not None:
        turns_PG = rewards_at_ends(kept_P, advantages_PG, acted.weights)
    elif algorithm.turn_advantages:
        turns_PG = turn_advantages(kept_P, rewards_PG, acted.weights)
    return Signal(
        kept_P=kept_P,
        rewards_PG=rewards_PG,
        advantages_PG=advantages_PG,
        learned_PG=learned_PG,
        turns_PG=turns_PG,
        chained=algorithm.critic is not None,
    )


def parts_of(
    signal: Signal,
    acted: Acted,
    *,
    updates: int,
    row_tokens: int,
    num_rows: int,
    shares: Shares | None,
    version: int | None,
) -> list[Batch]:
    """One batch for each update, all of one shape, with whole groups in each. The other arguments: see `assemble`."""
    return [
        assemble(
            [signal.kept_P[index] for index in indices],
            signal.advantages_PG[indices],
            signal.learned_PG[indices],
            like=acted.groups_P[0][0],
            row_tokens=row_tokens,
            num_rows=num_rows,
            shares=shares,
            version=version,
            turns_PG=None if signal.turns_PG is None else [signal.turns_PG[index] for index in indices],
            chained=signal.chained,
        )
        for indices in np.array_split(np.arange(len(signal.kept_P)), updates)
    ]


def has_signal(batch: Batch, rewards_PG: Float[np.ndarray, "P G"]) -> bool:
    """Tell whether any advantage of the batch differs from 0 by more than the rounding of the rewards."""
    assert batch.advantages is not None
    scale = np.abs(rewards_PG[~np.isnan(rewards_PG)]).max(initial=0.0)
    return not np.abs(batch.advantages).max() <= ROUNDING * scale


def signal_metrics(signal: Signal, acted: Acted, parts: Sequence[Batch]) -> dict[str, float]:
    """Metrics of groups and advantages. `advantages/invalid`: share of samples with a reward but no advantage."""
    invalid = np.isnan(signal.advantages_PG) & ~np.isnan(signal.rewards_PG)
    return {
        "groups/kept": float(len(signal.kept_P)),
        "groups/left_out": float(len(acted.groups_P) - len(signal.kept_P)),
        "advantages/invalid": float(invalid.mean()) if invalid.size else 0.0,
        "advantages/abs_max": max(float(np.abs(np.asarray(part.advantages)).max()) for part in parts),
    }


def advantages_of_all(groups_P: Sequence[Group], signal: Signal) -> Float[np.ndarray, "P G"]:
    """Advantages of all groups; NaN for those that are left out."""
    kept = zip(signal.kept_P, signal.advantages_PG, strict=True)
    by_group = {id(group): advantages for group, advantages in kept}
    left_out = np.full(len(groups_P[0]), np.nan, np.float32)
    return np.stack([by_group.get(id(group), left_out) for group in groups_P])
