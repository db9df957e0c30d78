"""Normalised source of user code, without comments, docstrings and layout: a function and all code that it reaches in
local files, with the values that it reads: environment variables, and of code in memory also globals that are computed,
such as from the command line. Versions with the same text behave the same. Installed packages are excluded."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import os
import re
import sys
import sysconfig
import textwrap
from collections.abc import Iterable
from pathlib import Path
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

OWN = Path(__file__).resolve().parents[1]
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
MUTATORS = frozenset(
    ("add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update")
)


SECRET = re.compile(r"(^|_)(key|apikey|token|secret|password)$", re.IGNORECASE)
"""Names whose values are left out: keys may be renewed."""
PLACE = re.compile(
    r"^(HOSTNAME|HOME|USER|PATH|PWD|TMPDIR|(.*_)?(RANK|PROCID|PROCESS_ID|WORKER_ID|TASK_ID|COMPLETION_INDEX|VISIBLE_DEVICES))$"
)
"""Environment variables that differ between the processes of a run, or where it resumes."""


def source_of(found: Any) -> str:
    """Source text of a function, class or object in memory, defined in a file, a script or a notebook."""
    reach = _Reach()
    reach.add_object(found)
    reach.add_globals()
    return reach.text()


def source_of_name(file: Path, name: str) -> str:
    """Source text of the statements that bind a name in a file."""
    reach = _Reach()
    reach.add_names(file, {name})
    return reach.text()


class _Reach:
    """Reachable statements and values found so far."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, ...], str] = {}
        self._files: dict[Path, _File] = {}
        self._reached: dict[Path, dict[int, ast.stmt]] = {}
        self._objects: dict[int, Any] = {}
        self._globals: dict[Path, dict[str, Any]] = {}

    def text(self) -> str:
        return "\n".join(dict.fromkeys(text for _, text in sorted(self._found.items())))

    def _add(self, text: str, *key: str) -> bool:
        new = key not in self._found
        self._found[key] = text
        return new

    # In files

    def add_names(self, path: Path, names: Iterable[str] | None) -> None:
        """Add the statements of a file that bind the names, and everything that they reach; None: all statements."""
        path = path.resolve()
        if not _is_local(path):
            return
        if path not in self._files:
            self._files[path] = _File(path)
        file = self._files[path]
        waiting = list(range(len(file.statements)) if names is None else file.binding(names))
        while waiting:
            index = waiting.pop()
            statement = file.statements[index]
            if self._add(_plain_text(statement), path.name, str(path), f"{index:06}"):
                self._reached.setdefault(path, {})[index] = statement
                self._add_environment(statement)
                self._add_imports(path, statement)
                waiting += file.binding(_names(statement))

    def _add_imports(self, path: Path, tree: ast.AST) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self._add_module(_module_file(path, alias.name, 0), None)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    inner = ".".join(filter(None, (node.module, alias.name)))
                    if (submodule := _module_file(path, inner, node.level)) is not None:
                        self._add_module(submodule, None)
                    else:
                        module = _module_file(path, node.module or "", node.level)
                        self._add_module(module, None if alias.name == "*" else {alias.name})

    def _add_module(self, path: Path | None, names: Iterable[str] | None) -> None:
        if path is not None:
            self.add_names(path, names)

    def _add_environment(self, tree: ast.AST) -> None:
        """Add the environment variables that code names."""
        for name in _variables(tree):
            if not SECRET.search(name) and not PLACE.match(name):
                self._add(f"environment {name} = {os.environ.get(name)!r}", "", "environment", name)

    # In memory

    def add_globals(self) -> None:
        """Add the values of globals that reached statements of files read and that are no literals, until there are no
        more: from the command line, a file, or set by the script that trains."""
        loaded = [module for module in tuple(sys.modules.values()) if getattr(module, "__file__", None)]
        values_of = {Path(str(module.__file__)).resolve(): vars(module) for module in loaded} | self._globals
        before = -1
        while before != len(self._found):
            before = len(self._found)
            for path, statements in [(path, tuple(found.values())) for path, found in self._reached.items()]:
                read = set[str]().union(*map(_names, statements)).difference(*map(_changed_names, statements))
                for name in sorted(read & values_of.get(path, {}).keys()):
                    if not SECRET.search(name) and not self._files[path].is_literal(name):
                        self._add_global(path, name, values_of[path][name])

    def _add_global(self, path: Path, name: str, value: Any) -> None:
        if (text := _constant(value)) is not None:
            self._add(f"{name} = {text}", path.name, str(path), "value", name)
        elif isinstance(value, functools.partial | FunctionType | MethodType | type) or _is_own(type(value)):
            self.add_object(value)

    def add_object(self, found: Any) -> None:
        if id(found) in self._objects:
            return
        self._objects[id(found)] = found
        if isinstance(found, functools.partial):
            for part in (found.func, *found.args, *found.keywords.values()):
                self._add_value("partial", part)
        elif isinstance(found, MethodType):
            self.add_object(found.__func__)
            self._add_value("self", found.__self__)
        elif isinstance(found, FunctionType):
            self._add_function(found)
        elif isinstance(found, type):
            self._add_class(found)
        elif getattr(found, "__module__", None) is not None and hasattr(found, "__dict__"):
            self.add_object(type(found))
            for name, value in vars(found).items():
                self._add_value(f"{type(found).__qualname__}.{name}", value)

    def _add_value(self, name: str, value: Any) -> None:
        """Add a value that code refers to: constants as they are, code as its source; other values are ignored."""
        if (text := _constant(value)) is not None:
            self._add(f"{name} = {text}", "", name)
        elif isinstance(value, ModuleType):
            self._add_module(Path(value.__file__) if value.__file__ else None, None)
        elif callable(value):
            self.add_object(value)

    def _add_class(self, found: type) -> None:
        path = _path_of(found)
        if path is not None and "<locals>" not in found.__qualname__:
            self.add_names(path, {found.__qualname__.partition(".")[0]})
        elif path is None or _is_local(path):
            for base in found.__mro__[1:-1]:
                self.add_object(base)
            for name, value in vars(found).items():
                if not name.startswith("__") or callable(value):
                    self._add_value(f"{found.__qualname__}.{name}", inspect.unwrap(value) if callable(value) else value)

    def _add_function(self, found: FunctionType) -> None:
        code, wrapped = found.__code__, getattr(found, "__wrapped__", None)
        if wrapped is not None:
            self._add_value("wrapped", wrapped)
        path = Path(code.co_filename)
        if not path.is_file():
            tree = _tree_in_memory(found)
        elif not _is_local(path.resolve()):
            return
        elif code.co_qualname == code.co_name and not code.co_name.startswith("<"):
            self._globals[path.resolve()] = found.__globals__
            self.add_names(path, {code.co_name})
            return
        else:
            if path.resolve() not in self._files:
                self._files[path.resolve()] = _File(path.resolve())
            tree = self._files[path.resolve()].at_line(code.co_firstlineno)
            self._add_imports(path.resolve(), tree)
        self._add_environment(tree)
        names, changed = _names(tree), _changed_names(tree)
        self._add(_plain_text(tree), "", code.co_qualname)
        cells = dict(zip(code.co_freevars, found.__closure__ or (), strict=True))
        values = {name: cell.cell_contents for name, cell in cells.items() if _is_filled(cell)}
        if path.is_file():
            self.add_names(path, names - values.keys())
        else:
            values = {name: value for name, value in found.__globals__.items() if name in names} | values
        for name in sorted(values.keys() - changed):
            self._add_value(name, values[name])


