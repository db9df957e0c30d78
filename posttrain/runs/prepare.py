"""Preparation of a run without weights: tokenizer, rows, rewards, losses; shared by `check` and `run`."""

from __future__ import annotations

from pathlib import Path

from posttrain.config import RunConfig, TrainSection, trains_on_samples
from posttrain.config.yaml_file import find_path
from posttrain.data.tokenizer import load_tokenizer
from posttrain.runs.check_model import read_model
from posttrain.runs.epochs import read_counts, with_steps
from posttrain.stages.prepared import Prepared
from posttrain.stages.prompts import check_cache
from posttrain.stages.table import STAGES, naming_stage, stage_names
from posttrain.weights.locate import refuse_misspelt, tokenizer_name, unreachable


def prepare(config: RunConfig, base_dir: Path, *, offline_ok: bool, estimate: bool = False) -> Prepared:
    """Load and validate all inputs of a run. ConfigError for the first mistake.

    `offline_ok`: without a network, checks that need the hub become notes. `estimate`: for `num_epochs` over a large
    dataset, return a note instead of `num_steps`.
    """
    prepared = Prepared(config=config, base_dir=base_dir, counts=read_counts(Path(config.output)))
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
                STAGES[section.kind].check_offline(section, base_dir)
        return prepared
    prepared.tokenizer = load_tokenizer(name).with_stop_tokens(config.model.stop_tokens)
    read_model(prepared, offline_ok=offline_ok)
    for index in range(len(config.stages)):
        with naming_stage(config, index):
            _prepare_stage(prepared, index, offline_ok=offline_ok, estimate=estimate)
    return prepared


def _prepare_stage(prepared: Prepared, index: int, *, offline_ok: bool, estimate: bool) -> None:
    """Add the inputs of a stage, or a note if they are on a hub that cannot be reached."""
    config, section, base_dir = prepared.config, prepared.config.stages[index], prepared.base_dir
    remote = [path for path in _dataset_paths(section, base_dir) if unreachable(path)]
    for path in remote:
        refuse_misspelt("dataset.path", path, base_dir)
    if offline_ok and remote:
        names = ", ".join(remote)
        prepared.notes.append(f"stages.{index}: not checked, no network: dataset {names}, if it is on the hub")
        STAGES[section.kind].check_offline(section, base_dir)
        return
    if trains_on_samples(section):
        check_cache(section, config.mesh.row_shards or 1)
    inputs, notes = STAGES[section.kind].prepare(section, prepared)
    inputs, more = with_steps(inputs, config.seed, prepared.counts, estimate=estimate)
    prepared.add(index, inputs)
    prepared.notes += [f"{stage_names(config)[index]}: {note}" for note in [*more, *notes]]


def _dataset_paths(section: TrainSection, base_dir: Path) -> list[str]:
    """Dataset paths that exist neither from here nor from the configuration's folder."""
    return [dataset.path for dataset in section.all_datasets if find_path(dataset.path, base_dir) is None]
