"""The work of `bench/rollout.py`, and the loop that a driver of an engine runs; needs numpy and nothing else.

A driver is a program of its own, in the Python of its engine. It gets a `Work` as JSON, makes the engine, and then for
each line of its input draws one batch and answers with what that took, so that engines can take turns.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

VOCABULARY = 4096
PAD, EOS, FIRST = 0, 1, 3
"""Token ids; those of prompts begin at `FIRST`."""


@dataclass(frozen=True)
class Work:
    """Requests to a random decoder of hidden 256 x 4 layers, 8 query and 4 key heads of 32, MLP 768, in float32."""

    prompts: int
    group: int
    """Samples of each prompt."""
    shared_tokens: int
    """Beginning that all prompts have in common."""
    own_tokens: int
    lengths: tuple[int, ...]
    """New tokens of each sample. An engine is not told them where they differ: its samples end by a stop token, or all
    go on until the longest is done."""

    @property
    def samples(self) -> int:
        return self.prompts * self.group

    @property
    def prompt_tokens(self) -> int:
        return self.shared_tokens + self.own_tokens

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def new_tokens(self) -> int:
        return sum(self.lengths)

    def prompt_batch(self, step: int) -> list[list[int]]:
        """Different prompts for every step."""
        rng = np.random.default_rng(step)
        shared = rng.integers(FIRST, VOCABULARY, self.shared_tokens).tolist()
        return [shared + rng.integers(FIRST, VOCABULARY, self.own_tokens).tolist() for _ in range(self.prompts)]

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Work:
        fields = json.loads(text)
        return cls(**{**fields, "lengths": tuple(fields["lengths"])})


LENGTHS = np.random.default_rng(0).integers(16, 49, 32)
"""Median 32; `skewed` makes three of them ten times that."""

WORKS = {
    "prompts": Work(prompts=32, group=1, shared_tokens=0, own_tokens=64, lengths=(128,) * 32),
    "groups": Work(prompts=4, group=8, shared_tokens=0, own_tokens=64, lengths=(128,) * 32),
    "skewed": Work(
        prompts=32,
        group=1,
        shared_tokens=0,
        own_tokens=64,
        lengths=tuple(320 if i in (5, 16, 27) else int(n) for i, n in enumerate(LENGTHS)),
    ),
    "system": Work(prompts=32, group=1, shared_tokens=512, own_tokens=32, lengths=(64,) * 32),
}

Draw = Callable[[], int]
"""Draws a batch; returns the number of new tokens that count."""


def serve(build: Callable[[Work], Callable[[int], Draw]], versions: Callable[[], dict[str, str]]) -> None:
    """`build(work)(step)` prepares the batch of a step, and returns what draws it."""
    before = peak_mib()
    prepare = build(Work.loads(sys.argv[1]))
    answer({"versions": versions(), "base_mib": before})
    for step, _ in enumerate(sys.stdin):
        start = time.perf_counter()
        draw = prepare(step)
        answer({"prepare_s": time.perf_counter() - start} | timed(draw) | {"peak_mib": peak_mib()})


def timed(draw: Draw) -> dict[str, Any]:
    wall, cpu, busy = time.perf_counter(), time.process_time(), busy_s()
    tokens = draw()
    wall, cpu, busy = time.perf_counter() - wall, time.process_time() - cpu, busy_s() - busy
    return {"tokens": tokens, "wall_s": wall, "cpu_s": cpu, "others_cpus": max(0.0, busy - cpu) / wall}


def busy_s() -> float:
    """Seconds that all processors of the machine together have worked."""
    with open("/proc/stat") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def answer(fields: dict[str, Any]) -> None:
    print(json.dumps(fields), flush=True)
