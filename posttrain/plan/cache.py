"""Figures of compiled programs on disk, by their text, machine and compiler."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from dataclasses import asdict, fields
from typing import Any

import jax

from posttrain.plan.hlo import Buffer, Collective, Large, ProgramText
from posttrain.plan.lowered import Figures, compile_program
from posttrain.plan.machine import EFFORT, LEVEL, Machine, libtpu_version
from posttrain.runtime.files import cache_folder

NUM_LARGEST = 12
"""Buffers that are kept of a program."""


def figures_of(lowered: jax.stages.Lowered, machine: Machine) -> Figures:
    """Figures of a program, from the cache or by compiling it."""
    effort = f"{jax.config.values.get(EFFORT)} {jax.config.values.get(LEVEL)}"
    names = " ".join(field.name for field in fields(Figures))
    compiler = [
        names,
        machine.name,
        jax.__version__,
        libtpu_version() if machine.chip.platform == "tpu" else "",
        effort,
    ]
    key = hashlib.sha256("\n".join([*compiler, lowered.as_text()]).encode()).hexdigest()
    file = cache_folder("plan") / f"{key}.json"
    if file.is_file():
        return _read(json.loads(file.read_text(encoding="utf-8")))
    for_cpu = machine.chip.platform == "cpu" or not machine.has_compiler
    found = compile_program(lowered, machine.num_devices, for_cpu=for_cpu)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(_written(found)), encoding="utf-8")
    partial.rename(file)
    return found


def _written(figures: Figures) -> dict[str, Any]:
    written = asdict(figures)
    written["text"] = {
        "collectives": [asdict(c) for c in figures.text.collectives],
        "made": [asdict(large) for large in figures.text.largest(NUM_LARGEST)],
        "kernels": dict(figures.text.kernels),
    }
    return written


def _read(written: dict[str, Any]) -> Figures:
    def buffer(given: dict[str, Any]) -> Buffer:
        return Buffer(given["dtype"], tuple(given["dims"]))

    text = written["text"]
    collectives = [
        Collective(
            c["kind"],
            c["group"],
            tuple(map(buffer, c["operands"])),
            tuple(map(buffer, c["results"])),
            tuple(c["loops"]),
            c["op_name"],
        )
        for c in text["collectives"]
    ]
    made = [Large(buffer(x["buffer"]), x["op"], x["op_name"], tuple(x["loops"])) for x in text["made"]]
    read = ProgramText(collectives, made, Counter(text["kernels"]))
    return Figures(**{**written, "text": read, "mosaic": tuple(written["mosaic"])})
