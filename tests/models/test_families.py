"""Dense families against transformers: goldens, a checkpoint in bfloat16, a real model on real text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from posttrain.kernels.logits.token_stats import token_stats
from posttrain.weights.load import load_model
from posttrain.weights.state import ModelWeights
from tests.models.goldens import DENSE, GEMMA, GOLDENS, MIXTURES, Batch, Golden, GoldenChecks, decode, logits_of
from tests.often import often

USUAL = ("llama", "olmo3", "smollm3", "glm4")
"""What the others have, these have: biases, norms after, rotary parts, layers without positions; a checkpoint in
bfloat16 has a test of its own."""


@pytest.fixture(scope="module", params=often(DENSE, *USUAL))
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


class TestGoldens(GoldenChecks):
    """In the order of the goldens, so that one model at a time is alive."""


def test_every_golden_is_checked() -> None:
    assert {folder.name for folder in GOLDENS.iterdir()} <= {*DENSE, *GEMMA, *MIXTURES}


def test_bfloat16_checkpoint() -> None:
    golden = Golden("llama_bf16")
    model = load_model(golden.folder)
    assert {w.dtype for w in ModelWeights(model).read().values()} == {jnp.dtype(jnp.bfloat16)}
    assert model.compute.dtype == jnp.bfloat16
    exact, theirs = golden.arrays["plain_logits"], golden.arrays["plain_logits_bf16_compute"]
    plain = Batch(*(array[:2] for array in golden.batch))
    assert np.square(logits_of(model, plain) - exact).mean() < 2 * np.square(theirs - exact).mean()
    wide = load_model(golden.folder, compute_dtype=jnp.float32)
    assert_allclose(logits_of(wide, plain), exact, atol=2e-4, rtol=0)


@pytest.mark.thorough
@pytest.mark.optimized
def test_real_model_on_real_stories(shared: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    folder = shared / "models" / "stories260k"
    model, tokenizer = load_model(folder), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    lines = (shared / "data/text/tinystories_v2gpt4_train_head.jsonl").read_text().split("\n")[:40]
    rows = [[1, *tokenizer.encode(json.loads(line)["text"], add_special_tokens=False).ids][:512] for line in lines]
    tokens = np.zeros((40, 512), np.int32)
    segments = np.zeros((40, 512), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)], segments[i, : len(row)] = row, 1
    positions = np.broadcast_to(np.arange(512, dtype=np.int32), tokens.shape)
    weights = ModelWeights(model)

    @jax.jit
    def total(arrays: Any, tokens: Any, positions: Any, segments: Any) -> Any:
        model = weights.bind(arrays)
        hidden, _ = model(tokens, positions, segments)
        return token_stats(model.logits, hidden, tokens, segments, temperature=1.0, vocab_size=512).logps.sum()

    batches = (jax.tree.map(lambda x, i=i: x[i : i + 4], (tokens, positions, segments)) for i in range(0, 40, 4))
    nats = -sum(float(total(weights.read(), *map(jnp.asarray, batch))) for batch in batches)
    assert round(nats / segments[:, 1:].sum(), 4) == 1.2945
    prompt = np.asarray([1, *tokenizer.encode("Once upon a time", add_special_tokens=False).ids])
    text = tokenizer.decode(decode(model, [prompt], 16)[0][0].tolist())
    assert text.startswith(", there was a little girl named Lily."), text
