"""Optimised HLO as text: collectives with the bytes that a device sends, trip counts of loops, kernels, buffers."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")

BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "f8e4m3fn": 8, "f8e5m2": 8} | {
    f"{kind}{bits}": bits for kind in "sufc" for bits in (8, 16, 32, 64, 128)
}
"""Bits of an element by HLO type."""

ASYNC_START = "AsyncCollectiveStart"

_TRANSFER = r'_xla_megascale_transfer_type="(\w+)"'
_SHAPE = re.compile(r"\b([a-z]+[0-9]+[a-z0-9]*|pred)\[([0-9,]*)\]")
_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*\(.*\)\s*->\s*.*\{\s*$")
_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT\s+)?%?([\w.\-]+)\s*=\s*(\(.*?\)|[a-z0-9]+\[[^\]]*\](?:\{[^}]*\})?)\s+([a-z][\w\-]*)\((.*)$"
)


@dataclass(frozen=True)
class Buffer:
    """Type and sizes of an array on one device."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return -(-math.prod(self.dims) * BITS[self.dtype] // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    type: str
    op: str
    line: str

    @property
    def results(self) -> list[Buffer]:
        return buffers(self.type)

    @property
    def op_name(self) -> str:
        """Name of the operation in JAX."""
        found = re.search(r'op_name="([^"]*)"', self.line)
        return found.group(1) if found else ""

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        return re.findall(r"%([\w.\-]+)", self.line.split(f" {self.op}(", 1)[1].split(")", 1)[0])

    @property
    def place(self) -> int:
        """Index of a `get-tuple-element`."""
        return int(re.findall(r"index=(\d+)", self.line)[-1])

    @property
    def cycles(self) -> int:
        """Cycles by the compiler's estimate; 0 where it has none, which it may write as a number near 2^63."""
        found = re.search(r'"estimated_cycles":"?(\d+)', self.line)
        cycles = int(found.group(1)) if found else 0
        return cycles if cycles < 10**15 else 0

    def called(self, attribute: str) -> list[str]:
        """Names of the computations that an attribute such as `body` or `calls` names."""
        found = re.search(attribute + r"=(?:\{([^}]*)\}|%?([\w.\-]+))", self.line)
        return re.findall(r"[\w.\-]+", found.group(1) or found.group(2)) if found else []


@dataclass(frozen=True)
class Collective:
    """A collective as often as the program runs it."""

    kind: str
    group: int
    """Devices that take part in one of them."""
    operands: tuple[Buffer, ...]
    results: tuple[Buffer, ...]
    loops: tuple[int | None, ...]
    """Trip counts of the loops around it, outermost first; None: known only at run time."""
    op_name: str

    @property
    def size(self) -> int:
        """Bytes of the result on a device."""
        return sum(x.bytes for x in self.results)

    @property
    def wire(self) -> float:
        """Bytes that a device sends on a ring for one execution."""
        share = (self.group - 1) / self.group
        factor = {"all-reduce": 2 * share, "reduce-scatter": self.group - 1.0, "collective-permute": 1.0}
        return self.size * factor.get(self.kind, share)

    @property
    def in_dynamic_loop(self) -> bool:
        return None in self.loops

    def executions(self, trips: Sequence[int] = ()) -> int:
        """Executions; `trips` are those of the loops whose count only the run knows, outermost first, by default 1."""
        given = iter(trips)
        return math.prod(next(given, 1) if loop is None else loop for loop in self.loops)

    @property
    def dims(self) -> list[tuple[int, ...]]:
        """Sizes of operands and results."""
        return [x.dims for x in (*self.operands, *self.results)]

    def __str__(self) -> str:
        shapes = ", ".join(map(str, self.results))
        where = "".join(f" x {'?' if loop is None else loop}" for loop in self.loops)
        return f"{self.kind} of {self.group}: {shapes}{where} ({self.op_name[-80:]})"


@dataclass(frozen=True)
class Large:
    """A buffer that an instruction makes, with the loops around it."""

    buffer: Buffer
    op: str
    op_name: str
    loops: tuple[int | None, ...]


