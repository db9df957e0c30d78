"""Identity of a run's user code: digests of the local files that its functions import, of functions without a file, and
of the values that these read. Layout and comments do not count, docstrings do: tools show theirs to the model."""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import json
import os
import re
import sys
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from posttrain.config import (
    PPO,
    DistillSection,
    Locator,
    OnlineSection,
    RLSection,
    RunConfig,
    Section,
    SFTSection,
    TrainSection,
    UserObject,
    UserOptimizer,
)
from posttrain.config.secrets import names_secret
from posttrain.errors import ConfigError
from posttrain.runtime.files import digest
from posttrain.user_code import is_object_spec

CODE_NAME = "code.json"
OWN = Path(__file__).resolve().parents[1]
MUTATORS = frozenset(
    ("add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update")
)
PLACE = re.compile(
    r"^(HOSTNAME|HOME|USER|PATH|PWD|TMPDIR|(.*_)?(RANK|PROCID|PROCESS_ID|WORKER_ID|TASK_ID|COMPLETION_INDEX|VISIBLE_DEVICES))$"
)
"""Environment variables that differ between the processes of a run, or where it resumes."""
VARIABLE = re.compile(r"(?:\benviron(?:\.\w+)?|\bgetenv)[\[(]'(\w+)'")


def remember_code(output: Path, config: RunConfig) -> None:
    """Write the digests into the folder of a new run."""
    (output / CODE_NAME).write_text(json.dumps(code_digests(config), indent=1), encoding="utf-8")


def check_code(output: Path, config: RunConfig) -> None:
    """Check the user code. ConfigError if a function, code that it imports, or a value that these read has changed
    since the run started."""
    file = output / CODE_NAME
    if not file.exists():
        remember_code(output, config)
        return
    before, differing = json.loads(file.read_text(encoding="utf-8")), []
    for place, new in code_digests(config).items():
        old = before.get(place, new)
        if changed := [part for part in {**old, **new} if old.get(part) != new.get(part)]:
            differing.append(f"{place} ({', '.join(changed)})")
    if differing:
        raise ConfigError(
            f"output: {output} was started with other code of {', '.join(differing)}; give another output to run with "
            f"the new code, bring the old code back to resume, or delete {file} to resume with the new code all the "
            "same (such as where a value is a time)"
        )


def code_digests(config: RunConfig) -> dict[str, dict[str, str]]:
    """Digests of each user function's code by file, function or value, by place of use."""
    family, of_family = config.model.family, UserCode()
    if family is not None:
        of_family.add_file(family.file)
    found = {} if family is None else {f"model.family={family}": of_family.digests}
    return found | {
        f"stages.{index}.{field}={named if isinstance(named, str) else named.__class__.__name__}": _digests_of(named)
        for index, section in enumerate(config.stages)
        for field, named in _functions(section)
    }


def _digests_of(named: Any) -> dict[str, str]:
    code = UserCode()
    if isinstance(named, Locator):
        code.add_name(named)
    else:
        code.add_object(named)
    return code.digests


def _functions(section: TrainSection) -> Iterator[tuple[str, Any]]:
    if isinstance(section, SFTSection):
        metrics = enumerate(section.metrics)
        yield from ((f"metrics.{index}.fn", metric.fn) for index, metric in metrics if metric.fn is not None)
    if isinstance(section, OnlineSection):
        rewards = enumerate(section.rewards)
        yield from ((f"rewards.{index}.fn", reward.fn) for index, reward in rewards if reward.fn is not None)
    if isinstance(section, OnlineSection | DistillSection) and section.rollout.engine is not None:
        yield "rollout.engine", section.rollout.engine
    if isinstance(section, RLSection):
        if section.env is not None and section.env.fn is not None:
            yield "env.fn", section.env.fn
        tools = enumerate(section.tools)
        yield from ((f"tools.{index}.fn", tool.fn) for index, tool in tools if tool.fn is not None)
        if section.agent is not None and section.agent.fn is not None:
            yield "agent.fn", section.agent.fn
        if section.refill is not None and isinstance(section.refill.keep, UserObject):
            yield "refill.keep", section.refill.keep.fn
    for number, dataset in enumerate(section.all_datasets):
        if is_object_spec(dataset.path):
            yield f"datasets.{number}", dataset.path
    optimizers = {"optimizer": section.optimizer}
    if isinstance(section, RLSection) and isinstance(section.algorithm, PPO):
        optimizers["algorithm.critic.optimizer"] = section.algorithm.critic.optimizer
    if isinstance(section, OnlineSection) and (drafter := section.rollout.drafter_optimizer) is not None:
        optimizers["rollout.speculative.optimizer"] = drafter
    yield from ((f"{name}.fn", one.fn.fn) for name, one in optimizers.items() if isinstance(one, UserOptimizer))
    of_algorithm = isinstance(section, RLSection)
    owner: Section = section.algorithm if isinstance(section, RLSection) else section
    for field in ("advantage", "filter", "loss"):
        if field in type(owner).model_fields:
            named = getattr(owner, field)
            if isinstance(named, UserObject):
                yield f"algorithm.{field}" if of_algorithm else field, named.fn


