"""A sampler with quantised weights: how far it is from the trainer, and that the update does not depend on it."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from posttrain.config import LoRA, MeshSection, RolloutQuantize
from posttrain.data.tokenizer import load_tokenizer
from posttrain.losses.ratios import ImportanceSampling
from posttrain.mesh import make_mesh, param_sharding
from posttrain.metrics import CompileCounter, to_host
from posttrain.models.quant import Quantized
from posttrain.rl.agreement import check_agreement
from posttrain.rollout.engine import NativeEngine
from posttrain.weights.lora import attach_lora, merged_lora
from posttrain.weights.quantize import Copies, quantize_model
from posttrain.weights.state import ModelWeights
from tests.rl.test_step import ROW, World, sgd
from tests.tiny import forward, shake, tiny_model

pytestmark = pytest.mark.thorough

TOKENS = np.random.default_rng(0).integers(0, 512, (2, 10))


def test_a_copy_is_the_merged_model_quantised_and_costs_one_program() -> None:
    model = tiny_model(num_layers=2, windows=(None,), dtype=jnp.bfloat16, compute_dtype=jnp.float32)
    attach_lora(model, LoRA(rank=2, targets=("attention", "mlp", "embed")), seed=0)
    shake(model, seed=1)
    copies = Copies("int8")
    outline, arrays = copies(model)
    alone = merged_lora(model)
    quantize_model(alone, "int8")
    expected = ModelWeights(alone).read()
    assert arrays.keys() == expected.keys()
    for path, array in expected.items():
        assert_array_equal(arrays[path], array, err_msg=path)
    kernel = outline.model.stages[0].blocks[0].mlp.up.kernel
    assert isinstance(kernel, Quantized)
    assert isinstance(kernel.codes.get_value(), jax.ShapeDtypeStruct), "programs hold the structure, and no old weights"
    norm = "final_norm.scale"
    assert arrays[norm] is ModelWeights(model).read()[norm]
    shake(model, seed=2)
    counter = CompileCounter()
    _, later = copies(model)
    assert counter.metrics()["perf/compilations"] == 0
    counter.close()
    assert any(not np.array_equal(later[path], array) for path, array in arrays.items() if path.endswith(".codes"))


def test_a_copy_of_a_split_model() -> None:
    mesh = make_mesh(MeshSection(data=1, fsdp=4, tensor=2))
    model = tiny_model(num_layers=2, windows=(None,))
    attach_lora(model, LoRA(rank=2), seed=0)
    shake(model, seed=1)
    _, expected = Copies("int8")(model)
    weights = ModelWeights(model)
    weights.write(jax.device_put(weights.read(), {p: param_sharding(mesh, p, d, s) for p, d, s in weights.shapes()}))
    model.compute = replace(model.compute, mesh=mesh)
    outline, got = Copies("int8")(model)
    for path, dims, shape in outline.shapes():
        # Sums in another order may move a number over the edge between two codes.
        assert_allclose(got[path].astype(jnp.float32), expected[path].astype(jnp.float32), atol=1, rtol=1e-5)
        assert got[path].sharding.is_equivalent_to(param_sharding(mesh, path, dims, shape), len(shape)), path
    codes = [(got[p] != expected[p]).mean() for p in got if p.endswith(".codes")]
    assert max(map(float, codes)) < 0.01


def quantized_world(kind: RolloutQuantize) -> World:
    tokenizer = load_tokenizer("bytes")
    world = World(tokenizer, lora=True, optimizer=sgd(0.5), old_logps="trainer", importance=ImportanceSampling())
    model = world.trainer.model
    engine = NativeEngine(
        model, slots=8, max_length=ROW, decode_steps=8, tokenizer_decode=tokenizer.decode, quantize=kind
    )
    world.cluster.engine = engine
    world.sampler = replace(world.sampler, engine=engine)
    return world


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_an_update_with_a_quantised_sampler(kind: RolloutQuantize, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "posttrain.weights"):
        world = quantized_world(kind)
    (told,) = (record.getMessage() for record in caplog.records)
    assert f"its matrices stored in {kind} and dequantized per layer for products in float32" in told
    assert ("cpu has no native fp8 and emulates it" in told) == (kind == "fp8")
    weights = ModelWeights(world.trainer.model)
    matrices = sum(
        array.nbytes for path, array in weights.read().items() if re.search(r"(attention|mlp)\.\w+\.k", path)
    )
    own = world.cluster.engine.metrics()["rollout/copy_mib"] * 2**20
    assert matrices / 4 < own < matrices / 3, "a quarter of float32, and the scales"
    outcome = world.step()
    batch, sampled = outcome.batch, outcome.batch.loss_weight > 0
    metrics = to_host(outcome.metrics)
    assert_allclose(metrics["ratio/mean"], 1.0, atol=1e-4)
    assert abs(metrics["approx_kl"]) < 1e-6 and metrics["grad_norm"] > 1e-4
    gap = np.abs(batch.old_logps - batch.sampler_logps)[sampled].mean()
    assert_allclose(metrics["sampling/logp_difference/mean"], gap, rtol=1e-4)
    assert 1e-4 < gap < (0.02 if kind == "int8" else 0.08)
    check_agreement(outcome.metrics, 1)
    assert_allclose(metrics["sampling/importance_sampling_ratio/mean"], 1.0, atol=0.05)
    ratios = np.exp(batch.old_logps - batch.behaviour_logps)[sampled]
    assert_allclose(metrics["sampling/importance_sampling_ratio/max"], ratios.max(), rtol=1e-4)
    programs = len(world.cluster.engine.programs), world.trainer.num_programs
    second = to_host(world.step().metrics)
    assert_allclose(second["ratio/mean"], 1.0, atol=1e-4)
    assert 1e-4 < second["sampling/logp_difference/mean"] < 0.1
    assert (len(world.cluster.engine.programs), world.trainer.num_programs) == programs


def test_the_samplers_logps_are_those_of_the_quantised_model() -> None:
    world = quantized_world("int8")
    outcome = world.step()
    world_now = quantized_world("int8")  # the weights before the update
    alone = merged_lora(world_now.trainer.model)
    quantize_model(alone, "int8")
    batch = outcome.batch
    logits = forward(alone, batch.tokens, batch.positions, batch.segments)
    logps = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    rows, places = np.nonzero(batch.loss_weight > 0)
    expected = logps[rows, places - 1, batch.tokens[rows, places]]
    assert_allclose(batch.sampler_logps[rows, places], expected, atol=2e-4)
    trainer = world_now.cluster.actor.logps(batch)
    assert_array_equal(trainer, batch.old_logps)
