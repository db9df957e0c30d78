"""Report of a plan: memory, traffic, roofline times, price, and the largest buffers with the field for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from posttrain.plan.hlo import Large
from posttrain.plan.lowered import Figures
from posttrain.plan.machine import GIB, PRICES_OF, Machine
from posttrain.plan.phases import Phase, StagePlan

MIB = 2**20
NUM_LARGEST = 3


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A phase compiled for a machine."""

    phase: Phase
    figures: Figures
    machine: Machine

    @property
    def peak(self) -> int:
        """Bytes in memory at the fullest moment, with what lies beside the program."""
        return self.figures.peak + self.phase.beside

    @property
    def fits(self) -> bool:
        return self.peak <= self.machine.chip.memory

    @property
    def wire(self) -> float:
        """Bytes that a device sends in one run; of decoding, per token."""
        if self.phase.name != "decode":
            return self.figures.text.wire(self.phase.trips)
        return sum((c.wire * c.executions() for c in self.figures.text.collectives if c.in_dynamic_loop), 0.0)

    @property
    def seconds(self) -> dict[str, float]:
        """Lower bounds of one run by what limits it."""
        chip = self.machine.chip
        return {
            "compute": self.phase.flops / chip.flops,
            "memory": self.phase.read / chip.memory_bandwidth,
            "network": self.wire / chip.wire,
        }

    @property
    def step_seconds(self) -> float:
        return max(self.seconds.values()) * self.phase.runs


def report(plan: StagePlan, outcomes: Sequence[Outcome], machine: Machine) -> Iterator[str]:
    """Lines on the phases of a stage."""
    rows = [("phase", "peak", "arguments", "wire", "step at least", "limited by", "kernels")]
    for outcome in outcomes:
        limit = max(outcome.seconds, key=lambda name: outcome.seconds[name])
        per = "token" if outcome.phase.name == "decode" else "run"
        rows.append(
            (
                f"{outcome.phase.role}: {outcome.phase.name}",
                in_units(outcome.peak) + ("" if outcome.fits else " TOO MUCH"),
                in_units(outcome.figures.arguments),
                f"{in_units(outcome.wire)} a {per}",
                f"{outcome.step_seconds:.3g} s",
                limit,
                ", ".join(outcome.figures.mosaic) or "none",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)]
        yield "  " + "  ".join([*cells, row[-1]])
    seconds = sum(outcome.step_seconds for outcome in outcomes if outcome.phase.name != "evaluation")
    rate = plan.tokens / seconds
    line = f"  a step takes {seconds:.3g} s at least: at most {rate:,.0f} {plan.unit} per second"
    if machine.chip.dollars_per_hour is not None:
        price = machine.chip.dollars_per_hour * machine.num_devices / 3600 / rate * 1e6
        line += f", ${price:.3g} per million at {machine.chip.dollars_per_hour:.2f} a chip and hour ({PRICES_OF})"
    yield line
    fullest = max(outcomes, key=lambda outcome: outcome.peak)
    yield f"  largest buffers of {fullest.phase.name}, per device:"
    for name, size, knob in largest(fullest):
        yield f"    {in_units(size)}  {name}: {knob}"


def largest(outcome: Outcome) -> list[tuple[str, int, str]]:
    """Three largest consumers of memory in a phase, with the field that makes each smaller."""
    phase, figures = outcome.phase, outcome.figures
    found = [(f"{made.buffer} ({made.op})", made.buffer.bytes, _knob(phase, made)) for made in figures.text.largest(12)]
    held = "weights, optimizer state and inputs" if phase.name == "update" else "weights, cache and inputs"
    by_size = "a larger mesh.fsdp, model.lora, model.quantize"
    if phase.name == "update":
        by_size = f"optimizer.moments, optimizer.stochastic_rounding, {by_size}"
    found.append((held, figures.arguments, by_size if phase.role == "trainer" else f"{by_size}, rollout.slots"))
    if phase.beside:
        beside = "cache and reference" if phase.name == "update" else "optimizer state, reference or cache"
        found.append((f"{beside}, beside the program", phase.beside, "rollout.slots, rollout.cache_tokens, model.lora"))
    return sorted(found, key=lambda each: -each[1])[:NUM_LARGEST]


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
