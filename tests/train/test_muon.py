"""Muon against the SVD, torch's and optax's; matrices, heads, experts and groups; several devices; Adafactor of
stacks."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from posttrain.config import Adafactor, AdamW, GroupedOptimizer, Lion, LoRA, MeshSection, Muon, UserOptimizer
from posttrain.errors import ConfigError
from posttrain.kernels.platform import traced_for
from posttrain.losses.sft import SFTLoss
from posttrain.mesh import make_mesh
from posttrain.metrics import to_host
from posttrain.train.checkpoint import Checkpointer
from posttrain.train.muon import orthogonalized
from posttrain.train.objective import TrainSettings
from posttrain.train.programs import placed_shapes
from posttrain.train.trainer import Trainer
from posttrain.train.transformations import groups_of, make_optimizer
from posttrain.weights.lora import attach_lora
from posttrain.weights.state import ModelWeights
from tests.mixtures import mixture_config, mixture_model
from tests.often import often
from tests.tiny import tiny_model
from tests.train.test_trainer import rows

pytestmark = pytest.mark.fast

Q, UP, NORM, EXPERTS = (
    f"stages.0.blocks.0.{name}" for name in ("attention.q.kernel", "mlp.up.kernel", "mlp_norm.scale", "mlp.experts.up")
)


@functools.cache
def weights(kind: str = "dense") -> ModelWeights:
    if kind == "mixture":
        return ModelWeights(mixture_model(mixture_config(num_layers=2, windows=(None,), num_dense=0)))
    model = tiny_model(num_layers=2, windows=(None,), tie_word_embeddings=False)
    if kind == "lora":
        attach_lora(model, LoRA(rank=4), seed=0)
    return ModelWeights(model)


def gradients(params: dict[str, Any], step: int) -> dict[str, Any]:
    return {path: jnp.cos(jnp.float32(step + 1) * 9 * p.astype(jnp.float32)) * 0.1 for path, p in params.items()}


def trained(section: GroupedOptimizer, paths: Sequence[str], kind: str = "dense", steps: int = 3) -> dict[str, Any]:
    """Parameters after updates with made-up gradients."""
    model = weights(kind)
    optimizer = make_optimizer(section, steps, seed=0, model=model.model)
    params = model.read(paths.__contains__)
    state = optimizer.init(params)
    update = jax.jit(lambda g, s, p: optimizer.update(g, s, p, lambda x: x, None))
    for step in range(steps):
        params, state = update(gradients(params, step), state, params)
    found: dict[str, Any] = jax.device_get(params)
    return found


SHAPES = ((7, 5), (5, 7), (1, 9), (2, 33), (3, 17, 40), (2, 2, 24, 24))


@pytest.mark.parametrize("shape", [pytest.param(s, marks=() if len(s) == 3 else pytest.mark.thorough) for s in SHAPES])
def test_the_iteration_goes_to_the_polar_factor(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    u, _, v = np.linalg.svd(x, full_matrices=False)
    assert_allclose(orthogonalized(jnp.asarray(1e3 * x), "polar_express", 12), u @ v, atol=3e-6)
    for iteration, low, high in (("polar_express", 0.85, 1.15), ("newton_schulz", 0.5, 1.25)):
        singular = np.linalg.svd(orthogonalized(jnp.asarray(x), iteration, 5), compute_uv=False)
        assert low < singular.min() and singular.max() < high
    assert_array_equal(orthogonalized(jnp.zeros(shape), "polar_express", 5), np.zeros(shape))


@pytest.mark.parametrize(("scale", "nesterov"), often((("rms", True), ("original", False)), ("rms", True)))
def test_muon_is_torchs(scale: Any, nesterov: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer's matrix [out, in] of its own, all else with torch's AdamW; in float32, where torch's is bfloat16."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.clone())
    adjust = {"rms": "match_rms_adamw", "original": "original"}[scale]
    common: dict[str, Any] = {"weight_decay": 0.3, "momentum": 0.9, "nesterov": nesterov}
    section = Muon(learning_rate=0.02, scale=scale, iteration="newton_schulz", **common)
    paths = (Q, UP, NORM, "embed.embedding")
    start, found = weights().read(paths.__contains__), trained(section, paths, steps=4)

    def twin(x: Any) -> Any:
        return torch.nn.Parameter(torch.tensor(np.array(x)))

    twins = {(path, i): twin(start[path][i].T) for path in (Q, UP) for i in range(2)}
    rest = {path: twin(start[path]) for path in paths[2:]}
    groups = [{"params": [p], "weight_decay": 0.3 * (path != NORM)} for path, p in rest.items()]
    optimizers = (
        torch.optim.Muon(twins.values(), lr=0.02, adjust_lr_fn=adjust, **common),
        torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95)),
    )
    for step in range(4):
        for one in (*twins.values(), *rest.values()):
            one.grad = torch.cos((step + 1) * 9 * one.detach()) * 0.1
        for optimizer in optimizers:
            optimizer.step()
    for (path, i), one in twins.items():
        assert_allclose(found[path][i], one.detach().numpy().T, atol=1e-5, err_msg=path)
    for path, one in rest.items():
        assert_allclose(found[path], one.detach().numpy(), atol=1e-5, err_msg=path)


@pytest.mark.thorough
def test_muon_without_nesterov_is_optaxs() -> None:
    found = trained(Muon(learning_rate=0.02, iteration="newton_schulz", nesterov=False, weight_decay=0.1), (Q, UP))
    twin = optax.contrib.muon(0.02, nesterov=False, consistent_rms=0.2, weight_decay=0.1, eps=0.0)
    for layer in range(2):
        matrices = {path: weights().read()[path][layer] for path in (Q, UP)}
        state = twin.init(matrices)
        for step in range(3):
            changes, state = twin.update(gradients(matrices, step), state, matrices)
            matrices = optax.apply_updates(matrices, changes)
        for path, matrix in matrices.items():
            assert_allclose(found[path][layer], matrix, atol=1e-5)


def test_each_expert_and_each_head_is_a_matrix_of_its_own() -> None:
    section = Muon(learning_rate=1.0, scale="original", num_iterations=12, per_head=True)
    k, o = Q.replace(".q.", ".k."), Q.replace(".q.", ".o.")
    start, end = weights("mixture").read(), trained(section, (EXPERTS, Q, k, o), "mixture", steps=1)
    attention = weights("mixture").model.config.stages[0].blocks[0].attention
    changed = {path: np.asarray(start[path]) - p for path, p in end.items()}

    def assert_orthogonal(matrices: np.ndarray) -> None:
        scale = np.sqrt(max(1.0, matrices.shape[-1] / matrices.shape[-2]))
        assert_allclose(np.linalg.svd(matrices, compute_uv=False), scale, rtol=1e-3)

    assert changed[EXPERTS].ndim == 4
    assert_orthogonal(changed[EXPERTS])
    for path, heads, axis in (
        (Q, attention.num_heads, -1),
        (k, attention.num_kv_heads, -1),
        (o, attention.num_heads, 1),
    ):
        assert_orthogonal(np.stack(np.split(changed[path], heads, axis=axis)))


@pytest.mark.thorough
def test_adafactor_is_optaxs_of_each_matrix() -> None:
    section = Adafactor(learning_rate=0.01, weight_decay=0.0, min_factored=8, momentum=0.5)
    found = trained(section, (Q, NORM, EXPERTS), "mixture", steps=2)
    twin = optax.adafactor(0.01, min_dim_size_to_factor=8, momentum=0.5)
    for path, index in ((Q, (1,)), (NORM, (0,)), (EXPERTS, (1, 2))):
        one = {"x": weights("mixture").read()[path][index]}
        state = twin.init(one)
        for step in range(2):
            changes, state = twin.update(gradients(one, step), state, one)
            one = optax.apply_updates(one, changes)
        assert_allclose(found[path][index], one["x"], atol=2e-6, err_msg=path)


def test_what_each_group_takes() -> None:
    """Embeddings, head, router, norms, biases and scalar heads are AdamW's; groups take theirs in order."""
    mixture = weights("mixture")
    rest, hidden = groups_of(Muon(learning_rate=0.1, beta2=0.9), mixture)
    assert (
        (rest.name, hidden.name) == ("adamw", "muon") and isinstance(rest.section, AdamW) and rest.section.beta2 == 0.9
    )
    words = {path.split(".")[-2] for path in hidden.paths}
    assert words == {"q", "k", "v", "o", "gate", "up", "down", "experts"}
    assert {"embed.embedding", "stages.0.blocks.0.mlp.router.proj.kernel"} < {*rest.paths}
    section = AdamW(
        learning_rate=0.1,
        beta1=0.5,
        weight_decay=0.2,
        groups=[{"match": "norm", "learning_rate": 0.3}, {"match": "attention", "kind": "lion"}],
    )
    found = {group.label: group for group in groups_of(section, weights())}
    assert [*found] == ["adamw", "adamw (groups.0)", "lion (groups.1)"]
    first, second = found["adamw (groups.0)"].section, found["lion (groups.1)"].section
    assert isinstance(first, AdamW) and (first.learning_rate, first.beta1, first.weight_decay) == (0.3, 0.5, 0.2)
    assert isinstance(second, Lion) and (second.learning_rate, second.beta1, second.weight_decay) == (0.1, 0.9, 0.2)
    assert all("norm" in path for path in found["adamw (groups.0)"].paths)
    assert {path.split(".")[5] for path in found["lion (groups.1)"].paths} == {"q", "k", "v", "o"}


