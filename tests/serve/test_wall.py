"""Outer wall of all servers: every endpoint with broken, foreign and hostile requests, the next of which is answered;
bounds of what one request may ask for, checked before its work; and work that is done beside the event loop."""

from __future__ import annotations

import base64
import io
import json
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from PIL import Image

from posttrain.agents import server as agents_server
from posttrain.agents import session as agents_session
from posttrain.agents.server import Sessions
from posttrain.config import ImageSection
from posttrain.data.chat import Renderer
from posttrain.data.grammar import Grammar, GrammarCompiler
from posttrain.data.pictures import Picture
from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.rollout.adapters import AdapterSlots
from posttrain.runtime.event_loop import LoopThread
from posttrain.serve import admission, body, model, writing
from posttrain.serve.completions import Choice
from posttrain.serve.model import Limits, Served
from posttrain.serve.text import TurnStream
from posttrain.view.chat import ChatPage
from tests.agents.test_session import Counting, session
from tests.serve.serving import listening, tiny_served
from tests.view.helpers import served_site
from tests.view.test_chat import Scripted

NAME, LENGTH, MAX_BODY = "mine", 128, 1 << 20
USER = {"role": "user", "content": "?"}
KIND = {"Content-Type": "application/json"}
CLIENT = httpx.Client(verify=False, timeout=60)
"""Client that keeps its connections: what comes behind a refused request must be read as the next one."""


@pytest.fixture(scope="module", autouse=True)
def client() -> Iterator[None]:
    yield
    CLIENT.close()


class Endpoint(NamedTuple):
    """Address of a request with a body, and the fields of one that is answered."""

    url: str
    fields: dict[str, Any]

    def ask(self, content: Any = None, method: str = "POST", **headers: str) -> httpx.Response:
        given = KIND | {name.replace("_", "-"): value for name, value in headers.items()}
        content = json.dumps(self.fields).encode() if content is None else content
        return CLIENT.request(method, self.url, content=content, headers=given)


@pytest.fixture(scope="module")
def served() -> Served:
    slots = AdapterSlots(count=1, rank=2)
    return tiny_served(NAME, LENGTH, slots=2, limits=Limits(queue=6, timeout_s=60.0), adapters=slots)


@pytest.fixture(scope="module")
def url(served: Served) -> Iterator[str]:
    with listening(served, max_body=MAX_BODY) as address:
        yield address


@contextmanager
def open_session() -> Iterator[tuple[str, LoopThread]]:
    """Address of a session of an agent, and the loop of its run."""
    tokenizer, sessions = load_tokenizer("bytes"), Sessions()
    made = session(tokenizer, Counting(tokenizer), max_turns=1000, max_rows=1000, row_tokens=LENGTH)

    async def opened() -> str:
        return sessions.open(made).base_url

    with LoopThread("run") as loop:
        yield loop.call(opened(), timeout_s=60.0), loop
        sessions.close()


@pytest.fixture(scope="module")
def endpoints(url: str) -> Iterator[dict[str, Endpoint]]:
    chat = {"model": NAME, "messages": [USER], "max_tokens": 2}
    answer = {"model": NAME, "input": "?", "max_output_tokens": 2}
    talk = Scripted()
    talk.go.set()
    with open_session() as (session_url, _), served_site(ChatPage(talk, "page", lambda: None)) as page:
        yield {
            "chat": Endpoint(f"{url}/chat/completions", chat),
            "completions": Endpoint(f"{url}/completions", {"model": NAME, "prompt": "?", "max_tokens": 2}),
            "responses": Endpoint(f"{url}/responses", answer),
            "load": Endpoint(f"{url}/load_lora_adapter", {"lora_name": "x", "lora_path": "/nowhere"}),
            "unload": Endpoint(f"{url}/unload_lora_adapter", {"lora_name": "x"}),
            "session": Endpoint(f"{session_url}/chat/completions", chat),
            "session responses": Endpoint(f"{session_url}/responses", answer),
            "page": Endpoint(f"{page}api/ask", {"text": "?"}),
        }


