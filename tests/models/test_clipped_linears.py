"""Clipped linear layers of Gemma 4's tower against transformers: features, gradients, files."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from safetensors.numpy import load_file, save_file

from posttrain.config import AdamW
from posttrain.models.vision.tower import ImageInputs
from posttrain.train.transformations import make_optimizer
from posttrain.weights.load import load_model
from posttrain.weights.save import hf_tensors, save_model
from posttrain.weights.state import ModelWeights
from tests.images import VisionCase, batch_of
from tests.models.goldens import COMPILER_OPTIONS

LIMITS = ("input_min", "input_max", "output_min", "output_max")


@pytest.fixture(scope="module")
def case(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> VisionCase:
    """Checkpoint with limits within which a part of the numbers lies."""
    folder = tmp_path_factory.mktemp("clipped") / "gemma4"
    shutil.copytree(shared / "goldens" / "vision" / "gemma4", folder)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["use_clipped_linears"] = True
    (folder / "config.json").write_text(json.dumps(config))
    tensors, draw = load_file(folder / "model.safetensors"), np.random.default_rng(3)
    linears = sorted(name.removesuffix(".linear.weight") for name in tensors if name.endswith("_proj.linear.weight"))
    for name in (name for name in linears if "vision_tower" in name):
        low, high = draw.uniform(-0.8, -0.1, 2), draw.uniform(0.1, 0.8, 2)
        limits = zip(LIMITS, (low[0], high[0], low[1] / 4, high[1] / 4), strict=True)
        tensors |= {f"{name}.{limit}": np.asarray(value, np.float32) for limit, value in limits}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return VisionCase(folder)


def test_features_and_gradients_are_those_of_transformers(case: VisionCase) -> None:
    torch = pytest.importorskip("torch", reason="transformers' tower needs torch")
    from transformers import Gemma4ForConditionalGeneration

    theirs = Gemma4ForConditionalGeneration.from_pretrained(case.folder, dtype=torch.float32).eval()
    pixels, places = (torch.tensor(case.arrays[f"images_{name}"]) for name in ("pixel_values", "image_position_ids"))
    features = theirs.model.get_image_features(pixels, image_position_ids=places.long()).pooler_output
    wanted = np.asarray(case.arrays["two_images"])
    expected = torch.cat([features[i] for i in wanted])
    weights = np.random.default_rng(0).normal(size=tuple(expected.shape)).astype(np.float32)
    (expected * torch.tensor(weights)).sum().backward()

    model = load_model(case.folder, dtype=jnp.float32, vision="tower")
    arrays, batch = ModelWeights(model), batch_of(case, model, [("two",)])

    def total(values: Any) -> Any:
        bound = arrays.bind(values)
        images = ImageInputs.of(batch, bound.config)
        assert bound.tower is not None and images is not None
        placed = bound.tower(images, bound.compute)
        assert placed is not None
        found = placed.features[0, : len(weights)]
        return jnp.sum(found * weights), found

    program = jax.jit(jax.value_and_grad(total, has_aux=True), compiler_options=COMPILER_OPTIONS)
    (_, found), gradient = program(arrays.read())
    assert_allclose(found, expected.detach().numpy(), atol=2e-3)
    ours = dict(hf_tensors(arrays.bind(gradient)))
    scale = max(float(p.grad.abs().max()) for p in theirs.model.vision_tower.parameters() if p.grad is not None)
    compared = 0
    for name, parameter in theirs.named_parameters():
        if "vision_tower" in name and parameter.grad is not None:
            assert_allclose(ours[name], parameter.grad.numpy(), atol=2e-3 * scale, err_msg=name)
            compared += name.endswith("linear.weight")
    assert compared >= 14
    # With limits at infinity they are those of the checkpoint without, and far from these.
    open_ended = {
        path: jnp.full_like(x, -jnp.inf if path.endswith("_min") else jnp.inf) if path.endswith(LIMITS) else x
        for path, x in arrays.read().items()
    }
    (_, plain), _ = program(open_ended)
    starts = np.cumsum([0, *case.arrays["image_tokens_per_image"]])
    golden = np.concatenate([case.arrays["projected"][starts[i] : starts[i + 1]] for i in wanted])
    assert_allclose(plain, golden, atol=2e-3)
    assert np.abs(plain - found).max() > 0.1


def test_files_are_written_as_they_came(case: VisionCase, tmp_path: Path) -> None:
    """The limits are numbers without a dimension, in a saved folder too, and are not trained."""
    model = load_model(case.folder, dtype=jnp.float32, vision="tower")
    source = load_file(case.folder / "model.safetensors")
    save_model(model, tmp_path)
    if importlib.util.find_spec("torch") is not None:
        from transformers import Gemma4ForConditionalGeneration

        _, told = Gemma4ForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(told.values()), told
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == source.keys()
    for name, tensor in source.items():
        assert_array_equal(written[name], tensor, err_msg=name)
        assert written[name].shape == tensor.shape
    assert json.loads((tmp_path / "config.json").read_text())["vision_config"]["use_clipped_linears"] is True
    weights = ModelWeights(model)
    limits = {path for path in weights.read() if path.endswith(LIMITS)}
    assert len(limits) == 7 * 4 and not limits & weights.trainable()
    assert {weights.parameters()[path].role for path in limits} == {"buffer"}
    make_optimizer(AdamW(learning_rate=1e-3, update_norms=True), 4, seed=0, model=model)
