"""What can be said of a run before any weights load."""

from __future__ import annotations

from pathlib import Path

from posttrain.batch import rows_per_pass
from posttrain.config import ComparedSection, DistillSection, RunConfig, SampledSection, SequenceSection, TrainSection
from posttrain.recipes.judged import JudgedInputs
from posttrain.recipes.prepare import prepare
from posttrain.recipes.prepare_rl import OnlineInputs, Scored
from posttrain.recipes.prepare_sequences import SFTInputs
from posttrain.recipes.prepared import Inputs
from posttrain.recipes.stages import row_notes, stage_names


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
        lines.append(f"{name}: {_describe(section, inputs, shards or 1)}")
    return lines + prepared.notes + row_notes(config, shards)


def _describe(section: TrainSection, inputs: Inputs | None, shards: int) -> str:
    tokens = section.row_tokens
    if isinstance(section, SequenceSection | ComparedSection):
        rows = ""
        if isinstance(inputs, SFTInputs):
            rows = f"{len(inputs.rows) + sum(len(more) for more, _ in inputs.mixed):,} dataset rows, "
        if isinstance(inputs, JudgedInputs):
            rows = f"{len(inputs.units.rows):,} dataset rows, {type(inputs.loss).__name__}, "
        passes = -(-section.batch_rows // rows_per_pass(section.batch_rows, section.micro_batch_rows, shards))
        text = f"{rows}{section.steps} steps of {section.batch_rows} x {tokens} tokens ({passes} micro-batches)"
        return text + (_teachers(section) if isinstance(section, DistillSection) else "")
    assert isinstance(section, SampledSection)
    prompts = "" if not isinstance(inputs, Scored) else f"{len(inputs.examples):,} prompts, "
    text = (
        f"{prompts}{section.steps} steps of {section.prompts_per_step} prompts x {section.group_size} samples "
        f"= {section.prompts_per_step * section.group_size}, up to {section.sampling.max_tokens} new tokens each"
    )
    if isinstance(inputs, OnlineInputs):
        text += f"; the best against the worst by {type(inputs.loss).__name__}"
    if isinstance(inputs, Scored) and inputs.eval_examples:
        text += f"; {len(inputs.eval_examples)} held-out prompts"
    return text


def _teachers(section: DistillSection) -> str:
    names = ", ".join(teacher.path for teacher in section.teachers)
    outside = [teacher.title for teacher in section.teachers if teacher.outside]
    live = f"in the step{', but for ' + ', '.join(outside) if outside else ''}"
    where = live if section.cache is None else f"from the cache {section.cache}"
    own = f"; {section.on_policy:.0%} of the steps on the student's own samples" if section.on_policy else ""
    return f"; taught by {names}, {where}{own}"
