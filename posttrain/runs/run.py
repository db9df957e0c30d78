"""Run: check everything, resume each stage, then print a summary."""

from __future__ import annotations

import contextlib
import gc
import json
import shutil
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
from posttrain.runs.prepare import prepare
from posttrain.runs.summary import print_summary
from posttrain.runtime.files import write_whole
from posttrain.stages.context import StageRun
from posttrain.stages.table import STAGES, check_row_tokens, row_notes, stage_names
from posttrain.tracking.console import console
from posttrain.train.loop import Interrupted, stop_on_signals
from posttrain.weights.load import load_model

CONFIG_NAME = "config.yaml"
NO_EFFECT = ("output", "tensorboard", "profile")
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


def run(config: RunConfig) -> RunResult:
    """Run the remaining steps of all stages. Raises ConfigError for mistakes, before any work, and Interrupted."""
    prepared = prepare(config, offline_ok=False)
    config = prepared.config
    mesh = make_mesh(config.mesh, training_devices(config))
    check_row_tokens(config, mesh.shape["context"])
    output = Path(config.output)
    names = stage_names(config)
    with _claimed(output, config), stop_on_signals() as stop:
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
                source_name=prepared.files.path,
                adapter=None if config.model.adapter is None else config.model.adapter.resolved,
                seed=config.seed,
                mesh=mesh,
                tokenizer=prepared.tokenizer,
                tensorboard=config.tensorboard,
                profile=config.profile,
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
def _claimed(output: Path, config: RunConfig) -> Iterator[None]:
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
        _check_same(output, config)
        yield


def _check_same(output: Path, config: RunConfig) -> None:
    file = output / CONFIG_NAME
    if not file.exists() or not _begun(output):
        remember_code(output, config)
        write_whole(file, dump_config(config))
        return
    before = load_config(file)
    # Both are compared as YAML, in which a function is its name.
    extended = _extended_stages(before, config)
    may_grow = {f"stages.{index}.num_steps" for index in extended}
    differing = [key for key in diff_config(before, config) if key.partition(".")[0] not in NO_EFFECT]
    changed = [key for key in differing if key not in may_grow]
    if changed:
        rule = " (num_steps may grow)" if any(key.endswith(".num_steps") for key in changed) else ""
        raise ConfigError(
            f"output: {output} holds a run with other settings: {', '.join(changed)}{rule}; "
            "give another output, or delete the folder to start over"
        )
    check_code(output, config)
    if extended:
        _extend(output, before, config, extended)
        write_whole(file, dump_config(config))


def _extended_stages(before: RunConfig, after: RunConfig) -> list[int]:
    """Numbers of the stages with more steps than before, for two runs with the same number of stages."""
    if len(before.stages) != len(after.stages):
        return []
    pairs = enumerate(zip(before.stages, after.stages, strict=True))
    return [index for index, (old, new) in pairs if (old.num_steps or 0) < (new.num_steps or 0)]


def _extend(output: Path, before: RunConfig, after: RunConfig, indices: Sequence[int]) -> None:
    """Reopen these stages at their last checkpoint, deleting the saved model of finished ones.

    ConfigError if a later stage started from that model, or if the last checkpoint is missing.
    """
    names = stage_names(after)
    for index in indices:
        _check_extension(output, names, index, before.stages[index].steps)
    for index in indices:
        old, new, folder = before.stages[index], after.stages[index], output / names[index]
        line = f"{names[index]}: num_steps grows from {old.steps} to {new.steps}"
        if new.optimizer.schedule != "constant":
            line += (
                f"; the {new.optimizer.schedule} schedule of its learning rate now ends at step {new.steps}, so that "
                "the result is not that of a run with so many steps from the start"
            )
        console().print(line, markup=False, soft_wrap=True)
        replaced = folder / "model.replaced"
        if (folder / "model").exists():
            # Renamed first, so that a killed process leaves no partial model under this name.
            (folder / "model").rename(replaced)
        shutil.rmtree(replaced, ignore_errors=True)
        (folder / "result.json").unlink(missing_ok=True)


def _check_extension(output: Path, names: Sequence[str], index: int, old_steps: int) -> None:
    field, folder = f"stages.{index}.num_steps", output / names[index]
    if begun := [name for name in names[index + 1 :] if (output / name / "source.json").exists()]:
        raise ConfigError(
            f"output: {field} grows, but {begun[0]} in {output} started from the model after {old_steps} steps; "
            f"delete {', '.join(str(output / name) for name in begun)} to train it anew, or give another output"
        )
    if (folder / "model").exists() and not (folder / "checkpoints" / str(old_steps)).is_dir():
        raise ConfigError(
            f"output: {field} grows, but {folder / 'checkpoints'} has no checkpoint of step {old_steps} to resume "
            "from; give another output"
        )


def _begun(output: Path) -> bool:
    """Tell whether the folder depends on the settings already: a run that failed while loading leaves nothing."""
    metrics = output / "metrics.jsonl"
    return (metrics.exists() and metrics.stat().st_size > 0) or any(output.glob("*/before.json"))
