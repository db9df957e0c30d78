"""Oracles in float64 by textbook and papers' formulas: token statistics, sampling, advantages and policy losses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from posttrain.batch import TokenStats
from posttrain.rollout.types import SamplingParams


def token_stats_reference(
    logits: Float[Array, "B T V"],
    tokens: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    *,
    temperature: float,
) -> TokenStats:
    """`token_stats` of full logits."""
    log_probs = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32) / temperature, axis=-1)
    logps = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
    same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    pad = ((0, 0), (1, 0))
    return TokenStats(
        logps=jnp.pad(jnp.where(same, logps, 0.0), pad), entropy=jnp.pad(jnp.where(same, entropy, 0.0), pad)
    )


def sample_reference(
    logits: np.ndarray, u: float, params: SamplingParams, prompt: Sequence[int] = (), sample: Sequence[int] = ()
) -> tuple[int, float, float, float]:
    """Token, logp, kept_logp and truncation_logp of `sampling.sample` for one row and its uniform, by a sort.

    `prompt` and `sample`: tokens before it, for penalties.
    """
    scale = params.temperature if params.temperature > 0 else 1.0
    model = _softmax(logits.astype(np.float64) / scale)
    probs = _softmax(process_reference(logits, params, prompt, sample) / scale)
    if params.temperature == 0:
        token = int(np.argmax(probs))
        return token, float(np.log(model[token])), 0.0, 0.0
    order = np.argsort(-probs, kind="stable")
    kept = probs[order]
    if params.top_k > 0:
        kept[params.top_k :] = 0.0
    if params.top_p < 1:
        above = np.cumsum(kept) - kept
        kept[above >= params.top_p * kept.sum()] = 0.0
    kept[kept < params.min_p * kept[0]] = 0.0
    restored = np.zeros_like(probs)
    restored[order] = kept / kept.sum()
    token = int(np.argmax(np.cumsum(restored) > u))
    logp = float(np.log(model[token]))
    return token, logp, float(logp - np.log(restored[token])), float(np.log(kept.sum()))


def process_reference(
    logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], sample: Sequence[int]
) -> np.ndarray:
    """`Tally.apply` for one row, token by token."""
    processed = logits.astype(np.float64)
    if params.is_plain:
        return processed
    counts, seen = Counter(sample), {*prompt, *sample}
    for token in range(len(processed)):
        x = processed[token]
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            x = -np.inf
        x += params.logit_bias.get(token, 0.0)
        count = counts[token]
        if token in seen:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        processed[token] = x - params.frequency_penalty * count - params.presence_penalty * (count > 0)
    return processed


def _softmax(logits: np.ndarray) -> np.ndarray:
    probs = np.exp(logits - logits.max())
    return probs / probs.sum()


@dataclass(frozen=True)
class Sample:
    """A sample as the run recorded it, before any mathematics of training."""

    rewards: Mapping[str, float]
    """Reward of each function, unweighted; NaN of one that does not apply."""
    rows: Sequence[int]
    """Numbers of its rows among all of the step."""
    cut: bool
    turns: Sequence[tuple[int, int, int, float]] = ()
    """Row, start, end and reward of each turn, in order of time."""


@dataclass(frozen=True)
class Rollouts:
    """Groups of a step with what the model says of their tokens: for each row an array [T]."""

    groups: Sequence[Sequence[Sample]]
    weights: Mapping[str, float]
    sampled: Sequence[np.ndarray]
    sampler: Sequence[np.ndarray]
    """Log-probabilities of the model that sampled."""
    behaviour: Sequence[np.ndarray]
    """Log-probabilities with which tokens were drawn."""
    old: Sequence[np.ndarray]
    """Log-probabilities under the weights before the step's first update."""
    entropy: Sequence[np.ndarray]
    ref: Sequence[np.ndarray]
    teacher: Sequence[np.ndarray]


def kl_estimate(kind: str, logps: np.ndarray, ref: np.ndarray) -> np.ndarray:
    """http://joschu.net/blog/kl-approx.html."""
    if kind == "k1":
        return logps - ref
    return 0.5 * (logps - ref) ** 2 if kind == "k2" else np.exp(ref - logps) - 1 - (ref - logps)


def standardise(values: np.ndarray) -> np.ndarray:
    """(x - mean) / (deviation + 1e-4), n - 1, of the values that are numbers; NaN of the others. A lone one has 0."""
    known = values[~np.isnan(values)]
    if known.size < 2:
        return values * 0.0
    return (values - known.mean()) / (known.std(ddof=1) + 1e-4)


def total_reward(sample: Sample, weights: Mapping[str, float]) -> float:
    """Weighted sum of the rewards that apply; NaN without any."""
    given = [weights[name] * reward for name, reward in sample.rewards.items() if not np.isnan(reward)]
    return sum(given) if given else float("nan")


