"""Engines, requests and comparisons for the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posttrain.models.decoder import Decoder
from posttrain.rollout.engine import NativeEngine
from posttrain.rollout.sampling import uniforms
from posttrain.rollout.types import Completion, Decode, SamplingParams, StopReason, TokenLogp, sample_key
from tests.oracles import sample_reference

LENGTH = 64
VOCABULARY = 512


def make_engine(model: Decoder, **changes: Any) -> NativeEngine:
    settings = {"slots": 4, "max_length": LENGTH, "decode_steps": 5, "tokenizer_decode": text_of} | changes
    return NativeEngine(model, **settings)


def text_of(tokens: Sequence[int], skip_special_tokens: bool = True, *, after: Sequence[int] = ()) -> str:
    return "".join(f"<{token}>" for token in tokens)


class _Draws:
    """A sample that grows by a token for each row of logits."""

    def __init__(self, prompt: Sequence[int], p: SamplingParams, uniforms: np.ndarray):
        self.prompt, self.p, self._uniforms = prompt, p, uniforms
        self.sample: list[int] = []
        self.drawn: list[tuple[float, float, tuple[TokenLogp, ...]]] = []

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.sample)

    def draw(self, logits: np.ndarray) -> None:
        u, before = self._uniforms[self.length], (self.prompt, self.sample)
        token, logp, kept_logp, truncation_logp = sample_reference(logits, u, self.p, *before)
        logps = log_softmax(logits, self.p.temperature)
        order = np.argsort(-logps, kind="stable")[: self.p.top_logps]
        self.sample.append(token)
        self.drawn.append((logp, kept_logp, truncation_logp, tuple(TokenLogp(int(t), float(logps[t])) for t in order)))


class NaiveEngine:
    """The slow twin of every engine: one request at a time, a whole forward pass for each token, float64 sampling."""

    def __init__(self, model: Decoder, *, length: int = LENGTH, tokenizer_decode: Decode = text_of):
        self.length = length
        self._decode_text = tokenizer_decode
        positions = jnp.arange(length, dtype=jnp.int32)

        def forward(tokens: jax.Array) -> jax.Array:
            hidden, _ = model(tokens[None], positions[None], jnp.ones_like(positions)[None])
            return model.logits(hidden)[0]

        self._forward = jax.jit(forward)
        self._uniforms = jax.jit(lambda key: uniforms(jnp.tile(key, (length, 1)), positions))

    def generate(self, prompt: Sequence[int], p: SamplingParams) -> Completion:
        draws = _Draws(prompt, p, self._uniforms_of(p))
        while (stop := self._stop_reason(draws.sample, p)) is None:
            draws.draw(self._logits([*prompt, *draws.sample])[draws.length - 1])
        return self._completion(draws, stop)

    def follow(self, prompt: Sequence[int], p: SamplingParams, tokens: Sequence[int]) -> Completion:
        """What `generate` gives, as far as it gives `tokens`: one forward pass has the logits after all of them, which
        are those of a pass for each. It ends at the first other token, at a stop, or where `tokens` do ("abort")."""
        draws, logits = _Draws(prompt, p, self._uniforms_of(p)), self._logits([*prompt, *tokens])
        for token in tokens:
            draws.draw(logits[draws.length - 1])
            if draws.sample[-1] != token or self._stop_reason(draws.sample, p) is not None:
                break
        return self._completion(draws, self._stop_reason(draws.sample, p) or "abort")

    def _completion(self, draws: _Draws, stop: StopReason) -> Completion:
        p, (logps, kept_logps, truncation_logps, top) = draws.p, zip(*draws.drawn, strict=True)
        return Completion(
            tokens=tuple(draws.sample),
            logps=logps,
            kept_logps=kept_logps,
            truncation_logps=truncation_logps,
            stop=stop,
            weights_versions=(0,) * len(draws.sample),
            top_logps=top if p.top_logps else None,
            prompt_logps=self._prompt_logps(draws.prompt, p.temperature) if p.prompt_logps else None,
            prompt_top_logps=self._prompt_top_logps(draws.prompt, p) if p.scores_top else None,
        )

    def _uniforms_of(self, p: SamplingParams) -> np.ndarray:
        return np.asarray(self._uniforms(jnp.asarray(p.key, jnp.uint32)), np.float64)

    def _logits(self, tokens: Sequence[int]) -> np.ndarray:
        return np.asarray(self._forward(jnp.asarray([*tokens, *[0] * (self.length - len(tokens))], jnp.int32)))

    def _stop_reason(self, sample: Sequence[int], p: SamplingParams) -> StopReason | None:
        if not sample:
            return None
        text = self._decode_text(sample)
        if any(stop in text for stop in p.stop) or (sample[-1] in p.stop_token_ids and not p.ignore_eos):
            return "stop"
        return "length" if len(sample) == p.max_tokens else None

    def _prompt_logps(self, prompt: Sequence[int], temperature: float) -> tuple[float, ...]:
        logits = self._logits(prompt)
        pairs = zip(logits, prompt[1:], strict=False)
        return (0.0, *(float(log_softmax(row, temperature)[token]) for row, token in pairs))

    def _prompt_top_logps(self, prompt: Sequence[int], p: SamplingParams) -> tuple[tuple[TokenLogp, ...], ...]:
        logps = [log_softmax(row, p.temperature) for row in self._logits(prompt)[: len(prompt) - 1]]
        orders = [np.argsort(-row, kind="stable")[: p.top_logps] for row in logps]
        pairs = zip(logps, orders, strict=True)
        return ((), *(tuple(TokenLogp(int(t), float(row[t])) for t in order) for row, order in pairs))


def log_softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    scaled = logits.astype(np.float64) / (temperature if temperature > 0 else 1.0)
    return scaled - scaled.max() - np.log(np.exp(scaled - scaled.max()).sum())


UNUSUAL: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"presence_penalty": 1.5, "frequency_penalty": -0.4, "top_p": 0.9},
    {"logit_bias": {7: 4.0, 11: -3.0, 13: float("-inf")}, "top_logps": 3},
    {"allowed_token_ids": tuple(range(3, VOCABULARY, 7)), "repetition_penalty": 1.2, "min_p": 0.02},
    {"top_logps": 20, "prompt_logps": True, "temperature": 0.7},
    {"prompt_logps": True, "ignore_eos": True},
    {},
]
"""Settings beyond the common ones, one of which is common after all: they run side by side."""


def unusual(parameters: Sequence[SamplingParams]) -> list[SamplingParams]:
    """The requests, each with the next of `UNUSUAL`."""
    return [replace(p, **UNUSUAL[i % len(UNUSUAL)]) for i, p in enumerate(parameters)]


def params(sample: int = 0, **changes: Any) -> SamplingParams:
    settings: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "stop_token_ids": ()}
    return SamplingParams(**settings | {"key": sample_key(0, 0, 0, sample)} | changes)


def requests(number: int, **changes: Any) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCABULARY, length).tolist() for length in rng.integers(1, 36, number)]
    prompts[1] = prompts[1][:1]
    limits = rng.integers(1, 28, number)
    limits[2] = 1
    return prompts, [params(i, **{"max_tokens": int(limits[i])} | changes) for i in range(number)]


def assert_same(got: Completion, expected: Completion) -> None:
    assert got.tokens == expected.tokens
    assert (got.stop, got.weights_versions) == (expected.stop, expected.weights_versions)
    np.testing.assert_allclose(got.logps, expected.logps, atol=1e-5, rtol=3e-6)
    np.testing.assert_allclose(got.kept_logps, expected.kept_logps, atol=1e-5, rtol=3e-6)
    np.testing.assert_allclose(got.truncation_logps, expected.truncation_logps, atol=1e-5, rtol=3e-6)
    assert (got.prompt_logps is None) == (expected.prompt_logps is None)
    if got.prompt_logps is not None:
        np.testing.assert_allclose(got.prompt_logps, expected.prompt_logps, atol=1e-5, rtol=3e-6)
    assert (got.top_logps is None) == (expected.top_logps is None)
    assert (got.prompt_top_logps is None) == (expected.prompt_top_logps is None)
    tops = [[*(one.prompt_top_logps or ()), *(one.top_logps or ())] for one in (got, expected)]
    for top, expected_top in zip(*tops, strict=True):
        assert len(top) == len(expected_top)
        for one, other in zip(top, expected_top, strict=True):
            assert abs(one.logp - other.logp) < 1e-5
            # Tokens of equal probability have no order.
            assert one.token == other.token or any(abs(t.logp - one.logp) < 1e-5 for t in top if t is not one)
