"""Sampling: logit processors, truncation by bisection instead of a sort, then an inverse CDF of two levels."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int, UInt32

from posttrain.data.grammar import WORD, packed
from posttrain.kernels.logits.layout import chunk_length
from posttrain.mesh import by_rows, by_rows_and_vocab, on_each_shard
from posttrain.rollout.types import MAX_LOGIT_BIAS, MAX_TOP_LOGPS, SamplingParams
from posttrain.rollout.vision import without
from posttrain.tree import pytree, replace, static


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
        allowed: Mapping[int, UInt32[np.ndarray, " W"]],
    ) -> Processors:
        """Make the arrays of each row's request. `histories`: prompt and sample, at most `max_length` tokens;
        `allowed`: by row, the tokens that a grammar allows next."""
        fixed = tables.of(params, max_length)
        if allowed:
            fixed["allowed"] = jax.device_put(tables.narrowed(allowed))
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


SETTINGS = {"keys": np.uint32, "temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32}


class Tables:
    """Settings of rows, those of `Processors` too: they stay on the device until the rows that have them change."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self._made: tuple[Hashable, dict[str, Array]] | None = None
        self._kept: Mapping[int, SamplingParams] = {}
        self._allowed = np.zeros((0, 0), np.uint32)
        self._settings: tuple[Sequence[SamplingParams], dict[str, Array]] = (), {}

    def settings(self, params: Sequence[SamplingParams]) -> dict[str, Array]:
        """The small arrays of `Sampling`: of a small model, putting them on a device takes a part of each dispatch."""
        if [*map(id, params)] != [*map(id, self._settings[0])]:
            columns = zip(*((p.key, p.temperature, p.top_k, p.top_p, p.min_p) for p in params), strict=True)
            arrays = map(np.asarray, columns, SETTINGS.values())
            self._settings = tuple(params), jax.device_put(dict(zip(SETTINGS, arrays, strict=True)))
        return self._settings[1]

    def of(self, params: Sequence[SamplingParams], max_length: int) -> dict[str, Array]:
        """`bias_tokens`, `bias` and `allowed`, and as `no_history` that of rows without penalties."""
        asking = {r: p for r, p in enumerate(params) if p.logit_bias or p.allowed_token_ids is not None}
        # Compared by identity: arrays are kept for the same request objects.
        key = (len(params), max_length, tuple((row, id(request)) for row, request in asking.items()))
        if self._made is None or self._made[0] != key:
            self._kept, made = asking, self._make(asking, len(params), max_length)
            self._made, self._allowed = (key, jax.device_put(made)), made["allowed"]
        return dict(self._made[1])

    def narrowed(self, allowed: Mapping[int, UInt32[np.ndarray, " W"]]) -> UInt32[np.ndarray, "R W"]:
        """The last `allowed`, in some rows narrowed."""
        narrowed = self._allowed.copy()
        for row, words in allowed.items():
            narrowed[row] &= words
        return narrowed

    def _make(self, asking: Mapping[int, SamplingParams], rows: int, max_length: int) -> dict[str, np.ndarray]:
        bias_tokens = np.full((rows, MAX_LOGIT_BIAS), self.vocab_size, np.int32)
        bias = np.zeros((rows, MAX_LOGIT_BIAS), np.float32)
        allowed = np.full((rows, -(-self.vocab_size // WORD)), 2**WORD - 1, np.uint32)
        for row, request in asking.items():
            bias_tokens[row, : len(request.logit_bias)] = list(request.logit_bias)
            bias[row, : len(request.logit_bias)] = list(request.logit_bias.values())
            if request.allowed_token_ids is not None:
                allowed[row] = packed(request.allowed_token_ids, self.vocab_size)
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

    def count(self, tokens: Int[Array, "R n"], grows: Bool[Array, "R n"]) -> Tally:
        """Count the tokens that samples grow by."""
        rows = jnp.arange(tokens.shape[0])[:, None]
        return replace(self, counts=self.counts.at[rows, tokens].add(grows.astype(jnp.int32)))


ONE_BITS = 0x3F800000
"""float32 1.0 as an integer; among non-negative floats the order of the bits is the order of the values."""
ROUNDS = ONE_BITS.bit_length()

LANES = 128
"""Numbers side by side in a TPU's vector; XLA:TPU takes very long over a window of more."""

MIN_BLOCK = 16
"""Tokens in the smallest block of a vocabulary; smaller ones would be too many."""


@pytree
class Sampling:
    """The settings of R rows, one per running request."""

    keys: UInt32[Array, "R 2"]
    temperature: Float[Array, " R"]
    """0: greedy."""
    top_k: Int[Array, " R"]
    top_p: Float[Array, " R"]
    min_p: Float[Array, " R"]
    processors: Processors | None
    """None where all rows are plain: another, faster program."""
    forbidden: tuple[int, ...] = static(default=())
    """Tokens that no row draws, such as placeholders of images."""

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        histories: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        *,
        max_length: int,
        tables: Tables,
        allowed: Mapping[int, UInt32[np.ndarray, " W"]] | None = None,
        forbidden: tuple[int, ...] = (),
    ) -> Sampling:
        """Make the arrays of each row's request. `histories`: prompt and sample, at most `max_length` tokens;
        `allowed`: by row, the tokens that a grammar allows next."""
        processors, others = None, (histories, prompt_lengths)
        if not all(p.is_plain for p in params):
            processors = Processors.of(params, *others, max_length=max_length, tables=tables, allowed=allowed or {})
        return cls(**tables.settings(params), processors=processors, forbidden=forbidden)

    @property
    def truncated(self) -> Bool[Array, " R"]:
        """True for rows that draw from a part of the tokens."""
        return (self.temperature > 0) & ((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0))

    def tally(self, vocab_size: int) -> Tally | None:
        """Token counts for penalties at the start of a dispatch; then `Tally.count` each new token."""
        return None if self.processors is None else Tally.start(self.processors, vocab_size)


@pytree
class Drawn:
    """The next token of each row, see `Completion`."""

    tokens: Int[Array, " R"]
    logps: Float[Array, " R"]
    kept_logps: Float[Array, " R"]
    truncation_logps: Float[Array, " R"]
    top: TopLogps | None
    """None where all rows are plain."""


@pytree
class TopLogps:
    """The most probable tokens, falling; 0 where no row asks for them."""

    tokens: Int[Array, "... n"]
    logps: Float[Array, "... n"]


def sample(logits: Float[Array, "R V"], positions: Int[Array, " R"], sampling: Sampling, tally: Tally | None) -> Drawn:
    """Draw the tokens at `positions`. Each row is a function of its own arguments alone. Greedy: the first of the most
    probable tokens. Tokens of equal probability are kept or dropped together."""
    logits = logits.astype(jnp.float32)
    sampled = sampling.temperature > 0
    scale = jnp.where(sampled, sampling.temperature, 1.0)[:, None]
    model = _Distribution.of(logits / scale)
    allowed = without(logits, sampling.forbidden) if sampling.forbidden else logits
    left = allowed if tally is None else tally.apply(allowed)
    drawn_from = model if left is logits else _Distribution.of(left / scale)
    tokens, truncation_logps = _draw(drawn_from, sampling, positions)
    logps = model.logps(tokens)
    # What is not truncation, such as penalties and forbidden tokens, is in `kept_logps` alone.
    kept_logps = truncation_logps
    if drawn_from is not model:
        kept_logps = jnp.where(sampled, logps - drawn_from.logps(tokens) + truncation_logps, 0.0)
    top = None if tally is None else _top(model, tally.processors.top_logps)
    return Drawn(tokens=tokens, logps=logps, kept_logps=kept_logps, truncation_logps=truncation_logps, top=top)


def guess(
    logits: Float[Array, "R V"],
    positions: Int[Array, " R"],
    sampling: Sampling,
    tally: Tally | None,
    window: Float[Array, " R"],
) -> Int[Array, " R"]:
    """The tokens that `sample` likely draws from the logits of a better model: those with most of the cumulated
    distribution within `window` of the same random number, and in greedy rows the most probable ones. At 0 the draws
    from these logits."""
    logits, scale = logits.astype(jnp.float32), jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)[:, None]
    model = _Distribution.of((logits if tally is None else tally.apply(logits)) / scale)

    def masses() -> Float[Array, "R V"]:
        probs = jax.lax.cond(jnp.any(sampling.truncated), lambda: _truncate(model, sampling)[0], lambda: model.probs)
        upper = jnp.cumsum(probs, axis=-1)
        middle, reach = (part[:, None] * upper[:, -1:] for part in (uniforms(sampling.keys, positions), window))
        inside = jnp.minimum(upper, middle + reach) - jnp.maximum(upper - probs, middle - reach)
        return jnp.where(sampling.temperature[:, None] > 0, inside, model.shifted)

    return _largest(jax.lax.cond(jnp.any(sampling.temperature > 0), masses, lambda: model.shifted))


@pytree
class _Distribution:
    """Not normalised: the most probable token has 1, up to rounding.

    XLA may compute `logits` anew for each use, rounded otherwise (a product fused with the subtraction): compare none
    of these for equality, find the largest by its index.
    """

    shifted: Float[Array, "R V"]
    probs: Float[Array, "R V"]
    total: Float[Array, " R"]

    @classmethod
    def of(cls, scaled: Float[Array, "R V"]) -> _Distribution:
        shifted = scaled - jnp.max(scaled, axis=-1, keepdims=True)
        probs = jnp.exp(shifted)
        return cls(shifted=shifted, probs=probs, total=_row_sums(probs))

    def logps(self, tokens: Int[Array, " R"]) -> Float[Array, " R"]:
        return jnp.take_along_axis(self.shifted, tokens[:, None], axis=-1)[:, 0] - jnp.log(self.total)

    def top(self) -> TopLogps:
        """As many most probable tokens as a request may ask for."""
        shifted, tokens = jax.lax.top_k(self.shifted, top_width(self.shifted.shape[1]))
        return TopLogps(tokens=tokens, logps=shifted - jnp.log(self.total)[:, None])


def _draw(of: _Distribution, s: Sampling, positions: Int[Array, " R"]) -> tuple[Int[Array, " R"], Float[Array, " R"]]:
    """Tokens, and the log of the mass that truncation kept. Where all rows are greedy no number is drawn."""
    sampled, whole = s.temperature > 0, jnp.zeros(positions.shape)

    def drawn(probs: Array, truncation_logps: Array) -> tuple[Array, Array]:
        tokens = _inverse_cdf(probs, uniforms(s.keys, positions))
        best = jax.lax.cond(jnp.all(sampled), lambda: tokens, lambda: _largest(of.shifted))
        return jnp.where(sampled, tokens, best), truncation_logps

    branches = [lambda: (_largest(of.shifted), whole), lambda: drawn(of.probs, whole), lambda: drawn(*_truncate(of, s))]
    found: tuple[Array, Array] = jax.lax.switch(jnp.any(sampled).astype(jnp.int32) + jnp.any(s.truncated), branches)
    return found


def _largest(x: Float[Array, "R V"]) -> Int[Array, " R"]:
    """Index of the largest entry of each row, the first of equal ones.

    By blocks: the block with the largest maximum, then its largest entry; XLA:CPU takes longer over a whole row.
    """
    x, size = _in_blocks(x, -jnp.inf)
    block = jnp.argmax(_by_block(x, size, jax.lax.max, -jnp.inf), axis=-1)
    return (block * size + jnp.argmax(_block(x, size, block), axis=-1)).astype(jnp.int32)


def _row_sums(x: Float[Array, "R V"]) -> Float[Array, " R"]:
    """Each row as a matrix, whose columns a CPU adds up side by side: half the time of adding up the row."""
    rows, vocab = x.shape
    return jnp.sum(jnp.sum(x.reshape(rows, -1, math.gcd(vocab, _root(vocab))), axis=1), axis=-1)


def _in_blocks(x: Float[Array, "R V"], filler: float) -> tuple[Float[Array, "R Vp"], int]:
    """Size of blocks, about the square root of V and at most `LANES`, and rows of whole blocks: padded only where no
    fair size divides V.

    They stay rows: in a reshape to blocks XLA:TPU would lay them out anew.
    """
    vocab = x.shape[1]
    most = min(_root(vocab), LANES)
    size = math.gcd(vocab, most)
    if size >= MIN_BLOCK:
        return x, size
    size = most
    return jnp.pad(x, ((0, 0), (0, -vocab % size)), constant_values=filler), size


def _by_block(x: Float[Array, "R V"], size: int, reduce: Callable[..., Array], start: float) -> Float[Array, "R N"]:
    reduced: Array = jax.lax.reduce_window(x, start, reduce, (1, size), (1, size), "VALID")
    return reduced


def _block(x: Float[Array, "R V"], size: int, block: Int[Array, " R"]) -> Float[Array, "R S"]:
    places = block[:, None] * size + jnp.arange(size, dtype=block.dtype)[None]
    return jnp.take_along_axis(x, places, axis=1, mode="promise_in_bounds")


def _root(vocab: int) -> int:
    """The power of two closest to the square root."""
    return 1 << max(0, round(math.log2(vocab) / 2))


def score(
    logits_of: Callable[[Float[Array, "1 C D"]], Float[Array, "1 C V"]],
    hidden: Float[Array, "T D"],
    targets: Int[Array, " T"],
    temperature: Float[Array, " T"],
    *,
    vocab_size: int,
    top: bool,
    mesh: Mesh | None,
) -> tuple[Float[Array, " T"], TopLogps | None]:
    """Log-probability of `targets[t]` right after the token whose hidden state is `hidden[t]`, whatever row it is in;
    with `top` also the most probable tokens there.

    In chunks, so that logits of a long prompt never exist all at once; at temperature 0 of the unscaled distribution.
    """
    length = targets.shape[0]
    shards = 1 if mesh is None else mesh.size
    chunk = shards * -(-chunk_length(1, length, vocab_size) // shards)

    def split(x: Array) -> Array:
        return jnp.pad(x, ((0, -length % chunk), *[(0, 0)] * (x.ndim - 1))).reshape(-1, chunk, *x.shape[1:])

    def scores_of(logits: Array, targets: Array, temperature: Array) -> tuple[Array, TopLogps | None]:
        scale = jnp.where(temperature > 0, temperature, 1.0)[:, None]
        model = _Distribution.of(logits.astype(jnp.float32) / scale)
        return model.logps(targets), model.top() if top else None

    def body(_: None, inputs: tuple[Array, Array, Array]) -> tuple[None, tuple[Array, TopLogps | None]]:
        hidden, targets, temperature = by_rows(inputs, mesh)
        logits = by_rows_and_vocab(logits_of(hidden[None])[0], mesh)
        return None, on_each_shard(scores_of, mesh)(logits, targets, temperature)

    _, chunks = jax.lax.scan(body, None, (split(hidden), split(targets), split(temperature)))
    scores: tuple[Array, TopLogps | None] = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:length], chunks)
    return scores


