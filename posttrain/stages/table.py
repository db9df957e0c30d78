"""Table of stage kinds: the only place that distinguishes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from posttrain.batch import rows_per_pass
from posttrain.config import ROW_AXES, RunConfig
from posttrain.errors import ConfigError
from posttrain.models.decoder import Decoder
from posttrain.stages.context import StageRun
from posttrain.stages.inputs import Inputs, Prepared

ROW_DEVICES = " x ".join(f"mesh.{axis}" for axis in ROW_AXES)


@dataclass(frozen=True, kw_only=True)
class StageKind:
    """Functions of a kind of stage."""

    prepare: Callable[[Any, Prepared], tuple[Inputs, list[str]]]
    """Load and check all inputs besides weights; also returns notes. ConfigError for the first mistake."""
    check_offline: Callable[[Any], None]
    """Check everything that needs neither tokenizer nor rows."""
    describe: Callable[[Any, Any, int], str]
    """Summarise section and inputs (None: not loaded) in one line, for a number of row shards."""
    run: Callable[[StageRun, Any], None]
    """Train to the last step of the stage, resuming from its newest checkpoint."""
    load_model: Callable[[StageRun], Decoder] = StageRun.load_model
    """Load the model at the start of the stage."""
    one_process: Callable[[Any], str | None] = lambda _: None
    """Reason why a section's stage runs in a single process; None: in any number of them."""
    roles: Callable[[Any], Sequence[str]] = lambda _: ()
    """Roles beside the actor that a stage with these inputs has."""


def stage_kind(kind: str) -> StageKind:
    """Functions of a kind of stage. Its module is imported on first use: a run loads no kind that it does not have."""
    match kind:
        case "sft":
            from posttrain.stages import sft

            return _functions_of(sft, one_process=sft.one_process)
        case "distill":
            from posttrain.stages import distill

            return _functions_of(distill, one_process=lambda _: "its teachers and their caches are those of one")
        case "preference" | "reward_model":
            from posttrain.stages import preference

            own = {"run": preference.run_reward_model, "load_model": preference.load_reward_model}
            return _functions_of(preference, **(own if kind == "reward_model" else {}))
        case "rl":
            from posttrain.stages import online, prompts, rl

            return _functions_of(rl, one_process=online.one_process, roles=prompts.roles_beside)
        case "online_preference":
            from posttrain.stages import online, online_preference, prompts

            return _functions_of(online_preference, one_process=online.one_process, roles=prompts.roles_beside)
        case "drafter":
            from posttrain.stages import drafter

            return _functions_of(drafter, one_process=lambda _: "its drafter is saved by one")
    raise AssertionError(f"no stage of kind {kind}")


def _functions_of(module: ModuleType, **others: Any) -> StageKind:
    names = ("prepare", "check_offline", "describe", "run")
    return StageKind(**{name: getattr(module, name) for name in names} | others)


def stage_names(config: RunConfig) -> list[str]:
    """Folder names of the stages: number and name, so that listings are in order."""
    return [f"{index}-{section.name or section.kind}" for index, section in enumerate(config.stages)]


@contextmanager
def naming_stage(config: RunConfig, index: int) -> Iterator[None]:
    """Prefix each line of an error with the stage's number if there are several stages."""
    try:
        yield
    except ConfigError as error:
        if len(config.stages) == 1:
            raise
        raise ConfigError("\n".join(f"stages.{index}: {line}" for line in str(error).splitlines())) from error


def check_row_tokens(config: RunConfig, context: int) -> None:
    """Check that `context` devices divide the tokens of each stage's rows. ConfigError if not."""
    for index, section in enumerate(config.stages):
        if section.row_tokens % context:
            with naming_stage(config, index):
                raise ConfigError(
                    f"mesh.context={context} must divide row_tokens={section.row_tokens}; use a multiple of {context}"
                )


def check_processes(config: RunConfig, num_processes: int, shards: int) -> None:
    """ConfigError for a run that cannot use this number of processes. `shards`: devices that split the rows."""
    if num_processes == 1:
        return
    for index, section in enumerate(config.stages):
        with naming_stage(config, index):
            if (reason := stage_kind(section.kind).one_process(section)) is not None:
                raise ConfigError(
                    f"a stage of kind {section.kind} runs in one process, not in {num_processes}: {reason}; use one "
                    "host, whose process has all of its devices"
                )
            if section.step_rows < shards:
                raise ConfigError(
                    f"batch_rows={section.step_rows} leaves devices of {num_processes} processes without a row: "
                    f"{ROW_DEVICES} = {shards} devices split them; use at least {shards} rows, fewer hosts, or a "
                    "greater mesh.context or mesh.tensor"
                )


def row_notes(config: RunConfig, shards: int) -> list[str]:
    """Report forward passes whose number of rows differs from the configuration.

    `shards`: devices that split the rows.
    """
    notes = []
    for name, section in zip(stage_names(config), config.stages, strict=True):
        wanted = section.micro_batch_rows
        if wanted is not None and (rows := rows_per_pass(section.step_rows, wanted, shards)) > wanted:
            notes.append(f"{name}: micro_batch_rows={wanted} becomes {rows}, a multiple of {ROW_DEVICES} = {shards}")
    return notes
