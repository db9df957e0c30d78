"""Kernels in the shapes of real models compile to the end: attention with its gradient, decode, experts."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from posttrain.kernels.attention import paged
from posttrain.kernels.attention.call import Variant
from posttrain.kernels.attention.dispatch import attention
from posttrain.kernels.attention.joined import HeadLanes, NewHeads
from posttrain.kernels.grouped_matmul import grouped_matmul
from posttrain.kernels.platform import traced_for
from posttrain.plan.hlo import kernel_names
from posttrain.rollout.blocks import BLOCK
from posttrain.runtime.xla import compile_options
from tests.aot.slices import mesh_of, on

ONE_CHIP = {"v5e": "1x1", "v6e": "1x1", "v5p": "2x2x1"}


class Rows(NamedTuple):
    """Shape of an attention call of training."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int | None = None
    length: int = 4096
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    fused: bool = True
    """The backward pass is one kernel."""
    context: int = 1
    """Chips that split a row."""
    largest: bool = False
    """With the largest logits."""
    ahead: int | None = None
    """Greatest number of keys ahead of a query in its image; all of a segment if the row's length."""


ROWS = {
    "qwen3_8b": Rows(32, 8, 128),
    "qwen3_8b_long": Rows(32, 8, 128, length=8192, fused=False),
    "qwen3_8b_context": Rows(32, 8, 128, length=8192, context=4),
    "gemma2": Rows(8, 4, 256, window=4096, soft_cap=50.0),
    "gemma3_1b": Rows(4, 1, 256, window=512),
    "gemma4_global": Rows(8, 1, 512, length=2048),
    "gpt_oss": Rows(64, 8, 64, window=128, sinks=True),
    "deepseek_v3": Rows(16, 16, 192, value_dim=128),
    "llama_1b": Rows(32, 8, 64, length=384),
    "padded": Rows(32, 8, 128, length=1000),
    "gemma3_images": Rows(8, 4, 256, window=512, length=1024, ahead=255),
    "siglip": Rows(16, 16, 72, ahead=4096),
    "qwen_tower": Rows(16, 16, 80, length=1024, ahead=1024),
    "qk_clip": Rows(8, 4, 256, window=4096, soft_cap=50.0, largest=True),
}


class Decode(NamedTuple):
    """Shape of an attention call of decoding."""

    heads: int
    kv_heads: int
    head_dim: int
    rows: int = 64
    positions: int = 1024
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    value_dim: int | None = None
    """Latent attention: values are the first lanes of the keys."""

    @property
    def lanes(self) -> HeadLanes:
        start = self.head_dim if self.value_dim is None else 0
        return HeadLanes(keys=self.head_dim, start=start, values=self.value_dim or self.head_dim)


DECODE = {
    "qwen3_0.6b": Decode(16, 8, 128),
    "qwen3_8b_long": Decode(32, 8, 128, rows=16, positions=32768),
    "qwen3_30b": Decode(32, 4, 128, rows=256),
    "qwen2_7b": Decode(28, 4, 128),
    "llama_1b": Decode(32, 8, 64),
    "gemma3_1b": Decode(4, 1, 256, window=512),
    "gemma2_2b": Decode(8, 4, 256, window=4096, soft_cap=50.0),
    "gemma3_4b": Decode(8, 4, 256, window=1024),
    "gemma3_12b": Decode(16, 8, 256),
    "gpt_oss": Decode(64, 8, 64, window=128, sinks=True),
    "moonlight": Decode(16, 1, 576, value_dim=512),
    "deepseek_v3": Decode(128, 1, 576, rows=16, positions=32768, value_dim=512),
    "phi3": Decode(32, 32, 96),
}

EXPERTS = {"qwen3_30b": (16384, 2048, 768, 32), "gpt_oss": (8192, 2880, 2880, 16), "decode": (512, 2048, 768, 128)}
"""Rows, D, F, experts."""

EVERYWHERE = {"qwen3_8b", "gemma2", "gpt_oss", "moonlight", "qwen3_0.6b", "gemma3_1b", "qwen3_30b"}
"""Compiled for all generations; the others for v5e."""


def cases(table: dict[str, Any]) -> list[Any]:
    return [
        pytest.param(kind, name, id=f"{kind}-{name}")
        for kind in ONE_CHIP
        for name in table
        if kind == "v5e" or name in EVERYWHERE
    ]


