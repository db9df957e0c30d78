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
from jax.sharding import Mesh
from numpy.testing import assert_allclose, assert_array_equal

from posttrain import objective
from posttrain.batch import Batch
from posttrain.config import ConfigError, LoRA, MeshSection, OptimizerSection
from posttrain.losses.sft import SFTLoss
from posttrain.mesh import make_mesh
from posttrain.models.adapter import drop
from posttrain.models.config import Compute
from posttrain.models.decoder import Decoder
from posttrain.models.hf import config_from_init
from posttrain.optim import make_optimizer
from posttrain.rl.cluster import Cluster, Role
from posttrain.rollout.native import NativeEngine
from posttrain.trainer import Trainer
from posttrain.weights.load import check_lora, init_model, load_model
from posttrain.weights.lora import (
    attach_lora,
    count_parameters,
    has_lora,
    merge,
    merged,
    parameter_rows,
    sites,
    unmerge,
)
from posttrain.weights.save import save_model
from posttrain.weights.state import ModelWeights, Weights, without_adapter
from tests.models.goldens import COMPILER_OPTIONS
from tests.tiny import forward, random_model, tiny_config, tiny_model


@pytest.fixture(autouse=True)
def scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator, and compiled in less time: short stacks are not unrolled either."""
    monkeypatch.setattr(objective, "UNROLLED_LAYERS_ON_CPU", 0)


TOKENS = np.random.default_rng(0).integers(0, 96, (2, 10))

MOE = {
    "model_type": "qwen3_moe",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}

DENSE = {key: value for key, value in MOE.items() if "expert" not in key and key != "moe_intermediate_size"}
DENSE |= {"model_type": "qwen3"}

KINDS: dict[str, LoRA] = {
    "lora": LoRA(rank=3, alpha=5.0),
    "rslora": LoRA(rank=4, alpha=3.0, rslora=True),
    "dora": LoRA(rank=3, dora=True),
    "everything": LoRA(rank=3, targets=("all-linear", "embed", "head")),
    "everything with dora": LoRA(rank=3, targets=("all-linear", "embed", "head"), dora=True),
    "layers and ranks": LoRA(
        rank=2, targets=("all-linear",), layers=(0, 2), rank_pattern={"q_proj": 4, "layers.2.mlp.up_proj": 1}, dora=True
    ),
}


def model_of(kind: str, seed: int = 0) -> Decoder:
    """The tiny model with its layers in one stack and, unless tied, a head; of experts where the name says so."""
    if kind.startswith("experts"):
        return random_model(config_from_init(MOE), Compute.of(jnp.float32), dtype=jnp.float32, seed=seed)
    return tiny_model(seed, vocab_size=96, tie_embeddings=kind.startswith("tied"), windows=(None,))


KINDS |= {
    "tied": LoRA(rank=3, targets=("attention", "embed")),
    "tied with dora": LoRA(rank=3, targets=("attention", "embed"), dora=True),
    "experts": LoRA(rank=3, targets=("attention", "experts")),
    "experts with dora": LoRA(rank=3, targets=("experts",), dora=True),
}


def disturb(model: Decoder) -> None:
    """Give the adapter values as training leaves them: what a layer does not have stays 0."""
    weights, draw = ModelWeights(model), np.random.default_rng(2)
    new, every = {}, weights.read()
    for path in sorted(weights.trainable()):
        w = np.asarray(every[path], np.float32)
        active = np.asarray(every.get(path.rsplit(".", 1)[0] + ".lora_scale", 1.0)) != 0
        noise = draw.normal(0, 0.3, w.shape) * active.reshape(active.shape + (1,) * (w.ndim - active.ndim))
        new[path] = jnp.asarray(w + noise, every[path].dtype)
    weights.write(new)


def trained(model: Decoder, lora: LoRA) -> Decoder:
    attach_lora(model, lora, seed=1)
    disturb(model)
    return model


def program(model: Decoder) -> Callable[[Weights], Array]:
    """Logits of TOKENS under arrays of the model's structure, compiled once."""
    weights = ModelWeights(model)
    tokens = jnp.asarray(TOKENS, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    def run(arrays: Weights) -> Array:
        bound = weights.bind(arrays)
        return bound.logits(bound(tokens, positions, jnp.ones_like(tokens))[0])

    return jax.jit(run, compiler_options=COMPILER_OPTIONS)


@pytest.mark.parametrize("kind", KINDS)
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
    alone = merged(model)
    assert has_lora(model) and not has_lora(alone) and count_parameters(alone).share == 1.0
    assert_allclose(plain(ModelWeights(alone).read()), applied, atol=3e-5 * np.abs(applied).max())


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


@pytest.mark.parametrize("kind", ["everything with dora", "experts"])
def test_merging_in_place_and_back(kind: str) -> None:
    model = trained(model_of(kind), KINDS[kind])
    before, applied = ModelWeights(model).read(), forward(model, TOKENS)
    detached = merge(model)
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
    detached = merge(model)
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
    merge(model)
    assert_allclose(site.matrix[...], exact, atol=2e-6)


def test_saved_merged(tmp_path: Path) -> None:
    model = trained(model_of("everything with dora"), KINDS["everything with dora"])
    save_model(model, tmp_path / "out")
    loaded = load_model(tmp_path / "out")
    expected = ModelWeights(merged(model)).read()
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
            "lora.targets: 'query' matches nothing that takes an adapter; there are attention.k, attention.o, "
            "attention.q, attention.v, embed, head, mlp.down, mlp.gate, mlp.up",
        ),
        ({"targets": ("mlp(",)}, "lora.targets: 'mlp(' is no regular expression: missing ), unterminated subpattern"),
        ({"layers": (0, 3)}, "lora.layers: 3 is no layer of the model, whose layers are 0 to 2"),
        ({"rank_pattern": {"lm_head": 3}}, "lora.rank_pattern: 'lm_head' matches no adapter; there are attention.k, "),
        ({"alpha_pattern": {"q_prj": 3}}, "lora.alpha_pattern: 'q_prj' matches no adapter; there are attention.k, "),
        ({"modules_to_save": ("lm_hed",)}, "lora.modules_to_save: 'lm_hed' matches no module; there are attention.k, "),
        (
            {"modules_to_save": ("q_proj",)},
            "lora.modules_to_save: 'q_proj' matches stages.0.blocks.0.attention.q.kernel, which has an adapter; ",
        ),
        ({"dropout": 0.1, "targets": ("mlp", "head")}, "lora.dropout=0.1 does not act on head; leave it out of"),
    ],
)
def test_what_an_adapter_cannot_be(fields: dict[str, Any], message: str) -> None:
    model = model_of("lora")
    with pytest.raises(ConfigError) as raised:
        attach_lora(model, LoRA(rank=2, **fields), seed=0)
    assert str(raised.value).startswith(message)
    assert not has_lora(model)
    with pytest.raises(ConfigError) as raised:
        check_lora(tiny_config(vocab_size=96, tie_embeddings=False), LoRA(rank=2, **fields))
    assert str(raised.value).startswith(message)


