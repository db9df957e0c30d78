"""Memory of the process of a run on CPU devices: its fullest moment, in parts that each have a reason."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from posttrain.plan.lowered import Figures
from posttrain.plan.phases import StagePlan
from posttrain.plan.report import Outcome, in_units
from posttrain.train.checkpoint import FILE_BYTES

SMALLEST = {False: 447 << 20, True: 581 << 20}
"""Bytes of the process of the smallest run, without and with a rollout engine: Python, JAX, its compiler and the
package. Measured by `bench/plan.py --smallest` with jax 0.10.2 on x86; a new release moves it."""
FILES_IN_FLIGHT = 4
"""Files of a checkpoint that are full and not yet on disk."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Moment of a run, with the bytes of what the process holds then."""

    name: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def moments(stage: StagePlan, outcomes: Sequence[Outcome], loading: Figures | int, num_devices: int) -> list[Moment]:
    """Moments that can be the fullest. `loading`: program that draws the weights, or bytes that reading them takes."""
    update = next(outcome for outcome in outcomes if outcome.phase.name == "update")
    trainer = [outcome.figures for outcome in outcomes if outcome.phase.role == "trainer"]
    sampler = [outcome.figures for outcome in outcomes if outcome.phase.role == "sampler"]
    package = {"Python, JAX and the package": SMALLEST[bool(sampler)]}
    programs = {"programs": sum(one.kept for one in trainer) + _kept_of_sampler(sampler, stage.sampler_programs)}
    held = {
        "weights, optimizer state and batch": num_devices * update.figures.arguments,
        "reference and cache": num_devices * update.phase.beside,
    }
    # Memory that a program has freed stays with the process until the next checkpoint (`trim_host_memory`), for the
    # programs of the same thread: those of the trainer share it, and the engine, in its own thread, has other memory.
    working = {
        "temporaries of the trainer": num_devices * max(one.made for one in trainer),
        "weights and temporaries of the sampler": num_devices
        * (stage.made + max((one.made for one in sampler), default=0)),
    }
    writing = {"files being written": _written(stage, num_devices)}
    compilers = [one.compiler for one in (*trainer, *sampler)]
    # An update cannot write over arrays that a checkpoint is still reading.
    copied = {"state being saved": num_devices * stage.state, **writing} if stage.saves_between else {}
    return [
        _loading(package, loading, num_devices),
        Moment(name="compiling", parts={**package, **held, "compiler": max(compilers)}),
        Moment(name="training", parts={**package, **programs, **held, **working, **copied}),
        Moment(name="saving", parts={**package, **programs, **held, **writing}),
    ]


def _loading(package: Mapping[str, int], loading: Figures | int, num_devices: int) -> Moment:
    if isinstance(loading, int):
        return Moment(name="loading", parts={**package, "weights": num_devices * loading})
    drawn = {"weights and their random numbers": num_devices * loading.peak}
    return Moment(name="loading", parts={**package, **drawn})


def _kept_of_sampler(sampler: Sequence[Figures], count: int) -> int:
    """Bytes of all programs of the engine, of which the largest are planned."""
    return sum(one.kept for one in sampler) * count // max(1, len(sampler))


def _written(stage: StagePlan, num_devices: int) -> int:
    """Bytes of a checkpoint that are compressed and not yet on disk: an array for each core, and files on the way."""
    each = (os.cpu_count() or 1) * stage.largest + FILES_IN_FLIGHT * FILE_BYTES
    return min(num_devices * stage.state, each)


def report_process(found: Sequence[Moment]) -> Iterator[str]:
    """Lines on the fullest moment of a process."""
    fullest = max(found, key=lambda moment: moment.total)
    yield f"  peak of the process: about {in_units(fullest.total)}, in {fullest.name}:"
    for name, size in sorted(fullest.parts.items(), key=lambda part: -part[1]):
        if size:
            yield f"    {in_units(size)}  {name}"
