"""Token microscope: the loss of each token of a recorded step, replayed by a child process and kept in the cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.errors import ConfigError
from posttrain.runtime.files import write_whole

META = b"posttrain.view"
LAST_LINES = 3
"""Last lines of a failed process that are shown."""


class Microscope:
    """Replays of a run's steps, one at a time, each into a file of `folder`."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._running: dict[Path, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()

    def state(self, stage: Path, step: int) -> dict[str, Any]:
        """State of a step's replay: `absent`, `running`, `failed` with its error, or `done` with its sums."""
        file = self.file(stage, step)
        with self._lock:
            process = self._running.get(file)
            if process is not None and process.poll() is None:
                return {"state": "running"}
            if process is not None:
                _reap(self._running.pop(file))
        if file.is_file():
            return {"state": "done", **_meta(file)}
        error = file.with_suffix(".error")
        if error.is_file():
            return {"state": "failed", "error": error.read_text(encoding="utf-8")}
        return {"state": "absent"}

    def start(self, stage: Path, step: int) -> dict[str, Any]:
        """Start the replay of a step, unless it is done or a replay is running."""
        file = self.file(stage, step)
        with self._lock:
            if any(process.poll() is None for process in self._running.values()):
                return {"state": "running"}
            if not file.is_file():
                file.parent.mkdir(parents=True, exist_ok=True)
                file.with_suffix(".error").unlink(missing_ok=True)
                command = [sys.executable, "-m", "posttrain.view.microscope", str(stage), str(step), str(file)]
                self._running[file] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        return self.state(stage, step)

    def tokens(self, stage: Path, step: int, group: int, sample: int) -> list[dict[str, Any]]:
        """Columns of a sample's tokens, a dictionary for each update and token sequence; none before the replay."""
        import pyarrow.compute as pc
        import pyarrow.parquet

        file = self.file(stage, step)
        if not file.is_file():
            return []
        chosen = (pc.field("group") == group) & (pc.field("sample") == sample)
        table = pyarrow.parquet.read_table(file, filters=chosen)
        columns = {name: table.column(name).to_numpy() for name in table.column_names}
        found = []
        for update, part in dict.fromkeys(zip(columns["update"].tolist(), columns["part"].tolist(), strict=True)):
            own = (columns["update"] == update) & (columns["part"] == part)
            lists = {name: array[own].tolist() for name, array in columns.items() if name not in ("update", "part")}
            found.append({"update": update, "part": part, **lists})
        return found

    def close(self) -> None:
        """End what runs."""
        for process in self._running.values():
            process.kill()
            _reap(process)
        self._running.clear()

    def file(self, stage: Path, step: int) -> Path:
        """File of a step's replay; another one once its record is written again."""
        record = stage / "trajectories" / f"{step:08d}.parquet"
        stamp = record.stat().st_mtime_ns if record.is_file() else 0
        return self._folder / f"{stage.name}-{step}-{stamp}.parquet"


def _reap(process: subprocess.Popen[bytes]) -> None:
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def _meta(file: Path) -> dict[str, Any]:
    import pyarrow.parquet

    found: dict[str, Any] = json.loads(pyarrow.parquet.read_metadata(file).metadata[META])
    return found


def write_token_losses(stage: Path, step: int, file: Path) -> None:
    """Replay a step and write its columns, with the sums in the metadata."""
    import pyarrow
    import pyarrow.parquet

    from posttrain.runs.replay import token_losses

    found = token_losses(stage, step)
    total = float(np.sum(found.columns["share"]))
    logged = None if np.isnan(found.logged) else found.logged
    updates = int(found.columns["update"].max()) + 1
    meta = {"loss": found.loss, "logged": logged, "sum": total, "updates": updates}
    table = pyarrow.table(found.columns).replace_schema_metadata({META: json.dumps(meta)})
    partial = file.with_suffix(".tmp")
    pyarrow.parquet.write_table(table, partial, compression="zstd")
    partial.rename(file)


def main(arguments: Sequence[str]) -> int:
    """Replay: STAGE STEP FILE. An error is written beside the file. Ends with its parent."""
    stage, step, file = Path(arguments[0]), int(arguments[1]), Path(arguments[2])

    def wait_for_parent() -> None:
        sys.stdin.buffer.read()
        os._exit(1)

    threading.Thread(target=wait_for_parent, daemon=True).start()
    try:
        from posttrain.runtime.xla import enable_compile_cache

        enable_compile_cache()
        write_token_losses(stage, step, file)
    except ConfigError as error:
        write_whole(file.with_suffix(".error"), str(error))
        return 2
    except BaseException as error:
        text = " ".join(str(error).splitlines()[:LAST_LINES])
        write_whole(file.with_suffix(".error"), f"the replay failed: {type(error).__name__}: {text}")
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
