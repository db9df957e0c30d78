"""Features of pictures that RL and online preferences keep: each is encoded once, and what is learned is the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from posttrain.cluster.cluster import Cluster, Critic
from posttrain.cluster.reference import ModelReference, Reference
from posttrain.cluster.sync import Shared, model_on
from posttrain.config import MeshSection
from posttrain.errors import ConfigError
from posttrain.losses.preference import PreferenceLoss
from posttrain.mesh import make_mesh, single_device_mesh
from posttrain.metrics import Timer, to_host
from posttrain.reward.types import Rewards
from posttrain.rl.assemble import assemble
from posttrain.rl.collector import ScoredRollouts
from posttrain.rl.online_dpo import OnlineLoss, PairSettings, online_step
from posttrain.rl.step import learn
from posttrain.rollout.engine import NativeEngine
from posttrain.runtime.event_loop import run_async
from posttrain.stages.cluster import check_tower
from posttrain.train.objective import TrainSettings
from posttrain.train.trainer import Trainer
from posttrain.weights.load import load_model
from posttrain.weights.scalar_head import add_scalar_head
from posttrain.weights.state import ModelWeights
from tests.rl.helpers import make_algorithm, step_settings
from tests.rl.test_images import NEW, ROW, World
from tests.tiny import sgd

KEPT = 2**20

Learned = tuple[list[dict[str, float]], dict[str, np.ndarray]]
"""Metrics of two steps, and parameters after them: the actor's, then the critic's."""


@pytest.fixture(scope="module")
def world(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(shared / "goldens" / "vision" / "gemma3", tmp_path_factory.mktemp("pictures"))


def trainer_of(world: World, loss: Any, limit: int, *, mesh: Any = None, head: bool = False, **model: Any) -> Trainer:
    loaded = load_model(world.checkpoint, dtype=jnp.float32, vision="frozen", **model)
    if head:
        add_scalar_head(loaded, seed=0)
    settings = TrainSettings(temperature=1.0, max_grad_norm=1.0, micro_batch_rows=2, image_cache_bytes=limit)
    return Trainer(loaded, loss, sgd(0.1), settings, mesh=mesh)


def cluster_of(world: World, trainer: Trainer, **roles: Any) -> Cluster:
    engine = NativeEngine(
        trainer.model,
        slots=2,
        max_length=ROW,
        decode_steps=4,
        tokenizer_decode=world.tokenizer.decode,
        tokenizer=world.tokenizer,
    )
    return Cluster(trainer, engine, Shared(trainer), **{"reference": Reference(trainer), **roles})


@pytest.fixture(scope="module")
def expected(world: World) -> Callable[[str], Learned]:
    """What is learned with the tower in each program."""
    return functools.cache(lambda kind: learned(world, 0, kind))


class Calls:
    """Pictures that a trainer's frozen tower has encoded."""

    def __init__(self, trainer: Trainer):
        towers, self.pictures = trainer._towers, 0
        assert towers is not None
        run = towers._run

        def counted(number: int, inputs: Any) -> Any:
            self.pictures += int((np.asarray(inputs.patch_images) > 0).any(axis=1).sum())
            return run(number, inputs)

        towers._run = counted  # type: ignore[method-assign]


def rollouts(world: World) -> ScoredRollouts:
    total = np.asarray([[0.0, 1.0], [2.0, 0.5], [1.0, 0.0]], np.float32)
    rewards = Rewards(total_PG=total, parts_PG={"one": total}, errors=[], metrics={}, extras={})
    return ScoredRollouts(version=0, groups_P=world.groups, rewards=rewards, weights={"one": 1.0})


