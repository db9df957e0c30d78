from __future__ import annotations

import os
import subprocess
import sys

import pytest

from posttrain.cpu import compile_sooner

OWN = "--xla_backend_extra_options=xla_cpu_disable_slp_vectorizer"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", "--xla_backend_extra_options=xla_cpu_disable_loop_unrolling"),
        ("--xla_dump_to=a", "--xla_dump_to=a --xla_backend_extra_options=xla_cpu_disable_loop_unrolling"),
        (OWN, OWN),
    ],
)
def test_flags(flags: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    compile_sooner()
    compile_sooner()
    assert os.environ["XLA_FLAGS"] == expected


def test_programs_are_compiled_with_them() -> None:
    """jaxlib ends the process where it does not know a flag; whoever uses a model has it."""
    code = (
        "import os, posttrain.models.decoder, jax; jax.jit(lambda x: x + 1)(1.0); "
        "assert 'xla_cpu_disable_loop_unrolling' in os.environ['XLA_FLAGS']"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
