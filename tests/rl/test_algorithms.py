"""Algorithms of every kind as built from their sections, and the group filter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.config import ALGORITHMS, RLSection
from posttrain.errors import ConfigError
from posttrain.losses import policy
from posttrain.losses.policy import DAPO, DISTILL, GRPO, GSPO, RLOO, dr_grpo
from posttrain.losses.ratios import k1, k3
from posttrain.losses.reduce import sequence_total, token_mean
from posttrain.losses.surrogates import CLIP_FIELDS, SAPOObjective
from posttrain.losses.value import ValueLoss
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
from posttrain.rl.algorithms import CriticSettings
from posttrain.rl.returns import GAE, RewardKL
from posttrain.tree import replace
from tests.rl.helpers import make_algorithm

pytestmark = pytest.mark.fast

REWARDS = np.array([[1, 1, 1], [0, 1, 0], [0, 0, 0], [np.nan, 1, 0], [np.nan, 1, 1]])


def test_kinds() -> None:
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
    assert [name for name, a in made.items() if a.critic is not None] == ["ppo"]
    assert [name for name, a in made.items() if a.needs_reference] == ["grpo", "gdpo"]
    assert [name for name, a in made.items() if a.filter is is_mixed] == ["dapo"]


def test_fields_are_those_of_the_loss_and_the_advantage() -> None:
    algorithm = make_algorithm("gspo", max_tokens=64, kl_coef=0.01, clip_low=0.1, clip_high=0.3)
    assert algorithm.loss == replace(GSPO, kl_coef=0.01, clip_low=0.1, clip_high=0.3)
    assert make_algorithm("grpo", max_tokens=64, kl_coef=0.0).loss == replace(GRPO, kl_coef=0.0)
    with pytest.raises(ConfigError, match=r"^algorithm.dual_clip=1.1 must be at least 1 \+ clip_high"):
        make_algorithm("grpo", max_tokens=64, dual_clip=1.1)


def test_advantage_scale() -> None:
    def scaled(name: str, scale: str) -> Any:
        return make_algorithm(name, max_tokens=64, advantage_scale=scale).advantage

    assert [scaled("grpo", scale) for scale in ("group", "batch", "none")] == [standardized, batch_scaled, centered]
    assert [scaled("dr_grpo", scale) for scale in ("group", "batch")] == [standardized, batch_scaled]
    assert [scaled("rloo", scale) for scale in ("batch", "none")] == [leave_one_out_scaled, leave_one_out]
    with pytest.raises(ValueError, match="Input should be 'batch' or 'none'"):
        scaled("rloo", "group")
    for kind in ("gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"):
        assert "advantage_scale" not in ALGORITHMS[kind].model_fields
    with pytest.raises(ValueError, match="advantage and advantage_scale each choose the advantages; remove all but"):
        make_algorithm("grpo", max_tokens=64, advantage_scale="none", advantage="own.py:centered")


def test_kl_in_reward() -> None:
    made = make_algorithm("grpo", max_tokens=64, kl_in="reward")
    assert made.reward_kl == RewardKL(coef=0.04, estimator=k1) and made.loss.kl_coef == 0 and made.needs_reference
    made = make_algorithm("rloo", max_tokens=64, kl_in="reward", kl_coef=0.1, kl_estimator="k3")
    assert made.reward_kl == RewardKL(coef=0.1, estimator=k3) and made.loss == RLOO
    with pytest.raises(ValueError, match="kl_in=reward with kl_coef=0 has no effect"):
        make_algorithm("rloo", max_tokens=64, kl_in="reward")
    with pytest.raises(ValueError, match="kl_bias_correction has no effect with kl_in: reward"):
        make_algorithm("grpo", max_tokens=64, kl_in="reward", kl_bias_correction=False)


def test_critic() -> None:
    made = make_algorithm("ppo", max_tokens=64, gamma=0.9, gae_lambda=0.8, value_clip=0.5).critic
    assert made is not None and (made.gae.gamma, made.gae.lam, made.loss.clip) == (0.9, 0.8, 0.5)
    plain = CriticSettings(gae=GAE(gamma=1.0, lam=0.95, whiten=True), loss=ValueLoss(clip=0.2))
    assert make_algorithm("ppo", max_tokens=64).critic == plain
    having = [kind for kind, section in ALGORITHMS.items() if "critic" in section.model_fields]
    assert having == ["ppo"] and "advantage" not in ALGORITHMS["ppo"].model_fields


OWN = """
import numpy as np
from posttrain.losses.policy import GRPO

class Own:
    kl_coef = 0.0

    def __call__(self, stats, batch):
        return GRPO(stats, batch)

def best(rewards_PG):
    return np.nanmax(rewards_PG, axis=1) > 0.5

def none(rewards_PG):
    return np.zeros(len(rewards_PG), bool)

def each(rewards_PG):
    return rewards_PG > 0

