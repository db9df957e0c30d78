"""The engine that decodes with the trainer's own model: continuous batching over the slots of one cache."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from posttrain.config import RolloutQuantize
from posttrain.models.cache import KVCache
from posttrain.models.decoder import Decoder
from posttrain.models.moe import check_recording
from posttrain.rollout.programs import Chunk, Loaded, Prefilled, Programs, Prompts, Rows, Scored, empty_slots
from posttrain.rollout.sampling import Sampling, TopLogps
from posttrain.rollout.scheduler import Request, Scheduler, bucket, distinct_prefixes, row_sizes, rows_for, stop_at
from posttrain.rollout.stopping import first_completed
from posttrain.rollout.types import Completion, SamplingParams, StopReason, TokenLogp
from posttrain.weights.quantize import QuantizedCopies
from posttrain.weights.state import ModelWeights

PREFILL_TOKENS = 512
"""Prompt tokens of one prefill call, padding included; a longer prompt goes alone."""
MIN_PROMPT_WIDTH = 16
MIN_WIDTH = 128
MIN_STOP_IDS = 4
IDLE = Request(prompt=(0,), params=SamplingParams(max_tokens=1, temperature=0.0, stop_token_ids=(), key=(0, 0)))


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """One trip to the device: prefills for the newly admitted, then up to `decode_steps` tokens for everybody."""

    loaded: Loaded
    prompts: list[tuple[Prompts, dict[int, int]]]
    """Prefill calls, and by slot the row of the call that holds its prompt."""
    rows: Rows
    slots: list[int]
    """Of each row, rising; where all slots take part, row and slot are the same."""
    running: dict[int, Request]
    """By slot; the other rows are idle, and what is in their slots does not matter."""
    stop_at: int
    width: int


class NativeEngine:
    """Samples from a `Decoder` in this process, whose arrays it shares, or with `quantize` from a copy in 8 bits.

    A completion depends on its prompt, its parameters and the weights; batch, slot and schedule change its
    log-probabilities by rounding only. Programs are compiled at the first request of each shape.

    ValueError for a request that can never run; an error on the device fails every request then in the engine.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        slots: int,
        max_length: int,
        decode_steps: int,
        tokenizer_decode: Callable[[Sequence[int]], str] | None,
        version: int = 0,
        record_routing: bool = False,
        quantize: RolloutQuantize = "none",
    ):
        for name, value in {"slots": slots, "decode_steps": decode_steps}.items():
            if value < 1:
                raise ValueError(f"rollout: {name}={value} must be at least 1")
        if max_length > model.config.max_positions:
            raise ValueError(
                f"rollout: max_length={max_length} must not exceed the model's "
                f"max_positions={model.config.max_positions}"
            )
        self.slots = slots
        self.max_length = max_length
        self.decode_steps = decode_steps
        if record_routing:
            check_recording(model.config)
        self.programs = Programs(record=record_routing)
        self._decode_text = tokenizer_decode
        self._scheduler = Scheduler(slots)
        self._copies = None if quantize == "none" else QuantizedCopies(quantize)
        self._loaded = self._load(model, version)
        self._cache: KVCache | None = None
        self._stop_ids_width = MIN_STOP_IDS
        # The thread of a cancelled driver may still be on the device when the next one starts.
        self._device = threading.Lock()
        self._driver: asyncio.Task[None] | None = None
        self._closed = False

    async def generate(self, prompt: Sequence[int], params: SamplingParams) -> Completion:
        """One completion. Cancelling it frees its slot."""
        self._check_loop()
        request = self._submit(prompt, params)
        if self._driver is None:
            self._driver = asyncio.get_running_loop().create_task(self._drive())
        return await asyncio.wrap_future(request.future)

    def generate_all(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Completion]:
        """A completion of each prompt, without asyncio: also where an event loop already runs, as in a notebook.

        RuntimeError while `generate` is at work.
        """
        if self._scheduler.busy:
            raise RuntimeError("generate_all: the engine is generating already; wait for that, or await generate")
        requests: list[Request] = []
        try:
            requests.extend(self._submit(p, q) for p, q in zip(prompts, params, strict=True))
            while dispatch := self._plan():
                self._collect(dispatch, self._run(dispatch))
        finally:
            self._scheduler.drain()
        return [request.future.result() for request in requests]

    def update_weights(self, model: Decoder, version: int) -> None:
        """Use the model's present arrays from the next dispatch on; samples under way go on with their cache.

        ValueError for a model of another configuration.
        """
        if model.config != self._loaded.source.model.config:
            raise ValueError("update_weights: the model's configuration differs from the engine's; make a new engine")
        self._loaded = self._load(model, version)

    def _load(self, model: Decoder, version: int) -> Loaded:
        source = ModelWeights(model)
        if self._copies is None:
            return Loaded.of(source, source.read(), version)
        return Loaded.of(*self._copies(model), version)

    def close(self) -> None:
        """End every request with what it has, as `abort`; later ones raise RuntimeError."""
        self._closed = True
        for request in self._scheduler.drain():
            request.finish("abort")
        self._cache = None

    @property
    def _vocab_size(self) -> int:
        return self._loaded.source.model.config.vocab_size

    @property
    def num_free(self) -> int:
        return len(self._scheduler.free)

    def _submit(self, prompt: Sequence[int], params: SamplingParams) -> Request:
        if self._closed:
            raise RuntimeError("the engine is closed")
        if len(prompt) == 0:
            raise ValueError("generate: the prompt is empty; it needs at least one token, for instance BOS")
        vocab_size = self._vocab_size
        params.check_vocabulary(vocab_size)
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise ValueError(
                f"generate: the prompt's token ids go from {min(prompt)} to {max(prompt)}; "
                f"the model's go from 0 to {vocab_size - 1}"
            )
        if len(prompt) + params.max_tokens > self.max_length:
            raise ValueError(
                f"generate: a prompt of {len(prompt)} tokens and max_tokens={params.max_tokens} need "
                f"{len(prompt) + params.max_tokens} positions, more than the engine's max_length={self.max_length}; "
                "shorten one or raise the other"
            )
        if params.stop and self._decode_text is None:
            raise ValueError(f"generate: stop={params.stop!r} needs an engine with tokenizer_decode")
        request = Request(prompt=tuple(prompt), params=params)
        self._scheduler.submit(request)
        return request

    def _check_loop(self) -> None:
        """Adopt a new event loop when the driver's own is closed. RuntimeError while another one is in use."""
        if self._driver is None or self._driver.get_loop() is asyncio.get_running_loop():
            return
        if not self._driver.get_loop().is_closed():
            raise RuntimeError("generate: the engine is generating in another event loop; make one engine for each")
        self._driver = None
        self._scheduler.drain()

    async def _drive(self) -> None:
        """Run dispatches while there is work: bookkeeping on the event loop, waiting for the device in a thread."""
        try:
            while dispatch := self._plan():
                self._collect(dispatch, await asyncio.to_thread(self._run, dispatch))
        except Exception as error:
            for request in self._scheduler.drain():
                request.fail(error)
        finally:
            for request in self._scheduler.drain():
                request.future.cancel()
            self._driver = None

    def _plan(self) -> Dispatch | None:
        """Admit what fits and describe the next trip to the device; None when there is nothing to do."""
        admitted = self._scheduler.admit()
        running = dict(self._scheduler.running)
        if not running:
            return None
        # Where samples fit into one dispatch, a smaller batch would save little and is one more program to compile.
        is_long = max(request.params.max_tokens for request in running.values()) > self.decode_steps
        sizes = row_sizes(self.slots) if is_long else [self.slots]
        num_rows = rows_for(sizes, len(running))
        slots = sorted([*running, *self._scheduler.free[: num_rows - len(running)]])
        reach = max(min(r.position + self.decode_steps, r.end) for r in running.values())
        return Dispatch(
            loaded=self._loaded,
            prompts=list(self._prompts(admitted)),
            rows=self._rows(slots, running),
            slots=slots,
            running=running,
            stop_at=stop_at(sizes, num_rows, bool(self._scheduler.waiting)),
            width=bucket(reach, MIN_WIDTH, self.max_length),
        )

    def _prompts(self, admitted: dict[int, Request]) -> Iterator[tuple[Prompts, dict[int, int]]]:
        """Each distinct prompt once, by width, as many to a call as `PREFILL_TOKENS` hold."""
        by_width: dict[int, list[tuple[tuple[int, ...], Sequence[int]]]] = {}
        for prefix, slots in distinct_prefixes(admitted):
            by_width.setdefault(bucket(len(prefix), MIN_PROMPT_WIDTH, self.max_length), []).append((prefix, slots))
        for width, entries in sorted(by_width.items()):
            rows = max(1, min(self.slots, PREFILL_TOKENS // width))
            for start in range(0, len(entries), rows):
                yield self._prompt_call(entries[start : start + rows], rows, width, admitted)

    def _prompt_call(
        self,
        entries: Sequence[tuple[tuple[int, ...], Sequence[int]]],
        rows: int,
        width: int,
        admitted: dict[int, Request],
    ) -> tuple[Prompts, dict[int, int]]:
        tokens = np.zeros((rows, width), np.int32)
        lengths = np.zeros(rows, np.int32)
        for row, (prefix, _) in enumerate(entries):
            tokens[row, : len(prefix)] = prefix
            lengths[row] = len(prefix)
        row_of = {slot: row for row, (_, slots) in enumerate(entries) for slot in slots}
        pairs = np.zeros((self.slots, 2), np.int32)
        pairs[: len(row_of)] = list(row_of.items())
        prompts = Prompts(
            **jax.device_put(
                {
                    "tokens": tokens,
                    "lengths": lengths,
                    "slots": pairs[:, 0],
                    "sources": pairs[:, 1],
                    "count": np.asarray(len(row_of), np.int32),
                }
            ),
            scored=_scored(tokens, {row: admitted[slot] for slot, row in row_of.items()}),
        )
        return prompts, row_of

    def _rows(self, slots: Sequence[int], running: dict[int, Request]) -> Rows:
        requests = [running.get(slot, IDLE) for slot in slots]
        params = [request.params for request in requests]
        while self._stop_ids_width < max(len(p.ends) for p in params):
            self._stop_ids_width *= 2
        stop_ids = np.full((len(params), self._stop_ids_width), -1, np.int32)
        for row, p in enumerate(params):
            stop_ids[row, : len(p.ends)] = p.ends
        return Rows(
            **jax.device_put(
                {
                    "slots": np.asarray(slots, np.int32),
                    "tokens": np.asarray([r.newest for r in requests], np.int32),
                    "positions": np.asarray([r.position for r in requests], np.int32),
                    "ends": np.asarray([r.end for r in requests], np.int32),
                    "active": np.asarray([slot in running for slot in slots]),
                    "stop_ids": stop_ids,
                }
            ),
            sampling=Sampling.of(
                params,
                [r.prompt for r in requests],
                [r.tokens for r in requests],
                vocab_size=self._vocab_size,
                max_length=self.max_length,
            ),
        )

    def _run(self, dispatch: Dispatch) -> tuple[Chunk, list[Prefilled]]:
        """On the device; returns when the sampled tokens are on the host."""
        with self._device:
            cache = self._cache
            self._cache = None  # gone if a program fails: it was donated
            if cache is None:
                cache = empty_slots(dispatch.loaded, self.slots, self.max_length)
            prefilled = []
            for prompts, _ in dispatch.prompts:
                cache, beside = self.programs.prefill(dispatch.loaded, cache, prompts)
                prefilled.append(beside)
            cache, chunk = self.programs.decode(
                dispatch.loaded, cache, dispatch.rows, dispatch.stop_at, width=dispatch.width, steps=self.decode_steps
            )
            self._cache = None if self._closed else cache
            return jax.device_get((chunk, prefilled))

    def _collect(self, dispatch: Dispatch, found: tuple[Chunk, list[Prefilled]]) -> None:
        """Hand the new tokens to their requests and free the slots of those that are done."""
        chunk, prefilled = found
        for (_, row_of), beside in zip(dispatch.prompts, prefilled, strict=True):
            for slot, row in row_of.items():
                admitted = dispatch.running[slot]
                length = len(admitted.prompt) - 1
                if beside.experts is not None:
                    admitted.experts.append(np.asarray(beside.experts[row, :length]))
                if beside.logps is not None:
                    admitted.prompt_logps = (0.0, *np.asarray(beside.logps[row, :length]).tolist())
        for row, slot in enumerate(dispatch.slots):
            request = dispatch.running.get(slot)
            if request is None or self._scheduler.running.get(slot) is not request:
                continue  # idle, or drained by `close` meanwhile
            count = int(chunk.counts[row])
            if not np.isfinite(chunk.logps[:count, row]).all():
                self._cache = None  # even masked, a NaN in it would spoil what comes next
                raise FloatingPointError(
                    f"generate: the weights of version {dispatch.loaded.version} give log-probabilities "
                    "that are not finite"
                )
            request.tokens += chunk.tokens[:count, row].tolist()
            request.logps += chunk.logps[:count, row].tolist()
            request.kept_logps += chunk.kept_logps[:count, row].tolist()
            request.versions += [dispatch.loaded.version] * count
            if chunk.top is not None:
                request.top_logps += _top_logps(chunk.top, count, row, request.params.top_logps)
            if chunk.experts is not None:
                request.experts.append(np.asarray(chunk.experts[:count, row]))
            reason = self._stop_reason(request, count)
            if reason is not None:
                self._scheduler.release(slot)
                request.finish(reason)

    def _stop_reason(self, request: Request, num_new: int) -> StopReason | None:
        """Why the request is done, if it is; a stop string cuts what was sampled beyond it."""
        params = request.params
        if params.stop and self._decode_text is not None:
            end = first_completed(self._decode_text, request.tokens, num_new, params.stop)
            if end is not None:
                request.cut(end)
                return "stop"
        if request.tokens[-1] in params.ends:
            return "stop"
        return "length" if len(request.tokens) == params.max_tokens else None


def _scored(prefixes: np.ndarray, requests: dict[int, Request]) -> Scored | None:
    """What a prefill call needs to score prompts; by row of the call one of its requests."""
    if not any(request.params.prompt_logps for request in requests.values()):
        return None
    targets, temperature = np.roll(prefixes, -1, axis=1), np.ones(len(prefixes), np.float32)
    for row, request in requests.items():
        targets[row, len(request.prompt) - 2] = request.prompt[-1]
        temperature[row] = request.params.temperature
    return Scored(**jax.device_put({"targets": targets, "temperature": temperature}))


def _top_logps(top: TopLogps, count: int, row: int, number: int) -> list[tuple[TokenLogp, ...]]:
    """The first `number` of each of a row's first `count` tokens."""
    tokens, logps = np.asarray(top.tokens[:count, row]), np.asarray(top.logps[:count, row])
    return [
        tuple(map(TokenLogp, *pair))
        for pair in zip(tokens[:, :number].tolist(), logps[:, :number].tolist(), strict=True)
    ]
