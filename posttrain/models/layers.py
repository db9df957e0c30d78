"""Parameters and basic layers: Linear, RMSNorm, Embedding with a lookup that moves no table, gated MLP."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int, Shaped

from posttrain.kernels.attention.joined import LANES
from posttrain.kernels.platform import matmul, platform_of, written, written_gradients
from posttrain.mesh import TOKEN_AXIS, row_axes, row_shards, split_axes
from posttrain.models.activations import GATE, UP
from posttrain.models.adapter import Adapter, AdapterStack
from posttrain.models.config import Activation, LayerInputsConfig, MLPConfig, ModelConfig, Role
from posttrain.models.quant import Quantized

SWIGLU_OAI_ALPHA = 1.702


def gated(
    activation: Activation, gate: Float[Array, "*B F"], up: Float[Array, "*B F"], limit: float | None = None
) -> Float[Array, "*B F"]:
    """activation(gate) * up; `swiglu_oai` is gpt-oss's: gate sigmoid(1.702 gate) (up + 1), both clipped to `limit`."""
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
    """Parameter initialization: standard deviation, dtype, PRNG keys."""

    stddev: float
    dtype: np.dtype
    rngs: nnx.Rngs


def param(value: Array, dims: tuple[str, ...], role: Role) -> Any:
    """Create a parameter with named dimensions, which `posttrain.mesh` maps to shardings, and its role."""
    assert value.ndim == len(dims), (value.shape, dims)
    return nnx.Param(value, dims=dims, role=role)


def normal(init: Init, shape: tuple[int, ...]) -> Array:
    return (jax.random.normal(init.rngs.params(), shape, jnp.float32) * init.stddev).astype(init.dtype)


class Adaptable(nnx.Module):
    """Layer with weight matrices that accept adapters."""

    adapters: nnx.Dict[Adapter | AdapterStack]
    """Adapters by matrix name; stacks of several only where an engine decodes with them."""

    def matrices(self) -> Mapping[str, Any]:
        """Parameters [*leading, in, out] by name; a quantized matrix reads like a parameter."""
        raise NotImplementedError

    def fix_gains(self) -> None:
        """Precompute adapter gains, for matrices and adapters that no longer change."""
        for name, adapter in self.adapters.items():
            adapter.fix_gain(self.matrices()[name][...])

    def merged(self, name: str) -> Float[Array, "*L in out"]:
        """Matrix with its adapter merged, in the matrix's dtype."""
        matrix, adapter = self.matrices()[name][...], self.adapters.get(name)
        assert not isinstance(adapter, AdapterStack), "one matrix cannot hold several adapters"
        return matrix if adapter is None else adapter.merged(matrix)


class Linear(Adaptable):
    """Linear layer x W + b with an optional adapter on W.

    Weights of all `repeats` layers are stacked in a leading dimension, which the decoder scans over.
    """

    def __init__(self, repeats: int, dims: tuple[str, str], shape: tuple[int, int], init: Init, *, bias: bool):
        self.shape = shape
        self.dims = dims
        self.kernel: Any = param(normal(init, (repeats, *shape)), ("layers", *dims), "kernel")
        self.bias = param(jnp.zeros((repeats, shape[1]), init.dtype), ("layers", dims[1]), "bias") if bias else None
        self.adapters = nnx.Dict({})

    def matrices(self) -> Mapping[str, Any]:
        return {"kernel": self.kernel}

    def frozen(self, dtype: DTypeLike) -> Float[Array, "*L in out"]:
        """Kernel without the adapter."""
        return self.kernel[...].astype(dtype)

    def weight(self, dtype: np.dtype) -> Float[Array, "in out"]:
        """Kernel of the current layer with the adapter merged, but for a stack of several."""
        adapter = self.adapters.get("kernel")
        if not isinstance(adapter, Adapter):
            return self.frozen(dtype)
        return adapter.merged(self.frozen(jnp.float32)).astype(dtype)

    @property
    def stack(self) -> AdapterStack | None:
        """Adapters of several requests."""
        adapter = self.adapters.get("kernel")
        return adapter if isinstance(adapter, AdapterStack) else None

    def __call__(self, x: Float[Array, "B T in"]) -> Float[Array, "B T out"]:
        return self.completed(x, _product(self.kernel, x))

    def completed(self, x: Float[Array, "B T in"], y: Float[Array, "B T out"]) -> Float[Array, "B T out"]:
        """Output from the product y of x and the kernel: adapter and bias."""
        y = self._adapted(x, y)
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)[None, None]

    def logits(self, hidden: Float[Array, "B T in"]) -> Float[Array, "B T out"]:
        """float32 output of a layer with a stack of size 1 (the language model head)."""
        graph, state = nnx.split(self)
        alone = nnx.merge(graph, jax.tree.map(lambda w: w[0], state))
        kernel = alone.frozen(hidden.dtype)
        return alone._adapted(hidden, matmul(hidden, kernel, jnp.float32))

    def _adapted(self, x: Float[Array, "B T in"], y: Float[Array, "B T out"]) -> Float[Array, "B T out"]:
        adapter = self.adapters.get("kernel")
        if adapter is None:
            return y
        return adapter.added(y, adapter.down(x), self.frozen(jnp.float32) if adapter.reads_kernel else None)


