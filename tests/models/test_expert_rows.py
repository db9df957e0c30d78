"""Expert parallelism of a layer: the sum over all experts, however the router spreads the tokens; no row is lost."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array
from numpy.testing import assert_allclose, assert_array_equal

from posttrain.config import GroupedKernel, LoRA, MeshSection, Quantize
from posttrain.mesh import make_mesh
from posttrain.models import decoder, moe
from posttrain.models.config import Compute
from posttrain.models.hf import config_from_init
from posttrain.models.layers import gated
from posttrain.models.moe import NO_EXPERT, Experts, ExpertStack, MoE, Sorted, capacity
from posttrain.models.quant import quantized_shape
from posttrain.weights.state import ModelWeights
from tests.mixtures import mixture_config, mixture_model
from tests.often import often
from tests.tiny import random_model
from tests.weights.adapted import MOE, trained

TOKENS, TOP_K, NUM_EXPERTS, EMBED = 64, 3, 8, 32
Layer = Callable[[Experts, Array, Array, Array], Array]


def routing(kind: str) -> np.ndarray:
    """Experts of each token."""
    draw = np.random.default_rng(3)
    experts = np.argsort(draw.random((TOKENS, NUM_EXPERTS)), axis=1)[:, :TOP_K]
    if kind == "one expert":
        return np.full_like(experts, 5)
    if kind == "one device":
        return np.broadcast_to(np.asarray([0, 0, 1]), experts.shape)
    if kind == "mostly one expert":
        experts[::2] = 5
    if kind == "some of none":
        experts[::3] = NO_EXPERT
    return experts


KINDS = ("even", "one expert", "mostly one expert", "one device", "some of none")
MESHES = {
    "expert=2": MeshSection(fsdp=2, expert=2, tensor=2),
    "expert=4": MeshSection(data=2, fsdp=1, expert=4),
    "expert=8": MeshSection(fsdp=1, expert=8),
}
ADAPTERS = {
    "full": None,
    "lora": LoRA(rank=2, targets=("experts",)),
    "dora": LoRA(rank=2, targets=("experts",), dora=True),
}


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "TILE", 8)


@functools.cache
def experts_of(adapter: str) -> tuple[Any, Any]:
    """Experts of one layer: graph and arrays."""
    lora = ADAPTERS[adapter]
    if lora is None:
        found = mixture_model(mixture_config(num_layers=1, num_dense=0))
    else:
        config = config_from_init(MOE | {"num_experts": NUM_EXPERTS})
        found = trained(random_model(config, Compute.of(jnp.float32), dtype=jnp.float32, seed=0), lora)
    layer = found.stages[0].blocks[0].mlp
    assert isinstance(layer, MoE)
    graph, state = nnx.split(layer.experts)
    return graph, jax.tree.map(lambda w: w[0], state)


def summed_over_all(layer: Experts, x: Array, experts: Array, weights: Array) -> Array:
    """Slow twin: every expert on every token."""
    biases = {"gate": layer.gate_bias, "up": layer.up_bias, "down": layer.down_bias}
    merged = {name: layer.merged(name) for name in layer.matrices()}

    def product(x: Array, name: str, e: int) -> Array:
        bias = biases[name]
        return x @ merged[name][e] + (0 if bias is None else bias[e][None])

    total = jnp.zeros_like(x)
    for e in range(NUM_EXPERTS):
        weight = jnp.sum(jnp.where(experts == e, weights, 0), axis=1, keepdims=True)
        hidden = gated(layer.config.activation, product(x, "gate", e), product(x, "up", e))
        total += weight * product(hidden, "down", e)
    return total


def result(adapter: str, layer: Layer) -> Callable[[str], Any]:
    """Output and gradients by routing, of one program."""
    graph, state = experts_of(adapter)
    draw = np.random.default_rng(0)
    x, d_out = (jnp.asarray(draw.normal(size=(TOKENS, EMBED)), jnp.float32) for _ in range(2))
    weights = jnp.asarray(draw.random((TOKENS, TOP_K)), jnp.float32)

    @jax.jit
    def run(experts: Array) -> Any:
        def function(state: Any, x: Array, weights: Array) -> Array:
            return layer(nnx.merge(graph, state), x, experts, weights)

        out, pull = jax.vjp(function, state, x, weights)
        return out, pull(d_out)

    return lambda kind: run(jnp.asarray(routing(kind)))


@functools.cache
def expected(adapter: str) -> Callable[[str], Any]:
    return functools.cache(result(adapter, summed_over_all))


def assert_same(found: Any, wanted: Any) -> None:
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        # `lora_scale` is never trained: one number, a sum of many that cancel.
        if "lora_scale" not in str(path):
            assert_allclose(a, b, atol=1e-5 * max(1.0, np.abs(b).max()), rtol=0, err_msg=str(path))


@pytest.mark.parametrize(
    ("adapter", "mesh"),
    often([(adapter, mesh) for adapter in ADAPTERS for mesh in MESHES], ("full", "expert=4")),
)
def test_every_mesh_and_routing_gives_the_sum_over_all_experts(adapter: str, mesh: str) -> None:
    compute = Compute(dtype=jnp.dtype(jnp.float32), mesh=make_mesh(MESHES[mesh]))
    found = result(adapter, lambda layer, *tokens: layer(*tokens, compute))
    for kind in KINDS:
        assert_same(found(kind), expected(adapter)(kind))


@pytest.mark.parametrize(
    "section",
    [pytest.param(None, marks=pytest.mark.thorough), MESHES["expert=4"]],
    ids=["one device", "expert=4"],
)
@pytest.mark.parametrize("kernel", [pytest.param("megablox", marks=pytest.mark.thorough), "ragged_dot"])
def test_undefined_rows_reach_nothing(kernel: GroupedKernel, section: MeshSection | None) -> None:
    """The kernel leaves rows beyond the groups as memory was: here NaN."""
    mesh = None if section is None else make_mesh(section)
    compute = Compute(dtype=jnp.dtype(jnp.float32), mesh=mesh, grouped_matmul=kernel)
    found = result("lora", lambda layer, *tokens: layer(*tokens, compute))("some of none")
    assert_same(found, expected("lora")("some of none"))


def test_rows_of_all_devices_and_rounds_are_all_assignments() -> None:
    draw = np.random.default_rng(1)
    sources, here, size = 4, 2, 24
    experts = draw.integers(-1, NUM_EXPERTS, (sources, TOKENS // sources, TOP_K))
    each = [Sorted.of(jnp.asarray(e), NUM_EXPERTS) for e in experts]
    length = experts[0].size
    together = Sorted(
        jnp.concatenate([s.order + n * length for n, s in enumerate(each)]), jnp.concatenate([s.counts for s in each])
    )
    seen: list[tuple[int, int]] = []
    for first in range(0, NUM_EXPERTS, here):
        total = int(together.total(first, here))
        for start in range(0, total, size):
            rows = together.rows(first, here, start, size)
            used = np.asarray(rows.used)
            assert used.sum() == np.asarray(rows.sizes).sum() == min(size, total - start)
            assert_array_equal(np.repeat(np.arange(here), rows.sizes), np.asarray(rows.expert)[used])
            assignment, expert = np.asarray(rows.assignment)[used], first + np.asarray(rows.expert)[used]
            seen += zip(assignment.tolist(), expert.tolist(), strict=True)
    flat = experts.reshape(-1).tolist()
    assert sorted(seen) == [(i, e) for i, e in enumerate(flat) if e != NO_EXPERT]


def test_the_buffer_does_not_grow_with_the_expert_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "TILE", 512)
    rows_per_device = 4096 * 8
    assert {capacity(sources * rows_per_device, sources) for sources in (2, 4, 8, 16)} == {40960}
    assert capacity(240, 8) == 240


LAYERS = 3
SAMPLERS = {
    "one device": None,
    "expert=2, tensor=2": MeshSection(data=2, fsdp=1, expert=2, tensor=2),
    "expert=8": MeshSection(fsdp=1, expert=8),
}
"""Meshes without `fsdp`, as those of samplers."""


@functools.cache
def experts_of_layers(adapter: str) -> tuple[Any, Any]:
    """Experts of several layers: graph and arrays."""
    lora = ADAPTERS[adapter]
    if lora is None:
        found = mixture_model(mixture_config(num_layers=LAYERS, num_dense=0, windows=(None,)))
    else:
        config = config_from_init(MOE | {"num_experts": NUM_EXPERTS, "num_hidden_layers": LAYERS})
        found = trained(random_model(config, Compute.of(jnp.float32), dtype=jnp.float32, seed=0), lora)
    layer = found.stages[0].blocks[0].mlp
    assert isinstance(layer, MoE)
    layer.experts.fix_gains()
    return nnx.split(layer.experts)


def megablox_on(sampler: str) -> Compute:
    section = SAMPLERS[sampler]
    mesh = None if section is None else make_mesh(section)
    return Compute(dtype=jnp.dtype(jnp.float32), mesh=mesh, grouped_matmul="megablox")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("adapter", "sampler"),
    often([(adapter, sampler) for adapter in ADAPTERS for sampler in SAMPLERS], ("full", "expert=2, tensor=2")),
)
def test_a_layer_reads_its_own_experts_of_a_stack(adapter: str, sampler: str) -> None:
    compute, (graph, state) = megablox_on(sampler), experts_of_layers(adapter)
    whole = nnx.merge(graph, state)
    whole.read_stacks(compute)
    own, stacks, others = nnx.split(whole, ExpertStack, ...)
    assert len(nnx.to_flat_state(stacks)) == 3
    draw = np.random.default_rng(0)
    x = jnp.asarray(draw.normal(size=(TOKENS, EMBED)), jnp.float32)
    weights = jnp.asarray(draw.random((TOKENS, TOP_K)), jnp.float32)

    @jax.jit
    def run(number: Array, experts: Array) -> list[Array]:
        of_layer, sliced = (jax.tree.map(lambda w: w[number], arrays) for arrays in (others, state))
        out = nnx.merge(own, stacks, of_layer)(x, experts, weights, compute)
        return [out, summed_over_all(nnx.merge(graph, sliced), x, experts, weights)]

    for number in range(LAYERS):
        assert_same(*run(jnp.int32(number), jnp.asarray(routing("mostly one expert"))))


@pytest.mark.thorough
def test_the_scan_over_layers_leaves_stacks_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """For decoding, behind a dense layer. Slow twin: training's pass, which slices them."""
    monkeypatch.setattr(decoder, "SPLIT_LAYERS", {})
    model = mixture_model(mixture_config(windows=(None,)), grouped_matmul="megablox")
    weights, ones = ModelWeights(model), jnp.ones((1, 8), jnp.int32)
    positions = jnp.arange(8, dtype=jnp.int32)[None]

    @jax.jit
    def run(arrays: Any) -> list[Array]:
        prepared, twin = weights.bind(arrays).for_decoding(), weights.bind(arrays)
        assert prepared.stages[1].repeats == 2
        twin.compute = replace(twin.compute, grouped_matmul="auto")
        return [model(7 * positions, positions, ones)[0] for model in (prepared, twin)]

    assert_same(*run(weights.read()))


def test_experts_that_a_layer_makes_first_are_sliced() -> None:
    """Those of another dtype, quantized, or gathered; and those of other kernels."""
    plain = megablox_on("one device")

    def read(compute: Compute, kind: Quantize | None = None) -> int:
        def made() -> Experts:
            layer = nnx.merge(*experts_of_layers("full"))
            if kind is not None:
                for name, matrix in layer.matrices().items():
                    setattr(layer, name, quantized_shape(matrix, kind))
            layer.read_stacks(compute)
            return layer

        return sum(isinstance(matrix, ExpertStack) for matrix in nnx.eval_shape(made).matrices().values())

    assert read(plain) == 3
    assert read(plain, "int8") == read(replace(plain, dtype=jnp.dtype(jnp.bfloat16))) == 0
    assert read(replace(plain, mesh=make_mesh(MeshSection(fsdp=2, expert=4)))) == 0
    assert read(replace(plain, grouped_matmul="auto")) == read(replace(plain, grouped_matmul="ragged_dot")) == 0
