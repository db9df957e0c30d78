"""Wears the native rollout engine out: thousands of random requests, aborts, cancellations, pauses and new weights.

    python bench/soak.py [--requests 2000] [--seed 0]

Ends with an error if a request is lost or wrong in form, a block does not come back, a program is compiled after the
warm-up, or memory grows. Samples are short, so that little time goes into arithmetic.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posttrain.metrics import CompileCounter
from posttrain.models.decoder import Decoder
from posttrain.rollout.engine import NativeEngine
from posttrain.rollout.programs import Expected
from posttrain.rollout.types import Completion, SamplingParams, sample_key
from posttrain.weights.load import init_model

VOCABULARY, CONCURRENT = 256, 200
STOPS = (5, 69, 133, 197)
FIELDS = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
RARE: tuple[dict[str, Any], ...] = (
    {"top_k": 20, "top_p": 0.9},
    {"repetition_penalty": 1.3, "top_logps": 2},
    {"prompt_logps": True},
    {"temperature": 0.0},
    {"stop": ("<7>", "5><1", "99")},
    {"logit_bias": {7: 3.0}, "allowed_token_ids": tuple(range(0, VOCABULARY, 3))},
)


@dataclass
class Report:
    ends: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    updates: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    warm_up_s: float = 0.0
    compiled_later: int = 0
    memory_mib: list[float] = field(default_factory=list)
    """Resident, each time another tenth of the requests is done."""
    arrays: list[int] = field(default_factory=list)
    """On the device, at the same times."""
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def growth(self) -> float:
        """Of the resident memory, after the first third."""
        later = self.memory_mib[len(self.memory_mib) // 3 :]
        return max(later) / later[0] - 1


def text_of(tokens: Sequence[int], skip_special_tokens: bool = True, *, after: Sequence[int] = ()) -> str:
    return "".join(f"<{token}>" for token in tokens)


def make_params(rng: np.random.Generator, number: int, longest: int) -> SamplingParams:
    settings: dict[str, Any] = {"temperature": 1.0}
    if rng.random() < 0.2:
        settings |= RARE[rng.integers(len(RARE))]
    return SamplingParams(
        max_tokens=int(rng.integers(1, longest + 1)),
        stop_token_ids=STOPS if rng.random() < 0.5 else (),
        key=sample_key(0, 0, number, 0),
        **settings,
    )


def make_prompt(rng: np.random.Generator, beginnings: list[list[int]]) -> list[int]:
    """A third begins with one of a few system prompts, or is a prompt that somebody had before."""
    own = rng.integers(0, VOCABULARY, int(rng.integers(1, 60))).tolist()
    kind = rng.random()
    if kind < 0.3:
        return [*beginnings[rng.integers(4)], *own[:20]]
    if kind < 0.6:
        return beginnings[rng.integers(len(beginnings))]
    beginnings.append(own)
    return own


class Soak:
    def __init__(self, engine: NativeEngine, models: list[Decoder], requests: int, seed: int):
        self.engine, self.models, self.requests = engine, models, requests
        self.longest = engine.max_length
        self.rng = np.random.default_rng(seed)
        self.report = Report()
        self.gate = asyncio.Semaphore(CONCURRENT)
        self.running: dict[tuple[int, int], asyncio.Task[None]] = {}

    async def run(self) -> Report:
        beginnings = [self.rng.integers(0, VOCABULARY, n).tolist() for n in (65, 67, 70, 72)]
        tasks = []
        trouble = asyncio.create_task(self._trouble())
        for number in range(self.requests):
            await self.gate.acquire()
            prompt = make_prompt(self.rng, beginnings)
            params = make_params(self.rng, number, min(60, self.longest - len(prompt)))
            task = asyncio.create_task(self._one(prompt, params))
            self.running[params.key] = task
            task.add_done_callback(partial(self._ended, params.key))
            tasks.append(task)
            if number % 7 == 0:
                await asyncio.sleep(0)
        errors = [
            found for found in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(found, Exception)
        ]
        trouble.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await trouble
        if errors:
            raise ExceptionGroup(f"{len(errors)} requests failed", errors)
        return self.report

    async def _one(self, prompt: list[int], params: SamplingParams) -> None:
        completion = await self.engine.generate(prompt, params)
        if completion.stop == "abort" and self.rng.random() < 0.5:
            self.report.ends["continued"] += 1
            completion = await self.engine.generate(prompt, params, partial=completion)
        check(completion, prompt, params)
        self.report.ends[completion.stop] += 1
        self.report.tokens += len(completion.tokens)

    def _ended(self, key: tuple[int, int], task: asyncio.Task[None]) -> None:
        """Also of a task that was cancelled before it began."""
        if task.cancelled():
            self.report.ends["cancelled"] += 1
        del self.running[key]
        self.gate.release()
        self._measure()

    async def _trouble(self) -> None:
        """What trainers and impatient callers do, again and again."""
        while True:
            await asyncio.sleep(float(self.rng.exponential(0.05)))
            keys = list(self.running)
            if not keys:
                continue
            chosen = [keys[i] for i in self.rng.integers(0, len(keys), 3)]
            match self.rng.integers(6):
                case 0 | 1:
                    self.engine.abort(chosen)
                case 2:
                    self.running[chosen[0]].cancel()
                case 3:
                    self._update()
                case 4:
                    await self.engine.pause()
                    self._update()
                    self.engine.resume()
                case _:
                    await self.engine.drain()
                    self._update()
                    self.engine.resume()

    def _update(self) -> None:
        self.report.updates += 1
        self.engine.update_weights(self.models[self.report.updates % len(self.models)], self.report.updates)

    def _measure(self) -> None:
        ended = sum(self.report.ends.values()) - self.report.ends["continued"]
        if ended % max(1, self.requests // 10) == 0:
            self.report.memory_mib.append(resident_mib())
            self.report.arrays.append(len(jax.live_arrays()))


def resident_mib() -> float:
    fields = Path("/proc/self/status").read_text().split()
    return int(fields[fields.index("VmRSS:") + 1]) / 1024


def check(completion: Completion, prompt: list[int], params: SamplingParams) -> None:
    count = len(completion.tokens)
    lengths = {len(completion.logps), len(completion.kept_logps), len(completion.weights_versions)}
    assert lengths == {count}, "one entry for each token"
    assert list(completion.weights_versions) == sorted(completion.weights_versions)
    assert np.isfinite(completion.logps).all()
    assert {
        "length": count == params.max_tokens,
        "stop": count > 0 and (completion.tokens[-1] in params.stop_token_ids or ends_by_text(completion, params)),
        "abort": count < params.max_tokens,
    }[completion.stop]
    assert (completion.prompt_logps is not None) == params.prompt_logps
    if completion.prompt_logps is not None and completion.stop != "abort":
        assert len(completion.prompt_logps) == len(prompt)


def ends_by_text(completion: Completion, params: SamplingParams) -> bool:
    """Its last token is the first that completes a stop string."""
    texts = text_of(completion.tokens), text_of(completion.tokens[:-1])
    whole, before = (any(stop in text for stop in params.stop) for text in texts)
    return whole and not before


def soak(requests: int, *, seed: int, longest: int) -> Report:
    """Sequences of up to `longest` tokens, in blocks for three of them.

    AssertionError where something is lost, wrong, or growing.
    """
    models = [init_model(FIELDS, dtype=jnp.float32, seed=seed) for seed in range(2)]
    engine = NativeEngine(
        models[0], slots=16, max_length=longest, decode_steps=8, tokenizer_decode=text_of, cache_tokens=3 * longest
    )
    rng = np.random.default_rng(seed)
    like = [Expected(params=make_params(rng, number, 60)) for number in range(100)]
    begin = time.perf_counter()
    engine.warm_up(like)
    counter, start, cpu = CompileCounter(), time.perf_counter(), time.process_time()
    report = asyncio.run(Soak(engine, models, requests, seed).run())
    report.seconds, report.cpu_s = time.perf_counter() - start, time.process_time() - cpu
    report.warm_up_s = start - begin
    report.compiled_later = int(counter.metrics()["perf/compilations"])
    counter.close()
    report.metrics = engine.metrics()
    ended = sum(report.ends.values()) - report.ends["continued"]
    assert ended == requests, f"{requests - ended} requests are lost"
    assert report.compiled_later == 0, f"{report.compiled_later} programs were compiled after the warm-up"
    assert report.metrics["rollout/late_compilations"] == 0
    assert engine.num_free == engine.slots and engine.num_used_blocks == 0, "slots or blocks did not come back"
    assert report.metrics["rollout/preemptions"] > 0 < report.metrics["rollout/prefix_hit_rate"]
    assert report.growth < 0.05, f"memory grew by {report.growth:.0%}: {report.memory_mib}"
    third = len(report.arrays) // 3
    # What runs at the time has some arrays of its own.
    assert max(report.arrays[third:]) < report.arrays[third] + 60, f"arrays stay: {report.arrays}"
    engine.close()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    report = soak(arguments.requests, seed=arguments.seed, longest=192)
    print(f"ends         {dict(report.ends)}")
    print(f"tokens       {report.tokens:,}, {report.updates} weight updates")
    print(f"seconds      {report.seconds:.1f}, of the CPU {report.cpu_s:.1f}, warm-up {report.warm_up_s:.1f}")
    print(f"metrics      {report.metrics}")
    print(f"memory MiB   {[round(x) for x in report.memory_mib]}")
    print(f"arrays       {report.arrays}")
    print(f"growth       {report.growth:.1%} after the first third")


if __name__ == "__main__":
    main()
