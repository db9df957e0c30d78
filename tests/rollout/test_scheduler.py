"""The scheduler's rules, without a model."""

from __future__ import annotations

import numpy as np

from posttrain.rollout.scheduler import Request, Scheduler, distinct_prefixes, row_sizes, rows_for, stop_at
from posttrain.rollout.types import SamplingParams


def request(*prompt: int, max_tokens: int = 4) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, stop_token_ids=(), key=(0, 0))
    return Request(prompt=prompt or (1,), params=params)


def test_first_come_first_served_and_no_slot_twice() -> None:
    rng = np.random.default_rng(0)
    scheduler = Scheduler(4)
    requests = [request(i) for i in range(50)]
    arriving = list(requests)
    order: list[Request] = []
    while arriving or scheduler.busy:
        for _ in range(int(rng.integers(0, 4))):
            if arriving:
                scheduler.submit(arriving.pop(0))
        order += scheduler.admit().values()
        assert len(scheduler.running) + len(scheduler.free) == 4
        assert not scheduler.waiting or not scheduler.free
        for slot in list(scheduler.running):
            if rng.random() < 0.4:
                scheduler.release(slot)
    assert order == requests
    assert scheduler.free == [0, 1, 2, 3]


def test_cancelled_requests_leave_queue_and_slots() -> None:
    scheduler = Scheduler(2)
    requests = [request(i) for i in range(4)]
    for r in requests:
        scheduler.submit(r)
    scheduler.admit()
    requests[0].future.cancel()
    requests[2].future.cancel()
    assert scheduler.admit() == {0: requests[3]}
    assert scheduler.running == {0: requests[3], 1: requests[1]}
    assert not scheduler.waiting


def test_a_finished_request_tells_its_caller_once() -> None:
    done, gone, broken = request(), request(), request()
    done.tokens += [5, 6]
    done.logps += [-1.0, -2.0]
    done.kept_logps += [0.0, 0.0]
    done.versions += [3, 4]
    done.cut(1)
    done.finish("stop")
    completion = done.future.result()
    assert (completion.tokens, completion.logps, completion.weights_versions) == ((5,), (-1.0,), (3,))
    gone.future.cancel()
    gone.finish("length")
    assert gone.future.cancelled()
    broken.fail(RuntimeError("device"))
    assert isinstance(broken.future.exception(), RuntimeError)


def test_batch_sizes_hold_what_runs() -> None:
    for slots in (1, 6, 32, 256):
        sizes = row_sizes(slots)
        for running in range(1, slots + 1):
            rows = rows_for(sizes, running)
            assert running <= rows <= slots
            # With nothing waiting, at least one token is sampled, and the pause comes where a smaller batch will do.
            pause = stop_at(sizes, rows, waiting=False)
            assert pause < running
            assert pause == 0 or pause in sizes
        assert 0 <= stop_at(sizes, slots, waiting=True) < slots


def test_equal_prompts_are_prefilled_once() -> None:
    admitted = {0: request(1, 2, 3), 1: request(1, 2, 4), 2: request(9), 3: request(5, 6), 4: request(1, 2, 3)}
    assert list(distinct_prefixes(admitted)) == [((1, 2), [0, 1, 4]), ((5,), [3])]
