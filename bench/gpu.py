"""What is to be known of one GPU: kernels, training steps, decoding and a GRPO step, beside torch.

    python bench/gpu.py [--part N | --work NAME ...] [--minutes N] [--no-torch] [--kernels] [--tiny] [--json FILE]

Part 1: the tests marked `gpu` and attention by kernel, SFT and LoRA at 1B. Part 2: the same at 8B. Part 3: decoding
with 64 and 256 slots at 1B and 8B, a GRPO step at 1B. Each takes less than eight minutes of an H100 or H200; what does
not fit into `--minutes` is named and left out. Shapes, and what is counted, stand in `gpu_work.py`.

Random weights of Llama 3.2 1B and 3.1 8B in bfloat16. MFU: the model's own multiply-adds, without what is computed
again, over the data sheet's rate; bandwidth: the bytes of all matrices and of keys and values at the mean length, over
the data sheet's. `ceilings` measures both on the device. torch: transformers with `scaled_dot_product_attention`, its
layers compiled, in the same Python.

Each work is a process of its own: one that fails, for want of memory for instance, is shown with its error. `--tiny`
runs the same programs on a CPU, in small.

A machine without a registry needs, beyond jax, torch, flax and transformers, the wheels of `gpu_wheels.txt`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_work import WORKS, Decode, Train, decode_bytes, tiny, train_flops
from rich.console import Console
from rich.table import Table

from posttrain.kernels.platform import CHIPS

HERE = Path(__file__).resolve().parent
PARTS = {
    1: ("ceilings", "tests", "attention-1b", "attention-8b", "sft-1b", "lora-1b"),
    2: ("ceilings", "sft-8b", "lora-8b"),
    3: ("ceilings", "decode-1b-64", "decode-1b-256", "decode-8b-64", "decode-8b-256", "grpo-1b"),
}
TIMEOUT_S = 300
MFU_GOAL, BANDWIDTH_GOAL = 0.45, 0.60


def commands(work: str, arguments: argparse.Namespace) -> dict[str, list[str]]:
    """By engine, the command of its process."""
    if work == "tests":
        return {"posttrain": [sys.executable, "-m", "pytest", "--gpu", "-m", "gpu", "-n", "0", "-q", "tests/kernels"]}
    small = ["--tiny"] * arguments.tiny
    more = ["--kernels"] * arguments.kernels
    found = {"posttrain": [sys.executable, str(HERE / "gpu_work.py"), work, *small, *more]}
    if not arguments.no_torch and isinstance(WORKS.get(work), Train | Decode):
        found["torch"] = [sys.executable, str(HERE / "peers" / "gpu_torch.py"), work, *small]
    return found


def run(work: str, command: Sequence[str], cache: str, timeout_s: float) -> dict[str, Any]:
    """What a process measured, or its `error`."""
    paths = f"{HERE.parent}:{os.environ.get('PYTHONPATH', '')}"
    settings = {
        "PYTHONPATH": paths,
        "HF_HUB_OFFLINE": "1",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.94",
        "JAX_COMPILATION_CACHE_DIR": cache,
    }
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command, env=os.environ | settings, capture_output=True, text=True, timeout=timeout_s, cwd=HERE.parent
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {timeout_s:.0f} s"}
    took = {"process_s": time.perf_counter() - start}
    if work == "tests":
        lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        summary = (done.stdout.strip().splitlines() or [done.stderr[-300:]])[-1]
        failed = {
            "error": "; ".join(lines) or f"code {done.returncode}: {summary}",
            "log": done.stdout[-4000:] + done.stderr,
        }
        return took | {"summary": summary} | (failed if done.returncode else {})
    line = next((line for line in reversed(done.stdout.splitlines()) if line.startswith("{")), None)
    if line is None:
        errors = [line for line in done.stderr.splitlines() if "Error" in line or "RESOURCE" in line]
        return took | {"error": (errors or [done.stderr[-300:]])[-1][:400], "log": done.stderr[-6000:]}
    return took | json.loads(line)


def shares(work: str, found: dict[str, Any], device: str, *, small: bool) -> dict[str, float]:
    """MFU of a training step, or the share of the bandwidth that decoding uses, by the data sheet of a known chip."""
    chip = next((chip for name, chip in CHIPS.items() if name != "cpu" and name in device.lower()), None)
    shape = WORKS.get(work)
    if chip is None or shape is None:
        return {}
    shape = tiny(shape) if small else shape
    if isinstance(shape, Train) and "step_s" in found:
        return {"mfu": train_flops(shape) / found["step_s"] / chip.flops}
    if isinstance(shape, Decode) and "token_ms" in found:
        return {"bandwidth": decode_bytes(shape) / (found["token_ms"] / 1000) / chip.memory_bandwidth}
    return {}


def told(name: str, value: Any) -> str:
    return f"{name} {value:,.3g}" if isinstance(value, float) else f"{name} {value}"


def show(console: Console, results: Mapping[str, Mapping[str, dict[str, Any]]]) -> None:
    table = Table(title="MFU goal 45 %, bandwidth goal 60 %")
    for name in ("work", "engine", "tokens/s", "ms", "MFU", "bandwidth", "peak GiB", "times torch", "first s"):
        table.add_column(name, justify="left" if name in ("work", "engine") else "right")
    for work, engines in results.items():
        if not isinstance(WORKS.get(work), Train | Decode):
            continue
        for engine, one in engines.items():
            if "error" in one:
                table.add_row(work, engine, "failed")
                continue
            time_ms = one.get("token_ms", 1000 * one.get("step_s", 0.0))
            torch = engines.get("torch", {}).get("tokens_per_s")
            table.add_row(
                work,
                engine,
                f"{one['tokens_per_s']:,.0f}",
                f"{time_ms:,.2f}",
                *(f"{100 * one[name]:.1f} %" if name in one else "" for name in ("mfu", "bandwidth")),
                f"{one['peak_gib']:.1f}" if "peak_gib" in one else "",
                f"{one['tokens_per_s'] / torch:.2f}" if torch and engine == "posttrain" else "",
                f"{one.get('first_step_s', one.get('first_batch_s', 0.0)):.1f}",
            )
    console.print(table)
    for work, engines in results.items():
        for engine, one in engines.items():
            if "error" in one:
                console.print(f"{work}, {engine}: {one['error']}", markup=False)
            elif not isinstance(WORKS.get(work), Train | Decode):
                console.print(f"{work}: " + ", ".join(told(*item) for item in one.items()), markup=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--part", type=int, choices=list(PARTS), help="by default all three")
    chosen.add_argument("--work", nargs="+", choices=["ceilings", "tests", *WORKS])
    parser.add_argument("--minutes", type=float, default=8.0, help="begin nothing later; per part")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--kernels", action="store_true", help="also the kernels that take longest in a step")
    parser.add_argument("--tiny", action="store_true", help="small shapes, on a CPU")
    parser.add_argument("--json", type=Path, help="write all figures here, after each work")
    arguments = parser.parse_args()
    parts = [PARTS[arguments.part]] if arguments.part else PARTS.values()
    works = arguments.work or list(dict.fromkeys(work for part in parts for work in part))
    minutes = arguments.minutes * (1 if arguments.part or arguments.work else len(PARTS))
    results: dict[str, dict[str, dict[str, Any]]] = {}
    left_out, device, deadline = [], "", time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as cache:
        for work in works:
            for engine, command in commands(work, arguments).items():
                left_s = deadline - time.monotonic()
                if left_s < 10:
                    left_out.append(f"{work} ({engine})")
                    continue
                found = run(work, command, cache, min(TIMEOUT_S, left_s))
                device = found.get("device", device)
                found |= shares(work, found, device, small=arguments.tiny)
                results.setdefault(work, {})[engine] = found
                print(work, engine, {k: v for k, v in found.items() if k not in ("log", "kernels")}, flush=True)
                if arguments.json:
                    arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    console = Console(width=130)
    show(console, results)
    if left_out:
        console.print(f"left out for time: {', '.join(left_out)}")
    if any("error" in one for engines in results.values() for engine, one in engines.items() if engine == "posttrain"):
        sys.exit(1)


if __name__ == "__main__":
    main()
