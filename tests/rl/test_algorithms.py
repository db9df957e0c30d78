"""The table of algorithms, overrides and the group filter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.errors import ConfigError
from posttrain.losses.policy import DAPO, DISTILL, GRPO, GSPO, RLOO, dr_grpo
from posttrain.rl.algorithms import (
    ALGORITHMS,
    Advantage,
    centered,
    is_mixed,
    leave_one_out,
    make_algorithm,
    standardized,
)
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


GOLDEN = Path(__file__).parents[1] / "goldens" / "losses" / "advantages"
FUNCTIONS: dict[str, Advantage] = {
    "centered": centered,
    "standardized": standardized,
    "leave_one_out": leave_one_out,
}
every_function = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


def cases() -> list[dict[str, Any]]:
    return json.loads(GOLDEN.with_suffix(".json").read_text())["cases"]


def function_of(args: dict[str, Any]) -> Advantage | None:
    """`None`: not covered. GDPO needs the rewards of each function; others whiten over the batch."""
    if "scale_rewards" in args:
        return {"group": standardized, "batch": None, "none": centered}[args["scale_rewards"]]
    if args.get("normalize_advantages") is False:
        return leave_one_out
    return None


COVERED = [case["name"] for case in cases() if function_of(case["args"]) is not None]


def test_all_cases_are_accounted_for() -> None:
    left_out = {case["name"] for case in cases()} - set(COVERED)
    data = ("single", "multi", "zero_std", "nan")
    over_the_batch = ("grpo_batch", "rloo_normTrue_beta0.0", "rloo_normTrue_beta0.05")
    assert left_out == {f"{name}_{kind}" for name in data for kind in ("grpo_normalize_then_sum", *over_the_batch)}
    assert len(COVERED) == 17


@pytest.mark.parametrize("name", COVERED)
def test_golden(name: str) -> None:
    case = next(case for case in cases() if case["name"] == name)
    args = case["args"]
    with np.load(GOLDEN.with_suffix(".npz")) as file:
        arrays = dict(file)
    per_function = arrays[args["rewards"]].astype(np.float64)
    rewards = np.nansum(per_function * args.get("reward_weights", [1.0]), axis=1)
    rewards[np.isnan(per_function).all(axis=1)] = np.nan
    if "reward_clip_range" in args:
        rewards = np.clip(rewards, *args["reward_clip_range"])
    if args.get("beta"):
        # TRL's RLOO takes the KL of the whole sequence off the reward.
        old, ref = (arrays[f"in/{name}/{which}_per_token_logps"] for which in ("old", "ref"))
        rewards = rewards - args["beta"] * (old - ref).sum(axis=1)
    function = function_of(args)
    assert function is not None
    actual = function(rewards.reshape(-1, args["num_generations"])).reshape(-1)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, arrays[case["output"]], rtol=1e-5, atol=1e-6)


@every_function
def test_groups_sum_to_zero(function: Advantage) -> None:
    rewards = np.random.default_rng(0).normal(3.0, 2.0, (5, 8)).astype(np.float32)
    rewards[1, 2] = rewards[3, :5] = np.nan
    advantages = function(rewards)
    assert (np.abs(advantages).max(axis=1) > 0.1).all()
    np.testing.assert_allclose(advantages.sum(axis=1), 0.0, atol=1e-5)


@every_function
def test_no_reward_is_left_out(function: Advantage) -> None:
    """A sample without reward: advantage 0, and the others as if it had not been sampled."""
    rewards = np.array([[1.0, np.nan, 0.0, 0.5], [np.nan, 2.0, -1.0, 0.5]])
    advantages = function(rewards)
    assert advantages[0, 1] == advantages[1, 0] == 0.0
    np.testing.assert_allclose(
        advantages[~np.isnan(rewards)].reshape(2, 3), function(rewards[~np.isnan(rewards)].reshape(2, 3)), rtol=1e-6
    )


@every_function
def test_nothing_to_compare_is_zero(function: Advantage) -> None:
    """Equal rewards (0.1 has a rounded mean), a single reward, none at all."""
    rewards = np.array([[0.1] * 3, [np.nan, 0.7, np.nan], [np.nan] * 3], np.float32)
    np.testing.assert_array_equal(function(rewards), np.zeros((3, 3), np.float32))


@every_function
def test_order_of_samples_does_not_matter(function: Advantage) -> None:
    rewards = np.random.default_rng(1).normal(size=(3, 6))
    order = [3, 1, 5, 0, 4, 2]
    np.testing.assert_allclose(function(rewards[:, order]), function(rewards)[:, order], rtol=1e-6)


def test_by_hand() -> None:
    rewards = np.array([[1.0, 2.0, 6.0]])
    np.testing.assert_allclose(centered(rewards), [[-2, -1, 3]], rtol=1e-6)
    np.testing.assert_allclose(standardized(rewards), np.array([[-2, -1, 3]]) / (np.sqrt(7) + 1e-4), rtol=1e-6)
    np.testing.assert_allclose(leave_one_out(rewards), [[1 - 4, 2 - 3.5, 6 - 1.5]], rtol=1e-6)


def test_is_mixed() -> None:
    rewards = np.array([[1, 1, 1], [1, 0, 1], [np.nan, 1, 1], [np.nan, 1, 0], [np.nan] * 3, [np.nan, np.nan, 1.0]])
    assert is_mixed(rewards).tolist() == [False, True, False, True, False, False]


@every_function
@pytest.mark.parametrize("rewards", [np.array([[1.0, np.inf]]), np.array([[1.0, -np.inf]])])
def test_infinite_rewards_are_refused(function: Advantage, rewards: np.ndarray) -> None:
    with pytest.raises(ValueError, match="must be finite or NaN"):
        function(rewards)
