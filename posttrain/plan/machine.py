"""Machines by name, such as `v5e-8`: chips with their limits, and devices to compile for that need not be there."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.errors import ConfigError
from posttrain.kernels.platform import CHIPS, Chip

GIB = 2**30

TPU_SETTINGS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_MIN_LOG_LEVEL": "2",
}
"""Environment of libtpu as a compiler, on a machine without a TPU."""

PRICES_OF = "2025-06"
"""Month of the prices below: list prices on demand in US regions; they change, and reservations cost about half."""


FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
CUBES = {8: "2x2x1", 16: "2x2x2", 32: "2x2x4", 64: "2x4x4", 128: "4x4x4", 256: "4x4x8"}

SLICES = {
    f"{kind}-{number}": shape
    for kind, shapes in {"v5e": FLAT, "v6e": FLAT, "v5p": CUBES}.items()
    for number, shape in shapes.items()
}
"""TPU slices by Google's names, with their topology; a v5p is named by its cores, two a chip."""


CHIPS_PER_HOST, GPUS_PER_HOST = 4, 8
MAX_SLICES = 16
ONE_HOST = {"v5e": 8, "v6e": 8, "v5p": 4}
"""Most chips of a TPU slice with a single host."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A number of chips to compile for."""

    name: str
    """Name of a slice where there are several."""
    chip: Chip
    num_devices: int
    num_slices: int = 1

    @property
    def num_hosts(self) -> int:
        """Number of hosts, with a process each: TPU slices of more than one host have four chips to each."""
        if self.chip.platform == "tpu":
            single, size = ONE_HOST[self.name.split("-")[0]], self.num_devices // self.num_slices
            return self.num_slices * (1 if size <= single else size // CHIPS_PER_HOST)
        return -(-self.num_devices // GPUS_PER_HOST) if self.chip.platform == "gpu" else 1

    @property
    def has_compiler(self) -> bool:
        """True if programs are compiled by the machine's own compiler, else by XLA for virtual CPU devices."""
        return self.chip.platform == "cpu" or (self.chip.platform == "tpu" and has_libtpu())

    def devices(self) -> Sequence[Any]:
        """Devices to lower and compile for: a TPU topology where libtpu is installed, else virtual CPU devices.

        Raises ConfigError if JAX has too few of these (`prepare_process` sets their number).
        """
        if self.chip.platform == "tpu" and has_libtpu():
            return topology_devices(self.name.split("-")[0], SLICES[self.name], self.num_slices)
        import jax

        found = jax.devices("cpu")
        if len(found) < self.num_devices:
            raise ConfigError(f"{self.name}: needs {self.num_devices} virtual CPU devices, JAX has {len(found)}")
        return found[: self.num_devices]

    def part(self, devices: Sequence[Any]) -> Sequence[Any]:
        """Devices to compile for in place of a part of them: TPU's compiler aborts for some parts of a slice, so that
        each stands as a slice of its own. ConfigError where there is none of that size."""
        if len(devices) == self.num_devices or self.chip.platform != "tpu" or not has_libtpu():
            return devices
        kind = self.name.split("-")[0]
        shapes = {math.prod(map(int, x.split("x"))): x for name, x in SLICES.items() if name.startswith(f"{kind}-")}
        if self.num_slices > 1 or len(devices) not in shapes:
            raise ConfigError(
                f"plan: {len(devices)} of the {self.num_devices} devices of {self.name} are no slice of their own; "
                f"plan with roles on {', '.join(map(str, shapes))} devices of one slice"
            )
        return topology_devices(kind, shapes[len(devices)])


def machine(name: str) -> Machine:
    """Resolve a name such as `v5e-8`, `2xv5e-16`, `h100-8` or `cpu-8`. Raises ConfigError for an unknown one."""
    found = re.fullmatch(r"(?:(\d+)x)?(([a-z0-9]+)-(\d+))", name)
    slices, one, kind, number = found.groups() if found else (None, "", "", "0")
    if kind in ("h100", "h200", "cpu") and slices is None and 1 <= int(number) <= 256:
        return Machine(name=name, chip=CHIPS[kind], num_devices=int(number))
    if one in SLICES and 1 <= (num_slices := int(slices or 1)) <= MAX_SLICES:
        count = num_slices * math.prod(map(int, SLICES[one].split("x")))
        return Machine(name=one, chip=CHIPS[kind], num_devices=count, num_slices=num_slices)
    several = f"2xv5e-16 (two slices, at most {MAX_SLICES})"
    raise ConfigError(f"machine {name!r} is unknown; use {', '.join(SLICES)}, {several}, h100-N, h200-N or cpu-N")


def machine_of(kind: str, platform: str, number: int, slices: int = 1) -> str | None:
    """Name of a machine with devices of a kind as JAX has it, such as `v5e-8`; None for one that has no plan."""
    if platform != "tpu":
        name = next((name for name in ("h100", "h200") if name in kind.lower()), "cpu" if platform == "cpu" else None)
        return None if name is None else f"{name}-{number}"
    chip = next((name for name, chip in CHIPS.items() if kind in chip.kinds), None)
    sizes = {name: math.prod(map(int, shape.split("x"))) for name, shape in SLICES.items()}
    found = (name for name, size in sizes.items() if name.split("-")[0] == chip and size * slices == number)
    name = next(found, None)
    return name if name is None or slices == 1 else f"{slices}x{name}"


def has_libtpu() -> bool:
    return importlib.util.find_spec("libtpu") is not None


def libtpu_version() -> str:
    """Version of the installed libtpu; empty without."""
    return importlib.metadata.version("libtpu") if has_libtpu() else ""


def topology_devices(kind: str, shape: str, slices: int = 1) -> Sequence[Any]:
    """Devices of TPU slices that are not there, such as `2x4` of `v5e`."""
    for key, value in TPU_SETTINGS.items():
        os.environ.setdefault(key, value)
    from jax.experimental import topologies

    wanted: dict[str, Any] = {"chips_per_host_bounds": (1, 1, 1)} if shape == "1x1" else {}
    wanted |= {"num_slices": slices} if slices > 1 else {}
    return topologies.get_topology_desc(topology_name=f"{kind}:{shape}", platform="tpu", **wanted).devices


EFFORT, LEVEL = "jax_exec_time_optimization_effort", "jax_optimization_level"
"""Settings of JAX for how much a compiler optimizes."""


def prepare_process(wanted: Machine, *, quick: bool) -> None:
    """Set up JAX, before its first use, to compile for a machine: no TPU or GPU of this one is touched.

    `quick`: without the passes that take long; memory differs by some percent, and more is sent.
    """
    import jax

    jax.config.update("jax_platforms", "cpu")
    if quick:
        # Since jax 0.12 a level has taken the place of the effort.
        setting = (EFFORT, -1.0) if EFFORT in jax.config.values else (LEVEL, "O1")
        jax.config.update(*setting)
    if wanted.num_devices > 1 and not (wanted.chip.platform == "tpu" and has_libtpu()):
        jax.config.update("jax_num_cpu_devices", wanted.num_devices)