def top_width(vocab_size: int) -> int:
    return min(MAX_TOP_LOGPS, vocab_size)


def _top(of: _Distribution, wanted: Int[Array, " R"]) -> TopLogps:
    rows, vocab = of.shifted.shape
    shape = (rows, top_width(vocab))
    nothing = TopLogps(tokens=jnp.zeros(shape, jnp.int32), logps=jnp.zeros(shape, jnp.float32))
    top: TopLogps = jax.lax.cond(jnp.any(wanted > 0), of.top, lambda: nothing)
    return top


def uniforms(keys: UInt32[Array, "S 2"], positions: Int[Array, " S"]) -> Float[Array, " S"]:
    """One number in [0, 1) per row, 24 bits of Threefry with the row's key at the token's position as the counter."""

    def words(key: Array, position: Array) -> Array:
        return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position))

    bits = jax.vmap(words)(keys, positions)[:, 0]
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def _truncate(of: _Distribution, s: Sampling) -> tuple[Float[Array, "S V"], Float[Array, " S"]]:
    """`probs` with zeros where it is cut, and the log of the share that is left.

    A token stays if fewer than k tokens, and less than p of what top-k kept, are more probable than it. The most
    probable token stays by its index, whatever rounding does to the cuts.
    """
    probs, truncated = of.probs, s.truncated
    top = jnp.arange(probs.shape[1], dtype=jnp.int32)[None] == _largest(probs)[:, None]
    count_limit = jnp.where(truncated & (s.top_k > 0), s.top_k.astype(jnp.float32), jnp.inf)
    cut_k = _bisect(probs, 1.0, count_limit)
    inside_k = jnp.where(top | (probs >= cut_k[:, None]), probs, 0.0)
    mass_limit = jnp.where(truncated & (s.top_p < 1), s.top_p * _row_sums(inside_k), jnp.inf)
    cut_p = _bisect(inside_k, inside_k, mass_limit)
    cut = jnp.maximum(cut_p, jnp.where(truncated, s.min_p, 0.0))
    inside = jnp.where(top | (inside_k >= cut[:, None]), inside_k, 0.0)
    return inside, jnp.where(truncated, jnp.log(_row_sums(inside) / of.total), 0.0)


