"""Base class of configuration sections: validated fields with readable errors."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from posttrain.runtime.files import check_local

T = TypeVar("T")

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0.0, le=1.0)]


def _from_words(value: object) -> object:
    """Convert YAML 1.1's other words for true and false, which are still in use."""
    return WORDS.get(value.lower(), value) if isinstance(value, str) else value


WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
Flag = Annotated[bool, BeforeValidator(_from_words)]
Text = Annotated[str, Field(min_length=1)]
ListOf: TypeAlias = Annotated[tuple[T, ...], Field(strict=False)]
"""List in YAML, tuple in Python. Items are validated strictly."""

LocalPath = Annotated[Text, AfterValidator(check_local)]
"""Local folder; URLs are refused."""

AttentionKernel = Literal["auto", "reference", "blockwise", "splash", "tokamax", "cudnn"]
DecodeAttention = Literal["auto", "rows", "gather", "ragged"]
GroupedKernel = Literal["auto", "reference", "ragged_dot", "buckets", "megablox", "tokamax"]
Remat = Literal["none", "full", "dots", "offload"]
MomentType = Literal["float32", "bfloat16", "int8"]
Quantize = Literal["none", "int8", "fp8", "int4", "nf4"]
RolloutQuantize = Literal["none", "int8", "fp8"]
SamplerTensor = Literal["auto", "trained"] | PositiveInt


class Section(BaseModel):
    """Section of a configuration: unknown keys are errors, values are validated, instances are frozen.

    Types are those of YAML: true is not a number, 1 is not true, and numbers are finite.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        frozen=True,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )
