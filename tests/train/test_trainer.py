"""The trainer: exact accumulation, adapters, bf16 masters, devices, compilations."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

from posttrain.batch import Batch, LossOutput, TokenStats
from posttrain.cluster.reference import FrozenModel, Reference
from posttrain.config import AdamW, LoRA, MeshSection
from posttrain.kernels.logits import layout
from posttrain.losses.router import RouterLoss
from posttrain.losses.sft import DFTLoss, SFTLoss
from posttrain.mesh import make_mesh
from posttrain.metrics import CompileCounter, to_host
from posttrain.models.decoder import Decoder
from posttrain.plan.hlo import read_program
from posttrain.train.objective import TrainSettings
from posttrain.train.trainer import Trainer, check_finite
from posttrain.train.transformations import make_optimizer
from posttrain.tree import Mean, replace
from posttrain.weights.lora import attach_lora
from tests.mixtures import mixture_config, mixture_model
from tests.often import often
from tests.tiny import WINDOW, sgd, shake, tiny_model

ROWS, LENGTH = 8, 24


def rows(seed: int, count: int = ROWS) -> Batch:
    """Rows of two sequences and some padding, with loss on the later part of each."""
    draw = np.random.default_rng(seed)
    tokens = draw.integers(1, 512, (count, LENGTH)).astype(np.int32)
    segments, positions = np.zeros_like(tokens), np.zeros_like(tokens)
    weight = np.zeros(tokens.shape, np.float32)
    for row in range(count):
        first, second = draw.integers(3, 11), draw.integers(3, 11)
        segments[row, :first], segments[row, first : first + second] = 1, 2
        positions[row, :first], positions[row, first : first + second] = np.arange(first), np.arange(second)
        weight[row, draw.integers(1, first) : first] = 1.0
        weight[row, first + draw.integers(1, second) : first + second] = 0.5
    return Batch(tokens=tokens, positions=positions, segments=segments, loss_weight=weight)


def small(**changes: Any) -> Decoder:
    """What is tested here does not depend on the pattern of layers: one block, scanned."""
    return tiny_model(num_layers=2, windows=(WINDOW,), **changes)


def trainer(**changes: Any) -> Trainer:
    """SGD-like first steps show the gradient itself: Adam would hide its size."""
    model, mesh = changes.pop("model", None) or small(), changes.pop("mesh", None)
    loss, optimizer = changes.pop("loss", SFTLoss()), changes.pop("optimizer", sgd(1.0))
    settings: dict[str, Any] = {"temperature": 1.0, "max_grad_norm": 1e9, **changes}
    return Trainer(model, loss, optimizer, TrainSettings(**settings), mesh=mesh)


def moved(t: Trainer, batch: Batch) -> dict[str, np.ndarray]:
    """The update of one step, as host arrays."""
    before = {path: np.asarray(w) for path, w in t.weights.items()}
    t.step(batch)
    return {path: np.asarray(w) - before[path] for path, w in t.weights.items()}


def assert_same_update(a: dict[str, np.ndarray], b: dict[str, np.ndarray], tolerance: float) -> None:
    assert a.keys() == b.keys()
    scale = max(np.abs(update).max() for update in a.values())
    assert scale > 1e-3
    for path in a:
        assert_allclose(a[path], b[path], atol=tolerance * scale, rtol=0, err_msg=path)


@pytest.fixture(scope="module")
def update() -> dict[str, np.ndarray]:
    """Of `rows(0)` in one piece, on one device."""
    return moved(trainer(), rows(0))


@pytest.mark.few(1)
@pytest.mark.parametrize("micro", often((1, 2, 3, 5), 1, 3))
def test_any_split_into_micro_batches_gives_the_same_gradient(micro: int, update: dict[str, np.ndarray]) -> None:
    assert_same_update(update, moved(trainer(micro_batch_rows=micro), rows(0)), 2e-6)


def test_row_order_and_empty_rows_change_nothing(update: dict[str, np.ndarray]) -> None:
    batch = rows(0)
    order = np.random.default_rng(1).permutation(ROWS)
    shuffled = jax.tree.map(lambda x: x[order], batch)
    padded = jax.tree.map(lambda x: np.concatenate([x, np.zeros_like(x)]), batch)
    assert_same_update(update, moved(trainer(micro_batch_rows=1), shuffled), 2e-6)
    assert_same_update(update, moved(trainer(micro_batch_rows=1), padded), 2e-6)


THREE_AXES = ({"data": 2, "fsdp": 2, "tensor": 2}, 16)


@pytest.mark.thorough
@pytest.mark.parametrize(("sizes", "parts"), often((THREE_AXES, ({"fsdp": 4, "tensor": 2}, 2)), THREE_AXES))
def test_eight_devices_give_the_update_of_one(
    update: dict[str, np.ndarray], sizes: dict[str, int], parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a vocabulary that each pair of `fsdp` has for itself."""
    monkeypatch.setattr(layout, "MAX_PARTS", parts)
    batch = rows(0)
    mesh = make_mesh(MeshSection(**sizes))
    sharded = trainer(mesh=mesh, micro_batch_rows=4)
    assert_same_update(update, moved(sharded, batch), 5e-6)
    single, spread = trainer().stats(batch), sharded.stats(batch)
    assert spread.logps.shape == (ROWS, LENGTH)
    assert single.logps.shape == (ROWS, LENGTH)


