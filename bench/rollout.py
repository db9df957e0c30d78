"""Speed and memory of the native rollout engine, beside the machine's own limit.

    python bench/rollout.py [--work small | tiny] [--repeats N]

`small`: 32 different prompts of 64 tokens, 128 new tokens each, hidden 256 x 4 layers, vocabulary 4,096, float32.
`tiny`: 32 groups of 8 samples, prompts of 16 tokens, 24 new tokens, hidden 128 x 2 layers, vocabulary 262.

The limit is the time that the multiply-adds alone take at the rate of this machine's matrix product of the same
shape. `cpu` columns are process time, which neighbours on the machine disturb less than wall time.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from posttrain.models.decoder import Decoder
from posttrain.rollout.native import NativeEngine
from posttrain.rollout.types import SamplingParams, sample_key
from posttrain.weights.load import init_model


@dataclass(frozen=True)
class Work:
    embed_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    vocab_size: int
    prompts: int
    group: int
    prompt_tokens: int
    new_tokens: int

    @property
    def samples(self) -> int:
        return self.prompts * self.group

    @property
    def model(self) -> Decoder:
        fields = {
            "model_type": "llama",
            "hidden_size": self.embed_dim,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.mlp_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
        }
        return init_model(fields, dtype=jnp.float32, seed=0)

    @property
    def flops(self) -> float:
        """Multiply-adds x 2 of one batch: prompts once per group, causal attention, logits of new tokens only."""
        body = (
            self.num_layers
            * self.embed_dim
            * (2 * (self.num_heads + self.num_kv_heads) * self.head_dim + 3 * self.mlp_dim)
        )
        head = self.embed_dim * self.vocab_size
        attention = 4 * self.num_layers * self.num_heads * self.head_dim
        prompt = self.prompt_tokens * (2 * body + attention * self.prompt_tokens / 2)
        new = self.new_tokens * (2 * (body + head) + attention * (self.prompt_tokens + self.new_tokens / 2))
        return self.prompts * prompt + self.samples * new


WORKS = {
    "small": Work(256, 4, 8, 4, 32, 768, 4096, prompts=32, group=1, prompt_tokens=64, new_tokens=128),
    "tiny": Work(128, 2, 4, 2, 32, 384, 262, prompts=32, group=8, prompt_tokens=16, new_tokens=24),
}


def timed(call: Callable[[], object]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


def matmul_rate(rows: int, work: Work) -> float:
    """FLOP per second of process time of the product that decoding does most."""
    a, b = jnp.ones((rows, work.embed_dim)), jnp.ones((work.embed_dim, work.mlp_dim))
    times = 200
    product = jax.jit(lambda a, b: jax.lax.fori_loop(0, times, lambda _, x: x + 1e-9 * (x @ b)[:, :1], a))
    product(a, b).block_until_ready()
    cpu = min(timed(lambda: product(a, b).block_until_ready())[1] for _ in range(5))
    return 2 * rows * work.embed_dim * work.mlp_dim * times / cpu


def measure(name: str, work: Work, repeats: int) -> dict[str, float | str]:
    engine = NativeEngine(
        work.model,
        slots=work.samples,
        max_length=work.prompt_tokens + work.new_tokens,
        decode_steps=32,
        tokenizer_decode=None,
        version=0,
    )

    def batch(step: int) -> None:
        rng = np.random.default_rng(step)
        prompts = rng.integers(3, work.vocab_size, (work.prompts, work.prompt_tokens)).tolist()
        params = [
            SamplingParams(
                max_tokens=work.new_tokens, temperature=1.0, stop_token_ids=(), key=sample_key(0, step, p, g)
            )
            for p in range(work.prompts)
            for g in range(work.group)
        ]
        engine.generate_all([prompt for prompt in prompts for _ in range(work.group)], params)

    first, _ = timed(lambda: batch(0))
    times = np.asarray([timed(lambda step=step: batch(step)) for step in range(1, 1 + repeats)])
    wall, cpu = times.min(axis=0)
    tokens = work.samples * work.new_tokens
    return {
        "work": name,
        "tokens/s": tokens / wall,
        "tokens/s cpu": tokens / cpu,
        "batch s": wall,
        "batch cpu s": cpu,
        "first batch s": first,
        "compile s": engine.programs.compile_s,
        "programs": len(engine.programs),
        "share of limit %": 100 * work.flops / matmul_rate(work.samples, work) / cpu,
        "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=list(WORKS), help="by default all")
    parser.add_argument("--repeats", type=int, default=6)
    arguments = parser.parse_args()
    for name in [arguments.work] if arguments.work else WORKS:
        for key, value in measure(name, WORKS[name], arguments.repeats).items():
            print(f"{key:>18} {value:>12}" if isinstance(value, str | int) else f"{key:>18} {value:12.2f}")
        print()


if __name__ == "__main__":
    main()
