"""Import layers: a module imports only from the layers below its own, in any place of its text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "posttrain"

LAYERS = (
    {"errors", "tree", "statistics"},
    {"runtime"},
    {"user_code"},
    {"config", "batch", "metrics", "sandbox"},
    {"mesh", "tracking"},
    {"kernels"},
    {"models", "data", "losses"},
    {"weights"},
    {"train", "rollout", "tools"},
    {"cluster", "generation", "serve"},
    {"distill", "reward", "environments"},
    {"agents"},
    {"rl"},
    {"evaluation"},
    {"diagnosis"},
    {"stages"},
    {"plan"},
    {"runs"},
    {"chat", "export", "view"},
    {"results"},
    {"api", "commands"},
    {"cli"},
    {"__main__", "__init__"},
)
"""A unit (file or folder of the package) imports from units of the layers above its own in this list, never beside."""

LAYER_OF = {unit: layer for layer, units in enumerate(LAYERS) for unit in units}
FOR_ALL = {"__version__"}
OF_REWARDS = (
    "posttrain.reward.types.",
    "posttrain.rollout.trajectory.",
    "posttrain.sandbox.run.",
    "posttrain.user_code.import_object.",
)
"""What reward files may import: types, the sandbox, and functions by name."""
ONLY_INSIDE_FUNCTIONS = {"datasets", "grain", "orbax", "pandas", "tensorboard", "transformers"}
NEVER = {"torch", "tensorflow"}


def modules(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    """Syntax tree of a file, which tests only read."""
    return ast.parse(path.read_text())


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


def violations(unit: str, package: str, tree: ast.AST) -> list[str]:
    """Imports of a module of `unit` that its layer does not allow, as `LINE: rule`."""
    found = []
    for name, line in imported(tree, package):
        first, _, rest = name.partition(".")
        target = rest.split(".")[0] or "__init__"
        if first == "rewards":
            found.append(f"{line}: {unit} must not import rewards")
        if first != "posttrain" or target in FOR_ALL or target == unit:
            continue
        if LAYER_OF.get(target, len(LAYERS)) >= LAYER_OF[unit]:
            found.append(f"{line}: {unit} (layer {LAYER_OF[unit]}) must not import {name}")
    return found


def edges_of(modules_of: Mapping[str, ast.AST]) -> dict[str, list[str]]:
    """Modules that each module imports, in any place of its text; imports for type checkers count too."""
    edges = {}
    for name, tree in modules_of.items():
        found = {imported_module(target, modules_of) for target, _ in imported(tree, name)}
        edges[name] = sorted(target for target in found if target and target != name)
    return edges


def circles(modules_of: Mapping[str, ast.AST]) -> list[list[str]]:
    """Groups of modules that import one another, directly or through others."""
    edges = edges_of(modules_of)
    reached = {name: reachable(name, edges) for name in edges}
    groups = {tuple(sorted(o for o in reached[name] if name in reached[o])) for name in edges if name in reached[name]}
    return sorted(map(list, groups))


def imported_module(name: str, modules_of: Mapping[str, ast.AST]) -> str | None:
    """The module that an imported dotted name is or stands in."""
    while name and name not in modules_of:
        name = name.rpartition(".")[0]
    return name or None


def reachable(start: str, edges: dict[str, list[str]]) -> set[str]:
    waiting, found = list(edges[start]), set()
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += edges[name]
    return found


def test_no_circles() -> None:
    names = {module_name(path): tree_of(path) for path in modules(PACKAGE)}
    del names["posttrain"]  # loads public names on first use
    assert circles(names) == []


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def rows_of_contributing(head: str) -> list[list[str]]:
    """Cells in code marks, row by row, of the table of CONTRIBUTING with this head."""
    table = (ROOT / "CONTRIBUTING.md").read_text().partition(f"{head}\n")[2].partition("\n\n")[0]
    return [re.findall(r"`([^`]+)`", line) for line in table.splitlines()[1:]]


def test_contributing_has_these_layers() -> None:
    assert [set(names) for names in rows_of_contributing("| layer | |")] == list(LAYERS)


def test_readme_names_every_folder() -> None:
    tree = (ROOT / "README.md").read_text().partition("posttrain/\n  config/")[2].partition("```")[0]
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()} - {"config"}
    assert folders - set(re.findall(r"([a-z]+)/", tree)) == set()


def test_contributing_says_where_things_are() -> None:
    rows = rows_of_contributing("| what | file | name |")
    assert len(rows) > 15
    defined = {file: {getattr(node, "name", "") for node in tree_of(ROOT / file).body} for file, _ in rows}
    assert [(file, name) for file, name in rows if name not in defined[file]] == []


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        ({"a.b": "from a.c import x", "a.c": "def f():\n    from a.b import y"}, [["a.b", "a.c"]]),
        ({"a.b": "from a import c", "a.c": "from a.d import z", "a.d": "import a.b"}, [["a.b", "a.c", "a.d"]]),
        ({"a.b": "from a.c import x", "a.c": "import numpy"}, []),
    ],
)
def test_the_search_finds_circles(texts: dict[str, str], found: list[list[str]]) -> None:
    assert circles({name: ast.parse(text) for name, text in texts.items()}) == found


def package_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).parent.parts)


@pytest.mark.parametrize("path", modules(PACKAGE), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    unit = unit_of(path)
    assert unit in LAYER_OF, f"posttrain/{unit} is in no layer: add it to LAYERS"
    assert violations(unit, package_of(path), tree_of(path)) == []


def test_rewards_import_little() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in modules(ROOT / "rewards")
        for name, line in imported(tree_of(path), package_of(path))
        if name.split(".")[0] == "posttrain" and not f"{name}.".startswith(OF_REWARDS)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("unit", "package", "text", "count"),
    [
        ("models", "posttrain.models", "from posttrain.data import chat", 1),
        ("models", "posttrain.models", "from ..data import chat", 1),
        ("models", "posttrain.models", "from . import layers\nfrom posttrain.models.layers import x", 0),
        ("models", "posttrain.models.families", "from ..layers import x\nfrom ...losses import kl", 1),
        ("models", "posttrain.models", "def f():\n    import posttrain.losses.ratios", 1),
        ("models", "posttrain.models", "import_module('posttrain.train.checkpoint')", 1),
        ("train", "posttrain.train", "from posttrain.rollout.engine import E", 1),
        ("train", "posttrain.train", "from posttrain import losses, rl", 1),
        ("tree", "posttrain", "import posttrain", 1),
        ("tree", "posttrain", "import posttrain.brandnew", 1),
        ("rl", "posttrain.rl", "import rewards.gsm8k", 1),
        ("cli", "posttrain", "from posttrain import __version__\nfrom posttrain.api import SFT", 0),
    ],
)
def test_the_check_finds(unit: str, package: str, text: str, count: int) -> None:
    assert len(violations(unit, package, ast.parse(text))) == count


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
        for node in module_level(tree_of(path)):
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
        for name, line in imported(tree_of(path), package_of(path))
        if name.split(".")[0] in NEVER and path != INDEPENDENT_READER
    ]
    assert found == []
