"""What a run needs besides weights, as it was loaded and validated."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from posttrain.config import RunConfig
from posttrain.data.tokenizer import Tokenizer
from posttrain.models.config import ModelConfig
from posttrain.recipes.judged import JudgedInputs
from posttrain.recipes.prepare_rl import OnlineInputs, RLInputs
from posttrain.recipes.prepare_sequences import SFTInputs

Inputs = SFTInputs | RLInputs | OnlineInputs | JudgedInputs


@dataclass
class Prepared:
    config: RunConfig
    """Run with what depends on its model and data filled in: lengths, steps."""
    base_dir: Path
    tokenizer: Tokenizer | None = None
    """None only where `notes` say that the hub could not be asked."""
    model: ModelConfig | None = None
    """None where only the hub has it and cannot be asked."""
    stages: list[Inputs] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What could not be checked, and why; and what is done otherwise than the configuration says."""

    def add(self, index: int, inputs: Inputs) -> None:
        """Inputs of stage `index`, whose section may have more filled in than the configuration's."""
        self.stages.append(inputs)
        stages = list(self.config.stages)
        stages[index] = inputs.section
        self.config = self.config.model_copy(update={"stages": tuple(stages)})
