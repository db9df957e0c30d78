"""Reinforcement learning: sampling, rewards, rollouts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from posttrain.config.base import Flag, Fraction, ListOf, NonNegativeInt, PositiveInt, RolloutQuantize, Section, Text
from posttrain.config.train import TrainSection


class SamplingSection(Section):
    max_tokens: PositiveInt
    """Longest completion, the end-of-sequence token included."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_k: NonNegativeInt = 0
    """0: off."""
    top_p: Fraction = 1.0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Above 1: tokens of prompt and sample are less likely, arXiv:1909.05858; the trainer scores without it."""
    stop: ListOf[Text] = ()
    """Strings that end a sample; the text ends before them."""


class RewardSection(Section):
    fn: Any
    """`rewards/gsm8k.py:correct`, `package.module:function`, or in Python the function itself."""
    weight: float = 1.0
    args: dict[str, Any] = {}
    """More keyword arguments for the function."""
    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds for one call; after that samples are scored one by one, and who takes as long again has no reward."""


class RolloutSection(Section):
    slots: PositiveInt | None = None
    """Sequences decoded at once; by default all samples of a step."""
    decode_steps: PositiveInt = 32
    """Tokens decoded per dispatch at most."""
    record_routing: Flag = False
    """Keep which experts of a mixture the sampler used, and use the same ones in training, arXiv:2510.11370."""
    quantize: RolloutQuantize = "none"
    """Sample, in evaluations too, from a copy of the weights in 8 bits, adapters merged, made anew after every update.
    How far it is from the trainer: `sampling/logp_difference/mean`. It saves memory, and time only where reading the
    weights bounds it: products are in `compute_dtype`, of matrices made whole again layer by layer, fp8 alike."""
    merge_lora: Flag = False
    """Sample from a copy with the adapter merged, made anew after every update: faster tokens for more memory."""
    cache_tokens: PositiveInt | None = None
    """Keys and values that the sampler holds; by default those of `slots` sequences of `row_tokens`. With fewer it
    interrupts the youngest samples and reads them again later; with more it keeps more shared prefixes."""
    warm_up: Flag = False
    """Compile all programs of the sampler before the first step; by default each when it is first needed."""


class RLSection(TrainSection):
    kind: Literal["rl"] = "rl"
    algorithm: str = "grpo"
    """`grpo`, `dr_grpo`, `dapo`, `gspo`, `rloo`."""
    advantage: str | None = None
    """`module:function` of rewards_PG in place of the algorithm's own."""
    rewards: Annotated[ListOf[RewardSection], Field(min_length=1)]
    """Functions that score a completion; their weighted sum is the reward."""
    prompts_per_step: PositiveInt
    """Different prompts in one optimiser step."""
    group_size: Annotated[int, Field(ge=2)]
    """Samples of one prompt, which the advantage compares."""
    max_prompt_tokens: PositiveInt | None = None
    """Longer prompts are an error that names the row; by default `row_tokens - sampling.max_tokens`."""
    sampling: SamplingSection
    """How completions are drawn; `max_tokens` at least."""
    eval_sampling: SamplingSection | None = None
    """By default greedy, with the other settings of `sampling`."""
    rollout: RolloutSection = RolloutSection()
    kl_coef: Annotated[float, Field(ge=0)] | None = None
    clip_low: Annotated[float, Field(gt=0)] | None = None
    clip_high: Annotated[float, Field(gt=0)] | None = None
    """Each overrides the algorithm's own value."""
    recompute_old_logps: Flag = False
    """Score the samples with the trainer before the update instead of trusting the sampler's log-probabilities."""
    samples_every: PositiveInt = 10
    """Steps between tables of sample completions."""

    @model_validator(mode="after")
    def _fits(self) -> RLSection:
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature=0 gives equal samples, from which nothing can be learned; use 1.0")
        if self.rollout.quantize != "none" and not self.recompute_old_logps:
            raise ValueError(
                f"rollout.quantize={self.rollout.quantize} needs recompute_old_logps: true: the log-probabilities of "
                "a quantized sampler are not the trainer's, and the first update's ratio would not be 1"
            )
        if not any(reward.weight for reward in self.rewards):
            raise ValueError("rewards: every weight is 0, so that there is nothing to learn; give one of them another")
        cache_tokens = self.rollout.cache_tokens
        if cache_tokens is not None and cache_tokens < self.row_tokens:
            raise ValueError(f"rollout.cache_tokens={cache_tokens} must be at least row_tokens={self.row_tokens}")
        if self.sampling.max_tokens >= self.row_tokens:
            raise ValueError(
                f"sampling.max_tokens={self.sampling.max_tokens} must be less than row_tokens={self.row_tokens}, "
                "which holds prompt and completion"
            )
        return self