class UserCode:
    """Digests found so far, by file, function without a file, environment variable and value."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}
        self._values: dict[tuple[str, str], str] = {}
        self._changing: set[str] = set()
        self._files: set[Path] = set()
        self._seen: dict[int, Any] = {}

    @property
    def digests(self) -> dict[str, str]:
        """All digests, without values that the code itself changes, such as counters and caches."""
        values = sorted((key, text) for key, text in self._values.items() if key[0] not in self._changing)
        return self._digests | {f"{name} of {owner}": digest(text) for (name, owner), text in values}

    def add_name(self, name: Locator) -> None:
        """Add the file of `file.py:name` or `module:name`, and what it imports, without importing anything."""
        source = name.object.rpartition(":")[0]
        if source.endswith(".py"):
            self.add_file(name.folder / Path(source).expanduser())
        else:
            self._add_module(source, [name.folder, *map(Path, sys.path)])

    def add_object(self, found: Any) -> None:
        """Add the code and the values of a function, class or object in memory."""
        self._add_value("settings", type(found).__name__, found)

    def add_file(self, path: Path) -> None:
        """Add a file of the user's, and what it imports, without importing anything."""
        path = path.resolve()
        if path not in self._files and _is_local(path):
            self._files.add(path)
            text = path.read_text(encoding="utf-8", errors="replace")
            self._add_code(path.relative_to(_root_of(path.parent)).as_posix(), _parsed(text), path.parent)

    def _add_code(self, label: str, tree: ast.AST, folder: Path) -> None:
        """Add code in a folder, the environment variables that it names and the local files that it imports."""
        text = ast.unparse(tree)
        self._digests[label] = digest(self._digests.get(label, "") + text)
        for name in VARIABLE.findall(text):
            if not names_secret(name) and not PLACE.match(name):
                self._digests[f"environment variable {name}"] = digest(repr(os.environ.get(name)))
        folders = [folder, _root_of(folder), *map(Path, sys.path)]
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self._add_module(alias.name, folders)
            elif isinstance(node, ast.ImportFrom):
                places = [(folder, *folder.parents)[node.level - 1]] if node.level else folders
                for alias in node.names:
                    self._add_module(".".join(filter(None, (node.module, alias.name))), places)

    def _add_module(self, name: str, folders: Sequence[Path]) -> None:
        """Add a module's file and those of the packages around it."""
        for part in accumulate(name.split("."), "{}/{}".format):
            files = (folder / f"{part}{end}" for folder in folders for end in ("/__init__.py", ".py"))
            self.add_file(next(filter(Path.is_file, files), Path()))

    def _add_loaded(self, name: str) -> None:
        """Add the files of a module in memory and of its submodules."""
        loaded = [module for key, module in sys.modules.items() if f"{key}.".startswith(f"{name}.")]
        for file in [getattr(module, "__file__", None) for module in loaded if name != "__main__"]:
            if file is not None:
                self.add_file(Path(file))

    def _add_value(self, name: str, owner: str, value: Any) -> None:
        if not names_secret(name):  # keys may be renewed
            self._values[name, owner] = self._values.get((name, owner), "") + self._text_of(value)

    def _text_of(self, value: Any) -> str:
        """Text of a value that is the same in every process; the code that it holds is added."""
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            return repr(value)
        kind = type(value).__qualname__
        if not isinstance(value, tuple):  # equal tuples may be one object in one process and two in another
            if id(value) in self._seen:
                return kind
            self._seen[id(value)] = value
        texts = list(map(self._text_of, self._parts_of(value)))
        return f"{kind}({', '.join(sorted(texts) if isinstance(value, set | frozenset) else texts)})"

    def _parts_of(self, value: Any) -> Iterable[Any]:
        """Values that a value is made of; none for objects of installed packages."""
        match value:
            case list() | tuple() | set() | frozenset():
                return value
            case dict():
                return chain.from_iterable(value.items())
            case np.ndarray() | np.generic():
                return str(value.dtype), *value.shape, value.tobytes()
            case re.Pattern():
                return value.pattern, value.flags
            case functools.partial():
                return value.func, value.args, value.keywords
            case MethodType():
                return value.__func__, value.__self__
            case property():
                return value.fget, value.fset
            case FunctionType():
                return self._parts_of_function(value)
            case ModuleType():
                self._add_loaded(value.__name__)
            case type() if _is_own(value):
                self._add_loaded(value.__module__)
                for name, part in vars(value).items():
                    if not name.startswith("__") or callable(part):
                        self._add_value(name, value.__qualname__, part)
                return value.__qualname__, *value.__mro__[1:-1]
            case _ if hasattr(value, "__wrapped__"):
                return (value.__wrapped__,)
            case argparse.Namespace() | SimpleNamespace():
                return chain.from_iterable(vars(value).items())
            case _ if _is_own(type(value)):
                for name, part in getattr(value, "__dict__", {}).items():
                    self._add_value(name, type(value).__qualname__, part)
                return (type(value),)
        return ()

    def _parts_of_function(self, found: FunctionType) -> Iterable[Any]:
        """Add a function's file, or its text if a script or notebook defines it, and the values that it reads."""
        code, path = found.__code__, Path(found.__code__.co_filename).resolve()
        closure = zip(code.co_freevars, found.__closure__ or (), strict=True)
        cells = {name: cell.cell_contents for name, cell in closure if cell != CellType()}
        if path.is_file() and not _is_local(path):
            return cells.values()  # settings of what an installed package has made, such as an optimiser
        tree = _tree_of(code)
        if path.is_file() and found.__globals__.get("__name__") != "__main__":
            self.add_file(path)
        elif path.is_file():
            self._add_code(f"{found.__qualname__} of {path.name}", tree, path.parent)
        else:
            self._add_code(f"{found.__qualname__} of the notebook", tree, Path.cwd())
        if found.__name__ not in ("__init__", "__post_init__"):
            self._changing |= _changed_names(tree)
        values = found.__globals__ | cells
        for name in sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & values.keys()):
            self._add_value(name, found.__qualname__, values[name])
        return found.__qualname__, found.__defaults__, found.__kwdefaults__


