"""OLMo 3 (arXiv:2512.13961): OLMo 2 with a sliding window and plain RoPE in three of four layers."""

from __future__ import annotations

from dataclasses import replace

from posttrain.models.config import ModelConfig
from posttrain.models.families.olmo2 import NAMES as OLMO2_NAMES
from posttrain.models.families.olmo2 import olmo_attention, post_norm_decoder
from posttrain.models.fields import Fields
from posttrain.models.hf import layer_types
from posttrain.models.rope import default_rope

ARCHITECTURE = "Olmo3ForCausalLM"
NAMES = OLMO2_NAMES
THETA = 500_000.0


def config_from_hf(hf: Fields) -> ModelConfig:
    layers = range(1, hf.get("num_hidden_layers", int) + 1)
    kinds = layer_types(hf, ["sliding_attention" if layer % 4 else "full_attention" for layer in layers])
    full = olmo_attention(hf, theta=THETA, layer_type="full_attention")
    if "rope_parameters" in hf:
        local = olmo_attention(hf, theta=THETA, layer_type="sliding_attention")
    else:
        # `rope_scaling` applies to the full-attention layers only.
        local = replace(full, rope=default_rope(hf.get("rope_theta", float, THETA), full.head_dim))
    local = replace(local, window=hf.optional("sliding_window", int, 4096))
    return post_norm_decoder(hf, [local if kind == "sliding_attention" else full for kind in kinds])
