"""Chat page: a conversation with its pictures and calls of tools in a browser, shown while the model answers."""

from __future__ import annotations

import base64
import io
import socket
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from posttrain.data.messages import Message
from posttrain.data.pictures import Picture
from posttrain.errors import ConfigError, RunError
from posttrain.serve.app import check_installed, listen
from posttrain.serve.body import Refused, parse_json
from posttrain.view.serve import HOST, serve

SHOWN_SIDE = 1024
"""Most pixels of a shown picture's side."""
STOP_TIMEOUT_S = 30.0


@runtime_checkable
class Talk(Protocol):
    """Chat of a page, such as `posttrain.chat.Chat`."""

    messages: list[Message]
    said: str
    """Text of the turn that is being sampled."""

    @property
    def sees(self) -> bool: ...

    @property
    def system(self) -> str | None: ...

    def ask(self, text: str, *, images: Sequence[Any] = ()) -> str: ...

    def again(self) -> str: ...

    def begin(self, system: str | None) -> None: ...

    def stop(self) -> None: ...

    def load(self, file: Path) -> None: ...

    def save(self, file: Path) -> None: ...


class ChatPage:
    """Page of a chat, which answers one message at a time. `answered`: called after each answer, whole or not."""

    page = "chat.html"

    def __init__(self, talk: Talk, title: str, answered: Callable[[], None]):
        self._talk, self._title, self._answered = talk, title, answered
        self._lock = threading.Lock()
        self._worker: threading.Thread | None = None
        self._error: str | None = None
        self._pictures: list[Picture] = []
        self.answers = {"state": self.state, "picture": self.picture}
        self.changes = {"ask": self.ask, "again": self.again, "stop": self.stop, "reset": self.reset}

    def state(self, given: Mapping[str, str]) -> Any:
        """The conversation so far, with the text that is being sampled."""
        messages = [self._shown(message) for message in list(self._talk.messages)]
        about = {"title": self._title, "sees": self._talk.sees, "busy": self._busy, "error": self._error}
        return {**about, "messages": messages, "said": self._talk.said}

    def picture(self, given: Mapping[str, str]) -> Any:
        """Picture of a number as the model sees it before it is resized: upright, and over white."""
        number = given.get("number", "")
        if not number.isdecimal() or len(number) > 9 or int(number) >= len(self._pictures):
            raise Refused(404, "not_found", f"number={number[:9]}: there are {len(self._pictures)} pictures")
        image, file = self._pictures[int(number)].pixels(), io.BytesIO()
        image.thumbnail((SHOWN_SIDE, SHOWN_SIDE))
        image.save(file, "PNG")
        return {"url": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"}

    def ask(self, given: Mapping[str, str], body: bytes) -> Any:
        """Answer a message, `{"text": ..., "images": [data: URLs]}`."""
        asked = parse_json(body)
        text, images = (asked.get("text"), asked.get("images", [])) if isinstance(asked, dict) else (None, None)
        if not isinstance(text, str) or not isinstance(images, list):
            raise ConfigError('a message is {"text": "...", "images": ["data:image/png;base64,..."]}')
        if not all(isinstance(one, str) and one.startswith("data:") for one in images):
            raise ConfigError("images: a page gives pictures as data: URLs alone")
        if images and not self._talk.sees:
            raise ConfigError("the model takes no pictures, or is loaded without its vision tower")
        return self._answer(lambda: self._talk.ask(text, images=images))

    def again(self, given: Mapping[str, str], body: bytes) -> Any:
        """Answer the last message anew."""
        return self._answer(self._talk.again)

    def stop(self, given: Mapping[str, str], body: bytes) -> Any:
        """Stop the answer; what was said stays."""
        self._talk.stop()
        return {}

    def reset(self, given: Mapping[str, str], body: bytes) -> Any:
        """Begin anew, with the same system message."""
        with self._lock:
            self._refuse_busy()
            self._error = None
            self._talk.begin(self._talk.system)
        return {}

    def close(self) -> None:
        """Stop the answer, and wait for its end."""
        self._talk.stop()
        if self._worker is not None:
            self._worker.join(STOP_TIMEOUT_S)

    @property
    def _busy(self) -> bool:
        return self._worker is not None and self._worker.is_alive()

    def _refuse_busy(self) -> None:
        if self._busy:
            raise Refused(409, "busy", "the model answers another message; stop it, or wait")

    def _answer(self, answer: Callable[[], str]) -> Any:
        def work() -> None:
            try:
                answer()
            except (ConfigError, RunError) as error:
                self._error = str(error)
            except Exception as error:
                traceback.print_exc()
                self._error = f"the chat has failed ({type(error).__name__}); the terminal says how"
            finally:
                self._answered()

        with self._lock:
            self._refuse_busy()
            self._error = None
            self._worker = threading.Thread(target=work, daemon=True, name="chat page")
            self._worker.start()
        return {}

    def _shown(self, message: Mapping[str, Any]) -> dict[str, Any]:
        content = message.get("content") or ""
        parts: Sequence[Any] = [{"type": "text", "text": content}] if isinstance(content, str) else content
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        return {
            "role": message["role"],
            "text": "".join(part["text"] for part in parts if part["type"] == "text"),
            "pictures": [self._number(part["image"]) for part in parts if part["type"] == "image"],
            "calls": [{"name": call["name"], "arguments": call["arguments"]} for call in calls],
        }

    def _number(self, picture: Picture) -> int:
        """Number of a picture, which stays its own."""
        with self._lock:
            known = (number for number, one in enumerate(self._pictures) if one is picture)
            if (number := next(known, None)) is None:
                number = len(self._pictures)
                self._pictures.append(picture)
            return number


def listener_of(page: bool, port: int | None) -> socket.socket | None:
    """Open the page's port, any free one without a number; None without a page. ConfigError if the port is taken, for
    a port without a page, or without the extra `view`."""
    if not page:
        if port is not None:
            raise ConfigError(f"chat: --port {port} is that of a page; add --page")
        return None
    check_installed("view", "chat: --page")
    return listen(HOST, port or 0, "chat: --page")


def hold(talk: Talk, listener: socket.socket, *, title: str, history: Path | None) -> None:
    """Hold a chat on a page until interrupted. `history`: file that is read if it is there, and written after each
    answer."""
    if history is not None and history.exists():
        talk.load(history)
    page = ChatPage(talk, title, (lambda: None) if history is None else lambda: talk.save(history))
    try:
        serve(page, listener)
    finally:
        page.close()
