"""Model of a run, its LoRA adapter, and the device mesh."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from posttrain.config.base import (
    AttentionKernel,
    DecodeAttention,
    Flag,
    GroupedKernel,
    ListOf,
    NonNegativeInt,
    PositiveInt,
    Quantize,
    RematName,
    SecretFreeMapping,
    Section,
    Text,
    Vision,
)
from posttrain.config.locator import Locator
from posttrain.errors import ConfigError, did_you_mean

MESH_AXES = ("data", "fsdp", "expert", "context", "tensor")
"""Mesh axes of the devices; the last one has the fastest connections."""
ROW_AXES = ("data", "fsdp", "expert")
"""Mesh axes that split the rows of a batch."""


class SavedActivations(Section):
    """Activations of each block that are kept for the backward pass; all others are computed again."""

    save: ListOf[RematName] = ()
    """Activations that stay on the device."""
    offload: ListOf[RematName] = ()
    """Activations that wait in the host's memory; on CPU the device's."""

    def _mistakes(self) -> Iterator[str]:
        if "block_input" in self.save:
            yield "block_input is always saved; name it in offload to keep it in the host's memory"
        if twice := set(self.save) & set(self.offload):
            yield f"{', '.join(sorted(twice))}: either save or offload"


Remat = Literal["none", "full", "dots", "offload"] | SavedActivations


def _saved(value: Any) -> Any:
    """Word, or section of a list of names or of two. ValueError for words and names that do not exist."""
    if isinstance(value, SavedActivations) or (isinstance(value, str) and value in REMAT_WORDS):
        return value
    if not isinstance(value, list | tuple | dict):
        words = f"{', '.join(REMAT_WORDS)} or a list of activations"
        raise ValueError(f"must be {words}; got {value!r}{did_you_mean(str(value), REMAT_WORDS)}")
    lists = value if isinstance(value, dict) else {"save": value}
    known = get_args(RematName)
    for name in (name for names in lists.values() if isinstance(names, list | tuple) for name in names):
        if name not in known:
            raise ValueError(f"{name!r} is no activation{did_you_mean(str(name), known)}; there are {', '.join(known)}")
    try:
        return SavedActivations(**lists)
    except ConfigError as error:
        raise ValueError(str(error).replace("SavedActivations: ", "")) from None


REMAT_WORDS = ("none", "full", "dots", "offload", "auto")
RematSetting = Annotated[
    Remat | Literal["auto"],
    BeforeValidator(_saved, json_schema_input_type=Remat | Literal["auto"] | ListOf[RematName]),
]


def _listed(value: Any) -> Any:
    """List of one text."""
    return [value] if isinstance(value, str) else value


class LoRA(Section):
    """LoRA adapter, arXiv:2106.09685: W + scale A B on every matrix matched by `targets`; other weights are frozen.

    Patterns are regular expressions searched in posttrain's parameter paths, such as `attention.q`, `mlp`, `experts`,
    `head`, `embed`, or module names of checkpoints, such as `q_proj`, `lm_head`, `layers.3.mlp.down_proj`. A vision
    tower, whose modules have the same names, is reached only by patterns that match from the beginning of its paths:
    `tower`, `tower.layers`, `tower.layers.attn`, `tower.projector`.
    """

    rank: PositiveInt
    """Rank: columns of A and rows of B, such as 16."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """Scale of the adapter: alpha / rank, with `rslora` alpha / sqrt(rank). By default the scale is 2."""
    targets: Annotated[
        ListOf[str], Field(min_length=1), BeforeValidator(_listed, json_schema_input_type=str | ListOf[str])
    ] = ("attention", "mlp")
    """Patterns of the adapted matrices, or one; `all-linear`: all except embeddings, head and vision tower. Routers are
    never adapted."""
    layers: ListOf[NonNegativeInt] | None = None
    """Layers of the language model to adapt, from 0; by default all."""
    rank_pattern: dict[str, PositiveInt] = {}
    """Ranks by pattern, overriding `rank`."""
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Alphas by pattern, overriding `alpha`."""
    rslora: Flag = False
    """Rank-stabilised LoRA, arXiv:2312.03732: divide alpha by the square root of the rank, so that high ranks train as
    fast as low ones."""
    dora: Flag = False
    """DoRA, arXiv:2402.09353: train the norms of the columns of W separately from their directions."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on adapter inputs in training. Not for experts, embeddings, head, vision tower, or in RL."""
    modules_to_save: ListOf[str] = ()
    """Patterns of modules trained in full together with the adapter, such as `lm_head` or `norm`."""


