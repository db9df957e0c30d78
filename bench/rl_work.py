"""One work of `bench/rl.py` in a process of its own; prints what it took as a line of JSON.

python bench/rl_work.py WORK --steps N
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from rl import FIRST, SKIPPED, VOCAB, WORKS, Work
from tokenizers import Tokenizer as Words
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from posttrain.cluster.cluster import Cluster
from posttrain.cluster.reference import Reference
from posttrain.cluster.sync import Shared
from posttrain.config import AdamW, SamplingSection
from posttrain.data.chat import Renderer
from posttrain.data.tokenizer import Tokenizer
from posttrain.losses.policy import GRPO
from posttrain.metrics import Timer, to_host
from posttrain.models.decoder import Decoder
from posttrain.reward.function import Reward
from posttrain.reward.rubric import Rubric
from posttrain.rl.advantages import standardized
from posttrain.rl.agreement import ROUNDED, SamplerGate
from posttrain.rl.algorithms import Algorithm
from posttrain.rl.collector import RolloutCollector
from posttrain.rl.sampler import Sampler, Source
from posttrain.rl.step import StepSettings, rl_step
from posttrain.rollout.engine import NativeEngine
from posttrain.rollout.trajectory import Example
from posttrain.rollout.types import Completion, SamplingParams
from posttrain.runtime.event_loop import run_async
from posttrain.train.objective import TrainSettings
from posttrain.train.trainer import Trainer
from posttrain.train.transformations import make_optimizer
from posttrain.weights.load import init_model

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 768,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}


def word_tokenizer(vocab: int) -> Tokenizer:
    """Token id i is the word "wi"."""
    words = {"<pad>": 0, "<eos>": 1, "<bos>": 2, **{f"w{i}": i for i in range(FIRST, vocab)}}
    found = Words(models.WordLevel(words, unk_token="<pad>"))
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=found, pad_token="<pad>", eos_token="<eos>")
    return Tokenizer(fast, "words", {}, {})


class Ending:
    """Engine whose samples end by a stop token at given lengths, which it cannot foresee: the same key gives the same
    sample, so that a draw before the step tells the token. Weights must not change."""

    def __init__(self, engine: NativeEngine, lengths: list[int]):
        self._engine, self._lengths = engine, lengths
        self._stops: dict[tuple[int, int], int] = {}

    def prepare(self, prompts: list[list[int]], params: list[SamplingParams]) -> None:
        for completion, one, length in zip(
            self._engine.generate_all(prompts, params), params, self._lengths, strict=True
        ):
            tokens = completion.tokens
            self._stops[one.key] = next(tokens[i] for i in reversed(range(length)) if tokens[i] not in tokens[:i])

    async def generate(
        self, prompt: list[int], params: SamplingParams, *, partial: Completion | None = None
    ) -> Completion:
        stop = self._stops.get(params.key)
        return await self._engine.generate(prompt, params if stop is None else replace(params, stop_token_ids=(stop,)))

    def update_weights(self, model: Any, version: int) -> None:
        self._engine.update_weights(model, version)

    def close(self) -> None:
        self._engine.close()


class Places:
    """Every place once."""

    def __init__(self) -> None:
        self.position = -1

    def __next__(self) -> int:
        self.position += 1
        return self.position

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Nothing is resumed here."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A cluster, and what a step needs."""

    cluster: Cluster
    algorithm: Algorithm
    collector: RolloutCollector
    settings: StepSettings
    engine: Ending
    native: NativeEngine
    tokens: list[list[int]]
    work: Work

    def step(self, number: int) -> dict[str, float]:
        """One step, with wall and process time."""
        sampler = self.collector.sampler
        if len(set(self.work.lengths)) > 1:
            first, places = number * self.work.prompts, range(self.work.prompts)
            prompts = [self.tokens[first + p] for p in places for _ in self.work.lengths]
            keys = [sampler.params(first + p, g) for p in places for g in range(self.work.group)]
            self.engine.prepare(prompts, keys)
            self.native.update_weights(self.cluster.actor.model, number)  # no prefix of the draw before is of use
        wall, cpu, timer = time.perf_counter(), time.process_time(), Timer()
        result = run_async(rl_step(self.cluster, self.algorithm, self.collector, self.settings, timer))
        count = to_host(result.metrics)["completions/num_tokens"]
        spent = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "count": count}
        return spent | timer.metrics()


