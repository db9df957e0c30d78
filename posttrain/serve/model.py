"""Served model: admission within limits, samples that stream out of the engine, and turns of conversations of them."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

from posttrain.config import Drafts
from posttrain.data.chat import Prompt, Renderer
from posttrain.data.format import with_default_system
from posttrain.data.grammar import Grammar
from posttrain.data.pictures import MAX_NAME, is_path
from posttrain.data.templates import effort_arguments
from posttrain.data.tokenizer import Tokenizer
from posttrain.errors import ConfigError
from posttrain.models.decoder import Decoder
from posttrain.rollout.adapters import AdapterSlots
from posttrain.rollout.drafting import Speculation
from posttrain.rollout.engine import NativeEngine
from posttrain.rollout.programs import Expected
from posttrain.rollout.types import Call, Completion, NewTokens, SamplingParams, grammar_of, samples_of
from posttrain.serve.admission import RequestLimits, admit
from posttrain.serve.body import MAX_STOPS, Body, ChatAsk, Refused, asked_grammar, wrong
from posttrain.serve.metrics import Metrics
from posttrain.serve.text import TurnStream, token_texts
from posttrain.serve.writing import written
from posttrain.tools.formats import Format, make_format
from posttrain.tools.grammar import tool_grammar
from posttrain.tools.prompts import ToolText
from posttrain.tools.types import ToolCall

DEFAULT_LENGTH = 4096
"""Maximum tokens of prompt and answer, unless the model has fewer or it is set."""
OPTIONS = {
    "rollout: a cache of": "--cache-tokens: a cache of",
    "rollout: ": "",
    "max_length=": "--max-length ",
    "the engine's adapters.rank=": "--adapter-rank ",
    "make the engine with more": "start the server with more --adapter-slots",
    "set rollout.tensor": "use fewer devices",
    "set chat to false, or model.chat_template to": "start the server with --chat-template and",
    "set model.chat_template": "start the server with --chat-template",
    "model.chat_template": "--chat-template",
    "dataset.chat: ": "",
}
"""Words of errors of the layers below, which name fields of a configuration or arguments, and those of this server."""
RENDERERS = 16
"""Chat templates with arguments of requests that are kept."""


@dataclass(frozen=True)
class Delta:
    """Part of a choice that is new."""

    index: int
    content: str = ""
    logprobs: str = ""
    """JSON of the new tokens' entries with commas between them, in the form of chat completions, where requested."""
    calls: Sequence[ToolCall] = ()
    thought: str = ""
    """Thought before a structured content."""
    finish: str | None = None
    """Reason, with the last part."""
    num_tokens: int = 0
    """Tokens of the choice, with the last part."""
    num_cached: int = 0
    """Prompt tokens that were found in the prefix cache, with the last part."""


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Choices for the next turn of a conversation, while they are sampled. `close` must be called in any case."""

    num_prompt_tokens: int
    deltas: AsyncIterator[Sequence[Delta]]
    """Parts as they come, as many at once as there are."""
    close: Callable[[], Awaitable[None]]


@runtime_checkable
class Backend(Protocol):
    """Model that answers chats: the served one, or the policy behind the session of an agent."""

    @property
    def names(self) -> Sequence[str]:
        """Names of models."""
        ...

    async def chat(self, ask: ChatAsk) -> Turns:
        """Begin the turns of a request. Refused for what cannot be answered."""
        ...


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a server."""

    queue: int
    """Samples that wait for a slot of the engine; more are refused with 503."""
    timeout_s: float
    """Seconds from the arrival of a request to the end of its answer."""
    request: RequestLimits = field(default_factory=RequestLimits)


