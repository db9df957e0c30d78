"""Reinforcement learning: sampling, rewards, rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeGuard, TypeVar

from pydantic import Field, model_validator

from posttrain.config.base import Flag, Fraction, ListOf, NonNegativeInt, PositiveInt, RolloutQuantize, Section, Text
from posttrain.config.teacher import TeacherSection, check_teachers
from posttrain.config.train import MAX_NEW_TOKENS, OptimizerSection, TrainSection

S = TypeVar("S", bound=Section)


class SamplingSection(Section):
    max_tokens: PositiveInt = MAX_NEW_TOKENS
    """Longest completion, the end-of-sequence token included; by default half of what a row has for a prompt and its
    completion where that is less, in `eval_sampling` as in `sampling`."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_k: NonNegativeInt = 0
    """0: off."""
    top_p: Fraction = 1.0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Above 1: tokens of prompt and sample are less likely, arXiv:1909.05858; the trainer scores without it."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens in the sample."""
    frequency_penalty: float = 0.0
    """Taken off the logits of tokens in the sample, as often as they are in it."""
    logit_bias: dict[int, Annotated[float, Field(allow_inf_nan=True)]] = {}
    """Token id -> number added to its logit; `-.inf` forbids the token."""
    allowed_token_ids: ListOf[int] | None = None
    """The only tokens that may be drawn."""
    stop: ListOf[Text] = ()
    """Strings that end a sample; the text ends before them."""
    stop_token_ids: ListOf[int] = ()
    """Tokens that end a sample, beside the tokenizer's."""
    ignore_eos: Flag = False
    """Go on after the tokenizer's end-of-sequence tokens."""

    @property
    def changes_distribution(self) -> bool:
        """Tokens are not drawn from the model's whole distribution at `temperature`, but from a truncated one, or from
        logits with penalties or bias."""
        names = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        plain = SamplingSection.model_construct(max_tokens=self.max_tokens)
        changed = any(getattr(self, name) != getattr(plain, name) for name in names)
        return changed or bool(self.logit_bias) or self.allowed_token_ids is not None


