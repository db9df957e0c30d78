"""Decoding on a v5e: kernels, memory and bytes per token of Qwen3-0.6B on each mesh; experts that no token copies."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import pytest

from posttrain.config import DecodeAttention, RolloutSection
from posttrain.kernels.platform import CHIPS
from posttrain.models.moe import Experts
from posttrain.plan.hlo import Buffer, Collective
from posttrain.plan.lowered import bytes_on_device, compile_program
from posttrain.plan.sampling import RolloutShapes
from posttrain.weights.state import ModelWeights
from tests.aot.bounds import DECODE, GIB, LAYOUT_MIB, MIB
from tests.aot.slices import FAMILIES, QWEN3, SMALL, mesh_of, model
from tests.often import often

MESHES = {
    "one": ("1x1", {}),
    "data=8": ("2x4", {"data": 8}),
    "tensor=4": ("2x2", {"tensor": 4}),
    "fsdp=8": ("2x4", {"fsdp": 8}),
}


def of_parameter(collective: Collective, parameters: set[tuple[int, ...]]) -> bool:
    """True if an operand or a result is a parameter, or one layer of a stacked one."""
    return any(tuple(size for size in dims if size > 1) in parameters for dims in collective.dims)


@pytest.mark.parametrize("name", MESHES)
def test_decode(name: str) -> None:
    shape, axes = MESHES[name]
    mesh, bound = mesh_of("v5e", shape, **axes), DECODE[name]
    made = model(QWEN3, mesh)
    rollout = RolloutShapes(made, mesh, slots=64, max_length=1024, steps=32, max_tokens=512, memory=CHIPS["v5e"].memory)
    assert rollout.runner.pool_shapes(rollout.loaded).layout == "ragged"
    found = compile_program(rollout.lower_decode(), mesh.size)
    assert set(found.mosaic) == bound.kernels
    assert found.peak / GIB <= bound.peak_gib
    loop = [c for c in found.text.collectives if c.in_dynamic_loop]
    once = [c for c in found.text.collectives if not c.in_dynamic_loop]
    shapes = [dims for _, _, dims in ModelWeights(made).shapes()]
    # Vectors of a layer's norms have the sizes of activations.
    matrices = {dims[-2:] for dims in shapes if math.prod(dims[-2:]) > made.config.embed_dim} | set(shapes)
    assert [str(c) for c in loop if of_parameter(c, matrices)] == []
    vocabulary = made.config.vocab_size
    assert [str(c) for c in loop if any(vocabulary in dims and len(dims) > 1 for dims in c.dims)] == []
    assert {c.kind for c in loop} <= bound.kinds
    assert sum(c.wire * c.executions() for c in loop) / MIB <= bound.loop_mib
    assert sum(c.wire * c.executions() for c in once) / MIB <= bound.once_mib


@pytest.mark.parametrize("slices", [False, True], ids=["stacks", "slices"])
def test_no_token_copies_experts(slices: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read from the stacks of all layers, of which no slice is made, nor another layout: of the 192 columns on
    a device, which XLA stores transposed, as they would be padded to 256. Slow twin: slices of the stacks."""
    if slices:
        monkeypatch.setattr(Experts, "read_stacks", lambda self, compute: None)
    mesh = mesh_of("v5e", "2x2", expert=2, tensor=2)
    made = model(SMALL | {"model_type": "qwen3_moe"} | FAMILIES["qwen3_moe"] | {"moe_intermediate_size": 384}, mesh)
    rollout = RolloutShapes(made, mesh, slots=8, max_length=512, steps=8, max_tokens=128, memory=CHIPS["v5e"].memory)
    found = compile_program(rollout.lower_decode(), mesh.size)
    experts = [m for m in found.text.made if sorted(m.buffer.dims[-3:]) == [4, 192, 512]]
    copies = [f"{m.op} {m.buffer}" for m in experts if m.loops or m.op == "copy"]
    assert bool(copies) == slices, copies


@pytest.mark.parametrize(
    ("family", "layout"),
    often([("deepseek_v3", "auto"), ("gpt_oss", "auto"), ("gpt_oss", "gather")], ("gpt_oss", "auto")),
)
def test_no_dispatch_copies_the_pool(family: str, layout: DecodeAttention) -> None:
    """Neither once nor at every token: the kernel reads pages in place and writes new positions. Slow twin: a gather
    and a scatter, for which the compiler lays the pool out anew."""
    mesh = mesh_of("v5e", "2x2", data=2, tensor=2)
    made = model(SMALL | {"model_type": family} | FAMILIES[family] | {"sliding_window": 4096}, mesh)
    made.compute = replace(made.compute, decode_attention=layout)
    # More than vector memory, into which the compiler would copy a pool, also that of windows.
    sizes: dict[str, Any] = {"slots": 128, "max_length": 8192, "steps": 8, "max_tokens": 128}
    rollout = RolloutShapes(made, mesh, **sizes, memory=CHIPS["v5e"].memory)
    pool = rollout.runner.pool_shapes(rollout.loaded)
    assert pool.layout == ("joined" if layout == "auto" else layout)
    found = compile_program(rollout.lower_decode(), mesh.size)
    assert ("joined_attention" in found.mosaic) == (layout == "auto")
    layers = {math.prod(x.sharding.shard_shape(x.shape)[3:]) * x.shape[2] for x in jax.tree.leaves(pool)}
    copies = [f"{m.op} {m.buffer}" for m in found.text.made if m.op.startswith("copy") and pool_sized(m.buffer, layers)]
    assert bool(copies) == (layout == "gather"), copies


def pool_sized(buffer: Buffer, layers: set[int]) -> bool:
    """True for one layer's pages, or those of several."""
    return any(math.prod(buffer.dims) % layer == 0 for layer in layers)


def test_laying_weights_out_takes_no_second_copy() -> None:
    """Beside the trainer's weights and those for sampling the program needs less than the table on one device."""
    mesh = mesh_of("v5e", "2x4", fsdp=8)
    sizes = {"slots": 8, "max_length": 128, "steps": 4, "max_tokens": 64, "memory": CHIPS["v5e"].memory}
    rollout = RolloutShapes(model(QWEN3, mesh), mesh, **sizes, settings=RolloutSection(tensor=2))  # type: ignore[arg-type]
    found = compile_program(rollout.layout.lowered, mesh.size)
    assert found.arguments >= bytes_on_device(rollout.loaded.arrays)
    assert (found.made - bytes_on_device(rollout.weights.derived)) / MIB <= LAYOUT_MIB < 148
