"""RL algorithms built from the configuration: loss, advantage, group filter, critic, and the place of the KL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Int

from posttrain.config import OnlineSection, ReferenceSection, RLSection, UserObject
from posttrain.config.algorithm import (
    CISPO,
    GDPO,
    GMPO,
    PPO,
    RLOO,
    SAPO,
    VESPO,
    AlgorithmSection,
    CISPOSurrogate,
    ClippedSection,
    GMPOSurrogate,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    RewardAdvantages,
    SAPOSurrogate,
    ScaledAdvantages,
    VESPOSurrogate,
)
from posttrain.config.locator import FORMS
from posttrain.config.rollout import ReferencePlacement
from posttrain.errors import ConfigError
from posttrain.losses import policy, surrogates
from posttrain.losses.policy import PolicyLoss, RLLoss
from posttrain.losses.ratios import ImportanceSampling, KLEstimator, k1, k2, k3
from posttrain.losses.reduce import ConstantLength, Reduction, sequence_mean, sequence_total, token_mean
from posttrain.losses.surrogates import CLIP_FIELDS, Surrogate
from posttrain.losses.value import ValueLoss
from posttrain.rl.advantages import (
    INPUTS,
    Advantage,
    RewardArray,
    advantages_of,
    batch_scaled,
    batch_standardized,
    centered,
    decoupled,
    given_advantage,
    group_baseline,
    inputs_of,
    is_mixed,
    leave_one_out,
    leave_one_out_scaled,
    standardized,
    undiminished,
)
from posttrain.rl.returns import GAE, RewardKL
from posttrain.user_code import describe_error

GroupFilter = Callable[[RewardArray], Bool[np.ndarray, " P"]]


def every_group(rewards_PG: RewardArray) -> Bool[np.ndarray, " P"]:
    """Keep all groups. Groups of equal rewards have advantage 0, but count in the loss's mean, and a KL penalty acts on
    them."""
    return np.ones(len(rewards_PG), dtype=bool)


def filter_of(given: str | UserObject, field: str, group_size: int) -> GroupFilter:
    """Filter of groups by its name, or the user's, tried on the groups that a run will meet. ConfigError, which begins
    with `field`, if that fails or does not return true or false for each group."""
    if given == "mixed":
        return is_mixed
    if not isinstance(given, UserObject):
        raise ConfigError(f"{field}: {given!r} is unknown; there is mixed, or give your own as {FORMS}")
    function = given.make(field, positional=1)

    def keep(rewards_PG: RewardArray) -> Bool[np.ndarray, " P"]:
        made = np.asarray(function(rewards_PG.copy()))
        if made.shape != rewards_PG.shape[:1] or made.dtype != bool:
            raise ConfigError(
                f"{field}: {given} must return true or false for each of the {len(rewards_PG)} groups of rewards_PG; "
                f"it returned {made.dtype} of shape {made.shape}"
            )
        return made

    try:
        keep(groups_to_try(group_size))
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{field}: {given}(rewards_PG) raised {describe_error(error)}") from error
    return keep


def groups_to_try(group_size: int) -> RewardArray:
    """Groups that a run will meet: different rewards, equal ones, and a sample without a reward (NaN)."""
    mixed = np.arange(group_size, dtype=np.float32) % 3
    return np.stack([mixed, np.ones_like(mixed), np.where(np.arange(group_size) == 0, np.nan, mixed)])


@dataclass(frozen=True, kw_only=True)
class CriticSettings:
    """Settings of a value model."""

    gae: GAE
    loss: ValueLoss


@dataclass(frozen=True)
class Algorithm:
    """RL algorithm of a stage."""

    name: str
    """Kind in the configuration."""
    loss: Any
    """`RLLoss`: a `PolicyLoss` or a user's loss."""
    advantage: Advantage
    filter: GroupFilter = every_group
    critic: CriticSettings | None = None
    """Critic whose values make advantages per token; `advantage` then gives the reward of each sequence."""
    reward_kl: RewardKL | None = None
    """KL penalty in the reward, in place of one in the loss."""
    truncated: Literal["keep", "mask"] = "keep"
    """Samples cut at the maximum length: `mask` leaves them out of the loss, but not out of the baseline."""
    top_entropy: float | None = None
    """Share of tokens with the highest entropy that have an advantage."""
    turn_advantages: bool = False
    """Advantages per turn, in place of `advantage`."""

    @classmethod
    def of(cls, section: RLSection, weights: Mapping[str, float]) -> Algorithm:
        """Build the algorithm of a stage. `weights`: of its rewards by name, with which a user's advantage is tried.

        ConfigError for values that do not go together, and for functions of the user that fail.
        """
        given = section.algorithm
        group_size = section.group_size
        in_reward = given.kl_in == "reward"
        algorithm = cls(
            name=given.kind,
            loss=loss_of(section),
            advantage=_advantage_of(given, group_size, weights),
            filter=every_group if given.filter is None else filter_of(given.filter, "algorithm.filter", group_size),
            critic=_critic_of(given),
            reward_kl=RewardKL(coef=given.kl_coef, estimator=_estimator_of(given)) if in_reward else None,
            truncated=given.truncated,
            top_entropy=given.top_entropy,
            turn_advantages=isinstance(given, RewardAdvantages) and given.turn_advantages,
        )
        of_reference = (section.reference, section.placement.reference)
        if of_reference != (ReferenceSection(), ReferencePlacement()) and not algorithm.needs_reference:
            raise ConfigError(
                f"reference: without effect, algorithm={given.kind} has no KL penalty; set algorithm.kl_coef, or "
                "remove it"
            )
        return algorithm

    @property
    def needs_reference(self) -> bool:
        """True if log-probabilities of the reference enter the loss or the reward."""
        return self.reward_kl is not None or self.loss.kl_coef > 0

    def advantages(
        self,
        rewards_PG: RewardArray,
        parts_PG: Mapping[str, RewardArray],
        weights: Mapping[str, float],
        lengths_PG: Int[np.ndarray, "P G"],
        penalties_PG: RewardArray,
    ) -> RewardArray:
        """Advantages of all samples of a step. NaN only where a user's function returns no finite number. The other
        arguments: see `INPUTS`."""
        return advantages_of(self.advantage, rewards_PG, parts_PG, weights, lengths_PG, penalties_PG)

    def kept(self, rewards_PG: RewardArray) -> Bool[np.ndarray, " P"]:
        """Mask of groups that pass `filter`; a step in which none passes has no update, and no group is refilled.

        Where no group has different rewards, `is_mixed` keeps all: their advantages are 0.
        """
        keep_P = self.filter(rewards_PG)
        return every_group(rewards_PG) if self.filter is is_mixed and not keep_P.any() else keep_P


