"""Server of the run browser: an address on loopback with a random token, an indexer beside it."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from posttrain.errors import ConfigError
from posttrain.view.app import Viewed, application
from posttrain.view.curves import Curves
from posttrain.view.folder import RunFolder, find_runs
from posttrain.view.index import cache_of, make_index
from posttrain.view.microscope import Microscope

HOST = "127.0.0.1"


def view(paths: Sequence[str], *, port: int) -> None:
    """Serve runs until interrupted; prints the address. `port` 0: any free one. ConfigError without a run or the extra
    `view`."""
    check_installed()
    runs = [viewed(name, folder) for name, folder in named(find_runs(paths))]
    token = secrets.token_urlsafe(16)
    listener = listen(port)
    print(f"http://{HOST}:{listener.getsockname()[1]}/{token}/", flush=True)
    with following(runs):
        serve(application(runs, token), listener)


def serve(app: Any, listener: socket.socket) -> None:
    """Serve an application on a listening socket until the process is interrupted."""
    import uvicorn

    config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none", timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[listener])


def listen(port: int) -> socket.socket:
    """Open a port on loopback; ConfigError if it is taken."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigError(f"view: port {port} cannot be opened ({error.strerror}); give another --port") from error
    return listener


def check_installed() -> None:
    """ConfigError without the extra `view`."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"view: needs the extra view ({error}); pip install 'posttrain[view]'") from error


def named(folders: Sequence[RunFolder]) -> Iterator[tuple[str, RunFolder]]:
    """Runs with the shortest names that tell them apart: the folder's, else with its parents'."""
    depth = 1
    while True:
        names = ["/".join(folder.path.parts[-depth:]) for folder in folders]
        if max(Counter(names).values()) == 1:
            return zip(names, folders, strict=True)
        depth += 1


def viewed(name: str, folder: RunFolder) -> Viewed:
    """Run with its index and replays in the cache."""
    cache = cache_of(folder.key)
    make_index(cache / "index.sqlite")
    curves = Curves(folder.path / "metrics.jsonl")
    return Viewed(name, folder, cache / "index.sqlite", curves, Microscope(cache / "tokens"))


@contextmanager
def following(runs: Sequence[Viewed]) -> Iterator[None]:
    """Index the runs in a child process during the block, and end their replays after it."""
    pairs = [text for run in runs for text in (str(run.folder.path), str(run.index))]
    command = [sys.executable, "-m", "posttrain.view.indexer", *pairs]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as indexer:
        try:
            yield
        finally:
            indexer.kill()
            for run in runs:
                run.microscope.close()
