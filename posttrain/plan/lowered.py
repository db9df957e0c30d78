"""Compiled programs as figures: peak memory, collectives, kernels and the time to compile."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from posttrain.plan.hlo import ProgramText, kernel_names, read_program
from posttrain.runtime.xla import Growth


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
    compiler: int
    """Bytes that the compiler held at most, in this process."""
    kept: int
    """Bytes that stay in this process while the program lives: its code, and what the compiler has loaded for it."""

    @property
    def made(self) -> int:
        """Bytes at the fullest moment beside the arguments: temporaries, and results in no donated argument."""
        return self.peak - self.arguments


def compile_program(lowered: jax.stages.Lowered, num_devices: int, *, for_cpu: bool = False) -> Figures:
    """Compile and read a program, `for_cpu` by XLA's compiler for CPU. Raises jax.errors.JaxRuntimeError, such as
    RESOURCE_EXHAUSTED."""
    if for_cpu:
        _load_compiler()
    start = time.perf_counter()
    names = kernel_names(lowered.as_text())
    with Growth() as growth:
        compiled = lowered.compile()
    memory: Any = compiled.memory_analysis()
    costs = compiled.cost_analysis() or {}
    return Figures(
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        peak=_sum_for_cpu(memory) if for_cpu else memory.peak_memory_in_bytes,
        code=memory.generated_code_size_in_bytes,
        text=read_program(compiled.as_text() or "", num_devices),
        mosaic=tuple(sorted(names)),
        flops=float(costs.get("flops", 0.0)),
        compile_s=time.perf_counter() - start,
        compiler=growth.highest,
        kept=growth.kept,
    )


def _sum_for_cpu(memory: Any) -> int:
    """Bytes of everything that a program has on CPU, which allocates its temporaries at once; the compiler's own peak
    leaves them out."""
    results: int = memory.output_size_in_bytes - memory.alias_size_in_bytes
    total: int = memory.argument_size_in_bytes + memory.temp_size_in_bytes + results
    return total


@cache
def _load_compiler() -> None:
    """Compile a small program, with which the process loads the compiler: no program's own memory."""
    jax.jit(lambda x: jnp.tanh(x @ x).sum()).lower(jax.ShapeDtypeStruct((8, 8), jnp.float32)).compile()
