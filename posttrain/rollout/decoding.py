"""The decode program: tokens of every row one by one, from the rows of a call to its tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int

from posttrain.mesh import by_rows, by_rows_and_vocab, on_each_shard
from posttrain.models.adapter import choose_slots
from posttrain.models.config import ModelConfig
from posttrain.models.decoder import Decoder
from posttrain.models.forward_state import Routing
from posttrain.models.vision.tower import ImageInputs
from posttrain.rollout.blocks import BLOCK
from posttrain.rollout.paged import Pool
from posttrain.rollout.sampling import Drawn, Sampling, Tally, TopLogps, sample, top_width
from posttrain.tree import pytree


@pytree
class DecodeRows:
    """The sequences of one decode call: R = D n rows, those of lane 0 first."""

    tokens: Int[Array, " R"]
    """The newest token, whose keys and values are not in the cache yet."""
    positions: Int[Array, " R"]
    ends: Int[Array, " R"]
    """First position that the sample may not take."""
    active: Bool[Array, " R"]
    context: Int[Array, "D n G W"]
    """The blocks of each row, see `Pool`; all of its positions that are read or written are in them."""
    targets: Int[Array, "D n G M"]
    """The blocks that its tokens are written to, from that of `positions` on; out of range beyond."""
    sampling: Sampling
    stop_ids: Int[Array, "R E"]
    """-1 where there are fewer than E."""
    adapters: Int[Array, " R"] | None
    """See `PromptPieces`."""
    rope_deltas: Int[Array, " R"] | None = None
    """Number added to positions for multimodal RoPE; None where no row has images."""

    def turned(self, positions: Int[Array, "R T"]) -> ImageInputs | None:
        """Multimodal RoPE of text at these positions behind images; None without."""
        if self.rope_deltas is None:
            return None
        return ImageInputs.turned(jnp.repeat((positions + self.rope_deltas[:, None])[..., None], 3, axis=-1))


@pytree
class DecodedTokens:
    """Tokens of one decode call: the first `counts[r]` steps of row r."""

    tokens: Int[Array, "steps R"]
    logps: Float[Array, "steps R"]
    kept_logps: Float[Array, "steps R"]
    truncation_logps: Float[Array, "steps R"]
    counts: Int[Array, " R"]
    top: TopLogps | None
    """None where all rows are plain."""
    experts: Int[Array, "steps R M k"] | None
    """Experts of the input token of each step, which precedes the token it sampled."""
    drafts: DraftCounts | None = None
    """None where no tokens are drafted."""


@pytree
class DraftCounts:
    """Counts of a speculative call."""

    rounds: Int[Array, " R"]
    """Forward passes of the model for each row while it was active."""
    drafted: Int[Array, " R"]
    """Tokens drafted for each row, without those beyond its end or that of the call."""
    hidden: Float[Array, "R W D"] | None = None
    """The newest hidden states of each row, see `BlockRows`; None without a block drafter."""
    known: Int[Array, " R"] | None = None


class Progress(NamedTuple):
    """Rows of a decode call between two tokens."""

    active: Bool[Array, " R"]
    tokens: Int[Array, " R"]
    positions: Int[Array, " R"]
    tally: Tally | None
    chunk: DecodedTokens

    @classmethod
    def start(cls, model: Decoder, rows: DecodeRows, *, steps: int, record: bool) -> Progress:
        tally = rows.sampling.tally(model.config.vocab_size)
        chunk = _empty_chunk(model.config, (steps, rows.tokens.shape[0]), top=tally is not None, record=record)
        return cls(rows.active, rows.tokens, rows.positions, tally, chunk)

    def append(
        self,
        rows: DecodeRows,
        drawn: Drawn,
        experts: Int[Array, "R M k"] | None,
        step: Int[Array, ""],
    ) -> Progress:
        """Append a token to the active rows."""
        old, new, grows = self.chunk, drawn.tokens, self.active

        def put(stored: Array, x: Array) -> Array:
            return stored.at[step].set(x)

        chunk = DecodedTokens(
            tokens=put(old.tokens, new),
            logps=put(old.logps, drawn.logps),
            kept_logps=put(old.kept_logps, drawn.kept_logps),
            truncation_logps=put(old.truncation_logps, drawn.truncation_logps),
            counts=old.counts + grows,
            top=jax.tree.map(put, old.top, drawn.top),
            experts=None if old.experts is None or experts is None else put(old.experts, experts),
        )
        positions = jnp.where(grows, self.positions + 1, self.positions)
        ended = jnp.any(new[:, None] == rows.stop_ids, axis=-1) | (positions + 1 >= rows.ends)
        tally = None if self.tally is None else self.tally.count(new[:, None], grows[:, None])
        return Progress(self.active & ~(grows & ended), jnp.where(grows, new, self.tokens), positions, tally, chunk)


def decode(
    model: Decoder,
    pool: Pool,
    rows: DecodeRows,
    stop_at: Int[Array, ""],
    *,
    steps: int,
    record: bool,
    mesh: Mesh | None,
) -> tuple[Pool, DecodedTokens]:
    """Sample up to `steps` tokens of every active row; pause when no more than `stop_at` rows are active.

    Works on the rows' blocks, or on a copy of them that is read whole at every token: as the pool's layout has it.
    """
    rows = by_rows(rows, mesh)
    choose_slots(model, rows.adapters)
    ones = jnp.ones((rows.tokens.shape[0], 1), jnp.int32)
    draw = on_each_shard(sample, mesh)

    def active_left(carry: tuple[Array, Any, Progress]) -> Array:
        step, _, now = carry
        return (step < steps) & (jnp.sum(now.active) > stop_at)

    def body(carry: tuple[Array, Any, Progress]) -> tuple[Array, Any, Progress]:
        step, near, now = carry
        places = now.positions[:, None]
        hidden, near, routing = model.forward(now.tokens[:, None], places, ones, near, images=rows.turned(places))
        logits = by_rows_and_vocab(model.logits(hidden)[:, 0], mesh)
        drawn = draw(logits, now.positions + 1, rows.sampling, now.tally)
        experts = recorded(routing)[:, 0] if record else None
        return step + 1, near, now.append(rows, drawn, experts, step)

    first = (rows.positions // BLOCK).reshape(rows.targets.shape[:2])
    near = pool.opened(rows.context, first, rows.targets, mesh)
    start = Progress.start(model, rows, steps=steps, record=record)
    _, near, now = jax.lax.while_loop(active_left, body, (jnp.int32(0), near, start))
    return pool.closed(near, first, rows.targets), now.chunk


def _empty_chunk(config: ModelConfig, lead: tuple[int, int], *, top: bool, record: bool) -> DecodedTokens:
    width = top_width(config.vocab_size)
    return DecodedTokens(
        tokens=jnp.zeros(lead, jnp.int32),
        logps=jnp.zeros(lead, jnp.float32),
        kept_logps=jnp.zeros(lead, jnp.float32),
        truncation_logps=jnp.zeros(lead, jnp.float32),
        counts=jnp.zeros(lead[1], jnp.int32),
        top=TopLogps(tokens=jnp.zeros((*lead, width), jnp.int32), logps=jnp.zeros((*lead, width))) if top else None,
        experts=jnp.zeros((*lead, len(config.mixtures), config.mixtures[0].top_k), jnp.int16) if record else None,
    )


def recorded(routing: Routing | None) -> Int[Array, "B T M k"]:
    """The chosen experts, small and by token."""
    assert routing is not None
    return jnp.moveaxis(routing.experts, 0, 2).astype(jnp.int16)
