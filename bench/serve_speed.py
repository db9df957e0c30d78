"""Speed of `posttrain serve` beside vLLM for CPU and `transformers serve`: time to the first text and tokens/s.

    python bench/serve_speed.py --model MODEL --vllm PYTHON --transformers PYTHON --clients 1 8 32 128 --rounds 5
    python bench/serve_speed.py --model MODEL --constrained 1 --clients 32

All servers stand at once, idle but for the one whose turn it is; in each round every number of clients is put to each
of them in turn. A client sends one streamed completion after the other, greedy, over prompts that no two requests
share. With `--constrained N` the first N clients ask for text by a regular expression (not of `transformers serve`).
Medians over the rounds; `first`: of the requests of a round, the median and that of the slowest twentieth.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WORDS = (
    "Once",
    "upon",
    "time",
    "there",
    "was",
    "little",
    "girl",
    "Lily",
    "dog",
    "Tom",
    "played",
    "park",
    "big",
    "ball",
)
PROMPT_WORDS = 24
PATTERN = "[a-z ]+"
CPU_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Server:
    """Server of one kind that listens."""

    kind: str
    port: int
    model: str


@dataclass
class Turn:
    """Measurements of one server with so many clients."""

    first_s: list[float] = field(default_factory=list)
    tokens: int = 0
    constrained_tokens: int = 0
    seconds: float = 0.0
    texts: dict[int, str] = field(default_factory=dict)
    """Text of each request."""

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def command(kind: str, args: argparse.Namespace, port: int) -> tuple[list[str], str]:
    """Command of a server, and the name of its model."""
    most, length = str(max(args.clients)), str(args.length)
    if kind == "vllm":
        words = [args.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", args.model, "--port", str(port)]
        words += ["--host", "127.0.0.1", "--served-model-name", "m", "--dtype", "float32", "--max-num-seqs", most]
        return [*words, "--max-model-len", length, *args.vllm_options.split()], "m"
    if kind == "transformers":
        words = [str(Path(args.transformers).with_name("transformers")), "serve", args.model, "--device", "cpu"]
        return [*words, "--port", str(port), "--host", "127.0.0.1", *args.transformers_options.split()], args.model
    words = [args.python if kind == "before" else sys.executable, "-m", "posttrain", "serve", args.model]
    words += ["--name", "m", "--port", str(port), "--slots", most, "--max-length", length]
    return [*words, *args.options.split()], "m"


@contextmanager
def running(kind: str, args: argparse.Namespace) -> Iterator[Server]:
    """Start a server, and end it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words, model = command(kind, args, port)
    folder = args.before if kind == "before" else None
    with (
        open(f"{args.logs}/{kind}.log", "w") as log,
        subprocess.Popen(words, stdout=log, stderr=log, env={**os.environ, **CPU_ENV}, cwd=folder) as process,
    ):
        try:
            while True:
                if process.poll() is not None:
                    raise SystemExit(f"{kind} has ended: {args.logs}/{kind}.log says why")
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
                    break
                except OSError:
                    time.sleep(0.2)
            yield Server(kind, port, model)
        finally:
            process.terminate()


async def events(server: Server, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Events of one streamed request, over a connection of its own and with next to no work for the client."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    data = json.dumps(body).encode()
    head = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    writer.write("\r\n".join([*head, f"Content-Length: {len(data)}\r\n\r\n"]).encode() + data)
    try:
        status = await reader.readline()
        while (await reader.readline()).strip():
            pass
        if b" 200 " not in status:
            raise SystemExit(f"{server.kind}: {status!r} {await reader.read(2000)!r}")
        rest = b""
        while size := int(await reader.readline(), 16):
            *whole, rest = (rest + (await reader.readexactly(size + 2))[:-2]).split(b"\n")
            for line in whole:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])
    finally:
        writer.close()


