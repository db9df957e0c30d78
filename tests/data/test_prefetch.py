"""Prefetching: the same batches and states at any speed, errors where they belong, a bound, and no thread left."""

from __future__ import annotations

import copy
import itertools
import json
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from posttrain.batch import Batch
from posttrain.data.image_rows import bad_image_metrics
from posttrain.data.pipeline import SFTBatches, make_batches
from posttrain.data.prefetch import Begin, Prefetch
from posttrain.data.sources import picked
from tests.data.test_images import CASES, drawn, png, tokenizer_of


class Counting:
    """Batches of one number each; `breaks_at` cannot be made, and each takes `seconds`."""

    def __init__(self, *, breaks_at: int | None = None, seconds: float = 0.0) -> None:
        self.next, self.breaks_at, self.seconds = 0, breaks_at, seconds

    def __next__(self) -> Batch:
        if self.next == self.breaks_at:
            raise ValueError(f"no batch {self.next}")
        time.sleep(self.seconds)
        tokens = np.full((1, 4), self.next, np.int32)
        self.next += 1
        return Batch(tokens=tokens, positions=tokens, segments=tokens, loss_weight=tokens.astype(np.float32))

    def state(self) -> dict[str, Any]:
        return {"next": self.next}

    def restore(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


NUM_BYTES = 4 * 16
"""Of one batch."""


def number(batch: Batch) -> int:
    return int(batch.tokens[0, 0])


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def made(stream: Counting, expected: int) -> int:
    """How many batches are made, when no more come."""
    end = time.monotonic() + 5
    while stream.next < expected and time.monotonic() < end:
        time.sleep(0.002)
    time.sleep(0.03)
    return stream.next


either = pytest.mark.parametrize("begin", [None, lambda batch: lambda: batch], ids=["plain", "begun"])


@either
@pytest.mark.parametrize(("maker", "trainer"), [(0.0, 0.004), (0.004, 0.0)])
def test_the_state_is_that_of_the_batch_that_was_taken(maker: float, trainer: float, begin: Begin | None) -> None:
    with Prefetch(Counting(seconds=maker), begin=begin, max_batches=4) as batches:
        states = []
        for step in range(6):
            states.append(json.dumps(batches.state()))
            assert number(next(batches)) == step
            time.sleep(trainer)
        for step in (2, 5, 0):
            batches.restore(json.loads(states[step]))
            assert json.dumps(batches.state()) == states[step]
            assert [number(next(batches)) for _ in range(3)] == [step, step + 1, step + 2]


@pytest.mark.parametrize(
    ("limits", "waiting"),
    [({"max_batches": 3}, 3), ({"max_bytes": 2 * NUM_BYTES}, 2), ({"max_bytes": 1}, 1), ({"max_batches": 1}, 1)],
)
def test_what_waits_is_bounded(limits: dict[str, int], waiting: int) -> None:
    stream = Counting()
    with Prefetch(stream, **limits) as batches:
        for taken in range(1, 4):
            next(batches)
            assert made(stream, taken + waiting) == taken + waiting


def begun_in(seen: list[str]) -> Begin:
    def begin(batch: Batch) -> Callable[[], Batch]:
        seen.append(f"begin {number(batch)}")
        return lambda: seen.append(f"finish {number(batch)}") or batch  # type: ignore[func-returns-value]

    return begin


def test_a_batch_is_begun_before_the_one_before_it_is_used() -> None:
    """But for the last, after which none is, and where the batch is not there yet."""
    seen: list[str] = []
    stream = Counting()
    with Prefetch(stream, begin=begun_in(seen), more=lambda: not any("2" in line for line in seen)) as batches:
        for _ in range(3):
            batches._worker = batches._worker or batches._start()
            made(stream, 4)
            seen.append(f"use {number(next(batches))}")
        assert seen == ["begin 0", "finish 0", "begin 1", "use 0", "finish 1", "begin 2", "use 1", "finish 2", "use 2"]
        del seen[:]
        batches.restore({"next": 1})
        assert number(next(batches)) == 1 and seen[:2] == ["begin 1", "finish 1"]


def test_no_batch_is_waited_for_but_the_one_that_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes late is begun when it is asked for; of several processes all begin the same ones."""
    for processes, begun in ((1, []), (2, ["begin 1"])):
        seen: list[str] = []
        monkeypatch.setattr("posttrain.runtime.processes.count", lambda number=processes: number)
        with Prefetch(Counting(seconds=0.1), begin=begun_in(seen)) as batches:
            assert number(next(batches)) == 0 and seen == ["begin 0", "finish 0", *begun]
            assert number(next(batches)) == 1 and seen[2:4] == ["begin 1", "finish 1"]


@either
def test_an_error_is_raised_where_its_batch_would_have_been(begin: Begin | None) -> None:
    with Prefetch(Counting(breaks_at=2), begin=begin) as batches:
        assert [number(next(batches)), number(next(batches))] == [0, 1]
        for _ in range(2):
            with pytest.raises(ValueError, match="no batch 2"):
                next(batches)
        assert batches.state() == {"next": 2}
        batches.restore({"next": 3})
        assert number(next(batches)) == 3


@either
def test_a_closed_stream_leaves_no_thread_and_goes_on_where_it_was(begin: Begin | None) -> None:
    before = threads()
    batches = Prefetch(Counting(), begin=begin)
    batches.close()
    assert threads() == before
    assert [number(next(batches)) for _ in range(2)] == [0, 1]
    assert len(threads()) == len(before) + 1
    batches.close()
    batches.close()
    assert threads() == before and batches.state() == {"next": 2}
    with batches:
        assert number(next(batches)) == 2
    assert threads() == before


def test_the_wait_for_batches_is_measured() -> None:
    with Prefetch(Counting(seconds=0.05), max_batches=1) as batches:
        next(batches)
        assert batches.metrics()["timing_s/data"] >= 0.05
        time.sleep(0.2)
        before = time.perf_counter()
        next(batches)
        assert batches.metrics()["timing_s/data"] < time.perf_counter() - before, "what came between is no wait"
        assert batches.metrics() == {"timing_s/data": 0.0}


def test_rows_left_out_are_counted_up_to_the_batch_that_is_taken() -> None:
    """Whatever is prefetched, and in a resumed run as in one that was never stopped."""
    tokenizer = tokenizer_of()
    messages = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Here."}]
    rows: list[dict[str, Any]] = [{"messages": messages} for _ in range(160)]
    bad = [index for index in range(160) if index not in picked(160)][::12]
    for index, held in zip(bad, itertools.cycle((b"no picture", png(drawn(0))[:-40])), strict=False):
        rows[index] = {"messages": CASES["one"], "images": [held]}

    def made() -> Prefetch:
        sizes: dict[str, Any] = {"row_tokens": 512, "batch_rows": 8, "packing": False}
        stream = make_batches(copy.deepcopy(rows), tokenizer, seed=3, on_bad_image="drop", **sizes)
        return Prefetch(cast(SFTBatches, stream))

    def counts(batches: Prefetch, number: int) -> list[float]:
        return [bad_image_metrics(batches.state())["data/bad_images"] for _ in itertools.islice(batches, number)]

    with made() as whole, made() as stopped, made() as resumed:
        expected = counts(whole, 24)
        assert len(set(expected)) > 4 and expected[-1] == len(bad) and expected == sorted(expected)
        assert counts(stopped, 9) == expected[:9]
        resumed.restore(json.loads(json.dumps(stopped.state())))
        assert counts(resumed, 15) == expected[9:]
