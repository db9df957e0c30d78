from __future__ import annotations

import jax

from posttrain.cpu import compiled_sooner


def test_options_are_known_to_xla() -> None:
    """jaxlib refuses an option that it does not know; tests compile with less effort still, which stands."""
    assert compiled_sooner("cpu") is None and compiled_sooner("tpu") is None
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        options = compiled_sooner("cpu")
        assert options == {"xla_backend_optimization_level": 1} and compiled_sooner("gpu") is None
        assert jax.jit(lambda x: x + 1, compiler_options=options)(1) == 2
    finally:
        jax.config.update("jax_disable_most_optimizations", True)
