"""Scheduler of the engine: which requests run, in which blocks, and the next dispatch. Host only."""

from __future__ import annotations

import heapq
import itertools
import weakref
from collections.abc import Iterator, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass

from posttrain.rollout.blocks import (
    BLOCK,
    BlockPool,
    Chain,
    Match,
    Node,
    Window,
    blocks_for,
    least_cache,
    window_blocks,
)
from posttrain.rollout.request import Request
from posttrain.rollout.types import Completion
from posttrain.rollout.vision import PicturedPiece

PROMPT_CHUNK = 512
"""Prompt tokens that one sequence reads in one call at most, unless images must be read at once."""
PROMPT_TOKENS = 2048
"""Prompt tokens of one plan; the last chunk may go beyond. A stream waits for at most two plans of them."""
MIN_SHARED = 64
"""Shared tokens below which a prompt that must be read further is read from its start: so few save less time than the
program costs that reads the middle of a prompt."""
SPREAD = 8
"""Rows by which a lane may be ahead of another for the sake of a shared prefix."""
NOTHING = Match([], None, 0)


@dataclass(eq=False)
class Row:
    """Running request and its blocks."""

    request: Request
    lane: int
    chain: Chain
    computed: int
    """Number of leading positions in the blocks once the current plan has run."""
    fresh: bool = True
    """True while the routing of shared prefix blocks is not yet copied to the request."""
    counted: bool = True
    """Count its shared tokens in the prefix hit rate; False after a preemption or a weight update."""

    @property
    def prefix(self) -> int:
        """Number of positions to prefill before the newest token, the first input of decoding."""
        return self.request.position

    @property
    def ready(self) -> bool:
        return self.computed == self.prefix

    def positions(self, steps: int) -> int:
        return self.request.positions(steps)


@dataclass(frozen=True, kw_only=True)
class PromptPiece:
    """Prompt tokens of a row to compute, from the start of a block on."""

    row: Row
    start: int
    end: int
    level: int
    """Dependency level: pieces read blocks that pieces of lower levels write, so calls run by level."""
    reads: tuple[int, ...]
    """Blocks before `start`."""
    writes: tuple[int | None, ...]
    """Blocks from `start` on; None if another chain's block has the same content."""
    windowed_reads: tuple[int, ...] = ()
    """Numbers of `reads` in layers with a window, if those have blocks of their own."""
    windowed_writes: tuple[int | None, ...] = ()

    @property
    def tables(self) -> Sequence[tuple[Sequence[int], Sequence[int | None]]]:
        """Numbers that it reads and writes, in each table of `Pool`."""
        return (self.reads, self.writes), (self.windowed_reads, self.windowed_writes)

    @property
    def pictured(self) -> PicturedPiece | None:
        """Images that it reads, or that its positions depend on."""
        return PicturedPiece.of(self.row.request.images, self.start, self.end)

    nodes: tuple[Node, ...]
    """Prefix-cache entries of the blocks from `start` on."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One dispatch: prefill pieces, then decode steps of every row whose prompt is read."""

    pieces: Sequence[PromptPiece]
    decode: Sequence[Row]
    """In order of arrival."""
    waiting: bool
    """True if a request waits for a slot."""
    lanes: Sequence[BlockPool]
    """Blocks of each lane."""


@dataclass(kw_only=True)
class Counts:
    """Counters since the last `take_counts`."""

    prompt_tokens: int = 0
    """Prompt tokens of admitted requests, counted once per request."""
    shared_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    preemptions: int = 0
    peak_blocks: int = 0


@dataclass
class Lane:
    """Data shard: its share of the slots and its blocks."""

    blocks: BlockPool
    running: int = 0


