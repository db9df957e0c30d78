"""What every section of a configuration is: validated fields, and errors for people."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0.0, le=1.0)]

AttentionKernel = Literal["auto", "reference", "blockwise", "splash", "tokamax", "cudnn"]
DecodeAttention = Literal["auto", "rows", "gather", "ragged"]
GroupedKernel = Literal["auto", "reference", "ragged_dot", "buckets", "megablox", "tokamax"]
Remat = Literal["none", "full", "dots", "offload"]
Quantize = Literal["none", "int8", "fp8", "int4", "nf4"]
RolloutQuantize = Literal["none", "int8", "fp8"]


class ConfigError(ValueError):
    """A mistake that the user can mend: one line that says where, the rule, what was given, what to do."""


class Section(BaseModel):
    """A part of a configuration: unknown keys are errors, values are checked, instances are frozen."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )
