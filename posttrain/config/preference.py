"""Preference, reward model and online preference stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from posttrain.config.base import Flag, PositiveInt
from posttrain.config.locator import NamedOrSet
from posttrain.config.optimizer import ANY_KIND, AdamW, OtherOptimizer, Schedule
from posttrain.config.rl import OnlineSection
from posttrain.config.rollout import check_drafter_stays, check_sampling
from posttrain.config.train import MAX_NEW_TOKENS, OfflineSection


class PreferenceOptimizer(AdamW):
    """AdamW settings of preference optimisation."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    schedule: Schedule = "linear"


class RewardModelOptimizer(AdamW):
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
    optimizer: Annotated[PreferenceOptimizer | OtherOptimizer, Field(discriminator="kind"), ANY_KIND] = (
        PreferenceOptimizer()
    )
    """Optimiser: `adamw`, `lion`, `adafactor`, `muon`, or an optax transformation (`fn`)."""
    loss: NamedOrSet = "sigmoid"
    """Loss type: `dpo` (also called `sigmoid`) or a variant (`ipo`, ...), `kto`, `apo_zero_unpaired`, `orpo`, `cpo`,
    `cpo_hinge`, `cpo_ipo`, `simpo`; with settings `{kind: sigmoid, beta: 0.1}`. DPO variants can be combined: `{kind:
    [sigmoid, sft], weights: [1, 0.1]}`. Or your own: `file.py:name`, `{fn: file.py:name, ...}`, or in Python the
    object."""
    reference: Literal["cached", "live"] | None = None
    """Reference log-probabilities of the model at the start of the stage: computed once and kept on disk (`cached`, the
    default of losses with a reference), or computed in each step (`live`)."""


class RewardModelSection(PairSection):
    """Reward model: a sequence classifier trained on pairs, or on labelled steps (process rewards)."""

    kind: Literal["reward_model"] = "reward_model"
    optimizer: Annotated[RewardModelOptimizer | OtherOptimizer, Field(discriminator="kind"), ANY_KIND] = (
        RewardModelOptimizer()
    )
    """Optimiser: `adamw`, `lion`, `adafactor`, `muon`, or an optax transformation (`fn`)."""
    loss: NamedOrSet = "bradley_terry"
    """Loss type: `bradley_terry` on pairs, `process` on labelled steps; with settings `{kind: bradley_terry,
    center_coef: 0.01}`. Or your own: `file.py:name`, `{fn: file.py:name, ...}`, or in Python the object."""


class OnlinePreferenceSection(OnlineSection):
    """Online DPO, arXiv:2402.04792: per prompt, the sample with the highest reward is chosen, the lowest rejected. The
    reference is the model at the start of the stage. A row of `row_tokens` holds both completions, each with its
    prompt."""

    prompts_in_row: ClassVar[int] = 2

    kind: Literal["online_preference"] = "online_preference"
    row_tokens: PositiveInt = 4 * MAX_NEW_TOKENS
    """Row length in tokens, for both completions of a prompt, each with the prompt: by default twice 512 plus
    `sampling.max_tokens`, or the model's context if that is shorter."""
    group_size: PositiveInt = 4
    """Samples per prompt; the best and the worst form a pair."""
    loss: NamedOrSet = "sigmoid"
    """DPO loss type (`dpo`, also called `sigmoid`, `ipo`, ...); with settings: `{kind: sigmoid, beta: 0.1}`. Or your
    own on pairs with a reference: `file.py:name`, `{fn: file.py:name, ...}`, or in Python the object."""
    share_prompts: Flag | Literal["auto"] = "auto"
    """Compute the common prompt of a pair once; `auto` as in `kind: preference`."""

    @property
    def sequence_tokens(self) -> int:
        return self.row_tokens // 2

    @property
    def step_rows(self) -> int:
        """Rows per step: one for the pair of each prompt."""
        return self.prompts_per_step

    def _mistakes(self) -> Iterator[str]:
        if not self.rewards:
            yield "set rewards, which rank the samples of a prompt"
        if self.group_size < 2:
            yield f"group_size={self.group_size}: a pair needs two samples of one prompt; use 2 or more"
        if 2 * self.sampling.max_tokens >= self.row_tokens:
            yield (
                f"sampling.max_tokens={self.sampling.max_tokens} must be less than half of row_tokens="
                f"{self.row_tokens}: a row holds two completions, each behind its prompt"
            )
        check_sampling(self.sampling, self.row_tokens, self.rollout, self.held_out_sampling)
        check_drafter_stays(self.rollout)