class Scheduler:
    """A queue in order of arrival; slots and blocks in `lanes`, each for a share of the running requests.

    Requests start in order of arrival. If blocks run out, the youngest running request is preempted: it releases its
    blocks and returns to its place in the queue; its sampled tokens are kept and prefilled again. The oldest request is
    never preempted.

    ValueError for a cache that cannot hold one sequence of `max_length`.
    """

    def __init__(
        self, *, slots: int, lanes: int, blocks: int, max_length: int, steps: int, window: Window | None = None
    ):
        if blocks * BLOCK < (least := least_cache(max_length)):
            raise ValueError(
                f"rollout: a cache of {blocks * BLOCK} tokens holds no sequence of max_length={max_length}; "
                f"it needs {least}" + (f" in each of {lanes} shards" if lanes > 1 else "")
            )
        assert slots % lanes == 0
        self.slots = slots
        self.steps = steps
        self._longest = blocks_for(max_length)
        self.lanes = [Lane(BlockPool(blocks, window)) for _ in range(lanes)]
        self.running: dict[int, Row] = {}
        """Running rows by request number, in order of arrival."""
        self.waiting: list[Request] = []
        """Waiting requests as a heap, the oldest first."""
        self.admitting = True
        """False while no new requests start."""
        self.counts = Counts()
        self._decoded = True
        """True if the last plan decoded all ready rows."""
        self._numbers = itertools.count()
        self._newest = -1

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def num_free(self) -> int:
        return self.slots - len(self.running)

    @property
    def num_blocks(self) -> int:
        return sum(lane.blocks.number for lane in self.lanes)

    @property
    def num_used_blocks(self) -> int:
        return sum(lane.blocks.used for lane in self.lanes)

    @property
    def may_preempt(self) -> bool:
        """True if blocks can run out. A growing row never competes with a copy source: its reader decodes first."""
        return any(lane.blocks.number < self.slots // len(self.lanes) * self._longest for lane in self.lanes)

    def take_counts(self) -> Counts:
        """Counts since the last call."""
        counts, self.counts = self.counts, Counts()
        return counts

    @property
    def drained(self) -> bool:
        """True if no request has started."""
        return not self.running and not any(request.started for request in self.waiting)

    def submit(self, request: Request) -> None:
        """Queue a request. Cancelling its future removes it immediately, also while a dispatch runs or none does."""
        request.number = next(self._numbers)
        heapq.heappush(self.waiting, request)
        known = weakref.ref(request)  # the future keeps its callbacks, and the request the future

        def leave(future: Future[Completion]) -> None:
            if future.cancelled() and (gone := known()) is not None:
                self.remove({gone})

        request.future.add_done_callback(leave)

    def plan(self) -> Plan | None:
        """Plan the next dispatch; None when idle. Row state is then as after the dispatch."""
        for row in list(self.running.values()):
            if self.holds(row):
                self._restart_stale(row)
                self._make_room(row)
        budget = _Budget(PROMPT_TOKENS)
        pieces = [piece for row in self.running.values() for piece in self._read_on(row, budget)]
        pieces += self._admit(budget)
        decode = [row for row in self.running.values() if row.ready]
        if decode and budget.left <= 0 and self._prompts_first(decode):
            decode = []
        self._decoded = bool(decode)
        for row in decode:
            self.lanes[row.lane].blocks.widen(row.chain, len(row.chain.blocks))
        self.counts.peak_blocks = max(self.counts.peak_blocks, self.num_used_blocks)
        if not pieces and not decode:
            return None
        waiting = bool(self.waiting) and self.admitting
        return Plan(pieces=pieces, decode=decode, waiting=waiting, lanes=[lane.blocks for lane in self.lanes])

    def _prompts_first(self, decode: Sequence[Row]) -> bool:
        """True if more prompts are read before these rows decode: few take nearly as long as many. Where one of them
        streams, so that someone waits for its tokens, only for twice the rows, and never twice running."""
        could = min(self.slots, len(self.running) + len(self.waiting) * self.admitting)
        if any(row.request.on_tokens is not None for row in decode):
            return self._decoded and 2 * len(decode) < could
        return len(decode) < could

    def settle(self, plan: Plan) -> None:
        """Update the blocks after a dispatch whose tokens were delivered."""
        for lane in self.lanes:
            lane.blocks.settle()
        for row in filter(self.holds, plan.decode):
            blocks, request = self.lanes[row.lane].blocks, row.request
            blocks.drop_source(row.chain)
            row.computed = request.position
            if blocks.has_more(row.chain, row.computed):
                blocks.record(row.chain, request.keys, row.computed, partial=False, routing=request.routing)

    def release(self, row: Row) -> None:
        """Release a finished row; its full blocks stay in the prefix cache."""
        self._leave(row)

    def holds(self, row: Row) -> bool:
        """Return whether the row still runs."""
        return self.running.get(row.request.number) is row

    def requests(self) -> Iterator[Request]:
        yield from (row.request for row in self.running.values())
        yield from self.waiting

    def remove(self, gone: Set[Request]) -> None:
        """Remove cancelled or aborted requests, running or waiting."""
        if not gone:
            return
        for row in list(self.running.values()):
            if row.request in gone:
                self._leave(row)
        self.waiting = [request for request in self.waiting if request not in gone]
        heapq.heapify(self.waiting)

    def drain(self) -> list[Request]:
        """Remove all requests and return them in order of arrival."""
        requests = sorted(self.requests())
        self.remove(set(requests))
        self.forget()
        return requests

    def forget(self) -> None:
        """Clear the prefix cache after a weight update. Started requests keep their cache."""
        for lane in self.lanes:
            lane.blocks.forget()
        for request in self.waiting:
            request.forget_prompt()

    def restart(self) -> None:
        """Discard all cached blocks: every running request is prefilled again."""
        for row in list(self.running.values()):
            self._leave(row)
            heapq.heappush(self.waiting, row.request)
        self.forget()

    def _restart_stale(self, row: Row) -> None:
        """Prefill prompts again that were computed with older weights, so that a sample starts under one version and
        its blocks can be shared; not those of samples that have tokens already."""
        blocks = self.lanes[row.lane].blocks
        if row.chain.generation != blocks.generation and not (row.ready and row.request.started):
            blocks.leave(row.chain)
            row.chain, row.computed, row.counted = blocks.start(NOTHING, row.request.space), 0, False
            row.request.forget_prompt()

    def _make_room(self, row: Row) -> None:
        """Allocate blocks for the row's next tokens; preempts the youngest rows of its lane if there are too few."""
        blocks = self.lanes[row.lane].blocks
        blocks.narrow(row.chain, row.computed)
        while self.holds(row) and not blocks.extend(row.chain, row.positions(self.steps)):
            self._preempt(next(r for r in reversed(self.running.values()) if r.lane == row.lane))

    def _preempt(self, row: Row) -> None:
        self.counts.preemptions += 1
        self._leave(row)
        heapq.heappush(self.waiting, row.request)

    def _leave(self, row: Row) -> None:
        self.lanes[row.lane].blocks.leave(row.chain)
        self.lanes[row.lane].running -= 1
        del self.running[row.request.number]

    def _read_on(self, row: Row, budget: _Budget) -> Iterator[PromptPiece]:
        """Next prefill pieces of a prompt, after blocks that other requests have computed in the meantime."""
        if row.ready:
            return
        blocks = self.lanes[row.lane].blocks
        match = _found(blocks, row.request)
        if match.length > row.computed:
            old = row.chain
            row.chain = blocks.start(match, row.request.space)
            blocks.leave(old)
            found = (match.length - row.computed) * row.counted
            self.counts.shared_tokens += found
            row.request.num_cached += found
            row.computed, row.fresh = match.length, True
            enough = blocks.extend(row.chain, row.positions(self.steps))
            assert enough, "sharing takes no more blocks than owning"
        yield from self._pieces(row, budget)

    def _admit(self, budget: _Budget) -> Iterator[PromptPiece]:
        """Start waiting requests, oldest first, while slots and blocks last."""
        while (request := self._next()) is not None:
            place = self._place(request)
            if place is None:
                return
            self._take(request)
            lane, match = place
            blocks = self.lanes[lane].blocks
            chain = blocks.start(match, request.space)
            row = Row(request, lane, chain, match.length, counted=not request.admitted)
            enough = blocks.extend(row.chain, row.positions(self.steps))
            assert enough, "counted by `cost`"
            if row.counted:
                request.admitted, request.num_cached = True, match.length
                self.counts.prompt_tokens += row.prefix
                self.counts.shared_tokens += match.length
            self.lanes[lane].running += 1
            self.running[request.number] = row
            if request.number < self._newest:
                self.running = dict(sorted(self.running.items()))
            self._newest = max(self._newest, request.number)
            yield from self._pieces(row, budget)

    def _next(self) -> Request | None:
        """Oldest waiting request that can start now."""
        if self.admitting:
            return self.waiting[0] if self.waiting else None
        return min((request for request in self.waiting if request.started), default=None)

    def _take(self, request: Request) -> None:
        if request is self.waiting[0]:
            heapq.heappop(self.waiting)
        else:
            self.waiting.remove(request)
            heapq.heapify(self.waiting)

    def _place(self, request: Request) -> tuple[int, Match] | None:
        """Choose a lane with a free slot and enough blocks, with its match of the prompt; None if no lane has both.

        Prefers the lane with the longest cached prefix, unless it has many more rows than another.
        """
        positions = request.positions(self.steps)
        matches: list[tuple[int, Match]] = []
        for index, lane in enumerate(self.lanes):
            if lane.running < self.slots // len(self.lanes):
                match = _found(lane.blocks, request)
                if lane.blocks.cost(match, positions) <= lane.blocks.available:
                    matches.append((index, match))
        if len(matches) < 2:
            return matches[0] if matches else None
        fewest = min(self.lanes[index].running for index, _ in matches)
        near = [place for place in matches if self.lanes[place[0]].running <= fewest + SPREAD]
        return max(near, key=lambda place: (place[1].length, -self.lanes[place[0]].running))

    def _pieces(self, row: Row, budget: _Budget) -> Iterator[PromptPiece]:
        blocks, chain, level = self.lanes[row.lane].blocks, row.chain, 0
        while not row.ready and budget.left > 0:
            start, end = row.computed, row.request.piece_end(row.computed, PROMPT_CHUNK)
            first = start // BLOCK
            level = 1 + max([level, *(node.level for node in chain.nodes[:first])])
            piece = slice(first, blocks_for(end))
            blocks.widen(chain, piece.stop)
            own, own_windowed = chain.blocks[piece], chain.windowed[piece]
            blocks.record(chain, row.request.keys, end, partial=end == row.prefix, level=level)
            (_, _), (windowed, _) = chain.tables
            yield PromptPiece(
                row=row,
                start=start,
                end=end,
                level=level,
                reads=tuple(chain.blocks[:first]),
                writes=_unchanged(own, chain.blocks[piece]),
                windowed_reads=tuple(windowed[:first]),
                windowed_writes=_unchanged(own_windowed, windowed[piece]),
                nodes=tuple(chain.nodes[first:]),
            )
            row.computed = end
            budget.left -= end - start


def _unchanged(before: Sequence[int], after: Sequence[int]) -> tuple[int | None, ...]:
    return tuple(a if a == b else None for a, b in zip(before, after, strict=True))


def window_of(
    positions: int | None, *, blocks: int, slots: int, max_length: int, steps: int, whole_images: bool = False
) -> Window | None:
    """Blocks of their own of layers that read so many positions, in each lane with `slots` and `blocks`; None where
    these are no more. `whole_images`: pieces of prompts may be longer than a chunk."""
    if positions is None:
        return None
    read = min(PROMPT_TOKENS + (max_length if whole_images else PROMPT_CHUNK), slots * max_length)
    own = Window(positions, window_blocks(positions, rows=slots, steps=steps, read_at_once=read))
    return own if own.blocks < blocks else None


@dataclass
class _Budget:
    left: int


def _found(blocks: BlockPool, request: Request) -> Match:
    """Match a request against the prefix cache: its whole prefix, or full blocks of at least `MIN_SHARED` tokens."""
    if request.unscored:
        return NOTHING
    match = blocks.match(request.keys, request.position, request.space)
    if match.length == request.position:
        return match
    length = BLOCK * len(match.full)
    return Match(match.full, None, length) if length >= MIN_SHARED else NOTHING
