"""Decoding in pages: every layout of the pool draws the samples of rows, and no row writes where it may not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.config import DecodeAttention, MeshSection
from posttrain.errors import ConfigError
from posttrain.mesh import make_mesh, param_sharding
from posttrain.models.config import Compute
from posttrain.models.decoder import Decoder
from posttrain.rollout.engine import NativeEngine
from posttrain.rollout.paged import _placed, choose_layout
from posttrain.weights.state import ModelWeights
from tests.often import often
from tests.rollout.engines import assert_same, make_engine, params, requests
from tests.tiny import tiny_config, tiny_model


def paged_model(layout: DecodeAttention, **changes: Any) -> Decoder:
    model = tiny_model(**changes)
    model.compute = replace(model.compute, decode_attention=layout)
    return model


@pytest.mark.parametrize("layout", often(("gather", "ragged"), "ragged"))
def test_samples_do_not_depend_on_the_layout(layout: DecodeAttention, engine: NativeEngine) -> None:
    """More requests than slots and blocks; groups that share a prompt write on in its last block, each in its own."""
    paged = make_engine(paged_model(layout), cache_tokens=112)
    prompts, parameters = requests(7)
    prompts += [prompts[3]] * 4
    parameters += [params(90 + i, max_tokens=12, temperature=float(i > 0)) for i in range(4)]
    for _ in range(2):  # the second time prompts are in the blocks already
        got = paged.generate_all(prompts, parameters)
        for completion, other in zip(got, engine.generate_all(prompts, parameters), strict=True):
            assert_same(completion, other)
    assert paged.num_used_blocks == 0
    pool = paged._runner._pool
    assert pool is not None and pool.layout == layout


@pytest.mark.thorough
@pytest.mark.parametrize("on_mesh", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_heads_apart_draw_the_samples_of_rows(on_mesh: bool) -> None:
    """Three heads of keys on a device, which the kernel does not read from one page."""
    heads = (
        {"num_attention_heads": 12, "num_key_value_heads": 6}
        if on_mesh
        else {"num_attention_heads": 6, "num_key_value_heads": 3}
    )
    paged = paged_model("ragged", **heads)
    expected = make_engine(tiny_model(**heads))
    if on_mesh:
        placed(paged, MeshSection(data=2, fsdp=2, tensor=2))
    engine = make_engine(paged)
    prompts, parameters = requests(6)
    prompts += [prompts[3]] * 3  # which share blocks and write on in copies of the last
    parameters += [params(90 + i, max_tokens=12) for i in range(3)]
    got = engine.generate_all(prompts, parameters)
    for completion, other in zip(got, expected.generate_all(prompts, parameters), strict=True):
        assert_same(completion, other)
    pool = engine._runner._pool
    assert pool is not None and pool.keys[0] is not None
    assert pool.keys[0].shape[3:] == (heads["num_key_value_heads"], 16, 2, 128)
    assert pool.keys[0].sharding.shard_shape(pool.keys[0].shape)[3] == 3


def placed(model: Decoder, section: MeshSection) -> None:
    mesh, weights = make_mesh(section), ModelWeights(model)
    dims = weights.dims()
    weights.write({p: jax.device_put(w, param_sharding(mesh, p, dims[p], w.shape)) for p, w in weights.read().items()})


@pytest.mark.thorough
def test_pages_on_a_mesh(engine: NativeEngine) -> None:
    model = paged_model("ragged")
    placed(model, MeshSection(data=2, fsdp=2, tensor=2))
    prompts, parameters = requests(6)
    sharded = make_engine(model)
    for completion, other in zip(
        sharded.generate_all(prompts, parameters), engine.generate_all(prompts, parameters), strict=True
    ):
        assert_same(completion, other)
    pool = sharded._runner._pool
    assert pool is not None
    keys = pool.keys[0]
    assert keys is not None
    lanes, heads = 4, 2
    assert keys.sharding.shard_shape(keys.shape)[1] == keys.shape[1] // lanes
    assert keys.sharding.shard_shape(keys.shape)[4] == keys.shape[4] // heads


def test_the_layout_that_a_platform_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    config, compute = tiny_config(), Compute.of(np.float32)
    attention = config.blocks[0].attention
    sinks = replace(config.stages[0].blocks[0], attention=replace(attention, sinks=True))
    with_sinks = replace(config, stages=(replace(config.stages[0], blocks=(sinks,)),))
    for platform, plain, other in (("cpu", "rows", "rows"), ("gpu", "gather", "gather"), ("tpu", "ragged", "gather")):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        assert choose_layout("auto", config, compute, None) == plain
        assert choose_layout("auto", with_sinks, compute, None) == other
        assert choose_layout("gather", config, compute, None) == "gather"
    with pytest.raises(ConfigError, match="model.decode_attention: 'ragged' knows neither the sinks"):
        choose_layout("ragged", with_sinks, compute, None)


def test_blocks_placed_at_once_as_one_by_one() -> None:
    rng = np.random.default_rng(0)
    pool, blocks = (rng.normal(size=(2, 1, n, 4, 1, 8)).astype(np.float32) for n in (6, 4))
    old, new = np.asarray([2, 0, 3, 1], np.int32), np.asarray([4, 6, 1, 9], np.int32)  # two out of range
    for source in (None, blocks):
        expected = pool.copy()
        expected[:, :, [4, 1]] = (pool if source is None else source)[:, :, [2, 3]]
        for platform in ("gpu", "tpu"):
            found = _placed(
                jnp.asarray(pool),
                None if source is None else jnp.asarray(source),
                jnp.asarray(old),
                jnp.asarray(new),
                platform,
            )
            np.testing.assert_array_equal(found, expected)