def test_the_router_takes_none_and_experts_no_dropout() -> None:
    with pytest.raises(ConfigError, match="lora.targets: 'router' matches nothing that takes an adapter"):
        targeted("router", moe=True)
    with pytest.raises(ConfigError, match="lora.dropout=0.1 does not act on stages.0.blocks.0.mlp.experts.down"):
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


def batch_of(tokens: np.ndarray) -> Batch:
    """Rows of one sequence each, loss on all tokens but the first."""
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    weight = (positions > 0).astype(np.float32)
    return Batch(tokens=tokens, positions=positions, segments=np.ones_like(tokens), loss_weight=weight)


BATCH = batch_of(np.random.default_rng(1).integers(3, 96, (4, 12), dtype=np.int32))


def trainer_of(model: Decoder, *, seed: int | None = 0, rows: int | None = None, mesh: Mesh | None = None) -> Trainer:
    optimizer = make_optimizer(OptimizerSection(learning_rate=1e-2, weight_decay=0.1), num_steps=10)
    fixed: dict[str, Any] = {"temperature": 1.0, "max_grad_norm": 1.0}
    return Trainer(model, SFTLoss(), optimizer, dropout_seed=seed, micro_batch_rows=rows, mesh=mesh, **fixed)


def changed(trainer: Trainer) -> dict[str, np.ndarray]:
    """What two steps change."""
    before = {path: np.asarray(w) for path, w in trainer.weights.items()}
    for _ in range(2):
        trainer.step(BATCH)
    after = {path: np.asarray(w) for path, w in trainer.weights.items()}
    return {path: w - before[path] for path, w in after.items() if not np.array_equal(w, before[path])}


