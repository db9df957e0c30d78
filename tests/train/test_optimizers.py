"""Schedules against Hugging Face's, AdamW against torch's, float32 masters, clipping."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from posttrain.config import OptimizerSection
from posttrain.train.optimizers import OptaxOptimizer, clipped, decay_mask, global_norm, make_optimizer, make_schedule

pytestmark = pytest.mark.fast

GOLDENS = Path(__file__).parents[1] / "goldens" / "losses" / "sampling.json"
SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant_with_warmup": "constant"}
CASES = [case for case in json.loads(GOLDENS.read_text())["schedules"] if case["name"] in SCHEDULES]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['name']}-{case['warmup']}")
def test_schedules_are_those_of_transformers(case):
    section = OptimizerSection(
        learning_rate=case["base_lr"], schedule=SCHEDULES[case["name"]], warmup_steps=case["warmup"]
    )
    schedule = make_schedule(section, case["total"])
    expected = case["lr_used_at_optimizer_step"]
    assert len(expected) == case["total"]
    np.testing.assert_allclose([schedule(step) for step in range(case["total"])], expected, rtol=2e-6, atol=0)
    assert float(schedule(0)) == (0.0 if case["warmup"] else np.float32(case["base_lr"]))
    if section.schedule != "constant":
        assert abs(schedule(case["total"])) < 1e-16


def parameters(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"layers.q.kernel": (2, 4, 3), "layers.q.bias": (2, 3), "layers.norm.scale": (2, 4), "embedding": (5, 4)}
    return {n: jax.random.normal(k, s, dtype) for k, (n, s) in zip(keys, shapes.items(), strict=True)}


@functools.partial(jax.jit, static_argnums=0)
def apply(optimizer, grads, state, params):
    return optimizer.update(grads, state, params, lambda g: g.astype(jnp.float32), None)


def test_only_matrices_and_embeddings_decay():
    names = (
        "a.kernel",
        "embed.embedding",
        "a.lora_a",
        "a.lora_b",
        "scale.kernel",
        "a.bias",
        "norm.scale",
        "scale",
        "a.sinks",
    )
    assert decay_mask({n: jnp.zeros((2, 2)) for n in names}) == {n: i < 5 for i, n in enumerate(names)}


def test_adamw_is_torchs_over_20_steps():
    torch = pytest.importorskip("torch")
    section = OptimizerSection(
        learning_rate=0.02, schedule="cosine", warmup_steps=4, weight_decay=0.3, beta1=0.8, beta2=0.95, eps=1e-6
    )
    params = parameters()
    grads = [{n: np.sin(np.asarray(p) * (i + 1)) * np.float32(0.1) for n, p in params.items()} for i in range(20)]
    twins = {n: torch.nn.Parameter(torch.tensor(np.asarray(p))) for n, p in params.items()}
    groups = [
        {"params": [t for n, t in twins.items() if n.endswith(("kernel", "embedding"))], "weight_decay": 0.3},
        {"params": [t for n, t in twins.items() if n.endswith(("bias", "scale"))], "weight_decay": 0.0},
    ]
    torch_optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.8, 0.95), eps=1e-6)
    schedule = make_schedule(section, 20)
    tx = make_optimizer(section, 20)
    state = tx.init(params)
    for step, grad in enumerate(grads):
        params, state = apply(tx, grad, state, params)
        for group in torch_optimizer.param_groups:
            group["lr"] = float(schedule(step))
        for name, twin in twins.items():
            twin.grad = torch.tensor(grad[name])
        torch_optimizer.step()
    for name, twin in twins.items():
        np.testing.assert_allclose(params[name], twin.detach().numpy(), rtol=1e-6, atol=1e-6)
        assert np.abs(params[name] - parameters()[name]).max() > 0.05


def test_adamw_is_optaxs_with_a_skipped_update_between():
    section = OptimizerSection(learning_rate=0.02, schedule="cosine", weight_decay=0.3, beta2=0.95)
    decayed = {"b1": section.beta1, "b2": section.beta2, "eps": section.eps, "weight_decay": section.weight_decay}
    twin = OptaxOptimizer(optax.adamw(make_schedule(section, 9), mask=decay_mask, **decayed))
    ends = []
    for optimizer in (make_optimizer(section, 9), twin):
        params = parameters()
        state = optimizer.init(params)
        for step in range(9):
            grads = jax.tree.map(lambda p, step=step: jnp.sin(p * (step + 1)), params)
            prepare, usable = (lambda g: 0.1 * g), jnp.bool_(step != 4)
            new, new_state = optimizer.update(grads, state, params, prepare, usable)
            if step == 4:
                jax.tree.map(np.testing.assert_array_equal, (new, new_state), (params, state))
            params, state = new, new_state
        ends.append(params)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), *ends)


def test_bfloat16_parameters_are_the_rounded_float32_run():
    section = OptimizerSection(learning_rate=0.05, weight_decay=0.1)
    tx = make_optimizer(section, 10)
    low, full = parameters(jnp.bfloat16), jax.tree.map(lambda p: p.astype(jnp.float32), parameters(jnp.bfloat16))
    low_state, full_state = tx.init(low), tx.init(full)
    assert {x.dtype for x in jax.tree.leaves(low_state)} == {jnp.dtype("float32"), jnp.dtype("int32")}
    assert full_state.masters == {}
    for step in range(10):
        grads = {n: jnp.asarray(np.cos(np.asarray(p) + step), jnp.bfloat16) for n, p in full.items()}
        low, low_state = apply(tx, grads, low_state, low)
        full, full_state = apply(tx, grads, full_state, full)
    for name in low:
        np.testing.assert_array_equal(low_state.masters[name], full[name])
        np.testing.assert_array_equal(low[name], full[name].astype(jnp.bfloat16))


def test_clipping_scales_the_whole_gradient():
    def with_norm(grads, max_norm):
        norm = global_norm(grads)
        return clipped(grads, norm, max_norm), norm

    grads = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[4.0]], jnp.bfloat16)}
    less, norm = with_norm(grads, 1.0)
    assert float(norm) == 5.0
    np.testing.assert_allclose(less["a"], [0.6, 0.0], rtol=1e-6)
    assert less["b"].dtype == jnp.bfloat16
    same, norm = with_norm(grads, 5.0)
    assert all((same[n] == grads[n]).all() for n in grads)
    assert norm.dtype == jnp.float32
    big, norm = with_norm({"a": jnp.full((4,), 1e4, jnp.bfloat16)}, 1.0)
    np.testing.assert_allclose(norm, 2e4, rtol=1e-2)
    assert float(big["a"][0]) == 0.5
    for bad in (jnp.nan, jnp.inf):
        broken, norm = with_norm({"a": jnp.array([bad, 1.0])}, 1.0)
        assert not jnp.isfinite(norm)
        assert jnp.isnan(broken["a"]).all()
