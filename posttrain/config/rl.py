"""Reinforcement learning stages: sampling, rewards, rollout engine, algorithm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeGuard, TypeVar

from pydantic import AfterValidator, Field, model_validator

from posttrain.config.base import (
    Flag,
    Fraction,
    ListOf,
    NonNegativeInt,
    PositiveInt,
    RolloutQuantize,
    SamplerTensor,
    Section,
    Text,
)
from posttrain.config.evaluation import EvaluateSection, RecordSection, check_evaluation
from posttrain.config.locator import Locator, located
from posttrain.config.teacher import TeacherSection, check_teachers
from posttrain.config.train import MAX_NEW_TOKENS, DatasetSection, OptimizerSection, TrainSection

S = TypeVar("S", bound=Section)


class SamplingSection(Section):
    """Sampling of completions."""

    max_tokens: PositiveInt = MAX_NEW_TOKENS
    """Maximum number of tokens of a completion, including end-of-sequence; by default 512, or half of the row's space
    for a prompt and its completion if that is less. The same default in `eval_sampling`."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_k: NonNegativeInt = 0
    """Sample from the k most probable tokens. 0: off."""
    top_p: Fraction = 1.0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Repetition penalty, arXiv:1909.05858: above 1, tokens of prompt and sample become less likely. The trainer's
    log-probabilities exclude it."""
    presence_penalty: float = 0.0
    """Presence penalty, subtracted from the logits of tokens in the sample."""
    frequency_penalty: float = 0.0
    """Frequency penalty, subtracted from the logits of tokens once per occurrence in the sample."""
    logit_bias: dict[int, Annotated[float, Field(allow_inf_nan=True)]] = {}
    """Numbers added to logits, by token id; `-.inf` forbids the token."""
    allowed_token_ids: ListOf[int] | None = None
    """Token ids that may be sampled; by default all."""
    stop: ListOf[Text] = ()
    """Stop strings; they are not part of the text."""
    stop_token_ids: ListOf[int] = ()
    """Stop token ids in addition to the tokenizer's."""
    ignore_eos: Flag = False
    """Continue after the tokenizer's end-of-sequence tokens."""

    def at_most(self, max_tokens: int) -> SamplingSection:
        """Copy with this `max_tokens` if it has the default one."""
        given = "max_tokens" in self.model_fields_set
        return self if given else self.model_copy(update={"max_tokens": max_tokens})

    @property
    def changes_distribution(self) -> bool:
        """True if tokens are not sampled from the model's full distribution at `temperature`, but from a truncated one
        or from logits with penalties or bias."""
        names = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        plain = SamplingSection.model_construct(max_tokens=self.max_tokens)
        changed = any(getattr(self, name) != getattr(plain, name) for name in names)
        return changed or bool(self.logit_bias) or self.allowed_token_ids is not None


