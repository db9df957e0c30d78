"""What a decoder is made of: static descriptions, made from a Hugging Face `config.json` by a family file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Frequency-dependent RoPE stretching of Llama 3.1, arXiv:2407.21783, section 3.2."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Position interpolation, arXiv:2306.15595: every frequency divided by `factor`."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding over the whole head, arXiv:2104.09864."""

    theta: float
    scaling: Llama3Scaling | LinearScaling | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    window: int | None = None
    """Tokens visible, itself included; None: all."""
    qk_norm: bool = False
    """RMSNorm over the head dimension of queries and keys, before RoPE."""
    qkv_bias: bool = False
    out_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """Gated: down(activation(gate x) * up x)."""

    dim: int
    activation: Activation = "silu"
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """What may differ between layers."""

    attention: AttentionConfig
    mlp: MLPConfig


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A short pattern of blocks, repeated: (5 local + 1 global) x n."""

    blocks: tuple[BlockConfig, ...]
    repeats: int

    @property
    def num_layers(self) -> int:
        return len(self.blocks) * self.repeats


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    model_type: str
    """The Hugging Face `model_type`, which is the name of the family's file."""
    vocab_size: int
    embed_dim: int
    norm_eps: float
    tie_embeddings: bool
    max_positions: int
    stages: tuple[Stage, ...]
    initializer_range: float = 0.02
    hf_json: str | None = None
    """The `config.json` that this was made from, as text, for `save_model`; None: made in Python."""

    @property
    def num_layers(self) -> int:
        return sum(stage.num_layers for stage in self.stages)

    @property
    def blocks(self) -> tuple[BlockConfig, ...]:
        """One entry per layer, in order."""
        return tuple(block for stage in self.stages for _ in range(stage.repeats) for block in stage.blocks)


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
