"""Kinetic: a function runs on a TPU host in the cloud as if it were called here. The model is copied to the bucket of
the job, since runs write to folders only."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import kinetic
from etils import epath

COMMAND = ["posttrain", "run", "configs/sft_gsm8k.yaml", "output=/tmp/sft_gsm8k"]


@kinetic.run(accelerator="tpu-v5e-8")
def train() -> None:
    subprocess.run(COMMAND, check=True)
    target = epath.Path(os.environ["KINETIC_OUTPUT_DIR"])
    for file in Path("/tmp/sft_gsm8k/0-sft/model").iterdir():
        epath.Path(file).copy(target / file.name, overwrite=True)


if __name__ == "__main__":
    train()
