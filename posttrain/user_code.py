"""User objects named in a configuration as `file.py:name` or `package.module:name`."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import math
import os
import pkgutil
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from posttrain.errors import ConfigError, did_you_mean
from posttrain.runtime.files import digest


def missing_path(path: Path) -> str:
    """Explain why a path does not exist: the nearest name beside it, or the first missing folder."""
    if not path.parent.is_dir():
        existing = next(parent for parent in path.parents if parent.is_dir())
        return f"no file {path}: no folder {path.parent} (the path exists up to {existing})"
    return f"no file {path}{did_you_mean(path.name, (entry.name for entry in path.parent.iterdir()))}"


def import_transformers(submodule: str = "") -> ModuleType:
    """Import transformers or a submodule without its advice to install torch: only tokenizers and templates are
    used."""
    switch = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(switch)
    os.environ[switch] = "1"
    try:
        return importlib.import_module(f"transformers.{submodule}" if submodule else "transformers")
    finally:
        if before is None:
            del os.environ[switch]
        else:
            os.environ[switch] = before


def is_object_spec(text: str) -> bool:
    """Return True if the text has the form `file.py:name` or `package.module:name`."""
    source, separator, name = text.rpartition(":")
    dotted = all(part.isidentifier() for part in source.split("."))
    return bool(separator) and name.isidentifier() and (source.endswith(".py") or dotted)


def import_object(spec: str, folder: Path) -> object:
    """Import the object named by `file.py:name` or `package.module:name`; files are relative to `folder`.

    A file is executed once per process, and anew when it, or a module that it imports from its folder, has changed.
    During import that folder (for modules: `folder`) is on `sys.path`. Raises ConfigError if the file, module or name
    does not exist, or the import fails.
    """
    _forget_changed()
    if not is_object_spec(spec):
        raise ConfigError(f"{spec!r} does not name an object; write 'file.py:name' or 'package.module:name'")
    source, _, name = spec.rpartition(":")
    module = _load_file(spec, folder / Path(source).expanduser()) if source.endswith(".py") else _load(spec, folder)
    if not hasattr(module, name):
        public = [key for key in vars(module) if not key.startswith("_")]
        raise ConfigError(f"{spec}: {source} has no {name!r}{did_you_mean(name, public)}")
    return getattr(module, name)


def public_functions(path: Path) -> list[str]:
    """Names of the functions that a file defines at its top, but for those that begin with an underscore. ConfigError
    for a file without any."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError) as error:
        raise ConfigError(f"{path}: {describe_error(error)}") from error
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    public = [name for name in functions if not name.startswith("_")]
    if not public:
        raise ConfigError(f"{path}: defines no public function")
    return public


def _load_file(spec: str, path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise ConfigError(f"{spec}: {missing_path(path)}")
    module_name = f"{path.stem}_{digest(str(path), 12)}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    try:
        with _importable(path.parent):
            return run_module(module_name, path)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{spec} fails to import: {describe_error(error)}") from error


def run_module(name: str, path: Path) -> ModuleType:
    """Execute a file as the module of a name, from its text: bytecode that Python keeps is taken for that of a file
    changed within a second, to the same size."""
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None, path
    module = importlib.util.module_from_spec(module_spec)
    before = sys.modules.get(name)
    # Dataclasses and pickling look their module up by name while the body runs.
    sys.modules[name] = module
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    except BaseException:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
        raise
    return module


_IMPORTED: dict[str, tuple[Path, str]] = {}
"""File and digest of each module of the user's that this process has imported, by name."""


def _forget_changed() -> None:
    """Let all modules of the user's be imported anew once one of them has changed on disk."""
    if all(file.is_file() and digest(file.read_bytes()) == content for file, content in _IMPORTED.values()):
        return
    for name in _IMPORTED:
        sys.modules.pop(name, None)
    _IMPORTED.clear()
    importlib.invalidate_caches()


def _remember_imported(names: Iterable[str], folder: Path) -> None:
    """Note the files of these modules that lie in a folder of the user's."""
    for name in names:
        file = getattr(sys.modules[name], "__file__", None)
        path = Path(file).resolve() if file else Path()
        installed = {"site-packages", "dist-packages"}.intersection(path.parts)
        own = path.suffix == ".py" and path.is_relative_to(folder.resolve()) and not installed
        if own and not path.is_relative_to(Path(__file__).resolve().parent):
            _IMPORTED[name] = path, digest(path.read_bytes())


def _load(spec: str, folder: Path) -> ModuleType:
    name = spec.rpartition(":")[0]
    with _importable(folder):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
                raise ConfigError(f"{spec} fails to import: {describe_error(error)}") from error
            parent, _, last = error.name.rpartition(".")
            paths = sys.modules[parent].__path__ if parent in sys.modules else None
            siblings = [module.name for module in pkgutil.iter_modules(paths)]
            where = (
                f"package {parent!r} has no module {last!r}"
                if parent
                else f"no module {last!r} in {folder} or installed"
            )
            raise ConfigError(f"{spec}: {where}{did_you_mean(last, siblings)}") from error
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{spec} fails to import: {describe_error(error)}") from error


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    entry, before = str(folder), {*sys.modules}
    writes_none = sys.dont_write_bytecode
    sys.path.insert(0, entry)
    sys.dont_write_bytecode = True  # see `run_module`
    try:
        yield
    finally:
        sys.dont_write_bytecode = writes_none
        sys.path.remove(entry)
        _remember_imported(sys.modules.keys() - before, folder)


def number_of(value: Any) -> float | None:
    """Number that user code gave, of Python, NumPy, JAX or PyTorch, also in an array of one element; None for anything
    else."""
    if hasattr(value, "item") and all(length == 1 for length in getattr(value, "shape", ())):
        value = value.item()
    if not hasattr(type(value), "__float__") or len(getattr(value, "shape", ())) > 0:
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def describe_error(error: BaseException) -> str:
    """Format an exception in one line with the innermost line of user code, if any."""
    if isinstance(error, SyntaxError):
        place, message = f"{error.filename}:{error.lineno}", error.msg
    else:
        frames = traceback.extract_tb(error.__traceback__)
        # Frames of the import system and of type checkers' wrappers are nobody's code.
        package = ("<frozen", "<@beartype", str(Path(__file__).parent))
        libraries = tuple(sysconfig.get_paths()[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
        foreign = [f for f in frames if not f.filename.startswith(package)]
        user_frames = [f for f in foreign if not f.filename.startswith(libraries)]
        near = user_frames or foreign
        place = f"{near[-1].filename}:{near[-1].lineno}" if near else ""
        message = f"sys.exit({error.code!r}) is called" if isinstance(error, SystemExit) else str(error)
    return f"{type(error).__name__}: {' '.join(message.split())}" + (f" ({place})" if place else "")


def is_users(value: object) -> bool:
    """Tell whether an object is not made by a class, or a function, of this package."""
    owner = getattr(value, "__module__", type(value).__module__)
    return bool(owner.partition(".")[0] != __name__.partition(".")[0])
