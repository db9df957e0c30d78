"""Plain completions in the form of the OpenAI API: prompts as text or token ids, echo, log-probabilities; and what all
answers have: streams of events."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from posttrain.data.chat import Renderer
from posttrain.errors import ConfigError
from posttrain.rollout.types import (
    MAX_TOP_LOGPS,
    NOT_A_CHARACTER,
    Call,
    Completion,
    NewTokens,
    SamplingParams,
    TokenLogp,
    grammar_of,
    samples_of,
)
from posttrain.serve.admission import check_logprobs, check_text
from posttrain.serve.body import MAX_CHOICES, Body, asked_grammar, wrong
from posttrain.serve.model import Samples, Served
from posttrain.serve.text import TextStream, token_texts
from posttrain.serve.writing import event, written

DEFAULT_TOKENS = 16
"""The API's default of `max_tokens`."""
MAX_PROMPTS = 1024


class Streaming:
    """Wishes of a request for a stream of events."""

    def __init__(self, body: Body):
        self.wanted = body.flag("stream")
        options = body.take("stream_options") or {}
        if not isinstance(options, Mapping) or (options and not self.wanted):
            raise wrong("stream_options", "must be an object, and needs stream: true")
        inner = Body(options)
        self.usage = inner.flag("include_usage")
        inner.flag("include_obfuscation")
        inner.finish()


DONE = "data: [DONE]\n\n"


@runtime_checkable
class Answer(Protocol):
    """Answer to a request that has begun; one of `whole` and `events` is used, and `close` called in any case."""

    async def whole(self) -> dict[str, Any]: ...

    def events(self) -> AsyncIterator[str]: ...

    async def close(self) -> None: ...


class CompletionRequest:
    """Completions of one or several prompts."""

    def __init__(self, body: Body):
        self.streaming = Streaming(body)
        self._model, self._body = body.text("model"), body
        self._prompt = body.take("prompt")
        self._n = body.whole("n", 1, MAX_CHOICES) or 1
        best_of = body.whole("best_of", 1)
        if best_of not in (None, self._n):
            raise wrong("best_of", f"{best_of} is not supported here; leave it out")
        longest = body.whole("max_tokens", 0)
        self._max_tokens = DEFAULT_TOKENS if longest is None else longest
        self._stop, self._echo = body.stops("stop"), body.flag("echo")
        self._logprobs = body.whole("logprobs", 0, MAX_TOP_LOGPS)
        if self._echo and self._logprobs is not None and self.streaming.wanted:
            raise wrong("stream", "is not supported together with echo and logprobs; leave one out")
        if self._max_tokens == 0 and not self._echo:
            raise wrong("max_tokens", "0 must be at least 1; without a completion set echo")

    async def begin(self, served: Served) -> CompletionAnswer:
        """Begin the samples. Refused for what cannot be answered."""
        adapter = served.check_model(self._model)
        prompts = await asyncio.to_thread(_prompts, self._prompt, served, self._n, max(self._max_tokens, 1))
        scored = self._echo and self._logprobs is not None
        count = self._max_tokens * len(prompts) + (sum(len(tokens) for _, tokens in prompts) if scored else 0)
        check_logprobs(count * self._n, self._logprobs, served.limits.request)
        params, seed = await asyncio.to_thread(
            served.params_of,
            self._body,
            max((tokens for _, tokens in prompts), key=len),
            max(self._max_tokens, 1),
            self._stop,
            top_logps=self._logprobs or 0,
            grammar=grammar_of(served.plain, await asyncio.to_thread(asked_grammar, self._body)),
            adapter=adapter,
            field="prompt",
            prompt_logps=scored,
        )
        several = [
            Call(tokens, one)
            for number, (_, tokens) in enumerate(prompts)
            for one in samples_of(params, n=self._n, seed=seed, prompt=number)
        ]
        choices = [
            Choice(
                served=served,
                text=text,
                prompt=tokens,
                params=params,
                echo=self._echo,
                scored=self._logprobs is not None,
                cut=self._max_tokens == 0,
            )
            for text, tokens in prompts
            for _ in range(self._n)
        ]
        return CompletionAnswer(
            samples=served.sample(several),
            choices=choices,
            streaming=self.streaming,
            head={
                "id": f"cmpl-{secrets.token_hex(12)}",
                "object": "text_completion",
                "created": int(time.time()),
                "model": served.name if self._model is None else self._model,
            },
            num_prompts=len(prompts),
            num_prompt_tokens=sum(len(tokens) for _, tokens in prompts),
        )


