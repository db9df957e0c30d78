"""8-bit checkpoints in blocks, as DeepSeek publishes them: read piece by piece, they are what numpy makes of them."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from posttrain.errors import ConfigError
from posttrain.models.hf import config_from_hf
from posttrain.weights import tensor_file
from posttrain.weights.load import load_model
from posttrain.weights.tensor_file import Outline, open_tensors, write_tensors
from tests.models.checkpoints import GOLDENS, assert_same

pytestmark = pytest.mark.fast

QUANTIZATION = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def quantized(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values and factors, block by block."""
    factors = np.empty([-(-size // 128) for size in weight.shape], np.float32)
    values = np.empty(weight.shape, jnp.float8_e4m3fn)
    for i, j in np.ndindex(*factors.shape):
        block = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
        factors[i, j] = np.abs(weight[block]).max() / 448
        values[block] = (weight[block] / factors[i, j]).astype(values.dtype)
    return values, factors


def write(file: Path, tensors: dict[str, np.ndarray]) -> None:
    """The safetensors package has no 8-bit floats of numpy."""
    write_tensors(file, [Outline(name, array.dtype, array.shape) for name, array in tensors.items()], tensors.values())


def restored(values: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """The slow twin: every factor written out."""
    wide = np.repeat(np.repeat(factors, 128, axis=0), 128, axis=1)
    return values.astype(np.float32) * wide[: values.shape[0], : values.shape[1]]


@pytest.mark.parametrize("chunk", [1 << 12, 4 << 20])
@pytest.mark.parametrize(
    "region", [np.s_[0:300, 0:200], np.s_[120:260, 100:131], np.s_[7:300:3, 5:200:2], np.s_[299:300, 199:200]]
)
def test_any_region_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, region: tuple[slice, slice], chunk: int
) -> None:
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", chunk)
    weight = np.random.default_rng(0).normal(0, 0.02, (300, 200)).astype(np.float32)
    values, factors = quantized(weight)
    write(tmp_path / "x.safetensors", {"a.weight": values, "a.weight_scale_inv": factors})
    with ExitStack() as stack:
        rest, matrices = tensor_file.split_fp8(open_tensors(tmp_path / "x.safetensors", stack))
        assert not rest and matrices["a.weight"].shape == weight.shape
        out = np.empty(weight[region].shape, np.float32)
        for task in matrices["a.weight"].reads(out, region):
            task()
    assert np.array_equal(out, restored(values, factors)[region])
    assert np.abs(out - weight[region]).max() < 0.05 * np.abs(weight).max()


def test_a_checkpoint_is_the_same_model_as_its_restored_twin(tmp_path: Path) -> None:
    eight, twin = tmp_path / "fp8", tmp_path / "twin"
    for folder in (eight, twin):
        shutil.copytree(GOLDENS / "deepseek_v3", folder)
    config = json.loads((eight / "config.json").read_text())
    (eight / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZATION}))
    stored, full = dict[str, np.ndarray](), dict[str, np.ndarray]()
    for name, array in load_file(GOLDENS / "deepseek_v3" / "model.safetensors").items():
        if array.ndim == 2 and "proj" in name:
            stored[name], stored[f"{name}_scale_inv"] = quantized(array.astype(np.float32))
            full[name] = restored(stored[name], stored[f"{name}_scale_inv"])
        else:
            stored[name] = full[name] = array
    write(eight / "model.safetensors", stored)
    save_file(full, twin / "model.safetensors")
    ours, theirs = (load_model(folder, dtype=jnp.float32) for folder in (eight, twin))
    assert_same(ours, theirs)
    assert "quantization_config" not in json.loads(ours.config.hf_json)


def test_other_kinds_are_refused() -> None:
    fields = json.loads((GOLDENS / "llama" / "config.json").read_text())
    with pytest.raises(ConfigError, match="fp8 with weight_block_size=None is not supported"):
        config_from_hf(fields | {"quantization_config": {"quant_method": "fp8"}})
    with pytest.raises(ConfigError, match="fp8 with fmt=e5m2 is not supported"):
        config_from_hf(fields | {"quantization_config": QUANTIZATION | {"fmt": "e5m2"}})
