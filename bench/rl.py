"""Speed and memory of a GRPO step beside other frameworks.

    python bench/rl.py [--work NAME ...] [--rounds N] [--steps N] [--cores N]
                       [--tunix PYTHON] [--trl PYTHON] [--peers FOLDER] [--json FILE]

A random decoder of hidden 256 x 4 layers, vocabulary 4,096, float32; 4 prompts of 64 tokens x 8 samples, a KL from a
reference in every step, AdamW, one update: sampling, rewards, log-probabilities and update.

`uniform`: 64 new tokens each. `skewed`: 32 new tokens, but 256 for one in eight, which no framework is told: our
samples end by a stop token (with a learning rate that changes nothing, so that a draw before tells the token), peers go
on until the longest is done. Tokens are those of the samples, not of padding.

Each run is a process of its own, a peer in the Python that is given, and they take turns. On a busy machine give
`--cores 1` and compare tokens per CPU second.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
PEERS = HERE.parent.parent / "shared" / "peers"
VOCAB, FIRST = 4096, 3
SKIPPED = 2
"""Steps before those that count."""


@dataclass(frozen=True)
class Work:
    """Prompts of a step, samples of each, tokens of a prompt, and new tokens of each sample of a prompt."""

    prompts: int
    group: int
    prompt_tokens: int
    lengths: tuple[int, ...]

    @property
    def new_tokens(self) -> int:
        return self.prompts * sum(self.lengths)


WORKS = {"uniform": Work(4, 8, 64, (64,) * 8), "skewed": Work(4, 8, 64, (32,) * 7 + (256,))}


def command(engine: str, work: str, arguments: argparse.Namespace) -> list[str]:
    steps = ["--steps", str(arguments.steps)]
    if engine == "posttrain":
        return [sys.executable, str(HERE / "rl_work.py"), work, *steps]
    script, new = str(HERE / "peers" / "rl_peer.py"), str(max(WORKS[work].lengths))
    return [getattr(arguments, engine), script, str(arguments.peers), f"peer_{engine}", "--new", new, *steps]


def run(engine: str, work: str, arguments: argparse.Namespace) -> dict[str, float]:
    """One process of one framework. RuntimeError with the end of its output where it fails."""
    settings = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command(engine, work, arguments), env=os.environ | settings, capture_output=True, text=True, check=False
    )
    line = next((line for line in reversed(done.stdout.splitlines()) if line.startswith("{")), None)
    if line is None:
        raise RuntimeError(f"{engine}, {work}: ended with code {done.returncode}\n{done.stderr[-2000:]}")
    found = json.loads(line)
    if engine == "posttrain":
        return found
    tokens = WORKS[work].new_tokens
    return {
        "tokens_per_s": tokens / found["step_s_all"],
        "tokens_per_s_best": tokens / found["step_s_min"],
        "tokens_per_cpu_s": tokens / found["cpu_s_min"],
        "step_s": found["step_s_all"],
        "step_cpu_s": found["cpu_s_min"],
        "first_step_s": found["first_step_s"],
        "peak_mib": found["rss_peak_mb"],
        "start_mib": found["rss_import_mb"],
    }


def best_of(runs: list[dict[str, float]]) -> dict[str, float]:
    """Of each number the better one over the rounds, of the median speed the median."""
    most = {name: max(r[name] for r in runs) for name in ("tokens_per_s_best", "tokens_per_cpu_s")}
    least = {name: min(r[name] for r in runs) for name in ("first_step_s", "step_s", "peak_mib")}
    return {**most, **least, "tokens_per_s": statistics.median(r["tokens_per_s"] for r in runs)}


def show(console: Console, work: str, found: dict[str, dict[str, float]]) -> None:
    table = Table(title=f"{work}: {WORKS[work].new_tokens:,} new tokens a step")
    for name in ("", "tokens/s", "best", "per CPU s", "times", "step", "first step", "peak"):
        table.add_column(name, justify="left" if not name else "right")
    ours = found["posttrain"]
    for engine, one in found.items():
        table.add_row(
            engine,
            f"{one['tokens_per_s']:,.0f}",
            f"{one['tokens_per_s_best']:,.0f}",
            f"{one['tokens_per_cpu_s']:,.0f}",
            ", CPU ".join(f"{ours[name] / one[name]:.2f}" for name in ("tokens_per_s", "tokens_per_cpu_s")),
            f"{one['step_s']:.3f} s",
            f"{one['first_step_s']:.1f} s",
            f"{one['peak_mib']:,.0f} MiB",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", nargs="+", choices=list(WORKS), default=list(WORKS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
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
        peers = [peer for peer in ("tunix", "trl") if getattr(arguments, peer)]
        runs: dict[str, list[dict[str, float]]] = {engine: [] for engine in ("posttrain", *peers)}
        for _ in range(arguments.rounds):
            for engine, done in runs.items():
                done.append(run(engine, work, arguments))
        found = {engine: best_of(done) for engine, done in runs.items()}
        show(console, work, found)
        if arguments.json:
            with arguments.json.open("a") as file:
                file.write(json.dumps({"work": work, "cores": len(os.sched_getaffinity(0)), **found}) + "\n")


if __name__ == "__main__":
    main()