@dataclass(eq=False)
class Served:
    """Model with its engine, under a name.

    Every model name that requests may use is in `names`; `check_model` resolves it.
    """

    engine: NativeEngine
    tokenizer: Tokenizer
    name: str
    vocab_size: int
    tool_format: str
    limits: Limits
    num_open: int = 0
    """Samples that run or wait."""
    closing: bool = False
    metrics: Metrics = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = Metrics(self._gauges)
        self.renderer = lru_cache(RENDERERS)(self._renderer)
        self.plain = Renderer(self.tokenizer, False)

    @property
    def form_note(self) -> str:
        """Line about the form of prompts, where it is not the chat template's alone."""
        tokenizer = self.tokenizer
        if tokenizer.chat_template is not None and not tokenizer.chats:
            return (
                "the model was trained on plain prompts: a chat of one user message is continued as plain text; "
                "--chat-template FILE renders chats"
            )
        if tokenizer.system is not None:
            return f"chats without a system message begin with that of the model's training, {tokenizer.system[:60]!r}"
        return ""

    @classmethod
    def of(
        cls,
        model: Decoder,
        tokenizer: Tokenizer,
        *,
        name: str,
        slots: int,
        max_length: int | None,
        cache_tokens: int | None,
        decode_steps: int,
        tool_format: str,
        limits: Limits,
        adapters: AdapterSlots | None = None,
        speculative: Drafts | None = None,
    ) -> Served:
        """Make the engine of a model, whose embedding has no more rows than the tokenizer has ids."""
        longest = model.config.max_positions
        if max_length is not None and max_length > longest:
            raise ConfigError(f"serve: --max-length {max_length} is more than the model's {longest}; give less")
        if tool_format != "auto":
            make_format(tool_format, tokenizer, [])
        try:
            engine = NativeEngine(
                model,
                slots=slots,
                max_length=min(longest, DEFAULT_LENGTH) if max_length is None else max_length,
                decode_steps=decode_steps,
                tokenizer_decode=tokenizer.decode,
                tokenizer=tokenizer,
                cache_tokens=cache_tokens,
                adapters=adapters,
                speculation=Speculation.of(speculative, model, tokenizer, "serve: --speculative"),
            )
        except ValueError as error:
            raise ConfigError(f"serve: {with_options(error)}") from error
        return cls(engine, tokenizer, name, model.config.vocab_size, tool_format, limits)

    def warm_up(self) -> None:
        """Compile the programs of all requests but those that score their prompts."""
        # As many stop tokens as a request may have beside the tokenizer's: their number is one of the shapes.
        stops = (*self.tokenizer.stop_ids, *range(2 * MAX_STOPS))
        params = SamplingParams(
            max_tokens=self.engine.max_length - 1, temperature=1.0, stop_token_ids=stops, key=(0, 0)
        )
        self.engine.warm_up([Expected(params=params), Expected(params=replace(params, top_logps=1))], rereads=False)

    @property
    def names(self) -> Sequence[str]:
        return (self.name, *self.engine.adapters)

    def check_model(self, name: str | None) -> str | None:
        """Adapter of a model's name; None: the base. Refused for a model that is not served."""
        if name is None:
            raise wrong("model", f"give the name of a model: {', '.join(self.names)}")
        if name not in self.names:
            raise Refused(
                404, "model_not_found", f"model {name!r} is not served here; use {', '.join(self.names)}", "model"
            )
        return None if name == self.name else name

    def add_adapter(self, name: str, folder: str) -> None:
        """Serve an adapter from the start. ConfigError for one that cannot be."""
        if name == self.name:
            raise ConfigError(f"serve: --adapter {name}={folder}: the model has this name; give another")
        try:
            self.engine.load_adapter(name, folder)
        except ValueError as error:
            raise ConfigError(f"serve: --adapter {name}={folder}: {with_options(error)}") from error

    async def load_adapter(self, name: str | None, folder: str | None) -> None:
        """Serve a PEFT adapter under a name, while requests go on. Refused for what cannot be."""
        if not name or not folder or name in self.names:
            taken = f"{name!r} is served already" if name in self.names else "needs lora_name and lora_path"
            raise wrong("lora_path" if name and not folder else "lora_name", taken)
        if len(name) > MAX_NAME:
            raise wrong("lora_name", f"{len(name)} characters; at most {MAX_NAME}")
        if not is_path(folder):
            raise wrong("lora_path", f"{folder[:40]!r}... of {len(folder)} characters is no path")
        try:
            read = await asyncio.to_thread(self.engine.read_adapter, name, folder)
            self.engine.load_adapter(name, read)
        except (ConfigError, ValueError) as error:
            raise Refused(400, "invalid_value", with_options(error), "lora_path") from error

    def drop_adapter(self, name: str | None) -> None:
        """Answer no more requests of an adapter; those that have come end with it."""
        if name not in self.engine.adapters:
            raise Refused(404, "model_not_found", f"no adapter {name!r} is served here", "lora_name")
        self.engine.drop_adapter(name)

    async def chat(self, ask: ChatAsk) -> Turns:
        """Begin the turns of a chat completion."""
        adapter = self.check_model(ask.model)
        self.check_count(ask.n)
        await asyncio.to_thread(admit, ask, self.tokenizer, self.engine.max_length, self.limits.request)
        arguments, (effort, field) = ask.body.template_args("chat_template_kwargs"), ask.body.effort()
        try:
            renderer = await asyncio.to_thread(self.renderer, arguments, effort, field)
        except ConfigError as error:
            raise Refused(400, "invalid_value", with_options(error), "chat_template_kwargs") from error
        (prompt, images), tool_format = await asyncio.to_thread(self._prompt, renderer, ask)
        self.check_room(len(prompt), ask.max_tokens, ask.field)
        if images is not None:
            try:
                await self.engine.decode(images)
            except ConfigError as error:
                raise Refused(400, "invalid_value", with_options(error), ask.field) from error
        top_logps = ask.top_logprobs
        grammar = await asyncio.to_thread(self._grammar, ask, renderer, tool_format)
        own: dict[str, Any] = {"top_logps": top_logps, "grammar": grammar, "adapter": adapter, "field": ask.field}
        params, seed = await asyncio.to_thread(self.params_of, ask.body, prompt, ask.max_tokens, ask.stop, **own)
        forms: dict[str, Any] = {"parallel": ask.parallel, "structured": grammar is not None}
        turns = await asyncio.to_thread(
            lambda: [TurnStream(renderer, prompt, params, tool_format, **forms) for _ in range(ask.n)]
        )
        samples = self.sample([Call(prompt, one, images=images) for one in samples_of(params, n=ask.n, seed=seed)])
        return Turns(
            num_prompt_tokens=len(prompt),
            deltas=self._deltas(samples, turns, params, ask.logprobs),
            close=samples.close,
        )

    def _prompt(self, renderer: Renderer, ask: ChatAsk) -> tuple[Prompt, Format | None]:
        """Tokens and pictures of a chat's prompt, and the format in which its answer may call tools."""
        try:
            # GPT-OSS writes its text into a channel, with or without tools.
            harmony = renderer.chat and ask.tools is None and "<|channel|>" in str(self.tokenizer.hf.chat_template)
            tools = ask.tools or ([] if harmony else None)
            tool_format = None if tools is None else make_format(self.tool_format, self.tokenizer, tools)
        except ConfigError as error:
            raise Refused(400, "invalid_value", str(error), "tools") from error
        messages = with_default_system(ask.messages, self.tokenizer) if renderer.chat else ask.messages
        try:
            return renderer.prompt_with_images(messages, ask.tools), tool_format
        except ConfigError as error:
            raise Refused(400, "invalid_value", with_options(error), ask.field) from error

    def _grammar(self, ask: ChatAsk, renderer: Renderer, tool_format: Format | None) -> Grammar | None:
        """Language of the answer: that of its format, or of calls that must be made or must fit their schemas."""
        grammar = asked_grammar(ask.body)
        if grammar is not None and ask.tools is not None:
            raise wrong("response_format", "is not supported together with tools, whose calls it would not allow")
        if (ask.forced is not None or ask.strict) and tool_format is not None:
            try:
                grammar = tool_grammar(
                    tool_format,
                    self.tokenizer,
                    name=ask.forced or None,
                    required=ask.forced is not None,
                    several=ask.parallel,
                )
            except (ValueError, ConfigError) as error:
                raise wrong("tools", str(error).removeprefix("sampling.grammar: ")) from error
        return grammar_of(renderer, grammar)

    def _renderer(self, arguments: str, effort: str | None, field: str) -> Renderer:
        """Renderer for values of the template's variables, a JSON object, and the effort of reasoning of a field.
        Refused for an effort that the template does not know, and for one beside a variable that says the same."""
        given, tokenizer = json.loads(arguments), self.tokenizer
        # A model trained without its template continues a message; without any, the renderer says what is missing.
        chat = tokenizer.chats or tokenizer.chat_template is None
        if effort is not None:
            try:
                asked = effort_arguments(tokenizer.chat_template or "" if chat else "", effort)
            except ConfigError as error:
                raise wrong(field, str(error)) from error
            if asked.keys() & given.keys():
                raise wrong(field, f"{effort}: chat_template_kwargs has {next(iter(asked))}; give one")
            given |= asked
        if given and not chat:
            raise ConfigError("chat_template_kwargs: the model continues plain text, which no template renders")
        tokenizer = tokenizer.with_template_args(given)
        return Renderer(tokenizer, chat, ToolText(tokenizer, self.tool_format) if chat else None)

    def params_of(
        self,
        body: Body,
        prompt: Sequence[int],
        max_tokens: int | None,
        stop: Sequence[str],
        *,
        top_logps: int,
        grammar: Grammar | None,
        adapter: str | None,
        field: str,
        prompt_logps: bool = False,
    ) -> tuple[SamplingParams, int]:
        """Read the sampling settings of a request, the last of its fields; also returns its seed. `field`: the one that
        the prompt was in."""
        room = self.check_room(len(prompt), max_tokens, field)
        temperature = body.number("temperature", 0.0, 100.0)
        top_p = body.number("top_p", 0.0, 1.0)
        top_k = body.whole("top_k", -1)
        penalty = body.number("repetition_penalty", 0.0, 100.0)
        seed = body.whole("seed", -(2**63), 2**63 - 1)
        ignore_eos = body.flag("ignore_eos")
        fields: dict[str, Any] = {
            "max_tokens": max_tokens or room,
            "temperature": 1.0 if temperature is None else temperature,
            "top_p": 1.0 if top_p is None else top_p,
            # -1 and 0 are off, and more than there are tokens is all of them.
            "top_k": min(max(top_k or 0, 0), self.vocab_size),
            "min_p": body.number("min_p", 0.0, 1.0) or 0.0,
            "repetition_penalty": 1.0 if penalty is None else penalty,
            "presence_penalty": body.number("presence_penalty", -2.0, 2.0) or 0.0,
            "frequency_penalty": body.number("frequency_penalty", -2.0, 2.0) or 0.0,
            "logit_bias": body.biases("logit_bias"),
            "allowed_token_ids": body.ids("allowed_token_ids", self.vocab_size),
            "skip_special_tokens": body.flag("skip_special_tokens", True),
            "stop_token_ids": (
                *(() if ignore_eos else self.tokenizer.stop_ids),
                *(body.ids("stop_token_ids", self.vocab_size, MAX_STOPS) or ()),
            ),
        }
        body.finish()
        try:
            recorded: dict[str, Any] = {"top_logps": top_logps, "prompt_logps": prompt_logps}
            params = SamplingParams(**fields, **recorded, grammar=grammar, adapter=adapter, key=(0, 0))
            params = params.stopped_at(stop, self.tokenizer)
            params.check_vocabulary(self.vocab_size)
        except ValueError as error:
            text = str(error).removeprefix("sampling.")
            raise Refused(400, "invalid_value", text, text.partition("=")[0].partition(":")[0]) from error
        return params, secrets.randbits(62) if seed is None else seed

    def check_room(self, num_tokens: int, max_tokens: int | None, field: str) -> int:
        """Tokens that are left for the answer to a prompt. Refused for fewer than `max_tokens`, and for none."""
        room = self.engine.max_length - num_tokens
        if (max_tokens or 1) > room:
            raise Refused(
                400,
                "context_length_exceeded",
                f"this model's maximum context length is {self.engine.max_length} tokens; the prompt has {num_tokens}"
                f"{f', max_tokens is {max_tokens}' if max_tokens else ''}",
                "max_tokens" if max_tokens and room > 0 else field,
            )
        return room

    def check_count(self, count: int) -> None:
        """Refused for more samples in one request than may run and wait at once."""
        most = self.engine.slots + self.limits.queue
        if count > most:
            rule = f"{count} samples in one request; at most {most}, the server's --slots and --max-queue"
            raise wrong("n", rule)

    def sample(self, calls: Sequence[Call]) -> Samples:
        """Begin samples. Refused if more wait than the limits allow."""
        self.check_count(len(calls))
        most = self.engine.slots + self.limits.queue
        if self.closing:
            raise Refused(503, "shutting_down", "the server is shutting down")
        if self.num_open + len(calls) > most:
            raise Refused(503, "overloaded", f"{self.num_open} samples run or wait already; try again later")
        return Samples(self, calls)

    async def _deltas(
        self, samples: Samples, turns: Sequence[TurnStream], params: SamplingParams, logprobs: bool
    ) -> AsyncIterator[Sequence[Delta]]:
        prompt = samples.calls[0].prompt
        histories = [[*prompt[-64:]] for _ in turns]
        counts = [0] * len(turns)

        def read(parts: Sequence[tuple[int, NewTokens | Completion]]) -> list[Delta]:
            """Deltas of parts. A turn that is complete takes no more of them."""
            deltas = []
            for index, part in parts:
                turn = turns[index]
                if turn.is_complete():
                    continue
                if isinstance(part, Completion):
                    content, calls, thought = turn.end()
                    finish = finish_reason(part.stop, turn.calls)
                    end = Delta(index, content, "", calls, thought, finish, len(part.tokens), part.num_cached)
                    deltas.append(end)
                    continue
                entries = logprob_entries(self.tokenizer, histories[index], part, params.ends) if logprobs else ""
                content, calls, thought = turn.add(part.tokens)
                counts[index] += len(part.tokens)
                if content or calls or thought or entries:
                    deltas.append(Delta(index, content, entries, calls, thought))
                if turn.is_complete():
                    content, calls, thought = turn.end()
                    end = Delta(index, content, "", calls, thought, "tool_calls", counts[index], part.num_cached)
                    deltas.append(end)
            return deltas

        async for parts in samples:
            deltas = await written(read, parts)
            for delta in deltas:
                if delta.finish is not None:
                    samples.stop(delta.index)
            yield deltas

    def _gauges(self) -> dict[str, tuple[float, str]]:
        engine = self.engine
        counts, drafts = engine.take_counts()
        self.metrics.counters["prompt_tokens"] += counts.prompt_tokens
        self.metrics.counters["cached_prompt_tokens"] += counts.shared_tokens
        self.metrics.counters["preemptions"] += counts.preemptions
        self.metrics.counters["drafted_tokens"] += drafts.drafted
        self.metrics.counters["accepted_tokens"] += drafts.accepted
        return {
            "samples_running": (float(engine.slots - engine.num_free), "Samples that hold a slot of the engine."),
            "samples_waiting": (float(engine.num_waiting), "Samples that wait for a slot."),
            "cache_blocks_used": (float(engine.num_used_blocks), "Blocks of the cache that running samples hold."),
        }


