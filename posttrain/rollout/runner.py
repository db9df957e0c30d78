"""Execution of the scheduler's plans: input arrays, compiled programs, the KV cache pool, and delivery to requests."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import Array
from jaxtyping import Bool, Int

from posttrain.config import CacheDtype
from posttrain.mesh import replicated
from posttrain.models.decoder import decoding_config
from posttrain.rollout.blocks import BLOCK, Chain, Node, blocks_for
from posttrain.rollout.decode_weights import Loaded
from posttrain.rollout.decoding import DecodedTokens, DecodeRows
from posttrain.rollout.paged import Pool, choose_layout, empty_pool, num_lanes, pool_shapes
from posttrain.rollout.programs import (
    DecodeShape,
    Expected,
    Prefilled,
    Programs,
    PromptPieces,
    PromptShape,
    ScoredPrompts,
    Shapes,
)
from posttrain.rollout.request import Request
from posttrain.rollout.sampling import Sampling, Tables, TopLogps
from posttrain.rollout.scheduler import Plan, PromptPiece, Row
from posttrain.rollout.types import Decode, SamplingParams, StopReason, TokenLogp, first_completed
from posttrain.runtime.profiler import span

MIN_STOP_IDS = 4
IDLE = Request(prompt=(0,), params=SamplingParams(max_tokens=1, temperature=1.0, stop_token_ids=(), key=(0, 0)))


@dataclass(frozen=True, kw_only=True)
class PromptCall:
    prompts: PromptPieces
    pieces: dict[int, PromptPiece]
    """By row of the call."""


@dataclass(frozen=True, kw_only=True)
class DecodeCall:
    rows: DecodeRows
    stop_at: np.int32
    places: dict[int, Row]
    """By row of the call; the others are idle."""


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """A plan as calls of programs."""

    loaded: Loaded
    prompts: list[PromptCall]
    decode: DecodeCall | None


@dataclass(frozen=True, kw_only=True)
class DispatchOutcome:
    """Results of a dispatch's calls, on the host."""

    prefilled: list[Prefilled]
    chunk: DecodedTokens | None


