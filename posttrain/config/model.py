"""The model of a run, its adapter, and the devices it lies on."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from posttrain.config.base import (
    AttentionKernel,
    DecodeAttention,
    Flag,
    GroupedKernel,
    ListOf,
    NonNegativeInt,
    PositiveInt,
    Quantize,
    Remat,
    Section,
    Text,
)

MESH_AXES = ("data", "fsdp", "expert", "tensor")
"""Of devices, the closest last."""
ROW_AXES = ("data", "fsdp", "expert")
"""The mesh axes that split the rows of a batch."""


class LoRA(Section):
    """Low-rank adapter, arXiv:2106.09685: W + scale A B on every matrix that `targets` names; the rest is frozen.

    Patterns are regular expressions searched in our paths, such as `attention.q`, `mlp`, `experts`, `head`, `embed`, or
    names of modules in checkpoints, such as `q_proj`, `lm_head`, `layers.3.mlp.down_proj`.
    """

    rank: PositiveInt
    """Columns of A and rows of B, such as 16."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """The scale is alpha / rank, with `rslora` alpha / sqrt(rank); by default it is 2."""
    targets: Annotated[ListOf[str], Field(min_length=1)] = ("attention", "mlp")
    """Patterns of the matrices that get an adapter; `all-linear`: all but embeddings and head. Routers get none."""
    layers: ListOf[NonNegativeInt] | None = None
    """The only layers that get an adapter, from 0; embeddings and head belong to none."""
    rank_pattern: dict[str, PositiveInt] = {}
    """Pattern -> another rank."""
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Pattern -> another alpha."""
    rslora: Flag = False
    """Divide alpha by the root of the rank, arXiv:2312.03732: high ranks learn as fast as low ones."""
    dora: Flag = False
    """Train the norms of the columns of W apart from their directions, arXiv:2402.09353."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that is set to 0 in training. Not for experts, embeddings, head, or in RL."""
    modules_to_save: ListOf[str] = ()
    """Patterns of modules trained in full beside the adapter, such as `lm_head` or `norm`."""


class ModelSection(Section):
    path: Text | None = None
    """A folder in Hugging Face layout or a hub id. Give `path` or `init`."""
    init: dict[str, Any] | None = None
    """Random weights: the fields of a Hugging Face `config.json`, with `model_type`."""
    family: Text | None = None
    """A Python file with the model's family, where posttrain has none: named as the `model_type`, and written as the
    notebook add_a_model shows."""
    tokenizer: Text | None = None
    """A folder, a hub id or `bytes` (the built-in byte tokenizer); by default `path`."""
    stop_tokens: ListOf[Text] = ()
    """Tokens that end a reply beside those that the tokenizer names, such as `<s>`; they are saved with the model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Storage of the parameters. The optimiser keeps float32 masters of bfloat16 parameters."""
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """Type of activations and matrix products; by default `dtype`."""
    lora: LoRA | None = None
    adapter: Text | None = None
    """A folder or hub id with PEFT's adapter of `path`: its training goes on, in a run of one stage, in place of a new
    one's (`lora`). In RL its dropout is off."""
    quantize: Quantize = "none"
    """Hold the layers' matrices in 8 or 4 bits while `lora` or `adapter` is trained (QLoRA, arXiv:2305.14314); those of
    routers, embeddings and head stay as they are. Loading prints how far the weights are from what they were; the saved
    model is again in `dtype`."""
    remat: Remat = "none"
    """What the backward pass computes again to save memory: `full` each block (about a third more time), `dots` all but
    its matrix products, `offload` each block from inputs kept in the host's memory (on CPU, which is the host, `full`).
    On CPU it also scans short stacks, and of a repeated pattern of blocks it saves less."""
    attention: AttentionKernel = "auto"
    """Implementation of attention over whole rows, as in training; by default the fastest for platform and shape."""
    decode_attention: DecodeAttention = "auto"
    """How sampling reads its cache: `ragged` in place, by TPU's kernel for pages; `gather` by copying the pages of each
    layer at every token; `rows` from one copy per dispatch, as wide as its longest sequence. By default `rows` on CPU,
    `ragged` on TPU for models without sinks, latents and shared keys, else `gather`."""
    grouped_matmul: GroupedKernel = "auto"
    """Implementation of the experts' matrix products; by default the fastest for platform and shape."""
    long_context: Flag = False
    """Use the factors for long sequences of a model that has two sets (LongRoPE, as in phi3): rows may
    then be longer than its original context. Only with `path`."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        if (self.path is None) == (self.init is None):
            raise ValueError("give either path (a checkpoint) or init (random weights)")
        if self.path is None and self.tokenizer is None:
            raise ValueError("init needs tokenizer: a folder, a hub id or bytes")
        if self.init is not None and self.long_context:
            raise ValueError("long_context chooses between the two sets of RoPE factors of a checkpoint; init has one")
        if self.adapter is not None and self.lora is not None:
            raise ValueError("adapter goes on with one that there is, lora begins a new one; give one of them")
        if self.adapter is not None and self.path is None:
            raise ValueError("adapter needs path: the model that it was trained on")
        if self.quantize != "none" and self.lora is None and self.adapter is None:
            raise ValueError(f"quantize={self.quantize} needs lora or adapter: quantized weights cannot be trained")
        return self


class MeshSection(Section):
    """Devices per axis; -1 takes what is left."""

    data: int = 1
    """Copies of the weights, each with its own rows of a batch."""
    fsdp: int = -1
    """Parts of every weight; rows are split as well."""
    expert: int = 1
    """Groups of experts of a mixture; rows are split as well."""
    tensor: int = 1
    """Parts of every matrix product; no rows are split."""

    @model_validator(mode="after")
    def _sizes(self) -> MeshSection:
        sizes = {axis: getattr(self, axis) for axis in MESH_AXES}
        if list(sizes.values()).count(-1) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
            named = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
            raise ValueError(f"{named}: sizes are positive, and at most one is -1 (what is left)")
        return self

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of `MESH_AXES`."""
        return (self.data, self.fsdp, self.expert, self.tensor)

    @property
    def row_shards(self) -> int | None:
        """Devices that share the rows of a batch; None where the configuration leaves that to the machine."""
        sizes = (self.data, self.fsdp, self.expert)
        return None if -1 in sizes else math.prod(sizes)