class RewardSection(Section):
    """Reward function or reward model of an online stage."""

    fn: Annotated[Any, AfterValidator(located)] = None
    """Reward function: `rewards/gsm8k.py:correct`, `package.module:function`, or in Python the function itself."""
    model: Locator | None = None
    """Reward model in place of `fn`: folder or hub id of a sequence classifier with one label, as saved by
    `reward_model` stages."""
    reduce: Literal["last", "min", "mean"] = "last"
    """Score of a sequence from `model`: the last token's, or of a process reward model the minimum or mean over its
    steps (lines)."""
    weight: float = 1.0
    args: dict[str, Any] = {}
    """Additional keyword arguments of the function."""
    name: Text | None = None
    """Name in metrics and messages; by default the function's name. Using a function twice requires two names."""
    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Timeout per step in seconds. If the call on all samples fails or takes more than half of it, samples are retried
    one by one, so that only failing samples have no reward; calls still running at the timeout are killed."""
    on_error: Literal["drop"] | float = "drop"
    """Value of a sample on which the function raises, crashes, times out or returns no finite number. `drop`: the
    sample has no reward and is excluded from its group. A number, such as 0, also penalises a policy that provokes
    errors."""
    isolate: Literal["auto", "process", "thread"] = "auto"
    """Isolation of the function. `process`: a child process without access to the devices and with its own module
    state, so that hangs and crashes do no harm; requires `file.py:function` or `module:function`. `thread`: a thread of
    this process, which cannot be killed. `auto`: a process for functions given by name, else a thread."""

    @model_validator(mode="after")
    def _one(self) -> RewardSection:
        if (self.fn is None) == (self.model is None):
            raise ValueError("a reward is a function (fn) or a reward model (model); set one of them")
        if self.model is None and self.reduce != "last":
            raise ValueError(f"reduce={self.reduce} has no effect on a function; it needs a reward model (model)")
        if self.model is not None and self.args:
            raise ValueError("args are for functions; a reward model (model) takes none")
        if self.model is not None and (self.timeout_s != 60.0 or self.isolate != "auto"):
            raise ValueError("timeout_s and isolate are for functions; a reward model (model) runs on the devices")
        if self.isolate == "process" and not isinstance(self.fn, str):
            raise ValueError("isolate: process needs a function that a child can import; name it as file.py:function")
        return self


class RolloutSection(Section):
    """Rollout engine."""

    slots: PositiveInt | None = None
    """Maximum number of sequences decoded concurrently; by default all samples of a step."""
    decode_steps: PositiveInt = 32
    """Maximum number of tokens decoded per dispatch."""
    record_routing: Flag = False
    """Record the sampler's MoE routing and replay it in training (R3), arXiv:2510.11370."""
    quantize: RolloutQuantize = "none"
    """Sample from a copy of the weights in 8 bits (adapters merged), remade after every update; also in evaluations.
    Its error: `sampling/logp_difference/mean`. The copy (`rollout/copy_mib`) needs memory in addition to the trainer's
    weights; with `none` there is no copy. It is smaller than that of `merge_lora`, and faster only if decoding is
    limited by memory bandwidth: matrices are dequantized layer by layer to `compute_dtype`, also from fp8, which most
    platforms emulate (the run reports it)."""
    merge_lora: Flag = False
    """Sample from a copy of the weights with the LoRA adapter merged, remade after every update: faster decoding for
    more memory."""
    tensor: SamplerTensor = "auto"
    """Number of devices that each weight is split over while samples run; the other devices hold copies and sample rows
    of their own. A trainer's `mesh.fsdp` would gather every weight at every token: where it is above 1 the weights are
    laid out anew once after each update, which takes memory until the samples are done. `auto`: the smallest number
    from `mesh.tensor` to `mesh.fsdp` x `mesh.tensor` with which the copy takes at most a quarter of a device's memory;
    `trained`, no copy, if none does and where `mesh.fsdp` is 1."""
    cache_tokens: PositiveInt | None = None
    """KV cache size in tokens; by default `slots` sequences of `row_tokens`. A smaller cache preempts the youngest
    samples and recomputes them later; a larger one keeps more shared prefixes."""
    warm_up: Flag = True
    """Compile all programs that the dataset's prompts can need before the first step; otherwise each when first used.
    """
    engine: Locator | None = None
    """Custom rollout engine: `module:Engine` or `file.py:Engine`, called with (model, tokenizer, this section), with
    the methods of `posttrain.rollout.types.RolloutEngine`. The fields above apply to the built-in engine only."""

    @model_validator(mode="after")
    def _of_the_engine(self) -> RolloutSection:
        plain = RolloutSection.model_construct()
        others = [name for name in RolloutSection.model_fields if getattr(self, name) != getattr(plain, name)]
        if self.engine is not None and (others := [name for name in others if name != "engine"]):
            raise ValueError(f"{', '.join(others)}: supported by the built-in engine, not by {self.engine}; remove it")
        return self


def check_sampling(sampling: SamplingSection, row_tokens: int) -> None:
    """Check the sampling of training samples. ValueError if they would be equal, or too long for a row."""
    if sampling.temperature == 0:
        raise ValueError("sampling.temperature=0 gives equal samples, without a training signal; use 1.0")
    if sampling.max_tokens >= row_tokens:
        raise ValueError(
            f"sampling.max_tokens={sampling.max_tokens} must be less than row_tokens={row_tokens}, "
            "which holds prompt and completion"
        )


