"""Folder of a run: claimed by one process, for the settings and the code with which the run was started."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from posttrain import __version__
from posttrain.config import RunConfig, TrainSection
from posttrain.config.yaml_file import diff_config, dump_config, load_recorded
from posttrain.errors import ConfigError
from posttrain.runs.code_identity import check_code, code_digests, remember_code
from posttrain.runs.environment import versions
from posttrain.runs.input_identity import check_inputs, input_digests, remember_inputs
from posttrain.runtime import processes
from posttrain.runtime.files import LOCK_NAME, digest, locked, write_whole
from posttrain.stages.inputs import Prepared
from posttrain.stages.table import stage_names
from posttrain.tracking.console import console

CONFIG_NAME = "config.yaml"
STALE_S = 60
"""Time for which NFS may not show a folder that another host has made."""
DEVICES = "devices.json"
VERSIONS = "versions.json"
SHOWN_VERSIONS = ("posttrain", "jax", "python")
"""Names of `versions.json` that one line has room for."""
OF_ROWS = re.compile(r"(dataset|mix\.\d+|sets\.\d+)\.args\.revision$")
"""Keys that say which rows are read, and no more."""
NO_EFFECT = ("output", "tensorboard", "trackers", "metrics_server", "profile")
"""Keys that may differ between calls of the same run."""


@dataclass(frozen=True, kw_only=True)
class Growth:
    """More steps for stages of a run than it had. The folder stays as it was until `write`."""

    output: Path
    config: RunConfig
    names: tuple[str, ...] = ()
    """Names of the stages that have more steps now."""

    def write(self) -> None:
        """Write the new settings, and delete model and result of the stages, which train on from their last checkpoint.
        A process that is killed in between leaves a run that the settings from before end as it was."""
        for name in self.names:
            folder = self.output / name
            replaced = folder / "model.replaced"
            if (folder / "model").exists():
                # Renamed first, so that a killed process leaves no partial model under this name.
                (folder / "model").rename(replaced)
            shutil.rmtree(replaced, ignore_errors=True)
            (folder / "result.json").unlink(missing_ok=True)
        if self.names:
            write_whole(self.output / CONFIG_NAME, dump_config(self.config))


@contextmanager
def claimed(prepared: Prepared) -> Iterator[Growth]:
    """Lock the run's folder, by the first process, with the stages that have more steps than before as the value, the
    same in all processes. ConfigError if another run uses the folder, other settings, code or data made it, or another
    process does not see it or has other ones."""
    config, output = prepared.config, Path(prepared.config.output)
    with contextlib.ExitStack() as held:
        growth = Growth(output=output, config=config)
        if processes.writes():
            growth = held.enter_context(_locked(output, prepared))
        if processes.count() > 1:
            _check_others(output, prepared)
        yield replace(growth, names=tuple(processes.agreed(lambda: list(growth.names))))


def _check_others(output: Path, prepared: Prepared) -> None:
    """ConfigError, in every process, if one has other settings, code or inputs, or does not see the folder of the
    first."""
    token = processes.agreed((output / LOCK_NAME).read_text)
    read = [code_digests(prepared.config), input_digests(prepared)]
    settings = [dump_config(prepared.config), json.dumps(read, sort_keys=True), __version__]
    processes.check_same("settings, code, inputs and version of the run", digest("\n".join(settings)))
    if processes.any_of(not _appears(output / LOCK_NAME, token)):
        raise ConfigError(
            f"output: a process does not see {output}, which process 0 has made; give a folder that all hosts share, "
            "such as NFS"
        )


def _appears(file: Path, content: str) -> bool:
    """Wait until a file has this content, as long as a network file system may show an old state; False if it never
    does."""
    end = time.monotonic() + STALE_S
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            if file.read_text() == content:
                return True
        time.sleep(0.2)
    return False


@contextmanager
def _locked(output: Path, prepared: Prepared) -> Iterator[Growth]:
    with contextlib.ExitStack() as held:
        try:
            output.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(output))
        except BlockingIOError as error:
            raise ConfigError(
                f"output: another process is running in {output}; wait for it, or give another output"
            ) from error
        except OSError as error:
            raise ConfigError(f"output: {output}: cannot be written: {error.strerror}; give another output") from error
        yield _check_same(output, prepared)


def remember_devices(output: Path, slices: int) -> None:
    """Write the devices of the run, after those of calls before with other ones."""
    first, before = jax.devices()[0], devices_of(output)
    own = {"kind": first.device_kind, "platform": first.platform, "number": len(jax.devices()), "slices": slices}
    own["processes"] = processes.count()
    if own not in before[-1:]:
        write_whole(output / DEVICES, json.dumps([*before, own], indent=1))


def remember_versions(output: Path) -> None:
    """Write the versions of posttrain, Python and the libraries into a folder that a command leaves, after those of
    calls before with other ones, and say which are others than before."""
    before, own = versions_of(output), versions()
    if own in before[-1:]:
        return
    if before:
        last = before[-1]
        names = [name for name in {**last, **own} if last.get(name) != own.get(name)]
        changes = ", ".join(f"{name} {last.get(name, 'none')} -> {own.get(name, 'none')}" for name in names)
        console().print(f"{output}: goes on with other versions than before: {changes}", markup=False, soft_wrap=True)
    write_whole(output / VERSIONS, json.dumps([*before, own], indent=1))


def versions_of(output: Path) -> list[dict[str, str]]:
    """Versions that have made a folder, those of its last call at the end; none of one that did not write them."""
    file = output / VERSIONS
    found: list[dict[str, str]] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    return found


def describe_versions(calls: Sequence[Mapping[str, str]]) -> str:
    """Versions of the last call in words, and those before where they were others; empty without any.

    >>> describe_versions([{"posttrain": "0.1.0", "jax": "0.9"}, {"posttrain": "0.1.0", "jax": "0.10", "flax": "1"}])
    'posttrain 0.1.0, jax 0.10 (before: jax 0.9)'
    """
    if not calls:
        return ""
    last = calls[-1]
    shown = [f"{name} {last[name]}" for name in SHOWN_VERSIONS if name in last]
    before = {
        f"{name} {call[name]}": None
        for call in calls[:-1]
        for name in SHOWN_VERSIONS
        if name in call and call[name] != last.get(name)
    }
    return ", ".join(shown) + (f" (before: {', '.join(before)})" if before else "")


def devices_of(output: Path) -> list[dict[str, Any]]:
    """Devices of a run, those of its last call at the end; none of one that did not write them."""
    file = output / DEVICES
    found: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    return found


def is_run(folder: Path) -> bool:
    return (folder / CONFIG_NAME).is_file()


def machine_of_run(output: Path) -> str:
    """Name of the machine of a run. ConfigError where it has no name."""
    from posttrain.plan.machine import machine_of

    found = devices_of(output)
    names = {machine_of(one["kind"], one["platform"], one["number"], one["slices"]) for one in found}
    if len(names) != 1 or (name := names.pop()) is None:
        kinds = " and ".join(f"{one['number']} x {one['kind']}" for one in found) or "devices that it did not write"
        raise ConfigError(f"plan: {output} ran on {kinds}; give --devices MACHINE")
    return name


def _check_same(output: Path, prepared: Prepared) -> Growth:
    """Stages that have more steps than before. ConfigError for settings, code or inputs that changed otherwise. Writes
    the settings of a run that has not begun."""
    config, file = prepared.config, output / CONFIG_NAME
    if not file.exists() or not _begun(output):
        remember_code(output, config)
        remember_inputs(output, prepared)
        write_whole(file, dump_config(config))
        return Growth(output=output, config=config)
    before = load_recorded(file)
    # Both are compared as YAML, in which a function is its name.
    extended = _extended_stages(before, config)
    may_grow = {f"stages.{index}.num_steps" for index in extended}
    differing = [key for key in diff_config(before, config) if key.partition(".")[0] not in NO_EFFECT]
    # Rows are compared themselves, so that a run goes on with those of an earlier commit.
    differing = [key for key in differing if not OF_ROWS.search(key)]
    changed = [key for key in differing if key not in may_grow]
    if changed:
        rule = " (num_steps may grow)" if any(key.endswith(".num_steps") for key in changed) else ""
        raise ConfigError(
            f"output: {output} holds a run with other settings: {', '.join(changed)}{rule}; "
            "give another output, or delete the folder to start over"
        )
    check_code(output, config)
    check_inputs(output, prepared)
    names = stage_names(config)
    for index in extended:
        _check_extension(output, names, index, before.stages[index].steps)
    for index in extended:
        _tell_growth(names[index], before.stages[index].steps, config.stages[index])
    return Growth(output=output, config=config, names=tuple(names[index] for index in extended))


def _extended_stages(before: RunConfig, after: RunConfig) -> list[int]:
    """Numbers of the stages with more steps than before, for two runs with the same number of stages."""
    if len(before.stages) != len(after.stages):
        return []
    pairs = enumerate(zip(before.stages, after.stages, strict=True))
    return [index for index, (old, new) in pairs if (old.num_steps or 0) < (new.num_steps or 0)]


def _tell_growth(name: str, old_steps: int, section: TrainSection) -> None:
    line = f"{name}: num_steps grows from {old_steps} to {section.steps}"
    schedule, warmup = section.optimizer.schedule, section.optimizer.warmup_steps
    changes = []
    if schedule != "constant":
        shown = schedule if isinstance(schedule, str) else "joined"
        changes.append(f"the {shown} schedule of its learning rate now ends at step {section.steps}")
    if isinstance(warmup, str):
        changes.append(f"its warm-up of {warmup} now has {section.optimizer.num_warmup_steps(section.steps)} steps")
    if changes:
        line += f"; {' and '.join(changes)}, so that the result is not that of a run with so many steps from the start"
    console().print(line, markup=False, soft_wrap=True)


def _check_extension(output: Path, names: Sequence[str], index: int, old_steps: int) -> None:
    """ConfigError if a later stage started from the model of this one, or if its last checkpoint is missing."""
    field, folder = f"stages.{index}.num_steps", output / names[index]
    if begun := [name for name in names[index + 1 :] if (output / name / "source.json").exists()]:
        raise ConfigError(
            f"output: {field} grows, but {begun[0]} in {output} started from the model after {old_steps} steps; "
            f"delete {', '.join(str(output / name) for name in begun)} to train it anew, or give another output"
        )
    if not (folder / "model").exists():
        return
    # A callback may have ended the stage before its last step.
    last = json.loads((folder / "result.json").read_text(encoding="utf-8")).get("ended", old_steps)
    if not (folder / "checkpoints" / str(last)).is_dir():
        raise ConfigError(
            f"output: {field} grows, but {folder / 'checkpoints'} has no checkpoint of step {last} to resume from; "
            "give another output"
        )


def _begun(output: Path) -> bool:
    """Tell whether the folder depends on the settings already: a run that failed while loading leaves nothing."""
    metrics = output / "metrics.jsonl"
    return (metrics.exists() and metrics.stat().st_size > 0) or any(output.glob("*/before.json"))
