"""What is compiled does not grow with depth: a scanned stage is one traced pattern."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from posttrain.batch import Batch
from posttrain.kernels.logits.token_stats import token_stats
from posttrain.losses.sft import SFTLoss
from posttrain.models import decoder
from posttrain.models.cache import empty_cache
from posttrain.models.decoder import Decoder
from posttrain.train.objective import Keys, Objective, TrainSettings
from posttrain.weights.state import ModelWeights
from tests.tiny import WINDOW, tiny_model

pytestmark = pytest.mark.thorough

PATTERNS: dict[str, tuple[tuple[int | None, ...], int]] = {
    "equal": ((None,), 4),
    "five_local_one_global": ((WINDOW,) * 5 + (None,), 12),
}
"""Windows of the layers of a pattern, and the smaller number of layers."""


@pytest.fixture(autouse=True)
def scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator: short stacks are not cut either."""
    monkeypatch.setattr(decoder, "SPLIT_LAYERS", {})


def training_step(model: Decoder) -> Any:
    weights = ModelWeights(model)
    tokens = jnp.zeros((2, 16), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(16, dtype=jnp.int32), tokens.shape)
    segments = jnp.ones_like(tokens)

    def loss(arrays: Any) -> Any:
        bound = weights.bind(arrays)
        hidden, _ = bound(tokens, positions, segments)
        return token_stats(bound.logits, hidden, tokens, segments, temperature=1.0, vocab_size=512).logps.sum()

    return jax.jit(jax.grad(loss)).lower(weights.read())


def gradient_of(model: Decoder) -> Any:
    """As a trainer computes it."""
    objective = Objective(
        student=ModelWeights(model),
        teachers=[],
        loss=SFTLoss(),
        settings=TrainSettings(temperature=1.0, max_grad_norm=1.0),
    )
    ones = jnp.ones((2, 16), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(16, dtype=jnp.int32), ones.shape)
    rows = Batch(tokens=ones, positions=positions, segments=ones, loss_weight=jnp.ones((2, 16)))
    batch = jax.tree.map(lambda x: x[None], rows)

    def gradient(params: Any) -> Any:
        return objective.gradients(params, {}, [], jnp.zeros(()), (batch, Keys(None, None)), jnp.int32(1))[0]

    return jax.jit(gradient).lower(objective.student.read())


def decoding_step(model: Decoder) -> Any:
    weights = ModelWeights(model)
    config = decoder.decoding_config(model.config, None)
    cache = empty_cache(config, 2, 16, jnp.dtype(jnp.float32))
    ones = jnp.ones((2, 1), jnp.int32)

    def step(arrays: Any, cache: Any) -> Any:
        bound = weights.bind(arrays).for_decoding()
        hidden, cache = bound(ones, ones, ones, cache)
        return bound.logits(hidden), cache

    return jax.jit(step, donate_argnums=1).lower(weights.read(), cache)


def calls(program: Callable[[Decoder], Any], model: Decoder) -> int:
    """Python functions called to trace and lower ``program``: the same on a busy machine, which its seconds are not."""
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    jax.clear_caches()
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        program(model)
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("program", [training_step, decoding_step])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_48_layers_are_no_more_to_trace_than_few(program: Callable[[Decoder], Any], pattern: str) -> None:
    windows, few = PATTERNS[pattern]
    counts = [calls(program, tiny_model(num_layers=num_layers, windows=windows)) for num_layers in (few, 48)]
    assert counts[1] <= 1.01 * counts[0]


@pytest.mark.optimized
@pytest.mark.parametrize("program", [training_step, decoding_step])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_48_layers_are_no_more_to_compile_than_few(program: Any, pattern: str) -> None:
    windows, few = PATTERNS[pattern]
    sizes = []
    for num_layers in (few, 48):
        lowered = program(tiny_model(num_layers=num_layers, windows=windows))
        # Operations handed to the compiler, and those that it made of them.
        sizes.append((lowered.as_text().count(" = "), lowered.compile().as_text().count(" = ")))
    assert sizes[1][0] <= 1.05 * sizes[0][0]
    assert sizes[1][1] <= 1.2 * sizes[0][1]


@pytest.mark.optimized
def test_rematerialisation_acts_on_few_layers() -> None:
    """Which XLA:CPU would compute once, unrolled."""
    models = [tiny_model(num_layers=6, windows=(None,), remat=remat) for remat in ("none", "full")]
    programs = [gradient_of(model) for model in models]
    plain, saving = (program.compile().memory_analysis().temp_size_in_bytes for program in programs)
    assert saving < 0.5 * plain


@pytest.mark.optimized
@pytest.mark.parametrize("remat", ["full", "dots", "offload"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_rematerialisation_saves_memory_and_changes_nothing(remat: Any, pattern: str) -> None:
    windows = PATTERNS[pattern][0]
    models = [tiny_model(num_layers=12, windows=windows, remat=kind) for kind in ("none", remat)]
    compiled = [training_step(model).compile() for model in models]
    plain, saving = (program.memory_analysis().temp_size_in_bytes for program in compiled)
    assert saving < 0.8 * plain
    gradients = [program(ModelWeights(model).read()) for program, model in zip(compiled, models, strict=True)]
    for path, gradient in gradients[0].items():
        assert jnp.allclose(gradient, gradients[1][path], atol=1e-5 * float(jnp.abs(gradient).max()) + 1e-9), path