def test_only_what_has_an_adapter_or_is_saved_is_trained() -> None:
    model = model_of("lora")
    lora = LoRA(
        rank=2,
        targets=("q_proj", "v_proj"),
        layers=(1,),
        rank_pattern={"v_proj": 3},
        dora=True,
        modules_to_save=("head",),
    )
    attach_lora(model, lora, seed=0)
    moved = changed(trainer_of(model))
    names = ("lora_a", "lora_b", "lora_magnitude")
    block = "stages.0.blocks.0.attention"
    assert moved.keys() == {f"{block}.{m}.adapters.kernel.{n}" for m in ("q", "v") for n in names} | {"head.kernel"}
    for path, difference in moved.items():
        if path != "head.kernel":
            assert [bool(layer.any()) for layer in difference] == [False, True, False]


def test_the_reference_stays_the_base_where_modules_are_trained_in_full() -> None:
    model = model_of("lora")
    attach_lora(model, LoRA(rank=2, targets=("q_proj",), dora=True, modules_to_save=("head", "norm")), seed=0)
    trainer = trainer_of(model)
    engine = NativeEngine(model, slots=1, max_length=16, decode_steps=4, tokenizer_decode=str, version=0)
    cluster = Cluster(trainer, engine, keep_reference=True)
    before = cluster.logps(Role.REFERENCE, BATCH)
    assert_array_equal(cluster.logps(Role.ACTOR, BATCH), before)
    trainer.step(BATCH)
    assert_array_equal(cluster.logps(Role.REFERENCE, BATCH), before)
    assert np.abs(cluster.logps(Role.ACTOR, BATCH) - before).max() > 1e-3


def losses(trainer: Trainer, steps: int) -> list[float]:
    return [float(trainer.step(BATCH)["loss"].value()) for _ in range(steps)]


def with_dropout(rate: float = 0.5, **fields: Any) -> Decoder:
    return trained(model_of("lora"), LoRA(rank=2, dropout=rate, **fields))


@pytest.mark.thorough
def test_dropout_is_for_training_only_and_depends_on_seed_and_step() -> None:
    trainer, other = (trainer_of(with_dropout(), seed=seed) for seed in (0, 1))
    off = trainer_of(with_dropout(0.0), seed=None)
    assert float(trainer.evaluate([BATCH])["loss"].value()) == float(off.evaluate([BATCH])["loss"].value())
    assert_array_equal(trainer.stats(BATCH).logps, off.stats(BATCH).logps)
    start = jax.tree.map(jnp.copy, trainer.state())
    plain = losses(trainer, 3)
    assert plain[0] not in (losses(off, 1)[0], losses(other, 1)[0])
    trainer.restore(start, 0)
    first, middle = losses(trainer, 2), jax.tree.map(jnp.copy, trainer.state())
    trainer.restore(middle, 2)
    assert first + losses(trainer, 1) == plain
    # The same weights at another step lose other parts.
    trainer.restore(jax.tree.map(jnp.copy, other.state()), 1)
    again = jax.tree.map(jnp.copy, trainer.state())
    at_one = losses(trainer, 1)
    trainer.restore(again, 2)
    assert losses(trainer, 1) != at_one
    with pytest.raises(ValueError, match="dropout of an adapter and noise_alpha draw random numbers; give dropout_"):
        trainer_of(with_dropout(), seed=None)


