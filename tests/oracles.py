"""Oracles in float64 by textbook and papers' formulas: token statistics, sampling, advantages, policy and value losses
with their gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from posttrain.batch import TokenStats
from posttrain.rollout.types import SamplingParams
from tests.optimizer_oracles import muon_direction, num_stacked, takes_muon


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

    group: int
    number: int
    rewards: Mapping[str, float]
    """Reward of each function, unweighted; NaN of one that does not apply."""
    rows: Sequence[int]
    """Numbers of its rows among all of the step."""
    cut: bool
    turns: Sequence[tuple[int, int, int, float]]
    """Row, start, end and reward of each turn, in order of time."""


@dataclass(frozen=True)
class Rollouts:
    """Groups of a step with what the models say of their tokens: for each row an array [T]."""

    groups: Sequence[Sequence[Sample]]
    weights: Mapping[str, float]
    """Weight of each reward."""
    sampled: Sequence[np.ndarray]
    sampler: Sequence[np.ndarray]
    """Log-probabilities of the model that sampled."""
    behaviour: Sequence[np.ndarray]
    """Log-probabilities with which tokens were drawn."""
    old: Sequence[np.ndarray]
    """Log-probabilities of the proximal policy: the weights before the step's first update, or the sampler's."""
    entropy: Sequence[np.ndarray]
    ref: Sequence[np.ndarray]
    teacher: Sequence[np.ndarray]
    values: Sequence[np.ndarray]
    """Critic's value of the context before each token, before the step's first update."""


COMMON: dict[str, Any] = {
    "surrogate": "clip",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "dual_clip": None,
    "ratio": "token",
    "reduce": "token_mean",
    "advantage_scale": "group",
    "filter": None,
    "kl_coef": 0.0,
    "kl_in": "loss",
    "kl_estimator": None,
    "kl_bias_correction": True,
    "entropy_coef": 0.0,
    "entropy_target": None,
    "entropy_step": 0.005,
    "off_policy_mask": None,
    "top_entropy": None,
    "truncated": "keep",
    "turn_advantages": False,
    "advantage": None,
    "loss": None,
}
"""PPO's clip, arXiv:1707.06347 section 6.1, a mean over tokens, and nothing beside it."""
GSPO = {"ratio": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4, "kl_bias_correction": False}
"""arXiv:2507.18071, section 5.1; a length-normalised ratio is no importance weight of the KL."""
SOFT_GATE = {"temperature_positive": 1.0, "temperature_negative": 1.05}
SEQUENCE_WEIGHTS = {"k_positive": 2.0, "rate_positive": 3.0, "k_negative": 3.0, "rate_negative": 2.0}
PAPERS: dict[str, dict[str, Any]] = {
    "grpo": {"reduce": "sequence_mean", "kl_coef": 0.04},  # arXiv:2402.03300 section 4.2
    "dr_grpo": {"reduce": "constant_length", "advantage_scale": "none"},  # arXiv:2503.20783
    "dapo": {"clip_high": 0.28, "filter": "mixed"},  # arXiv:2503.14476
    "bnpo": {},
    "gspo": {**GSPO, "reduce": "sequence_mean"},
    "gspo_token": {**GSPO, "ratio": "sequence_mean_token", "reduce": "sequence_mean"},  # arXiv:2507.18071 eq. 14
    "luspo": {**GSPO, "reduce": "sequence_total"},  # arXiv:2602.05261
    "gmpo": {"surrogate": "gmpo", "clip_low": 0.4, "clip_high": 0.4, "reduce": "sequence_mean"},  # arXiv:2507.20673
    "cispo": {"surrogate": "cispo", "clip_high": 4.0},  # arXiv:2506.13585, its bound arXiv:2510.13786
    "sapo": {"surrogate": "sapo", **SOFT_GATE, "reduce": "sequence_mean"},  # arXiv:2511.20347
    "vespo": {"surrogate": "vespo", **SEQUENCE_WEIGHTS},  # arXiv:2602.10693
    "rloo": {"ratio": "sequence_sum", "reduce": "sequence_mean", "advantage_scale": "none"},  # arXiv:2402.14740
    "reinforce_plus_plus": {},  # arXiv:2501.03262
    "reinforce_plus_plus_baseline": {},
    "gdpo": {"reduce": "sequence_mean", "kl_coef": 0.04},  # arXiv:2601.05242
    "ppo": {"gamma": 1.0, "gae_lambda": 0.95, "gae_level": "token", "value_clip": 0.2},
    "distill": {"advantage_scale": "none"},  # arXiv:2306.13649
}
"""What an algorithm's paper has in place of `COMMON`."""
CHANGES_SAMPLING = {"top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"}
CHANGES_SAMPLING |= {"logit_bias", "allowed_token_ids", "grammar"}


