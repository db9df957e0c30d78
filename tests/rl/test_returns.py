"""Returns: GAE against the reference and by property, PPO's losses against TRL, KL in the reward by enumeration."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from posttrain.batch import Batch, ScoreStats, TokenStats
from posttrain.data.packing import RowSpan
from posttrain.losses.policy import PPO
from posttrain.losses.ratios import KLEstimator, gradient_in_reward, k1, k2, k3
from posttrain.losses.value import ValueLoss, values_before
from posttrain.rl.returns import GAE, RewardKL, discounted, gae, turn_gae, whitened, with_returns
from posttrain.train.objective import TrainSettings
from posttrain.train.trainer import Trainer
from posttrain.tree import replace
from posttrain.weights.scalar_head import with_scalar_head
from tests.losses.conftest import read_golden
from tests.tiny import tiny_model

RTOL = 1e-6


def at_last_token(values: np.ndarray, mask: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """Values at the last sampled token of each sequence, 0 elsewhere: the reward of a sequence as one per token."""
    kept = np.zeros(values.shape, values.dtype)
    for row in range(len(values)):
        places = np.flatnonzero(mask[row])
        ids = segments[row, places]
        last = places[np.append(ids[1:] != ids[:-1], True)] if places.size else places
        kept[row, last] = values[row, last]
    return kept


def ones(mask: np.ndarray) -> np.ndarray:
    return np.ones(mask.shape, np.int32)


def test_gae_golden() -> None:
    data = read_golden("gae_derived")
    assert len(data.cases) == 3
    rewards, values, mask = (data.arrays[f"in/{name}"] for name in ("rewards", "values", "mask"))
    for case in data.cases:
        advantages, returns = gae(rewards, values, mask > 0, ones(mask), **case["args"])
        np.testing.assert_allclose(advantages, data.arrays[f"out/{case['name']}/adv"], rtol=RTOL, atol=1e-12)
        np.testing.assert_allclose(returns, data.arrays[f"out/{case['name']}/ret"], rtol=RTOL, atol=1e-12)


KL = {"k1": k1, "k3": k3}


@pytest.mark.parametrize("name", ["default", "k3_gamma", "whiten"])
def test_ppo_golden(name: str) -> None:
    """The reference gives the score to a value slot after the last token, which `longer` counts in."""
    data = read_golden("ppo")
    assert {case["name"] for case in data.cases} == {"default", "k3_gamma", "whiten"}
    case = next(case for case in data.cases if case["name"] == name)
    args, arrays = case["args"], data.arrays
    mask, longer = (~arrays[f"out/{name}/{which}"] for which in ("padding_mask", "padding_mask_p1"))
    logps, ref, values = (arrays[f"in/{which}"] for which in ("logprobs", "ref_logprobs", "values"))
    with jax.enable_x64(True):
        rewards = RewardKL(coef=args["kl_coef"], estimator=KL[args["kl_estimator"]])(logps, ref, mask)
    scores = np.broadcast_to(arrays["in/scores"][:, None], mask.shape)
    rewards = rewards + at_last_token(scores, longer, ones(mask))
    if args["whiten_rewards"]:
        (rewards,) = whitened([rewards], [longer], shift=False)
    np.testing.assert_allclose(rewards, arrays[f"out/{name}/rewards"], rtol=RTOL, atol=1e-12)
    advantages, returns = gae(rewards, values, longer, ones(mask), gamma=args["gamma"], lam=args["lam"])
    (advantages,) = whitened([advantages], [mask])
    np.testing.assert_allclose(returns, arrays[f"out/{name}/returns"], rtol=RTOL, atol=1e-12)
    np.testing.assert_allclose(advantages, arrays[f"out/{name}/advantages"], rtol=RTOL, atol=1e-12)
    check_losses(case, arrays, advantages, returns, mask, longer)


def check_losses(
    case: dict[str, Any],
    arrays: dict[str, np.ndarray],
    advantages: np.ndarray,
    returns: np.ndarray,
    mask: np.ndarray,
    longer: np.ndarray,
) -> None:
    args, name, zeros = case["args"], case["name"], np.zeros(mask.shape, np.int32)
    rows = Batch(tokens=zeros, positions=zeros, segments=zeros + 1, loss_weight=mask.astype(np.float64))
    batch = replace(rows, advantages=advantages, old_logps=np.where(mask, arrays["in/logprobs"], 0.0))
    # One more token at the beginning, whose score is the value before the next one.
    wide = jax.tree.map(lambda x: np.pad(x, ((0, 0), (1, 0))), rows)
    values, new = arrays["in/values"], arrays["in/vpred"]
    critic = replace(
        wide,
        segments=np.ones(wide.shape, np.int32),
        loss_weight=np.pad(longer.astype(np.float64), ((0, 0), (1, 0))),
        old_values=np.pad(values, ((0, 0), (1, 0))),
        returns=np.pad(returns, ((0, 0), (1, 0))),
    )
    policy = replace(PPO, clip_low=args["cliprange"], clip_high=args["cliprange"])
    with jax.enable_x64(True):

        def policy_loss(logps: jax.Array) -> Any:
            return policy(TokenStats(logps=logps), batch).loss.total / mask.sum()

        def value_loss(scores: jax.Array) -> Any:
            stats = ScoreStats(scores=jnp.pad(scores, ((0, 0), (0, 1))))
            out = ValueLoss(clip=args["cliprange_value"])(stats, critic)
            return out.loss.total / out.loss.weight, out

        loss, by_logps = jax.jit(jax.value_and_grad(policy_loss))(arrays["in/new_logprobs"])
        (value, out), by_values = jax.jit(jax.value_and_grad(value_loss, has_aux=True))(new)
    np.testing.assert_allclose(loss, case["pg_loss"], rtol=RTOL)
    np.testing.assert_allclose(value, case["vf_loss"], rtol=RTOL)
    np.testing.assert_allclose(out.metrics["critic/vf_clipfrac"].value(), case["vf_clipfrac"], rtol=1e-5)
    np.testing.assert_allclose(by_logps, arrays[f"out/{name}/dnew_logprobs"], rtol=RTOL, atol=1e-12)
    np.testing.assert_allclose(
        args["vf_coef"] * np.asarray(by_values), arrays[f"out/{name}/dvpred"], rtol=RTOL, atol=1e-12
    )
    np.testing.assert_allclose(float(loss) + args["vf_coef"] * float(value), case["loss"], rtol=RTOL)


def several_turns() -> tuple[np.ndarray, ...]:
    """Two conversations in one row and one in another, with tokens of tools between their turns."""
    mask = np.asarray([[0, 1, 1, 0, 0, 1, 1, 0, 1, 0, 1, 0], [0, 0, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0]], bool)
    segments = np.asarray([[1] * 7 + [2] * 4 + [0], [1] * 8 + [0] * 4], np.int32)
    draw = np.random.default_rng(0)
    rewards, values = (draw.normal(size=mask.shape) for _ in range(2))
    return np.where(mask, rewards, 0.0), values, mask, segments


def test_gae_over_turns_is_that_of_the_compressed_sequence() -> None:
    rewards, values, mask, segments = several_turns()
    found = gae(rewards, values, mask, segments, gamma=0.9, lam=0.8)
    for row, number in [(0, 1), (0, 2), (1, 1)]:
        inside = mask[row] & (segments[row] == number)
        one = [x[row, inside][None] for x in (rewards, values, mask, segments)]
        for actual, expected in zip(found, gae(*one, gamma=0.9, lam=0.8), strict=True):
            np.testing.assert_allclose(actual[row, inside][None], expected, rtol=1e-12)
    assert not found[0][~mask].any() and not found[1][~mask].any()
    # With lambda 1 the returns are the discounted rewards, whatever the critic says.
    _, returns = gae(rewards, values, mask, segments, gamma=0.9, lam=1.0)
    np.testing.assert_allclose(returns, discounted(rewards, mask, segments, gamma=0.9), rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match="a token that was not sampled has a reward"):
        gae(rewards + ~mask, values, mask, segments, gamma=0.9, lam=0.8)


def test_whitening_is_over_all_parts() -> None:
    draw = np.random.default_rng(1)
    parts, masks = [draw.normal(3, 2, (2, 5)) for _ in range(3)], [draw.random((2, 5)) < 0.6 for _ in range(3)]
    made = whitened(parts, masks)
    every = np.concatenate([part[mask] for part, mask in zip(made, masks, strict=True)])
    np.testing.assert_allclose([every.mean(), every.std(ddof=1)], [0.0, 1.0], atol=1e-7)
    assert not made[0][~masks[0]].any()
    one = np.zeros((1, 2), bool)
    np.testing.assert_array_equal(whitened([np.ones((1, 2))], [one])[0], 0.0)


def packed_batch(rewards: float = 1.0) -> Batch:
    _, _, mask, segments = several_turns()
    zeros, draw = np.zeros(mask.shape, np.int32), np.random.default_rng(2)
    spread = np.where(mask, segments * rewards, 0.0).astype(np.float32)
    logps, ref = (-draw.random(mask.shape).astype(np.float32) for _ in range(2))
    weight = mask.astype(np.float32)
    return Batch(
        tokens=zeros,
        positions=zeros,
        segments=segments,
        loss_weight=weight,
        advantages=at_last_token(spread, mask, segments),
        old_logps=logps,
        ref_logps=ref,
    )


def test_turns_as_steps() -> None:
    """Each turn is a step of GAE: its reward the sum, its value that before its first token."""
    rewards, values, mask, segments = several_turns()
    rewards = np.where(mask, np.random.default_rng(3).normal(size=mask.shape), 0.0)
    found = turn_gae(rewards, values, mask, segments, gamma=0.9, lam=0.8)
    for row in range(len(mask)):
        for segment in sorted({*segments[row]} - {0}):
            runs: list[list[int]] = []
            for t in np.flatnonzero(mask[row] & (segments[row] == segment)):
                if runs and runs[-1][-1] == t - 1:
                    runs[-1].append(t)
                else:
                    runs.append([t])
            after = value_after = 0.0
            for run in reversed(runs):
                after = rewards[row, run].sum() + 0.9 * value_after - values[row, run[0]] + 0.9 * 0.8 * after
                value_after = values[row, run[0]]
                np.testing.assert_allclose(found[0][row, run], after, atol=1e-9)
                np.testing.assert_allclose(found[1][row, run], after + value_after, atol=1e-9)
    assert not found[0][~mask].any()


def test_with_returns() -> None:
    """Rewards at the last sampled token, the penalty at each; whitened over the parts of a step."""
    batch, (_, values, mask, segments) = packed_batch(), several_turns()
    kl = RewardKL(coef=0.1, estimator=k1)
    settings = GAE(gamma=0.9, lam=0.8, whiten=False)
    (plain,), metrics = with_returns([batch], [values.astype(np.float32)], settings, kl)
    rewards = np.where(mask, -0.1 * (batch.old_logps - batch.ref_logps), 0.0)
    for row, t, number in [(0, 6, 1), (0, 10, 2), (1, 5, 1)]:
        rewards[row, t] += number
    advantages, returns = gae(rewards, values, mask, segments, gamma=0.9, lam=0.8)
    np.testing.assert_allclose(plain.advantages, advantages, atol=1e-6)
    np.testing.assert_allclose(plain.returns, returns, atol=1e-6)
    np.testing.assert_allclose(plain.old_values, np.where(mask, values, 0.0), atol=1e-6)
    explained = 1 - (returns - values)[mask].var() / returns[mask].var()
    assert metrics["critic/explained_var"] == pytest.approx(explained, rel=1e-5)
    parts, _ = with_returns([batch, batch], [values] * 2, replace(settings, whiten=True), None)
    every = np.concatenate([np.asarray(part.advantages)[mask] for part in parts])
    np.testing.assert_allclose([every.mean(), every.std(ddof=1)], [0.0, 1.0], atol=1e-5)
    with pytest.raises(ValueError, match=r"batch\.ref_logps is None, but a KL in the reward needs it"):
        with_returns([replace(batch, ref_logps=None)], [values], settings, kl)


@pytest.mark.thorough
def test_a_critic_explains_returns() -> None:
    """A chain whose reward at its end is told by its first token: values learn its discount at every place."""
    length, gamma, draw = 8, 0.8, np.random.default_rng(0)
    model = tiny_model(num_layers=2, windows=(None,))
    with_scalar_head(model, seed=0)
    loss = ValueLoss(clip=0.5)
    critic = Trainer(
        model, loss, optax.adam(1e-2), TrainSettings(temperature=1.0, max_grad_norm=1.0, micro_batch_rows=None)
    )
    settings = GAE(gamma=gamma, lam=0.95, whiten=True)
    explained = []
    for _ in range(60):
        tokens = draw.integers(1, 5, (16, length)).astype(np.int32)
        segments = np.ones_like(tokens)
        mask = np.broadcast_to(np.arange(length) > 0, tokens.shape)
        batch = Batch(
            tokens=tokens,
            positions=np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape),
            segments=segments,
            loss_weight=mask.astype(np.float32),
            advantages=at_last_token(
                np.where(tokens > 0, np.where(tokens[:, :1] > 2, 1.0, -1.0), 0.0), mask, segments
            ).astype(np.float32),
        )
        values = np.asarray(values_before(jnp.asarray(critic.scores(batch)), jnp.asarray(segments)))
        (batch,), metrics = with_returns([batch], [values], settings, None)
        explained.append(metrics["critic/explained_var"])
        critic.step(batch)
    assert explained[0] < 0.2 and np.mean(explained[-5:]) > 0.8, explained


def test_penalty_of_samples() -> None:
    batch = packed_batch()
    where = [RowSpan(0, slice(0, 7)), RowSpan(0, slice(7, 11)), RowSpan(1, slice(0, 8))]
    kl = RewardKL(coef=0.5, estimator=k2)
    penalties = kl.of_samples(batch, batch.old_logps, batch.ref_logps, where)
    square = np.where(batch.loss_weight > 0, (batch.ref_logps - batch.old_logps) ** 2 / 2, 0.0)
    np.testing.assert_allclose(penalties, [-0.5 * square[span.row, span.tokens].sum() for span in where], rtol=1e-5)


def kl_of(p: jax.Array, ref: jax.Array) -> jax.Array:
    return jnp.sum(jnp.exp(p) * (p - ref))


CLAIMS = {
    "reverse KL": kl_of,
    "reverse KL less forward KL": lambda p, ref: kl_of(p, ref) - kl_of(ref, p),
    "half the squared log-ratio less reverse KL": lambda p, ref: (
        jnp.sum(jnp.exp(p) * (p - ref) ** 2) / 2 - kl_of(p, ref)
    ),
}


@pytest.mark.parametrize("estimator", [k1, k2, k3])
def test_in_the_reward_each_estimator_has_the_gradient_that_it_claims(estimator: KLEstimator) -> None:
    """Enumerated over the samples of a policy of three tokens: the penalty is the advantage of the plain gradient."""
    logits = jnp.asarray([0.3, -0.4, 1.0])
    policy, reference = jax.nn.log_softmax(logits), jax.nn.log_softmax(jnp.asarray([1.2, -0.9, 0.1]))
    mask = np.ones((3, 1), bool)
    columns = np.asarray(policy)[:, None], np.asarray(reference)[:, None]
    penalty = RewardKL(coef=1.0, estimator=estimator)(*columns, mask)
    zeros = np.zeros((3, 1), np.int32)
    batch = Batch(
        tokens=zeros,
        positions=zeros,
        segments=zeros + 1,
        loss_weight=np.ones((3, 1), np.float32),
        advantages=penalty.astype(np.float32),
    )

    def expected_loss(logits: jax.Array) -> jax.Array:
        logps = jax.nn.log_softmax(logits)
        weighted = replace(batch, loss_weight=jax.lax.stop_gradient(jnp.exp(logps))[:, None])
        return jnp.asarray(PPO(TokenStats(logps=logps[:, None]), weighted).loss.total)

    claim = gradient_in_reward(estimator)
    assert claim is not None
    by_hand = jax.grad(lambda x: CLAIMS[claim](jax.nn.log_softmax(x), reference))
    found, analytic = jax.jit(lambda x: (jax.grad(expected_loss)(x), by_hand(x)))(logits)
    np.testing.assert_allclose(found, analytic, atol=1e-6)
    assert np.abs(analytic).max() > 0.02


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GAE(gamma=1.1, lam=0.9, whiten=True), "GAE.gamma=1.1 must be from 0 to 1"),
        (lambda: GAE(gamma=1.0, lam=-0.1, whiten=True), "GAE.lam=-0.1 must be from 0 to 1"),
        (lambda: RewardKL(coef=0.0, estimator=k1), "must be positive"),
        (lambda: RewardKL(coef=0.1, estimator=lambda logps, ref, mask: logps), "must be k1, k2 or k3"),
    ],
)
def test_bad_settings(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
