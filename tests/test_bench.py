"""Benchmarks of a GPU run in small on a CPU."""

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
