"""The speculative decode program: tokens are drafted, and one forward pass of the model judges all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int

from posttrain.mesh import by_rows, by_rows_and_vocab, on_each_shard
from posttrain.models.adapter import choose_slots
from posttrain.models.decoder import NO_TOKEN, Decoder
from posttrain.rollout.blocks import BLOCK
from posttrain.rollout.decoding import DecodedTokens, DecodeRows, DraftCounts, Progress, recorded
from posttrain.rollout.paged import Pool
from posttrain.rollout.sampling import guess, sample
from posttrain.tree import pytree, replace

MATCH = 8
"""Newest tokens of a sequence that are looked for earlier in it, at most."""
MIN_MATCH = 2
"""Tokens of a match, at least."""


@pytree
class SpeculativeRows:
    """Rows of a speculative decode call."""

    rows: DecodeRows
    history: Int[Array, "R S"] | None
    """Prompt and sample so far, from which tokens are drafted; None with a draft model."""
    context: Int[Array, "D n 1 W"] | None
    """The blocks that hold each row in the draft model's pool; None without a draft model."""
    before: Int[Array, " R"] | None
    """The token before the newest one, which the draft model has not read either; None without a draft model."""
    window: Float[Array, " R"] | None
    """Window of `guess`; None without a draft model."""


class Drafts(NamedTuple):
    tokens: Int[Array, "R k"]
    found: Bool[Array, " R"]
    """False for rows without a draft."""


Propose = Callable[[Any, Progress], tuple[Any, Drafts]]
"""Drafts of a round from the drafter's state, with the state after them."""


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
    state: Any
    propose: Propose
    if call.context is None:
        assert call.history is not None
        state, propose = by_rows(call.history, mesh), partial(_from_history, length=length)
    else:
        assert call.before is not None and call.window is not None
        state = pools[1].opened(call.context, first, rows.targets, mesh), by_rows(call.before, mesh)
        propose = partial(
            _from_model,
            models[1],
            rows,
            models[0].config.vocab_size,
            by_rows(call.window, mesh),
            length=length,
            mesh=mesh,
        )
    judge = _Judge(rows, length, steps, mesh)
    ones = jnp.ones((rows.tokens.shape[0], length + 1), jnp.int32)

    def active_left(carry: tuple[Any, Any, Progress, DraftCounts]) -> Array:
        return jnp.sum(carry[2].active) > stop_at

    def body(carry: tuple[Any, Any, Progress, DraftCounts]) -> tuple[Any, Any, Progress, DraftCounts]:
        near, state, now, counts = carry
        state, drafts = propose(state, now)
        counts = DraftCounts(
            rounds=counts.rounds + now.active, drafted=counts.drafted + length * (now.active & drafts.found)
        )
        tokens = jnp.concatenate([now.tokens[:, None], drafts.tokens], axis=1)
        positions = now.positions[:, None] + jnp.arange(length + 1, dtype=jnp.int32)[None]
        hidden, near, routing = models[0].forward(tokens, positions, ones, near)
        logits, experts = models[0].logits(hidden), recorded(routing) if record else None
        return near, state, judge(now, drafts, logits, experts), counts

    none = jnp.zeros(rows.tokens.shape, jnp.int32)
    start = Progress.start(models[0], rows, steps=steps, record=record)
    carry = (near, state, start, DraftCounts(rounds=none, drafted=none))
    near, state, now, counts = jax.lax.while_loop(active_left, body, carry)
    caches = [near] if call.context is None else [near, state[0]]
    closed = [pool.closed(cache, first, rows.targets) for pool, cache in zip(pools, caches, strict=True)]
    return tuple(closed), replace(now.chunk, drafts=counts)


