"""Machines by name."""

from __future__ import annotations

import math

import pytest

from posttrain.errors import ConfigError
from posttrain.plan.machine import SLICES, machine


def test_names() -> None:
    for name, shape in SLICES.items():
        assert machine(name).num_devices == math.prod(map(int, shape.split("x")))
    assert machine("v5e-8").num_devices == 8 and machine("v5p-16").num_devices == 8, "a v5p is named by its cores"
    assert machine("h100-8").chip.platform == "gpu" and len(machine("cpu-8").devices()) == 8


@pytest.mark.parametrize("name", ["v5e-3", "v5e", "a100-8", "h100-0", "cpu-x", ""])
def test_unknown_ones(name: str) -> None:
    with pytest.raises(ConfigError, match="machine .* is unknown; use v5e-1"):
        machine(name)
