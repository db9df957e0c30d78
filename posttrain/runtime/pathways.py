"""Pathways: one process that controls the devices of all hosts, through the package `pathwaysutils`."""

from __future__ import annotations

import importlib
import os
from typing import Any

import jax

from posttrain.errors import ConfigError


def used() -> bool:
    """Tell whether JAX reaches its devices through the proxy of Pathways."""
    return "proxy" in os.environ.get("JAX_PLATFORMS", "").split(",")


def initialize() -> None:
    """Register the proxy with JAX, before it is used; no effect elsewhere. ConfigError without `pathwaysutils`."""
    if used():
        _module("pathwaysutils").initialize()


def copied(tree: Any, shardings: Any) -> Any:
    """Copies of arrays where `shardings` say, also on other devices. Under Pathways they go from device to device, and
    a plan serves for all transfers of one kind; never by way of the controller."""
    if used():
        found = _module("pathwaysutils.experimental.reshard")
        return found.reshard(tree, shardings, may_alias=False, cache_resharding_plans=True)
    return jax.device_put(tree, shardings, may_alias=False)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError("JAX_PLATFORMS=proxy needs the package pathwaysutils; install it in the image") from error
