"""Rows, variants and implementations that the tests of attention share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from posttrain.kernels.attention import blockwise, fused
from posttrain.kernels.attention.call import Attended, MaskInputs, Operands, Variant, full_attention, visible
from posttrain.kernels.attention.fused import cudnn_arguments, tokamax

ROWS, LENGTH, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 2, 384, 4, 2, 8, 12
LENGTHS = ((200, 150), (384,))
"""Sequences of each row; what is left is padding."""


class Case(NamedTuple):
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    largest: bool = False

    @property
    def variant(self) -> Variant:
        return Variant(window=self.window, scale=0.3, soft_cap=self.soft_cap, largest=self.largest)


CASES = {
    "full": Case(),
    "window": Case(window=130),
    "soft_cap": Case(soft_cap=2.0),
    "sinks": Case(sinks=True),
    "all": Case(window=130, soft_cap=2.0, sinks=True),
}


class Rows(NamedTuple):
    q: Any
    k: Any
    v: Any
    sinks: Any
    positions: Any
    segments: Any


def rows(lengths: tuple[tuple[int, ...], ...] = LENGTHS, length: int = LENGTH, kv_heads: int = KV_HEADS) -> Rows:
    rng = np.random.default_rng(0)
    shape = len(lengths), length
    q = rng.normal(size=(*shape, HEADS, HEAD_DIM)).astype(np.float32)
    k = rng.normal(size=(shape[0], kv_heads, length, HEAD_DIM)).astype(np.float32)
    v = rng.normal(size=(shape[0], kv_heads, length, VALUE_DIM)).astype(np.float32)
    positions, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for row, parts in enumerate(lengths):
        start = 0
        for number, size in enumerate(parts, 1):
            positions[row, start : start + size] = np.arange(size)
            segments[row, start : start + size] = number
            start += size
    return Rows(q, k, v, rng.normal(size=HEADS).astype(np.float32), positions, segments)


def reference(operands: Operands, variant: Variant) -> Attended:
    q, k, v, places, sinks = operands
    mask, tokens = visible(*places, variant.window), places.q_segments > 0 if variant.largest else None
    return full_attention(q, k, v, mask, scale=variant.scale, soft_cap=variant.soft_cap, sinks=sinks, tokens=tokens)


def padded_splash(operands: Operands, variant: Variant, *, interpret: bool = True) -> Attended:
    """Splash attention on one device."""
    length, num_heads = operands.q.shape[1:3]
    padded, head_dim = fused.splash_length(length), max(operands.q.shape[3], operands.v.shape[3])
    kernel = fused.make_splash(padded, num_heads, head_dim, variant, shards=1, interpret=interpret)
    return fused.splash(operands, kernel, variant=variant, padding=padded - length)


def through_jax(operands: Operands, variant: Variant) -> Attended:
    """The call of cuDNN, served by XLA."""
    out = jax.nn.dot_product_attention(**cudnn_arguments(operands, variant), implementation="xla")
    return Attended(out[..., : operands.v.shape[3]])


def by_tokamax(operands: Operands, variant: Variant) -> Attended:
    return Attended(tokamax(operands, variant, implementation="xla"))


IMPLEMENTATIONS: dict[str, Callable[[Operands, Variant], Attended]] = {
    "reference": reference,
    "blockwise": functools.partial(blockwise.blockwise, same_tokens=True, block=128, short=False),
    "short_rows": functools.partial(blockwise.blockwise, same_tokens=True, block=128, short=True),
    "short_rows_uneven": functools.partial(blockwise.blockwise, same_tokens=True, block=152, short=True),
    "blockwise_uneven": functools.partial(blockwise.blockwise, same_tokens=False, block=100, short=False),
    "splash": padded_splash,
    "splash_split": padded_splash,
    "cudnn": through_jax,
    "tokamax": by_tokamax,
}


@functools.cache
def compiled(name: str, case: Case) -> Callable[..., tuple[jax.Array, tuple[jax.Array, ...], jax.Array | None]]:
    """(rows, gradient of the output) -> output, gradients of q, k, v and the sinks, the largest logits. Compiled once
    for all tests."""

    def run(rows: Rows, d_out: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...], jax.Array | None]:
        def out(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> tuple[jax.Array, Any]:
            places = MaskInputs(rows.positions, rows.positions, rows.segments, rows.segments, None)
            operands = Operands(q, k, v, places, sinks if case.sinks else None)
            heads, largest = IMPLEMENTATIONS[name](operands, case.variant)
            return heads, largest

        # The strictness of this suite is not that of other libraries.
        with jax.numpy_rank_promotion("allow" if name == "tokamax" else "raise"):
            value, pull, largest = jax.vjp(out, *(jnp.asarray(x) for x in rows[:4]), has_aux=True)
            return value, pull(d_out.astype(value.dtype)), largest

    return jax.jit(run)


def run(
    name: str, case: Case, rows: Rows, d_out: np.ndarray
) -> tuple[np.ndarray, tuple[np.ndarray, ...], jax.Array | None]:
    out, gradients, largest = compiled(name, case)(rows, d_out)
    return np.asarray(out), tuple(np.asarray(x) for x in gradients), largest
