"""Plan of a stage and its report: memory, traffic, roofline times, price, largest buffers with the field for each, the
parts of a process on CPU, and planned beside measured."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from posttrain.models.decoder import Decoder
from posttrain.plan.hlo import Collective, Large
from posttrain.plan.lowered import Figures
from posttrain.plan.machine import GIB, PRICES_OF, Machine
from posttrain.train.checkpoint import FILE_BYTES

MIB = 2**20
NUM_LARGEST = 3


OPTIMIZER, REFERENCE, CACHE, COPY = "optimizer state", "reference", "cache", "weights of the sampler"
WEIGHTS, CRITIC, CRITIC_OPTIMIZER = "weights of the actor", "critic", "optimizer state of the critic"
TEACHERS, QUANTIZED, REWARD_MODELS = "teachers", "weights quantized or merged", "reward models"
DRAFT, DRAFT_CACHE = "draft model", "cache of the draft model"
DRAFTER, DRAFTER_OPTIMIZER = "drafter", "optimizer state of the drafter"
"""Names of what roles hold."""
UPDATE, STATISTICS, VALUES, LAYOUT, PREFILL, DECODE = "update", "statistics", "values", "layout", "prefill", "decode"
EVALUATION, SYNC, COPYING, DRAFTED = "evaluation", "sync", "copy", "decode with drafts"
SCORES, REWARDS, ENCODE = "scores", "rewards", "encode"


@dataclass(frozen=True, kw_only=True)
class Roles:
    """Models of a stage beside the one that it trains, each with its devices, and the engine's devices."""

    rollout: Mesh | None = None
    """None: the trainer's."""
    reference: tuple[Decoder, Mesh] | None = None
    """Reference with all of its weights; None: none, or one that shares what is not trained."""
    critic: tuple[Decoder, Mesh] | None = None
    teachers: Sequence[Decoder] = ()
    """Those in the training step."""
    scorers: Sequence[tuple[Decoder, Mesh]] = ()
    """Teachers outside of it, on this machine."""
    draft: Decoder | None = None
    """Draft model of the engine."""
    drafter: Decoder | None = None
    """Trained model with the block drafter beside it that learns along."""
    rewards: Sequence[Decoder] = ()
    """Reward models, on the trainer's devices."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """Arrays that a role holds from phase to phase, in bytes on each of its devices."""

    name: str
    mesh: Mesh
    size: int
    only_in: Sequence[str] | None = None
    """Phases in which they are on the devices; None: all."""


def beside(held: Sequence[Held], mesh: Mesh, phase: str, *own: str) -> dict[str, int]:
    """Bytes of what lies on devices in a phase, without its `own`, by name."""
    devices = set(mesh.devices.flat)
    there = [h for h in held if h.name not in own and devices & set(h.mesh.devices.flat)]
    sizes: Counter[str] = Counter()
    for h in there:
        sizes[h.name] += h.size if h.only_in is None or phase in h.only_in else 0
    return {name: size for name, size in sizes.items() if size}


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One program of a stage, and its work in a step on one device."""

    role: str
    name: str
    lower: Callable[[], jax.stages.Lowered]
    runs: int | float
    """Runs of the program in one step, the mean of all; of a decode dispatch, tokens per row."""
    trips: tuple[int, ...]
    """Trips of its loops that only the run knows, outermost first, at most."""
    flops: float
    """Operations of one run: 2 per parameter and token, 6 with the backward pass, and those of recomputation."""
    tower: float = 0.0
    """Operations of the vision tower among them."""
    read: float
    """Bytes that one run reads at least: weights, and the cache in decoding."""
    parameters: frozenset[tuple[int, ...]]
    """Sizes of parameters, whole and on one device, without those of 1."""
    mesh: Mesh
    """Devices of the role."""
    beside: Mapping[str, int]
    """Bytes of what else is in their memory, by name: optimizer state, cache, other models."""
    own: Mapping[str, int]
    """Bytes of its arrays that are there before it, by name, but for inputs."""

    @property
    def held(self) -> int:
        """Bytes on a device before the program has made anything."""
        return sum(self.own.values()) + self.bytes_beside

    @property
    def bytes_beside(self) -> int:
        return sum(self.beside.values())


