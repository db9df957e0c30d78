"""Server of a test, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from posttrain.data.tokenizer import load_tokenizer
from posttrain.generation import without_padding
from posttrain.serve.app import application, listen, server_of
from posttrain.serve.middleware import AllowedHosts
from posttrain.serve.model import Limits, Served
from tests.tiny import tiny_model


def tiny_served(name: str, length: int, **changes: Any) -> Served:
    """Served model of one layer with random weights and a byte tokenizer, whose context is `length`."""
    tokenizer = load_tokenizer("bytes")
    sizes: dict[str, Any] = {"slots": 4, "decode_steps": 5, "limits": Limits(queue=64, timeout_s=60.0)}
    return Served.of(
        without_padding(tiny_model(num_layers=1, windows=(None,), max_positions=length), tokenizer),
        tokenizer,
        name=name,
        max_length=length,
        cache_tokens=None,
        tool_format="hermes",
        **sizes | changes,
    )


@contextmanager
def listening(served: Served, **changes: Any) -> Iterator[str]:
    """Serve on a free port of this machine in the thread `server`, with the address as the value. `changes`: arguments
    of the application."""
    listener = listen("127.0.0.1", 0, "test")
    app = application(lambda request: served, hosts=AllowedHosts("127.0.0.1"), served=served, loads=True, **changes)
    server = server_of(app)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True, name="server")
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    server.should_exit = True
    thread.join()
