"""Sick and healthy runs of the smallest model, and what `posttrain why` calls them: a confusion table by seed.

Each run of `tests/diagnosis/sick.py` is trained (in seconds, once for a folder) and diagnosed. Thresholds were set on
seeds below 4; those from 4 on are held out. `--keep` writes runs into the few kilobytes that the tests read.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(ROOT))

from posttrain.diagnosis.diagnose import diagnose  # noqa: E402
from posttrain.diagnosis.evidence import read_evidence  # noqa: E402
from tests.diagnosis import sick  # noqa: E402

NOTHING = "nothing"


def causes_of(run: Path) -> list[str]:
    """Names of the causes of a run, the first one first."""
    return [cause.name for evidence in read_evidence(run) for cause in diagnose(evidence)]


def table(runs: Iterable[tuple[str, Path]]) -> tuple[list[str], int, int]:
    """Lines of the confusion table, the number of runs whose cause came first, and the number of all."""
    first: dict[str, Counter[str]] = {}
    later: Counter[str] = Counter()
    for name, run in runs:
        found = causes_of(run)
        first.setdefault(name, Counter())[found[0] if found else NOTHING] += 1
        later[name] += sick.CASES[name].cause in found[1:]
    lines = ["| run | cause | runs | named first | named later | others first |", "|---|---|---|---|---|---|"]
    right, total = 0, 0
    for name, counts in first.items():
        cause = sick.CASES[name].cause
        wanted = NOTHING if cause == sick.HEALTHY else cause
        others = ", ".join(f"{other} ({n})" for other, n in counts.most_common() if other != wanted)
        lines.append(f"| {name} | {wanted} | {counts.total()} | {counts[wanted]} | {later[name]} | {others} |")
        right, total = right + counts[wanted], total + counts.total()
    return lines, right, total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, required=True, help="of the runs; those that it holds are not made again"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[4])
    parser.add_argument("--runs", nargs="+", default=[""], help="beginnings of names; by default all")
    parser.add_argument("--made", action="store_true", help="only runs that the folder holds")
    parser.add_argument("--keep", action="store_true", help="write the runs to tests/diagnosis/runs")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    names = [name for name in sick.CASES if name.startswith(tuple(arguments.runs))]
    runs = []
    for seed in arguments.seeds:
        for name in names:
            began = time.monotonic()
            if arguments.made and not sick.is_made(name, seed, arguments.folder):
                continue
            run = sick.make(name, seed, arguments.folder)
            print(f"{name} {seed}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            runs.append((name, run))
            if arguments.keep:
                sick.keep(name, seed, run)
    lines, right, total = table(runs)
    print("\n".join(lines))
    print(f"{right} of {total} runs")


if __name__ == "__main__":
    main()
