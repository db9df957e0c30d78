"""Chats with a model in this process: answers that stream, tools that are called, turns that share a cache; and the
terminal or pipe over which a person holds them."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Unpack

from posttrain.config import ToolSection
from posttrain.config.locator import Locator
from posttrain.data.chat import Renderer
from posttrain.data.messages import Message, checked_messages
from posttrain.data.pictures import picture_of, written
from posttrain.environments.conversation import message_of, tools_of
from posttrain.environments.tool_env import ToolEnv
from posttrain.errors import ConfigError, RunError, did_you_mean
from posttrain.generation import Settings, request_params, without_padding
from posttrain.rollout.drafting import Speculation
from posttrain.rollout.engine import NativeEngine
from posttrain.rollout.types import NewTokens, sample_key
from posttrain.runs.finished import Generator
from posttrain.runtime.event_loop import LoopThread
from posttrain.runtime.files import write_whole
from posttrain.serve.text import TurnStream
from posttrain.tools.formats import make_format
from posttrain.tools.prompts import ToolText
from posttrain.tools.types import Tool
from posttrain.tracking.console import cut, printable
from posttrain.user_code import missing_path, public_functions

MAX_LENGTH = 4096
"""Tokens of a whole chat, where the model's context allows them."""
DECODE_STEPS = 8
"""Tokens that come at once."""
MAX_ROUNDS = 16
"""Turns of an answer that call tools."""
STOP_TIMEOUT_S = 30.0
RESULT_CELLS = 100


class Listener(NamedTuple):
    """Receiver of an answer while it is sampled."""

    text: Callable[[str], None]
    note: Callable[[str], None]
    """Receiver of lines about calls of tools, and about an answer that was cut."""


SILENT = Listener(text=lambda _: None, note=lambda _: None)


class ChatStopped(RunError):
    """The answer was stopped."""


