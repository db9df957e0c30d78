"""Files of rows: their formats, and the files of a folder that belong to a split."""

from __future__ import annotations

import csv
import glob
import io
import itertools
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import yaml

from posttrain.config import DatasetSection
from posttrain.errors import ConfigError, did_you_mean
from posttrain.user_code import is_object_spec

SPLIT = re.compile(r"(?<![^-._ 0-9/])((train|test)(ing)?|dev|val(id(ation)?)?|eval(uation)?)(?![^-._ 0-9/])")
"""Word in a path that names a split."""
FILE_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
TABLES = (".parquet", ".arrow")
ROLE_COLUMNS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected", "text", "label", "output")
"""Columns that rows are made of, and which a CSV file must fill."""
MAP_KEYS = ("posttrain_map_key", "posttrain_map_value")
"""Fields of the entries of an Arrow map while it is a list, which becomes an object again in rows."""
COMPRESSED = (".gz", ".bz2", ".zst", ".lz4")
"""Endings that may follow those of text: `.jsonl.gz`."""
CONFIG_FIELDS = {"data_files", "data_dir", "default", "description", "features", "version"}
"""Fields of a configuration in a folder's README.md that do not change how its files are read."""
METADATA, IMAGE_FILES = "metadata", {"file_name": "image", "file_names": "images"}
"""Name of the file of Hugging Face's ImageFolder, and its columns of pictures with ours."""
NAMED_FILES = 8
"""Maximum number of file names in a message."""


