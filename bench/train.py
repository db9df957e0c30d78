"""Speed and memory of a training step beside other trainers and the machine's own limit.

    python bench/train.py [--work NAME ...] [--rounds N] [--steps N] [--cores N]
                          [--tunix PYTHON] [--trl PYTHON] [--peers FOLDER] [--json FILE]

A random decoder of hidden 256 x 4 layers, 8 heads on 4 key-value heads of 32, MLP 768, tied vocabulary of 4,096,
float32, AdamW, one update a step:

`sft`: 8 rows of 256 tokens. `lora`: the same with adapters of rank 16 on all linear layers. `dpo`: 4 pairs of 64 + 192
tokens with the reference in every step, a prompt computed once for both answers; `dpo-apart`: for each; `dpo-cached`:
with the reference's log-probabilities given. `distill`: `sft` with a teacher of hidden 512 x 8 layers in the step,
forward KL at temperature 2. `spread`: sequences of 32 to 256 tokens packed into
8 rows of 256; `spread-padded`: one in each row. `completion`: `sft` with loss on the last quarter of each row.

Tokens are those of sequences, never padding. Each run is a process of its own, a peer in the Python that is given, and
they take turns, so that what else the machine does falls on all. On a busy machine give `--cores 1` and compare tokens
per CPU second. `first step` is with compilation, until its result is there. `peak` is the process's memory, `added`
what compilation and steps took on top of the loaded model.

The limit is the time that the multiply-adds alone take at the rate of this machine's matrix products in the shape of
the MLP, all of them wanted: of padding and of prompts without loss as well.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table
from train_work import PAIRS, PROMPT, RESPONSE, ROWS, STUDENT, TEACHER, TOKENS, VOCAB

HERE = Path(__file__).resolve().parent
PEERS = HERE.parent.parent / "shared" / "peers"
WORKS = ("sft", "lora", "dpo", "dpo-apart", "dpo-cached", "distill", "spread", "spread-padded", "completion")
ITEMS = {"sft": "sft", "lora": "lora", "dpo": "dpo", "distill": "distill", "spread": "sft"}
"""What the peers' drivers do as well."""


def forward_flops(config: dict[str, Any], tokens: int, length: int, scored: int) -> float:
    """Multiply-adds x 2 of a forward pass over sequences of `length`, with logits for `scored` of all tokens."""
    heads, kv_heads, head_dim = (config[f] for f in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    body = 2 * (heads + kv_heads) * head_dim + 3 * config["intermediate_size"]
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    return tokens * (2 * layers * hidden * body + layers * 2 * heads * head_dim * length) + 2 * scored * hidden * VOCAB


def step_flops(work: str) -> float:
    """Forward, and two products backward; one where the weights are frozen."""
    tokens = ROWS * TOKENS
    if work.startswith("dpo"):
        length, answers = PROMPT + RESPONSE, 2 * PAIRS
        computed = answers * length - (0 if work == "dpo-apart" else PAIRS * (PROMPT - 1))
        one = forward_flops(STUDENT, computed, length, answers * RESPONSE)
        return (3 if work == "dpo-cached" else 4) * one
    scored = tokens // 4 if work == "completion" else tokens
    one = forward_flops(STUDENT, tokens, TOKENS, scored)
    if work == "distill":
        return 3 * one + forward_flops(TEACHER, tokens, TOKENS, scored)
    return (2 if work == "lora" else 3) * one


def matmul_rates() -> tuple[float, float]:
    """FLOP per second of wall and of process time in the products that a step does most: into the MLP and back."""
    embed, mlp, times = STUDENT["hidden_size"], STUDENT["intermediate_size"], 10
    x, up, down = jnp.ones((ROWS * TOKENS, embed)), jnp.full((embed, mlp), 1 / embed), jnp.full((mlp, embed), 1 / mlp)
    products = jax.jit(lambda x, up, down: jax.lax.fori_loop(0, times, lambda _, x: (x @ up) @ down, x))
    products(x, up, down).block_until_ready()
    walls, cpus = [], []
    for _ in range(8):
        wall, cpu = time.perf_counter(), time.process_time()
        products(x, up, down).block_until_ready()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    flops = 4 * ROWS * TOKENS * embed * mlp * times
    return flops / min(walls), flops / min(cpus)


def command(engine: str, work: str, arguments: argparse.Namespace) -> list[str]:
    steps = ["--steps", str(arguments.steps)]
    if engine == "posttrain":
        return [sys.executable, str(HERE / "train_work.py"), work, *steps]
    python, driver = getattr(arguments, engine), f"peer_{engine}"
    item = [ITEMS[work], *(["--spread"] if work == "spread" else [])]
    return [python, str(HERE / "peers" / "train_peer.py"), str(arguments.peers), driver, *item, *steps]


def run(engine: str, work: str, arguments: argparse.Namespace) -> dict[str, float]:
    """One process of one engine. RuntimeError with the end of its output where it fails."""
    threads = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command(engine, work, arguments), env=os.environ | threads, capture_output=True, text=True, check=False
    )
    line = next((line for line in reversed(done.stdout.splitlines()) if line.startswith("{")), None)
    if line is None:
        raise RuntimeError(f"{engine}, {work}: ended with code {done.returncode}\n{done.stderr[-2000:]}")
    found = json.loads(line)
    if engine == "posttrain":
        return found
    return {
        "tokens_per_s": found["tokens_per_s"],
        "tokens_per_s_best": found["tokens_per_s"] * found["step_s_all"] / found["step_s_min"],
        "tokens_per_cpu_s": found["tokens_per_cpu_s"],
        "step_cpu_s": found["cpu_s_min"],
        "first_step_s": found["first_step_s"],
        "first_step_cpu_s": found["first_step_cpu_s"],
        "peak_mib": found["rss_peak_mb"],
        "start_mib": found["rss_import_mb"],
    }


