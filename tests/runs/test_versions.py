"""Versions in a run's folder: those of each call that had others, which it says."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from pathlib import Path

import pytest

import posttrain
from posttrain.runs import folder
from posttrain.runs.environment import environment_lines, versions
from posttrain.runs.folder import remember_versions, versions_of

pytestmark = pytest.mark.fast


def test_versions_of_each_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert versions_of(tmp_path) == []
    for _ in range(2):
        remember_versions(tmp_path)
        assert versions_of(tmp_path) == json.loads((tmp_path / "versions.json").read_text()) == [versions()]
    assert capsys.readouterr().out == ""
    first = versions()
    assert first["posttrain"] == posttrain.__version__ and first["python"] == platform.python_version()
    assert {name: first[name] for name in ("jax", "jaxlib", "numpy", "orbax-checkpoint")} == {
        name: version(name) for name in ("jax", "jaxlib", "numpy", "orbax-checkpoint")
    }
    other = {**{name: number for name, number in first.items() if name != "optax"}, "jax": "9.9"}
    monkeypatch.setattr(folder, "versions", lambda: other)
    remember_versions(tmp_path)
    assert versions_of(tmp_path) == [first, other]
    said = capsys.readouterr().out
    assert f"jax {first['jax']} -> 9.9" in said and f"optax {first['optax']} -> none" in said and "numpy" not in said
    assert f"jax {first['jax']}" in "\n".join(environment_lines())
