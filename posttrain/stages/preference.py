"""Preference optimisation stage: preference pairs or labelled answers, one loss, and a reference if the loss needs
one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from posttrain.batch import Batch
from posttrain.cluster.reference_cache import check_scored, model_key, with_reference, with_reference_of_all
from posttrain.cluster.scorers import Reference
from posttrain.config import PreferenceSection
from posttrain.data.pairs import ComparisonBatches, Units
from posttrain.data.prefetch import Prefetch
from posttrain.evaluation.pairs import PairEvaluation, metrics_of, with_margins
from posttrain.stages.context import HeldOut, StageRun
from posttrain.stages.pairs import PairInputs
from posttrain.train.trainer import Trainer

AddReference = Callable[[Batch], Batch]


def run(stage: StageRun, inputs: PairInputs) -> None:
    """Train a preference stage to its last step, resuming from its newest checkpoint."""
    section = inputs.section
    trainer = stage.make_trainer(section, stage.load_model(), inputs.loss, terms=inputs.terms)
    referenced = _referenced(stage, inputs, trainer)
    eval_units = referenced.eval_units
    batches = Prefetch(ComparisonBatches(referenced.units, seed=stage.seed))
    dropped = {"data/dropped_ratio": inputs.dropped_ratio} if inputs.dropped_ratio else {}

    held_out = None
    if eval_units is not None:
        held_out = HeldOut(
            evaluate=PairEvaluation(trainer, inputs.loss, eval_units, referenced.complete), metrics=metrics_of
        )
    with batches, stage.training(trainer, batches, section, held_out) as training:
        for _ in training:
            metrics = trainer.step(referenced.for_step(next(batches)))
            training.log({**with_margins(metrics), **dropped, **batches.metrics()})


@dataclass(frozen=True, kw_only=True)
class _Referenced:
    """Units, and a function that adds reference log-probabilities to a batch unless the units include them."""

    units: Units
    eval_units: Units | None
    complete: AddReference
    for_step: AddReference


def _referenced(stage: StageRun, inputs: PairInputs, trainer: Trainer) -> _Referenced:
    section, units, eval_units = inputs.section, inputs.units, inputs.eval_units
    assert isinstance(section, PreferenceSection)
    if not inputs.loss.needs.reference:
        return _Referenced(units=units, eval_units=eval_units, complete=_as_it_is, for_step=_as_it_is)
    if section.reference == "live":
        reference = Reference(trainer)
        return _Referenced(units=units, eval_units=eval_units, complete=reference.added_to, for_step=reference.for_step)
    key = model_key(
        trainer,
        stage.origin.parts,
        quantize=stage.model.quantize,
        dtype=stage.model.dtype,
        long_context=stage.model.long_context,
        num_tokens=stage.tokenizer.num_ids,
    )
    known = with_reference(units, trainer, key, seed=stage.seed, num_steps=section.steps)
    held_out = None if eval_units is None else with_reference_of_all(eval_units, trainer, key)
    return _Referenced(units=known, eval_units=held_out, complete=check_scored, for_step=check_scored)


def _as_it_is(batch: Batch) -> Batch:
    return batch
