"""Chat page: what it answers while a message is answered, and the page in headless Chromium."""

from __future__ import annotations

import base64
import io
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from posttrain.chat import ChatStopped
from posttrain.data.messages import Message
from posttrain.data.pictures import picture_of
from posttrain.errors import ConfigError
from posttrain.view.chat import ChatPage, listener_of
from tests.view.chromium import Chromium, browser
from tests.view.helpers import UNSAFE, served_site

WAIT_S = 20.0
CALL = {"id": "a", "type": "function", "function": {"name": "lookup", "arguments": {"food": "egg", "numbers": [1, 2]}}}
READY = "document.querySelector('main')?.getAttribute('aria-busy') === 'false'"


class Scripted:
    """Chat that looks an egg up, and goes on with its answer when `go` is set."""

    sees, system = True, "Be brief."

    def __init__(self) -> None:
        self.said = ""
        self.go, self.stopped, self.saved = threading.Event(), threading.Event(), 0
        self.begin(self.system)

    def begin(self, system: str | None) -> None:
        self.messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]

    def ask(self, text: str, *, images: Sequence[Any] = ()) -> str:
        if text == "too long":
            raise ConfigError("the conversation has 300 tokens")
        if text == "broken":
            raise ZeroDivisionError
        shown = [{"type": "image", "image": picture_of(one, "image", Path())} for one in images]
        self.messages.append({"role": "user", "content": [*shown, {"type": "text", "text": text}]})
        self.messages.append({"role": "assistant", "content": "", "tool_calls": [CALL]})
        self.messages.append({"role": "tool", "name": "lookup", "content": "kcal 155"})
        self.said = "kcal"
        while not self.go.wait(0.01):
            if self.stopped.is_set():
                raise ChatStopped("chat: the answer was stopped")
        self.said = ""
        self.messages.append({"role": "assistant", "content": f"kcal 155 {UNSAFE}"})
        return "kcal 155"

    def again(self) -> str:
        self.messages[-1] = {"role": "assistant", "content": "again"}
        return "again"

    def stop(self) -> None:
        self.stopped.set()

    def load(self, file: Path) -> None: ...

    def save(self, file: Path) -> None: ...


@pytest.fixture
def talk() -> Scripted:
    return Scripted()


@pytest.fixture
def page(talk: Scripted) -> Iterator[ChatPage]:
    def answered() -> None:
        talk.saved += 1

    page = ChatPage(talk, "meals", answered)
    yield page
    talk.go.set()
    page.close()


@pytest.fixture
def address(page: ChatPage) -> Iterator[str]:
    with served_site(page) as address:
        yield address


def get(address: str, name: str) -> Any:
    with urllib.request.urlopen(f"{address}api/{name}") as response:
        return json.load(response)


def post(address: str, name: str, body: bytes = b"") -> tuple[int, Any]:
    try:
        kind = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{address}api/{name}", data=body, headers=kind, method="POST")
        with urllib.request.urlopen(request) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]


def message(text: str, *pictures: bytes) -> bytes:
    urls = [f"data:image/png;base64,{base64.b64encode(one).decode()}" for one in pictures]
    return json.dumps({"text": text, "images": urls}).encode()


def plate(size: tuple[int, int] = (40, 30)) -> bytes:
    image, file = Image.new("RGBA", size, (255, 0, 0, 255)), io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def settled(address: str, page: ChatPage) -> Any:
    assert page._worker is not None
    page._worker.join(WAIT_S)
    return get(address, "state")


def test_the_conversation_is_there_while_it_grows(talk: Scripted, page: ChatPage, address: str) -> None:
    assert post(address, "ask", message("How much?", plate(), plate((2000, 1000)))) == (200, {})
    while not talk.said:
        pass
    state = get(address, "state")
    assert state["busy"] and state["said"] == "kcal" and state["sees"] and state["title"] == "meals"
    system, user, assistant, tool = state["messages"]
    assert (system["role"], user["text"], user["pictures"]) == ("system", "How much?", [0, 1])
    assert assistant["calls"] == [CALL["function"]] and tool["text"] == "kcal 155"
    assert post(address, "ask", message("and?")) == (409, "the model answers another message; stop it, or wait")
    assert post(address, "reset")[0] == post(address, "again")[0] == 409
    for number, size in ((0, (40, 30)), (1, (1024, 512))):
        url = get(address, f"picture?number={number}")["url"]
        assert Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).size == size
    talk.go.set()
    state = settled(address, page)
    assert not state["busy"] and state["error"] is None and state["messages"][-1]["text"].startswith("kcal 155")
    assert state["messages"][1]["pictures"] == [0, 1] and talk.saved == 1
    assert post(address, "again") == (200, {}) and settled(address, page)["messages"][-1]["text"] == "again"
    assert post(address, "reset") == (200, {}) and len(get(address, "state")["messages"]) == 1


