from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array
from numpy.testing import assert_allclose, assert_array_equal

from posttrain.config import LoRA
from posttrain.errors import ConfigError
from posttrain.models.decoder import Decoder
from posttrain.weights.load import check_lora, load_model
from posttrain.weights.lora import (
    attach_lora,
    count_parameters,
    has_lora,
    merge_lora,
    merged_lora,
    parameter_rows,
    sites,
    unmerge,
)
from posttrain.weights.save import save_model
from posttrain.weights.state import ModelWeights, Weights, without_adapter
from tests.models.goldens import COMPILER_OPTIONS
from tests.often import often
from tests.tiny import forward, tiny_config, tiny_model
from tests.weights.adapted import KINDS, TOKENS, disturb, model_of, trained


def program(model: Decoder) -> Callable[[Weights], Array]:
    """Logits of TOKENS under arrays of the model's structure, compiled once."""
    weights = ModelWeights(model)
    tokens = jnp.asarray(TOKENS, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    def run(arrays: Weights) -> Array:
        bound = weights.bind(arrays)
        return bound.logits(bound(tokens, positions, jnp.ones_like(tokens))[0])

    return jax.jit(run, compiler_options=COMPILER_OPTIONS)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", often(KINDS, "lora", "experts", "everything with dora", "tied with dora"))
def test_applied_is_merged_and_off_is_base(kind: str) -> None:
    model = model_of(kind)
    plain = program(model)
    base = plain(ModelWeights(model).read())
    attach_lora(model, KINDS[kind], seed=1)
    with_adapter, weights = program(model), ModelWeights(model)
    fresh = with_adapter(weights.read())
    assert_allclose(fresh, base, atol=2e-5)
    drawn = [w for path, w in weights.read().items() if path.endswith((".lora_a", ".lora_b")) and w.any()]
    assert drawn and all(w.std() > 0.04 for w in drawn)
    # Switched off it is bitwise the new adapter's model, later still the base.
    assert_array_equal(with_adapter(without_adapter(weights.read())), fresh)
    disturb(model)
    applied = with_adapter(weights.read())
    assert np.abs(applied - base).max() > 1.0
    assert_array_equal(with_adapter(without_adapter(weights.read())), fresh)
    alone = merged_lora(model)
    assert has_lora(model) and not has_lora(alone) and count_parameters(alone).share == 1.0
    assert_allclose(plain(ModelWeights(alone).read()), applied, atol=3e-5 * np.abs(applied).max())


@pytest.mark.thorough
def test_norms_are_computed_once_for_decoding() -> None:
    model = trained(model_of("dora"), KINDS["everything with dora"])
    tokens = jnp.asarray(TOKENS, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    ones = jnp.ones_like(tokens)

    def decode(model: Decoder, times: int) -> Array:
        def body(_: int, total: Array) -> Array:
            return total + model.logits(model(tokens, positions, ones)[0])

        return jax.lax.fori_loop(0, times, body, jnp.zeros((*tokens.shape, 96)))

    weights = ModelWeights(model)
    prepared = jax.jit(lambda arrays: decode(weights.bind(arrays).for_decoding(), 2), compiler_options=COMPILER_OPTIONS)
    expected = 2 * program(model)(weights.read())
    assert_allclose(prepared(weights.read()), expected, atol=1e-5 * np.abs(expected).max())

    def roots_in_the_loop(prepare: Callable[[Decoder], Decoder]) -> bool:
        steps = jax.make_jaxpr(lambda arrays: decode(prepare(weights.bind(arrays)), 2))(weights.read()).eqns
        (loop,) = (step for step in steps if step.primitive.name == "scan")
        return "sqrt" in str(loop.params["jaxpr"]).replace("rsqrt", "")

    assert roots_in_the_loop(lambda model: model) and not roots_in_the_loop(Decoder.for_decoding)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["everything with dora", "experts"])
def test_merging_in_place_and_back(kind: str) -> None:
    model = trained(model_of(kind), KINDS[kind])
    before, applied = ModelWeights(model).read(), forward(model, TOKENS)
    detached = merge_lora(model)
    assert not has_lora(model)
    assert_allclose(forward(model, TOKENS), applied, atol=3e-5 * np.abs(applied).max())
    unmerge(model, detached)
    after = ModelWeights(model).read()
    assert after.keys() == before.keys()
    for path, value in after.items():
        assert_allclose(value, before[path], atol=2e-6, err_msg=path)


def test_merging_bfloat16_adds_in_float32() -> None:
    model = trained(tiny_model(dtype=jnp.bfloat16), KINDS["lora"])
    site = sites(model)["stages.0.blocks.0.mlp.up"]
    assert site.adapter is not None
    arrays = (site.matrix, site.adapter.lora_a, site.adapter.lora_b)
    w, a, b = (np.asarray(x[...], np.float32) for x in arrays)
    detached = merge_lora(model)
    assert site.matrix[...].dtype == jnp.bfloat16
    assert_allclose(np.asarray(site.matrix[...], np.float32), w + 5.0 / 3.0 * a @ b, rtol=2.0**-8)
    unmerge(model, detached)
    back = np.asarray(site.matrix[...], np.float32)
    assert_allclose(back, w, atol=2.0**-8 * np.abs(w + 5.0 / 3.0 * a @ b).max() + 2.0**-8 * np.abs(w).max())


def test_dora_trains_norms_apart_from_directions() -> None:
    model = trained(model_of("dora"), KINDS["dora"])
    site = sites(model)["stages.0.blocks.0.attention.q"]
    assert site.adapter is not None
    w, a, b, magnitude = (
        np.asarray(x[...], np.float64)
        for x in (site.matrix, site.adapter.lora_a, site.adapter.lora_b, site.adapter.lora_magnitude)
    )
    moved = w + 2.0 * a @ b
    direction = moved / np.linalg.norm(moved, axis=-2, keepdims=True)
    exact = direction * (np.linalg.norm(w, axis=-2) + magnitude)[:, None]
    merge_lora(model)
    assert_allclose(site.matrix[...], exact, atol=2e-6)


def test_saved_merged(tmp_path: Path) -> None:
    model = trained(model_of("everything with dora"), KINDS["everything with dora"])
    save_model(model, tmp_path / "out")
    loaded = load_model(tmp_path / "out")
    expected = ModelWeights(merged_lora(model)).read()
    for path, value in ModelWeights(loaded).read().items():
        assert_allclose(value, expected[path], rtol=2e-6, atol=1e-7, err_msg=path)


def targeted(*targets: str, moe: bool = False, **fields: Any) -> set[str]:
    """Sites that get an adapter, without their stage."""
    model = model_of("experts" if moe else "lora")
    lora = LoRA(rank=2, targets=targets, **fields)

    def attached(model: Decoder) -> Decoder:
        attach_lora(model, lora, seed=0)
        return model

    model = nnx.eval_shape(attached, model)
    return {path.split("blocks.")[-1] for path, site in sites(model).items() if site.adapter is not None}


def test_targets() -> None:
    assert targeted("attention.q$", r"0\.mlp.(up|down)") == {"0.attention.q", "0.mlp.up", "0.mlp.down"}
    assert targeted("q_proj", "lm_head", "embed_tokens") == {"0.attention.q", "head", "embed"}
    linear = targeted("all-linear")
    assert linear == targeted("attention", "mlp") and len(linear) == 7
    assert targeted("self_attn.o_proj", "layers.1.mlp.up_proj") == {"0.attention.o", "0.mlp.up"}
    experts = {f"0.mlp.experts.{name}" for name in ("gate", "up", "down")}
    assert targeted("experts", moe=True) == targeted("mlp", moe=True) == experts
    assert targeted("gate_proj", moe=True) == {"0.mlp.experts.gate"}


def scales(**fields: Any) -> dict[str, list[float]]:
    model = model_of("lora")
    attach_lora(model, LoRA(**({"rank": 4, "targets": ("q_proj", "down_proj")} | fields)), seed=0)
    found = {path.split("blocks.0.")[1]: site.adapter for path, site in sites(model).items() if "blocks" in path}
    return {path: adapter.lora_scale[...].tolist() for path, adapter in found.items() if adapter is not None}


def test_scales_by_rank_pattern_and_layer() -> None:
    def uniform(q: float, down: float) -> dict[str, list[float]]:
        return {"attention.q": [q] * 3, "mlp.down": [down] * 3}

    assert scales() == scales(rslora=True) == uniform(2, 2)
    assert scales(alpha=12) == uniform(3, 3)
    assert scales(alpha=12, rslora=True) == uniform(6, 6)
    assert scales(alpha=12, rank_pattern={"down_proj": 2}, alpha_pattern={"attention": 4}) == uniform(1, 6)
    assert scales(layers=(2,)) == {"attention.q": [0, 0, 2], "mlp.down": [0, 0, 2]}
    assert scales(targets=("layers.1.self_attn.q_proj",)) == {"attention.q": [0, 2, 0]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"targets": ("query",)},
            "lora.targets: 'query' matches no matrix that supports adapters; available: attention.k, attention.o, "
            "attention.q, attention.v, embed, head, mlp.down, mlp.gate, mlp.up",
        ),
        (
            {"targets": ("mlp(",)},
            "lora.targets: 'mlp(' is not a valid regular expression: missing ), unterminated subpattern",
        ),
        ({"layers": (0, 3)}, "lora.layers: 3 is not a layer of the model; use 0 to 2"),
        (
            {"targets": ("mlp", "layers.1.self_attn.q_proj"), "layers": (0, 2)},
            "lora.layers=[0, 2]: 'layers.1.self_attn.q_proj' of targets matches no matrix of these layers",
        ),
        (
            {"targets": ("layers.1.self_attn.q_proj",), "layers": (1, 2)},
            "lora.layers: layer 2 has no matrix that targets match; remove it",
        ),
        ({"rank_pattern": {"lm_head": 3}}, "lora.rank_pattern: 'lm_head' matches no adapter; available: attention.k, "),
        ({"alpha_pattern": {"q_prj": 3}}, "lora.alpha_pattern: 'q_prj' matches no adapter; available: attention.k, "),
        (
            {"modules_to_save": ("lm_hed",)},
            "lora.modules_to_save: 'lm_hed' matches no module; available: attention.k, ",
        ),
        (
            {"modules_to_save": ("q_proj",)},
            "lora.modules_to_save: 'q_proj' matches stages.0.blocks.0.attention.q.kernel, which has an adapter; ",
        ),
        ({"dropout": 0.1, "targets": ("mlp", "head")}, "lora.dropout=0.1 does not apply to head; remove it from"),
    ],
)
def test_what_an_adapter_cannot_be(fields: dict[str, Any], message: str) -> None:
    model = model_of("lora")
    with pytest.raises(ConfigError) as raised:
        attach_lora(model, LoRA(rank=2, **fields), seed=0)
    assert str(raised.value).startswith(message)
    assert not has_lora(model)
    with pytest.raises(ConfigError) as raised:
        check_lora(tiny_config(vocab_size=96, tie_embeddings=False, windows=(None,)), LoRA(rank=2, **fields))
    assert str(raised.value).startswith(message)


