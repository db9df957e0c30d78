"""Checkpoints: arrays and host data of one step with their digests, written atomically in the background."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from posttrain.errors import ConfigError
from posttrain.runtime import processes
from posttrain.runtime.files import check_readable, digest, file_digest, write_whole
from posttrain.tree import digests, path_str

T = TypeVar("T")
Tree = TypeVar("Tree")

FORMAT = 5
"""Format of the host part; checkpoints of another format are rejected."""
FILE_BYTES = 32 << 20
"""Size of a checkpoint's files: the writer holds what it has compressed until a file is full. With Orbax's default, 2
GiB, that is a second copy of the whole state."""
MANIFEST = "manifest.json"
"""Sizes and digests of the files beside it, all that TensorStore reads: damaged ones may end its process."""
DAMAGED = "damaged-"
"""Beginning of the names of steps that were set aside."""


class DamagedCheckpoint(ConfigError):
    """Step that cannot be read, or that differs from what was saved; every process raises it."""


class Checkpointer:
    """Checkpoint manager: saves steps below `directory` in the background and keeps the newest `keep`; a context
    manager.

    A step holds the leaves of a tree of jax arrays under their dotted paths, and host data: JSON in which numpy arrays
    of any shape may stand, with a digest of each leaf and of the host data, which are compared when it is restored, and
    one of each file, which is compared before it is read. It appears under its number once it is completely on disk: a
    process killed while saving leaves the previous steps.
    Incomplete steps are removed in the background from the opening on, at the latest by the next save, so only one run
    may have a directory open, and others beside it with `read_only`, which changes nothing in it. An error of a
    background save is raised by the next call. With several processes, all make the same calls.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 2, read_only: bool = False) -> None:
        import orbax.checkpoint as ocp

        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1")
        self.directory = Path(directory).absolute()
        # Orbax logs every array and phase; its errors are raised as exceptions as well.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        self._hook, sys.excepthook = sys.excepthook, _without_closed_loops(sys.excepthook)
        self._manager = ocp.CheckpointManager(
            self.directory,
            handler_registry=_item_handlers(),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=None if read_only else ocp.checkpoint_managers.LatestN(n=keep),
                cleanup_tmp_directories=not read_only,
                create=not read_only,
                read_only=read_only,
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
        found = digests(leaves)
        specs = {path: {**_spec(leaf), "digest": found[path]} for path, leaf in leaves.items()}
        record = {"host": text, "arrays": specs, "values": {name: _digest(value) for name, value in values.items()}}
        items: dict[str, Any] = {
            "arrays": ocp.args.PyTreeSave(leaves, ocdbt_target_data_file_size=FILE_BYTES),
            "host": ocp.args.JsonSave(_sealed(json.dumps(record), FORMAT)),
        }
        if values:
            items["values"] = ocp.args.PyTreeSave(values)
        self._manager.save(step, args=ocp.args.Composite(**items))

    def warm_up(self, arrays: Any) -> None:
        """Compile what a save of these arrays needs, so that no step waits for it."""
        digests(_by_path(arrays))

    def latest_step(self) -> int | None:
        """Newest complete step; waits for a background save."""
        self.wait()
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Steps on disk from the newest on, damaged ones as well, as the first process sees them; waits for a
        background save."""
        self.wait()
        found = (int(path.name) for path in self.directory.iterdir() if path.name.isdecimal())
        return processes.agreed(lambda: sorted(found, reverse=True))

    def set_aside(self, step: int) -> Path:
        """Rename a damaged step, so that it can be written anew; returns its new folder."""
        folder = self.directory / f"{DAMAGED}{step}"
        if processes.writes():
            shutil.rmtree(folder, ignore_errors=True)
            (self.directory / str(step)).rename(folder)
        processes.wait_for_all(f"step {step} is set aside")
        self._manager.reload()
        return folder

    def restore(self, step: int, like: Tree, *, partial: bool = False) -> tuple[Tree, dict[str, Any]]:
        """Restore the arrays of `step` in the structure, dtypes and shardings of `like`, and the host data.

        `like` holds arrays or `jax.ShapeDtypeStruct`; leaves without a sharding go to the first device. `partial`:
        `like` holds only some of the checkpoint's top-level branches, each complete, and only those are read. Raises
        ConfigError if the leaves differ (listing all), the step does not exist or the format differs, and
        DamagedCheckpoint if anything that is read differs from what was saved.
        """
        if step not in (steps := self.steps()):
            raise ConfigError(f"{self.directory}: no checkpoint of step {step}; available: {sorted(steps)}")
        record = self._together(step, lambda: self._record(step))
        if record["format"] != FORMAT:
            raise ConfigError(
                f"{self.directory / str(step)}: the checkpoint has format {record['format']}, this version reads "
                f"{FORMAT}; resume with the version that wrote it, which is in versions.json of the run, or use "
                "another output folder"
            )
        requested, saved = _by_path(like), record["arrays"]
        branches = {path.split(".")[0] for path in (requested if partial else saved)}
        self._check(step, {path: spec for path, spec in saved.items() if path.split(".")[0] in branches}, requested)
        # All files, by all processes, before one of them reads any: of damaged ones TensorStore may end the process.
        self._together(step, lambda: self._verify(step, record["values"]))
        leaves, values = self._together(step, lambda: self._arrays(step, requested, record["values"], partial=partial))
        found = digests(leaves) | {name: _digest(value) for name, value in values.items()}
        expected = {path: saved[path]["digest"] for path in leaves} | record["values"]
        if wrong := [path for path, one in expected.items() if found.get(path) != one]:
            raise self._damaged(step, f"{', '.join(wrong)}: other values than were saved")
        host = _with_arrays(json.loads(record["host"]), values)
        return jax.tree.unflatten(jax.tree.structure(like), [leaves[path] for path in requested]), host

    def _verify(self, step: int, values: dict[str, str]) -> None:
        """Compare files with their manifests, each process a part of them. ValueError for one that differs, OSError for
        one that is missing."""
        for item in ("arrays", "values") if values else ("arrays",):
            folder = self.directory / str(step) / item
            sealed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            if sealed != _sealed(sealed["record"], sealed["format"]):
                raise ValueError(f"{item}/{MANIFEST}: other data than was saved")
            files: dict[str, list[Any]] = json.loads(sealed["record"])
            for name in sorted(files)[processes.index() :: processes.count()]:
                if _seal_of(folder / name) != files[name]:
                    raise ValueError(f"{item}/{name}: other data than was saved")

    def _record(self, step: int) -> dict[str, Any]:
        """Host data, and specifications of the arrays."""
        import orbax.checkpoint as ocp

        read = ocp.JsonCheckpointHandler().restore
        sealed = read(self._manager.directory / str(step) / "host", args=ocp.args.JsonRestore())
        if "digest" not in sealed and isinstance(sealed["format"], int):
            return {"format": sealed["format"]}
        if sealed != _sealed(sealed["record"], sealed["format"]):
            raise ValueError("host: other data than was saved")
        return {"format": sealed["format"], **json.loads(sealed["record"])}

    def _arrays(
        self, step: int, requested: dict[str, Any], values: dict[str, str], *, partial: bool
    ) -> tuple[dict[str, jax.Array], dict[str, np.ndarray]]:
        """Requested leaves by path, and numpy arrays of the host data by name."""
        import orbax.checkpoint as ocp

        # Not the manager's `restore`, in which the other processes would wait for one that cannot read its part.
        read = ocp.PyTreeCheckpointHandler(type_handler_registry=_type_handlers()).restore
        folder = self._manager.directory / str(step)
        target = {path: _target(leaf) for path, leaf in requested.items()}
        places = ocp.checkpoint_utils.construct_restore_args(target)
        args = ocp.args.PyTreeRestore(target, restore_args=places, partial_restore=partial)
        leaves: dict[str, jax.Array] = read(folder / "arrays", args=args)
        numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in values}
        found = read(folder / "values", args=ocp.args.PyTreeRestore(restore_args=numpy)) if values else {}
        return leaves, found

    def _together(self, step: int, read: Callable[[], T]) -> T:
        """Result of a read in all processes. DamagedCheckpoint in all of them if it fails in one."""
        problem, result = "", None
        try:
            result = read()
        except (MemoryError, PermissionError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:  # Orbax and TensorStore have no class for damaged files
            check_readable(self.directory / str(step), error)
            told = re.split(r"<|\[| See ", " ".join(str(error).split()))[0]
            problem = f"{type(error).__name__}: {told[:160].rstrip(' .')}"
        if processes.any_of(bool(problem)):
            raise self._damaged(step, problem or "another process cannot read it")
        return cast(T, result)

    def _damaged(self, step: int, reason: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(f"{self.directory / str(step)}: the checkpoint of step {step} is damaged ({reason})")

    def wait(self) -> None:
        """Wait until all saved steps are on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        try:
            self._manager.close()
        finally:
            sys.excepthook = self._hook

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not processes.is_lost(error):
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
            if path in saved and _show(saved[path]) != _show(_spec(leaf))
        ]
        if problems:
            raise ConfigError(
                f"{self.directory / str(step)}: checkpoint of another model or optimizer: {'; '.join(problems)}. "
                "Resume with the configuration that wrote it, or use another output folder"
            )


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


