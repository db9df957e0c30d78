"""Adapters on vision towers: PEFT's files read and written, merged = applied, targets, what an engine keeps."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose

from posttrain.config import LoRA, Vision
from posttrain.errors import ConfigError
from posttrain.models.config import Compute
from posttrain.models.decoder import Decoder
from posttrain.models.hf import config_from_hf
from posttrain.models.names import TOWER
from posttrain.models.vision.tower import ImageInputs
from posttrain.weights.files import read_json
from posttrain.weights.load import load_model, outline_of
from posttrain.weights.lora import attach_lora, merged_lora
from posttrain.weights.peft_save import save_adapter
from posttrain.weights.save import save_model
from posttrain.weights.state import ModelWeights
from tests.images import VisionCase, batch_of
from tests.models.goldens import COMPILER_OPTIONS
from tests.weights.adapted import disturb


def logits_of(case: VisionCase, model: Decoder) -> np.ndarray:
    """Logits of the text with two pictures."""
    weights = ModelWeights(model)
    batch = jax.tree.map(jnp.asarray, batch_of(case, model, [("two",)]))

    def run(arrays: Any) -> jax.Array:
        bound = weights.bind(arrays)
        images = ImageInputs.of(batch, bound.config)
        return bound.logits(bound.forward(batch.tokens, batch.positions, batch.segments, images=images)[0])

    found = jax.jit(run, compiler_options=COMPILER_OPTIONS)(weights.read())
    return np.asarray(found)[0, : len(case.arrays["two_input_ids"])]


def inputs_of(case: VisionCase, torch: Any) -> dict[str, Any]:
    """The same text with its pictures for transformers."""
    arrays = case.arrays
    wanted, pixels = arrays["two_images"], arrays["images_pixel_values"]
    inputs: dict[str, Any] = {"input_ids": torch.tensor(arrays["two_input_ids"])[None]}
    if "images_image_grid_thw" in arrays:
        grids = arrays["images_image_grid_thw"]
        parts = np.split(pixels, np.cumsum(grids.prod(axis=1))[:-1])
        inputs["pixel_values"] = torch.tensor(np.concatenate([parts[i] for i in wanted]))
        inputs["image_grid_thw"] = torch.tensor(grids[wanted])
    else:
        inputs["pixel_values"] = torch.tensor(pixels[wanted])
        for key in ("image_sizes", "image_position_ids"):
            if f"images_{key}" in arrays:
                inputs[key] = torch.tensor(arrays[f"images_{key}"][wanted])
    if "two_mm_token_type_ids" in arrays:
        inputs["mm_token_type_ids"] = inputs["token_type_ids"] = torch.tensor(arrays["two_mm_token_type_ids"])[None]
    return inputs


EVERY = LoRA(rank=3, alpha=6, targets=("all-linear", "tower.layers", "tower.projector"), rank_pattern={"tower.*mlp": 5})


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("qwen2_5_vl", EVERY),
        ("qwen2_5_vl", LoRA(rank=2, targets=("tower",), dora=True)),
        ("qwen2_5_vl", LoRA(rank=2, targets=("tower.layers.attn",), modules_to_save=("tower.projector.mlp",))),
        ("qwen3_vl", EVERY),
        ("mistral3", LoRA(rank=2, targets=("attention", "tower.layers.attention.q", "tower.projector.linear"))),
        ("gemma3", LoRA(rank=2, targets=("q_proj", "tower.layers.self_attn.v"))),
        ("gemma4", LoRA(rank=2, targets=("tower",))),
    ],
    ids=["qwen2_5_vl", "dora", "saved", "qwen3_vl", "mistral3", "gemma3", "gemma4"],
)
@pytest.mark.filterwarnings("ignore")
def test_peft_reads_what_we_write(family: str, lora: LoRA, shared: Path, tmp_path: Path) -> None:
    """PEFT's logits are ours, as are those of the merged model; the adapter is loaded again as it was."""
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    case = VisionCase(shared / "goldens" / "vision" / family)
    with jax.default_matmul_precision("highest"):
        model = load_model(case.folder, dtype=jnp.float32, vision="frozen", lora=lora, seed=0)
        disturb(model, 0.05)
        ours = logits_of(case, model)
        save_adapter(model, tmp_path / "adapter", base=str(case.folder))
        again = load_model(case.folder, dtype=jnp.float32, vision="frozen", adapter=tmp_path / "adapter")
        held = ModelWeights(again).read()
        for path, w in ModelWeights(model).read().items():
            assert_allclose(held[path], w, atol=1e-6, err_msg=path)
        save_model(merged_lora(model), tmp_path / "merged")
        merged = load_model(tmp_path / "merged", dtype=jnp.float32, vision="frozen")
        assert_allclose(logits_of(case, merged), ours, atol=2e-4)
    read = transformers.AutoModelForImageTextToText.from_pretrained(
        case.folder, dtype="float32", attn_implementation="eager"
    )
    adapted = peft.PeftModel.from_pretrained(read, tmp_path / "adapter").eval()
    with torch.no_grad():
        theirs = adapted(**inputs_of(case, torch)).logits[0].numpy()
    assert_allclose(theirs, ours, atol=2e-4)


