"""Run configurations as YAML: reading with dotted overrides, writing, comparing. A file has `stages:`,
or `kind:` at the top level with the fields of a single stage beside `output` and `model`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from posttrain.config import RLSection, RunConfig, Section
from posttrain.config.locator import Locator, UserObject, object_text, shown_path
from posttrain.config.messages import FIRST_STAGE, ConfigSource, Key, messages, show
from posttrain.config.secrets import check_urls, without_named_secrets
from posttrain.errors import ConfigError

WORDS = {"algorithm": "kind", "surrogate": "kind", "dataset": "path", "eval_dataset": "path"}
"""Fields of sections for which a text may stand, and what that is of the section in which an override sets a field."""
DEFAULT_KINDS = {"algorithm": RLSection.model_fields["algorithm"].default.kind}
"""Kinds of these fields where a file has none."""
EXAMPLE = "; give a YAML file, such as configs/quickstart.yaml"


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file, apply `dotted.key=value` overrides in order, validate.

    Paths in the file are resolved from the current folder, the file's folder and the project's root, as `path` is from
    the first and the last. Raises ConfigError with one line per mistake.
    """
    file, data, lines = _read(path)
    return _build(data, lines, str(path), overrides, file.resolve().parent)


def load_recorded(file: Path) -> RunConfig:
    """Read the configuration that a run has written into its folder.

    ConfigError for one that another version of the package has written, whose fields differ.
    """
    try:
        return load_config(file)
    except ConfigError as error:
        if not file.is_file():
            raise
        raise ConfigError(
            f"{file.parent} holds a run of another version of posttrain ({str(error).splitlines()[0]}); resume it "
            "with that version, or give another output"
        ) from error


def has_stages(path: str | Path) -> bool:
    """Tell whether the stages of a file are a list: the fields of a single one may be at its top level."""
    data = _read(path)[1]
    return isinstance(data, dict) and not _is_short(data)


def build_config(
    data: Mapping[str, Any], overrides: Sequence[str] = (), *, name: str = "config", python: bool = False
) -> RunConfig:
    """Validate a mapping as `load_config` does a file in the current folder; error messages start with `name`.

    `python`: the mapping is keywords of a Python class, and errors suggest keywords.
    """
    return _build(data, {}, name, overrides, None, python)


def read_value(text: str, name: str) -> Any:
    """Value that a text has in YAML. ConfigError, which begins with `name`, for one that is not YAML."""
    return _parse(text, name)[0]


def dump_config(config: Section) -> str:
    """Dump a whole configuration, including defaults, as YAML that `load_config` reads; functions as
    `module:name`."""
    return yaml.dump(_plain(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def stage_settings(config: RunConfig, index: int) -> dict[str, Any]:
    """Dotted names and plain values of a stage and of what it shares with the others, without sections that are off."""
    plain = _plain(config)
    stage = plain.pop("stages")[index]
    return dict(_flat({**plain, **stage}, ()))


def diff_config(before: RunConfig, after: RunConfig) -> list[str]:
    """Dotted keys of values that differ, in the order of the schema."""
    return list(_differences(_plain(before), _plain(after), ()))


def _read(path: str | Path) -> tuple[Path, Any, dict[Key, int]]:
    file = _config_path(str(path))
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as text: {error}") from error
    return file, *_parse(text, str(path))


def _is_short(data: Mapping[str, Any]) -> bool:
    return "stages" not in data and "kind" in data


# --- YAML -------------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars: `1e-4` is a number; `no`, `1:30` and dates are text."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes text which either version of YAML would read as another type."""


_NUMBER_START = list("-+.0123456789")
for _tag, _pattern, _start in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+|0o[0-7]+", _NUMBER_START),
    (
        "float",
        r"[-+]?(?:(?:0|[1-9][0-9_]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        _NUMBER_START,
    ),
    ("merge", r"<<", ["<"]),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), _start)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def _parse(text: str, name: str) -> tuple[Any, dict[Key, int]]:
    """Value of a YAML document, and the line of every key in it."""
    loader = _Loader(text)
    lines: dict[Key, int] = {}
    try:
        node = loader.get_single_node()
        if node is None:
            return None, lines
        _collect_lines(node, (), lines, loader)
        return loader.construct_document(node), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{name}:{mark.line + 1}" if mark and "\n" in text else name
        raise ConfigError(f"{where}: not YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not YAML: {' '.join(str(error).split())}") from error
    finally:
        loader.dispose()


