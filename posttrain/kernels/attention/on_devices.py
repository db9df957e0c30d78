"""Attention kernels on a mesh: each device runs the queries of its own rows, heads and tokens (`jax.shard_map`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from posttrain.kernels.attention.call import AttentionCall, MaskInputs, Operands
from posttrain.kernels.platform import HEAD_AXIS, TOKEN_AXIS, row_axes


def on_devices(
    kernel: Callable[..., Array],
    operands: Operands,
    call: AttentionCall,
    mesh: Mesh | None,
    tables: Any = None,
    table_specs: Any = None,
) -> Array:
    """Run a kernel that the compiler cannot partition.

    Where `call` splits the tokens of a row, keys and values of the whole row are gathered, and their gradients
    reduce-scattered. `tables`: second argument of the kernel, laid out by `table_specs`.
    """
    arguments = (operands,) if tables is None else (operands, tables)
    if mesh is None or mesh.size == 1:
        return kernel(*arguments)
    repeats = call.split_kv_heads // call.num_kv_heads
    if repeats > 1:
        k, v = (jnp.repeat(x, repeats, axis=1) for x in (operands.k, operands.v))
        operands = operands._replace(k=k, v=v)
    rows, heads = row_axes(mesh), HEAD_AXIS if HEAD_AXIS in mesh.axis_names else None
    tokens = TOKEN_AXIS if call.token_shards > 1 else None
    queries, keys = PartitionSpec(rows, tokens, heads), PartitionSpec(rows, heads, tokens)
    specs = queries, keys, keys, PartitionSpec(rows, tokens), PartitionSpec(heads)

    def local(parts: tuple[Any, ...], *tables: Any) -> Array:
        operands = Operands(*parts)
        return kernel(operands if tokens is None else _with_all_keys(operands, tokens), *tables)

    split = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs, table_specs)[: len(arguments)],
        out_specs=queries,
        check_vma=False,
    )
    return split(tuple(operands), *arguments[1:])


def _with_all_keys(operands: Operands, axis: str) -> Operands:
    """Keys and values of whole rows, for a device's own queries."""
    k, v = (jax.lax.all_gather(x, axis, axis=2, tiled=True) for x in (operands.k, operands.v))
    of = operands.mask_inputs
    positions, segments = (jax.lax.all_gather(x, axis, axis=1, tiled=True) for x in (of.k_positions, of.k_segments))
    mask_inputs = MaskInputs(of.q_positions, positions, of.q_segments, segments, of.q_parents)
    return operands._replace(k=k, v=v, mask_inputs=mask_inputs)
