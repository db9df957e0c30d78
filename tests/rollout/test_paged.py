"""Decoding in pages: every layout of the pool draws the samples of rows, and no row writes where it may not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.config import CacheDtype, DecodeAttention, MeshSection
from posttrain.errors import ConfigError
from posttrain.mesh import make_mesh, param_sharding
from posttrain.models import attention
from posttrain.models.config import Compute
from posttrain.models.decoder import Decoder
from posttrain.models.quant import packed, unpacked
from posttrain.rollout import scheduler
from posttrain.rollout.blocks import BLOCK
from posttrain.rollout.engine import NativeEngine
from posttrain.rollout.paged import _placed, choose_layout
from posttrain.weights.state import ModelWeights
from tests.often import often
from tests.random_families import random_family_model
from tests.rollout.engines import LENGTH, assert_same, make_engine, params, requests
from tests.tiny import forward, tiny_config, tiny_model


def paged_model(layout: DecodeAttention, **changes: Any) -> Decoder:
    model = tiny_model(**changes)
    model.compute = replace(model.compute, decode_attention=layout)
    return model


@pytest.mark.parametrize("layout", often(("gather", "ragged", "joined"), "joined"))
def test_samples_do_not_depend_on_the_layout(
    layout: DecodeAttention, engine: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More requests than slots and blocks; groups that share a prompt write on in its last block, each in its own.
    Layers with a window have fewer blocks than the others."""
    monkeypatch.setattr(scheduler, "PROMPT_CHUNK", 16)
    monkeypatch.setattr(scheduler, "PROMPT_TOKENS", 16)
    paged = make_engine(paged_model(layout), cache_tokens=15 * BLOCK)
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
    assert [keys.shape[2] for keys in pool.keys] == [15, 14]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layout", "kind"), often([("rows", "int8"), ("gather", "int8"), ("gather", "fp8")], ("rows", "int8"))
)
def test_a_cache_in_8_bits(layout: DecodeAttention, kind: CacheDtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities are those of a forward pass that attends to rounded keys and values, whatever is shared, copied
    or read again. A number in the middle of two codes may be rounded either way: less than a fifth of the gap."""
    model = paged_model(layout, num_layers=1)
    engine = make_engine(model, cache_tokens=112, cache_dtype=kind)
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, 512, size).tolist() for size in (20, 22, 25, 31)]
    prompts, parameters = [*prompts, *[prompts[3]] * 3], [params(i) for i in range(7)]
    done = engine.generate_all(prompts, parameters)
    assert {array.dtype for array in engine._runner.arrays()} == {jnp.dtype(jnp.int8)}
    texts = [[*prompt, *completion.tokens] for prompt, completion in zip(prompts, done, strict=True)]
    rows = np.stack([np.pad(text, (0, LENGTH - len(text))) for text in texts])

    def gap() -> float:
        logps = np.asarray(jax.nn.log_softmax(forward(model, rows)))
        told = zip(prompts, done, rows, logps, strict=True)
        wide = [
            np.abs(of[at - 1, row[at]] - logp)
            for prompt, completion, row, of in told
            for at, logp in enumerate(completion.logps, len(prompt))
        ]
        return float(np.mean(wide))

    plain, store = gap(), attention.store_keys

    def rounding(keys: jax.Array, values: jax.Array, *args: Any, **settings: Any) -> Any:
        return store(*(unpacked(packed(x, kind), kind, x.dtype) for x in (keys, values)), *args, **settings)

    monkeypatch.setattr(attention, "store_keys", rounding)
    assert gap() < 0.2 * plain and 1e-4 < plain < 0.2


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_was_rounded_stays_as_it_is(kind: CacheDtype, dtype: Any) -> None:
    draw = np.random.default_rng(0)
    x = jnp.asarray(draw.normal(size=(500, 64)) * 10.0 ** draw.integers(-4, 3, (500, 1)), dtype)
    x = x.at[0].set(0).at[1:3, 0].set(jnp.asarray([127.0, 448.0], dtype))
    once = unpacked(packed(x, kind), kind, dtype)
    assert (once == unpacked(packed(once, kind), kind, dtype)).all()
    wide, rounded = np.asarray(x, np.float64), np.asarray(once, np.float64)
    largest = np.abs(wide).max(axis=-1, keepdims=True)
    # Half a step of the largest power of two below the largest number, or of each number's own.
    bound = largest / 127 if kind == "int8" else np.maximum(np.abs(wide) / 16, largest * 2.0**-16)
    assert (np.abs(rounded - wide) <= bound * 1.001).all()


@pytest.mark.fast
def test_where_a_cache_in_8_bits_cannot_be() -> None:
    compute = Compute(dtype=jnp.dtype(jnp.float32), remat="none", decode_attention="ragged")
    with pytest.raises(ConfigError, match="rollout.cache_dtype=int8: TPU's kernels read keys and values in compute"):
        choose_layout("ragged", tiny_config(), compute, None, "int8")
    latent = random_family_model("deepseek_v3", 0).config
    with pytest.raises(ConfigError, match="rollout.cache_dtype=fp8: latent attention keeps latents in compute only"):
        choose_layout("gather", latent, compute, None, "fp8")


@pytest.mark.thorough
@pytest.mark.parametrize("on_mesh", [False, True])
@pytest.mark.parametrize(("family", "seed"), [("deepseek_v3", 21), ("gpt_oss", 3)])
def test_latents_and_sinks_draw_the_samples_of_rows(family: str, seed: int, on_mesh: bool) -> None:
    """On a mesh all devices read the one latent, each with queries of its own."""
    model, paged = (random_family_model(family, seed) for _ in range(2))
    paged.compute = replace(paged.compute, decode_attention="joined")
    if on_mesh:
        placed(paged, MeshSection(data=2, fsdp=2, tensor=2))
    prompts = [[5, 6, 7], list(range(40)), [9] * 17, [9] * 17, [9] * 17]
    parameters = [params(seed, max_tokens=12) for seed in range(5)]
    got = make_engine(paged)
    expected = make_engine(model).generate_all(prompts, parameters)
    for completion, other in zip(got.generate_all(prompts, parameters), expected, strict=True):
        assert_same(completion, other)
    pool = got._runner._pool
    assert pool is not None and pool.layout == "joined" and all(values is None for values in pool.values)


@pytest.mark.thorough
@pytest.mark.parametrize("on_mesh", [False, True])
def test_joined_heads_draw_the_samples_of_rows(on_mesh: bool) -> None:
    """Three heads of keys on a device, which the other kernel does not read from one page."""
    heads = (
        {"num_attention_heads": 12, "num_key_value_heads": 6}
        if on_mesh
        else {"num_attention_heads": 6, "num_key_value_heads": 3}
    )
    paged = paged_model("joined", **heads)
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
    assert pool.keys[0].shape[3:] == (heads["num_key_value_heads"], 16, 128)
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
    wide, shared = tiny_config(head_dim=128), replace(attention, keeps="keys")
    with_shared = replace(config, stages=(replace(config.stages[0], blocks=(replace(sinks, attention=shared),)),))
    for platform, plain, kernels in (
        ("cpu", "rows", ("rows",) * 3),
        ("gpu", "rows", ("rows",) * 3),
        ("tpu", "gather", ("ragged", "joined", "joined")),
    ):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        assert choose_layout("auto", with_shared, compute, None) == plain
        # Of heads of 8, keys and values share the lanes that the other kernel takes for each.
        assert tuple(choose_layout("auto", of, compute, None) for of in (wide, config, with_sinks)) == kernels
        assert choose_layout("gather", config, compute, None) == "gather"
        if platform == "gpu":  # rows would undo what a cache of 8 bits saves of its memory
            assert choose_layout("auto", config, compute, None, "int8") == "gather"
    with pytest.raises(
        ConfigError, match="'ragged' does not know the sinks of qwen3; use auto, joined, rows or gather"
    ):
        choose_layout("ragged", with_sinks, compute, None)
    with pytest.raises(ConfigError, match="'joined' does not know the shared keys of qwen3; use auto, rows or gather"):
        choose_layout("joined", with_shared, compute, None)


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
