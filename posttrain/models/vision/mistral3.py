"""Mistral 3 (multimodal): text part, saved alone under its own type, and Pixtral (arXiv:2410.07073)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax import Array

from posttrain.config import ImageSection
from posttrain.errors import ConfigError
from posttrain.models.config import Activation, Compute, Encoded, Images, ModelConfig, TowerTensor, VisionConfig
from posttrain.models.fields import Fields
from posttrain.models.hf import activation, family
from posttrain.models.layers import gated
from posttrain.models.vision import gemma3
from posttrain.models.vision.gemma3 import part_config
from posttrain.models.vision.qwen2_5_vl import CLIP_MEAN, CLIP_STD
from posttrain.models.vision.tower import (
    Params,
    blocks,
    gelu,
    heads,
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

ARCHITECTURE = "Mistral3ForConditionalGeneration"
LONGEST_EDGE = 1540
"""Default of the image processor."""

text_name, stored_name = gemma3.text_name, gemma3.stored_name


def text_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    text = Fields(hf).section("text_config")
    model_type = text.get("model_type", str, "mistral")
    tied = hf.get("tie_word_embeddings", text.get("tie_word_embeddings", bool, False))
    whole = part_config({**hf, "tie_word_embeddings": tied}, architecture=family(model_type).ARCHITECTURE)
    return {"model_type": model_type} | whole


@dataclass(frozen=True, kw_only=True)
class Pixtral(VisionConfig):
    """Tower that turns by rows and columns; features are m x m patches joined, channel by channel."""

    head_dim: int
    theta: float
    activation: Activation
    used: int
    """Layers that the features come from."""
    text_eps: float
    bias: bool
    """Biases in the projector."""

    def tensors(self) -> dict[str, TowerTensor]:
        width, mlp, inner = self.width, self.mlp_dim, self.attention_dim
        sizes = {f"attention.{part}_proj": (inner, width) for part in "qkv"} | {"attention.o_proj": (width, inner)}
        sizes |= {"feed_forward.gate_proj": (mlp, width), "feed_forward.up_proj": (mlp, width)}
        sizes |= {"feed_forward.down_proj": (width, mlp)}
        norms = norm("attention_norm", width, bias=False) | norm("ffn_norm", width, bias=False)
        first = parameter("patch_conv.weight", (width, 3, self.patch_size, self.patch_size), "kernel")
        found = table("vision_tower.", first | norm("ln_pre", width, bias=False))
        layer = norms | matrices(sizes, bias=False)
        found |= table("vision_tower.transformer.layers.{layer}.", layer, key="layers.")
        ends = {"linear_1": (self.embed_dim, width), "linear_2": (self.embed_dim, self.embed_dim)}
        merged = matrices({"patch_merger.merging_layer": (width, width * self.merge**2)}, bias=False)
        last = norm("norm", width, bias=False) | merged | matrices(ends, bias=self.bias)
        return found | table("multi_modal_projector.", last, key="projector.")

    def attends(self, images: Any, places: Any) -> Sequence[tuple[Any, int]]:
        return [(images, self.used)]

    def picture_patches(self, limits: ImageSection) -> int:
        return (-(-(limits.longest_edge or LONGEST_EDGE) // (self.patch_size * self.merge)) * self.merge) ** 2

    @property
    def attention_dim(self) -> int:
        return self.num_heads * self.head_dim

    def encode(self, params: Params, images: Images, compute: Compute) -> Encoded:
        tables = place_tables(images.patch_places, self.head_dim, self.theta, alternating=True)
        x = linear(params, "patch_conv", pixels(self, images.patches).astype(compute.dtype))
        x = rms_norm(params, "ln_pre", x, self.eps)

        def layer(own: Params, x: Array, _: Any) -> Array:
            h = rms_norm(own, "attention_norm", x, self.eps)
            q, k, v = (heads(linear(own, f"attention.{part}_proj", h), self.num_heads) for part in "qkv")
            scale = self.head_dim**-0.5
            out = within_images(turned(q, tables), turned(k, tables), v, images.patch_images, scale, compute)
            x = x + linear(own, "attention.o_proj", out)
            h = rms_norm(own, "ffn_norm", x, self.eps)
            gate, up = (linear(own, f"feed_forward.{name}_proj", h) for name in ("gate", "up"))
            return x + linear(own, "feed_forward.down_proj", gated(self.activation, gate, up))

        x = run_layers(params, layer, x, compute, range(self.used))
        by_channel = blocks(rms_norm(params, "projector.norm", x, self.text_eps), self.merge).swapaxes(2, 3)
        h = linear(params, "projector.patch_merger.merging_layer", by_channel.reshape(*by_channel.shape[:2], -1))
        return Encoded(linear(params, "projector.linear_2", gelu(linear(params, "projector.linear_1", h), tanh=False)))


def with_vision(config: ModelConfig, hf: Fields) -> ModelConfig:
    """Add the tower to a text model. Raises ConfigError."""
    fields = hf.section("vision_config")
    fields.refuse("model_type", "pixtral", why="the tower is a Pixtral")
    fields.refuse("num_channels", 3, why="images have three channels")
    fields.without_effect("image_size")  # of training; positions are rotary
    hf.refuse("projector_hidden_act", "gelu", why="the projector's activation is gelu")
    depth, layer = fields.get("num_hidden_layers", int, 24), hf.get("vision_feature_layer", int, -1)
    if not -depth <= layer < 0:
        raise ConfigError(f"vision_feature_layer={layer}: must be from {-depth} to -1, counted from the last layer")
    width, num_heads = fields.get("hidden_size", int, 1024), fields.get("num_attention_heads", int, 16)
    rope = fields.section("rope_parameters")
    vision = Pixtral(
        model_type="mistral3",
        embed_dim=config.embed_dim,
        depth=depth,
        width=width,
        num_heads=num_heads,
        mlp_dim=fields.get("intermediate_size", int, 4096),
        patch_size=fields.get("patch_size", int, 16),
        merge=hf.get("spatial_merge_size", int, 2),
        eps=1e-5,
        mean=CLIP_MEAN,
        std=CLIP_STD,
        head_dim=fields.get("head_dim", int, width // num_heads),
        theta=rope.get("rope_theta", float, fields.get("rope_theta", float, 10_000.0)),
        activation=activation(fields, default="gelu"),
        used=depth + 1 + layer,
        text_eps=config.norm_eps,
        bias=hf.get("multimodal_projector_bias", bool, False),
    )
    return replace(config, vision=vision)