@pytest.mark.parametrize(("kind", "name"), cases(ROWS))
def test_attention_and_its_gradient(kind: str, name: str) -> None:
    case = ROWS[name]
    mesh = mesh_of(kind, ONE_CHIP[kind] if case.context == 1 else "2x2", data=-1, context=case.context)
    rows, value_dim = mesh.size // case.context, case.value_dim or case.head_dim
    spec = (("data",),)

    def loss(q: Any, k: Any, v: Any, positions: Any, segments: Any, sinks: Any, images: Any) -> Any:
        images = segments if case.ahead == case.length else images
        out = attention(
            q,
            k,
            v,
            q_positions=positions,
            k_positions=positions,
            q_segments=segments,
            k_segments=segments,
            q_parents=None,
            window=case.window,
            scale=case.head_dim**-0.5,
            soft_cap=case.soft_cap,
            sinks=sinks,
            kernel="auto",
            mesh=mesh,
            images=None if case.ahead is None else (images, images),
            ahead=case.ahead or 0,
            largest=case.largest,
        )
        return jnp.sum(out.heads.astype(jnp.float32)), out.largest

    ids = on(mesh, (rows, case.length), jnp.int32, spec)
    lowered = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True)).lower(
        on(mesh, (rows, case.length, case.heads, case.head_dim), spec=spec),
        on(mesh, (rows, case.kv_heads, case.length, case.head_dim), spec=spec),
        on(mesh, (rows, case.kv_heads, case.length, value_dim), spec=spec),
        ids,
        ids,
        on(mesh, (case.heads,), jnp.float32) if case.sinks else None,
        ids,
    )
    names = kernel_names(lowered.as_text())
    backward = ("splash_mha_dkv",) if case.fused else ("splash_mha_dkv", "splash_mha_dq")
    for kernel in ("splash_mha_fwd", *backward):
        assert any(name.startswith(kernel) for name in names), f"no {kernel} in {sorted(names)}"
    assert not case.largest or len(names) == 1 + len(backward), f"the largest logits come with the output: {names}"
    compiled = lowered.compile()
    if case.ahead is not None:
        assert f"{case.length},{case.length}]" not in compiled.as_text(), "no array of all logits"


@pytest.mark.parametrize(("kind", "name"), cases(DECODE))
def test_paged_decode(kind: str, name: str) -> None:
    case, mesh = DECODE[name], mesh_of(kind, ONE_CHIP[kind], data=-1)
    devices, width, repeats, lanes = mesh.size, case.positions // BLOCK, 2, case.lanes
    plain = case.head_dim % paged.LANES == 0 and not case.sinks and case.value_dim is None
    ragged = plain and paged.ragged_refusal(case.kv_heads, case.head_dim, 2, 1) is None
    page = (BLOCK, 2 * case.kv_heads, case.head_dim) if ragged else (case.kv_heads, BLOCK, lanes.width)

    def attend(q: Any, pages: Any, table: Any, lengths: Any, new: Any, writes: Any, sinks: Any) -> Any:
        variant = Variant(window=case.window, scale=case.head_dim**-0.5, soft_cap=case.soft_cap)
        joined = (None, None) if ragged else (lanes, NewHeads(new, writes))
        return paged.paged_attention(q, pages, jnp.int32(1), table, lengths, mesh, *joined, sinks, variant)

    rows, by_row = devices * case.rows, (("data",),)
    lowered = jax.jit(traced_for(mesh, attend), donate_argnums=1).lower(
        on(mesh, (rows, 1, case.heads, case.head_dim), spec=by_row),
        on(mesh, (repeats, devices, 1025, *page), spec=(None, ("data",))),
        on(mesh, (devices, case.rows, width), jnp.int32, by_row),
        on(mesh, (devices, case.rows), jnp.int32, by_row),
        on(mesh, (rows, case.kv_heads, lanes.width), spec=by_row),
        on(mesh, (rows,), jnp.bool_, by_row),
        on(mesh, (case.heads,), jnp.float32) if case.sinks else None,
    )
    expected = "ragged_paged_attention" if ragged else "joined_attention"
    assert any(kernel.startswith(expected) for kernel in kernel_names(lowered.as_text()))
    lowered.compile()


@pytest.mark.parametrize(("kind", "name"), cases(EXPERTS))
def test_experts_and_their_gradient(kind: str, name: str) -> None:
    rows, width, hidden, experts = EXPERTS[name]
    mesh = mesh_of(kind, ONE_CHIP[kind], data=-1)

    def loss(x: Any, w: Any, sizes: Any) -> Any:
        return jnp.sum(grouped_matmul(x, w, sizes, kernel="auto", platform="tpu").astype(jnp.float32))

    # The whole problem on each device of a slice that has several.
    whole = jax.shard_map(
        jax.grad(loss, argnums=(0, 1)), mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    lowered = jax.jit(whole).lower(
        on(mesh, (rows, width)), on(mesh, (experts, width, hidden)), on(mesh, (experts,), jnp.int32)
    )
    assert lowered.as_text().count("tpu_custom_call") >= 2
    lowered.compile()


def test_a_product_gathers_the_whole_weight() -> None:
    """Of Qwen3-8B at fsdp=8: by default it is a loop of sums, each rounded to bfloat16."""
    mesh, rows = mesh_of("v5e", "2x4", fsdp=8), ("fsdp",)
    x, w = on(mesh, (8, 2048, 4096), spec=rows), on(mesh, (4096, 12288), spec=rows)

    def text(options: dict[str, Any] | None) -> str:
        product = jax.jit(lambda x, w: jnp.tanh(x @ w), out_shardings=x.sharding, compiler_options=options)
        return product.lower(x, w).compile().as_text() or ""

    assert "windowed_dot_general" in text(None)
    assert "windowed_dot_general" not in text(compile_options("tpu"))
