"""Stages that learn from judged answers: preferences and reward models."""

from __future__ import annotations

from typing import Any, Literal

from posttrain.config.base import Flag, PositiveInt
from posttrain.config.train import TrainSection


class ComparedSection(TrainSection):
    """Fields of the stages that learn from judged answers."""

    batch_rows: PositiveInt
    """Rows of `row_tokens` in one optimiser step; a row holds both answers of a pair with their prompts."""
    packing: Flag = True
    """Several pairs per row."""
    share_prompts: Flag | Literal["auto"] = "auto"
    """What both prompts of a pair, or of KTO's two answers, begin with is computed once. `auto`: where the attention
    kernel knows such rows (on TPU splash does not), the loss has no weight on prompts, and the model is no mixture of
    experts, whose balance would count the tokens of prompts once."""
    overlong: Literal["truncate", "drop", "error"] = "error"
    """What becomes of a pair that no row holds."""

    @property
    def step_rows(self) -> int:
        return self.batch_rows


class PreferenceSection(ComparedSection):
    kind: Literal["preference"] = "preference"
    loss: str | dict[str, Any] = "sigmoid"
    """A kind of DPO (`sigmoid`, `ipo`, ...), `kto`, `apo_zero_unpaired`, `orpo`, `cpo`, `cpo_hinge`, `cpo_ipo`,
    `simpo`, or `module:Class`; with settings `{kind: sigmoid, beta: 0.1}`, of several kinds of DPO also
    `{kind: [sigmoid, sft], weights: [1, 0.1]}`."""
    reference: Literal["cached", "live"] | None = None
    """The model at the start of the stage: scores what the run will see once, kept on disk (`cached`, the default of
    losses that need one), or the rows of each step anew."""


class RewardModelSection(ComparedSection):
    kind: Literal["reward_model"] = "reward_model"
    loss: str | dict[str, Any] = "bradley_terry"
    """`bradley_terry` on pairs, `process` on the steps of completions, or `module:Class`; with settings
    `{kind: bradley_terry, center_coef: 0.01}`."""