def algorithm_of(stage: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the algorithm of a stage: what is written, and else what its paper has. `longest`: constant length of
    Dr. GRPO. `weights`: importance weights, None without any."""
    given = stage["algorithm"]
    made = {**COMMON, **PAPERS[given["kind"]], **given}
    if made["surrogate"] in ("sapo", "vespo") and given["kind"] not in ("sapo", "vespo"):
        made = {**PAPERS[made["surrogate"]], **made}
    weights = {"apply": "auto", "level": "token", "bound": "truncate", "low": None, "high": 2.0}
    weights |= given.get("importance_sampling", {})
    changed = bool(CHANGES_SAMPLING & stage["sampling"].keys()) or "asynchronous" in stage
    changed = changed or bool({"quantize", "cache_dtype"} & stage.get("rollout", {}).keys())
    applied = weights["apply"] == "always" or (weights["apply"] == "auto" and changed)
    made["weights"] = weights if applied else None
    turns = 1
    if "env" in stage or "agent" in stage:
        turns = stage["env"]["max_turns"] if "env" in stage else stage["agent"].get("max_turns", 16)
    made["longest"] = min(turns * stage["sampling"]["max_tokens"], stage["row_tokens"])
    return made


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


def is_learned(sample: Sample, run: Rollouts, algorithm: Mapping[str, Any]) -> bool:
    """Tell whether a sample is in the loss: it has a reward and sampled tokens, and was not cut where that masks it."""
    sampled = any(run.sampled[row].any() for row in sample.rows)
    masked = algorithm["truncated"] == "mask" and sample.cut
    return sampled and not masked and not np.isnan(total_reward(sample, run.weights))


def sample_advantages(run: Rollouts, algorithm: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Advantages [P, G] of the samples, and their rewards with the KL penalties of `kl_in: reward`; of a critic both
    are the rewards, whose penalties are its tokens'."""
    kind = algorithm["kind"]
    total = np.array([[total_reward(sample, run.weights) for sample in group] for group in run.groups])
    if kind == "ppo":
        return total, total
    penalty = np.zeros_like(total)
    if algorithm["kl_in"] == "reward":
        for at, _ in np.ndenumerate(total):
            for row in run.groups[at[0]][at[1]].rows:
                estimate = kl_estimate(algorithm["kl_estimator"] or "k1", run.sampler[row], run.ref[row])
                penalty[at] -= algorithm["kl_coef"] * estimate[run.sampled[row]].sum()
    rewards = total + penalty
    number = (~np.isnan(rewards)).sum(axis=1, keepdims=True)
    centred = rewards - np.nansum(rewards, axis=1, keepdims=True) / np.maximum(number, 1)
    if algorithm["advantage"] is not None:
        return 2 * centred, rewards  # that of `tests.pairs.CODE`
    if kind == "gdpo":
        each = [
            w * np.array([standardise(np.array([s.rewards[n] for s in g])) for g in run.groups])
            for n, w in run.weights.items()
        ]
        # A reward that does not apply to a sample counts as the mean of its group; a sample without any has no part.
        combined = np.where(np.isnan(total), np.nan, np.nansum(each, axis=0))
        centre = np.nanmean(np.where(np.isnan(total), np.nan, penalty), axis=1, keepdims=True)
        return standardise(combined + penalty - centre), rewards
    if kind == "reinforce_plus_plus":
        return standardise(rewards), rewards
    if kind == "reinforce_plus_plus_baseline":
        return standardise(centred), rewards
    if kind == "rloo":
        others = centred * number / np.maximum(number - 1, 1)  # r - the mean of the other samples
        return (standardise(others) if algorithm["advantage_scale"] == "batch" else others), rewards
    if algorithm["advantage_scale"] == "none":
        return centred, rewards
    if algorithm["advantage_scale"] == "batch":
        return centred / (rewards[~np.isnan(rewards)].std(ddof=1) + 1e-4), rewards
    return np.array([standardise(group) for group in rewards]), rewards


def credit_of_tokens(run: Rollouts, algorithm: Mapping[str, Any], teacher_coef: float | None) -> list[np.ndarray]:
    """Advantage of each token of each row, without a critic."""
    advantages, rewards = sample_advantages(run, algorithm)
    made = [np.zeros(len(one)) for one in run.sampled]
    for group, of_group, given in zip(run.groups, advantages, rewards, strict=True):
        for sample, advantage in zip(group, of_group, strict=True):
            for row in sample.rows:
                made[row][run.sampled[row]] = advantage
        if algorithm["turn_advantages"]:
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


def critic_credit(
    run: Rollouts, samples: Sequence[Sample], algorithm: Mapping[str, Any]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Advantages and returns of each token of each row: GAE over a sample's turns in order of time, arXiv:1506.02438
    eq. 16, advantages then standardised over all tokens of the step (variance + 1e-8)."""
    gamma, lam = algorithm["gamma"], algorithm["gae_lambda"]
    advantages = [np.zeros(len(one)) for one in run.sampled]
    returns = [np.zeros(len(one)) for one in run.sampled]
    for sample in samples:
        # Steps of the estimate: places of its tokens, value before the first of them, reward of all.
        steps: list[tuple[list[tuple[int, int]], float, float]] = []
        last = sample.turns[-1]
        paid = sum(run.weights.get("env", 0.0) * turn[3] for turn in sample.turns)
        for turn in sample.turns:
            row, start, end, given = turn
            rewards = np.zeros(end - start)
            rewards[-1] = run.weights.get("env", 0.0) * given
            if turn is last:
                rewards[-1] += total_reward(sample, run.weights) - paid
            if algorithm["kl_in"] == "reward":
                estimate = kl_estimate(algorithm["kl_estimator"] or "k1", run.old[row], run.ref[row])
                rewards -= algorithm["kl_coef"] * estimate[start:end]
            places = [(row, at) for at in range(start, end)]
            if algorithm["gae_level"] == "turn":
                steps.append((places, run.values[row][start], rewards.sum()))
            else:
                steps += [([at], run.values[row][at[1]], reward) for at, reward in zip(places, rewards, strict=True)]
        values = [value for _, value, _ in steps] + [0.0]
        errors = [reward + gamma * values[t + 1] - values[t] for t, (_, _, reward) in enumerate(steps)]
        for t, (places, value, _) in enumerate(steps):
            advantage = sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, len(steps)))
            for row, at in places:
                advantages[row][at] = advantage
                returns[row][at] = advantage + value
    if samples:
        rows = [row for sample in samples for row in sample.rows]
        every = np.concatenate([advantages[row][run.sampled[row]] for row in rows])
        for row in rows:
            scaled = (advantages[row] - every.mean()) / np.sqrt(every.var(ddof=1) + 1e-8)
            advantages[row] = np.where(run.sampled[row], scaled, 0.0)
    return advantages, returns


def keep_highest_entropies(made: Sequence[np.ndarray], learned: Sequence[int], run: Rollouts, share: float) -> float:
    """Set the advantage of all but this share of a step's tokens to 0; returns the least entropy that is kept.
    arXiv:2506.01939."""
    least = np.quantile(np.concatenate([run.entropy[row][run.sampled[row]] for row in learned]), 1 - share)
    for row in learned:
        made[row][run.entropy[row] < least] = 0.0
    return float(least)


def ratio_of(level: str, difference: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Ratio of two policies at each token of a row. `held`: the same difference, as a constant."""
    if level == "token":
        return np.exp(difference)
    if level == "sequence_mean_token":
        return np.exp(np.full(len(held), held.mean())) * np.exp(difference - held)
    of_row = difference.mean() if level == "sequence_mean" else difference.sum()
    return np.exp(np.full(len(difference), of_row))


def importance_of(weights: Mapping[str, Any] | None, difference: np.ndarray) -> np.ndarray:
    """Bounded importance weights of a row's tokens, 1 without: truncated, or 0 out of bounds, or for all of a row."""
    if weights is None:
        return np.ones(len(difference))
    ratio = ratio_of(weights["level"], difference, difference)
    low = 0.0 if weights["low"] is None else weights["low"]
    high = np.inf if weights["high"] is None else weights["high"]
    if weights["bound"] == "truncate":
        return np.clip(ratio, low, high)
    outside = (ratio < low) | (ratio > high)
    return np.where(outside.any() if weights["bound"] == "reject" else outside, 0.0, ratio)


def surrogate_of(
    algorithm: Mapping[str, Any],
    x: np.ndarray,
    held: np.ndarray,
    old: np.ndarray,
    advantage: np.ndarray,
    importance: np.ndarray,
) -> np.ndarray:
    """Loss of each token of a row, weighted. `x`: its log-probabilities, `held`: the same ones, as constants."""
    low, high = algorithm["clip_low"], algorithm["clip_high"]
    ratio = ratio_of(algorithm["ratio"], x - old, held - old)
    match algorithm["surrogate"]:
        case "cispo":
            constant = ratio_of(algorithm["ratio"], held - old, held - old)
            return -np.minimum(constant, 1 + high) * advantage * x * importance
        case "sapo":
            t = np.where(advantage > 0, algorithm["temperature_positive"], algorithm["temperature_negative"])
            return -4 / t / (1 + np.exp(-t * (ratio - 1))) * advantage * importance
        case "vespo":
            # The weight of the whole sequence against the policy that drew it; importance weights are a part of it.
            once = algorithm["weights"] is not None and algorithm["weights"]["level"] == "sequence_sum"
            with np.errstate(divide="ignore"):
                extra = np.log(importance)[:1].sum() if once else np.log(importance).sum()
            log_w = np.clip((held - old).sum() + np.maximum(extra, len(x) * np.log(1e-8)), np.log(1e-8), 20.0)
            k = np.where(advantage >= 0, algorithm["k_positive"], algorithm["k_negative"])
            rate = np.where(advantage >= 0, algorithm["rate_positive"], algorithm["rate_negative"])
            return -np.exp(k * log_w + rate * (1 - np.exp(log_w))) * advantage * x
        case "gmpo":
            log_ratio = x - old
            bounded = np.where(advantage > 0, np.minimum(log_ratio, high), log_ratio)
            bounded = np.where(advantage < 0, np.maximum(log_ratio, -low), bounded)
            return -np.exp(bounded.mean()) * advantage * importance
    objective = np.minimum(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)
    if algorithm["dual_clip"] is not None:  # arXiv:1912.09729 eq. 5
        objective = np.where(advantage < 0, np.maximum(objective, algorithm["dual_clip"] * advantage), objective)
    return -objective * importance


def policy_loss_reference(
    run: Rollouts,
    samples: Sequence[Sample],
    credit: Sequence[np.ndarray],
    new: Sequence[np.ndarray],
    entropy: Sequence[np.ndarray],
    algorithm: Mapping[str, Any],
    *,
    held: Sequence[np.ndarray],
) -> float:
    """Loss of an update on these samples. `new`, `entropy`: under its weights; `held`: `new` where no gradient goes."""
    sums, counts = [], []
    for sample in samples:
        losses = []
        for row in sample.rows:
            mask = run.sampled[row]
            if not mask.any():
                continue
            x, constant, old, advantage = new[row][mask], held[row][mask], run.old[row][mask], credit[row][mask]
            behaviour = run.behaviour[row][mask]
            if algorithm["loss"] is not None:
                losses.append(-advantage * x)  # that of `tests.pairs.CODE`
                continue
            one = surrogate_of(
                algorithm, x, constant, old, advantage, importance_of(algorithm["weights"], old - behaviour)
            )
            if algorithm["off_policy_mask"] is not None:  # arXiv:2512.02556 section 3.1
                far = (behaviour - constant).mean() > algorithm["off_policy_mask"]
                one = np.where((advantage < 0) & far, 0.0, one)
            if algorithm["kl_coef"] and algorithm["kl_in"] == "loss":
                kl = kl_estimate(algorithm["kl_estimator"] or "k3", x, run.ref[row][mask])
                ratio = ratio_of(algorithm["ratio"], x - old, constant - old)
                one = one + algorithm["kl_coef"] * kl * (ratio if algorithm["kl_bias_correction"] else 1.0)
            losses.append(one - algorithm["entropy_coef"] * entropy[row][mask])
        sums.append(np.concatenate(losses).sum())
        counts.append(len(np.concatenate(losses)))
    total = float(np.sum(sums))
    match "token_mean" if algorithm["loss"] is not None else algorithm["reduce"]:
        case "token_mean":
            return total / sum(counts)
        case "sequence_total":
            return total / len(samples)
        case "constant_length":
            return total / len(samples) / algorithm["longest"]
    return float(np.mean(np.array(sums) / counts))


def value_loss_reference(
    run: Rollouts,
    samples: Sequence[Sample],
    returns: Sequence[np.ndarray],
    values: Sequence[np.ndarray],
    clip: float,
) -> float:
    """Half the squared error of the values, the larger of it and that of values clipped around the old ones, mean over
    tokens. arXiv:2005.12729 section 3."""
    losses = []
    for row in (row for sample in samples for row in sample.rows):
        mask = run.sampled[row]
        value, old, target = values[row][mask], run.values[row][mask], returns[row][mask]
        near = np.clip(value, old - clip, old + clip)
        losses.append(0.5 * np.maximum((value - target) ** 2, (near - target) ** 2))
    return float(np.concatenate(losses).mean())


def gradient_reference(
    loss: Callable[[Sequence[np.ndarray]], float], at: Sequence[np.ndarray], masks: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Gradient of a loss by the masked numbers of each row, by central differences."""
    step, made = 1e-5, [np.zeros(len(one)) for one in at]
    moved = [np.array(one, np.float64) for one in at]
    for row, mask in enumerate(masks):
        for place in np.flatnonzero(mask):
            ends = []
            for sign in (1, -1):
                moved[row][place] = at[row][place] + sign * step
                ends.append(loss(moved))
            moved[row][place] = at[row][place]
            made[row][place] = (ends[0] - ends[1]) / (2 * step)
    return made


class OptimizerReference:
    """Updates of an optimiser with a constant rate, on the gradient clipped to norm 1. arXiv:1711.05101 (AdamW),
    arXiv:2302.06675 (Lion), arXiv:1804.04235 (Adafactor), arXiv:2502.16982 (Muon)."""

    def __init__(self, fields: Mapping[str, Any], tolerance: float = 0.0):
        self.least_tolerance = tolerance
        self.rate: float = fields["learning_rate"]
        self.qk_clip: float | None = fields.get("qk_clip")
        self.kind: str = "sgd" if "fn" in fields else fields.get("kind", "adamw")
        self.betas = {"adamw": (0.9, 0.999), "lion": (0.9, 0.99), "muon": (0.9, 0.95)}.get(self.kind, (0.0, 0.0))
        self.steps = 0
        self.first: dict[str, Any] = {}
        self.second: dict[str, Any] = {}

    @property
    def tolerance(self) -> float:
        """Error of an update as a share of it: signs of tiny gradients are rounding."""
        return max(self.least_tolerance, {"adamw": 0.03, "lion": 0.1, "muon": 0.03}.get(self.kind, 0.02))

    def update(self, params: Mapping[str, np.ndarray], gradient: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Changes of parameters [..., in, out]."""
        self.steps += 1
        norm = np.sqrt(sum(np.square(x).sum() for x in gradient.values()))
        clipped = {path: x / max(norm, 1.0) for path, x in gradient.items()}
        return {path: -self.rate * self._direction(path, params[path], g) for path, g in clipped.items()}

    def _direction(self, path: str, param: np.ndarray, g: np.ndarray) -> np.ndarray:
        if self.kind == "sgd":
            return g
        if self.kind == "adafactor":
            decay = 1 - self.steps**-0.8
            self.second[path] = decay * self.second.get(path, 0.0) + (1 - decay) * (g**2 + 1e-30)
            update = g / np.sqrt(self.second[path])
            return update / np.maximum(1.0, rms(path, update)) * np.maximum(1e-3, rms(path, param))
        if self.kind == "muon" and takes_muon(path):
            self.first[path] = 0.95 * self.first.get(path, 0.0) + g
            return muon_direction(g + 0.95 * self.first[path])
        low, high = self.betas
        if self.kind == "lion":
            mixed = low * self.first.get(path, 0.0) + (1 - low) * g
            self.first[path] = high * self.first.get(path, 0.0) + (1 - high) * g
            return np.sign(mixed)
        self.first[path] = low * self.first.get(path, 0.0) + (1 - low) * g
        self.second[path] = high * self.second.get(path, 0.0) + (1 - high) * g**2
        mean = self.first[path] / (1 - low**self.steps)
        return mean / (np.sqrt(self.second[path] / (1 - high**self.steps)) + 1e-8)


def rms(path: str, x: np.ndarray) -> np.ndarray:
    """Root of the mean square of a parameter, of those in a stack of layers or experts of each."""
    axes = tuple(range(num_stacked(path), x.ndim))
    return np.sqrt(np.square(x).mean(axis=axes, keepdims=True))


LAYER = "stages.0.blocks.0"


def largest_logits(weights: Mapping[str, np.ndarray], tokens: Sequence[int], init: Mapping[str, Any]) -> np.ndarray:
    """Largest attention logit of each head, at least 0, of a llama of one layer on a sequence."""
    heads, groups, dim = init["num_attention_heads"], init["num_key_value_heads"], init["head_dim"]
    x = weights["embed.embedding"][list(tokens)].astype(np.float64)
    x = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + init["rms_norm_eps"])
    x = x * weights[f"{LAYER}.attention_norm.scale"][0]
    angles = np.arange(len(tokens))[:, None] / init["rope_theta"] ** (np.arange(0, dim, 2) / dim)

    def turned(name: str, number: int) -> np.ndarray:
        made = (x @ weights[f"{LAYER}.attention.{name}.kernel"][0]).reshape(len(tokens), number, dim)
        first, second = np.split(made, 2, axis=-1)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    keys = np.repeat(turned("k", groups), heads // groups, axis=1)
    logits = np.einsum("thd,shd->hts", turned("q", heads), keys) / np.sqrt(dim)
    seen = np.tril(np.ones(logits.shape[1:], bool))
    return np.maximum(np.where(seen, logits, -np.inf).max(axis=(1, 2)), 0.0)


def query_key_products(weights: Mapping[str, np.ndarray], init: Mapping[str, Any]) -> np.ndarray:
    """Bilinear form [heads, D, D] of each head's queries and keys."""
    heads, groups, dim = init["num_attention_heads"], init["num_key_value_heads"], init["head_dim"]
    queries = weights[f"{LAYER}.attention.q.kernel"][0].astype(np.float64).reshape(-1, heads, dim)
    keys = weights[f"{LAYER}.attention.k.kernel"][0].astype(np.float64).reshape(-1, groups, dim)
    return np.einsum("ihd,jhd->hij", queries, np.repeat(keys, heads // groups, axis=1))
