"""Shell completion of configurations and of dotted overrides, for the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.errors import ConfigError

Candidates = Iterator[tuple[str, str]]
"""Completed words, each with its help."""


def complete_config(incomplete: str) -> list[str]:
    """YAML files that the text begins: of the current folder, and below a folder that it names or `configs`."""
    from posttrain.config.locator import Locator

    folder = incomplete.rpartition("/")[0] or "configs"
    here = sorted(path.name for path in Path().glob("*.y*ml"))
    found = Locator(folder).found
    below = [] if found is None else sorted(found.rglob("*.y*ml"))
    names = [*here, *(f"{folder}/{path.relative_to(found).as_posix()}" for path in below if found is not None)]
    return [name for name in names if name.startswith(incomplete)]


def complete_override(ctx: Any, incomplete: str) -> list[tuple[str, str]]:
    """`key=value` of the configuration in `ctx`, Typer's context, with its present value or each that it can have.

    Bash splits words at `=`: after one, the values alone. A configuration with a mistake has none.
    """
    config, typed = ctx.params.get("config"), list(ctx.params.get("overrides") or [])
    if not config:
        return []
    if typed and typed[-1] == "=":
        typed.pop()
    after = typed[-1] if typed and "=" not in typed[-1] else None
    start = incomplete if after is None else f"{after}={incomplete}"
    try:
        found = [(word, text) for word, text in _assignments(config, start) if word.startswith(start)]
    except ConfigError:
        return []
    return found if after is None else [(word.partition("=")[2], text) for word, text in found]


def _assignments(config: str, start: str) -> Candidates:
    from posttrain.config.describe import FieldRow, field_table
    from posttrain.config.run import SECTIONS, RunConfig
    from posttrain.config.yaml_file import has_stages, load_config, stage_settings

    loaded = load_config(config)

    def assignments(row: FieldRow, prefix: str, values: dict[str, object]) -> Candidates:
        name = f"{prefix}{row.name}"
        if row.type.endswith("section") or not (name.startswith(start) or start.startswith(f"{name}=")):
            return
        present = values.get(row.name)
        shown = str(present).lower() if isinstance(present, bool) else "" if present is None else str(present)
        for value in row.choices or (shown,):
            yield f"{name}={value}", row.description

    settings = [stage_settings(loaded, index) for index in range(len(loaded.stages))]
    for row in field_table(RunConfig):
        if not row.name.startswith("stages."):
            yield from assignments(row, "", settings[0])
    listed, kinds = has_stages(config), [stage.kind for stage in loaded.stages]
    for index, stage in enumerate(loaded.stages):
        name = stage.name or (stage.kind if kinds.count(stage.kind) == 1 else str(index))
        for row in field_table(SECTIONS[stage.kind]):
            yield from assignments(row, f"stages.{name}." if listed else "", settings[index])
