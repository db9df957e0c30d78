"""LoRA adapters (arXiv:2106.09685) and, with a magnitude, DoRA (arXiv:2402.09353)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from posttrain.kernels.platform import matmul

Product = Callable[[Array, Array], Array]


class LoRAParam(nnx.Param):
    """Trained adapter parameter; the base stays frozen."""


class DropoutKey(nnx.Variable[Array]):
    """PRNG key of adapter dropout, set for one forward pass; not a weight."""


class Adapter(nnx.Module):
    """LoRA or DoRA adapter: gain * (W + scale A B) of a frozen W [in, out]; the gain per output is 1 without a
    magnitude.

    With a magnitude (DoRA) it is (|W| + magnitude) / |W + scale A B|, where |.| is the norm over `in` and the
    denominator carries no gradient (section 4.3 of DoRA). The magnitude parameter is the difference to |W|: like B, 0
    is the base model.

    Arrays have the leading dimensions of W. `lora_scale` is 0 in layers without an adapter.
    """

    def __init__(
        self, arrays: Mapping[str, Array], dims: Mapping[str, tuple[str, ...]], *, dropout: float, rslora: bool
    ):
        self.rslora = rslora
        self.dropout = dropout
        self.lora_a = LoRAParam(arrays["lora_a"], dims=dims["lora_a"], role="kernel")
        self.lora_b = LoRAParam(arrays["lora_b"], dims=dims["lora_b"], role="kernel")
        self.lora_scale = nnx.Param(arrays["lora_scale"], dims=dims["lora_scale"], role="buffer")
        self.lora_magnitude: Any = nnx.data(None)
        if "lora_magnitude" in arrays:
            self.lora_magnitude = LoRAParam(arrays["lora_magnitude"], dims=dims["lora_magnitude"], role="magnitude")
        self.key: Any = nnx.data(None)
        self.fixed_gain: Any = nnx.data(None)

    def down(self, x: Float[Array, "*B in"], product: Product = matmul) -> Float[Array, "*B r"]:
        """x A, with dropout on x in training."""
        if self.key is not None:
            mask = jax.random.bernoulli(self.key[...], 1.0 - self.dropout, x.shape)
            x = jnp.where(mask, x / (1.0 - self.dropout), jnp.zeros((), x.dtype))
        return product(x, self.lora_a[...].astype(x.dtype))

    def own(self, low: Float[Array, "*B r"]) -> Float[Array, "*B r"]:
        """All of it: every row has this adapter."""
        return low

    def added(
        self,
        y: Float[Array, "*B out"],
        low: Float[Array, "*B r"],
        kernel: Float[Array, "*E in out"] | None,
        product: Product = matmul,
        group: Int[Array, " B"] | None = None,
    ) -> Float[Array, "*B out"]:
        """Adapted output from y = x W and low = x A; `group`: expert of each row."""
        y = y + product(low.astype(y.dtype), self.scaled_b(y.dtype))
        if self.lora_magnitude is None:
            return y
        gain = self.gain(kernel).astype(y.dtype)
        return y * (gain.at[group].get(mode="fill", fill_value=0) if group is not None else _as_row(gain, y.ndim))

    def scaled_b(self, dtype: DTypeLike) -> Float[Array, "*L r out"]:
        """scale * B: the cheapest factor to scale."""
        b = self.lora_b[...].astype(jnp.float32)
        return (b * _trailing(self.lora_scale[...], b.ndim)).astype(dtype)

    def delta(self) -> Float[Array, "*L in out"]:
        """scale * A B in float32."""
        a = self.lora_a[...].astype(jnp.float32)
        return jnp.matmul(a, self.scaled_b(a.dtype), precision=jax.lax.Precision.HIGHEST)

    @property
    def reads_kernel(self) -> bool:
        """Return True if `added` needs the kernel, for a gain that has not been fixed."""
        return self.lora_magnitude is not None and self.fixed_gain is None

    def gain(self, kernel: Float[Array, "*L in out"] | None) -> Float[Array, "*L out"]:
        """DoRA gain in float32, without forming W + scale A B: |W|^2 + 2 sum B (A^T W) + sum B (A^T A B)."""
        if self.fixed_gain is not None:
            return self.fixed_gain[...]
        assert kernel is not None
        a, b = (jax.lax.stop_gradient(x) for x in (self.lora_a[...].astype(jnp.float32), self.scaled_b(jnp.float32)))
        kernel = kernel.astype(jnp.float32)
        squares = jnp.sum(kernel * kernel, axis=-2)
        cross = _dot(a.mT, kernel) + 0.5 * _dot(_dot(a.mT, a), b)
        norm = jnp.sqrt(jnp.maximum(squares + 2.0 * jnp.sum(b * cross, axis=-2), 0.0))
        usable = (norm > 0.0) & (_trailing(self.lora_scale[...], norm.ndim) != 0.0)
        magnitude = jnp.sqrt(squares) + self.lora_magnitude[...].astype(jnp.float32)
        return jnp.where(usable, magnitude / jnp.where(usable, norm, 1.0), 1.0)

    def fix_gain(self, kernel: Float[Array, "*L in out"]) -> None:
        """Precompute the gain once, for kernel and adapter that no longer change, instead of in each call."""
        if self.reads_kernel:
            dims = self.lora_magnitude.get_metadata("dims")
            self.fixed_gain = nnx.Variable(self.gain(kernel), dims=dims)

    def merged(self, kernel: Float[Array, "*L in out"]) -> Float[Array, "*L in out"]:
        """gain * (W + scale A B), computed in float32 and returned in the dtype of W."""
        wide = kernel.astype(jnp.float32) + self.delta()
        if self.lora_magnitude is not None:
            wide = wide * self.gain(kernel)[..., None, :]
        return wide.astype(kernel.dtype)

    def unmerged(self, kernel: Float[Array, "*L in out"]) -> Float[Array, "*L in out"]:
        """Recover W from the result of `merged`; for DoRA the gain must have been fixed before merging."""
        wide = kernel.astype(jnp.float32)
        if self.lora_magnitude is not None:
            assert self.fixed_gain is not None
            wide = wide / self.fixed_gain[...][..., None, :]
        return (wide - self.delta()).astype(kernel.dtype)


class RowSlots(nnx.Variable[Array]):
    """Slot of each row of a batch, set for one forward pass; not a weight."""


class AdapterStack(nnx.Module):
    """LoRA adapters of one matrix in `count` slots, of which each row of a batch uses one or none: y + m(x A) B.

    A [in, count * r] and B [count * r, out] have the adapters side by side, B times its scale, lower ranks padded with
    zeros; the mask m keeps the columns of the row's own slot. One product reads all of them once, however many rows
    there are: fewer bytes than A and B of every row as soon as there are as many rows as slots.
    """

    def __init__(self, arrays: Mapping[str, Array], dims: Mapping[str, tuple[str, ...]], *, count: int):
        self.count = count
        self.lora_a = nnx.Param(arrays["lora_a"], dims=dims["lora_a"])
        self.lora_b = nnx.Param(arrays["lora_b"], dims=dims["lora_b"])
        self.rows: Any = nnx.data(None)

    reads_kernel = False

    def fix_gain(self, kernel: Float[Array, "*L in out"]) -> None:
        """None of these adapters has a gain."""

    def down(self, x: Float[Array, "B *T in"], product: Product = matmul) -> Float[Array, "B *T r"]:
        """m(x A)"""
        return self.own(product(x, self.lora_a[...].astype(x.dtype)))

    def added(
        self, y: Float[Array, "B *T out"], low: Float[Array, "B *T r"], kernel: Any, product: Product = matmul
    ) -> Float[Array, "B *T out"]:
        """Adapted output from y = x W and low = m(x A), without the kernel."""
        return y + product(low.astype(y.dtype), self.scaled_b(y.dtype))

    def scaled_b(self, dtype: DTypeLike) -> Float[Array, "*L r out"]:
        return self.lora_b[...].astype(dtype)

    def own(self, low: Float[Array, "B *T r"]) -> Float[Array, "B *T r"]:
        """Columns of each row's own slot; 0 elsewhere, whatever the adapter there gives."""
        assert self.rows is not None, "choose_slots comes first"
        slots = jax.lax.broadcasted_iota(jnp.int32, low.shape, low.ndim - 1) // (low.shape[-1] // self.count)
        rows = self.rows[...].reshape(-1, *[1] * (low.ndim - 1))
        return jnp.where(slots == rows, low, jnp.zeros((), low.dtype))