NAMES = (
    *("chat", "completions", "responses", "load", "unload"),
    *("session", "session responses", "page"),
)
ANSWERED = {"load": 400, "unload": 404}
"""Status of a request in order, but for 200: there is no such adapter."""
BROKEN: dict[str, bytes] = {
    "nothing": b"",
    "no object": b"[1]",
    "no JSON": b'{"text": "a"',
    "no UTF-8": b'{"text": "\xff"}',
    "UTF-16": json.dumps({"text": "a"}).encode("utf-16"),
    "half a character in UTF-8": b'{"text": "\xed\xa0\x80"}',
    "half a character as an escape": b'{"text": "\\ud800"}',
    "NaN": b'{"text": NaN}',
    "Infinity": b'{"text": [-Infinity]}',
    "a number beyond floats": b'{"text": 1e999}',
    "an integer of too many digits": b'{"text": 1' + b"0" * 5000 + b"}",
    "a key twice": b'{"text": "a", "text": "a"}',
    "a key twice, deeper": b'{"text": [{"a": 1, "b": 2, "a": 1}]}',
    "deep lists": b'{"text": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
    "deep objects": b'{"text": ' + b'{"a":' * 101 + b"1" + b"}" * 101 + b"}",
}


def error_of(response: httpx.Response) -> str:
    """Message of a refusal, which has one in its server's form."""
    error = response.json()["error"]
    if isinstance(error, str):
        return error
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    return str(error["message"])


@pytest.mark.parametrize("name", NAMES)
def test_broken_and_foreign_requests(endpoints: dict[str, Endpoint], name: str) -> None:
    """Each has a refusal in one line, and the next request is answered."""
    endpoint = endpoints[name]
    for case, content in BROKEN.items():
        response = endpoint.ask(content)
        assert response.status_code == 400, (case, response.text)
        message = error_of(response)
        assert message and "\n" not in message and len(message) < 300, case
    host = httpx.URL(endpoint.url).netloc.decode()
    for status, headers in (
        (403, {"Host": "evil.example.org"}),
        (403, {"Host": f"{host}.example.org"}),
        (403, {"Origin": "http://evil.example.org"}),
        (403, {"Origin": "null"}),
        (415, {"Content_Type": "text/plain"}),
        (415, {"Content_Type": "application/x-www-form-urlencoded", "Origin": "http://evil.example.org"}),
        (431, {"X_Long": "a" * 20_000}),
    ):
        response = endpoint.ask(None, **headers)
        assert response.status_code == status and error_of(response), (headers, response.text)
    for method in ("HEAD", "OPTIONS", "GET", "PUT", "DELETE"):
        assert endpoint.ask(method=method).status_code in (404, 405), method
    for good in (host, host.upper(), host.replace("127.0.0.1", "LocalHost."), host.replace("127.0.0.1", "[::1]")):
        answer = endpoint.ask(None, Host=good, Origin=f"http://{good}")
        assert answer.status_code == ANSWERED.get(name, 200), (good, answer.text)


@pytest.mark.parametrize(("name", "pieces"), [("chat", 2), ("load", 2), ("session", 65), ("page", 65)])
def test_a_body_without_a_length_is_counted(endpoints: dict[str, Endpoint], name: str, pieces: int) -> None:
    piece = b" " * (1 << 20)
    response = endpoints[name].ask(piece for _ in range(pieces))
    assert response.status_code == 413 and "MiB" in error_of(response)
    assert endpoints[name].ask().status_code == ANSWERED.get(name, 200)


BIG = "9" * 400
TOOL = {"type": "function", "function": {"name": "f"}}


def called(arguments: str) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    calls = [{"id": "a", "type": "function", "function": function}]
    return [USER, {"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": "1"}]


def strict(parameters: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}]


