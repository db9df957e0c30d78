"""Speed and memory of attention and of grouped matrix products, beside the machine's own limit.

    python bench/kernels.py [--work attention | grouped] [--repeats N]

Forward is one call, gradient one value and gradient by all inputs, float32. `temp` is the memory that the compiled
gradient holds beside its arguments and results. The limit is the time that the multiply-adds of visible keys, or of
each row's own group, take at the rate of this machine's matrix product (`bench/train.py`). All times are process time,
which neighbours on the machine disturb less than wall time, the best of the repeats.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from train import matmul_rates

from posttrain.config import AttentionKernel, GroupedKernel
from posttrain.kernels.attention.dispatch import attention
from posttrain.kernels.grouped_matmul import grouped_matmul


@dataclass(frozen=True)
class Rows:
    rows: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None

    def __str__(self) -> str:
        window = "" if self.window is None else f", window {self.window}"
        return f"{self.rows} x {self.length} tokens, {self.heads}/{self.kv_heads} heads of {self.head_dim}{window}"


@dataclass(frozen=True)
class Groups:
    rows: int
    groups: int
    embed: int
    mlp: int
    skew: float

    def __str__(self) -> str:
        return f"{self.rows} rows x {self.embed} x {self.mlp}, {self.groups} groups, skew {self.skew}"


ATTENTION = (
    Rows(8, 256, 8, 4, 32, None),
    Rows(2, 512, 8, 2, 64, None),
    Rows(1, 2048, 8, 2, 64, None),
    Rows(1, 2048, 8, 2, 64, 256),
)
ATTENTION_KERNELS: tuple[AttentionKernel, ...] = ("reference", "blockwise", "splash")
GROUPED = (Groups(1024, 8, 256, 512, 0.0), Groups(4096, 16, 256, 256, 1.0), Groups(64, 8, 256, 512, 0.0))
GROUPED_KERNELS: tuple[GroupedKernel, ...] = ("reference", "ragged_dot", "buckets", "megablox")


@dataclass(frozen=True)
class Line:
    work: str
    kernel: str
    function: Callable[..., jax.Array]
    arguments: tuple[jax.Array, ...]
    flops: float
    """Of the forward pass; the gradient takes three times as many."""


def attention_lines(work: Rows) -> Iterator[Line]:
    rng = np.random.default_rng(0)
    kv_shape = (work.rows, work.kv_heads, work.length, work.head_dim)
    shapes = [(work.rows, work.length, work.heads, work.head_dim), kv_shape, kv_shape]
    q, k, v = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    positions = jnp.broadcast_to(jnp.arange(work.length), (work.rows, work.length))
    segments = jnp.ones_like(positions)
    pairs = np.minimum(np.arange(work.length) + 1, work.window or work.length).sum()
    for kernel in ATTENTION_KERNELS:

        def run(q: jax.Array, k: jax.Array, v: jax.Array, kernel: AttentionKernel = kernel) -> jax.Array:
            return attention(
                q,
                k,
                v,
                q_positions=positions,
                k_positions=positions,
                q_segments=segments,
                k_segments=segments,
                q_parents=None,
                window=work.window,
                scale=work.head_dim**-0.5,
                soft_cap=None,
                sinks=None,
                kernel=kernel,
                mesh=None,
            ).heads

        yield Line(str(work), kernel, run, (q, k, v), 4.0 * work.rows * work.heads * work.head_dim * float(pairs))


def grouped_lines(work: Groups) -> Iterator[Line]:
    """Rows are dealt to groups with probabilities that the exponential of a normal number times `skew` gives."""
    rng = np.random.default_rng(0)
    shares = np.exp(work.skew * rng.normal(size=work.groups))
    sizes = jnp.asarray(rng.multinomial(work.rows, shares / shares.sum()), jnp.int32)
    x = jnp.asarray(rng.normal(size=(work.rows, work.embed)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(work.groups, work.embed, work.mlp)), jnp.float32)
    for kernel in GROUPED_KERNELS:

        def run(x: jax.Array, w: jax.Array, kernel: GroupedKernel = kernel) -> jax.Array:
            return grouped_matmul(x, w, sizes, kernel=kernel, platform=jax.default_backend())

        yield Line(str(work), kernel, run, (x, w), 2.0 * work.rows * work.embed * work.mlp)


def measure(line: Line, repeats: int, rate: float) -> tuple[float, ...]:
    """Milliseconds forward and gradient, their shares of the limit in per cent, MiB of the gradient."""

    def best(program: Callable[..., object]) -> float:
        jax.block_until_ready(program(*line.arguments))
        return min(cpu_seconds(lambda: jax.block_until_ready(program(*line.arguments))) for _ in range(repeats))

    def loss(*arguments: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(line.function(*arguments)))

    numbers = tuple(range(len(line.arguments)))
    gradient = jax.jit(jax.value_and_grad(loss, argnums=numbers)).lower(*line.arguments).compile()
    forward_s, gradient_s = best(jax.jit(line.function)), best(gradient)
    memory = gradient.memory_analysis().temp_size_in_bytes / 2**20
    limit = line.flops / rate
    return 1e3 * forward_s, 1e3 * gradient_s, 100 * limit / forward_s, 300 * limit / gradient_s, memory


def cpu_seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=["attention", "grouped"], help="by default both")
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    _, rate = matmul_rates()
    print(f"matrix product: {rate / 1e9:.0f} GFLOP per CPU second\n")
    print("| work | kernel | forward ms | gradient ms | share of limit, forward | gradient | temp MiB |")
    print("|---|---|---|---|---|---|---|")
    groups = [] if arguments.work == "attention" else [grouped_lines(work) for work in GROUPED]
    rows = [] if arguments.work == "grouped" else [attention_lines(work) for work in ATTENTION]
    for lines in (*rows, *groups):
        for line in lines:
            ms = measure(line, arguments.repeats, rate)
            cells = f"{ms[0]:.1f} | {ms[1]:.1f} | {ms[2]:.0f} % | {ms[3]:.0f} % | {ms[4]:.1f}"
            print(f"| {line.work} | {line.kernel} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
