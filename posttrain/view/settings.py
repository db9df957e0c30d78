"""Settings of a run beside their defaults, and its warnings, as its folder has them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from posttrain.config.secrets import FROM_ENV, names_secret, secret_in_url
from posttrain.config.yaml_file import load_recorded
from posttrain.diagnosis.evidence import read_warnings
from posttrain.errors import ConfigError

HIDDEN = "(not shown: a secret)"
MAX_WARNINGS = 500
"""Most warnings that the page shows, the newest ones."""


def settings(file: Path) -> list[dict[str, Any]]:
    """Settings of `config.yaml` by dotted names, as text: each with its default where it has one, and whether it
    differs from that. A run of another version has no defaults here. Secrets are not shown."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    values = dict(_flat(yaml.safe_load(text), ""))
    defaults: dict[str, Any] = {}
    with suppress(ConfigError):
        defaults = dict(_defaults(load_recorded(file), ""))
    return [
        {
            "name": name,
            "value": _shown(name, value),
            "default": _shown(name, defaults[name]) if name in defaults else None,
            "differs": name in defaults and defaults[name] != value,
        }
        for name, value in values.items()
    ]


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Values of nested mappings and lists by dotted names; what is empty is a value."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        for number, item in enumerate(value):
            yield from _flat(item, f"{name}.{number}")
    else:
        yield name, value


def _defaults(section: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Defaults of the fields of a section and of those in it, as `config.yaml` would have them."""
    for field, info in type(section).model_fields.items():
        place, value = f"{name}.{field}" if name else field, getattr(section, field)
        inside = list(value) if isinstance(value, tuple) else [value]
        if any(hasattr(one, "model_fields_set") for one in inside):
            for number, one in enumerate(inside):
                if hasattr(one, "model_fields_set"):
                    yield from _defaults(one, f"{place}.{number}" if isinstance(value, tuple) else place)
        elif not info.is_required():
            default = info.get_default(call_default_factory=True)
            if hasattr(default, "model_dump"):
                yield from _flat(default.model_dump(mode="json"), place)
            else:
                yield place, list(default) if isinstance(default, tuple) else default


def _shown(name: str, value: Any) -> str:
    parts = name.split(".")
    if any(names_secret(part) and not part.endswith(FROM_ENV) for part in parts) and isinstance(value, str):
        return HIDDEN
    texts = value if isinstance(value, list) else [value]
    if any(isinstance(text, str) and secret_in_url(text) for text in texts):
        return HIDDEN
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def warnings(folder: Path) -> list[dict[str, Any]]:
    """Warnings of a run in their order, as it told them, each with stage, step, name and `text`."""
    return [
        {
            **{key: line[key] for key in ("stage", "step", "name")},
            "text": f"{line['summary']}; try: {line['advice']}",
        }
        for line in read_warnings(folder)[-MAX_WARNINGS:]
    ]
