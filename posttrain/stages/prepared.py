"""Inputs of a run besides weights, loaded and validated."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from posttrain.config import RunConfig
from posttrain.data.tokenizer import Tokenizer
from posttrain.models.config import ModelConfig


@runtime_checkable
class Inputs(Protocol):
    """Inputs of one stage; each kind of stage has its own class."""

    @property
    def section(self) -> Any:
        """The stage's part of the configuration."""
        ...


@dataclass
class Prepared:
    """Tokenizer, model description and inputs of every stage of a run."""

    config: RunConfig
    """Run with what depends on its model and data filled in: lengths, steps."""
    base_dir: Path
    tokenizer: Tokenizer | None = None
    """None only where `notes` say that the hub could not be reached."""
    model: ModelConfig | None = None
    """None where only the hub has it and cannot be reached."""
    stages: list[Inputs] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    """Counted `num_steps` of passes over the data, kept with the run."""
    notes: list[str] = field(default_factory=list)
    """Checks that could not be made, and why; and where the run differs from the configuration."""

    def add(self, index: int, inputs: Inputs) -> None:
        """Add the inputs of stage `index`, whose section may have more filled in than the configuration's."""
        self.stages.append(inputs)
        stages = list(self.config.stages)
        stages[index] = inputs.section
        self.config = self.config.model_copy(update={"stages": tuple(stages)})

    @property
    def mixture(self) -> bool:
        """Whether the model is a mixture of experts."""
        return self.model is not None and bool(self.model.mixtures)

    def require_tokenizer(self) -> Tokenizer:
        assert self.tokenizer is not None
        return self.tokenizer