@runtime_checkable
class Table(Protocol):
    """Interface of rows by number: a list of dicts, or a table on disk."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


def read_file(path: Path, folder: Path | None = None) -> Table:
    """Read the rows of a file; pictures that it names become relative to `folder`, by default its own. ConfigError with
    file and line if it is malformed."""
    table = _read(path)
    if path.name.split(".")[0] != METADATA or not len(table) or not (columns := IMAGE_FILES.keys() & table[0].keys()):
        return table
    return ImageFolderRows(table, min(columns), path.parent.relative_to(folder or path.parent))


def _read(path: Path) -> Table:
    kind = file_kind(path)
    if kind in (".jsonl", ".ndjson"):
        return _read_jsonl(path)
    if kind == ".json":
        return _read_json(path)
    if kind in (".csv", ".tsv"):
        return _read_csv(path, "," if kind == ".csv" else "\t")
    if kind in TABLES:
        return _read_tables([path])
    raise ConfigError(
        f"dataset.path={path}: unknown kind of file {path.suffix!r}; use one of {', '.join(FILE_SUFFIXES)}, "
        f"of text also with {', '.join(COMPRESSED)}"
    )


def file_kind(path: Path) -> str | None:
    """Format of a file by its suffix, without that of a compression; None: not a file of rows."""
    compressed = path.suffix in COMPRESSED
    suffix = Path(path.stem).suffix if compressed else path.suffix
    return suffix if suffix in FILE_SUFFIXES and not (compressed and suffix in TABLES) else None


def _text(path: Path, *, newline: str | None = None) -> str:
    import pyarrow

    try:
        with pyarrow.input_stream(str(path), compression="detect") as file:
            return io.TextIOWrapper(io.BytesIO(file.read()), encoding="utf-8-sig", newline=newline).read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error


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
        if error.msg == "Extra data":
            return _read_jsonl(path)  # one object per line
        raise ConfigError(f"{path}:{error.lineno} is not JSON: {error.msg} at column {error.colno}") from error
    rows = value.get("data") if isinstance(value, dict) else value
    if not isinstance(rows, list):
        raise ConfigError(
            f'{path} must hold a list of objects, or {{"data": [...]}}; it holds a {type(value).__name__}'
        )
    return check_rows(rows, str(path))


def _read_csv(path: Path, delimiter: str) -> list[dict[str, Any]]:
    csv.field_size_limit(sys.maxsize)
    reader = csv.DictReader(io.StringIO(_text(path, newline=""), newline=""), strict=True, delimiter=delimiter)
    rows = []
    try:
        _check_header(path, list(reader.fieldnames or ()))
        for row in reader:
            if None in row or None in row.values():
                raise ConfigError(
                    f"{path}:{reader.line_num} has another number of fields than the header, "
                    f"which names {len(reader.fieldnames or ())}"
                )
            # A field without a text is a missing value, as null is elsewhere; in columns of other names, over which
            # templates stand, it is an empty text.
            rows.append({name: None if not value and name in ROLE_COLUMNS else value for name, value in row.items()})
    except csv.Error as error:
        raise ConfigError(f"{path}:{reader.line_num} is not CSV: {error}") from error
    return rows


def _check_header(path: Path, names: Sequence[str]) -> None:
    if len(names) == 1 and (other := next((one for one in ";\t|," if one in names[0]), None)):
        raise ConfigError(
            f"{path}:1: the header {names[0]!r} is one column; its fields seem to be separated by {other!r}: save "
            "it with ',', or with tabs as .tsv"
        )
    for name in names:
        if name != name.strip():
            raise ConfigError(f"{path}:1: the column {name!r} begins or ends with a space; remove it from the header")
        if name and names.count(name) > 1:
            raise ConfigError(f"{path}:1: the header names the column {name!r} twice; rename one of them")


def _read_tables(paths: Sequence[Path]) -> Table:
    """Read Parquet or Arrow files as one table, whose columns have the widest type of all files, by name."""
    import datasets
    import pyarrow
    import pyarrow.parquet

    tables: list[Any] = []
    schemas: list[Any] = []
    for path in paths:
        try:
            read = _arrow_table if path.suffix == ".arrow" else pyarrow.parquet.read_table
            table = read(path)
            schemas.append(table.schema)
            tables.append(_plain_table(table))
        except (pyarrow.ArrowException, OSError) as error:
            raise ConfigError(f"{path} cannot be read as {path.suffix[1:]}: {' '.join(str(error).split())}") from error
    try:
        # Metadata describes the types of one file.
        tables = [table.replace_schema_metadata(None) for table in tables] if len(tables) > 1 else tables
        return ArrowRows(datasets.Dataset(pyarrow.concat_tables(tables, promote_options="permissive")))
    except pyarrow.ArrowException as error:
        raise _other_types(paths, schemas, [table.schema for table in tables], error) from error
    except ValueError as error:  # of a type that the library does not know
        kinds = ", ".join(f"{one.name}: {one.type}" for one in schemas[0])
        raise ConfigError(
            f"{paths[0]} has a column of a type that cannot be read ({' '.join(str(error).split())}); its columns are "
            f"{kinds}; write it with another type, such as text"
        ) from error


def _arrow_table(path: Path) -> Any:
    """Table of an Arrow file, of either format."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as source:
        try:
            return pyarrow.ipc.open_stream(source).read_all()
        except pyarrow.ArrowInvalid:
            return pyarrow.ipc.open_file(source).read_all()


def _plain_table(table: Any) -> Any:
    """Table without types that depend on a file, or that `datasets` does not know: dictionaries become their values,
    views and run-ends plain arrays, maps lists of `MAP_KEYS`; at any depth."""
    import pyarrow

    for index, column in enumerate(table.schema):
        kind = _plain_type(column.type)
        if kind != column.type:
            chunks = [_plain_array(chunk) for chunk in table.column(index).chunks]
            table = table.set_column(index, column.name, pyarrow.chunked_array(chunks, kind))
    return table


def _plain_type(kind: Any) -> Any:
    import pyarrow
    from pyarrow import types

    if types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if types.is_run_end_encoded(kind):
        return _plain_type(kind.value_type)
    if types.is_map(kind):
        parts = zip(MAP_KEYS, (kind.key_type, kind.item_type), strict=True)
        return pyarrow.list_(pyarrow.struct([(name, _plain_type(part)) for name, part in parts]))
    if types.is_struct(kind):
        return pyarrow.struct([(kind.field(i).name, _plain_type(kind.field(i).type)) for i in range(kind.num_fields)])
    if types.is_fixed_size_list(kind) and _plain_type(kind.value_type) == kind.value_type:
        return kind
    if types.is_list(kind) or types.is_fixed_size_list(kind) or types.is_list_view(kind):
        return pyarrow.list_(_plain_type(kind.value_type))
    if types.is_large_list(kind) or types.is_large_list_view(kind):
        return pyarrow.large_list(_plain_type(kind.value_type))
    views = ((types.is_string_view, pyarrow.large_string()), (types.is_binary_view, pyarrow.large_binary()))
    return next((plain for is_view, plain in views if is_view(kind)), kind)