class ImageSection(Section):
    """Sizes to which a model's pictures are shrunk or enlarged, in place of those in its `preprocessor_config.json`."""

    min_pixels: PositiveInt | None = None
    """Least pixels of a resized picture, for Qwen."""
    max_pixels: PositiveInt | None = None
    """Most pixels of a resized picture, for Qwen: a token is 28 x 28 pixels in Qwen2.5-VL and 32 x 32 in Qwen3-VL, so
    that 262144 make at most 334 or 256 tokens."""
    longest_edge: PositiveInt | None = None
    """Longest side of a resized picture, for Mistral 3; a token is 28 x 28 pixels."""
    max_soft_tokens: Literal[70, 140, 280, 560, 1120] | None = None
    """Most tokens of a picture, for Gemma 4. Pictures of Gemma 3 have one size."""


class Upscale(Section):
    """Depth upscaling, arXiv:2312.15166: a copy of a band of layers, put in behind it. `{layers: [8, 24]}` makes 48
    layers of 32, as SOLAR did."""

    layers: Annotated[ListOf[NonNegativeInt], Field(min_length=2, max_length=2)]
    """First layer of the band, and the first one after it, from 0."""
    start: Literal["identity", "copy"] = "identity"
    """Beginning of the copies. `identity`: the matrices through which a copy adds to the residual stream are zeros (the
    scales of the norms behind them, in families that have those), so that the model computes what it did before;
    `copy`: all is copied, as in SOLAR, and the first loss is higher."""

    def _mistakes(self) -> Iterator[str]:
        first, end = self.layers
        if first >= end:
            yield f"layers=[{first}, {end}] is no band; give its first layer and the first one after it"