def sevens(completions: list[str]) -> list[float]:
    return [float(sum(word.endswith("7") for word in text.split())) for text in completions]


def build(work: Work, steps: int, model: Decoder, optimizer: AdamW, micro_batch_rows: int) -> Bench:
    samples, longest, row = work.prompts * work.group, max(work.lengths), work.prompt_tokens + max(work.lengths)
    algorithm, vocab = Algorithm("grpo", GRPO, standardized), model.config.vocab_size
    trainer = Trainer(
        model,
        algorithm.loss,
        make_optimizer(optimizer, steps, seed=0, model=model),
        TrainSettings(
            temperature=1.0,
            max_grad_norm=1.0,
            micro_batch_rows=micro_batch_rows,
            skip_update=SamplerGate(rounding=ROUNDED),
        ),
    )
    native = NativeEngine(model, slots=samples, max_length=row, decode_steps=32, tokenizer_decode=None)
    engine = Ending(native, list(work.lengths) * work.prompts)
    cluster = Cluster(trainer, engine, Shared(trainer), reference=Reference(trainer))
    cluster.sync_weights(cluster.version)
    tokens = np.random.default_rng(0).integers(FIRST, vocab, (steps * work.prompts, work.prompt_tokens)).tolist()
    collector = RolloutCollector(
        sampler=Sampler(
            engine=engine,
            renderer=Renderer(word_tokenizer(vocab), False),
            sampling=SamplingSection(max_tokens=longest, temperature=1.0, ignore_eos=True),
            max_prompt_tokens=work.prompt_tokens,
            seed=0,
        ),
        rubric=Rubric([Reward(function=sevens, weight=1.0, timeout_s=60.0)]),
        source=Source(Places(), [example(n, one) for n, one in enumerate(tokens)]),
        group_size=work.group,
        groups_per_step=work.prompts,
        steps_per_version=1,
    )
    settings = StepSettings(
        row_tokens=row,
        num_rows=samples,
        updates=1,
        epochs=1,
        seed=0,
        old_logps="self",
        zero_advantage="skip",
        stale=False,
    )
    parts = {"cluster": cluster, "algorithm": algorithm, "collector": collector, "settings": settings}
    return Bench(**parts, engine=engine, native=native, tokens=tokens, work=work)


def example(number: int, tokens: list[int]) -> Example:
    messages = [{"role": "user", "content": ""}]
    return Example(index=number, row={"prompt": ""}, messages=messages, prompt_tokens=tokens, plain=True)


def run(name: str, steps: int) -> dict[str, float]:
    model, work = init_model(CONFIG, dtype=jnp.float32, seed=0), WORKS[name]
    start = peak()
    rate = 1e-4 if len(set(work.lengths)) == 1 else 1e-30  # the tokens of a draw before must come again
    bench = build(work, steps, model, AdamW(learning_rate=rate), micro_batch_rows=work.prompts * work.group // 8)
    found = [bench.step(number) for number in range(steps)]
    steady = found[SKIPPED:]
    middle, cpu = statistics.median(one["wall"] for one in steady), min(one["cpu"] for one in steady)
    count = statistics.mean(one["count"] for one in steady)
    return {
        "tokens_per_s": count / middle,
        "tokens_per_s_best": count / min(one["wall"] for one in steady),
        "tokens_per_cpu_s": count / cpu,
        "step_s": middle,
        "step_cpu_s": cpu,
        "first_step_s": found[0]["wall"],
        "peak_mib": peak(),
        "start_mib": start,
    }


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    print(json.dumps(run(arguments.work, arguments.steps)))


if __name__ == "__main__":
    main()
