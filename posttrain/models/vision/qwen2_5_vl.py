"""Qwen2.5-VL (arXiv:2502.13923): text part, saved alone as a `qwen2`, and its tower with windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from posttrain.errors import ConfigError
from posttrain.mesh import by_heads
from posttrain.models.config import (
    AttentionConfig,
    Compute,
    Encoded,
    Images,
    ModelConfig,
    TowerTensor,
    VisionConfig,
    stages_of,
)
from posttrain.models.fields import Fields
from posttrain.models.vision.gemma3 import part_config, part_name
from posttrain.models.vision.tower import (
    Params,
    adapted,
    blocks,
    check_heads,
    gelu,
    linear,
    matrices,
    norm,
    parameter,
    pixels,
    place_tables,
    rms_norm,
    run_layers,
    table,
    turned,
    within_images,
)

ARCHITECTURE = "Qwen2_5_VLForConditionalGeneration"

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

MULTIMODAL = ("mrope_section", "mrope_interleaved")
OTHERS = frozenset(
    (
        *("vision_config", "text_config", "image_token_id", "video_token_id", "vision_start_token_id"),
        *("vision_end_token_id", "vision_token_id", "architectures", "transformers_version"),
    )
)
"""Fields that are not of the text part."""

MOST_WINDOWS = 1024
"""Windows a side of an image that have numbers of their own; numbers of 31 bits are enough for 2047 images a row."""


def text_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    return plain_text(hf, model_type="qwen2", architecture="Qwen2ForCausalLM")


def plain_text(hf: Mapping[str, Any], *, model_type: str, architecture: str) -> dict[str, Any]:
    """Text part as a model by itself, which turns by positions: multimodal RoPE is that for text."""
    inner = _text_fields(hf)
    outer = {key: value for key, value in hf.items() if key != "tie_word_embeddings"}
    tied = hf.get("tie_word_embeddings", inner.get("tie_word_embeddings", False))
    text = part_config({**outer, "text_config": inner, "tie_word_embeddings": tied}, architecture=architecture)
    for key in ("rope_scaling", "rope_parameters"):
        rope = {name: value for name, value in (text.pop(key, None) or {}).items() if name not in MULTIMODAL}
        for name in ("type", "rope_type"):
            if rope.get(name) == "mrope":
                rope[name] = "default"
        if rope:
            text[key] = rope
    return text | {"model_type": model_type}


def _text_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the text part; older files have them outside."""
    return dict(hf.get("text_config") or {key: value for key, value in hf.items() if key not in OTHERS})


def text_name(name: str) -> str | None:
    return part_name(name, "visual")


def stored_name(name: str) -> str:
    return name


def multimodal_rope(
    config: ModelConfig, hf: Fields, axes_of: Callable[[Sequence[int]], list[int]], *, interleaved: bool
) -> ModelConfig:
    """Turn pairs by time, row and column as the sections say. Raises ConfigError if they are not those of a head."""
    inner = hf.section("text_config") or hf
    rope = inner.section("rope_scaling") or inner.section("rope_parameters")
    why = f"pairs of this family's sections {'alternate' if interleaved else 'follow one another'}"
    rope.refuse("mrope_interleaved", interleaved, why=why)
    sections = rope.optional("mrope_section", list)
    changed = []
    for block in config.blocks:
        assert isinstance(block.attention, AttentionConfig) and block.attention.rope is not None
        pairs = len(block.attention.rope.frequencies)
        if sections is None or len(sections) != 3 or sum(sections) != pairs:
            raise ConfigError(f"mrope_section={sections}: must be three numbers of pairs that add up to {pairs}")
        turning = replace(block.attention.rope, axes=tuple(axes_of(sections)))
        changed.append(replace(block, attention=replace(block.attention, rope=turning)))
    return replace(config, stages=stages_of(tuple(changed)))


def in_sections(sections: Sequence[int]) -> list[int]:
    """First pairs by time, then by row, last by column."""
    return [axis for axis, count in enumerate(sections) for _ in range(count)]


