"""Preference and reward model stages: preference pairs or labelled answers, one loss, and a reference if the loss needs
one, or a scalar head on the decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from posttrain.batch import Batch
from posttrain.cluster.reference import Reference
from posttrain.cluster.reference_cache import check_scored, model_key, with_reference, with_reference_of_all
from posttrain.config import PreferenceSection
from posttrain.data.prefetch import Prefetch
from posttrain.data.units import ComparisonBatches, Units
from posttrain.evaluation.pairs import PairEvaluation, metrics_of, with_margins
from posttrain.models.decoder import Decoder
from posttrain.stages.context import HeldOut, StageRun
from posttrain.stages.pair_inputs import PairInputs
from posttrain.train.trainer import Trainer
from posttrain.weights.scalar_head import add_scalar_head, with_padding

CompleteBatch = Callable[[Batch], Batch]


@dataclass(frozen=True, kw_only=True)
class PairData:
    """Units, and functions that complete a batch of them: with reference log-probabilities that the units lack."""

    units: Units
    eval_units: Units | None
    complete: CompleteBatch
    for_step: CompleteBatch


def run(stage: StageRun, inputs: PairInputs) -> None:
    """Train a preference stage to its last step, resuming from its newest checkpoint."""
    trainer = stage.make_trainer(inputs.section, stage.load_model(), inputs.loss, terms=inputs.terms)
    train_pairs(stage, inputs, trainer, _referenced(stage, inputs, trainer))


def run_reward_model(stage: StageRun, inputs: PairInputs) -> None:
    """Train a reward model to the last step of its stage, resuming from its newest checkpoint."""
    trainer = stage.make_trainer(inputs.section, load_reward_model(stage), inputs.loss, terms=inputs.terms)
    train_pairs(stage, inputs, trainer, plain_data(inputs))


def load_reward_model(stage: StageRun) -> Decoder:
    """Load the stage's initial model, with a new scalar head unless it has one."""
    model = stage.load_model()
    add_scalar_head(model, seed=stage.seed, mesh=stage.mesh)
    tokenizer = stage.tokenizer
    model.config = with_padding(model.config, tokenizer.hf.pad_token_id, tokenizer.stop_ids)
    return model


def train_pairs(stage: StageRun, inputs: PairInputs, trainer: Trainer, data: PairData) -> None:
    """Run all steps and evaluations of a stage on pairs or labelled answers, then save its model."""
    batches = Prefetch(ComparisonBatches(data.units, seed=stage.seed))
    dropped = {"data/dropped_ratio": inputs.dropped_ratio} if inputs.dropped_ratio else {}
    held_out = None
    if data.eval_units is not None:
        evaluation = PairEvaluation(trainer, inputs.loss, data.eval_units, data.complete)
        held_out = HeldOut(evaluate=evaluation, metrics=metrics_of)
    with batches, stage.training(trainer, batches, inputs.section, held_out) as training:
        for _ in training:
            metrics = trainer.step(data.for_step(next(batches)))
            training.log({**with_margins(metrics), **dropped, **batches.metrics()})


def plain_data(inputs: PairInputs) -> PairData:
    """Data of a loss without a reference."""
    return PairData(units=inputs.units, eval_units=inputs.eval_units, complete=_unchanged, for_step=_unchanged)


def _referenced(stage: StageRun, inputs: PairInputs, trainer: Trainer) -> PairData:
    section, units, eval_units = inputs.section, inputs.units, inputs.eval_units
    assert isinstance(section, PreferenceSection)
    if not inputs.loss.needs.reference:
        return plain_data(inputs)
    if section.reference == "live":
        reference = Reference(trainer)
        return PairData(units=units, eval_units=eval_units, complete=reference.added_to, for_step=reference.for_step)
    key = model_key(
        trainer,
        stage.origin.parts,
        quantize=stage.model.quantize,
        dtype=stage.model.dtype,
        long_context=stage.model.long_context,
        num_tokens=stage.tokenizer.num_ids,
    )
    known = with_reference(units, trainer, key, stage.folder, seed=stage.seed, num_steps=section.steps)
    held_out = None if eval_units is None else with_reference_of_all(eval_units, trainer, key, stage.folder)
    return PairData(units=known, eval_units=held_out, complete=check_scored, for_step=check_scored)


def _unchanged(batch: Batch) -> Batch:
    return batch