def finish_reason(stop: str, calls: Sequence[ToolCall]) -> str:
    """`finish_reason` of the API. A turn that was cut says `length` also behind whole calls: others may be missing."""
    return "tool_calls" if calls and stop == "stop" else stop


def with_options(error: Exception) -> str:
    """Words of an error with the options of `posttrain serve` in place of what only Python or a configuration sets."""
    text = str(error)
    for words, option in OPTIONS.items():
        text = text.replace(words, option)
    return text


def logprob_entries(tokenizer: Tokenizer, history: list[int], part: NewTokens, ends: Sequence[int]) -> str:
    """Entries of new tokens but the stop token, see `Delta.logprobs`; adds the tokens to `history`."""
    tokens = part.tokens[:-1] if part.tokens[-1] in ends else part.tokens
    tops = part.top_logps or ((),) * len(part.tokens)
    entries = []
    for token, logp, top in zip(tokens, part.logps, tops, strict=False):
        shown = token_texts(tokenizer, [(history, one) for one in (token, *(t for t, _ in top))])
        first, *others = [
            {"token": text, "logprob": value, "bytes": raw}
            for (text, raw), value in zip(shown, (logp, *(value for _, value in top)), strict=True)
        ]
        entries.append(json.dumps(first | {"top_logprobs": others}, ensure_ascii=False))
        history.append(token)
        del history[:-64]
    return ",".join(entries)