class RewardSection(Section):
    fn: Any = None
    """`rewards/gsm8k.py:correct`, `package.module:function`, or in Python the function itself."""
    model: Text | None = None
    """In place of `fn`: folder or hub id of a sequence classifier of one label, as `reward_model` stages leave."""
    reduce: Literal["last", "min", "mean"] = "last"
    """Of `model`: the score of the last token; of a process reward model the least or mean one of its steps (lines)."""
    weight: float = 1.0
    args: dict[str, Any] = {}
    """More keyword arguments for the function."""
    name: Text | None = None
    """In metrics and messages; by default the function's own. The same function twice needs two names."""
    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds that a step waits for the function. A call on all samples that fails or takes over half of it is made
    anew for each sample alone, so that only samples at fault have no value; what still runs at the end is killed."""
    on_error: Literal["drop"] | float = "drop"
    """Value of a sample on which the function raises, ends its process, takes too long or returns no finite number.
    `drop`: the sample has no reward and is left out of its group. A number, such as 0, also punishes a policy that
    provokes errors."""
    isolate: Literal["auto", "process", "thread"] = "auto"
    """`process`: the function runs in a child process, without access to the devices and with its own module state,
    which a hang or a crash cannot harm; it must be named as `file.py:function` or `module:function`. `thread`: in this
    process, where nothing can be killed. `auto`: a process where the function is named, else a thread."""

    @model_validator(mode="after")
    def _one(self) -> RewardSection:
        if (self.fn is None) == (self.model is None):
            raise ValueError("a reward is a function (fn) or a reward model (model); give one of them")
        if self.model is None and self.reduce != "last":
            raise ValueError(f"reduce={self.reduce} has no effect on a function; it is of a reward model (model)")
        if self.model is not None and self.args:
            raise ValueError("args are of a function; a reward model (model) takes none")
        if self.model is not None and (self.timeout_s != 60.0 or self.isolate != "auto"):
            raise ValueError("timeout_s and isolate are of a function; a reward model (model) runs on the devices")
        if self.isolate == "process" and not isinstance(self.fn, str):
            raise ValueError("isolate: process needs a function that a child can import; name it as file.py:function")
        return self


class RolloutSection(Section):
    slots: PositiveInt | None = None
    """Sequences decoded at once; by default all samples of a step."""
    decode_steps: PositiveInt = 32
    """Tokens decoded per dispatch at most."""
    record_routing: Flag = False
    """Keep which experts of a mixture the sampler used, and use the same ones in training, arXiv:2510.11370."""
    quantize: RolloutQuantize = "none"
    """Sample, in evaluations too, from a copy of the weights in 8 bits, adapters merged, made anew after every update.
    How far it is from the trainer: `sampling/logp_difference/mean`. The copy (`rollout/copy_mib`) comes beside the
    trainer's weights, from which `none` samples without one; it is smaller than that of `merge_lora`, and saves time
    only where reading the weights bounds it: products are in `compute_dtype`, of matrices made whole layer by layer,
    fp8 alike, which most platforms emulate (the run says so)."""
    merge_lora: Flag = False
    """Sample from a copy with the adapter merged, made anew after every update: faster tokens for more memory."""
    cache_tokens: PositiveInt | None = None
    """Keys and values that the sampler holds; by default those of `slots` sequences of `row_tokens`. With fewer it
    interrupts the youngest samples and reads them again later; with more it keeps more shared prefixes."""
    warm_up: Flag = True
    """Compile all programs that the sampler can need for the dataset's prompts before the first step; without, each
    when it is first needed."""
    engine: Text | None = None
    """`module:Engine` or `file.py:Engine` of another engine, made with (model, tokenizer, this section); it has the
    methods of `posttrain.rollout.types.RolloutEngine`. The fields above are the built-in engine's."""

    @model_validator(mode="after")
    def _of_the_engine(self) -> RolloutSection:
        plain = RolloutSection.model_construct()
        others = [name for name in RolloutSection.model_fields if getattr(self, name) != getattr(plain, name)]
        if self.engine is not None and (others := [name for name in others if name != "engine"]):
            raise ValueError(f"{', '.join(others)}: of the built-in engine, not of {self.engine}; remove it")
        return self


def check_sampling(sampling: SamplingSection, row_tokens: int) -> None:
    """ValueError where samples to train on would be equal, or too long for a row."""
    if sampling.temperature == 0:
        raise ValueError("sampling.temperature=0 gives equal samples, from which nothing can be learned; use 1.0")
    if sampling.max_tokens >= row_tokens:
        raise ValueError(
            f"sampling.max_tokens={sampling.max_tokens} must be less than row_tokens={row_tokens}, "
            "which holds prompt and completion"
        )


