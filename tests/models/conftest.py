from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def highest_precision() -> Iterator[None]:
    # Here, because the suite's settings count only before the first import of JAX.
    import jax

    with jax.default_matmul_precision("highest"):
        yield
