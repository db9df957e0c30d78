"""Qwen3-VL: text part, saved alone as a `qwen3`, and its tower with features for the first layers (deepstack)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from posttrain.errors import ConfigError
from posttrain.models.config import Compute, Encoded, Images, ModelConfig, TowerTensor, VisionConfig, stages_of
from posttrain.models.fields import Fields
from posttrain.models.vision.gemma3 import part_name
from posttrain.models.vision.qwen2_5_vl import attended, folded, multimodal_rope, plain_text, qwen_fields
from posttrain.models.vision.tower import (
    Params,
    blocks,
    gelu,
    layer_norm,
    linear,
    matrices,
    norm,
    parameter,
    pixels,
    place_tables,
    run_layers,
    table,
)

ARCHITECTURE = "Qwen3VLForConditionalGeneration"


def text_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    return plain_text(hf, model_type="qwen3", architecture="Qwen3ForCausalLM")


def text_name(name: str) -> str | None:
    return part_name(name, "visual")


def stored_name(name: str) -> str:
    return f"model.language_{name}" if name.startswith("model.") else name


@dataclass(frozen=True, kw_only=True)
class Qwen3Vision(VisionConfig):
    """Tower with positions of a square table, read between its entries, and mergers after some layers."""

    side: int
    """Positions a side of the table."""
    deepstack: tuple[int, ...]
    """Layers after which a merger of their own gives the features that the text's first layers add."""

    def tensors(self) -> dict[str, TowerTensor]:
        width, joined = self.width, self.width * self.merge**2
        sizes = {"attn.qkv": (3 * width, width), "attn.proj": (width, width)}
        sizes |= {"mlp.linear_fc1": (self.mlp_dim, width), "mlp.linear_fc2": (width, self.mlp_dim)}
        norms = norm("norm1", width, bias=True) | norm("norm2", width, bias=True)
        first = parameter("patch_embed.proj.weight", (width, 3, 2, self.patch_size, self.patch_size), "kernel")
        first |= parameter("patch_embed.proj.bias", (width,), "bias", start=0.0)
        first |= parameter("pos_embed.weight", (self.side**2, width), "embedding")
        found = table("model.visual.", first)
        found |= table("model.visual.blocks.{layer}.", norms | matrices(sizes, bias=True), key="layers.")
        mergers = {"merger": width} | {f"deepstack_merger_list.{k}": joined for k in range(len(self.deepstack))}
        for name, normed in mergers.items():
            merger = {"linear_fc1": (joined, joined), "linear_fc2": (self.embed_dim, joined)}
            merged = norm("norm", normed, bias=True) | matrices(merger, bias=True)
            found |= table(f"model.visual.{name}.", merged, key=f"projector.{name}.")
        return found

    def encode(self, params: Params, images: Images, compute: Compute) -> Encoded:
        tables = place_tables(images.patch_places, self.width // self.num_heads, 10_000.0)
        x = folded(params, pixels(self, images.patches).astype(compute.dtype))
        x = x + self._positions(params["pos_embed.weight"], images.patch_places, images.patch_images).astype(x.dtype)

        def layer(own: Params, x: Array, _: Any) -> Array:
            h = layer_norm(own, "norm1", x, self.eps)
            x = x + attended(own, h, self, tables, images.patch_images, compute)
            h = linear(own, "mlp.linear_fc1", layer_norm(own, "norm2", x, self.eps))
            return x + linear(own, "mlp.linear_fc2", gelu(h, tanh=True))

        deeper, start = [], 0
        for k, after in enumerate(self.deepstack):
            x, start = run_layers(params, layer, x, compute, range(start, after + 1)), after + 1
            deeper.append(self._merged(params, f"projector.deepstack_merger_list.{k}", self._joined(x)))
        if start < self.depth:
            x = run_layers(params, layer, x, compute, range(start, self.depth))
        normed = layer_norm(params, "projector.merger.norm", x, self.eps)
        return Encoded(self._fed(params, "projector.merger", self._joined(normed)), tuple(deeper))

    def _joined(self, x: Float[Array, "B P D"]) -> Float[Array, "B N mD"]:
        joined = blocks(x, self.merge)
        return joined.reshape(*joined.shape[:2], -1)

    def _merged(self, params: Params, name: str, joined: Float[Array, "B N mD"]) -> Float[Array, "B N E"]:
        return self._fed(params, name, layer_norm(params, f"{name}.norm", joined, self.eps))

    def _fed(self, params: Params, name: str, x: Float[Array, "B N mD"]) -> Float[Array, "B N E"]:
        return linear(params, f"{name}.linear_fc2", gelu(linear(params, f"{name}.linear_fc1", x), tanh=False))

    def _positions(
        self, weight: Float[Array, "S D"], places: Int[Array, "B P 2"], images: Int[Array, "B P"]
    ) -> Float[Array, "B P D"]:
        """Entries of the table at i (side - 1) / (n - 1) of the n patches of the image on each axis, bilinear."""
        count = images.shape[1] // self.merge**2 + 1

        def last(places: Array, images: Array) -> Array:
            return jnp.zeros((count, 2), jnp.int32).at[images].max(places)[images]

        span = jax.vmap(last)(places, images)
        # Exact where the place is the last one.
        scaled = places.astype(jnp.float32) * (self.side - 1) / jnp.maximum(span, 1).astype(jnp.float32)
        low = jnp.floor(scaled).astype(jnp.int32)
        high, part = jnp.minimum(low + 1, self.side - 1), scaled - low.astype(jnp.float32)
        wide, total = weight.astype(jnp.float32), jnp.zeros((), jnp.float32)
        for row, share in ((low[..., 0], 1 - part[..., 0]), (high[..., 0], part[..., 0])):
            for column, other in ((low[..., 1], 1 - part[..., 1]), (high[..., 1], part[..., 1])):
                total = total + wide[row * self.side + column] * (share * other)[..., None]
        return total


def interleaved(sections: Sequence[int]) -> list[int]:
    """Pairs by time, row and column in turn, as long as a section has more."""
    return [axis if (axis := j % 3) and j < 3 * sections[axis] else 0 for j in range(sum(sections))]


def with_vision(config: ModelConfig, hf: Fields) -> ModelConfig:
    """Add the tower, multimodal RoPE and the features of the first layers to a text model. Raises ConfigError."""
    fields = hf.section("vision_config")
    common = qwen_fields(config, fields, model_type="qwen3_vl")
    fields.refuse("hidden_act", "gelu_pytorch_tanh", why="the tower's activation is gelu_pytorch_tanh")
    positions = fields.get("num_position_embeddings", int, 2304)
    side = round(positions**0.5)
    deepstack = tuple(fields.get("deepstack_visual_indexes", list, [8, 16, 24]))
    if side**2 != positions:
        raise ConfigError(f"num_position_embeddings={positions}: must be a square")
    if list(deepstack) != sorted(set(deepstack)) or not set(deepstack) <= set(range(common["depth"])):
        raise ConfigError(f"deepstack_visual_indexes={list(deepstack)}: must be rising layers of {common['depth']}")
    if len(deepstack) > config.num_layers:
        raise ConfigError(f"deepstack_visual_indexes: more than the {config.num_layers} layers of the text model")
    half = (0.5, 0.5, 0.5)
    vision = Qwen3Vision(**common, mean=half, std=half, side=side, deepstack=deepstack)
    config = multimodal_rope(config, hf, interleaved, interleaved=True)
    changed = [replace(block, deepstack=layer < len(deepstack)) for layer, block in enumerate(config.blocks)]
    return replace(config, stages=stages_of(tuple(changed)), vision=vision)
