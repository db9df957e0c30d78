"""Checkpoints: arrays and host data of one step, written atomically in the background."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from posttrain.errors import ConfigError
from posttrain.tree import path_str

Tree = TypeVar("Tree")

FORMAT = 2
"""Format of the host part; checkpoints of another format are rejected."""
FILE_BYTES = 32 << 20
"""Size of a checkpoint's files: the writer holds what it has compressed until a file is full. With Orbax's default, 2
GiB, that is a second copy of the whole state."""


class Checkpointer:
    """Checkpoint manager: saves steps below `directory` in the background and keeps the newest `keep`; a context
    manager.

    A step holds the leaves of a tree of jax arrays under their dotted paths, and host data: JSON in which numpy arrays
    of any shape may stand. It appears under its number once it is completely on disk: a process killed while saving
    leaves the previous steps. Incomplete steps are removed on opening, so only one run may have a directory open. An
    error of a background save is raised by the next call.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 2) -> None:
        import orbax.checkpoint as ocp

        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1")
        self.directory = Path(directory).absolute()
        # Orbax logs every array and phase; its errors are raised as exceptions as well.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=ocp.checkpoint_managers.LatestN(n=keep), cleanup_tmp_directories=True
            ),
        )

    def save(self, step: int, arrays: Any, host: dict[str, Any]) -> None:
        """Start writing step `step`; returns once the arrays may be donated or overwritten.

        Raises ValueError for a leaf that is not a jax array, for `host` that is not JSON and numpy arrays, and for a
        step not after the latest.
        """
        import orbax.checkpoint as ocp

        leaves = _by_path(arrays)
        wrong = [
            f"{path} is a {type(leaf).__name__}" for path, leaf in leaves.items() if not isinstance(leaf, jax.Array)
        ]
        if wrong:
            raise ValueError(f"checkpoint: arrays must hold jax arrays only; {'; '.join(wrong)}; put it into host")
        latest = self._manager.latest_step()
        if latest is not None and step <= latest:
            raise ValueError(f"checkpoint: step {step} must be after the latest step {latest} in {self.directory}")
        values: dict[str, np.ndarray] = {}
        try:
            text = json.dumps(_without_arrays(host, values))
        except (TypeError, ValueError) as error:
            raise ValueError(f"checkpoint: host must be JSON and numpy arrays, but {error}") from error
        # Save text, not the object: Orbax would serialize it later, when the caller may have changed it.
        record = {"format": FORMAT, "host": text, "arrays": {path: _spec(leaf) for path, leaf in leaves.items()}}
        items: dict[str, Any] = {
            "arrays": ocp.args.PyTreeSave(leaves, ocdbt_target_data_file_size=FILE_BYTES),
            "host": ocp.args.JsonSave(record),
        }
        if values:
            items["values"] = ocp.args.PyTreeSave(values)
        self._manager.save(step, args=ocp.args.Composite(**items))

    def latest_step(self) -> int | None:
        """Newest complete step; waits for a background save."""
        self.wait()
        return self._manager.latest_step()

    def restore(self, step: int, like: Tree, *, partial: bool = False) -> tuple[Tree, dict[str, Any]]:
        """Restore the arrays of `step` in the structure, dtypes and shardings of `like`, and the host data.

        `like` holds arrays or `jax.ShapeDtypeStruct`; leaves without a sharding go to the first device. `partial`:
        `like` holds only some of the checkpoint's top-level branches, each complete, and only those are read. Raises
        ConfigError if the leaves differ (listing all), the step does not exist, the format differs, or the checkpoint
        cannot be read.
        """
        import orbax.checkpoint as ocp

        self.wait()
        if step not in self._manager.all_steps():
            raise ConfigError(
                f"{self.directory}: no checkpoint of step {step}; available: {sorted(self._manager.all_steps())}"
            )
        requested = _by_path(like)
        with self._readable(step):
            args = ocp.args.Composite(host=ocp.args.JsonRestore())
            record = self._manager.restore(step, args=args)["host"]
            written, saved, host = record["format"], record["arrays"], json.loads(record["host"])
        if written != FORMAT:
            raise ConfigError(
                f"{self.directory / str(step)}: the checkpoint has format {written}, this version reads {FORMAT}; "
                "resume with the version that wrote it, or use another output folder"
            )
        branches = {path.split(".")[0] for path in (requested if partial else saved)}
        self._check(step, {path: spec for path, spec in saved.items() if path.split(".")[0] in branches}, requested)
        target = {path: _target(leaf) for path, leaf in requested.items()}
        with self._readable(step):
            restore_args = ocp.checkpoint_utils.construct_restore_args(target)
            args = ocp.args.Composite(
                arrays=ocp.args.PyTreeRestore(target, restore_args=restore_args, partial_restore=partial)
            )
            leaves = self._manager.restore(step, args=args)["arrays"]
            values = self._values(step, host)
        host = _with_arrays(host, values)
        return jax.tree.unflatten(jax.tree.structure(like), [leaves[path] for path in requested]), host

    def _values(self, step: int, host: Any) -> dict[str, np.ndarray]:
        """Numpy arrays of the host data."""
        import orbax.checkpoint as ocp

        names: set[str] = set()
        _named(host, names)
        if not names:
            return {}
        numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
        args = ocp.args.Composite(values=ocp.args.PyTreeRestore(restore_args=numpy))
        found: dict[str, np.ndarray] = self._manager.restore(step, args=args)["values"]
        return found

    def wait(self) -> None:
        """Wait until all saved steps are on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, step: int, saved: dict[str, Any], requested: dict[str, Any]) -> None:
        problems = [
            f"{path} {_show(_spec(leaf))} is not in the checkpoint"
            for path, leaf in requested.items()
            if path not in saved
        ]
        problems += [
            f"{path} {_show(spec)} is in the checkpoint but not in the run"
            for path, spec in saved.items()
            if path not in requested
        ]
        problems += [
            f"{path} is {_show(saved[path])} in the checkpoint and {_show(_spec(leaf))} in the run"
            for path, leaf in requested.items()
            if path in saved and saved[path] != _spec(leaf)
        ]
        if problems:
            raise ConfigError(
                f"{self.directory / str(step)}: checkpoint of another model or optimizer: {'; '.join(problems)}. "
                "Resume with the configuration that wrote it, or use another output folder"
            )

    @contextlib.contextmanager
    def _readable(self, step: int) -> Iterator[None]:
        """Convert any Orbax error on a damaged file into a ConfigError with a remedy."""
        try:
            with _quiet():
                yield
        except Exception as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"{self.directory / str(step)}: the checkpoint of step {step} cannot be read "
                f"({type(error).__name__}: {reason[:200]}); remove this folder to resume from the previous step, "
                "or restore it from a copy"
            ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress asyncio's messages about reads abandoned by a failed restore, whose error is raised anyway."""
    logger, hook = logging.getLogger("asyncio"), sys.unraisablehook
    level = logger.level
    try:
        yield
    except Exception:
        logger.setLevel(logging.CRITICAL)
        sys.unraisablehook = lambda _: None
        gc.collect()
        raise
    finally:
        logger.setLevel(level)
        sys.unraisablehook = hook


