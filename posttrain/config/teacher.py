"""Teachers, of which a student learns in distillation and in reinforcement learning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from posttrain.config.base import PositiveInt, Quantize, Section, Text
from posttrain.config.model import MeshSection


class TeacherSection(Section):
    path: Text
    """A folder in Hugging Face layout or a hub id; of a teacher with `url` that of its tokenizer."""
    name: Annotated[str, Field(pattern=r"^[\w.-]+$")] | None = None
    """What `teacher_column` calls it; by default the last part of `path`."""
    tokenizer: Literal["same", "align", "gold"] = "same"
    """`same`: a teacher with other tokens is refused. `align`: it reads the text in its own, and speaks where a token
    begins in both, by its `top_k` ids translated by their texts. `gold`: as in GOLD it speaks of groups of tokens with
    one text, whose log-probabilities are summed; of tokens that both have; and of the others sorted (ULD)."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Storage of its parameters; by default that of the student."""
    quantize: Quantize = "none"
    """Hold the matrices of its layers in 8 or 4 bits."""
    mesh: MeshSection | None = None
    """Devices of its own, the last ones of this machine, and not the run's `mesh`: it hands over its `top_k`."""
    url: Text | None = None
    """Address of a server that holds it, such as http://host:8000/v1: none of it is on the devices here."""
    server: Literal["vllm", "sglang"] = "vllm"
    """Which API: vLLM's completions with `prompt_logprobs`, or SGLang's own (http://host:30000, without /v1)."""
    model: Text | None = None
    """Its name at the server; by default `path`."""
    api_key_env: Text | None = None
    """Environment variable that holds the server's key."""
    concurrency: PositiveInt = 16
    """Requests at a time."""
    timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Seconds for one request; it is tried 5 times."""

    @model_validator(mode="after")
    def _where(self) -> TeacherSection:
        if self.mesh is not None and (self.url is not None or -1 in self.mesh.sizes):
            raise ValueError("mesh: give the number of devices on each axis (fsdp: 4), and no url")
        plain = TeacherSection.model_construct(path=self.path)
        of_server = ("server", "model", "api_key_env", "concurrency", "timeout_s")
        wrong = of_server if self.url is None else ("dtype", "quantize")
        for name in wrong:
            if getattr(self, name) != getattr(plain, name):
                raise ValueError(f"{name} is of a teacher {'with' if self.url is None else 'without'} url")
        return self

    @property
    def outside(self) -> bool:
        """Whether it is not in the training step, which gets what it says."""
        return self.url is not None or self.mesh is not None or self.aligned

    @property
    def aligned(self) -> bool:
        return self.tokenizer != "same"

    @property
    def title(self) -> str:
        return self.name or self.path.rstrip("/").rpartition("/")[2]


def check_teachers(
    teachers: Sequence[TeacherSection], column: str | None, temperature: float, *, samples: bool, groups: bool = False
) -> None:
    """ValueError where nothing says which of several teachers a row belongs to, or a server cannot say what is asked.

    `temperature`: at which the teachers are asked. `samples`: they are asked of the student's own; with `groups`
    those of `tokenizer: gold` as well.
    """
    for teacher in teachers:
        if samples and teacher.aligned and not (groups and teacher.tokenizer == "gold"):
            other = "gold, or " if groups else ""
            raise ValueError(
                f"teachers: tokenizer: {teacher.tokenizer} is for the dataset's text, not for samples; take {other}a "
                "teacher with the same tokens"
            )
    if temperature != 1.0 and any(teacher.url is not None for teacher in teachers):
        raise ValueError(f"teachers: a server (url) knows its distribution at temperature 1, not at {temperature}")
    if len(teachers) > 1 and column is None:
        raise ValueError("several teachers need teacher_column, which says whose rows they are")
    if len(teachers) == 1 and column is not None:
        raise ValueError(f"teacher_column={column!r} has no effect with one teacher; leave it out")
    titles = [teacher.title for teacher in teachers]
    if len({*titles}) < len(titles):
        raise ValueError(f"teachers must have different names; got {', '.join(titles)}")
