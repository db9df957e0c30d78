"""Stages that learn from judged answers: preferences and reward models."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from posttrain.config.base import Flag, PositiveInt
from posttrain.config.train import OfflineSection, OptimizerSection, Schedule


class PreferenceOptimizer(OptimizerSection):
    """AdamW of preference optimisation."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    schedule: Schedule = "linear"


class RewardModelOptimizer(OptimizerSection):
    """AdamW of reward models."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    schedule: Schedule = "linear"


class PairSection(OfflineSection):
    """Fields of the stages that learn from judged answers."""

    row_tokens: PositiveInt = 2048
    """Length of a row, which holds both answers of a pair with their prompts. By default the model's context where that
    is shorter."""
    share_prompts: Flag | Literal["auto"] = "auto"
    """What both prompts of a pair, or of KTO's two answers, begin with is computed once. `auto`: where the attention
    kernel knows such rows (on TPU splash does not), the loss has no weight on prompts, and the model is no mixture of
    experts, whose balance would count the tokens of prompts once."""
    overlong: Literal["truncate", "drop", "error"] = "error"
    """What becomes of a pair that no row holds."""

    @property
    def step_rows(self) -> int:
        return self.batch_rows


class PreferenceSection(PairSection):
    kind: Literal["preference"] = "preference"
    optimizer: PreferenceOptimizer = PreferenceOptimizer()
    """AdamW."""
    loss: str | dict[str, Any] = "sigmoid"
    """A kind of DPO (`sigmoid`, `ipo`, ...), `kto`, `apo_zero_unpaired`, `orpo`, `cpo`, `cpo_hinge`, `cpo_ipo`,
    `simpo`, or `module:Class`; with settings `{kind: sigmoid, beta: 0.1}`, of several kinds of DPO also
    `{kind: [sigmoid, sft], weights: [1, 0.1]}`."""
    reference: Literal["cached", "live"] | None = None
    """The model at the start of the stage: scores what the run will see once, kept on disk (`cached`, the default of
    losses that need one), or the rows of each step anew."""


class RewardModelSection(PairSection):
    kind: Literal["reward_model"] = "reward_model"
    optimizer: RewardModelOptimizer = RewardModelOptimizer()
    """AdamW."""
    loss: str | dict[str, Any] = "bradley_terry"
    """`bradley_terry` on pairs, `process` on the steps of completions, or `module:Class`; with settings
    `{kind: bradley_terry, center_coef: 0.01}`."""
