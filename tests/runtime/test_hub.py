"""The hub is probed once a minute, and never in offline mode."""

from __future__ import annotations

import socket
import urllib.request
from typing import Any

import pytest
from huggingface_hub import constants

from posttrain.runtime import hub

pytestmark = pytest.mark.fast


def test_an_outcome_is_reused_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[Any] = []

    def refuse(address: Any, timeout: float) -> None:
        attempts.append(address)
        raise OSError

    clock = [0.0]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.example")
    monkeypatch.setattr(urllib.request, "getproxies", dict)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(hub.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(hub, "_PROBES", {})
    assert not hub.hub_is_reachable() and not hub.hub_is_reachable()
    assert attempts == [("hub.example", 443)]
    clock[0] = hub.PROBE_LIFETIME_S + 1
    assert not hub.hub_is_reachable() and len(attempts) == 2
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert not hub.hub_is_reachable() and len(attempts) == 2
