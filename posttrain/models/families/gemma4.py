"""Gemma 4 (multimodal), text part; saved as a `gemma4_text`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.models.families.gemma3 import part_config, part_name


def text_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {"model_type": "gemma4_text"} | part_config(hf, architecture="Gemma4ForCausalLM")


def text_name(name: str) -> str | None:
    return part_name(name, "vision_tower|audio_tower|embed_vision|embed_audio")
