"""Settings of the whole suite; none of them needs an import of JAX, and child processes inherit them.

They count for what is imported after them. pytest imports the `conftest.py` of a folder that it is given before them:
such a file imports JAX and posttrain inside its fixtures.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import compilation, shape_checks

ROOT = Path(__file__).resolve().parent.parent
NO_THIRD_PARTY = "needs the folder ../shared (third-party data and checkpoints), which is not there"

# The same examples every time, without a clock: a slow machine is no failure.
settings.register_profile("suite", deadline=None, derandomize=True, database=None)
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-shape-checks", action="store_true", help="run without jaxtyping and beartype checks")
    parser.addoption("--part", metavar="K/N", help="only the K-th of N parts of the tests; each test is in one part")
    parser.addoption("--third-party", action="store_true", help="only the tests that need third-party data, ../shared")
    parser.addoption("--gpu", action="store_true", help="on the GPU that there is, for what is marked gpu")


def pytest_configure(config: pytest.Config) -> None:
    if early := {"jax", "posttrain"} & sys.modules.keys():
        raise pytest.UsageError(
            f"{', '.join(sorted(early))}: imported before the settings and shape checks of the suite; "
            "a conftest.py must import it inside its fixtures"
        )
    os.environ["JAX_PLATFORMS"] = "cuda,cpu" if config.getoption("--gpu") else "cpu"
    os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
    # Where in Python each operation came from costs a twentieth of tracing and lowering; no test reads it.
    os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
    cache = config.rootpath / ".pytest_cache" / "jax"
    if not hasattr(config, "workerinput"):  # before there are workers
        compilation.prune(cache)
    compilation.set_up(cache)
    compilation.forget_at_patches(pytest.MonkeyPatch)
    # Workers and children share what one of them compiled of Python, too.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if not config.getoption("--no-shape-checks"):
        shape_checks.install("posttrain")


@pytest.hookimpl(tryfirst=True)  # before -m looks at markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_second_cases(items)
    if config.getoption("--third-party"):
        others = [item for item in items if "shared" not in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in {*others}]
    if part := config.getoption("--part"):
        number, _, parts = part.partition("/")
        if not (number.isdigit() and parts.isdigit() and 1 <= int(number) <= int(parts)):
            raise pytest.UsageError(f"--part={part}: give K/N with K from 1 to N, such as 2/5")

        def part_of(item: pytest.Item) -> int:
            # By the function, whose cases share what they compile, unless there are hundreds of them.
            name = item.nodeid if item.get_closest_marker("by_case") else item.nodeid.split("[")[0]
            return zlib.crc32(name.encode()) % int(parts)

        kept = [item for item in items if part_of(item) == int(number) - 1]
        config.hook.pytest_deselected(items=[item for item in items if item not in {*kept}])
        items[:] = kept


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How much of the suite a machine without third-party data leaves out."""
    skipped = [one for one in terminalreporter.stats.get("skipped", ()) if NO_THIRD_PARTY in str(one.longrepr)]
    if skipped:
        terminalreporter.write_line(f"third-party data: {len(skipped)} tests skipped, each {NO_THIRD_PARTY}")


def mark_second_cases(items: list[pytest.Item]) -> None:
    """Of the cases of a function marked `few(N)`, N that lie evenly run each time; the others are thorough."""
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("thorough"):
            functions.setdefault(item.nodeid.split("[")[0], []).append(item)
    for cases in functions.values():
        marker = cases[0].get_closest_marker("few")
        assert marker
        (number,) = marker.args
        kept = {index * len(cases) // number for index in range(number)}
        for index, case in enumerate(cases):
            if index not in kept:
                case.add_marker("thorough")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Garbage collection looks at what tests make, not at the million objects of modules, of which none is garbage."""
    gc.disable()
    try:
        import_share(session.config)
        yield
    finally:
        gc.freeze()
        gc.set_threshold(50_000, 20, 20)
        gc.enable()


def import_share(config: pytest.Config) -> None:
    """Each worker begins with other files: of what Python has not compiled yet, each compiles a part for all."""
    worker = getattr(config, "workerinput", None)
    folders = [config.rootpath / text for text in config.args]
    if worker is None or not all(folder.is_dir() for folder in folders):
        return
    files = sorted(file for folder in folders for file in folder.rglob("test_*.py"))
    index, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    for file in files[len(files) * index // count :] if index else []:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # which collection meets again
            importlib.import_module(".".join(file.relative_to(config.rootpath).with_suffix("").parts))


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One worker per core for a folder; a single file runs in this process, where start-up would cost more."""
    single = len(config.args) == 1 and Path(config.args[0].split("::")[0]).is_file()
    return 0 if single else min(os.cpu_count() or 1, 8)


@pytest.fixture(autouse=True, scope="module")
def frozen() -> Iterator[None]:
    """Leave what a finished file made out of later collections: each run of a stage ends with one that looks at all
    objects, in an old process for more than a second."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def quick_compilation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Programs of tests are small and run a few times: XLA compiles them in a quarter of the time without its costly
    passes. A test that is about what the compiler makes, or that trains for long, is marked `optimized`."""
    shape_checks.begin(None if request.node.get_closest_marker("thorough") else 2)
    compilation.quick(request.node.get_closest_marker("optimized") is None)
    yield
    compilation.quick(True)


@pytest.fixture
def own_programs() -> None:
    """Programs are traced anew."""
    compilation.forget_programs()


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of third-party data and checkpoints beside the repository; not part of it."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(NO_THIRD_PARTY)
    return folder
