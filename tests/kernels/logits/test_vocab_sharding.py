"""Loss over the vocabulary on 8 devices: equal to that of one device, and no collective of the head's size in a loop."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from posttrain.batch import NO_ID, TopK
from posttrain.config import MeshSection
from posttrain.kernels.logits import chunks as module
from posttrain.kernels.logits.chunk_stats import PLAIN, Terms
from posttrain.kernels.logits.chunks import chunk_length
from posttrain.kernels.logits.divergence import Divergence
from posttrain.kernels.logits.token_stats import Teacher, stats_vjp, token_stats
from posttrain.kernels.logits.top_k import top_k
from posttrain.kernels.logits.vocab_sharding import VocabSharding
from posttrain.mesh import BATCH_SPEC, make_mesh, param_sharding

ROWS, LENGTH, DIM, K = 8, 12, 16, 5
MESHES = {
    "fsdp": (MeshSection(fsdp=8), 51),
    "tensor": (MeshSection(data=2, fsdp=1, tensor=4), 48),
    "both": (MeshSection(fsdp=4, tensor=2), 48),
    "expert": (MeshSection(fsdp=4, expert=2), 51),
}
"""Mesh and vocabulary size: 51 divides by no number of devices."""
DIVERGENCE = Divergence(beta=0.5, temperature=2.0)
TERMS = {
    "own": Terms(mean_over=45, squares=True, sampling_temperature=0.5),
    "live": Terms(divergence=DIVERGENCE),
    "ids": Terms(divergence=DIVERGENCE),
    "groups": Terms(divergence=Divergence(beta=0.5, temperature=1.0), unshared=bytes([0b10101010] * 6)),
}
COTANGENTS = {"own": ("logps", "entropy", "mean_logps"), "live": ("divergence", "logps"), "ids": ("divergence",)}


def inputs(vocab: int, length: int = LENGTH) -> dict[str, Any]:
    """Arrays of a problem: rows of different prompts, one padded, and a teacher of another width."""
    rng = np.random.default_rng(vocab)
    normal = {
        "hidden": (ROWS, length, DIM),
        "head": (DIM, vocab),
        "teacher_hidden": (ROWS, length, DIM // 2),
        "teacher_head": (DIM // 2, vocab + 2),
        "weight": (ROWS, length),
    }
    segments = np.ones((ROWS, length), np.int32)
    segments[0] = 1 + np.arange(length) // 3
    segments[1, length // 2 :] = 0
    only = np.arange(length) >= np.arange(ROWS)[:, None]
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in normal.items()}
    # More rows of the teacher than of the student hold no tokens.
    arrays["teacher_head"][:, vocab:] = -9.0
    ids = rng.permuted(np.broadcast_to(np.arange(vocab, dtype=np.int32), (ROWS, length, vocab)), axis=-1)[..., :K]
    tokens = rng.integers(0, vocab, (ROWS, length)).astype(np.int32)
    return {**arrays, "tokens": tokens, "segments": segments, "only": only, "ids": ids}


def teacher_topk(arrays: dict[str, Any], *, groups: bool) -> TopK:
    """Best ids of a teacher; in groups of two tokens some of them are no tokens of the student."""
    tokens, ids = arrays["tokens"], arrays["ids"]
    outcomes = np.random.default_rng(1).dirichlet(np.ones(K + 2), tokens.shape).astype(np.float32)
    tail = np.log(outcomes[..., K] + (0.0 if groups else outcomes[..., K + 1]))
    back = np.broadcast_to(np.arange(-1, LENGTH - 1, dtype=np.int32) % 2, tokens.shape)
    named = (ids != tokens[..., None]) & (ids % 3 > 0)
    return TopK(
        ids=jnp.where(named, ids, NO_ID) if groups else ids,
        logps=np.log(outcomes[..., :K]),
        tail=tail,
        scaled_tail=tail - 0.5,
        token_logps=np.log(outcomes[..., K + 1]),
        back=back if groups else None,
    )


def statistics(kind: str, arrays: dict[str, Any], hidden: Any, head: Any, mesh: Mesh | None, pulled: bool) -> Any:
    """A scalar whose gradient takes part in all that is differentiable, and the statistics."""
    names = COTANGENTS.get(kind, ("divergence", "sorted_distance", "logps"))
    teacher: Any = Teacher(lambda x: x @ arrays["teacher_head"], arrays["teacher_hidden"])
    teacher = teacher if kind == "live" else teacher_topk(arrays, groups=kind == "groups")
    given: dict[str, Any] = {
        "temperature": 0.7,
        "vocab_size": head.shape[1],
        "only": arrays["only"],
        "terms": TERMS[kind],
        "teachers": [] if kind == "own" else [teacher],
        "mesh": mesh,
    }
    problem = (lambda x: 3.0 * jnp.tanh(x @ head / 3.0), hidden, arrays["tokens"], arrays["segments"])
    if pulled:
        return stats_vjp(*problem, cotangents={name: arrays["weight"] for name in names}, **given)
    stats = token_stats(*problem, **given)
    return sum(jnp.sum(arrays["weight"] * getattr(stats, name)) for name in names), stats


def on_mesh(arrays: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Arrays where a trainer has them."""
    heads = {"head", "teacher_head"}
    tensor = mesh.shape["tensor"]

    def place(name: str, x: np.ndarray) -> Any:
        spec = PartitionSpec("fsdp", None if x.shape[1] % tensor else "tensor") if name in heads else BATCH_SPEC
        return jax.device_put(x, NamedSharding(mesh, spec))

    return {name: place(name, x) for name, x in arrays.items()}


def value_and_grad(kind: str, arrays: dict[str, Any], mesh: Mesh | None, pulled: bool, frozen: bool = False) -> Any:
    def run(arrays: dict[str, Any]) -> Any:
        def loss(hidden: jax.Array, head: jax.Array) -> Any:
            return statistics(kind, arrays, hidden, head, mesh, pulled)

        arguments = (0,) if frozen else (0, 1)
        return jax.value_and_grad(loss, arguments, has_aux=True)(arrays["hidden"], arrays["head"])

    return jax.jit(run)(arrays if mesh is None else on_mesh(arrays, mesh))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks per row: two tokens of each row of a device."""
    monkeypatch.setattr(module, "MIN_CHUNK_TOKENS", 2)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 1)


def assert_same(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kind", TERMS)
@pytest.mark.parametrize("name", MESHES)
def test_eight_devices_give_the_statistics_and_gradients_of_one(name: str, kind: str) -> None:
    section, vocab = MESHES[name]
    arrays, mesh = inputs(vocab), make_mesh(section)
    for pulled in (False, True) if kind in COTANGENTS else (False,):
        assert_same(value_and_grad(kind, arrays, mesh, pulled), value_and_grad(kind, arrays, None, pulled))
