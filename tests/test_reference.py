"""Generated pages: every field of the schema with TRL's names, every public name of the package."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import posttrain as pt
from posttrain.config.messages import config_fields
from posttrain.config.other_names import TRL_NAMES, trl_names_of

HOOKS = Path(__file__).resolve().parent.parent / "docs" / "hooks.py"


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("documents_hooks", HOOKS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_configuration_reference_has_every_field_with_the_names_of_trl(hooks: ModuleType) -> None:
    rows = [line for line in hooks.config_page().splitlines() if line.startswith("| `")]
    for key, info in config_fields():
        if key[-1] == "kind":
            continue
        dotted = ".".join(map(str, key))
        own = [row for row in rows if row.startswith(f"| `{key[-1]}` |")]
        assert own, dotted
        if info.description is not None:
            assert any(" ".join(info.description.split()).replace("|", "\\|") in row for row in own), dotted
        for entry in trl_names_of(dotted):
            assert any(f"`{entry.trl}`" in row for row in own), (dotted, entry.trl)
    assert [entry for entry in TRL_NAMES if not any(row.startswith(f"| `{entry.trl}` |") for row in rows)] == []


def test_configuration_reference_links_to_its_own_headings(hooks: ModuleType) -> None:
    page = hooks.config_page()
    sections = [hooks.anchor(section) for section in hooks.ordered_sections()]
    assert len({*sections}) == len(sections)
    assert [name for name in sections if page.count(f'<a id="{name}"></a>') != 1] == []
    assert set(re.findall(r"\]\(#([\w-]+)\)", page)) <= {*sections, "trl-names"}


def test_the_configuration_reference_in_the_repository_is_that_of_the_schema(hooks: ModuleType) -> None:
    assert hooks.CONFIG_PAGE.read_text() == hooks.config_page(), "write it anew: .venv/bin/python docs/hooks.py"


def test_python_reference_has_every_public_name(hooks: ModuleType) -> None:
    page = hooks.api_page()
    assert [name for name in pt.__all__ if not name.startswith("__") and f"## pt.{name}\n" not in page] == []
