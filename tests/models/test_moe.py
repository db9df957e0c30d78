"""Mixtures of experts: the sum that they are, the same on every mesh, replayed choices, statistics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from numpy.testing import assert_allclose, assert_array_equal

from posttrain.config import MeshSection
from posttrain.errors import ConfigError
from posttrain.mesh import BATCH_SPEC, make_mesh
from posttrain.models.config import Compute, MLPConfig, MoEConfig, RouterConfig, stages_of
from posttrain.models.decoder import Decoder
from posttrain.models.forward_state import Context, ForwardState, LayerIndex, Routing
from posttrain.models.moe import MoE, router_stats
from posttrain.weights.state import ModelWeights
from tests.mixtures import MIXTURE, mixture_config, mixture_model

ROWS, LENGTH = 8, 10
FORWARD: dict[Any, Any] = {}


def inputs(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two sequences and some padding in each row."""
    tokens = np.random.default_rng(seed).integers(0, 512, (ROWS, LENGTH)).astype(np.int32)
    index = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)
    segments = np.where(index < 4, 1, np.where(index < 9, 2, 0)).astype(np.int32)
    return tokens, np.where(index < 4, index, index - 4).astype(np.int32), segments


def run(model: Decoder, experts: Any = None, *, rows: int = ROWS) -> tuple[np.ndarray, Routing]:
    """Hidden states and routing."""
    weights = ModelWeights(model)
    graph = nnx.graphdef(model)
    if graph not in FORWARD:

        def forward(arrays: Any, experts: Any, *args: Any) -> Any:
            hidden, _, routing = weights.bind(arrays).forward(*args, experts=experts)
            return hidden, routing

        FORWARD[graph] = jax.jit(forward)
    hidden, routing = FORWARD[graph](weights.read(), experts, *(jnp.asarray(x[:rows]) for x in inputs()))
    return np.asarray(hidden), routing


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def test_a_mixture_is_the_weighted_sum_of_the_chosen_experts() -> None:
    """Padding has none."""
    layer = mixture_model(mixture_config(num_layers=2)).stages[1].blocks[0].mlp
    graph, state = nnx.split(layer)
    moe: MoE = nnx.merge(graph, jax.tree.map(lambda w: w[0], state))
    p = {".".join(map(str, path)): np.asarray(v[...])[0] for path, v in nnx.to_flat_state(state)}
    x = np.random.default_rng(1).normal(size=(2, 5, 32)).astype(np.float32)
    ones = jnp.ones((2, 5), jnp.int32)
    segments = np.asarray([[1] * 5, [1] * 3 + [0] * 2], np.int32)
    context = Context(
        positions=ones,
        segments=jnp.asarray(segments),
        parents=None,
        rope={},
        compute=Compute.of(jnp.float32),
        experts=None,
        layer_inputs=None,
        token_mesh=None,
    )
    out = np.asarray(jax.jit(lambda x: moe(x, context, ForwardState(cache=None), LayerIndex(0, 0, 1, 0)))(x))
    logits = x @ p["router.proj.kernel"] + p["router.proj.bias"]
    scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    for index in np.ndindex(2, 5):
        token, score = x[index], scores[index]
        chosen = np.argsort(-(score + p["router.correction"]), kind="stable")[:3]
        shared = silu(token @ p["shared.gate.kernel"]) * (token @ p["shared.up.kernel"]) @ p["shared.down.kernel"]
        expected = shared / (1 + np.exp(-(token @ p["shared_gate.kernel"])))
        for e in chosen if segments[index] else ():
            gate = token @ p["experts.gate"][e] + p["experts.gate_bias"][e]
            up = token @ p["experts.up"][e] + p["experts.up_bias"][e]
            down = silu(gate) * up @ p["experts.down"][e] + p["experts.down_bias"][e]
            expected = expected + score[e] / score[chosen].sum() * down
        assert_allclose(out[index], expected, atol=2e-5)


class Result:
    """Loss, hidden states, routing and gradients of one pass."""

    def __init__(self, section: MeshSection | None):
        mesh = None if section is None else make_mesh(section)
        model = mixture_model(CONFIG, mesh=mesh)
        weights = ModelWeights(model)

        def loss(arrays: Any, *args: Any) -> Any:
            hidden, _, routing = weights.bind(arrays).forward(*args)
            total = 1e-2 * jnp.sum(hidden**3) + routing.stats.balance.sum() + 0.1 * routing.stats.z.sum()
            return total, (hidden, routing)

        sharding = None if mesh is None else NamedSharding(mesh, BATCH_SPEC)
        args = [jax.device_put(x, sharding) for x in inputs()]
        (self.loss, (self.hidden, self.routing)), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(
            weights.read(), *args
        )
        self.gradients = jax.tree.map(np.asarray, gradients)


CONFIG = mixture_config(num_layers=2)


@pytest.fixture(scope="module")
def single() -> Result:
    return Result(None)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "section",
    [
        MeshSection(fsdp=2, expert=2, tensor=2),
        MeshSection(data=2, fsdp=1, expert=4),
    ],
    ids=["fsdp2-expert2-tensor2", "data2-expert4"],
)
def test_every_mesh_gives_the_result_of_one_device(single: Result, section: MeshSection) -> None:
    """Biases and a shared expert as well: over `tensor` each is added once."""
    spread = Result(section)
    assert_allclose(spread.loss, single.loss, rtol=1e-5)
    assert_allclose(spread.hidden, single.hidden, atol=1e-5)
    assert_array_equal(spread.routing.experts, single.routing.experts)
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-5), spread.routing.stats, single.routing.stats)
    for path, gradient in single.gradients.items():
        scale = np.abs(gradient).max()
        assert scale > 0 or path.endswith("correction"), path
        assert_allclose(spread.gradients[path], gradient, atol=1e-5 * max(scale, 1.0), rtol=0, err_msg=path)


