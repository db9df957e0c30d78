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
    """Inputs of one stage; each stage kind has its own class."""

    @property
    def section(self) -> Any:
        """Section of the stage."""
        ...


@dataclass
class Prepared:
    """Tokenizer, model description and inputs of every stage of a run."""

    config: RunConfig
    """Run configuration with values resolved from model and data: lengths, steps."""
    base_dir: Path
    tokenizer: Tokenizer | None = None
    """Tokenizer; None only if `notes` report that the hub cannot be reached."""
    model: ModelConfig | None = None
    """Model description; None if it is on a hub that cannot be reached."""
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
        return self.model is not None and bool(self.model.mixtures)

    def require_tokenizer(self) -> Tokenizer:
        assert self.tokenizer is not None
        return self.tokenizer
