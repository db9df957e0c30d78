"""Every state that accumulates over steps or micro-batches, in a model of bfloat16, against the same recursion in
float64: 200 small steps, each below the distance of two bfloat16 numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from numpy.testing import assert_allclose

from posttrain.cluster.reference import ModelReference, Reference
from posttrain.config import Adafactor, AdamW, AnyOptimizer, Lion, LoRA, MeshSection, Muon, UserOptimizer
from posttrain.losses.sft import SFTLoss
from posttrain.mesh import make_mesh
from posttrain.models.decoder import Decoder
from posttrain.rl.sampler import Curriculum
from posttrain.rl.step import EntropyControl
from posttrain.train.layer_matching import Matching
from posttrain.train.low_precision import moment_value
from posttrain.train.objective import TrainSettings
from posttrain.train.optimizers import Trained
from posttrain.train.trainer import Trainer
from posttrain.train.transformations import make_optimizer, optimizer_of
from posttrain.tree import Mean
from posttrain.weights.load import init_model, load_model
from posttrain.weights.lora import attach_lora
from posttrain.weights.save import save_model
from posttrain.weights.state import ModelWeights, Parameter
from posttrain.weights.upcycle import Upcycling, upcycled
from tests.often import often
from tests.tiny import sgd, tiny_config, tiny_model
from tests.train.test_trainer import rows

pytestmark = pytest.mark.fast

STEPS, RATE, SHAPE = 200, 1e-3, (1, 64, 8)
FEWER = 60
"""Steps of a whole model, where its routers alone are moved."""
PATTERN = np.linspace(0.2, 1.0, SHAPE[1])[None, :, None] * np.ones(SHAPE)
"""Sizes of the gradients of the elements of a matrix, so that codes of few bits are rounded."""
PARAMS = Trained(w=Parameter("kernel", ("layers", "embed", "mlp"), range(1)))
Values = dict[str, Any]
"""Values of a state by name."""


def gradients() -> np.ndarray:
    """Gradients of the steps [STEPS, *SHAPE]."""
    sizes = 1.0 + 0.5 * np.sin(np.arange(STEPS, dtype=np.float64))
    return sizes[:, None, None, None] * PATTERN


def optimized(section: AnyOptimizer, factor: float | None = None) -> tuple[Any, Any]:
    """Parameters and state after the steps, from 1. `factor`: of the parameter after each update, as of QK-clip."""
    made = optimizer_of(section, PARAMS, tiny_config(), STEPS, seed=0)
    start = {"w": jnp.ones(SHAPE, jnp.bfloat16)}
    factors = {} if factor is None else {"w": jnp.full((1, 1, 1), factor)}

    def step(carry: Any, gradient: Any) -> tuple[Any, None]:
        params, state = carry
        return made.update({"w": gradient}, state, params, lambda g: g.astype(jnp.float32), None, factors), None

    given = jnp.asarray(gradients(), jnp.float32)
    (params, state), _ = jax.jit(lambda carry: jax.lax.scan(step, carry, given))((start, made.init(start)))
    return params, state


def weight(params: Any, state: Any) -> np.ndarray:
    """The parameter: its float32 master, or what is rounded stochastically."""
    return np.asarray(state.masters.get("w", params["w"]), np.float64)


def moment(stored: Any) -> np.ndarray:
    return np.asarray(moment_value(stored), np.float64)


def leaves(state: Any, name: str) -> Any:
    """Arrays of a state below the fields of this name."""
    found = optax.tree_utils.tree_get_all_with_path(state.inner, name)
    return [leaf for _, value in found for leaf in jax.tree.leaves(value)]


def adamw(moments: Any = "float32", *, rounding: bool = False) -> tuple[Values, Values]:
    section = AdamW(
        learning_rate=RATE, moments=moments, stochastic_rounding=rounding, ema={"decay": 0.99}, weight_decay=0.1
    )
    params, state = optimized(section)
    w, mu, nu, average = np.ones(SHAPE), np.zeros(SHAPE), np.zeros(SHAPE), np.ones(SHAPE)
    for step, g in enumerate(gradients(), 1):
        mu, nu = 0.9 * mu + 0.1 * g, 0.999 * nu + 0.001 * g * g
        update = (mu / (1 - 0.9**step)) / (np.sqrt(nu / (1 - 0.999**step)) + 1e-8)
        w = w - RATE * (update + 0.1 * w)
        average = 0.99 * average + 0.01 * w
    adam = state.inner[0]
    found = {"weight": weight(params, state), "average": np.asarray(state.average["w"], np.float64)}
    found |= {"mu": moment(adam.mu["w"]), "nu": moment(adam.nu["w"])}
    return found, {"weight": w, "average": average, "mu": mu, "nu": nu}


def lion() -> tuple[Values, Values]:
    params, state = optimized(Lion(learning_rate=RATE, weight_decay=0.1))
    w, mu = np.ones(SHAPE), np.zeros(SHAPE)
    for g in gradients():
        update = np.sign(0.9 * mu + 0.1 * g)
        mu = 0.99 * mu + 0.01 * g
        w = w - RATE * (update + 0.1 * w)
    return {"weight": weight(params, state), "mu": moment(state.inner[0].mu["w"])}, {"weight": w, "mu": mu}


def adafactor() -> tuple[Values, Values]:
    """Factored second moments, whose products are those of equal elements; a first moment beside them."""
    section = Adafactor(learning_rate=RATE, min_factored=8, momentum=0.9, parameter_scale=False, clip_threshold=1e9)
    params, state = optimized(section)
    w, mu, nu = np.ones(SHAPE), np.zeros(SHAPE), np.zeros(SHAPE)
    for step, g in enumerate(gradients(), 1):
        decay = 1.0 - step**-0.8
        nu = decay * nu + (1 - decay) * (g * g + 1e-30)
        mu = 0.9 * mu + 0.1 * g / np.sqrt(nu)
        w = w - RATE * mu
    # Means over the rows and columns of each matrix of the stack.
    (by_row,), (by_column,) = leaves(state, "v_row"), leaves(state, "v_col")
    found = {"weight": weight(params, state), "rows": moment(by_row), "columns": moment(by_column)}
    means = (np.mean(nu, axis=axis) for axis in (1, 2))
    return found, {"weight": w} | dict(zip(("rows", "columns"), means, strict=True))


def muon() -> tuple[Values, Values]:
    """The momentum, and the update of a matrix of rank 1, which has one singular value."""
    section = Muon(learning_rate=RATE, nesterov=False, scale="original", num_iterations=12)
    params, state = optimized(section)
    w, mu = np.ones(SHAPE), np.zeros(SHAPE)
    for g in gradients():
        mu = 0.95 * mu + g
        w = w - RATE * np.sqrt(max(1.0, SHAPE[2] / SHAPE[1])) * PATTERN / np.linalg.norm(PATTERN)
    (trace,) = leaves(state, "trace")
    return {"weight": weight(params, state), "mu": moment(trace)}, {"weight": w, "mu": mu}


def momentum() -> tuple[Values, Values]:
    params, state = optimized(UserOptimizer(fn=optax.sgd, learning_rate=1e-5, args={"momentum": 0.9}))
    w, mu = np.ones(SHAPE), np.zeros(SHAPE)
    for g in gradients():
        mu = 0.9 * mu + g
        w = w - 1e-5 * mu
    return {"weight": weight(params, state)}, {"weight": w}


def clipped_heads(*, rounding: bool) -> tuple[Values, Values]:
    section = AdamW(learning_rate=1e-12, stochastic_rounding=rounding)
    params, state = optimized(section, factor=0.999)
    return {"weight": weight(params, state)}, {"weight": np.full(SHAPE, 0.999**STEPS)}


def reference(*, apart: bool) -> tuple[Values, Values]:
    """A reference that moves by 1 % of the way to an actor that has gone 5 % further."""
    model = tiny_model(num_layers=1, windows=(None,), dtype=jnp.bfloat16)
    actor = Trainer(model, SFTLoss(), sgd(0.0), TrainSettings(temperature=1.0, max_grad_norm=1.0))
    moving: dict[str, Any] = {"refresh_every": 1, "mixup": 0.01}
    devices = make_mesh(MeshSection(), jax.devices()[1:2])
    made: Any = (
        ModelReference.of_actor(actor, devices, temperature=1.0, rows=None, **moving)
        if apart
        else Reference(actor, **moving)
    )
    path = "stages.0.blocks.0.mlp.up.kernel"
    start = np.asarray(actor.params[path], np.float64)
    params = {name: (x.astype(jnp.float32) * 1.05).astype(x.dtype) for name, x in actor.params.items()}
    actor.restore({**actor.state(), "params": params}, 0)
    goal, expected = np.asarray(actor.params[path], np.float64), start
    for version in range(1, STEPS + 1):
        made.refresh(version)
        expected = 0.01 * goal + 0.99 * expected
    return {"way": np.asarray(made.state()[path], np.float64) - start}, {"way": expected - start}


def corrections(model: Decoder) -> tuple[Values, Values]:
    """Two experts of four that are always chosen, since their corrections are 16 above the others'."""
    weights = ModelWeights(model)
    paths = [path for path, one in weights.parameters().items() if one.role == "correction"]
    assert paths
    for path in paths:
        start = np.zeros(weights.structs()[path].shape)
        start[:, :2] = 16.0
        weights.write({path: jnp.asarray(start, weights.structs()[path].dtype)})
    settings = TrainSettings(temperature=1.0, max_grad_norm=1.0, correction_rate=RATE)
    trainer = Trainer(model, SFTLoss(), sgd(0.0), settings)
    for _ in range(FEWER):
        trainer.step(rows(0))
    # Of one type from the first step on: another would be another program, and in bfloat16 none of them would move.
    assert trainer.num_programs == 1
    found = {path: np.asarray(trainer.params[path], np.float64) for path in paths}
    ends = np.where(np.arange(4) < 2, 16.0 - FEWER * RATE, FEWER * RATE)
    return found, {path: np.broadcast_to(ends, x.shape) for path, x in found.items()}


