"""Server of a test, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from posttrain.serve.app import application, listen, server_of
from posttrain.serve.middleware import AllowedHosts
from posttrain.serve.model import Served


@contextmanager
def listening(served: Served) -> Iterator[str]:
    """Serve on a free port of this machine, with the address as the value."""
    listener = listen("127.0.0.1", 0, "test")
    server = server_of(application(lambda request: served, hosts=AllowedHosts("127.0.0.1"), served=served, loads=True))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    server.should_exit = True
    thread.join()
