"""Stages that learn from judged answers: preferences and reward models."""

from __future__ import annotations

from typing import Any, Literal

from posttrain.config.base import Flag, PositiveInt
from posttrain.config.train import TrainSection


class ComparedSection(TrainSection):
    """Fields of the stages that learn from judged answers."""

    batch_rows: PositiveInt
    """Rows of `row_tokens` in one optimiser step; a row holds both answers of a pair, each behind its prompt."""
    packing: Flag = True
    """Several pairs per row."""
    overlong: Literal["truncate", "drop", "error"] = "error"
    """What becomes of a pair that no row holds."""


class PreferenceSection(ComparedSection):
    kind: Literal["preference"] = "preference"
    loss: str | dict[str, Any] = "sigmoid"
    """A kind of DPO (`sigmoid`, `ipo`, ...), `kto`, `apo_zero_unpaired`, `orpo`, `cpo`, `cpo_hinge`, `cpo_ipo`,
    `simpo`, or `module:Class`; with settings `{kind: sigmoid, beta: 0.1}`, of several kinds of DPO also
    `{kind: [sigmoid, sft], weights: [1, 0.1]}`."""
    reference: Literal["cached", "live"] = "cached"
    """The model at the start of the stage: scores every row once, kept on disk, or the rows of each step anew."""


class RewardModelSection(ComparedSection):
    kind: Literal["reward_model"] = "reward_model"
    loss: str | dict[str, Any] = "bradley_terry"
    """`bradley_terry` on pairs, `process` on the steps of completions, or `module:Class`; with settings
    `{kind: bradley_terry, center_coef: 0.01}`."""
