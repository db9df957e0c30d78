"""A student's layers against a teacher's: a naive twin, packing, micro-batches, gradients, checkpoints, learning."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from numpy.testing import assert_allclose, assert_array_equal

from posttrain.batch import Batch
from posttrain.config import MeshSection
from posttrain.kernels.logits.chunk_stats import Terms
from posttrain.kernels.logits.divergence import Divergence
from posttrain.kernels.logits.layout import predicting
from posttrain.losses.distill import DistillLoss
from posttrain.mesh import make_mesh
from posttrain.metrics import to_host
from posttrain.models.activations import HIDDEN, Taps
from posttrain.models.decoder import Decoder
from posttrain.train import layer_matching
from posttrain.train.checkpoint import Checkpointer
from posttrain.train.layer_matching import Matching, Relation
from posttrain.train.objective import TrainSettings
from posttrain.train.trainer import Trainer
from posttrain.weights.state import ModelWeights
from tests.tiny import tiny_model

LENGTH = 20
LENGTHS = (7, 12, 9, 3)
EVERY = ("q", "k", "v")

HIDDEN_PAIRS = ((0, 1), (1, 1))
RELATIONS = (
    *(Relation(1, 1, name, heads) for name, heads in zip(EVERY, (4, 2, 2), strict=True)),
    Relation(0, 0, "q", 4),
)


def student() -> Decoder:
    return tiny_model(0, num_layers=2, windows=(5,))


def teacher() -> Decoder:
    return tiny_model(1, num_layers=2, windows=(None,), hidden_size=48, num_attention_heads=6)


def matching(**changes: Any) -> Matching:
    return Matching(**{"hidden": HIDDEN_PAIRS, "widths": (32, 48), "relations": RELATIONS, "seed": 0, **changes})


def apart() -> Batch:
    """Each sequence in a row of its own, loss on the later part."""
    draw = np.random.default_rng(0)
    tokens, segments, positions = np.zeros((3, len(LENGTHS), LENGTH), np.int32)
    weight = np.zeros(tokens.shape, np.float32)
    for row, length in enumerate(LENGTHS):
        tokens[row, :length] = draw.integers(1, 512, length)
        segments[row, :length], positions[row, :length] = 1, np.arange(length)
        weight[row, length // 3 + 1 : length] = draw.uniform(0.5, 1.5, length - length // 3 - 1)
    return Batch(tokens=tokens, positions=positions, segments=segments, loss_weight=weight)


def packed() -> Batch:
    """The same, two sequences to a row."""

    def together(x: np.ndarray, *, number: int = 0) -> np.ndarray:
        made = np.zeros((2, LENGTH), x.dtype)
        for index, length in enumerate(LENGTHS):
            start = LENGTHS[index - 1] if index % 2 else 0
            made[index // 2, start : start + length] = x[index, :length] + number * (index % 2)
        return made

    one = apart()
    return Batch(
        tokens=together(one.tokens),
        positions=together(one.positions),
        segments=together(one.segments, number=1),
        loss_weight=together(one.loss_weight),
    )


def trainer(match: Matching | None = None, *, rows: int | None = None, mesh: Mesh | None = None) -> Trainer:
    """Its first update is the gradient itself."""
    settings = TrainSettings(
        temperature=1.0,
        max_grad_norm=1e9,
        micro_batch_rows=rows,
        terms=Terms(divergence=Divergence(beta=0.0, temperature=1.0)),
        matching=match or matching(),
    )
    loss, optimizer = DistillLoss(0.0, hidden=0.5, attention=2.0), optax.sgd(1.0, momentum=0.9)
    return Trainer(student(), loss, optimizer, settings, mesh=mesh, teachers=[teacher()])


def moved(t: Trainer, batch: Batch) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    before = {path: np.asarray(w) for path, w in t.weights.items()}
    metrics = to_host(t.step(batch))
    return {path: np.asarray(w) - before[path] for path, w in t.weights.items()}, metrics


def assert_same(one: tuple[Any, Any], other: tuple[Any, Any], tolerance: float) -> None:
    for name in ("loss", "distill/hidden", "distill/attention", "distill/kl"):
        assert_allclose(one[1][name], other[1][name], rtol=1e-5, err_msg=name)
    assert one[0].keys() == other[0].keys()
    scale = max(np.abs(update).max() for update in one[0].values())
    for path in one[0]:
        assert_allclose(one[0][path], other[0][path], atol=tolerance * scale, rtol=0, err_msg=path)


@pytest.fixture(scope="module")
def whole() -> Trainer:
    """In one piece, on one device."""
    return trainer()


@pytest.fixture(scope="module")
def update(whole: Trainer) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Its first, from `apart()`."""
    return moved(whole, apart())


@pytest.fixture(scope="module")
def tapped() -> list[Any]:
    """What student and teacher hand out of `apart()`."""
    found, batch = [], apart()
    inputs = tuple(map(jnp.asarray, (batch.tokens, batch.positions, batch.segments)))
    for model, taps in ((student(), matching().student), (teacher(), matching().teacher)):
        weights = ModelWeights(model)
        program = jax.jit(lambda arrays, weights=weights, taps=taps: weights.bind(arrays).features(*inputs, taps)[2])
        found.append(program(weights.read()))
    return found


