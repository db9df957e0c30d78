"""Decoding of Qwen3-0.6B on a v5e: kernels, memory, and bytes per token on each mesh."""

from __future__ import annotations

import math

import pytest

from posttrain.plan.hlo import Collective
from posttrain.plan.lowered import compile_program
from posttrain.plan.machine import CHIPS
from posttrain.plan.phases import RolloutShapes
from posttrain.weights.state import ModelWeights
from tests.aot.bounds import DECODE, GIB, MIB
from tests.aot.slices import QWEN3, mesh_of, model

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
