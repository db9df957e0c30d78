"""Stress of `posttrain serve`: many clients over HTTP, of whom some hang up and some write nonsense.

Every answer must be the one that its prompt has alone; at the end no block is held, and the memory of the server is
told after each tenth of the requests.

    .venv/bin/python bench/serve.py --model ../shared/models/stories260k --clients 200 --requests 10000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

WORDS = (
    "Once upon a time",
    "The dog",
    "Lily went",
    "One day",
    "Tom saw",
    "It was",
    "A big",
    "The sun",
    "She said",
    "He ran",
)
HANGS_UP, NONSENSE = 10, 20
"""One client in so many."""


class Stress:
    """Requests of all clients, and what became of them."""

    def __init__(self, base: str, model: str, tokens: int, pid: int):
        self.base, self.model, self.tokens, self.pid = base, model, tokens, pid
        self.answers: dict[str, str] = {}
        self.counts = {"answered": 0, "hung up": 0, "refused": 0, "wrong": 0}
        self.first_s: list[float] = []
        self.memory_mib: list[float] = []

    def body(self, prompt: str, **fields: Any) -> dict[str, Any]:
        return {"model": self.model, "prompt": prompt, "max_tokens": self.tokens, "temperature": 0} | fields

    async def run(self, clients: int, requests: int) -> None:
        limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
        async with httpx.AsyncClient(timeout=300, limits=limits) as session:
            for prompt in WORDS:
                answer = await session.post(f"{self.base}/completions", json=self.body(prompt))
                self.answers[prompt] = answer.json()["choices"][0]["text"]
            numbers = iter(range(requests))

            async def client() -> None:
                for number in numbers:
                    await self.one(number, session)
                    if number % (requests // 10) == 0:
                        self.memory_mib.append(resident_mib(self.pid))

            await asyncio.gather(*(client() for _ in range(clients)))

    async def one(self, number: int, session: httpx.AsyncClient) -> None:
        prompt, url = WORDS[number % len(WORDS)], f"{self.base}/completions"
        if number % NONSENSE == 7:
            answer = await session.post(url, content=b'{"prompt": [' + b"x" * (number % 50))
            self.counts["refused" if answer.status_code == 400 else "wrong"] += 1
        elif number % HANGS_UP == 3:
            async with session.stream(
                "POST", url, json=self.body(prompt, stream=True, ignore_eos=True) | {"max_tokens": 48}
            ) as stream:
                await anext(stream.aiter_lines())
            self.counts["hung up"] += 1
        elif number % 2:
            answer = await session.post(url, json=self.body(prompt))
            right = answer.status_code == 200 and answer.json()["choices"][0]["text"] == self.answers[prompt]
            self.counts["answered" if right else "wrong"] += 1
        else:
            self.counts["answered" if await self.streamed(prompt, session) else "wrong"] += 1

    async def streamed(self, prompt: str, session: httpx.AsyncClient) -> bool:
        """Read a stream to its end, and tell whether its text is right."""

        text, begun, first = "", time.perf_counter(), 0.0
        async with session.stream("POST", f"{self.base}/completions", json=self.body(prompt, stream=True)) as stream:
            async for line in stream.aiter_lines():
                first = first or time.perf_counter() - begun
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        self.first_s.append(first)
        return text == self.answers[prompt]


def resident_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="../shared/models/stories260k")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--slots", type=int, default=32)
    args = parser.parse_args()
    command = [sys.executable, "-m", "posttrain", "serve", args.model, "--name", "m", "--port", "0"]
    command += ["--slots", str(args.slots), "--max-length", "64"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"}) as server:
        assert server.stdout is not None
        line = next(line for line in server.stdout if "http://" in line)
        base = next(word for word in line.split() if word.startswith("http://"))
        stress = Stress(base, "m", args.tokens, server.pid)
        begun = time.perf_counter()
        try:
            asyncio.run(stress.run(args.clients, args.requests))
            wall = time.perf_counter() - begun
            time.sleep(1.0)
            metrics = httpx.get(f"{base.removesuffix('/v1')}/metrics").text
        finally:
            server.terminate()
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    first = sorted(stress.first_s)
    print(f"{args.requests} requests of {args.clients} clients in {wall:.0f} s: {stress.counts}")
    print(f"tokens/s: {float(values['posttrain_completion_tokens_total']) / wall:.0f}")
    middle, late = first[len(first) // 2], first[len(first) * 95 // 100]
    print(f"first event of a stream, median and 95 %: {middle:.2f} s, {late:.2f} s")
    print("memory (MiB):", " ".join(f"{mib:.0f}" for mib in stress.memory_mib))
    left = {name: values[f"posttrain_{name}"] for name in ("samples_running", "samples_waiting", "cache_blocks_used")}
    print(f"left: {left}")
    if stress.counts["wrong"] or any(float(value) for value in left.values()):
        raise SystemExit("answers were wrong, or something is left")


if __name__ == "__main__":
    main()