class Runner:
    """Owns the pool and the compiled programs. `prepare` is for the thread of the scheduler, `run` for any other."""

    def __init__(
        self,
        shapes: Shapes,
        *,
        blocks: int,
        record: bool,
        vocab_size: int,
        adapters: bool = False,
        kind: CacheDtype = "compute",
    ):
        self.shapes = shapes
        self.blocks = blocks
        self.programs = Programs(steps=shapes.steps, record=record)
        self._tables = Tables(vocab_size)
        self._adapters = adapters
        self._kind = kind
        self._pool: Pool | None = None
        self._stop_ids = MIN_STOP_IDS
        # The thread of a cancelled driver may still be on the device when the next one starts.
        self._device = threading.Lock()
        self._closed = False

    @classmethod
    def of(
        cls,
        loaded: Loaded,
        *,
        slots: int,
        max_length: int,
        steps: int,
        record: bool,
        cache_tokens: int | None,
        adapters: bool = False,
        kind: CacheDtype = "compute",
    ) -> Runner:
        """Runner for weights that may be shapes. `slots` is rounded up to a multiple of the lanes; `cache_tokens`: see
        `NativeEngine`; `adapters`: the model has slots for them; `kind`: type of the cache. ConfigError for one that
        the layout cannot have."""
        lanes = num_lanes(loaded.placement.mesh)
        slots = lanes * -(-slots // lanes)
        blocks = slots * blocks_for(max_length) + lanes if cache_tokens is None else cache_tokens // BLOCK
        runner = cls(
            Shapes(slots // lanes, lanes, max_length, steps),
            blocks=blocks // lanes,
            record=record,
            vocab_size=loaded.source.model.config.vocab_size,
            adapters=adapters,
            kind=kind,
        )
        runner.pool_shapes(loaded)
        return runner

    def prepare(self, plan: Plan, loaded: Loaded) -> Dispatch:
        """The arrays of a plan; later changes of its rows do not matter."""
        return Dispatch(
            loaded=loaded,
            prompts=list(self._prompt_calls(plan.pieces)),
            decode=self._decode_call(plan) if plan.decode else None,
        )

    def run(self, dispatch: Dispatch) -> DispatchOutcome:
        """On the device; returns when everything is on the host."""
        rows = len(dispatch.decode.places) if dispatch.decode is not None else 0
        name = "rollout/prefill" if dispatch.prompts else "rollout/decode"
        with self._device, span(name, rows=rows, slots=self.shapes.slots * self.shapes.lanes):
            pool, self._pool = self._pool, None  # gone if a program fails: it was donated
            if pool is None:
                pool = empty_pool(self.pool_shapes(dispatch.loaded))
            prefilled, chunk = [], None
            for call in dispatch.prompts:
                pool, beside = self.programs.prefill(dispatch.loaded, pool, call.prompts)
                prefilled.append(beside)
            if (decode := dispatch.decode) is not None:
                pool, chunk = self.programs.decode(dispatch.loaded, pool, decode.rows, decode.stop_at)
            self._pool = None if self._closed else pool
            return DispatchOutcome(**jax.device_get({"prefilled": prefilled, "chunk": chunk}))

    def arrays(self) -> list[Array]:
        """Arrays of the KV cache."""
        return [] if self._pool is None else jax.tree.leaves(self._pool)

    def reset(self) -> None:
        """Forget what is in the blocks: even masked, a NaN in it would spoil what comes next."""
        self._pool = None

    def close(self) -> None:
        self._closed, self._pool = True, None
        self.programs.rest()

    def warm_up(
        self, loaded: Loaded, inputs: Sequence[PromptPieces | DecodeRows], advance: Callable[[int], None]
    ) -> None:
        """Compile the programs for inputs of these shapes. `advance(1)` after each."""
        with self._device:
            if self._pool is None:
                self._pool = empty_pool(self.pool_shapes(loaded))
            self.programs.compile(loaded, self._pool, inputs, advance)

    def examples(self, expected: Sequence[Expected], *, rereads: bool) -> list[PromptPieces | DecodeRows]:
        """Inputs of all shapes that any schedule of such requests may need. `rereads`: see `Expected.reads`."""
        return [*self._example_prompts(expected, rereads), *self._example_rows(expected)]

    def _example_prompts(self, expected: Sequence[Expected], rereads: bool) -> Iterator[PromptPieces]:
        calls = {
            (shape, scored, scored and e.params.scores_top)
            for e in expected
            for shape in self.shapes.prompts(e.reads(self.shapes.max_length, rereads=rereads))
            for scored in (False, e.params.prompt_logps)
        }
        yield from (self._prompts(shape, {}, scored=scored, top=top) for shape, scored, top in sorted(calls))

    def _example_rows(self, expected: Sequence[Expected]) -> Iterator[DecodeRows]:
        shapes = self.shapes
        self._fit_stop_ids([e.params for e in expected])
        tail = any(e.params.max_tokens > shapes.steps for e in expected)
        ranges = [(e.params, e.positions(shapes.steps, shapes.max_length)) for e in expected]
        longest = max((positions.longest for _, positions in ranges), default=0)
        calls: dict[tuple[DecodeShape, bool], SamplingParams] = {}
        for params, positions in ranges:
            # One row that is not plain is enough for the other program, whoever is beside it.
            within = positions if params.is_plain else positions._replace(longest=longest)
            calls |= {(shape, params.is_plain): params for shape in shapes.decodes(within, tail=tail)}
        for (shape, _), params in sorted(calls.items(), key=lambda call: call[0]):
            yield self._rows(shape, {0: Row(Request(prompt=(0,), params=params), 0, Chain(), 0)})

    def lower(self, loaded: Loaded, inputs: PromptPieces | DecodeRows) -> jax.stages.Lowered:
        """Lower the program for inputs of these shapes, of weights that may be shapes."""
        return self.programs.lower(loaded, self.pool_shapes(loaded), inputs)

    def pool_shapes(self, loaded: Loaded) -> Pool:
        """Shapes of the pool beside these weights."""
        model, mesh = loaded.source.model, loaded.placement.mesh
        compute, config = model.compute, decoding_config(model.config, model.compute.mesh)
        wanted, on = compute.decode_attention, compute.mesh if mesh is None else mesh
        layout = choose_layout(wanted, config, compute, on, self._kind)
        sharding = loaded.sharding if mesh is None else replicated(mesh)
        blocks: dict[str, Any] = {"lanes": self.shapes.lanes, "blocks": self.blocks}
        return pool_shapes(config, compute.dtype, sharding, layout=layout, kind=self._kind, **blocks)

    def _prompt_calls(self, pieces: Sequence[PromptPiece]) -> Iterator[PromptCall]:
        """By level, and within it by shape, as many pieces to a call as it has rows."""
        groups: dict[tuple[int, PromptShape], list[PromptPiece]] = {}
        for piece in pieces:
            groups.setdefault((piece.level, self.shapes.prompt(piece.start, piece.end)), []).append(piece)
        for (_, shape), group in sorted(groups.items(), key=lambda item: item[0]):
            while group:
                places, group = self._placed(group, shape.rows)
                params = [piece.row.request.params for piece in places.values() if piece.row.request.unscored]
                top = any(p.scores_top for p in params)
                yield PromptCall(prompts=self._prompts(shape, places, scored=bool(params), top=top), pieces=places)

    def _placed(self, pieces: Sequence[PromptPiece], rows: int) -> tuple[dict[int, PromptPiece], list[PromptPiece]]:
        """DecodeRows of a call for as many pieces as fit into their lanes, and what is left."""
        taken, left = [0] * self.shapes.lanes, []
        places: dict[int, PromptPiece] = {}
        for piece in pieces:
            lane = piece.row.lane
            if taken[lane] < rows:
                places[lane * rows + taken[lane]] = piece
                taken[lane] += 1
            else:
                left.append(piece)
        return places, left

    def _prompts(self, shape: PromptShape, places: dict[int, PromptPiece], *, scored: bool, top: bool) -> PromptPieces:
        lanes, rows = self.shapes.lanes, self.shapes.lanes * shape.rows
        tokens, following = np.zeros((rows, shape.tokens), np.int32), np.zeros((rows, shape.tokens), np.int32)
        starts, lengths, temperature = np.zeros(rows, np.int32), np.zeros(rows, np.int32), np.ones(rows, np.float32)
        context = np.zeros((rows, shape.context // BLOCK), np.int32)
        targets = np.full((rows, shape.tokens // BLOCK), self.blocks, np.int32)
        for row, piece in places.items():
            request, length = piece.row.request, piece.end - piece.start
            history = request.history
            tokens[row, :length] = history[piece.start : piece.end]
            following[row, :length] = history[piece.start + 1 : piece.end + 1]
            starts[row], lengths[row], temperature[row] = piece.start, length, request.params.temperature
            context[row, : len(piece.reads)] = piece.reads
            targets[row, : len(piece.writes)] = [self.blocks if block is None else block for block in piece.writes]
        arrays = {"tokens": tokens, "starts": starts, "lengths": lengths}
        wanted = {"targets": following, "temperature": temperature}
        return PromptPieces(
            **jax.device_put(arrays | {"targets": targets.reshape(lanes, shape.rows, -1)}),
            context=jax.device_put(context.reshape(lanes, shape.rows, -1)) if shape.context else None,
            scored=ScoredPrompts(**jax.device_put(wanted), top=top) if scored else None,
            adapters=self._slots_of({row: piece.row for row, piece in places.items()}, rows),
        )

    def _decode_call(self, plan: Plan) -> DecodeCall:
        shapes, lanes = self.shapes, self.shapes.lanes
        tail = any(row.request.params.max_tokens > shapes.steps for row in plan.decode)
        count = len(plan.decode)
        constrained = sum(row.request.constraint is not None for row in plan.decode)
        fullest = max(Counter(row.lane for row in plan.decode).values())
        shape = shapes.decode(fullest, max(row.positions(shapes.steps) for row in plan.decode), tail=tail)
        taken, places = [0] * lanes, {}
        for row in plan.decode:
            places[row.lane * shape.rows + taken[row.lane]] = row
            taken[row.lane] += 1
        # Pause for those who wait when a quarter has ended; else when the next smaller batch would do. After a token
        # under a grammar the host says what may follow.
        smaller = max((size for size in shapes.sizes(tail) if size < shape.rows), default=0)
        stop_at = count - max(1, count // 4) if plan.waiting else smaller
        stop_at = max(stop_at, count - constrained) if constrained else stop_at
        self._fit_stop_ids([row.request.params for row in plan.decode])
        return DecodeCall(rows=self._rows(shape, places), stop_at=np.int32(min(stop_at, count - 1)), places=places)

    def _rows(self, shape: DecodeShape, places: dict[int, Row]) -> DecodeRows:
        lanes, rows = self.shapes.lanes, self.shapes.lanes * shape.rows
        requests = [places[row].request if row in places else IDLE for row in range(rows)]
        params = [request.params for request in requests]
        stop_ids = np.full((rows, self._stop_ids), -1, np.int32)
        context = np.zeros((rows, shape.width // BLOCK), np.int32)
        # Tokens of a dispatch may start anywhere in a block.
        touched = min((self.shapes.steps + BLOCK - 2) // BLOCK + 1, context.shape[1])
        targets = np.full((rows, touched), self.blocks, np.int32)
        for index, row in places.items():
            blocks = row.chain.blocks
            first = row.request.position // BLOCK
            new = blocks[first : first + touched]
            targets[index, : len(new)] = new
            context[index, : len(blocks)] = blocks
            if row.chain.source is not None:
                context[index, first] = row.chain.source.block
            ends = row.request.params.ends
            stop_ids[index, : len(ends)] = ends
        return DecodeRows(
            **jax.device_put(
                {
                    "tokens": np.asarray([r.newest for r in requests], np.int32),
                    "positions": np.asarray([r.position for r in requests], np.int32),
                    "ends": np.asarray([r.end if r.constraint is None else r.position + 2 for r in requests], np.int32),
                    "active": np.asarray([row in places for row in range(rows)]),
                    "context": context.reshape(lanes, shape.rows, -1),
                    "targets": targets.reshape(lanes, shape.rows, -1),
                    "stop_ids": stop_ids,
                }
            ),
            sampling=Sampling.of(
                params,
                [r.history for r in requests],
                [len(r.prompt) for r in requests],
                max_length=self.shapes.max_length,
                tables=self._tables,
                allowed={row: r.constraint.allowed for row, r in enumerate(requests) if r.constraint is not None},
            ),
            adapters=self._slots_of(places, rows),
        )

    def _slots_of(self, places: Mapping[int, Row], rows: int) -> Int[Array, " N"] | None:
        """Adapter slots of a call's rows."""
        if not self._adapters:
            return None
        slots = [places[row].request.slot if row in places else -1 for row in range(rows)]
        return jax.device_put(np.asarray(slots, np.int32))

    def _fit_stop_ids(self, params: Sequence[SamplingParams]) -> None:
        while self._stop_ids < max(len(p.ends) for p in params):
            self._stop_ids *= 2


@dataclass(frozen=True)
class Ended:
    """Rows whose requests are finished or failed."""

    done: list[tuple[Row, StopReason]] = field(default_factory=list)
    failed: list[tuple[Row, Exception]] = field(default_factory=list)
    """FloatingPointError for log-probabilities that are not finite; other exceptions are raised by `decode_text`."""


def deliver(
    dispatch: Dispatch, outcome: DispatchOutcome, holds: Callable[[Row], bool], decode_text: Decode | None
) -> Ended:
    """Append the new tokens to every request; returns the rows that ended. Rows that `holds` refuses are skipped."""
    for call, prefilled in zip(dispatch.prompts, outcome.prefilled, strict=True):
        _deliver_prompts(call, prefilled, holds)
    ended = Ended()
    if dispatch.decode is None or outcome.chunk is None:
        return ended
    version, finite = dispatch.loaded.version, _finite(outcome.chunk)
    for index, row in dispatch.decode.places.items():
        if not holds(row):
            continue
        if not finite[index]:
            message = f"generate: the weights of version {version} give log-probabilities that are not finite"
            ended.failed.append((row, FloatingPointError(message)))
            continue
        _inherit_routing(row)
        count = _deliver_tokens(outcome.chunk, index, row.request, version)
        try:
            reason = _stop_reason(row.request, count, decode_text)
            if reason is None and row.request.constraint is not None:
                row.request.constraint.advance(row.request.tokens[len(row.request.tokens) - count :])
        except Exception as error:
            # The tokenizer and the grammar are not ours, and the other requests may have better tokens.
            ended.failed.append((row, error))
            continue
        if reason is not None:
            ended.done.append((row, reason))
    return ended


def _finite(chunk: DecodedTokens) -> Bool[np.ndarray, " R"]:
    """True for rows whose sampled log-probabilities are all finite."""
    sampled = np.arange(len(chunk.logps))[:, None] < np.asarray(chunk.counts)
    return (np.isfinite(np.asarray(chunk.logps)) | ~sampled).all(axis=0)


def _deliver_prompts(call: PromptCall, found: Prefilled, holds: Callable[[Row], bool]) -> None:
    for index, piece in call.pieces.items():
        row, length = piece.row, piece.end - piece.start
        if found.experts is not None:
            # Also for removed rows: other requests may share their blocks.
            _record_routing(piece.nodes, np.asarray(found.experts[index, :length]))
        if not holds(row):
            continue
        if found.experts is not None:
            row.request.record_routing(piece.start, np.asarray(found.experts[index, :length]))
        if found.logps is not None and row.request.unscored:
            top, number = None, row.request.params.top_logps
            if found.top is not None and number:
                top = _top_logps(found.top, np.s_[index, :length], number)
            row.request.record_prompt_logps(piece.start, np.asarray(found.logps[index, :length]).tolist(), top)


def _record_routing(nodes: Sequence[Node], experts: np.ndarray) -> None:
    for index, node in enumerate(nodes):
        if node.routing is None:
            start = index * BLOCK
            node.routing = experts[start : start + len(node.tokens)].copy()


def _inherit_routing(row: Row) -> None:
    """Copy the recorded experts of shared prefix blocks to the request, once."""
    if not row.fresh:
        return
    row.fresh = False
    for index, node in enumerate(row.chain.nodes):
        if node.routing is not None:
            row.request.record_routing(index * BLOCK, node.routing)
    source = row.chain.source
    if source is not None and source.routing is not None:
        start = len(row.chain.nodes) * BLOCK
        row.request.record_routing(start, source.routing[: row.computed - start])


def _deliver_tokens(chunk: DecodedTokens, index: int, request: Request, version: int) -> int:
    """Append the new tokens of a row to its request, and return their number."""
    count = int(chunk.counts[index])
    if chunk.experts is not None:
        request.record_routing(request.position, np.asarray(chunk.experts[:count, index]))
    request.tokens.extend(np.asarray(chunk.tokens[:count, index]).tolist())
    request.logps.extend(np.asarray(chunk.logps[:count, index]).tolist())
    request.kept_logps.extend(np.asarray(chunk.kept_logps[:count, index]).tolist())
    request.versions.extend([version] * count)
    if chunk.top is not None:
        request.top_logps += _top_logps(chunk.top, np.s_[:count, index], request.params.top_logps)
    return count


def _top_logps(top: TopLogps, places: tuple[Any, Any], number: int) -> list[tuple[TokenLogp, ...]]:
    """The `number` most probable tokens at each of these places."""
    tokens, logps = np.asarray(top.tokens[places]), np.asarray(top.logps[places])
    return [
        tuple(map(TokenLogp, *pair))
        for pair in zip(tokens[:, :number].tolist(), logps[:, :number].tolist(), strict=True)
    ]


def _stop_reason(request: Request, num_new: int, decode_text: Decode | None) -> StopReason | None:
    """Return the stop reason of a finished request, else None; tokens after a stop string are cut."""
    params = request.params
    if params.stop and decode_text is not None:
        end = first_completed(decode_text, request.history, len(request.prompt), num_new, params)
        if end is not None:
            request.cut(end)
            return "stop"
    if request.tokens[-1] in params.ends:
        return "stop"
    return "length" if len(request.tokens) == params.max_tokens else None
