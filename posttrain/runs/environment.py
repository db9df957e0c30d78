"""Environment of a run for bug reports: versions, devices, kernels that would be chosen, caches, settings of JAX."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax

from posttrain import __version__
from posttrain.kernels import grouped_matmul
from posttrain.kernels.attention import dispatch
from posttrain.kernels.attention.call import AttentionCall
from posttrain.kernels.platform import compute_capability, installed
from posttrain.runtime.files import cache_folder
from posttrain.runtime.xla import enable_compile_cache

PACKAGES = (
    *("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "optax", "qwix", "tokamax"),
    *("orbax-checkpoint", "transformers", "tokenizers", "datasets", "numpy", "pydantic", "torch"),
)
VARIABLES = ("JAX_", "XLA_", "LIBTPU_", "TPU_", "POSTTRAIN_", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_OFFLINE", "PJRT_")
"""Beginnings of the environment variables that are shown; none holds a secret."""
CACHES = ("compiled", "plan", "reference", "view")


def versions() -> dict[str, str]:
    """Version of posttrain, Python, the system, and the packages that are installed, by name."""
    found = {name: _version(name) for name in PACKAGES}
    system = f"{platform.system()} {platform.machine()}"
    return {
        "posttrain": __version__,
        "python": platform.python_version(),
        "platform": system,
        **{name: number for name, number in found.items() if number is not None},
    }


def environment_lines() -> Iterator[str]:
    """Yield the lines, without names of hosts or users beyond the folders of caches."""
    of = versions()
    yield f"posttrain {of.pop('posttrain')}, Python {of.pop('python')}, {of.pop('platform')}"
    yield "packages: " + ", ".join(f"{name} {number}" for name, number in of.items())
    devices = jax.devices()
    memory = (devices[0].memory_stats() or {}).get("bytes_limit")
    each = f", {memory / 2**30:.1f} GiB each" if memory else ""
    yield f"devices: {len(devices)} x {devices[0].device_kind} ({devices[0].platform}){each}"
    yield f"host: {os.cpu_count()} cores, {_host_gib():.1f} GiB"
    yield from _kernels(devices[0].platform)
    compiled = enable_compile_cache()
    yield f"compile cache: {'off' if compiled is None else f'{compiled} ({_size(compiled)})'}"
    for name in CACHES[1:]:
        if (folder := cache_folder(name)).is_dir():
            yield f"{name} cache: {folder} ({_size(folder)})"
    yield from (f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _kernels(kind: str) -> Iterator[str]:
    """Kernels of `auto` for 16-bit heads of 128 in rows of 4096 tokens, and for experts."""
    tokamax = installed("tokamax")
    call = AttentionCall(
        platform=kind,
        rows=1,
        num_queries=4096,
        num_keys=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        value_dim=128,
        dtype="bfloat16",
        soft_cap=None,
        sinks=False,
        parents=False,
        same_tokens=True,
        row_shards=1,
        head_shards=1,
        token_shards=1,
        tokamax=tokamax,
        compute_capability=compute_capability(None),
    )
    grouped = grouped_matmul.GroupedMatmulCall(platform=kind, dtype="bfloat16", tokamax=tokamax)
    yield (
        f"kernels chosen: attention {dispatch.select_attention('auto', call)} (rows of 4096, heads of 128), "
        f"grouped_matmul {grouped_matmul.select('auto', grouped)}"
    )


def _host_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _size(folder: Path) -> str:
    files = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
    return f"{len(files):,} files, {sum(files) / 2**30:.2f} GiB"
