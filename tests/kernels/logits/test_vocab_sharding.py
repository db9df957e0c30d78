"""Loss over the vocabulary on 8 devices: that of one device, and no collective of the head's size in a loop."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from posttrain.batch import NO_ID, TopK
from posttrain.config import LoRA, MeshSection
from posttrain.kernels.logits import layout
from posttrain.kernels.logits import layout as module
from posttrain.kernels.logits.chunk_stats import Terms
from posttrain.kernels.logits.divergence import Divergence
from posttrain.kernels.logits.layout import VocabSharding, chunk_length, head_function
from posttrain.kernels.logits.softmax import NO_LOGIT
from posttrain.kernels.logits.token_stats import Teacher, stats_vjp, token_stats, top_k
from posttrain.kernels.platform import traced_for
from posttrain.mesh import BATCH_SPEC, make_mesh, param_sharding
from posttrain.models.decoder import Decoder
from posttrain.models.quant import Quantized, quantized
from posttrain.weights.lora import attach_lora
from posttrain.weights.state import ModelWeights
from tests.often import often
from tests.tiny import shake, tiny_model

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
CASES = often(
    [(name, kind) for name in MESHES for kind in TERMS],
    ("expert", "own"),
    ("both", "groups"),
)
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
        return stats_vjp(*problem, cotangents=dict.fromkeys(names, arrays["weight"]), **given)
    stats = token_stats(*problem, **given)
    return sum(jnp.sum(arrays["weight"] * getattr(stats, name)) for name in names), stats


def on_mesh(arrays: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Arrays where a trainer has them."""
    heads = {"head", "teacher_head"}

    def place(name: str, x: np.ndarray) -> Any:
        return jax.device_put(x, stored(mesh, x.shape) if name in heads else NamedSharding(mesh, BATCH_SPEC))

    return {name: place(name, x) for name, x in arrays.items()}


