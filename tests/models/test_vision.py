"""Vision towers against transformers: features, logits, gradients, files; packed rows, other pixels."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from posttrain.batch import Batch
from posttrain.errors import ConfigError
from posttrain.kernels.logits.token_stats import token_stats
from posttrain.models.decoder import Decoder
from posttrain.models.hf import config_from_hf
from posttrain.models.vision.tower import ImageInputs
from posttrain.tree import replace
from posttrain.weights.files import read_json
from posttrain.weights.load import load_model
from posttrain.weights.save import hf_tensors, save_model
from posttrain.weights.state import ModelWeights
from tests.images import VisionCase, batch_of
from tests.models.goldens import COMPILER_OPTIONS, GRADIENTS
from tests.often import often

FAMILIES = ("gemma3", "qwen2_5_vl", "qwen3_vl", "mistral3", "gemma4", "gemma4_bidirectional")
ROWS = [("one", "turns"), ("two",), ("one",)]
"""Packed documents with several images, and the two rows of which the goldens have the gradient."""


class Outputs(NamedTuple):
    features: np.ndarray
    deeper: tuple[np.ndarray, ...]
    logits: np.ndarray
    logps: np.ndarray
    nll: float
    gradient: dict[str, Any]


class Golden(VisionCase):
    @cached_property
    def model(self) -> Decoder:
        return load_model(self.folder, dtype=jnp.float32, vision="tower")

    @cached_property
    def batch(self) -> Batch:
        return batch_of(self, self.model, ROWS)

    @property
    def atol(self) -> float:
        return 2e-3 if self.folder.name.startswith("gemma4") else 5e-4

    @cached_property
    def program(self) -> Any:
        weights, labels = ModelWeights(self.model), float(self.arrays["right_label_mask"].sum())

        def mean_nll(arrays: Any, batch: Batch) -> Any:
            model = weights.bind(arrays)
            images = ImageInputs.of(batch, model.config)
            hidden, _, _ = model.forward(batch.tokens, batch.positions, batch.segments, images=images)
            size = model.config.vocab_size
            stats = token_stats(model.logits, hidden, batch.tokens, batch.segments, temperature=1.0, vocab_size=size)
            nll = -(stats.logps * batch.loss_weight)[1:].sum() / labels
            placed = model.tower(images, model.compute)
            return nll, (placed.features, placed.added, model.logits(hidden), stats.logps)

        return jax.jit(jax.value_and_grad(mean_nll, has_aux=True), compiler_options=COMPILER_OPTIONS)

    def run(self, batch: Batch) -> Outputs:
        arrays = ModelWeights(self.model).read()
        (nll, (features, added, *rest)), gradient = self.program(arrays, jax.tree.map(jnp.asarray, batch))
        deeper = () if added is None else tuple(np.asarray(added))
        return Outputs(np.asarray(features), deeper, *map(np.asarray, rest), float(nll), gradient)

    @cached_property
    def outputs(self) -> Outputs:
        return self.run(self.batch)


@pytest.fixture(scope="module", params=often(FAMILIES, "gemma3"))
def golden(request: pytest.FixtureRequest, shared: Path) -> Golden:
    return Golden(shared / "goldens" / "vision" / request.param)


def bare(name: str) -> str:
    """Name of a tensor without what differs between the Hub and the memory of transformers."""
    return re.sub(r"\b(model|language_model|vision_model)\.", "", name)


def test_features_are_those_of_transformers(golden: Golden) -> None:
    """Of the images of the row `two`, and in front of its padding."""
    counts, wanted = golden.arrays["image_tokens_per_image"], golden.arrays["two_images"]
    places = np.split(np.arange(counts.sum()), np.cumsum(counts)[:-1])
    expected = np.concatenate([places[i] for i in wanted])
    out = golden.outputs
    assert_allclose(out.features[1, : len(expected)], golden.arrays["projected"][expected], atol=golden.atol)
    for level, found in enumerate(out.deeper):
        assert_allclose(found[1, : len(expected)], golden.arrays[f"deepstack_{level}"][expected], atol=golden.atol)


def test_logits_are_those_of_transformers(golden: Golden) -> None:
    """Packed as alone, beside padding of tokens and patches."""
    expected = [np.concatenate([golden.arrays[f"{name}_logits"] for name in names]) for names in ROWS]
    for row, logits in enumerate(expected):
        assert_allclose(golden.outputs.logits[row, : len(logits)], logits, atol=golden.atol)


def test_gradients_are_those_of_transformers(golden: Golden) -> None:
    assert_allclose(golden.outputs.nll, golden.meta["right_mean_nll"], rtol=1e-4)
    weights = ModelWeights(golden.model)
    declared = weights.parameters()
    # Buffers are never trained, so that nobody asks for their gradient.
    asked = {path: x * (declared[path].role != "buffer") for path, x in golden.outputs.gradient.items()}
    norms = {bare(name): np.linalg.norm(x) for name, x in hf_tensors(weights.bind(asked))}
    total = golden.meta["right_grad_norm_total"]
    for name, (norm, _) in golden.meta[GRADIENTS].items():
        assert_allclose(norms.pop(bare(name)), norm, rtol=1e-3, atol=1e-5 * total, err_msg=name)
    assert not any(norms.values()), "gradients of tensors that transformers has none of"


def test_other_pixels_change_what_sees_them(golden: Golden) -> None:
    """Of the second document's first image: nothing of the first document, nothing before the image, all behind it."""
    batch, image = golden.batch, 2
    patches = np.array(batch.patches)
    patches[0, np.asarray(batch.patch_images)[0] == image] += 97
    changed = golden.run(replace(batch, patches=patches)).logits
    before, same = golden.outputs.logits, int(np.flatnonzero(np.asarray(batch.images)[0] == image)[0])
    assert_array_equal(changed[0, :same], before[0, :same])
    assert_array_equal(changed[1:], before[1:])
    assert (np.abs(changed[0] - before[0]).max(axis=1)[same:] > 0)[np.asarray(batch.segments)[0, same:] > 0].all()


def test_fields_of_older_files_are_understood(golden: Golden) -> None:
    """As the Hub has them; a text-only checkpoint of the family has no tower."""
    new, old = (golden.folder / name for name in ("config.json", "config_hub_style.json"))
    fields = read_json(new)
    if old.is_file():
        found, expected = (config_from_hf(read_json(file), vision="frozen") for file in (old, new))
        assert replace(found, hf_json="") == replace(expected, hf_json="")
    with pytest.raises(ConfigError, match="has no vision tower; set it to none"):
        config_from_hf({**fields, "vision_config": None}, vision="frozen")


@pytest.mark.thorough
def test_text_is_that_of_the_text_part(golden: Golden, tmp_path: Path) -> None:
    """Which is saved alone, as a model of its own."""
    alone = load_model(golden.folder, dtype=jnp.float32)
    ids = jnp.asarray(golden.arrays["one_input_ids"][None, -12:])
    inputs = ids, jnp.arange(12)[None], jnp.ones_like(ids)
    save_model(alone, tmp_path)
    expected = golden.model.logits(golden.model(*inputs)[0])
    for model in (alone, load_model(tmp_path)):
        assert_allclose(model.logits(model(*inputs)[0]), expected, atol=1e-5)


def test_files_are_written_as_they_came(golden: Golden, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    source = load_file(golden.folder / "model.safetensors")
    found = dict(hf_tensors(golden.model))
    assert found.keys() == source.keys()
    for name, tensor in source.items():
        assert_array_equal(found[name], tensor, err_msg=name)
