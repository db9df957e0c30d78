"""Pruning: what is cut counts for nothing, what is kept is equal, and the folder is a model like any other."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.config import ConfigError
from posttrain.models.decoder import Decoder
from posttrain.recipes.prune import prune
from posttrain.weights.load import load_model
from posttrain.weights.prune import Pruning, pruned, pruned_config
from posttrain.weights.save import save_model
from posttrain.weights.state import ModelWeights
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


def test_what_cannot_be_pruned() -> None:
    config = tiny_config(windows=(None,))
    for plan, text in [
        (Pruning(layers=(2, 1)), "must rise"),
        (Pruning(layers=(3,)), "from 0 to 2"),
        (Pruning(mlp_dim=49), "mlp_dim=49 must be from 1 to 48"),
        (Pruning(embed_dim=0), "embed_dim=0 must be from 1 to 32"),
    ]:
        with pytest.raises(ConfigError, match=text):
            pruned_config(config, plan)
    with pytest.raises(ConfigError, match="differ in kind"):
        pruned_config(tiny_config(), Pruning(layers=(0,)))
