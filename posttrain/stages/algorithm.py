"""Algorithm of an RL stage, made from the configuration: loss, advantages, filters, and functions of the user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from posttrain.config import RLSection, UserObject
from posttrain.errors import ConfigError
from posttrain.losses.policy import RLLoss
from posttrain.losses.ratios import ImportanceSampling
from posttrain.losses.surrogates import CISPO, GMPO, SAPO, VESPO, Clip, Surrogate
from posttrain.reward.function import Reward
from posttrain.reward.rubric import Rubric
from posttrain.rl.advantages import INPUTS, given_advantage, inputs_of
from posttrain.rl.algorithms import Algorithm, given_filter, make_algorithm
from posttrain.user_code import describe_error


def _probe(
    advantage: Callable[..., Any], name: str, group_size: int, rewards: Sequence[Reward], *, penalised: bool
) -> None:
    """Check a user's advantage function. ConfigError unless it takes its inputs and returns finite advantages [P, G],
    which follow the KL penalties where rewards are `penalised`.

    Probes the groups that a run will meet: different rewards, equal ones, and a sample without a reward (NaN).
    """
    mixed = np.arange(group_size, dtype=np.float32) % 3
    rewards_PG = np.stack([mixed, np.ones_like(mixed), np.where(np.arange(group_size) == 0, np.nan, mixed)])
    wrapped = given_advantage(advantage, name)
    parts_PG = {reward.name: rewards_PG.copy() for reward in rewards}
    weights = {reward.name: reward.weight for reward in rewards}
    lengths_PG = np.full(rewards_PG.shape, 3)
    penalties_PG = -np.square(np.arange(rewards_PG.size, dtype=np.float32)).reshape(rewards_PG.shape)
    try:
        made = wrapped(rewards_PG, parts_PG, weights, lengths_PG, np.zeros_like(penalties_PG))
        moved = wrapped(rewards_PG + penalties_PG, parts_PG, weights, lengths_PG, penalties_PG)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        wanted = ", ".join(inputs_of(advantage, name)) or "rewards_PG"
        raise ConfigError(f"advantage: {name}({wanted}) raised {describe_error(error)}") from error
    if penalised and np.array_equal(made, moved, equal_nan=True):
        raise ConfigError(
            f"advantage: {name} gives the same advantages whatever the KL penalties of kl_in: reward are, so there "
            "would be no KL; read rewards_PG, which has them, or name the parameter penalties_PG [P, G] and add it, or "
            "set kl_in: loss"
        )
    valid_PG = ~np.isnan(rewards_PG)
    for group, advantages, valid in zip(rewards_PG, made, valid_PG, strict=True):
        if valid.sum() > 1 and np.isnan(advantages[valid]).any():
            raise ConfigError(
                f"advantage: {name} must return a finite advantage for each sample that has a reward; of the group "
                f"{group.tolist()} (nan: no reward) it made {advantages.tolist()}; use np.nanmean and np.nanstd, "
                "and add a small number to what it divides by"
            )


def algorithm_of(section: RLSection) -> Algorithm:
    """Make the algorithm of a stage. ConfigError for incompatible fields, and functions of the user that fail."""
    critic = {"gamma": section.gamma, "gae_lambda": section.gae_lambda, "value_clip": section.value_clip}
    algorithm = make_algorithm(
        section.algorithm,
        max_tokens=section.max_sampled_tokens,
        advantage=_advantage_of(section),
        advantage_scale=section.advantage_scale,
        filter=_filter_of(section),
        truncated=section.truncated,
        top_entropy=section.top_entropy,
        turn_advantages=section.turn_advantages,
        gae_level=section.gae_level,
        kl_in=section.kl_in,
        critic={name: value for name, value in critic.items() if value is not None},
        loss=rl_loss(section.loss) if section.loss is not None else None,
        surrogate=_surrogate_of(section),
        importance=_importance_of(section),
        **{name: getattr(section, name) for name in LOSS_FIELDS},
    )
    _check_fields(section, algorithm)
    return algorithm


LOSS_FIELDS = (
    "kl_coef",
    "kl_estimator",
    "kl_bias_correction",
    "clip_low",
    "clip_high",
    "dual_clip",
    "entropy_coef",
    "off_policy_mask",
    "ratio",
    "reduce",
)
"""Fields of the section that are fields of the policy loss."""


def rl_loss(spec: UserObject) -> RLLoss:
    """Make a user's loss. ConfigError unless it is a loss of RL stages."""
    loss = spec.make("loss", positional=2)
    if not isinstance(loss, RLLoss):
        raise ConfigError(
            f"loss: {spec} must be called with (stats, batch) and have kl_coef, 0 for a loss without ref_logps; see "
            "docs/extend/loss.md"
        )
    return loss


def _advantage_of(section: RLSection) -> Callable[..., Any] | None:
    if section.advantage is None:
        return None
    given, name = section.advantage.make("advantage", names=INPUTS), str(section.advantage)
    rewards, penalised = Rubric.of(section).rewards, section.kl_in == "reward"
    _probe(given, name, section.group_size, rewards, penalised=penalised)
    return given_advantage(given, name)


def _filter_of(section: RLSection) -> Callable[..., Any] | None:
    """User's group filter, tried on the groups of `_probe`. ConfigError if it fails."""
    if section.filter is None:
        return None
    keep = given_filter(section.filter.make("filter", positional=1), str(section.filter))
    mixed = np.arange(section.group_size, dtype=np.float32) % 3
    try:
        keep(np.stack([mixed, np.ones_like(mixed), np.where(mixed == 0, np.nan, mixed)]))
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"filter: {section.filter}(rewards_PG) raised {describe_error(error)}") from error
    return keep


def _surrogate_of(section: RLSection) -> Surrogate | None:
    given = section.surrogate
    if given is None:
        return None
    match given.kind:
        case "sapo":
            return SAPO(positive=given.temperature_positive, negative=given.temperature_negative)
        case "vespo":
            return VESPO(
                k_positive=given.k_positive,
                rate_positive=given.rate_positive,
                k_negative=given.k_negative,
                rate_negative=given.rate_negative,
            )
        case "cispo":
            return CISPO()
        case "gmpo":
            return GMPO()
    return Clip()


def _importance_of(section: RLSection) -> ImportanceSampling | None:
    given = section.importance_sampling
    if not section.weighs_samples or section.loss is not None:
        return None
    try:
        return ImportanceSampling(level=given.level, bound=given.bound, low=given.low, high=given.high)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check_fields(section: RLSection, algorithm: Algorithm) -> None:
    """ConfigError for settings of roles that the algorithm does not have."""
    plain = RLSection.model_construct()
    values = section.critic != plain.critic or section.placement.critic != plain.placement.critic
    if values and algorithm.critic is None:
        raise ConfigError(f"critic: algorithm={section.algorithm} has none; use algorithm: ppo, or remove it")
    given = section.reference != plain.reference or section.placement.reference != plain.placement.reference
    if given and not algorithm.needs_reference:
        raise ConfigError(
            f"reference: without effect, algorithm={section.algorithm} has no KL penalty; set kl_coef, or remove it"
        )
    if section.teachers and (algorithm.critic is not None or algorithm.top_entropy is not None):
        other = "top_entropy" if algorithm.critic is None else f"the critic of algorithm={section.algorithm}"
        raise ConfigError(f"teachers: their advantages do not go with {other}; remove one of them")
