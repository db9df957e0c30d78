"""Schedules against Hugging Face's, AdamW against torch's, any of optax's optimisers, float32 masters, clipping."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from posttrain.config import AdamW, MeshSection, Muon, UserOptimizer
from posttrain.config.optimizer import KINDS
from posttrain.errors import ConfigError
from posttrain.losses.sft import SFTLoss
from posttrain.mesh import make_mesh
from posttrain.train.checkpoint import Checkpointer
from posttrain.train.objective import TrainSettings
from posttrain.train.optimizers import Optimizer, Trained, clipped, global_norm
from posttrain.train.trainer import Trainer
from posttrain.train.transformations import make_optimizer, make_schedule, optimizer_of
from posttrain.tree import map_with_path
from posttrain.weights.state import ModelWeights, Parameter
from tests.often import often
from tests.tiny import tiny_config, tiny_model
from tests.train.test_trainer import rows

pytestmark = pytest.mark.fast

GOLDENS = Path(__file__).parents[1] / "goldens" / "losses" / "sampling.json"
SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant_with_warmup": "constant"}
CASES = [case for case in json.loads(GOLDENS.read_text())["schedules"] if case["name"] in SCHEDULES]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['name']}-{case['warmup']}")
def test_schedules_are_those_of_transformers(case):
    section = AdamW(learning_rate=case["base_lr"], schedule=SCHEDULES[case["name"]], warmup_steps=case["warmup"])
    schedule = make_schedule(section, case["total"])
    expected = case["lr_used_at_optimizer_step"]
    assert len(expected) == case["total"]
    np.testing.assert_allclose([schedule(step) for step in range(case["total"])], expected, rtol=2e-6, atol=0)
    assert float(schedule(0)) == (0.0 if case["warmup"] else np.float32(case["base_lr"]))
    if section.schedule != "constant":
        assert abs(schedule(case["total"])) < 1e-16


@pytest.mark.parametrize("kind", ["adamw", "muon", "user"])
def test_the_schedule_reads_the_step_also_after_skipped_updates(kind, tmp_path):
    """Rates by hand, from the size of each change; the run is resumed between. Adam's moments count what is in them."""
    fields = {"learning_rate": 0.1, "schedule": "linear"}
    sections = {
        "adamw": AdamW(**fields, beta1=0.0, beta2=0.0, eps=1e-30),
        "muon": Muon(**fields, beta1=0.0, beta2=0.0, eps=1e-30),
        "user": UserOptimizer(fn=optax.sign_sgd, **fields),
    }
    path = "embed.embedding"

    def made() -> Trainer:
        model = tiny_model(num_layers=1, windows=(None,))
        settings = TrainSettings(temperature=1.0, max_grad_norm=1e9)
        return Trainer(model, SFTLoss(), make_optimizer(sections[kind], 5, seed=0, model=model), settings)

    trainer, rates = made(), []
    for step, update in enumerate([True, False, False, True, True]):
        before = np.asarray(trainer.params[path], np.float64)
        metrics = trainer.step(rows(step), update=update)
        change = np.asarray(trainer.params[path], np.float64) - before
        rates.append(np.abs(change).max())
        assert float(metrics["update_skipped"]) == (not update)
        if step == 1:
            with Checkpointer(tmp_path) as checkpointer:
                checkpointer.save(2, trainer.state(), {})
                state, _ = checkpointer.restore(2, trainer.state())
            trainer = made()
            trainer.restore(state, 2)
    np.testing.assert_allclose(rates, [0.1, 0.0, 0.0, 0.04, 0.02], rtol=1e-4)
    inner = trainer.state()["opt_state"].inner
    counts = optax.tree_utils.tree_get_all_with_path(inner, "count")
    found = {int(count) for keys, count in counts if "Schedule" in str(keys)}
    assert found == {5}, counts
    assert {int(count) for keys, count in counts if "Adam" in str(keys)} <= {3}