class _Judge(NamedTuple):
    rows: DecodeRows
    length: int
    steps: int
    mesh: Mesh | None

    def __call__(
        self,
        now: Progress,
        drafts: Drafts,
        logits: Float[Array, "R k1 V"],
        experts: Int[Array, "R k1 M k"] | None,
    ) -> Progress:
        """Draw token by token, as long as those before are the drafted ones: one more than are accepted."""
        draw, numbers = on_each_shard(sample, self.mesh), jnp.arange(logits.shape[0])

        def any_agrees(carry: tuple[Array, Array, Progress]) -> Array:
            return (carry[0] <= self.length) & jnp.any(carry[1])

        def body(carry: tuple[Array, Array, Progress]) -> tuple[Array, Array, Progress]:
            place, agrees, now = carry
            here = by_rows_and_vocab(logits[:, place], self.mesh)
            drawn = draw(here, now.positions + 1, self.rows.sampling, now.tally)
            steps = jnp.where(agrees, now.chunk.counts, self.steps)
            now = now.append(
                self.rows,
                drawn,
                None if experts is None else experts[:, place],
                agrees,
                lambda stored, x: stored.at[steps, numbers].set(x, mode="drop"),
            )
            now = now._replace(active=now.active & (now.chunk.counts < self.steps))
            # The last draw comes after all drafts.
            same = drawn.tokens == drafts.tokens[:, jnp.minimum(place, self.length - 1)]
            return place + 1, agrees & now.active & drafts.found & same, now

        _, _, now = jax.lax.while_loop(any_agrees, body, (jnp.int32(0), now.active, now))
        return now


def _from_history(history: Int[Array, "R S"], now: Progress, *, length: int) -> tuple[Int[Array, "R S"], Drafts]:
    """Note the tokens of the last round, and look up what may follow."""
    numbers, back = jnp.arange(history.shape[0])[:, None], jnp.arange(length + 1, dtype=jnp.int32)[None]
    steps = now.chunk.counts[:, None] - 1 - back
    places = jnp.where(steps >= 0, now.positions[:, None] - back, history.shape[1])
    history = history.at[numbers, places].set(now.chunk.tokens[jnp.maximum(steps, 0), numbers], mode="drop")
    return history, lookup(history, now.positions, length)


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


def _from_model(
    drafter: Decoder,
    rows: DecodeRows,
    vocab_size: int,
    window: Float[Array, " R"],
    state: tuple[Any, Int[Array, " R"]],
    now: Progress,
    *,
    length: int,
    mesh: Mesh | None,
) -> tuple[tuple[Any, Int[Array, " R"]], Drafts]:
    """Draft with a model. `state`: its cache, and the token before the newest one, which it reads again: after a round
    that accepted all drafts it has not read the last of them."""
    near, before = state
    draw = on_each_shard(guess, mesh)
    counts, numbers = now.chunk.counts, jnp.arange(now.tokens.shape[0])
    before = jnp.where(counts > 1, now.chunk.tokens[jnp.maximum(counts - 2, 0), numbers], before)
    before = jnp.where(counts == 1, rows.tokens, before)

    def next_of(near: Any, tokens: Array, positions: Array) -> tuple[Any, Array]:
        hidden, near, _ = drafter.forward(tokens, positions, jnp.ones_like(tokens), near)
        logits = drafter.logits(hidden[:, -1:])[:, 0, :vocab_size]
        logits = jnp.pad(logits, ((0, 0), (0, vocab_size - logits.shape[1])), constant_values=NO_TOKEN)
        return near, draw(by_rows_and_vocab(logits, mesh), positions[:, -1] + 1, rows.sampling, now.tally, window)

    def step(carry: tuple[Any, Array], index: Array) -> tuple[tuple[Any, Array], Array]:
        near, drawn = next_of(carry[0], carry[1][:, None], (now.positions + index)[:, None])
        return (near, drawn), drawn

    # The first token of a row stands in for the one before it.
    before = jnp.where(now.positions > 0, before, now.tokens)
    pair = (
        jnp.stack([before, now.tokens], axis=1),
        jnp.stack([jnp.maximum(now.positions - 1, 0), now.positions], axis=1),
    )
    near, first = next_of(near, *pair)
    (near, _), tokens = jax.lax.scan(step, (near, first), jnp.arange(1, length, dtype=jnp.int32))
    drafts = jnp.concatenate([first[:, None], tokens.T], axis=1)
    return (near, state[1]), Drafts(drafts, jnp.ones(now.tokens.shape, bool))
