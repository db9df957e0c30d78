"""Reinforcement learning stages: steps of sampling and learning, dynamic sampling, curriculum, sampling ahead."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from posttrain.config.algorithm import GRPO, AnyAlgorithm, ImportanceSection, OldLogps
from posttrain.config.base import Flag, ListOf, NonNegativeInt, PositiveInt, Section, Text
from posttrain.config.environment import AgentSection, EnvSection, ToolSection, check_tools, with_env
from posttrain.config.locator import Named
from posttrain.config.optimizer import ANY_KIND, AdamW, OtherOptimizer
from posttrain.config.reward import EvaluateSection, MonitorSection, RecordSection, RewardSection, check_evaluation
from posttrain.config.rollout import (
    CriticPlacement,
    PlacementSection,
    ReferenceSection,
    RolloutSection,
    SamplingSection,
    answer_tokens,
    check_sampling,
    with_evaluation,
    with_lengths,
)
from posttrain.config.teacher import TeacherSection, check_teachers
from posttrain.config.train import MAX_NEW_TOKENS, DatasetSection, TrainSection


class RefillSection(Section):
    """Dynamic sampling, DAPO, arXiv:2503.14476 section 3.2: groups without a training signal are replaced."""

    limit: PositiveInt = 3
    """Maximum number of waves per step: each begins as many groups as are missing. After the last one the step trains
    on the useful groups it has (`sampling/refill/short`)."""
    keep: Named = "mixed"
    """Useful groups: `mixed`, those with different rewards, or a function of the rewards_PG of a wave, given as
    `filter`, which returns a mask of its groups. Replaces the filter of the algorithm."""


class CurriculumSection(Section):
    """Draws of prompts by pass rate: the share of a prompt's samples whose reward is above `pass_above`, as a moving
    average over its groups. A prompt without a scored group counts with a pass rate of 0.5."""

    pools: Annotated[ListOf[Annotated[float, Field(ge=0, le=1)]], Field(min_length=2)]
    """Rising bounds of the pools, from 0 to 1: a pool holds the pass rates from its lower bound to below its upper one,
    the last pool also 1."""
    draw: ListOf[Annotated[float, Field(ge=0, le=1)]]
    """Share of each pool in the groups that are begun; the shares add up to 1. The shares of empty pools go to the
    others in proportion."""
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Weight of a prompt's earlier pass rate when another of its groups is scored."""

    def _mistakes(self) -> Iterator[str]:
        if (self.pools[0], self.pools[-1]) != (0.0, 1.0) or any(low >= high for low, high in pairwise(self.pools)):
            yield f"pools={list(self.pools)} must rise from 0 to 1"
        if len(self.draw) != len(self.pools) - 1:
            yield (
                f"draw has {len(self.draw)} shares, and pools={list(self.pools)} bound {len(self.pools) - 1} pools; "
                "give one share for each"
            )
        if not math.isclose(sum(self.draw), 1.0, abs_tol=1e-6):
            yield f"draw={list(self.draw)} adds up to {sum(self.draw):g}; make it 1"


def check_selection(
    refill: RefillSection | None, curriculum: CurriculumSection | None, *, rewards: bool, shuffle: bool
) -> None:
    """Check both sections against the rest of a stage. ValueError where one would have no effect."""
    for name, section in (("refill", refill), ("curriculum", curriculum)):
        if section is not None and not rewards:
            raise ValueError(f"{name} needs rewards, which tell useful prompts; set rewards, or remove {name}")
    if curriculum is not None and not shuffle:
        raise ValueError("dataset.shuffle=false has no effect with curriculum, which draws prompts; remove one of them")


class AsyncSection(Section):
    """Asynchronous RL, arXiv:2505.24298: the next groups are sampled and scored while the trainer learns. Steps take
    groups in the order in which they were begun. With `refill` a step's waves follow each other ahead of it, too."""

    max_staleness: NonNegativeInt = 1
    """Maximum versions of the weights between a token and its update: so many steps of groups are begun ahead. 0: each
    step waits for its own groups, as without this section."""
    in_flight: Flag = False
    """Use new weights from the next dispatch on, also for samples under way. Without, each group is sampled by one
    version, `max_staleness` versions before its step, and a run does not depend on time."""
    stall_s: Annotated[float, Field(gt=0)] = 1800.0
    """Abort the run with a description of what is awaited, when nothing has been sampled or scored for so many seconds
    that the trainer waits."""


