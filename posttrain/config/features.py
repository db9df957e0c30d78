"""Feature distillation: hidden states and attention relations of a teacher's layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from posttrain.config.base import Flag, ListOf, PositiveInt, Section

LayerMap = dict[int, int] | Literal["uniform", "last"]


def _layer_map(value: Any) -> LayerMap:
    if value in ("uniform", "last"):
        return value
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
    """Hidden-state matching, arXiv:1909.10351 (TinyBERT)."""

    layers: Layers = "uniform"
    """Mapping of student layers to teacher layers, from 0. `uniform`: all student layers to evenly spaced teacher
    layers, the last to the last; `last`: only the last pair."""
    weight: Weight = 1.0
    """Weight in the loss of the mean over the pairs of layers."""
    loss: Literal["mse", "cosine"] = "cosine"
    """Distance of hidden states: 1 - cosine similarity, or the mean squared error, which depends on the teacher's
    scale."""
    project: Flag = True
    """Learn a projection per pair of layers, which is not part of the student; false requires equal widths."""


class AttentionFeatures(Section):
    """Self-attention relation matching, MiniLMv2, arXiv:2012.15828."""

    layers: Layers = "last"
    """Mapping of student layers to teacher layers, as in `hidden`."""
    weight: Weight = 1.0
    """Weight in the loss of the mean over pairs of layers, relations and heads."""
    relations: Annotated[ListOf[Literal["q", "k", "v"]], Field(min_length=1)] = ("q", "k", "v")
    """Relations to match, of queries, keys and values: KL(teacher || student) of softmax(x x^T / sqrt(size)) over
    previous tokens."""
    heads: PositiveInt | None = None
    """Number of relation heads into which both models are split; by default the student's heads, if they divide the
    teacher's width."""

    def _mistakes(self) -> Iterator[str]:
        if len({*self.relations}) < len(self.relations):
            yield f"relations: each once; got {', '.join(self.relations)}"


class FeaturesSection(Section):
    """Feature distillation: teacher layers to match at the tokens with loss, in addition to the distribution."""

    hidden: HiddenFeatures | None = None
    """Hidden states at the output of layers."""
    attention: AttentionFeatures | None = None
    """Relations among tokens in the attention of layers."""

    def _mistakes(self) -> Iterator[str]:
        if self.hidden is None and self.attention is None:
            yield "set hidden or attention, or both; {} takes the defaults: {hidden: {}}"
