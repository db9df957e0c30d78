"""Inputs of a run besides weights, loaded and validated: model description, dataset rows, Python objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from posttrain.batch import rows_per_pass
from posttrain.config import DatasetSection, PairSection, RunConfig, SequenceSection
from posttrain.data.chat import Renderer
from posttrain.data.pipeline import renderer_of
from posttrain.data.sources import Rows, Sequences, load_rows
from posttrain.data.tokenizer import PromptForm, Tokenizer
from posttrain.weights.locate import ModelFiles


@runtime_checkable
class Inputs(Protocol):
    """Inputs of one stage; each stage kind has its own class."""

    @property
    def section(self) -> Any:
        """Section of the stage."""
        ...

    @property
    def loss(self) -> Any:
        """Loss on tokens, pairs, or scores."""
        ...

    @property
    def epoch_sources(self) -> Sequence[EpochSource] | int:
        """Sequences or pairs over which `num_epochs` passes, or their number where each has a row of its own."""
        ...

    @property
    def renderers(self) -> Sequence[Renderer]:
        """Renderers of the datasets that are trained on."""
        ...

    @property
    def identity(self) -> Mapping[str, Mapping[str, str]]:
        """Digests of all that the rows hold, and of the pictures that they show, by dataset and part."""
        ...


@dataclass(frozen=True)
class EpochSource:
    """Sequences (or pairs) of one dataset, by row number."""

    dataset: DatasetSection
    rows: Rows
    count: int
    tokenize: Callable[[int], Sequences]
    identity: Mapping[str, str]
    """Digests of what makes the sequences of the rows: tokenizer, chat template, pictures."""
    row_patches: int = 0
    """Most image patches beside a row."""


@dataclass
class Prepared:
    """Tokenizer, model description and inputs of every stage of a run."""

    config: RunConfig
    """Run configuration with values resolved from model and data: lengths, steps."""
    files: ModelFiles
    """Description and tokenizer of the model; None in it only if `notes` report what could not be checked."""
    stages: list[Inputs] = field(default_factory=list)
    forms: list[PromptForm | None] = field(default_factory=list)
    """Form of the prompts on which the model of each stage was trained last; None: not known."""
    counts: dict[str, int] = field(default_factory=dict)
    """Resolved `num_steps` of epochs, kept with the run."""
    notes: list[str] = field(default_factory=list)
    """Notes: checks that were impossible, and resolved settings that differ from the configuration."""

    def add(self, index: int, inputs: Inputs) -> None:
        """Add the inputs of stage `index`, whose section may have more resolved values than the configuration's. The
        form of its prompts is the default of later stages."""
        if (form := prompt_form(inputs.renderers)) is not None:
            self.files = replace(self.files, tokenizer=self.tokenizer.with_form(form))
        self.forms.append(self.tokenizer.form)
        self.stages.append(inputs)
        stages = list(self.config.stages)
        stages[index] = inputs.section
        self.config = self.config.model_copy(update={"stages": tuple(stages)})

    @property
    def mixture(self) -> bool:
        """Tell whether the model is an MoE model."""
        return self.files.config is not None and bool(self.files.config.mixtures)

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model, which must have been there."""
        assert self.files.tokenizer is not None
        return self.files.tokenizer


def prompt_form(renderers: Sequence[Renderer]) -> PromptForm | None:
    """Form of the prompts that a stage trains on, by the rows read so far; None if its datasets have none, or differ in
    the use of the chat template."""
    forms = [one.form for one in renderers if one.form is not None]
    if len({form.chat for form in forms}) != 1:
        return None
    systems = {form.system for form in forms}
    return PromptForm(forms[0].chat, systems.pop() if len(systems) == 1 else None)


def form_notes(tokenizer: Tokenizer, form: PromptForm | None, datasets: Sequence[DatasetSection]) -> list[str]:
    """Lines about prompts whose form is, or is not, that of the model's training before. `form`: of the prompts;
    `datasets`: of which they are."""
    before = tokenizer.form
    if before is None and form is not None and tokenizer.chat_template is None:
        return [
            "no chat template: prompts are plain text, and generate, chat and serve will render them so too; "
            "model.chat_template sets one"
        ]
    if before is None or form is None:
        return []
    if before.chat != form.chat:
        words = ("with", "without") if form.chat else ("without", "with")
        return [
            f"prompts are rendered {words[0]} the chat template, and the model was trained {words[1]} it; "
            f"dataset.chat={str(before.chat).lower()} renders them as in its training"
        ]
    if not form.chat and tokenizer.chat_template is not None and any(one.chat is None for one in datasets):
        return [
            "prompts are plain text, as the model was trained; dataset.chat=true renders them with the chat template"
        ]
    if before.system is not None and form.system != before.system:
        others = "have none, or another" if form.system is None else f"begin with {form.system[:60]!r}"
        return [
            f"the model was trained after the system message {before.system[:60]!r}, and these prompts {others}; "
            "dataset.system gives rows without one a system message"
        ]
    return []


def rows_and_renderer(section: DatasetSection, tokenizer: Tokenizer) -> tuple[Rows, Renderer]:
    """Rows of a dataset, and their renderer, whose remarks are among the notes of the rows."""
    rows = load_rows(section)
    return rows, renderer_of(rows, section, tokenizer)


def describe_rows(section: SequenceSection | PairSection, shards: int) -> str:
    """Summarise the batches of an offline stage. `shards`: devices that split the rows of a forward pass."""
    passes = -(-section.batch_rows // rows_per_pass(section.batch_rows, section.micro_batch_rows, shards))
    rows = f"{section.batch_rows} x {section.row_tokens} tokens"
    passes_text = f" ({passes} micro-batches)" if passes > 1 else ""
    if section.epochs is not None:
        return f"num_epochs={section.epochs:g} in steps of {rows}{passes_text}"
    return f"{section.num_steps} steps of {rows}{passes_text}"
