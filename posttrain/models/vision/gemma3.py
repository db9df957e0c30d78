"""Gemma 3 (multimodal, arXiv:2503.19786): text part, saved alone as a `gemma3_text`, and SigLIP (arXiv:2303.15343)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import Array

from posttrain.config import ImageSection
from posttrain.errors import ConfigError
from posttrain.models.config import (
    AttentionConfig,
    BlockConfig,
    Compute,
    Encoded,
    Images,
    ModelConfig,
    TowerTensor,
    VisionConfig,
    stages_of,
)
from posttrain.models.fields import Fields
from posttrain.models.vision.tower import (
    Params,
    blocks,
    check_heads,
    gelu,
    heads,
    layer_norm,
    linear,
    matrices,
    norm,
    parameter,
    pixels,
    rms_norm,
    run_layers,
    table,
    within_images,
)

ARCHITECTURE = "Gemma3ForConditionalGeneration"

DEFAULTS = {
    "model_type": "gemma3_text",
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}
"""Defaults of transformers for fields that published files omit."""

OUTER = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "quantization_config")
"""Fields of the outer config that apply to its parts."""


def text_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    return DEFAULTS | part_config(hf, architecture="Gemma3ForCausalLM")


def part_config(hf: Mapping[str, Any], *, architecture: str) -> dict[str, Any]:
    """Return the entry `text_config` with the outer fields that apply to it."""
    text = {key: value for key, value in Fields(hf).get("text_config", dict).items() if value is not None}
    outer = {key: hf[key] for key in OUTER if hf.get(key) is not None}
    tied = Fields(hf).get("tie_word_embeddings", bool, True)
    return text | outer | {"architectures": [architecture], "tie_word_embeddings": tied}


def text_name(name: str) -> str | None:
    return part_name(name, "vision_tower|multi_modal_projector")


def part_name(name: str, others: str) -> str | None:
    """Strip the prefix that transformers adds (depends on its version); None: a tensor of one of the `others`."""
    if re.match(rf"(model\.)?({others})\.", name):
        return None
    name = re.sub(r"^(language_model\.model|model\.language_model)\.", "model.", name)
    return name.removeprefix("language_model.")


def stored_name(name: str) -> str:
    """Return the name under which transformers saves a tensor of the text part."""
    return f"language_model.{name}"


@dataclass(frozen=True, kw_only=True)
class Siglip(VisionConfig):
    """Tower with learned positions on images of one size; features are means of blocks of patches."""

    side: int
    """Patches a side of an image."""

    def written_fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {**fields, "vision_config": {**fields["vision_config"], "vision_use_head": False}}

    def tensors(self) -> dict[str, TowerTensor]:
        tower, width, mlp = "vision_tower.vision_model.", self.width, self.mlp_dim
        norms = norm("layer_norm1", width, bias=True) | norm("layer_norm2", width, bias=True)
        sizes = {f"self_attn.{part}_proj": (width, width) for part in ("q", "k", "v", "out")}
        sizes |= {"mlp.fc1": (mlp, width), "mlp.fc2": (width, mlp)}
        patch = parameter("patch_embedding.weight", (width, 3, self.patch_size, self.patch_size), "kernel")
        patch |= parameter("patch_embedding.bias", (width,), "bias", start=0.0)
        patch |= parameter("position_embedding.weight", (self.side**2, width), "embedding")
        found = table(f"{tower}embeddings.", patch)
        found |= table(f"{tower}encoder.layers.{{layer}}.", norms | matrices(sizes, bias=True), key="layers.")
        found |= table(tower, norm("post_layernorm", width, bias=True))
        # The norm multiplies by 1 + its scale; the matrix is stored [in, out], which no adapter reads.
        projector = norm("mm_soft_emb_norm", width, bias=False, start=0.0)
        projector |= parameter("mm_input_projection_weight", (width, self.embed_dim), "kernel")
        return found | table("multi_modal_projector.", projector, key="projector.")

    def picture_patches(self, limits: ImageSection) -> int:
        return self.side**2

    def encode(self, params: Params, images: Images, compute: Compute) -> Encoded:
        eps, scale = self.eps, (self.width // self.num_heads) ** -0.5
        x = linear(params, "patch_embedding", pixels(self, images.patches).astype(compute.dtype))
        places = images.patch_places[..., 0] * self.side + images.patch_places[..., 1]
        x = x + params["position_embedding.weight"].astype(x.dtype)[places]

        def layer(own: Params, x: Array, _: Any) -> Array:
            h = layer_norm(own, "layer_norm1", x, eps)
            q, k, v = (heads(linear(own, f"self_attn.{part}_proj", h), self.num_heads) for part in "qkv")
            x = x + linear(own, "self_attn.out_proj", within_images(q, k, v, images.patch_images, scale, compute))
            h = linear(own, "mlp.fc1", layer_norm(own, "layer_norm2", x, eps))
            return x + linear(own, "mlp.fc2", gelu(h, tanh=True))

        x = run_layers(params, layer, x, compute, range(self.depth))
        x = layer_norm(params, "post_layernorm", x, eps)
        pooled = jnp.mean(blocks(x, self.merge), axis=2)
        normed = rms_norm(params, "projector.mm_soft_emb_norm", pooled, eps, offset=1.0)
        return Encoded(normed @ params["projector.mm_input_projection_weight"].astype(normed.dtype)[None])


def with_vision(config: ModelConfig, hf: Fields) -> ModelConfig:
    """Add the tower to a text model, in which tokens of an image see one another. Raises ConfigError."""
    fields, tokens = hf.section("vision_config"), hf.get("mm_tokens_per_image", int, 256)
    fields.refuse("model_type", "siglip_vision_model", why="the tower is a SigLIP")
    fields.refuse("hidden_act", "gelu_pytorch_tanh", why="the tower's activation is gelu_pytorch_tanh")
    fields.refuse("num_channels", 3, why="images have three channels")
    fields.refuse("vision_use_head", False, True, why="must be true or false; a pooling head is not loaded")
    size, patch = fields.get("image_size", int, 224), fields.get("patch_size", int, 16)
    side, merged = size // patch, math.isqrt(tokens)
    if size % patch or merged**2 != tokens or side % merged:
        raise ConfigError(
            f"mm_tokens_per_image={tokens}: {side} x {side} patches (image_size={size}, patch_size={patch}) cannot be "
            "pooled to a square of that many tokens"
        )
    width, num_heads = fields.get("hidden_size", int, 768), fields.get("num_attention_heads", int, 12)
    check_heads(width, num_heads, 1)
    vision = Siglip(
        model_type="gemma3",
        embed_dim=config.embed_dim,
        depth=fields.get("num_hidden_layers", int, 12),
        width=width,
        num_heads=num_heads,
        mlp_dim=fields.get("intermediate_size", int, 3072),
        patch_size=patch,
        merge=side // merged,
        eps=fields.get("layer_norm_eps", float, 1e-6),
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        side=side,
    )
    return replace(seeing_images(config, tokens - 1), vision=vision)


def seeing_images(config: ModelConfig, ahead: int, *, windows: bool = False) -> ModelConfig:
    """Let tokens of an image see one another, of which at most `ahead` follow one; `windows`: in window layers only."""

    def changed(block: BlockConfig) -> BlockConfig:
        if windows and block.attention.window is None:
            return block
        assert isinstance(block.attention, AttentionConfig)
        return replace(block, attention=replace(block.attention, image_ahead=ahead))

    return replace(config, stages=stages_of(tuple(changed(block) for block in config.blocks)))
