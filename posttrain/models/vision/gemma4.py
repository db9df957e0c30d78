"""Gemma 4 (multimodal), text part; saved as a `gemma4_text`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.errors import ConfigError
from posttrain.models.config import ModelConfig
from posttrain.models.vision.gemma3 import part_config, part_name


def text_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {"model_type": "gemma4_text"} | part_config(hf, architecture="Gemma4ForCausalLM")


def text_name(name: str) -> str | None:
    return part_name(name, "vision_tower|audio_tower|embed_vision|embed_audio")


def stored_name(name: str) -> str:
    """Return the name under which transformers saves a tensor of the text part."""
    return f"model.language_{name}" if name.startswith("model.") else name


def with_vision(config: ModelConfig, hf: Mapping[str, Any]) -> ModelConfig:
    raise ConfigError("model.vision: the tower of gemma4 is not supported; set it to none")
