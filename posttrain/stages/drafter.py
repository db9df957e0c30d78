"""Drafter stage: a block drafter is trained on the hidden states of the run's model, which stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from posttrain.config import DrafterSection, ModelSection
from posttrain.data.pipeline import eval_batches
from posttrain.data.prefetch import Prefetch
from posttrain.errors import ConfigError
from posttrain.evaluation.sequences import Record, counted
from posttrain.kernels.logits.chunk_stats import PLAIN
from posttrain.losses.distill import BlockDraftLoss
from posttrain.metrics import to_host
from posttrain.models.config import ModelConfig
from posttrain.stages.context import HeldOut, StageRun
from posttrain.stages.inputs import Prepared
from posttrain.stages.sft import SequenceInputs, describe_sequences, prepare_sequences, sequences_of
from posttrain.tracking.console import progress_bar
from posttrain.train.trainer import Trainer
from posttrain.weights.drafter import attach_drafter, drafter_config


@dataclass(frozen=True, kw_only=True)
class DrafterInputs(SequenceInputs):
    """Inputs of drafter stages."""

    section: DrafterSection


def prepare(section: DrafterSection, prepared: Prepared) -> tuple[DrafterInputs, list[str]]:
    """Load rows, and check the target. Also returns notes about dropped rows."""
    check_target(prepared.config.model, prepared.files.config)
    inputs, notes = prepare_sequences(section, prepared, BlockDraftLoss())
    return DrafterInputs(**vars(inputs)), notes


def check_offline(section: DrafterSection) -> None:
    """Check everything that needs neither tokenizer nor rows."""


def check_target(section: ModelSection, config: ModelConfig | None) -> None:
    """ConfigError for a model that no drafter is trained with."""
    quantize = None if section.quantize == "none" else section.quantize
    given: dict[str, object] = {"lora": section.lora, "adapter": section.adapter, "upscale": section.upscale}
    given |= {"quantize": quantize, "init": section.init}
    if others := [f"model.{name}" for name, value in given.items() if value is not None]:
        raise ConfigError(
            f"{', '.join(others)}: a stage of kind drafter reads the model as it is served, and trains nothing of it; "
            "give a merged model as model.path"
        )
    if config is not None and config.vision is not None:
        raise ConfigError("model.vision: a block drafter is for models of text; set it to none")


def describe(section: DrafterSection, inputs: DrafterInputs | None, shards: int) -> str:
    """Summarise the stage in one line."""
    read = f"{section.tokens} tokens from {section.window} hidden states"
    return f"{describe_sequences(section, inputs, shards)}; a drafter of {read}, the model frozen"


def run(stage: StageRun, inputs: DrafterInputs) -> None:
    """Train a drafter to the last step, resuming from its newest checkpoint."""
    section = inputs.section
    model = stage.load_model()
    attach_drafter(model, drafter_config(section, model.config), seed=stage.seed, mesh=stage.mesh)
    settings = stage.train_settings(section, temperature=1.0, terms=PLAIN)
    trainer = stage.make_trainer(section, model, inputs.loss, settings)
    held_out = None
    if section.eval_dataset is not None:
        held_out = HeldOut(evaluate=lambda: evaluate(trainer, inputs), metrics=_plain)
    dropped = {} if section.overlong == "error" else inputs.cuts
    with (
        Prefetch(sequences_of(stage, inputs, None)) as batches,
        stage.training(trainer, batches, section, held_out) as training,
    ):
        for _ in training:
            training.log({**trainer.step(next(batches)), **dropped, **batches.metrics()})


def evaluate(trainer: Trainer, inputs: DrafterInputs) -> Record:
    """Evaluate the drafter on the stage's held-out rows."""
    rows, renderer, section = inputs.eval_rows, inputs.eval_renderer, inputs.section
    assert rows is not None and renderer is not None and section.eval_dataset is not None
    with progress_bar(f"evaluating {len(rows):,} held-out rows", len(rows)) as advance:
        found = trainer.evaluate(counted(eval_batches(section, section.eval_dataset, rows, renderer, None), advance))
    return {f"eval/{name}": value for name, value in to_host(found).items()}


def _plain(record: Record) -> Mapping[str, float]:
    return record
