"""Mixtures of experts of every family: goldens, other sizes against transformers, and what their files may say."""

from __future__ import annotations

import pytest

from tests.models.goldens import MIXTURES, Golden, GoldenChecks


@pytest.fixture(scope="module", params=MIXTURES)
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


class TestGoldens(GoldenChecks): ...
