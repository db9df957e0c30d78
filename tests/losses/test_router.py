"""Losses and metrics of routers, and their part in a step: exact for any split, frozen corrections, balancing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from posttrain.batch import Batch, LossOutput, RouterStats, TokenStats
from posttrain.config import AdamW, MeshSection
from posttrain.errors import ConfigError
from posttrain.losses.policy import DAPO, GRPO, GSPO, RLOO, dr_grpo
from posttrain.losses.router import RouterLoss, check_weight, load_metrics, updated_correction, weight_of
from posttrain.losses.sft import DFTLoss, SFTLoss
from posttrain.mesh import make_mesh
from posttrain.metrics import tables, to_host
from posttrain.models.config import ModelConfig, RouterConfig, check_router
from posttrain.train.objective import TrainSettings
from posttrain.train.trainer import Trainer
from posttrain.train.transformations import make_optimizer
from posttrain.tree import Mean
from posttrain.weights.state import ModelWeights
from tests.mixtures import MIXTURE, mixture_config, mixture_model
from tests.tiny import sgd, tiny_config, tiny_model

ROWS, LENGTH = 4, 12
CORRECTION = "stages.0.blocks.0.mlp.router.correction"
CONFIG = mixture_config(num_layers=1, num_dense=0)
PLAIN = mixture_config(replace(MIXTURE, router=RouterConfig()), num_layers=1, num_dense=0)
ROUTER_LOSS = RouterLoss(balance_coef=0.3, z_coef=0.1)


def rows(seed: int = 0) -> Batch:
    """Two sequences of random lengths in each row, with different shares of weighted tokens."""
    draw = np.random.default_rng(seed)
    tokens = draw.integers(1, 512, (ROWS, LENGTH)).astype(np.int32)
    segments, positions = np.zeros_like(tokens), np.zeros_like(tokens)
    weight = np.zeros(tokens.shape, np.float32)
    for row in range(ROWS):
        first = draw.integers(2, 6)
        second = draw.integers(2, 7)
        segments[row, :first], segments[row, first : first + second] = 1, 2
        positions[row, :first], positions[row, first : first + second] = np.arange(first), np.arange(second)
        weight[row, 1:first], weight[row, first + row % 2 + 1 : first + second] = 1.0, 0.5
    return Batch(tokens=tokens, positions=positions, segments=segments, loss_weight=weight)


def trainer(**changes: Any) -> Trainer:
    model, mesh = changes.pop("model", None) or mixture_model(CONFIG), changes.pop("mesh", None)
    loss, optimizer = changes.pop("loss", SFTLoss()), changes.pop("optimizer", sgd(1.0))
    settings: dict[str, Any] = {"temperature": 1.0, "max_grad_norm": 1e9, "router_loss": ROUTER_LOSS, **changes}
    return Trainer(model, loss, optimizer, TrainSettings(**settings), mesh=mesh)


def moved(t: Trainer, batch: Batch) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    before = {path: np.asarray(w) for path, w in t.weights.items()}
    metrics = to_host(t.step(batch))
    return {path: np.asarray(w) - before[path] for path, w in t.weights.items()}, metrics


def assert_same(a: dict[str, np.ndarray], b: dict[str, np.ndarray], tolerance: float) -> None:
    scale = max(np.abs(update).max() for update in a.values())
    for path in a:
        assert_allclose(a[path], b[path], atol=tolerance * scale, rtol=0, err_msg=path)


@pytest.fixture(scope="module")
def whole() -> tuple[dict[str, np.ndarray], dict[str, float]]:
    return moved(trainer(), rows())


@pytest.mark.thorough
def test_the_step_is_the_gradient_of_both_means(whole: Any) -> None:
    """Written down without the trainer: mean loss + 0.3 mean balance + 0.1 mean z."""
    model, batch = mixture_model(CONFIG), rows()
    weights = ModelWeights(model)
    tokens, positions, segments = (jnp.asarray(x) for x in (batch.tokens, batch.positions, batch.segments))

    def objective(arrays: Any) -> Any:
        bound = weights.bind(arrays)
        hidden, _, routing = bound.forward(tokens, positions, segments)
        logps = jax.nn.log_softmax(bound.logits(hidden))
        picked = jnp.take_along_axis(logps[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
        nll = -jnp.sum(picked * batch.loss_weight[:, 1:]) / jnp.sum(batch.loss_weight)
        count = jnp.sum(segments > 0)
        balance, z = jnp.sum(routing.stats.balance) / count, jnp.sum(routing.stats.z) / count
        return nll + 0.3 * balance + 0.1 * z, (nll, balance, z)

    gradient, (nll, balance, z) = jax.jit(jax.grad(objective, has_aux=True))(weights.read())
    update, metrics = whole
    assert_same({path: -np.asarray(g) for path, g in gradient.items()}, update, 1e-5)
    assert_allclose([metrics["loss"], metrics["moe/balance_loss"], metrics["moe/z_loss"]], [nll, balance, z], rtol=1e-5)
    plain, _ = moved(trainer(router_loss=None), batch)
    router = "stages.0.blocks.0.mlp.router.proj.kernel"
    assert np.abs(plain[router] - update[router]).max() > 1e-3


@pytest.mark.thorough
def test_any_split_into_micro_batches_gives_the_same_gradient(whole: Any) -> None:
    """Rows differ in their numbers of real and of weighted tokens."""
    split, metrics = moved(trainer(micro_batch_rows=1), rows())
    assert_same(whole[0], split, 1e-6)
    for name, value in whole[1].items():
        assert_allclose(metrics[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.thorough
def test_devices_change_nothing(whole: Any) -> None:
    mesh = make_mesh(MeshSection(fsdp=2, expert=2, tensor=2))
    assert_same(whole[0], moved(trainer(mesh=mesh), rows())[0], 1e-5)


@pytest.mark.thorough
def test_what_a_step_says_of_the_experts(whole: Any) -> None:
    metrics = whole[1]
    assert 1 / 8 < metrics["moe/load_max_share"] <= 1 / 3
    assert 0 <= metrics["moe/load_min_share"] < 1 / 8
    assert 0 < metrics["moe/load_entropy"] < np.log(8)
    assert 0 < metrics["moe/router_entropy"] < np.log(8)
    assert metrics["moe/replaced_ratio"] == 0
    assert not any(name.startswith("moe/") for name in moved(trainer(model=tiny_model(), router_loss=None), rows())[1])


def test_load_metrics() -> None:
    found = load_metrics(jnp.asarray([[4.0, 0.0], [1.0, 3.0]]))
    assert_allclose(found["moe/load_max_share"], 1.0)
    assert_allclose(found["moe/load_min_share"], 0.0)
    assert_allclose(found["moe/max_violation"], 0.75)
    assert_allclose(found["moe/load_entropy"], 0.5 * -(0.25 * np.log(0.25) + 0.75 * np.log(0.75)), rtol=1e-6)
    nothing = load_metrics(jnp.zeros((2, 4)))
    assert all(np.isfinite(value).all() for value in nothing.values())
    assert_allclose(found["moe/share"], [[1.0, 0.0], [0.25, 0.75]])
    assert_allclose(tables(found)["moe/share"], found["moe/share"])
    assert "moe/share" not in to_host(found)


def test_coefficients() -> None:
    stats = RouterStats(
        load=jnp.ones((2, 4)),
        balance=jnp.asarray([3.0, 1.0]),
        z=jnp.asarray([0.5, 0.5]),
        entropy=jnp.zeros(2),
        replaced=jnp.zeros(2),
    )
    assert_allclose(RouterLoss(balance_coef=0.5, z_coef=2.0)(stats), 4.0)
    assert not RouterLoss().on
    with pytest.raises(ValueError, match="balance_coef=-1.0 and z_coef=0.0 must not be negative"):
        RouterLoss(balance_coef=-1.0)


LOSSES = [SFTLoss(), DFTLoss(), GRPO, DAPO, GSPO, RLOO, dr_grpo(9), replace(GRPO, kl_coef=0.1, entropy_coef=0.1)]


@pytest.mark.few(2)
@pytest.mark.parametrize("loss", LOSSES, ids=range(len(LOSSES)))
def test_the_weight_of_every_loss_depends_on_the_batch_alone(loss: Any) -> None:
    draw = np.random.default_rng(1)

    def logps() -> np.ndarray:
        return -draw.random((ROWS, LENGTH)).astype(np.float32)

    batch = replace(rows(), sampler_logps=logps(), ref_logps=logps(), advantages=logps())
    batch = jax.tree.map(jnp.asarray, batch)
    check_weight(loss, batch, scores=False)
    stats = TokenStats(logps=jnp.asarray(logps()), entropy=jnp.asarray(-logps()))
    assert_allclose(weight_of(loss, batch, scores=False), loss(stats, batch).loss.weight)
    assert weight_of(loss, batch, scores=False) > 0


@dataclass(frozen=True)
class Wrong:
    """Counts only tokens that the model finds improbable."""

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput:
        improbable = stats.logps < -0.5
        return LossOutput(loss=Mean(total=jnp.sum(stats.logps), weight=jnp.sum(improbable)), metrics={})


def test_a_weight_that_depends_on_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="that of Wrong is 0 or [0-9]+ for different log-probabilities"):
        trainer(loss=Wrong()).step(rows())


def test_the_correction_moves_against_the_load() -> None:
    load = jnp.asarray([[0.0, 6.0, 3.0, 3.0]])
    assert_allclose(updated_correction(jnp.asarray([[1.0, 1.0, 1.0, 1.0]]), load, 0.1), [[1.1, 0.9, 1.0, 1.0]])


def test_no_correction_of_a_balanced_mixture() -> None:
    """Whatever the number of experts: a mean of equal counts may miss them by rounding."""
    compiled = jax.jit(updated_correction, static_argnums=2)
    for experts in (3, 6, 7, 24, 41, 60):
        load = jnp.arange(1.0, 60.0)[:, None] * jnp.ones((1, experts))
        assert_array_equal(compiled(jnp.zeros(load.shape), load, 0.1), jnp.zeros(load.shape))


@pytest.mark.thorough
def test_only_its_rate_changes_a_correction() -> None:
    """No gradient, no weight decay, whatever the optimiser does to the rest."""
    optimizer = make_optimizer(AdamW(learning_rate=1e-2, weight_decay=0.5), 10, model=mixture_model(CONFIG))
    frozen, _ = moved(trainer(optimizer=optimizer), rows())
    assert_array_equal(frozen[CORRECTION], 0.0)
    assert np.abs(frozen["stages.0.blocks.0.mlp.experts.gate"]).max() > 1e-3
    free, _ = moved(trainer(optimizer=optimizer, correction_rate=0.25), rows())
    assert set(np.round(np.abs(free[CORRECTION]), 5).ravel()) <= {0.0, 0.25}
    assert (np.abs(free[CORRECTION]) > 0).any()


def test_corrections_even_out_the_load() -> None:
    t = trainer(router_loss=None, optimizer=sgd(0.0), correction_rate=0.02)
    violations = [to_host(t.step(rows()))["moe/max_violation"] for _ in range(40)]
    assert np.mean(violations[-10:]) < 0.5 * violations[0]


def test_biases_of_experts_are_not_decayed() -> None:
    model = mixture_model(CONFIG)
    optimizer = make_optimizer(AdamW(learning_rate=1.0, weight_decay=1.0), 10, model=model)
    params = ModelWeights(model).read()
    zeros = jax.tree.map(jnp.zeros_like, params)
    after, _ = jax.jit(lambda p: optimizer.update(zeros, optimizer.init(p), p, lambda g: g, None))(params)
    still = {path for path, w in params.items() if np.array_equal(after[path], w)}
    expected = {p for p in params if p.endswith(("bias", "scale", "correction"))}
    assert still == expected and f"{CORRECTION.rsplit('.', 2)[0]}.experts.gate_bias" in still


@pytest.mark.parametrize(
    ("config", "rate", "adapter", "message"),
    [
        (tiny_config(), 0.0, False, "router: qwen3 has no MoE layer to balance; remove the section router"),
        (PLAIN, 0.1, False, "the routers of qwen3 have no bias correction; use router.balance_coef"),
        (CONFIG, 0.1, True, "router.correction_rate=0.1: an adapter cannot hold the corrections; set it to 0"),
    ],
    ids=["dense", "no-correction", "adapter"],
)
def test_what_cannot_be_balanced(config: ModelConfig, rate: float, adapter: bool, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_router(config, rate, adapter=adapter)


def test_a_trainer_asks_whether_its_model_can_be_balanced() -> None:
    with pytest.raises(ConfigError, match="no MoE layer"):
        trainer(model=tiny_model())
    with pytest.raises(ConfigError, match="no bias correction"):
        trainer(model=mixture_model(PLAIN), correction_rate=0.1)