@dataclass(frozen=True, kw_only=True)
class Move:
    """Transfer of arrays in every step, in bytes of one device."""

    name: str
    size: int
    times: int = 1
    by: Literal["host", "wire"]
    """Link of the device that it takes: to its host, or to other devices."""
    phase: str
    """Phase that waits for it."""


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """Phases of one stage, the tokens that a step trains on, and the arrays that lie on a device."""

    phases: Sequence[Phase]
    tokens: int
    unit: str
    state: int
    """Bytes of what a checkpoint holds: trained parameters and optimizer state."""
    largest: int
    """Bytes of the largest array among them."""
    saves_between: bool
    """True if a checkpoint is written while training goes on."""
    rounds_at_once: bool
    """True if the optimizer gets all gradients at once, and rounds its state so."""
    made: int = 0
    """Bytes of weights that are made anew for sampling."""
    elsewhere: int = 0
    """Bytes, on all devices, of what roles hold that is not on the trainer's devices in an update: offloaded, on
    devices of their own, or a cache that is given up."""
    sampler_programs: int = 0
    """Number of programs that the rollout engine compiles; 0: no engine."""
    moves: Sequence[Move] = ()
    overlaps: bool = False
    """True if samples are made on devices of their own while the trainer learns."""
    not_counted: Sequence[str] = ()
    """Memory and time that are in no phase, in words."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A phase compiled for a machine."""

    phase: Phase
    figures: Figures
    machine: Machine

    @property
    def peak(self) -> int:
        """Bytes in memory at the fullest moment, with what lies beside the program."""
        return self.figures.peak + self.phase.bytes_beside + self.unused

    @property
    def unused(self) -> int:
        """Bytes of its role's arrays that the program does not take, as a prefill that samples nothing the head."""
        return max(0, sum(self.phase.own.values()) - self.figures.arguments)

    def made_on_all(self, more: int = 0) -> int:
        """Bytes on all devices of what the program makes, and of `more` on each."""
        return self.phase.mesh.size * (self.figures.made + more)

    @property
    def fits(self) -> bool:
        return self.peak <= self.machine.chip.memory

    @property
    def wire(self) -> float:
        """Bytes that a device sends inside of its slice in one run; of decoding, per token."""
        return self._sent(self.figures.text.collectives)

    @property
    def between(self) -> float:
        """Bytes that a device sends to other slices in one run; of decoding, per token."""
        return self._sent(self.figures.text.between)

    def _sent(self, collectives: Sequence[Collective]) -> float:
        if self.phase.name != "decode":
            return sum((c.wire * c.executions(self.phase.trips) for c in collectives), 0.0)
        return sum((c.wire * c.executions() for c in collectives if c.in_dynamic_loop), 0.0)

    @property
    def seconds(self) -> dict[str, float]:
        """Lower bounds of one run by what limits it."""
        chip = self.machine.chip
        return {
            "compute": self.phase.flops / chip.flops,
            "memory": self.phase.read / chip.memory_bandwidth,
            "network": self.wire / chip.wire,
            **({"network between slices": self.between / chip.between} if self.between else {}),
        }

    @property
    def step_seconds(self) -> float:
        return max(self.seconds.values()) * self.phase.runs


def report(plan: StagePlan, outcomes: Sequence[Outcome], machine: Machine) -> Iterator[str]:
    """Lines on the phases of a stage."""
    several = machine.num_slices > 1
    rows = [
        ("phase", "peak", "arguments", "wire", *["between slices"] * several, "step at least", "limited by", "kernels")
    ]
    for outcome in outcomes:
        limit = max(outcome.seconds, key=lambda name: outcome.seconds[name])
        per = "token" if outcome.phase.name == "decode" else "run"
        rows.append(
            (
                f"{outcome.phase.role}: {outcome.phase.name}",
                in_units(outcome.peak) + ("" if outcome.fits else " TOO MUCH"),
                in_units(outcome.figures.arguments),
                f"{in_units(outcome.wire)} a {per}",
                *[f"{in_units(outcome.between)} a {per}" if machine.has_compiler else "not known"] * several,
                f"{outcome.step_seconds:.3g} s",
                limit,
                ", ".join(outcome.figures.mosaic) or "none",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)]
        yield "  " + "  ".join([*cells, row[-1]])
    yield from _on_own_devices(outcomes)
    for move in plan.moves:
        yield f"  {move.name}: {in_units(move.times * move.size)} a step, {move_seconds(move, machine):.3g} s at least"
    for name in plan.not_counted:
        yield f"  not counted: {name}"
    seconds = step_seconds(plan, outcomes, machine)
    rate = plan.tokens / seconds
    line = f"  a step takes {seconds:.3g} s at least: at most {rate:,.0f} {plan.unit} per second"
    if machine.chip.dollars_per_hour is not None:
        price = machine.chip.dollars_per_hour * machine.num_devices / 3600 / rate * 1e6
        line += f", ${price:.3g} per million at {machine.chip.dollars_per_hour:.2f} a chip and hour ({PRICES_OF})"
    yield line
    if plan.rounds_at_once:
        yield "  the optimizer gets all gradients at once; set optimizer.elementwise if it has each element alone"
    fullest = max(outcomes, key=lambda outcome: outcome.peak)
    yield f"  largest buffers of {fullest.phase.name}, per device:"
    for name, size, knob in largest(fullest):
        yield f"    {in_units(size)}  {name}: {knob}"


