"""Every mesh axis, alone and mixed, dense and mixture, full and LoRA: two updates on eight devices are those of one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from posttrain.batch import Batch
from posttrain.config import LoRA, MeshSection
from posttrain.losses.sft import SFTLoss
from posttrain.mesh import make_mesh
from posttrain.metrics import to_host
from posttrain.models.config import Compute
from posttrain.models.decoder import Decoder
from posttrain.models.hf import config_from_init
from posttrain.train.objective import TrainSettings
from posttrain.train.trainer import Trainer
from tests.tiny import WINDOW, random_model, sgd, tiny_model
from tests.weights.adapted import MOE, trained

LENGTH = 24
AXES = {
    "data": {"data": 8},
    "fsdp": {"fsdp": 8},
    "context": {"context": 8},
    "tensor": {"data": 4, "tensor": 2},
    "fsdp context tensor": {"fsdp": 2, "context": 2, "tensor": 2},
}
MIXTURE_AXES = {
    "expert": {"expert": 8},
    "context": {"context": 4, "data": 2},
    "expert context tensor": {"expert": 2, "context": 2, "tensor": 2},
    "fsdp expert context": {"fsdp": 2, "expert": 2, "context": 2},
}
ALWAYS = {("mixture", "expert context tensor", True)}


def section(sizes: dict[str, int]) -> MeshSection:
    return MeshSection(**{"fsdp": 1, **sizes})


def packed(seed: int) -> Batch:
    """Eight rows: two sequences that end anywhere, and padding."""
    draw = np.random.default_rng(seed)
    tokens = draw.integers(1, 500, (8, LENGTH)).astype(np.int32)
    segments, positions = np.zeros_like(tokens), np.zeros_like(tokens)
    for row in range(8):
        first, last = sorted(draw.choice(np.arange(2, LENGTH + 1), 2, replace=False))
        segments[row, :first], segments[row, first:last] = 1, 2
        positions[row, :first], positions[row, first:last] = np.arange(first), np.arange(last - first)
    weight = draw.uniform(0.5, 1.5, tokens.shape).astype(np.float32) * (positions > 0)
    return Batch(tokens=tokens, positions=positions, segments=segments, loss_weight=weight)


class Update(NamedTuple):
    losses: list[float]
    norms: list[float]
    moved: dict[str, np.ndarray]


def two_updates(model: Decoder, sizes: dict[str, int] | None) -> Update:
    """By SGD, whose steps are the gradients."""
    mesh = None if sizes is None else make_mesh(section(sizes))
    settings = TrainSettings(temperature=0.9, max_grad_norm=1e9, micro_batch_rows=8)
    trainer = Trainer(model, SFTLoss(), sgd(0.1), settings, mesh=mesh)
    before = {path: np.asarray(w) for path, w in trainer.weights.items()}
    told = [to_host(trainer.step(packed(step))) for step in range(2)]
    moved = {path: np.asarray(w) - before[path] for path, w in trainer.weights.items()}
    return Update([t["loss"] for t in told], [t["grad_norm"] for t in told], moved)


def made(kind: str, lora: bool) -> Decoder:
    """With an odd vocabulary, which no axis divides, and a window in one layer of the dense model."""
    if kind == "dense":
        model = tiny_model(vocab_size=509, num_layers=2, windows=(WINDOW, None))
    else:
        config = config_from_init(MOE | {"vocab_size": 509, "num_hidden_layers": 1, "num_experts": 8})
        model = random_model(config, Compute.of(jnp.float32), dtype=jnp.float32, seed=0)
    return trained(model, LoRA(rank=3, targets=("all-linear",))) if lora else model


@cache
def alone(kind: str, lora: bool) -> Update:
    return two_updates(made(kind, lora), None)


def cases() -> Iterator[Any]:
    for kind, axes in (("dense", AXES), ("mixture", MIXTURE_AXES)):
        for name in axes:
            for lora in (False, True) if " " in name else (kind == "mixture",):
                always = (kind, name, lora) in ALWAYS
                marks = () if always else pytest.mark.thorough
                yield pytest.param(kind, axes[name], lora, marks=marks, id=f"{kind}-{name}{'-lora' * lora}")


@pytest.mark.parametrize(("kind", "sizes", "lora"), [*cases()])
def test_two_updates_are_those_of_one_device(kind: str, sizes: dict[str, int], lora: bool) -> None:
    got, expected = two_updates(made(kind, lora), sizes), alone(kind, lora)
    assert_allclose(got.losses, expected.losses, rtol=1e-5)
    assert_allclose(got.norms, expected.norms, rtol=2e-5)
    scale = max(np.abs(moved).max() for moved in expected.moved.values())
    assert scale > 1e-3
    for path, moved in expected.moved.items():
        assert_allclose(got.moved[path], moved, atol=1e-5 * scale, rtol=0, err_msg=path)
