"""What is made of the weights for decoding: the model's own arrays where they serve, copies only while samples run."""

from __future__ import annotations

import asyncio
import gc
import weakref

import jax
import numpy as np
import pytest
from flax import nnx

from posttrain.models.decoder import Decoder
from posttrain.rollout.decode_weights import (
    DecodeLayout,
    DecodeWeights,
    DecodeWeightsCache,
    Loaded,
    choose_placement,
)
from posttrain.rollout.engine import NativeEngine
from posttrain.weights.state import ModelWeights
from tests.rollout.engines import assert_same, make_engine, params
from tests.rollout.test_sharded import MESHES, sharded_model
from tests.tiny import tiny_model

STACKED = {"num_layers": 4, "windows": (None, 5)}
"""Two layers in each stack."""


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_model(**STACKED)


@pytest.fixture
def engine(model: Decoder) -> NativeEngine:
    return make_engine(model, slots=1)


def loaded(model: Decoder, version: int = 0) -> Loaded:
    source = ModelWeights(model)
    return Loaded.of(
        source, arrays := source.read(), version, choose_placement("trained", source, arrays, None, slots=1)
    )


def leaves(model: Decoder) -> list[jax.Array]:
    return jax.tree.leaves(nnx.state(model))


def test_it_is_the_model_for_decoding_and_shares_what_is_not_cut(model: Decoder) -> None:
    now, cache = loaded(model), DecodeWeightsCache()
    weights = cache.of(now)
    found, expected = cache.model_of(now)(weights), now.source.bind(now.arrays).for_decoding()
    assert found.config == expected.config
    for array, same in zip(leaves(found), leaves(expected), strict=True):
        np.testing.assert_array_equal(array, same)
    assert found.embed.embedding.get_value() is now.arrays["embed.embedding"]
    assert {id(array) for array in leaves(found)} == {
        *map(id, weights.derived),
        *(id(array) for path, array in now.arrays.items() if not path.startswith("stages.")),
    }


def test_a_version_is_made_once_and_forgotten(model: Decoder) -> None:
    first, second, cache = loaded(model), loaded(model, 1), DecodeWeightsCache()
    assert first.layout == second.layout != loaded(tiny_model(num_layers=1)).layout
    weights = cache.of(first)
    assert cache.of(first) is weights is not cache.of(second)
    alive = weakref.ref(cache.of(second).derived[0])
    assert len(cache._layouts) == 1
    cache.forget()
    gc.collect()
    assert alive() is None


def test_the_old_copy_goes_before_the_new_is_made(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where samples under way take new weights, whose copies would lie side by side."""
    first, second, cache = loaded(model), loaded(model, 1), DecodeWeightsCache()
    alive = weakref.ref(cache.of(first).derived[0])
    make = DecodeLayout.weights

    def weights(layout: DecodeLayout, now: Loaded) -> DecodeWeights:
        gc.collect()
        assert alive() is None
        return make(layout, now)

    monkeypatch.setattr(DecodeLayout, "weights", weights)
    assert len(cache.of(second).derived) > 0


def test_an_idle_engine_holds_no_copy(engine: NativeEngine) -> None:
    cache = engine.programs._weights
    engine.generate_all([[5, 6]], [params(0, max_tokens=3)])
    assert not cache._latest

    async def look() -> None:
        sample = asyncio.create_task(engine.generate([5, 6], params(1, max_tokens=12)))
        while not cache._latest:
            await asyncio.sleep(0)
        await sample
        while engine._driver is not None:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(look(), 60))
    assert not cache._latest
    # The cache goes only when it is told to, and comes again.
    held = engine._runner.arrays()
    [sample] = engine.generate_all([[5, 6]], [params(2, max_tokens=3)])
    engine.release_cache()
    assert held and all(array.is_deleted() for array in held) and engine._runner.arrays() == []
    assert engine.num_used_blocks == 0
    assert_same(engine.generate_all([[5, 6]], [params(2, max_tokens=3)])[0], sample)
    assert engine._runner.arrays()


@pytest.mark.parametrize("name", ["fsdp", "all"])
def test_layers_that_are_cut_stay_spread(name: str) -> None:
    now = loaded(sharded_model(MESHES[name], **STACKED))
    own = sum(array.addressable_shards[0].data.nbytes for p, array in now.arrays.items() if p.startswith("stages."))
    assert sum(array.addressable_shards[0].data.nbytes for array in DecodeWeightsCache().of(now).derived) == own
