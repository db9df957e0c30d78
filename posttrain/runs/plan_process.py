"""Plan of a run in a process of its own, for Python whose JAX already holds the devices of this machine."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from posttrain.config import RunConfig
from posttrain.config.yaml_file import dump_config
from posttrain.errors import ConfigError


def plan_elsewhere(config: RunConfig, devices: str) -> Iterator[str]:
    """Lines of `posttrain plan --quick` for a machine, as they come. ConfigError with what the command says if it
    fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(dump_config(config), encoding="utf-8")
        command = [sys.executable, "-m", "posttrain", "plan", str(file), "--devices", devices, "--quick"]
        errors = Path(folder) / "errors"
        with (
            errors.open("wb") as stderr,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, encoding="utf-8") as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                yield line.rstrip("\n")
        if process.returncode:
            last = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
            said = "\n".join(line.removeprefix("error: ") for line in last)
            raise ConfigError(said or f"plan: the process ended with code {process.returncode}")