class ModelSection(Section):
    """Model to train: a checkpoint or random weights, tokenizer, precision, adapter, quantization, kernels."""

    path: Locator | None = None
    """Folder in Hugging Face layout or hub id. Set `path` or `init`."""
    init: SecretFreeMapping | None = None
    """Random initialisation: the fields of a Hugging Face `config.json`, including `model_type`. With a vision tower,
    of `gemma3`, `qwen2_5_vl` or `qwen3_vl`: its text model's fields are in `text_config`, the tower's in
    `vision_config`, and image tokens that the tokenizer lacks are added to it."""
    family: Locator | None = None
    """Python file that defines a model family unknown to posttrain, named as the `model_type`; see the notebook
    add_a_model."""
    tokenizer: Locator | None = None
    """Tokenizer: a folder, a hub id or `bytes` (the built-in byte tokenizer); by default `path`."""
    chat_template: Locator | None = None
    """File with a chat template (Jinja) in place of the tokenizer's, or the name of one that posttrain brings, which
    keeps earlier turns as they are: `chatml`, `llama3`, `phi3.5`, `qwen3`; it is saved with the model."""
    chat_template_args: SecretFreeMapping = {}
    """Variables of the chat template, such as `{enable_thinking: false}`, for data, samples and evaluations; they are
    saved as its defaults with the model."""
    stop_tokens: ListOf[Text] = ()
    """Additional stop tokens, such as `<s>`; they are saved with the model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the parameters. The optimiser keeps float32 master weights of bfloat16 parameters."""
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """Data type of activations and matrix products; by default `dtype`."""
    lora: LoRA | None = None
    adapter: Locator | None = None
    """PEFT adapter of `path` (folder or hub id) to continue training, in a run of one stage, instead of a new one
    (`lora`). In RL its dropout is off."""
    quantize: Quantize = "none"
    """Quantize the layers' matrices to 8 or 4 bits while `lora` or `adapter` is trained (QLoRA, arXiv:2305.14314);
    routers, embeddings, head and vision tower are not quantized. Loading prints the quantization error; the saved model
    is in `dtype`."""
    remat: RematSetting = "none"
    """Gradient checkpointing: recompute activations in the backward pass to save memory. `full`: each block (about a
    third more time); `dots`: all except matrix products; `offload`: each block, with its inputs in host memory (`full`
    on CPU). A list of names, such as `[attention, qkv]`: each block, except for these activations; `{save: [...],
    offload: [...]}` keeps some of them in the host's memory. `auto`: as many names as fit the devices' memory by an
    estimate, which `posttrain plan` shows, those first that spare most operations per byte; a run that is resumed keeps
    its choice. On CPU short stacks are then scanned too, and repeated patterns of blocks save less."""
    attention: AttentionKernel = "auto"
    """Attention kernel for whole rows, as in training; by default the fastest for platform and shape."""
    decode_attention: DecodeAttention = "auto"
    """Attention over the KV cache in decoding. `ragged`: in place, JAX's paged kernel for TPU; `joined`: in place, the
    package's own for TPU, which knows sinks and latent attention, and stores keys and values of heads of 64 without
    padding; `gather`: copies the pages of each layer at every token; `rows`: one copy per dispatch, as wide as the
    longest sequence. By default `rows` on CPU, and on GPU but for a cache of 8 bits; on TPU `ragged` for heads of a
    multiple of 128 where it serves, `joined` for others without shared keys; else `gather`."""
    grouped_matmul: GroupedKernel = "auto"
    """Kernel of the experts' grouped matrix products; by default the fastest for platform and shape."""
    long_context: Flag = False
    """Use the long-context RoPE factors of a model that has two sets (LongRoPE, as in phi3): rows may then be longer
    than its original context. Only with `path`."""
    upscale: Upscale | None = None
    """Depth upscaling of the model in `path` before the first stage; later stages continue the deeper model. `posttrain
    upscale` writes it without training."""
    image: ImageSection = ImageSection()
    """Sizes of pictures; they are saved with the model."""
    vision: Vision = "none"
    """Vision tower of a multimodal checkpoint, for data with images. `none`: the text part is loaded and saved alone;
    `frozen`: the tower is loaded, computed and saved as it is; `projector`, `tower`: the projector, or both, are
    trained in full beside the language model or its adapter, which may reach a frozen tower (`lora.targets`). With
    `init` only `tower`."""

    def _mistakes(self) -> Iterator[str]:
        if (self.path is None) == (self.init is None):
            yield "set either path (a checkpoint) or init (random weights)"
        elif self.path is None and self.tokenizer is None:
            yield "init needs tokenizer: a folder, a hub id or bytes"
        if self.init is not None and self.long_context:
            yield "long_context chooses between the two sets of RoPE factors of a checkpoint; init has one"
        if self.upscale is not None:
            if self.path is None:
                yield "upscale copies layers of a checkpoint; give init as many layers as you want"
            if self.adapter is not None:
                yield "adapter is of a model with fewer layers; merge it, and upscale the merged model"
            if self.vision != "none":
                yield f"upscale copies layers of the text part alone; set vision to none, not {self.vision}"
        if self.vision == "none" and self.image != ImageSection():
            yield "image has no effect without a vision tower; set vision: frozen, or remove image"
        yield from self._init_mistakes()
        if self.adapter is not None and self.lora is not None:
            yield "adapter continues an existing adapter, lora starts a new one; set one of them"
        if self.adapter is not None and self.path is None:
            yield "adapter needs path: the model that it was trained on"
        if self.quantize != "none" and self.lora is None and self.adapter is None:
            yield f"quantize={self.quantize} needs lora or adapter: quantized weights cannot be trained"

    def _init_mistakes(self) -> Iterator[str]:
        if self.init is None:
            return
        for place, fields in (("init", self.init), ("init.text_config", self.init.get("text_config"))):
            for key in ("dtype", "torch_dtype"):
                if isinstance(fields, Mapping) and fields.get(key) not in (None, self.dtype):
                    yield f"{place}.{key}={fields[key]}: the weights have dtype={self.dtype}; set that, or remove this"
        given = "vision_config" in self.init
        if given and self.vision != "tower":
            yield f"vision={self.vision}: a tower with random weights learns with the model; set vision to tower"
        if self.vision != "none" and not given:
            yield (
                f"vision={self.vision} with init needs a multimodal model: model_type, text_config and vision_config "
                "in init; or set path, or vision to none"
            )

    @property
    def grown(self) -> ModelSection:
        """Section for a model that has its copied layers already, such as that of the stage before."""
        return self.model_copy(update={"upscale": None})


