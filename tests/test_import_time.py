"""`import posttrain` and `posttrain --help` answer in under a second and load nothing heavy."""

from __future__ import annotations

import ast
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import posttrain

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 1.0
TRIES = 3
HEAVY = ("jax", "jaxlib", "flax", "optax", "orbax", "grain", "datasets", "transformers", "tensorboard", "numpy")

HELP = "import sys; sys.argv = ['posttrain', '--help']; from posttrain.cli import main; main()"


def run(code: str) -> tuple[float, str]:
    """Processor time of `python -c code` in seconds, the best of three, and what it printed.

    Starting up waits for nothing but the processor, and its time stays the same on a busy machine.
    """
    best, output = float("inf"), ""
    for _ in range(TRIES):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        best, output = min(best, seconds), done.stdout
        if best < LIMIT_S:
            break
    return best, output


@pytest.mark.parametrize(
    "code",
    ["import posttrain", "from posttrain.config.yaml_file import load_config", HELP],
    ids=["package", "config", "help"],
)
def test_under_a_second(code: str) -> None:
    seconds, _ = run(code)
    assert seconds < LIMIT_S


@pytest.mark.parametrize(
    "code",
    ["import posttrain", "from posttrain.config.yaml_file import load_config", HELP],
    ids=["package", "config", "help"],
)
def test_nothing_heavy_is_loaded(code: str) -> None:
    report = f"import atexit, sys; atexit.register(lambda: print('LOADED', *sorted(set(sys.modules) & set({HEAVY}))))"
    _, output = run(f"{report}\n{code}")
    assert output.splitlines()[-1] == "LOADED"


def test_help_names_the_commands() -> None:
    _, output = run(HELP)
    assert all(command in output for command in ("run", "check", "generate"))


def test_public_names_load() -> None:
    names = [name for name in posttrain.__all__ if name != "__version__"]
    # A member of an enumeration has another attribute for its name.
    found = {name: getattr(posttrain, name) for name in names}
    assert [name for name, one in found.items() if getattr(one, "__name__", getattr(one, "name", None)) != name] == []
    assert set(names) <= set(dir(posttrain))


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse((ROOT / "posttrain" / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.asname: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen == posttrain._MODULES


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'posttrain' has no attribute 'nothing'$"):
        posttrain.nothing  # noqa: B018