def _prompts(value: Any, served: Served, n: int, max_tokens: int) -> list[tuple[str | None, list[int]]]:
    """Prompts as tokens, with the text of those that are given as text. What can be refused by counts is refused before
    a text is encoded, and the first one that leaves no room for its `n` answers of `max_tokens` ends the work."""
    several = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    if len(several) > MAX_PROMPTS:
        raise wrong("prompt", f"{len(several)} prompts in one request; at most {MAX_PROMPTS}")
    served.check_count(len(several) * n)
    for one in several:
        if isinstance(one, str):
            check_text([one], served.tokenizer, served.engine.max_length, "prompt")
    prompts = []
    for one in several:
        text, tokens = _tokens(one, served)
        served.check_room(len(tokens), max_tokens, "prompt")
        prompts.append((text, tokens))
    return prompts


def _tokens(prompt: Any, served: Served) -> tuple[str | None, list[int]]:
    if isinstance(prompt, str):
        try:
            tokens = Renderer(served.tokenizer, False).prompt([{"role": "user", "content": prompt}])
        except ConfigError as error:
            raise wrong("prompt", str(error)) from error
    elif isinstance(prompt, list) and all(type(token) is int for token in prompt):
        tokens = prompt
        if tokens and not 0 <= min(tokens) <= max(tokens) < served.vocab_size:
            raise wrong("prompt", f"token ids must be from 0 to {served.vocab_size - 1}")
    else:
        raise wrong("prompt", "must be text, token ids, or a list of either")
    if not tokens:
        raise wrong("prompt", "is empty; it needs at least one token")
    return (prompt if isinstance(prompt, str) else None), tokens


@dataclass(kw_only=True)
class Choice:
    """One completion while it is sampled."""

    served: Served
    text: str | None
    """Prompt, if it was given as text."""
    prompt: list[int]
    params: SamplingParams
    echo: bool
    scored: bool
    cut: bool
    """Return the prompt alone."""

    def __post_init__(self) -> None:
        self._stream = TextStream(self.served.tokenizer.decode, self.prompt, self.params)
        self._sent = 0
        self._offset = 0
        self._sampled: list[int] = []

    def begin(self) -> str:
        """Text before what is sampled."""
        if not self.echo:
            return ""
        return (
            self.served.tokenizer.decode(self.prompt, self.params.skip_special_tokens)
            if self.text is None
            else self.text
        )

    def add(self, part: NewTokens) -> tuple[str, dict[str, Any] | None]:
        """New text that can no longer change, and log-probabilities of the new tokens."""
        if self.cut:
            return "", None
        self._stream.add(part.tokens)
        new, self._sent = self._stream.text[self._sent : self._stream.safe(())], self._stream.safe(())
        tops = part.top_logps or ((),) * len(part.tokens)
        return new, self._entries(part.tokens, part.logps, tops) if self.scored else None

    def end(self) -> str:
        """Rest of the text."""
        return "" if self.cut else self._stream.final[self._sent :]

    def of_prompt(self, done: Completion) -> dict[str, Any] | None:
        """Log-probabilities of the prompt; null for its first token."""
        if done.prompt_logps is None:
            return None
        tops = done.prompt_top_logps or ((),) * len(self.prompt)
        self._sampled, self._offset = [], 0
        entries = self._entries(self.prompt, done.prompt_logps, tops, after=[])
        return {**entries, **{name: [None, *entries[name][1:]] for name in ("token_logprobs", "top_logprobs")}}

    def _entries(
        self,
        tokens: Sequence[int],
        logps: Sequence[float],
        tops: Sequence[Sequence[TokenLogp]],
        after: list[int] | None = None,
    ) -> dict[str, Any]:
        """Log-probabilities in the form of the API. `after`: tokens before, by default prompt and sample."""
        history = [*self.prompt, *self._sampled][-64:] if after is None else after
        entries: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, logp, top in zip(tokens, logps, tops, strict=True):
            others = dict.fromkeys([token, *(one for one, _ in top)])
            texts = dict(
                zip(others, token_texts(self.served.tokenizer, [(history, one) for one in others]), strict=True)
            )
            likely = {texts[one][0]: value for one, value in reversed((*top, TokenLogp(token, logp)))}
            entries["tokens"].append(texts[token][0])
            entries["token_logprobs"].append(logp)
            entries["top_logprobs"].append(likely if self.params.top_logps else None)
            entries["text_offset"].append(self._offset)
            shown = self.served.tokenizer.decode([token], self.params.skip_special_tokens, after=history[-32:])
            self._offset += len(shown.rstrip(NOT_A_CHARACTER))
            history.append(token)
        if after is None:
            self._sampled += tokens
        return entries


