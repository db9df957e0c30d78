"""Import layers: a module imports only from the layers below its own, in any place of its text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "posttrain"

LAYERS = (
    {"tree", "config", "config_errors", "config_file", "cpu", "host_memory", "imports"},
    {"mesh", "batch", "accumulate", "metrics", "statistics", "sinks", "console", "optim", "kernels"},
    {"models", "data", "losses", "checkpoint"},
    {"weights"},
    {"trainer", "objective", "matching", "reference", "fit", "rollout", "plan"},
    {"rl"},
    {"recipes", "view"},
    {"cli"},
    {"__main__", "__init__"},
)
SIDEWAYS = {
    ("config_file", "config"),
    ("config_file", "config_errors"),
    ("config_errors", "config"),
    ("config_errors", "imports"),
    ("imports", "config"),
    ("kernels", "batch"),
    ("accumulate", "batch"),
    ("sinks", "metrics"),
    ("sinks", "console"),
    ("console", "metrics"),
    ("fit", "trainer"),
    ("reference", "trainer"),
    ("trainer", "objective"),
    ("trainer", "matching"),
    ("objective", "matching"),
}
"""Imports within a layer. There are none among models, data, losses and checkpoint, nor of trainer and rollout."""

LAYER_OF = {unit: layer for layer, units in enumerate(LAYERS) for unit in units}
FOR_ALL = {"__version__"}
ONLY_INSIDE_FUNCTIONS = {"datasets", "grain", "orbax", "tensorboard", "transformers"}
NEVER = {"torch", "tensorflow"}


def modules(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def imported(tree: ast.AST, package: str) -> Iterator[tuple[str, int]]:
    """Dotted names that a module imports, also inside functions, relatively or through `import_module("...")`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            source = ".".join(part for part in (base, node.module or "") if part)
            yield from ((f"{source}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield str(node.args[0].value), node.lineno


def unit_of(path: Path) -> str:
    """The file or folder directly below the package that `path` is or lies in."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def violations(unit: str, package: str, text: str) -> list[str]:
    """Imports of a module of `unit` that its layer does not allow, as `LINE: rule`."""
    found = []
    for name, line in imported(ast.parse(text), package):
        first, _, rest = name.partition(".")
        target = rest.split(".")[0] or "__init__"
        if first == "rewards":
            found.append(f"{line}: {unit} must not import rewards")
        if first != "posttrain" or target in FOR_ALL or target == unit or (unit, target) in SIDEWAYS:
            continue
        if LAYER_OF.get(target, len(LAYERS)) >= LAYER_OF[unit]:
            found.append(f"{line}: {unit} (layer {LAYER_OF[unit]}) must not import {name}")
    return found


def package_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).parent.parts)


@pytest.mark.parametrize("path", modules(PACKAGE), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    unit = unit_of(path)
    assert unit in LAYER_OF, f"posttrain/{unit} is in no layer: add it to LAYERS"
    assert violations(unit, package_of(path), path.read_text()) == []


def test_rewards_import_only_the_types_of_rl() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in modules(ROOT / "rewards")
        for name, line in imported(ast.parse(path.read_text()), package_of(path))
        if name.split(".")[0] == "posttrain" and not f"{name}.".startswith("posttrain.rl.types.")
    ]
    assert found == []


@pytest.mark.parametrize(
    ("unit", "package", "text", "count"),
    [
        ("models", "posttrain.models", "from posttrain.data import chat", 1),
        ("models", "posttrain.models", "from ..data import chat", 1),
        ("models", "posttrain.models", "from . import layers\nfrom posttrain.models.layers import x", 0),
        ("models", "posttrain.models.families", "from ..layers import x\nfrom ...losses import kl", 1),
        ("models", "posttrain.models", "def f():\n    import posttrain.losses.kl", 1),
        ("models", "posttrain.models", "import_module('posttrain.train.checkpoint')", 1),
        ("trainer", "posttrain", "from posttrain.rollout.engine import E", 1),
        ("trainer", "posttrain", "from posttrain import losses, rl", 1),
        ("tree", "posttrain", "import posttrain", 1),
        ("tree", "posttrain", "import posttrain.brandnew", 1),
        ("rl", "posttrain.rl", "import rewards.gsm8k", 1),
        ("cli", "posttrain", "from posttrain import __version__\nfrom posttrain.stages.sft import SFT", 0),
    ],
)
def test_the_check_finds(unit: str, package: str, text: str, count: int) -> None:
    assert len(violations(unit, package, text)) == count


def module_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported; not those under `if TYPE_CHECKING`."""
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        yield node
        waiting += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]


def test_heavy_packages_are_imported_inside_functions() -> None:
    found = []
    for path in modules(PACKAGE):
        for node in module_level(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {name.split(".")[0] for name, _ in imported(ast.Module([node], []), package_of(path))}
                found += [f"{path.relative_to(ROOT)}:{node.lineno}: {n}" for n in names & ONLY_INSIDE_FUNCTIONS]
    assert found == []


INDEPENDENT_READER = PACKAGE / "export" / "readers.py"
"""Reads what was written with another implementation, where that is installed."""


def test_no_other_framework() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for folder in (PACKAGE, ROOT / "rewards")
        for path in modules(folder)
        for name, line in imported(ast.parse(path.read_text()), package_of(path))
        if name.split(".")[0] in NEVER and path != INDEPENDENT_READER
    ]
    assert found == []
