"""The user's functions that a run depends on, by their text: a resumed run goes on only with the same."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.config import RunConfig, SampledSection
from posttrain.errors import ConfigError
from posttrain.stages.inputs import object_of
from posttrain.user_code import is_object_spec
from posttrain.weights.locate import local_or_hub, origin_of_folder

CODE_NAME = "code.json"


def source_of(function: Any) -> str:
    """The text of a function or of an object's class; nothing where it is not Python, or was typed at a prompt."""
    try:
        return inspect.getsource(function if hasattr(function, "__code__") else type(function))
    except (OSError, TypeError):
        return ""


def remember_code(output: Path, config: RunConfig, base_dir: Path) -> None:
    """Write digests of the functions into the folder of a run that begins."""
    (output / CODE_NAME).write_text(json.dumps(_digests(config, base_dir), indent=1), encoding="utf-8")


def check_code(output: Path, config: RunConfig, base_dir: Path) -> None:
    """ConfigError where a function has another text than when the run began."""
    file = output / CODE_NAME
    if not file.exists():
        return
    before = json.loads(file.read_text(encoding="utf-8"))
    changed = [name for name, digest in _digests(config, base_dir).items() if before.get(name, digest) != digest]
    if changed:
        raise ConfigError(
            f"output: {output} holds a run that began with another text of {', '.join(changed)}; "
            "give another output to run with the new one, or bring the old one back to go on"
        )


def _digests(config: RunConfig, base_dir: Path) -> dict[str, str]:
    """By where the function is used: of the file that holds it, of one from Python its own text."""
    texts = {
        f"stages.{index}.{field}={named if isinstance(named, str) else named.__class__.__name__}": (
            _file_text(named, base_dir) if isinstance(named, str) else source_of(named)
        )
        for index, section in enumerate(config.stages)
        for field, named in _functions(section)
    }
    texts |= _reward_models(config, base_dir)
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()}


def _reward_models(config: RunConfig, base_dir: Path) -> dict[str, str]:
    """Of each one in a local folder, what its files hold."""
    found = {}
    for index, section in enumerate(config.stages):
        for number, reward in enumerate(section.rewards if isinstance(section, SampledSection) else ()):
            if reward.model is not None and (folder := Path(local_or_hub(reward.model, base_dir))).is_dir():
                parts = origin_of_folder(reward.model, folder).parts
                found[f"stages.{index}.rewards.{number}.model={reward.model}"] = json.dumps(parts, sort_keys=True)
    return found


def _functions(section: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(section, SampledSection):
        rewards = enumerate(section.rewards)
        yield from ((f"rewards.{index}.fn", reward.fn) for index, reward in rewards if reward.fn is not None)
    for field in ("advantage", "loss"):
        if field in type(section).model_fields:
            named = getattr(section, field)
            kind = named.get("kind") if isinstance(named, dict) else named
            if isinstance(kind, str) and is_object_spec(kind):
                yield field, kind


def _file_text(spec: str, base_dir: Path) -> str:
    """Of the module in which the object is defined."""
    found = object_of(spec, base_dir)
    name = getattr(found, "__module__", None) or type(found).__module__
    file = getattr(sys.modules.get(name), "__file__", None)
    return "" if file is None else Path(file).read_text(encoding="utf-8", errors="replace")
