"""Placements of the engine: shared, another layout of the same devices, other devices; and offload of what rests."""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from posttrain.cluster import sync
from posttrain.cluster.cluster import Cluster
from posttrain.cluster.reference import ModelReference, Reference, WithoutAdapter
from posttrain.cluster.sync import ColocatedReplica, Replica, ReshardedReplica, Shared, local_bytes, model_on, moved
from posttrain.config import AdamW, LoRA, MeshSection, SamplingSection
from posttrain.data.chat import Renderer
from posttrain.data.tokenizer import load_tokenizer
from posttrain.errors import RunError
from posttrain.losses.sft import SFTLoss
from posttrain.mesh import make_mesh
from posttrain.metrics import Timer, to_host
from posttrain.reward.function import Reward
from posttrain.reward.rubric import Rubric
from posttrain.rl.agreement import EXACT, SamplerGate
from posttrain.rl.sampler import Sampler
from posttrain.rl.step import StepResult, rl_step
from posttrain.rollout.engine import NativeEngine
from posttrain.runtime.event_loop import run_async
from posttrain.train.objective import TrainSettings
from posttrain.train.trainer import Trainer
from posttrain.train.transformations import make_optimizer
from posttrain.tree import digests
from posttrain.weights.lora import attach_lora
from posttrain.weights.state import ModelWeights, without_adapter
from tests.rl.helpers import collector, example, make_algorithm, step_settings
from tests.rollout.test_placement import in_loops, of_weights
from tests.tiny import WINDOW, sgd, tiny_model

GROUP, NEW, ROW = 4, 8, 16
PROMPTS = ("1+1=", "2*")
PLACES = ("same", "layout", "other")


def even_share(completions: Sequence[str]) -> list[float]:
    return [sum(ord(c) % 2 == 0 for c in text) / max(len(text), 1) for text in completions]


class World:
    """Cluster of which the trainer has four devices (`fsdp`), and the engine the same or the other four."""

    def __init__(self, place: str, *, lora: bool, temperature: float = 1.0, offload: bool = False, **engine: Any):
        tokenizer, devices = load_tokenizer("bytes"), jax.devices()
        mesh = make_mesh(MeshSection(fsdp=4), devices[:4])
        model = tiny_model(num_layers=2, windows=(WINDOW,), vocab_size=tokenizer.vocab_size, initializer_range=0.1)
        if lora:
            attach_lora(model, LoRA(rank=4), seed=0)
        self.algorithm = make_algorithm("grpo", max_tokens=NEW)
        model = model_on(model, mesh)
        self.trainer = Trainer(
            model,
            self.algorithm.loss,
            make_optimizer(AdamW(learning_rate=1e-2), 100, model=model),
            TrainSettings(
                temperature=temperature,
                max_grad_norm=1.0,
                micro_batch_rows=4,
                skip_update=SamplerGate(rounding=EXACT),
                offload_optimizer=offload,
            ),
            mesh=mesh,
        )
        other = make_mesh(MeshSection(data=2, fsdp=1, tensor=2), devices[4:])
        self.replica: Replica = ReshardedReplica(self.trainer, other) if place == "other" else Shared(self.trainer)
        self.engine = NativeEngine(
            self.replica.model,
            slots=8,
            max_length=ROW,
            decode_steps=8,
            tokenizer_decode=tokenizer.decode,
            tensor={"same": "trained", "layout": 2, "other": "auto"}[place],
            **engine,
        )
        reference = Reference(self.trainer, offload=offload)
        self.cluster = Cluster(self.trainer, self.engine, self.replica, reference=reference)
        self.sampler = Sampler(
            engine=self.engine,
            renderer=Renderer(tokenizer, False),
            sampling=SamplingSection(max_tokens=NEW, temperature=temperature),
            max_prompt_tokens=ROW - NEW,
            seed=7,
        )
        self.rubric = Rubric([Reward(function=even_share, weight=1.0, timeout_s=60.0)])
        self.issued = 0

    def step(self) -> StepResult:
        examples = [example(number, text) for number, text in enumerate(PROMPTS)]
        acting = collector(self.sampler, self.rubric, examples, GROUP, issued=self.issued)
        settings = step_settings(row_tokens=ROW, num_rows=len(PROMPTS) * GROUP)
        result = run_async(rl_step(self.cluster, self.algorithm, acting, settings, Timer()))
        self.issued = acting.source.issued
        return result