def test_phases_are_joined():
    phases = [{"kind": "constant", "steps": 4}, {"kind": "cosine", "steps": 4, "end": 0.5}, {"kind": "linear"}]
    section = AdamW(learning_rate=2.0, warmup_steps=2, schedule=phases)
    rates = [float(make_schedule(section, 14)(step)) for step in range(15)]
    cosine = [1 + 0.5 * (1 + np.cos(np.pi * n / 4)) for n in range(4)]
    np.testing.assert_allclose(rates, [0, 1, 2, 2, 2, 2, *cosine, 1, 0.75, 0.5, 0.25, 0], atol=1e-6)
    with pytest.raises(ValueError, match="every phase but the last needs steps"):
        AdamW(learning_rate=1.0, schedule=phases[::-1])


@pytest.mark.parametrize(
    ("share", "num_steps", "steps"), [("3%", 100, 3), ("3%", 101, 4), ("7%", 100, 7), ("0.5%", 40, 1), ("0%", 9, 0)]
)
def test_a_share_of_warm_up_is_rounded_up(share, num_steps, steps):
    """As `warmup_ratio` in Hugging Face's arguments."""
    given, counted = (
        make_schedule(AdamW(learning_rate=2.0, warmup_steps=warmup, schedule="cosine"), num_steps)
        for warmup in (share, steps)
    )
    assert [float(given(step)) for step in range(num_steps)] == [float(counted(step)) for step in range(num_steps)]


def parameters(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"layers.q.kernel": (2, 4, 3), "layers.q.bias": (2, 3), "layers.norm.scale": (2, 4), "embedding": (5, 4)}
    return {n: jax.random.normal(k, s, dtype) for k, (n, s) in zip(keys, shapes.items(), strict=True)}


DECLARED = Trained(
    {
        "layers.q.kernel": Parameter("kernel", ("layers", "embed", "heads")),
        "layers.q.bias": Parameter("bias", ("layers", "heads")),
        "layers.norm.scale": Parameter("norm", ("layers", "embed")),
        "embedding": Parameter("embedding", ("vocab", "embed")),
    }
)
"""Declarations of `parameters`."""


def made_of(section, num_steps):
    return optimizer_of(section, DECLARED, tiny_config(), num_steps, seed=0)


def decaying(params):
    """Matrices and tables of `parameters` or of a tiny model."""
    return {path: path.endswith(("kernel", "embedding")) for path in params}


@functools.partial(jax.jit, static_argnums=0)
def apply(optimizer, grads, state, params):
    return optimizer.update(grads, state, params, lambda g: g.astype(jnp.float32), None)


def test_adamw_is_torchs_over_20_steps():
    torch = pytest.importorskip("torch")
    section = AdamW(
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
    tx = made_of(section, 20)
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
    section = AdamW(learning_rate=0.02, schedule="cosine", weight_decay=0.3, beta2=0.95, ema={"decay": 0.9})
    decayed = {"b1": section.beta1, "b2": section.beta2, "eps": section.eps, "weight_decay": section.weight_decay}
    twin = Optimizer(transformation=optax.adamw(make_schedule(section, 9), mask=decaying, **decayed))
    ends = []
    for optimizer in (made_of(section, 9), twin):
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
    section = AdamW(learning_rate=0.05, weight_decay=0.1)
    tx = made_of(section, 10)
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


STEPS = 3
KERNEL = Parameter("kernel", ("embed", "mlp"))
ANY: dict[str, optax.GradientTransformation] = {
    "adam": optax.adam(1e-2),
    "adamw": optax.adamw(optax.cosine_decay_schedule(1e-2, STEPS), mask=decaying),
    "lion": optax.lion(1e-3),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "momentum": optax.sgd(1e-1, momentum=0.9),
    "rmsprop": optax.rmsprop(1e-2),
    "novograd": optax.novograd(1e-2),
    "muon": optax.contrib.muon(1e-2),
    "lamb": optax.lamb(1e-2),
    "frozen": optax.partition({"a": optax.adam(1e-2), "b": optax.set_to_zero()}, lambda p: map_with_path(_label, p)),
}


def _label(path: str, _: object) -> str:
    return "b" if path.endswith("scale") else "a"


OFTEN = (("adamw", "float32"), ("lion", "bfloat16"), ("adafactor", "bfloat16"), ("muon", "bfloat16"))


@functools.cache
def gradient_trainer(dtype: str) -> Trainer:
    """Trainer whose optimizer keeps the gradient as its state, and moves nothing."""

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree.map(jnp.zeros_like, gradients), gradients

    keeps = optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)
    model = tiny_model(num_layers=2, windows=(None,), dtype=jnp.dtype(dtype))
    return Trainer(model, SFTLoss(), keeps, TrainSettings(temperature=1.0, max_grad_norm=1.0))


