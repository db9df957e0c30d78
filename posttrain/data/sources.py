"""Dataset sources: files, folders, the Hugging Face hub, or a function; always a sequence of dicts of known length."""

from __future__ import annotations

import csv
import inspect
import io
import json
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from posttrain.config import DatasetSection, Locator
from posttrain.data.format import standard_row
from posttrain.data.messages import Remarks
from posttrain.data.sequence_cache import Arrays, SequenceCache
from posttrain.errors import ConfigError, did_you_mean
from posttrain.runtime.hub import hub_is_reachable, is_hub_id
from posttrain.tracking.console import progress
from posttrain.user_code import describe_error, import_object, is_object_spec, missing_path

FILE_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
SPLIT_NAMES = ("train", "test", "validation", "valid", "val", "dev", "eval")
NOT_ROWS = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json")


T = TypeVar("T")

CHECKED_ROWS = 20_000
"""Maximum number of rows per dataset that are read before a run starts."""


@runtime_checkable
class Table(Protocol):
    """Interface of rows by number: a list of dicts, or a table on disk."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


class ArrowRows:
    """Rows of an Arrow table, whose structs have the keys of all rows: those that are null in a row are left out.

    A null that was written stays in columns and lists, in JSON text and in columns of JSON, but not in a struct.
    """

    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        features = self._table.features
        return {name: _stripped(value, features[name]) for name, value in self._table[index].items()}


def _stripped(value: Any, feature: Any) -> Any:
    """Value of an Arrow column of type `feature` without null fields of structs."""
    if isinstance(value, Mapping) and isinstance(feature, Mapping):
        return {name: _stripped(item, feature[name]) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        of_items = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
        return [_stripped(item, of_items) for item in value]
    return value


def listed(rows: Iterable[Any]) -> list[Any]:
    """List rows in memory; those of an Arrow dataset without null fields of structs."""
    datasets = sys.modules.get("datasets")
    if datasets is None or not isinstance(rows, datasets.Dataset | datasets.IterableDataset) or not rows.features:
        return list(rows)
    return [{name: _stripped(value, rows.features[name]) for name, value in row.items()} for row in rows]


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

    def sequences(self, key: Hashable, make: Callable[[int], Arrays | None], count: int | None = None) -> SequenceCache:
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
        if Path(section.path).suffix in FILE_SUFFIXES or not is_hub_id(section.path):
            raise ConfigError(f"dataset.path: {missing_path(section.path.folder / Path(section.path).expanduser())}")
        return _from_hub(section)
    _refuse_args(section)
    if path.is_dir():
        return _read_folder(section, path)
    _refuse_split(section, "a single file")
    return read_file(path)


def _refuse_args(section: DatasetSection) -> None:
    if section.args:
        raise ConfigError(
            f"dataset.args={section.args} cannot be used with {section.path}; "
            "only a function or a hub dataset takes args"
        )


def _refuse_split(section: DatasetSection, what: str) -> None:
    if section.split != "train":
        raise ConfigError(
            f"dataset.split={section.split!r}: {section.path} is {what} and has no splits; "
            "remove split, or use skip and limit"
        )


def read_file(path: Path) -> Table:
    """Read the rows of a file. Raises `ConfigError` with file and line if it is malformed."""
    if path.suffix == ".jsonl":
        return _read_jsonl(path)
    if path.suffix == ".json":
        return _read_json(path)
    if path.suffix == ".csv":
        return _read_csv(path)
    if path.suffix == ".parquet":
        return _read_parquet([path])
    raise ConfigError(
        f"dataset.path={path}: unknown kind of file {path.suffix!r}; use one of {', '.join(FILE_SUFFIXES)}"
    )


def _text(path: Path, *, newline: str | None = None) -> str:
    try:
        with path.open(encoding="utf-8-sig", newline=newline) as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{path}:{number} is not JSON: {error.msg} at column {error.colno}") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{path}:{number} holds a {type(row).__name__}; each line must be an object {{...}}")
            rows.append(row)
    return rows


def _read_json(path: Path) -> list[dict[str, Any]]:
    try:
        value = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path}:{error.lineno} is not JSON: {error.msg} at column {error.colno}; "
            "a file with one object per line is named .jsonl"
        ) from error
    rows = value.get("data") if isinstance(value, dict) else value
    if not isinstance(rows, list):
        raise ConfigError(
            f'{path} must hold a list of objects, or {{"data": [...]}}; it holds a {type(value).__name__}'
        )
    return _checked(rows, str(path))


def _read_csv(path: Path) -> list[dict[str, Any]]:
    reader = csv.DictReader(io.StringIO(_text(path, newline=""), newline=""), strict=True)
    rows = []
    try:
        for row in reader:
            if None in row or None in row.values():
                raise ConfigError(
                    f"{path}:{reader.line_num} has another number of fields than the header, "
                    f"which names {len(reader.fieldnames or ())}"
                )
            rows.append(row)
    except csv.Error as error:
        raise ConfigError(f"{path}:{reader.line_num} is not CSV: {error}") from error
    return rows


def _read_parquet(paths: Sequence[Path]) -> Table:
    import datasets
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.concat_tables([pyarrow.parquet.read_table(path) for path in paths])
        return ArrowRows(datasets.Dataset(table))
    except (pyarrow.ArrowInvalid, OSError) as error:
        names = ", ".join(map(str, paths))
        raise ConfigError(f"{names} cannot be read as parquet: {' '.join(str(error).split())}") from error


def _read_folder(section: DatasetSection, folder: Path) -> Table:
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return _from_disk(section, folder)
    found = sorted(p for p in folder.rglob("*") if p.suffix in FILE_SUFFIXES and p.name not in NOT_ROWS)
    if not found:
        names = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8])
        raise ConfigError(
            f"dataset.path={section.path}: no {', '.join(FILE_SUFFIXES)} in the folder; it holds {names or 'nothing'}"
        )
    splits = {path: _split_of(path) for path in found}
    named = {split for split in splits.values() if split is not None}
    if named or section.split != "train":
        if section.split not in named:
            raise _no_split(section, named)
        found = [path for path in found if splits[path] == section.split]
    if all(path.suffix == ".parquet" for path in found):
        return _read_parquet(found)
    return [row for path in found for row in _iterate(read_file(path))]


def _split_of(path: Path) -> str | None:
    """Split at the start of a file name: `train-00000-of-00002.parquet`, `test.jsonl`."""
    first = path.stem.replace("_", "-").replace(".", "-").split("-")[0]
    return first if first in SPLIT_NAMES else None


def _iterate(table: Table) -> Iterable[dict[str, Any]]:
    return (dict(table[i]) for i in range(len(table)))


def _no_split(section: DatasetSection, found: Iterable[str]) -> ConfigError:
    names = sorted(found)
    return ConfigError(
        f"dataset.split={section.split!r}: {section.path} has "
        + (f"the splits {', '.join(names)}{did_you_mean(section.split, names)}" if names else "no splits; remove split")
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
        raise _no_split(section, map(str, loaded))
    return ArrowRows(loaded[section.split])


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
    return _checked(rows, section.path)


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


def _checked(rows: list[Any], name: str) -> list[dict[str, Any]]:
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ConfigError(
                f"{name} row {index} is a {type(row).__name__}; each row must be an object with named columns"
            )
    return rows


def checked_rows(length: int) -> range:
    """Numbers of the rows that are read before a run starts: all, or `CHECKED_ROWS` spread evenly."""
    return range(0, length, -(-length // CHECKED_ROWS))


def each_row(rows: Rows, chosen: Sequence[int], what: str, read: Callable[[int], T]) -> Iterator[T]:
    """Apply `read` to each chosen row, with a progress bar if that takes long."""
    for index in progress(chosen, f"checking {what} of {rows.name}", len(chosen)):
        yield read(index)
