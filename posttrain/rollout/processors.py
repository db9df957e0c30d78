"""Logit processors: allowed tokens, logit bias, and repetition, presence and frequency penalties."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int, UInt32

from posttrain.rollout.types import MAX_LOGIT_BIAS, SamplingParams
from posttrain.tree import pytree, replace

WORD = 32


@pytree
class Processors:
    """Logit-processor settings of R requests; large arrays stay on the device, see `Tables`.

    Shapes depend on rows, vocabulary and longest sequence alone, and a request without processors gets its logits
    back unchanged: one more program serves every mixture of requests.
    """

    repetition_penalty: Float[Array, " R"]
    presence_penalty: Float[Array, " R"]
    frequency_penalty: Float[Array, " R"]
    bias_tokens: Int[Array, "R N"]
    """Token ids with a bias; V pads to N."""
    bias: Float[Array, "R N"]
    allowed: UInt32[Array, "R W"]
    """Bit t % 32 of word t // 32 is token t."""
    history: Int[Array, "R S"]
    """Prompt and sample so far, the newest token included, of rows with penalties; V beyond, and elsewhere."""
    prompt_lengths: Int[Array, " R"]
    top_logps: Int[Array, " R"]

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        histories: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        *,
        max_length: int,
        tables: Tables,
    ) -> Processors:
        """Make the arrays of each row's request. `histories`: prompt and sample, at most `max_length` tokens."""
        fixed = tables.of(params, max_length)
        history = fixed.pop("no_history")
        penalized = [row for row, request in enumerate(params) if request.has_penalties]
        if penalized:
            tokens = np.full(history.shape, tables.vocab_size, np.int32)
            for row in penalized:
                tokens[row, : len(histories[row])] = histories[row]
            history = jax.device_put(tokens)
        return cls(
            **jax.device_put(
                {
                    "repetition_penalty": np.asarray([p.repetition_penalty for p in params], np.float32),
                    "presence_penalty": np.asarray([p.presence_penalty for p in params], np.float32),
                    "frequency_penalty": np.asarray([p.frequency_penalty for p in params], np.float32),
                    "prompt_lengths": np.asarray(prompt_lengths, np.int32),
                    "top_logps": np.asarray([p.top_logps for p in params], np.int32),
                }
            ),
            history=history,
            **fixed,
        )


class Tables:
    """Large arrays of `Processors`; they stay on the device until the rows that need them change."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self._made: tuple[Hashable, dict[str, Array]] | None = None
        self._kept: Mapping[int, SamplingParams] = {}

    def of(self, params: Sequence[SamplingParams], max_length: int) -> dict[str, Array]:
        """`bias_tokens`, `bias` and `allowed`, and as `no_history` that of rows without penalties."""
        asking = {r: p for r, p in enumerate(params) if p.logit_bias or p.allowed_token_ids is not None}
        # Compared by identity: arrays are kept for the same request objects.
        key = (len(params), max_length, tuple((row, id(request)) for row, request in asking.items()))
        if self._made is None or self._made[0] != key:
            self._kept = asking
            self._made = key, jax.device_put(self._make(asking, len(params), max_length))
        return dict(self._made[1])

    def _make(self, asking: Mapping[int, SamplingParams], rows: int, max_length: int) -> dict[str, np.ndarray]:
        words = -(-self.vocab_size // WORD)
        bias_tokens = np.full((rows, MAX_LOGIT_BIAS), self.vocab_size, np.int32)
        bias = np.zeros((rows, MAX_LOGIT_BIAS), np.float32)
        allowed = np.full((rows, words), 2**WORD - 1, np.uint32)
        for row, request in asking.items():
            bias_tokens[row, : len(request.logit_bias)] = list(request.logit_bias)
            bias[row, : len(request.logit_bias)] = list(request.logit_bias.values())
            if request.allowed_token_ids is not None:
                bits = np.zeros(words * WORD, bool)
                bits[np.asarray(request.allowed_token_ids)] = True
                allowed[row] = np.packbits(bits, bitorder="little").view("<u4")
        no_history = np.full((rows, max_length), self.vocab_size, np.int32)
        return {"bias_tokens": bias_tokens, "bias": bias, "allowed": allowed, "no_history": no_history}


@pytree
class Tally:
    """`Processors` expanded over the whole vocabulary, for the duration of a dispatch."""

    processors: Processors
    added: Float[Array, "R V"]
    """Bias, and -inf where a token is not allowed."""
    in_prompt: Bool[Array, "R V"]
    counts: Int[Array, "R V"]
    """Count of each token in the sample."""

    @classmethod
    def start(cls, processors: Processors, vocab_size: int) -> Tally:
        p = processors
        num_rows, length = p.history.shape
        rows, shape = jnp.arange(num_rows)[:, None], (num_rows, vocab_size)
        is_prompt = jnp.arange(length)[None] < p.prompt_lengths[:, None]

        def scatter(base: Array, tokens: Array, values: Array | int) -> Array:
            return base.at[rows, tokens].add(values, mode="drop")  # V stands for no token

        bits = (p.allowed[:, :, None] >> jnp.arange(WORD, dtype=jnp.uint32)[None, None]) & 1
        allowed = bits.reshape(num_rows, -1)[:, :vocab_size] == 1
        return cls(
            processors=p,
            added=scatter(jnp.where(allowed, 0.0, -jnp.inf), p.bias_tokens, p.bias),
            in_prompt=scatter(jnp.zeros(shape, jnp.int32), jnp.where(is_prompt, p.history, vocab_size), 1) > 0,
            counts=scatter(jnp.zeros(shape, jnp.int32), jnp.where(is_prompt, vocab_size, p.history), 1),
        )

    def apply(self, logits: Float[Array, "R V"]) -> Float[Array, "R V"]:
        p = self.processors
        x = logits + self.added
        penalty = p.repetition_penalty[:, None]
        seen = self.in_prompt | (self.counts > 0)
        x = jnp.where(seen, jnp.where(x > 0, x / penalty, x * penalty), x)
        x = x - p.frequency_penalty[:, None] * self.counts
        return x - jnp.where(self.counts > 0, p.presence_penalty[:, None], 0.0)

    def count(self, tokens: Int[Array, " R"], active: Bool[Array, " R"]) -> Tally:
        """Count one more token in the samples of the active rows."""
        rows = jnp.arange(tokens.shape[0])
        return replace(self, counts=self.counts.at[rows, tokens].add(active.astype(jnp.int32)))


def process_reference(
    logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], sample: Sequence[int]
) -> np.ndarray:
    """The slow twin of `Tally.apply` for one row, token by token."""
    processed = logits.astype(np.float64)
    if params.is_plain:
        return processed
    counts, seen = Counter(sample), {*prompt, *sample}
    for token in range(len(processed)):
        x = processed[token]
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            x = -np.inf
        x += params.logit_bias.get(token, 0.0)
        count = counts[token]
        if token in seen:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        processed[token] = x - params.frequency_penalty * count - params.presence_penalty * (count > 0)
    return processed