@dataclass(frozen=True, kw_only=True)
class QwenVision(VisionConfig):
    """Tower whose attention is within windows in all but some layers; features are m x m patches joined."""

    window: int
    """Patches a side of a window."""
    whole: tuple[int, ...]
    """Layers with attention within whole images."""

    def tensors(self) -> dict[str, TowerTensor]:
        width, mlp, joined = self.width, self.mlp_dim, self.width * self.merge**2
        sizes = {"attn.qkv": (3 * width, width), "attn.proj": (width, width)}
        sizes |= {"mlp.gate_proj": (mlp, width), "mlp.up_proj": (mlp, width), "mlp.down_proj": (width, mlp)}
        norms = norm("norm1", width, bias=False) | norm("norm2", width, bias=False)
        merger = {"mlp.0": (joined, joined), "mlp.2": (self.embed_dim, joined)}
        patch = parameter("patch_embed.proj.weight", (width, 3, 2, self.patch_size, self.patch_size), "kernel")
        found = table("visual.", patch)
        found |= table("visual.blocks.{layer}.", norms | matrices(sizes, bias=True), key="layers.")
        last = norm("ln_q", width, bias=False) | matrices(merger, bias=True)
        return found | table("visual.merger.", last, key="projector.")

    def attends(self, images: Any, places: Any) -> Sequence[tuple[Any, int]]:
        side, whole = places // self.window, sum(layer in self.whole for layer in range(self.depth))
        windows = (images * MOST_WINDOWS + side[..., 0]) * MOST_WINDOWS + side[..., 1]
        return [(images, whole), (windows * (images > 0), self.depth - whole)]

    def encode(self, params: Params, images: Images, compute: Compute) -> Encoded:
        tables = place_tables(images.patch_places, self.width // self.num_heads, 10_000.0)
        (numbers, _), (windows, _) = self.attends(images.patch_images, images.patch_places)
        x = folded(params, pixels(self, images.patches).astype(compute.dtype))

        def layer(own: Params, x: Array, whole: Array) -> Array:
            segments = jnp.where(whole, numbers, windows)
            x = x + attended(own, rms_norm(own, "norm1", x, self.eps), self, tables, segments, compute)
            h = rms_norm(own, "norm2", x, self.eps)
            gate, up = (linear(own, f"mlp.{name}_proj", h) for name in ("gate", "up"))
            return x + linear(own, "mlp.down_proj", jax.nn.silu(gate) * up)

        whole = jnp.asarray([layer in self.whole for layer in range(self.depth)])
        x = run_layers(params, layer, x, compute, range(self.depth), whole)
        joined = blocks(rms_norm(params, "projector.ln_q", x, self.eps), self.merge)
        h = gelu(linear(params, "projector.mlp.0", joined.reshape(*joined.shape[:2], -1)), tanh=False)
        return Encoded(linear(params, "projector.mlp.2", h))


def folded(params: Params, x: Array) -> Array:
    """Embed patches: of an image both frames are the same."""
    kernel = params["patch_embed.proj.weight"]
    both, bias = jnp.sum(kernel.astype(jnp.float32), axis=2), params.get("patch_embed.proj.bias")
    return linear({"patch.weight": both, **({} if bias is None else {"patch.bias": bias})}, "patch", x)


def attended(own: Params, h: Array, config: VisionConfig, tables: Any, segments: Array, compute: Compute) -> Array:
    """Attention with queries, keys and values of one product, turned by rows and columns."""
    weight, bias = (own[f"attn.qkv.{name}"].astype(h.dtype) for name in ("weight", "bias"))
    # Whole heads on a device: halves of the joined outputs would be of one kind on each, and patches would move.
    weight = by_heads(weight.reshape(3, config.num_heads, -1, h.shape[-1]), compute.mesh, dim=1)
    joined = adapted(own, "attn.qkv", h, jnp.einsum("bpi,knhi->bpknh", h, weight))
    q, k, v = jnp.moveaxis(joined + bias.reshape(1, 1, *weight.shape[:-1]), 2, 0)
    scale = q.shape[-1] ** -0.5
    out = within_images(turned(q, tables), turned(k, tables), v, segments, scale, compute)
    return linear(own, "attn.proj", out)


def with_vision(config: ModelConfig, hf: Fields) -> ModelConfig:
    """Add the tower and multimodal RoPE to a text model. Raises ConfigError."""
    fields = hf.section("vision_config")
    common = qwen_fields(config, fields, model_type="qwen2_5_vl")
    fields.refuse("hidden_act", "silu", why="the tower's activation is silu")
    size, merge = fields.get("window_size", int, 112), common["merge"]
    window = size // merge // common["patch_size"] * merge
    if window < merge:
        raise ConfigError(f"window_size={size}: must be at least patch_size x spatial_merge_size")
    whole = fields.get("fullatt_block_indexes", list, [7, 15, 23, 31])
    if not set(whole) <= set(range(common["depth"])):
        raise ConfigError(f"fullatt_block_indexes={whole}: must be layers of {common['depth']}, from 0")
    vision = QwenVision(**common, mean=CLIP_MEAN, std=CLIP_STD, window=window, whole=tuple(whole))
    return replace(multimodal_rope(config, hf, in_sections, interleaved=False), vision=vision)


def qwen_fields(config: ModelConfig, fields: Fields, *, model_type: str) -> dict[str, Any]:
    """Sizes that the towers of both generations have. Raises ConfigError."""
    fields.refuse("in_channels", 3, why="images have three channels")
    fields.refuse("in_chans", 3, why="images have three channels")
    fields.without_effect("tokens_per_second")  # of videos
    fields.refuse("temporal_patch_size", 2, why="patches have two frames")
    fields.refuse(
        "out_hidden_size", config.embed_dim, why=f"features are as wide as the text model, {config.embed_dim}"
    )
    theta = fields.section("rope_parameters").get("rope_theta", float, 10_000.0)
    if theta != 10_000.0:
        raise ConfigError(f"vision_config.rope_parameters: rope_theta={theta} is not supported, only 10000")
    width, num_heads = fields.get("hidden_size", int), fields.get("num_heads", int)
    check_heads(width, num_heads, 4)
    return {
        "model_type": model_type,
        "embed_dim": config.embed_dim,
        "depth": fields.get("depth", int),
        "width": width,
        "num_heads": num_heads,
        "mlp_dim": fields.get("intermediate_size", int),
        "patch_size": fields.get("patch_size", int),
        "merge": fields.get("spatial_merge_size", int, 2),
        "eps": 1e-6,
    }