def run(world: World, steps: int = 3) -> tuple[list[Any], list[float], list[dict[str, float]]]:
    results = [world.step() for _ in range(steps)]
    tokens = [[[s.tokens for s in group] for group in result.groups_P] for result in results]
    told = [to_host(result.metrics) for result in results]
    return tokens, [one["loss"] for one in told], told


@functools.cache
def finished(place: str, lora: bool, temperature: float) -> tuple[World, Any]:
    """A world after its steps and what they told; tests that share it take no step."""
    world = World(place, lora=lora, temperature=temperature)
    return world, run(world)


@pytest.mark.thorough
@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("temperature", [pytest.param(0.7, marks=pytest.mark.thorough), 1.0])
def test_every_placement_gives_the_same_run(lora: bool, temperature: float) -> None:
    """Tokens first: a uniform that falls between two roundings would part the runs. Then the losses."""
    runs = {place: finished(place, lora, temperature)[1] for place in PLACES}
    for place in PLACES[1:]:
        assert runs[place][0] == runs["same"][0], place
        assert_allclose(runs[place][1], runs["same"][1], atol=1e-5, err_msg=place)
    told = runs["other"][2][-1]
    moved_bytes = told["sync/gib"] * 2**30
    trainer = finished("same", lora, temperature)[0].trainer
    assert_allclose(moved_bytes, sum(w.nbytes for w in trainer.params.values()), rtol=1e-6)
    assert_allclose(told["sync/gib_per_s"], told["sync/gib"] / told["sync/seconds"], rtol=1e-6)
    assert runs["same"][2][-1]["sync/gib"] == 0


INT8 = {"quantize": "int8"}


@pytest.mark.thorough
@pytest.mark.parametrize("engine", [{"merge_lora": True}, INT8])
def test_copies_for_sampling_are_made_where_samples_are(engine: dict[str, Any]) -> None:
    """The adapter alone moves; merged or quantised weights are made of it on the engine's devices."""
    world = World("other", lora=True, **engine)
    for number in range(2):
        told = to_host(world.step().metrics)
        assert told["update_skipped"] == 0
        gap = told["sampling/logp_difference/mean"]
        assert gap < (1e-4 if "merge_lora" in engine else 0.05), number
    assert told["sync/arrays"] == len(world.trainer.params)
    assert all({*array.sharding.device_set} <= {*jax.devices()[4:]} for array in world.engine.arrays())


@pytest.mark.thorough
def test_devices_and_buffers_of_each_placement() -> None:
    same, other = (finished(place, False, 1.0)[0] for place in ("same", "other"))
    held = {path: same.engine._loaded.arrays[path] for path in same.trainer.weights}
    for path, array in same.trainer.weights.items():
        pointers = [[s.data.unsafe_buffer_pointer() for s in x.addressable_shards] for x in (array, held[path])]
        assert pointers[0] == pointers[1], path
    apart = [
        {device for array in arrays for device in array.sharding.device_set}
        for arrays in (other.trainer.arrays(), other.engine.arrays())
    ]
    assert apart[0].isdisjoint(apart[1])


@pytest.mark.thorough
@pytest.mark.parametrize("place", ["layout", "other"])
def test_no_weight_travels_while_samples_run(place: str) -> None:
    """The search finds weights in the trainer's own layout, see tests/rollout/test_placement.py."""
    world = World(place, lora=False)
    world.step()
    mesh, arrays = world.engine._placement.mesh, in_loops(world.engine)
    assert mesh is not None and mesh.shape["tensor"] == 2 and arrays
    assert not of_weights(arrays, world.replica.model, mesh.shape["tensor"])


