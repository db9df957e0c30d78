"""Prefetching: a worker thread makes the next batches of a stream while the trainer runs, up to a bound."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from copy import deepcopy
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from posttrain.batch import Batch

State = dict[str, Any]

MAX_BATCHES = 64
"""Batches that wait at most. The next window of sequences is packed while they are trained on."""
MAX_BYTES = 2**27
"""Bytes of the batches that wait at most; one is made ahead however large it is."""


@runtime_checkable
class BatchStream(Protocol):
    """Batches, and the position of the stream."""

    def __next__(self) -> Batch: ...

    def state(self) -> State: ...

    def restore(self, state: State) -> None: ...


class MeasuredStream(BatchStream, Protocol):
    """A stream that knows how long its batches were waited for."""

    def metrics(self) -> dict[str, float]: ...


class _Made(NamedTuple):
    batch: Batch
    state: State


class Prefetch:
    """The batches of `stream` in their order, made ahead in a thread that the first one starts.

    `state()` is the stream's state after the last batch taken, whatever was made since. An error of the stream is
    raised where its batch would have been taken. `close()` ends the thread.
    """

    def __init__(self, stream: BatchStream, *, max_batches: int = MAX_BATCHES, max_bytes: int = MAX_BYTES) -> None:
        self._stream, self._max_batches, self._max_bytes = stream, max_batches, max_bytes
        self._worker: _Worker | None = None
        self._error: BaseException | None = None
        self._state: State | None = None
        self._is_ahead = False
        self._waited = 0.0

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        start = time.perf_counter()
        worker = self._worker or self._start()
        if self._error is not None:
            raise self._error
        made = worker.made.get()
        self._waited += time.perf_counter() - start
        if isinstance(made, BaseException):
            self._error = made
            raise made
        worker.go_on.put(True)
        self._state = made.state
        return made.batch

    def state(self) -> State:
        return self._stream.state() if self._state is None else self._state

    def restore(self, state: State) -> None:
        self.close()
        self._stream.restore(state)
        self._state, self._is_ahead = state, False

    def close(self) -> None:
        """End the thread, and drop what was made ahead; the batch in the making is waited for."""
        worker, self._worker, self._error = self._worker, None, None
        if worker is not None:
            worker.stop()
            self._is_ahead = True

    def metrics(self) -> dict[str, float]:
        """`timing_s/data`: seconds for which batches were waited for since the last call."""
        waited, self._waited = self._waited, 0.0
        return {"timing_s/data": waited}

    def _start(self) -> _Worker:
        if self._state is None:
            self._state = deepcopy(self._stream.state())
        elif self._is_ahead:
            self._stream.restore(self._state)
        self._is_ahead = False
        self._worker = _Worker(self._stream, self._max_batches, self._max_bytes)
        return self._worker


class _Worker:
    """The thread and its queues, which the trainer's thread never waits for while a batch is there."""

    def __init__(self, stream: BatchStream, max_batches: int, max_bytes: int) -> None:
        self._stream, self._max_batches, self._max_bytes = stream, max_batches, max_bytes
        self.made: SimpleQueue[_Made | BaseException] = SimpleQueue()
        self.go_on: SimpleQueue[bool] = SimpleQueue()
        """True for each batch taken; False ends the thread."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self.go_on.put(False)
        self._thread.join()

    def _run(self) -> None:
        room = None
        while not self._stopped.is_set():
            try:
                made = _Made(next(self._stream), deepcopy(self._stream.state()))
            except BaseException as error:
                self.made.put(error)
                return
            self.made.put(made)
            # All batches of a stream have one shape.
            room = self._room(made.batch) if room is None else room
            room -= 1
            if room <= 0:
                if not self.go_on.get():
                    return
                room += 1

    def _room(self, batch: Batch) -> int:
        """Batches that may wait."""
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(batch))
        return max(1, min(self._max_batches, self._max_bytes // max(num_bytes, 1)))
