"""The speculative decode program: tokens are drafted, and one forward pass of the model judges all of them."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int

from posttrain.mesh import by_rows, by_rows_and_vocab, on_each_shard
from posttrain.models.adapter import choose_slots
from posttrain.models.decoder import NO_TOKEN, Decoder
from posttrain.models.drafter import DrafterConfig, following, propose
from posttrain.rollout.blocks import BLOCK
from posttrain.rollout.decoding import DecodedTokens, DecodeRows, DraftCounts, Progress, recorded
from posttrain.rollout.paged import Pool
from posttrain.rollout.sampling import Sampling, Tally, guess, sample
from posttrain.tree import pytree, replace, static

MATCH = 8
"""Newest tokens of a sequence that are looked for earlier in it, at most."""
MIN_MATCH = 2
"""Tokens of a match, at least."""


@pytree
class BlockRows:
    """Rows of a block drafter."""

    weights: dict[str, Any]
    """Its arrays, or their shapes in a plan."""
    hidden: Float[Array, "R W D"]
    """The target's newest hidden states, the latest last, up to that of the token before the newest one."""
    known: Int[Array, " R"]
    """Number of them that are there."""
    config: DrafterConfig = static()


@pytree
class SpeculativeRows:
    """Rows of a speculative decode call."""

    rows: DecodeRows
    history: Int[Array, "R S"] | None = None
    """Prompt and sample so far, from which tokens are drafted; None with a model that drafts."""
    context: Int[Array, "D n 1 W"] | None = None
    """The blocks that hold each row in the draft model's pool; None without a draft model."""
    before: Int[Array, " R"] | None = None
    """The token before the newest one, which the draft model has not read either; None without a draft model."""
    window: Float[Array, " R"] | None = None
    """Window of `guess`; None without a model that drafts."""
    block: BlockRows | None = None
    """None without a block drafter."""


class Drafts(NamedTuple):
    tokens: Int[Array, "R k"]
    found: Bool[Array, " R"]
    """False for rows without a draft."""


class Judged(NamedTuple):
    """A round's draws from the model's logits."""

    tokens: Int[Array, "R k1"]
    grown: Int[Array, " R"]
    """Number of them, from the first on, that follow in the sample."""


@runtime_checkable
class Source(Protocol):
    """Source of drafts, whose state a call carries from round to round."""

    def propose(self, state: Any, now: Progress) -> tuple[Any, Drafts]:
        """Draft the next tokens."""

    def note(self, state: Any, now: Progress, judged: Judged, hidden: Float[Array, "R k1 D"]) -> Any:
        """Update the state by a round. `now`: before it; `hidden`: the model's states at the round's places."""


class Rounds(NamedTuple):
    """State of a call between two rounds. The chunk of `now` has places for `length` + 1 tokens of each round."""

    cache: Any
    state: Any
    now: Progress
    number: Int[Array, ""]
    grown: Int[Array, "steps R"]
    """Tokens of each round."""
    drafted: Int[Array, " R"]


