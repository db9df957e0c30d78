"""Advantages: against TRL, by hand, by property."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.errors import ConfigError
from posttrain.rl.advantages import (
    Advantage,
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

pytestmark = pytest.mark.fast

GOLDEN = Path(__file__).parents[1] / "goldens" / "losses" / "advantages"
FUNCTIONS: dict[str, Advantage] = {
    "centered": centered,
    "standardized": standardized,
    "leave_one_out": leave_one_out,
    "batch_scaled": batch_scaled,
    "leave_one_out_scaled": leave_one_out_scaled,
    "batch_standardized": batch_standardized,
    "group_baseline": group_baseline,
    "decoupled": lambda rewards: decoupled({"one": rewards}, {"one": 1.0}, np.zeros(rewards.shape)),
}
every_function = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


def cases() -> list[dict[str, Any]]:
    return json.loads(GOLDEN.with_suffix(".json").read_text())["cases"]


def function_of(args: dict[str, Any]) -> Advantage:
    if args.get("aggregation", "").startswith("normalize_then_sum"):
        return decoupled
    if "scale_rewards" in args:
        return {"group": standardized, "batch": batch_scaled, "none": centered}[args["scale_rewards"]]
    return leave_one_out_scaled if args["normalize_advantages"] else leave_one_out


def test_number_of_cases() -> None:
    assert len(cases()) == 33


@pytest.mark.parametrize("name", [case["name"] for case in cases()])
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
    rewards_PG = rewards.reshape(-1, args["num_generations"])
    names = [str(number) for number in range(per_function.shape[1])]
    parts_PG = {name: per_function[:, number].reshape(rewards_PG.shape) for number, name in enumerate(names)}
    weights = dict(zip(names, args.get("reward_weights", [1.0]), strict=True))
    lengths_PG = np.ones(rewards_PG.shape, np.int32)
    more = parts_PG, weights, lengths_PG, np.zeros(rewards_PG.shape)
    actual = advantages_of(function_of(args), rewards_PG, *more).reshape(-1)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, arrays[case["output"]], rtol=1e-5, atol=1e-6)


@every_function
def test_advantages_sum_to_zero(function: Advantage) -> None:
    rewards = np.random.default_rng(0).normal(3.0, 2.0, (5, 8)).astype(np.float32)
    rewards[1, 2] = rewards[3, :5] = np.nan
    advantages = function(rewards)
    assert (np.abs(advantages).max(axis=1) > 0.1).all()
    np.testing.assert_allclose(advantages.sum(), 0.0, atol=1e-5)
    if function is not batch_standardized:
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
    rewards = np.array([[0.1] * 3, [np.nan, 0.1, np.nan], [np.nan] * 3], np.float32)
    np.testing.assert_array_equal(function(rewards), np.zeros((3, 3), np.float32))
    if function is not batch_standardized:
        rewards[1, 1] = 0.7
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


def test_over_the_batch_by_hand() -> None:
    rewards = np.array([[1.0, 3.0], [2.0, 2.0], [np.nan, 4.0]])
    found = np.array([1.0, 3.0, 2.0, 2.0, 4.0])
    np.testing.assert_allclose(
        batch_standardized(rewards)[~np.isnan(rewards)], (found - 2.4) / (found.std(ddof=1) + 1e-4), rtol=1e-6
    )
    differences = np.array([-1.0, 1.0, 0.0, 0.0, 0.0])
    np.testing.assert_allclose(
        group_baseline(rewards)[~np.isnan(rewards)], differences / (differences.std(ddof=1) + 1e-4), rtol=1e-6
    )
    np.testing.assert_allclose(batch_scaled(rewards)[0], np.array([-1, 1]) / (found.std(ddof=1) + 1e-4), rtol=1e-6)
    np.testing.assert_array_equal(undiminished(rewards), [[1, 3], [2, 2], [0, 4]])


def test_decoupled_rewards_count_alike() -> None:
    """A reward of a thousand times the scale does not drown the other; its weight is of the standardised one."""
    draw = np.random.default_rng(3)
    parts = {"large": draw.normal(size=(4, 6)) * 1000, "small": draw.normal(size=(4, 6))}
    zeros = np.zeros((4, 6))
    made = decoupled(parts, {"large": 1.0, "small": 1.0}, zeros)
    same = decoupled({"large": parts["large"] / 1000, "small": parts["small"]}, {"large": 1.0, "small": 1.0}, zeros)
    np.testing.assert_allclose(made, same, atol=1e-3)
    assert np.abs(made - decoupled(parts, {"large": 1.0, "small": 0.1}, zeros)).max() > 0.1


def test_the_coefficient_of_a_penalty_counts_beside_decoupled_rewards() -> None:
    """Equal penalties of a group change nothing; others are added, centred, to the standardised rewards."""
    draw = np.random.default_rng(4)
    parts, penalties = {"one": draw.normal(size=(3, 5)) * 100}, -draw.random((3, 5))
    parts["one"][1, 2] = np.nan
    weights = {"one": 0.5}
    plain = decoupled(parts, weights, np.zeros((3, 5)))
    np.testing.assert_array_equal(decoupled(parts, weights, np.repeat(penalties[:, :1], 5, axis=1)), plain)
    valid = ~np.isnan(parts["one"])
    total = 0.5 * standardized(parts["one"]) + centered(np.where(valid, penalties, np.nan))
    expected = (total - total[valid].mean()) / (total[valid].std(ddof=1) + 1e-4)
    np.testing.assert_allclose(decoupled(parts, weights, penalties), np.where(valid, expected, 0), atol=1e-5)


def call(function: Advantage) -> np.ndarray:
    rewards = np.array([[1.0, 2.0]])
    parts = {"a": rewards, "b": 10 * rewards}
    return advantages_of(function, rewards, parts, {"a": 0.5, "b": 2.0}, np.array([[3, 4]]), -rewards)


def test_functions_get_what_they_name() -> None:
    np.testing.assert_array_equal(call(lambda r: r), [[1, 2]])
    np.testing.assert_array_equal(call(lambda rewards_PG, lengths_PG: rewards_PG * lengths_PG), [[3, 8]])
    np.testing.assert_array_equal(call(lambda parts_PG, weights: weights["b"] * parts_PG["b"]), [[20, 40]])
    np.testing.assert_array_equal(call(lambda parts_PG, penalties_PG: parts_PG["b"] + penalties_PG), [[9, 18]])
    np.testing.assert_array_equal(call(np.negative), [[-1, -2]])
    wrapped = given_advantage(lambda weights, rewards_PG: weights["a"] * rewards_PG, "own")
    np.testing.assert_array_equal(call(wrapped), [[0.5, 1]])
    with pytest.raises(ConfigError, match="advantage: own has the parameters tokens, which nothing provides"):
        inputs_of(lambda rewards_PG, tokens: rewards_PG, "own")


def test_is_mixed() -> None:
    rewards = np.array([[1, 1, 1], [1, 0, 1], [np.nan, 1, 1], [np.nan, 1, 0], [np.nan] * 3, [np.nan, np.nan, 1.0]])
    assert is_mixed(rewards).tolist() == [False, True, False, True, False, False]


@every_function
@pytest.mark.parametrize("rewards", [np.array([[1.0, np.inf]]), np.array([[1.0, -np.inf]])])
def test_infinite_rewards_are_refused(function: Advantage, rewards: np.ndarray) -> None:
    with pytest.raises(ValueError, match="must be finite or NaN"):
        function(rewards)
