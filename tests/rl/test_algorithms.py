"""The table of algorithms, overrides and the group filter."""

from __future__ import annotations

import numpy as np
import pytest

from posttrain.errors import ConfigError
from posttrain.losses.policy import DAPO, DISTILL, GRPO, GSPO, RLOO, dr_grpo
from posttrain.rl.advantages import centered, leave_one_out, standardized
from posttrain.rl.algorithms import ALGORITHMS, make_algorithm
from posttrain.tree import replace

pytestmark = pytest.mark.fast

REWARDS = np.array([[1, 1, 1], [0, 1, 0], [0, 0, 0], [np.nan, 1, 0], [np.nan, 1, 1]])
GROUPS = ["good", "mixed", "bad", "mixed with an error", "good with an error"]


def test_table() -> None:
    made = {name: make_algorithm(name, max_tokens=64) for name in ALGORITHMS}
    assert {name: (a.name, a.loss, a.advantage) for name, a in made.items()} == {
        "grpo": ("grpo", GRPO, standardized),
        "dr_grpo": ("dr_grpo", dr_grpo(64), centered),
        "dapo": ("dapo", DAPO, standardized),
        "gspo": ("gspo", GSPO, standardized),
        "rloo": ("rloo", RLOO, leave_one_out),
        "distill": ("distill", DISTILL, centered),
    }


def test_overrides() -> None:
    algorithm = make_algorithm("gspo", max_tokens=64, kl_coef=0.01, clip_low=0.1, clip_high=0.3, advantage=centered)
    assert algorithm.loss == replace(GSPO, kl_coef=0.01, clip_low=0.1, clip_high=0.3)
    assert algorithm.advantage is centered
    assert make_algorithm("grpo", max_tokens=64, kl_coef=0.0).loss == replace(GRPO, kl_coef=0.0)
    with pytest.raises(ConfigError, match=r"^dual_clip=1.1 must be at least 1 \+ clip_high"):
        make_algorithm("grpo", max_tokens=64, dual_clip=1.1)


def test_unknown_name() -> None:
    with pytest.raises(
        ConfigError, match=r"'dr-grpo' is unknown; did you mean 'dr_grpo'\?; there are grpo, dr_grpo, dapo"
    ):
        make_algorithm("dr-grpo", max_tokens=64)


def test_dapo_keeps_mixed_groups() -> None:
    groups, rewards = make_algorithm("dapo", max_tokens=64).keep(GROUPS, REWARDS)
    assert groups == ["mixed", "mixed with an error"]
    np.testing.assert_array_equal(rewards, REWARDS[[1, 3]])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "gspo", "rloo"])
def test_others_keep_every_group(name: str) -> None:
    groups, rewards = make_algorithm(name, max_tokens=64).keep(GROUPS, REWARDS)
    assert groups == GROUPS
    np.testing.assert_array_equal(rewards, REWARDS)


def test_a_batch_is_never_empty() -> None:
    """Where no group is mixed all stay, with advantage 0."""
    dapo = make_algorithm("dapo", max_tokens=64)
    groups, rewards = dapo.keep(["good", "bad"], np.array([[1.0, 1.0], [0.0, 0.0]]))
    assert groups == ["good", "bad"]
    assert not dapo.advantage(rewards).any()


def test_groups_and_rewards_must_match() -> None:
    with pytest.raises(ValueError, match="4 groups but 5 rows of rewards"):
        make_algorithm("grpo", max_tokens=64).keep(GROUPS[:4], REWARDS)