def _plain_array(array: Any) -> Any:
    """Array of type `_plain_type`."""
    import pyarrow
    from pyarrow import types

    kind, plain = array.type, _plain_type(array.type)
    if kind == plain:
        return array
    if types.is_dictionary(kind):
        return _plain_array(array.dictionary_decode())
    if types.is_run_end_encoded(kind):
        return _plain_array(pyarrow.compute.run_end_decode(array))
    if types.is_struct(kind):
        # `field` leaves out an offset and the nulls of the struct; `flatten` applies both.
        parts = [_plain_array(part) for part in array.flatten()]
        return pyarrow.StructArray.from_arrays(parts, fields=list(plain), mask=array.is_null())
    if types.is_map(kind):
        # Entries of a slice, and null maps, through Python: maps are small.
        entries = [
            None if one is None else [dict(zip(MAP_KEYS, pair, strict=True)) for pair in one]
            for one in array.to_pylist()
        ]
        return pyarrow.array(entries, plain)
    if types.is_list(kind) or types.is_large_list(kind):
        whole = pyarrow.concat_arrays([array])  # without an offset
        lengths = pyarrow.compute.fill_null(pyarrow.compute.list_value_length(whole), 0)
        offsets = [0, *itertools.accumulate(lengths.to_pylist())]
        make = pyarrow.ListArray if types.is_list(kind) else pyarrow.LargeListArray
        numbers = pyarrow.array(offsets, pyarrow.int32() if types.is_list(kind) else pyarrow.int64())
        return make.from_arrays(numbers, _plain_array(whole.flatten()), type=plain, mask=whole.is_null())
    if types.is_fixed_size_list(kind) or types.is_list_view(kind) or types.is_large_list_view(kind):
        return pyarrow.array(array.to_pylist(), plain)
    return array.cast(plain)


def _other_types(paths: Sequence[Path], schemas: Sequence[Any], plain: Sequence[Any], error: Exception) -> ConfigError:
    """Name the first file whose columns do not fit those of an earlier one. `plain`: schemas as they are read."""
    for number, schema in enumerate(plain):
        for earlier, other in enumerate(plain[:number]):
            for name in schema.names:
                if name in other.names and not _unite(other.field(name).type, schema.field(name).type):
                    types = [schemas[one].field(name).type for one in (number, earlier)]
                    return ConfigError(
                        f"{paths[number]}: column {name!r} holds {types[0]}, and {types[1]} in {paths[earlier]}; "
                        "write both with one type"
                    )
    return ConfigError(f"{', '.join(map(str, paths))} do not fit together: {' '.join(str(error).split())}")


def _unite(one: Any, other: Any) -> bool:
    import pyarrow

    try:
        schemas = [pyarrow.schema([("column", kind)]) for kind in (one, other)]
        pyarrow.unify_schemas(schemas, promote_options="permissive")
    except pyarrow.ArrowException:
        return False
    return True


def check_rows(rows: list[Any], name: str) -> list[dict[str, Any]]:
    """Return rows that are all mappings. Raises `ConfigError` for others."""
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ConfigError(
                f"{name} row {index} is a {type(row).__name__}; each row must be an object with named columns"
            )
    return rows


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
        if value and isinstance(value[0], Mapping) and tuple(value[0]) == MAP_KEYS:
            return {entry[MAP_KEYS[0]]: _stripped(entry[MAP_KEYS[1]], None) for entry in value}
        of_items = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
        return [_stripped(item, of_items) for item in value]
    return value


