"""The engine's programs, lowered for TPU on a machine without one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax._src.mesh import AbstractDevice
from jax.sharding import AbstractMesh, AxisType

from posttrain.rollout.decode_weights import Loaded, PassCost, Placement
from posttrain.rollout.decoding import DecodeRows, decode
from posttrain.rollout.paged import empty_pool
from posttrain.rollout.programs import Expected, PromptPieces, Shapes, prefill
from posttrain.rollout.runner import Runner
from posttrain.weights.state import ModelWeights
from tests.rollout.engines import params
from tests.tiny import tiny_model

TPU = AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu")
COST = PassCost(
    bandwidth=1e12, flops=1e14, dense_bytes=1e9, dense_size=5e8, expert_bytes=0.0, expert_size=0.0, active=0.0,
    expert_devices=1, layers=4,
)  # fmt: skip
ALLOWED = [export.DisabledSafetyCheck.custom_call("tpu_custom_call")]


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    return Runner(Shapes(4, 1, 256, 8), blocks=32, record=False, vocab_size=512, cost=COST)


def examples(runner: Runner) -> list[PromptPieces | DecodeRows]:
    return runner.examples([Expected(params=params())], rereads=True)


def lowered(runner: Runner, example: PromptPieces | DecodeRows) -> str:
    model = tiny_model(num_layers=4, windows=(None, 5), head_dim=128, dtype=jnp.bfloat16)
    source = ModelWeights(model)
    loaded = Loaded.of(source, source.read(), 0, Placement(None, fuse=("attention",)))
    pool = empty_pool(runner.pool_shapes(loaded))
    assert pool.layout == "ragged"

    def program(weights: object, pool: object, inputs: object) -> object:
        bound = source.bind(weights).for_decoding(fuse=("attention",))  # type: ignore[arg-type]
        if isinstance(inputs, PromptPieces):
            return prefill(bound, pool, inputs, record=False, window=0, mesh=None)  # type: ignore[arg-type]
        return decode(bound, pool, inputs, jnp.int32(0), steps=8, record=False, mesh=None)  # type: ignore[arg-type]

    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=TPU)):
        exported = export.export(jax.jit(program), platforms=["tpu"], disabled_checks=ALLOWED)
        return exported(loaded.arrays, pool, example).mlir_module()


def test_decoding_reads_pages_in_place(runner: Runner) -> None:
    text = lowered(runner, next(rows for rows in examples(runner) if isinstance(rows, DecodeRows)))
    # One for each layer of the pattern, which is scanned.
    assert text.count("stablehlo.custom_call @tpu_custom_call") == 2
    # No page is gathered within the loop, nor a layer sliced out of the pool: [R, D, P, page, 2 K, H].
    loop = text[text.index("stablehlo.while") :]
    assert "tensor<1x1x32x16x4x128xbf16>" not in loop
    assert "tensor<4x16x16x4x128xbf16>" not in loop


def test_prompts_use_the_kernel_of_training(runner: Runner) -> None:
    prompts = [example for example in examples(runner) if isinstance(example, PromptPieces)]
    long = next(example for example in prompts if example.context is None and example.tokens.shape[1] >= 128)
    assert lowered(runner, long).count("stablehlo.custom_call @tpu_custom_call") == 2
