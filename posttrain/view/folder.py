"""Run folders: their stages and state, read without loading a model or JAX."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from posttrain.errors import ConfigError
from posttrain.runtime.files import digest

CONFIG = "config.yaml"
STAGE = re.compile(r"(\d+)-.+")
LIVE_S = 600.0
"""Seconds without a new line of metrics after which an unfinished run counts as stopped."""
PASS_ABOVE = 0.5
"""Reward above which a sample passes, of stages whose settings have none."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Stage of a run that has begun."""

    name: str
    kind: str
    num_steps: int | None
    """None: not in the settings."""
    pass_above: float


@dataclass(frozen=True)
class RunFolder:
    """Output folder of a run."""

    path: Path

    @property
    def key(self) -> str:
        """Name of the run's cache folder: digits of its path."""
        return digest(str(self.path))

    def stages(self) -> list[Stage]:
        """Stages that have begun, in the order of the run."""
        names = [path.name for path in self.path.iterdir() if path.is_dir() and STAGE.fullmatch(path.name)]
        sections = self._settings().get("stages") or []
        return [_stage(name, sections) for name in sorted(names, key=lambda name: int(name.split("-")[0]))]

    def state(self) -> str:
        """`finished`, `live`, or `stopped`."""
        stages, count = self.stages(), len(self._settings().get("stages") or [])
        if count and len(stages) == count and (self.path / stages[-1].name / "model").is_dir():
            return "finished"
        metrics = self.path / "metrics.jsonl"
        written = metrics.stat().st_mtime if metrics.is_file() else 0.0
        return "live" if time.time() - written < LIVE_S else "stopped"

    def _settings(self) -> dict[str, Any]:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        with (self.path / CONFIG).open("rb") as file:
            settings = yaml.load(file, loader)
        return settings if isinstance(settings, dict) else {}


def find_runs(paths: Sequence[str | Path]) -> list[RunFolder]:
    """Runs named by their folder, the folder of one of their stages, or a folder that holds runs. ConfigError for any
    other folder."""
    found: dict[Path, RunFolder] = {}
    for given in paths:
        path = Path(given).expanduser().resolve()
        if (path / CONFIG).is_file():
            runs = [path]
        elif (path.parent / CONFIG).is_file() and path.is_dir():
            runs = [path.parent]
        else:
            runs = sorted(file.parent for file in path.glob(f"*/{CONFIG}")) if path.is_dir() else []
        if not runs:
            raise ConfigError(f"view: {given} is no run: it has no {CONFIG}; give the output folder of a run")
        found |= {run: RunFolder(run) for run in runs}
    return list(found.values())


def _stage(name: str, sections: Sequence[Any]) -> Stage:
    number, kind = name.split("-", 1)
    index = int(number)
    section = sections[index] if index < len(sections) and isinstance(sections[index], dict) else {}
    return Stage(
        name=name,
        kind=section.get("kind", kind),
        num_steps=section.get("num_steps"),
        pass_above=section.get("pass_above", PASS_ABOVE),
    )
