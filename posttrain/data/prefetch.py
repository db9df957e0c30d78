"""Reading ahead: the next batch of a stream is made in a thread while the last one is trained on."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from typing import Any, Protocol, runtime_checkable

from posttrain.batch import Batch

State = dict[str, Any]


@runtime_checkable
class BatchStream(Protocol):
    """Batches, and where the stream stands."""

    def __next__(self) -> Batch: ...

    def state(self) -> State: ...

    def restore(self, state: State) -> None: ...


class Ahead:
    """The same batches as `stream`, one of them ahead; its state is that after the last batch that was taken."""

    def __init__(self, stream: BatchStream):
        self._stream, self._pool = stream, ThreadPoolExecutor(max_workers=1)
        self._state: State | None = None
        self._next: Future[tuple[Batch, State]] | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        made = self._next or self._pool.submit(self._make)
        batch, self._state = made.result()
        self._next = self._pool.submit(self._make)
        return batch

    def state(self) -> State:
        return self._stream.state() if self._state is None else self._state

    def restore(self, state: State) -> None:
        if self._next is not None:
            self._next.result()
        self._next = None
        self._state = state
        self._stream.restore(state)

    def close(self) -> None:
        """Without waiting for what nobody takes."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _make(self) -> tuple[Batch, State]:
        batch = next(self._stream)
        return batch, deepcopy(self._stream.state())
