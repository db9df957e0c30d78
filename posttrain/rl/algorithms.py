"""RL algorithms by name: a loss, an advantage function, a group filter, and where KL and values enter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Int

from posttrain.errors import ConfigError, did_you_mean
from posttrain.losses import policy
from posttrain.losses.policy import PolicyLoss, RLLoss
from posttrain.losses.ratios import KLEstimator, k1, k2, k3
from posttrain.losses.reduce import ConstantLength, Reduction, sequence_mean, sequence_total, token_mean
from posttrain.losses.surrogates import CLIP_FIELDS
from posttrain.losses.value import ValueLoss
from posttrain.rl.advantages import (
    Advantage,
    RewardArray,
    advantages_of,
    batch_standardized,
    centered,
    decoupled,
    group_baseline,
    is_mixed,
    leave_one_out,
    scaled,
    standardized,
    undiminished,
)
from posttrain.rl.returns import GAE, RewardKL

GroupFilter = Callable[[RewardArray], Bool[np.ndarray, " P"]]


def every_group(rewards_PG: RewardArray) -> Bool[np.ndarray, " P"]:
    """Keep all groups. Groups of equal rewards have advantage 0, but count in the loss's mean, and a KL penalty acts on
    them."""
    return np.ones(len(rewards_PG), dtype=bool)


def given_filter(function: GroupFilter, name: str) -> GroupFilter:
    """Wrap a user's group filter. ConfigError unless it returns true or false for each group."""

    def keep(rewards_PG: RewardArray) -> Bool[np.ndarray, " P"]:
        made = np.asarray(function(rewards_PG.copy()))
        if made.shape != rewards_PG.shape[:1] or made.dtype != bool:
            raise ConfigError(
                f"filter: {name} must return true or false for each of the {len(rewards_PG)} groups of rewards_PG; it "
                f"returned {made.dtype} of shape {made.shape}"
            )
        return made

    return keep


@dataclass(frozen=True, kw_only=True)
class Critic:
    """Settings of a value model."""

    gae: GAE
    loss: ValueLoss


@dataclass(frozen=True)
class Algorithm:
    """RL algorithm of a stage."""

    name: str
    loss: Any
    """`RLLoss`: a `PolicyLoss` or a user's loss."""
    advantage: Advantage
    filter: GroupFilter = every_group
    critic: Critic | None = None
    """Critic whose values make advantages per token; `advantage` then gives the reward of each sequence."""
    reward_kl: RewardKL | None = None
    """KL penalty in the reward, in place of one in the loss."""
    truncated: Literal["keep", "mask"] = "keep"
    """Samples cut at the maximum length: `mask` leaves them out of the loss, but not out of the baseline."""
    top_entropy: float | None = None
    """Share of tokens with the highest entropy that have an advantage."""
    turn_advantages: bool = False
    """Advantages per turn, in place of `advantage`."""

    @property
    def needs_critic(self) -> bool:
        return self.critic is not None

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


CRITIC = Critic(gae=GAE(gamma=1.0, lam=0.95, whiten=True), loss=ValueLoss(clip=0.2))
"""Critic of PPO: no discount, lambda 0.95, whitened advantages, value clip 0.2."""

ALGORITHMS: dict[str, Callable[[int], Algorithm]] = {
    "grpo": lambda _: Algorithm("grpo", policy.GRPO, standardized),
    "dr_grpo": lambda max_tokens: Algorithm("dr_grpo", policy.dr_grpo(max_tokens), centered),
    "dapo": lambda _: Algorithm("dapo", policy.DAPO, standardized, filter=is_mixed),
    "bnpo": lambda _: Algorithm("bnpo", policy.BNPO, standardized),
    "gspo": lambda _: Algorithm("gspo", policy.GSPO, standardized),
    "gspo_token": lambda _: Algorithm("gspo_token", policy.GSPO_TOKEN, standardized),
    "luspo": lambda _: Algorithm("luspo", policy.LUSPO, standardized),
    "gmpo": lambda _: Algorithm("gmpo", policy.GMPO, standardized),
    "cispo": lambda _: Algorithm("cispo", policy.CISPO, standardized),
    "sapo": lambda _: Algorithm("sapo", policy.SAPO, standardized),
    "vespo": lambda _: Algorithm("vespo", policy.VESPO, standardized),
    "rloo": lambda _: Algorithm("rloo", policy.RLOO, leave_one_out),
    "reinforce_plus_plus": lambda _: Algorithm("reinforce_plus_plus", policy.REINFORCE, batch_standardized),
    "reinforce_plus_plus_baseline": lambda _: Algorithm(
        "reinforce_plus_plus_baseline", policy.REINFORCE, group_baseline
    ),
    "gdpo": lambda _: Algorithm("gdpo", policy.GRPO, decoupled),
    "ppo": lambda _: Algorithm("ppo", policy.PPO, undiminished, critic=CRITIC),
    "distill": lambda _: Algorithm("distill", policy.DISTILL, centered),
}
"""Algorithms by name, as functions of the maximum number of sampled tokens per trajectory."""
REDUCTIONS: dict[str, Reduction] = {
    "sequence_mean": sequence_mean,
    "token_mean": token_mean,
    "sequence_total": sequence_total,
}
ESTIMATORS: dict[str, KLEstimator] = {"k1": k1, "k2": k2, "k3": k3}


