"""Extension of an existing run: `num_steps` raised between two calls."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from posttrain.config import RunConfig
from posttrain.errors import ConfigError
from posttrain.stages.table import stage_names
from posttrain.tracking.console import console


def extended_stages(before: RunConfig, after: RunConfig) -> list[int]:
    """Numbers of the stages with more steps than before, for two runs with the same number of stages."""
    if len(before.stages) != len(after.stages):
        return []
    pairs = enumerate(zip(before.stages, after.stages, strict=True))
    return [index for index, (old, new) in pairs if (old.num_steps or 0) < (new.num_steps or 0)]


def extend(output: Path, before: RunConfig, after: RunConfig, indices: Sequence[int]) -> None:
    """Reopen these stages at their last checkpoint, deleting the saved model of finished ones.

    ConfigError if a later stage started from that model, or if the last checkpoint is missing.
    """
    names = stage_names(after)
    for index in indices:
        _check(output, names, index, before.stages[index].steps)
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


def _check(output: Path, names: Sequence[str], index: int, old_steps: int) -> None:
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