class Chat:
    """Chat whose messages grow with each answer; its engine keeps what it has read for the turns that follow.

    A model without a chat template, or of a run on plain prompts, continues each message as a text of its own.
    ConfigError for settings out of range, and for tools without a chat template. `max_length`: tokens of the whole
    chat; `tools`: of `tools_from`, called and answered until a turn calls none; None: those of the run, as is
    `tool_format`.
    """

    def __init__(
        self,
        generator: Generator,
        *,
        tools: Sequence[Tool] | None = None,
        tool_format: str | None = None,
        max_length: int | None = None,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        **settings: Unpack[Settings],
    ):
        if settings.pop("n", 1) != 1:
            raise ConfigError("chat: n: a chat has one answer; remove n")
        own, seed = settings.pop("chat", None), settings.pop("seed", None)
        drafts = settings.pop("speculative", None)
        model = generator.model
        tokenizer = generator.tokenizer.with_template_args(settings.pop("chat_template_args", {}))
        self.chats = tokenizer.chats if own is None else own
        tools = tools_of(generator.tools, servers=True) if tools is None else tools
        tool_format = tool_format or generator.tool_format
        if tools and not self.chats:
            raise ConfigError(
                f"chat: tools need a chat template, and {generator.name} is used without one; give none of them "
                "(--tools none)"
            )
        limit = model.config.max_positions
        if max_length is not None and not 2 <= max_length <= limit:
            raise ConfigError(f"chat: max_length={max_length} must be from 2 to the model's {limit}")
        self._length = max_length or min(limit, MAX_LENGTH)
        self.greedy = temperature == 0
        self._params = request_params(
            model, tokenizer, settings, max_new_tokens or self._length, temperature, top_logps=0, prompt_logps=False
        )
        self._renderer = Renderer(tokenizer, self.chats, ToolText(tokenizer, tool_format) if tools else None)
        self._tools, self._schemas = tools, [dict(tool.schema) for tool in tools] or None
        self._format = make_format(tool_format, tokenizer, self._schemas) if self._schemas else None
        self._env = ToolEnv(tools)
        self._seed, self._count = secrets.randbits(31) if seed is None else seed, 0
        self.said = ""
        """Text of the turn that is being sampled."""
        self._answering: asyncio.Task[Any] | None = None
        self._stops = False
        sampled = without_padding(model, tokenizer)
        self._engine = NativeEngine(
            sampled,
            slots=1,
            max_length=self._length,
            decode_steps=DECODE_STEPS,
            tokenizer_decode=tokenizer.decode,
            tokenizer=tokenizer,
            speculation=Speculation.of(drafts, sampled, tokenizer, "chat: speculative"),
        )
        self._thread = LoopThread("chat")
        self.messages: list[Message] = []
        self._system = tokenizer.system if self.chats else None
        self.begin(self._system)

    def begin(self, system: str | None) -> None:
        """Begin anew, with a system message or without."""
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    @property
    def sees(self) -> bool:
        """True where messages may hold pictures."""
        return self.chats and self._renderer.tokenizer.sees

    @property
    def system(self) -> str | None:
        """System message; None without one."""
        first = self.messages[0] if self.messages else None
        return first["content"] if first is not None and first["role"] == "system" else None

    def ask(self, text: str, listener: Listener = SILENT, *, images: Sequence[Any] = ()) -> str:
        """Answer a message of the user; returns the text of the last turn. `images`: pictures before the text, each a
        path, a `data:` URL, bytes or an image of Pillow, for a model with its vision tower.

        An interrupt and `stop` end the answer, and are raised (the latter as ChatStopped): what was said until then
        stays, or without anything the message goes too. So it does after an error: ConfigError for a chat that is too
        long, or that the template refuses.
        """
        content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}]
        asked = {"role": "user", "content": content if images else text}
        if images and not self.chats:
            raise ConfigError("chat: pictures need a chat template, and the model is used without one")
        return self._answer([*self.messages, *self._checked([asked], "message")], listener)

    def again(self, listener: Listener = SILENT) -> str:
        """Answer the last message of the user anew. ConfigError without one, and for a greedy answer, which would be
        the same."""
        asked = [number for number, message in enumerate(self.messages) if message["role"] == "user"]
        if not asked:
            raise ConfigError("chat: there is no message to answer")
        if self.greedy and asked[-1] < len(self.messages) - 1:
            raise ConfigError("chat: at temperature 0 (greedy) the answer would be the same; set a temperature")
        return self._answer(self.messages[: asked[-1] + 1], listener)

    def stop(self) -> None:
        """End the answer that another thread waits for."""
        if (task := self._answering) is not None:
            self._stops = True
            self._thread.loop.call_soon_threadsafe(task.cancel)

    def complete(self, messages: Sequence[Mapping[str, Any]], listener: Listener = SILENT) -> str:
        """Answer a whole conversation, which takes the place of the messages so far. ConfigError for one that the model
        cannot be given."""
        checked = self._checked(list(messages), "messages")
        roles = [message["role"] for message in checked]
        if roles[-1] == "assistant":
            raise ConfigError("chat: the conversation ends with an assistant message; end before the answer")
        if not self.chats and [role for role in roles if role != "system"] != ["user"]:
            raise ConfigError(
                f"chat: roles {roles}: without a chat template the model continues one message of a user, after one of "
                "system; give no more, or a model with a template"
            )
        return self._answer(checked, listener)

    def _checked(self, messages: Sequence[Any], name: str) -> list[Message]:
        return checked_messages(messages, name, self._renderer.tokenizer.picture_reader())

    def _answer(self, messages: list[Message], listener: Listener) -> str:
        before, self.messages, self.said = self.messages, messages, ""
        ended, stopped = threading.Event(), threading.Event()
        told = Listener(
            text=lambda text: None if stopped.is_set() or not text else listener.text(text),
            note=lambda line: None if stopped.is_set() else listener.note(line),
        )

        async def turns() -> None:
            self._answering, self._stops = asyncio.current_task(), False
            try:
                await self._turns(told)
            except asyncio.CancelledError:
                if self._stops:
                    raise ChatStopped("chat: the answer was stopped") from None
                raise
            finally:
                self._answering = None
                ended.set()

        try:
            self._thread.call(turns())
        except BaseException as error:
            stopped.set()
            ended.wait(STOP_TIMEOUT_S)
            if isinstance(error, KeyboardInterrupt | ChatStopped) and self.said.strip():
                self.messages.append({"role": "assistant", "content": self.said})
            else:
                self.messages = before
            raise
        finally:
            self.said = ""
        return self.messages[-1]["content"]

    async def _turns(self, told: Listener) -> None:
        """Sample turns until one calls no tool."""
        for _ in range(MAX_ROUNDS):
            message = await self._turn(told)
            self.messages.append(message)
            self.said = ""
            reply = await self._env.reply(message)
            message.pop("malformed_calls", None)
            if reply.done:
                return
            calls = [f"{_shown_call(call['function'])} -> " for call in message.get("tool_calls", ())]
            for call, result in zip([*calls, *[""] * len(reply.messages)], reply.messages, strict=False):
                told.note(f"{call}{result['content']}")
            self.messages += reply.messages
        raise RunError(f"chat: {MAX_ROUNDS} turns in a row called tools; ask in another way")

    async def _turn(self, told: Listener) -> Message:
        prompt, images = self._renderer.prompt_with_images(self._prompt(), self._schemas)
        room = self._length - len(prompt)
        if room < 1:
            raise ConfigError(
                f"chat: the conversation has {len(prompt)} tokens, and max_length is {self._length}; begin anew, or "
                "raise it"
            )
        key, limit = sample_key(self._seed, 0, self._count, 0), min(room, self._params.max_tokens)
        params = replace(self._params, max_tokens=limit, key=key)
        self._count += 1
        stream = TurnStream(self._renderer, prompt, params, self._format, parallel=True, structured=False)

        def take(text: str) -> None:
            self.said += text
            told.text(text)

        def on_tokens(new: NewTokens) -> None:
            take(stream.add(new.tokens).content)

        completion = await self._engine.generate(prompt, params, images=images, on_tokens=on_tokens)
        take(stream.end().content)
        if completion.stop == "length":
            told.note(f"cut after {limit} tokens" + (", at max_length" if limit == room else ""))
        return message_of(prompt, completion, self._renderer, params, self._format)[0]

    def _prompt(self) -> list[Message]:
        """Messages of the next turn's prompt; without a template the last of the user, after the system message."""
        if self.chats:
            return self.messages
        system = [message for message in self.messages if message["role"] == "system"]
        return [*system, self.messages[-1]]

    def picture(self, path: str) -> Path:
        """File of a picture, which can be read. ConfigError for others, and for a model that takes none."""
        if not self.sees:
            raise ConfigError("chat: the model takes no pictures, or is loaded without its vision tower")
        file = Path(path).expanduser()
        self._renderer.tokenizer.image_of(picture_of(str(file), "picture", Path()))
        return file

    @property
    def shared_tokens(self) -> int:
        """Prompt tokens since the last call that the cache had already."""
        return self._engine.take_counts()[0].shared_tokens

    def save(self, file: Path) -> None:
        """Write the messages as JSONL."""
        write_whole(file, "".join(json.dumps(written(one), ensure_ascii=False) + "\n" for one in self.messages))

    def load(self, file: Path) -> None:
        """Read messages from JSONL in place of those so far. ConfigError for a file that holds none."""
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
            messages = [json.loads(line) for line in lines if line.strip()]
        except OSError as error:
            raise ConfigError(f"chat: {missing_path(file.absolute()) if not file.exists() else error}") from error
        except ValueError as error:
            raise ConfigError(f"chat: {file} is no JSONL of messages: {error}") from error
        self.messages = self._checked(messages, str(file))

    def close(self) -> None:
        """Free the engine, and end what tools hold."""
        self._thread.close(STOP_TIMEOUT_S)
        self._engine.close()
        for tool in self._tools:
            tool.close()