GATHERED_AXES = ("data", "fsdp")
"""Mesh axes with which weights can be gathered once an update."""


class MeshSection(Section):
    """Device mesh: devices per axis, of each slice; -1 takes the remaining devices. On TPU neighbours on an axis are
    neighbours on the torus where it can be."""

    data: int = 1
    """Data parallelism: replicas of the weights, each with its own rows of a batch."""
    fsdp: int = -1
    """Fully sharded data parallelism: shards of every weight, each with its own rows of a batch."""
    expert: int = 1
    """Expert parallelism of MoE models: groups of experts, each with its own rows of a batch."""
    context: int = 1
    """Context parallelism: parts of every row's tokens, for long rows; each layer gathers the row's keys and values.
    Weights and optimizer state are split over it as over `fsdp`."""
    tensor: int = 1
    """Tensor parallelism: parts of every matrix product, on the same rows."""
    slices: PositiveInt = 1
    """TPU slices, between which there is only the slower network of the data centre (DCN): so many times the devices of
    the axes. On other machines equal groups of devices in their order, such as hosts."""
    slice_axis: Literal["data", "fsdp"] = "data"
    """Axis that continues across slices: `data`, which sends gradients between them, or `fsdp`, which gathers the
    weights of every layer from all slices and takes less memory."""
    gather: Literal["auto", "layer", "update"] = "auto"
    """Time at which devices gather the weights of the trained model that `fsdp` splits. `layer`: before each layer of
    each micro-batch, whose gradients are reduced with it. `update`: all once an update, whose gradients each device
    adds up in float32, to be reduced once; needs memory for both, axes `data` and `fsdp` alone and no dropout. `auto`:
    `update` where that can be, a step has several micro-batches and an estimate, which `posttrain plan` shows, finds
    the memory; a run that is resumed keeps its choice."""

    def _mistakes(self) -> Iterator[str]:
        sizes = {axis: getattr(self, axis) for axis in MESH_AXES}
        if list(sizes.values()).count(-1) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
            named = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
            yield f"{named}: sizes are positive, and at most one is -1 (what is left)"
        if self.slices == 1 and self.slice_axis != "data":
            yield f"slice_axis={self.slice_axis} has no effect on one slice; set slices, or remove it"
        others = [axis for axis in MESH_AXES if axis not in GATHERED_AXES and sizes[axis] != 1]
        if self.gather == "update" and others:
            yield f"gather=update is for data and fsdp alone; remove {' and '.join(others)}, or set gather=layer"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of devices on each of `MESH_AXES`, on all slices."""
        sizes = {axis: getattr(self, axis) for axis in MESH_AXES}
        if sizes[self.slice_axis] != -1:
            sizes[self.slice_axis] *= self.slices
        return tuple(sizes.values())

    @property
    def row_shards(self) -> int | None:
        """Number of devices that split the rows of a batch; None if that depends on the machine."""
        sizes = self.sizes[: len(ROW_AXES)]
        return None if -1 in sizes else math.prod(sizes)
