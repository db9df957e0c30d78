"""Inputs of online stages besides weights: prompts, rewards, an algorithm."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from posttrain.config import (
    DatasetSection,
    DistillSection,
    HeldOutSection,
    Locator,
    OnlinePreferenceSection,
    OnlineSection,
    RLSection,
    SamplingSection,
)
from posttrain.data.chat import Renderer
from posttrain.data.format import prompt_is_text, prompt_messages
from posttrain.data.sources import Rows, each_row
from posttrain.data.tokenizer import Tokenizer
from posttrain.distill.teachers import TeacherSource
from posttrain.errors import ConfigError, did_you_mean
from posttrain.losses.importance import ImportanceSampling
from posttrain.losses.preference import KINDS
from posttrain.losses.surrogates import CISPO, GMPO, SAPO, VESPO, Clip, Surrogate
from posttrain.models.heads import CLASSIFIER
from posttrain.reward.model import ModelReward
from posttrain.reward.rubric import Reward, Rubric, missing_arguments
from posttrain.rl.advantages import given_advantage, inputs_of
from posttrain.rl.algorithms import Algorithm, RLLoss, given_filter, make_algorithm
from posttrain.rl.assemble import Shares
from posttrain.rl.sampler import sampling_params
from posttrain.rl.teachers import shares_of
from posttrain.rollout.blocks import BLOCK, least_cache
from posttrain.rollout.trajectory import Example
from posttrain.stages.engine import EngineFactory, engine_of
from posttrain.stages.inputs import callable_of, rows_and_renderer
from posttrain.stages.pair_inputs import PREFERENCE_LOSSES, make_loss
from posttrain.user_code import describe_error
from posttrain.weights.locate import read_model_files


@dataclass(frozen=True, kw_only=True)
class EvalSet:
    """Held-out prompts."""

    name: str | None
    """Name in metrics; None: `eval_dataset`."""
    renderer: Renderer
    examples: Sequence[Example]


@dataclass(frozen=True, kw_only=True)
class RolloutInputs:
    """Inputs of stages that generate and score completions."""

    section: OnlineSection
    renderer: Renderer
    rows: Rows
    examples: Sequence[Example]
    """Examples whose prompts are not too long."""
    eval_sets: Sequence[EvalSet]
    """`eval_dataset`, then the others."""
    rubric: Rubric
    max_prompt_tokens: int
    make_engine: EngineFactory | None
    """Factory of the rollout engine. None: the built-in one."""

    @property
    def epoch_sources(self) -> int:
        """Number of prompts; online stages have `num_steps`."""
        return len(self.examples)


@dataclass(frozen=True, kw_only=True)
class RLInputs(RolloutInputs):
    """Inputs of RL stages."""

    section: RLSection
    algorithm: Algorithm
    teachers: Sequence[TeacherSource]


@dataclass(frozen=True, kw_only=True)
class OnlinePreferenceInputs(RolloutInputs):
    """Inputs of online preference stages."""

    section: OnlinePreferenceSection
    loss: Any
    """Loss: a `PairLoss` on pairs and a reference."""
    share_prompts: bool


def prepare_scored(
    section: OnlineSection, tokenizer: Tokenizer, shares: Shares | None
) -> tuple[RolloutInputs, list[str]]:
    """Load prompts and rewards. Also returns a note per dataset with dropped prompts."""
    refuse_completions(section)
    check_token_ids({"sampling": section.sampling, "eval_sampling": section.eval_sampling}, tokenizer)
    room, answer = section.sequence_tokens, section.sampling.max_tokens
    limit = section.max_prompt_tokens or room - answer
    if limit + answer > room:
        raise ConfigError(f"max_prompt_tokens={limit} + sampling.max_tokens={answer} must fit {_room(section, room)}")
    rubric = rubric_of(section)
    rows, renderer = rows_and_renderer(section.dataset, tokenizer)
    _check_columns(rubric, rows.columns)
    examples, notes = examples_of(rows, section.dataset, renderer, limit, rubric, shares, section.overlong)
    eval_sets: list[EvalSet] = []
    for dataset in section.all_datasets[1:]:
        eval_rows, eval_renderer = rows_and_renderer(dataset, tokenizer)
        _check_columns(rubric, eval_rows.columns)
        held_out, more = examples_of(eval_rows, dataset, eval_renderer, limit, rubric, shares, section.overlong)
        name = dataset.name if isinstance(dataset, HeldOutSection) else None
        eval_sets.append(EvalSet(name=name, renderer=eval_renderer, examples=held_out))
        notes += more
    scored = RolloutInputs(
        section=section,
        renderer=renderer,
        rows=rows,
        examples=examples,
        eval_sets=eval_sets,
        rubric=rubric,
        max_prompt_tokens=limit,
        make_engine=engine_of(section.rollout),
    )
    return scored, notes


def online_loss(section: OnlinePreferenceSection) -> Any:
    """Make the loss. ConfigError for a loss that does not compare pairs with a reference, or needs values that samples
    lack."""
    loss = make_loss(section.loss, PREFERENCE_LOSSES, lambda spec: callable_of(spec, "loss"))
    needs = loss.needs
    if needs.rows != "pairs" or not needs.reference or needs.prompts or needs.margins:
        raise ConfigError(
            f"loss: {section.loss!r} is not for online preference, which compares two samples against the start of "
            f"the stage, without margins and without a loss on prompts; use a kind of DPO: {', '.join(KINDS)}"
        )
    return loss


@dataclass(frozen=True, kw_only=True)
class PromptInputs:
    """Prompts of a distillation stage with on-policy samples."""

    examples: Sequence[Example]
    eval_examples: Sequence[Example]
    max_tokens: int
    """Maximum prompt length in tokens."""
    make_engine: EngineFactory | None
    """Factory of the rollout engine. None: the built-in one."""


def prepare_prompts(
    section: DistillSection, sources: Sequence[tuple[DatasetSection, Rows, Renderer]], tokenizer: Tokenizer
) -> tuple[PromptInputs, list[str]]:
    """Read the prompts of the training dataset and of the evaluation dataset, which is the last one. Also returns a
    note per dataset with dropped prompts; prompts are never truncated."""
    assert section.sampling is not None
    check_token_ids({"sampling": section.sampling}, tokenizer)
    limit, shares = section.row_tokens - section.sampling.max_tokens, shares_of(section)
    overlong: Literal["drop", "error"] = "drop" if section.overlong == "drop" else "error"
    found = [
        examples_of(rows, dataset, renderer, limit, Rubric([]), shares, overlong) for dataset, rows, renderer in sources
    ]
    inputs = PromptInputs(
        examples=found[0][0],
        eval_examples=[] if section.eval_dataset is None else found[-1][0],
        max_tokens=limit,
        make_engine=engine_of(section.rollout),
    )
    return inputs, [note for _, notes in found for note in notes]


MODEL_REWARD = "reward_model"
"""Name in metrics; further reward models get a number."""


def examples_of(
    rows: Rows,
    section: DatasetSection,
    renderer: Renderer,
    max_prompt_tokens: int,
    rubric: Rubric,
    shares: Shares | None,
    overlong: Literal["drop", "error"],
) -> tuple[list[Example], list[str]]:
    """Tokenise and check all prompts, each once; also returns a note about prompts dropped as too long.

    ConfigError if all are dropped, or if one is too long and `overlong` is `error`.
    """
    complete = {rows.columns}

    def example(index: int) -> Example:
        with rows.named(index) as row:
            if tuple(row) not in complete:
                _check_columns(rubric, tuple(row))
                complete.add(tuple(row))
            messages = prompt_messages(row, section)
            # Four bytes per token; a list of numbers takes eight or more.
            tokens = array("i", renderer.prompt(messages))
            plain = prompt_is_text(row, section)
            made = Example(index=index, row=row, messages=messages, prompt_tokens=tokens, plain=plain)
            if shares is not None:
                shares(made)
            return made

    kept: list[Example] = []
    long: list[tuple[int, int]] = []
    for made in each_row(rows, range(len(rows)), "prompts", example):
        length = len(made.prompt_tokens)
        if length <= max_prompt_tokens:
            kept.append(made)
        else:
            long.append((rows.start + made.index, length))
    if not long:
        return kept, []
    found = (
        f"{len(long):,} of {len(rows):,} prompts of {rows.name} have more than max_prompt_tokens={max_prompt_tokens} "
        f"tokens (row {long[0][0]}: {long[0][1]}; the longest: {max(length for _, length in long)})"
    )
    if overlong == "error" or not kept:
        remedy = ", or set overlong to drop" if kept else ""
        raise ConfigError(f"{found}; raise row_tokens and max_prompt_tokens{remedy}")
    return kept, [f"{found}; they are dropped (overlong: drop)"]


def check_token_ids(samplings: Mapping[str, SamplingSection | None], tokenizer: Tokenizer) -> None:
    """Check sampling settings. ConfigError for settings that no request may have, such as an unknown token."""
    for name, sampling in samplings.items():
        if sampling is None:
            continue
        try:
            params = sampling_params(sampling, tokenizer, key=(0, 0))
            params.check_vocabulary(tokenizer.vocab_size)
        except ValueError as error:
            raise ConfigError(f"{name}.{str(error).removeprefix('sampling.')}") from error


def check_cache(section: OnlineSection | DistillSection, row_shards: int) -> None:
    """Check the KV cache size. ConfigError if `cache_tokens` cannot hold a sequence in each of the `row_shards`
    parts."""
    given = section.rollout.cache_tokens
    longest = section.sequence_tokens
    if given is not None and given < (least := row_shards * least_cache(longest)):
        parts = f", in each of {row_shards} parts of the mesh" if row_shards > 1 else ""
        raise ConfigError(
            f"rollout.cache_tokens={given} must be at least {least}: {_room(section, longest)} in whole blocks "
            f"of {BLOCK} and one block more{parts}"
        )


def _room(section: OnlineSection | DistillSection, tokens: int) -> str:
    """Name the settings that bound a sequence of this length."""
    return f"{'' if tokens == section.row_tokens else 'half of '}row_tokens={section.row_tokens}"


def check_rewards(section: OnlineSection) -> None:
    """Check the rewards and columns of an online stage without its rows."""
    refuse_completions(section)
    rubric_of(section)


def refuse_completions(section: OnlineSection) -> None:
    more = () if section.evaluate is None else section.evaluate.sets
    named = {"dataset": section.dataset, "eval_dataset": section.eval_dataset}
    named |= {f"evaluate.sets.{number}": dataset for number, dataset in enumerate(more)}
    for name, dataset in named.items():
        if dataset is not None and dataset.completion is not None:
            raise ConfigError(
                f"{name}.completion={dataset.completion!r}: this stage samples its completions; remove it "
                "(reward functions get every column of the dataset by its name)"
            )


def _check_columns(rubric: Rubric, columns: Sequence[str]) -> None:
    lines = [line for reward in rubric.rewards for line in missing_arguments(reward, columns)]
    if lines:
        raise ConfigError("\n".join(lines))


def rubric_of(section: OnlineSection) -> Rubric:
    """Make the rubric of a stage. Functions given by name run in child processes, which are not started yet."""
    rewards: list[Reward] = []
    for item in section.rewards:
        if item.model is not None:
            number = sum(reward.name.startswith(MODEL_REWARD) for reward in rewards)
            name = item.name or (f"{MODEL_REWARD}_{number + 1}" if number else MODEL_REWARD)
            function: Any = ModelReward(_classifier(item.model), item.reduce, name)
        else:
            function = callable_of(item.fn, "rewards.fn") if isinstance(item.fn, Locator) else item.fn
        if not callable(function):
            raise ConfigError(f"rewards.fn={item.fn!r} is not a function; set file.py:function")
        isolated = isinstance(item.fn, Locator) and item.isolate != "thread"
        rewards.append(
            Reward(
                function=function,
                weight=item.weight,
                args=item.args,
                name=item.name or "",
                timeout_s=None if item.fn is None else item.timeout_s,
                on_error=item.on_error,
                isolated=(item.fn.object, str(item.fn.folder.resolve())) if isolated else None,
            )
        )
    _check_reward_name(section, [reward.name for reward in rewards])
    return Rubric(rewards)


def _check_reward_name(section: OnlineSection, names: Sequence[str]) -> None:
    name = None if section.evaluate is None else section.evaluate.reward
    if name is not None and name not in names:
        raise ConfigError(
            f"evaluate.reward: no reward is called {name!r}{did_you_mean(name, names)}; there are {', '.join(names)}"
        )


def _classifier(path: Locator) -> str:
    """Resolve the folder or hub id of a reward model. ConfigError for another model."""
    files = read_model_files(path.resolved)
    if files.config is not None and not files.config.scalar_head:
        raise ConfigError(
            f"rewards.model: {path} is no reward model; set a {CLASSIFIER} with one label, such as the model that a "
            "stage of kind reward_model leaves"
        )
    return path.resolved


def _probe(advantage: Callable[..., Any], name: str, group_size: int, rewards: Sequence[Reward]) -> None:
    """Check a user's advantage function. ConfigError unless it takes its inputs and returns finite advantages [P, G].

    Probes the groups that a run will meet: different rewards, equal ones, and a sample without a reward (NaN).
    """
    mixed = np.arange(group_size, dtype=np.float32) % 3
    rewards_PG = np.stack([mixed, np.ones_like(mixed), np.where(np.arange(group_size) == 0, np.nan, mixed)])
    wrapped = given_advantage(advantage, name)
    parts_PG = {reward.name: rewards_PG.copy() for reward in rewards}
    weights = {reward.name: reward.weight for reward in rewards}
    try:
        made = wrapped(rewards_PG, parts_PG, weights, np.full(rewards_PG.shape, 3))
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        wanted = ", ".join(inputs_of(advantage, name)) or "rewards_PG"
        raise ConfigError(f"advantage: {name}({wanted}) raised {describe_error(error)}") from error
    valid_PG = ~np.isnan(rewards_PG)
    for group, advantages, valid in zip(rewards_PG, made, valid_PG, strict=True):
        if valid.sum() > 1 and np.isnan(advantages[valid]).any():
            raise ConfigError(
                f"advantage: {name} must return a finite advantage for each sample that has a reward; of the group "
                f"{group.tolist()} (nan: no reward) it made {advantages.tolist()}; use np.nanmean and np.nanstd, "
                "and add a small number to what it divides by"
            )


def algorithm_of(section: RLSection) -> Algorithm:
    """Make the algorithm of a stage. ConfigError for incompatible fields, and functions of the user that fail."""
    critic = {"gamma": section.gamma, "gae_lambda": section.gae_lambda, "value_clip": section.value_clip}
    algorithm = make_algorithm(
        section.algorithm,
        max_tokens=section.max_sampled_tokens,
        advantage=_advantage_of(section),
        advantage_scale=section.advantage_scale,
        filter=_filter_of(section),
        truncated=section.truncated,
        top_entropy=section.top_entropy,
        kl_in=section.kl_in,
        critic={name: value for name, value in critic.items() if value is not None},
        loss=rl_loss(section.loss) if section.loss is not None else None,
        surrogate=_surrogate_of(section),
        importance=_importance_of(section),
        **{name: getattr(section, name) for name in LOSS_FIELDS},
    )
    _check_fields(section, algorithm)
    return algorithm


LOSS_FIELDS = (
    "kl_coef",
    "kl_estimator",
    "kl_bias_correction",
    "clip_low",
    "clip_high",
    "dual_clip",
    "entropy_coef",
    "off_policy_mask",
    "ratio",
    "reduce",
)
"""Fields of the section that are fields of the policy loss."""


def rl_loss(spec: Locator) -> RLLoss:
    """Import and make a user's loss. ConfigError unless it is a loss of RL stages."""
    made = callable_of(spec, "loss")
    try:
        loss = made()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"loss: {spec}() raised {describe_error(error)}; it is called without arguments") from error
    if not isinstance(loss, RLLoss):
        raise ConfigError(
            f"loss: {spec} must be called with (stats, batch) and have kl_coef, 0 for a loss without ref_logps; see "
            "docs/extend/loss.md"
        )
    return loss


