"""Software engineering: a small git repository with a failing test, which the policy repairs with tools.

The agent's own loop is here, written with the `openai` client: it reads and edits files of the repository, and runs the
tests in a sandbox. Its reward is 1 if the tests of the first commit pass, whatever it has done to them.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from openai import OpenAI

from posttrain.data.chat import Message
from posttrain.sandbox.run import Result, run, run_test

SYSTEM = (
    "You repair a Python repository. Find out why its test fails, edit the source, and run the tests until they pass. "
    "Then say DONE. Do not change the tests."
)
MAX_CHARS = 4000
"""Maximum length of a tool's answer."""

MODULES: Mapping[str, tuple[str, str, tuple[tuple[str, str], ...]]] = {
    "clamp": (
        "def clamp(value, low, high):\n    return max(low, min(value, high))\n",
        "assert clamp(5, 0, 3) == 3 and clamp(-1, 0, 3) == 0 and clamp(2, 0, 3) == 2",
        (("max(low, min(value, high))", "min(low, max(value, high))"), ("min(value, high)", "min(value, low)")),
    ),
    "median": (
        "def median(values):\n    ordered = sorted(values)\n    middle = len(ordered) // 2\n"
        "    if len(ordered) % 2:\n        return ordered[middle]\n"
        "    return (ordered[middle - 1] + ordered[middle]) / 2\n",
        "assert median([3, 1, 2]) == 2 and median([4, 1, 3, 2]) == 2.5",
        (("sorted(values)", "list(values)"), ("ordered[middle - 1]", "ordered[middle + 1]")),
    ),
    "gcd": (
        "def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a\n",
        "assert gcd(12, 18) == 6 and gcd(7, 3) == 1 and gcd(0, 4) == 4",
        (("a % b", "a // b"), ("return a", "return b")),
    ),
    "chunks": (
        "def chunks(items, size):\n    return [items[i : i + size] for i in range(0, len(items), size)]\n",
        "assert chunks([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]] and chunks([], 3) == []",
        (("i + size]", "size]"), ("range(0, len(items), size)", "range(0, len(items) - size, size)")),
    ),
    "flatten": (
        "def flatten(items):\n    found = []\n    for item in items:\n        if isinstance(item, list):\n"
        "            found.extend(flatten(item))\n        else:\n            found.append(item)\n    return found\n",
        "assert flatten([1, [2, [3]], []]) == [1, 2, 3]",
        (("found.extend(flatten(item))", "found.extend(item)"), ("found.append(item)", "found.append([item])")),
    ),
    "count_words": (
        "def count_words(text):\n    counts = {}\n    for word in text.lower().split():\n"
        "        counts[word] = counts.get(word, 0) + 1\n    return counts\n",
        'assert count_words("A b a") == {"a": 2, "b": 1}',
        (("text.lower().split()", "text.split()"), ("counts.get(word, 0) + 1", "1")),
    ),
    "running_max": (
        "def running_max(values):\n    found, best = [], None\n    for value in values:\n"
        "        best = value if best is None else max(best, value)\n        found.append(best)\n    return found\n",
        "assert running_max([2, 1, 3]) == [2, 2, 3] and running_max([]) == []",
        (("max(best, value)", "max(0, value)"), ("found.append(best)", "found.append(value)")),
    ),
    "is_leap": (
        "def is_leap(year):\n    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)\n",
        "assert is_leap(2024) and is_leap(2000) and not is_leap(1900) and not is_leap(2023)",
        (("year % 100 != 0 or year % 400 == 0", "year % 100 != 0"), ("year % 400 == 0", "year % 400 != 0")),
    ),
}

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": text, "parameters": {
        "type": "object", "properties": {p: {"type": "string", "description": d} for p, d in parameters.items()},
        "required": list(parameters)}}}
    for name, text, parameters in (
        ("list_files", "List the files of the repository.", {}),
        ("read_file", "Read a file.", {"path": "Path in the repository."}),
        ("edit_file", "Replace a text that occurs once in a file.",
         {"path": "Path in the repository.", "old": "Text to replace.", "new": "New text."}),
        ("run_tests", "Run the tests; answers with their output.", {}),
    )
]  # fmt: skip