def _shown_call(function: Mapping[str, Any]) -> str:
    arguments = ", ".join(f"{key}={value!r}" for key, value in function["arguments"].items())
    return f"{function['name']}({arguments})"


def tools_from(given: Sequence[Any]) -> list[Tool]:
    """Make tools of functions, of their names `file.py:name`, and of all public functions of files `file.py`; `none`
    alone is no tool."""
    if list(given) == ["none"]:
        return []
    named: list[Any] = []
    for one in given:
        if isinstance(one, str) and one.endswith(".py"):
            named += [f"{one}:{name}" for name in public_functions(Locator(one).file)]
        else:
            named.append(one)
    return tools_of([ToolSection(fn=Locator(one) if isinstance(one, str) else one) for one in named], servers=False)


COMMANDS = {
    "/image": "PATH show a picture with the next message",
    "/reset": "begin anew",
    "/system": "[TEXT] show the system message, or begin anew with another",
    "/regenerate": "answer the last message again",
    "/save": "FILE write the messages as JSONL",
    "/load": "FILE read them",
    "/help": "this list",
    "/exit": "end, as does Ctrl-D",
}
BLOCK = '"""'


@dataclass
class Terminal:
    """Chat of a person over a terminal or a pipe: answers go to standard output, everything else to standard error.

    A line is a message; one that ends with a backslash goes on in the next, and one that begins with three quotes goes
    on to the line that ends with three. Over a pipe the first error is raised. `history`: file that is read if it is
    there, and written after each answer. `until_empty`: an empty line ends the chat.
    """

    chat: Chat
    history: Path | None = None
    until_empty: bool = False

    def __post_init__(self) -> None:
        self._interactive = sys.stdin.isatty() or self.until_empty
        self._column = 0
        self._last = ""
        self._images: list[str] = []
        """Pictures of the next message."""
        if self.history is not None and self.history.exists():
            self.chat.load(self.history)

    def run(self) -> str:
        """Hold the chat until its end; returns the last answer."""
        if sys.stdin.isatty():
            import readline  # noqa: F401 (input edits lines with it)

            self._note("/help lists commands; Ctrl-C stops an answer, Ctrl-D ends. The first answer compiles.")
            if not self.chat.chats:
                self._note("without a chat template: each message is continued as a text of its own")
        while (text := self._read()) is not None:
            if not self._handled(text):
                break
        return self._last

    def _read(self) -> str | None:
        """Next message or command; None at the end."""
        while True:
            try:
                text = self._message()
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                self._note("\nCtrl-D or /exit ends")
                continue
            except EOFError:
                return None
            if text.strip():
                return text
            if self.until_empty:
                return None

    def _message(self) -> str:
        line = self._line("> ")
        if line.lstrip().startswith(BLOCK):
            lines = [line.lstrip().removeprefix(BLOCK)]
            while not lines[-1].rstrip().endswith(BLOCK):
                lines.append(self._line("... "))
            return "\n".join([*lines[:-1], lines[-1].rstrip().removesuffix(BLOCK)]).strip("\n")
        while line.endswith("\\"):
            line = f"{line[:-1]}\n{self._line('... ')}"
        return line

    def _line(self, prompt: str) -> str:
        return input(prompt if self._interactive else "")

    def _handled(self, text: str) -> bool:
        """Answer a message or do what a command says; False at the end."""
        try:
            if text.startswith("//") or not text.startswith("/"):
                images, self._images = self._images, []
                self._answer(lambda: self.chat.ask(text.removeprefix("/"), self._listener, images=images))
                return True
            return self._command(*text.split(maxsplit=1))
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            self._end_line()
            self._note("stopped")
        except (ConfigError, RunError) as error:
            self._end_line()
            if not self._interactive:
                raise
            self._note(f"error: {error}")
        return True

    def _command(self, command: str, argument: str | None = None) -> bool:
        if command not in COMMANDS:
            near = did_you_mean(command, COMMANDS)
            raise ConfigError(f"chat: {command} is no command{near}; a message that begins with / is written //...")
        if command in ("/save", "/load", "/image") and argument is None:
            raise ConfigError(f"chat: {command} needs a file")
        if command == "/reset":
            self.chat.begin(self.chat.system)
        elif command == "/system" and argument is None:
            self._note(self.chat.system or "no system message")
        elif command == "/system":
            self.chat.begin(argument)
        elif command == "/image":
            self._images.append(str(self.chat.picture(argument or "")))
        elif command == "/regenerate":
            self._answer(lambda: self.chat.again(self._listener))
        elif command == "/save":
            self.chat.save(Path(argument or "").expanduser())
        elif command == "/load":
            self.chat.load(Path(argument or "").expanduser())
            self._note(f"{len(self.chat.messages)} messages")
        elif command == "/help":
            for name, text in COMMANDS.items():
                self._note(f"{name} {text}")
        return command != "/exit"

    def _answer(self, answer: Callable[[], str]) -> None:
        try:
            self._last = answer()
        finally:
            self._end_line()
            if self.history is not None:
                self.chat.save(self.history)

    @property
    def _listener(self) -> Listener:
        return Listener(text=self._write, note=lambda line: self._note(cut(line, RESULT_CELLS)))

    def _write(self, text: str) -> None:
        """Write a piece of an answer; to a terminal without control characters."""
        encoding = sys.stdout.encoding or "utf-8"
        if sys.stdout.isatty():
            text = "".join(c if c in "\n\t" else printable(c, encoding) for c in text)
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
        self._column = 0 if text.endswith("\n") else 1

    def _end_line(self) -> None:
        if self._column:
            self._write("\n")

    def _note(self, line: str) -> None:
        self._end_line()
        shown = "\n".join(printable(one, sys.stderr.encoding or "utf-8") for one in line.split("\n"))
        print(shown, file=sys.stderr, flush=True)
