"""Programming tasks: completions are programs, run on tests in the sandbox of `posttrain.sandbox`, each with limits.

A program that fails, hangs or breaks a limit is wrong, with reward 0; it is no error of the reward function.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from posttrain.sandbox.run import run_python, run_test

FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
MAX_PARALLEL = 16
"""Maximum number of programs at a time; each needs three processes for a moment."""


def program_of(text: str) -> str:
    """Return the last fenced code block; the whole text if there is none.

    >>> program_of("So:\\n```python\\nx = 1\\n```\\nThat is it.")
    'x = 1\\n'
    """
    blocks = FENCE.findall(text)
    return blocks[-1] if blocks else text


def passes(
    completions: Sequence[str], tests: Sequence[str | Sequence[str]], *, seconds: float = 10.0, memory_mib: int = 1024
) -> list[float]:
    """1 where the program runs, and `tests` on it (Python, or a list of statements such as asserts) without an error.

    The tests run apart from the program, and import what they compare with: they call its functions, and make objects
    of its classes, whose names begin with capitals; what functions return is plain data for them. `seconds`: time-out
    of a program; set the reward's `timeout_s` to several times as much.
    """
    cases: list[tuple[str, str]] = [
        (program_of(text), test if isinstance(test, str) else "\n".join(test))
        for text, test in zip(completions, tests, strict=True)
    ]
    return _each(lambda case: _passes(case, seconds, memory_mib), cases)


def human_eval(
    completions: Sequence[str],
    prompt: Sequence[str],
    test: Sequence[str],
    entry_point: Sequence[str],
    *,
    seconds: float = 10.0,
    memory_mib: int = 1024,
) -> list[float]:
    """1 where the function passes its tests, with the columns of HumanEval (arXiv:2107.03374).

    A completion that defines `entry_point` replaces the prompt's function; any other continues the prompt.
    """
    cases: list[tuple[str, str]] = []
    for text, start, tests, name in zip(completions, prompt, test, entry_point, strict=True):
        code = program_of(text)
        # The prompt's imports and helpers count in either case.
        joint = "\n" if re.search(rf"^def {re.escape(name)}\b", code, re.MULTILINE) else ""
        body = f"{start}{'    pass' if joint else ''}{joint}{code}"
        # The tests have the prompt's helpers themselves.
        cases.append((body, f"tested = {name}\n{start}    pass\n\n{name} = tested\n{tests}\n\ncheck(tested)\n"))
    return _each(lambda case: _passes(case, seconds, memory_mib), cases)


def outputs(
    completions: Sequence[str],
    inputs: Sequence[Sequence[str]],
    outputs: Sequence[Sequence[str]],
    *,
    seconds: float = 10.0,
    memory_mib: int = 1024,
    partial: bool = False,
) -> list[float]:
    """1 where the program prints each of `outputs` for the standard input at the same place of `inputs`; spaces between
    words do not count. `partial`: the share of right outputs."""

    def score(case: tuple[str, Sequence[str], Sequence[str]]) -> float:
        text, given, expected = case
        right = 0
        for stdin, stdout in zip(given, expected, strict=True):
            found = run_python(program_of(text), stdin=stdin, timeout_s=seconds, memory_mib=memory_mib)
            right += found.code == 0 and found.stdout.split() == stdout.split()
            if not partial and not right:
                return 0.0
        return right / len(expected) if partial else float(right == len(expected))

    return _each(score, list(zip(completions, inputs, outputs, strict=True)))


def _passes(case: tuple[str, str], seconds: float, memory_mib: int) -> float:
    return float(run_test(*case, timeout_s=seconds, memory_mib=memory_mib).code == 0)


def _each(score: Callable[[Any], float], cases: Sequence[Any]) -> list[float]:
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_PARALLEL)) as pool:
        return list(pool.map(score, cases))