def best_of(runs: list[dict[str, float]]) -> dict[str, float]:
    """Of each number the better one over the rounds, of the median speed the median."""
    most = {name: max(r[name] for r in runs) for name in ("tokens_per_s_best", "tokens_per_cpu_s")}
    least = {
        name: min(r[name] for r in runs) for name in ("first_step_s", "first_step_cpu_s", "step_cpu_s", "peak_mib")
    }
    start = min(r["start_mib"] for r in runs)
    return {**most, **least, "start_mib": start, "tokens_per_s": statistics.median(r["tokens_per_s"] for r in runs)}


def show(console: Console, work: str, found: dict[str, dict[str, float]], rates: tuple[float, float]) -> None:
    table = Table(title=f"{work}: matrix product {rates[0] / 1e9:.0f} GFLOP/s, {rates[1] / 1e9:.0f} per CPU second")
    for name in ("", "tokens/s", "best", "per CPU s", "times", "limit, CPU", "first step", "its CPU", "peak", "added"):
        table.add_column(name, justify="left" if not name else "right")
    ours = found["posttrain"]
    for engine, one in found.items():
        share = step_flops(work) / rates[1] / one["step_cpu_s"]
        table.add_row(
            engine,
            f"{one['tokens_per_s']:,.0f}",
            f"{one['tokens_per_s_best']:,.0f}",
            f"{one['tokens_per_cpu_s']:,.0f}",
            ", CPU ".join(f"{ours[name] / one[name]:.2f}" for name in ("tokens_per_s", "tokens_per_cpu_s")),
            f"{100 * share:.0f} %",
            f"{one['first_step_s']:.1f} s",
            f"{one['first_step_cpu_s']:.1f} s",
            f"{one['peak_mib']:,.0f} MiB",
            f"{one['peak_mib'] - one['start_mib']:,.0f} MiB",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cores", type=int, help="use only so many")
    parser.add_argument("--tunix", help="the Python of an environment with Tunix")
    parser.add_argument("--trl", help="the Python of an environment with TRL")
    parser.add_argument("--peers", default=str(PEERS), help="folder of the peers' drivers")
    parser.add_argument("--json", type=Path, help="append what was found to this file")
    arguments = parser.parse_args()
    if arguments.cores:
        os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: arguments.cores]))
    console = Console(width=140)
    for work in arguments.work:
        peers = [peer for peer in ("tunix", "trl") if getattr(arguments, peer) and work in ITEMS]
        runs: dict[str, list[dict[str, float]]] = {engine: [] for engine in ("posttrain", *peers)}
        rates = matmul_rates()
        for _ in range(arguments.rounds):
            for engine, done in runs.items():
                done.append(run(engine, work, arguments))
        again = matmul_rates()
        found = {engine: best_of(done) for engine, done in runs.items()}
        show(console, work, found, (max(rates[0], again[0]), max(rates[1], again[1])))
        if arguments.json:
            with arguments.json.open("a") as file:
                file.write(json.dumps({"work": work, "cores": len(os.sched_getaffinity(0)), **found}) + "\n")


if __name__ == "__main__":
    main()
