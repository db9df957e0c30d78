"""Prefetching: a worker thread makes the next batches of a stream while the trainer runs, up to a bound."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from posttrain.batch import Batch
from posttrain.runtime import processes
from posttrain.runtime.profiler import span

State = dict[str, Any]

MAX_BATCHES = 64
"""Maximum number of prefetched batches. The next window of sequences is packed while they are trained on."""
MAX_BYTES = 2**27
"""Maximum bytes of prefetched batches; at least one is prefetched regardless of size."""


@runtime_checkable
class BatchStream(Protocol):
    """Interface of a stream of batches with a resumable position."""

    def __next__(self) -> Batch: ...

    def state(self) -> State: ...

    def restore(self, state: State) -> None: ...


class MeasuredStream(BatchStream, Protocol):
    """Interface of a stream that measures the time spent waiting for its batches."""

    def metrics(self) -> dict[str, float]: ...


class _Made(NamedTuple):
    """Prefetched batch with the stream's state after it."""

    batch: Batch
    state: State


class _Begun(NamedTuple):
    """Batch on which work was begun, with the stream's state after it."""

    finish: Callable[[], Batch]
    state: State


Begin = Callable[[Batch], Callable[[], Batch]]
"""Function that begins work on a batch, and returns one that waits for it and returns the batch with its result."""


class Prefetch:
    """Prefetch the batches of `stream`, in order, in a thread that starts with the first one.

    `begin` is called in the caller's thread, with each batch before the one before it is returned if it is there by
    then, of several processes always, which begin in one order. `more` tells whether a batch will be taken after the
    one that is returned; none is begun without. `state()` is the stream's state after the last batch taken, regardless
    of prefetched ones. An error of the stream is raised in place of its batch. `close()` ends the thread.
    """

    def __init__(
        self,
        stream: BatchStream,
        *,
        begin: Begin | None = None,
        more: Callable[[], bool] = lambda: True,
        max_batches: int = MAX_BATCHES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._stream, self._max_batches, self._max_bytes = stream, max_batches, max_bytes
        self._begin, self._more = begin, more
        self._begun: _Begun | BaseException | None = None
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
        if self._error is not None:
            raise self._error
        if self._begin is None:
            batch, self._state = self._take()
            return batch
        begun = self._started(self._begin) if self._begun is None else self._begun
        if isinstance(begun, BaseException):
            self._error = begun
            raise begun
        batch, self._state = begun.finish(), begun.state
        self._begun = self._started(self._begin) if self._more() and self._is_there() else None
        return batch

    def _is_there(self) -> bool:
        """True if the next batch can be begun without waiting for it, or has to be."""
        return processes.count() > 1 or (self._worker is not None and not self._worker.made.empty())

    def _take(self) -> _Made:
        """Wait for the next batch. Raises the stream's error in place of one."""
        start = time.perf_counter()
        worker = self._worker or self._start()
        with span("data"):
            item = worker.made.get()
        self._waited += time.perf_counter() - start
        if isinstance(item, BaseException):
            self._error = item
            raise item
        worker.consumed.put(True)
        return item

    def _started(self, begin: Begin) -> _Begun | BaseException:
        """Begin work on the next batch; the error in place of one."""
        try:
            made = self._take()
            return _Begun(begin(made.batch), made.state)
        except Exception as error:
            self._error = None
            return error

    def state(self) -> State:
        return self._stream.state() if self._state is None else self._state

    def restore(self, state: State) -> None:
        self.close()
        self._stream.restore(state)
        self._state, self._is_ahead = state, False

    def close(self) -> None:
        """End the thread, waiting for the batch in progress, and drop prefetched batches."""
        worker, self._worker, self._error, self._begun = self._worker, None, None, None
        if worker is not None:
            worker.stop()
            self._is_ahead = True

    def metrics(self) -> dict[str, float]:
        """Metric `timing_s/data`: seconds spent waiting for batches since the last call."""
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
    """Worker thread with its queues, on which the trainer's thread blocks only if no batch is ready."""

    def __init__(self, stream: BatchStream, max_batches: int, max_bytes: int) -> None:
        self._stream, self._max_batches, self._max_bytes = stream, max_batches, max_bytes
        self.made: SimpleQueue[_Made | BaseException] = SimpleQueue()
        self.consumed: SimpleQueue[bool] = SimpleQueue()
        """Signals of the consumer: True for each batch taken, False to end the thread."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self.consumed.put(False)
        self._thread.join()

    def _run(self) -> None:
        room = most = self._max_batches
        while not self._stopped.is_set():
            try:
                item = _Made(next(self._stream), deepcopy(self._stream.state()))
            except BaseException as error:
                self.made.put(error)
                return
            self.made.put(item)
            # Batches with pictures are larger than those without.
            fewer = min(most, self._room(item.batch))
            room, most = room - (most - fewer) - 1, fewer
            while room <= 0:
                if not self.consumed.get():
                    return
                room += 1

    def _room(self, batch: Batch) -> int:
        """Maximum number of prefetched batches of this size."""
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(batch))
        return max(1, min(self._max_batches, self._max_bytes // max(num_bytes, 1)))
