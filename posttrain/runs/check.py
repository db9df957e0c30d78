"""Check of a run before any weights load: `posttrain check`."""

from __future__ import annotations

import math
from pathlib import Path

from posttrain.config import ROW_AXES, RunConfig
from posttrain.runs.prepare import prepare
from posttrain.runs.size import describe_size, mesh_of_run
from posttrain.stages.table import STAGES, row_notes, stage_names


def check(config: RunConfig, base_dir: Path, num_devices: int | None = None) -> list[str]:
    """Validate a run; return lines about what it would do. Raises ConfigError for the first mistake.

    `num_devices`: devices of the target machine; None: of this machine.
    """
    mesh = mesh_of_run(config, num_devices)
    prepared = prepare(config, base_dir, offline_ok=True, estimate=True)
    shards = math.prod(mesh[axis] for axis in ROW_AXES)
    lines = [f"output: {config.output}{' (exists)' if Path(config.output).exists() else ''}"]
    if prepared.model is not None:
        model = prepared.model
        lines.append(f"model: {model.model_type}, {model.num_layers} layers, vocabulary {model.vocab_size:,}")
        lines += describe_size(prepared.config, model, mesh, base_dir)
    named = ", ".join(f"{axis}={size}" for axis, size in mesh.items())
    where = f"{num_devices} devices" if num_devices is not None else "this machine; --devices N for another"
    lines.append(f"mesh: {named} ({where})")
    config = prepared.config
    for name, section in zip(stage_names(config), config.stages, strict=True):
        inputs = next((i for i in prepared.stages if i.section is section), None)
        lines.append(f"{name}: {STAGES[section.kind].describe(section, inputs, shards)}")
    return lines + prepared.notes + row_notes(config, shards)