@functools.cache
def _without_closed_loops(hook: Hook) -> Hook:
    """Hook without what TensorStore's threads print about writes abandoned by a failed save, whose error is raised.

    It is kept for good: Python calls a hook without a reference of its own, and a thread that has begun to report an
    error ends the process if the hook is freed meanwhile.
    """

    def print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if str(error) != "Event loop is closed":
            hook(kind, error, trace)

    return print_error


def _item_handlers() -> Any:
    """Handlers of Orbax of a step's items: those of arrays write a manifest of their files."""
    import orbax.checkpoint as ocp

    class Sealing(ocp.PyTreeCheckpointHandler):
        def finalize(self, directory: Any) -> None:
            """Called when all files are written, before the step gets its name."""
            super().finalize(directory)
            if processes.writes():
                folder = Path(directory)
                names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
                files = {name: _seal_of(folder / name) for name in names}
                write_whole(folder / MANIFEST, json.dumps(_sealed(json.dumps(files), FORMAT)))

    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for item in ("arrays", "values"):
        sealing = Sealing()
        registry.add(item, ocp.args.PyTreeSave, sealing)
        registry.add(item, ocp.args.PyTreeRestore, sealing)
    json_handler = ocp.JsonCheckpointHandler()
    registry.add("host", ocp.args.JsonSave, json_handler)
    registry.add("host", ocp.args.JsonRestore, json_handler)
    return registry


