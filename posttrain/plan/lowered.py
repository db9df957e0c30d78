"""Compiled programs as figures, kept in a cache: peak memory, collectives, kernels and the time to compile."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from posttrain.models.decoder import Decoder
from posttrain.models.names import TOWER
from posttrain.plan.hlo import Buffer, Collective, Large, ProgramText, kernel_names, read_program
from posttrain.plan.machine import EFFORT, LEVEL, Machine, libtpu_version
from posttrain.runtime.files import cache_folder
from posttrain.runtime.xla import Growth
from posttrain.weights.state import ModelWeights


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


def compile_program(
    lowered: jax.stages.Lowered, num_devices: int, *, num_slices: int = 1, for_cpu: bool = False
) -> Figures:
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
        text=read_program(compiled.as_text() or "", num_devices, num_slices),
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


def bytes_on_device(tree: object) -> int:
    """Bytes of shapes on one device."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize if x.sharding else x.size * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )


def sizes_of(weights: Mapping[Any, Any]) -> frozenset[tuple[int, ...]]:
    """Sizes of arrays and of single layers of them, whole and on one device, without those of 1."""
    whole = [x.shape for x in weights.values()]
    parts = [x.sharding.shard_shape(x.shape) for x in weights.values()]
    found = {tuple(size for size in shape if size > 1) for shape in [*whole, *parts]}
    return frozenset(found | {shape[1:] for shape in found if len(shape) > 2})


def total_parameters(model: Decoder) -> int:
    return sum(math.prod(shape) for _, _, shape in ModelWeights(model).shapes())


def active_parameters(model: Decoder) -> float:
    """Parameters that a token meets: of the experts of an MoE layer as many as it is routed to; no lookup table, and
    nothing of a vision tower, which meets images."""
    total = 0.0
    mixtures = model.config.mixtures
    share = mixtures[0].top_k / mixtures[0].num_experts if mixtures else 1.0
    for path, dims, shape in ModelWeights(model).shapes():
        if path.startswith(TOWER) or (path.startswith("embed.") and not model.config.tie_embeddings):
            continue
        total += math.prod(shape) * (share if "expert" in dims else 1.0)
    return total


NUM_LARGEST = 12
"""Buffers that are kept of a program."""


def figures_of(lowered: jax.stages.Lowered, machine: Machine, mesh: Mesh) -> Figures:
    """Figures of a program for devices in the order of the mesh, from the cache or by compiling it."""
    effort = f"{jax.config.values.get(EFFORT)} {jax.config.values.get(LEVEL)}"
    names = " ".join(field.name for kind in (Figures, ProgramText) for field in fields(kind))
    compiler = [
        names,
        machine.name,
        jax.__version__,
        libtpu_version() if machine.chip.platform == "tpu" else "",
        effort,
        str([device.id for device in mesh.devices.flat]),
    ]
    key = hashlib.sha256("\n".join([*compiler, lowered.as_text()]).encode()).hexdigest()
    file = cache_folder("plan") / f"{key}.json"
    if file.is_file():
        return _read(json.loads(file.read_text(encoding="utf-8")))
    for_cpu = machine.chip.platform == "cpu" or not machine.has_compiler
    found = compile_program(lowered, mesh.size, num_slices=machine.num_slices, for_cpu=for_cpu)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(_written(found)), encoding="utf-8")
    partial.rename(file)
    return found


def _written(figures: Figures) -> dict[str, Any]:
    written = asdict(figures)
    written["text"] = {
        "collectives": [asdict(c) for c in figures.text.collectives],
        "between": [asdict(c) for c in figures.text.between],
        "made": [asdict(large) for large in figures.text.largest(NUM_LARGEST)],
        "kernels": dict(figures.text.kernels),
        "cycles": list(figures.text.cycles.items()),
    }
    return written


def _read(written: dict[str, Any]) -> Figures:
    def buffer(given: dict[str, Any]) -> Buffer:
        return Buffer(given["dtype"], tuple(given["dims"]))

    def collective(c: dict[str, Any]) -> Collective:
        operands, results = (tuple(map(buffer, c[name])) for name in ("operands", "results"))
        return Collective(c["kind"], c["group"], operands, results, tuple(c["loops"]), c["op_name"])

    text = written["text"]
    collectives, between = ([*map(collective, text[name])] for name in ("collectives", "between"))
    made = [Large(buffer(x["buffer"]), x["op"], x["op_name"], tuple(x["loops"])) for x in text["made"]]
    cycles = Counter({tuple(loops): count for loops, count in text["cycles"]})
    read = ProgramText(collectives, made, Counter(text["kernels"]), cycles, between)
    return Figures(**{**written, "text": read, "mosaic": tuple(written["mosaic"])})