@pytest.mark.thorough
def test_rows_that_the_mesh_does_not_divide() -> None:
    """As a sampler has them."""
    config = mixture_config(num_layers=1, num_dense=0)
    expected, _ = run(mixture_model(config), rows=3)
    spread, _ = run(mixture_model(config, mesh=make_mesh(MeshSection(fsdp=2, expert=2, tensor=2))), rows=3)
    assert_allclose(spread, expected, atol=1e-5)


def test_experts_that_the_mesh_does_not_divide() -> None:
    config = mixture_config(replace(MIXTURE, num_experts=6), num_layers=1, num_dense=0)
    with pytest.raises(ConfigError) as raised:
        mixture_model(config, mesh=make_mesh(MeshSection(fsdp=2, expert=4)))
    assert str(raised.value) == (
        "mesh.expert=4 must divide the dimension 'expert' (6) of stages.0.blocks.0.mlp.experts.down; use a divisor of 6"
    )


def test_replayed_experts_are_used_and_negative_ones_left_to_the_router() -> None:
    model = mixture_model(CONFIG)
    hidden, routing = run(model)
    chosen = np.asarray(routing.experts)
    assert chosen.shape == (1, ROWS, LENGTH, 3)
    assert not routing.stats.replaced.any()
    again, _ = run(model, jnp.asarray(chosen))
    assert_array_equal(again, hidden)
    own, _ = run(model, jnp.full_like(chosen, -1))
    assert_array_equal(own, hidden)
    other = chosen.copy()
    other[0, 2, 3] = sorted(set(range(8)) - set(chosen[0, 2, 3].tolist()))[:3]
    changed, routing = run(model, jnp.asarray(other))
    assert_array_equal(routing.experts, other)
    assert_array_equal(routing.stats.replaced, [3.0])
    difference = np.abs(changed - hidden).max(axis=-1)
    assert difference[2, 3] > 1e-3
    difference[2, 3] = 0.0
    assert difference.max() == 0


def test_statistics_are_of_real_tokens_and_balance_is_by_sequence() -> None:
    """Two sequences of a row count as they would apart, and experts used alike with equal scores give 1."""
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(1, 10, 4)).astype(np.float32)
    experts, segments = np.argsort(-logits, axis=-1)[..., :2], np.asarray([[1] * 4 + [2] * 5 + [0]], np.int32)
    scores = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    stats = jax.jit(router_stats)
    both = stats(logits, scores, experts, experts, segments)
    apart = [
        stats(logits[:, a:b], scores[:, a:b], experts[:, a:b], experts[:, a:b], segments[:, a:b] * 0 + 1)
        for a, b in ((0, 4), (4, 9))
    ]
    jax.tree.map(lambda whole, *parts: assert_allclose(whole, sum(parts), rtol=1e-6), both, *apart)
    expected = 0.0
    for a, b in ((0, 4), (4, 9)):
        share = np.bincount(experts[0, a:b].reshape(-1), minlength=4) / (b - a)
        expected += (b - a) * 4 / 2 * np.sum(share * scores[0, a:b].mean(axis=0))
    assert_allclose(both.balance, expected, rtol=1e-6)
    assert_allclose(both.z, np.sum(np.log(np.exp(logits).sum(-1))[0, :9] ** 2), rtol=1e-5)
    assert both.load.sum() == 18

    even, used = np.zeros((1, 4, 4), np.float32), np.asarray([[[0, 1], [2, 3], [1, 0], [3, 2]]])
    assert_allclose(stats(even, even + 0.25, used, used, np.ones((1, 4), np.int32)).balance / 4, 1.0)


@pytest.mark.thorough
def test_the_numbers_of_mixtures_follow_the_order_of_layers() -> None:
    """Corrections by their path against the routing of a pass, whose stages repeat patterns of several blocks."""
    plain = replace(MIXTURE, router=RouterConfig())
    config = mixture_config(num_layers=9, num_dense=0)
    first = config.blocks[0]
    blocks = [replace(first, mlp=m) for m in (plain, MIXTURE, first.mlp, MLPConfig(dim=8)) * 2]
    config = replace(config, stages=stages_of(tuple(blocks)))
    assert [stage.repeats for stage in config.stages] == [2]
    paths = config.correction_paths
    assert paths == {f"stages.0.blocks.{b}.mlp.router.correction": [b, 3 + b] for b in (1, 2)}
    model = mixture_model(config)
    weights = ModelWeights(model)
    before = np.asarray(run(model)[1].stats.load)
    for path, numbers in paths.items():
        # A large correction of one expert: every token of that mixture then goes to it.
        old = weights.read()[path]
        weights.write({path: old.at[1, 5].set(100.0)})
        load = np.asarray(run(model)[1].stats.load)
        weights.write({path: old})
        assert load[numbers[1], 5] == (inputs()[2] > 0).sum() != before[numbers[1], 5]
        assert np.flatnonzero((load != before).any(axis=-1))[0] == numbers[1]


def test_grouped_choice_stays_in_the_best_groups() -> None:
    mixture = MoEConfig(
        num_experts=8,
        top_k=2,
        expert=MLPConfig(dim=8),
        router=RouterConfig(score="sigmoid", num_groups=4, top_groups=1, scale=2.5),
    )
    _, routing = run(mixture_model(mixture_config(mixture, num_layers=1, num_dense=0)))
    groups = np.asarray(routing.experts) // 2
    assert_array_equal(groups[..., 0], groups[..., 1])
    assert len(np.unique(groups)) > 1
