"""Updates on images for TPU: towers and layers whose images see one another have their kernels, and no array of all
logits."""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import pytest

from posttrain.config import AdamW, ImageSection, Vision
from posttrain.losses.sft import SFTLoss
from posttrain.models.config import Compute
from posttrain.models.hf import config_from_hf
from posttrain.plan.hlo import kernel_names
from posttrain.plan.lowered import batch_of, compile_program, pictured
from posttrain.train.objective import TrainSettings
from posttrain.train.programs import TrainPrograms
from posttrain.train.transformations import make_optimizer
from posttrain.weights.load import outline_of
from tests.aot.bounds import MIB
from tests.aot.slices import BFLOAT16, FAMILIES, SMALL, Fields, mesh_of

FORWARD, BACKWARD = "splash_mha_fwd_segmented", "splash_mha_dkv_segmented"
QWEN: Fields = SMALL | {
    "model_type": "qwen2_5_vl",
    "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "image_token_id": 8000,
    "vision_start_token_id": 8001,
    "vision_config": {
        "depth": 2,
        "hidden_size": 1280,
        "num_heads": 16,
        "intermediate_size": 3420,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": SMALL["hidden_size"],
        "window_size": 112,
        "fullatt_block_indexes": [1],
        "hidden_act": "silu",
    },
}
GEMMA: Fields = {
    "model_type": "gemma3",
    "image_token_index": 8000,
    "mm_tokens_per_image": 256,
    "text_config": SMALL | {"model_type": "gemma3_text"} | FAMILIES["gemma3_text"],
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "intermediate_size": 4304,
        "patch_size": 14,
        "image_size": 896,
        "hidden_act": "gelu_pytorch_tanh",
    },
}
"""Head sizes and widths of the towers of the 3B and 4B models."""


def lowered(fields: Fields, train: Vision, length: int, patches: int, **axes: int) -> Any:
    mesh = mesh_of("v5e", "2x2", **axes)
    compute = Compute(dtype=BFLOAT16, mesh=mesh, remat="full")
    outline = outline_of(config_from_hf(fields, vision=train), compute, jnp.dtype(BFLOAT16))
    optimizer = make_optimizer(AdamW(learning_rate=1e-5), 10, seed=0, model=outline)
    settings = TrainSettings(temperature=1.0, max_grad_norm=1.0)
    programs = TrainPrograms(outline, SFTLoss(), optimizer, settings, mesh=mesh)
    return programs.lower_update(pictured(batch_of(4, length), outline.config, patches, ImageSection()))


@pytest.mark.parametrize(
    ("fields", "train", "patches", "forward", "backward"),
    [
        # Of the text with its backward pass; of the tower without one.
        pytest.param(QWEN, "frozen", 1024, 2, 1, id="qwen2_5_vl"),
        # Two masks in both layers of the text, one in the tower; with a trained one both passes.
        pytest.param(GEMMA, "tower", 4096, 3, 3, id="gemma3"),
    ],
)
def test_attention_of_images_has_kernels(
    fields: Fields, train: Vision, patches: int, forward: int, backward: int, recwarn: pytest.WarningsRecorder
) -> None:
    update = lowered(fields, train, 640, patches, fsdp=2, tensor=2)
    assert "vision tower" in update.as_text(debug_info=True), "a part of profiles"
    text = update.as_text()
    names = kernel_names(text)
    assert sum(count for name, count in names.items() if name.startswith(FORWARD)) >= forward
    assert sum(count for name, count in names.items() if name.startswith(BACKWARD)) >= backward
    assert not re.search(rf"x({patches}x{patches}|640x640)x", text), "no array of all logits"
    assert [str(one.message) for one in recwarn if "slow on TPU" in str(one.message)] == []


@pytest.mark.thorough
def test_memory_and_traffic_of_a_frozen_tower() -> None:
    found = compile_program(lowered(QWEN, "frozen", 1024, 1024, fsdp=2, tensor=2), 4)
    assert found.peak <= 230 * MIB
    assert not {one for one in found.text.kernels if "host" in one.lower()}
    moved = [one.op_name for one in found.text.collectives if one.loops and "vision tower" in one.op_name]
    assert not [name for name in moved if name.endswith("split")], "queries, keys and values stay where their heads are"
    assert [str(made.buffer) for made in found.text.made if made.buffer.dims[-2:] == (1024, 1024)] == []


@pytest.mark.thorough
def test_gemma_learns_from_pictures() -> None:
    """Its update with gradients of the tower, in whose masks the tokens of an image see one another."""
    found = compile_program(lowered(GEMMA, "tower", 640, 4096, fsdp=2, tensor=2), 4)
    assert {name.split("_segmented")[0] for name in found.mosaic} == {"splash_mha_fwd", "splash_mha_dkv"}
    assert found.peak <= 780 * MIB
    assert [str(made.buffer) for made in found.text.made if made.buffer.dims[-2:] in ((640, 640), (4096, 4096))] == []