@pytest.mark.parametrize(
    ("field", "fields", "words"),
    [
        ("messages", {"messages": [USER] * 4097}, "4097 messages; at most 4096"),
        ("messages", {"messages": called('{"a":' * 101 + "1" + "}" * 101)}, "at most 100 levels"),
        ("messages", {"messages": called('{"a":' * 50_000)}, "no JSON"),
        ("messages", {"messages": called('{"a": NaN}')}, "NaN is no number"),
        ("messages", {"messages": called(json.dumps({"a": "b" * 3000}))}, "bytes of text"),
        ("messages", {"tools": [{"type": "function", "function": {"name": "f" * 3000}}]}, "bytes of text"),
        ("tools", {"tools": [TOOL] * 1025}, "1025 tools; at most 1024"),
        ("tools", {"tools": strict("object")}, "must be a JSON schema"),
        ("tools", {"tools": strict({"properties": [1]})}, "properties is '[1]'; it must be an object"),
        ("tools", {"tools": strict({"properties": {"a": 5}})}, "must be a JSON schema"),
        ("tools", {"tools": strict({"required": "a"})}, "a list of texts"),
        ("tools", {"tools": strict({"properties": {"a": {"pattern": "a?" * 5000}}})}, "a pattern of 10000"),
        ("stop", {"stop": ["a"] * 17}, "17 strings; at most 16"),
        ("stop", {"stop": "a" * 257}, "a string of 257 characters; at most 256"),
        ("stop_token_ids", {"stop_token_ids": [1] * 17}, "17 token ids; at most 16"),
        ("stop_token_ids", {"stop_token_ids": [10**12]}, "from 0 to"),
        ("allowed_token_ids", {"allowed_token_ids": [1] * (1 << 14) + [512]}, "from 0 to"),
        ("logit_bias", {"logit_bias": {str(number): 1 for number in range(301)}}, "301 token ids; at most 300"),
        ("logit_bias", {"logit_bias": {"1": int(BIG)}}, "must map token ids to numbers"),
        ("n", {"n": 129}, "from 1 to 128"),
        ("n", {"n": 9}, "9 samples in one request; at most 8"),
        ("n", {"n": int(BIG)}, "from 1 to 128"),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 21}, "from 0 to 20"),
        ("temperature", {"temperature": int(BIG)}, "from 0 to 100"),
        ("seed", {"seed": int(BIG)}, "whole number"),
        ("max_tokens", {"max_tokens": int(BIG)}, "maximum context length"),
        ("chat_template_kwargs", {"chat_template_kwargs": {"a": "b" * 20_000}}, "at most 16384"),
        ("chat_template_kwargs", {"chat_template_kwargs": [1]}, "must be an object"),
        ("response_format", {"response_format": {"type": "regex", "pattern": "a?" * 5000}}, "a pattern of 10000"),
        ("structured_outputs", {"structured_outputs": {"regex": "a?" * 5000}}, "a pattern of 10000"),
        ("structured_outputs", {"structured_outputs": {"json": '{"a":' * 20_000}}, "recursion"),
        ("structured_outputs", {"structured_outputs": {"json": '{"a":' * 500 + "1" + "}" * 500}}, "100 levels"),
        ("structured_outputs", {"structured_outputs": {"regex": "(" * 300 + "a" + ")" * 300}}, "nested"),
    ],
)
def test_bounds(
    endpoints: dict[str, Endpoint],
    monkeypatch: pytest.MonkeyPatch,
    field: str,
    fields: dict[str, Any],
    words: str,
) -> None:
    """Each is told of its field, before a grammar is compiled."""
    if "nested" not in words:
        monkeypatch.setattr(Grammar, "checked", None)
    response = endpoints["chat"].ask(json.dumps(endpoints["chat"].fields | fields).encode())
    assert response.status_code == 400, response.text
    assert words in error_of(response) and response.json()["error"]["param"] == field
    assert endpoints["chat"].ask().status_code == 200


def test_sizes_of_grammars(endpoints: dict[str, Endpoint]) -> None:
    choices = {"choice": ["a" * 1000 + str(number) for number in range(300)]}
    with pytest.raises(body.Refused, match="bytes; at most 262144") as refused:
        body.asked_grammar(body.Body({"structured_outputs": choices}))
    assert refused.value.param == "structured_outputs"