def _seal_of(file: Path) -> list[Any]:
    """Size and digest of a file."""
    return [file.stat().st_size, file_digest(file)]


class _ReadsToTheEnd:
    """Type handler of Orbax that ends when all its reads have.

    Orbax raises the first error and closes the event loop. TensorStore's threads would report the other reads to it
    nevertheless, raise, and free there what those held.
    """

    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        others = asyncio.all_tasks()
        try:
            return await super().deserialize(infos, args)  # type: ignore[misc]
        finally:
            while reads := asyncio.all_tasks() - others:
                await asyncio.wait(reads)


@functools.cache
def _type_handlers() -> Any:
    from orbax.checkpoint import type_handlers

    class Arrays(_ReadsToTheEnd, type_handlers.ArrayHandler):
        pass

    class Values(_ReadsToTheEnd, type_handlers.NumpyHandler):
        pass

    return type_handlers.create_type_handler_registry((jax.Array, Arrays()), (np.ndarray, Values()))


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


def _by_path(tree: Any) -> dict[str, Any]:
    leaves = [(path_str(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
    named = dict(leaves)
    assert len(named) == len(leaves), f"two leaves share a path: {sorted(path for path, _ in leaves)}"
    return named


def _sealed(record: str, written: int) -> dict[str, Any]:
    """Record with its digest."""
    return {"format": written, "record": record, "digest": digest(f"{written}\n{record}")}


def _digest(value: np.ndarray) -> str:
    return digest(value.tobytes())


def _spec(leaf: Any) -> dict[str, Any]:
    return {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}


def _show(spec: dict[str, Any]) -> str:
    return f"{spec['dtype']}{spec['shape']}"


def _target(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = SingleDeviceSharding(jax.local_devices()[0]) if leaf.sharding is None else leaf.sharding
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
