"""What a stage that learns from judged answers needs besides weights: units and a loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posttrain.config import PreferenceSection, RewardModelSection
from posttrain.data.sources import checked_rows, each_row
from posttrain.data.tokenizer import Tokenizer
from posttrain.errors import ConfigError
from posttrain.stages.inputs import callable_of, rows_and_renderer
from posttrain.stages.pairs import LOSSES, JudgedInputs, check_units, make_loss, shares_prompts, units_of
from posttrain.stages.prepared import Prepared


def prepare_judged(
    section: PreferenceSection | RewardModelSection, tokenizer: Tokenizer, prepared: Prepared
) -> tuple[JudgedInputs, list[str]]:
    """The inputs, and a line for each dataset of which units are left out."""
    loss = judged_loss(section, prepared.base_dir)
    mixture = prepared.model is not None and bool(prepared.model.mixtures)
    share_prompts = shares_prompts(section, loss.needs, prepared.config.model, mixture=mixture)
    made, ratios, notes = [], [], []
    for dataset in section.all_datasets:
        found = rows_and_renderer(dataset, tokenizer, prepared.base_dir)
        units = units_of(section, dataset, *found, loss, share_prompts=share_prompts)
        chosen = checked_rows(len(units))
        ratio, lines = check_units(units, (unit is None for unit in each_row(units.rows, chosen, "rows", units)))
        made.append(units)
        ratios.append(ratio)
        notes += lines
    inputs = JudgedInputs(
        section=section,
        loss=loss,
        units=made[0],
        eval_units=made[1] if len(made) > 1 else None,
        dropped_ratio=ratios[0],
    )
    return inputs, notes


def judged_loss(section: PreferenceSection | RewardModelSection, base_dir: Path) -> Any:
    loss = make_loss(section.loss, LOSSES[section.kind], lambda spec: callable_of(spec, "loss", base_dir))
    if isinstance(section, PreferenceSection) and section.reference is not None and not loss.needs.reference:
        raise ConfigError(
            f"reference: {section.reference} has no effect: {type(loss).__name__} needs no reference; remove it"
        )
    return loss