def copies(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


def gradient_of(params: dict[str, Any], dtype: str, step: int) -> dict[str, Any]:
    trainer = gradient_trainer(dtype)
    trainer.restore({"params": copies(params), "opt_state": trainer.state()["opt_state"]}, 0)
    trainer.step(rows(step))
    return dict(copies(trainer.state()["opt_state"].inner))


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "dtype"), often(tuple(itertools.product(ANY, ("bfloat16", "float32"))), *OFTEN))
def test_any_optimizer_is_optaxs_by_hand(name, dtype):
    """Three steps of SFT; low-precision parameters are the rounded float32 ones, which are not rounded in between."""
    transformation, start = ANY[name], copies(gradient_trainer(dtype).params)
    optimizer, params = Optimizer(transformation=transformation), start
    state = optimizer.init(params)
    full = {path: p.astype(jnp.float32) for path, p in start.items()}
    expected = transformation.init(full)

    @jax.jit
    def by_hand(gradients: Any, state: Any, full: Any) -> tuple[Any, Any]:
        changes, state = transformation.update(gradients, state, full)
        return optax.apply_updates(full, changes), state

    for step in range(STEPS):
        params, state = apply(optimizer, gradient_of(params, dtype, step), state, params)
        rounded = {path: p.astype(dtype) for path, p in full.items()}
        full, expected = by_hand(gradient_of(rounded, dtype, step), expected, full)
    moved = max(float(np.abs(np.asarray(full[path]) - np.asarray(start[path], np.float32)).max()) for path in full)
    assert moved > 1e-4
    found = params if dtype == "float32" else state.masters
    for path, p in full.items():
        np.testing.assert_allclose(found[path], p, rtol=1e-6, atol=1e-6 * moved, err_msg=path)
        assert params[path].dtype == dtype
        np.testing.assert_array_equal(params[path], found[path].astype(dtype))


@pytest.mark.thorough
def test_states_of_any_shape_are_sharded_and_resume_exactly(tmp_path):
    """Factored moments are whole on every device, others sharded as their parameter; a skipped update changes none."""
    mesh = make_mesh(MeshSection(data=2, fsdp=2, tensor=2))
    model = tiny_model(num_layers=2, windows=(None,), dtype=jnp.bfloat16)
    made = Optimizer(
        transformation=optax.adafactor(1e-2, min_dim_size_to_factor=8, momentum=0.9), moments="int8", seed=1
    )
    trainer = Trainer(model, SFTLoss(), made, TrainSettings(temperature=1.0, max_grad_norm=1.0), mesh=mesh)
    places = jax.tree_util.tree_leaves_with_path(trainer.state()["opt_state"].inner)
    path = "stages.0.blocks.0.mlp.up.kernel"
    own = {jax.tree_util.keystr(keys): x for keys, x in places if path in jax.tree_util.keystr(keys)}
    specs = {name: x.sharding.spec for name, x in own.items()}
    assert any("v_row" in name and not any(spec) for name, spec in specs.items())
    assert any(x.dtype == jnp.int8 and specs[name] == trainer.params[path].sharding.spec for name, x in own.items())
    trainer.step(rows(0))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, trainer.state(), {})
        before = jax.device_get(trainer.state())
        trainer.step(rows(0), update=False)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(trainer.state()), before)
        trainer.step(rows(1))
        expected = jax.device_get(trainer.state())
        state, _ = checkpointer.restore(1, trainer.state())
    trainer.restore(state, 1)
    trainer.step(rows(1))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(trainer.state()), expected)