def naive(tapped: list[Any], kind: layer_matching.HiddenLoss) -> tuple[float, float]:
    """Both metrics in float64, sequence by sequence and pair by pair."""
    batch, projections = apart(), matching().projections()
    own, theirs = jax.tree.map(lambda x: np.asarray(x, np.float64), tapped)
    sums, weights = np.zeros(2), 0.0
    for row, length in enumerate(LENGTHS):
        for t in range(1, length):
            weight = float(batch.loss_weight[row, t])
            weights += weight
            hidden = []
            for a, b in HIDDEN_PAIRS:
                s, q = (
                    own[a][HIDDEN][row, t - 1] @ projections[f"matching.{a}.projection"],
                    theirs[b][HIDDEN][row, t - 1],
                )
                cosine = 1 - s @ q / np.linalg.norm(s) / np.linalg.norm(q)
                hidden.append(np.mean((s - q) ** 2) if kind == "mse" else cosine)
            attention = []
            for a, b, name, heads in RELATIONS:
                p_s, p_t = (relation(x[row, :t], heads) for x in (own[a][name], theirs[b][name]))
                attention.append(np.mean(np.sum(p_t * np.log(p_t / p_s), axis=-1)))
            sums += weight * np.array([np.mean(hidden), np.mean(attention)])
    return tuple(sums / weights)


def relation(x: np.ndarray, heads: int) -> np.ndarray:
    """Of the last of some tokens to all of them, [heads, tokens]."""
    x = x.reshape(len(x), heads, -1)
    scores = np.einsum("hd,thd->ht", x[-1], x) / np.sqrt(x.shape[-1])
    exps = np.exp(scores - scores.max(-1, keepdims=True))
    return exps / exps.sum(-1, keepdims=True)


def test_the_naive_twin(update: tuple[Any, dict[str, float]], tapped: list[Any]) -> None:
    hidden, attention = naive(tapped, "cosine")
    metrics = update[1]
    assert attention > 0.01 and 0.5 < hidden < 1.5
    assert_allclose((metrics["distill/hidden"], metrics["distill/attention"]), (hidden, attention), rtol=1e-4)
    assert_allclose(metrics["loss"], metrics["distill/divergence"] + 0.5 * hidden + 2 * attention, rtol=1e-4)
    batch, squares = apart(), matching(kind="mse", relations=())
    projections = jax.tree.map(jnp.asarray, squares.projections())
    found = jax.jit(squares)(*tapped, projections, batch.segments, batch.loss_weight > 0)
    assert found.keys() == {"hidden_distance"} and not found["hidden_distance"][batch.loss_weight == 0].any()
    mean = np.average(found["hidden_distance"], weights=batch.loss_weight)
    assert_allclose(mean, naive(tapped, "mse")[0], rtol=1e-4)


