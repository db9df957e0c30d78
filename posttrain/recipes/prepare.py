"""Everything of a run that needs no weights: tokenizer, rows, rewards, losses. `check` stops here, `run` goes on."""

from __future__ import annotations

from pathlib import Path

from posttrain.config import (
    DistillSection,
    OnlinePreferenceSection,
    PreferenceSection,
    RewardModelSection,
    RLSection,
    RunConfig,
    SampledSection,
    SFTSection,
    TrainSection,
    is_sampled,
)
from posttrain.config_file import find_path
from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.recipes.features import check_features
from posttrain.recipes.prepare_judged import judged_loss, prepare_judged
from posttrain.recipes.prepare_model import read_model
from posttrain.recipes.prepare_rl import (
    algorithm_of,
    check_cache,
    online_loss,
    prepare_online,
    prepare_rl,
    refuse_completions,
    rubric_of,
)
from posttrain.recipes.prepare_sequences import prepare_sequences, sequence_loss
from posttrain.recipes.prepared import Inputs, Prepared
from posttrain.recipes.source import refuse_misspelt, tokenizer_name, unreachable
from posttrain.recipes.stages import naming_stage, stage_names
from posttrain.recipes.teachers import find_teachers


def prepare(config: RunConfig, base_dir: Path, *, offline_ok: bool) -> Prepared:
    """Load and validate all inputs of a run. ConfigError for the first mistake.

    With `offline_ok`, what only the hub can answer becomes a note when there is no network.
    """
    prepared = Prepared(config=config, base_dir=base_dir)
    name = tokenizer_name(config.model, base_dir)
    offline = unreachable(name)
    if offline:
        refuse_misspelt("model.path" if config.model.tokenizer is None else "model.tokenizer", name, base_dir)
    if offline_ok and offline:
        read_model(prepared, offline_ok=offline_ok)
        prepared.notes.append(
            f"not checked, no network: tokenizer and rows of every stage (of the tokenizer {name}, if it is on the hub)"
        )
        for index, section in enumerate(config.stages):
            with naming_stage(config, index):
                _check_offline(section, base_dir)
        return prepared
    prepared.tokenizer = load_tokenizer(name).with_stop_tokens(config.model.stop_tokens)
    read_model(prepared, offline_ok=offline_ok)
    for index in range(len(config.stages)):
        with naming_stage(config, index):
            _prepare_stage(prepared, index, prepared.tokenizer, offline_ok=offline_ok)
    return prepared


def _prepare_stage(prepared: Prepared, index: int, tokenizer: Tokenizer, *, offline_ok: bool) -> None:
    """Add its inputs, or a note where they are on a hub that cannot be asked."""
    config, section, base_dir = prepared.config, prepared.config.stages[index], prepared.base_dir
    remote = [path for path in _dataset_paths(section, base_dir) if unreachable(path)]
    for path in remote:
        refuse_misspelt("dataset.path", path, base_dir)
    if offline_ok and remote:
        names = ", ".join(remote)
        prepared.notes.append(f"stages.{index}: not checked, no network: dataset {names}, if it is on the hub")
        _check_offline(section, base_dir)
        return
    if is_sampled(section):
        check_cache(section, config.mesh.row_shards or 1)
    inputs, notes = _inputs_of(prepared, section, tokenizer)
    prepared.stages.append(inputs)
    prepared.notes += [f"{stage_names(config)[index]}: {note}" for note in notes]


def _inputs_of(prepared: Prepared, section: TrainSection, tokenizer: Tokenizer) -> tuple[Inputs, list[str]]:
    if isinstance(section, PreferenceSection | RewardModelSection):
        return prepare_judged(section, tokenizer, prepared)
    if isinstance(section, OnlinePreferenceSection):
        mixture = prepared.model is not None and bool(prepared.model.mixtures)
        return prepare_online(section, tokenizer, prepared.base_dir, prepared.config.model, mixture=mixture)
    if isinstance(section, RLSection):
        return prepare_rl(section, tokenizer, prepared.base_dir)
    assert isinstance(section, SFTSection | DistillSection)
    inputs, notes = prepare_sequences(section, tokenizer, prepared.base_dir)
    if isinstance(section, DistillSection):
        notes += check_features(section, inputs.teachers, prepared.model, prepared.base_dir)
    return inputs, notes


def _dataset_paths(section: TrainSection, base_dir: Path) -> list[str]:
    """Of those that are not found from here or from the configuration's folder."""
    return [dataset.path for dataset in section.all_datasets if find_path(dataset.path, base_dir) is None]


def _check_offline(section: TrainSection, base_dir: Path) -> None:
    """What can be said of a stage without its rows."""
    if isinstance(section, SampledSection):
        refuse_completions(section)
        rubric_of(section, base_dir)
    if isinstance(section, RLSection):
        algorithm_of(section, base_dir)
    elif isinstance(section, OnlinePreferenceSection):
        online_loss(section, base_dir)
    elif isinstance(section, SFTSection | DistillSection):
        sequence_loss(section, base_dir)
    elif isinstance(section, PreferenceSection | RewardModelSection):
        judged_loss(section, base_dir)
    if isinstance(section, DistillSection | RLSection):
        find_teachers(section, None, base_dir)
