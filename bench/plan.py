"""Memory that `posttrain plan` predicts beside the memory of the run: 20 configurations on one CPU device.

    python bench/plan.py [--only sft grpo] [--held-out | --smallest]

Each is planned and run in processes of their own, without compiled programs of an earlier run. `measured` is the peak
resident memory of the run's process by the system (VmHWM), without processes of rewards; `predicted` the plan's line on
the process, whose parts go to stderr. `--held-out`: six configurations that the prediction was not made with.
`--smallest`: memory at the end of the smallest runs, for `SMALLEST` of `posttrain/plan/report.py`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.plan_runs import HELD_OUT, RUNS, SMALLEST, write

MIB = 2**20
WITHIN = 0.1
UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
PREDICTED = re.compile(r"peak of the process: about ([\d.,]+) ([GMK]iB)")


def resident(entry: str) -> int:
    """Bytes of this process's resident memory: `VmRSS` now, `VmHWM` at its fullest."""
    found = re.search(rf"{entry}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def child(arguments: list[str]) -> None:
    """Run a command of posttrain in this process; write its peak as the last line."""
    from posttrain.cli import main

    sys.argv = ["posttrain", *arguments]
    try:
        main()
    finally:
        sys.stdout.flush()
        print(f"\npeak {resident('VmHWM')}\nend {resident('VmRSS')}", flush=True)


def call(folder: Path, *arguments: str) -> str:
    """Output of a command of posttrain in a process of its own, without settings of JAX from here."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    environment |= {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, str(Path(__file__).resolve()), "--child", *arguments]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def compare(name: str, model: dict[str, object], stage: dict[str, object]) -> tuple[int, int]:
    """Predicted and measured bytes of a configuration."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        file = write(folder, model, stage)
        lines = call(folder, "plan", str(file), "--devices", "cpu-1")
        print(lines[max(0, lines.find("peak of the process")) :], file=sys.stderr)
        planned = PREDICTED.search(lines)
        assert planned is not None, f"{name}: the plan has no line on the process"
        predicted = float(planned[1].replace(",", "")) * UNITS[planned[2]]
        measured = re.findall(r"^peak (\d+)$", call(folder, "run", str(file)), re.MULTILINE)[-1]
    return round(predicted), int(measured)


def smallest() -> None:
    for name, (model, stage) in SMALLEST.items():
        with tempfile.TemporaryDirectory() as temporary:
            said = call(Path(temporary), "run", str(write(Path(temporary), model, stage)))
        end = int(re.findall(r"^end (\d+)$", said, re.MULTILINE)[-1])
        print(f"{name}: {end / MIB:,.0f} MiB", flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of those to run")
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--smallest", action="store_true")
    arguments = parser.parse_args()
    if arguments.smallest:
        smallest()
        return
    runs = HELD_OUT if arguments.held_out else RUNS
    chosen = {name: run for name, run in runs.items() if not arguments.only or any(o in name for o in arguments.only)}
    print("| run | predicted | measured | difference |\n|---|---|---|---|", flush=True)
    inside = 0
    for name, (model, stage) in chosen.items():
        predicted, measured = compare(name, model, stage)
        difference = predicted / measured - 1
        inside += abs(difference) <= WITHIN
        print(f"| {name} | {predicted / MIB:,.0f} MiB | {measured / MIB:,.0f} MiB | {difference:+.1%} |", flush=True)
    print(f"\n{inside} of {len(chosen)} within {WITHIN:.0%}")


if __name__ == "__main__":
    main()
