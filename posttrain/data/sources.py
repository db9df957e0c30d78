"""Dataset sources: files, folders, the Hugging Face hub, or a function; rows with a cache of their token sequences."""

from __future__ import annotations

import hashlib
import inspect
import re
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from posttrain.config import DatasetSection, Locator
from posttrain.config.secrets import argument_names, with_secrets
from posttrain.data.columns import standard_row
from posttrain.data.cuts import Cut
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
from posttrain.data.messages import Remarks
from posttrain.data.pictures import PictureError
from posttrain.errors import ConfigError
from posttrain.runtime.files import content_digest, digest, typed_text
from posttrain.runtime.hub import hub_is_reachable, is_hub_id
from posttrain.tracking.console import console, progress
from posttrain.user_code import describe_error, import_object, is_object_spec, missing_path

T = TypeVar("T")

CHECKED_ROWS = 20_000
"""Maximum number of rows per dataset that are read before a run starts."""
FINGERPRINT_ROWS = 64
"""Maximum number of rows per dataset whose tokens tell whether they are made in the same way."""


COMMIT = re.compile("[0-9a-f]{40}")
NAMED_ROWS = 3
"""Rows left out that are named."""


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
    files: tuple[Path, ...] = ()
    """Files that hold the whole table, in order; none of rows in memory."""
    revision: str | None = None
    """Commit of a dataset on the hub, where it is known."""
    remarks: Remarks = field(default_factory=Remarks, init=False, repr=False, compare=False)
    """Remarks about rows that were read."""
    bad_images: set[int] = field(default_factory=set, init=False, repr=False, compare=False)
    """Rows that were left out so far for a picture that cannot be read."""
    cuts: dict[Hashable, dict[int, Cut]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Losses of rows by `overlong`, by the key of their sequences (`sequences`) and their number."""
    _columns: dict[str, None] = field(default_factory=dict, init=False, repr=False, compare=False)
    _known: dict[Hashable, str] = field(default_factory=dict, init=False, repr=False, compare=False)
    _sequences: dict[Hashable, SequenceCache] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        of_table = self.table[self.start + index]
        self._columns.update(dict.fromkeys(of_table))
        row, remark = standard_row(of_table)
        self.remarks.row = self.start + index
        if remark is not None:
            self.remarks.add("columns", remark)
        return row

    @cached_property
    def content(self) -> str:
        """Digest of all that the rows hold: of whole files, or of each row in memory. Pictures that rows name by their
        files are not in it."""
        whole = hashlib.sha256(f"{self.start} {self.stop}".encode())
        if self.files:
            for file in self.files:
                whole.update(content_digest(file).encode())
            return whole.hexdigest()[:16]
        for index in progress(range(self.start, self.stop), f"comparing the rows of {self.name}", len(self)):
            whole.update(digest(typed_text(self.table[index])).encode())
        return whole.hexdigest()[:16]

    @property
    def notes(self) -> list[str]:
        """Lines about what was remarkable in the rows so far."""
        return [f"{self.name} {text}" for text in self.remarks.texts.values()]

    @property
    def columns(self) -> tuple[str, ...]:
        """Column names of the first row."""
        return tuple(self[0])

    @property
    def all_columns(self) -> tuple[str, ...]:
        """Column names of the source in all rows that were read so far."""
        return tuple(self._columns)

    def sequences(self, key: Hashable, make: Callable[[int], Sequences], count: int | None = None) -> SequenceCache:
        """Cache of the sequences that `make` returns, shared by all calls with the same `key`.

        `key`: everything that the sequences depend on besides the rows. `count`: number of sequences, by default of
        rows.
        """
        if key not in self._sequences:
            self._sequences[key] = SequenceCache(make, len(self) if count is None else count)
        return self._sequences[key]

    def known(self, key: Hashable, make: Callable[[], str]) -> str:
        """Value of `make`, which is made once for a `key`: everything that it depends on besides the rows."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    @contextmanager
    def named(self, index: int) -> Iterator[dict[str, Any]]:
        """Read a row; errors in the `with` block are reported with the row's number in the source."""
        try:
            yield self[index]
        except RowError:  # raised for a row that was read inside the block
            raise
        except ConfigError as error:
            raise RowError(f"{self.name} row {self.start + index}: {error}") from error

    def left_out(self, indices: Iterable[int]) -> int:
        """Number of these rows that were left out for a picture."""
        return len(self.bad_images.intersection(indices))

    def leaves_out(self, index: int, error: RowError) -> bool:
        """Note a row whose error is of a picture, and name the first ones; False for other errors."""
        if not isinstance(error.__cause__, PictureError):
            return False
        if index not in self.bad_images:
            self.bad_images.add(index)
            if len(self.bad_images) <= NAMED_ROWS:
                line = f"WARNING: {error}; it is left out (on_bad_image: drop)"
                console().print(line, style="bold yellow", markup=False, soft_wrap=True)
        return True


def with_all_columns(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows with the columns of all of them: None where a row lacks one, as in a table."""
    none: dict[str, Any] = {name: None for row in rows for name in row}
    return [row if len(row) == len(none) else {**row, **{n: None for n in none if n not in row}} for row in rows]


def load_rows(section: DatasetSection) -> Rows:
    """Load the rows of a dataset section.

    Raises `ConfigError` if the source does not exist or cannot be read, or if no rows remain.
    """
    started = time.monotonic()
    table, files = _open(section)
    if _few:
        _few[-1].loads[section.path] = time.monotonic() - started
    if len(table) == 0:
        raise ConfigError(f"dataset.path={section.path}: the dataset is empty; it needs at least one row")
    if section.skip >= len(table):
        raise ConfigError(f"dataset.skip={section.skip} leaves none of the {len(table)} rows of {section.path}")
    stop = len(table) if section.limit is None else min(len(table), section.skip + section.limit)
    return Rows(section.path, table, section.skip, stop, tuple(files), _revision(section, files))


def _open(section: DatasetSection) -> tuple[Table, Sequence[Path]]:
    """Table of a dataset, and the files that hold it."""
    path = section.path.found
    if is_object_spec(section.path):
        _refuse_split(section, "a function")
        return _call(section), ()
    if path is None:
        if file_kind(Path(section.path)) is not None or not is_hub_id(section.path):
            raise ConfigError(f"dataset.path: {missing_path(section.path.folder / Path(section.path).expanduser())}")
        loaded = _from_hub(section)
        return ArrowRows(loaded), _arrow_files(loaded)
    if path.is_dir() and not is_saved(path):
        files = folder_files(section, path).taken
        return read_files(files, path), files
    _refuse_args(section)
    if path.is_dir():
        loaded = _from_disk(section, path)
        return ArrowRows(loaded), _arrow_files(loaded)
    _refuse_split(section, "a single file")
    return read_file(path), [path]


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


def _arrow_files(loaded: Any) -> list[Path]:
    """Files of a dataset of the library; none if it holds its rows in memory."""
    return [Path(file["filename"]) for file in loaded.cache_files]


def _revision(section: DatasetSection, files: Sequence[Path]) -> str | None:
    """Commit of a dataset on the hub: the library names by it the folder in which it keeps the rows."""
    if is_object_spec(section.path) or section.path.found is not None or not files:
        return None
    return files[0].parent.name if COMMIT.fullmatch(files[0].parent.name) else None


def _from_disk(section: DatasetSection, folder: Path) -> Any:
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
        return loaded
    if section.split not in loaded:
        raise no_split(section, map(str, loaded))
    return loaded[section.split]


def _from_hub(section: DatasetSection) -> Any:
    import datasets

    if "streaming" in section.args:
        raise ConfigError(
            f"dataset.args.streaming={section.args['streaming']}: rows are read by their numbers, in a new order in "
            "each epoch, and a stream has none; remove it: the library keeps the rows in files, which are not in memory"
        )
    before = datasets.config.HF_HUB_OFFLINE
    reachable = hub_is_reachable()
    # Offline mode answers from the library's cache at once instead of retrying for a minute.
    datasets.config.HF_HUB_OFFLINE = not reachable
    try:
        return datasets.load_dataset(str(section.path), split=section.split, **with_secrets(section.args))
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
        inspect.signature(function).bind(**dict.fromkeys(argument_names(section.args)))
    except TypeError as error:
        raise ConfigError(f"dataset.args={section.args} do not fit {section.path}: {error}") from error
    try:
        result = function(**with_paths(function, section.path, with_secrets(section.args)))
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


@dataclass
class FewRows:
    """Bounds of a quick check, and what it has left out."""

    most: int
    """Rows of a dataset."""
    seconds: float
    """Time for reading the rows of all datasets together; one row of each is read all the same."""
    read: dict[tuple[str, str, int], int] = field(default_factory=dict)
    """Number of rows that were read, by dataset, what they are, and how many there are."""
    loads: dict[str, float] = field(default_factory=dict)
    """Seconds in which a dataset was opened, or made by its function, by name."""

    used_s: float = 0.0
    """Time that reading has taken so far."""

    def notes(self) -> list[str]:
        """Say of each dataset how many of its rows were read, where not all were."""
        left = [f"{name}: {read:,} of {whole:,} {what} were read" for (name, what, whole), read in self.read.items()]
        late = [f"reading was ended after {self.used_s:.0f} s"] if self.used_s > self.seconds else []
        slow = [
            f"{name}: opening it took {seconds:.0f} s, which --quick cannot shorten"
            for name, seconds in self.loads.items()
            if seconds > SLOW_S
        ]
        return [f"quick: {line}" for line in (*left, *late, *slow)]


SLOW_S = 5.0
"""Seconds above which a quick check says that opening a dataset has taken them."""
_few: list[FewRows] = []
"""Bounds in force, if any."""


@contextmanager
def few_rows(bounds: FewRows) -> Iterator[FewRows]:
    """Read few rows of each dataset in this block, spread evenly."""
    _few.append(bounds)
    try:
        yield bounds
    finally:
        _few.pop()


def checked_rows(length: int) -> range:
    """Numbers of the rows that are read before a run starts: all, or `CHECKED_ROWS` spread evenly; in a quick check
    those of its bound."""
    most = _few[-1].most if _few else CHECKED_ROWS
    return range(0, length, -(-length // most))


def needed_rows(length: int) -> range:
    """Numbers of the rows that a run must have read before it starts: all; in a quick check those of its bound."""
    return checked_rows(length) if _few else range(length)


def picked(length: int) -> list[int]:
    """Numbers of up to `FINGERPRINT_ROWS` rows, spread evenly."""
    return sorted({int(i) for i in np.linspace(0, length - 1, min(length, FINGERPRINT_ROWS))})


def each_row(rows: Rows, chosen: Sequence[int], what: str, read: Callable[[int], T]) -> Iterator[T]:
    """Apply `read` to each chosen row, with a progress bar if that takes long. A quick check ends with its time."""
    count = 0
    for index in progress(chosen, f"checking {what} of {rows.name}", len(chosen)):
        if _few and count and _few[-1].used_s > _few[-1].seconds:
            break
        started = time.monotonic()
        made = read(index)
        if _few:
            _few[-1].used_s += time.monotonic() - started
        yield made
        count += 1
    if _few and count < len(rows):
        _few[-1].read[rows.name, what, len(rows)] = count


Arrays = dict[str, np.ndarray]
Sequences = list[Arrays | None]
"""Sequences of a row, usually one; None for one that is dropped as too long."""

MAX_BYTES = 2**28
"""Maximum bytes of cached sequences per dataset; others are made again at each use."""
CHUNK_TOKENS = 2**18

_UNKNOWN, _LEFT_OUT, _WHOLE = -1, -2, -3


class _Field(NamedTuple):
    """Array of all cached sequences, concatenated."""

    name: str
    dtype: np.dtype[np.generic]


class SequenceCache:
    """Cache of `make(number)` for numbers below `count`; a sequence is arrays of one length, or of any with pictures,
    or None. Those of text have the same names and types.

    Cached arrays are read-only.
    """

    def __init__(self, make: Callable[[int], Sequences], count: int, *, max_bytes: int = MAX_BYTES) -> None:
        self._make, self._max_bytes = make, max_bytes
        self._chunk_of = np.full(count, _UNKNOWN, np.int32)
        self._starts, self._lengths = np.zeros(count, np.int32), np.zeros(count, np.int32)
        self._parts: dict[int, list[int | None]] = {}
        """Lengths of the sequences, None for dropped ones, of each number with other than one."""
        self._whole: dict[int, Sequences] = {}
        """Sequences with pictures, whose arrays are not of one length."""
        self._fields: list[_Field] = []
        self._chunks: list[list[np.ndarray]] = []
        self._used, self._num_bytes = 0, 0
        self._lock = threading.Lock()

    def __call__(self, number: int) -> Sequences:
        chunk = int(self._chunk_of[number])
        if chunk == _WHOLE:
            return self._whole[number]
        if chunk == _LEFT_OUT:
            return [None for _ in self._parts.get(number, [None])]
        if chunk == _UNKNOWN:
            sequences = self._make(number)
            with self._lock:
                self._keep(number, sequences)
            return sequences
        start = int(self._starts[number])
        cached: Sequences = []
        for length in self._parts.get(number, [int(self._lengths[number])]):
            stop = start + (length or 0)
            arrays = {
                f.name: chunk_array[start:stop]
                for f, chunk_array in zip(self._fields, self._chunks[chunk], strict=True)
            }
            cached.append(None if length is None else arrays)
            start = stop
        return cached

    @property
    def num_kept(self) -> int:
        """Number of sequences that are not made again, including dropped ones."""
        return int((self._chunk_of != _UNKNOWN).sum())

    def _keep_whole(self, number: int, made: Sequences) -> None:
        # The patches of a sequence take no memory yet.
        arrays = [array for one in made if one is not None for name, array in one.items() if name != "patches"]
        num_bytes = self._num_bytes + sum(array.nbytes for array in arrays)
        if num_bytes <= self._max_bytes:
            self._whole[number], self._num_bytes = made, num_bytes
            self._chunk_of[number] = _WHOLE

    def _keep(self, number: int, made: Sequences) -> None:
        if self._chunk_of[number] != _UNKNOWN:
            return
        there = [one for one in made if one is not None]
        if any("images" in one for one in there):
            self._keep_whole(number, made)
            return
        if len(made) != 1:
            self._parts[number] = [None if one is None else len(next(iter(one.values()))) for one in made]
        if not there:
            self._chunk_of[number] = _LEFT_OUT
            return
        fields = [_Field(name, array.dtype) for name, array in there[0].items()]
        self._fields = self._fields or fields
        assert fields == self._fields, (fields, self._fields)
        length = sum(len(next(iter(one.values()))) for one in there)
        if not self._chunks or self._used + length > len(self._chunks[-1][0]):
            size = max(CHUNK_TOKENS, length)
            num_bytes = self._num_bytes + size * sum(one.dtype.itemsize for one in fields)
            if num_bytes > self._max_bytes:
                return
            self._chunks.append([np.empty(size, one.dtype) for one in fields])
            self._used, self._num_bytes = 0, num_bytes
        for chunk, of in zip(self._chunks[-1], self._fields, strict=True):
            chunk[self._used : self._used + length] = np.concatenate([one[of.name] for one in there])
        self._starts[number], self._lengths[number] = self._used, length
        self._used += length
        # Set last: known numbers are read without the lock.
        self._chunk_of[number] = len(self._chunks) - 1
