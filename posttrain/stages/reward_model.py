"""Reward model stage: a scalar head on the decoder, trained on preference pairs or on labelled steps."""

from __future__ import annotations

from posttrain.batch import Batch
from posttrain.data.pairs import ComparisonBatches
from posttrain.data.prefetch import Prefetch
from posttrain.evaluation.pairs import PairEvaluation, metrics_of, with_margins
from posttrain.models.decoder import Decoder
from posttrain.stages.context import HeldOut, StageRun
from posttrain.stages.pairs import PairInputs
from posttrain.weights.scalar_head import add_scalar_head, with_padding


def run(stage: StageRun, inputs: PairInputs) -> None:
    """Train a reward model to the last step of its stage, resuming from its newest checkpoint."""
    section = inputs.section
    trainer = stage.make_trainer(section, load_reward_model(stage), inputs.loss, terms=inputs.terms)
    batches = Prefetch(ComparisonBatches(inputs.units, seed=stage.seed))
    dropped = {"data/dropped_ratio": inputs.dropped_ratio} if inputs.dropped_ratio else {}

    def as_it_is(batch: Batch) -> Batch:
        return batch

    held_out = None
    if (units := inputs.eval_units) is not None:
        held_out = HeldOut(evaluate=PairEvaluation(trainer, inputs.loss, units, as_it_is), metrics=metrics_of)
    with batches, stage.training(trainer, batches, section, held_out) as training:
        for _ in training:
            training.log({**with_margins(trainer.step(next(batches))), **dropped, **batches.metrics()})


def load_reward_model(stage: StageRun) -> Decoder:
    """Load the stage's initial model, with a new scalar head unless it has one."""
    model = stage.load_model()
    add_scalar_head(model, seed=stage.seed, mesh=stage.mesh)
    tokenizer = stage.tokenizer
    model.config = with_padding(model.config, tokenizer.hf.pad_token_id, tokenizer.stop_ids)
    return model
