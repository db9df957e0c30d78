"""Greedy text, samples and their log-probabilities of random models of every family, against whole forward passes.

Optimised programs, for only these round one number in several ways: XLA makes the logits anew inside of what uses them.
"""

from __future__ import annotations

import pkgutil
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike

from posttrain.kernels.logits.token_stats import token_stats
from posttrain.models import families
from posttrain.models.decoder import Decoder
from posttrain.models.hf import Family, family_module
from posttrain.rollout.engine import NativeEngine
from posttrain.rollout.types import Completion
from posttrain.weights.state import ModelWeights
from tests.models.goldens import COMPILER_OPTIONS
from tests.often import often
from tests.random_families import FAMILIES, random_family_model
from tests.rollout.engines import params

pytestmark = pytest.mark.optimized

LENGTH, NEW_TOKENS = 32, 14
OFTEN = ("gemma2",)
"""A soft cap of the logits; each costs some seconds of compilation."""
MARGIN = 1e-3
"""Of the largest logit before the next, above which rounding in float32 decides nothing."""
ROUNDING = {"float32": 5e-4, "bfloat16": 0.2}
"""Of log-probabilities, by the type that a model computes in. A token of a random model may be ill-conditioned: one row
in place of four in the same forward pass moves it by 1e-4."""


def test_every_family_is_drawn() -> None:
    modules = (family_module(module.name) for module in pkgutil.iter_modules(families.__path__))
    assert {module.__name__.rsplit(".", 1)[-1] for module in modules if isinstance(module, Family)} == set(FAMILIES)


@pytest.mark.thorough
@pytest.mark.parametrize("family", often(FAMILIES, *OFTEN))
def test_greedy_text_is_the_argmax_of_a_forward_pass(family: str) -> None:
    assert_engine_is_the_trainer(family, seed=1)


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(2, 4))
def test_more_sizes(family: str, seed: int) -> None:
    assert_engine_is_the_trainer(family, seed)


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16(family: str) -> None:
    assert_engine_is_the_trainer(family, 0, dtype=jnp.bfloat16)


def assert_engine_is_the_trainer(family: str, seed: int, *, dtype: DTypeLike = jnp.float32) -> None:
    """Two greedy requests, one that draws from the whole distribution, one from a truncated one."""
    model, rng = random_family_model(family, seed, dtype=dtype), np.random.default_rng(seed)
    prompts = [rng.integers(0, model.config.vocab_size, length).tolist() for length in (1, 12, 5, 7)]
    settings = [{"temperature": 0.0}, {"temperature": 0.0}, {}, {"top_k": 7, "top_p": 0.9, "min_p": 0.01}]
    requests = [params(i, max_tokens=NEW_TOKENS, **chosen) for i, chosen in enumerate(settings)]
    engine = NativeEngine(
        model,
        slots=4,
        max_length=LENGTH,
        decode_steps=NEW_TOKENS,
        tokenizer_decode=None,
        record_routing=bool(model.config.mixtures),
    )
    completions = engine.generate_all(prompts, requests)
    passed, name = _forward(model, prompts, completions), jnp.dtype(dtype).name
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        here = slice(len(prompt), len(prompt) + NEW_TOKENS)
        np.testing.assert_allclose(completion.logps, passed.logps[row, here], atol=ROUNDING[name], rtol=1e-5)
        logits = passed.logits[row, len(prompt) - 1 : len(prompt) + NEW_TOKENS - 1]
        chosen = np.take_along_axis(logits, np.asarray(completion.tokens)[:, None], axis=-1)[:, 0]
        if requests[row].temperature == 0:
            behind = logits.max(axis=-1) - chosen
            assert behind.max() < (MARGIN if name == "float32" else ROUNDING[name]), (completion.tokens, behind)
        elif requests[row].top_k:
            ahead = (logits > chosen[:, None] + ROUNDING[name]).sum(axis=-1)
            assert ahead.max() < requests[row].top_k
            assert all(-3.0 < kept <= 0.0 for kept in completion.kept_logps)


class ForwardOutput(NamedTuple):
    logits: np.ndarray
    logps: np.ndarray


def _forward(model: Decoder, prompts: list[list[int]], completions: list[Completion]) -> ForwardOutput:
    """Run the forward pass of the trainer over prompts with their completions, with the engine's choice of experts.

    Two experts may be equally good for a token; which is then chosen, rounding decides.
    """
    rows = [[*prompt, *completion.tokens] for prompt, completion in zip(prompts, completions, strict=True)]
    tokens = np.stack([np.pad(row, (0, LENGTH - len(row))) for row in rows]).astype(np.int32)
    segments = (np.arange(LENGTH) < np.asarray([len(row) for row in rows])[:, None]).astype(np.int32)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)
    weights, vocab_size = ModelWeights(model), model.config.vocab_size

    def run(arrays: object, experts: jax.Array | None, *inputs: jax.Array) -> tuple[jax.Array, ...]:
        bound, (tokens, _, segments) = weights.bind(arrays), inputs
        hidden, _, _ = bound.forward(*inputs, experts=experts)
        stats = token_stats(bound.logits, hidden, tokens, segments, temperature=1.0, vocab_size=vocab_size)
        return bound.logits(hidden), stats.logps

    compiled = jax.jit(run, compiler_options=COMPILER_OPTIONS)
    inputs = map(jnp.asarray, (tokens, positions, segments))
    return ForwardOutput(*map(np.asarray, compiled(weights.read(), _experts(completions), *inputs)))


def _experts(completions: list[Completion]) -> np.ndarray | None:
    """Stack the recorded routing as [M, B, T, k]; -1 beyond it."""
    recorded = [completion.experts for completion in completions if completion.experts is not None]
    if not recorded:
        return None
    padded = [np.pad(one, ((0, LENGTH - len(one)), (0, 0), (0, 0)), constant_values=-1) for one in recorded]
    return np.moveaxis(np.stack(padded), 2, 0).astype(np.int32)
