"""What a decoder is made of: static descriptions, made from a Hugging Face `config.json` by a family file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from posttrain.config import AttentionKernel, DecodeAttention, GroupedKernel, Remat
from posttrain.errors import ConfigError

Activation = Literal["silu", "gelu", "gelu_tanh", "swiglu_oai"]


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding, arXiv:2104.09864. `posttrain.models.rope` makes the frequencies of every kind."""

    frequencies: tuple[float, ...]
    """Radians per position of each rotated pair; dimensions of the head beyond the pairs stay as they are."""
    magnitude: float = 1.0
    """Multiplies the rotated vectors: YaRN's and LongRoPE's attention factor."""
    interleaved: bool = False
    """The pairs are (x[2i], x[2i + 1]); else (x[i], x[i + pairs])."""


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None
    """None: the layer sees no positions."""
    scale: float
    """Of the products of queries and keys."""
    window: int | None = None
    """Tokens visible, itself included; None: all."""
    soft_cap: float | None = None
    """Logits become cap * tanh(logits / cap)."""
    sinks: bool = False
    """A learned logit per head takes part in the softmax and has no value."""
    qk_norm: Literal["head", "projection"] | None = None
    """RMSNorm of queries and keys before RoPE, over each head or over the whole projection."""
    value_norm: bool = False
    """RMSNorm without a scale over each head's values."""
    keys_as_values: bool = False
    """The projection of the keys serves as that of the values."""
    qkv_bias: bool = False
    out_bias: bool = False
    keeps: str | None = None
    """Under this name later layers reuse this layer's keys and values."""
    reuses: str | None = None
    """The layer has no keys and values of its own but takes those kept under this name."""

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Heads and the size of one, of the layer's own queries, keys and values."""
        kv = (self.num_kv_heads, self.head_dim)
        return {"q": (self.num_heads, self.head_dim), **({} if self.reuses else {"k": kv, "v": kv})}


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig:
    """Multi-head latent attention of DeepSeek-V2, arXiv:2405.04434, section 2.1."""

    num_heads: int
    q_rank: int | None
    """None: queries are projected directly."""
    kv_rank: int
    nope_dim: int
    """Dimensions of a head without positions; `rope_dim` more have them."""
    rope_dim: int
    value_dim: int
    rope: Rope
    scale: float
    norm_eps: float
    """Of the norms of both latents, whatever the model's other norms have."""
    bias: bool = False
    window: int | None = None

    @property
    def num_kv_heads(self) -> int:
        """Of what the cache holds: the latents, which all heads share."""
        return 1

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Heads and the size of one, of queries and keys without their rotary parts, and of values."""
        sizes = {"q": self.nope_dim, "k": self.nope_dim, "v": self.value_dim}
        return {name: (self.num_heads, size) for name, size in sizes.items()}


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """Gated: down(activation(gate x) * up x)."""

    dim: int
    activation: Activation = "silu"
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Which experts a token goes to, and with what weights."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    """The weights of the chosen experts sum to 1 (before `scale`)."""
    scale: float = 1.0
    bias: bool = False
    """A bias in the router's projection."""
    correction: bool = False
    """A bias per expert that takes part in the choice only, arXiv:2408.15664."""
    num_groups: int = 1
    top_groups: int = 1
    """Experts are chosen within the groups whose two best scores have the largest sums, arXiv:2412.19437."""


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A mixture of gated MLPs; every token goes to `top_k` of them, none is dropped."""

    num_experts: int
    top_k: int
    expert: MLPConfig
    router: RouterConfig
    shared: MLPConfig | None = None
    """An expert that every token goes to."""
    shared_gate: bool = False
    """The shared expert's output is multiplied by sigmoid(gate x)."""
    swiglu_limit: float | None = None
    """Bound of what the activation `swiglu_oai` gets."""

    def __post_init__(self) -> None:
        groups, chosen, experts = self.router.num_groups, self.router.top_groups, self.num_experts
        if groups < 1 or experts % groups or (groups > 1 and experts // groups < 2):
            raise ConfigError(f"n_group={groups} must split the {experts} experts evenly, into groups of 2 or more")
        if not 1 <= chosen <= groups:
            raise ConfigError(f"topk_group={chosen} must be from 1 to n_group={groups}")
        if not 1 <= self.top_k <= chosen * (experts // groups):
            raise ConfigError(
                f"num_experts_per_tok={self.top_k} must be from 1 to {chosen * (experts // groups)}, the experts that "
                "there are to choose from"
            )


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """What may differ between layers."""

    attention: AttentionConfig | LatentAttentionConfig
    mlp: MLPConfig | MoEConfig
    norms: Literal["pre", "post", "sandwich"] = "pre"
    """Where the norms stand: before attention and MLP, after them (before the residual sum), or both."""
    residual_scale: float = 1.0
    """Multiplies what attention and MLP add."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A short pattern of blocks, repeated: (5 local + 1 global) x n."""

    blocks: tuple[BlockConfig, ...]
    repeats: int

    @property
    def num_layers(self) -> int:
        return len(self.blocks) * self.repeats


@dataclass(frozen=True, kw_only=True)
class LayerInputsConfig:
    """What each layer gets of the tokens beside the residual stream."""

    vocab_size: int
    dim: int
    """Of what one layer gets."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    model_type: str
    """The Hugging Face `model_type`, which is the name of the family's file."""
    vocab_size: int
    """Rows of the embedding."""
    embed_dim: int
    norm_eps: float
    tie_embeddings: bool
    max_positions: int
    stages: tuple[Stage, ...]
    initializer_range: float = 0.02
    norm_offset: float = 0.0
    """RMSNorm multiplies by offset + scale."""
    embed_scale: float = 1.0
    logits_scale: float = 1.0
    logits_soft_cap: float | None = None
    num_tokens: int | None = None
    """Ids from here on are padding of the embedding: they have no token, and their probability is 0 for trainer and
    sampler alike. None: every row has a token."""
    layer_inputs: LayerInputsConfig | None = None
    scalar_head: bool = False
    """One number per token in place of logits: a reward model."""
    further_layers: int = 0
    """Layers that a checkpoint has after the last, for predicting more than the next token: they are not loaded."""
    hf_json: str = "{}"
    """The `config.json` of the model, as text: `save_model` writes it."""
    generation_json: str = "{}"
    """The `generation_config.json` that the model came with, as text: `save_model` writes it."""
    block: type[nnx.Module] | None = None
    """The family's own kind of block; None: `posttrain.models.decoder.Block`."""

    @property
    def num_layers(self) -> int:
        return sum(stage.num_layers for stage in self.stages)

    @property
    def blocks(self) -> tuple[BlockConfig, ...]:
        """One entry per layer, in order."""
        return tuple(block for stage in self.stages for _ in range(stage.repeats) for block in stage.blocks)

    @property
    def mixtures(self) -> tuple[MoEConfig, ...]:
        """Of the layers that are mixtures of experts, in order."""
        return tuple(block.mlp for block in self.blocks if isinstance(block.mlp, MoEConfig))


@dataclass(frozen=True, kw_only=True)
class Compute:
    """How a model is computed: speed and memory depend on it, the function does not (but for rounding)."""

    dtype: np.dtype
    """Of activations and matrix products."""
    remat: Remat = "none"
    attention: AttentionKernel = "auto"
    decode_attention: DecodeAttention = "auto"
    grouped_matmul: GroupedKernel = "auto"
    mesh: Mesh | None = None
    """Where the weights lie, for kernels that GSPMD cannot split; None: one device."""

    @classmethod
    def of(cls, dtype: DTypeLike) -> Compute:
        return cls(dtype=jnp.dtype(dtype))


def stages_of(blocks: tuple[BlockConfig, ...]) -> tuple[Stage, ...]:
    """The shortest repeating pattern of the layers as stages; a remainder becomes stages of its own."""
    stages: list[Stage] = []
    while blocks:
        period, repeats = _best_pattern(blocks)
        stages.append(Stage(blocks=blocks[:period], repeats=repeats))
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