def listed(rows: Iterable[Any]) -> list[Any]:
    """List rows in memory; those of an Arrow dataset without null fields of structs."""
    datasets = sys.modules.get("datasets")
    if datasets is None or not isinstance(rows, datasets.Dataset | datasets.IterableDataset) or not rows.features:
        return list(rows)
    return [{name: _stripped(value, rows.features[name]) for name, value in row.items()} for row in rows]


class ImageFolderRows:
    """Rows of the `metadata` file of Hugging Face's ImageFolder: `file_name` or `file_names`, relative to that file,
    become `image` or `images`."""

    def __init__(self, table: Table, column: str, within: Path) -> None:
        self._table, self._column, self._within = table, column, within

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        row = dict(self._table[index])
        value, image = row.pop(self._column, None), IMAGE_FILES[self._column]
        if image in row:
            raise ConfigError(f"row {index} has the columns {self._column} and {image}; both name pictures, give one")
        return row | {image: self._named(value)}

    def _named(self, value: Any) -> Any:
        return [self._named(one) for one in value] if isinstance(value, list) else value and str(self._within / value)


class FolderFiles(NamedTuple):
    """Files of a folder: those of the split, and the other files of rows."""

    taken: list[Path]
    left_out: list[Path]


def folder_files(section: DatasetSection, folder: Path) -> FolderFiles:
    """Files of the section's split, by the rules of Hugging Face `datasets`.

    The splits are those of a configuration in README.md (`args: {name: ...}`), else folders or files with the name of
    a split, else all files are `train`; hidden files are not read. Raises `ConfigError` if there is no such split, and
    for files that two splits share.
    """
    if glob.has_magic(str(folder)):
        raise ConfigError(
            f"dataset.path={folder}: a folder's path must not contain *, ? or [; rename it, or make a link"
        )
    all_files = _resolve(folder, "**")
    if not all_files:
        names = ", ".join(sorted(entry.name for entry in folder.iterdir())[:NAMED_FILES])
        raise ConfigError(
            f"dataset.path={section.path}: no {', '.join(FILE_SUFFIXES)} in the folder; it holds {names or 'nothing'}"
        )
    splits = _splits(section, folder)
    if section.split not in splits:
        raise no_split(section, [] if list(splits.values()) == [all_files] else splits)
    taken = splits[section.split]
    for name, others in splits.items():
        if name != section.split and (shared := sorted(set(taken) & set(others))):
            raise ConfigError(
                f"dataset.path={section.path}: {_names(folder, shared)} belongs to the splits {section.split} and "
                f"{name} by its name; give a file or a folder of one split"
            )
    if not taken:
        raise ConfigError(f"dataset.path={section.path}: README.md names no files of the split {section.split}")
    rows = [path for path in taken if file_kind(path) != ".json" or _holds_rows(path)] or taken
    if len({_family(path) for path in rows}) > 1:
        raise ConfigError(
            f"dataset.path={section.path}: the split {section.split} has files of several formats: "
            f"{_names(folder, rows)}; give one file, or a folder with one format"
        )
    return FolderFiles(rows, [path for path in all_files if path not in rows])


def files_note(section: DatasetSection) -> str | None:
    """Report the files that are read of a folder; None for other sources."""
    folder = section.path.found
    if folder is None or is_object_spec(section.path) or not folder.is_dir() or is_saved(folder):
        return None
    taken, left_out = folder_files(section, folder)
    rest = f"; not read: {_names(folder, left_out)}" if left_out else ""
    return f"{section.path}: split {section.split} of {_names(folder, taken)}{rest}"


def _names(folder: Path, paths: Sequence[Path]) -> str:
    more = f" and {len(paths) - NAMED_FILES} more" if len(paths) > NAMED_FILES else ""
    return ", ".join(str(path.relative_to(folder)) for path in paths[:NAMED_FILES]) + more


def _family(path: Path) -> str:
    """Format of a file, the same for those that are read as one."""
    kind = file_kind(path)
    return "json" if kind in (".jsonl", ".ndjson", ".json") else "table" if kind in TABLES else str(kind)


