"""The scheduler's rules over random schedules, with a simulated device that keeps the content of every block."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.rollout import scheduler as scheduling
from posttrain.rollout.blocks import BLOCK, Window, blocks_for, window_blocks
from posttrain.rollout.request import Request
from posttrain.rollout.scheduler import PROMPT_CHUNK, PROMPT_TOKENS, Plan, Row, Scheduler
from posttrain.rollout.types import SamplingParams

pytestmark = pytest.mark.fast

LONGEST = 200


def request(prompt: Sequence[int], max_tokens: int = 4, sample: int = 0) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, stop_token_ids=(), key=(0, sample))
    return Request(prompt=tuple(prompt), params=params)


def scheduler(
    *, slots: int = 4, lanes: int = 1, blocks: int = 60, steps: int = 8, window: Window | None = None
) -> Scheduler:
    return Scheduler(slots=slots, lanes=lanes, blocks=blocks, max_length=LONGEST, steps=steps, window=window)


class Device:
    """Holds in each block the tokens whose keys and values a real one would: a position is what was read up to it."""

    def __init__(self, scheduler: Scheduler, window: int = 0):
        self.scheduler, self.window = scheduler, window
        shape = (lane.blocks.number for lane in scheduler.lanes)
        self.content: list[dict[tuple[int, int], Any]] = [{} for _ in shape]
        self.windowed: list[dict[tuple[int, int], Any]] = [{} for _ in scheduler.lanes]
        """Of layers with a window, a place in the history before the token: their blocks serve many."""
        self.read: dict[int, int] = {}
        """Prompt tokens read for each request."""

    def run(self, plan: Plan, tokens: Any) -> list[Row]:
        """Carries the plan out; `tokens(request)` samples. The rows that are done."""
        levels = sorted({piece.level for piece in plan.pieces})
        for level in levels:
            self._read([piece for piece in plan.pieces if piece.level == level])
        ended = []
        for row in plan.decode:
            self._check(row)
        for row in plan.decode:
            if self._decode(row, tokens):
                ended.append(row)
        self.scheduler.settle(plan)
        return ended

    def _read(self, pieces: Sequence[Any]) -> None:
        found = [self._context(p.row.lane, p.reads, p.start) for p in pieces]
        for piece in pieces:
            self._check_window(piece.row, piece.windowed_reads, piece.start)
        for piece, context in zip(pieces, found, strict=True):
            history = list(piece.row.request.history)
            assert context == history[: piece.start]
            assert piece.start % BLOCK == 0 and piece.end - piece.start <= PROMPT_CHUNK
            self.read[piece.row.request.number] = self.read.get(piece.row.request.number, 0) + piece.end - piece.start
            for index, block in enumerate(piece.writes):
                if block is not None:
                    self._write(piece.row, block, history, piece.start + index * BLOCK, piece.end)
            for index, number in enumerate(piece.windowed_writes):
                if number is not None:
                    self._write_window(piece.row, number, history, piece.start + index * BLOCK, piece.end)

    def _write_window(self, row: Row, number: int, history: list[int], start: int, end: int) -> None:
        for position in range(start, min(start + BLOCK, end)):
            self.windowed[row.lane][number, position % BLOCK] = position, history[position]

    def _check_window(self, row: Row, numbers: Sequence[int], length: int) -> None:
        """All that a query at position `length` or later reads is there."""
        if (pool := self.scheduler.lanes[row.lane].blocks.windows) is None:
            return
        assert len({n for n in numbers if n >= 0} | {0}) == len({*numbers, 0}), "no table has a place without a block"
        for position in range(max(0, length - self.window + 1), length):
            held = self.windowed[row.lane].get((numbers[position // BLOCK], position % BLOCK))
            assert held == (position, row.request.history[position]), pool

    def _context(self, lane: int, blocks: Sequence[int], length: int) -> list[int]:
        return [self.content[lane].get((blocks[p // BLOCK], p % BLOCK)) for p in range(length)]

    def _write(self, row: Row, block: int, history: list[int], start: int, end: int) -> None:
        for position in range(start, min(start + BLOCK, end)):
            self.content[row.lane][block, position % BLOCK] = history[position]

    def _check(self, row: Row) -> None:
        blocks = list(row.chain.blocks)
        if row.chain.source is not None:
            blocks[row.prefix // BLOCK] = row.chain.source.block
        assert self._context(row.lane, blocks, row.prefix) == list(row.request.history[: row.prefix])
        _, (numbers, source) = row.chain.tables
        numbers = list(numbers)
        if source is not None and numbers:
            numbers[row.prefix // BLOCK] = source
        self._check_window(row, numbers, row.prefix)

    def _decode(self, row: Row, tokens: Any) -> bool:
        start, r = row.prefix, row.request
        new = tokens(r)[: min(self.scheduler.steps, r.params.max_tokens - len(r.tokens))]
        r.tokens.extend(new)
        r.logps.extend([0.0] * len(new))
        r.kept_logps.extend([0.0] * len(new))
        r.truncation_logps.extend([0.0] * len(new))
        r.versions.extend([0] * len(new))
        first = start // BLOCK * BLOCK
        for position in range(first, r.position, BLOCK):
            block = row.chain.blocks[position // BLOCK]
            others = [q for q in self.scheduler.running.values() if q is not row and q.lane == row.lane]
            assert all(block not in q.chain.blocks for q in others), "written blocks have one owner"
            self._write(row, block, list(r.history), position, r.position)
            if self.window:
                number = row.chain.windowed[position // BLOCK]
                held = [q.chain.windowed[q.chain.first :] for q in others]
                assert all(number not in numbers for numbers in held), "written numbers have one owner"
                # A row that continues in a copy has the beginning of its source.
                self._write_window(row, number, list(r.history), position, r.position)
        return len(r.tokens) == r.params.max_tokens


def check(scheduler: Scheduler) -> None:
    """No block is lost or used by somebody who is not there."""
    for index, lane in enumerate(scheduler.lanes):
        rows = [row for row in scheduler.running.values() if row.lane == index]
        assert lane.running == len(rows) <= scheduler.slots // len(scheduler.lanes)
        held = {block for row in rows for block in row.chain.blocks}
        held |= {row.chain.source.block for row in rows if row.chain.source is not None}
        assert lane.blocks.used == len(held)
        if (windows := lane.blocks.windows) is not None:
            numbers = [number for number in windows.numbers if number >= 0]
            assert len(numbers) == len({*numbers}) and not {*numbers} & {*windows._free}
            wanted = {block for row in rows for block in row.chain.blocks[row.chain.first : len(row.chain.windowed)]}
            wanted |= {row.chain.source.block for row in rows if row.chain.source is not None}
            assert all(windows.numbers[block] >= 0 for block in wanted)
            assert {block for block, users in enumerate(windows._users) if users} == wanted
    numbers = list(scheduler.running)
    assert numbers == sorted(numbers)


@st.composite
def schedules(draw: Any) -> dict[str, Any]:
    beginnings = draw(st.lists(st.integers(0, 90), min_size=1, max_size=4))
    sizes = st.tuples(st.sampled_from(beginnings), st.integers(1, 40), st.integers(1, 60), st.integers(0, 3))
    lanes = draw(st.sampled_from([1, 1, 2]))
    return {
        "lanes": lanes,
        "slots": lanes * draw(st.integers(1, 5)),
        "blocks": blocks_for(LONGEST) + 1 + draw(st.integers(0, 30)),
        "steps": draw(st.integers(1, 20)),
        "sizes": draw(st.lists(sizes, min_size=1, max_size=24)),
        "seed": draw(st.integers(0, 2**16)),
        "vocabulary": draw(st.sampled_from([1, 2, 500])),
        "window": draw(st.sampled_from([0, 1, 7, 16, 33, 90])),
    }


@given(schedules())
def test_any_schedule(schedule: dict[str, Any]) -> None:
    """Random arrivals, shared prompts, little memory, cancellations, new weights: every block holds what its reader
    expects, everybody else ends, in fair order, and all blocks come back."""
    tokens, chunk = (32, 32) if schedule["window"] else (PROMPT_TOKENS, PROMPT_CHUNK)
    with patch.multiple(scheduling, PROMPT_TOKENS=tokens, PROMPT_CHUNK=chunk):
        run_schedule(schedule)


def run_schedule(schedule: dict[str, Any]) -> None:
    rng, positions = np.random.default_rng(schedule["seed"]), schedule["window"]
    per_lane = schedule["slots"] // schedule["lanes"]
    # As few blocks as there may be: a plan reads prompts of 31 and a piece more at most.
    own = window_blocks(positions, rows=per_lane, steps=schedule["steps"], read_at_once=31 + 32)
    window = Window(positions, own) if positions else None
    s = scheduler(window=window, **{name: schedule[name] for name in ("slots", "lanes", "blocks", "steps")})
    device = Device(s, positions)
    arriving = []
    for number, (beginning, own, max_tokens, group) in enumerate(schedule["sizes"]):
        prompt = [*range(1000, 1000 + beginning), *rng.integers(0, schedule["vocabulary"], own).tolist()]
        arriving += [request(prompt, max_tokens, number + i) for i in range(group + 1)]
    everybody, cancelled, started = list(arriving), set(), []
    ended: list[Request] = []
    dispatches = 0
    while arriving or s.busy:
        for _ in range(int(rng.integers(0, 6))):
            if arriving:
                s.submit(arriving.pop(0))
        if rng.random() < 0.05 and (victims := list(s.requests())):
            victim = victims[int(rng.integers(len(victims)))]
            victim.future.cancel()
            cancelled.add(victim)
        if rng.random() < 0.05:
            s.forget()
        plan = s.plan()
        check(s)
        if plan is None:
            assert not s.busy
            continue
        started += [row.request for row in s.running.values() if row.request not in started]
        for row in device.run(plan, lambda r: rng.integers(0, schedule["vocabulary"], s.steps).tolist()):
            s.release(row)
            ended.append(row.request)
        check(s)
        dispatches += 1
        assert dispatches < 3000, "no progress"
    # A cancelled one may have been done by then.
    assert set(everybody) - cancelled <= set(ended) and len(ended) == len(set(ended))
    assert [r.number for r in started if r.tokens] == sorted(r.number for r in started if r.tokens) or s.lanes[1:]
    assert all(lane.blocks.used == 0 and lane.running == 0 for lane in s.lanes)
    assert s.num_free == s.slots
    assert s.may_preempt or s.counts.preemptions == 0


def tokens(r: Request) -> list[int]:
    return [7000 + r.number] * 64


def run_all(device: Device, *requests: Request) -> dict[int, int]:
    """Prompt tokens read for each."""
    s = device.scheduler
    for r in requests:
        s.submit(r)
    while (plan := s.plan()) is not None:
        for row in device.run(plan, tokens):
            s.release(row)
    return {r.number: device.read[r.number] for r in requests if r.number in device.read}


@pytest.mark.parametrize("slots", [2, 8])
def test_the_prompt_of_a_group_is_read_once(slots: int) -> None:
    s = scheduler(slots=slots, blocks=120)
    group = [request(range(150), 4, i) for i in range(8)]
    assert run_all(Device(s), *group) == {0: 149}
    assert s.counts.shared_tokens == 7 * 149 and s.counts.prompt_tokens == 8 * 149


def test_prompts_longer_than_a_plan_are_read_by_those_who_share_them_together() -> None:
    s = Scheduler(slots=4, lanes=1, blocks=2000, max_length=6000, steps=8)
    group = [request(range(5001), 4, i) for i in range(4)]
    assert sum(run_all(Device(s), *group).values()) == 5000


def test_a_later_turn_reads_what_is_new() -> None:
    device = Device(scheduler())
    first = request(range(70), 20)
    run_all(device, first)
    # 89 positions were read, of which 80 are whole blocks.
    assert run_all(device, request([*first.history, *range(30)], 4)) == {1: 119 - 80}


def test_short_common_beginnings_are_not_worth_another_program() -> None:
    device = Device(scheduler())
    assert run_all(device, *(request([*range(40), i, i + 1]) for i in range(3))) == {0: 41, 1: 41, 2: 41}


def test_new_weights_end_the_sharing() -> None:
    device = Device(scheduler())
    run_all(device, request(range(100)))
    assert run_all(device, request(range(100))) == {}
    device.scheduler.forget()
    assert run_all(device, request(range(100))) == {2: 99}


def test_who_wants_its_prompt_scored_reads_all_of_it() -> None:
    device = Device(scheduler())
    run_all(device, request(range(100)))
    scored = request(range(100))
    params = SamplingParams(max_tokens=4, temperature=1.0, stop_token_ids=(), key=(0, 0), prompt_logps=True)
    scored.params = params
    assert run_all(device, scored) == {1: 99}


def streamed(tokens: Sequence[int], new: int) -> Request:
    """A request whose tokens someone waits for."""
    made = request(tokens, new)
    made.on_tokens = lambda new: None
    return made


def test_long_prompts_do_not_hold_up_streams() -> None:
    """A long prompt is read in pieces, a few tokens of everybody between them."""
    s = Scheduler(slots=4, lanes=1, blocks=4000, max_length=20_000, steps=8)
    device = Device(s)
    early = [streamed([i, i, i], 100) for i in range(3)]
    for r in early:
        s.submit(r)
    device.run(s.plan(), tokens)
    s.submit(request(range(9000), 4))
    plans = 0
    while not s.running or len(s.running) < 4 or not s.running[3].ready:
        plan = s.plan()
        assert plan is not None and {row.request for row in plan.decode} >= set(early)
        assert sum(piece.end - piece.start for piece in plan.pieces) <= PROMPT_TOKENS
        device.run(plan, tokens)
        plans += 1
    assert plans == 5


def test_the_youngest_gives_way_and_comes_back_in_its_old_place() -> None:
    s = scheduler(slots=3, blocks=blocks_for(LONGEST) + 1, steps=16)
    requests = [request([i] * 60, 100) for i in range(4)]
    device = Device(s)
    for r in requests:
        s.submit(r)
    order: list[int] = []
    while (plan := s.plan()) is not None:
        assert 0 in s.running or requests[0].number in order
        for row in device.run(plan, tokens):
            s.release(row)
            order.append(row.request.number)
    assert order == [0, 1, 2, 3]
    assert s.counts.preemptions > 0
    assert all(len(r.tokens) == 100 for r in requests)
    # What a request finds of itself when it comes back is nothing shared.
    assert (s.counts.shared_tokens, s.counts.prompt_tokens) == (0, 4 * 59)


def test_nothing_new_starts_while_draining() -> None:
    s = scheduler(slots=2)
    device = Device(s)
    requests = [request([i, i], 20) for i in range(4)]
    for r in requests:
        s.submit(r)
    device.run(s.plan(), tokens)
    s.admitting = False
    assert not s.drained
    while (plan := s.plan()) is not None:
        for row in device.run(plan, tokens):
            s.release(row)
    assert s.drained and [len(r.tokens) for r in requests] == [20, 20, 0, 0]
    s.admitting = True
    assert s.plan() is not None


def test_draining_ends_what_has_begun_behind_those_who_have_not() -> None:
    """In the queue: one that gave its slot up before its first token, then a new one, then two with tokens."""
    s = scheduler(slots=1)
    device = Device(s)
    requests = [request([i] * 30, 20) for i in range(4)]
    for r in requests[2:]:
        r.tokens.extend([5, 6, 7])
    for r in requests:
        s.submit(r)
    s.admitting = False
    assert not s.drained
    ended = []
    while (plan := s.plan()) is not None:
        assert not s.drained
        for row in device.run(plan, tokens):
            s.release(row)
            ended.append(row.request)
    assert s.drained and ended == requests[2:] and s.waiting == requests[:2]


def test_a_stream_waits_for_one_plan_at_most() -> None:
    s = Scheduler(slots=4, lanes=1, blocks=4000, max_length=31_000, steps=8)
    device = Device(s)
    early = streamed([1, 2, 3], 500)
    s.submit(early)
    device.run(s.plan(), tokens)
    for i in range(2):
        s.submit(request([i, *range(30_000)], 4))
    deferred = []
    while not all(row.ready for row in s.running.values()) or len(s.running) < 3:
        plan = s.plan()
        deferred.append(not plan.decode)
        device.run(plan, tokens)
    assert len(deferred) > 25 and deferred.count(True) > 5
    assert not any(a and b for a, b in pairwise(deferred))


def test_without_streams_all_prompts_are_read_before_any_decodes() -> None:
    """So that no dispatch decodes a part of a batch: 8 prompts are 4 plans, 64 tokens of each 8 dispatches."""
    s = Scheduler(slots=8, lanes=1, blocks=2000, max_length=1100, steps=8)
    device = Device(s)
    for i in range(8):
        s.submit(request([i, *range(1024)], 64))
    counts = []
    while (plan := s.plan()) is not None:
        counts.append(len(plan.decode))
        for row in device.run(plan, tokens):
            s.release(row)
    assert counts == [0, 0, 0, *[8] * 8]


def test_a_prompt_read_under_old_weights_is_read_anew_unless_its_sample_has_begun() -> None:
    device = Device(s := scheduler())
    begun, deferred = request(range(50), 60), request(range(100, 150), 60)
    s.submit(begun)
    device.run(s.plan(), tokens)
    s.submit(deferred)
    plan = s.plan()
    # As when its first token waits for other prompts: it is read, and has no token.
    device.run(replace(plan, decode=[row for row in plan.decode if row.request is begun]), tokens)
    s.forget()
    plan = s.plan()
    assert [(piece.row.request, piece.start, piece.end) for piece in plan.pieces] == [(deferred, 0, 49)]
    assert device.run(plan, tokens) == [] and s.take_counts().shared_tokens == 0


def test_a_cancelled_request_is_gone_at_once() -> None:
    device = Device(s := scheduler(slots=2))
    requests = [request([i] * 40, 20) for i in range(4)]
    for r in requests:
        s.submit(r)
    plan = s.plan()
    for r in requests[1:3]:  # one in a slot and one in the queue, while the plan is carried out
        r.future.cancel()
        check(s)
    assert (s.num_free, s.waiting) == (1, [requests[3]])
    device.run(replace(plan, decode=list(filter(s.holds, plan.decode))), tokens)
    assert len(requests[0].tokens) == 8
    assert {row.request for row in s.plan().decode} == {requests[0], requests[3]}


def test_a_group_stays_in_one_lane_until_others_are_idle() -> None:
    s = scheduler(slots=32, lanes=2, blocks=120)
    for prompt in range(2):
        for i in range(16):
            s.submit(request([*range(prompt, prompt + 100)], 4, i))
    assert s.plan() is not None
    lanes = [{row.lane for row in s.running.values() if row.request.prompt[0] == prompt} for prompt in range(2)]
    assert [lane.running for lane in s.lanes] == [16, 16]
    assert sum(map(len, lanes)) <= 4


def test_a_cache_that_holds_no_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="a cache of 208 tokens holds no sequence of max_length=200; it needs 224"):
        scheduler(blocks=13)


def test_a_finished_request_tells_its_caller_once() -> None:
    done, gone, broken = request([1]), request([1]), request([1])
    done.tokens.extend([5, 6])
    done.logps.extend([-1.0, -2.0])
    done.kept_logps.extend([0.0, 0.0])
    done.truncation_logps.extend([0.0, 0.0])
    done.versions.extend([3, 4])
    done.cut(1)
    done.finish("stop")
    completion = done.future.result()
    assert (completion.tokens, completion.logps, completion.weights_versions) == ((5,), (-1.0,), (3,))
    gone.future.cancel()
    gone.finish("length")
    assert gone.future.cancelled() and isinstance(gone.future, Future)
    broken.fail(RuntimeError("device"))
    assert isinstance(broken.future.exception(), RuntimeError)