def check_async(section: AsyncSection, *, old_logps: str, models_refill: bool, record_routing: bool) -> None:
    """Check the section against the rest of a stage. ValueError where both cannot be. `models_refill`: reward models
    tell which groups are replaced."""
    if models_refill:
        raise ValueError(
            "asynchronous and refill with reward models: they score a step when it is learned from, too late to "
            "replace groups; score with functions, or remove one of asynchronous and refill"
        )
    stale = section.max_staleness > 0
    if stale and old_logps == "self":
        raise ValueError(
            f"asynchronous.max_staleness={section.max_staleness} with old_logps=self: samples come from older weights "
            "than the trainer's; use auto or trainer"
        )
    if section.in_flight and not stale:
        raise ValueError("asynchronous.in_flight has no effect with max_staleness=0; remove one of them")
    if section.in_flight and record_routing:
        raise ValueError(
            "asynchronous.in_flight and rollout.record_routing: a sample would mix the experts of several versions of "
            "the weights; use one of the two"
        )


class OnlineOptimizer(AdamW):
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
    optimizer: Annotated[OnlineOptimizer | OtherOptimizer, Field(discriminator="kind"), ANY_KIND] = OnlineOptimizer()
    """Optimiser: `adamw`, `lion`, `adafactor`, `muon`, or an optax transformation (`fn`)."""
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
    """Sampling in evaluations, as changes of its default: greedy (temperature 0, no truncation) with the other settings
    of `sampling`, with teachers `sampling` itself. What it does not set stays as in the default."""
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
        evaluation = self.held_out_sampling.at_most(sampling.max_tokens)
        return super().default_lengths(max_positions) | {"sampling": sampling, "eval_sampling": evaluation}

    @property
    def kept_images_mib(self) -> int:
        return self.rollout.image_cache_mib

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
        """Sampling of evaluations: `eval_sampling`, which validation completes."""
        assert self.eval_sampling is not None
        return self.eval_sampling

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
        # The KL from teachers is measured on the training distribution.
        greedy = not (isinstance(data, Mapping) and data.get("teachers"))
        evaluated = partial(with_evaluation, build=build, greedy=greedy)
        return with_lengths(data, evaluated, default_row=row, prompts_in_row=cls.prompts_in_row, fills_row=True)

    def _mistakes(self) -> Iterator[str]:
        check_evaluation(self.evaluate, self.eval_dataset, self.scored, self.held_out_sampling.temperature)
        if self.optimizer.ema is not None:
            yield "optimizer.ema is for stages that do not sample: samples are those of the last weights; remove it"
        skips = self.sampling.skip_special_tokens
        if self.held_out_sampling.skip_special_tokens != skips:
            yield (
                f"eval_sampling.skip_special_tokens={not skips} must be that of sampling, {skips}: the same rewards "
                "read the texts of both"
            )
        if self.rewards and not any(reward.weight for reward in self.rewards):
            yield "rewards: every weight is 0, so there is no training signal; change one of them"


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
    `gemma`, `gemma4`, `glm` (GLM-4.5 and later), `deepseek`, `gpt_oss`, `phi` or `pythonic`. `auto`: that of the chat
    template. Where the template does not write tools, the prompt describes them and the format."""
    agent: AgentSection | None = None
    """Agent with a loop of its own in place of `env`, which talks to the policy through an OpenAI-compatible
    endpoint."""
    algorithm: AnyAlgorithm = GRPO()
    """Algorithm, by the word of a kind with its values, or a section with `kind` and others: `grpo`, `dr_grpo`, `dapo`,
    `bnpo`, `gspo`, `gspo_token`, `luspo`, `gmpo`, `cispo`, `sapo`, `vespo`, `rloo`, `reinforce_plus_plus`,
    `reinforce_plus_plus_baseline`, `gdpo`, `ppo`, or `distill` (with teachers, without rewards)."""
    teachers: ListOf[TeacherSection] = ()
    """Teachers with the student's tokenizer that score each sampled token (on-policy distillation); several need
    `teacher_column`."""
    teacher_column: Text | None = None
    """Dataset column with the name of a row's teacher, or a mapping of names to weights."""
    teacher_coef: Annotated[float, Field(gt=0)] = 1.0
    """Coefficient of log(teacher / student) of each sampled token, which is added to the advantage."""
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
    def samples_off_policy(self) -> bool:
        """True if tokens are sampled from another distribution than the trainer's, so that importance weights have an
        effect."""
        return self.sampling.changes_distribution or self.rollout.rounds is not None or self.samples_ahead

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
            rows = self.agent.rows
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

    def _mistakes(self) -> Iterator[str]:
        yield from self._learns_from()
        yield from self._weighs()
        yield from self._turns()
        yield from self._updates()
        yield from self._fits()

    def _learns_from(self) -> Iterator[str]:
        check_teachers(self.teachers, self.teacher_column, self.sampling.temperature, samples=True)
        kind = self.algorithm.kind
        if not self.scored and not self.teachers:
            yield "set rewards, env or agent, or teachers for on-policy distillation"
        elif not self.scored and kind != "distill":
            yield f"algorithm={kind} needs rewards; without them use algorithm: distill"
        elif kind == "distill" and not self.teachers:
            yield "algorithm=distill needs teachers"
        if self.placement.critic != CriticPlacement() and kind != "ppo":
            yield f"placement.critic: algorithm={kind} has no critic; use algorithm: ppo, or remove it"
        if self.teachers and (kind == "ppo" or self.algorithm.top_entropy is not None):
            both = "the critic of algorithm=ppo" if kind == "ppo" else "algorithm.top_entropy"
            yield f"teachers: their advantages do not go with {both}; remove one of them"
        if self.scored and self.group_size < 2 and self.algorithm.compares:
            yield f"group_size={self.group_size}: rewards are compared within a group; use 2 or more"
        if not self.teachers and (self.teacher_column is not None or self.teacher_coef != 1.0):
            yield "teacher_column and teacher_coef need teachers"
        other = self.held_out_sampling
        if self.teachers and other.temperature != self.sampling.temperature:
            yield (
                f"eval_sampling.temperature={other.temperature} must be that of sampling, {self.sampling.temperature}: "
                "the KL from the teachers is measured on the training distribution"
            )

    @property
    def proximal_logps(self) -> OldLogps:
        """Source of the log-probabilities of pi_old, with the default resolved."""
        if self.algorithm.old_logps != "auto":
            return self.algorithm.old_logps
        rounded = bool(self.teachers) and self.rollout.rounds is not None
        return "trainer" if self.updates_per_batch > 1 or rounded or self.samples_ahead else "self"

    @property
    def updates_per_batch(self) -> int:
        """Updates between two hand-overs of the weights to the engine."""
        return self.updates * self.update_epochs

    @property
    def weighs_samples(self) -> bool:
        """True if importance weights are applied."""
        apply = self.algorithm.importance_sampling.apply
        return apply == "always" or (apply == "auto" and self.samples_off_policy)

    def _weighs(self) -> Iterator[str]:
        # Values, not what was written: a dumped configuration writes every field.
        given, plain = self.algorithm.importance_sampling, ImportanceSection()
        fields = [name for name in ImportanceSection.model_fields if name != "apply"]
        others = [name for name in fields if getattr(given, name) != getattr(plain, name)]
        if others and not self.weighs_samples:
            yield (
                f"algorithm.importance_sampling.{', '.join(sorted(others))} without effect: apply={given.apply} and "
                f"samples of {'another' if self.samples_off_policy else 'the same'} policy have no importance weights; "
                "remove it, or use apply: always"
            )

    @model_validator(mode="before")
    @classmethod
    def _env_of_tools(cls, data: Any) -> Any:
        return with_env(data)

    def _turns(self) -> Iterator[str]:
        check_tools(self.tools, self.tool_format, self.env, self.agent, rewards=bool(self.rewards or self.teachers))
        if self.env is not None and self.agent is not None:
            yield "env and agent: a conversation is held by one of them; remove the other"
        if not self.converses and (name := self.algorithm.of_turns) is not None:
            yield f"algorithm.{name} has no effect without env or agent: a sample then has a single turn"

    def _updates(self) -> Iterator[str]:
        each = self.updates_per_batch
        if self.prompts_per_step % self.updates:
            yield f"updates={self.updates} must divide prompts_per_step={self.prompts_per_step}"
        if self.num_steps % each:
            below = self.num_steps // each * each
            yield (
                f"num_steps={self.num_steps} must be a multiple of updates x update_epochs = {each}, the updates of "
                f"each batch of rollouts; use {below or each} or {below + each}"
            )
        if self.algorithm.old_logps == "self" and each > 1:
            yield (
                f"old_logps=self with updates={self.updates} and update_epochs={self.update_epochs}: after the first "
                "update the policy is not the one that sampled; use auto or trainer"
            )

    def _fits(self) -> Iterator[str]:
        check_sampling(self.sampling, self.row_tokens, self.rollout, self.held_out_sampling)
        check_selection(self.refill, self.curriculum, rewards=self.scored, shuffle=self.dataset.shuffle)
        if self.asynchronous is not None:
            check_async(
                self.asynchronous,
                old_logps=self.algorithm.old_logps,
                models_refill=self.refill is not None and any(reward.model is not None for reward in self.rewards),
                record_routing=self.rollout.record_routing,
            )
        others = self.rollout.rounds is not None or self.samples_ahead
        if self.teachers and others and self.proximal_logps != "trainer":
            name = "asynchronous" if self.samples_ahead else self.rollout.rounds
            yield (
                f"teachers with {name} need old_logps: trainer: the advantage is log(teacher / student), and the "
                "sampler's log-probabilities are not the student's"
            )