BOTH = {"data": 2, "fsdp": 2}


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", often(({"data": 2, "fsdp": 1}, BOTH), BOTH))
def test_gradients_are_reduced_once_an_update(sizes: dict[str, int], update: dict[str, np.ndarray]) -> None:
    """Each device adds up those of its own rows over the micro-batches, in whose loop is no collective."""
    mesh = make_mesh(MeshSection(**sizes), jax.devices()[: math.prod(sizes.values())])
    t = trainer(mesh=mesh, micro_batch_rows=4, gather_once=True)
    compiled = t._lower(t._arguments(rows(0))).compile()
    found = read_program(compiled.as_text() or "", mesh.size).collectives
    assert [str(c) for c in found if c.in_dynamic_loop] == []
    reduced = {"all-reduce": 1, "reduce-scatter": sizes["fsdp"]}
    assert sum(c.size * reduced.get(c.kind, 0) for c in found) >= sum(w.nbytes for w in t.params.values())
    assert_same_update(update, moved(t, rows(0)), 5e-6)


def with_adapter() -> Decoder:
    model = small()
    attach_lora(model, LoRA(rank=4), seed=0)
    shake(model, 1)
    return model


GATHERED: dict[str, tuple[Callable[[], Decoder], dict[str, Any]]] = {
    "untied": (partial(small, tie_embeddings=False), {}),
    "adapter": (with_adapter, {}),
    "clipped": (small, {"max_grad_norm": 2.0}),
    "noise": (small, {"noise_alpha": 5.0, "dropout_seed": 1}),
    "experts": (
        lambda: mixture_model(mixture_config(num_dense=0, num_layers=2, windows=(WINDOW,))),
        {"router_loss": RouterLoss(balance_coef=0.1, z_coef=0.01)},
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", GATHERED)
def test_weights_gathered_once_give_the_update_of_one_device(name: str) -> None:
    make, settings = GATHERED[name]
    mesh = make_mesh(MeshSection(**BOTH), jax.devices()[:4])
    once = moved(trainer(model=make(), mesh=mesh, micro_batch_rows=4, gather_once=True, **settings), rows(0))
    assert_same_update(moved(trainer(model=make(), **settings), rows(0)), once, 5e-6)


@pytest.mark.thorough
def test_gathered_in_the_type_of_the_computation() -> None:
    """Matrices of layers, whose gradients still are those of the same numbers, added up in float32."""
    mesh = make_mesh(MeshSection(**BOTH), jax.devices()[:4])
    given = {"micro_batch_rows": 4, "mesh": mesh}
    once, apart = (trainer(model=small(compute_dtype=jnp.bfloat16), gather_once=one, **given) for one in (True, False))
    text = once._lower(once._arguments(rows(0))).as_text()
    gathered = re.findall(r'"stablehlo.all_gather".*-> tensor<([^>]*)>', text)
    assert any(x.endswith("bf16") for x in gathered) and any(x.endswith("f32") for x in gathered)
    assert_same_update(moved(once, rows(0)), moved(apart, rows(0)), 1e-2)


def test_what_cannot_gather_once() -> None:
    with pytest.raises(ValueError, match="gather_once needs a mesh of data and fsdp alone, of several devices"):
        trainer(mesh=make_mesh(MeshSection(fsdp=2, tensor=2), jax.devices()[:4]), gather_once=True)


@pytest.mark.thorough
def test_only_the_adapter_is_trained() -> None:
    model = small()
    attach_lora(model, LoRA(rank=4), seed=0)
    update = moved(trainer(model=model), rows(0))
    changed = {path for path, delta in update.items() if np.abs(delta).max() > 0}
    assert changed
    assert all(path.endswith((".lora_a", ".lora_b")) for path in changed)


@pytest.mark.few(1)
@pytest.mark.parametrize("continued", [False, True])
def test_the_reference_is_the_actor_at_the_start(continued: bool) -> None:
    """Also of an adapter that was trained before: then it is not the base."""
    model, batch = small(), rows(0)
    base = trainer(model=model).stats(batch).logps
    attach_lora(model, LoRA(rank=4), seed=0)
    if continued:
        shake(model, 1)
    actor = trainer(model=model)
    start, reference = actor.stats(batch).logps, Reference(actor)
    assert (np.abs(start - base).max() < 1e-5) != continued
    for _ in range(2):
        assert_array_equal(reference.logps(batch), start)
        actor.step(batch)
    assert np.abs(actor.stats(batch).logps - start).max() > 1e-3


@pytest.mark.thorough
def test_the_reference_scores_while_the_first_update_is_compiled(
    update: dict[str, np.ndarray], own_programs: None
) -> None:
    t, batch = trainer(), rows(0)
    ready, before = Reference(t).for_step(batch), {path: np.asarray(w) for path, w in t.weights.items()}
    assert ready.ref_logps is not None
    assert_array_equal(ready.ref_logps, t.stats(batch).logps)
    assert t._compiling is not None
    t._compiling.result()
    counter = CompileCounter()
    t.step(ready)
    assert counter.metrics()["perf/compilations"] == 0
    assert t.num_programs == 2
    assert_same_update(update, {path: np.asarray(w) - before[path] for path, w in t.weights.items()}, 1e-6)
    assert t._compiling is None
    other = rows(1, ROWS // 2)
    t.compile_ahead(other, other)
    assert t._compiling is None
    counter.close()


@pytest.mark.thorough
def test_a_batch_of_another_shape_than_the_one_compiled_ahead(
    update: dict[str, np.ndarray], own_programs: None
) -> None:
    t, other = trainer(), rows(1, ROWS // 2)
    t.compile_ahead(other, other)
    assert t._compiling is not None
    t._compiling.result()
    counter = CompileCounter()
    t.stats(other)
    assert counter.metrics()["perf/compilations"] == 0
    counter.close()
    assert_same_update(update, moved(t, rows(0)), 1e-6)


def test_a_batch_without_weight_or_with_a_broken_gradient_changes_nothing() -> None:
    @dataclass(frozen=True)
    class Broken:
        def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput:
            return LossOutput(loss=Mean(total=jnp.sum(stats.logps) * jnp.nan, weight=jnp.float32(1.0)), metrics={})

    batch = rows(0)
    silent = replace(batch, loss_weight=np.zeros_like(batch.loss_weight))
    for t, rows_ in ((trainer(), silent), (trainer(loss=Broken()), batch)):
        before = {path: np.asarray(w) for path, w in t.weights.items()}
        metrics = to_host(t.step(rows_))
        assert metrics["update_skipped"] == 1.0
        for path, w in t.weights.items():
            assert_array_equal(before[path], w)
    with pytest.raises(FloatingPointError, match="step 1: the gradient norm is nan; the update was not applied"):
        check_finite(metrics, 1)


@pytest.mark.thorough
def test_the_model_shows_the_new_weights_and_their_type_stays() -> None:
    model = small(dtype=jnp.bfloat16, compute_dtype=jnp.float32)
    t = trainer(model=model, optimizer=make_optimizer(AdamW(learning_rate=1e-2), 10, model=model))
    before = np.asarray(model.final_norm.scale[...], np.float32)
    t.step(rows(0))
    assert model.final_norm.scale[...].dtype == jnp.bfloat16
    assert np.abs(np.asarray(model.final_norm.scale[...], np.float32) - before).max() > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_optimizers_of_a_library_keep_the_type_of_their_state(name: str) -> None:
    """Moments that began as bfloat16 ones, and float32 gradients: one program, also where an update is skipped."""
    optimizer = {"adamw": optax.adamw(1e-2), "sgd": optax.sgd(1e-2, momentum=0.9)}[name]
    t = trainer(model=small(dtype=jnp.bfloat16, compute_dtype=jnp.float32), optimizer=optimizer)
    kinds = [jax.tree.map(lambda x: x.dtype, t.state()["opt_state"]) for _ in range(2) if to_host(t.step(rows(0)))]
    assert kinds[0] == kinds[1] and t.num_programs == 1
    before = jax.device_get(t.state()["opt_state"])
    nothing = rows(0)
    assert to_host(t.step(replace(nothing, loss_weight=np.zeros_like(nothing.loss_weight))))["update_skipped"] == 1
    jax.tree.map(assert_array_equal, t.state()["opt_state"], before)


@pytest.mark.thorough
def test_twenty_steps_compile_once_per_row_length() -> None:
    model = small()
    t = trainer(model=model, optimizer=make_optimizer(AdamW(learning_rate=1e-3), 20, model=model), micro_batch_rows=2)
    first, last = [], []
    for step in range(20):
        metrics = to_host(t.step(rows(0)))
        (first if step < 3 else last).append(metrics["nll"])
        t.stats(rows(step))
    assert t.num_programs == 2
    assert last[-1] < first[0]
    short = jax.tree.map(lambda x: x[:, :16], rows(0))
    t.step(short)
    assert t.num_programs == 3


def test_an_equal_trainer_traces_nothing() -> None:
    """The next trainer's programs are those of the last; they hold no arrays of its model."""
    adam, batch = {"optimizer": make_optimizer(AdamW(learning_rate=1e-2), 100, model=small())}, rows(0)
    first = trainer(**adam)
    first.step(batch)
    found = dict(first.params)
    model = small(seed=1)
    other = trainer(model=model, optimizer=make_optimizer(AdamW(learning_rate=1e-2), 100, model=model))
    other.step(batch)
    assert other._programs is first._programs and other.num_programs == 1
    assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(nnx.split(first._programs.structure.model)))
    again = trainer(**adam)
    again.step(batch)
    for path, w in again.params.items():
        assert_array_equal(w, found[path], err_msg=path)
    assert again.num_programs == 1
    adapted, wider = small(), small()
    attach_lora(adapted, LoRA(rank=4), seed=0)
    attach_lora(wider, LoRA(rank=8), seed=0)
    changes: list[dict[str, Any]] = [
        {"temperature": 0.5},
        {"loss": DFTLoss()},
        {"loss": lambda stats, batch: SFTLoss()(stats, batch)},
        {"optimizer": make_optimizer(AdamW(learning_rate=1e-3), 100, model=small())},
        {"optimizer": optax.adam(1e-2)},
        {"model": small(dtype=jnp.bfloat16)},
        {"model": adapted},
        {"model": wider},
        {"mesh": make_mesh(MeshSection(fsdp=2), jax.devices()[:2])},
    ]
    for one in changes:
        if "model" in one:
            one["optimizer"] = make_optimizer(AdamW(learning_rate=1e-2), 100, model=one["model"])
    programs = [trainer(**adam | one)._programs for one in changes]
    assert len({*map(id, programs), id(again._programs)}) == len(changes) + 1
    # What a function of the user does may have changed meanwhile.
    first, second = (trainer(**adam | {"loss": changes[2]["loss"]})._programs for _ in range(2))
    assert first is not second


def test_evaluate_adds_up_over_batches_and_changes_nothing() -> None:
    t = trainer()
    before = {path: np.asarray(w) for path, w in t.weights.items()}
    both = jax.tree.map(lambda a, b: np.concatenate([a, b]), rows(0), rows(1))
    apart, together = to_host(t.evaluate([rows(0), rows(1)])), to_host(t.evaluate([both]))
    assert_allclose(apart["loss"], together["loss"], rtol=1e-6)
    for path, w in t.weights.items():
        assert_array_equal(before[path], w)


def test_clipping_bounds_the_update() -> None:
    update = moved(trainer(max_grad_norm=0.1), rows(0))
    assert_allclose(np.sqrt(sum((u**2).sum() for u in update.values())), 0.1, rtol=1e-4)


@pytest.mark.thorough
@pytest.mark.optimized
def test_the_compiled_step_holds_no_array_of_rows_times_tokens_times_vocabulary() -> None:
    vocab, length = 32768, 512
    model = small(vocab_size=vocab)
    t = trainer(model=model, optimizer=make_optimizer(AdamW(learning_rate=1e-3), 10, model=model))
    tokens = np.ones((4, length), np.int32)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape).copy()
    batch = Batch(tokens=tokens, positions=positions, segments=tokens, loss_weight=np.ones(tokens.shape, np.float32))
    compiled = t._lower(t._arguments(batch)).compile()
    text, whole = compiled.as_text(), 4 * length * vocab
    shapes = {tuple(map(int, s.split(","))) for s in re.findall(r"(?:f32|bf16)\[([\d,]+)\]", text)}
    assert max(map(math.prod, shapes)) < whole
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * whole


@pytest.mark.thorough
def test_its_programs_get_the_options_of_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA refuses an option that it does not know."""
    for name in ("train.programs.fast_compile_options", "cluster.reference.compile_options"):
        monkeypatch.setattr(f"posttrain.{name}", lambda platform: {f"no_option_of_{platform}": 1})
    t, batch = trainer(), rows(0)
    frozen = FrozenModel(small(), t.mesh, temperature=1.0, rows=ROWS)
    for program in (
        lambda: t.step(batch),
        lambda: t.stats(batch),
        lambda: t.evaluate([batch]),
        lambda: frozen.logps(batch),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match="no_option_of_cpu"):
            program()
    for program in (lambda: t.compile_ahead(batch, batch), lambda: t.step(batch)):
        with pytest.raises(jax.errors.JaxRuntimeError, match="no_option_of_cpu"):
            program()
