"""The loss over the vocabulary of Qwen3-8B at fsdp=8, forward and gradient, apart from its model."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from posttrain.kernels.logits.token_stats import stats_vjp
from posttrain.kernels.platform import matmul, traced_for
from posttrain.plan.lowered import compile_program, vocabulary_trips
from tests.aot.bounds import GIB, HEAD_8B_GIB, HEAD_8B_PEAK_GIB
from tests.aot.slices import mesh_of, on

ROWS, LENGTH, EMBED, VOCABULARY = 8, 4096, 4096, 151936


def test_head_of_8b_at_fsdp_8() -> None:
    mesh, rows = mesh_of("v5e", "2x4", fsdp=8), (("data", "fsdp", "expert"),)

    def loss(hidden: Any, head: Any, tokens: Any, segments: Any, weight: Any) -> Any:
        def logits_of(hidden: Any) -> Any:
            return matmul(hidden, head.astype(hidden.dtype), jnp.float32)

        return stats_vjp(
            logits_of,
            hidden,
            tokens,
            segments,
            cotangents={"logps": weight},
            temperature=1.0,
            vocab_size=VOCABULARY,
            only=weight != 0,
            mesh=mesh,
        )[0]

    def gradient(hidden: Any, head: Any, *rest: Any) -> Any:
        return jax.grad(loss, argnums=(0, 1))(hidden, head.astype(jnp.float32), *rest)

    hidden, head = on(mesh, (ROWS, LENGTH, EMBED), spec=rows), on(mesh, (EMBED, VOCABULARY), spec=("fsdp", "tensor"))
    ids = on(mesh, (ROWS, LENGTH), jnp.int32, rows)
    outputs = hidden.sharding, head.sharding
    program = jax.jit(traced_for(mesh, gradient), out_shardings=outputs)
    found = compile_program(
        program.lower(hidden, head, ids, ids, on(mesh, (ROWS, LENGTH), jnp.float32, rows)), mesh.size
    )
    trips = [vocabulary_trips(mesh, ROWS, LENGTH, VOCABULARY)]
    assert found.peak / GIB <= HEAD_8B_PEAK_GIB
    loop = [c for c in found.text.collectives if c.in_dynamic_loop]
    assert [str(c) for c in loop if any(VOCABULARY in dims for dims in c.dims)] == []
    assert found.text.wire(trips) / GIB <= HEAD_8B_GIB