def _holds_rows(path: Path) -> bool:
    """Tell a JSON file of rows from one of other contents, such as statistics."""
    import pyarrow

    with pyarrow.input_stream(str(path), compression="detect") as file:
        if file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] != b"{":
            return True
    try:
        return isinstance(json.loads(_text(path)).get("data"), list)
    except json.JSONDecodeError:
        return True  # one object per line, or malformed


def _resolve(folder: Path, pattern: str) -> list[Path]:
    """Files of rows that match a pattern of `datasets`, without hidden ones."""
    from datasets.data_files import resolve_pattern

    try:
        paths = resolve_pattern(pattern, base_path=str(folder))
    except FileNotFoundError:
        return []
    return sorted({path for path in map(Path, paths) if file_kind(path) is not None})


def _splits(section: DatasetSection, folder: Path) -> dict[str, list[Path]]:
    from datasets.data_files import _get_data_files_patterns, sanitize_patterns

    config = _config(section, folder)
    folder = folder / config.get("data_dir", "")
    patterns = config.get("data_files")
    if patterns is None:
        _check_case(folder)
        try:
            patterns = _get_data_files_patterns(lambda pattern: list(map(str, _resolve(folder, pattern))))
        except FileNotFoundError:
            return {}
    return {
        split: sorted({path for pattern in group for path in _resolve(folder, pattern)})
        for split, group in sanitize_patterns(patterns).items()
    }


def _check_case(folder: Path) -> None:
    """Raises ConfigError for names such as `Test.jsonl` beside other files: splits have small letters."""
    names = [str(path.relative_to(folder)) for path in _resolve(folder, "**")]
    capitals = [name for name in names if SPLIT.search(name.lower()) and not SPLIT.search(name)]
    if capitals and len(names) > 1:
        raise ConfigError(
            f"dataset.path={folder}: {capitals[0]} names a split with capital letters, which is not seen as one; "
            "rename it in small letters, or give one file"
        )


def _config(section: DatasetSection, folder: Path) -> dict[str, Any]:
    """Configuration of a folder's README.md that `args: {name: ...}` or its own default selects; empty without any."""
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import metadata_load

    name, readme = section.args.get("name"), folder / "README.md"
    if section.args.keys() - {"name"}:
        raise ConfigError(f"dataset.args={section.args}: a folder takes only name, a configuration of its README.md")
    try:
        known = MetadataConfigs.from_dataset_card_data((metadata_load(readme) if readme.is_file() else None) or {})
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{readme}: the block of configs cannot be read: {' '.join(str(error).split())}") from error
    if not known and name is None:
        return {}
    name = name or known.get_default_config_name()
    if name not in known:
        asked = "give one as dataset.args: {name: ...}" if name is None else f"there is no {name!r} (dataset.args)"
        raise ConfigError(
            f"dataset.path={section.path}: its README.md has the configurations {', '.join(known) or 'none'}; "
            f"{asked}{did_you_mean(name or '', known)}"
        )
    if unknown := known[name].keys() - CONFIG_FIELDS:
        raise ConfigError(f"{readme}: {min(unknown)} of the configuration {name} is not supported; give the files")
    return known[name]


def read_files(paths: Sequence[Path], folder: Path) -> Table:
    """Read files of one format as one table; pictures that they name are relative to `folder`."""
    if file_kind(paths[0]) in TABLES and paths[0].stem != METADATA:
        return _read_tables(paths)
    return [row for path in paths for row in _iterate(read_file(path, folder))]


def _iterate(table: Table) -> Iterable[dict[str, Any]]:
    return (dict(table[i]) for i in range(len(table)))


def no_split(section: DatasetSection, found: Iterable[str]) -> ConfigError:
    names = sorted(found)
    return ConfigError(
        f"dataset.split={section.split!r}: {section.path} has "
        + (f"the splits {', '.join(names)}{did_you_mean(section.split, names)}" if names else "no splits; remove split")
    )


def is_saved(folder: Path) -> bool:
    """Recognise a folder of `save_to_disk`."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()