@pytest.fixture(scope="module")
def case(shared: Path) -> VisionCase:
    return VisionCase(shared / "goldens" / "vision" / "qwen2_5_vl")


def outline(case: VisionCase, lora: LoRA, vision: Vision = "frozen") -> Decoder:
    """Model of shapes with an adapter."""
    config = config_from_hf(read_json(case.folder / "config.json"), vision=vision)
    model = outline_of(config, Compute.of(jnp.float32), jnp.dtype(jnp.float32))

    def adapted(model: Decoder) -> Decoder:
        attach_lora(model, lora, seed=0)
        return model

    return nnx.eval_shape(adapted, model)


@pytest.mark.parametrize(
    ("targets", "hit"),
    [
        (("all-linear",), set()),
        (("mlp", "q_proj", "down_proj"), set()),
        (("mlp", "tower.projector"), {"projector.mlp.0", "projector.mlp.2"}),
        (("attention|tower.layers.attn.qkv",), {"layers.attn.qkv"}),
        (("visual.blocks.1.attn.proj",), {"layers.attn.proj"}),
        (("tower.layers.*mlp.(gate|up)",), {"layers.mlp.gate_proj", "layers.mlp.up_proj"}),
    ],
)
def test_only_patterns_that_begin_with_the_tower_hit_it(
    case: VisionCase, targets: tuple[str, ...], hit: set[str]
) -> None:
    """Its modules have names of the language model's."""
    lora = LoRA(rank=2, targets=(*targets, "attention"))
    trained = ModelWeights(outline(case, lora)).trainable()
    found = {re.fullmatch(r"tower.adapters.(.+).weight.lora_[ab]", path) for path in trained if path.startswith(TOWER)}
    assert {match[1] for match in found if match is not None} == hit and None not in found


@pytest.mark.parametrize(
    ("lora", "vision", "message"),
    [
        (LoRA(rank=2, targets=("tower.layers",)), "tower", "trains it in full; set model.vision to frozen"),
        (LoRA(rank=2, targets=("tower.projector",)), "projector", "tower.projector.mlp.0.weight has an adapter"),
        (LoRA(rank=2, targets=("tower.patch_embed",)), "frozen", "matches no matrix that supports adapters"),
        (LoRA(rank=2, targets=("tower.layers",), dropout=0.1), "frozen", "does not apply to tower.layers.attn.proj"),
    ],
)
def test_what_is_refused(case: VisionCase, lora: LoRA, vision: Vision, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        outline(case, lora, vision)


def test_work_of_an_adapted_tower(case: VisionCase) -> None:
    """The backward pass goes as far as adapters do."""

    def training(*targets: str, vision: Vision = "frozen", saved: tuple[str, ...] = ()) -> tuple[Vision, bool]:
        lora = LoRA(rank=2, targets=targets, modules_to_save=saved)
        return ModelWeights(outline(case, lora, vision)).tower_training

    assert training("attention") == ("frozen", False)
    assert training("attention", vision="projector") == ("projector", False)
    assert training("attention", "tower.projector") == ("projector", True)
    assert training("attention", saved=("tower.projector.mlp",)) == ("projector", False)
    assert training("tower") == training("tower.layers") == ("tower", True)