@pytest.mark.thorough
def test_a_sync_that_moves_nothing_is_told_in_that_step(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World("other", lora=False)
    world.step()
    kept = dict(world.replica.model and ModelWeights(world.replica.model).read())
    monkeypatch.setattr(sync, "moved", lambda arrays, to, bytes_at_once: {path: kept[path] for path in arrays})
    with pytest.raises(RunError, match=r"stale weights: \d+ of \d+ arrays of version 2 at the rollout engine"):
        world.step()


@pytest.mark.parametrize("lora", [False, True])
def test_a_copy_beside_the_trainer(lora: bool) -> None:
    """Weights for an engine that samples during updates: the trained ones only, of an adapter the adapter."""
    trainer = World("same", lora=lora).trainer
    beside = ColocatedReplica(trainer)
    before = ModelWeights(beside.model).read()

    def pointers(array: Any) -> list[int]:
        return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]

    for path, array in trainer.weights.items():
        assert (pointers(array) == pointers(before[path])) == (path not in trainer.params), path
    state = trainer.state()
    trainer.restore({**state, "params": {path: w + 1.0 for path, w in state["params"].items()}}, 1)
    path = next(iter(trainer.params))
    assert_array_equal(ModelWeights(beside.model).read()[path], before[path])
    assert beside.update(1) == (sum(w.nbytes for w in trainer.params.values()), len(trainer.params))
    assert_array_equal(ModelWeights(beside.model).read()[path], trainer.params[path])
    assert beside.model.compute == trainer.model.compute


def test_pieces_and_digests() -> None:
    draw = np.random.default_rng(0)
    mesh = make_mesh(MeshSection(fsdp=4), jax.devices()[4:])
    arrays = {
        f"{dtype}{size}": jnp.asarray(draw.standard_normal((size, 4)), dtype)
        for dtype in ("float32", "bfloat16")
        for size in (4, 8, 64)
    }
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    for bytes_at_once in (1, 300, 1 << 30):
        there = moved(arrays, dict.fromkeys(arrays, place), bytes_at_once=bytes_at_once)
        assert all(array.sharding == place for array in there.values())
        assert digests(there) == digests(arrays)
    first = arrays["float328"]
    for other in (first[::-1], first.at[3, 1].add(1e-6), first.at[0, 0].set(first[0, 1]).at[0, 1].set(first[0, 0])):
        assert digests({"x": other}) != digests({"x": first})


@pytest.mark.parametrize("place", [pytest.param("same", marks=pytest.mark.thorough), "other"])
def test_offload_is_bitwise_and_the_ledger_adds_up(place: str) -> None:
    plain, expected = finished(place, False, 1.0)
    states = [jax.tree.leaves(plain.trainer.state())]
    gc.collect()
    before = {id(array) for array in jax.live_arrays()}
    world = World(place, lora=False, offload=True)
    found = run(world)
    assert found[:2] == expected[:2]
    for path, array in world.trainer.params.items():
        assert_array_equal(array, plain.trainer.params[path], err_msg=path)
    states.append(jax.tree.leaves(world.trainer.state()))
    for one, other in zip(*states, strict=True):
        assert_array_equal(one, other)
    told = found[2][-1]
    assert told["memory/rollout/optimizer_gib"] == told["memory/update/reference_gib"] == 0
    assert told["memory/rollout/optimizer_host_gib"] == told["memory/update/optimizer_host_gib"] > 0
    # The cache is given up for the update.
    assert told["memory/update/rollout_gib"] < told["memory/rollout/rollout_gib"]
    del states
    gc.collect()
    world.engine.programs.rest()
    ledger = sum(gib for name, gib in world.cluster.memory("now").items() if not name.endswith("peak_gib"))
    # Comparisons above made views of single shards.
    arrays = [x for x in jax.live_arrays() if id(x) not in before and len(x.sharding.device_set) > 1]
    live = sum(map(local_bytes, arrays)) / 2**30
    assert_allclose(ledger, live, rtol=0.01)


