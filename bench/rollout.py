"""Speed and memory of the rollout engine beside other samplers and the machine's own limit.

    python bench/rollout.py [--work NAME ...] [--rounds N] [--cores N] [--tunix PYTHON] [--transformers PYTHON]
                            [--json FILE]

A random decoder of hidden 256 x 4 layers, vocabulary 4,096, float32, temperature 1; prompts differ in every round:

`prompts`: 32 prompts of 64 tokens, 128 new ones each. `groups`: 4 prompts x 8 samples, 64 + 128. `skewed`: 32 prompts
of 64, 16 to 48 new tokens, but 320 for three; no engine is told which. `system`: 32 prompts of 512 shared and 32 own
tokens, 64 new.

Each engine runs in a process of its own, a peer in the Python that is given (with what `peers/` imports), and they take
turns, so that what else the machine does falls on all. `best` is the fastest round. On a busy machine give `--cores 1`
and compare tokens per CPU second: threads that wait for each other in vain count as work.

The limit is the CPU time that the multiply-adds of the work take at the rate of this machine's matrix product of the
same rows, or that reading weights and cache takes at its rate of reading as many bytes again and again, whichever is
longer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

PEERS = Path(__file__).resolve().parent / "peers"
sys.path.insert(0, str(PEERS))

from work import VOCABULARY, WORKS, Work  # noqa: E402

BODY = 4 * 256 * (2 * (8 + 4) * 32 + 3 * 768)
HEAD = 256 * VOCABULARY
ATTENTION = 4 * 4 * 8 * 32
"""Multiply-adds x 2 of one new token per position of the context."""
CACHE_BYTES = 4 * 2 * 4 * 32 * 4
"""Of one position."""


class Driver:
    """A driver's process, which draws a batch when asked to."""

    def __init__(self, python: str, file: str, work: Work):
        environment = os.environ | {"PYTHONPATH": str(PEERS.parent.parent), "HF_HUB_OFFLINE": "1"}
        command = [python, str(PEERS / file), work.dumps()]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        self.facts = self._answer()

    def draw(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"{self._process.args} ended with code {self._process.wait()}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def seconds(call: Callable[[], object], times: int = 7) -> float:
    """Of the processor, for the cheapest call after the first."""
    call()
    taken = []
    for _ in range(times):
        start = time.process_time()
        call()
        taken.append(time.process_time() - start)
    return min(taken)


def matmul_rate(rows: int) -> float:
    """FLOP per second of the product that decoding does most."""
    a, b, times = jnp.ones((rows, 256)), jnp.ones((256, 768)), 200
    product = jax.jit(lambda a, b: jax.lax.fori_loop(0, times, lambda _, x: x + 1e-9 * (x @ b)[:, :1], a))
    return 2 * rows * 256 * 768 * times / seconds(lambda: product(a, b).block_until_ready())


def read_rate(size: int) -> float:
    """Bytes per second of products of one row with a matrix of as many bytes, which read it once each."""
    matrix, times = jnp.ones((256, size // 1024)), 20
    read = jax.jit(lambda x, m: jax.lax.fori_loop(0, times, lambda _, x: x + 1e-9 * (x @ m)[:, :1], x))
    return size * times / seconds(lambda: read(jnp.ones((1, 256)), matrix).block_until_ready())


def limits_s(work: Work) -> dict[str, float]:
    """Least seconds of a batch: prompts once each, what they share once; the head for new tokens only."""
    shared, own = work.shared_tokens, work.prompts * work.own_tokens
    flops = 2 * BODY * (shared + own) + ATTENTION * (shared**2 / 2 + own * (shared + work.own_tokens / 2))
    positions = sum(n * (work.prompt_tokens + n / 2) for n in work.lengths)
    flops += 2 * (BODY + HEAD) * work.new_tokens + ATTENTION * positions
    read = 4 * (BODY + HEAD) * work.longest + CACHE_BYTES * positions
    rate = matmul_rate(max(1, round(work.new_tokens / work.longest)))
    return {"matmul": flops / rate, "bandwidth": read / read_rate(4 * (BODY + HEAD))}


def measure(name: str, drivers: dict[str, tuple[str, str]], rounds: int) -> dict[str, dict[str, Any]]:
    """By engine, what its rounds took."""
    work = WORKS[name]
    running = {engine: Driver(python, file, work) for engine, (python, file) in drivers.items()}
    first = {engine: driver.draw() for engine, driver in running.items()}
    taken: dict[str, list[dict[str, Any]]] = {engine: [] for engine in running}
    for _ in range(rounds):
        for engine, driver in running.items():
            taken[engine].append(driver.draw())
    limits = limits_s(work)
    bound = max(limits, key=lambda limit: limits[limit])
    results = {}
    for engine, driver in running.items():
        driver.close()
        best = min(taken[engine], key=lambda one: one["wall_s"])
        total = [one["wall_s"] + one["prepare_s"] for one in (first[engine], *taken[engine])]
        speeds = [one["tokens"] / one["wall_s"] for one in taken[engine]]
        results[engine] = {
            "tokens/s, best": best["tokens"] / best["wall_s"],
            "tokens/s, median": statistics.median(speeds),
            "tokens per CPU s": max(one["tokens"] / one["cpu_s"] for one in taken[engine]),
            "batch s": best["wall_s"],
            "first batch s": total[0],
            "of it compiling": total[0] - min(total[1:]),
            f"share of {bound} limit %": 100 * limits[bound] / min(one["cpu_s"] for one in taken[engine]),
            "peak MiB": taken[engine][-1]["peak_mib"],
            "of it beyond imports": taken[engine][-1]["peak_mib"] - driver.facts["base_mib"],
            "others' CPUs": sum(one["others_cpus"] for one in taken[engine]) / rounds,
            "versions": driver.facts["versions"],
        }
    return results


def show(name: str, results: dict[str, dict[str, Any]]) -> None:
    print(f"{name:<24}" + "".join(f"{engine:>14}" for engine in results))
    keys = [key for key in next(iter(results.values())) if key != "versions"]
    for key in keys:
        print(f"{key:<24}" + "".join(f"{result[key]:>14,.2f}" for result in results.values()))
    for key in ("tokens/s, median", "tokens per CPU s"):
        own = results["posttrain"][key]
        print(f"{'times: ' + key:<24}" + "".join(f"{own / result[key]:>14,.2f}" for result in results.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=list(WORKS), nargs="+", default=list(WORKS))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--cores", type=int, default=os.cpu_count(), help="that each engine may use, by default all")
    parser.add_argument("--tunix", metavar="PYTHON", help="of an environment with google-tunix")
    parser.add_argument("--transformers", metavar="PYTHON", help="of an environment with transformers and torch")
    parser.add_argument("--json", type=Path, help="also write all figures here")
    arguments = parser.parse_args()
    drivers = {"posttrain": (sys.executable, "native.py")}
    if arguments.tunix:
        drivers["tunix"] = (arguments.tunix, "tunix_sampler.py")
    if arguments.transformers:
        drivers["transformers"] = (arguments.transformers, "transformers_generate.py")
    found = {}
    cores = sorted(os.sched_getaffinity(0))[: arguments.cores]
    os.sched_setaffinity(0, cores)  # of the drivers, too, which take it over
    for name in arguments.work:
        print(f"\nload average {os.getloadavg()[0]:.1f}, {len(cores)} of {os.cpu_count()} cores")
        found[name] = measure(name, drivers, arguments.rounds)
        show(name, found[name])
    for engine, result in next(iter(found.values())).items():
        print(f"\n{engine}: " + ", ".join(f"{package} {version}" for package, version in result["versions"].items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