class FusedLinear(nnx.Module):
    """Linear layers of one input, none of which is wide, as one product: for decoding on accelerators, which read a
    weight as fast as they can only if it is large.

    Takes the layers' kernels and leaves them adapters and biases. In each of the `shards` that the outputs are split
    over, the parts of all layers are side by side, so that taking them apart moves nothing.
    """

    def __init__(self, layers: Sequence[Linear], shards: int):
        self.shards = shards
        self.sizes = tuple(layer.shape[1] for layer in layers)
        kernels = [layer.kernel for layer in layers]
        dims, first = kernels[0].get_metadata("dims"), kernels[0]
        if isinstance(first, Quantized):
            codes = self._together([kernel.codes[...] for kernel in kernels])
            scales = self._together([kernel.scales[...] for kernel in kernels])
            self.kernel: Any = Quantized(codes, scales, dims, kind=first.kind, dtype=first.dtype)
        else:
            self.kernel = nnx.Param(self._together([kernel[...] for kernel in kernels]), dims=dims, role="kernel")
        for layer in layers:
            layer.kernel = nnx.data(None)

    def __call__(self, x: Float[Array, "B T in"], layers: Sequence[Linear]) -> list[Float[Array, "B T _out"]]:
        """Output of each layer."""
        y = _product(self.kernel, x).reshape(*x.shape[:2], self.shards, -1)
        parts = jnp.split(y, np.cumsum(self.sizes)[:-1] // self.shards, axis=-1)
        flat = (part.reshape(*x.shape[:2], -1) for part in parts)
        return [layer.completed(x, part) for layer, part in zip(layers, flat, strict=True)]

    def _together(self, kernels: Sequence[Shaped[Array, "*L in _out"]]) -> Shaped[Array, "*L in outs"]:
        parts = [kernel.reshape(*kernel.shape[:-1], self.shards, -1) for kernel in kernels]
        return jnp.concatenate(parts, axis=-1).reshape(*kernels[0].shape[:-1], -1)


def fused_linear(layers: Sequence[Linear], shards: int) -> FusedLinear | None:
    """Fuse layers; None for a single one, and where they are stored differently or do not divide into shards."""
    kinds = {
        (type(k), k.dtype, k.kind if isinstance(k, Quantized) else None) for k in (layer.kernel for layer in layers)
    }
    divides = all(layer.shape[1] % shards == 0 for layer in layers)
    return FusedLinear(layers, shards) if len(layers) > 1 and len(kinds) == 1 and divides else None


def _product(kernel: Any, x: Float[Array, "B T in"]) -> Float[Array, "B T out"]:
    return kernel.product(matmul, x) if isinstance(kernel, Quantized) else matmul(x, kernel[...].astype(x.dtype))


class RMSNorm(nnx.Module):
    """RMSNorm x / rms(x) * (offset + scale) over the last dimension in float32 (arXiv:1910.07467)."""

    def __init__(self, lead: tuple[int, ...], dim: str, size: int, *, eps: float, dtype: np.dtype, offset: float = 0.0):
        self.eps = eps
        self.offset = offset
        self.scale = param(jnp.full((*lead, size), 1.0 - offset, dtype), ("layers", dim) if lead else (dim,), "norm")

    @classmethod
    def of(cls, model: ModelConfig, repeats: int, dim: str, size: int, init: Init) -> RMSNorm:
        """Norm of a block with the model's settings."""
        return cls((repeats,), dim, size, eps=model.norm_eps, dtype=init.dtype, offset=model.norm_offset)

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        scale = self.scale[...].astype(jnp.float32) + self.offset
        return (rms_normed(x, self.eps) * scale.reshape((1,) * (x.ndim - 1) + scale.shape)).astype(x.dtype)


def rms_normed(x: Float[Array, "*B D"], eps: float) -> Float[Array, "*B D"]:
    """x / sqrt(mean(x^2) + eps) in float32."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)


class Embedding(Adaptable):
    """Token embedding table; with tied embeddings also the output head."""

    def __init__(self, vocab_size: int, embed_dim: int, init: Init, *, scale: float):
        self.scale = scale
        self.embedding = param(normal(init, (vocab_size, embed_dim)), ("vocab", "embed"), "embedding")
        self.adapters = nnx.Dict({})
        self.width = embed_dim

    def matrices(self) -> Mapping[str, Any]:
        return {"embedding": self.embedding}

    def widen(self) -> None:
        """Pad rows to whole registers, for lookups only: a TPU stores a table by columns where its rows alone would
        need padding, and copies it for every program that looks rows up."""
        rows, columns = self.embedding.shape
        if rows % LANES == 0 and columns % LANES and not self.adapters:
            self.embedding.set_value(jnp.pad(self.embedding[...], [(0, 0), (0, -columns % LANES)]))

    def __call__(self, tokens: Int[Array, "B T"], dtype: np.dtype, mesh: Mesh | None) -> Float[Array, "B T D"]:
        x = lookup(self.embedding[...], tokens, dtype, mesh)[..., : self.width]
        if adapter := self.adapters.get("embedding"):
            low = adapter.own(jnp.take(adapter.lora_a[...], tokens, axis=0).astype(dtype))
            x = adapter.added(x, low, self.embedding[...])
        return x if self.scale == 1.0 else x * jnp.asarray(self.scale, dtype)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits in float32: hidden times the transposed table."""
        table, adapter = self.embedding[...], self.adapters.get("embedding")
        if adapter is None:
            return _transposed_product(hidden, table)
        if isinstance(adapter, Adapter) and adapter.lora_magnitude is not None:
            hidden = hidden * adapter.gain(table).astype(hidden.dtype)[None, None]
        low = adapter.own(_transposed_product(hidden, adapter.scaled_b(jnp.float32)))
        return _transposed_product(hidden, table) + _transposed_product(low, adapter.lora_a[...])


def _transposed_product(x: Float[Array, "B T D"], table: Float[Array, "V D"]) -> Float[Array, "B T V"]:
    return matmul(x, table.astype(x.dtype).T, jnp.float32)


class LayerInputs(nnx.Module):
    """Per-layer inputs of embedded tokens x: (E[token] sqrt(P) + norm(W x / sqrt(D))) / sqrt(2), P numbers per
    layer."""

    def __init__(self, model: ModelConfig, config: LayerInputsConfig, init: Init):
        size = model.num_layers * config.dim
        self.embed = Embedding(config.vocab_size, size, init, scale=math.sqrt(config.dim))
        self.projection = Linear(1, ("embed", "latent"), (model.embed_dim, size), init, bias=False)
        self.norm = RMSNorm((), "latent", config.dim, eps=model.norm_eps, dtype=init.dtype, offset=model.norm_offset)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        x: Float[Array, "B T D"],
        mesh: Mesh | None,
        images: Bool[Array, "B T"] | None = None,
    ) -> Float[Array, "L B T P"]:
        """`images`: tokens that stand for images, whose own embedding is not trained."""
        projected = self.projection.logits(x).astype(x.dtype) * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
        split = (*tokens.shape, -1, self.norm.scale.shape[-1])
        embedded = self.embed(tokens, x.dtype, mesh)
        if images is not None:
            embedded = jnp.where(images[..., None], jax.lax.stop_gradient(embedded), embedded)
        total = self.norm(projected.reshape(split)) + embedded.reshape(split)
        return jnp.moveaxis(total * jnp.asarray(2**-0.5, x.dtype), 2, 0)


