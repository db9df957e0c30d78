"""What a configuration names: rows, and functions of users."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from posttrain.config import DatasetSection
from posttrain.config.yaml_file import resolve_path
from posttrain.data.chat import Renderer
from posttrain.data.format import use_chat
from posttrain.data.sources import Rows, load_rows
from posttrain.data.tokenizer import Tokenizer
from posttrain.errors import ConfigError
from posttrain.tracking.console import progress
from posttrain.user_code import import_object, is_object_spec
from posttrain.weights.locate import path_exists

T = TypeVar("T")

CHECKED_ROWS = 20_000


def rows_of(section: DatasetSection, base_dir: Path) -> Rows:
    """The rows of a dataset section, its path resolved like every path of a configuration."""
    spec = section.path
    if is_object_spec(spec):
        spec = resolve_spec(spec, base_dir)
    elif path_exists(spec, base_dir):
        spec = str(resolve_path(spec, base_dir).resolve())
    return load_rows(section.model_copy(update={"path": spec}), base_dir=base_dir)


def rows_and_renderer(section: DatasetSection, tokenizer: Tokenizer, base_dir: Path) -> tuple[Rows, Renderer]:
    rows = rows_of(section, base_dir)
    return rows, Renderer(tokenizer, use_chat(section, tokenizer, rows.columns))


def checked_rows(length: int) -> range:
    """Numbers of the rows that are read before a run begins: all, or `CHECKED_ROWS` spread evenly."""
    return range(0, length, -(-length // CHECKED_ROWS))


def each_row(rows: Rows, chosen: Sequence[int], what: str, read: Callable[[int], T]) -> Iterator[T]:
    """What `read` makes of each chosen row, with a bar where that takes long."""
    for index in progress(chosen, f"checking {what} of {rows.name}", len(chosen)):
        yield read(index)


def callable_of(spec: str, field: str, base_dir: Path) -> Any:
    found = object_of(spec, base_dir)
    if not callable(found):
        raise ConfigError(f"{field}: {spec} is a {type(found).__name__}, not a function or class")
    return found


def object_of(spec: str, base_dir: Path) -> object:
    """`file.py:name` or `module:name`, the file looked for like every path of a configuration."""
    return import_object(resolve_spec(spec, base_dir), base_dir=base_dir)


def resolve_spec(spec: str, base_dir: Path) -> str:
    """`file.py:name` with the whole path of its file; `module:name` as it is."""
    file, _, name = spec.rpartition(":")
    if file.endswith(".py") and path_exists(file, base_dir):
        return f"{resolve_path(file, base_dir).resolve()}:{name}"
    return spec
