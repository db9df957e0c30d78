"""Inputs of a run besides weights, loaded and validated: model description, dataset rows, Python objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from posttrain.batch import rows_per_pass
from posttrain.config import DatasetSection, PairSection, RunConfig, SequenceSection
from posttrain.data.chat import Renderer
from posttrain.data.pipeline import renderer_of
from posttrain.data.sources import Rows, Sequences, load_rows
from posttrain.data.tokenizer import Tokenizer
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


@dataclass(frozen=True)
class EpochSource:
    """Sequences (or pairs) of one dataset, by row number."""

    dataset: DatasetSection
    rows: Rows
    count: int
    tokenize: Callable[[int], Sequences]
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
    counts: dict[str, int] = field(default_factory=dict)
    """Resolved `num_steps` of epochs, kept with the run."""
    notes: list[str] = field(default_factory=list)
    """Notes: checks that were impossible, and resolved settings that differ from the configuration."""

    def add(self, index: int, inputs: Inputs) -> None:
        """Add the inputs of stage `index`, whose section may have more resolved values than the configuration's."""
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
