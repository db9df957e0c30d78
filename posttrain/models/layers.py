"""Parameters and the small layers: Linear, RMSNorm, Embedding, gated MLP, RoPE."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from posttrain.kernels.matmul import matmul
from posttrain.models.config import Activation, Llama3Scaling, MLPConfig, Rope

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


class LoRAParam(nnx.Param):
    """A parameter of an adapter: trained while the base stays frozen."""


def param(value: Array, dims: tuple[str, ...], kind: type[nnx.Param] = nnx.Param) -> Any:
    """A parameter that names its dimensions; `posttrain.mesh` turns names into shardings."""
    assert value.ndim == len(dims), (value.shape, dims)
    return kind(value, dims=dims)


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: jnp.dtype, stddev: float) -> Array:
    return (jax.random.normal(rngs.params(), shape, jnp.float32) * stddev).astype(dtype)


class Linear(nnx.Module):
    """x W + b, and where an adapter is attached + scale * (x A) B.

    Weights of all `repeats` layers are stacked in a leading dimension, which the decoder scans over.
    """

    def __init__(
        self,
        repeats: int,
        dims: tuple[str, str],
        shape: tuple[int, int],
        *,
        bias: bool,
        stddev: float,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        self.shape = shape
        self.dims = dims
        self.lora_scale = 0.0
        self.kernel = param(normal(rngs, (repeats, *shape), dtype, stddev), ("layers", *dims))
        self.bias = param(jnp.zeros((repeats, shape[1]), dtype), ("layers", dims[1])) if bias else None
        self.lora_a: Any = nnx.data(None)
        self.lora_b: Any = nnx.data(None)

    def add_lora(self, rank: int, scale: float, rngs: nnx.Rngs) -> None:
        """Attach an adapter that changes nothing yet: A is drawn, B is 0."""
        repeats, dtype = self.kernel.shape[0], self.kernel.dtype
        a = normal(rngs, (repeats, self.shape[0], rank), dtype, 1.0 / math.sqrt(self.shape[0]))
        self.lora_scale = scale
        self.lora_a = param(a, ("layers", self.dims[0], "rank"), LoRAParam)
        self.lora_b = param(
            jnp.zeros((repeats, rank, self.shape[1]), dtype), ("layers", "rank", self.dims[1]), LoRAParam
        )

    def __call__(self, x: Float[Array, "B T in"]) -> Float[Array, "B T out"]:
        y = matmul(x, self.kernel[...].astype(x.dtype))
        if self.bias is not None:
            y = y + self.bias[...].astype(x.dtype)[None, None]
        if self.lora_a is not None:
            low = matmul(x, self.lora_a[...].astype(x.dtype))
            y = y + matmul(low, self.lora_b[...].astype(x.dtype)) * self.lora_scale
        return y


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last dimension, computed in float32 (arXiv:1910.07467)."""

    def __init__(self, lead: tuple[int, ...], dim: str, size: int, *, eps: float, dtype: jnp.dtype):
        self.eps = eps
        self.scale = param(jnp.ones((*lead, size), dtype), ("layers", dim) if lead else (dim,))

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(jnp.float32)
        return (normed * scale.reshape((1,) * (x.ndim - 1) + scale.shape)).astype(x.dtype)


class Embedding(nnx.Module):
    def __init__(self, vocab_size: int, embed_dim: int, *, stddev: float, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.embedding = param(normal(rngs, (vocab_size, embed_dim), dtype, stddev), ("vocab", "embed"))

    def __call__(self, tokens: Int[Array, "B T"], dtype: jnp.dtype) -> Float[Array, "B T D"]:
        return jnp.take(self.embedding[...], tokens, axis=0).astype(dtype)


class MLP(nnx.Module):
    def __init__(
        self, config: MLPConfig, repeats: int, embed_dim: int, *, stddev: float, dtype: jnp.dtype, rngs: nnx.Rngs
    ):
        self.activation: Activation = config.activation
        kwargs: dict[str, Any] = {"bias": config.bias, "stddev": stddev, "dtype": dtype, "rngs": rngs}
        self.gate = Linear(repeats, ("embed", "mlp"), (embed_dim, config.dim), **kwargs)
        self.up = Linear(repeats, ("embed", "mlp"), (embed_dim, config.dim), **kwargs)
        self.down = Linear(repeats, ("mlp", "embed"), (config.dim, embed_dim), **kwargs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.down(ACTIVATIONS[self.activation](self.gate(x)) * self.up(x))


def rope_frequencies(rope: Rope, head_dim: int) -> Float[Array, " half"]:
    """Radians per position for each pair of dimensions."""
    frequencies = rope.theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if rope.scaling is None:
        return frequencies
    if not isinstance(rope.scaling, Llama3Scaling):
        return frequencies / rope.scaling.factor
    s = rope.scaling
    wavelength = 2 * jnp.pi / frequencies
    keep = (s.original_max_positions / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    keep = jnp.clip(keep, 0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / s.factor


def rope_tables(
    rope: Rope, head_dim: int, positions: Int[Array, "B T"]
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """Cosines and sines of every position, float32."""
    angles = positions[..., None].astype(jnp.float32) * rope_frequencies(rope, head_dim)[None, None]
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(
    x: Float[Array, "B T N H"], tables: tuple[Float[Array, "B T half"], Float[Array, "B T half"]]
) -> Float[Array, "B T N H"]:
    """Rotate the pairs (x[i], x[i + H/2]), the layout of Hugging Face checkpoints."""
    cos, sin = (table[:, :, None, :] for table in tables)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