class _File:
    """Top-level statements of a Python file, by the names that they bind or change."""

    def __init__(self, path: Path):
        try:
            self.tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        except (OSError, SyntaxError):
            self.tree = ast.Module([], [])
        self.statements = [s for s in self.tree.body if not _is_docstring(s) and not _is_main_guard(s)]
        self._binding: dict[str, list[int]] = {}
        for index, statement in enumerate(self.statements):
            for name in _bound(statement):
                self._binding.setdefault(name, []).append(index)

    def binding(self, names: Iterable[str]) -> list[int]:
        return [index for name in names for index in self._binding.get(name, ())]

    def is_literal(self, name: str) -> bool:
        """Tell whether the text of the statements that bind a name is all that there is to know."""
        statements = [self.statements[index] for index in self.binding([name])]
        return bool(statements) and all(map(_is_literal, statements))

    def at_line(self, line: int) -> ast.AST:
        """Functions that start at a line."""
        found = [node for node in ast.walk(self.tree) if isinstance(node, FUNCTIONS) and _first_line(node) == line]
        return ast.Module([n if isinstance(n, ast.stmt) else ast.Expr(n) for n in found], [])


def _first_line(node: ast.AST) -> int:
    return min([getattr(node, "lineno", 0), *(d.lineno for d in getattr(node, "decorator_list", ()))])


