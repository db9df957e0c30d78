"""Properties of the decoder that every family shares."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from numpy.testing import assert_allclose, assert_array_equal

from posttrain.config import AttentionKernel, MeshSection, SavedActivations
from posttrain.errors import ConfigError
from posttrain.kernels.attention import dispatch
from posttrain.kernels.logits.token_stats import token_stats
from posttrain.mesh import BATCH_SPEC, make_mesh
from posttrain.models import decoder
from posttrain.models.cache import empty_cache
from posttrain.models.config import stages_of
from posttrain.models.decoder import Decoder
from posttrain.weights.load import init_model
from posttrain.weights.state import ModelWeights
from tests.often import often
from tests.tiny import WINDOW, forward, shake, tiny_config, tiny_model

VARIANTS: dict[str, dict[str, Any]] = {
    "norms_tied": {},
    "biases_untied": {"qk_norm": False, "bias": True, "tie_embeddings": False},
}


@pytest.fixture(scope="module", params=often(VARIANTS, "norms_tied"))
def model(request: pytest.FixtureRequest) -> Decoder:
    model = tiny_model(**VARIANTS[request.param])
    shake(model, seed=1)
    return model


def rows(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 512, shape).astype(np.int32)


PACKED_LENGTHS = (5, 9, 7)
PACKED = np.concatenate([np.arange(n) for n in PACKED_LENGTHS] + [np.zeros(3)])[None].astype(np.int32)
SEGMENTS = np.repeat([1, 2, 3, 0], [*PACKED_LENGTHS, 3])[None].astype(np.int32)


def test_packed_is_apart(model: Decoder) -> None:
    tokens = rows(0, 1, 24)
    packed = forward(model, tokens, PACKED, SEGMENTS)
    for segment in (1, 2, 3):
        inside, alone = SEGMENTS[0] == segment, np.arange(24)[None] < PACKED_LENGTHS[segment - 1]
        apart = forward(model, np.roll(tokens, -np.argmax(inside)), np.arange(24)[None], alone)
        assert_allclose(packed[0, inside], apart[alone], atol=1e-5)
    assert np.isfinite(packed).all()


def test_no_gradient_between_segments(model: Decoder) -> None:
    # Every position has a token of its own, so that a row of the embedding's gradient belongs to one position.
    tokens = np.arange(24, dtype=np.int32)[None]
    weights = ModelWeights(model)
    inside = SEGMENTS[0] == 2

    def of_segment(arrays: Any) -> Any:
        hidden, _ = weights.bind(arrays)(jnp.asarray(tokens), jnp.asarray(PACKED), jnp.asarray(SEGMENTS))
        return jnp.sum(jnp.sin(hidden[0, inside]))

    gradient = np.asarray(jax.jit(jax.grad(of_segment))(weights.read())["embed.embedding"])[:24]
    assert (gradient[~inside] == 0).all()
    assert (np.abs(gradient[inside]).max(axis=-1) > 0).all()


def test_window_ends_after_so_many_tokens() -> None:
    model = tiny_model(num_layers=1, windows=(WINDOW,))
    tokens = rows(1, 1, 12)
    changed = tokens.copy()
    changed[0, 3] = (changed[0, 3] + 1) % 512
    difference = np.abs(forward(model, tokens) - forward(model, changed)).max(axis=-1)[0]
    assert (difference[:3] == 0).all()
    assert (difference[3 : 3 + WINDOW] > 1e-4).all()
    assert (difference[3 + WINDOW :] == 0).all()


def test_attention_is_causal(model: Decoder) -> None:
    tokens = rows(2, 1, 12)
    changed = tokens.copy()
    changed[0, 6:] = rows(3, 6)
    assert_array_equal(forward(model, tokens)[:, :6], forward(model, changed)[:, :6])


def gradients(model: Decoder, tokens: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """Summed log-probability of the tokens, and its gradient."""
    weights = ModelWeights(model)
    ones = jnp.ones_like(tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    def total(arrays: Any, tokens: Any) -> Any:
        bound = weights.bind(arrays)
        hidden, _ = bound(tokens, positions, ones)
        return token_stats(bound.logits, hidden, tokens, ones, temperature=1.0, vocab_size=512).logps.sum()

    value, gradient = jax.jit(jax.value_and_grad(total))(weights.read(), jnp.asarray(tokens))
    return value, {path: np.asarray(g) for path, g in gradient.items()}


def assert_same_gradients(one: tuple[Any, dict[str, np.ndarray]], two: tuple[Any, dict[str, np.ndarray]]) -> None:
    assert_allclose(one[0], two[0], rtol=1e-5)
    assert one[1].keys() == two[1].keys()
    for path, gradient in one[1].items():
        assert_allclose(two[1][path], gradient, atol=1e-5 * np.abs(gradient).max(), rtol=1e-4, err_msg=path)


def test_scanned_is_unrolled_and_remat_changes_nothing() -> None:
    tokens = rows(4, 2, 12)
    pattern: dict[str, Any] = {"num_layers": 4, "windows": (None, WINDOW)}
    plain = tiny_model(**pattern)
    assert [(len(stage.blocks), stage.repeats) for stage in plain.config.stages] == [(2, 2)]
    scanned = gradients(plain, tokens)
    named = SavedActivations(save=("attention", "gate"), offload=("qkv", "block_input"))
    assert_same_gradients(scanned, gradients(tiny_model(remat=named, **pattern), tokens))
    plain.unroll = True
    assert_same_gradients(scanned, gradients(plain, tokens))


def test_cached_decode_is_full_forward(model: Decoder) -> None:
    """Two rows of unlike length: prompts at once with padding, then chunks of one, three and one token."""
    tokens, lengths = rows(5, 2, 16), np.asarray([6, 3])
    expected = forward(model, tokens)
    weights = ModelWeights(model)

    @jax.jit
    def step(arrays: Any, *inputs: Any) -> Any:
        bound = weights.bind(arrays)
        hidden, cache = bound(*inputs)
        return bound.logits(hidden), cache

    cache = empty_cache(model.config, 2, 14, jnp.dtype(jnp.float32))
    done = np.zeros(2, np.int64)
    for counts in (lengths, [1, 1], [3, 3], [1, 1]):
        width = int(np.max(counts))
        offsets = np.arange(width)[None]
        real = offsets < np.asarray(counts)[:, None]
        positions = np.where(real, done[:, None] + offsets, 0)
        inputs = (np.take_along_axis(tokens, positions, 1), positions, real)
        logits, cache = step(weights.read(), *(jnp.asarray(x, jnp.int32) for x in inputs), cache)
        for row in range(2):
            got, want = logits[row, : counts[row]], expected[row, done[row] : done[row] + counts[row]]
            assert_allclose(got, want, atol=1e-5)
        done += counts


def test_bfloat16_compute_of_float32_parameters() -> None:
    model = tiny_model(compute_dtype=jnp.bfloat16)
    x = jnp.zeros((1, 4), jnp.int32)
    hidden, _ = jax.eval_shape(model, x, x, x)
    assert hidden.dtype == jnp.bfloat16
    assert jax.eval_shape(model.logits, hidden).dtype == jnp.float32
    assert model.embed.embedding[...].dtype == jnp.float32


QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


@pytest.mark.thorough
@pytest.mark.parametrize("unroll", often([False, True], True))
def test_eight_devices_are_one(unroll: bool) -> None:
    mesh = make_mesh(MeshSection(fsdp=4, tensor=2))
    alone = init_model(QWEN3, dtype=jnp.float32, seed=3)
    spread = init_model(QWEN3, dtype=jnp.float32, seed=3, mesh=mesh)
    spread.unroll = unroll
    kernel = spread.stages[0].blocks[0].mlp.up.kernel[...]
    assert kernel.addressable_shards[0].data.shape == (2, 32 // 4, 48 // 2)
    tokens = rows(6, 8, 10)
    placed = jax.device_put(tokens, NamedSharding(mesh, BATCH_SPEC))
    assert_same_gradients(gradients(alone, tokens), gradients(spread, placed))


def test_mesh_that_does_not_fit() -> None:
    with pytest.raises(ConfigError) as raised:
        init_model(QWEN3, dtype=jnp.float32, seed=0, mesh=make_mesh(MeshSection(fsdp=1, tensor=8)))
    assert str(raised.value) == "mesh.tensor=8 must divide num_kv_heads=2 of qwen3; use 1 or 2"


def test_stages_find_the_pattern() -> None:
    config = tiny_config(num_layers=7, windows=(WINDOW, WINDOW, None))
    assert [(len(stage.blocks), stage.repeats) for stage in config.stages] == [(3, 2), (1, 1)]
    assert stages_of(config.blocks) == config.stages
    assert [block.attention.window for block in config.blocks] == [5, 5, None, 5, 5, None, 5]


def test_tables_of_rope_are_made_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = list[Any](), decoder.rope_tables

    def counted(rope: Any, *positions: Any) -> Any:
        made.append(rope)
        return make(rope, *positions)

    monkeypatch.setattr(decoder, "rope_tables", counted)
    model, tokens = tiny_model(num_layers=6), jnp.zeros((1, 4), jnp.int32)
    jax.eval_shape(lambda tokens: model(tokens, tokens, tokens)[0], tokens)
    assert len(made) == len(set(made)) == 1


@pytest.mark.parametrize("kernel", often(get_args(AttentionKernel), "auto", "blockwise"))
def test_the_run_chooses_the_kernel_of_attention(kernel: AttentionKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name through the model's settings; what cannot serve here says why."""
    ran, run = set[str](), dispatch.run_attention

    def recorded(name: str, *arguments: Any) -> Any:
        ran.add(name)
        return run(name, *arguments)

    monkeypatch.setattr(dispatch, "run_attention", recorded)
    model = tiny_model(num_layers=2, windows=(None, WINDOW))
    tokens = np.random.default_rng(0).integers(0, 512, (1, 128))
    model.compute = replace(model.compute, attention="reference")
    expected = forward(model, tokens)
    assert ran == {"reference"}
    model.compute = replace(model.compute, attention=kernel)
    if kernel in ("cudnn", "tokamax"):
        with pytest.raises(ValueError, match=f"kernel '{kernel}' (runs on GPU|is not installed)"):
            forward(model, tokens)
        return
    assert_allclose(forward(model, tokens), expected, atol=1e-4)
    assert ran == {"reference", "reference" if kernel == "auto" else kernel}
