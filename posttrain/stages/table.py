"""The stages of a run by their names, and how many rows their steps take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from posttrain.batch import rows_per_pass
from posttrain.config import ROW_AXES, ComparedSection, RunConfig, SampledSection, SequenceSection, TrainSection
from posttrain.errors import ConfigError

ROW_DEVICES = " x ".join(f"mesh.{axis}" for axis in ROW_AXES)


def stage_names(config: RunConfig) -> list[str]:
    """Folder names: number and name, so that a listing shows the order."""
    return [f"{index}-{section.name or section.kind}" for index, section in enumerate(config.stages)]


@contextmanager
def naming_stage(config: RunConfig, index: int) -> Iterator[None]:
    """Put the stage's number before each line of an error, where there are several."""
    try:
        yield
    except ConfigError as error:
        if len(config.stages) == 1:
            raise
        raise ConfigError("\n".join(f"stages.{index}: {line}" for line in str(error).splitlines())) from error


def row_notes(config: RunConfig, shards: int | None) -> list[str]:
    """Where the rows of a forward pass are not as many as the configuration says.

    `shards`: the devices that share them; None where it is not known before the run.
    """
    notes = []
    for name, section in zip(stage_names(config), config.stages, strict=True):
        wanted = section.micro_batch_rows
        if wanted is None:
            continue
        start = f"{name}: micro_batch_rows={wanted}"
        if shards is None:
            notes.append(f"{start} is rounded up to a multiple of {ROW_DEVICES}, which only the devices say")
        elif (rows := rows_per_pass(rows_per_step(section), wanted, shards)) > wanted:
            notes.append(f"{start} becomes {rows}, a multiple of {ROW_DEVICES} = {shards}")
    return notes


def rows_per_step(section: TrainSection) -> int:
    """Rows of one optimiser step: of RL the worst case, one sample per row; of online preference one pair per row."""
    if isinstance(section, SampledSection):
        return section.step_rows
    assert isinstance(section, SequenceSection | ComparedSection)
    return section.batch_rows