def _advantage_of(section: RLSection) -> Callable[..., Any] | None:
    if section.advantage is None:
        return None
    given = callable_of(section.advantage, "advantage")
    _probe(given, section.advantage, section.group_size, rubric_of(section).rewards)
    return given_advantage(given, section.advantage)


def _filter_of(section: RLSection) -> Callable[..., Any] | None:
    """User's group filter, tried on the groups of `_probe`. ConfigError if it fails."""
    if section.filter is None:
        return None
    keep = given_filter(callable_of(section.filter, "filter"), section.filter)
    mixed = np.arange(section.group_size, dtype=np.float32) % 3
    try:
        keep(np.stack([mixed, np.ones_like(mixed), np.where(mixed == 0, np.nan, mixed)]))
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"filter: {section.filter}(rewards_PG) raised {describe_error(error)}") from error
    return keep


def _surrogate_of(section: RLSection) -> Surrogate | None:
    given = section.surrogate
    if given is None:
        return None
    match given.kind:
        case "sapo":
            return SAPO(positive=given.temperature_positive, negative=given.temperature_negative)
        case "vespo":
            return VESPO(
                k_positive=given.k_positive,
                rate_positive=given.rate_positive,
                k_negative=given.k_negative,
                rate_negative=given.rate_negative,
            )
        case "cispo":
            return CISPO()
        case "gmpo":
            return GMPO()
    return Clip()


def _importance_of(section: RLSection) -> ImportanceSampling | None:
    given = section.importance_sampling
    if not section.weighs_samples or section.loss is not None:
        return None
    try:
        return ImportanceSampling(level=given.level, bound=given.bound, low=given.low, high=given.high)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check_fields(section: RLSection, algorithm: Algorithm) -> None:
    """ConfigError for settings of roles that the algorithm does not have."""
    plain = RLSection.model_construct()
    values = section.critic != plain.critic or section.placement.critic != plain.placement.critic
    if values and algorithm.critic is None:
        raise ConfigError(f"critic: algorithm={section.algorithm} has none; use algorithm: ppo, or remove it")
    given = section.reference != plain.reference or section.placement.reference != plain.placement.reference
    if given and not algorithm.needs_reference:
        raise ConfigError(
            f"reference: without effect, algorithm={section.algorithm} has no KL penalty; set kl_coef, or remove it"
        )
    if section.teachers and (algorithm.critic is not None or algorithm.top_entropy is not None):
        raise ConfigError("teachers: their advantages have no critic and no top_entropy; remove one of them")
