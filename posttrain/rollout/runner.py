"""Execution of the scheduler's plans: input arrays, compiled programs, and the KV cache pool."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jaxtyping import Int

from posttrain.config import CacheDtype
from posttrain.mesh import replicated
from posttrain.models.cache import windows_of
from posttrain.models.decoder import decoding_config
from posttrain.models.vision.tower import ImagePatches
from posttrain.rollout.blocks import BLOCK, Chain, Window, blocks_for
from posttrain.rollout.decode_weights import Loaded, PassCost
from posttrain.rollout.decoding import DecodeRows
from posttrain.rollout.dispatch import DecodeCall, Dispatch, DispatchOutcome, PromptCall, fair_length
from posttrain.rollout.drafting import Drafter, DraftTotals, Speculation
from posttrain.rollout.paged import Pool, choose_layout, empty_pool, num_lanes, pool_shapes
from posttrain.rollout.programs import (
    DecodeShape,
    Expected,
    Inputs,
    Prefilled,
    Programs,
    PromptPieces,
    PromptShape,
    ScoredPrompts,
    Shapes,
    Side,
)
from posttrain.rollout.request import Request
from posttrain.rollout.sampling import Sampling, Tables
from posttrain.rollout.scheduler import Plan, PromptPiece, Row, window_of
from posttrain.rollout.speculative import SpeculativeRows
from posttrain.rollout.types import SamplingParams
from posttrain.rollout.vision import Features, PromptCache, encoded
from posttrain.runtime.profiler import span

MIN_STOP_IDS = 4
IDLE = Request(prompt=(0,), params=SamplingParams(max_tokens=1, temperature=1.0, stop_token_ids=(), key=(0, 0)))


class Runner:
    """Owns the pool and the compiled programs. `prepare` is for the thread of the scheduler, `run` for any other."""

    def __init__(
        self,
        shapes: Shapes,
        *,
        blocks: int,
        record: bool,
        vocab_size: int,
        cost: PassCost,
        adapters: bool = False,
        kind: CacheDtype = "compute",
        drafter: Drafter | None = None,
        window: Window | None = None,
        image_bytes: int = 0,
        forbidden: tuple[int, ...] = (),
    ):
        """`image_bytes`: limit of the cache of images; `forbidden`: tokens that no sample has."""
        self.shapes = shapes
        self.blocks = blocks
        self.window = window
        self.drafter = drafter
        drafts, window_read = (0, 0) if drafter is None else (drafter.tokens, drafter.window)
        self.programs = Programs(steps=shapes.steps, record=record, drafts=drafts, window=window_read)
        self._tables = Tables(vocab_size)
        self._cost = cost
        self.images, self._forbidden = PromptCache(image_bytes), forbidden
        self._adapters = adapters
        self._kind = kind
        self._pool: Pool | None = None
        self._stop_ids = MIN_STOP_IDS
        # The thread of a cancelled driver may still be on the device when the next one starts.
        self._device = threading.Lock()
        self._closed = False
        self._seconds = {"prefill": 0.0, "decode": 0.0}
        self._counted = dict(self._seconds)

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
        speculation: Speculation | None = None,
        image_bytes: int = 0,
        forbidden: tuple[int, ...] = (),
    ) -> Runner:
        """Runner for weights that may be shapes. `slots` is rounded up to a multiple of the lanes; `cache_tokens`: see
        `NativeEngine`; `adapters`: the model has slots for them; `kind`: type of the cache. ConfigError for one that
        the layout cannot have."""
        lanes = num_lanes(loaded.placement.mesh)
        slots = lanes * -(-slots // lanes)
        blocks = slots * blocks_for(max_length) + lanes if cache_tokens is None else cache_tokens // BLOCK
        model = loaded.source.model
        widest = max((x for x in windows_of(model.config) if x is not None), default=None)
        sizes: dict[str, Any] = {"slots": slots // lanes, "max_length": max_length, "steps": steps}
        cost = PassCost.of(loaded)
        runner = cls(
            Shapes(slots // lanes, lanes, max_length, steps),
            blocks=blocks // lanes,
            window=window_of(widest, blocks=blocks // lanes, whole_images=model.config.sees_ahead, **sizes),
            record=record,
            vocab_size=model.config.vocab_size,
            adapters=adapters,
            kind=kind,
            drafter=None if speculation is None else Drafter(speculation, loaded, max_length, cost),
            cost=cost,
            image_bytes=image_bytes,
            forbidden=forbidden,
        )
        runner.pool_shapes(loaded)
        if runner.drafter is not None and runner.drafter.loaded is not None:
            runner.draft_pool_shapes(runner.drafter.loaded)
        return runner

    def prepare(self, plan: Plan, loaded: Loaded) -> Dispatch:
        """The arrays of a plan; later changes of its rows do not matter."""
        decode = self._decode_call(plan) if plan.decode else None
        drafting: list[PromptCall] = []
        if self.drafter is not None and decode is not None and isinstance(decode.rows, SpeculativeRows):
            drafting = list(self._prompt_calls(self.drafter.catch_up(plan), scored=False))
        prompts = list(self._prompt_calls(plan.pieces))
        return Dispatch(loaded=loaded, prompts=prompts, drafting=drafting, decode=decode)

    def run(self, dispatch: Dispatch) -> DispatchOutcome:
        """On the device; returns when everything is on the host."""
        rows = len(dispatch.decode.places) if dispatch.decode is not None else 0
        name = "prefill" if dispatch.prompts else "decode"
        with self._device, span(f"rollout/{name}", rows=rows, slots=self.shapes.slots * self.shapes.lanes):
            start = time.perf_counter()
            decode, prefilled, chunk = dispatch.decode, [], None
            drafts = decode is not None and isinstance(decode.rows, SpeculativeRows)
            sides = self._sides(dispatch.loaded, drafts=drafts)
            sides[0], features = self._encoded(sides[0], dispatch.prompts)
            for call in dispatch.prompts:
                pool, beside = self.programs.prefill(*sides[0], call.with_features(dispatch.loaded, features))
                sides[0] = sides[0]._replace(pool=pool)
                prefilled.append(beside)
            for call in dispatch.drafting:
                pool, _ = self.programs.prefill(*sides[1], call.prompts)
                sides[1] = sides[1]._replace(pool=pool)
            pools: Sequence[Pool] = [side.pool for side in sides]
            self._note_states(dispatch, prefilled)
            if decode is not None:
                if isinstance(decode.rows, SpeculativeRows):
                    speculative = decode.rows
                    if self.drafter is not None and dispatch.prompts:
                        speculative = self.drafter.with_states(speculative, decode.places)
                    pools, chunk = self.programs.speculate(sides, speculative, decode.stop_at)
                else:
                    pool, chunk = self.programs.decode(*sides[0], decode.rows, decode.stop_at)
                    pools = [pool, *pools[1:]]
            self._put_pools(pools)
            outcome = jax.device_get({"prefilled": prefilled, "chunk": chunk})
            self._seconds[name] += time.perf_counter() - start
            return DispatchOutcome(**outcome)

    def _note_states(self, dispatch: Dispatch, prefilled: Sequence[Prefilled]) -> None:
        """Note the hidden states of prompts that have just been read, before their rows decode."""
        if self.drafter is not None and self.drafter.window:
            for call, found in zip(dispatch.prompts, prefilled, strict=True):
                self.drafter.note_prompts(call.pieces, np.asarray(found.hidden))

    def _encoded(self, side: Side, calls: Sequence[PromptCall]) -> tuple[Side, Features]:
        """Features of the calls' images, by the tower where they are not known."""
        needed, pools = [one for call in calls for piece in call.images.values() for one in piece.needed], [side.pool]
        if not needed:
            return side, {}

        def run(inputs: ImagePatches) -> Any:
            pools[0], found = self.programs.encode(side.loaded, pools[0], inputs)
            return jax.device_get(found)

        with span("rollout/encode", images=len(needed)):
            found = encoded(self.images, needed, self.shapes.lanes, run)
        return side._replace(pool=pools[0]), found

    def _sides(self, loaded: Loaded, *, drafts: bool) -> list[Side]:
        """The model and its pool, and with `drafts` the draft model's. The pools are gone if a program fails, to which
        they are donated."""
        drafter, pool, self._pool = self.drafter, self._pool, None
        sides = [Side(loaded, pool or empty_pool(self.pool_shapes(loaded)))]
        if drafts and drafter is not None and drafter.loaded is not None:
            pool, drafter.pool = drafter.pool, None
            sides.append(Side(drafter.loaded, pool or empty_pool(self.draft_pool_shapes(drafter.loaded))))
        return sides

    def _put_pools(self, pools: Sequence[Pool]) -> None:
        if not self._closed:
            self._pool = pools[0]
            if self.drafter is not None and len(pools) > 1:
                self.drafter.pool = pools[1]

    def arrays(self) -> list[Array]:
        """Arrays of the KV cache, and those of the draft model."""
        drafter = self.drafter
        own = [] if drafter is None or drafter.loaded is None else list(drafter.loaded.arrays.values())
        return [*own, *jax.tree.leaves((self._pool, None if drafter is None else drafter.pool))]

    def forget(self) -> None:
        """Forget what drafts were worth, and the states that they were made from."""
        if self.drafter is not None:
            self.drafter.forget()

    def reset(self) -> None:
        """Forget what is in the blocks: even masked, a NaN in it would spoil what comes next."""
        self._pool = None
        if self.drafter is not None:
            self.drafter.pool = None

    def close(self) -> None:
        self._closed = True
        self.images.close()
        self.reset()
        self.programs.rest()

    def warm_up(
        self,
        loaded: Loaded,
        inputs: Sequence[Inputs],
        draft_prompts: Sequence[PromptPieces],
        advance: Callable[[int], None],
    ) -> None:
        """Compile the programs for inputs of these shapes, and those in which the draft model reads prompts.
        `advance(1)` after each."""
        with self._device:
            sides = self._sides(loaded, drafts=True)
            calls = [(sides if isinstance(one, SpeculativeRows) else sides[:1], one) for one in inputs]
            calls += [(sides[1:], one) for one in draft_prompts]
            self.programs.compile(calls, advance)
            self._put_pools([side.pool for side in sides])

    def examples(self, expected: Sequence[Expected], *, rereads: bool) -> list[Inputs]:
        """Inputs of all shapes that any schedule of such requests may need. `rereads`: see `Expected.reads`."""
        return [*self._example_prompts(expected, rereads), *self._example_rows(expected)]

    def draft_examples(self, expected: Sequence[Expected]) -> list[PromptPieces]:
        """Prompts of all shapes that a draft model may have to read, such as what was sampled without it."""
        if self.drafter is None or self.drafter.loaded is None:
            return []
        return [prompts for prompts in self._example_prompts(expected, True) if prompts.scored is None]

    def _example_prompts(self, expected: Sequence[Expected], rereads: bool) -> Iterator[PromptPieces]:
        calls = {
            (shape, scored, scored and e.params.scores_top)
            for e in expected
            for shape in self.shapes.prompts(e.reads(self.shapes.max_length, rereads=rereads))
            for scored in (False, e.params.prompt_logps)
        }
        yield from (self._prompts(shape, {}, scored=scored, top=top) for shape, scored, top in sorted(calls))

    def _example_rows(self, expected: Sequence[Expected]) -> Iterator[DecodeRows | SpeculativeRows]:
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
            places = {0: Row(Request(prompt=(0,), params=params), 0, Chain(), 0)}
            yield self._rows(shape, places, shapes.steps)
            if self.drafter is not None:
                yield self._speculative_rows(shape, places)

    def lower(self, loaded: Loaded, inputs: Inputs) -> jax.stages.Lowered:
        """Lower the program for inputs of these shapes, of weights that may be shapes."""
        sides = [Side(loaded, self.pool_shapes(loaded))]
        if isinstance(inputs, SpeculativeRows) and self.drafter is not None and self.drafter.loaded is not None:
            sides.append(Side(self.drafter.loaded, self.draft_pool_shapes(self.drafter.loaded)))
        return self.programs.lower(sides, inputs)

    def pool_shapes(self, loaded: Loaded) -> Pool:
        """Shapes of the pool beside these weights."""
        return self._pool_shapes(loaded, self.window)

    def draft_pool_shapes(self, loaded: Loaded) -> Pool:
        """Shapes of the draft model's pool: it may read what the model's windows have passed."""
        return self._pool_shapes(loaded, None)

    def _pool_shapes(self, loaded: Loaded, window: Window | None) -> Pool:
        model, mesh = loaded.source.model, loaded.placement.mesh
        compute, config = model.compute, decoding_config(model.config, model.compute.mesh)
        wanted, on = compute.decode_attention, compute.mesh if mesh is None else mesh
        layout = choose_layout(wanted, config, compute, on, self._kind)
        sharding = loaded.sharding if mesh is None else replicated(mesh)
        blocks: dict[str, Any] = {"lanes": self.shapes.lanes, "blocks": self.blocks}
        blocks["window_blocks"] = None if window is None else window.blocks
        return pool_shapes(config, compute.dtype, sharding, layout=layout, kind=self._kind, **blocks)

    @property
    def has_draft_model(self) -> bool:
        return self.drafter is not None and self.drafter.loaded is not None

    @property
    def _tables_of_row(self) -> int:
        """Tables of blocks, see `Pool`."""
        return 1 if self.window is None else 2

    def take_draft_totals(self) -> DraftTotals:
        return DraftTotals() if self.drafter is None else self.drafter.take_totals()

    def draft_metrics(self, totals: DraftTotals) -> dict[str, float]:
        return {} if self.drafter is None else self.drafter.metrics(totals)

    def take_seconds(self) -> dict[str, float]:
        """Seconds of dispatches since the last call, with the layout of weights: `prefill_s` of those that read
        prompts, in which rows may decode too, `decode_s` of others."""
        # Another thread may add to them meanwhile.
        before, self._counted = self._counted, dict(self._seconds)
        return {f"rollout/{name}_s": value - before[name] for name, value in self._counted.items()}

    def note(self, plan: Plan, dispatch: Dispatch, outcome: DispatchOutcome, holds: Callable[[Row], bool]) -> None:
        """Note the drafts of a dispatch after its tokens were delivered, and what the draft model has read."""
        if self.drafter is None or dispatch.decode is None or outcome.chunk is None:
            return
        places = {index: row for index, row in dispatch.decode.places.items() if holds(row)}
        self.drafter.note(places, plan.lanes, outcome.chunk, dispatch.decode.size)

    def _prompt_calls(self, pieces: Sequence[PromptPiece], *, scored: bool = True) -> Iterator[PromptCall]:
        """By level, and within it by shape, as many pieces to a call as it has rows."""
        groups: dict[tuple[int, PromptShape, bool], list[PromptPiece]] = {}
        for piece in pieces:
            shape = self.shapes.prompt(piece.start, piece.end)
            groups.setdefault((piece.level, shape, piece.pictured is not None), []).append(piece)
        for (_, shape, _), group in sorted(groups.items(), key=lambda item: item[0]):
            while group:
                places, group = self._placed(group, shape.rows)
                requests = [piece.row.request for piece in places.values()] if scored else []
                params = [request.params for request in requests if request.unscored]
                top = any(p.scores_top for p in params)
                yield PromptCall(
                    prompts=self._prompts(shape, places, scored=bool(params), top=top),
                    pieces=places,
                    images={row: own for row, piece in places.items() if (own := piece.pictured) is not None},
                )

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
        context = np.zeros((rows, self._tables_of_row, shape.context // BLOCK), np.int32)
        targets = np.full((rows, self._tables_of_row, shape.tokens // BLOCK), self.blocks, np.int32)
        for row, piece in places.items():
            request, length = piece.row.request, piece.end - piece.start
            history = request.history
            tokens[row, :length] = history[piece.start : piece.end]
            following[row, :length] = history[piece.start + 1 : piece.end + 1]
            if request.images is not None:
                # Of a picture nothing is scored, and its placeholder may be no token of the table.
                behind = request.images.numbers[piece.start + 1 : piece.end + 1]
                following[row, : len(behind)][behind > 0] = 0
            starts[row], lengths[row], temperature[row] = piece.start, length, request.params.temperature
            for table, (reads, writes) in enumerate(piece.tables[: self._tables_of_row]):
                context[row, table, : len(reads)] = reads
                targets[row, table, : len(writes)] = [self.blocks if block is None else block for block in writes]
        arrays = {"tokens": tokens, "starts": starts, "lengths": lengths}
        wanted = {"targets": following, "temperature": temperature}
        return PromptPieces(
            **jax.device_put(arrays | {"targets": targets.reshape(lanes, shape.rows, *targets.shape[1:])}),
            context=jax.device_put(context.reshape(lanes, shape.rows, *context.shape[1:])) if shape.context else None,
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
        # After a token under a grammar the host says what may follow; the others go on for as long as is fair to both.
        length, plain = shapes.steps, count - constrained
        if constrained:
            count = plain or count
            token_s = self._cost.seconds(shape.rows)
            length = fair_length(plain=plain, constrained=constrained, longest=length, token_s=token_s)
        # The first text of a stream comes at once, where no other row would wait for the host because of it.
        begins = all(row.request.on_tokens is not None and not row.request.started for row in plan.decode)
        length = 1 if begins else length
        # Pause for those who wait when a quarter has ended; else when the next smaller batch would do.
        smaller = max((size for size in shapes.sizes(tail) if size < min(shape.rows, count)), default=0)
        may_draft = self.drafter is not None and not constrained and not begins
        drafts = self.drafter is not None and may_draft and self.drafter.pace.choose(shape.rows)
        if drafts:
            smaller = count - max(1, count // 2)  # the faster half waits no longer for the slower one
        stop_at = count - max(1, count // 4) if plan.waiting else smaller
        self._fit_stop_ids([row.request.params for row in plan.decode])
        rows = self._speculative_rows(shape, places) if drafts else self._rows(shape, places, length)
        pause = np.int32(min(stop_at, count - 1))
        return DecodeCall(rows=rows, stop_at=pause, places=places, size=shape.rows)

    def _speculative_rows(self, shape: DecodeShape, places: dict[int, Row]) -> SpeculativeRows:
        assert self.drafter is not None
        return self.drafter.rows(self._rows(shape, places, self.shapes.steps), places, shape.width)

    def _rows(self, shape: DecodeShape, places: dict[int, Row], length: int) -> DecodeRows:
        """Arrays of rows that draw up to `length` tokens, and one under a grammar."""
        lanes, rows = self.shapes.lanes, self.shapes.lanes * shape.rows
        requests = [places[row].request if row in places else IDLE for row in range(rows)]
        params, deltas = [request.params for request in requests], [request.rope_delta for request in requests]
        stop_ids = np.full((rows, self._stop_ids), -1, np.int32)
        width, tables = shape.width // BLOCK, self._tables_of_row
        context = np.zeros((rows, tables, width), np.int32)
        # Tokens of a dispatch may start anywhere in a block.
        touched = min((self.shapes.steps + BLOCK - 2) // BLOCK + 1, width)
        targets = np.full((rows, tables, touched), self.blocks, np.int32)
        for index, row in places.items():
            first = row.request.position // BLOCK
            for table, (blocks, source) in enumerate(row.chain.tables[:tables]):
                new = blocks[first : first + touched]
                targets[index, table, : len(new)] = new
                context[index, table, : len(blocks)] = blocks
                if source is not None:
                    context[index, table, first] = source
            ends = row.request.params.ends
            stop_ids[index, : len(ends)] = ends
        return DecodeRows(
            **jax.device_put(
                {
                    "tokens": np.asarray([r.newest for r in requests], np.int32),
                    "positions": np.asarray([r.position for r in requests], np.int32),
                    "ends": np.asarray(
                        [min(r.end, r.position + 1 + (length if r.constraint is None else 1)) for r in requests],
                        np.int32,
                    ),
                    "active": np.asarray([row in places for row in range(rows)]),
                    "context": context.reshape(lanes, shape.rows, tables, -1),
                    "targets": targets.reshape(lanes, shape.rows, tables, -1),
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
                forbidden=self._forbidden,
            ),
            adapters=self._slots_of(places, rows),
            rope_deltas=jax.device_put(np.asarray(deltas, np.int32)) if any(deltas) else None,
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