MIXTURE: dict[str, Any] = {
    "model_type": "glm4_moe",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "partial_rotary_factor": 0.5,
}


def made_mixture(tmp_path: Path) -> Decoder:
    return init_model(MIXTURE, dtype=jnp.bfloat16, seed=0)


def loaded_mixture(tmp_path: Path) -> Decoder:
    save_model(init_model(MIXTURE, dtype=jnp.bfloat16, seed=0), tmp_path)
    return load_model(tmp_path, dtype=jnp.bfloat16)


def upcycled_mixture(tmp_path: Path) -> Decoder:
    dense = tiny_model(num_layers=2, windows=(None,), qk_norm=False, dtype=jnp.bfloat16)
    return upcycled(dense, Upcycling(experts=4, top_k=2, mode="copy", shared=1, dense_layers=1), seed=0)


def micro_batches() -> tuple[Values, Values]:
    """Mean of the gradients of as many rows, all alike, and that of one, by the masters' plain descent."""
    many = rows(0)
    repeated = jax.tree.map(lambda x: np.repeat(np.asarray(x)[:1], STEPS, axis=0), many)
    path, found = "stages.0.blocks.0.mlp.up.kernel", {}
    for name, batch in (("many", repeated), ("single", jax.tree.map(lambda x: np.asarray(x)[:1], many))):
        model = tiny_model(num_layers=1, windows=(None,), dtype=jnp.bfloat16)
        settings = TrainSettings(temperature=1.0, max_grad_norm=1e9, micro_batch_rows=1)
        trainer = Trainer(model, SFTLoss(), sgd(1.0), settings)
        before = np.asarray(trainer.state()["opt_state"].masters[path], np.float64)
        trainer.step(batch)
        found[name] = np.asarray(trainer.state()["opt_state"].masters[path], np.float64) - before
    return {"gradient": found["many"]}, {"gradient": found["single"]}


