"""Locators: paths, hub ids and names of Python objects, whose places are resolved when a configuration is read; and the
functions, classes and objects that users write for a field, with the settings that they take."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Annotated, Any, get_type_hints

from pydantic import (
    Field,
    GetCoreSchemaHandler,
    PlainValidator,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
    WrapValidator,
)

from posttrain.config.base import Flag, plain_value
from posttrain.config.secrets import (
    check_urls,
    names_secret,
    secret_in_url,
    with_secrets,
    without_named_secrets,
    without_secrets,
)
from posttrain.errors import ConfigError, did_you_mean
from posttrain.runtime.hub import is_hub_id
from posttrain.user_code import describe_error, import_object, is_object_spec

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
        path = Path(text).expanduser()
        root = CHECKOUT or INSTALLED.get(path.parts[0] if path.parts else "")
        bases = dict.fromkeys((Path.cwd(), *(base.absolute() for base in (folder, root) if base is not None)))
        self.folder = (folder or Path.cwd()).absolute()
        self.places = tuple(dict.fromkeys(base / path for base in bases))
        return self

    @property
    def found(self) -> Path | None:
        """Absolute path of the first place that exists."""
        return next((place for place in self.places if place.exists()), None)

    @property
    def file(self) -> Path:
        """Absolute path of an existing file or folder. Raises ConfigError with a suggestion if nothing exists."""
        path = self.found
        if path is None:
            raise ConfigError(f"{self}: no such file or folder{self.suggestion}")
        return path

    @property
    def resolved(self) -> str:
        """Absolute path of what exists, otherwise a hub id. ConfigError for a text that is neither."""
        return str(self) if self.found is None and is_hub_id(self) else str(self.file)

    @property
    def object(self) -> str:
        """Python object as `/absolute/file.py:name`; `module:name` and missing files are unchanged."""
        source, _, name = self.rpartition(":")
        path = self.beside(source).found if source.endswith(".py") else None
        return str(self) if path is None else f"{path.resolve()}:{name}"

    def beside(self, text: str) -> Locator:
        """Locator of another text of the same configuration."""
        return Locator(text, self.folder)

    @property
    def suggestion(self) -> str:
        """Hint for a path that does not exist: the command of the run that writes it, if there is nothing of that run
        yet, or else `; did you mean ...?` with the most similar path; empty without either."""
        if self.found:
            return ""
        if command := self._command:
            return f"; first run: {command}"
        near = next((near for place in self.places if (near := _similar(place))), None)
        return "" if near is None else f"; did you mean {shown_path(near)!r}?"

    @property
    def _command(self) -> str | None:
        """Command of a configuration, beside this one or of the project's, whose output folder this path lies in and
        which did not run yet."""
        folders = dict.fromkeys((self.folder, *self.beside("configs").places, *self.beside("configs/rl").places))
        for file in (file for folder in folders for file in sorted(folder.glob("*.yaml"))):
            output = re.search(r"^output: *([^\s#]+)", file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
            if output and self.startswith(f"{output[1]}/") and self.beside(output[1]).found is None:
                return f"posttrain run {shown_path(file)}"
        return None

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return handler.generate_schema(Annotated[str, Field(min_length=1), WrapValidator(_located)])


def _located(value: Any, build: Callable[[Any], str], info: Any) -> Locator:
    """Validate a text, or in Python a path; the context of the validation is the configuration's folder."""
    text = str(value) if isinstance(value, PurePath) else value
    return value if isinstance(value, Locator) else Locator(build(text), info.context)


def located(value: Any, info: Any) -> Any:
    """Locator of a text; other values are unchanged."""
    return Locator(value, info.context) if isinstance(value, str) and not isinstance(value, Locator) else value


def callable_of(given: Any, field: str) -> Any:
    """Function or class that a field names, imported, or in Python is. ConfigError, which begins with the field."""
    target = load_object(given, field) if isinstance(given, Locator) else given
    if not callable(target):
        raise ConfigError(f"{field}: {given} is a {type(target).__name__}, not a function or class; set file.py:name")
    return target


def load_object(spec: Locator, field: str) -> Any:
    """Import what a field names. ConfigError, which begins with the field, for what was made in Python by an earlier
    process, and has no name in a file."""
    if spec.startswith(("<", "__main__:")) or "<locals>" in spec or "<lambda>" in spec:
        raise ConfigError(
            f"{field}: {spec} was made in Python, in a script or notebook, and has no name for another process; run "
            "that again, or give file.py:name"
        )
    return import_object(spec.object, spec.folder)


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


# --- what users write for a field -------------------------------------------------------------------------------------

FORMS = "file.py:name or {fn: file.py:name, ...} with settings"


