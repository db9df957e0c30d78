"""Dataset sources: files, folders, the Hugging Face hub, or a function; always a sequence of dicts of known length."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from posttrain.config import DatasetSection, Locator
from posttrain.data.files import (
    ArrowRows,
    Table,
    check_rows,
    file_kind,
    folder_files,
    is_saved,
    listed,
    no_split,
    read_file,
    read_files,
)
from posttrain.data.format import standard_row
from posttrain.data.messages import Remarks
from posttrain.data.sequence_cache import SequenceCache, Sequences
from posttrain.errors import ConfigError
from posttrain.runtime.hub import hub_is_reachable, is_hub_id
from posttrain.tracking.console import progress
from posttrain.user_code import describe_error, import_object, is_object_spec, missing_path

T = TypeVar("T")

CHECKED_ROWS = 20_000
"""Maximum number of rows per dataset that are read before a run starts."""


class RowError(ConfigError):
    """Error of a row, with its number in the message."""


@dataclass(frozen=True)
class Rows:
    """Rows `start .. stop` of a table, read on access."""

    name: str
    """Source name from the configuration."""
    table: Table
    start: int
    stop: int
    remarks: Remarks = field(default_factory=Remarks, init=False, repr=False, compare=False)
    """Remarks about rows that were read."""
    _sequences: dict[Hashable, SequenceCache] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        row, remark = standard_row(self.table[self.start + index])
        self.remarks.row = self.start + index
        if remark is not None:
            self.remarks.add("columns", remark)
        return row

    @property
    def notes(self) -> list[str]:
        """Lines about what was remarkable in the rows so far."""
        return [f"{self.name} {text}" for text in self.remarks.texts.values()]

    @property
    def columns(self) -> tuple[str, ...]:
        """Column names of the first row."""
        return tuple(self[0])

    def sequences(self, key: Hashable, make: Callable[[int], Sequences], count: int | None = None) -> SequenceCache:
        """Cache of the sequences that `make` returns, shared by all calls with the same `key`.

        `key`: everything that the sequences depend on besides the rows. `count`: number of sequences, by default of
        rows.
        """
        if key not in self._sequences:
            self._sequences[key] = SequenceCache(make, len(self) if count is None else count)
        return self._sequences[key]

    @contextmanager
    def named(self, index: int) -> Iterator[dict[str, Any]]:
        """Read a row; errors in the `with` block are reported with the row's number in the source."""
        try:
            yield self[index]
        except RowError:  # raised for a row that was read inside the block
            raise
        except ConfigError as error:
            raise RowError(f"{self.name} row {self.start + index}: {error}") from error


def with_all_columns(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows with the columns of all of them: None where a row lacks one, as in a table."""
    none: dict[str, Any] = {name: None for row in rows for name in row}
    return [row if len(row) == len(none) else {**row, **{n: None for n in none if n not in row}} for row in rows]


def load_rows(section: DatasetSection) -> Rows:
    """Load the rows of a dataset section.

    Raises `ConfigError` if the source does not exist or cannot be read, or if no rows remain.
    """
    table = _open(section)
    if len(table) == 0:
        raise ConfigError(f"dataset.path={section.path}: the dataset is empty; it needs at least one row")
    if section.skip >= len(table):
        raise ConfigError(f"dataset.skip={section.skip} leaves none of the {len(table)} rows of {section.path}")
    stop = len(table) if section.limit is None else min(len(table), section.skip + section.limit)
    return Rows(section.path, table, section.skip, stop)


def _open(section: DatasetSection) -> Table:
    path = section.path.found
    if is_object_spec(section.path):
        _refuse_split(section, "a function")
        return _call(section)
    if path is None:
        if file_kind(Path(section.path)) is not None or not is_hub_id(section.path):
            raise ConfigError(f"dataset.path: {missing_path(section.path.folder / Path(section.path).expanduser())}")
        return _from_hub(section)
    if path.is_dir() and not is_saved(path):
        return read_files(folder_files(section, path).taken)
    _refuse_args(section)
    if path.is_dir():
        return _from_disk(section, path)
    _refuse_split(section, "a single file")
    return read_file(path)


def _refuse_args(section: DatasetSection) -> None:
    if section.args:
        raise ConfigError(
            f"dataset.args={section.args} cannot be used with {section.path}; "
            "only a function, a hub dataset, or a folder with named configurations takes args"
        )


def _refuse_split(section: DatasetSection, what: str) -> None:
    if section.split != "train":
        raise ConfigError(
            f"dataset.split={section.split!r}: {section.path} is {what} and has no splits; "
            "remove split, or use skip and limit"
        )


def _from_disk(section: DatasetSection, folder: Path) -> Table:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # the library passes on whatever its dependencies raise for damaged files
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ConfigError(
            f"dataset.path={section.path}: the saved dataset is damaged or incomplete ({reason}); save it anew"
        ) from error
    if not isinstance(loaded, datasets.DatasetDict):
        _refuse_split(section, "a single saved dataset")
        return ArrowRows(loaded)
    if section.split not in loaded:
        raise no_split(section, map(str, loaded))
    return loaded[section.split]


def _from_hub(section: DatasetSection) -> Table:
    import datasets

    before = datasets.config.HF_HUB_OFFLINE
    reachable = hub_is_reachable()
    # Offline mode answers from the library's cache at once instead of retrying for a minute.
    datasets.config.HF_HUB_OFFLINE = not reachable
    try:
        return ArrowRows(datasets.load_dataset(str(section.path), split=section.split, **section.args))
    except (OSError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())[:300]
        hub = "on the hub" if reachable else "the hub cannot be reached"
        raise ConfigError(
            f"dataset.path={section.path}: no such file or folder here; {hub}: {reason}{section.path.suggestion}"
        ) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def _call(section: DatasetSection) -> Table:
    function = import_object(section.path.object, section.path.folder)
    if not callable(function):
        raise ConfigError(
            f"dataset.path={section.path} is a {type(function).__name__}, not a function that returns rows"
        )
    try:
        inspect.signature(function).bind(**section.args)
    except TypeError as error:
        raise ConfigError(f"dataset.args={section.args} do not fit {section.path}: {error}") from error
    try:
        result = function(**with_paths(function, section.path, section.args))
        rows = result if isinstance(result, str | Mapping) or not isinstance(result, Iterable) else listed(result)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{section.path} raised {describe_error(error)}") from error
    if not isinstance(rows, list):
        raise ConfigError(f"{section.path} returned a {type(rows).__name__}; it must return a list of dicts")
    return check_rows(rows, section.path)


def with_paths(function: Callable[..., Any], at: Locator, args: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a function; parameters annotated as `Path` are resolved like every path of the configuration."""
    kinds = {name: p.annotation for name, p in inspect.signature(function).parameters.items()}
    # Postponed annotations are strings.
    return {
        name: at.beside(value).file
        if isinstance(value, str) and kinds.get(name) in (Path, "Path", "pathlib.Path")
        else value
        for name, value in args.items()
    }


def checked_rows(length: int) -> range:
    """Numbers of the rows that are read before a run starts: all, or `CHECKED_ROWS` spread evenly."""
    return range(0, length, -(-length // CHECKED_ROWS))


def each_row(rows: Rows, chosen: Sequence[int], what: str, read: Callable[[int], T]) -> Iterator[T]:
    """Apply `read` to each chosen row, with a progress bar if that takes long."""
    for index in progress(chosen, f"checking {what} of {rows.name}", len(chosen)):
        yield read(index)
