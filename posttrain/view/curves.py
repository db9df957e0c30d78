"""Curves of a run: its metrics by name, read from `metrics.jsonl` as far as it has grown."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

Point = tuple[int, float]
HEAD = ("step", "stage", "time")
MAX_POINTS = 2000
"""Points of a curve; longer ones are thinned to means of neighbouring steps."""


class Curves:
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