@pytest.mark.thorough
def test_dropout_keeps_the_mean_and_differs_by_layer_and_micro_batch() -> None:
    model = with_dropout(0.25, targets=("mlp.down",))
    weights = ModelWeights(model)
    bound = weights.bind(weights.read())
    drop(bound, jax.random.key(0))
    adapter = sites(bound)["stages.0.blocks.0.mlp.down"].adapter
    assert adapter is not None
    keys = jax.random.key_data(adapter.key[...])
    assert len({tuple(key.tolist()) for key in keys}) == 3
    adapter.key.set_value(adapter.key[...][0])
    seen: list[Any] = []
    adapter.down(jnp.ones((64, 64, 48)), lambda x, _: seen.append(x) or x)
    assert_allclose(sorted(set(np.unique(seen[0]))), [0.0, 1 / 0.75], rtol=1e-6)
    assert abs(float(seen[0].mean()) - 1.0) < 5e-3
    # Equal rows in two micro-batches lose different parts.
    trainer = trainer_of(with_dropout(), rows=1)
    start = jax.tree.map(jnp.copy, trainer.state())
    twice = float(trainer.step(batch_of(np.tile(BATCH.tokens[:1], (2, 1))))["loss"].value())
    trainer.restore(start, 0)
    assert float(trainer.step(batch_of(BATCH.tokens[:1]))["loss"].value()) != twice


@pytest.mark.thorough
def test_dropout_is_the_same_where_layers_are_unrolled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer loses what it loses in the loop."""
    scanned = trainer_of(with_dropout(), rows=2)
    expected, updates = losses(scanned, 2), changed(scanned)
    monkeypatch.setattr(objective, "UNROLLED_LAYERS_ON_CPU", 8)
    unrolled = trainer_of(with_dropout(), rows=2)
    assert_allclose(losses(unrolled, 2), expected, rtol=1e-6)
    for path, update in changed(unrolled).items():
        assert_allclose(update, updates[path], rtol=1e-4, atol=1e-7, err_msg=path)


SPLIT = {"q": "tensor", "o": "fsdp", "gate": "tensor", "down": "fsdp", "embed": "fsdp", "head": "tensor"}
"""Mesh axis of the outputs of what an adapter stands beside."""


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["everything with dora", "experts with dora"])
def test_adapters_on_sharded_models(kind: str) -> None:
    mesh = make_mesh(MeshSection(data=1, fsdp=2, tensor=2, expert=2))
    fields = (MOE if kind.startswith("experts") else DENSE) | {"num_hidden_layers": 1}
    alone, spread = (init_model(fields, dtype=jnp.float32, seed=0, lora=KINDS[kind], mesh=m) for m in (None, mesh))
    ours, theirs = ModelWeights(alone).read(), ModelWeights(spread).read()
    for path, w in theirs.items():
        assert_array_equal(w, ours[path], err_msg=path)
        owner, _, name = path.partition(".adapters.")
        axis = SPLIT.get(name.split(".")[0] if owner.endswith("experts") else owner.rsplit(".", 1)[-1])
        if name.endswith((".lora_b", ".lora_magnitude")) and axis is not None:
            assert w.sharding.spec[-1] == axis, path
            assert w.addressable_shards[0].data.shape[-1] == w.shape[-1] // 2
    one, eight = (losses(trainer_of(model, mesh=m), 3) for model, m in ((alone, None), (spread, mesh)))
    assert_allclose(eight, one, rtol=2e-5)
    together = merged(spread)
    assert_allclose(forward(together, TOKENS), forward(merged(alone), TOKENS), atol=2e-3)
    for path, w in ModelWeights(together).read().items():
        assert w.sharding.is_equivalent_to(theirs[path].sharding, w.ndim), path