def _tree_in_memory(function: FunctionType) -> ast.AST:
    """Syntax tree of a notebook's function; its text or bytecode if it is not a statement of its own."""
    try:
        text = textwrap.dedent(inspect.getsource(function))
        return ast.parse(text)
    except (OSError, TypeError, SyntaxError):
        code = function.__code__
        names = [ast.Expr(ast.Name(name, ast.Load())) for name in (*code.co_names, *code.co_freevars)]
        constants = [c for c in code.co_consts if _constant(c) is not None]
        return ast.Module([*names, ast.Expr(ast.Constant(repr((code.co_code, constants))))], [])


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _path_of(found: type) -> Path | None:
    """File of a class; None if defined in a notebook."""
    written = {v.__code__.co_filename for v in vars(found).values() if isinstance(v, FunctionType)} - {"<string>"}
    file = min(written, default=getattr(sys.modules.get(found.__module__), "__file__", None))
    return Path(file) if file is not None and Path(file).is_file() else None


def _is_own(found: type) -> bool:
    """Tell whether a class is the user's, in a file."""
    path = _path_of(found)
    return path is not None and _is_local(path.resolve())


def _is_local(path: Path) -> bool:
    """Tell whether a file is the user's: not the standard library, an installed package, or posttrain."""
    paths = sysconfig.get_paths()
    installed = [Path(paths[kind]).resolve() for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    foreign = path.is_relative_to(OWN) or any(path.is_relative_to(folder) for folder in installed)
    return not foreign and path.suffix == ".py" and path.is_file()


def _module_file(importing: Path, name: str, level: int) -> Path | None:
    """Local file of an imported module: beside the importing file, or below the root of its package."""
    if level:
        folders = [importing.parents[level - 1]]
    else:
        root = importing.parent
        while (root / "__init__.py").is_file():
            root = root.parent
        folders = [importing.parent, root]
    for folder in folders:
        path = folder.joinpath(*name.split(".")) if name else folder
        for candidate in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
            if candidate.is_file() and _is_local(candidate.resolve()):
                return candidate
    return None


def _bound(statement: ast.stmt) -> set[str]:
    """Names that a top-level statement binds, changes or (as a call for its effect) mentions."""
    if isinstance(statement, Definition):
        return {statement.name}
    if isinstance(statement, ast.Expr):
        return _names(statement)
    found: set[str] = set()
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Definition):
            found.add(node.name)
            continue
        if isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            found |= _names(node)
        if isinstance(node, ast.Expr) and node is not statement:
            found |= _names(node)
        waiting += ast.iter_child_nodes(node)
    return found


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _changed_names(tree: ast.AST) -> set[str]:
    """Names of values that the code itself changes, such as counters and caches; their state is excluded."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Global | ast.Nonlocal):
            found |= {*node.names}
        elif isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            found |= _names(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            found |= _names(node.func)
    return found


def _is_docstring(statement: ast.AST) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _is_literal(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
        try:
            ast.literal_eval(statement.value)
        except ValueError:
            return False
        return True
    return isinstance(statement, (*Definition.__args__, ast.Import, ast.ImportFrom, ast.Expr))


def _variables(tree: ast.AST) -> set[str]:
    """Environment variables that code reads by name."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript):
            owner, name = node.value, node.slice
        elif isinstance(node, ast.Call) and node.args:
            owner, name = node.func, node.args[0]
        else:
            continue
        if re.search(r"\b(environ|getenv)\b", ast.unparse(owner)) and isinstance(name, ast.Constant):
            found.add(str(name.value))
    return found


def _is_main_guard(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "__name__" in _names(statement.test)


def _plain_text(tree: ast.AST) -> str:
    """Code without docstrings; syntax trees have no comments or layout."""
    copied = ast.parse(ast.unparse(tree))
    for node in ast.walk(copied):
        body = getattr(node, "body", None)
        if isinstance(node, Definition) and isinstance(body, list) and _is_docstring(body[0]):
            body[0] = ast.Pass()
    return ast.unparse(copied)


def _constant(value: Any) -> str | None:
    """Plain value as text that is the same in every process; None for other values."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if isinstance(value, re.Pattern):
        return f"{value.pattern!r} {value.flags}"
    if isinstance(value, argparse.Namespace | SimpleNamespace):
        value = vars(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        parts = [part for item in value.items() for part in item]
    elif isinstance(value, list | tuple | set | frozenset):
        parts = [*value]
    else:
        return None
    texts = [_constant(part) for part in parts]
    if parts and not any(texts):
        return None
    known = [text or f"<{type(part).__name__}>" for text, part in zip(texts, parts, strict=True)]
    return f"{type(value).__name__}({', '.join(sorted(known) if isinstance(value, set | frozenset) else known)})"