class MLP(nnx.Module):
    def __init__(self, config: MLPConfig, repeats: int, embed_dim: int, init: Init):
        self.activation: Activation = config.activation
        self.gate = Linear(repeats, ("embed", "mlp"), (embed_dim, config.dim), init, bias=config.bias)
        self.up = Linear(repeats, ("embed", "mlp"), (embed_dim, config.dim), init, bias=config.bias)
        self.down = Linear(repeats, ("mlp", "embed"), (config.dim, embed_dim), init, bias=config.bias)
        self.fused: FusedLinear | None = nnx.data(None)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        layers = (self.gate, self.up)
        gate, up = [layer(x) for layer in layers] if self.fused is None else self.fused(x, layers)
        gate, up = checkpoint_name(gate, GATE), checkpoint_name(up, UP)
        if platform_of(None) != "tpu" or x.shape[1] == 1:
            return self.down(gated(self.activation, gate, up))
        # XLA:TPU would compute them anew for each tile of the products that read them.
        return self.down(written(gated(self.activation, *written_gradients(gate, up))))

    def fuse(self, shards: int) -> None:
        """Compute gate and up as one product from now on."""
        self.fused = nnx.data(fused_linear((self.gate, self.up), shards))


class ScalarHead(nnx.Module):
    """Scalar head x w of reward models and critics, without a bias, as in one-label classifiers of transformers."""

    def __init__(self, embed_dim: int, init: Init):
        self.kernel = param(normal(init, (embed_dim, 1)), ("embed", "score"), "kernel")

    def __call__(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T"]:
        kernel = self.kernel[...].astype(hidden.dtype)[:, 0]
        return jnp.einsum("btd,d->bt", hidden, kernel, preferred_element_type=jnp.float32)


SLICE_AXIS, COPY_AXIS = "fsdp", "data"
"""Mesh axes that split D of the table and then rows, and that hold copies of all of it."""


def lookup(
    table: Float[Array, "V D"], tokens: Int[Array, "B T"], dtype: DTypeLike, mesh: Mesh | None
) -> Float[Array, "B T D"]:
    """table[tokens] in `dtype`."""
    if mesh is None or mesh.size == 1 or tokens.shape[0] % row_shards(mesh):
        return jnp.take(table, tokens, axis=0).astype(dtype)
    return _lookup(table, tokens, jnp.dtype(dtype), mesh)


# Shardings change step by step, by one all-to-all between rows and slices of D, and before it one between tokens and
# slices where `context` splits both; in one step XLA gathers all rows on every device. Without the sharding of rows it
# would split D in the whole model.


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _lookup(table: Array, tokens: Array, dtype: DTypeLike, mesh: Mesh) -> Array:
    parts, near = _table_axes(tokens.shape[1], table.shape[1], mesh)
    x = jnp.take(table, _placed(mesh, tokens, COPY_AXIS), axis=0).astype(dtype)
    x = _placed(mesh, _placed(mesh, x, COPY_AXIS, None, parts), COPY_AXIS, near, SLICE_AXIS)
    return _placed(mesh, _placed(mesh, x, (COPY_AXIS, SLICE_AXIS), near), row_axes(mesh), near)


def _forward(table: Array, tokens: Array, dtype: DTypeLike, mesh: Mesh) -> tuple[Array, tuple[Array, Array]]:
    return _lookup(table, tokens, dtype, mesh), (jnp.zeros_like(table, jnp.float32), tokens)


def _backward(
    dtype: DTypeLike, mesh: Mesh, saved: tuple[Array, Array], gradient: Float[Array, "B T D"]
) -> tuple[Array, None]:
    """Scatter-add in float32, of slices that travel in `dtype`. Either all copies of the table get all rows, or each
    adds its own and the tables are summed, whichever sends less."""
    zeros, tokens = saved
    parts, near = _table_axes(tokens.shape[1], zeros.shape[1], mesh)
    rows = _placed(mesh, _placed(mesh, gradient, row_axes(mesh), near), (COPY_AXIS, SLICE_AXIS), near)
    slices = _placed(mesh, _placed(mesh, rows, COPY_AXIS, near, SLICE_AXIS), COPY_AXIS, None, parts)
    ids = _placed(mesh, tokens, COPY_AXIS)
    if tokens.size <= 2 * zeros.shape[0]:
        slices, ids = _placed(mesh, slices, None, None, parts), _placed(mesh, ids)
    table = zeros.at[ids].add(slices.astype(jnp.float32), mode="drop")
    return _placed(mesh, table, "tensor", parts), None


def _table_axes(length: int, width: int, mesh: Mesh) -> tuple[tuple[str, ...], str | None]:
    """Axes that split D of the table, and the one of them that then splits the tokens of a row."""
    parts = split_axes("embed", width, mesh.shape)
    near = TOKEN_AXIS in parts and length % mesh.shape[TOKEN_AXIS] == 0
    return parts, TOKEN_AXIS if near else None


def _placed(mesh: Mesh, x: Array, *spec: str | tuple[str, ...] | None) -> Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))


_lookup.defvjp(_forward, _backward)
