"""What can be said of a run before any weights load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from posttrain.config import ConfigError, RLSection, RunConfig, SFTSection
from posttrain.models import hf
from posttrain.models.config import ModelConfig
from posttrain.recipes.prepare import Prepared, RLInputs, SFTInputs, local_or_hub, prepare, stage_names


def check(config: RunConfig, base_dir: Path) -> list[str]:
    """Validate a run; the lines say what it would do. Raises ConfigError for the first mistake."""
    prepared = prepare(config, base_dir, offline_ok=True)
    lines = [f"output: {config.output}{' (exists)' if Path(config.output).exists() else ''}"]
    model = _model_config(config, base_dir, prepared)
    if model is not None:
        lines.append(f"model: {model.model_type}, {model.num_layers} layers, vocabulary {model.vocab_size:,}")
        for name, section in zip(stage_names(config), config.stages, strict=True):
            if section.row_tokens > model.max_positions:
                raise ConfigError(
                    f"{name}: row_tokens={section.row_tokens} must be at most max_position_embeddings="
                    f"{model.max_positions} of the model"
                )
    for name, section in zip(stage_names(config), config.stages, strict=True):
        inputs = next((i for i in prepared.stages if i.section is section), None)
        lines.append(f"{name}: {_describe(section, inputs)}")
    return lines + prepared.notes


def _model_config(config: RunConfig, base_dir: Path, prepared: Prepared) -> ModelConfig | None:
    m = config.model
    if m.init is not None:
        vocab = {} if prepared.tokenizer is None else {"vocab_size": prepared.tokenizer.vocab_size}
        return hf.config_from_init({**vocab, **m.init})
    assert m.path is not None
    folder = Path(local_or_hub(m.path, base_dir))
    if not folder.is_dir():
        prepared.notes.append(f"not checked: the model {m.path} is not on this machine; it is downloaded by run")
        return None
    file = folder / "config.json"
    try:
        fields: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {file}: cannot be read: {error}") from error
    return hf.config_from_hf(fields)


def _describe(section: SFTSection | RLSection, inputs: SFTInputs | RLInputs | None) -> str:
    tokens = section.row_tokens
    if isinstance(section, SFTSection):
        rows = "" if not isinstance(inputs, SFTInputs) else f"{len(inputs.rows):,} dataset rows, "
        micro = section.micro_batch_rows or section.batch_rows
        return (
            f"{rows}{section.num_steps} steps of {section.batch_rows} x {tokens} tokens "
            f"({-(-section.batch_rows // micro)} micro-batches)"
        )
    prompts = "" if not isinstance(inputs, RLInputs) else f"{len(inputs.examples):,} prompts, "
    samples = section.prompts_per_step * section.group_size
    text = (
        f"{prompts}{section.num_steps} steps of {section.prompts_per_step} prompts x {section.group_size} samples "
        f"= {samples}, up to {section.sampling.max_tokens} new tokens each"
    )
    if isinstance(inputs, RLInputs) and inputs.eval_examples:
        text += f"; {len(inputs.eval_examples)} held-out prompts"
    return text
