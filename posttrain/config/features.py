"""Distillation from what is inside of a teacher: its hidden states, and the relations that its attention makes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, model_validator

from posttrain.config.base import Flag, ListOf, PositiveInt, Section

LayerMap = dict[int, int] | Literal["uniform", "last"]


def _layer_map(value: Any) -> LayerMap:
    if value in ("uniform", "last"):
        return value
    if isinstance(value, dict):
        # A saved configuration has keys as text.
        value = {int(key) if isinstance(key, str) and key.isdecimal() else key: other for key, other in value.items()}
    numbers = [n for pair in value.items() for n in pair] if isinstance(value, dict) else []
    if numbers and all(type(n) is int and n >= 0 for n in numbers):
        return value
    raise ValueError(
        f"must be uniform, last, or layers of the student with those of the teacher, from 0 on: {{1: 5, 3: 11}}; got "
        f"{value!r}"
    )


Layers = Annotated[LayerMap, PlainValidator(_layer_map)]
Weight = Annotated[float, Field(gt=0)]


class HiddenFeatures(Section):
    """Hidden states, arXiv:1909.10351."""

    layers: Layers = "uniform"
    """Which layer of the student learns from which of the teacher, from 0 on; `uniform`: all of the student's from
    layers at equal distances, the last from the last; `last`: this pair alone."""
    weight: Weight = 1.0
    """Of the mean over the pairs, in the loss."""
    loss: Literal["mse", "cosine"] = "cosine"
    """1 - cosine, or the mean squared difference, which has the scale of the teacher's hidden states."""
    project: Flag = True
    """Through a learned matrix for each pair, which is no part of the student; false needs equal widths."""


class AttentionFeatures(Section):
    """Relations among the queries, the keys and the values of tokens, MiniLMv2, arXiv:2012.15828."""

    layers: Layers = "last"
    """As of `hidden`."""
    weight: Weight = 1.0
    """Of the mean over pairs, relations and heads, in the loss."""
    relations: Annotated[ListOf[Literal["q", "k", "v"]], Field(min_length=1)] = ("q", "k", "v")
    """Among queries, keys or values: KL(teacher || student) of softmax(x x^T / sqrt(size)) over the tokens before."""
    heads: PositiveInt | None = None
    """Into how many heads both are split, whatever the models have; by default as many as the student has, where the
    teacher's can be split so."""

    @model_validator(mode="after")
    def _once(self) -> AttentionFeatures:
        if len({*self.relations}) < len(self.relations):
            raise ValueError(f"relations: each once; got {', '.join(self.relations)}")
        return self


class FeaturesSection(Section):
    """What of the one teacher's layers the student learns beside its distribution, at the tokens with loss."""

    hidden: HiddenFeatures | None = None
    """Hidden states of layers: what each hands to the next."""
    attention: AttentionFeatures | None = None
    """Relations among tokens in the attention of layers."""

    @model_validator(mode="after")
    def _any(self) -> FeaturesSection:
        if self.hidden is None and self.attention is None:
            raise ValueError("give hidden or attention, or both; {} takes the defaults: {hidden: {}}")
        return self
