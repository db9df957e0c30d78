"""Locators: paths, hub ids and names of Python objects, whose places are resolved when a configuration is read."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, GetCoreSchemaHandler, WrapValidator

from posttrain.config.base import Arguments
from posttrain.errors import ConfigError
from posttrain.runtime.hub import is_hub_id
from posttrain.user_code import import_object

PACKAGE = Path(__file__).resolve().parent.parent
CHECKOUT = PACKAGE.parent if (PACKAGE.parent / "pyproject.toml").is_file() else None
INSTALLED = {"configs": PACKAGE, "rewards": PACKAGE.parent, "envs": PACKAGE.parent}
"""Location of the project's own folders when it is installed instead of checked out."""


class Locator(str):
    """Path, hub id or `file.py:name`. As text it is what the user wrote; its places are absolute.

    A relative path is looked for in the current folder, in the configuration's folder and in the project's root, as
    they were when the configuration was read.
    """

    folder: Path
    """Absolute folder of the configuration, from which modules are imported too; by default the current folder."""
    places: tuple[Path, ...]
    """Absolute paths that the text may name, in the order of preference."""

    def __new__(cls, text: str, folder: Path | None = None) -> Locator:
        self = super().__new__(cls, text)
        given = Path(text).expanduser()
        root = CHECKOUT or INSTALLED.get(given.parts[0] if given.parts else "")
        bases = dict.fromkeys((Path.cwd(), *(base.absolute() for base in (folder, root) if base is not None)))
        self.folder = (folder or Path.cwd()).absolute()
        self.places = tuple(dict.fromkeys(base / given for base in bases))
        return self

    @property
    def found(self) -> Path | None:
        """Absolute path of the first place that exists."""
        return next((place for place in self.places if place.exists()), None)

    @property
    def file(self) -> Path:
        """Absolute path of an existing file or folder. Raises ConfigError with a suggestion if nothing exists."""
        found = self.found
        if found is None:
            raise ConfigError(f"{self}: no such file or folder{self.suggestion}")
        return found

    @property
    def resolved(self) -> str:
        """Absolute path of what exists, otherwise a hub id. ConfigError for a text that is neither."""
        return str(self) if self.found is None and is_hub_id(self) else str(self.file)

    @property
    def object(self) -> str:
        """Python object as `/absolute/file.py:name`; `module:name` and missing files are unchanged."""
        source, _, name = self.rpartition(":")
        found = self.beside(source).found if source.endswith(".py") else None
        return str(self) if found is None else f"{found.resolve()}:{name}"

    def beside(self, text: str) -> Locator:
        """Locator of another text of the same configuration."""
        return Locator(text, self.folder)

    @property
    def suggestion(self) -> str:
        """Hint `; did you mean ...?` with the most similar existing path; empty if this one exists, or without one."""
        near = None if self.found else next((near for place in self.places if (near := _similar(place))), None)
        return "" if near is None else f"; did you mean {shown_path(near)!r}?"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return handler.generate_schema(Annotated[str, Field(min_length=1), WrapValidator(_located)])


def _located(value: Any, build: Callable[[Any], str], info: Any) -> Locator:
    """Validate a text; the context of the validation is the configuration's folder."""
    return value if isinstance(value, Locator) else Locator(build(value), info.context)


def located(value: Any, info: Any) -> Any:
    """Locator of a text, or of the `kind` in a mapping; other values are unchanged."""
    if isinstance(value, dict) and isinstance(value.get("kind"), str):
        return {**value, "kind": located(value["kind"], info)}
    return Locator(value, info.context) if isinstance(value, str) and not isinstance(value, Locator) else value


LossSpec = Annotated[str | Arguments, AfterValidator(located)]
"""Loss: a name or `module:Class`, or a mapping with it as `kind` and settings."""


def callable_of(given: Any, field: str) -> Any:
    """Function or class that a field names, imported, or in Python is. ConfigError, which begins with the field."""
    found = import_object(given.object, given.folder) if isinstance(given, Locator) else given
    if not callable(found):
        raise ConfigError(f"{field}: {given} is a {type(found).__name__}, not a function or class; set file.py:name")
    return found


def shown_path(file: Path) -> str:
    """Path relative to the current folder or the project's root, if below one of them."""
    return str(
        next((file.relative_to(base) for base in (Path.cwd(), PACKAGE.parent) if file.is_relative_to(base)), file)
    )


def _similar(path: Path) -> Path | None:
    """Similar name in the same folder, or the same name in a folder with a similar name."""
    if path.parent.is_dir():
        entries = sorted(path.parent.iterdir())
        names = {**{entry.stem: entry for entry in entries}, **{entry.name: entry for entry in entries}}
        near = difflib.get_close_matches(path.name, names, 1, 0.75)
        return names[near[0]] if near else None
    folder = _similar(path.parent)
    return folder / path.name if folder is not None and (folder / path.name).exists() else None
