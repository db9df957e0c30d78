"""The table of algorithms, overrides and the group filter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from posttrain.errors import ConfigError
from posttrain.losses import policy
from posttrain.losses.policy import DAPO, DISTILL, GRPO, GSPO, RLOO, dr_grpo
from posttrain.losses.ratios import k1, k3
from posttrain.losses.reduce import sequence_total, token_mean
from posttrain.losses.surrogates import CISPO, SAPO
from posttrain.rl.advantages import (
    batch_scaled,
    batch_standardized,
    centered,
    decoupled,
    group_baseline,
    is_mixed,
    leave_one_out,
    leave_one_out_scaled,
    standardized,
    undiminished,
)
from posttrain.rl.algorithms import ALGORITHMS, CRITIC, given_filter, make_algorithm
from posttrain.rl.returns import RewardKL
from posttrain.tree import replace

pytestmark = pytest.mark.fast

REWARDS = np.array([[1, 1, 1], [0, 1, 0], [0, 0, 0], [np.nan, 1, 0], [np.nan, 1, 1]])


def test_table() -> None:
    made = {name: make_algorithm(name, max_tokens=64) for name in ALGORITHMS}
    assert {name: (a.name, a.loss, a.advantage) for name, a in made.items()} == {
        "grpo": ("grpo", GRPO, standardized),
        "dr_grpo": ("dr_grpo", dr_grpo(64), centered),
        "dapo": ("dapo", DAPO, standardized),
        "bnpo": ("bnpo", replace(GRPO, reduce=token_mean, kl_coef=0.0), standardized),
        "gspo": ("gspo", GSPO, standardized),
        "gspo_token": ("gspo_token", replace(GSPO, ratio="sequence_mean_token"), standardized),
        "luspo": ("luspo", replace(GSPO, reduce=sequence_total), standardized),
        "gmpo": ("gmpo", policy.GMPO, standardized),
        "cispo": ("cispo", policy.CISPO, standardized),
        "sapo": ("sapo", policy.SAPO, standardized),
        "vespo": ("vespo", policy.VESPO, standardized),
        "rloo": ("rloo", RLOO, leave_one_out),
        "reinforce_plus_plus": ("reinforce_plus_plus", policy.REINFORCE, batch_standardized),
        "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", policy.REINFORCE, group_baseline),
        "gdpo": ("gdpo", GRPO, decoupled),
        "ppo": ("ppo", policy.PPO, undiminished),
        "distill": ("distill", DISTILL, centered),
    }
    assert [name for name, a in made.items() if a.needs_critic] == ["ppo"]
    assert [name for name, a in made.items() if a.needs_reference] == ["grpo", "gdpo"]
    assert [name for name, a in made.items() if a.filter is is_mixed] == ["dapo"]


def test_overrides() -> None:
    algorithm = make_algorithm("gspo", max_tokens=64, kl_coef=0.01, clip_low=0.1, clip_high=0.3, advantage=centered)
    assert algorithm.loss == replace(GSPO, kl_coef=0.01, clip_low=0.1, clip_high=0.3)
    assert algorithm.advantage is centered
    assert make_algorithm("grpo", max_tokens=64, kl_coef=0.0).loss == replace(GRPO, kl_coef=0.0)
    with pytest.raises(ConfigError, match=r"^dual_clip=1.1 must be at least 1 \+ clip_high"):
        make_algorithm("grpo", max_tokens=64, dual_clip=1.1)


def test_advantage_scale() -> None:
    def scaled(name: str, scale: str) -> Any:
        return make_algorithm(name, max_tokens=64, advantage_scale=scale).advantage

    assert [scaled("grpo", scale) for scale in ("group", "batch", "none")] == [standardized, batch_scaled, centered]
    assert [scaled("dr_grpo", scale) for scale in ("group", "batch")] == [standardized, batch_scaled]
    assert [scaled("rloo", scale) for scale in ("batch", "none")] == [leave_one_out_scaled, leave_one_out]
    with pytest.raises(ConfigError, match="advantage_scale=group with algorithm=rloo: it can be batch or none"):
        scaled("rloo", "group")
    with pytest.raises(ConfigError, match="advantage_scale=batch with algorithm=gdpo: its advantage has no other"):
        scaled("gdpo", "batch")
    with pytest.raises(ConfigError, match="advantage_scale=none has no effect on an advantage function of your own"):
        make_algorithm("grpo", max_tokens=64, advantage_scale="none", advantage=centered)


def test_kl_in_reward() -> None:
    made = make_algorithm("grpo", max_tokens=64, kl_in="reward")
    assert made.reward_kl == RewardKL(coef=0.04, estimator=k1) and made.loss.kl_coef == 0 and made.needs_reference
    made = make_algorithm("rloo", max_tokens=64, kl_in="reward", kl_coef=0.1, kl_estimator="k3")
    assert made.reward_kl == RewardKL(coef=0.1, estimator=k3) and made.loss == RLOO
    with pytest.raises(ConfigError, match="kl_in=reward with kl_coef=0 has no effect"):
        make_algorithm("rloo", max_tokens=64, kl_in="reward")
    with pytest.raises(ConfigError, match="kl_bias_correction has no effect with kl_in: reward"):
        make_algorithm("grpo", max_tokens=64, kl_in="reward", kl_bias_correction=True)


def test_critic() -> None:
    made = make_algorithm("ppo", max_tokens=64, critic={"gamma": 0.9, "gae_lambda": 0.8, "value_clip": 0.5}).critic
    assert made is not None and (made.gae.gamma, made.gae.lam, made.loss.clip) == (0.9, 0.8, 0.5)
    assert make_algorithm("ppo", max_tokens=64).critic == CRITIC
    with pytest.raises(ConfigError, match="gamma without effect on algorithm=grpo, which has no critic"):
        make_algorithm("grpo", max_tokens=64, critic={"gamma": 0.9})
    with pytest.raises(ConfigError, match="advantage has no effect on algorithm=ppo"):
        make_algorithm("ppo", max_tokens=64, advantage=centered)


class Own:
    kl_coef = 0.0

    def __call__(self, stats: Any, batch: Any) -> Any:
        return GRPO(stats, batch)


def test_own_loss() -> None:
    made = make_algorithm("dapo", max_tokens=64, loss=Own(), truncated="mask", top_entropy=0.2)
    assert isinstance(made.loss, Own) and made.filter is is_mixed
    assert (made.truncated, made.top_entropy, made.needs_reference) == ("mask", 0.2, False)
    with pytest.raises(ConfigError, match="clip_low, surrogate without effect on a loss of your own"):
        make_algorithm("dapo", max_tokens=64, loss=Own(), clip_low=0.1, surrogate=CISPO())


def test_surrogates_are_overrides() -> None:
    sapo = SAPO(positive=0.5, negative=2.0)
    assert make_algorithm("dapo", max_tokens=64, surrogate=sapo).loss == replace(DAPO, surrogate=sapo)
    with pytest.raises(ConfigError, match="^clip_low, clip_high without effect on the surrogate SAPO; remove it"):
        make_algorithm("sapo", max_tokens=64, clip_low=0.1, clip_high=0.3)
    with pytest.raises(ConfigError, match="^clip_low without effect on the surrogate CISPO"):
        make_algorithm("cispo", max_tokens=64, clip_low=0.1)
    assert make_algorithm("cispo", max_tokens=64, clip_high=1.0).loss.clip_high == 1.0
    with pytest.raises(ConfigError, match="^ratio=sequence_mean with the surrogate GMPO, which aggregates"):
        make_algorithm("gmpo", max_tokens=64, ratio="sequence_mean")


def test_own_filter() -> None:
    best = given_filter(lambda rewards_PG: np.nanmax(rewards_PG, axis=1) > 0.5, "best")
    assert make_algorithm("grpo", max_tokens=64, filter=best).kept(REWARDS).tolist() == [True, True, False, True, True]
    for wrong in (lambda rewards: rewards > 0, lambda rewards: rewards.mean(axis=1)):
        with pytest.raises(ConfigError, match="filter: own must return true or false for each of the 5 groups"):
            given_filter(wrong, "own")(REWARDS)


def test_unknown_name() -> None:
    with pytest.raises(
        ConfigError, match=r"'dr-grpo' is unknown; did you mean 'dr_grpo'\?; there are grpo, dr_grpo, dapo"
    ):
        make_algorithm("dr-grpo", max_tokens=64)


def kept(name: str, rewards_PG: np.ndarray, **settings: Any) -> list[bool]:
    return make_algorithm(name, max_tokens=64, **settings).kept(rewards_PG).tolist()


def test_kept_groups() -> None:
    """Only the filter of equal rewards keeps all groups where it would keep none: their advantages are 0."""
    assert kept("dapo", REWARDS) == [False, True, False, True, False]
    assert all(all(kept(name, REWARDS)) for name in ("grpo", "dr_grpo", "gspo", "rloo"))
    equal = REWARDS[[0, 2]]
    assert kept("dapo", equal) == [True, True] and not standardized(equal).any()
    assert (
        kept("dapo", REWARDS, filter=given_filter(lambda rewards: np.zeros(len(rewards), bool), "own")) == [False] * 5
    )


@pytest.mark.parametrize("name", sorted(ALGORITHMS.keys() - {"ppo"}))
def test_a_penalty_changes_advantages(name: str) -> None:
    algorithm = make_algorithm(name, max_tokens=64, kl_in="reward", kl_coef=0.1)
    draw = np.random.default_rng(0)
    parts = {"a": draw.random((2, 4)), "b": draw.random((2, 4))}
    total, penalties = parts["a"] + parts["b"], -draw.random((2, 4))
    given = parts, {"a": 1.0, "b": 1.0}, np.full((2, 4), 3)
    with_none = algorithm.advantages(total, *given, np.zeros((2, 4)))
    assert np.abs(algorithm.advantages(total + penalties, *given, penalties) - with_none).max() > 0.1
