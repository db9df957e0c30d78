"""QK-clip of MuonClip, Kimi K2, arXiv:2507.20534: after an update the logits of each head are multiplied by
f = min(1, limit / its largest logit in the step's forward pass), by factors on the weights of its queries and keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from posttrain.errors import ConfigError
from posttrain.models.config import AttentionConfig, LatentAttentionConfig, ModelConfig
from posttrain.models.decoder import LargestLogits
from posttrain.tree import Max

LargestHeads = Mapping[str, Max]
"""Largest attention logit of each head [R, N], and at least 0, for all repeats of a block, by its path."""


def largest_of(logits: LargestLogits) -> LargestHeads:
    """Largest logits over the rows of a pass."""
    return {path: Max(largest=jnp.maximum(jnp.max(each, axis=1), 0.0)) for path, each in logits.items()}


def check_clip(config: ModelConfig, *, adapter: bool) -> None:
    """Raises ConfigError for a model without queries and keys that can be scaled."""
    if adapter:
        raise ConfigError(
            "optimizer.qk_clip scales the projections of queries and keys, which an adapter (model.lora, "
            "model.adapter) leaves frozen; remove it, or train the whole model"
        )
    for attention in (block.attention for block in config.blocks):
        if isinstance(attention, AttentionConfig) and attention.qk_norm is not None:
            raise ConfigError(
                f"optimizer.qk_clip: {config.model_type} normalises queries and keys, whose logits the scale of their "
                "projections does not change and the weights of the norms bound; remove it"
            )


def clip_factors(config: ModelConfig, largest: LargestHeads, limit: float) -> dict[str, Float[Array, R * _]]:
    """Factors of the parameters of queries and keys, by path."""
    factors: dict[str, Array] = {}
    for path, attention in _blocks(config):
        heads = largest[path].largest
        each = jnp.where(heads > limit, limit / jnp.maximum(heads, limit), 1.0)
        of = _of_latent if isinstance(attention, LatentAttentionConfig) else _of_heads
        factors |= {f"{path}.attention.{name}": x for name, x in of(attention, each).items()}
    return factors


def _blocks(config: ModelConfig) -> Iterator[tuple[str, Any]]:
    for number, stage in enumerate(config.stages):
        for block, of in enumerate(stage.blocks):
            yield f"stages.{number}.blocks.{block}", of.attention


def _of_heads(c: AttentionConfig, each: Float[Array, "R N"]) -> dict[str, Float[Array, R * _]]:
    repeats, groups = each.shape[0], c.num_heads // c.num_kv_heads
    keys = jnp.sqrt(jnp.max(each.reshape(repeats, c.num_kv_heads, groups), axis=-1))
    if c.reuses is not None or c.keeps is not None or c.keys_as_values:
        keys = jnp.ones_like(keys)
    queries = each / jnp.repeat(keys, groups, axis=1)
    scaled = {"q": queries} if c.reuses is not None else {"q": queries, "k": keys}
    wide = {name: jnp.repeat(factor, c.head_dim, axis=1) for name, factor in scaled.items()}
    factors = {f"{name}.kernel": factor[:, None] for name, factor in wide.items()}
    return factors | ({f"{name}.bias": factor for name, factor in wide.items()} if c.qkv_bias else {})


def _of_latent(c: LatentAttentionConfig, each: Float[Array, "R N"]) -> dict[str, Float[Array, R * _]]:
    def columns(first: Array, size: int, second: Array, rest: int) -> Array:
        parts = [jnp.repeat(x[..., None], n, axis=-1) for x, n in ((first, size), (second, rest))]
        return jnp.concatenate(parts, axis=-1).reshape(each.shape[0], 1, -1)

    root = jnp.sqrt(each)
    return {
        "q.kernel" if c.q_rank is None else "q_up.kernel": columns(root, c.nope_dim, each, c.rope_dim),
        "kv.kernel": columns(root, c.nope_dim, jnp.ones_like(each), c.value_dim),
    }


def clip_metrics(config: ModelConfig, largest: LargestHeads, limit: float, updated: Array) -> dict[str, Array]:
    """`attention/largest_logit` over all heads, `attention/clipped_heads`, the share of heads that are scaled down, 0
    in a step that is not `updated`, and the table `attention/largest_logits` of each layer."""
    heads = {path: one.largest for path, one in largest.items()}
    clipped = jnp.concatenate([jnp.ravel(jnp.asarray(x) > limit) for x in heads.values()])
    layers = []
    for number, stage in enumerate(config.stages):
        blocks = [jnp.max(heads[f"stages.{number}.blocks.{block}"], axis=1) for block in range(len(stage.blocks))]
        layers.append(jnp.stack(blocks, axis=1).reshape(-1))
    by_layer = jnp.concatenate(layers)
    return {
        "attention/largest_logit": jnp.max(by_layer),
        "attention/clipped_heads": jnp.mean(updated & clipped, dtype=jnp.float32),
        "attention/largest_logits": by_layer,
    }
