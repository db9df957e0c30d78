"""Which request decodes in which slot: first come, first served. Plain Python, no device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from posttrain.rollout.types import Completion, SamplingParams, StopReason, TokenLogp

ROWS_STEP = 4
MIN_ROWS = 8
"""A tail of few samples is decoded in slots / 4, slots / 16, ... rows, not below 8: each size is one more program."""


@dataclass(eq=False, kw_only=True)
class Request:
    """A prompt, and what has been sampled after it so far."""

    prompt: tuple[int, ...]
    params: SamplingParams
    future: Future[Completion] = field(default_factory=Future)
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    kept_logps: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_logps: list[tuple[TokenLogp, ...]] = field(default_factory=list)
    prompt_logps: tuple[float, ...] = (0.0,)
    experts: list[np.ndarray] = field(default_factory=list)
    """Of an engine that records them: [tokens, M, k] of each call that read tokens, in order."""

    @property
    def end(self) -> int:
        """Positions that the whole sample may take."""
        return len(self.prompt) + self.params.max_tokens

    @property
    def position(self) -> int:
        """Position of the newest token, which is the next input of the model."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def newest(self) -> int:
        return self.tokens[-1] if self.tokens else self.prompt[-1]

    def cut(self, length: int) -> None:
        """Drop the tokens after the first `length`."""
        for values in (self.tokens, self.logps, self.kept_logps, self.versions, self.top_logps):
            del values[length:]

    def finish(self, stop: StopReason) -> None:
        """Hand the completion over, unless the caller has gone."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(
                Completion(
                    tokens=tuple(self.tokens),
                    logps=tuple(self.logps),
                    kept_logps=tuple(self.kept_logps),
                    stop=stop,
                    weights_versions=tuple(self.versions),
                    experts=self._all_experts(),
                    top_logps=tuple(self.top_logps) if self.params.top_logps else None,
                    prompt_logps=self.prompt_logps if self.params.prompt_logps else None,
                )
            )

    def _all_experts(self) -> np.ndarray | None:
        if not self.experts:
            return None
        read = np.concatenate(self.experts)[: self.position]
        unread = len(self.prompt) + len(self.tokens) - len(read)
        return np.pad(read, ((0, unread), (0, 0), (0, 0)), constant_values=-1)

    def fail(self, error: BaseException) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class Scheduler:
    """A queue in order of arrival, and slots that hold one running request each."""

    def __init__(self, slots: int):
        self.slots = slots
        self.running: dict[int, Request] = {}
        self.waiting: deque[Request] = deque()

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def free(self) -> list[int]:
        return [slot for slot in range(self.slots) if slot not in self.running]

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def admit(self) -> dict[int, Request]:
        """Move waiting requests, oldest first, into free slots, lowest first. Cancelled ones drop out."""
        self.running = {slot: request for slot, request in self.running.items() if not request.future.cancelled()}
        admitted: dict[int, Request] = {}
        for slot in self.free:
            while self.waiting and self.waiting[0].future.cancelled():
                self.waiting.popleft()
            if not self.waiting:
                break
            admitted[slot] = self.waiting.popleft()
        self.running |= admitted
        return admitted

    def release(self, slot: int) -> None:
        del self.running[slot]

    def drain(self) -> list[Request]:
        """Forget everything; what was running and waiting, in that order."""
        requests = [*self.running.values(), *self.waiting]
        self.running.clear()
        self.waiting.clear()
        return requests


def row_sizes(slots: int) -> list[int]:
    """Batch sizes that decoding may use, falling: all slots, a quarter of them, ...

    >>> row_sizes(256), row_sizes(6)
    ([256, 64, 16], [6])
    """
    sizes = [slots]
    while sizes[-1] // ROWS_STEP >= MIN_ROWS:
        sizes.append(sizes[-1] // ROWS_STEP)
    return sizes


def rows_for(sizes: Sequence[int], running: int) -> int:
    """The smallest batch size that holds all running requests."""
    return min(size for size in sizes if size >= running)


def stop_at(sizes: Sequence[int], rows: int, waiting: bool) -> int:
    """Number of active rows at which decoding pauses before its steps are done.

    With requests waiting as soon as a quarter of the slots (at least one) is free; else when the next smaller batch
    would do.
    """
    if waiting:
        return sizes[0] - max(1, sizes[0] // 4)
    return max((size for size in sizes if size < rows), default=0)


def bucket(length: int, smallest: int, largest: int) -> int:
    """The smallest of smallest, 2 smallest, 4 smallest, ... that holds `length`, cut at `largest`.

    >>> [bucket(n, 16, 100) for n in (1, 16, 17, 70)]
    [16, 16, 32, 100]
    """
    assert length <= largest, (length, largest)
    size = smallest
    while size < length:
        size *= 2
    return min(size, largest)


def distinct_prefixes(admitted: dict[int, Request]) -> Iterator[tuple[tuple[int, ...], Sequence[int]]]:
    """Prompts without their last token, each once, with the slots that need them; empty ones need no prefill.

    Those whose log-probabilities are wanted stand alone: they depend on the last token and the temperature.
    """
    slots_of: dict[tuple[tuple[int, ...], int | None], list[int]] = {}
    for slot, request in admitted.items():
        alone = slot if request.params.prompt_logps else None
        slots_of.setdefault((request.prompt[:-1], alone), []).append(slot)
    return ((prefix, slots) for (prefix, _), slots in slots_of.items() if prefix)
