"""Model description of a run without its weights, and checks of the configuration against it."""

from __future__ import annotations

import json
from pathlib import Path

from posttrain.config import DistillSection, ModelSection, OnlineSection, RewardModelSection, TrainSection
from posttrain.errors import ConfigError
from posttrain.models.config import ModelConfig
from posttrain.models.moe import check_recording, check_router
from posttrain.runs.kernels import check_kernels
from posttrain.runs.lengths import fit_lengths
from posttrain.stages.prepared import Prepared
from posttrain.stages.table import naming_stage
from posttrain.weights.load import check_adapter, check_lora, check_weights
from posttrain.weights.locate import local_or_hub, read_model_config, read_wrapper, refuse_misspelt, unreachable


def read_model(prepared: Prepared, *, offline_ok: bool) -> None:
    """Set `model` and check the configuration against it."""
    config, tokenizer = prepared.config, prepared.tokenizer
    if tokenizer is None and config.model.init is not None and "vocab_size" not in config.model.init:
        prepared.notes.append("not checked: model.init, whose vocab_size is the tokenizer's")
        return
    vocab_size = None if tokenizer is None else tokenizer.vocab_size
    model = read_model_config(config.model, prepared.base_dir, vocab_size=vocab_size)
    if model is None:
        assert config.model.path is not None
        refuse_misspelt("model.path", config.model.path, prepared.base_dir)
        prepared.notes.append(f"not checked, no network: the model {config.model.path}, if it is on the hub")
        return
    prepared.model = model
    config = prepared.config = fit_lengths(config, model.max_positions)
    _check_weights(config.model, prepared.base_dir)
    if model.scalar_head and not all(isinstance(section, RewardModelSection) for section in config.stages):
        raise ConfigError(f"model.path: {config.model.path} is a reward model, which cannot generate")
    if tokenizer is not None:
        prepared.tokenizer = tokenizer.for_model(model.vocab_size)
    if config.model.lora is not None and (reason := check_lora(model, config.model.lora, config.model.quantize)):
        prepared.notes.append(f"model.lora: {reason}; of this adapter there is only export --to merged")
    if config.model.adapter is not None:
        _check_adapter(prepared, model)
    if config.model.tokenizer is not None and vocab_size is not None and vocab_size > model.vocab_size:
        raise ConfigError(
            f"model.tokenizer: {config.model.tokenizer} has {vocab_size} tokens, the model only {model.vocab_size}; "
            + ("raise model.init.vocab_size" if config.model.init is not None else "give the model's own tokenizer")
        )
    prepared.notes += check_kernels(config, model, here=not offline_ok)
    for index, section in enumerate(config.stages):
        if section.row_tokens > model.max_positions:
            raise ConfigError(
                f"stages.{index}: row_tokens={section.row_tokens} must be at most {_context_of(config.model, model)}"
            )
        with naming_stage(config, index):
            adapter = config.model.lora is not None or config.model.adapter is not None
            _check_mixture(section, model, adapter=adapter)


def _check_adapter(prepared: Prepared, model: ModelConfig) -> None:
    section = prepared.config.model
    assert section.adapter is not None
    reward = all(isinstance(stage, RewardModelSection) for stage in prepared.config.stages)
    try:
        name = local_or_hub(section.adapter, prepared.base_dir)
        if unreachable(name):
            prepared.notes.append(f"not checked, no network: model.adapter {name}, which run downloads")
            return
        check_adapter(model, name, read_wrapper(section, prepared.base_dir), reward=reward)
    except ConfigError as error:
        raise ConfigError(f"model.adapter: {error}") from error


def _context_of(section: ModelSection, model: ModelConfig) -> str:
    """Maximum context of the model, and how to extend it."""
    limit = f"max_position_embeddings={model.max_positions} of the model"
    whole = json.loads(model.hf_json).get("max_position_embeddings", 0)
    if section.path is None or section.long_context or whole <= model.max_positions:
        return limit
    return f"{model.max_positions}, for which the model's short RoPE factors are; model.long_context=true takes {whole}"


def _check_weights(section: ModelSection, base_dir: Path) -> None:
    """Check a local model folder. ConfigError if its weights do not match its `config.json`."""
    folder = None if section.path is None else Path(local_or_hub(section.path, base_dir))
    if folder is not None and folder.is_dir():
        try:
            check_weights(folder)
        except ConfigError as error:
            raise ConfigError(f"model.path: {error}") from error


def _check_mixture(section: TrainSection, model: ModelConfig, *, adapter: bool) -> None:
    """Check MoE settings. ConfigError if the stage uses a setting that needs an MoE model."""
    router = section.router
    check_router(model, router.balance_coef > 0 or router.z_coef > 0, router.correction_rate, adapter=adapter)
    if isinstance(section, OnlineSection | DistillSection) and section.rollout.record_routing:
        check_recording(model)