REDUCTIONS: dict[str, Reduction] = {
    "sequence_mean": sequence_mean,
    "token_mean": token_mean,
    "sequence_total": sequence_total,
}
ESTIMATORS: dict[str, KLEstimator] = {"k1": k1, "k2": k2, "k3": k3}
OF_LOSS = (*("kl_bias_correction", "entropy_coef", "off_policy_mask", "clip_low", "clip_high", "dual_clip", "ratio"),)
"""Fields of a kind that are fields of the policy loss."""


def loss_of(section: RLSection) -> RLLoss:
    """Build the loss of a stage: that of its kind, or the user's. ConfigError for values that do not go together."""
    given = section.algorithm
    return _policy_loss(section) if given.loss is None else _given_loss(given.loss)


def _policy_loss(section: RLSection) -> PolicyLoss:
    """Policy loss of a kind: GRPO's with the values of the section, where the kind has them."""
    given, fields = section.algorithm, type(section.algorithm).model_fields
    reduce = given.reduce
    weights = given.importance_sampling
    try:
        made = replace(
            policy.GRPO,
            surrogate=_surrogate_of(given),
            reduce=ConstantLength(section.max_sampled_tokens) if reduce == "constant_length" else REDUCTIONS[reduce],
            kl_coef=0.0 if given.kl_in == "reward" else given.kl_coef,
            kl_estimator=k3 if given.kl_in == "reward" else _estimator_of(given),
            importance=ImportanceSampling(**weights.model_dump(exclude={"apply"})) if section.weighs_samples else None,
            **{name: getattr(given, name) for name in OF_LOSS if name in fields},
        )
    except ValueError as error:
        raise ConfigError(f"algorithm.{str(error).removeprefix('PolicyLoss.')}") from error
    changed = [name for name in CLIP_FIELDS if name in fields and getattr(given, name) != fields[name].default]
    if unread := [f"algorithm.{name}" for name in changed if name not in made.surrogate.bounds]:
        name = type(made.surrogate).__name__.removesuffix("Objective")
        raise ConfigError(f"{', '.join(unread)} without effect on the surrogate {name}; remove it")
    return made


def _estimator_of(given: AlgorithmSection) -> KLEstimator:
    return ESTIMATORS[given.kl_estimator or ("k1" if given.kl_in == "reward" else "k3")]