def tasks(*, count: int, seed: int) -> list[dict[str, Any]]:
    """Rows with `prompt`, the `files` of the repository by path as JSON, and `fixed`, the source without the bug."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        name = draw.choice(sorted(MODULES))
        source, check, bugs = MODULES[name]
        right, wrong = draw.choice(bugs)
        others = draw.sample(sorted(MODULES.keys() - {name}), 2)
        files = {
            f"{name}.py": source.replace(right, wrong),
            f"test_{name}.py": f"from {name} import {name}\n\n{check}\nprint('ok')\n",
            **{f"{other}.py": MODULES[other][0] for other in others},
            "README.md": f"# Helpers\n\n`{name}` and others.\n",
        }
        request = f"The test of {name} fails. Repair it."
        prompt = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": request}]
        rows.append({"prompt": prompt, "files": json.dumps(files), "fixed": source, "module": name})
    return rows


def solve(
    base_url: str, api_key: str, model: str, messages: list[Message], files: str, max_turns: int = 8
) -> dict[str, float]:
    """Work on one task; the reward is 1.0 if the tests of the first commit pass at the end, else 0.0."""
    with (
        OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client,
        tempfile.TemporaryDirectory(prefix="repair-") as folder,
    ):
        repository = Repository(Path(folder), json.loads(files))
        said: list[Any] = list(messages)
        for _ in range(max_turns):
            answer = client.chat.completions.create(model=model, messages=said, tools=TOOLS).choices[0].message
            said.append(answer)
            if not answer.tool_calls:
                break
            for call in answer.tool_calls:
                text = repository.call(call.function.name, call.function.arguments)
                said.append({"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": text})
        passed = repository.passes()
        return {"reward": float(passed), "edits": float(repository.edits), "runs": float(repository.runs)}


class Repository:
    """Git repository in a folder, with the tools that work on it."""

    def __init__(self, folder: Path, files: Mapping[str, str]):
        self.folder, self.edits, self.runs = folder, 0, 0
        for path, text in files.items():
            (folder / path).write_text(text, encoding="utf-8")
        self.git("init", "-q")
        self.git("add", "-A")
        self.git("-c", "user.name=task", "-c", "user.email=task@localhost", "commit", "-q", "-m", "The task")

    def git(self, *arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=self.folder, capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout

    def call(self, name: str, arguments: str) -> str:
        """Answer a tool call; mistakes are answered too."""
        tools: dict[str, Callable[..., str]] = {
            "list_files": self.list_files,
            "read_file": self.read_file,
            "edit_file": self.edit_file,
            "run_tests": self.run_tests,
        }
        if name not in tools:
            return f"Error: no tool {name!r}; tools are {', '.join(tools)}"
        try:
            return tools[name](**json.loads(arguments))[:MAX_CHARS]
        except (TypeError, ValueError, OSError) as error:
            return f"Error: {error}"

    def list_files(self) -> str:
        return self.git("ls-files").strip()

    def read_file(self, path: str) -> str:
        return self._inside(path).read_text(encoding="utf-8")

    def edit_file(self, path: str, old: str, new: str) -> str:
        """Replace a text that occurs once. ValueError if it does not."""
        file = self._inside(path)
        text = file.read_text(encoding="utf-8")
        if not old or text.count(old) != 1:
            raise ValueError(
                f"the text occurs {text.count(old) if old else 0} times in {path}; give one that occurs once"
            )
        file.write_text(text.replace(old, new), encoding="utf-8")
        self.edits += 1
        return self.git("diff", "--", path)

    def run_tests(self) -> str:
        self.runs += 1
        done = self._run({path.name: path.read_text(encoding="utf-8") for path in self.folder.glob("*.py")})
        if done.timed_out:
            return "The tests did not end in time."
        return f"exit code {done.code}\n{done.stdout}{done.stderr}"

    def passes(self) -> bool:
        """Tell whether the tests of the first commit pass on the sources of now."""
        files = {path.name: path.read_text(encoding="utf-8") for path in self.folder.glob("*.py")}
        tests = [name for name in self.git("ls-tree", "--name-only", "HEAD").split() if name.startswith("test_")]
        sources = {name: text for name, text in files.items() if not name.startswith("test_")}
        # The tests run apart from what was edited, which has no part in the verdict.
        done = run_test(
            "",
            "".join(f"import {name.removesuffix('.py')}\n" for name in tests),
            program_files=sources,
            test_files={name: self.git("show", f"HEAD:{name}") for name in tests},
            modules=[name.removesuffix(".py") for name in sources],
            timeout_s=20.0,
        )
        return bool(tests) and done.code == 0

    def _run(self, files: Mapping[str, str]) -> Result:
        """Run all tests in the sandbox, one after the other."""
        tests = sorted(name.removesuffix(".py") for name in files if name.startswith("test_"))
        program = f"import sys; sys.path.insert(0, '.'); [__import__(name) for name in {tests!r}]"
        return run([sys.executable, "-c", program], files=files, timeout_s=20.0)

    def _inside(self, path: str) -> Path:
        file = (self.folder / path).resolve()
        if not file.is_relative_to(self.folder.resolve()) or ".git" in file.parts:
            raise ValueError(f"{path} is outside of the repository")
        return file
