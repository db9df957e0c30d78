"""The real TPU compiler, where it is installed: programs of slices that are not there are compiled, never run."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

REASON = "needs libtpu, TPU's compiler, in an environment of its own: see CONTRIBUTING.md, The TPU compiler"


@pytest.fixture(autouse=True, scope="session")
def tpu_compiler() -> Iterator[None]:
    """Skips without libtpu; compiles as for a run, each program anew: an entry of the cache cannot be read without
    a TPU."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip(REASON)
    import jax

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")
        jax.config.update("jax_enable_compilation_cache", False)
        yield
        jax.config.update("jax_enable_compilation_cache", True)
