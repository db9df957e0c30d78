"""Adapters in a trainer: what changes, dropout, sharded models."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from numpy.testing import assert_allclose, assert_array_equal

from posttrain.batch import Batch
from posttrain.cluster.cluster import Cluster
from posttrain.cluster.reference import Reference
from posttrain.cluster.sync import Shared
from posttrain.config import AdamW, LoRA, MeshSection
from posttrain.losses.sft import SFTLoss
from posttrain.mesh import make_mesh
from posttrain.models.adapter import drop
from posttrain.models.decoder import Decoder
from posttrain.rollout.engine import NativeEngine
from posttrain.train import objective
from posttrain.train.objective import TrainSettings
from posttrain.train.trainer import Trainer
from posttrain.train.transformations import make_optimizer
from posttrain.weights.load import init_model
from posttrain.weights.lora import attach_lora, merged_lora, sites
from posttrain.weights.state import ModelWeights
from tests.tiny import forward
from tests.weights.adapted import DENSE, KINDS, MOE, TOKENS, model_of, trained


@pytest.fixture(autouse=True)
def scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator, and compiled in less time: short stacks are not unrolled either."""
    monkeypatch.setattr(objective, "UNROLLED_LAYERS_ON_CPU", 0)


def batch_of(tokens: np.ndarray) -> Batch:
    """Rows of one sequence each, loss on all tokens but the first."""
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    weight = (positions > 0).astype(np.float32)
    return Batch(tokens=tokens, positions=positions, segments=np.ones_like(tokens), loss_weight=weight)


BATCH = batch_of(np.random.default_rng(1).integers(3, 96, (4, 12), dtype=np.int32))


def trainer_of(model: Decoder, *, seed: int | None = 0, rows: int | None = None, mesh: Mesh | None = None) -> Trainer:
    optimizer = make_optimizer(AdamW(learning_rate=1e-2, weight_decay=0.1), num_steps=10, model=model)
    settings = TrainSettings(temperature=1.0, max_grad_norm=1.0, dropout_seed=seed, micro_batch_rows=rows)
    return Trainer(model, SFTLoss(), optimizer, settings, mesh=mesh)


def changed(trainer: Trainer) -> dict[str, np.ndarray]:
    """What two steps change."""
    before = {path: np.asarray(w) for path, w in trainer.weights.items()}
    for _ in range(2):
        trainer.step(BATCH)
    after = {path: np.asarray(w) for path, w in trainer.weights.items()}
    return {path: w - before[path] for path, w in after.items() if not np.array_equal(w, before[path])}


@pytest.mark.thorough
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
    cluster = Cluster(trainer, engine, Shared(trainer), reference=Reference(trainer))
    before = cluster.reference.logps(BATCH)
    assert_array_equal(cluster.actor.logps(BATCH), before)
    trainer.step(BATCH)
    assert_array_equal(cluster.reference.logps(BATCH), before)
    assert np.abs(cluster.actor.logps(BATCH) - before).max() > 1e-3


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
    with pytest.raises(ValueError, match="adapter dropout and noise_alpha need dropout_"):
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
    together = merged_lora(spread)
    assert_allclose(forward(together, TOKENS), forward(merged_lora(alone), TOKENS), atol=2e-3)
    for path, w in ModelWeights(together).read().items():
        assert w.sharding.is_equivalent_to(theirs[path].sharding, w.ndim), path
