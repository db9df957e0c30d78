"""Settings of the whole suite; none of them needs an import of JAX, and child processes inherit them.

They count for what is imported after them. pytest imports the `conftest.py` of a folder that it is given before them:
such a file imports JAX and posttrain inside its fixtures.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

ROOT = Path(__file__).resolve().parent.parent
DEVICES = 8


# The same examples every time, without a clock: a slow machine is no failure.
settings.register_profile("suite", deadline=None, derandomize=True, database=None)
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-shape-checks", action="store_true", help="run without jaxtyping and beartype checks")
    parser.addoption("--gpu", action="store_true", help="on the GPU that there is, for what is marked gpu")


def pytest_configure(config: pytest.Config) -> None:
    if early := {"jax", "posttrain"} & sys.modules.keys():
        raise pytest.UsageError(
            f"{', '.join(sorted(early))}: imported before the settings and shape checks of the suite; "
            "a conftest.py must import it inside its fixtures"
        )
    os.environ["JAX_PLATFORMS"] = "cuda,cpu" if config.getoption("--gpu") else "cpu"
    # Virtual devices that wait for each other on a busy machine: after 40 seconds XLA would end the process.
    patience = "--xla_cpu_collective_call_terminate_timeout_seconds=300 --xla_cpu_collective_timeout_seconds=300"
    devices = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {devices} {patience}"
    os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
    # A size limit makes JAX lock the folder, which parallel workers need.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(config.rootpath / ".pytest_cache" / "jax")
    os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] = str(2 << 30)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    if not config.getoption("--no-shape-checks"):
        install_import_hook("posttrain", "beartype.beartype")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One worker per core for a folder; a single file runs in this process, where start-up would cost more."""
    single = len(config.args) == 1 and Path(config.args[0].split("::")[0]).is_file()
    return 0 if single else min(os.cpu_count() or 1, 8)


@pytest.fixture(autouse=True)
def quick_compilation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Programs of tests are small and run a few times: XLA compiles them in two thirds of the time without its costly
    passes. A test that is about what the compiler makes, or that trains for long, is marked `optimized`."""
    optimized = request.node.get_closest_marker("optimized") is not None
    set_quick_compilation(not optimized)
    yield
    set_quick_compilation(True)


def set_quick_compilation(quick: bool) -> None:
    """In this process and in children to come."""
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(quick))
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_disable_most_optimizations", quick)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of third-party data and checkpoints beside the repository; not part of it."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("needs the folder ../shared (third-party data and checkpoints), which is not there")
    return folder
