"""SmolLM3: Llama with NoPE in every fourth layer (arXiv:2501.18795)."""

from __future__ import annotations

from dataclasses import replace

from posttrain.errors import ConfigError
from posttrain.models.config import ModelConfig
from posttrain.models.fields import Fields
from posttrain.models.hf import attention_config, decoder_config, head_dim_of, layer_types, mlp_config
from posttrain.models.names import DECODER_NAMES
from posttrain.models.rope import rope_from_hf

ARCHITECTURE = "SmolLM3ForCausalLM"
NAMES = DECODER_NAMES


def config_from_hf(hf: Fields) -> ModelConfig:
    has_rope, bias, head_dim = _layers_with_rope(hf), hf.get("attention_bias", bool, False), head_dim_of(hf)
    attention = attention_config(
        hf,
        rope=rope_from_hf(hf, head_dim, theta=2_000_000.0),
        head_dim=head_dim,
        default_kv_heads=4,
        qkv_bias=bias,
        out_bias=bias,
    )
    attentions = [
        replace(attention, rope=attention.rope if rope else None, window=window)
        for rope, window in zip(has_rope, _windows(hf, has_rope), strict=True)
    ]
    mlp = mlp_config(hf, bias=hf.get("mlp_bias", bool, False))
    return decoder_config(hf, attentions, [mlp] * len(attentions), tie_embeddings=True)


def _layers_with_rope(hf: Fields) -> list[bool]:
    num_layers, interval = hf.get("num_hidden_layers", int), hf.get("no_rope_layer_interval", int, 4)
    # Despite the field's name, 1 is a layer with RoPE.
    flags = hf.get("no_rope_layers", list, [int(layer % interval != 0) for layer in range(1, num_layers + 1)])
    if len(flags) < num_layers:
        raise ConfigError(f"no_rope_layers: must name num_hidden_layers={num_layers} layers, got {len(flags)}")
    return [bool(flag) for flag in flags[:num_layers]]


def _windows(hf: Fields, has_rope: list[bool]) -> list[int | None]:
    used, window = hf.get("use_sliding_window", bool, False), hf.optional("sliding_window", int)
    window = window if used else None
    default = ["sliding_attention" if window and not rope else "full_attention" for rope in has_rope]
    kinds = layer_types(hf, default)
    if window is None and "sliding_attention" in kinds:
        raise ConfigError("layer_types: sliding_attention needs use_sliding_window=true and sliding_window")
    return [window if kind == "sliding_attention" else None for kind in kinds]
