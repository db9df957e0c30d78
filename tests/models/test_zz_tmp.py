from __future__ import annotations
import pytest
from tests.models.goldens import *
@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def golden(request): return Golden(request.param)
class TestGoldens(GoldenChecks): ...