def choose_slots(model: nnx.Module, slots: Int[Array, " B"] | None) -> None:
    """Give each row of the next forward pass the adapters of its slot; -1: none. None where the model has no slots."""
    for _, node in nnx.iter_graph(model):
        if isinstance(node, AdapterStack):
            assert slots is not None, "the model has adapters in slots"
            lead = node.lora_a.shape[:-2]
            node.rows = RowSlots(jnp.broadcast_to(slots, (*lead, *slots.shape)), dims=())


def column_norms(kernel: Float[Array, "*L in out"]) -> Float[Array, "*L out"]:
    """Norm of each column (over `in`) in float32."""
    return jnp.sqrt(jnp.sum(jnp.square(kernel.astype(jnp.float32)), axis=-2))


def _dot(x: Float[Array, "*L i j"], y: Float[Array, "*L j k"]) -> Float[Array, "*L i k"]:
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)


def _trailing(scale: Float[Array, "*L"], ndim: int) -> Array:
    """Append dimensions of 1 up to `ndim`."""
    return scale.reshape(scale.shape + (1,) * (ndim - scale.ndim))


def _as_row(gain: Float[Array, " out"], ndim: int) -> Array:
    return gain.reshape((1,) * (ndim - 1) + gain.shape)


def has_dropout(model: nnx.Module) -> bool:
    return any(isinstance(node, Adapter) and node.dropout > 0.0 for _, node in nnx.iter_graph(model))


def without_dropout(model: nnx.Module) -> None:
    """Disable adapter dropout."""
    for _, node in nnx.iter_graph(model):
        if isinstance(node, Adapter):
            node.dropout = 0.0


def drop(model: nnx.Module, key: Array) -> None:
    """Enable adapter dropout for one training pass, with a separate key per layer."""
    nodes = ((".".join(map(str, path)), node) for path, node in nnx.iter_graph(model) if isinstance(node, Adapter))
    adapters = dict(sorted({path: node for path, node in nodes if node.dropout > 0.0}.items()))
    for index, adapter in enumerate(adapters.values()):
        keys = jax.random.split(jax.random.fold_in(key, index), adapter.lora_scale.shape[0])
        adapter.key = DropoutKey(keys, dims=("layers",))
