"""Reward models: a scalar head over the decoder, trained on pairs of answers or on judged steps."""

from __future__ import annotations

from posttrain.batch import Batch
from posttrain.data.pairs import ComparisonBatches
from posttrain.data.prefetch import Prefetch
from posttrain.evaluation.pairs import PairEvaluation, metrics_of, with_margins
from posttrain.models.decoder import Decoder
from posttrain.stages.context import HeldOut, StageRun
from posttrain.stages.pairs import PairInputs
from posttrain.stages.preference import make_pair_trainer
from posttrain.weights.scalar_head import add_scalar_head, with_padding


def run(stage: StageRun, inputs: PairInputs) -> None:
    """Train one reward model to the end of its stage, from its newest checkpoint if there is one."""
    section = inputs.section
    trainer = make_pair_trainer(stage, inputs, load_reward_model(stage))
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
    """The stage's model at its start, its head replaced by a scalar one if it has none yet."""
    model = stage.load_model()
    add_scalar_head(model, seed=stage.seed, mesh=stage.mesh)
    tokenizer = stage.tokenizer
    model.config = with_padding(model.config, tokenizer.hf.pad_token_id, tokenizer.stop_ids)
    return model
