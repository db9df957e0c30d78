"""Stage of a run as experiment trackers see it: project, name, identifier, settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.runtime.files import digest

PROJECT = "posttrain"
"""Project of runs whose tracker has none in its environment, such as `WANDB_PROJECT`."""


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """Stage of a run as trackers see it."""

    folder: Path
    """Folder of the run; its name is that of the tracked run."""
    stage: str
    settings: Mapping[str, Any]
    """Configuration as dotted names and plain values."""

    @property
    def name(self) -> str:
        return f"{self.folder.resolve().name}/{self.stage}"

    @property
    def identifier(self) -> str:
        """Identifier by which a resumed stage finds its tracked run again."""
        return digest(f"{self.folder.resolve()}/{self.stage}")

    @property
    def project(self) -> str:
        return os.environ.get("POSTTRAIN_PROJECT", PROJECT)
