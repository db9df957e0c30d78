"""One tiny engine for all tests of a file, so that its programs are compiled once, and naive sampling beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from posttrain.models.decoder import Decoder
    from posttrain.rollout.engine import NativeEngine
    from posttrain.rollout.types import Completion, SamplingParams


@pytest.fixture(scope="module")
def model() -> Decoder:
    from tests.tiny import tiny_model

    return tiny_model()


@pytest.fixture(scope="module")
def shared_engine(model: Decoder) -> NativeEngine:
    from tests.rollout.engines import make_engine

    return make_engine(model)


@pytest.fixture
def engine(shared_engine: NativeEngine, model: Decoder) -> Iterator[NativeEngine]:
    """4 slots; every test must leave all of them free."""
    shared_engine.update_weights(model, 0)
    yield shared_engine
    assert shared_engine.num_free == shared_engine.slots


@pytest.fixture(scope="module")
def naive(model: Decoder) -> Callable[[Sequence[int], SamplingParams], Completion]:
    from tests.rollout.engines import NaiveEngine

    return NaiveEngine(model).generate
