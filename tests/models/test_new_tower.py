"""New models with a vision tower: sizes from the configuration, tokens from the tokenizer, files that transformers
reads; what is missing, misspelt or mistyped is an error."""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from PIL import Image

from posttrain.config import ModelSection
from posttrain.data.tokenizer import load_tokenizer
from posttrain.errors import ConfigError
from posttrain.models.vision.tower import ImageInputs
from posttrain.weights.load import init_model, load_model
from posttrain.weights.locate import ModelFiles, init_fields, run_tokenizer, trained_model_files
from posttrain.weights.save import save_model
from posttrain.weights.state import ModelWeights
from tests.data.test_images import batch

TEXT: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.3,
}
INITS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "mm_tokens_per_image": 4,
        "text_config": {**TEXT, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16},
        "vision_config": {
            "num_hidden_layers": 2,
            "hidden_size": 20,
            "num_attention_heads": 2,
            "intermediate_size": 36,
            "patch_size": 5,
            "image_size": 20,
        },
    },
    "qwen2_5_vl": {
        "text_config": {
            **TEXT,
            "num_key_value_heads": 4,
            "hidden_size": 32,
            "tie_word_embeddings": False,
            "rope_theta": 1e4,
            "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]},
        },
        "vision_config": {
            "depth": 3,
            "hidden_size": 24,
            "num_heads": 3,
            "intermediate_size": 44,
            "patch_size": 6,
            "window_size": 24,
            "fullatt_block_indexes": [1],
        },
    },
    "qwen3_vl": {
        "text_config": {
            **TEXT,
            "head_dim": 8,
            "rope_theta": 1e4,
            "tie_word_embeddings": True,
            "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True},
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 16,
            "num_heads": 2,
            "intermediate_size": 36,
            "patch_size": 4,
            "spatial_merge_size": 3,
            "num_position_embeddings": 49,
            "deepstack_visual_indexes": [1],
        },
    },
}


def described(family: str, change: Callable[[dict[str, Any]], Any] = lambda model: None) -> ModelFiles:
    model = {"tokenizer": "bytes", "vision": "tower", "init": {"model_type": family, **copy.deepcopy(INITS[family])}}
    change(model)
    section = ModelSection(**model)
    return trained_model_files(section, run_tokenizer("bytes", section))


@pytest.mark.parametrize("family", list(INITS))
def test_a_new_model_has_its_tokens_and_processor(family: str, tmp_path: Path) -> None:
    files = described(family)
    assert files.tokenizer is not None and files.hf_json is not None and files.config is not None
    vocabulary = files.tokenizer.hf.get_vocab()
    assert set(files.tokenizer.images.family.layout.texts) <= set(vocabulary)
    assert files.config.vocab_size == len(vocabulary) and files.config.vision is not None
    assert (files.config.vision.depth, files.config.vision.train) == (3 if family == "qwen2_5_vl" else 2, "tower")
    files.tokenizer.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(files.hf_json))
    section = ModelSection(path=str(tmp_path), vision="frozen")
    read = trained_model_files(section, load_tokenizer(tmp_path))
    assert read.config is not None and read.tokenizer is not None
    assert read.config.stages == files.config.stages
    assert read.config.vision == dataclasses.replace(files.config.vision, train="frozen")
    assert read.tokenizer.images == files.tokenizer.images and read.tokenizer.hf.get_vocab() == vocabulary
    row = {"image": Image.new("RGB", (30, 20), "red"), "prompt": "What?", "completion": "<|image_pad|>"}
    with warnings.catch_warnings(action="ignore"):  # of a family's placeholder that is typed
        assert_array_equal(*(batch(one, [row]).tokens for one in (read.tokenizer, files.tokenizer)))


