"""Reinforcement learning stages: steps of sampling and learning, algorithm."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from posttrain.config.base import Flag, ListOf, PositiveInt, Text
from posttrain.config.environment import AgentSection, EnvSection, ToolSection, check_tools, with_env
from posttrain.config.groups import AsyncSection, CurriculumSection, RefillSection, check_async, check_selection
from posttrain.config.locator import UserObject
from posttrain.config.policy_loss import ImportanceSection, Level, SurrogateSection
from posttrain.config.reward import EvaluateSection, MonitorSection, RecordSection, RewardSection, check_evaluation
from posttrain.config.rollout import (
    CriticSection,
    PlacementSection,
    ReferenceSection,
    RolloutSection,
    SamplingSection,
    answer_tokens,
    check_sampling,
    with_lengths,
)
from posttrain.config.teacher import TeacherSection, check_teachers
from posttrain.config.train import MAX_NEW_TOKENS, DatasetSection, OptimizerSection, TrainSection


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
    """Samples per prompt (group size); 1 is allowed in RL without rewards, and with algorithms that do not compare the
    samples of a prompt."""
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
    pass_above: float = 0.5
    """Reward above which a sample passes: in pass@k and maj@k of `evaluate`, and in RL for `curriculum`, `pass_rate`,
    `frac_all_good` and `frac_all_bad`."""
    placement: PlacementSection = PlacementSection()
    """Devices and memory of the roles; by default all share those of the actor."""
    reference: ReferenceSection = ReferenceSection()
    """Reference policy of the KL penalty, or of the preference loss."""
    samples_every: PositiveInt | None = None
    """Steps between tables of sample completions; by default the console has one after the last step, and
    `samples.jsonl` some of every tenth step."""
    record: RecordSection | None = RecordSection()
    """Record of all trajectories, in `trajectories/` of the stage's folder; `null`: none."""
    monitor: MonitorSection | None = MonitorSection()
    """Monitor of reward hacking; `null`: none."""

    @property
    def scored(self) -> bool:
        """True if samples have rewards."""
        return bool(self.rewards)

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
        """Batch rows of an update in the worst case."""
        return self.samples_per_step

    @property
    def samples_per_step(self) -> int:
        """Samples of a batch of rollouts."""
        return self.prompts_per_step * self.group_size

    @property
    def pass_rows(self) -> int:
        return self.micro_batch_rows or -(-self.samples_per_step // 8)

    @property
    def held_out_sampling(self) -> SamplingSection:
        """Sampling of evaluations, with the default resolved."""
        greedy = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        return self.eval_sampling or self.sampling.model_copy(update=greedy)

    @property
    def samples_in_flight(self) -> int:
        """Number of samples that a step generates concurrently."""
        return self.samples_per_step

    @property
    def samples_while_updating(self) -> bool:
        """True if the engine samples with the weights before while the trainer's are updated."""
        return False

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
        check_evaluation(self.evaluate, self.eval_dataset, self.scored, self.held_out_sampling.temperature)
        skips = self.sampling.skip_special_tokens
        if self.held_out_sampling.skip_special_tokens != skips:
            raise ValueError(
                f"eval_sampling.skip_special_tokens={not skips} must be that of sampling, {skips}: the same rewards "
                "read the texts of both"
            )
        if self.rewards and not any(reward.weight for reward in self.rewards):
            raise ValueError("rewards: every weight is 0, so there is no training signal; change one of them")
        return self


OldLogps = Literal["self", "trainer", "sampler"]
"""Sources of the log-probabilities of pi_old, see `RLSection.old_logps`."""
ZeroAdvantage = Literal["skip", "update"]
WITHOUT_GROUPS = ("reinforce_plus_plus", "ppo")
"""Algorithms that do not compare the samples of a prompt."""


class RLSection(OnlineSection):
    """Reinforcement learning with GRPO and its variants, or on-policy distillation from teachers."""

    kind: Literal["rl"] = "rl"
    env: EnvSection | None = None
    """Environment of conversations of several turns; by default a sample is one completion of its prompt. With it
    `sampling.max_tokens` bounds a turn, `row_tokens` the conversation."""
    tools: ListOf[ToolSection] = ()
    """Tools that the policy can call, in conversations as those of `env`."""
    tool_format: str = "auto"
    """Format in which the model writes tool calls: `hermes` (Qwen2.5, Qwen3), `qwen_coder`, `llama3`, `mistral`,
    `gemma`, `deepseek`, `gpt_oss`, `phi` or `pythonic`. `auto`: that of the chat template. Where the template does not
    write tools, the prompt describes them and the format."""
    agent: AgentSection | None = None
    """Agent with a loop of its own in place of `env`, which talks to the policy through an OpenAI-compatible
    endpoint."""
    algorithm: str = "grpo"
    """Algorithm: `grpo`, `dr_grpo`, `dapo`, `bnpo`, `gspo`, `gspo_token`, `luspo`, `gmpo`, `cispo`, `sapo`, `vespo`,
    `rloo`, `reinforce_plus_plus`, `reinforce_plus_plus_baseline`, `gdpo`, `ppo`, or `distill` (with teachers, without
    rewards)."""
    advantage: UserObject | None = None
    """Advantage function in place of the algorithm's: `file.py:name`, with settings `{fn: file.py:name, ...}`, or in
    Python the function. It takes those of rewards_PG, parts_PG (by name of the reward), weights and lengths_PG that it
    names; a single parameter of another name is rewards_PG."""
    advantage_scale: Literal["group", "batch", "none"] | None = None
    """Deviation that advantages are divided by: of the group's rewards (`grpo`), of the batch's, or `none`
    (`dr_grpo`)."""
    filter: UserObject | None = None
    """Group filter in place of the algorithm's, given as `advantage`: a function of rewards_PG that returns true for
    each group to learn from."""
    loss: UserObject | None = None
    """Loss in place of the algorithm's: a class, which is called with its settings, an object or a function, given as
    `advantage`; `posttrain check --loss` tests it."""
    teachers: ListOf[TeacherSection] = ()
    """Teachers with the student's tokenizer that score each sampled token (on-policy distillation); several need
    `teacher_column`."""
    teacher_column: Text | None = None
    """Dataset column with the name of a row's teacher, or a mapping of names to weights."""
    teacher_coef: Annotated[float, Field(gt=0)] = 1.0
    """Coefficient of log(teacher / student) of each sampled token, which is added to the advantage."""
    kl_coef: Annotated[float, Field(ge=0)] | None = None
    """Coefficient of the KL from the reference. Fields from here to `reduce` override the algorithm's values."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Place of the KL: a term of the loss, or a penalty in the reward, of whole samples, with `ppo` per token. In the
    reward `kl_estimator` is k1 by default, the only one with the gradient of KL(policy || reference) there."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """KL estimator, see `posttrain.losses.ratios`; k1, whose expected gradient is 0, needs `kl_bias_correction`."""
    kl_bias_correction: Flag | None = None
    """Multiply the KL by the ratio pi / pi_old, so that its gradient is that of KL(policy || reference); approximate
    with `ratio: sequence_mean`. arXiv:2512.02556."""
    surrogate: SurrogateSection | None = None
    clip_low: Annotated[float, Field(gt=0)] | None = None
    clip_high: Annotated[float, Field(gt=0)] | None = None
    """Upper clip bound: the ratio pi / pi_old is clipped to 1 - clip_low .. 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Upper bound of the ratio for negative advantages, arXiv:1912.09729; at least 1 + clip_high."""
    entropy_coef: Annotated[float, Field(ge=0)] | None = None
    """Coefficient of the entropy bonus; with `entropy_target` its start, by default 0."""
    entropy_target: Annotated[float, Field(gt=0)] | None = None
    """Mean entropy in nats per token to keep: the coefficient of the bonus rises by `entropy_step` after a step below
    it and falls else, and acts only at or below it. arXiv:2505.22312."""
    entropy_step: Annotated[float, Field(gt=0)] = 0.005
    """Change of the coefficient after each batch of rollouts, with `entropy_target`."""
    ratio: Level | Literal["sequence_mean_token"] | None = None
    """Level of the ratio: per token, or per sequence as exp of the mean (GSPO) or sum (RLOO) of its log-ratios;
    `sequence_mean_token` (GSPO-token) has the gradient of each token."""
    reduce: Literal["sequence_mean", "token_mean", "constant_length", "sequence_total"] | None = None
    """Reduction of the loss: mean over samples of token means (GRPO), mean over all tokens (DAPO), sum over tokens
    divided by the number of samples and by `sampling.max_tokens` (Dr. GRPO), or by the number of samples alone (LUSPO).
    A sample counts once, however many rows it has."""
    off_policy_mask: Annotated[float, Field(gt=0)] | None = None
    """Largest mean of log(pi_behaviour / pi) in nats per token: samples of negative advantage beyond it are not learned
    from. arXiv:2512.02556."""
    top_entropy: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of tokens to learn from, those of highest entropy in the batch. arXiv:2506.01939; by default all."""
    truncated: Literal["keep", "mask"] = "keep"
    """Samples cut at `sampling.max_tokens`: `mask` leaves them out of the loss, but not out of their group's mean.
    arXiv:2503.14476."""
    critic: CriticSection = CriticSection()
    """Value model of `ppo`."""
    gamma: Annotated[float, Field(ge=0, le=1)] | None = None
    """Discount per token of `ppo`; by default 1."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] | None = None
    """Weight of longer returns in the advantages of `ppo` (GAE, arXiv:1506.02438); by default 0.95."""
    gae_level: Literal["token", "turn"] = "token"
    """Step of `gamma` and `gae_lambda` in `ppo` with `env`: a sampled token, or a turn, whose tokens share one
    advantage."""
    turn_advantages: Flag = False
    """Advantages per turn with `env`: the sum of rewards from the turn on, standardised over the samples of the group
    that have this turn, in place of one advantage for each sample."""
    value_clip: Annotated[float, Field(gt=0)] | None = None
    """Largest change of a value by the value loss of `ppo`; by default 0.2."""
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
    asynchronous: AsyncSection | None = None
    """Sample later groups while the trainer learns; by default a step samples, then learns."""
    refill: RefillSection | None = None
    """Dynamic sampling: replace groups without a training signal until `prompts_per_step` are useful."""
    curriculum: CurriculumSection | None = None
    """Draw prompts by their pass rates so far; by default in the order of the dataset, epoch after epoch."""

    @property
    def held_out_sampling(self) -> SamplingSection:
        return self.sampling if self.teachers and self.eval_sampling is None else super().held_out_sampling

    @property
    def samples_off_policy(self) -> bool:
        """True if tokens are sampled from another distribution than the trainer's, so that importance weights have an
        effect."""
        return self.sampling.changes_distribution or self.rollout.quantize != "none" or self.samples_ahead

    @property
    def samples_ahead(self) -> bool:
        """True if tokens may be older than the weights of their update."""
        return self.asynchronous is not None and self.asynchronous.max_staleness > 0

    @property
    def samples_while_updating(self) -> bool:
        return self.asynchronous is not None and self.samples_ahead and not self.asynchronous.in_flight

    @property
    def step_rows(self) -> int:
        rows = 1
        if self.agent is not None:
            rows = self.agent.max_rows
        elif self.env is not None and self.env.split_turns:
            rows = self.env.max_turns
        return self.samples_per_step // self.updates * rows

    @property
    def scored(self) -> bool:
        return bool(self.rewards) or self.converses

    @property
    def converses(self) -> bool:
        """True if samples are conversations of several turns."""
        return self.env is not None or self.agent is not None

    @property
    def max_sampled_tokens(self) -> int:
        turn, held = self.sampling.max_tokens, self.env or self.agent
        return turn if held is None else min(held.max_turns * turn, self.sequence_tokens)

    @property
    def samples_in_flight(self) -> int:
        groups = self.prompts_per_step
        if self.asynchronous is not None and self.asynchronous.in_flight:
            groups += self.asynchronous.max_staleness * self.prompts_per_step
        return groups * self.group_size

    @model_validator(mode="after")
    def _learns_from(self) -> RLSection:
        check_teachers(self.teachers, self.teacher_column, self.sampling.temperature, samples=True)
        if not self.scored and not self.teachers:
            raise ValueError("set rewards, env or agent, or teachers for on-policy distillation")
        if not self.scored and self.algorithm != "distill":
            raise ValueError(f"algorithm={self.algorithm} needs rewards; without them use algorithm: distill")
        if self.algorithm == "distill" and not self.teachers:
            raise ValueError("algorithm=distill needs teachers")
        compares = self.algorithm not in WITHOUT_GROUPS or self.advantage is not None
        if self.scored and self.group_size < 2 and compares:
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
        quantized = bool(self.teachers) and self.rollout.quantize != "none"
        return "trainer" if self.updates_per_batch > 1 or quantized or self.samples_ahead else "self"

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

    @model_validator(mode="before")
    @classmethod
    def _env_of_tools(cls, data: Any) -> Any:
        return with_env(data)

    @model_validator(mode="after")
    def _turns(self) -> RLSection:
        check_tools(self.tools, self.tool_format, self.env, self.agent, rewards=bool(self.rewards or self.teachers))
        if self.env is not None and self.agent is not None:
            raise ValueError("env and agent: a conversation is held by one of them; remove the other")
        if not self.converses and (self.turn_advantages or self.gae_level != "token"):
            name = "turn_advantages" if self.turn_advantages else "gae_level"
            raise ValueError(f"{name} has no effect without env or agent: a sample then has a single turn")
        if self.gae_level != "token" and self.algorithm != "ppo":
            raise ValueError(f"gae_level={self.gae_level} has no effect on algorithm={self.algorithm}; use ppo")
        if self.turn_advantages and (self.algorithm == "ppo" or self.advantage or self.advantage_scale):
            raise ValueError("turn_advantages takes the place of the advantages of ppo, advantage and advantage_scale")
        return self

    @model_validator(mode="after")
    def _entropy(self) -> RLSection:
        if self.entropy_target is None and self.entropy_step != RLSection.model_fields["entropy_step"].default:
            raise ValueError(f"entropy_step={self.entropy_step} has no effect without entropy_target")
        if self.entropy_target is not None and self.loss is not None:
            raise ValueError("entropy_target has no effect on a loss of your own; remove it, or loss")
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
        check_selection(self.refill, self.curriculum, rewards=self.scored, shuffle=self.dataset.shuffle)
        if self.asynchronous is not None:
            check_async(
                self.asynchronous,
                old_logps=self.old_logps,
                models_refill=self.refill is not None and any(reward.model is not None for reward in self.rewards),
                record_routing=self.rollout.record_routing,
            )
        others = self.rollout.quantize != "none" or self.samples_ahead
        if self.teachers and others and self.proximal_logps != "trainer":
            name = "asynchronous" if self.samples_ahead else f"rollout.quantize={self.rollout.quantize}"
            raise ValueError(
                f"teachers with {name} need old_logps: trainer: the advantage is log(teacher / student), and the "
                "sampler's log-probabilities are not the student's"
            )
        return self
