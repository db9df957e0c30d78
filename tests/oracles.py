"""Oracles: slow twins of token statistics and of sampling, by textbook formulas, full arrays and sorts in float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

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
) -> tuple[int, float, float]:
    """Token, logp and kept_logp of `sampling.sample` for one row and its uniform, by a sort.

    `prompt` and `sample`: tokens before it, for penalties.
    """
    scale = params.temperature if params.temperature > 0 else 1.0
    model = _softmax(logits.astype(np.float64) / scale)
    probs = _softmax(process_reference(logits, params, prompt, sample) / scale)
    if params.temperature == 0:
        token = int(np.argmax(probs))
        return token, float(np.log(model[token])), 0.0
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
    return token, float(np.log(model[token])), float(np.log(model[token]) - np.log(restored[token]))


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
