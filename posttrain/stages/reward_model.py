"""Reward model stage: a scalar head on the decoder, trained on preference pairs or on labelled steps."""

from __future__ import annotations

from posttrain.models.decoder import Decoder
from posttrain.stages.context import StageRun
from posttrain.stages.pair_inputs import PairInputs
from posttrain.stages.preference import plain_data, train_pairs
from posttrain.weights.scalar_head import add_scalar_head, with_padding


def run(stage: StageRun, inputs: PairInputs) -> None:
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