@dataclass(frozen=True)
class ProgramText:
    """Reading of one compiled program."""

    collectives: list[Collective] = field(default_factory=list)
    made: list[Large] = field(default_factory=list)
    """Results of instructions outside of fusions."""
    kernels: Counter[str] = field(default_factory=Counter)
    """Custom calls by target."""
    cycles: Counter[tuple[int | None, ...]] = field(default_factory=Counter)
    """Cycles of one trip by the compiler's estimate, without Mosaic kernels, by the loops around them."""
    between: list[Collective] = field(default_factory=list)
    """Collectives between slices, of what one device sends for its part."""

    def wire(self, trips: Sequence[int] = ()) -> float:
        """Bytes that a device sends inside of its slice; `trips`: see `Collective.executions`."""
        return sum((c.wire * c.executions(trips) for c in self.collectives), 0.0)

    def wire_between(self, trips: Sequence[int] = ()) -> float:
        """Bytes that a device sends to other slices."""
        return sum((c.wire * c.executions(trips) for c in self.between), 0.0)

    def wire_by_kind(self, trips: Sequence[int] = ()) -> dict[str, float]:
        """Bytes that a device sends, by kind of collective."""
        totals: dict[str, float] = {}
        for c in self.collectives:
            totals[c.kind] = totals.get(c.kind, 0.0) + c.wire * c.executions(trips)
        return totals

    def largest(self, count: int) -> list[Large]:
        """Largest distinct buffers that the program makes."""
        by_shape: dict[str, Large] = {}
        for large in sorted(self.made, key=lambda made: -made.buffer.bytes):
            by_shape.setdefault(str(large.buffer), large)
        return list(by_shape.values())[:count]


def buffers(text: str) -> list[Buffer]:
    """Arrays in the text of a type, in order."""
    found = _SHAPE.findall(text)
    return [Buffer(dtype, tuple(int(d) for d in dims.split(",") if d)) for dtype, dims in found if dtype in BITS]


def read_program(text: str, num_devices: int, num_slices: int = 1) -> ProgramText:
    """Read `Compiled.as_text()` of a program on `num_devices` of `num_slices`."""
    computations, entry = _computations(text)
    reader = _Reader(computations, num_devices, num_slices)
    reader.walk(entry, (), "")
    return ProgramText(reader.collectives(), reader.made, reader.kernels, reader.cycles, reader.between)


def kernel_names(lowered: str) -> Counter[str]:
    """Mosaic kernels by name in StableHLO text (`Lowered.as_text()`)."""
    return Counter(re.findall(r'kernel_name\s*=\s*"([^"]+)"', lowered))


