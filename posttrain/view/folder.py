"""Run folders, read without loading a model or JAX: stages, state, and curves of metrics as far as they have grown."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from posttrain.errors import ConfigError
from posttrain.runtime.files import digest, is_locked

CONFIG = "config.yaml"
VERSIONS = "versions.json"
STAGE = re.compile(r"(\d+)-.+")
LIVE_S = 600.0
"""Seconds without a new line of metrics after which an unfinished run of another host counts as stopped."""
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
        try:
            names = [path.name for path in self.path.iterdir() if path.is_dir() and STAGE.fullmatch(path.name)]
        except FileNotFoundError:
            return []
        sections = self._settings().get("stages") or []
        return [_stage(name, sections) for name in sorted(names, key=lambda name: int(name.split("-")[0]))]

    def versions(self) -> list[dict[str, str]]:
        """Versions of each call of the run that had others, the last at the end; none of a run that wrote none."""
        try:
            found: list[dict[str, str]] = json.loads((self.path / VERSIONS).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return []
        return found

    def state(self) -> str:
        """`finished`, `live`, `stopped`, or `deleted`: a process of this host is alive while it locks the folder, and
        one of another while it writes metrics."""
        if not (self.path / CONFIG).is_file():
            return "deleted"
        stages, count = self.stages(), len(self._settings().get("stages") or [])
        if count and len(stages) == count and (self.path / stages[-1].name / "model").is_dir():
            return "finished"
        if (held := is_locked(self.path)) is not None:
            return "live" if held else "stopped"
        metrics = self.path / "metrics.jsonl"
        written = metrics.stat().st_mtime if metrics.is_file() else 0.0
        return "live" if time.time() - written < LIVE_S else "stopped"

    def _settings(self) -> dict[str, Any]:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        try:
            with (self.path / CONFIG).open("rb") as file:
                settings = yaml.load(file, loader)
        except FileNotFoundError:
            return {}
        return settings if isinstance(settings, dict) else {}


def find_runs(paths: Sequence[str | Path]) -> list[RunFolder]:
    """Runs named by their folder, the folder of one of their stages, or a folder that holds runs, which may be begun
    later. ConfigError for any other folder."""
    found: dict[Path, RunFolder] = {}
    for given in paths:
        runs = runs_in(Path(given).expanduser().resolve())
        if not runs:
            raise ConfigError(f"view: {given} is no run: it has no {CONFIG}; give the output folder of a run")
        found |= {run: RunFolder(run) for run in runs}
    return list(found.values())


def runs_in(path: Path) -> list[Path]:
    """Output folders of the runs that a path names at present."""
    if (path / CONFIG).is_file():
        return [path]
    if (path.parent / CONFIG).is_file() and path.is_dir():
        return [path.parent]
    return sorted(file.parent for file in path.glob(f"*/{CONFIG}")) if path.is_dir() else []


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


Point = tuple[int, float]
HEAD = ("step", "stage", "time")
MAX_POINTS = 2000
"""Points of a curve; longer ones are thinned to means of neighbouring steps."""


class CurveReader:
    """Reader of a growing file of metrics. Lines that the run has removed are forgotten."""

    def __init__(self, file: Path):
        self._file, self._lock = file, threading.Lock()
        self._identity: tuple[int, int] | None = None
        self._read = 0
        self._curves: dict[tuple[str, str], list[Point]] = {}

    def names(self) -> dict[str, list[str]]:
        """Names of metrics by stage."""
        with self._lock:
            self._update()
            found: dict[str, list[str]] = {}
            for stage, name in self._curves:
                found.setdefault(stage, []).append(name)
        return {stage: sorted(names) for stage, names in found.items()}

    def curve(self, stage: str, name: str) -> dict[str, Any]:
        """Steps and values of a metric, and how many steps are averaged in a point."""
        with self._lock:
            self._update()
            points = list(self._curves.get((stage, name), ()))
        width = -(-len(points) // MAX_POINTS) or 1
        parts = [points[start : start + width] for start in range(0, len(points), width)]
        return {
            "steps": [part[-1][0] for part in parts],
            "values": [sum(value for _, value in part) / len(part) for part in parts],
            "width": width,
        }

    def value(self, stage: str, name: str, step: int) -> float | None:
        """Value of a metric at a step; None if it is not logged."""
        with self._lock:
            self._update()
            return dict(self._curves.get((stage, name), ())).get(step)

    def _update(self) -> None:
        try:
            file = self._file.open("rb")
        except FileNotFoundError:
            return
        with file:
            stat = self._file.stat()
            if self._identity != (stat.st_dev, stat.st_ino) or stat.st_size < self._read:
                self._identity, self._read, self._curves = (stat.st_dev, stat.st_ino), 0, {}
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # being written
                self._read += len(line)
                self._add(json.loads(line))

    def _add(self, line: dict[str, Any]) -> None:
        for name, value in line.items():
            if name not in HEAD and isinstance(value, int | float):
                self._curves.setdefault((line["stage"], name), []).append((line["step"], float(value)))