@pytest.mark.parametrize("placed", ["beside", "apart"])
def test_a_moving_reference_of_bfloat16_is_an_average_in_float32(placed: str) -> None:
    """Of weights that lie within 1 % of half the distance of two numbers: 1 - 0.99^n of the way, by float64."""
    model = tiny_model(num_layers=1, windows=(None,), dtype=jnp.bfloat16)
    actor = Trainer(model, SFTLoss(), sgd(0.0), TrainSettings(temperature=1.0, max_grad_norm=1.0))
    moving: dict[str, Any] = {"refresh_every": 1, "mixup": 0.01}

    def made() -> Any:
        if placed == "beside":
            return Reference(actor, **moving)
        apart = make_mesh(MeshSection(), jax.devices()[1:2])
        return ModelReference.of_actor(actor, apart, temperature=1.0, rows=None, **moving)

    reference, path = made(), "stages.0.blocks.0.mlp.up.kernel"
    start = np.asarray(actor.params[path], np.float64)
    params = {name: (x.astype(jnp.float32) * 1.05).astype(x.dtype) for name, x in actor.params.items()}
    actor.restore({**actor.state(), "params": params}, 0)
    goal = np.asarray(actor.params[path], np.float64)
    for version in range(1, 101):
        reference.refresh(version)
        if version == 50:
            state = jax.tree.map(jnp.copy, reference.state())
            reference = made()
            reference.restore(state)
    assert_allclose(reference.state()[path], start + (1 - 0.99**100) * (goal - start), rtol=1e-5, atol=1e-7)
    held = [x for x in reference.arrays() if x.shape == goal.shape]
    assert {x.dtype for x in held} == {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)}


@pytest.mark.thorough
def test_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy on other devices is the copy beside the actor; it follows every second version, or a share of it."""
    world, apart = World("same", lora=True), make_mesh(MeshSection(fsdp=2), jax.devices()[4:6])
    trainer, settings = world.trainer, {"temperature": 1.0, "rows": 4}
    batch = world.step().batch
    base = np.asarray(trainer.stats(batch, without_adapter(trainer.weights)).logps)
    assert_allclose(WithoutAdapter(trainer).logps(batch), base)
    start = world.cluster.reference.logps(batch)
    found: dict[str, Any] = {
        "copy": Reference(trainer, refresh_every=2),
        "average": Reference(trainer, refresh_every=1, mixup=0.25, offload=True),
        "other": ModelReference.of_actor(trainer, apart, refresh_every=2, **settings),
        "other average": ModelReference.of_actor(trainer, apart, refresh_every=1, mixup=0.25, offload=True, **settings),
    }
    own = trainer.stats(batch).logps
    sampled = batch.loss_weight > 0
    world.step()
    for reference in found.values():
        assert_allclose(reference.logps(batch)[sampled], own[sampled], atol=1e-5)
        reference.refresh(1)
    assert_allclose(found["copy"].logps(batch)[sampled], own[sampled], atol=1e-6)
    now = trainer.stats(batch).logps
    for name, reference in found.items():
        reference.refresh(2)
        moved_by = np.abs(reference.logps(batch) - own)[sampled].max()
        whole = np.abs(now - own)[sampled].max()
        assert moved_by < 0.9 * whole if "average" in name else abs(moved_by - whole) < 1e-5, name
    assert_allclose(found["average"].logps(batch), found["other average"].logps(batch), atol=1e-5)
    assert_allclose(world.cluster.reference.logps(batch), start)
    again = Reference(trainer, refresh_every=1, mixup=0.25)
    again.restore(found["average"].state())
    assert_array_equal(again.logps(batch), found["average"].logps(batch))
    assert Reference(trainer).state() == {}
