"""Parameters and the small layers: Linear, RMSNorm, Embedding, gated MLP."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from posttrain.kernels.matmul import matmul
from posttrain.models.config import Activation, MLPConfig

SWIGLU_OAI_ALPHA = 1.702


def gated(
    activation: Activation, gate: Float[Array, "*B F"], up: Float[Array, "*B F"], limit: float | None = None
) -> Float[Array, "*B F"]:
    """activation(gate) * up; `swiglu_oai` is gpt-oss's: gate sigmoid(1.702 gate) (up + 1), both bounded by `limit`."""
    if activation == "silu":
        return jax.nn.silu(gate) * up
    if activation == "gelu":
        return jax.nn.gelu(gate, approximate=False) * up
    if activation == "gelu_tanh":
        return jax.nn.gelu(gate, approximate=True) * up
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(SWIGLU_OAI_ALPHA * gate) * (up + 1)


class Init(NamedTuple):
    """How parameters are born."""

    stddev: float
    dtype: np.dtype
    rngs: nnx.Rngs


class LoRAParam(nnx.Param):
    """A parameter of an adapter: trained while the base stays frozen."""


def param(value: Array, dims: tuple[str, ...], kind: type[nnx.Param] = nnx.Param) -> Any:
    """A parameter that names its dimensions; `posttrain.mesh` turns names into shardings."""
    assert value.ndim == len(dims), (value.shape, dims)
    return kind(value, dims=dims)


def normal(init: Init, shape: tuple[int, ...]) -> Array:
    return (jax.random.normal(init.rngs.params(), shape, jnp.float32) * init.stddev).astype(init.dtype)


class Linear(nnx.Module):
    """x W + b, and where an adapter is attached + scale * (x A) B.

    Weights of all `repeats` layers are stacked in a leading dimension, which the decoder scans over.
    """

    def __init__(self, repeats: int, dims: tuple[str, str], shape: tuple[int, int], init: Init, *, bias: bool):
        self.shape = shape
        self.dims = dims
        self.lora_scale = 0.0
        self.kernel = param(normal(init, (repeats, *shape)), ("layers", *dims))
        self.bias = param(jnp.zeros((repeats, shape[1]), init.dtype), ("layers", dims[1])) if bias else None
        self.lora_a: Any = nnx.data(None)
        self.lora_b: Any = nnx.data(None)

    def add_lora(self, rank: int, scale: float, rngs: nnx.Rngs) -> None:
        """Attach an adapter that changes nothing yet: A is drawn, B is 0."""
        repeats, dtype = self.kernel.shape[0], self.kernel.dtype
        a = normal(Init(1.0 / math.sqrt(self.shape[0]), dtype, rngs), (repeats, self.shape[0], rank))
        self.lora_scale = scale
        self.lora_a = param(a, ("layers", self.dims[0], "rank"), LoRAParam)
        self.lora_b = param(
            jnp.zeros((repeats, rank, self.shape[1]), dtype), ("layers", "rank", self.dims[1]), LoRAParam
        )

    def weight(self, dtype: np.dtype) -> Float[Array, "in out"]:
        """The kernel with the adapter's part added, of the one layer that the decoder is at."""
        kernel = self.kernel[...].astype(dtype)
        if self.lora_a is None:
            return kernel
        return kernel + self.lora_scale * (self.lora_a[...].astype(dtype) @ self.lora_b[...].astype(dtype))

    def __call__(self, x: Float[Array, "B T in"]) -> Float[Array, "B T out"]:
        y = matmul(x, self.kernel[...].astype(x.dtype))
        if self.bias is not None:
            y = y + self.bias[...].astype(x.dtype)[None, None]
        if self.lora_a is not None:
            low = matmul(x, self.lora_a[...].astype(x.dtype))
            y = y + matmul(low, self.lora_b[...].astype(x.dtype)) * self.lora_scale
        return y


class RMSNorm(nnx.Module):
    """x / rms(x) * (offset + scale) over the last dimension, computed in float32 (arXiv:1910.07467)."""

    def __init__(
        self, lead: tuple[int, ...], dim: str, size: int, *, eps: float, dtype: np.dtype, offset: float = 0.0
    ):
        self.eps = eps
        self.offset = offset
        self.scale = param(jnp.full((*lead, size), 1.0 - offset, dtype), ("layers", dim) if lead else (dim,))

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        scale = self.scale[...].astype(jnp.float32) + self.offset
        return (rms_normed(x, self.eps) * scale.reshape((1,) * (x.ndim - 1) + scale.shape)).astype(x.dtype)


def rms_normed(x: Float[Array, "*B D"], eps: float) -> Float[Array, "*B D"]:
    """x / sqrt(mean(x^2) + eps) in float32."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)


class Embedding(nnx.Module):
    def __init__(self, vocab_size: int, embed_dim: int, init: Init, *, scale: float):
        self.scale = scale
        self.embedding = param(normal(init, (vocab_size, embed_dim)), ("vocab", "embed"))

    def __call__(self, tokens: Int[Array, "B T"], dtype: np.dtype) -> Float[Array, "B T D"]:
        x = jnp.take(self.embedding[...], tokens, axis=0).astype(dtype)
        return x if self.scale == 1.0 else x * jnp.asarray(self.scale, dtype)


class MLP(nnx.Module):
    def __init__(self, config: MLPConfig, repeats: int, embed_dim: int, init: Init):
        self.activation: Activation = config.activation
        self.gate = Linear(repeats, ("embed", "mlp"), (embed_dim, config.dim), init, bias=config.bias)
        self.up = Linear(repeats, ("embed", "mlp"), (embed_dim, config.dim), init, bias=config.bias)
        self.down = Linear(repeats, ("mlp", "embed"), (config.dim, embed_dim), init, bias=config.bias)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.down(gated(self.activation, self.gate(x), self.up(x)))
