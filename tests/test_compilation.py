from __future__ import annotations

import os

import pytest
from jax._src import compiler

from tests import compilation

pytestmark = pytest.mark.fast


def options() -> dict[str, object]:
    return dict(compiler.get_compile_options(1, 1).env_option_overrides)


def test_programs_of_tests_are_compiled_quickly() -> None:
    assert options() == {} and compilation.QUICK in os.environ["XLA_FLAGS"]


@pytest.mark.optimized
def test_what_is_marked_is_compiled_as_for_a_run() -> None:
    assert options() == compilation.OPTIMIZED and compilation.QUICK not in os.environ["XLA_FLAGS"]
    assert os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "0"