def _collect_lines(node: yaml.Node, key: Key, lines: dict[Key, int], loader: _Loader) -> None:
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[*key, index] = item.start_mark.line + 1
            _collect_lines(item, (*key, index), lines, loader)
    elif isinstance(node, yaml.MappingNode):
        seen: dict[Any, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            scalar = isinstance(key_node, yaml.ScalarNode) and not key_node.tag.endswith(":merge")
            word = loader.construct_object(key_node) if scalar else str(key_node.value)
            if word in seen:
                dotted = ".".join(map(str, (*key, word)))
                problem = f"{dotted} is given twice, first in line {seen[word]}; keep one"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
            seen[word] = lines[*key, word] = line
            _collect_lines(value_node, (*key, word), lines, loader)


# --- from raw data to RunConfig ---------------------------------------------------------------------------------------


def _build(
    data: Any,
    lines: Mapping[Key, int],
    name: str,
    overrides: Sequence[str],
    folder: Path | None,
    python: bool = False,
) -> RunConfig:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{name}: a configuration is a mapping of fields such as `seed: 0`; got {show(data)}")
    raw = _copy(data)
    short = _is_short(raw)
    if short:
        own = RunConfig.model_fields
        stage = {word: raw.pop(word) for word in list(raw) if word not in own}
        raw["stages"] = [stage]
        lines = {key if key[0] in own else (*FIRST_STAGE, *key): line for key, line in lines.items()}
    source = ConfigSource(name=name, short=short, python=python, lines=lines, raw=raw)
    for text in overrides:
        _override(raw, text, source)
    try:
        return RunConfig.model_validate(raw, context=folder)
    except ValidationError as error:
        raise ConfigError("\n".join(messages(error, source))) from error


def _copy(value: Any) -> Any:
    """Copy containers recursively, so that overriding one use of a YAML anchor leaves the others alone."""
    if isinstance(value, Mapping):
        return {word: _copy(item) for word, item in value.items()}
    return [_copy(item) for item in value] if type(value) in (list, tuple) else value


def _override(raw: dict[str, Any], text: str, source: ConfigSource) -> None:
    dotted, equals, written = text.partition("=")
    words = dotted.strip().split(".")
    if not equals or not all(words):
        raise ConfigError(f"override {text}: must be KEY=VALUE, such as stages.0.num_steps=5 or model.lora.rank=8")
    if source.short and words[0] not in RunConfig.model_fields:
        words = [*map(str, FIRST_STAGE), *words]
    value, _ = _parse(written, f"override {text}")
    try:
        check_urls(without_named_secrets({words[-1]: value}))
    except ValueError:  # refused below, without being repeated
        text = f"{dotted}=..."
    node: Any = raw
    key: Key = ()
    for word in words[:-1]:
        step = _step(node, word, key, text)
        if isinstance(node, dict) and node.get(step) is None:
            node[step] = {"kind": DEFAULT_KINDS[step]} if step in DEFAULT_KINDS else {}
            source.overrides[*key, step] = text
        elif step in WORDS and isinstance(node[step], str):
            node[step] = {WORDS[step]: node[step]}
        node, key = node[step], (*key, step)
    step = _step(node, words[-1], key, text)
    node[step] = value
    key = (*key, step)
    for older in [k for k in source.overrides if k[: len(key)] == key]:
        del source.overrides[older]
    source.overrides[key] = text


def _step(node: Any, word: str, key: Key, text: str) -> str | int:
    """Resolve `word` of an override to a key or index in `node`."""
    dotted = ".".join(map(str, key))
    if isinstance(node, dict):
        return word if word in node else _scalar(word)
    if not isinstance(node, list):
        raise ConfigError(f"override {text}: {dotted} is {show(node)}, which has no {word!r} in it")
    if word.isdecimal():
        if int(word) < len(node):
            return int(word)
        raise ConfigError(f"override {text}: {dotted} has no item {word}; it has {len(node)}, counted from 0")
    names = [{item.get("name"), item.get("kind")} if isinstance(item, dict) else set() for item in node]
    found = [index for index, own in enumerate(names) if word in own]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{i} ({' '.join(sorted(map(str, own - {None}))) or 'no name'})" for i, own in enumerate(names))
    rule = f"{len(found)} items are called {word!r}; use a number" if found else f"no item is called {word!r}"
    raise ConfigError(f"override {text}: {dotted}: {rule}: {known}")


def _scalar(word: str) -> Any:
    """Value of a plain scalar in YAML: `13` is a number, as a key as well."""
    loader = _Loader("")
    return loader.construct_object(yaml.ScalarNode(loader.resolve(yaml.ScalarNode, word, (True, False)), word))


# --- paths ------------------------------------------------------------------------------------------------------------


def _config_path(text: str) -> Path:
    path = Locator(text).found
    if path is None:
        folders = [Path(text).parent, *reversed(Locator("configs").places)]
        raise ConfigError(f"{text}: no such file{_nearest(text, folders, '*.y*ml') or EXAMPLE}")
    return path


def _nearest(text: str, folders: Iterable[Path], pattern: str) -> str:
    """Suggest `; did you mean ...?` with the most similar file name; empty without one."""
    files = {file.stem: file for folder in folders for file in sorted(folder.glob(pattern))}
    near = difflib.get_close_matches(Path(text).stem, files, 1)
    if not near:
        return ""
    return f"; did you mean {shown_path(files[near[0]])!r}?"


# --- writing and comparing --------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """Convert to YAML types, keys as they are; functions and objects become their names."""
    if isinstance(value, Section):
        names = sorted(type(value).model_fields, key=lambda name: name != "kind")
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {word: _plain(item) for word, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, UserObject):
        return _plain(value.written)
    return value if value is None or isinstance(value, bool | int | float) else object_text(value)


def _flat(value: Any, key: Key) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for word, item in value.items():
            yield from _flat(item, (*key, word))
    elif value is not None:
        yield ".".join(map(str, key)), value


def _differences(before: Any, after: Any, key: Key) -> Iterator[str]:
    if isinstance(before, list) and isinstance(after, list):
        before, after = dict(enumerate(before)), dict(enumerate(after))
    if isinstance(before, dict) and isinstance(after, dict):
        # As texts: true, 1 and 1.0 are other keys and values, and a NaN is itself.
        old, new = ({repr(word): (word, item) for word, item in one.items()} for one in (before, after))
        for text, (word, _) in (old | new).items():
            if (text in old) != (text in new):
                yield ".".join(map(str, (*key, word)))
            else:
                yield from _differences(old[text][1], new[text][1], (*key, word))
    elif repr(before) != repr(after):
        yield ".".join(map(str, key))
