"""XLA on this host: settings of XLA:CPU, compiled programs that are kept, and memory (malloc, garbage collector)."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import re
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import jax

from posttrain.runtime import processes
from posttrain.runtime.files import cache_folder, digest

T = TypeVar("T")

# Collective operations of a program that may wait for other devices at the same time, per virtual device.
THREADS_PER_DEVICE = 8


def disable_async_dispatch() -> None:
    """Disable asynchronous CPU dispatch: programs run in the calling thread and allocate from its malloc arena.

    Otherwise XLA runs programs in pool threads, whose arenas hold at most 64 MiB contiguously. Call it before the first
    use of a device; later calls have no effect.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def reserve_collective_threads() -> None:
    """Give virtual CPU devices, or several processes, enough threads for all concurrent collectives of a program.

    XLA uses one thread per device and does not order a loop that reduces over devices and a gather beside it: if
    devices wait in different ones, no thread is left to join them, and the program hangs (jaxlib 0.10.2, in `distill`
    on 8 devices, about half of the time). An existing PJRT_NPROC is kept. Call it before the first use of a device.
    """
    asked = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    devices = max([1, jax.config.values["jax_num_cpu_devices"], *map(int, asked[-1:])])
    if devices * processes.count() > 1:
        os.environ.setdefault("PJRT_NPROC", str(THREADS_PER_DEVICE * devices))


WHOLE_PRODUCTS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1 << 20}
"""Option of XLA:TPU: a product whose operand lies on several devices gathers it first, whatever its size up to 1 TiB.
By default a large one is a sum of products with one device's part each, rounded to bfloat16 after each part, so that
programs that split the operand differently round differently; it also sends more, and takes longer by the compiler's
estimate."""


def compile_options(platform: str) -> dict[str, Any] | None:
    """Options of `jax.jit` for each program with a model's products. XLA refuses an option that it does not know."""
    return dict(WHOLE_PRODUCTS) if platform == "tpu" else None


def fast_compile_options(platform: str) -> dict[str, Any] | None:
    """The same for programs dominated by library matrix products: less LLVM effort on the rest compiles faster and runs
    as fast. They have lower precedence than `XLA_FLAGS`."""
    reduced = jax.config.read("jax_disable_most_optimizations")
    fast = platform == "cpu" and not reduced
    return {"xla_backend_optimization_level": 1} if fast else compile_options(platform)


MAX_BYTES = 20 << 30
"""Size at which the oldest programs are deleted, until half of it is left."""


def enable_compile_cache() -> Path | None:
    """Use the cache, unless JAX has one already or is told to use none; return its folder, None if there is none.

    JAX's own variables select it: `JAX_COMPILATION_CACHE_DIR` another folder, `JAX_ENABLE_COMPILATION_CACHE=false`
    none.
    """
    config: Any = jax.config  # whose flags are not typed
    if not config.jax_enable_compilation_cache:
        return None
    given = config.jax_compilation_cache_dir
    if given is not None:
        return Path(given)
    folder = cache_folder("compiled") / _machine()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a home folder that cannot be written is no reason to refuse a run
        return None
    prune_cache(folder, MAX_BYTES)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return folder


def prune_cache(folder: Path, max_bytes: int) -> None:
    """Delete the oldest files of a cache larger than `max_bytes`, until half of that is left."""
    files = [(file.stat().st_mtime, file.stat().st_size, file) for file in folder.iterdir() if file.is_file()]
    size = sum(number for _, number, _ in files)
    if size <= max_bytes:
        return
    for _, number, file in sorted(files, key=lambda entry: entry[0]):
        file.unlink(missing_ok=True)
        size -= number
        if size <= max_bytes // 2:
            return


def _machine() -> str:
    """Digest of the processor: programs for a CPU use its instructions, which another one may lack."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    own = sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    return digest("\n".join([platform.machine(), platform.processor(), *own]), 12)


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Parameters of `mallopt`, malloc.h of glibc."""
_LARGEST = 2**31 - 1
WATCH_S = 0.005
"""Seconds between two looks at the memory of this process."""


def trim_host_memory(platform: str) -> None:
    """Return freed memory to the system after a compilation, hundreds of MiB that the allocator would keep.

    For programs on `cpu`, also keep memory freed later, up to 2 GiB at the heap's end: otherwise large blocks are
    mapped and zeroed by the system in every run, a seventh of a training step's time. Requires glibc; has no effect
    with another C library.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_trim"):
        return
    library.malloc_trim(0)
    if platform == "cpu":
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, _LARGEST)


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not say."""
    file = Path("/proc/self/statm")
    return int(file.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if file.exists() else 0


class Growth:
    """Growth of this process's resident memory in a block, without what was free before: a context manager."""

    highest = 0
    """Bytes at the fullest moment beyond those before."""
    kept = 0
    """Bytes at the end, without what is free again, beyond those before."""

    def __enter__(self) -> Growth:
        trim_host_memory("")
        self._before = self._peak = resident_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="resident memory")
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()
        trim_host_memory("")
        self.highest = max(0, self._peak - self._before)
        self.kept = max(0, resident_bytes() - self._before)

    def _watch(self) -> None:
        while not self._done.wait(WATCH_S):
            self._peak = max(self._peak, resident_bytes())


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable cyclic garbage collection in the block: tracing allocates so many long-lived objects that the collector
    would scan all live objects again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Recent(Generic[T]):
    """The latest programs by all that they depend on, kept for an equal trainer or engine later in this process.

    Not many: programs take memory of the devices.
    """

    every: ClassVar[list[Recent[Any]]] = []

    def __init__(self, size: int):
        self.size = size
        self._kept: dict[Hashable, T] = {}
        self.every.append(self)

    def of(self, key: Hashable, make: Callable[[], T]) -> T:
        self._kept[key] = self._kept.pop(key) if key in self._kept else make()
        while len(self._kept) > self.size:
            del self._kept[next(iter(self._kept))]
        return self._kept[key]

    def clear(self) -> None:
        self._kept.clear()