def move_seconds(move: Move, machine: Machine) -> float:
    return move.times * move.size / {"host": machine.chip.host, "wire": machine.chip.wire}[move.by]


def step_seconds(plan: StagePlan, outcomes: Sequence[Outcome], machine: Machine) -> float:
    """Seconds of a step at least; the longer half of one that samples ahead on other devices."""
    seconds = {True: 0.0, False: sum(move_seconds(move, machine) for move in plan.moves)}
    for outcome in outcomes:
        if outcome.phase.name != EVALUATION:
            seconds[outcome.phase.role == "sampler"] += outcome.step_seconds
    return max(seconds.values()) if plan.overlaps else sum(seconds.values())


def _on_own_devices(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Line for each group of devices on its fullest phase, if there are several."""
    groups: dict[frozenset[Any], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(frozenset(outcome.phase.mesh.devices.flat), []).append(outcome)
    for devices, there in groups.items() if len(groups) > 1 else ():
        fullest = max(there, key=lambda outcome: outcome.peak)
        roles = " and ".join(dict.fromkeys(outcome.phase.role for outcome in there))
        verdict = "fits" if fullest.fits else "DOES NOT FIT"
        of = f"{in_units(fullest.peak)} of {in_units(fullest.machine.chip.memory)} in {fullest.phase.name}"
        yield f"  {len(devices)} device{'s' * (len(devices) > 1)} of {roles}: {of}, {verdict}"


def largest(outcome: Outcome) -> list[tuple[str, int, str]]:
    """Three largest consumers of memory in a phase, with the field that makes each smaller."""
    phase, figures = outcome.phase, outcome.figures
    found = [(f"{made.buffer} ({made.op})", made.buffer.bytes, _knob(phase, made)) for made in figures.text.largest(12)]
    held = "weights, optimizer state and inputs" if phase.name == "update" else "weights, cache and inputs"
    by_size = "a larger mesh.fsdp, model.lora, model.quantize"
    if phase.name == "update":
        by_size = f"optimizer.moments, optimizer.stochastic_rounding, {by_size}"
    found.append((held, figures.arguments, by_size if phase.role == "trainer" else f"{by_size}, rollout.slots"))
    found += [(f"{name}, beside the program", size, knob_of(name)) for name, size in phase.beside.items()]
    return sorted(found, key=lambda each: -each[1])[:NUM_LARGEST]


def knob_of(name: str) -> str:
    """Fields that make what a role holds smaller."""
    fields = {
        CACHE: "rollout.slots, rollout.cache_tokens",
        OPTIMIZER: "placement.optimizer.offload, optimizer.moments, model.lora",
        REFERENCE: "placement.reference, model.lora with reference.model=base",
        CRITIC_OPTIMIZER: "placement.critic, algorithm.critic.optimizer.moments",
        CRITIC: "placement.critic.devices",
        TEACHERS: "teachers.N.quantize, a larger mesh.fsdp",
        REWARD_MODELS: "rewards.N.model, a larger mesh.fsdp",
        DRAFT: "rollout.speculative",
        DRAFTER_OPTIMIZER: "rollout.speculative.optimizer.moments",
        DRAFT_CACHE: "rollout.speculative, rollout.slots, rollout.cache_tokens",
    }
    return fields.get(name, "a larger mesh.fsdp, model.lora, model.quantize")


def _knob(phase: Phase, made: Large) -> str:
    dims = tuple(size for size in made.buffer.dims if size > 1)
    if dims in phase.parameters:
        if phase.name == "update" and made.buffer.dtype == "f32":
            return "a moment, a master weight or a gradient; optimizer.moments, model.lora, a larger mesh.fsdp"
        return "a weight; a larger mesh.tensor or mesh.fsdp, model.quantize"
    if phase.role == "sampler":
        return "the cache; rollout.slots, row_tokens" if len(made.buffer.dims) >= 5 else "rollout.slots"
    return "an activation; micro_batch_rows, model.remat, row_tokens"


def in_units(count: int | float) -> str:
    """Bytes in the unit that suits them."""
    for unit, scale in (("GiB", GIB), ("MiB", MIB), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:,.2f} {unit}"
    return f"{count:.0f} B"


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Row of a table of planned beside measured; None: not known."""

    name: str
    planned_s: float | None = None
    """Lower bound of the seconds in a step."""
    measured_s: float | None = None
    """Median of the steps in which nothing was compiled."""
    measured_by: str = ""
    """Metrics of the seconds."""
    planned_bytes: int | None = None
    """Peak of a device, or of the process."""
    measured_bytes: float | None = None
    memory_note: str = ""
    """Why there is no measured peak, and what is known of it."""

    def record(self) -> dict[str, Any]:
        ratios = {"ratio_s": ratio(self.measured_s, self.planned_s)}
        return {**asdict(self), **ratios, "ratio_bytes": ratio(self.measured_bytes, self.planned_bytes)}

    def cells(self) -> tuple[str, ...]:
        def times(value: float | None) -> str:
            return "-" if value is None else f"{value:.3g}"

        planned, measured = (None if x is None else in_units(x) for x in (self.planned_bytes, self.measured_bytes))
        found = self.record()
        return (
            *(self.name, times(self.planned_s), times(self.measured_s), times(found["ratio_s"]), planned or "-"),
            *(measured or self.memory_note or "-", times(found["ratio_bytes"]), self.measured_by or "-"),
        )


def ratio(measured: float | None, planned: float | int | None) -> float | None:
    return measured / planned if measured is not None and planned else None


HEADS = ("phase", "at least, s", "measured, s", "ratio", "peak", "measured", "ratio", "seconds by")


@dataclass(frozen=True, kw_only=True)
class StageBeside:
    """Planned beside measured of one stage of a run."""

    name: str
    machine: str
    devices: Sequence[Mapping[str, Any]]
    """Devices of the calls of the run."""
    steps: int
    """Steps that count: those in which nothing was compiled, or all if something was in each."""
    compiled: bool
    """True if something was compiled in each step."""
    rows: Sequence[Beside]
    notes: Sequence[str]
    """Lines on what is not measured or not planned."""

    def record(self) -> dict[str, Any]:
        return {**vars(self), "rows": [row.record() for row in self.rows]}

    def lines(self) -> Iterator[str]:
        on = ", then ".join(f"{one['number']} x {one['kind']}" for one in self.devices) or "devices that are not known"
        counted = f"{self.steps} steps" + (", each with a compilation" if self.compiled else " without a compilation")
        yield f"{self.name}: planned for {self.machine}; measured on {on}, medians of {counted}"
        table = [HEADS, *(row.cells() for row in self.rows)]
        widths = [max(len(row[column]) for row in table) for column in range(len(HEADS))]
        for row in table:
            yield "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        yield from (f"  {note}" for note in self.notes)


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


def moments(stage: StagePlan, outcomes: Sequence[Outcome], loading: Figures | int) -> list[Moment]:
    """Moments that can be the fullest. `loading`: program that draws the weights, or bytes that reading them takes."""
    update = next(o for o in outcomes if (o.phase.role, o.phase.name) == ("trainer", UPDATE))
    num_devices = update.phase.mesh.size
    trainer = [outcome for outcome in outcomes if outcome.phase.role != "sampler"]
    layouts = [outcome for outcome in outcomes if outcome.phase.name == LAYOUT]
    sampler = [o for o in outcomes if o.phase.role == "sampler" and o.phase.name != LAYOUT]
    package = {"Python, JAX and the package": SMALLEST[bool(sampler)]}
    kept = sum(one.figures.kept for one in (*trainer, *layouts))
    kept += _kept_of_sampler([one.figures for one in sampler], stage.sampler_programs)
    programs = {"programs": kept}
    held = {
        "weights, optimizer state and batch": num_devices * update.figures.arguments,
        # On CPU what is given up stays with the process, and the host's memory is the devices'.
        "other models and cache": num_devices * update.phase.bytes_beside + stage.elsewhere,
    }
    # Memory that a program has freed stays with the process until the next checkpoint (`trim_host_memory`), for the
    # programs of the same thread: those of the trainer share it, and the engine, in its own thread, has other memory.
    working = {
        "temporaries of the trainer": max(
            [one.made_on_all() for one in trainer]
            # A copy on its way to the host's memory, which is the devices'.
            + [num_devices * move.size for move in stage.moves if move.by == "host"]
        ),
        "weights and temporaries of the sampler": max(
            [one.made_on_all(stage.made) for one in sampler] + [one.made_on_all() for one in layouts], default=0
        ),
    }
    writing = {"files being written": _written(stage, num_devices)}
    compilers = [one.figures.compiler for one in (*trainer, *layouts, *sampler)]
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