def answer_tokens(row_tokens: int, prompts_in_row: int) -> int:
    """Default length of completions: half of a row's space for a prompt and its completion, at most 512."""
    return max(1, min(MAX_NEW_TOKENS, row_tokens // (2 * prompts_in_row)))


def with_lengths(data: Any, build: Callable[[Any], S], *, default_row: int, prompts_in_row: int, fills_row: bool) -> S:
    """Build a stage with the default of `row_tokens` or `sampling.max_tokens` that fits the value of the other.

    Defaults are not in `model_fields_set`: `fit_lengths` lowers them to the model's context.
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
    """AdamW settings of online stages."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-6


class OnlineSection(TrainSection):
    """Fields of online stages, which sample completions and score them."""

    prompts_in_row: ClassVar[int] = 1
    """Number of prompts, each with its completion, that fit in a row."""

    num_steps: PositiveInt = 100
    """Optimiser steps of the stage. When raised in a later call, the stage resumes from its last checkpoint."""
    row_tokens: PositiveInt = 2 * MAX_NEW_TOKENS
    """Row length in tokens, for a prompt and its completion: by default 512 plus `sampling.max_tokens`, or the model's
    context if that is shorter."""
    optimizer: OnlineOptimizer = OnlineOptimizer()
    """AdamW settings."""
    rewards: ListOf[RewardSection] = ()
    """Reward functions and reward models; their weighted sum is the reward."""
    prompts_per_step: PositiveInt = 8
    """Number of distinct prompts per optimiser step."""
    group_size: PositiveInt = 8
    """Samples per prompt (group size); 1 is allowed in RL without rewards."""
    max_prompt_tokens: PositiveInt | None = None
    """Maximum prompt length in tokens; by default the row without `sampling.max_tokens`, in online preference half a
    row."""
    overlong: Literal["drop", "error"] = "error"
    """Prompts longer than `max_prompt_tokens`: drop their rows, or raise an error that lists them."""
    sampling: SamplingSection = SamplingSection()
    """Sampling of completions in training."""
    eval_sampling: SamplingSection | None = None
    """Sampling in evaluations; by default greedy with the other settings of `sampling`, with teachers `sampling`
    itself."""
    evaluate: EvaluateSection | None = None
    """Evaluation with several samples per held-out prompt, on several datasets; needs `eval_dataset`."""
    rollout: RolloutSection = RolloutSection()
    samples_every: PositiveInt = 10
    """Steps between tables of sample completions."""
    record: RecordSection | None = RecordSection()
    """Record of all trajectories, in `trajectories/` of the stage's folder; `null`: none."""

    @property
    def all_datasets(self) -> tuple[DatasetSection, ...]:
        return super().all_datasets + (() if self.evaluate is None else self.evaluate.sets)

    @property
    def records_routing(self) -> bool:
        return self.rollout.record_routing

    def default_lengths(self, max_positions: int) -> dict[str, Any]:
        sampling = self.sampling.at_most(answer_tokens(max_positions, self.prompts_in_row))
        fields = super().default_lengths(max_positions) | {"sampling": sampling}
        if self.eval_sampling is not None:
            fields["eval_sampling"] = self.eval_sampling.at_most(sampling.max_tokens)
        return fields

    @property
    def step_rows(self) -> int:
        """Batch rows of a step in the worst case."""
        return self.prompts_per_step * self.group_size

    @property
    def pass_rows(self) -> int:
        return self.micro_batch_rows or -(-self.step_rows // 8)

    @property
    def held_out_sampling(self) -> SamplingSection:
        """Sampling of evaluations, with the default resolved."""
        greedy = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        return self.eval_sampling or self.sampling.model_copy(update=greedy)

    @property
    def samples_in_flight(self) -> int:
        """Number of samples that a step generates concurrently."""
        return self.step_rows

    @property
    def max_sampled_tokens(self) -> int:
        """Maximum number of sampled tokens of a single-turn trajectory; the constant length of Dr. GRPO."""
        return self.sampling.max_tokens

    @model_validator(mode="wrap")
    @classmethod
    def _default_lengths(cls, data: Any, build: Any) -> Any:
        row = cls.model_fields["row_tokens"].default
        return with_lengths(data, build, default_row=row, prompts_in_row=cls.prompts_in_row, fills_row=True)

    @model_validator(mode="after")
    def _scores(self) -> OnlineSection:
        check_evaluation(self.evaluate, self.eval_dataset, self.rewards, self.held_out_sampling.temperature)
        if self.rewards and not any(reward.weight for reward in self.rewards):
            raise ValueError("rewards: every weight is 0, so there is no training signal; change one of them")
        return self


OldLogps = Literal["self", "trainer", "sampler"]
"""Sources of the log-probabilities of pi_old, see `RLSection.old_logps`."""
ZeroAdvantage = Literal["skip", "update"]
RatioLevel = Literal["token", "sequence_mean", "sequence_sum"]


class ImportanceSection(Section):
    """Importance sampling weights pi_old / pi_behaviour of the surrogate, for samples from another policy than the
    trainer's."""

    apply: Literal["auto", "always", "never"] = "auto"
    """Condition for weights. `auto`: if the sampler's distribution differs from the trainer's: top-k, top-p, min-p,
    penalties, logit bias, allowed tokens, `rollout.quantize` or `oversample_prompts`."""
    level: RatioLevel = "token"
    """Level of the weights: per token, or per sequence as exp of the mean or sum of its log-ratios."""
    bound: Literal["truncate", "mask"] = "truncate"
    """Treatment of weights beyond `low` and `high`: `truncate` to the bound (TIS), or `mask` the token with weight 0
    (MIS)."""
    low: Annotated[float, Field(ge=0, lt=1)] | None = None
    high: Annotated[float, Field(gt=1)] | None = 2.0


class RLSection(OnlineSection):
    """Reinforcement learning with GRPO and its variants, or on-policy distillation from teachers."""

    kind: Literal["rl"] = "rl"
    algorithm: str = "grpo"
    """Algorithm: `grpo`, `dr_grpo`, `dapo`, `gspo`, `rloo`, or `distill` (with teachers, without rewards)."""
    advantage: Locator | None = None
    """Custom advantage function `module:function` of rewards_PG, in place of the algorithm's."""
    teachers: ListOf[TeacherSection] = ()
    """Teachers with the student's tokenizer that score each sampled token (on-policy distillation); several need
    `teacher_column`."""
    teacher_column: Text | None = None
    """Dataset column with the name of a row's teacher, or a mapping of names to weights."""
    teacher_coef: Annotated[float, Field(gt=0)] = 1.0
    """Coefficient of log(teacher / student) of each sampled token, which is added to the advantage."""
    kl_coef: Annotated[float, Field(ge=0)] | None = None
    """Coefficient of the KL from the reference. This and the next eight fields override the algorithm's values."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """KL estimator, see `posttrain.losses.kl`; k1, whose expected gradient is 0, needs `kl_bias_correction`."""
    kl_bias_correction: Flag | None = None
    """Multiply the KL by the ratio pi / pi_old, so that its gradient is that of KL(policy || reference); approximate
    with `ratio: sequence_mean`. arXiv:2512.02556."""
    clip_low: Annotated[float, Field(gt=0)] | None = None
    clip_high: Annotated[float, Field(gt=0)] | None = None
    """Upper clip bound: the ratio pi / pi_old is clipped to 1 - clip_low .. 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Upper bound of the ratio for negative advantages, arXiv:1912.09729; at least 1 + clip_high."""
    entropy_coef: Annotated[float, Field(ge=0)] | None = None
    """Coefficient of the entropy bonus."""
    ratio: RatioLevel | None = None
    """Level of the ratio: per token, or per sequence as exp of the mean (GSPO) or sum (RLOO) of its log-ratios."""
    reduce: Literal["sequence_mean", "token_mean", "constant_length"] | None = None
    """Reduction of the loss: mean over sequences of token means (GRPO), mean over all tokens (DAPO), or sum over tokens
    divided by the number of sequences and by `sampling.max_tokens` (Dr. GRPO)."""
    old_logps: Literal["auto", OldLogps] = "auto"
    """Source of the log-probabilities of pi_old. `self`: the same forward pass, so that the ratio is exactly 1, for a
    single update per batch of rollouts; `trainer`: a forward pass before the first update; `sampler`: the rollout
    engine's, which differ by rounding, enough to clip GSPO and RLOO in bfloat16. `auto`: `self`, or `trainer` where
    that is wrong: with several `updates` or `update_epochs`, and with teachers and samples of another policy."""
    importance_sampling: ImportanceSection = ImportanceSection()
    """Importance sampling for samples from another policy than the trainer's."""
    zero_advantage: ZeroAdvantage = "skip"
    """Steps whose advantages are all 0 (no group has different rewards): `skip` the update, or `update` with KL
    penalty, entropy bonus, momentum and weight decay alone."""
    updates: PositiveInt = 1
    """Updates per batch of rollouts, each on an equal part of its groups; must divide `prompts_per_step`. `num_steps`
    counts updates."""
    update_epochs: PositiveInt = 1
    """Passes over each batch of rollouts, each of `updates` updates."""
    oversample_prompts: NonNegativeInt = 0
    """Prompts started beyond `prompts_per_step` (partial rollouts, arXiv:2501.12599): a step trains on the first
    `prompts_per_step` finished groups; the others are resumed in the next step with its weights."""
    max_staleness: PositiveInt = 4
    """Maximum steps between the start of a group and its update, with `oversample_prompts`; a step waits for groups
    that reach it."""

    @property
    def held_out_sampling(self) -> SamplingSection:
        return self.sampling if self.teachers and self.eval_sampling is None else super().held_out_sampling

    @property
    def samples_off_policy(self) -> bool:
        """True if tokens are sampled from another distribution than the trainer's, so that importance weights have an
        effect."""
        return self.sampling.changes_distribution or self.rollout.quantize != "none" or self.oversample_prompts > 0

    @property
    def samples_in_flight(self) -> int:
        return (self.prompts_per_step + self.oversample_prompts) * self.group_size

    @model_validator(mode="after")
    def _learns_from(self) -> RLSection:
        check_teachers(self.teachers, self.teacher_column, self.sampling.temperature, samples=True)
        if not self.rewards and not self.teachers:
            raise ValueError("set rewards, or teachers for on-policy distillation")
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
                "the KL from the teachers is measured on the training distribution"
            )
        return self

    @property
    def proximal_logps(self) -> OldLogps:
        """Source of the log-probabilities of pi_old, with the default resolved."""
        if self.old_logps != "auto":
            return self.old_logps
        others = bool(self.teachers) and (self.rollout.quantize != "none" or self.oversample_prompts > 0)
        return "trainer" if self.updates_per_batch > 1 or others else "self"

    @property
    def updates_per_batch(self) -> int:
        """Updates between two hand-overs of the weights to the engine."""
        return self.updates * self.update_epochs

    @property
    def weighs_samples(self) -> bool:
        """True if importance weights are applied."""
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
    def _updates(self) -> RLSection:
        each = self.updates_per_batch
        if self.prompts_per_step % self.updates:
            raise ValueError(f"updates={self.updates} must divide prompts_per_step={self.prompts_per_step}")
        if self.num_steps % each:
            below = self.num_steps // each * each
            raise ValueError(
                f"num_steps={self.num_steps} must be a multiple of updates x update_epochs = {each}, the updates of "
                f"each batch of rollouts; use {below or each} or {below + each}"
            )
        if self.old_logps == "self" and each > 1:
            raise ValueError(
                f"old_logps=self with updates={self.updates} and update_epochs={self.update_epochs}: after the first "
                "update the policy is not the one that sampled; use auto or trainer"
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
            and self.proximal_logps != "trainer"
            and (self.rollout.quantize != "none" or self.oversample_prompts)
        ):
            raise ValueError(
                f"teachers with rollout.quantize={self.rollout.quantize} and oversample_prompts="
                f"{self.oversample_prompts} need old_logps: trainer: the advantage is log(teacher / student), "
                "and the sampler's log-probabilities are not the student's"
            )
        return self
