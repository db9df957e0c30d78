"""Hugging Face hub reachability, checked before downloads that would retry for a minute."""

from __future__ import annotations

import math
import re
import socket
import time
import urllib.parse
import urllib.request

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def is_hub_id(name: str) -> bool:
    """Return True if the text has the form `name` or `owner/name`."""
    return HUB_ID.fullmatch(name) is not None


PROBE_LIFETIME_S = 60.0
"""Time for which the outcome of a connection attempt is reused."""

_PROBES: dict[tuple[str, int], tuple[float, bool]] = {}


def hub_is_reachable(timeout_s: float = 5.0) -> bool:
    """Return False in the library's offline mode, or if no connection to the hub can be opened.

    Behind a proxy it returns True and leaves the check to the download. Reuses an outcome of the last minute.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    endpoint = urllib.parse.urlparse(constants.ENDPOINT)
    if endpoint.hostname is None or endpoint.scheme in urllib.request.getproxies():
        return True
    address = endpoint.hostname, endpoint.port or (443 if endpoint.scheme == "https" else 80)
    probed, reachable = _PROBES.get(address, (-math.inf, False))
    if time.monotonic() - probed > PROBE_LIFETIME_S:
        reachable = _connects(address, timeout_s)
        _PROBES[address] = time.monotonic(), reachable
    return reachable


def _connects(address: tuple[str, int], timeout_s: float) -> bool:
    try:
        socket.create_connection(address, timeout=timeout_s).close()
    except OSError:
        return False
    return True