def _surrogate_of(given: AlgorithmSection) -> Surrogate:
    """Surrogate of a kind, or that which is given in place of its clip."""
    match given.surrogate or given if isinstance(given, ClippedSection) else given:
        case SAPO() | SAPOSurrogate() as one:
            return surrogates.SAPOObjective(positive=one.temperature_positive, negative=one.temperature_negative)
        case VESPO() | VESPOSurrogate() as one:
            return surrogates.VESPOObjective(
                k_positive=one.k_positive,
                rate_positive=one.rate_positive,
                k_negative=one.k_negative,
                rate_negative=one.rate_negative,
            )
        case CISPO() | CISPOSurrogate():
            return surrogates.CISPOObjective()
        case GMPO() | GMPOSurrogate():
            return surrogates.GMPOObjective()
    return surrogates.CLIP


def _given_loss(spec: UserObject) -> RLLoss:
    """Make a user's loss. ConfigError unless it is a loss of RL stages."""
    loss = spec.make("algorithm.loss", positional=2)
    if not isinstance(loss, RLLoss):
        raise ConfigError(
            f"algorithm.loss: {spec} must be called with (stats, batch) and have kl_coef, 0 for a loss without "
            "ref_logps; see docs/extend/loss.md"
        )
    return loss


def _advantage_of(given: AlgorithmSection, group_size: int, weights: Mapping[str, float]) -> Advantage:
    """Advantage function of a kind, or the user's."""
    if isinstance(given, RewardAdvantages) and given.advantage is not None:
        function, name = given.advantage.make("algorithm.advantage", names=INPUTS), str(given.advantage)
        _try_advantage(function, name, group_size, weights, penalised=given.kl_in == "reward")
        return given_advantage(function, name)
    match given:
        case PPO():
            return undiminished
        case GDPO():
            return decoupled
        case ReinforcePlusPlus():
            return batch_standardized
        case ReinforcePlusPlusBaseline():
            return group_baseline
        case RLOO():
            return {"batch": leave_one_out_scaled, "none": leave_one_out}[given.advantage_scale]
    assert isinstance(given, ScaledAdvantages)
    return {"group": standardized, "batch": batch_scaled, "none": centered}[given.advantage_scale]


def _try_advantage(
    function: Callable[..., Any], name: str, group_size: int, weights: Mapping[str, float], *, penalised: bool
) -> None:
    """Check a user's advantage function on the groups that a run will meet. ConfigError unless it takes its inputs and
    returns finite advantages [P, G], which follow the KL penalties where rewards are `penalised`."""
    rewards_PG = groups_to_try(group_size)
    wrapped = given_advantage(function, name)
    parts_PG = {reward: rewards_PG.copy() for reward in weights}
    lengths_PG = np.full(rewards_PG.shape, 3)
    penalties_PG = -np.square(np.arange(rewards_PG.size, dtype=np.float32)).reshape(rewards_PG.shape)
    try:
        made = wrapped(rewards_PG, parts_PG, weights, lengths_PG, np.zeros_like(penalties_PG))
        moved = wrapped(rewards_PG + penalties_PG, parts_PG, weights, lengths_PG, penalties_PG)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        wanted = ", ".join(inputs_of(function, name)) or "rewards_PG"
        raise ConfigError(f"algorithm.advantage: {name}({wanted}) raised {describe_error(error)}") from error
    if penalised and np.array_equal(made, moved, equal_nan=True):
        raise ConfigError(
            f"algorithm.advantage: {name} gives the same advantages whatever the KL penalties of kl_in: reward are, so "
            "there would be no KL; read rewards_PG, which has them, or name the parameter penalties_PG [P, G] and add "
            "it, or set kl_in: loss"
        )
    valid_PG = ~np.isnan(rewards_PG)
    for group, advantages, valid in zip(rewards_PG, made, valid_PG, strict=True):
        if valid.sum() > 1 and np.isnan(advantages[valid]).any():
            raise ConfigError(
                f"algorithm.advantage: {name} must return a finite advantage for each sample that has a reward; of the "
                f"group {group.tolist()} (nan: no reward) it made {advantages.tolist()}; use np.nanmean and np.nanstd, "
                "and add a small number to what it divides by"
            )


def needs_reference(section: OnlineSection) -> bool:
    """True if log-probabilities of a reference enter the loss or the reward."""
    if not isinstance(section, RLSection):
        return True
    return section.algorithm.kl_in == "reward" or loss_of(section).kl_coef > 0


def _critic_of(given: AlgorithmSection) -> CriticSettings | None:
    """Critic of PPO, with whitened advantages."""
    if not isinstance(given, PPO):
        return None
    gae = GAE(gamma=given.gamma, lam=given.gae_lambda, whiten=True, level=given.gae_level)
    return CriticSettings(gae=gae, loss=ValueLoss(clip=given.value_clip))