def test_rates_of_what_reads_hidden_states_fall_with_the_width() -> None:
    """Adam's first update is the rate itself: a quarter of it for the matrices of a model four times as wide."""
    model = weights()
    section = AdamW(learning_rate=0.1, base_width=8, groups=[{"match": "attention.q", "learning_rate": 0.2}])
    assert {g.label: g.section.learning_rate for g in groups_of(section, model)} == {
        "adamw": 0.1,
        "adamw (base_width)": 0.025,
        "adamw (groups.0)": 0.2,
        "adamw (groups.0, base_width)": 0.05,
    }
    optimizer = make_optimizer(section, 10, seed=0, model=model.model)
    params = jax.tree.map(jnp.zeros_like, model.read())
    update = jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p, lambda x: x, None)[0])
    moved = update(gradients(params, 0), params)
    wide = {path for path in params if path.endswith("kernel") and "embed" not in path}
    assert {path.split(".")[-2] for path in wide} == {*"qkvo", "gate", "up", "down", "head"}
    for path, array in moved.items():
        rate = (0.2 if "attention.q" in path else 0.1) / (4 if path in wide else 1)
        assert_allclose(np.abs(array), rate, rtol=1e-4, err_msg=path)
    lion = groups_of(Lion(learning_rate=0.1, base_width=64, groups=[{"match": "mlp.up", "kind": "muon"}]), model)
    assert {g.label: g.section.learning_rate for g in lion} == {
        "lion": 0.1,
        "lion (base_width)": 0.2,
        "muon (groups.0)": 0.1,
    }
    with pytest.raises(ConfigError, match="a tied table of tokens would need one rate as input"):
        groups_of(section, ModelWeights(tiny_model()))
    with pytest.raises(ConfigError, match="base_width is for training in full, not for adapters"):
        groups_of(AdamW(learning_rate=0.1, base_width=8), weights("lora"))


