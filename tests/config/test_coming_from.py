"""Tables for those who come from another framework: the last column holds fields and names of this one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

import posttrain as pt
from posttrain.cli import app
from posttrain.config import ALGORITHMS, RunConfig
from posttrain.config.describe import field_table
from posttrain.config.messages import config_fields
from posttrain.config.run import SECTIONS
from posttrain.stages.preference import PREFERENCE_LOSSES, REWARD_LOSSES
from posttrain.stages.sft import SFT_LOSSES
from tests.documents import FENCE, ROOT

pytestmark = pytest.mark.fast

PAGES = sorted((ROOT / "docs" / "coming-from").glob("*.md"))
KEYS = [
    [word for word in key if isinstance(word, str) and word not in ("stages", *SECTIONS)] for key, _ in config_fields()
]
FIELDS = {".".join(key[start:]) for key in KEYS for start in range(len(key))}
"""Dotted names of all fields, from any section on."""
VALUES = {
    choice for section in (RunConfig, *SECTIONS.values()) for row in field_table(section) for choice in row.choices
}
VALUES |= {*ALGORITHMS, *PREFERENCE_LOSSES, *REWARD_LOSSES, *SFT_LOSSES, *SECTIONS}
OTHERS = {"metrics.jsonl"}
"""Files of a run."""


def cells(page: Path) -> Iterator[str]:
    """Code in the last cells of tables, without their heads."""
    for table in re.findall(r"(?:^\|.*\n)+", FENCE.sub("", page.read_text()), re.M):
        for line in table.splitlines()[2:]:
            yield from re.findall(r"`([^`]+)`", line.rstrip("| ").rpartition(" | ")[2])


def keys_of(value: Any, prefix: str = "") -> Iterator[str]:
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, dict):
            for key, inner in ((k, v) for k, v in item.items() if k != "..."):
                yield f"{prefix}{key}"
                if any(name.startswith(f"{prefix}{key}.") for name in FIELDS):
                    yield from keys_of(inner, f"{prefix}{key}.")


def unknown(code: str) -> str | None:
    """What is no field, value, command or public name; None: everything is."""
    if code.startswith("pt."):
        name = re.match(r"pt\.(\w+)", code)
        return None if name is not None and hasattr(pt, name[1]) else code
    if code.startswith("posttrain "):
        return None if code.split()[1] in get_command(app).commands else code
    if code in FIELDS | VALUES | OTHERS or (ROOT / code.partition(":")[0]).is_file():
        return None
    data = yaml.safe_load(code)
    wrong = [key for key in keys_of(data) if key not in FIELDS] if isinstance(data, dict | list) else [code]
    return ", ".join(wrong) or None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_name_what_there_is(page: Path) -> None:
    codes = list(cells(page))
    assert len(codes) > 15 and [wrong for code in codes if (wrong := unknown(code))] == []
