"""Gemma 4 (multimodal): text part, saved alone as a `gemma4_text`, and its vision encoder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from posttrain.config import ImageSection
from posttrain.errors import ConfigError
from posttrain.models.config import Compute, Encoded, Images, ModelConfig, Rope, TowerTensor, VisionConfig
from posttrain.models.fields import Fields
from posttrain.models.layers import gated, rms_normed
from posttrain.models.rope import default_frequencies, rope_tables
from posttrain.models.vision.gemma3 import part_config, part_name, seeing_images
from posttrain.models.vision.tower import (
    Params,
    blocks,
    heads,
    linear,
    matrices,
    norm,
    parameter,
    pixels,
    rms_norm,
    run_layers,
    table,
    turned,
    within_images,
)

ARCHITECTURE = "Gemma4ForConditionalGeneration"

LIMITS = {"input_min": -math.inf, "input_max": math.inf, "output_min": -math.inf, "output_max": math.inf}
"""Buffers of a clipped linear layer, a number each, and their initial values."""
SOFT_TOKENS, MAX_TOKENS = 280, 1120
"""Greatest number of tokens of an image: by default, and of all settings."""


def text_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {"model_type": "gemma4_text"} | part_config(hf, architecture="Gemma4ForCausalLM")


def text_name(name: str) -> str | None:
    return part_name(name, "vision_tower|audio_tower|embed_vision|embed_audio")


def stored_name(name: str) -> str:
    """Return the name under which transformers saves a tensor of the text part."""
    return f"model.language_{name}" if name.startswith("model.") else name


@dataclass(frozen=True, kw_only=True)
class Gemma4Vision(VisionConfig):
    """Encoder like the text model's, on images of any size; features are means of blocks of patches."""

    head_dim: int
    theta: float
    positions: int
    """Rows and columns with a learned position."""
    standardize: bool
    clipped: bool
    """Inputs and outputs of the layers' matrices are clamped to limits of their own."""

    def written_fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {**fields, "audio_config": None}

    def tensors(self) -> dict[str, TowerTensor]:
        tower, width, mlp, inner = "model.vision_tower.", self.width, self.mlp_dim, self.attention_dim
        norms = (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        )
        layer = norm("self_attn.q_norm", self.head_dim, bias=False)
        layer |= norm("self_attn.k_norm", self.head_dim, bias=False)
        for name in norms:
            layer |= norm(name, width, bias=False)
        sizes = {f"self_attn.{part}_proj.linear": (inner, width) for part in "qkv"}
        sizes |= {"self_attn.o_proj.linear": (width, inner), "mlp.gate_proj.linear": (mlp, width)}
        sizes |= {"mlp.up_proj.linear": (mlp, width), "mlp.down_proj.linear": (width, mlp)}
        first = parameter("input_proj.weight", (width, 3 * self.patch_size**2), "kernel")
        first |= parameter("position_embedding_table", (2, self.positions, width), "embedding")
        found = table(f"{tower}patch_embedder.", first)
        layers = f"{tower}encoder.layers.{{layer}}."
        found |= table(layers, layer | matrices(sizes, bias=False), key="layers.")
        if self.clipped:
            names = [f"{name.removesuffix('.linear')}.{limit}" for name in sizes for limit in LIMITS]
            # Buffers in transformers: not trained.
            for name in names:
                found |= table(
                    layers, parameter(name, (), "buffer", start=LIMITS[name.rpartition(".")[2]]), key="layers."
                )
        if self.standardize:
            # Buffers in transformers: not trained.
            buffers = parameter("std_bias", (width,), "buffer", start=0.0)
            found |= table(tower, buffers | parameter("std_scale", (width,), "buffer", start=1.0))
        last = matrices({"embedding_projection": (self.embed_dim, width)}, bias=False)
        return found | table("model.embed_vision.", last, key="projector.")

    def picture_patches(self, limits: ImageSection) -> int:
        return (limits.max_soft_tokens or SOFT_TOKENS) * self.merge**2

    @property
    def attention_dim(self) -> int:
        return self.num_heads * self.head_dim

    def encode(self, params: Params, images: Images, compute: Compute) -> Encoded:
        eps, places = self.eps, images.patch_places
        x = 2 * pixels(self, images.patches) - 1
        # In the checkpoint a patch is [y, x, channel].
        kernel = params["input_proj.weight"].reshape(self.width, -1, 3).swapaxes(1, 2)
        x = linear({"patch.weight": kernel}, "patch", x.astype(compute.dtype))
        by_axis = params["position_embedding_table"].astype(x.dtype)
        x = x + by_axis[0][places[..., 1]] + by_axis[1][places[..., 0]]
        rope = Rope(frequencies=tuple(default_frequencies(self.theta, self.head_dim // 2).tolist()))
        tables = [rope_tables(rope, places[..., axis]) for axis in (1, 0)]

        def turning(x: Array) -> Array:
            """Turn half of a head by columns, half by rows."""
            parts = jnp.split(x, 2, axis=-1)
            return jnp.concatenate([turned(part, of) for part, of in zip(parts, tables, strict=True)], axis=-1)

        def layer(own: Params, x: Array, _: Any) -> Array:
            h = rms_norm(own, "input_layernorm", x, eps)
            q, k, v = (heads(clipped_linear(own, f"self_attn.{part}_proj", h), self.num_heads) for part in "qkv")
            q, k = (turning(rms_norm(own, f"self_attn.{name}_norm", y, eps)) for name, y in (("q", q), ("k", k)))
            out = within_images(q, k, rms_normed(v, eps).astype(v.dtype), images.patch_images, 1.0, compute)
            x = x + rms_norm(own, "post_attention_layernorm", clipped_linear(own, "self_attn.o_proj", out), eps)
            h = rms_norm(own, "pre_feedforward_layernorm", x, eps)
            gate, up = (clipped_linear(own, f"mlp.{name}_proj", h) for name in ("gate", "up"))
            h = clipped_linear(own, "mlp.down_proj", gated("gelu_tanh", gate, up))
            return x + rms_norm(own, "post_feedforward_layernorm", h, eps)

        x = run_layers(params, layer, x, compute, range(self.depth)).astype(jnp.float32)
        pooled: Float[Array, "B N D"] = jnp.mean(blocks(x, self.merge), axis=2) * self.width**0.5
        if self.standardize:
            bias, scale = (params[f"std_{name}"].astype(jnp.float32) for name in ("bias", "scale"))
            pooled = (pooled - bias[None, None]) * scale[None, None]
        normed = rms_normed(pooled, eps).astype(compute.dtype)
        return Encoded(linear(params, "projector.embedding_projection", normed))


def clipped_linear(own: Params, name: str, x: Float[Array, "B P F"]) -> Float[Array, "B P G"]:
    """Linear layer whose input and output are clamped, where it has limits."""

    def clamp(x: Array, side: str) -> Array:
        if f"{name}.{side}_min" not in own:
            return x
        low, high = (own[f"{name}.{side}_{end}"].astype(x.dtype) for end in ("min", "max"))
        return jnp.clip(x, low[None, None], high[None, None])

    return clamp(linear(own, f"{name}.linear", clamp(x, "input")), "output")


def with_vision(config: ModelConfig, hf: Fields) -> ModelConfig:
    """Add the encoder to a text model; in its window layers tokens of an image may see one another. Raises
    ConfigError."""
    fields, text = hf.section("vision_config"), hf.section("text_config")
    fields.refuse("model_type", "gemma4_vision", why="the encoder is that of Gemma 4")
    fields.refuse("hidden_activation", "gelu_pytorch_tanh", why="the encoder's activation is gelu_pytorch_tanh")
    fields.refuse("attention_bias", False, why="the encoder has no biases")
    fields.without_effect("max_position_embeddings")
    num_heads = fields.get("num_attention_heads", int)
    fields.refuse("num_key_value_heads", num_heads, why="every head of the encoder has keys of its own")
    vision = Gemma4Vision(
        model_type="gemma4",
        embed_dim=config.embed_dim,
        depth=fields.get("num_hidden_layers", int),
        width=fields.get("hidden_size", int),
        num_heads=num_heads,
        mlp_dim=fields.get("intermediate_size", int),
        patch_size=fields.get("patch_size", int, 16),
        merge=fields.get("pooling_kernel_size", int, 3),
        eps=fields.get("rms_norm_eps", float, 1e-6),
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
        fill_id=text.get("pad_token_id", int, 0),
        head_dim=fields.get("head_dim", int, 64),
        theta=fields.section("rope_parameters").get("rope_theta", float, 100.0),
        positions=fields.get("position_embedding_size", int),
        standardize=fields.get("standardize", bool, False),
        clipped=fields.get("use_clipped_linears", bool, False),
    )
    if vision.fill_id >= config.vocab_size:
        raise ConfigError(f"pad_token_id={vision.fill_id}: must be below vocab_size={config.vocab_size}")
    seen = text.optional("use_bidirectional_attention", str) == "vision"
    return replace(seeing_images(config, MAX_TOKENS - 1, windows=True) if seen else config, vision=vision)