def _failure(error: Exception) -> Refused:
    """Refusal of a request whose sample has failed in the engine."""
    if isinstance(error, ValueError):
        return Refused(400, "invalid_value", with_options(error))
    return Refused(500, "engine_error", f"{type(error).__name__}: {error}")


class Samples:
    """Samples of one request: their tokens as they come, each one's completion last. `close` frees what they hold."""

    def __init__(self, served: Served, calls: Sequence[Call]):
        self.calls = calls
        self._served, self._parts = served, asyncio.Queue[tuple[int, NewTokens | Completion | Exception]]()
        self._end = asyncio.get_running_loop().time() + served.limits.timeout_s
        served.num_open += len(calls)
        served.metrics.counters["samples"] += len(calls)
        self._left = set(range(len(calls)))
        self._tasks = [asyncio.create_task(self._run(index, call)) for index, call in enumerate(calls)]
        for task in self._tasks:
            task.add_done_callback(self._ended)  # also of a task that is cancelled before it begins

    async def _run(self, index: int, call: Call) -> None:
        metrics, begun = self._served.metrics, time.perf_counter()
        first = 0.0
        count = 0

        def told(part: NewTokens) -> None:
            nonlocal first, count
            if not first:
                first = time.perf_counter()
                metrics.first_token_s.add(first - begun)
            else:
                count += len(part.tokens)
            metrics.counters["completion_tokens"] += len(part.tokens)
            self._parts.put_nowait((index, part))

        try:
            done = await self._served.engine.generate(call.prompt, call.params, images=call.images, on_tokens=told)
            if count:
                metrics.token_s.add((time.perf_counter() - first) / count)
            self._parts.put_nowait((index, done))
        except Exception as error:
            self._parts.put_nowait((index, error))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._served.num_open -= 1

    def stop(self, index: int) -> None:
        """End a sample whose further tokens are of no use."""
        self._left.discard(index)
        self._tasks[index].cancel()

    async def __aiter__(self) -> AsyncIterator[Sequence[tuple[int, NewTokens | Completion]]]:
        """Parts by index, as many at once as have come. Refused at the time limit, and where the engine fails or is
        closed."""
        while self._left:
            try:
                async with asyncio.timeout_at(self._end):
                    come = [await self._parts.get()]
            except TimeoutError as error:
                limit = self._served.limits.timeout_s
                raise Refused(504, "timeout", f"the answer takes longer than {limit:g} s") from error
            while not self._parts.empty():
                come.append(self._parts.get_nowait())
            parts: list[tuple[int, NewTokens | Completion]] = []
            failure: Refused | None = None
            for index, part in come:
                if isinstance(part, Exception):
                    failure = _failure(part)
                elif isinstance(part, Completion):
                    self._left.discard(index)
                    if part.stop == "abort":
                        failure = Refused(503, "shutting_down", "the server is shutting down")
                if failure is not None or isinstance(part, Exception):
                    break
                parts.append((index, part))
            if parts:
                yield parts
            if failure is not None:
                raise failure

    async def close(self) -> None:
        """Cancel what still runs. The engine has its slots and blocks back on return."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task
