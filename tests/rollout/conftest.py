"""One tiny engine for all tests of a file, so that its programs are compiled once, and naive sampling beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.models.decoder import Decoder
from posttrain.rollout.native import NativeEngine
from posttrain.rollout.sampling import sample_reference, uniforms
from posttrain.rollout.types import Completion, SamplingParams
from tests.rollout.engines import LENGTH, make_engine
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_model()


@pytest.fixture(scope="module")
def shared_engine(model: Decoder) -> NativeEngine:
    return make_engine(model)


@pytest.fixture
def engine(shared_engine: NativeEngine, model: Decoder) -> Iterator[NativeEngine]:
    """4 slots; every test must leave all of them free."""
    shared_engine.update_weights(model, 0)
    yield shared_engine
    assert shared_engine.num_free == shared_engine.slots


@pytest.fixture(scope="module")
def naive(model: Decoder) -> Callable[[Sequence[int], SamplingParams], Completion]:
    @jax.jit
    def logits_at(tokens: jax.Array, index: jax.Array) -> jax.Array:
        positions = jnp.arange(LENGTH, dtype=jnp.int32)[None]
        hidden, _ = model(tokens[None], positions, jnp.ones_like(positions))
        return model.logits(hidden[:, index][:, None])[0, 0]

    draws = jax.jit(lambda key: uniforms(jnp.tile(key, (LENGTH, 1)), jnp.arange(LENGTH, dtype=jnp.int32)))

    def generate(prompt: Sequence[int], p: SamplingParams) -> Completion:
        u = np.asarray(draws(jnp.asarray(p.key, jnp.uint32)), np.float64)
        tokens, logps, kept = list(prompt), [], []
        while len(logps) < p.max_tokens and not (logps and tokens[-1] in p.stop_token_ids):
            padded = jnp.asarray(tokens + [0] * (LENGTH - len(tokens)), jnp.int32)
            logits = np.asarray(logits_at(padded, jnp.int32(len(tokens) - 1)))
            token, logp, kept_logp = sample_reference(logits, u[len(tokens)], p.temperature, p.top_k, p.top_p, p.min_p)
            tokens.append(token)
            logps.append(logp)
            kept.append(kept_logp)
        return Completion(
            tokens=tuple(tokens[len(prompt) :]),
            logps=tuple(logps),
            kept_logps=tuple(kept),
            stop="stop" if tokens[-1] in p.stop_token_ids else "length",
            weights_versions=(0,) * len(logps),
        )

    return generate
