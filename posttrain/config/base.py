"""Base class of configuration sections: validated fields with readable errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from posttrain.config.other_names import meant_kind
from posttrain.config.secrets import check_urls, without_named_secrets, without_secrets
from posttrain.errors import ConfigError, did_you_mean
from posttrain.runtime.files import check_local

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)

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


SCALARS = (bool, int, float, str)


def plain_value(value: Any) -> Any:
    """Convert a free value to the types of YAML: text, numbers, true and false, null, lists, mappings. Functions, paths
    and objects without a value of their own are kept; ValueError for others, such as sets and dates, and for keys that
    are not scalars."""
    if value is None or type(value) in SCALARS:
        return value
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return plain_value(value.item())
    if isinstance(value, Mapping):
        if wrong := [key for key in value if key is not None and type(key) not in SCALARS]:
            raise ValueError(f"a key must be text, a number, true, false or null; got {wrong[0]!r}")
        return {key: plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    equal: Any = type(value).__eq__
    named = isinstance(value, str | PurePath) or callable(value) or equal is object.__eq__
    if not named or isinstance(value, Enum):
        raise ValueError(f"must be text, a number, true, false, null, a list or a mapping; got {value!r}")
    return value


PlainMapping: TypeAlias = Annotated[dict[str, Any], BeforeValidator(plain_value)]
"""Mapping with values of YAML's types: a run that is resumed or replayed has the same."""
SecretFreeMapping: TypeAlias = Annotated[PlainMapping, AfterValidator(without_named_secrets)]
"""Fields that no function gets, without secrets."""
FunctionArguments: TypeAlias = Annotated[PlainMapping, AfterValidator(without_secrets)]
"""Keywords for functions of users. A secret is `NAME_env: VARIABLE`, and stands in no file of the run."""

LocalPath = Annotated[Text, AfterValidator(check_local)]
"""Local folder; URLs are refused."""

AttentionKernel = Literal["auto", "reference", "blockwise", "splash", "tokamax", "cudnn"]
DecodeAttention = Literal["auto", "rows", "gather", "ragged", "joined"]
GroupedKernel = Literal["auto", "reference", "ragged_dot", "buckets", "megablox", "tokamax"]
RematName = Literal["qkv", "attention", "projection", "gate", "up", "down", "block_input"]
MomentType = Literal["float32", "bfloat16", "int8"]
Quantize = Literal["none", "int8", "fp8", "int4", "nf4"]
Vision = Literal["none", "frozen", "projector", "tower"]
RolloutQuantize = Literal["none", "int8", "fp8"]
CacheDtype = Literal["compute", "int8", "fp8"]
SamplerTensor = Literal["auto", "trained"] | PositiveInt


class Mistakes(ValueError):
    """Values of a section that do not go together."""

    def __init__(self, texts: list[str]) -> None:
        super().__init__("; ".join(texts))
        self.texts = texts


class SectionType(ModelMetaclass):
    """Type of sections: a call with wrong values raises ConfigError."""

    if not TYPE_CHECKING:  # checkers read the types of fields from the constructor that pydantic makes

        def __call__(cls, *args: Any, **values: Any) -> Any:
            try:
                return super().__call__(*args, **values)
            except ValidationError as error:
                raise ConfigError("\n".join(_wrong(cls, item) for item in error.errors(include_url=False))) from None


def _wrong(section: Any, item: Any) -> str:
    """Line about a wrong value in a call of a section."""
    place = ".".join(map(str, item["loc"]))
    if item["type"] == "extra_forbidden":
        known = section.model_fields
        rule = "unknown field" + (did_you_mean(place, known) or f"; it has {', '.join(known)}")
    elif item["type"] == "missing":
        rule = "required, but missing"
    else:
        error = item.get("ctx", {}).get("error")
        rule = f"{item['msg']}; got {item['input']!r}" if error is None else str(error)
    return ": ".join(filter(None, (section.__name__, place, rule)))


class Section(BaseModel, metaclass=SectionType):
    """Section of a configuration: unknown keys are errors, values are validated, instances are frozen.

    Types are those of YAML: true is not a number, 1 is not true, and numbers are finite. A class that defines
    `_mistakes` yields what is wrong with its valid values together, and raises ValueError where it cannot look further;
    those of its base classes come first, and all are reported.
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

    def _mistakes(self) -> Iterator[str]:
        yield from ()

    @model_validator(mode="after")
    def _consistent(self) -> Section:
        texts: list[str] = []
        for name in type(self).model_fields:
            try:
                check_urls(getattr(self, name), name)
            except ValueError as error:
                texts.append(str(error))
        for owner in reversed(type(self).__mro__):
            if "_mistakes" in vars(owner):
                try:
                    for text in vars(owner)["_mistakes"](self):
                        texts.append(text)
                except ValueError as error:
                    texts.append(str(error))
        if texts:
            raise Mistakes(texts)
        return self


def with_kind(sections: Any) -> BeforeValidator:
    """Validator by which a union of sections takes the word of a kind for the section with its defaults."""
    kinds = [one.model_fields["kind"].default for one in get_args(sections)]

    def validate(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value not in kinds:
            raise ValueError(f"{value!r} is unknown{meant_kind(value, kinds)}; there are {', '.join(kinds)}")
        return {"kind": value}

    # A literal of words that are known only here.
    words: Any = Literal.__getitem__(tuple(kinds))
    return BeforeValidator(validate, json_schema_input_type=words | Annotated[sections, Field(discriminator="kind")])