class _Reader:
    """Walk over the computations from the entry, with the loops around each."""

    def __init__(self, computations: Mapping[str, list[Instruction]], num_devices: int, num_slices: int):
        self._computations, self._num_devices, self._num_slices = computations, num_devices, num_slices
        self.between: list[Collective] = []
        self._found: list[tuple[Collective, str | None, bool]] = []
        self.made: list[Large] = []
        self.kernels: Counter[str] = Counter()
        self.cycles: Counter[tuple[int | None, ...]] = Counter()

    def walk(self, name: str, loops: tuple[int | None, ...], fusion: str) -> None:
        """Visit a computation; `fusion`: names of the fusion that it belongs to and of the computation of that."""
        instructions = self._computations.get(name, [])
        types = {i.name: i.results for i in instructions}
        starts = any(ASYNC_START in i.line for i in instructions if i.op == "custom-call")
        for i in instructions:
            kind = i.op.removesuffix("-start")
            if kind in KINDS:
                self._collective(i, kind, types, loops, fusion, starts)
            elif i.op == "send" and (transfer := re.search(_TRANSFER, i.line)):
                self._transfer(i, transfer.group(1).lower().replace("_", "-"), loops)
            elif i.op == "custom-call":
                target = re.search(r'custom_call_target="([^"]+)"', i.line)
                self.kernels[target.group(1) if target else "?"] += 1
            if not fusion and i.op not in ("parameter", "tuple", "get-tuple-element", "bitcast", "while", "constant"):
                self.made += [Large(x, i.op, i.op_name, loops) for x in i.results]
                self.cycles[loops] += i.cycles
            self._enter(i, loops, fusion)

    def _enter(self, i: Instruction, loops: tuple[int | None, ...], fusion: str) -> None:
        if i.op == "while":
            trips = self._trip_count(i)
            for inner in (*i.called("body"), *i.called("condition")):
                self.walk(inner, (*loops, trips), fusion)
        elif i.op == "conditional":
            for attribute in ("branch_computations", "true_computation", "false_computation"):
                for inner in i.called(attribute):
                    self.walk(inner, loops, fusion)
        elif i.op == "fusion":
            for inner in i.called("calls"):
                self.walk(inner, loops, fusion or f"{i.name} {inner}")
        elif i.op in ("call", "async-start"):
            for inner in (*i.called("calls"), *i.called("to_apply")):
                self.walk(inner, loops, fusion)

    def _collective(
        self,
        i: Instruction,
        kind: str,
        types: Mapping[str, list[Buffer]],
        loops: tuple[int | None, ...],
        fusion: str,
        starts: bool,
    ) -> None:
        group = self._group_size(i.line)
        if group == 1:
            return
        operands = [x for name in i.operands for x in types.get(name, [])]
        results = i.results
        if i.op.endswith("-start") and kind != "all-reduce":
            # (operands, results, counters)
            results = [x for x in results if x.dims][len(operands) :]
        if kind == "all-reduce" and "all-reduce-scatter" in fusion:
            kind, results = "reduce-scatter", [Buffer(x.dtype, _divided(x.dims, group)) for x in results]
        collective = Collective(kind, group, tuple(operands), tuple(results), loops, i.op_name)
        channel = re.search(r"channel_id=(\d+)", i.line)
        self._found.append((collective, channel.group(1) if channel else None, starts))

    def _transfer(self, i: Instruction, kind: str, loops: tuple[int | None, ...]) -> None:
        """A collective between slices, which the compiler has made of one over all devices: each sends its part."""
        sent, slices = i.results[0], self._num_slices
        dims = {"all-gather": (slices, *sent.dims), "reduce-scatter": _divided(sent.dims, slices)}.get(kind, sent.dims)
        kind = "collective-permute" if kind == "one-to-one" else kind
        self.between.append(Collective(kind, slices, (sent,), (Buffer(sent.dtype, dims),), loops, i.op_name))

    def collectives(self) -> list[Collective]:
        """Collectives, those once that the compiler split into an asynchronous start and pieces of one channel.

        Without a start a channel says nothing: all collectives of `jax.shard_map` have the same.
        """
        split = {(c.kind, channel) for c, channel, starts in self._found if starts}
        kept: dict[object, tuple[Collective, bool]] = {}
        for number, (collective, channel, starts) in enumerate(self._found):
            key: object = (collective.kind, channel) if (collective.kind, channel) in split else number
            before = kept.get(key)
            if before is None or (starts, collective.executions()) > (before[1], before[0].executions()):
                kept[key] = collective, starts
        return [collective for collective, _ in kept.values()]

    def _group_size(self, line: str) -> int:
        if found := re.search(r"replica_groups=\{\{([0-9,]+)\}", line):
            return len(found.group(1).split(","))
        if found := re.search(r"replica_groups=\[(\d+),(\d+)\]", line):
            return int(found.group(2))
        if found := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\([^)]*\)[^{]*)?\s*\{([^}]*)\}", line):
            sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found.group(1))}
            return math.prod(sizes[name] for name in re.findall(r"'([^']+)'", found.group(2)))
        pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", line)
        return 2 if pairs else self._num_devices

    def _trip_count(self, loop: Instruction) -> int | None:
        """Trip count that the compiler notes, or the one constant of a condition that only compares with it."""
        if found := re.search(r'known_trip_count[^0-9}]*"?(\d+)', loop.line):
            return int(found.group(1))
        inside = list(self._all_of(*loop.called("condition")))
        limits = [
            int(n) for i in inside if i.op == "constant" for n in re.findall(r"[su]32\[\].*constant\((\d+)\)", i.line)
        ]
        simple = not any(i.op in ("and", "or", "reduce", "all-reduce") for i in inside)
        if not simple or len(limits) != 1:
            return None
        return -(-limits[0] // self._step(loop, inside))

    def _step(self, loop: Instruction, condition: Sequence[Instruction]) -> int:
        """Increment of the counter in one trip: windowed products do two of their steps."""
        by_name = {i.name: i for i in condition}
        compared = [by_name.get(name) for i in condition if i.op == "compare" for name in i.operands]
        places = [i.place for i in compared if i is not None and i.op == "get-tuple-element"]
        body = {i.name: i for name in loop.called("body") for i in self._computations.get(name, [])}
        if len(places) != 1 or not body:
            return 1
        root = list(body.values())[-1]
        new = body.get(root.operands[places[0]]) if root.op == "tuple" else None
        step = 0
        while new is not None and new.op == "add":
            parts = [body[name] for name in new.operands if name in body]
            step += sum(int(n) for i in parts if i.op == "constant" for n in re.findall(r"constant\((\d+)\)", i.line))
            new = next((i for i in parts if i.op != "constant"), None)
        return max(1, step)

    def _all_of(self, *names: str) -> Iterator[Instruction]:
        for name in names:
            for i in self._computations.get(name, []):
                yield i
                yield from self._all_of(*i.called("calls"))


def _divided(dims: tuple[int, ...], group: int) -> tuple[int, ...]:
    """Sizes of one part of an array split over `group` devices."""
    place = next((n for n, size in enumerate(dims) if size % group == 0), None)
    return tuple(size // group if n == place else size for n, size in enumerate(dims))


def _computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Instructions of each computation by name, and the name of the entry."""
    found: dict[str, list[Instruction]] = {}
    current: list[Instruction] | None = None
    entry = ""
    for line in text.splitlines():
        if line == "}":
            current = None
        elif current is None:
            if header := _HEADER.match(line):
                current = found.setdefault(header.group(2), [])
                entry = header.group(2) if header.group(1) else entry
        # The metadata of a kernel goes on in lines that are not indented.
        elif match := _INSTRUCTION.match(line):
            current.append(Instruction(match.group(1), match.group(2), match.group(3), line))
    return found, entry