def credit_of_tokens(run: Rollouts, algorithm: Mapping[str, Any], teacher_coef: float | None) -> list[np.ndarray]:
    """Advantage of each token of each row, by the papers' formulas; `algorithm`: as written in the configuration."""
    kind = algorithm["kind"]
    total = np.array([[total_reward(sample, run.weights) for sample in group] for group in run.groups])
    penalty = np.zeros_like(total)
    if algorithm.get("kl_in") == "reward":
        for at, _ in np.ndenumerate(total):
            for row in run.groups[at[0]][at[1]].rows:
                estimate = kl_estimate("k1", run.sampler[row], run.ref[row])
                penalty[at] -= algorithm["kl_coef"] * estimate[run.sampled[row]].sum()
    rewards = total + penalty
    if kind == "gdpo":
        each = [
            w * np.array([standardise(np.array([s.rewards[n] for s in g])) for g in run.groups])
            for n, w in run.weights.items()
        ]
        # A reward that does not apply to a sample counts as the mean of its group; a sample without any has no part.
        combined = np.where(np.isnan(total), np.nan, np.nansum(each, axis=0))
        centre = np.nanmean(np.where(np.isnan(total), np.nan, penalty), axis=1, keepdims=True)
        advantages = standardise(combined + penalty - centre)
    elif kind == "reinforce_plus_plus":
        advantages = standardise(rewards)
    else:
        advantages = np.array([standardise(group) for group in rewards])
    made = [np.zeros(len(one)) for one in run.sampled]
    for group, of_group, given in zip(run.groups, advantages, rewards, strict=True):
        for sample, advantage in zip(group, of_group, strict=True):
            for row in sample.rows:
                made[row][run.sampled[row]] = advantage
        if algorithm.get("turn_advantages"):
            spread_over_turns(group, given, run.weights, made)
    for row, mask in enumerate(run.sampled):
        if teacher_coef is not None:
            made[row] += np.where(mask, teacher_coef * (run.teacher[row] - run.old[row]), 0.0)
    return made


def spread_over_turns(
    group: Sequence[Sample], rewards: np.ndarray, weights: Mapping[str, float], made: Sequence[np.ndarray]
) -> None:
    """Return of each turn, standardised over the samples of the group that have it."""
    returns = []
    for sample, reward in zip(group, rewards, strict=True):
        given = [weights.get("env", 0.0) * turn[3] for turn in sample.turns]
        given[-1] += reward - sum(given)
        returns.append(np.cumsum(given[::-1])[::-1])
    for number in range(max(map(len, returns))):
        having = [index for index, one in enumerate(returns) if len(one) > number]
        values = np.array([returns[index][number] for index in having])
        scaled = standardise(values) if len(having) > 1 else np.zeros(1)
        for index, value in zip(having, scaled, strict=True):
            row, start, end, _ = group[index].turns[number]
            made[row][start:end] = value


def keep_highest_entropies(made: Sequence[np.ndarray], learned: Sequence[int], run: Rollouts, share: float) -> None:
    """Set the advantage of all but this share of a step's tokens to 0."""
    least = np.quantile(np.concatenate([run.entropy[row][run.sampled[row]] for row in learned]), 1 - share)
    for row in learned:
        made[row][run.entropy[row] < least] = 0.0


def ratio_of(level: str, difference: np.ndarray) -> np.ndarray:
    """Ratio of two policies at each token of a row."""
    if level == "token":
        return np.exp(difference)
    of_row = difference.mean() if level == "sequence_mean" else difference.sum()
    return np.exp(np.full(len(difference), of_row))


def policy_loss_reference(
    run: Rollouts,
    samples: Sequence[Sample],
    credit: Sequence[np.ndarray],
    new: Sequence[np.ndarray],
    algorithm: Mapping[str, Any],
    *,
    weighted: bool,
) -> float:
    """Loss of an update on these samples, `new`: log-probabilities under its weights. PPO's clip per token or sequence,
    truncated importance weights, k3 against the reference; means by samples or tokens."""
    kind = algorithm["kind"]
    level, low, high = ("sequence_mean", 3e-4, 4e-4) if kind == "gspo" else ("token", 0.2, 0.2)
    kl_coef = algorithm.get("kl_coef", 0.04 if kind in ("grpo", "gdpo") else 0.0)
    kl_coef = 0.0 if algorithm.get("kl_in") == "reward" else kl_coef
    means, total, count = [], 0.0, 0
    for sample in samples:
        losses = []
        for row in sample.rows:
            mask = run.sampled[row]
            if not mask.any():
                continue
            x, old, advantage = new[row][mask], run.old[row][mask], credit[row][mask]
            ratio = ratio_of(level, x - old)
            one = -np.minimum(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)
            if weighted:
                at = algorithm.get("importance_sampling", {}).get("level", "token")
                one *= np.minimum(ratio_of(at, old - run.behaviour[row][mask]), 2.0)
            if kl_coef:
                one += kl_coef * kl_estimate("k3", x, run.ref[row][mask]) * (1 if kind == "gspo" else ratio)
            losses.append(one)
        every = np.concatenate(losses)
        means.append(every.mean())
        total, count = total + every.sum(), count + len(every)
    return total / count if kind == "reinforce_plus_plus" else float(np.mean(means))