@pytest.mark.parametrize(
    ("kind", "section", "words"),
    [
        ("dense", {"groups": [{"match": "zzz"}]}, "groups.0: 'zzz' matches no trained parameter"),
        ("dense", {"groups": [{"match": "norm", "kind": "muon"}]}, "norm.scale is none"),
        ("dense", {"groups": [{"match": "norm", "momentum": 0.5}]}, "momentum is no field of adamw"),
        ("lora", {}, "none of them is trained here"),
    ],
)
def test_groups_that_cannot_be_are_refused(kind: str, section: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        groups_of(Muon(learning_rate=0.1, **section), weights(kind))


def on_devices(section: GroupedOptimizer, kind: str, axes: dict[str, int]) -> Any:
    """Masters, or parameters without, after two updates on the devices."""
    model, mesh = weights(kind), make_mesh(MeshSection(**axes), jax.devices()[: math.prod(axes.values())])
    optimizer, shapes = make_optimizer(section, 3, seed=0, model=model.model), placed_shapes(model, mesh)
    paths = (Q, EXPERTS) if kind == "mixture" else (Q, UP)
    start = {path: p.astype(jnp.bfloat16) for path, p in model.read(paths.__contains__).items()}
    params = jax.device_put(start, {path: shapes[path].sharding for path in paths})
    state = optimizer.init(params)

    @jax.jit
    def update(g: Any, s: Any, p: Any) -> Any:
        return traced_for(mesh, lambda g, s, p: optimizer.update(g, s, p, lambda x: x, None))(g, s, p)

    for step in range(2):
        params, state = update(gradients(start, step), state, params)
    return jax.device_get(state.masters or params)


DEVICES = (("dense", {"fsdp": 4, "tensor": 2}), ("mixture", {"fsdp": 2, "expert": 2, "data": 2}))


@pytest.mark.parametrize(("kind", "axes"), often(DEVICES, DEVICES[1]))
def test_eight_devices_give_the_update_of_one(kind: str, axes: dict[str, int]) -> None:
    section = Muon(learning_rate=0.02, weight_decay=0.1)
    several, alone = on_devices(section, kind, axes), on_devices(section, kind, {"fsdp": 1})
    for path, p in alone.items():
        assert_allclose(several[path], p, atol=2e-6, err_msg=path)


@pytest.mark.thorough
@pytest.mark.parametrize("section", [Muon, Adafactor, Lion])
def test_each_kind_trains_in_few_bits_and_resumes_exactly(section: Any, tmp_path: Path) -> None:
    """On a mesh, with moments of 8 bits, stochastic rounding, a group, and state in the host's memory."""
    model = tiny_model(num_layers=2, windows=(None,), dtype=jnp.bfloat16)
    made = section(
        learning_rate=3e-3,
        moments="int8",
        stochastic_rounding=True,
        groups=[{"match": "norm", "kind": "adamw", "learning_rate": 1e-3}],
    )
    optimizer = make_optimizer(made, 4, seed=1, model=model)
    settings = TrainSettings(temperature=1.0, max_grad_norm=1.0, offload_optimizer=True)
    trainer = Trainer(model, SFTLoss(), optimizer, settings, mesh=make_mesh(MeshSection(data=2, fsdp=2, tensor=2)))
    first = to_host(trainer.step(rows(0)))["loss"]
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, trainer.state(), {})
        trainer.step(rows(1))
        expected = jax.device_get(trainer.state())
        state, _ = checkpointer.restore(1, trainer.state())
    trainer.restore(state, 1)
    trainer.step(rows(1))
    jax.tree.map(assert_array_equal, jax.device_get(trainer.state()), expected)
    for _ in range(8):
        last = to_host(trainer.step(rows(0)))["loss"]
    assert last < 0.95 * first