@pytest.mark.thorough
@pytest.mark.parametrize("family", list(INITS))
def test_what_is_saved_is_loaded(family: str, tmp_path: Path) -> None:
    """Weights here, and in transformers classes, pixels and logits."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    files = described(family)
    assert files.tokenizer is not None and files.hf_json is not None
    model = init_model(files.hf_json, dtype=jnp.float32, seed=3, vision="tower")
    assert {path.partition(".")[0] for path in ModelWeights(model).trainable()} >= {"tower", "embed"}
    save_model(model, tmp_path / "model", tokenizer=files.tokenizer)
    weights, again = (ModelWeights(m).read() for m in (model, load_model(tmp_path / "model", vision="tower")))
    assert weights.keys() == again.keys()
    for path, weight in weights.items():
        assert_array_equal(np.asarray(weight), np.asarray(again[path]), path)
    theirs, report = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )
    assert not any(report.values()) and type(theirs).__name__ == files.hf_json["architectures"][0]
    image = Image.effect_noise((46, 33), 80).convert("RGB")
    one = batch(files.tokenizer, [{"image": image, "prompt": "What?", "completion": "noise"}])
    length = int((np.asarray(one.segments) > 0).sum())
    tokens = torch.tensor(np.asarray(one.tokens)[:, :length], dtype=torch.long)
    pixels = transformers.AutoImageProcessor.from_pretrained(tmp_path / "model")(image, return_tensors="pt")
    pixels.pop("num_crops", None)
    kinds = "token_type_ids" if family == "gemma3" else "mm_token_type_ids"
    marks = (tokens == files.tokenizer.image_id).long()
    with torch.no_grad():
        expected = theirs(input_ids=tokens, attention_mask=torch.ones_like(tokens), **{kinds: marks}, **pixels).logits
    images = ImageInputs.of(one, model.config)
    hidden, _, _ = model.forward(*map(jnp.asarray, (one.tokens, one.positions, one.segments)), images=images)
    assert_allclose(np.asarray(model.logits(hidden))[:, :length], expected.numpy(), atol=5e-4)


def put(*path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Change a field of `init`, or remove it."""

    def change(model: dict[str, Any]) -> None:
        fields = model["init"]
        for name in path[:-1]:
            fields = fields[name]
        fields.pop(path[-1], None)
        if value is not None:
            fields[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: model.pop("vision"), "vision=none: a tower with random weights learns with the model; set"),
        (lambda model: model.update(vision="frozen"), "vision=frozen: a tower with random weights learns"),
        (put("vision_config", value=None), "vision=tower with init needs a multimodal model"),
        (put("text_config", value=None), "text_config: missing; a new model with a tower has"),
        (put("model_type", value="qwen3"), "a new model with a vision tower is one of gemma3, qwen2_5_vl, qwen3_vl"),
        (put("model_type", value="gemma4"), "a new model with a vision tower is one of gemma3, qwen2_5_vl, qwen3_vl"),
        (put("vision_confg", value={}), "vision_confg: unknown field; did you mean 'vision_config'?"),
        (put("vision_config", "pach_size", value=8), "pach_size: unknown field; did you mean 'patch_size'?"),
        (put("text_config", "hiden_size", value=8), "text_config: hiden_size: unknown field"),
        (put("vision_config", "depth", value=None), "depth: missing in the model's vision_config"),
        (put("text_config", "hidden_size", value=None), "hidden_size: missing in the model's text_config"),
        (put("vision_config", "depth", value="two"), "depth: must be a whole number, got 'two'"),
        (put("vision_config", "depth", value=0), "depth: must be above 0"),
        (put("vision_config", "num_heads", value=3), "hidden_size=16 must be a multiple of 12, for 3 heads"),
        (put("vision_config", "num_position_embeddings", value=50), "num_position_embeddings=50: must be a square"),
        (put("text_config", "rope_scaling", "mrope_interleaved", value=False), "mrope_interleaved=False is not"),
        (put("text_config", "rope_scaling", value=None), "mrope_section=None: must be three numbers of pairs that"),
        (put("image_token_id", value=5), "image_token_id=5: the tokenizer has 261; remove the field"),
        (lambda model: model.update(image={"longest_edge": 9}), "model.image.longest_edge: images of a qwen3_vl"),
    ],
)
def test_mistakes_are_named(change: Callable[[dict[str, Any]], None], reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        described("qwen3_vl", change)
    assert reason in str(error.value)


def test_layers_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"fullatt_block_indexes=\[7\]: must be layers of 3"):
        described("qwen2_5_vl", put("vision_config", "fullatt_block_indexes", value=[7]))
    tokenizer = described("gemma3").tokenizer
    assert tokenizer is not None
    fields = init_fields({"model_type": "gemma3", **INITS["gemma3"]}, tokenizer)
    assert fields["text_config"]["pad_token_id"] == 256 and fields["image_token_index"] == 261 + 2