def test_stopped_and_failed_answers_are_said(talk: Scripted, page: ChatPage, address: str) -> None:
    post(address, "ask", message("How much?"))
    assert post(address, "stop") == (200, {})
    state = settled(address, page)
    assert not state["busy"] and state["error"] == "chat: the answer was stopped"
    assert post(address, "ask", message("too long")) == (200, {})
    assert settled(address, page)["error"] == "the conversation has 300 tokens"
    post(address, "ask", message("broken"))
    assert settled(address, page)["error"] == "the chat has failed (ZeroDivisionError); the terminal says how"
    assert talk.saved == 3


@pytest.mark.parametrize(
    ("name", "body", "code", "said"),
    [
        ("ask", b"no JSON", 400, "the body is not JSON"),
        ("ask", b"[]", 400, "a message is"),
        ("ask", b'{"text": 1}', 400, "a message is"),
        ("ask", b'{"text": "a", "images": ["/etc/passwd"]}', 400, "data: URLs alone"),
        ("ask", b" " * ((64 << 20) + 1), 413, "at most 64 MiB"),
        ("state", b"", 404, "not found"),
    ],
    ids=["text", "list", "number", "path", "large", "reading"],
)
def test_wrong_requests(page: ChatPage, address: str, name: str, body: bytes, code: int, said: str) -> None:
    """Red if a page could read files of the machine, or fill its memory."""
    found, message = post(address, name, body)
    assert found == code and said in message
    assert page._worker is None


def test_a_port_without_a_page_is_refused() -> None:
    assert listener_of(False, None) is None
    with pytest.raises(ConfigError, match="--port 8000 is that of a page; add --page"):
        listener_of(False, 8000)


@pytest.mark.skipif(browser() is None, reason="no Chromium: apt-get install chromium")
def test_the_page(talk: Scripted, address: str, tmp_path: Path) -> None:
    """Red if a script fails, if text of a model is markup, or if the page does not follow the answer."""
    with Chromium(tmp_path) as chromium:
        chromium.open(address, width=390)
        chromium.wait(f"{READY} && document.querySelectorAll('.message').length === 1")
        chromium.value(
            f"(() => {{ const text = atob('{base64.b64encode(plate()).decode()}');"
            "const bytes = Uint8Array.from(text, (c) => c.charCodeAt(0));"
            "const given = new DataTransfer(); given.items.add(new File([bytes], 'a.png', { type: 'image/png' }));"
            "const input = document.getElementById('pictures'); input.files = given.files;"
            "input.dispatchEvent(new Event('change')); })()"
        )
        chromium.wait("document.querySelectorAll('#attached img').length === 1")
        chromium.value("document.getElementById('text').value = 'How much?'; document.getElementById('send').click()")
        chromium.wait("document.querySelector('.message.now pre')?.textContent === 'kcal'")
        chromium.wait("document.querySelector('.message.user img')?.naturalWidth === 40")
        shown = chromium.value("document.querySelector('.call').textContent")
        assert shown == 'lookup(food="egg", numbers=[1, 2])'
        assert chromium.value("document.querySelector('.message.tool pre').textContent") == "kcal 155"
        assert chromium.value("document.querySelectorAll('#attached img').length") == 0
        assert chromium.value("document.getElementById('send').disabled")
        talk.go.set()
        chromium.wait(f"{READY} && document.querySelectorAll('.message').length === 5")
        assert chromium.value("document.querySelector('.message:last-child pre').textContent") == f"kcal 155 {UNSAFE}"
        assert chromium.value("document.title") == "posttrain chat"
        assert chromium.value("document.documentElement.scrollWidth") <= 390
        assert chromium.errors == []