@pytest.mark.thorough
def test_packing_micro_batches_and_chunks_change_nothing(update: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_matching, "CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(layer_matching, "MIN_CHUNK_TOKENS", 3)
    assert_same(update, moved(trainer(rows=1), packed()), 5e-6)


@pytest.mark.thorough
def test_unequal_micro_batches_change_nothing(update: Any) -> None:
    assert_same(update, moved(trainer(rows=3), apart()), 5e-6)


@pytest.mark.thorough
@pytest.mark.optimized
def test_no_array_of_tokens_times_tokens_is_whole() -> None:
    """Of no head, forward or backward."""
    rows, length, heads = 2, 512, 4
    x, y = (jnp.ones((rows, length, heads * size)) for size in (8, 12))
    segments = jnp.ones((rows, length), jnp.int32)

    def total(x: jax.Array, y: jax.Array) -> jax.Array:
        related = [layer_matching.RelationPair(x, y, heads), layer_matching.RelationPair(x, x, heads)]
        return jnp.sum(layer_matching.relation_divergence(related, segments, predicting(segments)))

    text = jax.jit(jax.grad(total)).lower(x, y).compile().as_text()
    shapes = {tuple(map(int, s.split(","))) for s in re.findall(r"(?:f32|pred|s32)\[([\d,]+)\]", text)}
    largest = max(map(math.prod, shapes))
    assert rows * length * length / 4 < largest < rows * length * length


@pytest.mark.thorough
def test_eight_devices_give_the_update_of_one(update: Any) -> None:
    mesh = make_mesh(MeshSection(data=2, fsdp=2, tensor=2))
    assert_same(update, moved(trainer(mesh=mesh), apart()), 2e-5)


def test_what_learns_and_what_does_not(whole: Trainer, update: Any) -> None:
    """The projections and the student; the teacher stays as it is."""
    for path, w in whole._teacher_weights[0].items():
        assert_array_equal(w, ModelWeights(teacher()).read()[path])
    for layer in (0, 1):
        assert np.abs(update[0][f"matching.{layer}.projection"]).max() > 1e-4
    assert not [path for path in ModelWeights(whole.model).read() if path.startswith("matching")]
    same = Matching(hidden=HIDDEN_PAIRS, widths=(32, 32), seed=0).projections()
    assert_array_equal(same["matching.1.projection"], np.eye(32))


def test_equal_features_are_at_no_distance(tapped: list[Any]) -> None:
    match = Matching(hidden=((0, 0), (1, 1)), relations=(Relation(0, 0, "q", 2),), seed=0, kind="mse")
    ones = jnp.ones((len(LENGTHS), LENGTH), jnp.int32)
    found = jax.jit(match)(tapped[0], tapped[0], {}, ones, ones > 0)
    for values in found.values():
        assert_allclose(values, 0.0, atol=1e-6)


def scanned_and_unrolled(remat: Any, gradients: bool) -> tuple[Decoder, list[Any]]:
    """What some of the repeats of a pattern hand out, with gradients or without."""
    model = tiny_model(0, num_layers=4, windows=(None, 5), remat=remat)
    weights, batch = ModelWeights(model), packed()
    inputs = tuple(map(jnp.asarray, (batch.tokens, batch.positions, batch.segments)))
    taps = Taps(layers={HIDDEN: frozenset((0, 1, 3)), "k": frozenset((2,))})

    def total(arrays: Any, unroll: bool) -> Any:
        bound = weights.bind(arrays)
        bound.unroll = unroll
        final, _, found, _ = bound.features(*inputs, taps)
        return sum(jnp.sum(jnp.sin(x)) for given in found.values() for x in given.values()), (final, found)

    program = jax.jit(jax.value_and_grad(total, has_aux=True) if gradients else total, static_argnums=1)
    return model, [program(weights.read(), unroll) for unroll in (False, True)]


def test_scanned_layers_hand_out_what_unrolled_ones_do() -> None:
    model, ((_, one), (_, other)) = scanned_and_unrolled("none", gradients=False)
    names = {layer: tuple(given) for layer, given in one[1].items()}
    assert names == {0: (HIDDEN,), 1: (HIDDEN,), 2: ("k",), 3: (HIDDEN,)}
    jax.tree.map(lambda a, b: assert_allclose(a, b, atol=1e-5), one, other)
    assert_allclose(model.final_norm(one[1][3][HIDDEN]), one[0], atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("remat", ["none", "full"])
def test_scanned_layers_have_the_gradients_of_unrolled_ones(remat: Any) -> None:
    _, ((_, one), (_, other)) = scanned_and_unrolled(remat, gradients=True)
    jax.tree.map(lambda a, b: assert_allclose(a, b, atol=1e-4), one, other)


def test_a_model_that_is_not_tapped_is_the_program_that_it_was() -> None:
    """Nothing but its result leaves it: no array more goes from layer to layer."""
    model, batch = tiny_model(0, num_layers=4, windows=(5,)), packed()
    inputs = tuple(map(jnp.asarray, (batch.tokens, batch.positions, batch.segments)))
    weights = ModelWeights(model)

    def carried(taps: Taps | None) -> int:
        traced = jax.make_jaxpr(lambda arrays: weights.bind(arrays).features(*inputs, taps)[0])(weights.read())
        (scan,) = [equation for equation in traced.eqns if equation.primitive.name == "scan"]
        return len(scan.outvars)

    assert carried(None) == 1 and carried(matching().student) == 1 + 4


def test_resumed_is_never_stopped(whole: Trainer, update: Any, tmp_path: Path) -> None:
    """Projections and their moments come back; the model's branch of the checkpoint has none of them."""
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, whole.state(), {})
        assert not [path for path in whole.state()["params"] if path.startswith("matching")]
        whole.step(apart())
        expected = {path: np.asarray(w) for path, w in whole.params.items()}
        other = trainer(matching(seed=5))
        state, _ = checkpointer.restore(1, other.state())
        checkpointer.restore(1, {"params": whole.state()["params"]}, partial=True)
    moments = jax.tree_util.tree_leaves_with_path(state["opt_state"])
    kept = [np.abs(m).max() for path, m in moments if ".projection" in jax.tree_util.keystr(path)]
    assert len(kept) == 2 and min(kept) > 0
    other.restore(jax.tree.map(jnp.copy, state), 1)
    whole.restore(state, 1)
    for path, value in whole.params.items():
        assert_array_equal(other.params[path], value)
    whole.step(apart())
    for path, value in expected.items():
        assert_array_equal(whole.params[path], value)


def test_a_matching_without_its_teacher_or_weight() -> None:
    with pytest.raises(ValueError, match="matching needs exactly one in-step teacher, got 0"):
        Trainer(
            student(),
            DistillLoss(0.0),
            optax.sgd(1.0),
            TrainSettings(temperature=1.0, max_grad_norm=1.0, matching=matching()),
        )
    with pytest.raises(ValueError, match="DistillLoss.attention=2.0: no statistics for it"):
        trainer(matching(relations=())).evaluate([apart()])
