"""Run: check everything, resume each stage, then print a summary."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.config import RunConfig, trains_on_samples
from posttrain.config.yaml_file import diff_config, dump_config, load_config
from posttrain.distill.teachers import training_devices
from posttrain.errors import ConfigError
from posttrain.mesh import make_mesh, row_shards
from posttrain.models.decoder import Decoder
from posttrain.runs.code_identity import check_code, remember_code
from posttrain.runs.epochs import write_counts
from posttrain.runs.extend import extend, extended_stages
from posttrain.runs.prepare import prepare
from posttrain.runs.summary import print_summary
from posttrain.stages.context import StageRun
from posttrain.stages.table import STAGES, row_notes, stage_names
from posttrain.tracking.console import console
from posttrain.train.loop import Interrupted, stop_on_signals
from posttrain.weights.load import load_model
from posttrain.weights.locate import local_or_hub

CONFIG_NAME = "config.yaml"
NO_EFFECT = ("output", "tensorboard")
"""Keys that may differ between calls of the same run."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Result of a finished run."""

    output: Path
    stages: Sequence[str]
    results: Sequence[Mapping[str, Any]]
    """Evaluations `before` and `after` by stage, with an `eval_dataset`."""
    trained: Sequence[str]
    """Stages trained by this call; empty if the run was already finished."""

    @property
    def model_path(self) -> Path:
        """Folder of the final model in Hugging Face layout."""
        return self.output / self.stages[-1] / "model"

    def load_model(self) -> Decoder:
        return load_model(self.model_path)


def run(config: RunConfig, base_dir: Path) -> RunResult:
    """Run the remaining steps of all stages. Raises ConfigError for mistakes, before any work, and Interrupted."""
    prepared = prepare(config, base_dir, offline_ok=False)
    config = prepared.config
    mesh = make_mesh(config.mesh, training_devices(config))
    assert prepared.tokenizer is not None
    output = Path(config.output)
    names = stage_names(config)
    with _claimed(output, config, base_dir), stop_on_signals() as stop:
        write_counts(output, prepared.counts)
        for note in prepared.notes + row_notes(config, row_shards(mesh)):
            console().print(note, markup=False, soft_wrap=True)
        source, trained = None, []
        for name, inputs in zip(names, prepared.stages, strict=True):
            folder = output / name
            folder.mkdir(exist_ok=True)
            stage = StageRun(
                name=name,
                kind=inputs.section.kind,
                sampled=trains_on_samples(inputs.section),
                folder=folder,
                output=output,
                model=config.model,
                source=source,
                source_name=None if config.model.path is None else local_or_hub(config.model.path, base_dir),
                adapter=None if config.model.adapter is None else local_or_hub(config.model.adapter, base_dir),
                seed=config.seed,
                mesh=mesh,
                tokenizer=prepared.tokenizer,
                tensorboard=config.tensorboard,
                stop=stop,
            )
            source = stage.model_folder
            if source.exists():
                console().print(f"{name}: done before; its model is {source}")
                continue
            if stop.requested:
                raise Interrupted(f"stopped before {name}")
            trained.append(name)
            console().rule(f"{name}: {inputs.section.steps} steps", align="left")
            STAGES[inputs.section.kind].run(stage, inputs)
            gc.collect()  # trainer and programs form a cycle that keeps the weights alive
    results = [json.loads((output / name / "result.json").read_text(encoding="utf-8")) for name in names]
    result = RunResult(output=output, stages=names, results=results, trained=trained)
    if not trained:
        console().print(
            f"NOTHING WAS TRAINED: {output} holds this run, finished before with the same settings and code; these are "
            "its results. To train again give another output, or delete the folder.",
            style="bold yellow",
            markup=False,
            soft_wrap=True,
        )
    print_summary(result.output, names, results, config)
    return result


@contextlib.contextmanager
def _claimed(output: Path, config: RunConfig, base_dir: Path) -> Iterator[None]:
    """Lock the run's folder for this process; ConfigError if another process uses it or another configuration made
    it."""
    import fcntl

    try:
        output.mkdir(parents=True, exist_ok=True)
        lock_file = (output / ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"output: {output}: cannot be written: {error.strerror}; give another output") from error
    with lock_file as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"output: another process is running in {output}; wait for it, or give another output"
            ) from error
        _check_same(output, config, base_dir)
        yield


def _check_same(output: Path, config: RunConfig, base_dir: Path) -> None:
    file = output / CONFIG_NAME
    if not file.exists() or not _begun(output):
        remember_code(output, config, base_dir)
        _write(file, config)
        return
    before = load_config(file).config
    # Both are compared as YAML, in which a function is its name.
    extended = extended_stages(before, config)
    may_differ = {*NO_EFFECT, *(f"stages.{index}.num_steps" for index in extended)}
    changed = [key for key in diff_config(before, config) if key not in may_differ]
    if changed:
        rule = " (num_steps may grow)" if any(key.endswith(".num_steps") for key in changed) else ""
        raise ConfigError(
            f"output: {output} holds a run with other settings: {', '.join(changed)}{rule}; "
            "give another output, or delete the folder to start over"
        )
    check_code(output, config, base_dir)
    if extended:
        extend(output, before, config, extended)
        _write(file, config)


def _write(file: Path, config: RunConfig) -> None:
    partial = file.with_suffix(".tmp")
    partial.write_text(dump_config(config), encoding="utf-8")
    partial.rename(file)


def _begun(output: Path) -> bool:
    """Tell whether the folder depends on the settings already: a run that failed while loading leaves nothing."""
    metrics = output / "metrics.jsonl"
    return (metrics.exists() and metrics.stat().st_size > 0) or any(output.glob("*/before.json"))
