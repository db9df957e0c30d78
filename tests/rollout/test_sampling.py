"""The sampler against a full sort, Hugging Face's logits processors, and the distribution itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from posttrain.rollout.sampling import sample, sample_reference, uniforms

GOLDENS = Path(__file__).parents[1] / "goldens" / "losses" / "sampling.npz"

compiled = jax.jit(sample)


def draw(logits: np.ndarray, *, first_position: int = 0, **settings: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One token of each row, all under the same settings, row r at position first_position + r."""
    rows = logits.shape[0]
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | settings
    columns = {
        name: jnp.full(rows, value, jnp.int32 if name == "top_k" else jnp.float32) for name, value in values.items()
    }
    keys = jnp.broadcast_to(jnp.asarray([7, 11], jnp.uint32), (rows, 2))
    positions = first_position + jnp.arange(rows, dtype=jnp.int32)
    return tuple(map(np.asarray, compiled(jnp.asarray(logits), keys, positions, **columns)))


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 10_000},
    {"top_p": 0.6},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 1.5, "top_k": 3, "top_p": 0.5},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("vocab", [1, 40, 515])
def test_equals_the_reference(settings: dict[str, Any], vocab: int) -> None:
    logits = np.random.default_rng(vocab + 1).normal(size=(64, vocab)).astype(np.float32) * 3
    tokens, logps, kept = draw(logits, **settings)
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | settings
    keys = jnp.broadcast_to(jnp.asarray([7, 11], jnp.uint32), (64, 2))
    u = np.asarray(uniforms(keys, jnp.arange(64, dtype=jnp.int32)), np.float64)
    for row in range(64):
        token, logp, kept_logp = sample_reference(logits[row], u[row], **values)
        assert tokens[row] == token
        np.testing.assert_allclose(logps[row], logp, atol=2e-6)
        np.testing.assert_allclose(kept[row], kept_logp, atol=2e-6)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("topk5", {"top_k": 5}),
        ("topp06", {"top_p": 0.6}),
        ("topp095", {"top_p": 0.95}),
        ("minp01", {"min_p": 0.1}),
        ("temp_minp", {"temperature": 1.7, "min_p": 0.1}),
        ("temp_topk_topp_order_hf", {"temperature": 1.7, "top_k": 12, "top_p": 0.8}),
    ],
)
def test_kept_sets_are_those_of_hugging_face(name: str, settings: dict[str, Any]) -> None:
    with np.load(GOLDENS) as golden:
        logits, processed = golden["in/logits"], golden[f"out/{name}"]
    kept = np.isfinite(processed)
    scaled = np.exp(logits.astype(np.float64) / settings.get("temperature", 1.0))
    probs = scaled / scaled.sum(axis=-1, keepdims=True)
    for row in range(len(logits)):
        tokens, logps, kept_logps = draw(np.repeat(logits[row : row + 1], 4000, axis=0), **settings)
        mass = probs[row, kept[row]].sum()
        assert kept[row, tokens].all()
        # What is likely enough to be seen in 4,000 draws is seen.
        assert set(np.flatnonzero(kept[row] & (probs[row] > 0.01 * mass))) <= set(tokens.tolist())
        np.testing.assert_allclose(kept_logps, np.log(mass), atol=1e-5)
        np.testing.assert_allclose(logps, np.log(probs[row, tokens]), atol=1e-5)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    draws = 20_000
    logits = np.random.default_rng(1).normal(size=300).astype(np.float32) * 1.5
    tokens, _, _ = draw(np.repeat(logits[None], draws, axis=0), temperature=temperature)
    probs = np.exp(logits.astype(np.float64) / temperature)
    probs /= probs.sum()
    counts = np.bincount(tokens, minlength=300)
    often = probs * draws >= 5
    observed = np.append(counts[often], counts[~often].sum())
    expected = np.append(probs[often], probs[~often].sum()) * draws
    assert stats.chisquare(observed, expected).pvalue > 1e-3
    assert 0.5 * np.abs(counts / draws - probs).sum() < 0.06


def test_never_a_token_of_probability_zero() -> None:
    logits = np.full((4000, 200), -np.inf, np.float32)
    allowed = [3, 64, 130]
    logits[:, allowed] = [0.0, -1.0, -18.0]
    tokens, logps, _ = draw(logits)
    assert set(tokens.tolist()) <= set(allowed)
    assert np.isfinite(logps).all()


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = np.random.default_rng(2).normal(size=(6, 100)).astype(np.float32)
    tokens, _, _ = draw(logits, top_p=0.9)
    for row in range(6):
        alone, _, _ = draw(logits[row : row + 1], first_position=row, top_p=0.9)
        assert alone[0] == tokens[row]


def test_uniforms_are_uniform_over_keys_and_positions() -> None:
    keys = jnp.asarray(np.random.default_rng(0).integers(0, 2**32, (100, 2), np.uint64).astype(np.uint32))
    u = np.stack([np.asarray(jax.jit(uniforms)(keys, jnp.full(100, p, jnp.int32))) for p in range(100)])
    assert u.min() >= 0
    assert u.max() < 1
    assert stats.kstest(u.ravel(), "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(u[:-1].ravel(), u[1:].ravel())[0, 1]) < 0.05
    assert len(np.unique(u)) > 0.99 * u.size
