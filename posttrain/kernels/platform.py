"""What the choice of a kernel depends on: the platform, installed packages, and how arrays lie on a mesh."""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
import sys
from typing import Any

import jax
from jax.sharding import Mesh

from posttrain.config import ROW_AXES

HEAD_AXIS = "tensor"
"""Mesh axis that splits attention heads."""

LOGGER = logging.getLogger("posttrain.kernels")


def platform_of(mesh: Mesh | None) -> str:
    """`cpu`, `gpu` or `tpu`: that of the mesh's devices, else the default one."""
    return jax.default_backend() if mesh is None else str(mesh.devices.flat[0].platform)


def compute_capability(mesh: Mesh | None) -> float | None:
    """The generation of the mesh's GPUs, else of the default one, such as 9.0; None: there is no GPU."""
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    return float(device.compute_capability) if device.platform == "gpu" else None


def has_fp8(mesh: Mesh | None) -> bool:
    """The devices know fp8; on others each number is made of integers."""
    capability = compute_capability(mesh)
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    return "TPU7" in device.device_kind if capability is None else capability >= 8.9


def row_axes(mesh: Mesh | None) -> tuple[str, ...]:
    return () if mesh is None else tuple(axis for axis in ROW_AXES if axis in mesh.axis_names)


def row_shards(mesh: Mesh | None) -> int:
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in row_axes(mesh))


def head_shards(mesh: Mesh | None) -> int:
    return mesh.shape[HEAD_AXIS] if mesh is not None and HEAD_AXIS in mesh.axis_names else 1


@functools.cache
def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@functools.cache
def tokamax_library() -> Any:
    """The package `tokamax`, an extra of the installation."""
    flags = importlib.import_module("absl.flags")
    library = importlib.import_module("tokamax")
    if not flags.FLAGS.is_parsed():
        # At its first call it would take the program's command line for its own, and refuse what it does not know.
        flags.FLAGS(sys.argv[:1])
    return library


@functools.cache
def log_choice(operation: str, kernel: str, kind: str, platform: str) -> None:
    """One line for each combination, however often it is traced."""
    LOGGER.info("%s: kernel %r for %s on %s", operation, kernel, kind, platform)
