"""Kernels of TPU are traced, and lowered to its instructions, on a machine without one."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from posttrain.kernels.attention import dispatch
from posttrain.kernels.attention.call import AttentionCall, MaskInputs, Operands
from posttrain.kernels.grouped_matmul import megablox
from tests.kernels.attention_cases import CASES, padded_splash

ALLOWED = [export.DisabledSafetyCheck.custom_call("tpu_custom_call")]


def kernels(function: Callable[..., object], *shapes: object) -> int:
    """Number of TPU kernels in the program of `function`."""
    return (
        export.export(jax.jit(function), platforms=["tpu"], disabled_checks=ALLOWED)(*shapes)
        .mlir_module()
        .count("@tpu_custom_call")
    )


def operands(length: int, head_dim: int, value_dim: int, dtype: type, *, sinks: bool) -> Operands:
    rows, heads, kv_heads = 4, 8, 2
    shape = jax.ShapeDtypeStruct
    q = shape((rows, length, heads, head_dim), dtype)
    k, v = (shape((rows, kv_heads, length, size), dtype) for size in (head_dim, value_dim))
    places = MaskInputs(*[shape((rows, length), jnp.int32)] * 4, None)
    return Operands(q, k, v, places, shape((heads,), jnp.float32) if sinks else None)


def gradient(attend: Callable[[Operands], jax.Array]) -> Callable[[Operands], object]:
    def of(given: Operands) -> object:
        def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return jnp.sum(attend(given._replace(q=q, k=k, v=v)).astype(jnp.float32))

        return jax.grad(loss, argnums=(0, 1, 2))(given.q, given.k, given.v)

    return of


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "length", "head_dim", "value_dim", "dtype", "backward"),
    [
        ("full", 1024, 128, 128, jnp.bfloat16, 1),
        ("window", 8192, 64, 64, jnp.bfloat16, 2),
        ("soft_cap", 1024, 256, 256, jnp.bfloat16, 1),
        ("sinks", 640, 64, 64, jnp.float32, 1),
        ("all", 1024, 192, 128, jnp.bfloat16, 1),
        ("all", 1024, 512, 512, jnp.bfloat16, 1),
    ],
)
def test_splash(name: str, length: int, head_dim: int, value_dim: int, dtype: type, backward: int) -> None:
    case = CASES[name]
    given = operands(length, head_dim, value_dim, dtype, sinks=case.sinks)

    def attend(given: Operands) -> jax.Array:
        return padded_splash(given, case.variant, interpret=False).heads

    assert kernels(attend, given) == 1
    assert kernels(gradient(attend), given) == 1 + backward


def test_splash_on_a_mesh() -> None:
    mesh = Mesh(
        np.asarray(jax.devices()[:8]).reshape(2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3
    )
    case = CASES["all"]
    given = operands(1024, 128, 128, jnp.bfloat16, sinks=True)
    request = AttentionCall(
        platform="tpu",
        rows=4,
        num_queries=1024,
        num_keys=1024,
        num_heads=8,
        num_kv_heads=2,
        head_dim=128,
        value_dim=128,
        dtype="bfloat16",
        soft_cap=case.soft_cap,
        sinks=True,
        parents=False,
        same_tokens=True,
        row_shards=4,
        head_shards=2,
        token_shards=1,
        tokamax=False,
        compute_capability=None,
    )
    assert dispatch.choose_attention(request) == "splash"
    sharding = NamedSharding(mesh, PartitionSpec())
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), given)

    def attend(given: Operands) -> jax.Array:
        return dispatch.run_attention("splash", given, case.variant, request, mesh).heads

    assert kernels(gradient(attend), given) == 2


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("rows", "groups", "embed", "mlp", "dtype"), [(1000, 8, 256, 200, jnp.float32), (8192, 4, 2048, 1408, jnp.bfloat16)]
)
def test_megablox(rows: int, groups: int, embed: int, mlp: int, dtype: type) -> None:
    shape = jax.ShapeDtypeStruct
    given = shape((rows, embed), dtype), shape((groups, embed, mlp), dtype), shape((groups,), jnp.int32)

    def loss(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        return jnp.sum(megablox(False, x, w, sizes).astype(jnp.float32) ** 2)

    assert kernels(lambda *given: megablox(False, *given), *given) == 1
    assert kernels(jax.grad(loss, argnums=(0, 1)), *given) == 3
