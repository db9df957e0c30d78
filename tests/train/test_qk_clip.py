"""QK-clip: each head's logits are multiplied by its factor and no other's; micro-batches, devices, few bits; refusals;
a run that diverges without it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from posttrain.batch import Batch
from posttrain.config import AdamW, LoRA, MeshSection, Muon
from posttrain.errors import ConfigError
from posttrain.losses.sft import SFTLoss
from posttrain.mesh import make_mesh
from posttrain.metrics import tables, to_host
from posttrain.models.config import Compute, ModelConfig
from posttrain.models.decoder import Decoder
from posttrain.models.hf import config_from_init
from posttrain.train.objective import TrainSettings
from posttrain.train.qk_clip import clip_factors, largest_of
from posttrain.train.trainer import Trainer
from posttrain.train.transformations import make_optimizer
from posttrain.tree import replace
from posttrain.weights.lora import attach_lora
from posttrain.weights.state import ModelWeights
from tests.often import often
from tests.tiny import random_model, sgd, tiny_config, tiny_model
from tests.train.test_trainer import rows

pytestmark = pytest.mark.fast

LATENT = {
    "model_type": "deepseek_v3",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 9,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "rope_theta": 1e4,
}


def config_of(kind: str) -> ModelConfig:
    if kind == "latent":
        return config_from_init({**LATENT})
    bias = kind == "biases"
    return tiny_config(num_layers=2, windows=(None,), qk_norm=False, bias=bias, initializer_range=0.4)


def model_of(kind: str, **options: Any) -> Decoder:
    return random_model(config_of(kind), Compute(dtype=jnp.dtype(jnp.float32)), dtype=jnp.float32, seed=0, **options)


@functools.cache
def logits_of(kind: str) -> Any:
    """(weights, batch) -> largest logits of each head."""
    weights = ModelWeights(model_of(kind))

    def run(arrays: Any, batch: Batch) -> Any:
        inputs = (jnp.asarray(x) for x in (batch.tokens, batch.positions, batch.segments))
        return largest_of(weights.bind(arrays).features(*inputs, None, largest=True)[3])

    return jax.jit(run)


@pytest.mark.parametrize("kind", often(("grouped", "biases", "latent"), "latent"))
def test_each_head_is_scaled_to_the_limit(kind: str) -> None:
    """In the layer where nothing before it has changed; a head below the limit keeps its logits."""
    config, weights, batch = config_of(kind), ModelWeights(model_of(kind)).read(), rows(0)
    if kind == "biases":
        weights = {path: w + 0.3 if path.endswith("bias") else w for path, w in weights.items()}
    found = logits_of(kind)(weights, batch)
    ((path, first),) = found.items()
    before = np.asarray(first.largest)[0]
    limit = float(np.sort(before)[1]) * 1.01
    factors = clip_factors(config, found, limit)
    assert {name.removeprefix(f"{path}.attention.") for name in factors} == {
        "grouped": {"q.kernel", "k.kernel"},
        "biases": {"q.kernel", "k.kernel", "q.bias", "k.bias"},
        "latent": {"q_up.kernel", "kv.kernel"},
    }[kind]
    assert all((np.asarray(factor) <= 1).all() for factor in factors.values())
    after = logits_of(kind)(weights | {name: weights[name] * factor for name, factor in factors.items()}, batch)
    assert (before > limit).sum() == 2
    assert_allclose(after[path].largest[0], np.minimum(before, limit), rtol=2e-5)


def trained(batch: Batch, **changes: Any) -> tuple[dict[str, Any], dict[str, float], dict[str, np.ndarray]]:
    """Parameters after a step, its metrics and its tables."""
    model, mesh = changes.pop("model", None) or model_of("grouped"), changes.pop("mesh", None)
    optimizer = changes.pop("optimizer", sgd(0.1))
    settings = TrainSettings(**{"temperature": 1.0, "max_grad_norm": 1e9, **changes})
    trainer = Trainer(model, SFTLoss(), optimizer, settings, mesh=mesh)
    metrics = trainer.step(batch)
    return jax.device_get(trainer.state()), to_host(metrics), tables(metrics)


LIMIT = 17.0


@functools.cache
def alone() -> tuple[dict[str, Any], dict[str, float], dict[str, np.ndarray]]:
    return trained(rows(0), qk_clip=LIMIT)


@pytest.mark.thorough
def test_the_update_is_scaled_too() -> None:
    plain, metrics, _ = trained(rows(0))
    assert not any(name.startswith("attention/") for name in metrics)
    heads = logits_of("grouped")(ModelWeights(model_of("grouped")).read(), rows(0))
    factors = clip_factors(config_of("grouped"), heads, LIMIT)
    for path, p in plain["params"].items():
        assert_allclose(alone()[0]["params"][path], p * np.asarray(factors.get(path, 1.0)), rtol=1e-6, err_msg=path)


def test_a_step_scales_what_it_has_seen() -> None:
    model = model_of("grouped")
    before = jax.device_get(ModelWeights(model).read())
    found, metrics, by_layer = trained(rows(0), model=model, optimizer=sgd(0.0), qk_clip=LIMIT)
    heads = logits_of("grouped")(ModelWeights(model_of("grouped")).read(), rows(0))
    factors = clip_factors(config_of("grouped"), heads, LIMIT)
    assert len(factors) == 2 and all((np.asarray(factor) < 1).any() for factor in factors.values())
    for path, p in before.items():
        assert_allclose(found["params"][path], p * np.asarray(factors.get(path, 1.0)), rtol=1e-6, err_msg=path)
    ((_, largest),) = heads.items()
    assert_allclose(by_layer["attention/largest_logits"], np.max(largest.largest, axis=1), rtol=1e-6)
    assert_allclose(metrics["attention/largest_logit"], np.max(largest.largest), rtol=1e-6)
    assert 0 < metrics["attention/clipped_heads"] < 1
    assert metrics["attention/clipped_heads"] == np.mean(np.asarray(largest.largest) > LIMIT)


def test_a_step_that_is_skipped_clips_nothing() -> None:
    model = model_of("grouped")
    before = jax.device_get(ModelWeights(model).read())
    optimizer = make_optimizer(AdamW(learning_rate=1e-2, update_norms=True), 4, seed=0, model=model)
    clipping = {"qk_clip": LIMIT, "max_grad_norm": 1e-3}
    settings = TrainSettings(**{"temperature": 1.0, **clipping})
    trainer = Trainer(model, SFTLoss(), optimizer, settings)
    metrics = to_host(trainer.step(rows(0), update=False))
    for path, p in before.items():
        assert_array_equal(ModelWeights(model).read()[path], p, err_msg=path)
    told = [metrics[name] for name in ("update_skipped", "attention/clipped_heads", "grad_clipped")]
    assert told == [1, 0, 0] and metrics["grad_norm"] > 1e-3
    metrics = to_host(trainer.step(rows(0)))
    assert metrics["attention/clipped_heads"] > 0 and metrics["grad_clipped"] == 1


MESHES = ({"data": 8}, {"fsdp": 2, "context": 2, "tensor": 2}, {"data": 2, "fsdp": 4})


@pytest.mark.thorough
@pytest.mark.parametrize("axes", MESHES)
@pytest.mark.parametrize("micro", [None, 8])
def test_devices_and_micro_batches_give_the_step_of_one(axes: dict[str, int], micro: int | None) -> None:
    """Rows of padding alone, and padding in rows, have no part in it."""
    batch = rows(0)
    if micro is not None:
        batch = jax.tree.map(lambda x: np.concatenate([x, np.zeros_like(x)]), batch)
    once = micro is not None and {*axes} <= {"data", "fsdp"}
    changes: dict[str, Any] = {"mesh": make_mesh(MeshSection(**axes)), "micro_batch_rows": micro, "gather_once": once}
    found, metrics, _ = trained(batch, qk_clip=LIMIT, **changes)
    expected, expected_metrics, _ = alone()
    for path, p in expected["params"].items():
        assert_allclose(found["params"][path], p, atol=2e-5, err_msg=path)
    for name in ("attention/largest_logit", "attention/clipped_heads"):
        assert_allclose(metrics[name], expected_metrics[name], rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("rounding", [False, True])
def test_masters_and_rounded_parameters_are_scaled_too(rounding: bool) -> None:
    model = tiny_model(num_layers=2, windows=(None,), qk_norm=False, initializer_range=0.4, dtype=jnp.bfloat16)
    section = Muon(learning_rate=1e-9, stochastic_rounding=rounding, moments="int8" if rounding else "float32")
    before, optimizer = jax.device_get(ModelWeights(model).read()), make_optimizer(section, 3, seed=1, model=model)
    state, _, _ = trained(rows(0), model=model, optimizer=optimizer, qk_clip=LIMIT / 3)
    for path in ("stages.0.blocks.0.attention.q.kernel", "stages.0.blocks.0.attention.k.kernel"):
        after = state["params"][path] if rounding else state["opt_state"].masters[path]
        norms = (np.linalg.norm(np.asarray(x, np.float32), axis=1) for x in (after, before[path]))
        ratio = np.divide(*norms)
        assert ratio.min() < 0.95 and ratio.max() < 1.01
        by_head = ratio.reshape(2, -1, 8)
        assert_allclose(by_head, np.broadcast_to(by_head[..., :1], by_head.shape), rtol=1e-2 if rounding else 1e-4)


@pytest.mark.thorough
def test_a_skipped_update_scales_nothing() -> None:
    model = model_of("grouped")
    before = jax.device_get(ModelWeights(model).read())
    batch = rows(0)
    state, metrics, _ = trained(replace(batch, loss_weight=0 * batch.loss_weight), model=model, qk_clip=LIMIT)
    assert metrics["update_skipped"] == 1
    jax.tree.map(assert_array_equal, state["params"], before)


def test_models_without_weights_to_scale_are_refused() -> None:
    with pytest.raises(ConfigError, match="qk_clip: qwen3 normalises queries and keys"):
        trained(rows(0), model=tiny_model(), qk_clip=LIMIT)
    model = model_of("grouped")
    attach_lora(model, LoRA(rank=4), seed=0)
    with pytest.raises(ConfigError, match=r"qk_clip scales .* an adapter .model.lora, model.adapter. leaves frozen"):
        trained(rows(0), model=model, qk_clip=LIMIT)
    model = model_of("grouped")
    model.compute = replace(model.compute, attention="tokamax")
    with pytest.raises(ConfigError, match="'tokamax' (does not return the largest logits|is not installed)"):
        trained(rows(0), model=model, qk_clip=LIMIT)


def copies(seed: int) -> Batch:
    """Rows whose second half repeats the first: only attention tells what comes next."""
    first = np.random.default_rng(seed).integers(1, 64, (16, 12)).astype(np.int32)
    tokens = np.concatenate([first, first], axis=1)
    positions = np.broadcast_to(np.arange(24, dtype=np.int32), tokens.shape).copy()
    weight = (positions > 12).astype(np.float32)
    return Batch(tokens=tokens, positions=positions, segments=np.ones_like(tokens), loss_weight=weight)


def stressed(kind: str, limit: float, seed: int, steps: int) -> dict[str, float]:
    """Metrics at the end of a run whose queries and keys have a rate of 0.3; it ends early once it has learned."""
    if kind == "latent":
        config = config_from_init({**LATENT, "vocab_size": 64, "initializer_range": 0.1})
        model = random_model(config, Compute(dtype=jnp.dtype(jnp.float32)), dtype=jnp.float32, seed=seed)
    else:
        model = tiny_model(seed, num_layers=2, windows=(None,), qk_norm=False, initializer_range=0.1, vocab_size=64)
    groups = [{"match": r"attention\.(q|k|q_up|kv)\.", "learning_rate": 0.3}]
    optimizer = make_optimizer(Muon(learning_rate=0.02, warmup_steps=10, groups=groups), 240, 0, model=model)
    trainer = Trainer(model, SFTLoss(), optimizer, TrainSettings(temperature=1.0, max_grad_norm=1.0, qk_clip=limit))
    metrics: dict[str, float] = {"loss": 9.0}
    for step in range(steps):
        if metrics["loss"] > LEARNED[kind]:
            metrics = to_host(trainer.step(copies(1000 * seed + step)))
    return metrics


LEARNED = {"grouped": 0.5, "latent": 1.5}


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", LEARNED)
def test_a_rate_that_diverges_without_it_and_learns_with_it(kind: str, seed: int) -> None:
    """The largest logit grows to thousands and the loss stays that of guessing, log 63; with the limit rows are copied,
    on each of three seeds, also by latent attention."""
    diverged, learned = stressed(kind, 1e9, seed, 300), stressed(kind, 30.0, seed, 900)
    assert diverged["loss"] > 3.9 and diverged["attention/largest_logit"] > 3000
    assert learned["loss"] < LEARNED[kind] and learned["attention/largest_logit"] < 100
