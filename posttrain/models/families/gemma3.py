"""Gemma 3 (multimodal), text part; saved as a `gemma3_text`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from posttrain.models.fields import Fields

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
