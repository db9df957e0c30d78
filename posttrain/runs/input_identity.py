"""Identity of what a run reads beside its settings, its code and its own model: tokenizer and chat template, rows of
every dataset, teachers, reward models, references, critics and drafters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from posttrain.config import (
    PPO,
    BlockDrafts,
    DistillSection,
    Locator,
    ModelDrafts,
    OnlineSection,
    RLSection,
    TrainSection,
)
from posttrain.data.tokenizer_files import files_of, processor_files
from posttrain.errors import ConfigError
from posttrain.runtime.files import content_digest, digest, write_whole
from posttrain.stages.inputs import Prepared
from posttrain.weights.drafter import drafter_folder
from posttrain.weights.files import find_folder
from posttrain.weights.locate import origin_of_folder

INPUTS_NAME = "inputs.json"
ABSENT = "absent"
"""Digest of what is not there."""


def remember_inputs(output: Path, prepared: Prepared) -> None:
    """Write the digests into the folder of a new run."""
    write_whole(output / INPUTS_NAME, json.dumps(input_digests(prepared), indent=1))


def read_inputs(output: Path) -> Mapping[str, Mapping[str, str]]:
    """Digests of a run that has begun; none of one that did not write them."""
    file = output / INPUTS_NAME
    found: Mapping[str, Mapping[str, str]] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return found


def check_inputs(output: Path, prepared: Prepared) -> None:
    """ConfigError if what the run reads has changed since it started."""
    if not (output / INPUTS_NAME).exists():
        remember_inputs(output, prepared)
        return
    before = read_inputs(output)
    changes = []
    for place, new in input_digests(prepared).items():
        old = before.get(place, new)
        for part in {**old, **new}:
            if old.get(part) != new.get(part):
                name = place if place.endswith(part) else f"{part} of {place}"
                changes.append(f"{name} was {old.get(part, ABSENT)!r} and is {new.get(part, ABSENT)!r} now")
    if changes:
        raise ConfigError(
            f"cannot resume: {', '.join(changes)}, since {output} was started; restore it (a revision of the hub by "
            "args: {revision: ...} of the dataset), or start a new run with another output folder"
        )


def input_digests(prepared: Prepared) -> dict[str, dict[str, str]]:
    """Digests of each input by its place in the configuration, and by part. Models on the hub are downloaded."""
    places: dict[str, Mapping[str, str]] = {"tokenizer": prepared.tokenizer.identity}
    for index, inputs in enumerate(prepared.stages):
        stage = f"stages.{index}." if len(prepared.stages) > 1 else ""
        of_stage = {**inputs.identity, **dict(_models_of(inputs.section))}
        places |= {f"{stage}{place}": parts for place, parts in of_stage.items()}
    return {place: dict(parts) for place, parts in places.items()}


def _models_of(section: TrainSection) -> Iterator[tuple[str, dict[str, str]]]:
    """Digests of the models that a stage reads beside the one that it trains."""
    if isinstance(section, RLSection) or (isinstance(section, DistillSection) and section.cache is None):
        for number, teacher in enumerate(section.teachers):
            if teacher.url is None:
                yield f"teachers.{number}={teacher.path}", _weights(teacher.path)
    if isinstance(section, OnlineSection):
        for number, reward in enumerate(section.rewards):
            if reward.model is not None:
                yield f"rewards.{number}.model={reward.model}", _weights(reward.model) | _readers(reward.model)
        if section.reference.path is not None:
            yield f"reference.path={section.reference.path}", _weights(section.reference.path)
    if isinstance(section, RLSection) and isinstance(section.algorithm, PPO):
        critic = section.algorithm.critic.path
        if critic is not None:
            yield f"algorithm.critic.path={critic}", _weights(critic)
    if isinstance(section, OnlineSection | DistillSection):
        drafts = section.rollout.speculative
        if isinstance(drafts, ModelDrafts):
            yield f"rollout.speculative.path={drafts.path}", _weights(drafts.path)
        if isinstance(drafts, BlockDrafts):
            folder = drafter_folder(drafts.path.resolved)
            files = {file.name: content_digest(file) for file in sorted(folder.iterdir()) if file.is_file()}
            yield f"rollout.speculative.path={drafts.path}", files


def _weights(path: Locator) -> dict[str, str]:
    """Digests of the configuration and the weights of a model."""
    resolved = path.resolved
    return dict(origin_of_folder(resolved, find_folder(resolved)).parts)


def _readers(path: Locator) -> dict[str, str]:
    """Digests of the files of a model's tokenizer and image processor, for a model that reads texts by its own."""
    folder = find_folder(path.resolved)
    files = files_of(folder) | processor_files(str(folder))
    return {name: digest(content) for name, content in files.items()}