@functools.cache
def _is_local(path: Path) -> bool:
    """Tell whether a resolved file is the user's: not of the standard library, an installed package, or posttrain."""
    installed = [Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    packaged = {"site-packages", "dist-packages"}.intersection(path.parts)
    return (
        path.suffix == ".py" and path.is_file() and not (packaged or any(map(path.is_relative_to, [OWN, *installed])))
    )


def _is_own(found: type) -> bool:
    """Tell whether a class is the user's."""
    file = getattr(sys.modules.get(found.__module__), "__file__", None)
    return found.__module__ == "__main__" or (file is not None and _is_local(Path(file).resolve()))


def _root_of(folder: Path) -> Path:
    """Folder from which the modules of a folder are imported: the nearest that is no package."""
    return next(place for place in (folder, *folder.parents) if not (place / "__init__.py").is_file())


def _parsed(text: str) -> ast.AST:
    try:
        return ast.parse(text)
    except SyntaxError:
        return ast.Expr(ast.Constant(text))


def _tree_of(code: CodeType) -> ast.AST:
    """Syntax tree of a function; names, constants and bytecode of one that is no statement of its own."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        names = [ast.Name(name, ast.Load()) for name in (*code.co_names, *code.co_freevars)]
        inner = [_tree_of(part) if isinstance(part, CodeType) else ast.Constant(repr(part)) for part in code.co_consts]
        parts = [ast.Constant(code.co_code), *names, *inner]
        return ast.Tuple([part for part in parts if isinstance(part, ast.expr)], ast.Load())


def _changed_names(tree: ast.AST) -> set[str]:
    """Names and attributes of the values that code changes."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Global | ast.Nonlocal):
            found |= {*node.names}
        elif isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            found |= _path_of(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            found |= _path_of(node.func.value)
    return found


def _path_of(node: ast.AST) -> set[str]:
    """Names in a chain of attributes and items, such as `a` and `b` of `a.b[0]`."""
    found = {getattr(node, "id", ""), getattr(node, "attr", "")} - {""}
    return found | _path_of(node.value) if isinstance(node, ast.Attribute | ast.Subscript) else found
