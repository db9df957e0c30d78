"""Teacher models of distillation and reinforcement learning."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field

from posttrain.config.base import PositiveInt, Quantize, Section, Text
from posttrain.config.locator import Locator
from posttrain.config.model import MeshSection


class TeacherSection(Section):
    """Teacher model: in the training step, on devices of its own, or at a server."""

    path: Locator
    """Folder in Hugging Face layout or hub id; with `url`, that of the teacher's tokenizer."""
    name: Annotated[str, Field(pattern=r"^[\w.-]+$")] | None = None
    """Name in `teacher_column`; by default the last part of `path`."""
    tokenizer: Literal["same", "align", "gold"] = "same"
    """Tokenizer of the teacher. `same`: must equal the student's. `align`: scores the text with its own tokenizer at
    positions where a token starts in both; its `top_k` ids are translated by their text. `gold`: as in GOLD, scores
    groups of tokens with the same text by summed log-probabilities, matches shared tokens, and compares the others
    sorted (ULD)."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Data type of the parameters; by default the student's."""
    quantize: Quantize = "none"
    """Quantize the matrices of the layers to 8 or 4 bits."""
    mesh: MeshSection | None = None
    """Device mesh of its own instead of the run's `mesh`; only `top_k` is transferred, before each step."""
    devices: Literal["own", "shared"] = "own"
    """Devices of `mesh`: `own`, the last ones of this machine, which the run's mesh is then without, or `shared`, those
    of the run's mesh, such as `{expert: 16}` for a teacher with experts, which would be gathered at each step."""
    url: Text | None = None
    """URL of an inference server with the teacher, such as http://host:8000/v1; it uses no local devices."""
    server: Literal["vllm", "sglang"] = "vllm"
    """API of the server: vLLM's completions with `prompt_logprobs`, or SGLang's own (http://host:30000, without /v1).
    """
    model: Text | None = None
    """Name of the model at the server; by default `path`."""
    api_key_env: Text | None = None
    """Environment variable with the server's API key."""
    concurrency: PositiveInt = 16
    """Maximum number of concurrent requests."""
    timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Timeout per request in seconds; a request is tried 5 times."""

    def _mistakes(self) -> Iterator[str]:
        own = self.devices == "own"
        if self.mesh is not None and (self.url is not None or (own and -1 in self.mesh.sizes)):
            yield "mesh: give the number of devices on each axis (fsdp: 4), and no url"
        if self.mesh is not None and self.mesh.gather != "auto":
            yield f"mesh.gather={self.mesh.gather} has no effect on a teacher, which is not trained; remove it"
        if self.mesh is None and not own:
            yield "devices=shared has no effect without mesh, the arrangement of the shared devices; set mesh"
        plain = TeacherSection.model_construct(path=self.path)
        of_server = ("server", "model", "api_key_env", "concurrency", "timeout_s")
        wrong = of_server if self.url is None else ("dtype", "quantize")
        for name in wrong:
            if getattr(self, name) != getattr(plain, name):
                yield f"{name} is for a teacher {'with' if self.url is None else 'without'} url"

    @property
    def outside(self) -> bool:
        """True if the teacher runs outside of the training step, which receives its top-k."""
        return self.url is not None or self.mesh is not None or self.aligned

    @property
    def num_own_devices(self) -> int:
        """Number of devices that the teacher has for itself."""
        return 0 if self.mesh is None or self.devices == "shared" else math.prod(self.mesh.sizes)

    @property
    def aligned(self) -> bool:
        return self.tokenizer != "same"

    @property
    def title(self) -> str:
        return self.name or self.path.rstrip("/").rpartition("/")[2]


def check_teachers(
    teachers: Sequence[TeacherSection], column: str | None, temperature: float, *, samples: bool, groups: bool = False
) -> None:
    """Check teachers. ValueError if rows cannot be assigned to one of several, or a server cannot return what is
    needed.

    `temperature`: sampling temperature of the scores. `samples`: the teachers score the student's samples; with
    `groups` also those of `tokenizer: gold`.
    """
    for teacher in teachers:
        if samples and teacher.aligned and not (groups and teacher.tokenizer == "gold"):
            other = "gold, or " if groups else ""
            raise ValueError(
                f"teachers: tokenizer: {teacher.tokenizer} is for the dataset's text, not for samples; take {other}a "
                "teacher with the same tokens"
            )
    if temperature != 1.0 and any(teacher.url is not None for teacher in teachers):
        raise ValueError(f"teachers: a server (url) returns its distribution at temperature 1, not at {temperature}")
    if len(teachers) > 1 and column is None:
        raise ValueError("several teachers need teacher_column, which assigns rows to them")
    if len(teachers) == 1 and column is not None:
        raise ValueError(f"teacher_column={column!r} has no effect with one teacher; remove it")
    titles = [teacher.title for teacher in teachers]
    if len({*titles}) < len(titles):
        raise ValueError(f"teachers must have different names; got {', '.join(titles)}")
