"""Inputs of online stages besides weights: prompts, rewards, an algorithm."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from posttrain.agents.runner import Agents
from posttrain.agents.server import Sessions
from posttrain.batch import TokenLoss
from posttrain.config import (
    DatasetSection,
    DistillSection,
    HeldOutSection,
    ModelDrafts,
    OnlineSection,
    RLSection,
    SamplingSection,
)
from posttrain.data.chat import Renderer
from posttrain.data.columns import unread_columns, unread_note
from posttrain.data.format import prompt_conversation, prompt_is_text
from posttrain.data.image_rows import no_picture_note
from posttrain.data.messages import Message, Tools, parts_of, pictures_in
from posttrain.data.pictures import Picture, Pictures
from posttrain.data.pipeline import prompts_identity
from posttrain.data.prompt_images import PromptImages
from posttrain.data.sources import Rows, each_row, needed_rows, with_all_columns
from posttrain.data.tokenizer import Tokenizer
from posttrain.data.turns import sampled_stop_notes
from posttrain.distill.teachers import TeacherSource, tokenizers_identity
from posttrain.environments.conversation import Environments, tools_of
from posttrain.environments.types import Conversations
from posttrain.errors import ConfigError
from posttrain.reward.function import missing_arguments, reward_notes
from posttrain.reward.keywords import accepted
from posttrain.reward.model import ModelReward, takes_pictures
from posttrain.reward.rubric import Rubric
from posttrain.rl.algorithms import Algorithm
from posttrain.rl.assemble import Shares
from posttrain.rl.collector import Refill
from posttrain.rl.monitor import Monitor
from posttrain.rl.sampler import sampling_params
from posttrain.rl.teachers import shares_of
from posttrain.rollout.blocks import BLOCK, least_cache
from posttrain.rollout.drafting import check_drafts
from posttrain.rollout.trajectory import Example
from posttrain.rollout.types import EngineFactory, engine_factory
from posttrain.stages.inputs import Prepared, rows_and_renderer
from posttrain.tools.prompts import ToolText
from posttrain.tools.types import Tool


@dataclass(frozen=True, kw_only=True)
class EvalSet:
    """Held-out prompts."""

    name: str | None
    """Name in metrics; None: `eval_dataset`."""
    dataset: DatasetSection
    rows: Rows
    renderer: Renderer
    examples: Sequence[Example]

    @property
    def identity(self) -> dict[str, str]:
        """Digest of all that the rows hold, and of the pictures of the prompts, by part."""
        return prompts_identity(self.dataset, self.rows, pictures_of_prompts(self.examples))


@dataclass(frozen=True, kw_only=True)
class RolloutInputs:
    """Inputs of stages that generate and score completions."""

    section: OnlineSection
    renderer: Renderer
    rows: Rows
    examples: Sequence[Example]
    """Examples whose prompts are not too long."""
    cuts: Mapping[str, float]
    """Metrics of the prompts that are dropped by `overlong`."""
    eval_sets: Sequence[EvalSet]
    """`eval_dataset`, then the others."""
    rubric: Rubric
    monitor: Monitor | None
    """Monitor of reward hacking, whose state is that of the run."""
    max_prompt_tokens: int
    make_engine: EngineFactory | None
    """Factory of the rollout engine. None: the built-in one."""
    conversations: Conversations | None = None
    """Environments or agents; None: one completion of each prompt."""

    @property
    def renderers(self) -> Sequence[Renderer]:
        """Renderer of the prompts that are sampled from in training."""
        return [self.renderer]

    @property
    def epoch_sources(self) -> int:
        """Number of prompts; online stages have `num_steps`."""
        return len(self.examples)

    @property
    def identity(self) -> Mapping[str, Mapping[str, str]]:
        """Digests of all that the rows hold, and of the pictures of the prompts, by dataset and part."""
        trained = prompts_identity(self.section.dataset, self.rows, pictures_of_prompts(self.examples))
        held_out = ((f"evaluate.sets.{one.name}" if one.name else "eval_dataset", one) for one in self.eval_sets)
        return {"dataset": trained, **{name: one.identity for name, one in held_out}}


@dataclass(frozen=True, kw_only=True)
class RLInputs(RolloutInputs):
    """Inputs of RL stages."""

    section: RLSection
    algorithm: Algorithm
    refill: Refill | None
    teachers: Sequence[TeacherSource]

    @property
    def loss(self) -> TokenLoss:
        """Loss of the algorithm."""
        return self.algorithm.loss

    @property
    def identity(self) -> Mapping[str, Mapping[str, str]]:
        """Digests of all that the rows hold, and of the tokenizers of teachers, by part."""
        return {**super().identity, **tokenizers_identity(self.teachers)}


def roles_beside(inputs: RolloutInputs) -> list[str]:
    """Roles of a stage beside the actor."""
    algorithm = inputs.algorithm if isinstance(inputs, RLInputs) else None
    reference = algorithm is None or algorithm.needs_reference
    critic = algorithm is not None and algorithm.critic is not None
    return ["rollout", *(["reference"] if reference else []), *(["critic"] if critic else [])]


def prepare_scored(
    section: OnlineSection, prepared: Prepared, shares: Shares | None, rubric: Rubric, monitor: Monitor | None
) -> tuple[RolloutInputs, list[str]]:
    """Load prompts, tools and conversations. Also returns notes: on dropped prompts of each dataset, and on rewards."""
    tokenizer = prepared.tokenizer
    check_cache(section, prepared.config.mesh.row_shards or 1)
    check_token_ids({"sampling": section.sampling, "eval_sampling": section.held_out_sampling}, tokenizer)
    target = prepared.files.config
    check_drafts(section.rollout.speculative, tokenizer, section.sequence_tokens, target=target)
    room, answer = section.sequence_tokens, section.sampling.max_tokens
    limit = section.max_prompt_tokens or room - answer
    if limit + answer > room:
        raise ConfigError(f"max_prompt_tokens={limit} + sampling.max_tokens={answer} must fit {_room(section, room)}")
    tools, schemas = _tools_and_schemas(section)
    rows, renderer = _rows_with_tools(section, section.dataset, tokenizer)
    check_columns(rubric, (*rows.columns, *_seen([], renderer)))
    converses = isinstance(section, RLSection) and section.converses
    read = [section.teacher_column] if isinstance(section, RLSection) and section.teacher_column else []

    def prompts_of(dataset: DatasetSection, rows: Rows, renderer: Renderer) -> tuple[list[Example], list[str]]:
        overlong = section.overlong
        return examples_of(
            rows, dataset, renderer, limit, rubric, shares, overlong, schemas, converses=converses, others=read
        )

    examples, notes = prompts_of(section.dataset, rows, renderer)
    notes += reward_notes(rubric.rewards) + sampled_stop_notes(renderer, examples[0].messages, examples[0].tools)
    eval_sets: list[EvalSet] = []
    for dataset in section.all_datasets[1:]:
        eval_rows, eval_renderer = _rows_with_tools(section, dataset, tokenizer)
        check_columns(rubric, (*eval_rows.columns, *_seen([], eval_renderer)))
        held_out, more = prompts_of(dataset, eval_rows, eval_renderer)
        name = dataset.name if isinstance(dataset, HeldOutSection) else None
        held_out_rows: dict[str, Any] = {"dataset": dataset, "rows": eval_rows, "renderer": eval_renderer}
        eval_sets.append(EvalSet(name=name, examples=held_out, **held_out_rows))
        notes += more
    _refuse_blind(section, rubric, [*examples, *(example for one in eval_sets for example in one.examples)])
    conversations = None
    if isinstance(section, RLSection):
        prompts = [(renderer, examples), *((one.renderer, one.examples) for one in eval_sets)]
        conversations = _conversations_of(section, prompts, tools)
    scored = RolloutInputs(
        section=section,
        renderer=renderer,
        rows=rows,
        examples=examples,
        cuts=dropped_prompts(rows, examples),
        eval_sets=eval_sets,
        rubric=rubric,
        monitor=monitor,
        max_prompt_tokens=limit,
        make_engine=engine_factory(section.rollout),
        conversations=conversations,
    )
    return scored, notes


def _refuse_blind(section: OnlineSection | DistillSection, rubric: Rubric, examples: Sequence[Example]) -> None:
    """ConfigError for a reward model of text or a draft model of prompts with pictures, of which they would read the
    ids."""
    pictured = next((example.index for example in examples if example.images is not None), None)
    if pictured is None:
        return
    models = [one.function for one in rubric.rewards if isinstance(one.function, ModelReward)]
    blind = next((model for model in models if not takes_pictures(model.path)), None)
    if blind is not None:
        raise ConfigError(
            f"rewards.model: {blind.path} reads text alone, and row {pictured} has pictures; give a reward model "
            "that is trained with its tower (model.vision), or remove one of both"
        )
    if isinstance(section.rollout.speculative, ModelDrafts):
        raise ConfigError(
            f"rollout.speculative: a draft model sees no pictures, and row {pictured} has them; use ngram, or none"
        )


def _tools_and_schemas(section: OnlineSection) -> tuple[list[Tool], list[dict[str, Any]] | None]:
    """Tools of a stage, and the schemas that the prompts of all rows describe; None where each environment has tools of
    its own."""
    if not isinstance(section, RLSection):
        return [], None
    tools = tools_of(section.tools, servers=True)
    answered = section.env is not None and section.env.fn is None
    return tools, [dict(tool.schema) for tool in tools] if answered else None


def _rows_with_tools(section: OnlineSection, dataset: DatasetSection, tokenizer: Tokenizer) -> tuple[Rows, Renderer]:
    """Rows and renderer of a dataset; it describes the tools of conversations where the chat template does not."""
    rows, renderer = rows_and_renderer(dataset, tokenizer)
    if isinstance(section, RLSection) and section.converses and renderer.chat:
        renderer = Renderer(tokenizer, True, ToolText(tokenizer, section.tool_format), rows.remarks)
    return rows, renderer


def _conversations_of(
    section: RLSection, prompts: Sequence[tuple[Renderer, Sequence[Example]]], tools: Sequence[Tool]
) -> Conversations | None:
    """Environments or agents of a stage, checked on its prompts; None without."""
    tokenizer = prompts[0][0].tokenizer
    conversations: Conversations
    if section.env is not None:
        conversations = Environments.of(section, tokenizer, tools)
    elif section.agent is not None:
        conversations = Agents.of(section, tokenizer, Sessions(section.agent.host))
    else:
        return None
    turns = section.env or section.agent
    for renderer, examples in prompts:
        conversations.check(renderer, examples, keep_thinking=turns is not None and turns.keep_thinking)
    return conversations


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
    section: DistillSection, sources: Sequence[tuple[DatasetSection, Rows, Renderer]], prepared: Prepared
) -> tuple[PromptInputs, list[str]]:
    """Read the prompts of the training dataset and of the evaluation dataset, which is the last one. Also returns a
    note per dataset with dropped prompts; prompts are never truncated."""
    assert section.sampling is not None
    check_token_ids({"sampling": section.sampling}, prepared.tokenizer)
    target = prepared.files.config
    check_drafts(section.rollout.speculative, prepared.tokenizer, section.row_tokens, target=target)
    limit, shares = section.row_tokens - section.sampling.max_tokens, shares_of(section)
    overlong: Literal["drop", "error"] = "drop" if section.overlong == "drop" else "error"
    # What is trained on, beside prompts, is told with the rows.
    read = {name for _, rows, _ in sources for name in (*rows.columns, section.teacher_column) if name is not None}
    examples = [
        examples_of(rows, dataset, renderer, limit, Rubric([]), shares, overlong, others=read)
        for dataset, rows, renderer in sources
    ]
    inputs = PromptInputs(
        examples=examples[0][0],
        eval_examples=[] if section.eval_dataset is None else examples[-1][0],
        max_tokens=limit,
        make_engine=engine_factory(section.rollout),
    )
    _refuse_blind(section, Rubric([]), [*inputs.examples, *inputs.eval_examples])
    notes = sampled_stop_notes(sources[0][2], examples[0][0][0].messages, examples[0][0][0].tools)
    return inputs, [*(note for _, more in examples for note in more), *notes]


def examples_of(
    rows: Rows,
    section: DatasetSection,
    renderer: Renderer,
    max_prompt_tokens: int,
    rubric: Rubric,
    shares: Shares | None,
    overlong: Literal["drop", "error"],
    tools: Tools | None = None,
    *,
    converses: bool = False,
    others: Collection[str] = (),
) -> tuple[list[Example], list[str]]:
    """Tokenise and check all prompts, each once; also returns notes: on prompts dropped as too long, and on columns
    that nothing reads.

    A prompt describes the tools of its row, unless it `converses` with an environment or an agent, which read all
    columns: then those of `tools`, the schemas of the stage. `others`: columns that something else reads.

    ConfigError if all are dropped, or if one is too long and `overlong` is `error`.
    """
    given = tuple(_seen([], renderer))
    readers = [accepted(reward.function) for reward in rubric.rewards]
    taken = frozenset().union(*(names for names in readers if names is not None))

    def named(of: Tools) -> set[str]:
        return {tool["function"]["name"] for tool in of}

    complete = {rows.columns}  # as they stand in the source: a parameter without a default needs all rows

    def example(index: int) -> Example:
        with rows.named(index) as row:
            if tuple(row) not in complete:
                check_columns(rubric, (*row, *given))
                complete.add(tuple(row))
            messages, _, of_row = prompt_conversation(row, section, renderer, read=taken)
            if of_row and converses and not tools:
                rows.remarks.add("tools", "tools of rows are no part of prompts here: those of the stage are")
            if of_row and tools and named(of_row) != named(tools):
                raise ConfigError(
                    f"the row describes the tools {', '.join(sorted(named(of_row)))}, and the stage has "
                    f"{', '.join(sorted(named(tools)))}; remove the column, or give the same"
                )
            described = tools if converses else of_row
            # Four bytes per token; a list of numbers takes eight or more.
            tokens, images = renderer.prompt_with_images(messages, described)
            if images is not None and not renderer.tokenizer.tower:
                raise ConfigError("the row has pictures, and model.vision=none loads no tower; set it to frozen")
            if images is not None:
                messages, images = _of_row(messages, images, f"{rows.name} row {rows.start + index}")
            prompt = Example(
                index=index,
                row={**row, **_seen(messages, renderer)},
                messages=messages,
                prompt_tokens=array("i", tokens),
                plain=prompt_is_text(row, section),
                images=images,
                tools=described,
            )
            if shares is not None:
                shares(prompt)
            return prompt

    fitting: list[Example] = []
    long: list[tuple[int, int]] = []
    prompts = list(each_row(rows, needed_rows(len(rows)), "prompts", example))
    filled = with_all_columns([prompt.row for prompt in prompts])
    for prompt in (replace(prompt, row=row) for prompt, row in zip(prompts, filled, strict=True)):
        length = len(prompt.prompt_tokens)
        if length <= max_prompt_tokens:
            fitting.append(prompt)
        else:
            long.append((rows.start + prompt.index, length))
    blind = renderer.tokenizer.sees and all(prompt.images is None for prompt in prompts)
    notes = [*(no_picture_note(len(prompts), "prompts", rows) if blind else []), *rows.notes]
    if not converses and None not in readers:
        sees = renderer.tokenizer.has_images
        unread = unread_columns(rows.all_columns, section, "prompt", images=sees, others={*taken, *others})
        notes += unread_note(rows.name, unread)
    if not long:
        return fitting, notes
    note = (
        f"{len(long):,} of {len(rows):,} prompts of {rows.name} have more than max_prompt_tokens={max_prompt_tokens} "
        f"tokens (row {long[0][0]}: {long[0][1]}; the longest: {max(length for _, length in long)})"
    )
    if overlong == "error" or not fitting:
        remedy = ", or set overlong to drop" if fitting else ""
        raise ConfigError(f"{note}; raise row_tokens and max_prompt_tokens{remedy}")
    return fitting, [f"{note}; they are dropped (overlong: drop)", *notes]


def dropped_prompts(rows: Rows, examples: Sequence[Example]) -> dict[str, float]:
    """Metric of prompts that are left out as too long; prompts are never truncated."""
    return {"data/dropped_ratio": (len(rows) - len(examples)) / len(rows)}


def _of_row(messages: Sequence[Message], images: PromptImages, row: str) -> tuple[list[Message], PromptImages]:
    """Messages and images whose pictures are decoded later, with the row in the errors of those."""
    named = {picture: replace(picture, name=f"{row}: {picture.name}") for picture in pictures_in(messages)}

    def part(one: dict[str, Any]) -> dict[str, Any]:
        return {**one, "image": named[one["image"]]} if one["type"] == "image" else one

    renamed: list[Any] = [
        {**one, "content": [*map(part, parts)]} if (parts := parts_of(one)) else one for one in messages
    ]
    seen = [replace(image, picture=named[image.picture]) for image in images.images]
    return renamed, replace(images, images=tuple(seen))


def _seen(messages: Sequence[Message], renderer: Renderer) -> dict[str, Pictures]:
    """Column `images` of rewards and environments, for a model that sees: the pictures of the prompt."""
    tokenizer = renderer.tokenizer
    return {"images": Pictures(pictures_in(messages))} if tokenizer.sees else {}


def pictures_of_prompts(examples: Sequence[Example]) -> list[Picture]:
    """Pictures of all prompts, in order."""
    return [image.picture for one in examples if one.images is not None for image in one.images.images]


def check_token_ids(samplings: Mapping[str, SamplingSection], tokenizer: Tokenizer) -> None:
    """Check sampling settings. ConfigError for settings that no request may have, such as an unknown token."""
    for name, sampling in samplings.items():
        try:
            params = sampling_params(sampling, tokenizer, key=(0, 0))
            params.check_vocabulary(tokenizer.vocab_size)
        except ValueError as error:
            raise ConfigError(f"{name}.{str(error).removeprefix('sampling.')}") from error


def check_cache(section: OnlineSection | DistillSection, row_shards: int) -> None:
    """Check the KV cache size. ConfigError if `cache_tokens` cannot hold a sequence in each of the `row_shards`
    parts."""
    cache_tokens = section.rollout.cache_tokens
    longest = section.sequence_tokens
    if cache_tokens is not None and cache_tokens < (least := row_shards * least_cache(longest)):
        parts = f", in each of {row_shards} parts of the mesh" if row_shards > 1 else ""
        raise ConfigError(
            f"rollout.cache_tokens={cache_tokens} must be at least {least}: {_room(section, longest)} in whole blocks "
            f"of {BLOCK} and one block more{parts}"
        )


def _room(section: OnlineSection | DistillSection, tokens: int) -> str:
    """Name the settings that bound a sequence of this length."""
    return f"{'' if tokens == section.row_tokens else 'half of '}row_tokens={section.row_tokens}"


def build_rewards(section: OnlineSection) -> tuple[Rubric, Monitor | None]:
    """Build the rubric and the monitor of an online stage, which need no rows."""
    _refuse_completions(section)
    rubric = Rubric.of(section)
    return rubric, Monitor.of(section, rubric.rewards)


def _refuse_completions(section: OnlineSection) -> None:
    more = () if section.evaluate is None else section.evaluate.sets
    named = {"dataset": section.dataset, "eval_dataset": section.eval_dataset}
    named |= {f"evaluate.sets.{number}": dataset for number, dataset in enumerate(more)}
    for name, dataset in named.items():
        if dataset is not None and dataset.completion is not None:
            raise ConfigError(
                f"{name}.completion={dataset.completion!r}: this stage samples its completions; remove it "
                "(reward functions get every column of the dataset by its name)"
            )


def check_columns(rubric: Rubric, columns: Sequence[str]) -> None:
    """ConfigError for functions that read columns which the rows do not have."""
    lines = [line for reward in rubric.rewards for line in missing_arguments(reward, columns)]
    if lines:
        raise ConfigError("\n".join(lines))
