"""Preference and reward model stages."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from posttrain.config.base import Flag, PositiveInt
from posttrain.config.locator import LossSpec
from posttrain.config.train import OfflineSection, OptimizerSection, Schedule


class PreferenceOptimizer(OptimizerSection):
    """AdamW settings of preference optimisation."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    schedule: Schedule = "linear"


class RewardModelOptimizer(OptimizerSection):
    """AdamW settings of reward models."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    schedule: Schedule = "linear"


class PairSection(OfflineSection):
    """Fields of preference and reward model stages."""

    row_tokens: PositiveInt = 2048
    """Row length in tokens, for both answers of a pair with their prompts; by default at most the model's context."""
    share_prompts: Flag | Literal["auto"] = "auto"
    """Compute the common prefix of a pair (or of KTO's two answers) once. `auto`: if the attention kernel supports it
    (on TPU splash does not), the loss has no weight on prompts, and the model is not an MoE model, whose load balancing
    would count prompt tokens once."""
    overlong: Literal["truncate", "drop", "error"] = "error"
    """Pairs longer than a row: truncate, drop, or raise an error."""

    @property
    def step_rows(self) -> int:
        return self.batch_rows


class PreferenceSection(PairSection):
    """Preference optimisation: DPO and its variants, KTO, ORPO, CPO, SimPO."""

    kind: Literal["preference"] = "preference"
    optimizer: PreferenceOptimizer = PreferenceOptimizer()
    """AdamW settings."""
    loss: LossSpec = "sigmoid"
    """Loss type: a DPO variant (`sigmoid`, `ipo`, ...), `kto`, `apo_zero_unpaired`, `orpo`, `cpo`, `cpo_hinge`,
    `cpo_ipo`, `simpo`, or `module:Class`; with settings `{kind: sigmoid, beta: 0.1}`. DPO variants can be combined:
    `{kind: [sigmoid, sft], weights: [1, 0.1]}`."""
    reference: Literal["cached", "live"] | None = None
    """Reference log-probabilities of the model at the start of the stage: computed once and kept on disk (`cached`, the
    default of losses with a reference), or computed in each step (`live`)."""


class RewardModelSection(PairSection):
    """Reward model: a sequence classifier trained on pairs, or on labelled steps (process rewards)."""

    kind: Literal["reward_model"] = "reward_model"
    optimizer: RewardModelOptimizer = RewardModelOptimizer()
    """AdamW settings."""
    loss: LossSpec = "bradley_terry"
    """Loss type: `bradley_terry` on pairs, `process` on labelled steps, or `module:Class`; with settings `{kind:
    bradley_terry, center_coef: 0.01}`."""
