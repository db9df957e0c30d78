import math
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from posttrain.errors import ConfigError, did_you_mean
from posttrain.reward.call import check_values
from posttrain.user_code import import_object, number_of


class Tensor:
    """Interface of PyTorch's tensors: `size` is a method, and only one element has a value."""

    def __init__(self, *shape: int):
        self.shape = shape

    def size(self) -> tuple[int, ...]:
        return self.shape

    def __float__(self) -> float:
        raise TypeError("use item()")

    def item(self) -> float:
        return 1.5


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (True, 1.0),
        (Fraction(3, 2), 1.5),
        (Decimal("1.5"), 1.5),
        (10**400, math.inf),
        (np.float32(1.5), 1.5),
        (np.bool_(True), 1.0),
        (np.ones((1, 1)), 1.0),
        (np.asarray(1.5, ml_dtypes.bfloat16), 1.5),
        (jnp.asarray([1.5], jnp.bfloat16), 1.5),
        (Tensor(), 1.5),
        (Tensor(1), 1.5),
        (Tensor(2), None),
        (np.ones(2), None),
        ("1", None),
        (np.str_("1"), None),
        (1j, None),
        ([1.0], None),
        (None, None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_numbers_of_other_libraries(value: Any, number: float | None) -> None:
    assert number_of(value) == number
    if not isinstance(value, int) or value < 2:
        assert check_values([value, 0], 2).values[0] == pytest.approx(
            math.nan if number is None else number, nan_ok=True
        )


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)


def test_file_object_is_loaded_once_with_its_siblings(tmp_path: Path) -> None:
    write(tmp_path, "helper_of_reward.py", "SCALE = 3\n")
    write(
        tmp_path,
        "my_reward.py",
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom helper_of_reward import SCALE\n"
        "@dataclass\nclass Box:\n    x: int\ndef score(n):\n    return n * SCALE\n",
    )
    path_before = list(sys.path)
    score = import_object("my_reward.py:score", tmp_path)
    assert callable(score)
    assert score(2) == 6
    assert import_object("my_reward.py:Box", tmp_path) is import_object(f"{tmp_path}/my_reward.py:Box", Path.cwd())
    assert sys.path == path_before


def test_changed_code_is_imported_anew(tmp_path: Path) -> None:
    """Of the file, and of a module beside it; of the same size, within a second. Red without: a notebook's second run
    has the code of the first one, while its folder names the new code."""
    write(tmp_path, "bonus_of_reward.py", "BONUS = 1\n")
    write(tmp_path, "edited.py", "from bonus_of_reward import BONUS\ndef score(n):\n    return n + BONUS\n")

    def value() -> object:
        return import_object("edited.py:score", tmp_path)(10)  # type: ignore[operator]

    assert value() == 11
    kept = import_object("edited.py:score", tmp_path)
    assert import_object("edited.py:score", tmp_path) is kept
    write(tmp_path, "edited.py", "from bonus_of_reward import BONUS\ndef score(n):\n    return n * BONUS\n")
    assert value() == 10
    write(tmp_path, "bonus_of_reward.py", "BONUS = 7\n")
    assert value() == 70
    assert import_object("bonus_of_reward:BONUS", tmp_path) == 7


def test_module_below_the_folder(tmp_path: Path) -> None:
    package = tmp_path / "pkg_of_rewards"
    package.mkdir()
    write(package, "__init__.py", "")
    write(package, "maths.py", "def correct(): return 1\n")
    assert import_object("pkg_of_rewards.maths:correct", tmp_path)() == 1  # type: ignore[operator]
    with pytest.raises(ConfigError, match=r"has no module 'mathz'; did you mean 'maths'\?"):
        import_object("pkg_of_rewards.mathz:correct", tmp_path)
    with pytest.raises(ConfigError, match=r"has no 'corect'; did you mean 'correct'\?"):
        import_object("pkg_of_rewards.maths:corect", tmp_path)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gsm8j.py:correct", r"no file .*gsm8j\.py; did you mean 'gsm8k\.py'\?"),
        ("nowhere/gsm8k.py:correct", r"no folder .*nowhere"),
        ("gsm8k.py:corect", r"gsm8k\.py has no 'corect'; did you mean 'correct'\?"),
        ("raising.py:f", r"fails to import: ZeroDivisionError: division by zero \(.*raising\.py:2\)"),
        ("syntax.py:f", r"fails to import: SyntaxError: .* \(.*syntax\.py:1\)"),
        ("lacking.py:f", r"fails to import: ModuleNotFoundError: .*'no_such_library'.* \(.*lacking\.py:1\)"),
        ("leaving.py:f", r"leaving\.py:f fails to import: SystemExit: sys.exit\(0\) is called \(.*leaving\.py:2\)"),
        ("leaving:f", r"leaving:f fails to import: SystemExit: sys.exit\(0\) is called \(.*leaving\.py:2\)"),
        ("jsonn:loads", r"no module 'jsonn' in .* or installed; did you mean 'json'\?"),
        ("lacking:f", r"fails to import: ModuleNotFoundError: .*'no_such_library'"),
        ("gsm8k.py", "does not name an object"),
    ],
)
def test_errors_are_one_line_with_the_nearest_name(tmp_path: Path, spec: str, message: str) -> None:
    write(tmp_path, "gsm8k.py", "def correct(): ...\n")
    write(tmp_path, "raising.py", "x = 1\ny = x / 0\n")
    write(tmp_path, "leaving.py", "import sys\nsys.exit(0)\n")
    write(tmp_path, "syntax.py", "def f(:\n")
    write(tmp_path, "lacking.py", "import no_such_library\n")
    with pytest.raises(ConfigError, match=message) as caught:
        import_object(spec, tmp_path)
    assert "\n" not in str(caught.value)


def test_a_failed_import_is_tried_again(tmp_path: Path) -> None:
    write(tmp_path, "flaky.py", "raise ValueError('first')\n")
    with pytest.raises(ConfigError, match="first"):
        import_object("flaky.py:f", tmp_path)
    write(tmp_path, "flaky.py", "def f(): return 'mended'\n")
    assert import_object("flaky.py:f", tmp_path)() == "mended"  # type: ignore[operator]


def test_did_you_mean_says_nothing_without_resemblance() -> None:
    assert did_you_mean("prompt", ["zzz"]) == ""
    assert did_you_mean("completion", ["prompt", "question"]) == did_you_mean("question", ["solution"]) == ""
    assert did_you_mean("completion", ["prompt", "completions"]) == "; did you mean 'completions'?"
    assert did_you_mean("sft", ["rl", "stf"]) == "; did you mean 'stf'?"