def speculate(
    models: tuple[Decoder, ...],
    pools: tuple[Pool, ...],
    call: SpeculativeRows,
    stop_at: Int[Array, ""],
    *,
    length: int,
    steps: int,
    record: bool,
    mesh: Mesh | None,
) -> tuple[tuple[Pool, ...], DecodedTokens]:
    """Sample up to `steps` tokens of every active row with drafts of `length`; pause when no more than `stop_at` rows
    have some of them to go.

    The model's own draw decides: a drafted token is accepted if it equals the token that is drawn from the model's
    logits with fold_in(key, p), as without drafts, so samples are the same token for token, whatever the sampler's
    settings.

    `models` and `pools`: the model's; then the draft model's, else tokens are drafted by `lookup`.
    """
    rows = by_rows(call.rows, mesh)
    choose_slots(models[0], rows.adapters)
    first = (rows.positions // BLOCK).reshape(rows.targets.shape[:2])
    near = pools[0].opened(rows.context, first, rows.targets, mesh)
    state, source = _source(models, pools, call, rows, first, length, mesh)
    places, count = jnp.arange(length + 1, dtype=jnp.int32)[None], rows.tokens.shape[0]

    def active_left(rounds: Rounds) -> Array:
        return jnp.sum(rounds.now.active) > stop_at

    def body(rounds: Rounds) -> Rounds:
        now = rounds.now
        left = jnp.minimum(rows.ends - 1 - now.positions, steps - now.chunk.counts)
        state, drafts = source.propose(rounds.state, now)
        tokens = jnp.concatenate([now.tokens[:, None], drafts.tokens], axis=1)
        at = now.positions[:, None] + places
        hidden, cache, routing = models[0].forward(
            tokens, at, jnp.ones_like(tokens), rounds.cache, images=rows.turned(at)
        )
        experts = recorded(routing) if record else None
        after, judged = judge(now, drafts, models[0].logits(hidden), experts, rows, rounds.number, steps, mesh)
        return Rounds(
            cache=cache,
            state=source.note(state, now, judged, hidden),
            now=after,
            number=rounds.number + 1,
            grown=rounds.grown.at[rounds.number].set(judged.grown),
            drafted=rounds.drafted + jnp.where(now.active & drafts.found, jnp.clip(left - 1, 0, length), 0),
        )

    start = Progress.start(models[0], rows, steps=steps * (length + 1), record=record)
    none, zero = jnp.zeros((steps, count), jnp.int32), jnp.int32(0)
    rounds = jax.lax.while_loop(active_left, body, Rounds(near, state, start, zero, none, none[0]))
    caches = [rounds.cache] if call.context is None else [rounds.cache, rounds.state[0]]
    closed = [pool.closed(cache, first, rows.targets) for pool, cache in zip(pools, caches, strict=True)]
    left = (None, None) if call.block is None else rounds.state
    counts = DraftCounts(
        rounds=jnp.sum(rounds.grown > 0, axis=0), drafted=rounds.drafted, hidden=left[0], known=left[1]
    )
    return tuple(closed), replace(_joined(rounds.now.chunk, rounds.grown, length + 1), drafts=counts)


def _source(
    models: tuple[Decoder, ...],
    pools: tuple[Pool, ...],
    call: SpeculativeRows,
    rows: DecodeRows,
    first: Int[Array, "D n"],
    length: int,
    mesh: Mesh | None,
) -> tuple[Any, Source]:
    """Source of a call's drafts, and its state at the start."""
    if call.history is not None:
        return by_rows(call.history, mesh), History(length)
    assert call.window is not None
    window = by_rows(call.window, mesh)
    if (block := call.block) is not None:
        source = Block(block.config, block.weights, models[0], rows.sampling, window, length, mesh)
        return by_rows((block.hidden, block.known), mesh), source
    assert call.before is not None and call.context is not None
    near = pools[1].opened(call.context, first, rows.targets, mesh)
    draft = DraftModel(models[1], rows.sampling, models[0].config.vocab_size, window, length, mesh)
    return (near, by_rows(call.before, mesh)), draft


def judge(
    now: Progress,
    drafts: Drafts,
    logits: Float[Array, "R k1 V"],
    experts: Int[Array, "R k1 M k"] | None,
    rows: DecodeRows,
    number: Int[Array, ""],
    steps: int,
    mesh: Mesh | None,
) -> tuple[Progress, Judged]:
    """Draw at all places as if the drafts before were accepted, and keep the draws up to the first other one.

    `number`: of the round, whose draws the chunk keeps at its own places; `steps`: tokens of a row in this call.
    """
    count, places, vocab_size = logits.shape
    positions = now.positions[:, None] + 1 + jnp.arange(places, dtype=jnp.int32)[None]
    sampling = jax.tree.map(lambda x: jnp.repeat(x, places, axis=0), rows.sampling)
    tally = None if now.tally is None else _tally_after(now.tally, drafts.tokens)
    flat = by_rows_and_vocab(logits.reshape(-1, vocab_size), mesh)
    drawn = on_each_shard(sample, mesh)(flat, positions.reshape(-1), sampling, tally)
    drawn = jax.tree.map(lambda x: x.reshape(count, places, *x.shape[1:]), drawn)

    ended = jnp.any(drawn.tokens[:, :, None] == rows.stop_ids[:, None], axis=-1) | (positions + 1 >= rows.ends[:, None])
    ended |= now.chunk.counts[:, None] + 1 + jnp.arange(places, dtype=jnp.int32)[None] >= steps
    goes_on = drafts.found[:, None] & ~ended[:, :-1] & (drawn.tokens[:, :-1] == drafts.tokens)
    grows = jnp.cumprod(jnp.concatenate([now.active[:, None], goes_on], axis=1).astype(jnp.int32), axis=1)
    grown = jnp.sum(grows, axis=1)
    last = jnp.maximum(grown - 1, 0)[:, None]

    def put(stored: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(stored, new.swapaxes(0, 1), number * places, axis=0)

    old = now.chunk
    chunk = DecodedTokens(
        tokens=put(old.tokens, drawn.tokens),
        logps=put(old.logps, drawn.logps),
        kept_logps=put(old.kept_logps, drawn.kept_logps),
        truncation_logps=put(old.truncation_logps, drawn.truncation_logps),
        counts=old.counts + grown,
        top=jax.tree.map(put, old.top, drawn.top),
        experts=None if old.experts is None or experts is None else put(old.experts, experts),
    )
    newest = jnp.take_along_axis(drawn.tokens, last, axis=1)[:, 0]
    after = Progress(
        active=now.active & ~jnp.take_along_axis(ended, last, axis=1)[:, 0],
        tokens=jnp.where(now.active, newest, now.tokens),
        positions=now.positions + grown,
        tally=None if now.tally is None else now.tally.count(drawn.tokens, grows > 0),
        chunk=chunk,
    )
    return after, Judged(drawn.tokens, grown)


def _tally_after(tally: Tally, drafts: Int[Array, "R k"]) -> Tally:
    """The tally before each of `length` + 1 places, as more rows: of the drafts before it."""
    length, vocab = drafts.shape[1], jnp.arange(tally.counts.shape[1], dtype=drafts.dtype)
    seen = (drafts[:, :, None] == vocab[None, None]).astype(tally.counts.dtype)
    before = jnp.pad(jnp.cumsum(seen, axis=1), ((0, 0), (1, 0), (0, 0)))
    every: Tally = jax.tree.map(lambda x: jnp.repeat(x, length + 1, axis=0), tally)
    return replace(every, counts=every.counts + before.reshape(every.counts.shape))


def _joined(chunk: DecodedTokens, grown: Int[Array, "steps R"], places: int) -> DecodedTokens:
    """The tokens of all rounds without what was refused, each row's from step 0 on."""
    ends, steps = jnp.cumsum(grown, axis=0), jnp.arange(grown.shape[0], dtype=jnp.int32)
    number = jnp.sum(ends[None] <= steps[:, None, None], axis=1)
    start = jnp.take_along_axis(ends - grown, number, axis=0, mode="clip")
    index = number * places + steps[:, None] - start

    def joined(x: Array) -> Array:
        return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=0, mode="clip")

    return replace(
        chunk,
        tokens=joined(chunk.tokens),
        logps=joined(chunk.logps),
        kept_logps=joined(chunk.kept_logps),
        truncation_logps=joined(chunk.truncation_logps),
        top=jax.tree.map(joined, chunk.top),
        experts=jax.tree.map(joined, chunk.experts),
    )


class History(NamedTuple):
    """Drafts from what prompt and sample have repeated; the state is both, by position."""

    length: int

    def propose(self, state: Int[Array, "R S"], now: Progress) -> tuple[Any, Drafts]:
        return state, lookup(state, now.positions, self.length)

    def note(self, state: Int[Array, "R S"], now: Progress, judged: Judged, hidden: Array) -> Int[Array, "R S"]:
        places = jnp.arange(state.shape[1], dtype=jnp.int32)[None] - now.positions[:, None] - 1
        tokens = jnp.take_along_axis(judged.tokens, jnp.clip(places, 0, self.length), axis=1)
        return jnp.where((places >= 0) & (places < judged.grown[:, None]), tokens, state)


def lookup(history: Int[Array, "R S"], positions: Int[Array, " R"], length: int) -> Drafts:
    """The tokens that followed the latest of the longest earlier matches of the newest tokens, which are at
    `positions`; where they reach the end they repeat."""
    places = jnp.arange(history.shape[1], dtype=jnp.int32)[None]
    newest = positions[:, None] - jnp.arange(MATCH, dtype=jnp.int32)[None]
    suffix = jnp.take_along_axis(history, newest, axis=1, mode="clip")
    equal = places < positions[:, None]
    matched = jnp.zeros(history.shape, jnp.int32)
    for back in range(MATCH):
        shifted = jnp.pad(history, ((0, 0), (back, 0)), constant_values=-1)[:, : history.shape[1]]
        equal &= (shifted == suffix[:, back : back + 1]) & (newest[:, back : back + 1] >= 0)
        matched += equal
    end = jnp.argmax(matched * history.shape[1] + jnp.where(matched > 0, places, 0), axis=1).astype(jnp.int32)[:, None]
    period = jnp.maximum(positions[:, None] - end, 1)
    follows = end + 1 + jnp.arange(length, dtype=jnp.int32)[None] % period
    found = jnp.take_along_axis(matched, end, axis=1)[:, 0] >= MIN_MATCH
    return Drafts(jnp.take_along_axis(history, follows, axis=1, mode="clip"), found)


class DraftModel(NamedTuple):
    """Drafts of a smaller model. The state is its cache, and the token before the newest one, which it reads again:
    after a round that accepted all drafts it has not read the last of them."""

    model: Decoder
    sampling: Sampling
    vocab_size: int
    window: Float[Array, " R"]
    length: int
    mesh: Mesh | None

    def propose(self, state: tuple[Any, Int[Array, " R"]], now: Progress) -> tuple[Any, Drafts]:
        near, before = state
        # The first token of a row stands in for the one before it.
        pair = jnp.stack([jnp.where(now.positions > 0, before, now.tokens), now.tokens], axis=1)
        places = jnp.stack([jnp.maximum(now.positions - 1, 0), now.positions], axis=1)
        near, first = self._next(near, pair, places, now)

        def step(carry: tuple[Any, Array], index: Array) -> tuple[tuple[Any, Array], Array]:
            near, drawn = self._next(carry[0], carry[1][:, None], (now.positions + index)[:, None], now)
            return (near, drawn), drawn

        (near, _), tokens = jax.lax.scan(step, (near, first), jnp.arange(1, self.length, dtype=jnp.int32))
        drafts = jnp.concatenate([first[:, None], tokens.T], axis=1)
        return (near, before), Drafts(drafts, jnp.ones(now.tokens.shape, bool))

    def note(
        self, state: tuple[Any, Int[Array, " R"]], now: Progress, judged: Judged, hidden: Array
    ) -> tuple[Any, Array]:
        second = jnp.take_along_axis(judged.tokens, jnp.maximum(judged.grown - 2, 0)[:, None], axis=1)[:, 0]
        before = jnp.where(judged.grown > 1, second, jnp.where(judged.grown == 1, now.tokens, state[1]))
        return state[0], before

    def _next(self, near: Any, tokens: Array, positions: Array, now: Progress) -> tuple[Any, Int[Array, " R"]]:
        hidden, near, _ = self.model.forward(tokens, positions, jnp.ones_like(tokens), near)
        logits = self.model.logits(hidden[:, -1:])[:, 0, : self.vocab_size]
        logits = jnp.pad(logits, ((0, 0), (0, self.vocab_size - logits.shape[1])), constant_values=NO_TOKEN)
        draw = on_each_shard(guess, self.mesh)
        logits = by_rows_and_vocab(logits, self.mesh)
        return near, draw(logits, positions[:, -1] + 1, self.sampling, now.tally, self.window)


class Block(NamedTuple):
    """Drafts of a block drafter. The state is the window of the model's newest hidden states, and how many are known:
    where none are, as after a call without drafts, it drafts from the newest token alone."""

    config: DrafterConfig
    weights: dict[str, Array]
    model: Decoder
    sampling: Sampling
    window: Float[Array, " R"]
    length: int
    mesh: Mesh | None

    def propose(self, state: tuple[Array, Int[Array, " R"]], now: Progress) -> tuple[Any, Drafts]:
        model, mesh = self.model, self.mesh

        def embedded(tokens: Int[Array, " R"]) -> Float[Array, "R D"]:
            return model.embed(tokens[:, None], model.compute.dtype, model.compute.mesh)[:, 0]

        def step(newest: Array, place: tuple[Array, Array]) -> tuple[Array, Array]:
            logits, number = place
            follows = following(self.weights, embedded(newest)).astype(logits.dtype)
            flat, position = by_rows_and_vocab(logits + follows, mesh), now.positions + 1 + number
            drawn = on_each_shard(guess, mesh)(flat, position, self.sampling, now.tally, self.window)
            return drawn, drawn

        places = propose(self.config, self.weights, *state, embedded(now.tokens))[:, : self.length]
        inputs = model.logits(places).swapaxes(0, 1), jnp.arange(self.length, dtype=jnp.int32)
        _, tokens = jax.lax.scan(step, now.tokens, inputs)
        return state, Drafts(tokens.T, jnp.ones(now.tokens.shape, bool))

    def note(
        self, state: tuple[Array, Int[Array, " R"]], now: Progress, judged: Judged, hidden: Float[Array, "R k1 D"]
    ) -> tuple[Array, Int[Array, " R"]]:
        before, known = state
        both = jnp.concatenate([before, hidden.astype(before.dtype)], axis=1)
        newest = judged.grown[:, None] + jnp.arange(self.config.window, dtype=jnp.int32)[None]
        window = jnp.take_along_axis(both, newest[..., None], axis=1)
        return window, jnp.minimum(known + judged.grown, self.config.window)
