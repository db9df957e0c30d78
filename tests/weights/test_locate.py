"""What tells one model from another: every byte of its files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from posttrain.weights.locate import origin_of_folder, origin_of_init

pytestmark = pytest.mark.fast


def write(folder: Path, tensors: dict[str, np.ndarray]) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    save_file(tensors, folder / "model.safetensors")
    return dict(origin_of_folder("name", folder).parts)


@pytest.mark.parametrize("count", [1000, 800_000], ids=["small", "large"])
def test_origin_of_a_folder(tmp_path: Path, count: int) -> None:
    values = np.random.default_rng(0).normal(size=count).astype(np.float32)
    first = write(tmp_path / "a", {"w": values})
    assert first == write(tmp_path / "b", {"w": values}) and set(first) == {"config.json", "model.safetensors"}
    trained, longer = values.copy(), np.append(values, np.float32(0.0))
    trained[count // 7] += 1e-3
    for other in ({"w": trained}, {"v": values}, {"w": longer}, {"w": values.reshape(2, -1)}):
        parts = write(tmp_path / "b", other)
        assert [name for name in parts if parts[name] != first[name]] == ["model.safetensors"]
    (tmp_path / "a" / "config.json").write_text('{"model_type": "qwen3"}')
    assert origin_of_folder("name", tmp_path / "a").parts["config.json"] != first["config.json"]


def test_origin_of_random_weights() -> None:
    fields = {"model_type": "qwen3", "rope_scaling": {"b": 1, "a": 2}}
    parts = origin_of_init(fields, 3).parts
    for other in ({"b": 1.0, "a": 2}, {"b": True, "a": 2}, {"b": "1", "a": 2}):
        assert origin_of_init({**fields, "rope_scaling": other}, 3).parts != parts
    assert origin_of_init({"x": {1: 2}}, 3).parts != origin_of_init({"x": {"1": 2}}, 3).parts
    assert parts == origin_of_init({"rope_scaling": {"a": 2, "b": 1}, "model_type": "qwen3"}, 3).parts
    assert origin_of_init(fields, 4).parts != parts != origin_of_init({**fields, "hidden_size": 4}, 3).parts
