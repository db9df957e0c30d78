"""What a run needs besides weights, as it was loaded and validated."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from posttrain.config import RunConfig
from posttrain.data.tokenizer import Tokenizer
from posttrain.models.config import ModelConfig
from posttrain.stages.pairs import JudgedInputs
from posttrain.stages.prompts import OnlineInputs, RLInputs
from posttrain.stages.sequences import SFTInputs

Inputs = SFTInputs | RLInputs | OnlineInputs | JudgedInputs


@dataclass
class Prepared:
    config: RunConfig
    base_dir: Path
    tokenizer: Tokenizer | None = None
    """None only where `notes` say that the hub could not be asked."""
    model: ModelConfig | None = None
    """None where only the hub has it and cannot be asked."""
    stages: list[Inputs] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What could not be checked, and why; and what is done otherwise than the configuration says."""
