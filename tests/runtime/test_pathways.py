"""Pathways through a stand-in for `pathwaysutils`: initialised once, and used for every transfer."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from posttrain.errors import ConfigError
from posttrain.runtime import processes

pytestmark = pytest.mark.fast


def test_elsewhere_nothing_is_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    processes.initialize_pathways()
    array = jnp.arange(4.0)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    (there,) = processes.copied([array], [place])
    assert there.sharding == place and there.tolist() == array.tolist()


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "proxy")
    monkeypatch.setitem(sys.modules, "pathwaysutils", None)
    with pytest.raises(ConfigError, match="JAX_PLATFORMS=proxy needs the package pathwaysutils"):
        processes.initialize_pathways()


def test_its_own_transfer_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []

    def reshard(tree: Any, shardings: Any, **options: Any) -> Any:
        called.append((shardings, options))
        return jax.device_put(tree, shardings)

    monkeypatch.setenv("JAX_PLATFORMS", "proxy,cpu")
    monkeypatch.setitem(sys.modules, "pathwaysutils", SimpleNamespace(initialize=lambda: called.append("initialized")))
    monkeypatch.setitem(sys.modules, "pathwaysutils.experimental.reshard", SimpleNamespace(reshard=reshard))
    processes.initialize_pathways()
    place = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    found = processes.copied({"x": jnp.ones(3)}, {"x": place})
    options = {"may_alias": False, "cache_resharding_plans": True}
    assert found["x"].sharding == place and called == ["initialized", ({"x": place}, options)]
