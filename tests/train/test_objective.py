"""Losses that are linear in the statistics: what they say of it is true, and the update is that of any other loss."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from posttrain.batch import DIFFERENTIABLE, Batch, LinearLoss, LossOutput, TokenStats
from posttrain.kernels.logits.chunk_stats import Terms
from posttrain.kernels.logits.divergence import Divergence
from posttrain.losses.distill import DistillLoss
from posttrain.losses.preference import PreferenceLoss
from posttrain.losses.sft import DFTLoss, SFTLoss
from posttrain.mesh import single_device_mesh
from posttrain.metrics import to_host
from posttrain.models.config import Compute
from posttrain.models.decoder import Decoder
from posttrain.models.hf import config_from_init
from posttrain.plan.build import train_programs
from posttrain.train.accumulate import num_micro
from posttrain.train.objective import known_cotangents
from posttrain.train.trainer import Trainer
from posttrain.weights.state import ModelWeights
from tests.tiny import random_model, tiny_model
from tests.weights.adapted import MOE

ROWS, LENGTH = 4, 12
LINEAR: dict[str, Any] = {
    "sft": SFTLoss(),
    "smoothed": SFTLoss(0.2),
    "distill": DistillLoss(cross_entropy=0.0),
    "mixed": DistillLoss(cross_entropy=0.3),
    "all": DistillLoss(cross_entropy=0.3, hidden=0.5, attention=2.0, uld=0.7),
}


def batch() -> Batch:
    draw = np.random.default_rng(0)
    segments = np.broadcast_to(np.arange(LENGTH) // 5 + 1, (ROWS, LENGTH)).astype(np.int32)
    weight = draw.choice([0.0, 0.5, 1.0], (ROWS, LENGTH)) * (np.arange(LENGTH) % 5 > 0)
    return Batch(
        tokens=draw.integers(0, 512, (ROWS, LENGTH)).astype(np.int32),
        positions=np.broadcast_to(np.arange(LENGTH) % 5, (ROWS, LENGTH)).astype(np.int32),
        segments=segments.copy(),
        loss_weight=weight.astype(np.float32),
    )


@pytest.mark.parametrize("kind", LINEAR)
def test_a_linear_loss_has_the_gradient_that_it_says(kind: str) -> None:
    """At any statistics, by each of them; by those that it does not name it is 0."""
    loss = LINEAR[kind]
    assert isinstance(loss, LinearLoss)
    draw = np.random.default_rng(1)
    names = [field.name for field in fields(TokenStats)]
    stats = TokenStats(**{name: jnp.asarray(draw.normal(size=(ROWS, LENGTH)), jnp.float32) for name in names})
    gradient = jax.grad(lambda stats: jnp.asarray(loss(stats, batch()).loss.total))(stats)
    known = known_cotangents(loss, batch())
    assert known is not None and set(known) <= set(DIFFERENTIABLE)
    for name in names:
        found = np.asarray(getattr(gradient, name))
        np.testing.assert_allclose(found, known.get(name, np.zeros_like(found)), rtol=1e-6)
        assert found.any() == (name in known)


@pytest.mark.parametrize("loss", [DFTLoss(), PreferenceLoss()])
def test_other_losses_are_not(loss: Any) -> None:
    assert known_cotangents(loss, batch()) is None


def update(
    loss: Any, terms: Terms, teachers: list[Decoder], micro: int | None
) -> tuple[dict[str, Any], dict[str, float]]:
    trainer = Trainer(
        tiny_model(num_layers=1),
        loss,
        optax.sgd(1.0),
        temperature=1.3,
        max_grad_norm=1e9,
        micro_batch_rows=micro,
        terms=terms,
        teachers=teachers,
    )
    metrics = to_host(trainer.step(batch()))
    return {path: np.asarray(w) for path, w in ModelWeights(trainer.model).read().items()}, metrics


@pytest.mark.parametrize(("name", "micro"), [("smoothed", None), ("mixed", 2)])
def test_the_update_is_that_of_the_same_loss_without_its_promise(name: str, micro: int | None) -> None:
    def opaque(stats: TokenStats, batch: Batch) -> LossOutput:
        output: LossOutput = LINEAR[name](stats, batch)
        return output

    terms, teachers = Terms(mean_over=500), []
    if name == "mixed":
        terms, teachers = Terms(divergence=Divergence(beta=0.0, temperature=2.0)), [tiny_model(num_layers=1, seed=5)]
    (weights, metrics), (expected, wanted) = (update(x, terms, teachers, micro) for x in (LINEAR[name], opaque))
    assert metrics.keys() == wanted.keys()
    for key, value in wanted.items():
        assert metrics[key] == pytest.approx(value, rel=1e-5, abs=1e-6), key
    for path, array in expected.items():
        np.testing.assert_allclose(weights[path], array, rtol=1e-4, atol=1e-5, err_msg=path)


def test_gradients_of_experts_need_no_float32_copy() -> None:
    """One micro-batch has one product; several are added up in float32."""
    config = config_from_init(MOE | {"vocab_size": 512})
    model = random_model(config, Compute.of(jnp.bfloat16), dtype=jnp.bfloat16, seed=0)
    params = ModelWeights(model).read()
    found, single = {}, [path for path in params if path.rsplit(".", 1)[-1] in ("gate", "up", "down")]
    for rows in (ROWS, ROWS // 2):
        objective = train_programs(model, SFTLoss(), optax.sgd(1.0), single_device_mesh()).objective
        micro = jax.tree.map(lambda x, rows=rows: jnp.asarray(x).reshape(-1, rows, LENGTH), batch())

        @jax.jit
        def gradient(params: Any, objective: Any = objective, micro: Any = micro) -> Any:
            count = jnp.int32(num_micro(micro))
            inputs = micro, objective.keys(jnp.uint32(0), micro)
            return objective.gradients(params, {}, [], objective.router_weight(micro, count), inputs, count)[0]

        found[rows] = gradient(params)
    assert len(single) == 3 and {path: g.dtype for path, g in found[ROWS].items()} == {
        path: jnp.dtype(jnp.bfloat16 if path in single else jnp.float32) for path in params
    }
    assert {g.dtype for g in found[ROWS // 2].values()} == {jnp.dtype(jnp.float32)}
    for path in single:
        one, two = (np.asarray(found[rows][path], np.float32) for rows in found)
        np.testing.assert_allclose(one, two, atol=2**-6 * np.abs(two).max(), err_msg=path)


def test_noise_on_embeddings() -> None:
    """NEFTune, arXiv:2310.05914 algorithm 1: uniform in +-alpha / sqrt(L D), L the length of the sequence, also in a
    packed row; other noise in every row and step; none in an evaluation."""
    model, alpha, lengths = tiny_model(num_layers=1), 5.0, (3, 9, 20)
    segments = np.repeat([1, 2, 3, 0], [*lengths, 4])[None].repeat(2, axis=0).astype(np.int32)
    ones = np.where(segments > 0, 1.0, 0.0).astype(np.float32)
    positions = np.concatenate([np.arange(n) for n in (*lengths, 4)])[None].repeat(2, axis=0).astype(np.int32)
    packed = Batch(tokens=segments + 7, positions=positions, segments=segments, loss_weight=ones)
    given: dict[str, Any] = {"temperature": 1.0, "max_grad_norm": 1.0, "dropout_seed": 0}
    noisy, plain = (Trainer(model, SFTLoss(), optax.sgd(0.0), noise_alpha=x, **given) for x in (alpha, 0.0))
    objective, micro = noisy._objective, jax.tree.map(lambda x: x[None], packed)
    drawn = [objective.keys(jnp.asarray(step), micro).noise for step in (0, 1)]
    assert drawn[0] is not None and drawn[1] is not None
    first, other = (np.asarray(objective._noise(keys[0], jnp.asarray(segments))) for keys in drawn)
    for number, length in enumerate(lengths, start=1):
        bound, found = alpha / np.sqrt(length * model.config.embed_dim), first[segments == number]
        assert 0.95 * bound < np.abs(found).max() <= bound
        np.testing.assert_allclose(found.std(), bound / np.sqrt(3), rtol=0.1)
        assert abs(found.mean()) < 4 * found.std() / np.sqrt(found.size)
    assert np.abs(first[0] - first[1]).max() > 0.1 < np.abs(first - other).max()
    quiet, loud = (to_host(trainer.step(packed))["nll"] for trainer in (plain, noisy))
    assert abs(loud - quiet) > 1e-3
    found, expected = (to_host(trainer.evaluate([packed]))["nll"] for trainer in (noisy, plain))
    assert found == pytest.approx(expected, rel=1e-6) == quiet
