"""Weights laid out for sampling: the samples of one device on every mesh, and no weight that travels per token."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from posttrain.config import LoRA, MeshSection, SamplerTensor
from posttrain.errors import ConfigError
from posttrain.kernels.platform import CHIPS
from posttrain.mesh import make_mesh, param_sharding
from posttrain.models import decoder, moe
from posttrain.models.config import Compute
from posttrain.models.decoder import Decoder
from posttrain.models.layers import FusedLinear
from posttrain.plan.lowered import model_of
from posttrain.rollout import decode_weights
from posttrain.rollout.decode_weights import DecodeLayout, Loaded, choose_placement
from posttrain.rollout.engine import NativeEngine
from posttrain.train.programs import placed_shapes
from posttrain.weights.lora import attach_lora
from posttrain.weights.quantize import quantize_model
from posttrain.weights.state import ModelWeights
from tests.aot.slices import QWEN3, QWEN3_8B, QWEN3_30B
from tests.mixtures import mixture_config, mixture_model
from tests.random_families import random_family_model
from tests.rollout.engines import assert_same, make_engine, requests
from tests.rollout.test_sharded import collectives_of_loops
from tests.tiny import shake, tiny_model

MESHES = {
    "fsdp": MeshSection(data=1, fsdp=8),
    "data": MeshSection(data=8, fsdp=1),
    "tensor": MeshSection(data=2, fsdp=1, tensor=4),
    "fsdp and tensor": MeshSection(data=2, fsdp=2, tensor=2),
    "expert": MeshSection(data=1, fsdp=2, expert=4),
    "fsdp and context": MeshSection(data=1, fsdp=4, context=2),
    "expert and context": MeshSection(data=1, fsdp=1, expert=2, context=2, tensor=2),
}
LARGE = {
    "num_layers": 2,
    "num_key_value_heads": 4,
    "num_attention_heads": 8,
    "hidden_size": 64,
    "intermediate_size": 96,
}
THOROUGH = pytest.mark.thorough


def made(kind: str) -> Decoder:
    model = tiny_model(**LARGE)
    if "stacks" in kind:
        return mixture_model(mixture_config(num_dense=0, num_layers=4, windows=(None, 5)))
    if "moe" in kind:
        model = random_family_model("qwen3_moe", 0) if "lora" in kind else mixture_model(mixture_config(num_layers=2))
    if "lora" in kind or "dora" in kind:
        attach_lora(model, LoRA(rank=2, targets=("attention", "mlp"), dora="dora" in kind), seed=0)
        shake(model, seed=1, stddev=0.02)
    if "int8" in kind:
        quantize_model(model, "int8")
    return model


def on_mesh(model: Decoder, section: MeshSection) -> Decoder:
    mesh, weights = make_mesh(section), ModelWeights(model)
    dims = weights.dims()
    weights.write({p: jax.device_put(w, param_sharding(mesh, p, dims[p], w.shape)) for p, w in weights.read().items()})
    model.compute = replace(model.compute, mesh=mesh)
    return model


def in_loops(engine: NativeEngine) -> list[list[int]]:
    """Dimensions above 1, by size, of all arrays of collectives in loops."""
    found = {c[1] for p in engine.programs._compiled.values() for c in collectives_of_loops(p.as_text())}
    arrays = [dims.split(",") for shape in found for dims in re.findall(r"\[([\d,]+)\]", shape)]
    return sorted(sorted(int(size) for size in dims if size != "1") for dims in arrays)


def of_weights(arrays: list[list[int]], model: Decoder, tensor: int) -> list[list[int]]:
    """Those with the shape of a layer's matrix, or of a part of it over `tensor`."""
    matrices = [shape[-2:] for path, _, shape in ModelWeights(model).shapes() if path.endswith("kernel")]
    sizes = [pair for pair in matrices if min(pair) >= 16]
    parts = [sorted(part) for a, b in sizes for part in ((a, b), (a // tensor, b), (a, b // tensor))]
    return [dims for dims in arrays if dims in parts]


@pytest.mark.parametrize(
    ("kind", "name", "tensor"),
    [
        ("dense", "fsdp", "auto"),
        pytest.param("moe", "expert", "auto", marks=THOROUGH),
        pytest.param("dense lora", "fsdp", 4, marks=THOROUGH),
        pytest.param("dense", "data", "auto", marks=THOROUGH),
        pytest.param("dense", "tensor", "auto", marks=THOROUGH),
        pytest.param("dense", "fsdp and tensor", 4, marks=THOROUGH),
        pytest.param("dense dora", "fsdp and tensor", "auto", marks=THOROUGH),
        pytest.param("moe", "fsdp", "auto", marks=THOROUGH),
        pytest.param("moe", "data", "auto", marks=THOROUGH),
        pytest.param("moe", "expert and context", "auto", marks=THOROUGH),
        pytest.param("moe lora", "expert", "auto", marks=THOROUGH),
        pytest.param("dense int8", "fsdp", "auto", marks=THOROUGH),
    ],
)
def test_the_samples_of_one_device_and_no_weight_that_travels(
    kind: str, name: str, tensor: SamplerTensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions: list[int] = []
    weights = DecodeLayout.weights
    monkeypatch.setattr(
        DecodeLayout, "weights", lambda self, loaded: versions.append(loaded.version) or weights(self, loaded)
    )
    prompts, parameters = requests(4)
    expected = make_engine(made(kind)).generate_all(prompts, parameters)
    versions.clear()
    model = on_mesh(made(kind), MESHES[name])
    engine = make_engine(model, tensor=tensor, decode_steps=3)
    for completion, other in zip(engine.generate_all(prompts, parameters), expected, strict=True):
        assert_same(completion, other)
    assert versions == [0]
    mesh, arrays = engine._placement.mesh, in_loops(engine)
    assert mesh is not None and not of_weights(arrays, model, mesh.shape["tensor"])
    if kind.startswith("dense") and mesh.shape["tensor"] == 1:
        assert not arrays


@pytest.mark.thorough
def test_the_trainers_layout_brings_weights_together_at_every_token() -> None:
    """What the search for collectives finds where there are some."""
    model = on_mesh(made("dense"), MESHES["fsdp"])
    engine = make_engine(model, tensor="trained", slots=24, decode_steps=32)
    engine.generate_all(*requests(3))
    assert len(in_loops(engine)) > 8


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("dense lora", None),
        pytest.param("dense", "fsdp", marks=THOROUGH),
        pytest.param("dense", "tensor", marks=THOROUGH),
        pytest.param("dense int8", "fsdp and tensor", marks=THOROUGH),
        pytest.param("dense dora", "tensor", marks=THOROUGH),
        pytest.param("moe", "tensor", marks=THOROUGH),
    ],
)
def test_fused_products_draw_the_same(kind: str, name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on accelerators, without the layout of layers on CPU."""
    prompts, parameters = requests(4)
    expected = make_engine(made(kind)).generate_all(prompts, parameters)
    monkeypatch.setattr(decode_weights, "platform_of", lambda mesh: "tpu")
    model = made(kind) if name is None else on_mesh(made(kind), MESHES[name])
    engine = make_engine(model)
    held: list[Decoder] = []
    prepared = decode_weights._prepared
    monkeypatch.setattr(decode_weights, "_prepared", lambda *args: held.append(prepared(*args)) or held[-1])
    for completion, other in zip(engine.generate_all(prompts, parameters), expected, strict=True):
        assert_same(completion, other)
    block = held[0].stages[0].blocks[0]
    assert isinstance(block.attention.fused, FusedLinear) and block.attention.q.kernel is None
    if name == "fsdp":
        assert isinstance(block.mlp.fused, FusedLinear) and block.mlp.up.kernel is None  # copies anyway


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "name", "tensor"),
    [
        ("dense lora", "fsdp and tensor", 4),
        pytest.param("dense int8", "fsdp", 2, marks=THOROUGH),
        ("moe stacks", "fsdp", 1),
        pytest.param("moe lora", "expert", "auto", marks=THOROUGH),
    ],
)
def test_layers_and_pieces_are_moved_bit_by_bit(
    kind: str, name: str, tensor: SamplerTensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on accelerators: stacks in a loop over their layers, tables in pieces of which the last overlaps another."""
    monkeypatch.setattr(decode_weights, "platform_of", lambda mesh: "tpu")
    monkeypatch.setattr(decoder, "SPLIT_LAYERS", {})
    monkeypatch.setattr(moe, "reads_stacks", lambda *kernel: True)
    monkeypatch.setattr(decode_weights, "PIECE_BYTES", 20_000)
    monkeypatch.setattr(decode_weights, "TILE_ROWS", 3)
    monkeypatch.setitem(LARGE, "num_layers", 4)
    source = ModelWeights(on_mesh(made(kind), MESHES[name]))
    arrays = source.read()
    now = Loaded.of(source, arrays, 0, choose_placement(tensor, source, arrays, None, slots=4))
    layout = DecodeLayout.of(now)
    assert layout.lowered.as_text().count("stablehlo.while") >= (1 if "moe lora" in kind else 2)
    found = jax.tree.leaves(nnx.split(layout.model(weights := layout.weights(now))))
    expected = jax.tree.leaves(nnx.split(decode_weights._prepared(source.bind(arrays), now.placement)))
    for array, same in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(array), np.asarray(same))
    assert [array.sharding for array in weights.derived] == [shape.sharding for shape in layout.derived]


def test_the_layout_that_is_chosen() -> None:
    def sizes(name: str, wanted: SamplerTensor, memory: int | None = None) -> tuple[int, ...]:
        model = on_mesh(tiny_model(**LARGE), MESHES[name])
        source = ModelWeights(model)
        found = choose_placement(wanted, source, source.read(), memory, slots=4).mesh
        assert found is not None
        assert found.devices.flatten().tolist() == make_mesh(MESHES[name]).devices.flatten().tolist()
        return tuple(found.shape.values())

    whole = sum(array.nbytes for array in ModelWeights(tiny_model(**LARGE)).read().values())
    assert sizes("fsdp", "auto") == (8, 1, 1, 1, 1) == sizes("fsdp", "auto", 4 * whole)
    assert sizes("fsdp", "auto", 3 * whole) == (4, 1, 1, 1, 2)
    assert sizes("fsdp", "auto", 2 * whole // 10) == (1, 8, 1, 1, 1)  # nothing fits
    assert sizes("fsdp", 2) == (4, 1, 1, 1, 2)
    assert sizes("fsdp", "trained") == (1, 8, 1, 1, 1)
    assert sizes("tensor", "auto", 1) == (2, 1, 1, 1, 4)
    assert sizes("fsdp and tensor", "auto") == (4, 1, 1, 1, 2)
    assert sizes("fsdp and tensor", "auto", 2 * whole) == (2, 1, 1, 1, 4)
    assert sizes("expert", "auto") == (2, 1, 4, 1, 1)
    assert sizes("fsdp and context", "auto") == (8, 1, 1, 1, 1)
    assert sizes("fsdp and context", "trained") == (1, 4, 1, 2, 1)
    assert sizes("expert and context", "auto") == (1, 1, 2, 2, 2)
    # A vocabulary that 2 devices do not divide lies whole on both.
    odd = on_mesh(tiny_model(**LARGE, vocab_size=511), MESHES["fsdp"])
    source = ModelWeights(odd)
    found = choose_placement("auto", source, source.read(), 3 * whole, slots=4)
    assert found.mesh is not None and found.mesh.shape["tensor"] == 2
    with pytest.raises(ConfigError, match=r"rollout.tensor=8 must divide num_kv_heads=\d of qwen3"):
        sizes("fsdp", 8)
    for name, wanted in (("fsdp", 3), ("expert", 2)):
        with pytest.raises(ConfigError, match=f"rollout.tensor={wanted}: must be one of"):
            sizes(name, wanted)
    with pytest.raises(ConfigError, match=r"rollout.tensor=2: the model is on one device"):
        make_engine(tiny_model(), tensor=2)


SPLITS = {
    "v5e": {"0.6B": 4, "4B": 8, "8B": 8, "30B-A3B": None},
    "v5p": {"0.6B": 2, "4B": 4, "8B": 8, "30B-A3B": 4},
    "v6e": {"0.6B": 4, "4B": 8, "8B": 8, "30B-A3B": None},
}
"""Devices that split each weight, of 8 chips at fsdp=8 with 64 slots; None: no copy fits a quarter of a chip."""
MODELS = {
    "0.6B": QWEN3,
    "4B": QWEN3_8B | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "8B": QWEN3_8B,
    "30B-A3B": QWEN3_30B,
}


def test_the_split_with_the_fastest_token(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, found = make_mesh(MESHES["fsdp"]), {kind: dict[str, int | None]() for kind in SPLITS}
    for name, fields in MODELS.items():
        source = ModelWeights(model_of(fields, Compute(dtype=jnp.dtype("bfloat16"), mesh=mesh), jnp.dtype("bfloat16")))
        arrays = placed_shapes(source, mesh)
        for kind in SPLITS:
            monkeypatch.setattr(decode_weights, "chip_of", lambda device, kind=kind: CHIPS[kind])
            chosen = choose_placement("auto", source, arrays, CHIPS[kind].memory, slots=64).mesh
            assert chosen is not None
            found[kind][name] = None if chosen == mesh else chosen.shape["tensor"]
    assert found == SPLITS