ARRAY = "numpy array"
"""Key that stands in JSON for a numpy array, with its name, or for an empty one its shape and dtype."""


def _without_arrays(value: Any, found: dict[str, np.ndarray]) -> Any:
    """JSON with names in place of numpy arrays, which go to `found`."""
    if isinstance(value, np.ndarray):
        if not value.size:
            return {ARRAY: _spec(value)}
        name = f"value_{len(found)}"
        found[name] = value
        return {ARRAY: name}
    if isinstance(value, Mapping):
        return {key: _without_arrays(one, found) for key, one in value.items()}
    return [_without_arrays(one, found) for one in value] if isinstance(value, list | tuple) else value


def _with_arrays(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Inverse of `_without_arrays`."""
    if isinstance(value, dict) and value.keys() == {ARRAY}:
        name = value[ARRAY]
        return arrays[name] if isinstance(name, str) else np.zeros(name["shape"], name["dtype"])
    if isinstance(value, dict):
        return {key: _with_arrays(one, arrays) for key, one in value.items()}
    return [_with_arrays(one, arrays) for one in value] if isinstance(value, list) else value


def _named(value: Any, names: set[str]) -> None:
    """Add the names of the arrays that JSON stands for."""
    if isinstance(value, dict) and isinstance(value.get(ARRAY), str):
        names.add(value[ARRAY])
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            _named(one, names)


def _by_path(tree: Any) -> dict[str, Any]:
    leaves = [(path_str(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
    named = dict(leaves)
    assert len(named) == len(leaves), f"two leaves share a path: {sorted(path for path, _ in leaves)}"
    return named


def _spec(leaf: Any) -> dict[str, Any]:
    return {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}


def _show(spec: dict[str, Any]) -> str:
    return f"{spec['dtype']}{spec['shape']}"


def _target(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = SingleDeviceSharding(jax.local_devices()[0]) if leaf.sharding is None else leaf.sharding
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