def answer_tokens(row_tokens: int, prompts_in_row: int) -> int:
    """Default length of completions: half of what a row has for a prompt and its completion, 512 at most."""
    return max(1, min(MAX_NEW_TOKENS, row_tokens // (2 * prompts_in_row)))


def with_lengths(data: Any, build: Callable[[Any], S], *, default_row: int, prompts_in_row: int, fills_row: bool) -> S:
    """Stage with the default of `row_tokens` or `sampling.max_tokens` that fits what is given of the other.

    A default is no member of `model_fields_set`: `fit_lengths` lowers it where the model's context is shorter.
    """
    sampling = data.get("sampling", {} if fills_row else None) if isinstance(data, Mapping) else None
    if not isinstance(sampling, Mapping):
        return build(data)
    filled, answer = {**data, "sampling": dict(sampling)}, sampling.get("max_tokens")
    row_is_default = fills_row and "row_tokens" not in data
    if row_is_default and _is_length(answer):
        filled["row_tokens"] = prompts_in_row * (MAX_NEW_TOKENS + answer)
    if "max_tokens" not in sampling:
        row = data.get("row_tokens", default_row)
        filled["sampling"]["max_tokens"] = answer_tokens(row if _is_length(row) else default_row, prompts_in_row)
    other = data.get("eval_sampling")
    evaluates = isinstance(other, Mapping) and "max_tokens" not in other
    if evaluates:
        filled["eval_sampling"] = {**other, "max_tokens": filled["sampling"]["max_tokens"]}
    made = build(filled)
    if "sampling" not in data:
        made.model_fields_set.discard("sampling")
    if row_is_default:
        made.model_fields_set.discard("row_tokens")
    for name, is_default in (("sampling", "max_tokens" not in sampling), ("eval_sampling", evaluates)):
        if is_default:
            getattr(made, name).model_fields_set.discard("max_tokens")
    return made


def _is_length(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


class OnlineOptimizer(OptimizerSection):
    """AdamW of stages that learn from their own samples."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-6


class OnlineSection(TrainSection):
    """Fields of the stages that sample answers to prompts and score them."""

    prompts_in_row: ClassVar[int] = 1
    """Prompts, each with its completion, that a row must hold."""

    num_steps: PositiveInt = 100
    """Optimiser steps of the stage. A later call may raise it: the stage goes on from its last checkpoint."""
    row_tokens: PositiveInt = 2 * MAX_NEW_TOKENS
    """Length of a row, which holds a prompt and its completion: by default 512 and `sampling.max_tokens`, or the
    model's context where that is shorter."""
    optimizer: OnlineOptimizer = OnlineOptimizer()
    """AdamW."""
    rewards: ListOf[RewardSection] = ()
    """Functions that score a completion; their weighted sum is the reward."""
    prompts_per_step: PositiveInt = 8
    """Different prompts in one optimiser step."""
    group_size: PositiveInt = 8
    """Samples of one prompt, which are compared with each other; RL without rewards is content with one."""
    max_prompt_tokens: PositiveInt | None = None
    """Maximum prompt length in tokens; by default what `sampling.max_tokens` leaves of a row, in online preference of
    half a row."""
    overlong: Literal["drop", "error"] = "error"
    """Prompts longer than `max_prompt_tokens`: leave their rows out, or refuse the dataset and name the rows."""
    sampling: SamplingSection = SamplingSection()
    """How completions are drawn."""
    eval_sampling: SamplingSection | None = None
    """By default greedy, with the other settings of `sampling`; with teachers by default `sampling` itself."""
    rollout: RolloutSection = RolloutSection()
    samples_every: PositiveInt = 10
    """Steps between tables of sample completions."""

    @property
    def sequence_tokens(self) -> int:
        """What a prompt and its completion may have together."""
        return self.row_tokens

    @property
    def step_rows(self) -> int:
        """Rows that hold what one step learns from, in the worst case."""
        return self.prompts_per_step * self.group_size

    @property
    def samples_in_flight(self) -> int:
        """Samples that a step draws from at once."""
        return self.step_rows

    @property
    def max_sampled_tokens(self) -> int:
        """Most sampled tokens of a trajectory, which has one turn; the constant length of Dr. GRPO."""
        return self.sampling.max_tokens

    @model_validator(mode="wrap")
    @classmethod
    def _default_lengths(cls, data: Any, build: Any) -> Any:
        row = cls.model_fields["row_tokens"].default
        return with_lengths(data, build, default_row=row, prompts_in_row=cls.prompts_in_row, fills_row=True)

    @model_validator(mode="after")
    def _weighs_a_reward(self) -> OnlineSection:
        if self.rewards and not any(reward.weight for reward in self.rewards):
            raise ValueError("rewards: every weight is 0, so that there is nothing to learn; give one of them another")
        return self


OldLogps = Literal["self", "trainer", "sampler"]
ZeroAdvantage = Literal["skip", "update"]
RatioLevel = Literal["token", "sequence_mean", "sequence_sum"]


class ImportanceSection(Section):
    """Importance weights pi_old / pi_behaviour of the surrogate, where the policy that drew the tokens is another."""

    apply: Literal["auto", "always", "never"] = "auto"
    """`auto`: where the sampler's distribution is not the trainer's: with top-k, top-p, min-p, penalties, logit bias,
    allowed tokens, `rollout.quantize` or `oversample_prompts`."""
    level: RatioLevel = "token"
    """One weight for each token, or for the sequence: exp of the mean or of the sum of its log-ratios."""
    bound: Literal["truncate", "mask"] = "truncate"
    """Weights beyond `low` and `high` become the bound (TIS), or 0, which leaves the token out (MIS)."""
    low: Annotated[float, Field(ge=0, lt=1)] | None = None
    high: Annotated[float, Field(gt=1)] | None = 2.0


class RLSection(OnlineSection):
    kind: Literal["rl"] = "rl"
    algorithm: str = "grpo"
    """`grpo`, `dr_grpo`, `dapo`, `gspo`, `rloo`, or `distill`, which needs no rewards where there are teachers."""
    advantage: str | None = None
    """`module:function` of rewards_PG in place of the algorithm's own."""
    teachers: ListOf[TeacherSection] = ()
    """On-policy distillation: models with the student's tokens that score each sampled token; several need
    `teacher_column`."""
    teacher_column: Text | None = None
    """Column that names a row's teacher, or maps names to weights."""
    teacher_coef: Annotated[float, Field(gt=0)] = 1.0
    """Weight of log(teacher / student) of each sampled token, which is added to the advantage of the rewards."""
    kl_coef: Annotated[float, Field(ge=0)] | None = None
    """Weight of the KL from the reference. This and the next eight override the algorithm's own values."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """Estimator of that KL, see `posttrain.losses.kl`: k1, whose expected gradient is 0, needs the correction."""
    kl_bias_correction: Flag | None = None
    """Multiply the KL by the ratio pi / pi_old, so that its gradient is that of KL(policy || reference); with
    `ratio: sequence_mean` only nearly. arXiv:2512.02556."""
    clip_low: Annotated[float, Field(gt=0)] | None = None
    clip_high: Annotated[float, Field(gt=0)] | None = None
    """The ratio pi / pi_old is clipped to 1 - clip_low .. 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Upper bound of the ratio where the advantage is negative, arXiv:1912.09729; at least 1 + clip_high."""
    entropy_coef: Annotated[float, Field(ge=0)] | None = None
    """Weight of the entropy bonus."""
    ratio: RatioLevel | None = None
    """One ratio for each token, or for the sequence: exp of the mean (GSPO) or of the sum (RLOO) of its log-ratios."""
    reduce: Literal["sequence_mean", "token_mean", "constant_length"] | None = None
    """Loss of a step: mean over sequences of their token means (GRPO), mean over all tokens (DAPO), or sum over tokens
    by the number of sequences and a constant, `sampling.max_tokens` (Dr. GRPO)."""
    old_logps: OldLogps = "self"
    """Source of the proximal log-probabilities of pi_old. `self`: the trainer's own of the same forward pass, so that
    the ratio of the first update is exactly 1; `trainer`: a forward pass before the update; `sampler`: the engine's,
    from which the trainer differs by rounding, enough to clip GSPO and RLOO in bfloat16."""
    importance_sampling: ImportanceSection = ImportanceSection()
    """Importance weights for samples of another policy than the trainer's."""
    zero_advantage: ZeroAdvantage = "skip"
    """A step whose advantages are all 0, as no group has different rewards, is counted without an update: KL, entropy
    bonus, momentum and weight decay would act alone, which `update` lets them do."""
    oversample_prompts: NonNegativeInt = 0
    """Prompts begun beyond `prompts_per_step`: a step learns from as many groups as that, the first that are whole, and
    leaves the others, which go on at the next step under its weights. Partial rollouts, arXiv:2501.12599."""
    max_staleness: PositiveInt = 4
    """With `oversample_prompts`: most steps from the begin of a group to the step that learns from it; a step waits for
    the groups that must not wait longer."""

    @property
    def samples_off_policy(self) -> bool:
        """Tokens are drawn from another distribution than the trainer's: importance weights have an effect."""
        return self.sampling.changes_distribution or self.rollout.quantize != "none" or self.oversample_prompts > 0

    @property
    def samples_in_flight(self) -> int:
        return (self.prompts_per_step + self.oversample_prompts) * self.group_size

    @model_validator(mode="after")
    def _learns_from(self) -> RLSection:
        check_teachers(self.teachers, self.teacher_column, self.sampling.temperature, samples=True)
        if not self.rewards and not self.teachers:
            raise ValueError("give rewards, or teachers for on-policy distillation")
        if not self.rewards and self.algorithm != "distill":
            raise ValueError(f"algorithm={self.algorithm} needs rewards; without them use algorithm: distill")
        if self.algorithm == "distill" and not self.teachers:
            raise ValueError("algorithm=distill needs teachers")
        if self.rewards and self.group_size < 2:
            raise ValueError(f"group_size={self.group_size}: rewards are compared within a group; use 2 or more")
        if not self.teachers and (self.teacher_column is not None or self.teacher_coef != 1.0):
            raise ValueError("teacher_column and teacher_coef need teachers")
        other = self.eval_sampling
        if self.teachers and other is not None and other.temperature != self.sampling.temperature:
            raise ValueError(
                f"eval_sampling.temperature={other.temperature} must be that of sampling, {self.sampling.temperature}: "
                "how far the student is from its teachers is measured on what it samples in training"
            )
        return self

    @property
    def weighs_samples(self) -> bool:
        """Importance weights are applied."""
        apply = self.importance_sampling.apply
        return apply == "always" or (apply == "auto" and self.samples_off_policy)

    @model_validator(mode="after")
    def _weighs(self) -> RLSection:
        # Values, not what was written: a dumped configuration writes every field.
        given, plain = self.importance_sampling, ImportanceSection()
        fields = [name for name in ImportanceSection.model_fields if name != "apply"]
        others = [name for name in fields if getattr(given, name) != getattr(plain, name)]
        if others and not self.weighs_samples:
            raise ValueError(
                f"importance_sampling.{', '.join(sorted(others))} without effect: apply={given.apply} and samples of "
                f"{'another' if self.samples_off_policy else 'the same'} policy have no importance weights; remove it, "
                "or use apply: always"
            )
        return self

    @model_validator(mode="after")
    def _fits(self) -> RLSection:
        check_sampling(self.sampling, self.row_tokens)
        if self.oversample_prompts and self.rollout.record_routing:
            raise ValueError(
                f"oversample_prompts={self.oversample_prompts} and rollout.record_routing: samples resumed in a later "
                "step would mix the experts of two versions of the weights; use one of the two"
            )
        if self.oversample_prompts > self.max_staleness * self.prompts_per_step:
            raise ValueError(
                f"oversample_prompts={self.oversample_prompts} with prompts_per_step={self.prompts_per_step} makes "
                f"groups wait longer than max_staleness={self.max_staleness} steps; raise it to "
                f"{-(-self.oversample_prompts // self.prompts_per_step)} or lower oversample_prompts"
            )
        if not self.oversample_prompts and self.max_staleness != RLSection.model_fields["max_staleness"].default:
            raise ValueError(f"max_staleness={self.max_staleness} has no effect without oversample_prompts")
        if (
            self.teachers
            and self.old_logps != "trainer"
            and (self.rollout.quantize != "none" or self.oversample_prompts)
        ):
            raise ValueError(
                f"teachers with rollout.quantize={self.rollout.quantize} and oversample_prompts="
                f"{self.oversample_prompts} need old_logps: trainer: the advantage is log(teacher / student), "
                "and the sampler's log-probabilities are not the student's"
            )
        return self