def evaluation() -> tuple[Values, Values]:
    """Sums over batches of a model in bfloat16, and those of each batch alone."""
    model = tiny_model(num_layers=1, windows=(None,), dtype=jnp.bfloat16)
    trainer = Trainer(model, SFTLoss(), sgd(0.0), TrainSettings(temperature=1.0, max_grad_norm=1.0))
    totals = []
    for number in range(4):
        nll = trainer.evaluate([rows(number)])["nll"]
        assert isinstance(nll, Mean)
        totals.append((float(nll.total), float(nll.weight)))
    several = trainer.evaluate(rows(number % 4) for number in range(STEPS))["nll"]
    assert isinstance(several, Mean)
    expected = np.sum(np.tile(np.asarray(totals, np.float64), (STEPS // 4, 1)), axis=0)
    return {"sums": np.asarray([several.total, several.weight], np.float64)}, {"sums": expected}


def pass_rates() -> tuple[Values, Values]:
    curriculum = Curriculum(1, pools=(0.0, 0.5, 1.0), shares=(0.5, 0.5), decay=0.999, pass_above=0.5, seed=0)
    curriculum.seen(0, np.ones(4))
    rate = 1.0
    for _ in range(STEPS):
        curriculum.seen(0, np.zeros(4, np.float32))
        rate = 0.999 * rate
    return {"rate": curriculum.rates[0]}, {"rate": rate}


def entropy_coefficient() -> tuple[Values, Values]:
    control, low = EntropyControl(target=1.0, start=1.0, step=RATE), jnp.float32(0.5)
    for _ in range(STEPS):
        control.observe({"entropy": Mean(total=low, weight=jnp.float32(1.0))})
    return {"coef": control.coef}, {"coef": 1.0 + RATE * STEPS}


STATES: dict[str, Callable[[], tuple[Values, Values]]] = {
    "adamw, masters, average": adamw,
    "adamw in bfloat16": lambda: adamw("bfloat16"),
    "adamw in int8": lambda: adamw("int8"),
    "adamw, parameters rounded stochastically": lambda: adamw("int8", rounding=True),
    "lion": lion,
    "adafactor": adafactor,
    "muon": muon,
    "momentum of optax": momentum,
    "factors of qk_clip on masters": lambda: clipped_heads(rounding=False),
    "factors of qk_clip, rounded stochastically": lambda: clipped_heads(rounding=True),
    "moving reference": lambda: reference(apart=False),
    "moving reference on other devices": lambda: reference(apart=True),
    "gradients over micro-batches": micro_batches,
    "metrics over batches": evaluation,
    "pass rates of a curriculum": pass_rates,
    "coefficient of the entropy": entropy_coefficient,
}
ROUNDED = {"adamw in bfloat16": 0.02, "adamw in int8": 0.05, "adamw, parameters rounded stochastically": 0.05}
ROUNDED |= {"factors of qk_clip, rounded stochastically": 2e-3}
"""Relative difference of the mean of what is rounded without bias; of all else that of each number in float32."""


@pytest.mark.parametrize("name", STATES)
def test_a_state_moves_by_small_steps(name: str) -> None:
    found, expected = STATES[name]()
    assert found.keys() == expected.keys() and found
    for part, value in expected.items():
        if name in ROUNDED:
            assert_allclose(np.mean(found[part] / value), 1.0, rtol=ROUNDED[name], err_msg=f"{name}: {part}")
        else:
            assert_allclose(found[part], value, rtol=1e-4, atol=1e-5, err_msg=f"{name}: {part}")


@pytest.mark.parametrize(
    "make", often([made_mixture, loaded_mixture, upcycled_mixture], loaded_mixture, upcycled_mixture)
)
def test_corrections_of_routers_move_by_small_steps(make: Callable[[Path], Decoder], tmp_path: Path) -> None:
    """Of a model from random weights, from files, and upcycled from a dense one."""
    found, expected = corrections(make(tmp_path))
    for path, value in expected.items():
        assert_allclose(found[path], value, rtol=1e-4, atol=1e-4, err_msg=path)


OTHERS = {
    "adagrad": optax.adagrad(1e-2),
    "amsgrad": optax.amsgrad(1e-2),
    "adamax": optax.adamax(1e-2),
    "adabelief": optax.adabelief(1e-2),
    "ademamix": optax.contrib.ademamix(1e-2),
    "ema": optax.chain(optax.ema(0.99), optax.scale(-1e-2)),
    "lamb": optax.lamb(1e-2),
    "novograd": optax.novograd(1e-2),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-2),
    "several steps": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
}


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon", "lora", "matching", *OTHERS])
def test_no_state_of_a_trainer_is_in_the_storage_type(name: str) -> None:
    """Whatever a transformation keeps: all of a trainer's state but the parameters themselves has 32 bits."""
    model = tiny_model(num_layers=2, windows=(None,), dtype=jnp.bfloat16)
    settings, teachers = TrainSettings(temperature=1.0, max_grad_norm=1.0), []
    if name == "lora":
        attach_lora(model, LoRA(rank=2, dora=True), seed=0)
    if name == "matching":
        teachers = [tiny_model(num_layers=2, windows=(None,), dtype=jnp.bfloat16)]
        settings = replace(settings, matching=Matching(hidden=((1, 1),), widths=(32, 32), seed=0))
    sections: dict[str, AnyOptimizer] = {
        "adafactor": Adafactor(learning_rate=1e-2, momentum=0.9),
        "muon": Muon(learning_rate=1e-2, ema={"decay": 0.9}),
    }
    section = sections.get(name, AdamW(learning_rate=1e-2, ema={"decay": 0.9}))
    made: Any = OTHERS.get(name) or make_optimizer(section, 4, model=model, matching=settings.matching)
    trainer = Trainer(model, SFTLoss(), made, settings, teachers=teachers)
    state = trainer.state()
    assert {str(x.dtype) for x in state["params"].values()} == {"bfloat16"}
    rest = {key: value for key, value in state.items() if key != "params"}
    kinds = {str(x.dtype) for x in jax.tree.leaves(rest) if jnp.issubdtype(x.dtype, jnp.floating)}
    assert kinds <= {"float32"}, kinds
    assert {*state["opt_state"].masters} == {*state["params"]}
