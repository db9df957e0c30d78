"""Check of kernel settings against the model, before weights load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from posttrain.config import RunConfig
from posttrain.errors import ConfigError
from posttrain.kernels import grouped_matmul
from posttrain.kernels.attention import dispatch
from posttrain.kernels.attention.call import AttentionCall
from posttrain.kernels.platform import compute_capability, installed
from posttrain.models.cache import refusal_of_ragged
from posttrain.models.config import AttentionConfig, LatentAttentionConfig, ModelConfig

PLATFORMS = ("cpu", "gpu", "tpu")


def check_kernels(config: RunConfig, model: ModelConfig, *, here: bool) -> list[str]:
    """Check kernels. ConfigError for a kernel that no platform supports for this model, and with `here` for one that
    this machine does not support.

    Returns a note for each kernel that only another machine supports.
    """
    notes = []
    if config.model.attention != "auto":
        requests = list(_attention_requests(config, model))
        notes += _check("attention", config.model.attention, dispatch.select_attention, requests, here=here)
    if config.model.grouped_matmul != "auto" and model.mixtures:
        request = grouped_matmul.GroupedMatmulCall(platform="", dtype=_dtype(config), tokamax=True)
        notes += _check("grouped_matmul", config.model.grouped_matmul, grouped_matmul.select, [request], here=here)
    if config.model.decode_attention == "ragged":
        refusal = refusal_of_ragged(model, jnp.dtype(_dtype(config)))
        if refusal is not None:
            raise ConfigError(f"model.decode_attention: 'ragged' {refusal}; use auto, rows or gather")
    return notes


def _check(field: str, kernel: str, select: Callable[[str, Any], str], requests: list[Any], *, here: bool) -> list[str]:
    try:
        for request in requests:
            select(kernel, replace(request, platform=jax.default_backend(), tokamax=installed("tokamax")))
    except ConfigError as error:
        if here or not any(_serves(kernel, select, requests, platform) for platform in PLATFORMS):
            raise ConfigError(f"model.{field}={kernel}: {error}") from error
        return [f"model.{field}={kernel}: not on this machine: {error}"]
    return []


def _serves(kernel: str, select: Callable[[str, Any], str], requests: list[Any], platform: str) -> bool:
    try:
        for request in requests:
            select(kernel, replace(request, platform=platform))
    except ConfigError:
        return False
    return True


def _dtype(config: RunConfig) -> str:
    return config.model.compute_dtype or config.model.dtype


def _attention_requests(config: RunConfig, model: ModelConfig) -> Iterator[AttentionCall]:
    """Attention calls of the run: whole rows in training; the KV cache of a sampler uses "auto"."""
    for row_tokens in {section.row_tokens for section in config.stages}:
        for kind in {block.attention for block in model.blocks}:
            yield AttentionCall(
                platform="",
                rows=1,
                num_queries=row_tokens // max(1, config.mesh.context),
                num_keys=row_tokens,
                dtype=_dtype(config),
                parents=False,
                same_tokens=True,
                row_shards=1,
                head_shards=max(1, config.mesh.tensor),
                token_shards=max(1, config.mesh.context),
                tokamax=True,
                # Without a local GPU, that of the probable target.
                compute_capability=compute_capability(None) or 9.0,
                **_shape(kind),
            )


def _shape(kind: AttentionConfig | LatentAttentionConfig) -> dict[str, Any]:
    """Shape of one layer's heads."""
    if isinstance(kind, LatentAttentionConfig):
        sizes = {"num_kv_heads": kind.num_heads, "head_dim": kind.nope_dim + kind.rope_dim, "value_dim": kind.value_dim}
        return {"num_heads": kind.num_heads, **sizes, "soft_cap": None, "sinks": False}
    sizes = {"num_kv_heads": kind.num_kv_heads, "head_dim": kind.head_dim, "value_dim": kind.head_dim}
    return {"num_heads": kind.num_heads, **sizes, "soft_cap": kind.soft_cap, "sinks": kind.sinks}
