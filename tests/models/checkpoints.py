"""What tests of files share: models to write, and equality of all weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.testing import assert_array_equal
from safetensors.numpy import load_file, save_file

from posttrain.models.decoder import Decoder
from posttrain.weights.state import ModelWeights

GOLDENS = Path(__file__).parent.parent / "goldens" / "models"
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "hidden_act": "gelu_pytorch_tanh",
    "attention_bias": True,
    "mlp_bias": True,
    "rope_scaling": {"rope_type": "linear", "factor": 3.0},
    "initializer_range": 0.1,
    "eos_token_id": 5,
}


def weights_of(model: Decoder) -> dict[str, np.ndarray]:
    return {path: np.asarray(w) for path, w in ModelWeights(model).read().items()}


def assert_same(one: Decoder, two: Decoder) -> None:
    expected, got = weights_of(one), weights_of(two)
    assert expected.keys() == got.keys()
    for path, value in expected.items():
        assert got[path].dtype == value.dtype
        assert_array_equal(got[path], value, err_msg=path)


def edit(folder: Path, **changes: np.ndarray | None) -> None:
    """Replace, add or (None) remove tensors of a checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: x for name, x in changes.items() if x is not None}
    kept = {name: x for name, x in tensors.items() if changes.get(name, x) is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
