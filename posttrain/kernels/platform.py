"""Platform facts for kernel selection: devices and installed packages."""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh

T = TypeVar("T")

LOGGER = logging.getLogger("posttrain.kernels")


def platform_of(mesh: Mesh | None) -> str:
    """Return `cpu`, `gpu` or `tpu`: the platform of the mesh's devices.

    None: of the devices that the program is traced for (`traced_for`), outside of one the default backend.
    """
    if mesh is not None:
        return str(mesh.devices.flat[0].platform)
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else str(device.platform)


def traced_for(mesh: Mesh | AbstractMesh | None, function: Callable[..., T]) -> Callable[..., T]:
    """Trace `function` for the mesh's devices, which need not be there: JAX's TPU kernels, too, ask for their kind.

    None: for the default device.
    """
    if mesh is None:
        return function

    @functools.wraps(function)
    def traced(*args: Any) -> T:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*args)

    return traced


def compute_capability(mesh: Mesh | None) -> float | None:
    """GPU compute capability of the mesh's devices or the default device, such as 9.0; None without a GPU."""
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    return float(device.compute_capability) if device.platform == "gpu" else None


def has_fp8(mesh: Mesh | None) -> bool:
    """Return True if the devices support fp8 natively; others emulate it with integers."""
    capability = compute_capability(mesh)
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    return "TPU7" in device.device_kind if capability is None else capability >= 8.9


@functools.cache
def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@functools.cache
def tokamax_library() -> Any:
    """Import `tokamax`, an optional dependency."""
    flags = importlib.import_module("absl.flags")
    library = importlib.import_module("tokamax")
    if not flags.FLAGS.is_parsed():
        # On its first call tokamax would parse the program's command line and reject unknown flags.
        flags.FLAGS(sys.argv[:1])
    return library


@functools.cache
def log_choice(operation: str, kernel: str, kind: str, platform: str) -> None:
    """Log the selected kernel once per combination, however often it is traced."""
    LOGGER.info("%s: kernel %r for %s on %s", operation, kernel, kind, platform)


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning once, however often a program is traced."""
    LOGGER.warning(message)
