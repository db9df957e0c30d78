"""Placement table: who sits on which devices."""

from __future__ import annotations

import jax
import pytest

from posttrain.config.yaml_file import build_config
from posttrain.mesh import make_mesh
from posttrain.runs.run import placement_rows, print_placement, shown_devices
from posttrain.stages.context import RoleDevices, role_devices, training_devices
from tests.documents import STAGES

pytestmark = pytest.mark.fast


def test_roles_and_their_devices(capsys: pytest.CaptureFixture[str]) -> None:
    placement = {"rollout": {"devices": 2}, "reference": {"offload": True}}
    config = build_config(
        {"output": "o", "seed": 1, "model": {"path": "m"}, "mesh": {"fsdp": -1}, "kind": "rl", **STAGES["rl"]}
        | {"placement": placement, "algorithm": {"kind": "grpo", "kl_coef": 0.1}}
    )
    section, roles = config.stages[0], ("rollout", "reference")
    mesh = make_mesh(config.mesh, training_devices(config))
    devices = role_devices(config, section.placement, jax.devices())
    assert [row[0] for row in placement_rows(section, mesh, devices, roles)] == ["actor", "rollout", "reference"]
    print_placement(section, mesh, devices, roles)
    printed = capsys.readouterr().out
    assert "6 x cpu: 0-5" in printed and "2 x cpu: 6-7" in printed and "fsdp 6" in printed and "weights" in printed


def test_one_device_needs_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    config = build_config({"output": "o", "seed": 1, "model": {"path": "m"}, "kind": "sft", **STAGES["sft"]})
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    print_placement(config.stages[0], mesh, RoleDevices(), ())
    assert capsys.readouterr().out == ""


def test_ranges_of_devices() -> None:
    devices = jax.devices()
    assert shown_devices([devices[0], devices[1], devices[3]]) == "3 x cpu: 0-1, 3"
