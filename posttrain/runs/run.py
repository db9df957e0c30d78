"""Run: check everything, resume each stage, then print a summary."""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import jax
from jax.sharding import Mesh

from posttrain.config import PlacementSection, RunConfig, trains_on_samples
from posttrain.config.yaml_file import stage_settings
from posttrain.errors import ConfigError, OutsideError, outside_error
from posttrain.mesh import make_mesh, row_shards
from posttrain.runs.folder import claimed
from posttrain.runs.prepare import keep_clock, prepare, write_counts
from posttrain.runs.summary import print_placement, print_summary
from posttrain.runtime import join, processes
from posttrain.runtime.files import check_writable
from posttrain.runtime.xla import enable_compile_cache
from posttrain.stages.context import StageRun, role_devices, training_devices
from posttrain.stages.inputs import Prepared
from posttrain.stages.table import check_processes, check_row_tokens, row_notes, stage_kind, stage_names
from posttrain.tracking.console import console
from posttrain.tracking.sink import Sink
from posttrain.tracking.trackers import require
from posttrain.train.loop import StopRequest, stop_on_signals


def run(config: RunConfig, watchers: Sequence[Sink] = (), *, strict: bool = False) -> list[str]:
    """Run the remaining steps of all stages; return the names of those that were trained.

    `watchers`: sinks in addition to the run's own, of which each stage's metrics go to all. `strict`: end where the
    newest checkpoint is damaged. Raises ConfigError for mistakes, before any work, Interrupted, and
    OutsideError.
    """
    enable_compile_cache()
    for tracker in config.trackers:
        require(tracker)
    mesh = mesh_of(config)
    check_writable(Path(config.output))
    prepared = prepare(config, offline_ok=False)
    config = prepared.config
    output, names = Path(config.output), stage_names(config)
    with _outside_failures(output), claimed(output, config), stop_on_signals() as stop:
        if processes.writes():
            write_counts(output, prepared.counts)
            keep_clock(output, prepared.tokenizer)
        for note in prepared.notes + row_notes(config, row_shards(mesh)):
            console().print(note, markup=False, soft_wrap=True)
        trained = _train_stages(prepared, mesh, watchers, stop, strict=strict)
    results = [json.loads((output / name / "result.json").read_text(encoding="utf-8")) for name in names]
    if not trained:
        _print_nothing_trained(output, _finished(output / names[-1]))
    print_summary(output, names, results, config)
    return trained


def _train_stages(
    prepared: Prepared, mesh: Mesh, watchers: Sequence[Sink], stop: StopRequest, *, strict: bool
) -> list[str]:
    """Run the stages that are not done, each from the model of the one before; return their names."""
    config, output, names = prepared.config, Path(prepared.config.output), stage_names(prepared.config)
    source, trained = None, []
    for name, inputs in zip(names, prepared.stages, strict=True):
        folder = output / name
        if processes.writes():
            folder.mkdir(exist_ok=True)
        stage = StageRun(
            name=name,
            kind=inputs.section.kind,
            sampled=trains_on_samples(inputs.section),
            folder=folder,
            output=output,
            model=config.model,
            source=source,
            source_name=prepared.files.path,
            adapter=None if config.model.adapter is None else config.model.adapter.resolved,
            seed=config.seed,
            mesh=mesh,
            devices=role_devices(config, getattr(inputs.section, "placement", PlacementSection())),
            tokenizer=prepared.tokenizer,
            tensorboard=config.tensorboard,
            profile=config.profile,
            stop=stop,
            trackers=config.trackers,
            settings=stage_settings(config, names.index(name)),
            watchers=watchers,
            strict=strict,
        )
        source = stage.model_folder
        if processes.agreed(source.exists):
            console().print(f"{name}: done before; its model is {source}")
            continue
        if processes.any_of(stop.requested):
            raise stop.interrupted(f"stopped before {name}")
        trained.append(name)
        console().rule(f"{name}: {inputs.section.steps} steps", align="left")
        kind = stage_kind(stage.kind)
        print_placement(inputs.section, mesh, stage.devices, kind.roles(inputs))
        kind.run(stage, inputs)
        gc.collect()  # trainer and programs form a cycle that keeps the weights alive
    return trained


def _print_nothing_trained(output: Path, when: str) -> None:
    console().print(
        f"NOTHING WAS TRAINED: {output} holds this run, finished on {when} with the same settings and code; these are "
        f"its results. To train again give another output, such as output={output}-2, or delete the folder.",
        style="bold yellow",
        markup=False,
        soft_wrap=True,
    )


def _finished(folder: Path) -> str:
    """Date and time at which a stage was finished."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime((folder / "result.json").stat().st_mtime))


def mesh_of(config: RunConfig) -> Mesh:
    """Mesh of the run. ConfigError if the run cannot use it or all processes, or if these have not joined."""
    if jax.process_count() != processes.count():
        raise ConfigError(
            f"this host is one of {jax.process_count()}, which have not joined; use posttrain run, or call "
            "jax.distributed.initialize() first"
        )
    mesh = make_mesh(config.mesh, training_devices(config))
    check_row_tokens(config, mesh.shape["context"])
    check_processes(config, processes.count(), row_shards(mesh))
    return mesh


@contextlib.contextmanager
def _outside_failures(output: Path) -> Iterator[None]:
    """Say of failures outside of the program, such as a full disk, where the same command resumes."""
    join.tell(partial(_goes_on, output))
    try:
        yield
    except Exception as error:
        if (found := outside_error(error, processes.peer())) is None:
            raise
        raise OutsideError(f"{found}; the same command {_goes_on(output)}", found.code) from error


def _goes_on(output: Path) -> str:
    """Words for the same command after a failure outside of the program."""
    steps = [folder for folder in output.glob("*/checkpoints/*") if folder.name.isdecimal()]
    newest = max(steps, key=lambda folder: (int(folder.parts[-3].partition("-")[0]), int(folder.name)), default=None)
    return "begins again" if newest is None else f"resumes after step {newest.name} of {newest.parts[-3]}"
