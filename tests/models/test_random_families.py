"""Saved files, logits and gradients of random models of every family, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from safetensors.numpy import load_file

from posttrain.kernels.logits.token_stats import token_stats
from posttrain.models.decoder import Decoder
from posttrain.weights.load import load_model
from posttrain.weights.save import hf_tensors, save_model
from posttrain.weights.state import ModelWeights
from tests.models.checkpoints import assert_same
from tests.random_families import FAMILIES, random_family_model

ROWS, LENGTH = 3, 17


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_has_the_same_logits_and_gradients(family: str, tmp_path: Path) -> None:
    """A saved model loads here and there; a step of gradients of both is saved, and compared tensor by tensor."""
    model = random_family_model(family, seed=1)
    save_model(model, tmp_path / "ours")
    assert_same(model, load_model(tmp_path / "ours"))
    tokens = np.random.default_rng(1).integers(0, model.config.vocab_size, (ROWS, LENGTH)).astype(np.int32)
    logits, gradients = _ours(model, tokens)

    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    options = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", **options).train()
    found = theirs(torch.from_numpy(tokens).long()).logits
    logps = torch.log_softmax(found[:, :-1], dim=-1)
    torch.gather(logps, -1, torch.from_numpy(tokens[:, 1:, None]).long()).sum().backward()
    scale = np.abs(logits).max()
    assert_allclose(logits, found.detach().numpy(), atol=1e-4 * max(scale, 1.0), rtol=0)
    # no parameters there: a router's bias is moved by its load
    constant = {name.rsplit(".", 1)[-1] for name, _ in theirs.named_buffers()}
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    theirs.save_pretrained(tmp_path / "gradients")
    expected = load_file(tmp_path / "gradients" / "model.safetensors")
    size = np.sqrt(sum(float(np.square(tensor).sum()) for tensor in expected.values()))
    compared = {name for name in expected if name.rsplit(".", 1)[-1] not in constant}
    assert compared <= gradients.keys(), compared - gradients.keys()
    for name in compared:
        assert_allclose(gradients[name], expected[name], rtol=1e-2, atol=1e-4 * size, err_msg=name)


def _ours(model: Decoder, tokens: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Logits, and the gradient of the sum of log-probabilities under the names of checkpoints."""
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)
    segments, weights = np.ones_like(tokens), ModelWeights(model)

    def total(arrays: Any, *inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        bound = weights.bind(arrays)
        hidden, _ = bound(*inputs)
        vocab_size = model.config.vocab_size
        stats = token_stats(bound.logits, hidden, inputs[0], inputs[2], temperature=1.0, vocab_size=vocab_size)
        return stats.logps.sum(), bound.logits(hidden)

    gradient = jax.jit(jax.grad(total, has_aux=True, allow_int=True))
    found, logits = gradient(weights.read(), *map(jnp.asarray, (tokens, positions, segments)))
    return np.asarray(logits), {name: np.asarray(x) for name, x in hf_tensors(weights.bind(found))}
