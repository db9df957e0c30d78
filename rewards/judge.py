"""LLM judge: a model behind an OpenAI-compatible endpoint scores each completion by the text of a rubric file.

What the judge cannot score after all retries is an error of its sample, never a 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import fcntl
import hashlib
import os
import random
import re
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx

SCORE = re.compile(r"""["'*_]*score["'*_]*\s*[:=]\s*["'*_]*\s*(-?\d+(?:\.\d+)?)""", re.IGNORECASE)
RETRIED = (408, 409, 425, 429, 500, 502, 503, 504, 529)
FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 60.0
POLL_S = 0.02


async def judged(
    completions: Sequence[Any],
    prompts: Sequence[Any],
    answer: Sequence[Any] | None = None,
    *,
    base_url: str,
    model: str,
    rubric: str,
    lowest: float,
    highest: float,
    api_key: str | None = None,
    concurrency: int = 16,
    requests_per_minute: float | None = None,
    retries: int = 5,
    request_timeout_s: float = 60.0,
    temperature: float = 0.0,
    max_tokens: int = 1024,
) -> list[Any]:
    """Judge's score, scaled so that `lowest` is 0 and `highest` is 1.

    `rubric`: text file with the places `{prompt}`, `{completion}` and, if the dataset has that column, `{answer}`; it
    asks for a last line `Score: NUMBER`. `base_url`: such as `http://localhost:8000/v1`. `api_key`: the server's, in a
    configuration `api_key_env: VARIABLE`; None: none. `concurrency` and `requests_per_minute` hold for all processes of
    this user on this machine that ask the same model. Set the reward's `timeout_s` to what all requests of a step may
    take.
    """
    if not lowest < highest:
        raise ValueError(f"lowest={lowest:g} must be below highest={highest:g}, the ends of the judge's scale")
    template = Path(rubric).read_text(encoding="utf-8")
    answers = [""] * len(completions) if answer is None else answer
    limit = RateLimit(f"{base_url} {model}", concurrency, requests_per_minute)
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(headers=headers, timeout=request_timeout_s) as client:

        async def one(prompt: Any, completion: Any, gold: Any) -> float:
            filled = {"{prompt}": _text(prompt), "{completion}": _text(completion), "{answer}": str(gold)}
            text = re.sub("|".join(map(re.escape, filled)), lambda place: filled[place[0]], template)
            body = {
                "model": model,
                "messages": [{"role": "user", "content": text}],
                "temperature": temperature,
                "max_tokens": max_tokens,
            }
            reply = await _asked(client, f"{base_url.rstrip('/')}/chat/completions", body, limit, retries)
            return (score_of(reply, lowest, highest) - lowest) / (highest - lowest)

        asked = (one(*case) for case in zip(prompts, completions, answers, strict=True))
        return await asyncio.gather(*asked, return_exceptions=True)


def score_of(reply: str, lowest: float, highest: float) -> float:
    """Last score in a judge's reply. ValueError without one, or for one outside of the scale.

    >>> score_of('Good, but long.\\n**Score: 7**', 1, 10), score_of('{"score": 3.5}', 1, 10)
    (7.0, 3.5)
    """
    found = SCORE.findall(reply)
    if not found:
        raise ValueError(f"the judge gave no line 'Score: NUMBER', but {reply[-80:]!r}")
    score = float(found[-1])
    if not lowest <= score <= highest:
        raise ValueError(f"the judge's score {score:g} is outside of its scale, {lowest:g} to {highest:g}")
    return score


async def _asked(client: httpx.AsyncClient, url: str, body: dict[str, Any], limit: RateLimit, retries: int) -> str:
    """Text of the judge's reply; retried with exponential delays and jitter, or after the server's Retry-After."""
    for attempt in range(retries + 1):
        waits = min(FIRST_DELAY_S * 2**attempt, LONGEST_DELAY_S) * random.uniform(0.5, 1.5)
        try:
            async with limit.request():
                response = await client.post(url, json=body)
        except httpx.TransportError as error:
            problem = f"{type(error).__name__}: {error}"
        else:
            if response.status_code == 200:
                content: str | None = response.json()["choices"][0]["message"]["content"]
                return content or ""
            problem = f"status {response.status_code}: {response.text[:200]}"
            if response.status_code not in RETRIED:
                raise RuntimeError(f"judge at {url}: {problem}")
            waits = max(waits, retry_after(response.headers.get("retry-after")))
        if attempt < retries:
            await asyncio.sleep(waits)
    raise RuntimeError(f"judge at {url}: no reply after {retries + 1} requests; the last: {problem}")


def retry_after(header: str | None) -> float:
    """Seconds of a Retry-After header, a number or a date; 0 without one. RFC 9110, section 10.2.3."""
    if header is None:
        return 0.0
    with contextlib.suppress(ValueError):
        return max(float(header), 0.0)
    with contextlib.suppress(ValueError, TypeError):
        return max(email.utils.parsedate_to_datetime(header).timestamp() - time.time(), 0.0)
    return 0.0


class RateLimit:
    """Concurrency and rate of requests, over all processes of the user on this machine, by locked files: a process
    that is killed frees its places."""

    def __init__(self, name: str, concurrency: int, per_minute: float | None):
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self._folder = Path(base) / "posttrain" / "judge" / hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._concurrency, self._per_minute = concurrency, per_minute
        self._here = asyncio.Semaphore(concurrency)  # so that no more tasks than places look for one

    @contextlib.asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Wait for a place and for the time of the next request."""
        async with self._here:
            place = await self._place()
            try:
                await asyncio.sleep(self._delay_s())
                yield
            finally:
                os.close(place)

    async def _place(self) -> int:
        while True:
            for number in random.sample(range(self._concurrency), self._concurrency):
                file = os.open(self._folder / f"place-{number}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return file
                except BlockingIOError:
                    os.close(file)
            await asyncio.sleep(POLL_S * random.uniform(0.5, 1.5))

    def _delay_s(self) -> float:
        """Seconds until this request's turn: turns are evenly spaced."""
        if self._per_minute is None:
            return 0.0
        with (self._folder / "next").open("a+", encoding="ascii") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            text = file.read()
            now = time.time()
            turn = max(now, float(text) if text else 0.0)
            file.truncate(0)
            file.write(repr(turn + 60.0 / self._per_minute))
        return turn - now


def _text(value: Any) -> str:
    """Text of a prompt or completion; conversations as `role: content` lines, of a single message the content."""
    if isinstance(value, str):
        return value
    if len(value) == 1:
        return str(value[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in value)
