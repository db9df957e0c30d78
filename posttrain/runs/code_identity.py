"""User code of a run, by digests of its source: a run resumes only with the same code."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.config import Locator, OnlineSection, RLSection, RunConfig, TrainSection
from posttrain.errors import ConfigError
from posttrain.runs.source_text import source_of, source_of_name
from posttrain.runtime.files import digest
from posttrain.user_code import is_object_spec
from posttrain.weights.locate import origin_of_folder

CODE_NAME = "code.json"


def remember_code(output: Path, config: RunConfig) -> None:
    """Write digests of the functions into the folder of a new run."""
    (output / CODE_NAME).write_text(json.dumps(_digests(config), indent=1), encoding="utf-8")


def check_code(output: Path, config: RunConfig) -> None:
    """Check the user code. ConfigError if a function, or code that it calls, has changed since the run started."""
    file = output / CODE_NAME
    if not file.exists():
        return
    before = json.loads(file.read_text(encoding="utf-8"))
    changed = [name for name, new in _digests(config).items() if before.get(name, new) != new]
    if changed:
        raise ConfigError(
            f"output: {output} was started with other code of {', '.join(changed)}, or of code that it calls, or with "
            "other values of globals and environment variables that these read; "
            "give another output to run with the new code, or bring the old code back to resume"
        )


def _digests(config: RunConfig) -> dict[str, str]:
    """Digest of each function's source and of the local code that it reaches, by place of use."""
    texts = code_texts(config) | _reward_models(config)
    return {name: digest(text) for name, text in texts.items()}


def code_texts(config: RunConfig) -> dict[str, str]:
    """Source of each user function and of the local code that it reaches, by place of use."""
    return {
        f"stages.{index}.{field}={named if isinstance(named, str) else named.__class__.__name__}": (
            _source_of_name(named) if isinstance(named, Locator) else source_of(named)
        )
        for index, section in enumerate(config.stages)
        for field, named in _functions(section)
    }


def _reward_models(config: RunConfig) -> dict[str, str]:
    """Digest of the files of each reward model in a local folder."""
    found = {}
    for index, section in enumerate(config.stages):
        for number, reward in enumerate(section.rewards if isinstance(section, OnlineSection) else ()):
            if reward.model is not None and (folder := Path(reward.model.resolved)).is_dir():
                parts = origin_of_folder(reward.model, folder).parts
                found[f"stages.{index}.rewards.{number}.model={reward.model}"] = json.dumps(parts, sort_keys=True)
    return found


def _functions(section: TrainSection) -> Iterator[tuple[str, Any]]:
    if isinstance(section, OnlineSection):
        rewards = enumerate(section.rewards)
        yield from ((f"rewards.{index}.fn", reward.fn) for index, reward in rewards if reward.fn is not None)
    if isinstance(section, RLSection):
        if section.env is not None and section.env.fn is not None:
            yield "env.fn", section.env.fn
        tools = enumerate(section.tools)
        yield from ((f"tools.{index}.fn", tool.fn) for index, tool in tools if tool.fn is not None)
        if section.agent is not None and section.agent.fn is not None:
            yield "agent.fn", section.agent.fn
        if section.refill is not None and isinstance(section.refill.keep, Locator):
            yield "refill.keep", section.refill.keep
    for number, dataset in enumerate(section.all_datasets):
        if is_object_spec(dataset.path):
            yield f"datasets.{number}", dataset.path
    for field in ("advantage", "filter", "loss"):
        if field in type(section).model_fields:
            named = getattr(section, field)
            kind = named.get("kind") if isinstance(named, dict) else named
            if isinstance(kind, Locator) and is_object_spec(kind):
                yield field, kind


def _source_of_name(name: Locator) -> str:
    """Source text without importing anything. Empty for a missing file, which a later check reports."""
    source, _, attribute = name.object.rpartition(":")
    if source.endswith(".py"):
        files = [name.folder / Path(source).expanduser()]
    else:
        folders = [name.folder, *map(Path, sys.path)]
        modules = [folder.joinpath(*source.split(".")) for folder in folders]
        files = [file for path in modules for file in (path.with_name(f"{path.name}.py"), path / "__init__.py")]
    return next((source_of_name(file, attribute) for file in files if file.is_file()), "")