def changed(section: Any, model: Any, paths: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Parameters, gradients, and what one update with them takes away."""
    params = model.read(paths.__contains__)
    made = make_optimizer(section, 3, seed=0, model=model.model)
    given = gradients(params, 0)
    new, _ = jax.jit(lambda g, p: made.update(g, made.init(p), p, lambda x: x, None))(given, params)
    return params, given, {path: np.asarray(params[path]) - np.asarray(new[path]) for path in params}


def test_gradients_are_clipped_by_value_and_by_the_weights_of_each_output() -> None:
    """As optax's clips one matrix, of each layer and expert; norms and biases as a whole."""
    section = UserOptimizer(fn=optax.sgd, learning_rate=1.0, clip_value=0.05, clip_adaptive=0.2)
    stacked_dims = {Q: 1, NORM: 1, EXPERTS: 2, "final_norm.scale": 0}
    params, given, found = changed(section, weights("mixture"), [*stacked_dims])
    for path, stacked in stacked_dims.items():
        p, g = (np.asarray(x[path]) for x in (params, given))
        axis = stacked if p.ndim - stacked == 2 else -1
        g = np.clip(g, -0.05, 0.05)
        most = 0.2 * np.maximum(np.linalg.norm(p, axis=axis, keepdims=True), 1e-3)
        norm = np.linalg.norm(g, axis=axis, keepdims=True)
        assert path != Q or ((norm > most).any() and (norm < most).any())
        assert_allclose(found[path], np.where(norm > most, g * most / np.maximum(norm, 1e-9), g), atol=1e-6)


def test_rates_of_layers_decay_with_their_distance_from_the_last() -> None:
    model = ModelWeights(tiny_model(num_layers=4, windows=(None, 5), tie_word_embeddings=False))
    expected = {
        "embed.embedding": [[1 / 16]],
        "stages.0.blocks.0.attention.q.kernel": [[[1 / 8]], [[1 / 2]]],
        "stages.0.blocks.1.mlp_norm.scale": [[1 / 4], [1.0]],
        "final_norm.scale": [1.0],
        "head.kernel": [[[1.0]]],
    }
    section = UserOptimizer(fn=optax.sgd, learning_rate=1.0, layer_decay=0.5)
    _, given, found = changed(section, model, [*expected])
    for path, factors in expected.items():
        assert_allclose(found[path], np.asarray(factors) * np.asarray(given[path]), atol=1e-6, err_msg=path)


@pytest.mark.thorough
def test_norms_of_the_update_by_group_and_few_bits() -> None:
    model = tiny_model(num_layers=2, windows=(None,), dtype=jnp.bfloat16)
    few = {"moments": "int8", "stochastic_rounding": True, "layer_decay": 0.5, "clip_adaptive": 0.1}
    section = Muon(learning_rate=3e-2, update_norms=True, **few)
    before = {path: np.asarray(x, np.float32) for path, x in ModelWeights(model).read().items()}
    settings = TrainSettings(temperature=1.0, max_grad_norm=1e-3)
    trainer = Trainer(model, SFTLoss(), make_optimizer(section, 4, seed=1, model=model), settings)
    metrics = to_host(trainer.step(rows(0)))
    after = {path: np.asarray(x, np.float32) for path, x in trainer.params.items()}
    muon = {path for group in groups_of(section, ModelWeights(model)) if group.name == "muon" for path in group.paths}
    for label, paths in (("muon", muon), ("adamw", {*after} - muon)):
        for name, arrays in (("weight", after), ("update", {path: after[path] - before[path] for path in after})):
            norm = math.sqrt(sum(float(np.square(arrays[path]).sum()) for path in paths))
            assert_allclose(metrics[f"{name}_norm/{label}"], norm, rtol=1e-3)
    assert metrics["grad_clipped"] == 1
    change = after[Q] - before[Q]
    assert_allclose(np.linalg.norm(change[0]) / np.linalg.norm(change[1]), 0.5, rtol=0.1)
