from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from safetensors.numpy import load_file

from posttrain.config import ConfigError, LoRA
from posttrain.models.decoder import Decoder
from posttrain.models.load import load_model
from posttrain.models.save import save_model
from posttrain.models.lora import attach_lora, count_parameters, has_lora, linears, merged
from posttrain.models.weights import ModelWeights, without_adapter
from tests.tiny import forward, tiny_model

GOLDENS = Path(__file__).parent.parent / "goldens"
TOKENS = np.random.default_rng(0).integers(0, 512, (2, 10))


def trained(model: Decoder) -> Decoder:
    """With an adapter whose B is not zero."""
    attach_lora(model, LoRA(rank=3, alpha=5.0), seed=1)
    weights = ModelWeights(model)
    keys = iter(jax.random.split(jax.random.key(2), 100))
    b = {p: jax.random.normal(next(keys), w.shape) for p, w in weights.read(lambda p: p.endswith("lora_b")).items()}
    weights.write(b)
    return model


def test_fresh_adapter_changes_nothing() -> None:
    model = tiny_model()
    before = forward(model, TOKENS)
    attach_lora(model, LoRA(rank=4), seed=0)
    assert_allclose(forward(model, TOKENS), before, atol=1e-5)
    layer = linears(model)["stages.0.blocks.0.attention.q"]
    assert (layer.lora_scale, layer.lora_a.shape, layer.lora_b.shape) == (2.0, (1, 32, 4), (1, 4, 32))
    assert layer.lora_a[...].std() > 0.1


def test_applied_is_merged_and_off_is_base() -> None:
    base = tiny_model()
    expected = forward(base, TOKENS)
    model = trained(tiny_model())
    applied = forward(model, TOKENS)
    assert np.abs(applied - expected).max() > 1.0
    alone = merged(model)
    assert not has_lora(alone)
    assert has_lora(model)
    assert_allclose(forward(alone, TOKENS), applied, atol=1e-5 * np.abs(applied).max())
    assert_array_equal(forward(model, TOKENS), applied)
    weights = ModelWeights(model)
    off = forward(weights.bind(without_adapter(weights.read())), TOKENS)
    assert_allclose(off, expected, atol=1e-5)
    attach_lora(base, LoRA(rank=3, alpha=5.0), seed=7)
    assert_array_equal(off, forward(base, TOKENS))


def test_saved_merged(tmp_path: Path) -> None:
    model = trained(tiny_model())
    save_model(model, tmp_path / "out")
    loaded = load_model(tmp_path / "out")
    expected = ModelWeights(merged(model)).read()
    for path, value in ModelWeights(loaded).read().items():
        assert_array_equal(value, expected[path], err_msg=path)


def test_only_the_adapter_is_trained() -> None:
    model = tiny_model()
    assert count_parameters(model).share == 1.0
    attach_lora(model, LoRA(rank=2, targets=("attention.q$", r"0\.mlp.(up|down)")), seed=0)
    names = {path.split("blocks.")[1] for path in ModelWeights(model).trainable()}
    layers = ("attention.q", "mlp.up", "mlp.down")
    assert names == {f"0.{layer}.{matrix}" for layer in layers for matrix in ("lora_a", "lora_b")}
    counts = count_parameters(model)
    # Three layers: q is 32 x 32, up 32 x 48, down 48 x 32.
    assert counts.trainable == 3 * 2 * (32 + 32 + 32 + 48 + 48 + 32)
    assert counts.total == count_parameters(tiny_model()).total + counts.trainable


def test_merging_bfloat16_adds_in_float32() -> None:
    model = trained(tiny_model(dtype=jnp.bfloat16))
    path = "stages.0.blocks.0.mlp.up"
    layer = linears(model)[path]
    wide = {name: np.asarray(getattr(layer, name)[...], np.float32) for name in ("kernel", "lora_a", "lora_b")}
    exact = wide["kernel"] + 5.0 / 3.0 * wide["lora_a"] @ wide["lora_b"]
    kernel = linears(merged(model))[path].kernel[...]
    assert kernel.dtype == jnp.bfloat16
    assert_allclose(np.asarray(kernel, np.float32), exact, rtol=2.0**-8)


def test_against_peft() -> None:
    golden = np.load(GOLDENS / "lora" / "lora" / "golden.npz")
    stored = load_file(GOLDENS / "lora" / "lora" / "adapter_model.safetensors")
    model = load_model(GOLDENS / "models" / "llama")
    tokens = golden["input_ids"]
    assert_allclose(forward(model, tokens), golden["base_logits"], atol=2e-4)
    attach_lora(model, LoRA(rank=4, alpha=8.0, targets=("attention.q", "attention.v")), seed=0)
    weights = ModelWeights(model)
    new: dict[str, Any] = {}
    for path, ours in weights.read(weights.trainable().__contains__).items():
        projection, matrix = path.split(".")[-2:]
        name = "base_model.model.model.layers.{}.self_attn.{}_proj.lora_{}.weight"
        layers = [stored[name.format(i, projection, matrix[-1].upper())].T for i in range(3)]
        new[path] = jnp.asarray(np.stack(layers))
        assert new[path].shape == ours.shape
    weights.write(new)
    assert_allclose(forward(model, tokens), golden["adapter_logits"], atol=2e-4)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (
            ("q_proj",),
            "lora.targets: 'q_proj' matches no linear layer; there are attention.k, attention.o, attention.q, "
            "attention.v, mlp.down, mlp.gate, mlp.up",
        ),
        (("mlp", "."), "lora.targets: '.' matches head, which takes no adapter; use attention, mlp"),
        (("mlp(",), "lora.targets: 'mlp(' is no regular expression: missing ), unterminated subpattern at position 3"),
    ],
)
def test_targets_that_cannot_be(targets: tuple[str, ...], message: str) -> None:
    model = tiny_model(tie_embeddings=False)
    with pytest.raises(ConfigError) as raised:
        attach_lora(model, LoRA(rank=2, targets=targets), seed=0)
    assert str(raised.value) == message
    assert not has_lora(model)


def test_one_adapter_at_a_time() -> None:
    model = tiny_model()
    attach_lora(model, LoRA(rank=2), seed=0)
    with pytest.raises(ConfigError, match="lora: the model already has an adapter; merge it first"):
        attach_lora(model, LoRA(rank=2), seed=0)
    attach_lora(merged(model), LoRA(rank=2), seed=0)
