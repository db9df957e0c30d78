"""The host's part of a decode dispatch, during which the device idles: plan, arrays of the programs, delivery.

    PYTHONPATH=. python bench/host.py [--rows 256] [--tokens 7000] [--vocabulary 152000]

CPU milliseconds, the best of five. No model and no program: made-up tokens stand for what the device would return. All
rows are plain, or the first asks for a repetition penalty, or for allowed tokens (a tenth of the vocabulary), or all
for a penalty. `prepare` holds the transfers.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from dataclasses import replace
from typing import Any, cast

import jax
import numpy as np

from posttrain.rollout.blocks import blocks_for
from posttrain.rollout.decode_weights import PassCost
from posttrain.rollout.decoding import DecodedTokens
from posttrain.rollout.dispatch import DispatchOutcome, deliver
from posttrain.rollout.programs import Shapes
from posttrain.rollout.request import Request
from posttrain.rollout.runner import Runner
from posttrain.rollout.sampling import TopLogps
from posttrain.rollout.scheduler import Plan, Scheduler
from posttrain.rollout.types import SamplingParams

STEPS, DISPATCHES, NEW_TOKENS = 32, 5, 1000


COST = PassCost(
    bandwidth=1e12, flops=1e14, dense_bytes=1e9, dense_size=5e8, expert_bytes=0.0, expert_size=0.0, active=0.0,
    expert_devices=1, layers=4,
)  # fmt: skip
"""Costs of a model that is not there."""


class LoadedNothing:
    version = 0


def params(number: int, kind: str, vocabulary: int) -> SamplingParams:
    plain = SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, stop_token_ids=(vocabulary - 1,), key=(0, number))
    if kind == "all penalized" or (kind == "one penalized" and number == 0):
        return replace(plain, repetition_penalty=1.1)
    if kind == "one constrained" and number == 0:
        return replace(plain, allowed_token_ids=tuple(range(0, vocabulary, 10)))
    return plain


def outcome(plan: Plan, rows: int, vocabulary: int, rng: np.random.Generator) -> DispatchOutcome:
    tokens = rng.integers(0, vocabulary - 1, (STEPS, rows)).astype(np.int32)
    logps = np.full((STEPS, rows), -1.0, np.float32)
    is_plain = all(row.request.params.is_plain for row in plan.decode)
    top = (
        None if is_plain else TopLogps(tokens=np.zeros((STEPS, rows, 20), np.int32), logps=np.zeros((STEPS, rows, 20)))
    )
    counts = np.full(rows, STEPS, np.int32)
    chunk = cast(Any, DecodedTokens)(
        tokens=tokens, logps=logps, kept_logps=0 * logps, counts=counts, top=top, experts=None
    )
    return DispatchOutcome(prefilled=[], chunk=chunk)


def measure(kind: str, rows: int, tokens: int, vocabulary: int) -> dict[str, float]:
    rng = np.random.default_rng(0)
    longest = tokens + NEW_TOKENS
    scheduler = Scheduler(slots=rows, lanes=1, blocks=rows * blocks_for(longest) + 1, max_length=longest, steps=STEPS)
    runner = Runner(Shapes(rows, 1, longest, STEPS), blocks=1, record=False, vocab_size=vocabulary, cost=COST)
    for number in range(rows):
        prompt = tuple(rng.integers(0, vocabulary, tokens).tolist())
        scheduler.submit(Request(prompt=prompt, params=params(number, kind, vocabulary)))
    loaded = cast(Any, LoadedNothing())
    seconds: dict[str, list[float]] = defaultdict(list)
    while len(seconds["plan"]) < DISPATCHES:
        start = time.process_time()
        plan = scheduler.plan()
        assert plan is not None
        if plan.pieces:
            scheduler.settle(replace(plan, decode=[]))
            continue
        planned = time.process_time()
        dispatch = runner.prepare(plan, loaded)
        assert dispatch.decode is not None
        jax.block_until_ready(dispatch.decode.rows)
        prepared = time.process_time()
        found = outcome(plan, rows, vocabulary, rng)
        returned = time.process_time()
        deliver(dispatch, found, scheduler.holds, None)
        scheduler.settle(plan)
        done = time.process_time()
        for name, span in {"plan": planned - start, "prepare": prepared - planned, "deliver": done - returned}.items():
            seconds[name].append(span)
    return {name: 1000 * min(spans) for name, spans in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=7000)
    parser.add_argument("--vocabulary", type=int, default=152_000)
    arguments = parser.parse_args()
    for kind in ("all plain", "one penalized", "one constrained", "all penalized"):
        spans = measure(kind, arguments.rows, arguments.tokens, arguments.vocabulary)
        print(f"{kind:16}", *(f"{name} {span:6.1f}" for name, span in spans.items()), f"sum {sum(spans.values()):6.1f}")


if __name__ == "__main__":
    main()