async def ask(server: Server, number: int, args: argparse.Namespace, turn: Turn, *, constrained: bool) -> None:
    """One request: its time to the first text, and its tokens."""
    words = [WORDS[(number * 7919 + place * (number + 3)) % len(WORDS)] for place in range(PROMPT_WORDS)]
    body: dict[str, Any] = {"model": server.model, "prompt": " ".join(words), "max_tokens": args.tokens}
    body |= {"temperature": 0, "stream": True}
    if server.kind != "transformers":
        body |= {"stream_options": {"include_usage": True}, "ignore_eos": True}
    if constrained:
        body |= {"structured_outputs": {"regex": PATTERN}}
    begun, text, tokens = time.perf_counter(), "", 0
    first = None
    async for one in events(server, body):
        if "choices" not in one:
            raise SystemExit(f"{server.kind}: {one}")
        text += "".join(choice["text"] for choice in one["choices"])
        if text and first is None:
            first = time.perf_counter() - begun
        tokens = (one.get("usage") or {}).get("completion_tokens", tokens)
    if constrained:
        turn.constrained_tokens += tokens
        return
    turn.first_s.append(first if first is not None else time.perf_counter() - begun)
    turn.tokens += tokens
    turn.texts[number] = text


async def measure(server: Server, clients: int, args: argparse.Namespace, start: int) -> Turn:
    """Requests of all clients. Those of constrained ones go on as long as others run."""
    turn = Turn()
    numbers = iter(range(start, start + max(args.requests, clients)))
    constrained = min(args.constrained, clients - 1)

    async def plain() -> None:
        for number in numbers:
            await ask(server, number, args, turn, constrained=False)

    async def by_grammar(client: int) -> None:
        while True:
            await ask(server, start + 10_000 + client, args, turn, constrained=True)

    begun = time.perf_counter()
    beside = [asyncio.create_task(by_grammar(client)) for client in range(constrained)]
    await asyncio.gather(*(plain() for _ in range(clients - constrained)))
    turn.seconds = time.perf_counter() - begun
    for task in beside:
        task.cancel()
    await asyncio.gather(*beside, return_exceptions=True)
    return turn


def report(turns: dict[tuple[int, str], list[Turn]]) -> None:
    for (clients, kind), several in turns.items():
        speeds = [one.speed for one in several]
        middle = statistics.median(statistics.median(one.first_s) for one in several)
        late = statistics.median(sorted(one.first_s)[len(one.first_s) * 95 // 100] for one in several)
        ours = turns[clients, "posttrain"]
        pairs = [(a.texts[n], b.texts[n]) for a, b in zip(several, ours, strict=True) for n in a.texts]
        same = sum(a == b for a, b in pairs) / len(pairs)
        constrained = statistics.median(one.constrained_tokens / one.seconds for one in several)
        beside = f" + {constrained:.0f} by grammar" if constrained else ""
        speed = f"{statistics.median(speeds):,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f}){beside}"
        print(
            f"| {clients} | {kind} | {speed} | {1e3 * middle:.0f} ms | {1e3 * late:.0f} ms | {same:.0%} |", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--vllm", help="Python of an environment with vLLM for CPU.")
    parser.add_argument("--transformers", help="Python of an environment with transformers[serving].")
    parser.add_argument("--before", help="Folder of another version of this package.")
    parser.add_argument("--python", default=sys.executable, help="Its Python.")
    parser.add_argument("--options", default="")
    parser.add_argument("--vllm-options", default="")
    parser.add_argument("--transformers-options", default="")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--constrained", type=int, default=0)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--logs", default="/tmp")
    args = parser.parse_args()
    kinds = ["posttrain", *(kind for kind in ("before", "vllm", "transformers") if getattr(args, kind))]
    turns: dict[tuple[int, str], list[Turn]] = {(n, kind): [] for n in args.clients for kind in kinds}
    print(
        "| clients | server | tokens/s | first text: median | 95 % | texts as ours |\n|---|---|---|---|---|---|",
        flush=True,
    )
    with ExitStack() as stack:
        servers = [stack.enter_context(running(kind, args)) for kind in kinds]
        for clients in args.clients:
            for number in range(-1, args.rounds):
                for server in servers[number % len(servers) :] + servers[: number % len(servers)]:
                    turn = asyncio.run(measure(server, clients, args, start=1 + (number + 1) * 1_000_000))
                    if number >= 0:  # the first is for what is done once
                        turns[clients, server.kind].append(turn)
            report({key: several for key, several in turns.items() if key[0] == clients})


if __name__ == "__main__":
    main()