def _bisect(
    probs: Float[Array, "S V"], weights: Float[Array, "S V"] | float, limit: Float[Array, " S"]
) -> Float[Array, " S"]:
    """The smallest float32 t in [0, 1] where the weight of the tokens with probability above t is less than `limit`.

    0 where the limit is infinite; where all are, nothing is computed.
    """

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high + 1) // 2
        threshold = jax.lax.bitcast_convert_type(middle, jnp.float32)
        fits = _row_sums(jnp.where(probs > threshold[:, None], weights, 0.0)) < limit
        return jnp.where(fits, low, middle), jnp.where(fits, middle, high)

    asked = jnp.isfinite(limit)
    low = jnp.full(limit.shape, -1, jnp.int32)  # never fits, or is not asked
    high = jnp.where(asked, ONE_BITS, 0)  # fits: nothing is above 1
    _, high = jax.lax.fori_loop(0, jnp.where(jnp.any(asked), ROUNDS, 0), halve, (low, high))
    return jax.lax.bitcast_convert_type(high, jnp.float32)


def _inverse_cdf(probs: Float[Array, "S V"], u: Float[Array, " S"]) -> Int[Array, " S"]:
    """The first token whose cumulated mass exceeds u times the whole; never one of mass 0."""
    probs, size = _in_blocks(probs, 0.0)
    masses = _by_block(probs, size, jax.lax.add, 0.0)
    cumulated = jnp.cumsum(masses, axis=-1)
    target = u * cumulated[:, -1]
    block = _first_above(cumulated, masses, target)
    rest = target - jnp.take_along_axis(cumulated - masses, block[:, None], axis=-1)[:, 0]
    inside = _block(probs, size, block)
    return block * size + _first_above(jnp.cumsum(inside, axis=-1), inside, rest)


def _first_above(
    cumulated: Float[Array, "S N"], masses: Float[Array, "S N"], target: Float[Array, " S"]
) -> Int[Array, " S"]:
    """The first entry of positive mass with cumulated mass above the target; where rounding leaves none, the largest.

    Cumulated sums of floats may fall by one unit in the last place, so an entry of mass 0 is excluded by its mass.
    """
    above = (masses > 0) & (cumulated > target[:, None])
    return jnp.where(jnp.any(above, axis=-1), jnp.argmax(above, axis=-1), jnp.argmax(masses, axis=-1))
