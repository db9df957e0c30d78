from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def _highest_precision() -> Iterator[None]:
    with jax.default_matmul_precision("highest"):
        yield
