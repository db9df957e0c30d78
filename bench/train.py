"""Speed and memory of a training step, beside the machine's own limit.

    python bench/train.py [--work sft | lora] [--repeats N]

8 rows of 256 random tokens, hidden 256 x 4 layers, 8 heads on 4 key-value heads of 32, MLP 768, tied vocabulary of
4,096, float32, AdamW. `sft` trains every weight, `lora` adapters of rank 16 on all linear layers.

The limit is the time that the multiply-adds alone take at the rate of this machine's matrix products in the shape of
the MLP. `cpu` rows are process time, which neighbours on the machine disturb less than wall time. `added` is the
memory that compilation and steps took on top of the loaded model.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from posttrain.batch import Batch
from posttrain.config import LoRA, OptimizerSection
from posttrain.losses.sft import SFTLoss
from posttrain.optim import make_optimizer
from posttrain.trainer import Trainer
from posttrain.weights.load import init_model

ROWS, TOKENS = 8, 256
EMBED, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB = 256, 4, 8, 4, 32, 768, 4096
RANK = 16
CONFIG = {
    "model_type": "llama",
    "hidden_size": EMBED,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": MLP,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
WORKS = {"sft": None, "lora": LoRA(rank=RANK)}


def step_flops(lora: bool) -> float:
    """Multiply-adds x 2 of one step: forward and two products backward, one where the weights are frozen."""
    body = LAYERS * EMBED * (2 * (HEADS + KV_HEADS) * HEAD_DIM + 3 * MLP)
    attention = LAYERS * 2 * HEADS * HEAD_DIM * TOKENS
    return (2 if lora else 3) * ROWS * TOKENS * (2 * (body + EMBED * VOCAB) + attention)


def timed(call: Callable[[], object]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


def matmul_rates() -> tuple[float, float]:
    """FLOP per second of wall and of process time in the products that a step does most: into the MLP and back."""
    x, up, down = jnp.ones((ROWS * TOKENS, EMBED)), jnp.full((EMBED, MLP), 1 / EMBED), jnp.full((MLP, EMBED), 1 / MLP)
    times = 10
    products = jax.jit(lambda x, up, down: jax.lax.fori_loop(0, times, lambda _, x: (x @ up) @ down, x))
    products(x, up, down).block_until_ready()
    wall, cpu = np.min([timed(lambda: products(x, up, down).block_until_ready()) for _ in range(8)], axis=0)
    flops = 4 * ROWS * TOKENS * EMBED * MLP * times
    return flops / wall, flops / cpu


def batch(tokens: Int[np.ndarray, "B T"]) -> Batch:
    """Rows of one sequence each, loss on all tokens but the first."""
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    return Batch(
        tokens=tokens,
        positions=positions,
        segments=np.ones_like(tokens),
        loss_weight=(positions > 0).astype(np.float32),
    )


def measure(name: str, repeats: int) -> dict[str, float | str]:
    lora = WORKS[name]
    trainer = Trainer(
        init_model(CONFIG, dtype=jnp.float32, lora=lora, seed=0),
        SFTLoss(),
        make_optimizer(OptimizerSection(learning_rate=1e-4), num_steps=1000),
        temperature=1.0,
        max_grad_norm=1.0,
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rng = np.random.default_rng(0)

    def step() -> None:
        tokens = rng.integers(3, VOCAB, (ROWS, TOKENS), dtype=np.int32)
        jax.block_until_ready(trainer.step(batch(tokens)))

    rates = matmul_rates()
    first, _ = timed(step)
    times = np.asarray([timed(step) for _ in range(repeats)])
    (wall, cpu), median = times.min(axis=0), float(np.median(times[:, 0]))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wall_rate, cpu_rate = np.max([rates, matmul_rates()], axis=0)
    flops = step_flops(lora is not None)
    return {
        "work": name,
        "tokens/s": ROWS * TOKENS / wall,
        "tokens/s median": ROWS * TOKENS / median,
        "tokens/s cpu": ROWS * TOKENS / cpu,
        "step s": wall,
        "step cpu s": cpu,
        "first step s": first,
        "compile s": first - median,
        "programs": trainer.num_programs,
        "matmul GFLOP/s": wall_rate / 1e9,
        "share of limit %": 100 * flops / wall_rate / wall,
        "share, cpu %": 100 * flops / cpu_rate / cpu,
        "peak MiB": peak / 1024,
        "added MiB": (peak - before) / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=list(WORKS), help="by default all, each in a process of its own")
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.work is None:
        # A process has one peak of memory, so each work needs its own.
        for name in WORKS:
            command = [sys.executable, __file__, "--work", name, "--repeats", str(arguments.repeats)]
            subprocess.run(command, check=True)
        return
    for key, value in measure(arguments.work, arguments.repeats).items():
        print(f"{key:>18} {value:>12}" if isinstance(value, str | int) else f"{key:>18} {value:12.2f}")
    print()


if __name__ == "__main__":
    main()