def test_the_router_takes_none_and_experts_no_dropout() -> None:
    with pytest.raises(ConfigError, match="lora.targets: 'router' matches no matrix that supports adapters"):
        targeted("router", moe=True)
    with pytest.raises(ConfigError, match="lora.dropout=0.1 does not apply to stages.0.blocks.0.mlp.experts.down"):
        targeted("mlp", moe=True, dropout=0.1)


def test_one_adapter_at_a_time() -> None:
    model = model_of("lora")
    attach_lora(model, LoRA(rank=2), seed=0)
    with pytest.raises(ConfigError, match="lora: the model already has an adapter; merge it first"):
        attach_lora(model, LoRA(rank=2), seed=0)


def test_parameters_by_kind() -> None:
    model = model_of("lora")
    assert count_parameters(model).share == 1.0
    attach_lora(model, LoRA(rank=2, targets=("attention.q", "up_proj"), dora=True, modules_to_save=("norm",)), seed=0)
    rows = {row.kind: (row.trainable, row.total) for row in parameter_rows(model)}
    # Three layers: q is 32 x 32, up 32 x 48, each with a norm per column.
    assert rows["attention.q"] == (3 * (2 * 64 + 32), 3 * (2 * 64 + 32 + 32 * 32))
    assert rows["mlp.up"] == (3 * (2 * 80 + 48), 3 * (2 * 80 + 48 + 32 * 48))
    assert rows["mlp.gate"] == (0, 3 * 32 * 48) and rows["embed"] == rows["head"] == (0, 96 * 32)
    assert rows["norms"] == (3 * (2 * 32 + 2 * 8) + 32,) * 2
    count = count_parameters(model)
    assert (count.trainable, count.total) == tuple(sum(column) for column in zip(*rows.values(), strict=True))