def stored(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """Layout of a head in a trainer; a vocabulary that `tensor` does not divide is whole."""
    return NamedSharding(mesh, PartitionSpec("fsdp", None if shape[1] % mesh.shape["tensor"] else "tensor"))


def program(kind: str, mesh: Mesh | None, arguments: tuple[int, ...] = (0, 1)) -> Any:
    """Values, statistics and gradients by hidden states and head: of the backward pass, and with the value."""

    def run(arrays: dict[str, Any]) -> list[Any]:
        def loss(hidden: jax.Array, head: jax.Array, pulled: bool) -> Any:
            if mesh is not None:
                head = jax.lax.with_sharding_constraint(head, stored(mesh, head.shape))
            return statistics(kind, arrays, hidden, head, mesh, pulled)

        gradient = jax.value_and_grad(loss, arguments, has_aux=True)
        paths = (False, True) if kind in COTANGENTS else (False,)
        return [gradient(arrays["hidden"], arrays["head"], pulled) for pulled in paths]

    return jax.jit(traced_for(mesh, run))


@functools.cache
def of_one_device(kind: str, vocab: int, arguments: tuple[int, ...] = (0, 1)) -> Any:
    return program(kind, None, arguments)(inputs(vocab))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks per row: two tokens of each row of a device."""
    monkeypatch.setattr(module, "MIN_CHUNK_TOKENS", 2)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 1)


def assert_same(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_eight_devices_give_the_statistics_and_gradients_of_one(name: str, kind: str) -> None:
    section, vocab = MESHES[name]
    mesh = make_mesh(section)
    assert_same(program(kind, mesh)(on_mesh(inputs(vocab), mesh)), of_one_device(kind, vocab))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", often(TERMS, "groups"))
def test_groups_of_fsdp(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices of a group share the vocabulary, and gather no hidden state of another."""
    monkeypatch.setattr(layout, "MAX_PARTS", 2)
    section, vocab = MESHES["fsdp"]
    mesh = make_mesh(section)
    sharding = VocabSharding.of(mesh)
    assert (sharding.groups, sharding.shards) == (4, 2)
    compiled = program(kind, mesh).lower(on_mesh(inputs(vocab), mesh)).compile()
    assert_same(compiled(on_mesh(inputs(vocab), mesh)), of_one_device(kind, vocab))
    gathered = [sizes for looped, result in collectives(compiled.as_text()) if looped for sizes in result]
    assert max(sizes[0] for sizes in gathered if sizes and sizes[-1] == DIM) == ROWS // 4


@pytest.mark.parametrize(("size", "parts"), [(16, 16), (17, 17), (24, 12), (34, 34), (256, 16)])
def test_parts_of_many_devices(size: int, parts: int) -> None:
    """A size without a fit divisor stays whole: in groups of 2 each device would hold half of the head."""
    mesh = Mesh(np.broadcast_to(np.asarray(jax.devices()[:1]), (1, size)), ("data", "fsdp"))
    sharding = VocabSharding.of(mesh)
    assert (sharding.shards, sharding.groups) == (parts, size // parts)


def test_a_frozen_head() -> None:
    section, vocab = MESHES["fsdp"]
    mesh = make_mesh(section)
    assert_same(program("own", mesh, (0,))(on_mesh(inputs(vocab), mesh)), of_one_device("own", vocab, (0,)))


@pytest.mark.few(1)
@pytest.mark.parametrize("parts", [2, 16])
@pytest.mark.parametrize("name", ["fsdp", "both"])
def test_best_ids(name: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "MAX_PARTS", parts)
    section, vocab = MESHES[name]
    arrays, mesh = inputs(vocab), make_mesh(section)

    def best(arrays: dict[str, Any], mesh: Mesh | None) -> TopK:
        given = (arrays["hidden"], arrays["tokens"])
        options: dict[str, Any] = {"k": 9, "temperature": 2.0, "vocab_size": vocab, "only": arrays["only"]}
        return top_k(lambda x: x @ arrays["head"], *given, **options, mesh=mesh)

    def ids(arrays: dict[str, Any], mesh: Mesh | None) -> TopK:
        return jax.jit(traced_for(mesh, lambda arrays: best(arrays, mesh)))(arrays)

    found, expected = ids(on_mesh(arrays, mesh), mesh), ids(arrays, None)
    np.testing.assert_array_equal(found.ids, expected.ids)
    assert_same(found, expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["both", "expert"])
def test_another_vocabulary(name: str) -> None:
    """Ids of a teacher with more or fewer are on the student's devices; those that it lacks are impossible."""
    sharding = VocabSharding(make_mesh(MESHES[name][0]))
    logits = np.random.default_rng(0).normal(size=(8, 2, 60)).astype(np.float32)
    for width, vocab in ((50, 48), (60, 56), (46, 51), (56, 60), (51, 48), (48, 51), (48, 48), (20, 48)):
        given = logits[..., :width]
        found = np.asarray(jax.jit(lambda x, vocab=vocab: sharding.resized(sharding.split(x), vocab))(given))
        np.testing.assert_array_equal(found[..., :width], given[..., :vocab])
        assert (found[..., width:] == NO_LOGIT).all()
        assert found.shape[-1] == vocab


def quantized_head(model: Decoder) -> None:
    assert model.head is not None
    kernel = model.head.kernel
    codes, scales = quantized(kernel[...], "int8")
    model.head.kernel = Quantized(codes, scales, kernel.get_metadata("dims"), kind="int8", dtype=kernel.dtype)
    attach_lora(model, LoRA(rank=2), seed=0)


HEADS: dict[str, tuple[dict[str, Any], Callable[[Decoder], None]]] = {
    "tied": ({}, lambda model: None),
    "untied": ({"tie_embeddings": False}, lambda model: None),
    "adapted": ({"tie_embeddings": False}, lambda model: attach_lora(model, LoRA(rank=2, targets=["head"]), seed=0)),
    "adapted table": ({}, lambda model: attach_lora(model, LoRA(rank=2, dora=True, targets=["embed"]), seed=0)),
    "int8": ({"tie_embeddings": False}, quantized_head),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", often(HEADS, "adapted table", "int8"))
def test_heads_of_models(kind: str) -> None:
    """Gradients of what is trained of a scaled and capped head with ids that have no token."""
    changes, prepare = HEADS[kind]
    model = tiny_model(num_layers=1, vocab_size=58, **changes)
    prepare(model)
    if kind != "int8":
        shake(model, 1)
    model.config = replace(model.config, logits_scale=0.5, logits_soft_cap=4.0, num_tokens=50)
    arrays, weights, mesh = inputs(50), ModelWeights(model), make_mesh(MeshSection(fsdp=4, tensor=2))
    hidden = np.concatenate([arrays["hidden"]] * 2, axis=-1)
    frozen = {path: np.asarray(w) for path, w in weights.read().items()}
    trained = {p: frozen.pop(p) for p in weights.trainable() if p.startswith(("embed", "head"))}
    assert bool(trained) == (kind != "int8")

    def run(mesh: Mesh | None, trained: Any, frozen: Any, arrays: dict[str, Any], hidden: Any) -> Any:
        def loss(trained: Any, hidden: Any) -> Any:
            bound = weights.bind({**frozen, **trained})
            hidden += 0.0 if bound.head else bound.embed(arrays["tokens"], hidden.dtype, mesh)
            problem = (bound.logits, hidden, arrays["tokens"], arrays["segments"])
            cotangents = dict.fromkeys(("logps", "entropy"), arrays["weight"])
            return stats_vjp(*problem, cotangents=cotangents, temperature=0.7, vocab_size=58, mesh=mesh)

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(trained, hidden)

    def placed(arrays: dict[str, Any]) -> dict[str, Any]:
        dims = weights.dims()
        return {p: jax.device_put(w, param_sharding(mesh, p, dims[p], w.shape)) for p, w in arrays.items()}

    compiled = jax.jit(run, static_argnums=0)
    found = compiled(mesh, placed(trained), placed(frozen), on_mesh(arrays, mesh), hidden)
    assert_same(found, compiled(None, trained, frozen, arrays, hidden))


COLLECTIVE = re.compile(r" = (.*?) (?:all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def collectives(hlo: str) -> Iterator[tuple[bool, list[list[int]]]]:
    """Sizes of each collective's results, and a mark of those in a loop."""
    bodies = dict(re.findall(r"^(?:ENTRY )?%?([\w.-]+) [^\n]*\{\n(.*?)^\}", hlo, re.M | re.S))
    looped, new = set[str](), set(re.findall(r"body=%?([\w.-]+)", hlo))
    while new:
        looped |= new
        called = (re.findall(r"(?:calls|to_apply|body|condition)=%?([\w.-]+)", bodies[name]) for name in new)
        new = {name for names in called for name in names if name in bodies} - looped
    for name, body in bodies.items():
        for result in COLLECTIVE.findall(body):
            yield (
                name in looped,
                [[int(n) for n in dims.split(",") if n] for dims in re.findall(r"\[([\d,]*)\]", result)],
            )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "kind"),
    often([(n, kind) for n in MESHES for kind in TERMS], ("both", "groups")),
)
def test_no_collective_of_the_vocabularys_size_in_a_loop(name: str, kind: str) -> None:
    """Nor a whole gradient of the head on a device of a mesh that splits it."""
    vocab = 2048
    arrays, mesh = inputs(vocab), make_mesh(MESHES[name][0])
    shards = VocabSharding(mesh).shards

    hlo = program(kind, mesh).lower(on_mesh(arrays, mesh)).compile().as_text()
    found = list(collectives(hlo))
    in_loops = [sizes for looped, result in found if looped for sizes in result]
    assert in_loops
    assert max(max(sizes, default=1) for sizes in in_loops) < vocab // shards
    assert not re.search(rf"f32\[(?:1,)?{DIM},{vocab}\]", hlo)


@pytest.mark.parametrize(
    ("section", "rows", "vocab", "expected"),
    [
        (MeshSection(fsdp=8), 8, 151936, 512),
        (MeshSection(fsdp=8), 64, 151936, 64),
        (MeshSection(data=2, fsdp=1, tensor=4), 8, 151936, 512),
        (MeshSection(data=8, fsdp=1), 8, 151936, 512),
        (MeshSection(fsdp=4, expert=2), 8, 65536, 1024),
        (MeshSection(fsdp=8), 8, 1024, 2048),
    ],
)
def test_chunks_of_accelerators(
    monkeypatch: pytest.MonkeyPatch, section: MeshSection, rows: int, vocab: int, expected: int
) -> None:
    """By tokens of a device, at least 512 of a device that has rows, whatever the number of devices is."""
    monkeypatch.setattr(module, "platform_of", lambda mesh: "tpu")
    assert chunk_length(rows, 4096, vocab, VocabSharding(make_mesh(section))) == expected


def test_rows_that_the_groups_do_not_divide() -> None:
    sharding = VocabSharding(make_mesh(MeshSection(data=2, fsdp=4)))
    with pytest.raises(ValueError, match="3 rows: the size of .'data',., 2, must divide them"):
        head_function(lambda x: x, jax.ShapeDtypeStruct((3, 2, 5), jnp.float32), sharding)