@dataclass(frozen=True)
class UserObject:
    """Function, class or object of the user: `file.py:name`, or `{fn: file.py:name, width: 0.3}` with its keywords, or
    in Python the thing itself."""

    fn: Any
    """Locator of the function, class or object; or the thing itself."""
    settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Keywords of the function or class, with values of YAML's types; secrets by `NAME_env`, see `with_secrets`."""

    def __str__(self) -> str:
        return object_text(self.fn)

    @property
    def written(self) -> Any:
        """Value as one writes it in YAML: a text, or a mapping with `fn` where there are settings."""
        fields = _plain_fields(self.fn)
        owner, values = (self.fn, self.settings) if fields is None else (type(self.fn), fields)
        return {"fn": object_text(owner), **values} if values else object_text(owner)

    def load(self, place: str) -> Any:
        """Function, class or object, imported where it is named. ConfigError, which begins with the field's name
        `place`, for one that does not exist, or was made in Python by an earlier process."""
        return load_object(self.fn, place) if isinstance(self.fn, Locator) else self.fn

    def make(self, place: str, *, positional: int = 0, names: Collection[str] = ()) -> Any:
        """Object for the field `place`: a class called with its settings, a function with its settings bound, or an
        object as it is.

        `positional`, `names`: inputs that a function gets when it is called, which are no settings. ConfigError for
        settings that are unknown, missing or of another type, and for a class that raises.
        """
        target = self.load(place)
        if isinstance(target, type):
            target = self.call(place)
        if not callable(target):
            raise ConfigError(f"{place}: {self} is a {type(target).__name__}, which cannot be called")
        if not self.settings or isinstance(self.load(place), type):
            return target
        if not inspect.isroutine(target) and not isinstance(target, functools.partial):
            raise ConfigError(f"{place}: settings are for classes and functions; {self} is a {type(target).__name__}")
        bound = functools.partial(target, **self._checked(target, place, positional, names))
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(bound, name, getattr(target, name, None))
        vars(bound).update(vars(target))
        return bound

    def call(self, place: str, **inputs: Any) -> Any:
        """Result of calling the function or class with its settings, and with `inputs` by name. ConfigError as of
        `make`, and if a required keyword is missing."""
        target = self.load(place)
        values = self._checked(target, place, 0, inputs)
        required = [name for name, p in _keywords(target).items() if p.default is p.empty]
        if missing := [name for name in required if name not in values and name not in inputs]:
            example = ", ".join(f"{name}: ..." for name in missing)
            raise ConfigError(f"{place}: {self} needs {', '.join(missing)}; write {{fn: {self}, {example}}}")
        try:
            return target(**inputs, **values)
        except (Exception, SystemExit) as error:
            shown = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
            raise ConfigError(f"{place}: {self}({shown}) raised {describe_error(error)}") from error

    def _checked(self, found: Any, place: str, positional: int, names: Collection[str]) -> dict[str, Any]:
        at = self.fn if isinstance(self.fn, Locator) else Locator(place)
        given = with_secrets(self.settings)
        return checked_settings(found, given, place, str(self), at, positional=positional, names=names)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return handler.generate_schema(
            Annotated[Any, PlainValidator(lambda value, info: user_object(value, info.context))]
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        mapping = {"type": "object", "properties": {"fn": {"type": "string", "minLength": 1}}, "required": ["fn"]}
        return {"anyOf": [{"type": "string", "minLength": 1}, mapping]}


def user_object(value: Any, folder: Path | None = None) -> UserObject:
    """Validate a text, a mapping with `fn`, or in Python a function, class or object. ValueError for others.

    `folder`: that of the configuration, where files are looked for; by default the current one.
    """
    if isinstance(value, UserObject):
        return value
    if isinstance(value, Mapping):
        if "fn" not in value:
            raise ValueError(f"must have fn, the function or class; write {FORMS}")
        return UserObject(user_object(value["fn"], folder).fn, _settings(value))
    if isinstance(value, str):
        if not value:
            raise ValueError("must not be empty")
        return UserObject(value if isinstance(value, Locator) else Locator(value, folder))
    if value is None or isinstance(value, bool | int | float) or type(value) in (list, tuple):
        raise ValueError(f"must be {FORMS}, or in Python a function, class or object; got {value!r}")
    return UserObject(value)


def _settings(value: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords beside `fn`, or below `args`. ValueError for values that YAML does not have, and for secrets."""
    beside = plain_value({name: item for name, item in value.items() if name not in ("fn", "args")})
    args = plain_value(value.get("args", {}))
    if not isinstance(args, dict) or args.keys() & beside.keys():
        raise ValueError(f"args must be a mapping of keywords that are not beside it; got {args!r}")
    settings = beside | args
    if wrong := [name for name, item in settings.items() if not isinstance(name, str) or callable(item)]:
        raise ValueError(f"the setting {wrong[0]!r} must be a value of YAML; in Python give an object as fn")
    check_urls(settings)
    return without_secrets(settings)


def _named(value: Any, info: Any) -> Any:
    """Name of the package's own, or of the user's."""
    if isinstance(value, str) and value and not is_object_spec(value) and not value.startswith("<"):
        return str(value)
    return user_object(value, info.context)


def _named_or_set(value: Any, info: Any) -> Any:
    """Name of the package's own, a mapping with it as `kind` and its settings, or of the user's."""
    if not isinstance(value, Mapping) or "fn" in value:
        return _named(value, info)
    if "kind" not in value:
        raise ValueError(f"must have kind, a name of the package's own, or fn, your function or class; got {value!r}")
    if isinstance(kind := value["kind"], str) and is_object_spec(kind):
        raise ValueError(f"kind is a name of the package's own; write fn: {kind!r} in place of it")
    return without_named_secrets(plain_value(value))


Named = Annotated[str | UserObject, PlainValidator(_named, json_schema_input_type=str | UserObject)]
"""Name of the package's own, or what users write."""
NamedOrSet = Annotated[
    str | dict[str, Any] | UserObject,
    PlainValidator(_named_or_set, json_schema_input_type=str | dict[str, Any] | UserObject),
]
"""Name of the package's own, a mapping with it as `kind` and its settings, or what users write."""


def checked_settings(
    found: Any,
    settings: Mapping[str, Any],
    place: str,
    name: str,
    at: Locator,
    *,
    positional: int = 0,
    names: Collection[str] = (),
) -> dict[str, Any]:
    """Settings of a function or class, of the types that it declares; texts of parameters declared as `Path` are
    resolved beside `at`. ConfigError for names that are no keywords, or inputs of a function, and for other types."""
    known = [key for key in _keywords(found, positional) if key not in names]
    if unknown := [key for key in settings if key not in known and (_takes_any(found) is False or key in names)]:
        listed = f"known: {', '.join(known)}" if known else "it has none"
        near = did_you_mean(unknown[0], known)
        raise ConfigError(f"{place}: {unknown[0]!r} is no setting of {name}{near}; {listed}")
    try:
        plain_class = isinstance(found, type) and not dataclasses.is_dataclass(found)
        hints = get_type_hints(found.__init__ if plain_class else found)
    except (NameError, TypeError, AttributeError):  # types that do not exist at run time
        hints = {}
    return {key: _as_declared(hints.get(key, Any), value, f"{place}: {key}", at) for key, value in settings.items()}


def _as_declared(declared: Any, value: Any, place: str, at: Locator) -> Any:
    """Convert a value to a declared type: YAML reads words and numbers such as `off` and 1e-3 as text, and has no
    tuples."""
    if declared is Path:
        return at.beside(value).file
    try:
        return TypeAdapter(Flag if declared is bool else declared).validate_python(value)
    except PydanticUserError:  # a type that pydantic does not know
        return value
    except ValidationError as error:
        shown = place if names_secret(place.rpartition(" ")[2]) else f"{place}={value!r}"
        raise ConfigError(f"{shown}: {error.errors()[0]['msg']}") from error


def _keywords(found: Any, positional: int = 0) -> dict[str, inspect.Parameter]:
    """Parameters that can be given by name, but for the first `positional`; none of a builtin without a signature."""
    try:
        parameters = list(inspect.signature(found).parameters.values())[positional:]
    except (TypeError, ValueError):
        return {}
    return {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _takes_any(found: Any) -> bool:
    """Tell whether a function or class takes keywords of any name, or has no signature."""
    try:
        return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(found).parameters.values())
    except (TypeError, ValueError):
        return True


def object_text(found: Any) -> str:
    """Text of a function or class, `module:name`; of an object its class and fields, in angle brackets, which names
    nothing that can be imported. Secrets among them are left out."""
    if isinstance(found, str | Path):
        return str(found)
    if hasattr(found, "__qualname__"):
        return f"{found.__module__}:{found.__qualname__}"
    if isinstance(found, functools.partial):
        names = [*_keywords(found.func)][: len(found.args)]
        given = [_shown(value, name) for name, value in itertools.zip_longest(names, found.args)]
        values = (*given, *(f"{name}={_shown(value, name)}" for name, value in found.keywords.items()))
        return f"<{object_text(found.func)}({', '.join(values)})>"
    owner = f"{type(found).__module__}:{type(found).__qualname__}"
    if not dataclasses.is_dataclass(found):
        return f"<{owner}>"
    fields = (f"{one.name}={_shown(getattr(found, one.name), one.name)}" for one in dataclasses.fields(found))
    return f"<{owner}({', '.join(fields)})>"


def _shown(value: Any, name: object = None) -> str:
    """Value within the text of an object, the same in every process; of one whose name says so, or of a URL, that it is
    a secret."""
    if isinstance(value, str) and ((isinstance(name, str) and names_secret(name)) or secret_in_url(value)):
        return "<secret>"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_shown(item, name) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_shown(key)}: {_shown(item, key)}' for key, item in value.items())}}}"
    return object_text(value)


def _plain_fields(found: Any) -> dict[str, Any] | None:
    """Fields of an object of an importable dataclass that is made of plain values alone, without secrets; None of
    another object."""
    if isinstance(found, type | str) or not dataclasses.is_dataclass(found) or "<locals>" in type(found).__qualname__:
        return None
    shown = {one.name: getattr(found, one.name) for one in dataclasses.fields(found)}
    rebuilt = all(one.init and one.name not in ("fn", "args", "kind") for one in dataclasses.fields(found))
    if not rebuilt or not all(map(_is_plain, shown.values())):
        return None
    fields = {name: plain_value(value) for name, value in shown.items()}
    try:
        check_urls(without_named_secrets(fields))
    except ValueError:
        return None
    return fields


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, float, str)
