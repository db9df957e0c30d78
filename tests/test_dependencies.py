"""What the packages import is declared, and the versions in constraints.txt satisfy what is declared."""

from __future__ import annotations

import ast
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL_EXTRAS = ("agents", "grammar", "mcp", "notebooks", "rewards", "serve", "view")
OPTIONAL = [text for extra in OPTIONAL_EXTRAS for text in PROJECT["optional-dependencies"][extra]]
"""Imported where the configuration asks for it."""
EXTRAS = [text for extra in PROJECT["optional-dependencies"].values() for text in extra]
OURS = {"posttrain", "rewards", "envs"}
WHERE_INSTALLED = {"torch", "peft"}
"""Read what was exported, as others will; nothing needs them."""
CLIENTS = {"openai", "httpx"}
"""Clients of the example of an agent, whose users bring their own."""


def requirements(texts: list[str]) -> dict[str, Requirement]:
    return {canonicalize_name(Requirement(text).name): Requirement(text) for text in texts}


def imported_packages() -> set[str]:
    names: set[str] = set()
    for path in [path for folder in OURS for path in (ROOT / folder).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.split(".")[0])
    return names - OURS - WHERE_INSTALLED - CLIENTS - set(sys.stdlib_module_names)


def test_every_import_is_a_dependency_with_an_upper_bound() -> None:
    declared = requirements([*PROJECT["dependencies"], *OPTIONAL])
    providers = packages_distributions()
    assert (
        sorted(
            name
            for name in imported_packages()
            if not declared.keys() & {canonicalize_name(provider) for provider in providers.get(name, ())}
        )
        == []
    )
    assert [name for name, requirement in declared.items() if "<" not in str(requirement.specifier)] == []


def test_constraints_satisfy_the_bounds() -> None:
    declared = requirements([*EXTRAS, *PROJECT["dependencies"]])
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    for constraint in map(Requirement, lines):
        (pin,) = constraint.specifier
        bounds = declared.get(canonicalize_name(constraint.name))
        assert pin.operator == "==", constraint
        assert bounds is None or bounds.specifier.contains(pin.version), f"{constraint} is outside of {bounds}"


def test_every_dependency_has_a_tested_version() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = requirements([line for line in lines if not line.startswith("#")])
    assert sorted(requirements(PROJECT["dependencies"]).keys() - pinned.keys()) == []
