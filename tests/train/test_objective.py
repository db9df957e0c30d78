"""Losses that are linear in the statistics: what they say of it is true, and the update is that of any other loss."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from posttrain.batch import DIFFERENTIABLE, Batch, LinearLoss, LossOutput, TokenStats
from posttrain.config import MeshSection, Remat
from posttrain.kernels.logits.chunk_stats import Terms
from posttrain.kernels.logits.divergence import Divergence
from posttrain.losses.distill import DistillLoss
from posttrain.losses.preference import PreferenceLoss
from posttrain.losses.reduce import known_cotangents
from posttrain.losses.sft import DFTLoss, SFTLoss
from posttrain.mesh import make_mesh
from posttrain.metrics import to_host
from posttrain.models.config import Compute
from posttrain.models.decoder import Decoder
from posttrain.train.objective import Objective, TrainSettings
from posttrain.train.trainer import Trainer
from posttrain.weights.state import ModelWeights
from tests.mixtures import mixture_config, mixture_model
from tests.tiny import sgd, tiny_config, tiny_model

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


def test_which_layers_are_unrolled(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one GPU up to a depth under any `remat`; on several, which might gather all layers at once, none."""

    def unrolled(platform: str, *, layers: int, remat: Remat = "none", data: int | None = None) -> bool:
        monkeypatch.setattr("posttrain.train.objective.platform_of", lambda mesh: platform)
        mesh = None if data is None else make_mesh(MeshSection(data=data, fsdp=1), jax.devices()[:data])
        compute = Compute(dtype=jnp.dtype(jnp.float32), remat=remat, mesh=mesh)
        config = tiny_config(num_layers=layers, windows=(None,) * layers)
        model = nnx.eval_shape(lambda: Decoder(config, compute, dtype=compute.dtype, rngs=nnx.Rngs(0)))
        settings = TrainSettings(temperature=1.0, max_grad_norm=1.0)
        found = Objective(student=ModelWeights(model), teachers=(), loss=SFTLoss(), settings=settings)
        return found._unrolled

    assert unrolled("gpu", layers=2) and unrolled("gpu", layers=2, remat="full", data=1)
    assert not unrolled("gpu", layers=33) and not unrolled("gpu", layers=2, data=2)
    assert unrolled("cpu", layers=2) and not unrolled("cpu", layers=2, remat="full")
    assert not unrolled("tpu", layers=2)


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
        sgd(1.0),
        TrainSettings(temperature=1.3, max_grad_norm=1e9, micro_batch_rows=micro, terms=terms),
        teachers=teachers,
    )
    metrics = to_host(trainer.step(batch()))
    return {path: np.asarray(w) for path, w in ModelWeights(trainer.model).read().items()}, metrics


@pytest.mark.few(1)
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


@pytest.mark.thorough
def test_noise_on_embeddings() -> None:
    """NEFTune, arXiv:2310.05914 algorithm 1: uniform in +-alpha / sqrt(L D), L the length of the sequence, also in a
    packed row; other noise in every row and step; none in an evaluation."""
    model, alpha, lengths = tiny_model(num_layers=1), 5.0, (3, 9, 20)
    segments = np.repeat([1, 2, 3, 0], [*lengths, 4])[None].repeat(2, axis=0).astype(np.int32)
    ones = np.where(segments > 0, 1.0, 0.0).astype(np.float32)
    positions = np.concatenate([np.arange(n) for n in (*lengths, 4)])[None].repeat(2, axis=0).astype(np.int32)
    packed = Batch(tokens=segments + 7, positions=positions, segments=segments, loss_weight=ones)
    given = TrainSettings(temperature=1.0, max_grad_norm=1.0, dropout_seed=0)
    noisy, plain = (Trainer(model, SFTLoss(), sgd(0.0), replace(given, noise_alpha=x)) for x in (alpha, 0.0))
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


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["dense", pytest.param("mixture", marks=pytest.mark.thorough)])
def test_gradients_of_matrices_have_the_type_of_their_product(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 ones are those of float32 copies, whose products gave bfloat16 as well; sums of micro-batches are
    float32. Head, embedding and router, whose gradients are sums of several, stay float32."""

    def gradients(micro: int | None) -> dict[str, jax.Array]:
        sizes: Any = {"num_layers": 2, "windows": (None,), "tie_embeddings": False}
        if kind == "dense":
            model = tiny_model(dtype=jnp.bfloat16, **sizes)
        else:
            model = mixture_model(mixture_config(num_dense=0, **sizes), dtype=jnp.bfloat16)
            weights = ModelWeights(model)
            weights.write(jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights.read()))
        settings = TrainSettings(temperature=1.0, max_grad_norm=1.0, micro_batch_rows=micro)
        trainer = Trainer(model, SFTLoss(), sgd(1.0), settings)
        objective, (rows, count) = trainer._objective, trainer._micro_batches(batch())
        given = trainer.params, {}, [], jnp.zeros(()), (rows, objective.keys(jnp.uint32(0), rows)), count
        found: dict[str, jax.Array] = jax.jit(objective.gradients)(*given)[0]
        return found

    found, split = gradients(None), gradients(2)
    assert {g.dtype for g in split.values()} == {jnp.dtype("float32")}
    low = {path for path, g in found.items() if g.dtype == jnp.bfloat16}
    assert low == {
        path
        for path, g in found.items()
        if path.startswith("stages.") and g.ndim >= 3 and not re.search("router|shared_gate|bias", path)
    }
    monkeypatch.setattr("posttrain.train.objective.used_once", lambda *_: frozenset())
    wide = gradients(None)
    assert {g.dtype for g in wide.values()} == {jnp.dtype("float32")}
    for path, expected in wide.items():
        for one in (found[path], split[path]):
            error = np.linalg.norm(np.asarray(one, np.float32) - expected)
            assert error <= 2**-7 * np.linalg.norm(expected), path