@pytest.mark.parametrize(
    ("transformation", "moments", "words"),
    [
        (optax.adafactor(1e-2, min_dim_size_to_factor=2), "float32", "v_row"),
        (optax.novograd(1e-2), "float32", "nu"),
        (optax.add_noise(0.1, 0.5, jax.random.key(0)), "float32", "key_data"),
    ],
)
def test_states_that_contradict_are_refused(transformation, moments, words):
    optimizer = Optimizer(transformation=transformation, elementwise=True, moments=moments, seed=0)
    with pytest.raises(ValueError, match=words):
        optimizer.init(parameters())


@pytest.mark.thorough
def test_an_elementwise_update_by_layers_is_that_of_the_tree():
    """In float32, and with moments in few bits, whose random numbers are of each layer: to their rounding."""
    params = parameters()
    params["layers.q.kernel"] = jax.random.normal(jax.random.key(9), (2, 64, 3))
    for name in ("adam", "momentum"):
        for moments, atol in (("float32", 0.0), ("bfloat16", 4e-3), ("int8", 2e-2)):
            ends = []
            for elementwise in (False, True):
                few = {"moments": moments, "seed": 1, "parameters": DECLARED}
                made = Optimizer(transformation=ANY[name], elementwise=elementwise, **few)
                new, state = params, made.init(params)
                for step in range(STEPS):
                    gradients = jax.tree.map(lambda p, step=step: jnp.cos(p * (step + 1)), new)
                    new, state = apply(made, gradients, state, new)
                ends.append(new)
                counts = [int(x) for x in jax.tree.leaves(state) if x.ndim == 0]
                assert counts and {*counts} == {STEPS}
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=atol), *ends)


@pytest.mark.parametrize(
    ("transformation", "field"),
    [
        (optax.contrib.ademamix(1e-2), "ScaleByAdemamixState.m1"),
        (optax.contrib.schedule_free_adamw(1e-2), "ScheduleFreeState.z"),
        (optax.contrib.prodigy(), "ProdigyState.exp_avg"),
        (optax.contrib.sophia(1e-2), "SophiaState.mu"),
        (optax.contrib.muon(1e-2), "MuonState.mu"),
        (optax.rmsprop(1e-2, centered=True), "ScaleByRStdDevState.mu"),
        (optax.rprop(1e-2), "ScaleByRpropState.step_sizes"),
        (optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(), "MultiStepsState.acc_grads"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_state_that_is_no_known_moment_is_refused_in_8_bits(transformation, field):
    few = {"moments": "int8", "seed": 0, "parameters": Trained(a=KERNEL)}
    with pytest.raises(ConfigError, match=f"moments=int8.*{field}.*bfloat16"):
        Optimizer(transformation=transformation, **few).init({"a": jnp.ones((64, 8))})


@pytest.mark.parametrize("kind", ["adamw", "lion", "adafactor", "muon"])
def test_decay_of_a_group_acts_on_all_that_it_matches(kind):
    """Without gradients a norm of 1 becomes 1 - rate x decay; others without decay stay."""
    model = tiny_model(num_layers=1, windows=(None,), bias=True)
    fields = {"kind": kind, "learning_rate": 0.1, "weight_decay": 0.2}
    section = KINDS[kind](**fields, groups=[{"match": "final_norm", "weight_decay": 0.5}])
    params = jax.tree.map(jnp.ones_like, ModelWeights(model).read())
    optimizer = make_optimizer(section, 4, seed=0, model=model)
    new, _ = apply(optimizer, jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    for path, x in new.items():
        plain = 1.0 if "norm" in path or path.endswith("bias") else 0.98
        np.testing.assert_allclose(x, 0.95 if path == "final_norm.scale" else plain, rtol=1e-6, err_msg=path)


def test_codes_have_a_sign_but_for_what_is_never_negative():
    params = {"a": jnp.ones((64, 8))}
    dtypes = {"adam": {"int8", "uint8"}, "rmsprop": {"uint8"}, "lion": {"int8"}, "momentum": {"int8"}}
    for name, expected in dtypes.items():
        few = {"moments": "int8", "seed": 0, "parameters": Trained(a=KERNEL)}
        state = Optimizer(transformation=ANY[name], **few).init(params)
        assert {str(x.dtype) for x in jax.tree.leaves(state) if x.dtype.itemsize == 1} == expected