def test_a_long_chain_of_references_ends_no_process(served: Served) -> None:
    """llguidance goes down along all of them; with a stack of the usual 8 MiB the process was ended at 5000."""
    links = {f"a{number}": {"$ref": f"#/$defs/a{number + 1}"} for number in range(6000)}
    grammar = Grammar.json_schema({"$ref": "#/$defs/a0", "$defs": links | {"a6000": {"enum": [7]}}})
    started = GrammarCompiler(served.tokenizer, served.vocab_size).start(grammar, [65], served.tokenizer.stop_ids)
    (seven,) = served.tokenizer.encode("7")
    assert started.allowed[seven // 32] >> seven % 32 & 1


def test_adapters_that_cannot_be(endpoints: dict[str, Endpoint]) -> None:
    for field, name, path in (
        ("lora_name", "x" * 256, "/nowhere"),
        ("lora_path", "x", "a\0b"),
        ("lora_path", "x", "/" + "y" * 256),
        ("lora_path", "x", "y/" * 2048),
        ("lora_path", "x", "/nowhere"),
    ):
        response = endpoints["load"].ask(json.dumps({"lora_name": name, "lora_path": path}).encode())
        assert response.status_code == 400 and response.json()["error"]["param"] == field
        assert len(error_of(response)) < 300


def test_one_request_fails_alone(endpoints: dict[str, Endpoint]) -> None:
    """A number beyond the engine's integers ended all requests that ran beside it."""
    chat = endpoints["chat"]
    for fields in ({"top_k": 10**30}, {"top_k": 2**31}, {"temperature": 1e-300}, {"top_p": 1e-300}):
        response = chat.ask(json.dumps(chat.fields | fields).encode())
        assert response.status_code == 200, response.text


def test_the_log_probabilities_of_an_answer(
    endpoints: dict[str, Endpoint], served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that are sampled and scored, with their alternatives."""
    limits = admission.RequestLimits(logprobs=100)
    for count, top in ((100, 0), (20, 4), (10**9, None)):
        admission.check_logprobs(count, top, limits)
    for count, top in ((101, 0), (21, 4)):
        with pytest.raises(body.Refused, match="log-probabilities, at most 100"):
            admission.check_logprobs(count, top, limits)
    monkeypatch.setattr(served, "limits", replace(served.limits, request=limits))
    for name, fields, count in (
        ("completions", {"prompt": [[65] * 20] * 4, "logprobs": 1, "max_tokens": 2, "echo": True}, 4 * 22 * 2),
        ("completions", {"prompt": "a", "logprobs": 9, "max_tokens": 11}, 110),
        ("chat", {"logprobs": True, "top_logprobs": 4, "max_tokens": 7, "n": 3}, 105),
    ):
        endpoint = endpoints[name]
        response = endpoint.ask(json.dumps(endpoint.fields | fields).encode())
        assert response.status_code == 400 and f"{count} log-probabilities" in error_of(response)
        assert response.json()["error"]["param"] == "logprobs"


class Watched:
    """Functions that note the threads that they are called in."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self._patch = patch
        self.threads: dict[str, set[str]] = {}

    def __call__(self, owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def noted(*args: Any, **fields: Any) -> Any:
            self.threads.setdefault(f"{owner.__name__}.{name}", set()).add(threading.current_thread().name)
            return real(*args, **fields)

        self._patch.setattr(owner, name, noted)


FREE = {"ignore_eos": True, "allowed_token_ids": [*range(65, 91)]}


def test_work_is_done_beside_the_event_loop(endpoints: dict[str, Endpoint], monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading, admission, rendering, grammars, texts of tokens, and JSON, of all kinds of answers."""
    watched = Watched(monkeypatch)
    for owner, name in (
        (body, "parse_json"),
        (model, "admit"),
        (Renderer, "prompt_with_images"),
        (Tokenizer, "encode"),
        (Tokenizer, "decode_each"),
        (TurnStream, "add"),
        (TurnStream, "end"),
        (model, "logprob_entries"),
        (writing, "_pieces"),
        (Grammar, "checked"),
        (GrammarCompiler, "start"),
        (Choice, "add"),
    ):
        watched(owner, name)
    scored = {"logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}, "max_tokens": 6}
    shaped = {"response_format": {"type": "regex", "pattern": "[A-Z]{3}"}, "ignore_eos": False}
    for name, fields in (
        ("chat", FREE | scored | {"n": 3, "stream": True}),
        ("chat", FREE | {"logprobs": True, "n": 2}),
        ("chat", shaped),
        ("responses", {"stream": True}),
        ("completions", FREE | {"logprobs": 3, "stream": True, "n": 2}),
        ("completions", FREE | {"logprobs": 3}),
    ):
        endpoint = endpoints[name]
        response = endpoint.ask(json.dumps(endpoint.fields | fields).encode())
        assert response.status_code == 200, response.text
    # The first and the last events of a stream are short.
    assert {name for name, threads in watched.threads.items() if "server" in threads} <= {f"{writing.__name__}._pieces"}
    assert all(threads - {"server"} for threads in watched.threads.values()) and len(watched.threads) == 12


def test_work_of_sessions_is_done_beside_the_loop_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """In which the other samples of the run are, and that of the agents' server."""
    watched = Watched(monkeypatch)
    for owner, name in (
        (agents_session, "admit"),
        (agents_session, "message_of"),
        (agents_session, "_known"),
        (Renderer, "prompt_with_images"),
        (Renderer, "between_with_images"),
        (agents_server, "logprob_entries"),
        (writing, "_pieces"),
    ):
        watched(owner, name)
    with open_session() as (address, loop):
        chat = Endpoint(f"{address}/chat/completions", {"model": NAME, "messages": [USER], "logprobs": True})
        first = chat.ask()
        assert first.status_code == 200, first.text
        later = [USER, first.json()["choices"][0]["message"], USER]
        assert chat.ask(json.dumps({"messages": later, "n": 2}).encode()).status_code == 200
        assert len(watched.threads) == 7
        busy = {loop.thread.name, "server of agents"}
        assert not [name for name, threads in watched.threads.items() if threads & busy]


def test_an_answer_that_is_written_is_what_json_would_write() -> None:
    """Also with parts that are JSON already, at every depth."""
    inner = {"a": [1, 2.5, None, True, 'é\u2028"', {}, [], {"b": [[[[[[{"c": 1}]]]]]]}]}
    for value in (inner, [inner, [inner]], "a", {"x": {}}, [[]], (1, (2,))):
        assert json.loads(writing.encoded(value)) == json.loads(json.dumps(value))
        assert "\n" not in writing.encoded(value)
    made = {"logprobs": {"content": writing.Json('[{"token": "a"}]')}, "text": "[1]"}
    assert json.loads(writing.encoded(made)) == {"logprobs": {"content": [{"token": "a"}]}, "text": "[1]"}
    with pytest.raises(ValueError, match="not JSON compliant"):
        writing.encoded([float("nan")])


def png(width: int, height: int) -> str:
    """A picture of so many pixels by its header, as a URL: its pixels are not there."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = [struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head))]
    chunks += [struct.pack(">I", 0) + kind + struct.pack(">I", zlib.crc32(kind)) for kind in (b"IDAT", b"IEND")]
    content = bytes([137, 80, 78, 71, 13, 10, 26, 10]) + b"".join(chunks)
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def jpeg(scans: int) -> str:
    """A progressive JPEG whose last scan stands there so many times more: each is some bytes, and takes all pixels."""
    file = io.BytesIO()
    Image.new("L", (64, 64), 200).save(file, "JPEG", progressive=True)
    content = file.getvalue()
    last = content.rindex(b"\xff\xda")
    content += content[last:-2] * scans
    return f"data:image/jpeg;base64,{base64.b64encode(content).decode()}"


@pytest.mark.parametrize(
    ("pictures", "words"),
    [
        ([png(30_000, 30_000)], "decompression bomb"),
        ([png(9000, 9000)], "9000 x 9000 pixels by its header"),
        ([png(8000, 8000)] * 3, "more than 128,000,000 pixels in all"),
        ([png(10, 10)] * 401, "401 pictures; the context has 400 tokens"),
        (["data:image/png;base64,AAAA"], "is no picture"),
        ([jpeg(300)], r"is a JPEG of 30\d scans, more than 256"),
    ],
)
def test_pictures_that_take_too_much_memory(
    shared: Path, monkeypatch: pytest.MonkeyPatch, pictures: list[str], words: str
) -> None:
    """Refused by their headers: none is decoded."""
    checkpoint = shared / "goldens" / "vision" / "gemma3"
    fields = json.loads((checkpoint / "config.json").read_text())
    seeing = load_tokenizer(str(checkpoint)).for_images(fields, str(checkpoint), ImageSection())
    monkeypatch.setattr(Picture, "pixels", None)
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in pictures]
    ask = body.chat_ask(body.Body({"messages": [{"role": "user", "content": parts}]}))
    with pytest.raises(body.Refused, match=words) as refused:
        admission.admit(ask, seeing, 400, admission.RequestLimits())
    assert (refused.value.status, refused.value.param) == (400, "messages")
    if len(pictures) == 3:
        admission.admit(ask, seeing, 400, admission.RequestLimits(pixels=3 * 8000**2))
