"""What can be said of a run before any weights load."""

from __future__ import annotations

from pathlib import Path

from posttrain.config import RunConfig
from posttrain.runs.prepare import prepare
from posttrain.stages.table import STAGES, row_notes, stage_names


def check(config: RunConfig, base_dir: Path) -> list[str]:
    """Validate a run; the lines say what it would do. Raises ConfigError for the first mistake."""
    prepared = prepare(config, base_dir, offline_ok=True)
    shards = config.mesh.row_shards
    lines = [f"output: {config.output}{' (exists)' if Path(config.output).exists() else ''}"]
    if prepared.model is not None:
        model = prepared.model
        lines.append(f"model: {model.model_type}, {model.num_layers} layers, vocabulary {model.vocab_size:,}")
    for name, section in zip(stage_names(config), config.stages, strict=True):
        inputs = next((i for i in prepared.stages if i.section is section), None)
        lines.append(f"{name}: {STAGES[section.kind].describe(section, inputs, shards or 1)}")
    return lines + prepared.notes + row_notes(config, shards)
