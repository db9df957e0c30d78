"""Pruning: what is cut counts for nothing, what is kept is equal, and the folder is a model like any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.data.tokenizer import load_tokenizer
from posttrain.errors import ConfigError
from posttrain.export.resize import expert_load, prune
from posttrain.models.config import AttentionConfig
from posttrain.models.decoder import Decoder
from posttrain.weights.load import load_model
from posttrain.weights.prune import Pruning, pruned, pruned_config
from posttrain.weights.save import save_model
from posttrain.weights.state import ModelWeights
from posttrain.weights.upcycle import Upcycling, upcycled
from tests.tiny import forward, shake, tiny_config, tiny_model

TOKENS = np.arange(24).reshape(2, 12)


@pytest.fixture(scope="module")
def model() -> Decoder:
    """Three alike layers, of which the second, half of each MLP and a quarter of the stream do nothing."""
    model = tiny_model(windows=(None,), initializer_range=0.1)
    shake(model, 1)
    weights = ModelWeights(model)
    made = {path: np.array(w) for path, w in weights.read().items()}
    for path, array in made.items():
        name = path.rpartition(".mlp.")[2]
        if name == "down.kernel":
            array[:, ::2] = 0.0
        if path.endswith((".down.kernel", ".attention.o.kernel")):
            array[1] = 0.0
    weights.write({path: jnp.asarray(array) for path, array in made.items()})
    return model


def test_what_does_nothing_is_cut_without_loss(model: Decoder) -> None:
    small = pruned(model, Pruning(layers=(0, 2), mlp_dim=24))
    assert small.config.num_layers == 2 and small.config.blocks[0].mlp.dim == 24
    np.testing.assert_allclose(forward(small, TOKENS), forward(model, TOKENS), rtol=1e-4, atol=1e-4)


def test_the_stream_keeps_its_largest_dimensions(model: Decoder) -> None:
    small = pruned(model, Pruning(embed_dim=20))
    kept, whole = (ModelWeights(m).read() for m in (small, model))
    columns = [np.flatnonzero((np.asarray(whole["embed.embedding"]) == c[:, None]).all(0))[0]
               for c in np.asarray(kept["embed.embedding"]).T]  # fmt: skip
    assert len({*columns}) == 20 and columns == sorted(columns)
    for path, array in kept.items():
        if path.endswith("norm.scale") and "attention.q" not in path and array.shape[-1] == 20:
            np.testing.assert_array_equal(array, np.asarray(whole[path])[..., columns])
    assert np.isfinite(forward(small, TOKENS)).all()


def test_a_pruned_checkpoint(tmp_path: Path, model: Decoder) -> None:
    save_model(model, tmp_path / "whole")
    said = prune(str(tmp_path / "whole"), tmp_path / "small", Pruning(layers=(0, 2), embed_dim=24), reader="posttrain")
    assert "parameters" in said and load_model(tmp_path / "small").config.embed_dim == 24
    with pytest.raises(ConfigError, match="exists"):
        prune(str(tmp_path / "whole"), tmp_path / "small", Pruning())


def test_heads_go_with_their_group(model: Decoder) -> None:
    """The first of two groups of every layer, whose values are made to count for nothing, is the one that goes."""
    weights = ModelWeights(model)
    (path,) = [path for path in weights.read() if path.endswith("attention.v.kernel")]
    values = np.array(weights.read()[path])
    values[..., :8] = 0.0
    whole = weights.bind(weights.read() | {path: jnp.asarray(values)})
    small = pruned(whole, Pruning(kv_heads=1))
    attention = small.config.blocks[0].attention
    assert isinstance(attention, AttentionConfig)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (2, 1, 8)
    np.testing.assert_allclose(forward(small, TOKENS), forward(whole, TOKENS), rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
def test_experts_become_one_mlp(tmp_path: Path) -> None:
    """Copies say what the dense model said, whatever their number; of experts that differ the most used stay."""
    llama = tiny_model(windows=(None,), qk_norm=False)
    mixture = upcycled(llama, Upcycling(experts=4, top_k=2, mode="copy"), seed=0)
    load = expert_load(mixture, [TOKENS[0], TOKENS[1][:7]])
    assert load.shape == (3, 4) and (load.sum(axis=1) == 2 * (12 + 7)).all()
    for experts in (1, 3):
        small = pruned(mixture, Pruning(experts=experts), load)
        assert small.config.model_type == "llama" and small.config.blocks[0].mlp.dim == 48 * experts
        np.testing.assert_allclose(forward(small, TOKENS), forward(llama, TOKENS), rtol=1e-4, atol=1e-4)
    noisy = upcycled(llama, Upcycling(experts=4, top_k=2, mode="copy", noise=0.5), seed=0)
    first = pruned(noisy, Pruning(experts=1, layers=(1, 2)), np.asarray([[0, 0, 0, 1], [0, 5, 3, 2], [4, 1, 2, 3.0]]))
    kept, there = (ModelWeights(m).read() for m in (first, noisy))
    up = np.asarray(there["stages.0.blocks.0.mlp.experts.up"])
    np.testing.assert_array_equal(kept["stages.0.blocks.0.mlp.up.kernel"], [up[1, 1], up[2, 0]])
    save_model(noisy, tmp_path / "noisy", tokenizer=load_tokenizer("bytes"))
    (tmp_path / "rows.jsonl").write_text('{"text": "a text"}\n')
    with pytest.raises(ConfigError, match="give both or none"):
        prune(str(tmp_path / "noisy"), tmp_path / "small", Pruning(experts=2))
    text = str(tmp_path / "rows.jsonl")
    prune(str(tmp_path / "noisy"), tmp_path / "small", Pruning(experts=2, mlp_dim=64), text=text, reader="posttrain")
    assert load_model(tmp_path / "small").config.blocks[0].mlp.dim == 64


def test_the_generation_config_stays(model: Decoder) -> None:
    config = replace(model.config, generation_json='{"top_p": 0.5}')
    assert pruned_config(config, Pruning(mlp_dim=24)).generation_json == config.generation_json


def test_what_cannot_be_pruned() -> None:
    config = tiny_config(windows=(None,))
    for plan, text in [
        (Pruning(kv_heads=3), "kv_heads=3 must be from 1 to 2"),
        (Pruning(experts=1), "qwen3 is not an MoE model with a dense counterpart"),
        (Pruning(layers=(2, 1)), "must be ascending"),
        (Pruning(layers=(3,)), "from 0 to 2"),
        (Pruning(mlp_dim=49), "mlp_dim=49 must be from 1 to 48"),
        (Pruning(embed_dim=0), "embed_dim=0 must be from 1 to 32"),
    ]:
        with pytest.raises(ConfigError, match=text):
            pruned_config(config, plan)
    with pytest.raises(ConfigError, match="differ in type"):
        pruned_config(tiny_config(), Pruning(layers=(0,)))
