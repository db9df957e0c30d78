"""Parts of a multimodal checkpoint that nothing reads: named when it is loaded, and absent from what is saved, which
transformers reads with the same numbers; any other tensor that is unknown is refused."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from safetensors.numpy import load_file, save_file

from posttrain.errors import ConfigError
from posttrain.export.export import compare_with_source
from posttrain.weights.load import load_model
from posttrain.weights.save import save_model
from tests.images import VisionCase

torch = pytest.importorskip("torch", reason="transformers' models need torch")


def with_part(source: Path, folder: Path, name: str, fields: dict[str, Any], part: str) -> Path:
    """Copy of a checkpoint with a further part, as transformers makes it."""
    import transformers

    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    for key, value in fields.items():
        config[key] = {**(config.get(key) or {}), **value}
    (folder / "config.json").write_text(json.dumps(config))
    model = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32)
    model.save_pretrained(folder)
    added = load_file(folder / "model.safetensors").keys() - load_file(source / "model.safetensors").keys()
    assert added and all(part in one for one in added), added
    return folder


AUDIO = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "output_proj_dims": 16,
    "subsampling_conv_channels": [4, 4],
    "conv_kernel_size": 3,
}
CASES = {
    "gemma3": ("Gemma3ForConditionalGeneration", {"vision_config": {"vision_use_head": True}}, "head"),
    "gemma4": ("Gemma4ForConditionalGeneration", {"audio_config": {"model_type": "gemma4_audio", **AUDIO}}, "audio"),
}


@pytest.mark.parametrize("family", CASES)
def test_a_saved_model_lacks_what_is_not_read(
    family: str, shared: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import transformers

    name, fields, part = CASES[family]
    golden = VisionCase(shared / "goldens" / "vision" / family)
    source = with_part(golden.folder, tmp_path / "source", name, fields, part)
    with caplog.at_level(logging.WARNING, "posttrain.weights"):
        model = load_model(source, dtype=jnp.float32, vision="tower")
    (line,) = [one.getMessage() for one in caplog.records if "not read" in one.getMessage()]
    assert f"{part}" in line and "a saved model lacks them" in line
    save_model(model, tmp_path / "saved")
    saved, plain = (load_file(folder / "model.safetensors") for folder in (tmp_path / "saved", golden.folder))
    assert saved.keys() == plain.keys()
    read, told = getattr(transformers, name).from_pretrained(
        tmp_path / "saved", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(told.values()), told
    arrays = golden.arrays
    inputs = {"input_ids": torch.tensor(arrays["one_input_ids"][None]).long()}
    pictures = arrays["one_images"]
    inputs["pixel_values"] = torch.tensor(arrays["images_pixel_values"][pictures])
    if "images_image_position_ids" in arrays:
        inputs["image_position_ids"] = torch.tensor(arrays["images_image_position_ids"][pictures]).long()
    types = torch.tensor(golden.token_rows("one")[None]).long()
    with torch.no_grad():
        logits = read.eval()(**inputs, token_type_ids=types, mm_token_type_ids=types).logits[0].numpy()
    assert_allclose(logits, arrays["one_logits"], atol=1e-3)
    assert "names and shapes of the source" in compare_with_source(tmp_path / "saved", source, None, trained=True)


def test_other_unknown_tensors_of_a_tower_are_refused(shared: Path, tmp_path: Path) -> None:
    shutil.copytree(shared / "goldens" / "vision" / "gemma3", tmp_path / "odd")
    tensors = load_file(tmp_path / "odd" / "model.safetensors")
    first = next(name for name in tensors if "vision_tower" in name and name.endswith("q_proj.weight"))
    tensors[first.replace("q_proj.weight", "q_gate.weight")] = np.ones((2, 2), np.float32)
    save_file(tensors, tmp_path / "odd" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"q_gate\.weight: unknown"):
        load_model(tmp_path / "odd", dtype=jnp.float32, vision="frozen")
    load_model(tmp_path / "odd", dtype=jnp.float32)
