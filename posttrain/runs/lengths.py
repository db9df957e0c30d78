"""Default lengths of rows and completions for a model's context."""

from __future__ import annotations

from typing import Any

from posttrain.config import (
    DistillSection,
    OnlineSection,
    RunConfig,
    SamplingSection,
    TrainSection,
    answer_tokens,
)
from posttrain.errors import ConfigError


def fit_lengths(config: RunConfig, max_positions: int) -> RunConfig:
    """Resolve default lengths to the model's context; explicit lengths are unchanged."""
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
    # A copy would not validate explicit lengths against the resolved ones.
    given = {name: getattr(section, name) for name in section.model_fields_set}
    try:
        return type(section).model_validate({**given, **fitted})
    except ValueError as error:
        raise ConfigError(
            f"row_tokens is by default max_position_embeddings={max_positions} of the model, which does not hold "
            f"sampling.max_tokens={fitted['sampling'].max_tokens} beside a prompt; lower it"
        ) from error


def _fit_sampling(sampling: SamplingSection, longest: int) -> SamplingSection:
    return (
        sampling if "max_tokens" in sampling.model_fields_set else sampling.model_copy(update={"max_tokens": longest})
    )
