"""Model configuration: static architecture descriptions that family files build from `config.json`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from posttrain.config import AttentionKernel, DecodeAttention, GroupedKernel, ImageSection, Remat, Vision
from posttrain.errors import ConfigError

Activation = Literal["silu", "gelu", "gelu_tanh", "swiglu_oai"]


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding, arXiv:2104.09864. `posttrain.models.rope` computes the frequencies of every type."""

    frequencies: tuple[float, ...]
    """Radians per position of each rotated pair; head dimensions beyond the pairs are not rotated."""
    magnitude: float = 1.0
    """Factor on rotated vectors: attention factor of YaRN and LongRoPE."""
    interleaved: bool = False
    """Rotate pairs (x[2i], x[2i + 1]); otherwise (x[i], x[i + pairs])."""
    axes: tuple[int, ...] = ()
    """Axis of `Batch.rope_positions` that turns each pair (multimodal RoPE, arXiv:2409.12191); empty: positions do."""


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None
    """Position embedding; None: NoPE."""
    scale: float
    """Factor on the products of queries and keys."""
    window: int | None = None
    """Sliding window in tokens, including the query's own; None: full attention."""
    soft_cap: float | None = None
    """Soft cap: logits become cap * tanh(logits / cap)."""
    sinks: bool = False
    """Attention sinks: a learned logit per head in the softmax, without a value."""
    qk_norm: Literal["head", "projection"] | None = None
    """RMSNorm of queries and keys before RoPE, per head or over the whole projection."""
    value_norm: bool = False
    """RMSNorm without scale over each head's values."""
    keys_as_values: bool = False
    """Use the key projection as the value projection."""
    qkv_bias: bool = False
    out_bias: bool = False
    keeps: str | None = None
    """Name under which later layers reuse this layer's keys and values."""
    reuses: str | None = None
    """Name of the stored keys and values to use; the layer has none of its own."""
    image_ahead: int = 0
    """Greatest number of keys ahead of a query in its image, whose tokens see one another; 0: causal attention."""

    @property
    def head_dims(self) -> tuple[int, int]:
        """Sizes of a head's keys and values."""
        return self.head_dim, self.head_dim

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Number and size of heads of the layer's own queries, keys and values."""
        kv = (self.num_kv_heads, self.head_dim)
        return {"q": (self.num_heads, self.head_dim), **({} if self.reuses else {"k": kv, "v": kv})}


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig:
    """Multi-head latent attention (MLA) of DeepSeek-V2, arXiv:2405.04434, section 2.1."""

    num_heads: int
    q_rank: int | None
    """Rank of the query projection; None: full-rank."""
    kv_rank: int
    nope_dim: int
    """Head dimensions without RoPE; `rope_dim` more have it."""
    rope_dim: int
    value_dim: int
    rope: Rope
    scale: float
    norm_eps: float
    """Epsilon of both latents' norms, independent of the model's other norms."""
    bias: bool = False
    window: int | None = None

    @property
    def num_kv_heads(self) -> int:
        """KV heads in the cache: one, the latent shared by all heads."""
        return 1

    @property
    def head_dims(self) -> tuple[int, int]:
        """Sizes of a head's keys and values, without latents."""
        return self.nope_dim + self.rope_dim, self.value_dim

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Number and size of heads of queries and keys without their RoPE part, and of values."""
        sizes = {"q": self.nope_dim, "k": self.nope_dim, "v": self.value_dim}
        return {name: (self.num_heads, size) for name, size in sizes.items()}


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """Gated MLP: down(activation(gate x) * up x)."""

    dim: int
    activation: Activation = "silu"
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """MoE router: expert selection and weights."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    """Normalize the weights of the selected experts to sum 1 (before `scale`)."""
    scale: float = 1.0
    bias: bool = False
    """Bias in the router's projection."""
    correction: bool = False
    """Bias per expert used for selection only (bias correction), arXiv:2408.15664."""
    num_groups: int = 1
    top_groups: int = 1
    """Number of groups selected, by the sum of their two best scores, before experts; arXiv:2412.19437."""


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Mixture of experts of gated MLPs; every token is routed to `top_k` of them, no token is dropped."""

    num_experts: int
    top_k: int
    expert: MLPConfig
    router: RouterConfig
    shared: MLPConfig | None = None
    """Shared expert applied to every token."""
    shared_gate: bool = False
    """Multiply the shared expert's output by sigmoid(gate x)."""
    swiglu_limit: float | None = None
    """Clipping bound of the inputs of the activation `swiglu_oai`."""

    def __post_init__(self) -> None:
        groups, chosen, experts = self.router.num_groups, self.router.top_groups, self.num_experts
        if groups < 1 or experts % groups or (groups > 1 and experts // groups < 2):
            raise ConfigError(f"n_group={groups} must split the {experts} experts evenly, into groups of 2 or more")
        if not 1 <= chosen <= groups:
            raise ConfigError(f"topk_group={chosen} must be from 1 to n_group={groups}")
        if not 1 <= self.top_k <= chosen * (experts // groups):
            raise ConfigError(
                f"num_experts_per_tok={self.top_k} must be from 1 to {chosen * (experts // groups)}, the experts in "
                "the selected groups"
            )


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Per-layer configuration."""

    attention: AttentionConfig | LatentAttentionConfig
    mlp: MLPConfig | MoEConfig
    norms: Literal["pre", "post", "sandwich"] = "pre"
    """Norm placement: before attention and MLP, after them (before the residual sum), or both."""
    residual_scale: float = 1.0
    """Factor on the outputs of attention and MLP."""
    deepstack: bool = False
    """Add image features of the layer's own to the output, arXiv:2406.04334."""


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """Short pattern of blocks, repeated: (5 local + 1 global) x n."""

    blocks: tuple[BlockConfig, ...]
    repeats: int

    @property
    def num_layers(self) -> int:
        return len(self.blocks) * self.repeats


@dataclass(frozen=True, kw_only=True)
class LayerInputsConfig:
    """Per-layer token inputs beside the residual stream (Gemma 3n and 4)."""

    vocab_size: int
    dim: int
    """Input size per layer."""


@runtime_checkable
class Images(Protocol):
    """Images of a batch as a tower reads them; see `Batch`."""

    @property
    def patches(self) -> Any: ...

    @property
    def patch_images(self) -> Any: ...

    @property
    def patch_places(self) -> Any: ...


class Encoded(NamedTuple):
    """Features of images: those in place of embeddings, and those that the first layers add."""

    features: Float[Array, "B N D"]
    deeper: tuple[Float[Array, "B N D"], ...] = ()


Role = Literal["kernel", "embedding", "norm", "bias", "sinks", "magnitude", "correction", "buffer"]
"""Role of a parameter, by which optimizers decide on weight decay, precision and orthogonalisation: a matrix of
weights, a table of tokens or positions, a norm's scale, a bias, attention sinks, the magnitudes of DoRA, a router's
correction, which follows the load of the experts, and numbers that are never trained."""


@dataclass(frozen=True, kw_only=True)
class TowerTensor:
    """Tensor of a tower or projector, stored as in the checkpoint, stacked over layers."""

    name: str
    """Name in the checkpoint; `{layer}` if it is stacked."""
    shape: tuple[int, ...]
    role: Role
    start: float | None
    """Initial value; None: random."""
    adaptable: bool = False
    """Weight [out, in] of a linear layer, which may have an adapter."""


class TowerWork(NamedTuple):
    """Operations of a tower's forward pass."""

    products: float = 0.0
    attention: float = 0.0
    projector: float = 0.0

    def trained(self, train: Vision, adapted: bool = False, *, attention: float = 3.0) -> float:
        """Operations with the backward pass, twice the forward one, of what is trained; `adapted`: by adapters, without
        gradients of the matrices; `attention`: of attention, all of it times the forward pass."""
        factor = 2 if adapted else 3
        if train == "tower":
            return factor * (self.products + self.projector) + attention * self.attention
        return self.products + self.attention + (factor if train == "projector" else 1) * self.projector

    @property
    def total(self) -> float:
        return sum(self)


@dataclass(frozen=True, kw_only=True)
class VisionConfig(ABC):
    """Vision tower with its projector; one subclass per tower in `posttrain.models.vision`."""

    model_type: str
    """Hugging Face `model_type` of the whole model."""
    embed_dim: int
    """Width of the language model."""
    depth: int
    width: int
    num_heads: int
    mlp_dim: int
    patch_size: int
    merge: int
    """Patches a side that one feature merges."""
    eps: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Mean and standard deviation of the channels, of pixels from 0 to 1."""
    fill_id: int = 0
    """Token whose embedding stands at image tokens where a layer reads tokens beside the residual stream."""
    train: Vision = "frozen"
    files: tuple[tuple[str, str], ...] = ()
    """Names and text of the image processor's files; written by `save_model`."""

    @abstractmethod
    def tensors(self) -> dict[str, TowerTensor]:
        """Tensors by key: those of the projector begin with `projector.`, stacked ones with `layers.`."""

    @abstractmethod
    def encode(self, params: Mapping[str, Array], images: Images, compute: Compute) -> Encoded:
        """Features of all merged blocks of patches, in order; a block holds patches of one image."""

    def written_fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of the whole model's `config.json` as saved: without parts that are not read, see `UNREAD`."""
        return dict(fields)

    def attends(self, images: Any, places: Any) -> Sequence[tuple[Any, int]]:
        """Groups of patches that see one another by number, 0 for padding, with the layers that attend so. `images`,
        `places`: of patches, as in `Batch`, of NumPy or JAX."""
        return [(images, self.depth)]

    def reads_as(self, other: VisionConfig | None) -> bool:
        """Tell whether another tower reads the same patches of pictures."""
        own = self.model_type, self.patch_size, self.merge
        return other is not None and own == (other.model_type, other.patch_size, other.merge)

    def picture_patches(self, limits: ImageSection) -> int | None:
        """Patches of the largest picture; None: not limited."""
        return None if limits.max_pixels is None else limits.max_pixels // self.patch_size**2

    @property
    def attention_dim(self) -> int:
        """Width of all heads."""
        return self.width

    def work(self, images: np.ndarray, places: np.ndarray) -> TowerWork:
        """Operations on host patches: 2 for each parameter and patch, of the projector for each feature, and 4 for each
        number of all heads and each pair of patches in attention."""
        shapes = {key: math.prod(tensor.shape) for key, tensor in self.tensors().items()}
        layer, projector = (
            sum(size for key, size in shapes.items() if key.startswith(start)) for start in ("layers.", "projector.")
        )
        groups = [(same_pairs(np.asarray(numbers)), layers) for numbers, layers in self.attends(images, places)]
        patches, depth = int((np.asarray(images) > 0).sum()), sum(layers for _, layers in groups)
        return TowerWork(
            products=2.0 * patches * (3 * self.patch_size**2 * self.width + depth * layer),
            attention=4.0 * self.attention_dim * sum(pairs * layers for pairs, layers in groups),
            projector=2.0 * patches * projector / self.merge**2,
        )

    @property
    def prefixes(self) -> frozenset[str]:
        """Beginnings of the names of the tensors in the checkpoint."""
        return frozenset(tensor.name.split("{")[0] for tensor in self.tensors().values())

    @property
    def trained(self) -> tuple[str, ...]:
        """Beginnings of the paths of trained parameters."""
        return {"none": (), "frozen": (), "projector": ("tower.projector.",), "tower": ("tower.",)}[self.train]


def same_pairs(numbers: Int[np.ndarray, "B P"]) -> float:
    """Pairs with the same number above 0 in a row, both ways and with themselves."""
    in_rows = numbers.astype(np.int64) + (np.arange(len(numbers), dtype=np.int64)[:, None] << 32)
    _, counts = np.unique(in_rows[numbers > 0], return_counts=True)
    return float((counts.astype(np.float64) ** 2).sum())


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    model_type: str
    """Hugging Face `model_type`: the name of the family's file."""
    vocab_size: int
    """Rows of the embedding."""
    embed_dim: int
    norm_eps: float
    tie_embeddings: bool
    max_positions: int
    stages: tuple[StageConfig, ...]
    initializer_range: float = 0.02
    norm_offset: float = 0.0
    """RMSNorm multiplies by offset + scale."""
    embed_scale: float = 1.0
    logits_scale: float = 1.0
    logits_soft_cap: float | None = None
    num_tokens: int | None = None
    """Number of ids with a token: embedding rows from here on are padding with probability 0 in trainer and sampler.
    None: every row has a token."""
    resized: bool = False
    """An adapter brought embedding and head, with the rows of added tokens, in place of its base's."""
    layer_inputs: LayerInputsConfig | None = None
    scalar_head: bool = False
    """Scalar head instead of logits (one number per token): a reward model."""
    further_layers: int = 0
    """Multi-token prediction layers of the checkpoint after the last layer; not loaded."""
    hf_json: str = "{}"
    """`config.json` of the model as text; written by `save_model`."""
    generation_json: str = "{}"
    """`generation_config.json` of the model as text; written by `save_model`."""
    vision: VisionConfig | None = None
    """Vision tower; None: text alone, also where the checkpoint has one."""
    block: type[nnx.Module] | None = None
    """Family-specific block class; None: `posttrain.models.decoder.Block`."""

    @property
    def num_layers(self) -> int:
        return sum(stage.num_layers for stage in self.stages)

    @property
    def blocks(self) -> tuple[BlockConfig, ...]:
        """Configuration of each layer, in order."""
        return tuple(block for stage in self.stages for _ in range(stage.repeats) for block in stage.blocks)

    @property
    def turns_by_axes(self) -> bool:
        """True for multimodal RoPE."""
        return any(block.attention.rope is not None and bool(block.attention.rope.axes) for block in self.blocks)

    @property
    def deepstack(self) -> int:
        """Number of layers that add image features of their own."""
        return sum(block.deepstack for block in self.blocks)

    @property
    def sees_ahead(self) -> bool:
        """True if tokens of an image see those behind them, so that it must be read at once."""
        return any(isinstance(c := block.attention, AttentionConfig) and c.image_ahead > 0 for block in self.blocks)

    @property
    def mixtures(self) -> tuple[MoEConfig, ...]:
        """Configuration of each MoE layer, in order."""
        return tuple(block.mlp for block in self.blocks if isinstance(block.mlp, MoEConfig))

    @property
    def correction_paths(self) -> dict[str, list[int]]:
        """Parameter paths of the routers' bias corrections -> indices of the MoE layers stacked in each."""
        paths: dict[str, list[int]] = {}
        number = 0
        for s, stage in enumerate(self.stages):
            for _ in range(stage.repeats):
                for b, block in enumerate(stage.blocks):
                    if isinstance(block.mlp, MoEConfig):
                        if block.mlp.router.correction:
                            paths.setdefault(f"stages.{s}.blocks.{b}.mlp.router.correction", []).append(number)
                        number += 1
        return paths


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Compute options: they change speed and memory, not the function (except for rounding)."""

    dtype: np.dtype
    """Dtype of activations and matrix products."""
    remat: Remat = "none"
    attention: AttentionKernel = "auto"
    decode_attention: DecodeAttention = "auto"
    grouped_matmul: GroupedKernel = "auto"
    mesh: Mesh | None = None
    """Mesh of the weights, for kernels that GSPMD cannot partition; None: one device."""

    @classmethod
    def of(cls, dtype: DTypeLike) -> Compute:
        return cls(dtype=jnp.dtype(dtype))


def stages_of(blocks: tuple[BlockConfig, ...]) -> tuple[StageConfig, ...]:
    """Group layers into stages by the shortest repeating pattern; a remainder becomes separate stages."""
    stages: list[StageConfig] = []
    while blocks:
        period, repeats = _best_pattern(blocks)
        stages.append(StageConfig(blocks=blocks[:period], repeats=repeats))
        blocks = blocks[period * repeats :]
    return tuple(stages)


def _best_pattern(blocks: tuple[BlockConfig, ...]) -> tuple[int, int]:
    best = (1, 1)
    for period in range(1, len(blocks) // 2 + 1):
        repeats = 1
        while blocks[:period] == blocks[period * repeats : period * (repeats + 1)]:
            repeats += 1
        if repeats > 1 and period * repeats > best[0] * best[1]:
            best = (period, repeats)
    return best


def check_router(config: ModelConfig, correction_rate: float, *, adapter: bool) -> None:
    """Raises ConfigError if the model does not support load balancing, with this rate of its bias correction."""
    if not config.mixtures:
        raise ConfigError(f"router: {config.model_type} has no MoE layer to balance; remove the section router")
    if not correction_rate:
        return
    if not config.correction_paths:
        raise ConfigError(
            f"router.correction_rate={correction_rate}: the routers of {config.model_type} have no bias "
            "correction; use router.balance_coef"
        )
    if adapter:
        raise ConfigError(
            f"router.correction_rate={correction_rate}: an adapter cannot hold the corrections; set it to 0, or train "
            "all parameters"
        )


def check_recording(config: ModelConfig) -> None:
    """Raises ConfigError if the model has no routing to record."""
    if not config.mixtures:
        raise ConfigError(
            f"rollout.record_routing: {config.model_type} has no MoE layer whose routing could be recorded; "
            "remove the option"
        )
