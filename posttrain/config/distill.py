"""Distillation and its teachers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from posttrain.config.base import ListOf, PositiveInt, Quantize, Section, Text
from posttrain.config.train import SequenceSection


class TeacherSection(Section):
    path: Text
    """A folder in Hugging Face layout or a hub id."""
    name: Annotated[str, Field(pattern=r"^[\w.-]+$")] | None = None
    """What `teacher_column` calls it; by default the last part of `path`."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Storage of its parameters; by default that of the student."""
    quantize: Quantize = "none"
    """Hold the matrices of its layers in 8 or 4 bits."""

    @property
    def title(self) -> str:
        return self.name or self.path.rstrip("/").rpartition("/")[2]


class DistillSection(SequenceSection):
    """The student learns the distribution of its teachers, GKD (arXiv:2306.13649)."""

    kind: Literal["distill"] = "distill"
    teachers: Annotated[ListOf[TeacherSection], Field(min_length=1)]
    """Models with the student's tokens; several need `teacher_column`."""
    teacher_column: str | None = None
    """Column that names a row's teacher, or maps names to weights."""
    beta: Annotated[float, Field(ge=0, le=1)] = 0.0
    """0: forward KL, from teacher to student. 1: reverse KL. Between: generalised Jensen-Shannon divergence."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Of both distributions in the divergence."""
    cross_entropy: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the loss that is the log-likelihood of the text itself."""
    cache: Text | None = None
    """Folder of what the teachers said, which `posttrain distill --cache` writes: training then needs no teacher."""
    top_k: PositiveInt = 64
    """Most probable tokens in the cache, of each token; the others are there by their sum."""

    @model_validator(mode="after")
    def _which_teacher(self) -> DistillSection:
        if len(self.teachers) > 1 and self.teacher_column is None:
            raise ValueError("several teachers need teacher_column, which says whose rows they are")
        titles = [teacher.title for teacher in self.teachers]
        if len({*titles}) < len(titles):
            raise ValueError(f"teachers must have different names; got {', '.join(titles)}")
        return self
