"""Machines by name."""

from __future__ import annotations

import math

import pytest

from posttrain.errors import ConfigError
from posttrain.plan.machine import SLICES, machine, machine_of


def test_names() -> None:
    for name, shape in SLICES.items():
        assert machine(name).num_devices == math.prod(map(int, shape.split("x")))
    assert machine("v5e-8").num_devices == 8 and machine("v5p-16").num_devices == 8, "a v5p is named by its cores"
    assert (
        machine("h200-8").chip.platform == machine("h100-8").chip.platform == "gpu"
        and len(machine("cpu-8").devices()) == 8
    )


def test_several_slices() -> None:
    one, two = machine("v5e-16"), machine("2xv5e-16")
    assert (two.num_devices, two.num_slices, two.num_hosts) == (32, 2, 8) and two.chip == one.chip
    assert machine("4xv5e-8").num_hosts == 4


def test_names_of_devices_that_are_there() -> None:
    for name in ("v5e-8", "v5p-8", "v6e-256", "4xv5e-8"):
        found = machine(name)
        assert all(machine_of(k, "tpu", found.num_devices, found.num_slices) == name for k in found.chip.kinds)
    assert machine_of("NVIDIA H100 80GB HBM3", "gpu", 4) == "h100-4" and machine_of("cpu", "cpu", 1) == "cpu-1"
    assert machine_of("NVIDIA A100", "gpu", 8) is machine_of("TPU v5 lite", "tpu", 3) is None
    assert machine_of("TPU v4", "tpu", 8) is None


@pytest.mark.parametrize(
    "name", ["2xh100-8", "0xv5e-8", "17xv5e-8", "2xv5e-3", "v5e-3", "v5e", "a100-8", "h100-0", "cpu-x", ""]
)
def test_unknown_ones(name: str) -> None:
    with pytest.raises(ConfigError, match="machine .* is unknown; use v5e-1"):
        machine(name)