def make_algorithm(
    name: str,
    *,
    max_tokens: int,
    advantage: Advantage | None = None,
    advantage_scale: str | None = None,
    filter: GroupFilter | None = None,
    truncated: Literal["keep", "mask"] = "keep",
    top_entropy: float | None = None,
    turn_advantages: bool = False,
    gae_level: Literal["token", "turn"] = "token",
    kl_in: Literal["loss", "reward"] = "loss",
    critic: Mapping[str, float] | None = None,
    loss: RLLoss | None = None,
    **fields: Any,
) -> Algorithm:
    """Make the algorithm of a name; arguments that are not None override its defaults.

    `max_tokens`: maximum number of sampled tokens per trajectory. `critic`: gamma, gae_lambda, value_clip. `loss`: a
    user's loss in place of a `PolicyLoss`, of which `fields` are fields. Raises ConfigError for an unknown name or
    incompatible values.
    """
    if name not in ALGORITHMS:
        raise ConfigError(
            f"algorithm: {name!r} is unknown{did_you_mean(name, ALGORITHMS)}; there are {', '.join(ALGORITHMS)}"
        )
    algorithm = ALGORITHMS[name](max_tokens)
    if advantage_scale is not None:
        if advantage is not None:
            raise ConfigError(f"advantage_scale={advantage_scale} has no effect on an advantage function of your own")
        advantage = scaled(algorithm.advantage, advantage_scale, name)
    if algorithm.critic is not None and advantage is not None:
        raise ConfigError(f"advantage has no effect on algorithm={name}, whose critic makes advantages; remove it")
    given = {field: value for field, value in fields.items() if value is not None}
    reward_kl = None
    if kl_in == "reward":
        reward_kl = _reward_kl(algorithm, given, loss)
    return replace(
        algorithm,
        loss=_loss_of(algorithm.loss, given, max_tokens) if loss is None else _given_loss(loss, given),
        advantage=algorithm.advantage if advantage is None else advantage,
        filter=algorithm.filter if filter is None else filter,
        critic=_critic_of(algorithm, critic or {}, gae_level),
        reward_kl=reward_kl,
        truncated=truncated,
        top_entropy=top_entropy,
        turn_advantages=turn_advantages,
    )


def _loss_of(default: PolicyLoss, given: Mapping[str, Any], max_tokens: int) -> PolicyLoss:
    changes = dict(given)
    if (reduce := changes.get("reduce")) is not None:
        changes["reduce"] = ConstantLength(max_tokens) if reduce == "constant_length" else REDUCTIONS[reduce]
    if (estimator := changes.get("kl_estimator")) is not None:
        changes["kl_estimator"] = ESTIMATORS[estimator]
    try:
        made = replace(default, **changes)
    except ValueError as error:
        raise ConfigError(str(error).removeprefix("PolicyLoss.")) from error
    if unread := [name for name in CLIP_FIELDS if name in given and name not in made.surrogate.bounds]:
        raise ConfigError(
            f"{', '.join(unread)} without effect on the surrogate {type(made.surrogate).__name__}; remove it"
        )
    return made


def _given_loss(loss: RLLoss, given: Mapping[str, Any]) -> RLLoss:
    if given:
        raise ConfigError(f"{', '.join(sorted(given))} without effect on a loss of your own; remove it, or loss")
    return loss


def _reward_kl(algorithm: Algorithm, given: dict[str, Any], loss: RLLoss | None) -> RewardKL:
    """KL in the reward from the fields of one in the loss, which are taken out of `given`."""
    if given.pop("kl_bias_correction", None) is not None:
        raise ConfigError("kl_bias_correction has no effect with kl_in: reward, where nothing is differentiated")
    coef = given.get("kl_coef", algorithm.loss.kl_coef if loss is None else 0.0)
    if coef <= 0:
        raise ConfigError(f"kl_in=reward with kl_coef={coef:g} has no effect; set kl_coef above 0")
    if loss is None:
        given["kl_coef"] = 0.0
    else:
        given.pop("kl_coef")
    return RewardKL(coef=coef, estimator=ESTIMATORS[given.pop("kl_estimator", "k1")])


def _critic_of(algorithm: Algorithm, given: Mapping[str, float], level: Literal["token", "turn"]) -> Critic | None:
    if algorithm.critic is None:
        if given:
            raise ConfigError(f"{', '.join(given)} without effect on algorithm={algorithm.name}, which has no critic")
        return None
    default = algorithm.critic.gae
    gae = replace(
        default, gamma=given.get("gamma", default.gamma), lam=given.get("gae_lambda", default.lam), level=level
    )
    loss = ValueLoss(clip=given["value_clip"]) if "value_clip" in given else algorithm.critic.loss
    return Critic(gae=gae, loss=loss)