def mean(rewards_PG):
    return rewards_PG.mean(axis=1)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)


@pytest.mark.usefixtures("own")
def test_own_loss() -> None:
    made = make_algorithm("dapo", max_tokens=64, loss="own.py:Own", truncated="mask", top_entropy=0.2)
    assert type(made.loss).__name__ == "Own" and made.filter is is_mixed
    assert (made.truncated, made.top_entropy, made.needs_reference) == ("mask", 0.2, False)
    with pytest.raises(ValueError, match="surrogate, clip_low without effect on a loss of your own"):
        make_algorithm("dapo", max_tokens=64, loss="own.py:Own", clip_low=0.1, surrogate="cispo")
    made = make_algorithm("grpo", max_tokens=64, loss="own.py:Own", kl_in="reward", kl_coef=0.3)
    assert made.reward_kl == RewardKL(coef=0.3, estimator=k1)


def test_surrogates() -> None:
    sapo = {"kind": "sapo", "temperature_positive": 0.5, "temperature_negative": 2.0}
    made = make_algorithm("dapo", max_tokens=64, surrogate=sapo)
    assert made.loss == replace(DAPO, surrogate=SAPOObjective(positive=0.5, negative=2.0))
    for name in ("sapo", "vespo", "cispo", "gmpo"):
        plain = make_algorithm(name, max_tokens=64).loss.surrogate
        assert make_algorithm("dapo", max_tokens=64, surrogate=name).loss.surrogate == plain
    with pytest.raises(ConfigError, match="^algorithm.clip_low, algorithm.clip_high without effect on the surr"):
        make_algorithm("grpo", max_tokens=64, clip_low=0.1, clip_high=0.3, surrogate="sapo")
    with pytest.raises(ConfigError, match="^algorithm.clip_low without effect on the surrogate CISPO"):
        make_algorithm("grpo", max_tokens=64, clip_low=0.1, surrogate="cispo")
    assert make_algorithm("cispo", max_tokens=64, clip_high=1.0).loss.clip_high == 1.0
    with pytest.raises(ConfigError, match="^algorithm.ratio=sequence_mean with the surrogate GMPO, which aggregates"):
        make_algorithm("grpo", max_tokens=64, ratio="sequence_mean", surrogate="gmpo")
    read = {name: {*CLIP_FIELDS} & ALGORITHMS[name].model_fields.keys() for name in ("cispo", "sapo", "vespo", "gmpo")}
    assert read == {name: {*make_algorithm(name, max_tokens=64).loss.surrogate.bounds} for name in read}


@pytest.mark.usefixtures("own")
def test_own_filter() -> None:
    best = make_algorithm("grpo", max_tokens=64, filter="own.py:best")
    assert best.kept(REWARDS).tolist() == [True, True, False, True, True]
    for wrong in ("each", "mean"):
        with pytest.raises(ConfigError, match=f"algorithm.filter: own.py:{wrong} must return true or false for"):
            make_algorithm("grpo", max_tokens=64, filter=f"own.py:{wrong}")


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match=r"'dr-grpo' is unknown; did you mean 'dr_grpo'\?; there are grpo, dr_"):
        RLSection.model_validate({"dataset": {"path": "x"}, "rewards": [{"fn": len}], "algorithm": "dr-grpo"})


def kept(name: str, rewards_PG: np.ndarray, **settings: Any) -> list[bool]:
    return make_algorithm(name, max_tokens=64, **settings).kept(rewards_PG).tolist()


@pytest.mark.usefixtures("own")
def test_kept_groups() -> None:
    """Only the filter of equal rewards keeps all groups where it would keep none: their advantages are 0."""
    assert kept("dapo", REWARDS) == kept("grpo", REWARDS, filter="mixed") == [False, True, False, True, False]
    assert all(all(kept(name, REWARDS)) for name in ("grpo", "dr_grpo", "gspo", "rloo"))
    assert all(kept("dapo", REWARDS, filter=None))
    equal = REWARDS[[0, 2]]
    assert kept("dapo", equal) == [True, True] and not standardized(equal).any()
    assert kept("dapo", REWARDS, filter="own.py:none") == [False] * 5


@pytest.mark.parametrize("name", sorted(ALGORITHMS.keys() - {"ppo"}))
def test_a_penalty_changes_advantages(name: str) -> None:
    algorithm = make_algorithm(name, max_tokens=64, kl_in="reward", kl_coef=0.1)
    draw = np.random.default_rng(0)
    parts = {"a": draw.random((2, 4)), "b": draw.random((2, 4))}
    total, penalties = parts["a"] + parts["b"], -draw.random((2, 4))
    given = parts, {"a": 1.0, "b": 1.0}, np.full((2, 4), 3)
    with_none = algorithm.advantages(total, *given, np.zeros((2, 4)))
    assert np.abs(algorithm.advantages(total + penalties, *given, penalties) - with_none).max() > 0.1
