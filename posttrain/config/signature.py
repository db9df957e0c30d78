"""Signature of the Python classes from the fields of their sections, for completion and help."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import Parameter, Signature
from typing import Any

from pydantic.fields import FieldInfo

from posttrain.config.base import Section
from posttrain.config.model import ModelSection
from posttrain.config.run import SECTIONS, RunConfig
from posttrain.config.train import DatasetSection

LEADING = {"distill": ("model", "teacher", "dataset")}
"""Parameters that may be given by position, where they are not model and dataset."""


class _Defaults:
    """Default of a section, shown as `...`."""

    def __repr__(self) -> str:
        return "..."


def keyword_signature(kind: str, model_fields: Iterable[str], dataset_fields: Iterable[str]) -> Signature:
    """Signature of a stage kind: model and dataset, then the fields of run, dataset, stage and model as keywords."""
    leading = LEADING.get(kind, ("model", "dataset"))
    own, model = SECTIONS[kind].model_fields, ModelSection.model_fields
    fields = {name: RunConfig.model_fields[name] for name in RunConfig.model_fields if name not in ("model", "stages")}
    fields |= {name: DatasetSection.model_fields[name] for name in dataset_fields}
    fields |= {name: info for name, info in own.items() if name not in ("kind", "dataset")}
    fields |= {name: model[name] for name in model if name in set(model_fields)}
    first = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in leading]
    return Signature([*first, *(_keyword(name, info) for name, info in fields.items())])


def _keyword(name: str, info: FieldInfo) -> Parameter:
    default: Any = info.default
    if name in ("output", "seed"):
        default = None
    elif info.is_required():
        default = Parameter.empty
    elif isinstance(default, Section):
        default = _Defaults()
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default)
