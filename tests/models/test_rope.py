"""Frequencies of every kind of RoPE against transformers, and the rotation itself."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from posttrain.models.fields import Fields
from posttrain.models.rope import apply_rope, default_rope, rope_from_hf, rope_tables, rotate_lanes

KINDS = ("default", "dynamic", "linear", "llama3", "yarn", "yarn_mscale", "yarn_plain", "longrope", "proportional")


def drawn(kind: str, seed: int) -> tuple[dict[str, Any], bool]:
    """Fields of a `config.json` with random RoPE of this kind, and whether the run wants the long factors."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    head_dim, original = 2 * int(rng.integers(2, 70)), int(rng.integers(64, 9000))
    part, factor = float(rng.choice([1.0, 0.5, 0.75])), float(rng.uniform(1.0, 40.0))
    pairs = (int(head_dim * part) + 1) // 2
    if kind.startswith("yarn"):
        part, pairs = 1.0, head_dim // 2
    own: dict[str, Any] = {
        "dynamic": {"factor": factor},
        "linear": {"factor": factor},
        "llama3": {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": float(rng.uniform(2, 8))},
        "yarn": {"factor": factor, "beta_fast": float(rng.uniform(8, 64)), "beta_slow": float(rng.uniform(0.2, 4))},
        "yarn_mscale": {"factor": factor, "mscale": float(rng.uniform(0.1, 2)), "mscale_all_dim": 0.7},
        "yarn_plain": {"factor": factor, "truncate": False, "attention_factor": float(rng.uniform(0.5, 2))},
        "longrope": {f"{name}_factor": rng.uniform(1, 30, pairs).tolist() for name in ("short", "long")},
        "proportional": {"factor": factor},
    }.get(kind, {})
    if kind in ("llama3", "longrope") or kind.startswith("yarn"):
        own["original_max_position_embeddings"] = original
    theta = float(rng.choice([1e4, 5e5, 1e6, 8e3]))
    rope = {"rope_type": kind.split("_")[0], "rope_theta": theta, "partial_rotary_factor": part, **own}
    sizes = {"hidden_size": 4 * head_dim, "num_attention_heads": 4, "head_dim": head_dim}
    fields = {**sizes, "max_position_embeddings": original * int(rng.integers(1, 20)), "rope_parameters": rope}
    return fields, bool(rng.integers(2))


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_are_those_of_transformers(kind: str) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    for seed in range(20):
        fields, long_context = drawn(kind, seed)
        theirs = transformers.LlamaConfig(**fields)
        compute = ROPE_INIT_FUNCTIONS.get(kind.split("_")[0], Phi3RotaryEmbedding.compute_default_rope_parameters)
        length = fields["max_position_embeddings"] + 10**6 if long_context and kind != "dynamic" else None
        expected, magnitude = compute(theirs, device=None, seq_len=length)
        ours = rope_from_hf(Fields(fields, long_context=long_context), fields["head_dim"], rotary_factor=1.0)
        assert_allclose(ours.frequencies, expected.numpy(), rtol=1e-5, atol=0, err_msg=str(fields))
        assert ours.magnitude == pytest.approx(magnitude, rel=1e-6), fields


def test_rotation_is_by_position_times_frequency() -> None:
    """Of the pairs as complex numbers; the rest of the head passes through."""
    x = np.random.default_rng(0).normal(size=(2, 5, 3, 10)).astype(np.float32)
    positions = np.asarray([[0, 1, 2, 0, 1], [7, 8, 9, 900, 901]], np.int32)
    rope = default_rope(100.0, 8)
    angles = positions[..., None].astype(np.float64) * np.asarray(rope.frequencies)
    turn = np.exp(1j * angles)[:, :, None, :]
    for interleaved in (False, True):
        first, second = (x[..., 0:8:2], x[..., 1:8:2]) if interleaved else (x[..., :4], x[..., 4:8])
        turned = (first + 1j * second) * turn
        parts = (turned.real, turned.imag)
        joined = np.stack(parts, axis=-1).reshape(*x.shape[:-1], 8) if interleaved else np.concatenate(parts, axis=-1)
        got = apply_rope(jnp.asarray(x), rope_tables(rope, jnp.asarray(positions)), interleaved=interleaved)
        assert_allclose(got[..., :8], joined, atol=2e-4)
        assert_allclose(got[..., 8:], x[..., 8:], atol=0)


@pytest.mark.parametrize(("pairs", "interleaved"), [(4, False), (4, True), (3, False), (3, True)])
def test_whole_lanes_are_rotated_as_halves_are(pairs: int, interleaved: bool) -> None:
    """To the last bit, with the gradient; also where a part of the head passes through."""
    draw = np.random.default_rng(0)
    x, weight = (jnp.asarray(draw.normal(size=(2, 5, 3, 8)), jnp.float32) for _ in range(2))
    tables = rope_tables(default_rope(100.0, 2 * pairs), jnp.arange(10).reshape(2, 5))

    def both(rotate: Any) -> tuple[Any, Any]:
        return jax.value_and_grad(lambda x: jnp.sum(rotate(x, tables, interleaved=interleaved) * weight))(x)

    got = rotate_lanes(x, tables, interleaved=interleaved)
    assert_array_equal(got, apply_rope(x, tables, interleaved=interleaved))
    assert_allclose(both(rotate_lanes)[1], both(apply_rope)[1], atol=1e-7)
