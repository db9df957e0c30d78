"""Default lengths of rows and completions for a model's context, and `num_epochs` as optimiser steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from posttrain.config import (
    DatasetSection,
    DistillSection,
    OfflineSection,
    OnlineSection,
    RunConfig,
    SamplingSection,
    TrainSection,
    answer_tokens,
)
from posttrain.data.epochs import rows_of_epochs
from posttrain.data.pipeline import row_tokenizer, window_of
from posttrain.data.sources import Rows
from posttrain.errors import ConfigError
from posttrain.stages.pairs import PairInputs
from posttrain.stages.prepared import Inputs
from posttrain.stages.sequences import SequenceInputs
from posttrain.tracking.console import progress


def fit_lengths(config: RunConfig, max_positions: int) -> RunConfig:
    """Run whose default lengths fit the model's context; lengths that were given stay as they are."""
    return config.model_copy(update={"stages": tuple(_fit_stage(stage, max_positions) for stage in config.stages)})


def _fit_stage(section: TrainSection, max_positions: int) -> TrainSection:
    if "row_tokens" in section.model_fields_set or section.row_tokens <= max_positions:
        return section
    fitted: dict[str, Any] = {"row_tokens": max_positions}
    if isinstance(section, OnlineSection):
        longest = answer_tokens(max_positions, section.prompts_in_row)
        fitted["sampling"] = _fit_sampling(section.sampling, longest)
        if section.eval_sampling is not None:
            fitted["eval_sampling"] = _fit_sampling(section.eval_sampling, fitted["sampling"].max_tokens)
    elif isinstance(section, DistillSection) and section.sampling is not None:
        fitted["sampling"] = _fit_sampling(section.sampling, answer_tokens(max_positions, 1))
    # A copy would not check the lengths that were given against those that are fitted.
    given = {name: getattr(section, name) for name in section.model_fields_set}
    try:
        return type(section).model_validate({**given, **fitted})
    except ValueError as error:
        raise ConfigError(
            f"row_tokens is by default max_position_embeddings={max_positions} of the model, which does not hold "
            f"sampling.max_tokens={fitted['sampling'].max_tokens} beside a prompt; give less"
        ) from error


def _fit_sampling(sampling: SamplingSection, longest: int) -> SamplingSection:
    return (
        sampling if "max_tokens" in sampling.model_fields_set else sampling.model_copy(update={"max_tokens": longest})
    )


def with_steps(inputs: Inputs, seed: int) -> tuple[Inputs, list[str]]:
    """Inputs whose section has `num_steps`, and a note where these come from passes over the data."""
    section = inputs.section
    if not isinstance(section, OfflineSection) or section.num_steps is not None:
        return inputs, []
    num_epochs = 1.0 if section.num_epochs is None else section.num_epochs
    num_steps = math.ceil(_num_rows(inputs, section, num_epochs, seed) / section.batch_rows)
    try:
        section.check_warmup(num_steps)
    except ValueError as error:
        raise ConfigError(f"{error}, which num_epochs={num_epochs:g} makes of the data") from error
    note = f"num_epochs={num_epochs:g} is num_steps={num_steps:,} of {section.batch_rows} rows"
    counted = section.model_copy(update={"num_steps": num_steps, "num_epochs": None})
    resolved: Any = inputs
    return replace(resolved, section=counted), [note]


def _num_rows(inputs: Inputs, section: OfflineSection, num_epochs: float, seed: int) -> int:
    """Rows that hold `num_epochs` passes over the data of a stage."""
    sources: list[tuple[DatasetSection, Rows, int, Callable[[int], Any]]]
    if isinstance(inputs, PairInputs):
        units = inputs.units
        sources = [(section.dataset, units.rows, len(units), units)]
    else:
        assert isinstance(inputs, SequenceInputs)
        if inputs.prompts is not None:
            return math.ceil(num_epochs * len(inputs.prompts.examples))
        data = [(inputs.rows, inputs.renderer), *inputs.mixed]
        sources = [
            (dataset, rows, len(rows), row_tokenizer(inputs.section, dataset, rows, renderer))
            for dataset, (rows, renderer) in zip(section.datasets, data, strict=True)
        ]
    datasets = [dataset for dataset, *_ in sources]
    lengths = [_lengths(tokenize, count, rows.name) for _, rows, count, tokenize in sources]
    return rows_of_epochs(
        section, datasets, lengths, window=window_of(section, datasets), num_epochs=num_epochs, seed=seed
    )


def _lengths(tokenize: Callable[[int], Any], count: int, name: str) -> Sequence[int | None]:
    """Tokens of each sequence; None for one that is left out."""
    made = (tokenize(index) for index in progress(range(count), f"counting the tokens of {name}", count))
    return [None if one is None else len(one["tokens"]) for one in made]
