"""Activations that the backward pass saves by name: their bytes, the products that they spare, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.interpreters.partial_eval import dce_jaxpr

from posttrain.config import Remat, RematName, SavedActivations
from posttrain.errors import ConfigError
from posttrain.models.activations import SAVED_BY, rematerialized, saved_costs
from posttrain.models.config import Compute, ModelConfig
from posttrain.models.decoder import Decoder
from posttrain.models.hf import config_from_init
from posttrain.weights.load import outline_of
from posttrain.weights.state import ModelWeights
from tests.often import often
from tests.random_families import FAMILIES, random_fields
from tests.tiny import tiny_config

ROWS, LENGTH = 2, 128
FLOAT32 = jnp.dtype(jnp.float32)


def forward(config: ModelConfig, remat: Remat) -> tuple[ModelWeights, Callable[..., Any]]:
    """Weights as shapes, and the hidden states as a function of them."""
    compute = Compute(dtype=FLOAT32, remat=remat, attention="splash")
    weights = ModelWeights(outline_of(config, compute, FLOAT32))
    ids = jnp.zeros((ROWS, LENGTH), jnp.int32)
    return weights, lambda arrays: weights.bind(arrays)(ids, ids, ids)[0]


@cache
def held(config: ModelConfig, remat: Remat) -> int:
    """Bytes that the forward pass saves."""
    weights, hidden = forward(config, remat)
    pull = jax.eval_shape(lambda arrays: jax.vjp(hidden, arrays)[1], weights.structs())
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pull))


@cache
def work(config: ModelConfig, remat: Remat) -> tuple[int, int]:
    """Operations of matrix products in a gradient, and calls of kernels, as often as a scan makes them."""
    weights, hidden = forward(config, remat)
    program = jax.make_jaxpr(jax.grad(lambda arrays: jnp.sum(hidden(arrays))))(weights.structs()).jaxpr
    # As a compiler does: leave out what nothing reads.
    found = list(_work(dce_jaxpr(program, [True] * len(program.outvars))[0], 1))
    return sum(flops for flops, _ in found), sum(calls for _, calls in found)


def _work(jaxpr: Any, times: int) -> Iterator[tuple[int, int]]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield 0, times
            continue
        if eqn.primitive.name == "dot_general":
            ((contracted, _), _) = eqn.params["dimension_numbers"]
            depth = [eqn.invars[0].aval.shape[dim] for dim in contracted]
            yield 2 * times * eqn.outvars[0].aval.size * math.prod(depth), 0
        inner = times * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
            part = getattr(value, "jaxpr", value)
            if hasattr(part, "eqns"):
                yield from _work(part, inner)


NAMES: tuple[RematName, ...] = ("qkv", "attention", "projection", "gate", "up")


@pytest.mark.few(2)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("qk_norm", often([True, False], True))
def test_a_name_saves_its_bytes_and_spares_its_operations(name: RematName, qk_norm: bool) -> None:
    """Of attention the call of its kernel, which would run again without its statistics."""
    config = tiny_config(num_layers=2, windows=(None,), qk_norm=qk_norm)
    cost, named = saved_costs(config, 4, ROWS, LENGTH)[name], SavedActivations(save=(name,))
    assert held(config, named) - held(config, "full") == cost.bytes
    (products, calls), (fewer, fewer_calls) = work(config, "full"), work(config, named)
    # Queries with norms are still read by the norms, which are no products.
    assert products - fewer == (0 if name == "attention" else cost.flops)
    assert calls - fewer_calls == (config.num_layers if name == "attention" else 0)


@pytest.mark.thorough
@pytest.mark.parametrize("family", often(FAMILIES, "qwen3_moe"))
def test_all_names_save_their_bytes_and_spare_the_forward_kernels(family: str) -> None:
    config = config_from_init(random_fields(family, 1))
    costs = saved_costs(config, 4, ROWS, LENGTH)
    every = SavedActivations(save=tuple(costs))
    shapes = forward(config, every)[0].structs().items()
    # Saved products need their biases no more.
    biases = sum(4 * x.size for path, x in shapes if path.endswith("bias"))
    expected = sum(cost.bytes for cost in costs.values())
    assert expected - biases <= held(config, every) - held(config, "full") <= expected
    assert work(config, every)[1] == 2 * config.num_layers


def test_the_words_are_lists() -> None:
    config = tiny_config(num_layers=2, windows=(None,))
    assert work(config, "full") == work(config, SavedActivations()) == work(config, "offload")
    assert work(config, "dots")[0] == work(config, "none")[0] < work(config, "full")[0]
    assert set(SAVED_BY) == {"full", "dots", "offload"}


def test_offloaded_activations_are_put_into_the_hosts_memory() -> None:
    def block(x: Any) -> Any:
        return jnp.sin(jax.ad_checkpoint.checkpoint_name(jnp.sin(x), "gate"))

    def places(remat: Remat) -> str:
        return str(jax.make_jaxpr(jax.grad(lambda x: rematerialized(block, remat)(x)))(1.0))

    assert "Host" in places(SavedActivations(offload=("gate",))) or "pinned_host" in places(
        SavedActivations(offload=("gate",))
    )
    assert "Host" not in (saved := places(SavedActivations(save=("gate",)))) and "pinned_host" not in saved


def test_an_activation_without_a_reader_is_refused() -> None:
    config, compute = tiny_config(), Compute(dtype=FLOAT32, remat=SavedActivations(save=("gate", "down")))
    with pytest.raises(ConfigError, match="the backward pass of qwen3 does not read down; it reads qkv, attention"):
        outline_of(config, compute, FLOAT32)
    assert isinstance(outline_of(config_from_init(random_fields("gemma2", 1)), compute, FLOAT32), Decoder)
