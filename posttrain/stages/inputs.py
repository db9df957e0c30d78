"""Inputs named in a configuration: dataset rows and Python objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posttrain.batch import rows_per_pass
from posttrain.config import DatasetSection, PairSection, SequenceSection
from posttrain.config.yaml_file import resolve_path
from posttrain.data.chat import Renderer
from posttrain.data.format import use_chat
from posttrain.data.sources import Rows, load_rows
from posttrain.data.tokenizer import Tokenizer
from posttrain.errors import ConfigError
from posttrain.user_code import import_object, is_object_spec
from posttrain.weights.locate import path_exists


def rows_of(section: DatasetSection, base_dir: Path) -> Rows:
    """Load the rows of a dataset section, with its path resolved like every path of a configuration."""
    spec = section.path
    if is_object_spec(spec):
        spec = resolve_spec(spec, base_dir)
    elif path_exists(spec, base_dir):
        spec = str(resolve_path(spec, base_dir).resolve())
    return load_rows(section.model_copy(update={"path": spec}), base_dir=base_dir)


def rows_and_renderer(section: DatasetSection, tokenizer: Tokenizer, base_dir: Path) -> tuple[Rows, Renderer]:
    rows = rows_of(section, base_dir)
    return rows, Renderer(tokenizer, use_chat(section, tokenizer, rows.columns))


def callable_of(spec: str, field: str, base_dir: Path) -> Any:
    found = object_of(spec, base_dir)
    if not callable(found):
        raise ConfigError(f"{field}: {spec} is a {type(found).__name__}, not a function or class")
    return found


def object_of(spec: str, base_dir: Path) -> object:
    """Import `file.py:name` or `module:name`, with the file resolved like every path of a configuration."""
    return import_object(resolve_spec(spec, base_dir), base_dir=base_dir)


def resolve_spec(spec: str, base_dir: Path) -> str:
    """Resolve the file of `file.py:name` to an absolute path; `module:name` is unchanged."""
    file, _, name = spec.rpartition(":")
    if file.endswith(".py") and path_exists(file, base_dir):
        return f"{resolve_path(file, base_dir).resolve()}:{name}"
    return spec


def describe_rows(section: SequenceSection | PairSection, shards: int) -> str:
    """Summarise the batches of an offline stage. `shards`: devices that split the rows of a forward pass."""
    passes = -(-section.batch_rows // rows_per_pass(section.batch_rows, section.micro_batch_rows, shards))
    rows = f"{section.batch_rows} x {section.row_tokens} tokens"
    passes_text = f" ({passes} micro-batches)" if passes > 1 else ""
    if section.num_steps is None:
        num_epochs = 1.0 if section.num_epochs is None else section.num_epochs
        return f"num_epochs={num_epochs:g} in steps of {rows}{passes_text}"
    return f"{section.num_steps} steps of {rows}{passes_text}"
