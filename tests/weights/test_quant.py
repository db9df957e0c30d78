"""Quantised matrices: how far they are, what they cost, that they train, split and save like the ones they replace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from numpy.testing import assert_allclose, assert_array_equal

from posttrain.batch import Batch
from posttrain.config import AdamW, LoRA, MeshSection, ModelSection, Quantize, RLSection
from posttrain.errors import ConfigError
from posttrain.kernels.platform import matmul
from posttrain.losses.sft import SFTLoss
from posttrain.mesh import make_mesh, param_sharding
from posttrain.models.decoder import Decoder
from posttrain.models.quant import PER_OUTPUT, TYPES, Quantized, dequantized, quantized, tile_size
from posttrain.train.objective import TrainSettings
from posttrain.train.trainer import Trainer
from posttrain.train.transformations import make_optimizer
from posttrain.weights.load import check_lora, load_model
from posttrain.weights.lora import attach_lora, count_parameters, merge_lora, merged_lora
from posttrain.weights.peft_save import save_adapter
from posttrain.weights.quantize import error_rows, quantizable, quantize_model
from posttrain.weights.save import hf_tensors, save_model
from posttrain.weights.state import ModelWeights
from tests.often import often
from tests.tiny import forward, model_of_fields, tiny_config, tiny_model

GOLDENS = Path(__file__).parent.parent / "goldens" / "models"
KINDS: tuple[Quantize, ...] = ("int8", "fp8", "int4", "nf4")

ERRORS = {"int8": (0.004, 0.009), "fp8": (0.02, 0.03), "int4": (0.08, 0.12), "nf4": (0.07, 0.10)}
"""Between which the relative RMS error of normally distributed weights is."""
TOKENS = np.random.default_rng(0).integers(0, 90, (2, 12))


def mixture(expert_size: int = 32) -> Decoder:
    """A dense layer, then a mixture with a shared expert."""
    sizes = {"hidden_size": 128, "intermediate_size": 64, "moe_intermediate_size": expert_size, "vocab_size": 128}
    sizes |= {"shared_expert_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    fields = {"model_type": "qwen2_moe", "num_hidden_layers": 2, "mlp_only_layers": [0], "initializer_range": 0.2}
    return model_of_fields(fields | sizes | heads)


def matrix(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32)


def relative(found: Any, expected: Any) -> float:
    """Root mean square of the differences of logits by that of the logits, means of all tokens taken off."""
    found, expected = (np.asarray(x) - np.asarray(x).mean(-1, keepdims=True) for x in (found, expected))
    return float(np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)))


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS)
def test_error_size_and_the_numbers_of_qwix(kind: Quantize) -> None:
    w = matrix(2, 256, 48)
    codes, scales = jax.jit(quantized, static_argnums=1)(w, kind)
    back = jax.jit(dequantized, static_argnums=(2, 3))(codes, scales, kind, jnp.float32)
    low, high = ERRORS[kind]
    assert low < float(jnp.sqrt(jnp.mean((back - w) ** 2) / jnp.mean(w**2))) < high
    assert scales.shape == (2, 1 if kind in PER_OUTPUT else 4, 48)
    assert codes.nbytes == w.size * (1 if kind in PER_OUTPUT else 0.5)
    tile = tile_size(kind, 256)
    theirs = qwix.quantize(w, TYPES[kind], channelwise_axes=(0, 2), tiled_axes={1: tile})
    # Scales of 4-bit codes are held in bfloat16.
    assert_allclose(back, qwix.dequantize(theirs), rtol=0 if kind in PER_OUTPUT else 2.0**-8)
    assert_array_equal(dequantized(*quantized(jnp.zeros((64, 2)), kind), kind, jnp.float32), 0.0)


def test_tiles() -> None:
    assert [tile_size("nf4", size) for size in (4096, 11008, 896, 48, 172, 20)] == [64, 64, 64, 48, 86, 20]
    assert tile_size("int8", 35) == 35
    with pytest.raises(ConfigError, match="quantize=nf4: a matrix has an odd number of inputs, 35; use int8 or fp8"):
        tile_size("nf4", 35)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_the_product_has_the_right_gradient_and_keeps_no_plain_matrix(kind: Quantize) -> None:
    layers, size = 192, 64
    codes, scales = quantized(matrix(layers, size, size) / size**0.5, kind)
    plain = dequantized(codes, scales, kind, jnp.float32)
    x = matrix(4, size)

    def stack(x: Any, codes: Any, scales: Any) -> Any:
        def body(x: Any, layer: Any) -> tuple[Any, None]:
            w = Quantized(*layer, ("embed", "mlp"), kind=kind, dtype=np.dtype(np.float32))
            return jnp.tanh(w.product(matmul, x)), None

        return jnp.sum(jax.lax.scan(body, x, (codes, scales))[0] ** 2)

    def expected(x: Any) -> Any:
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, plain)[0] ** 2)

    gradient = jax.jit(jax.grad(stack)).lower(x, codes, scales).compile()
    assert_allclose(gradient(x, codes, scales), jax.grad(expected)(x), rtol=1e-4, atol=1e-6)
    assert gradient.memory_analysis().temp_size_in_bytes < plain.nbytes / 4
    assert_array_equal(jax.grad(stack, argnums=2)(x, codes, scales), 0.0)


@pytest.fixture(scope="module")
def llama() -> Decoder:
    return load_model(GOLDENS / "llama", dtype=jnp.float32)


@pytest.fixture(scope="module", params=often(KINDS, "int8", "nf4"))
def pair(request: pytest.FixtureRequest) -> tuple[Quantize, Decoder]:
    return request.param, load_model(GOLDENS / "llama", dtype=jnp.float32, quantize=request.param)


LOGITS = {"int8": 0.05, "fp8": 0.25, "int4": 0.8, "nf4": 0.8}
"""Relative RMS error of the logits of a tiny random model, which react to rounding more than those of a trained one."""


@pytest.mark.few(1)
def test_a_loaded_model_is_close_and_the_same_as_when_quantised_whole(
    llama: Decoder, pair: tuple[Quantize, Decoder]
) -> None:
    kind, model = pair
    error = relative(forward(model, TOKENS), forward(llama, TOKENS))
    assert 0.1 * LOGITS[kind] < error < LOGITS[kind]
    whole = ModelWeights(llama).bind(ModelWeights(llama).read())
    rows = error_rows(quantize_model(whole, kind))
    got, expected = ModelWeights(model).read(), ModelWeights(whole).read()
    assert got.keys() == expected.keys()
    for path, value in expected.items():
        assert_array_equal(got[path], value, err_msg=path)
    kinds = ["attention.k", "attention.o", "attention.q", "attention.v", "mlp.down", "mlp.gate", "mlp.up", "all"]
    assert [row.kind for row in rows] == kinds
    assert all(0.8 * ERRORS[kind][0] < row.relative < 1.1 * ERRORS[kind][1] for row in rows)


def test_what_stays_as_it_is() -> None:
    model = mixture()
    before = ModelWeights(model).read()
    count = count_parameters(model).total
    quantize_model(model, "int8")
    after = ModelWeights(model).read()
    changed = {path.removesuffix(".codes") for path in after if path.endswith(".codes")}
    assert changed == set(quantizable(model)) and not any("router" in path or "shared_gate" in path for path in changed)
    assert any(path.endswith("experts.gate") for path in changed)
    assert all(after[path] is array for path, array in before.items() if path not in changed)
    assert count_parameters(model).total == count
    assert not any(path.endswith((".codes", ".scales")) for path in ModelWeights(model).trainable())


def test_loading_says_how_far_the_weights_are(capsys: pytest.CaptureFixture[str]) -> None:
    model = load_model(GOLDENS / "llama_bf16", quantize="int8")
    printed = capsys.readouterr().out
    assert "base quantized to int8" in printed and "mlp.down" in printed and "0.5" in printed
    q = model.stages[0].blocks[0].attention.q.kernel
    assert isinstance(q, Quantized) and q[...].dtype == jnp.bfloat16 and q.codes[...].dtype == jnp.int8


def with_adapter(model: Decoder, lora: LoRA) -> Decoder:
    """With an adapter that is not at 0."""
    attach_lora(model, lora, seed=1)
    weights, draw = ModelWeights(model), np.random.default_rng(2)
    names = (".lora_a", ".lora_b", ".lora_magnitude")
    weights.write(
        {p: jnp.asarray(draw.normal(0, 0.1, w.shape), w.dtype) for p, w in weights.read().items() if p.endswith(names)}
    )
    return model


ADAPTERS = [LoRA(rank=3, targets=("attention", "mlp.up", "head")), LoRA(rank=2, dora=True)]


@pytest.mark.thorough
@pytest.mark.parametrize("lora", ADAPTERS, ids=["lora", "dora"])
def test_saved_is_what_the_model_computes_and_so_is_its_adapter(lora: LoRA, llama: Decoder, tmp_path: Path) -> None:
    model = with_adapter(load_model(GOLDENS / "llama", dtype=jnp.float32, quantize="nf4"), lora)
    expected = forward(model, TOKENS)
    save_model(model, tmp_path / "merged")
    saved = load_model(tmp_path / "merged")
    tolerance = 1e-4 * float(np.abs(expected).max())
    assert_allclose(forward(saved, TOKENS), expected, atol=tolerance)
    assert ModelWeights(saved).read().keys() == ModelWeights(llama).read().keys()
    alone = merged_lora(model)
    for path, array in ModelWeights(alone).read().items():
        assert_allclose(array, ModelWeights(saved).read()[path], atol=1e-6, err_msg=path)
    assert_array_equal(forward(model, TOKENS), expected)
    save_adapter(model, tmp_path / "adapter")
    again = load_model(GOLDENS / "llama", dtype=jnp.float32, quantize="nf4", adapter=tmp_path / "adapter")
    assert_allclose(forward(again, TOKENS), expected, atol=tolerance)


@pytest.mark.thorough
def test_experts(tmp_path: Path) -> None:
    plain = load_model(GOLDENS / "mixtral", dtype=jnp.float32)
    model = load_model(GOLDENS / "mixtral", dtype=jnp.float32, quantize="int8")
    assert relative(forward(model, TOKENS), forward(plain, TOKENS)) < 0.1
    with_adapter(model, LoRA(rank=2, targets=("experts",)))
    expected = forward(model, TOKENS)
    save_model(model, tmp_path / "merged")
    got = forward(load_model(tmp_path / "merged"), TOKENS)
    assert_allclose(got, expected, atol=1e-4 * float(np.abs(expected).max()))


MESHES = [MeshSection(data=1, fsdp=4, tensor=2), MeshSection(data=1, fsdp=2, expert=2, tensor=2)]


def on_mesh(model: Decoder, section: MeshSection) -> Decoder:
    mesh = make_mesh(section)
    weights = ModelWeights(model)
    split = ModelWeights(weights.bind(weights.read()))
    placed = {path: param_sharding(mesh, path, dims, shape) for path, dims, shape in split.shapes()}
    split.write(jax.device_put(split.read(), placed))
    split.model.compute = type(model.compute)(dtype=model.compute.dtype, mesh=mesh)
    return split.model


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "expert_size"), [("int8", 32), ("nf4", 32), ("nf4", 128)])
def test_split_over_devices(kind: Quantize, expert_size: int) -> None:
    """Of experts the devices gather codes, unless a tile would be split."""
    model = mixture(expert_size)
    quantize_model(model, kind)
    attach_lora(model, LoRA(rank=2), seed=0)
    tokens = np.random.default_rng(0).integers(0, 128, (8, 8))

    def gradient(model: Decoder) -> tuple[Any, Any]:
        weights = ModelWeights(model)
        trained = weights.trainable()

        def loss(params: Any, rest: Any) -> Any:
            bound = weights.bind({**rest, **params})
            ones = jnp.ones_like(tokens)
            positions = jnp.broadcast_to(jnp.arange(8), tokens.shape)
            logits = bound.logits(bound(jnp.asarray(tokens), positions, ones)[0])
            return jnp.sum(jax.nn.log_softmax(logits)[..., 3]), logits

        run = jax.jit(jax.grad(loss, has_aux=True))
        return run(weights.read(trained.__contains__), weights.read(lambda path: path not in trained))

    expected, logits = gradient(model)
    split = on_mesh(model, MESHES[1])
    scales = split.stages[0].blocks[0].mlp.gate.kernel.scales[...]
    assert scales.sharding.spec[1] == (None if kind == "int8" else "fsdp")
    got, split_logits = gradient(split)
    assert_allclose(split_logits, logits, atol=1e-4 * float(np.abs(logits).max()))
    largest = max(float(np.abs(g).max()) for g in expected.values())
    for path, value in expected.items():
        assert_allclose(got[path], value, atol=1e-4 * largest, err_msg=path)


@pytest.mark.thorough
def test_loading_onto_devices(llama: Decoder) -> None:
    mesh = make_mesh(MESHES[0])
    model = load_model(GOLDENS / "llama", dtype=jnp.float32, quantize="nf4", mesh=mesh, lora=LoRA(rank=2), seed=0)
    weights = ModelWeights(model)
    whole = ModelWeights(ModelWeights(llama).bind(ModelWeights(llama).read()))
    quantize_model(whole.model, "nf4")
    whole = ModelWeights(whole.model)
    for path, array in whole.read().items():
        assert_array_equal(weights.read()[path], array, err_msg=path)
    for path, dims, shape in weights.shapes():
        assert weights.read()[path].sharding.is_equivalent_to(param_sharding(mesh, path, dims, shape), len(shape)), path


def batches(seed: int) -> Iterator[Batch]:
    tokens = np.random.default_rng(seed).integers(0, 32, (4, 12)).astype(np.int32)
    positions = np.broadcast_to(np.arange(12, dtype=np.int32), tokens.shape)
    ones = np.ones_like(tokens)
    weight = (positions > 0).astype(np.float32)
    while True:
        yield Batch(tokens=tokens, positions=positions, segments=ones, loss_weight=weight)


def losses(kind: Quantize | None) -> list[float]:
    model = tiny_model(num_layers=1, windows=(None,))
    if kind is not None:
        quantize_model(model, kind)
    attach_lora(model, LoRA(rank=8), seed=0)
    frozen = {p: np.asarray(w) for p, w in ModelWeights(model).read().items() if p.endswith((".codes", ".scales"))}
    optimizer = make_optimizer(AdamW(learning_rate=0.02), 12, model=model)
    trainer = Trainer(model, SFTLoss(), optimizer, TrainSettings(temperature=1.0, max_grad_norm=1.0))
    found = [float(trainer.step(batch)["loss"].value()) for batch, _ in zip(batches(0), range(12), strict=False)]
    assert all(np.array_equal(np.asarray(ModelWeights(model).read()[path]), array) for path, array in frozen.items())
    return found


@pytest.mark.thorough
def test_an_adapter_learns_on_a_quantised_base_as_on_a_plain_one() -> None:
    plain, quant = losses(None), losses("nf4")
    assert plain[0] - plain[-1] > 0.5
    assert quant[0] - quant[-1] > 0.8 * (plain[0] - plain[-1])


def test_refusals() -> None:
    model = tiny_model(num_layers=1, windows=(None,), tie_embeddings=False)
    quantize_model(model, "int8")
    with pytest.raises(ValueError, match="Trainer: quantized weights cannot be trained; give the model an adapter"):
        Trainer(
            model,
            SFTLoss(),
            make_optimizer(AdamW(learning_rate=0.1), 1, model=model),
            TrainSettings(temperature=1.0, max_grad_norm=1.0),
        )
    with pytest.raises(ConfigError, match="lora.modules_to_save: 'up_proj' matches .*up.kernel, which model.quantize"):
        attach_lora(model, LoRA(rank=2, targets=("attention",), modules_to_save=("up_proj",)), seed=0)
    attach_lora(model, LoRA(rank=2, targets=("attention",), modules_to_save=("lm_head", "norm")), seed=0)
    with pytest.raises(ConfigError, match=r"merge: .*attention.k is quantized, which a merge cannot undo; use merged"):
        merge_lora(model)
    with pytest.raises(ConfigError, match=r"hf_tensors: the model is quantized; give merged\(model\)"):
        next(hf_tensors(model))
    narrow = tiny_config(intermediate_size=35)
    with pytest.raises(ConfigError, match="quantize=int4: a matrix has an odd number of inputs, 35"):
        check_lora(narrow, LoRA(rank=2), "int4")
    check_lora(narrow, LoRA(rank=2), "fp8")


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="quantize=nf4 needs lora or adapter: quantized weights cannot be trained"):
        ModelSection(path="x", quantize="nf4")
    fields: dict[str, Any] = {"dataset": {"path": "x"}, "num_steps": 1, "row_tokens": 8, "prompts_per_step": 1}
    fields |= {"rewards": [{"fn": "a:b"}], "group_size": 2, "sampling": {"max_tokens": 4}}
    fields |= {"optimizer": {"learning_rate": 1.0}, "rollout": {"quantize": "int8"}}
    taught = {**fields, "teachers": [{"path": "y"}]}
    with pytest.raises(ValueError, match=r"teachers with rollout.quantize=int8 need old_logps: trainer"):
        RLSection(**taught, algorithm={"kind": "grpo", "old_logps": "self"})
    assert RLSection(**taught).proximal_logps == "trainer"