@dataclass(kw_only=True)
class CompletionAnswer:
    """Completions under way, as an answer or as events."""

    samples: Samples
    choices: list[Choice]
    streaming: Streaming
    head: dict[str, Any]
    num_prompts: int
    num_prompt_tokens: int

    async def close(self) -> None:
        await self.samples.close()

    async def whole(self) -> dict[str, Any]:
        """Answer with all choices."""
        done: dict[int, Completion] = {}
        async for parts in self.samples:
            done |= {index: part for index, part in parts if isinstance(part, Completion)}
        return await written(self._completion, [done[index] for index in sorted(done)])

    def _completion(self, done: Sequence[Completion]) -> dict[str, Any]:
        choices = [self._choice(index, one) for index, one in enumerate(done)]
        return {**self.head, "choices": choices, "usage": self._usage(done)}

    def _choice(self, index: int, done: Completion) -> dict[str, Any]:
        choice = self.choices[index]
        before, prompt = choice.begin(), choice.of_prompt(done)
        if not choice.echo or prompt is None:
            choice._offset = len(before)
        new, sampled = choice.add(NewTokens(done.tokens, done.logps, done.top_logps, done.num_cached))
        entries = [one for one in (prompt, sampled) if one is not None]
        logprobs = {name: [x for one in entries for x in one[name]] for name in entries[0]} if entries else None
        text = before + new + choice.end()
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": self._finish(done, choice)}

    def _finish(self, done: Completion, choice: Choice) -> str:
        return "length" if choice.cut else done.stop

    async def events(self) -> AsyncIterator[str]:
        """Answer as events."""
        done: dict[int, Completion] = {}
        if echoed := await written(self._echoes):
            yield echoed
        async for parts in self.samples:
            done |= {index: part for index, part in parts if isinstance(part, Completion)}
            if chunks := await written(self._chunks, parts):
                yield chunks
        if self.streaming.usage:
            yield event({**self.head, "choices": [], "usage": self._usage([done[index] for index in sorted(done)])})
        yield DONE

    def _echoes(self) -> str:
        """Events of the prompts that are returned."""
        chunks = []
        for index, choice in enumerate(self.choices):
            if choice.echo:
                chunks.append(self._chunk(index, choice.begin()))
                choice._offset = len(choice.begin())
        return "".join(chunks)

    def _chunks(self, parts: Sequence[tuple[int, NewTokens | Completion]]) -> str:
        """Events of parts of samples."""
        chunks = []
        for index, part in parts:
            choice = self.choices[index]
            if isinstance(part, Completion):
                chunks.append(self._chunk(index, choice.end(), finish=self._finish(part, choice)))
            elif any(new := choice.add(part)):
                chunks.append(self._chunk(index, *new))
        return "".join(chunks)

    def _chunk(self, index: int, text: str, logprobs: Any = None, finish: str | None = None) -> str:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return event({**self.head, "choices": [choice], **({"usage": None} if self.streaming.usage else {})})

    def _usage(self, done: Sequence[Completion]) -> dict[str, Any]:
        sampled = sum(0 if self.choices[0].cut else len(one.tokens) for one in done)
        total = self.num_prompt_tokens + sampled
        groups = zip(*[iter(done)] * (len(done) // self.num_prompts), strict=True)
        details = {"cached_tokens": sum(min(one.num_cached for one in group) for group in groups)}
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": total,
            "prompt_tokens_details": details,
        }