def learned(world: World, limit: int, kind: str, *, mesh: Any = None) -> Learned:
    if kind == "online":
        trainer, critic = trainer_of(world, OnlineLoss(pairs=PreferenceLoss()), limit, mesh=mesh), None
        cluster, settings = cluster_of(world, trainer), PairSettings(row_tokens=2 * ROW, num_rows=3, share_prompts=True)

        def step() -> Any:
            return run_async(online_step(cluster, collector, settings, Timer()))

        async def collector(*_: Any) -> ScoredRollouts:
            return rollouts(world)

    else:
        algorithm = make_algorithm(kind, max_tokens=NEW, **({} if kind == "ppo" else {"kl_coef": 0.1}))
        trainer, critic = trainer_of(world, algorithm.loss, limit, mesh=mesh), None
        if algorithm.critic is not None:
            values = trainer_of(world, algorithm.critic.loss, limit, mesh=mesh, head=True)
            critic = Critic(values, warmup=0, own_tower=False)
        cluster = cluster_of(world, trainer, critic=critic)
        way = {"updates": 3, "stale": True} if kind == "grpo" else {}
        settings = step_settings(row_tokens=ROW, num_rows=2 if way else 6, old_logps="trainer", **way)

        def step() -> Any:
            return learn(cluster, algorithm, rollouts(world), settings, Timer())

    trainers = [trainer] if critic is None else [trainer, critic.trainer]
    calls = [Calls(one) for one in trainers if limit]
    found = [to_host(step().metrics) for _ in range(2)]
    if limit == KEPT:
        assert [one.pictures for one in calls] == [2, 0][: len(calls)], "the two pictures of the prompts, once"
        assert [one["images/encoded"] for one in found] == [2, 0] and found[1]["images/hit_rate"] == 1
    weights = {f"{n} {path}": np.asarray(w) for n, one in enumerate(trainers) for path, w in one.params.items()}
    return found, weights


def same(found: Learned, expected: Learned, atol: float = 1e-5) -> None:
    for mine, own in zip(found[0], expected[0], strict=True):
        for name in ("loss", "kl", "entropy", "grad_norm", "critic/loss", "rewards/margins"):
            if name in own:
                assert_allclose(mine[name], own[name], atol=atol, err_msg=name)
    for path, weight in expected[1].items():
        assert_allclose(found[1][path], weight, atol=atol, err_msg=path)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["grpo", "ppo", "online"])
def test_what_is_learned_is_the_same(world: World, expected: Callable[[str], Learned], kind: str) -> None:
    """As with the tower in each program; also where the limit holds one picture, which is then encoded again."""
    assert "images/encoded" not in expected(kind)[0][0]
    same(learned(world, KEPT, kind), expected(kind))
    if kind == "grpo":
        found = learned(world, 1200, kind)
        same(found, expected(kind))
        assert found[0][1]["images/encoded"] > 0


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"data": 2, "fsdp": 2, "context": 2}])
def test_eight_devices_learn_as_one(world: World, expected: Callable[[str], Learned], sizes: dict[str, int]) -> None:
    mesh = make_mesh(MeshSection(**{"fsdp": 1} | sizes))
    same(learned(world, KEPT, "ppo", mesh=mesh), expected("ppo"), atol=1e-5)


@pytest.mark.thorough
def test_models_with_another_tower_encode_by_theirs(world: World) -> None:
    """A reference and a critic of their own files, whatever features a batch has."""
    trainer = trainer_of(world, world.trainer._objective.loss, KEPT)
    ones = np.ones((3, 2), np.float32)
    part = assemble(world.groups, ones, ones > 0, like=world.groups[2][0], row_tokens=ROW, num_rows=6)
    encoded = trainer.encoded(part)
    others = [load_model(world.checkpoint, dtype=jnp.float32, vision="frozen") for _ in range(2)]
    for weights in map(ModelWeights, others):
        weights.write({path: 1.5 * w for path, w in weights.read().items() if path.startswith("tower.")})
    reference = ModelReference(others[0], single_device_mesh(), temperature=1.0, rows=2)
    found = reference.logps(encoded)
    split = ModelReference(model_on(others[0], eight := make_mesh(MeshSection(fsdp=8))), eight, temperature=1.0, rows=8)
    assert_allclose(split.logps(encoded), found, atol=1e-5)
    assert_allclose(found, reference.logps(part), atol=1e-6)
    assert np.abs(found - trainer.logps(part)).max() > 1e-3
    loss = make_algorithm("ppo", max_tokens=NEW).critic.loss  # type: ignore[union-attr]
    settings = TrainSettings(temperature=1.0, max_grad_norm=1.0, image_cache_bytes=KEPT)
    add_scalar_head(others[1], seed=0)
    critic = Critic(Trainer(others[1], loss, sgd(0.1), settings), warmup=0, own_tower=True)
    assert_allclose(critic.values(encoded), critic.values(part), atol=1e-6)
    critic._own_tower = False
    assert np.abs(critic.values(encoded) - critic.values(part)).max() > 1e-3, "the towers differ"
    stranger = load_model(world.checkpoint.parent / "qwen3_vl", vision="frozen")
    with pytest.raises(ConfigError, match="reads other patches of pictures than the actor's gemma3"):
        check_tower("reference.path=other", stranger, trainer.model)
