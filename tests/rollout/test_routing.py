"""Recorded routing: what the sampler used is what a whole pass over the same tokens uses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from posttrain.config import MeshSection
from posttrain.errors import ConfigError
from posttrain.mesh import make_mesh
from posttrain.models.decoder import Decoder
from posttrain.rollout.engine import NativeEngine
from posttrain.weights.state import ModelWeights
from tests.mixtures import mixture_config, mixture_model
from tests.rollout.engines import LENGTH, assert_same, make_engine, params, requests, text_of
from tests.tiny import tiny_model

CONFIG = mixture_config(num_layers=3)
"""A dense layer and two mixtures."""


@pytest.fixture(scope="module")
def model() -> Decoder:
    return mixture_model(CONFIG)


@pytest.fixture(scope="module")
def engine(model: Decoder) -> NativeEngine:
    return make_engine(model, record_routing=True)


@pytest.fixture(scope="module")
def routing_of(model: Decoder) -> Any:
    weights = ModelWeights(model)

    @jax.jit
    def run(arrays: Any, tokens: Any) -> Any:
        positions = jnp.arange(LENGTH, dtype=jnp.int32)[None]
        _, _, routing = weights.bind(arrays).forward(tokens[None], positions, jnp.ones_like(positions))
        return jnp.moveaxis(routing.experts[:, 0], 0, 1)

    def routing(tokens: list[int]) -> np.ndarray:
        padded = np.pad(tokens, (0, LENGTH - len(tokens))).astype(np.int32)
        return np.asarray(run(weights.read(), jnp.asarray(padded)))[: len(tokens)]

    return routing


@pytest.mark.thorough
def test_every_token_of_prompt_and_sample_has_its_experts(engine: NativeEngine, routing_of: Any) -> None:
    """Slots are refilled while others go on, two requests share a prompt, and one prompt has a single token."""
    prompts, parameters = requests(9)
    prompts[4] = prompts[3]
    completions = engine.generate_all(prompts, parameters)
    assert len(prompts[1]) == 1
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens = [*prompt, *completion.tokens]
        assert completion.experts is not None
        assert completion.experts.dtype == np.int16
        assert completion.experts.shape == (len(tokens), 2, 3)
        assert_array_equal(completion.experts[:-1], routing_of(tokens)[:-1])
        assert_array_equal(completion.experts[-1], -1)


@pytest.mark.thorough
def test_a_stop_string_cuts_the_routing_as_well(engine: NativeEngine, routing_of: Any) -> None:
    prompt = [3, 5, 7]
    (whole,) = engine.generate_all([prompt], [params(max_tokens=12)])
    (cut,) = engine.generate_all([prompt], [params(max_tokens=12, stop=(text_of(whole.tokens[2:3]),))])
    assert cut.stop == "stop" and len(cut.tokens) <= 3 and cut.experts is not None
    assert len(cut.experts) == 3 + len(cut.tokens)
    assert_array_equal(cut.experts[:-1], routing_of([*prompt, *cut.tokens])[:-1])


@pytest.mark.thorough
def test_recording_changes_no_sample_nor_does_a_mesh(model: Decoder, engine: NativeEngine) -> None:
    prompts, parameters = requests(5)
    recorded = engine.generate_all(prompts, parameters)
    mesh = make_mesh(MeshSection(fsdp=2, expert=2, tensor=2))
    for other in (make_engine(model), make_engine(mixture_model(CONFIG, mesh=mesh))):
        for plain, expected in zip(other.generate_all(prompts, parameters), recorded, strict=True):
            assert_same(plain, expected)
            assert plain.experts is None


def test_a_dense_model_has_nothing_to_record() -> None:
    with pytest.raises(ConfigError) as raised:
        make_engine(tiny_model(), record_routing=True)
    assert str(raised.value) == (
        "rollout.record_routing: qwen3 has no MoE layer whose routing could be recorded; remove the option"
    )
