"""Compiled programs as figures: peak memory, collectives, kernels and the time to compile."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import jax

from posttrain.plan.hlo import ProgramText, kernel_names, read_program


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Figures of one compiled program, per device."""

    arguments: int
    temporaries: int
    peak: int
    """Bytes at the fullest moment, arguments included."""
    code: int
    """Bytes of the program itself."""
    text: ProgramText
    mosaic: tuple[str, ...]
    """Names of the Mosaic kernels."""
    flops: float
    """Operations by XLA's count, without Mosaic kernels; a loop's body counts once."""
    compile_s: float


def compile_program(lowered: jax.stages.Lowered, num_devices: int) -> Figures:
    """Compile and read a program. Raises jax.errors.JaxRuntimeError, such as RESOURCE_EXHAUSTED."""
    start = time.perf_counter()
    names = kernel_names(lowered.as_text())
    compiled = lowered.compile()
    memory: Any = compiled.memory_analysis()
    costs = compiled.cost_analysis() or {}
    return Figures(
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        peak=memory.peak_memory_in_bytes,
        code=memory.generated_code_size_in_bytes,
        text=read_program(compiled.as_text() or "", num_devices),
        mosaic=tuple(sorted(names)),
        flops=float(costs.get("flops", 0.0)),
        compile_s=time.perf_counter() - start,
    )
