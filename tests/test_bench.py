"""Benchmarks in small on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.thorough
def test_one_gpu_in_small(tmp_path: Path) -> None:
    works = "ceilings", "attention-1b", "sft-1b", "lora-8b", "decode-1b-64", "grpo-1b"
    file = tmp_path / "gpu.json"
    command = [sys.executable, "bench/gpu.py", "--tiny", "--no-torch", "--json", str(file), "--work", *works]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {work: engines["posttrain"] for work, engines in json.loads(file.read_text()).items()}
    assert set(found) == set(works)
    assert 5.3 < found["sft-1b"]["loss"] < 5.8  # ln 256 = 5.55
    assert found["decode-1b-64"]["tokens_per_s"] > 0 and found["grpo-1b"]["rollout_s"] > 0
    assert found["attention-1b"]["auto_tflops"] > 0 and "cudnn_error" in found["attention-1b"]


@pytest.mark.thorough
def test_the_best_rate_stays_where_the_width_is_known(shared: Path) -> None:
    """Twice the width halves it, and leaves it with `base_width`."""
    command = [sys.executable, "bench/width.py", "--widths", "32", "64"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split(" | ") for line in done.stdout.splitlines()[1:]]
    rates = {(base, width): float(rate) for base, width, *_, rate in lines}
    assert 1.7 < rates["None", "32"] / rates["None", "64"] < 2.8, rates
    assert 0.7 < rates["None", "32"] / rates["32", "64"] < 1.4, rates
