"""Stages of runs that have begun: their folder, tokenizer and model."""

from __future__ import annotations

from pathlib import Path

from jax.sharding import Mesh

from posttrain.config import RunConfig, trains_on_samples
from posttrain.config.yaml_file import load_recorded
from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.errors import ConfigError
from posttrain.runs.folder import CONFIG_NAME
from posttrain.runs.prepare import run_clock
from posttrain.stages.context import RoleDevices, StageRun, read_source
from posttrain.stages.table import stage_names
from posttrain.train.loop import StopRequest
from posttrain.weights.locate import own_tokenizer, run_tokenizer, tokenizer_name


def find_stage(run: Path) -> tuple[Path, str]:
    """The run's output folder, and the name of the stage."""
    run = run.expanduser().resolve()
    if (run / CONFIG_NAME).is_file():
        names = stage_names(load_recorded(run / CONFIG_NAME))
        begun = [name for name in names if (run / name / "checkpoints").is_dir()]
        if not begun:
            raise ConfigError(f"{run}: no stage has a checkpoint yet; its stages are {', '.join(names)}")
        return run, begun[-1]
    if (run.parent / CONFIG_NAME).is_file() and (run / "checkpoints").is_dir():
        return run.parent, run.name
    raise ConfigError(
        f"{run}: is neither the output folder of a run (with {CONFIG_NAME}) nor the folder of a stage in it"
    )


def tokenizer_of(output: Path, name: str, config: RunConfig) -> Tokenizer:
    """Tokenizer of the run: saved with the stage's model, else that of the source model."""
    saved, clock = output / name / "model", run_clock(output)
    if saved.is_dir():
        return load_tokenizer(saved).at(clock)
    source, adapter = read_source(output / name)
    from_source = config.model.tokenizer is None and source is not None
    own = own_tokenizer(adapter) if from_source and adapter is not None else None
    folder = own or (source if from_source and source is not None else tokenizer_name(config.model))
    return run_tokenizer(folder, config.model).at(clock)


def open_stage(output: Path, name: str, config: RunConfig, tokenizer: Tokenizer, mesh: Mesh) -> StageRun:
    """Context of a stage that has run, to load its model and make its trainer."""
    names = stage_names(config)
    index = names.index(name)
    source_name, adapter = read_source(output / name)
    return StageRun(
        name=name,
        kind=config.stages[index].kind,
        sampled=trains_on_samples(config.stages[index]),
        folder=output / name,
        output=output,
        model=config.model,
        source=output / names[index - 1] / "model" if index else None,
        source_name=source_name,
        adapter=adapter,
        seed=config.seed,
        mesh=mesh,
        devices=RoleDevices(),
        tokenizer=tokenizer,
        tensorboard=False,
        profile=None,
        stop=StopRequest(),
    )
