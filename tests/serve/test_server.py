"""The server over one tiny engine, by the official client: many clients at once, hang-ups, odd requests, and limits."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from safetensors.numpy import save_file

from posttrain.config import LookupDrafts
from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.errors import ConfigError
from posttrain.generation import without_padding
from posttrain.rollout.adapters import AdapterSlots
from posttrain.rollout.engine import NativeEngine
from posttrain.rollout.types import SamplingParams, samples_of, text_of
from posttrain.serve.body import Body, Refused, chat_ask
from posttrain.serve.chat import ResponseRequest
from posttrain.serve.model import Limits, Served
from posttrain.tools.formats import Format
from posttrain.tools.grammar import tool_grammar
from tests.serve.serving import listening, tiny_served
from tests.tiny import tiny_model

MODEL, LENGTH = "tiny/model", 512


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("bytes")


@pytest.fixture(scope="module")
def served() -> Served:
    return tiny_served(MODEL, LENGTH, adapters=AdapterSlots(count=1, rank=2))


@pytest.fixture(scope="module")
def url(served: Served) -> Iterator[str]:
    with listening(served) as address:
        yield address


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """PEFT's adapter of one matrix."""
    folder, draw = tmp_path / "adapter", np.random.default_rng(0)
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    prefix = "base_model.model.model.layers.0.mlp.down_proj.lora_"
    sizes = {"A.weight": (2, 48), "B.weight": (32, 2)}
    tensors = {f"{prefix}{name}": draw.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(served: Served) -> Iterator[None]:
    yield
    until(lambda: served.num_open == served.engine.num_used_blocks == served.engine.num_waiting == 0)
    assert served.engine.num_free == served.engine.slots


@pytest.mark.thorough
def test_the_page_of_the_server(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs/reference/serve.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    assert "http://127.0.0.1:8000/v1" in code and '"mine"' in code
    exec(code.replace("http://127.0.0.1:8000/v1", url).replace('"mine"', repr(MODEL)), {})
    assert capsys.readouterr().out.strip()


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def expected(served: Served, prompt: list[int], **settings: Any) -> tuple[int, ...]:
    """Tokens of the engine itself."""
    plain = {"max_tokens": 16, "temperature": 0.0, "stop_token_ids": served.tokenizer.stop_ids}
    params = SamplingParams(**plain | settings, key=(0, 0))
    (one,) = samples_of(params, n=1, seed=7)
    (done,) = twin(served).generate_all([prompt], [one])
    return done.tokens


def twin(served: Served) -> NativeEngine:
    """The same engine, while no request runs: it has no event loop then."""
    until(lambda: served.engine._driver is None)
    return served.engine


def plain(client: openai.OpenAI, prompt: Any, **fields: Any) -> Any:
    return client.completions.create(
        model=MODEL, prompt=prompt, **{"max_tokens": 16, "temperature": 0, "seed": 7} | fields
    )


def chat(client: openai.OpenAI, text: str, **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return client.chat.completions.create(
        model=MODEL, messages=messages, **{"max_tokens": 16, "temperature": 0, "seed": 7} | fields
    )


def test_tokens_are_those_of_the_engine(client: openai.OpenAI, served: Served) -> None:
    """Prompts as text, as tokens and several at once, streamed or not, greedy or drawn by a seed."""
    prompts = [[65, 66, 67], list(b"hello you"), [70]]
    for settings in ({"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.8, "min_p": 0.01, "top_k": 40}):
        wire = {"temperature": settings["temperature"], "top_p": settings.get("top_p", 1.0)}
        extra = {name: settings[name] for name in ("min_p", "top_k") if name in settings}
        whole = [
            text_of(served.tokenizer.decode, one, expected(served, one, **settings), params_of(served))
            for one in prompts
        ]
        for prompt, text in zip(prompts, whole, strict=True):
            got = plain(client, prompt, extra_body=extra, **wire)
            assert got.choices[0].text == text and got.usage.prompt_tokens == len(prompt)
            pieces = list(
                plain(client, prompt, stream=True, stream_options={"include_usage": True}, extra_body=extra, **wire)
            )
            assert "".join(piece.choices[0].text for piece in pieces[:-1]) == text
            assert pieces[-1].usage.completion_tokens == got.usage.completion_tokens and not pieces[-1].choices
    several = plain(client, prompts)
    assert [one.index for one in several.choices] == [0, 1, 2]
    assert [one.text for one in several.choices] == [plain(client, one).choices[0].text for one in prompts]
    as_text = [*served.tokenizer.prefix_ids, 65, 66, 67]
    assert plain(client, "ABC").choices[0].text == plain(client, as_text).choices[0].text
    drawn = plain(client, [65], temperature=1.0, n=3)
    assert len({one.text for one in drawn.choices}) == 3
    assert [one.text for one in plain(client, [65], temperature=1.0, n=3).choices] == [
        one.text for one in drawn.choices
    ]


def params_of(served: Served) -> SamplingParams:
    return SamplingParams(max_tokens=16, temperature=0.0, stop_token_ids=served.tokenizer.stop_ids, key=(0, 0))


@pytest.mark.thorough
def test_drafts_change_no_token(served: Served) -> None:
    drafting = tiny_served(MODEL, LENGTH, speculative=LookupDrafts(tokens=3))
    drafting.engine._runner.drafter.pace.choose = lambda rows: True  # type: ignore
    prompt, params = list(b"ABABABAB"), replace(params_of(served), max_tokens=32, allowed_token_ids=(65, 66, 67))
    [found], [wanted] = (twin(one).generate_all([prompt], [params]) for one in (drafting, served))
    assert found.tokens == wanted.tokens
    counts = dict(re.findall(r"^posttrain_(drafted|accepted)_tokens_total (\d+)$", drafting.metrics.text(), re.M))
    assert 32 > int(counts["accepted"]) > 0 and int(counts["drafted"]) > int(counts["accepted"])
    assert "posttrain_drafted_tokens_total 0" in served.metrics.text()


@pytest.mark.thorough
def test_scores_of_a_prompt(client: openai.OpenAI, served: Served) -> None:
    """As lm-eval asks for them: echo, one token, one alternative, which is the most probable one."""
    prompt = [*expected(served, [65, 66], max_tokens=9)]
    prompt = [65, 66, *prompt[:6], 200, 201]
    got = plain(client, prompt, echo=True, logprobs=1, max_tokens=1).choices[0]
    logprobs = got.logprobs
    assert len(logprobs.tokens) == len(prompt) + 1 and logprobs.token_logprobs[0] is None is logprobs.top_logprobs[0]
    pairs = zip(logprobs.tokens[1:], logprobs.top_logprobs[1:], strict=True)
    greedy = [token == max(top, key=top.get) for token, top in pairs]
    assert greedy[1:7] == [True] * 6 and not all(greedy[7:9])
    twice = plain(client, [*prompt, 3], echo=True, logprobs=0, max_tokens=0).choices[0]
    assert np.allclose(twice.logprobs.token_logprobs[1:-1], logprobs.token_logprobs[1:-1], atol=1e-4)
    assert len(twice.logprobs.tokens) == len(prompt) + 1 and twice.finish_reason == "length"
    assert plain(client, "abc", echo=True).choices[0].text.startswith("abc")
    text = plain(client, "abc", echo=True, logprobs=0)
    assert text.choices[0].logprobs.text_offset[:5] == [0, *([0] * len(served.tokenizer.prefix_ids)), 1, 2, 3][:5]


def test_chats(client: openai.OpenAI, served: Served) -> None:
    forever = {"ignore_eos": True, "allowed_token_ids": [*range(65, 91)]}
    whole = chat(client, "hi", logprobs=True, top_logprobs=2, n=2, temperature=1.0, extra_body=forever)
    for choice in whole.choices:
        entries = choice.logprobs.content
        assert len(entries) == 16 and all(len(entry.top_logprobs) == 2 for entry in entries)
        assert all(entry.logprob <= entry.top_logprobs[0].logprob + 1e-6 and entry.logprob <= 0 for entry in entries)
        assert bytes(byte for entry in entries for byte in entry.bytes or ()).decode() == choice.message.content
    streams: dict[int, str] = {0: "", 1: ""}
    ends = {}
    for chunk in chat(client, "hi", n=2, temperature=1.0, stream=True, extra_body=forever):
        (choice,) = chunk.choices
        streams[choice.index] += choice.delta.content or ""
        ends |= {choice.index: choice.finish_reason} if choice.finish_reason else {}
    assert [streams[0], streams[1]] == [choice.message.content for choice in whole.choices]
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}
    again = chat(client, "hi")
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    assert chat(client, "hi", logit_bias={"65": 100}, max_tokens=3).choices[0].message.content == "AAA"
    cut = chat(client, "hi", logit_bias={"65": 100}, stop=["AA"], max_tokens=9)
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("", "stop")
    banned = chat(client, "hi", max_completion_tokens=5, extra_body={"allowed_token_ids": [66, 67]})
    assert set(banned.choices[0].message.content) <= {"B", "C"}
    answer = chat(client, "hi", response_format={"type": "regex", "pattern": "(yes|no)[0-9]{2}"}, temperature=1.0)
    assert answer.choices[0].message.content[-2:].isdecimal()
    chosen = chat(client, "hi", extra_body={"structured_outputs": {"choice": ["Paris", "Rome"]}})
    assert chosen.choices[0].message.content in ("Paris", "Rome") and chosen.choices[0].finish_reason == "stop"
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    shaped = chat(client, "hi", response_format=wanted, temperature=1.0, max_tokens=60)
    assert json.loads(shaped.choices[0].message.content)["a"] in (1, 2)


def test_strict_tools(served: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}

    def asked(**fields: Any) -> tuple[list[int], Any]:
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema} | fields}]
        ask = chat_ask(Body({"model": MODEL, "messages": [{"role": "user", "content": "?"}], "tools": tools}))
        renderer = served.renderer("{}", None, "reasoning_effort")
        (prompt, _), tool_format = served._prompt(renderer, ask)
        return prompt, served._grammar(ask, renderer, tool_format)

    prompt, grammar = asked(strict=True)
    wanted = tool_grammar(Format("hermes", {"f": schema}), served.tokenizer, required=False, several=True)
    assert asked() == asked(strict=False) == (prompt, None)
    assert (grammar.start, grammar.rules) == (wanted.start, wanted.rules)
    for strict in (True, False):
        flat = {"type": "function", "name": "f", "parameters": schema, "strict": strict}
        assert ResponseRequest(Body({"model": MODEL, "input": "?", "tools": [flat]}))._ask.strict is strict
    for wrong in ({"strict": "yes"}, {"strict": True, "parameters": {"type": "object", "not": {}}}):
        with pytest.raises(Refused, match=r"^tools: "):
            asked(**wrong)


@pytest.mark.thorough
def test_tools(client: openai.OpenAI, served: Served) -> None:
    """A call that must be made is made, whatever the model would say, whole, streamed, and as an item."""
    two = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    tools: Any = [{"type": "function", "function": {"name": name, "parameters": two}} for name in ("add", "sub")]
    messages: Any = [{"role": "user", "content": "?"}]
    # Without an h there is no <think>, which a random model would not end.
    thoughtless = {"logit_bias": {"104": -100}, "ignore_eos": False}
    fields: Any = {"model": MODEL, "messages": messages, "tools": tools, "max_tokens": 90, "extra_body": thoughtless}
    forced: Any = {"type": "function", "function": {"name": "sub"}}
    whole = client.chat.completions.create(**fields, tool_choice=forced, parallel_tool_calls=False).choices[0]
    (call,) = whole.message.tool_calls
    assert (whole.finish_reason, call.function.name) == ("tool_calls", "sub") and whole.message.content is None
    assert json.loads(call.function.arguments)["a"] in (1, 2)
    deltas = [
        chunk.choices[0].delta
        for chunk in client.chat.completions.create(
            **fields, tool_choice="required", parallel_tool_calls=False, stream=True
        )
    ]
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [call.index for call in calls] == [0] and calls[0].function.name in ("add", "sub")
    flat: Any = [{"type": "function", **tool["function"], "strict": True} for tool in tools]
    done = client.responses.create(
        model=MODEL, input="?", tools=flat, tool_choice="required", parallel_tool_calls=False, extra_body=thoughtless
    )
    assert [item.type for item in done.output] == ["function_call"]


@pytest.mark.thorough
def test_a_call_that_is_cut_behind_a_whole_one(client: openai.OpenAI) -> None:
    """`length` and `incomplete` tell that calls are missing; whole and streamed, and as items. Tokens found in the
    cache are told of an answer that ends with its only call, too."""
    digit = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["a"]}
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": digit}}]
    messages: Any = [{"role": "user", "content": "?"}]
    thoughtless = {"logit_bias": {"104": -100}, "ignore_eos": False}
    # One call has some 50 tokens, so that 80 end within the second.
    fields: Any = {"model": MODEL, "messages": messages, "tools": tools, "tool_choice": "required", "max_tokens": 80}
    for seed in range(20):
        whole = client.chat.completions.create(**fields, seed=seed, extra_body=thoughtless)
        assert whole.usage is not None
        if whole.choices[0].message.tool_calls and whole.usage.completion_tokens == 80:
            break
    else:
        raise AssertionError("no answer is cut behind a whole call")
    assert whole.choices[0].finish_reason == "length"
    chunks = client.chat.completions.create(**fields, seed=seed, extra_body=thoughtless, stream=True)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    flat: Any = [{"type": "function", **tool["function"]} for tool in tools]
    asked: Any = {"model": MODEL, "input": "?", "tools": flat, "tool_choice": "required", "max_output_tokens": 80}
    items = client.responses.create(**asked, extra_body={**thoughtless, "seed": seed})
    assert items.status == "incomplete" and "function_call" in [item.type for item in items.output]
    one = client.chat.completions.create(**fields, parallel_tool_calls=False, seed=seed, extra_body=thoughtless)
    assert one.usage is not None and one.usage.prompt_tokens_details is not None
    assert one.choices[0].finish_reason == "tool_calls" and one.usage.prompt_tokens_details.cached_tokens


@pytest.mark.thorough
def test_responses(client: openai.OpenAI, served: Served) -> None:
    whole = client.responses.create(
        model=MODEL,
        input="hi",
        max_output_tokens=8,
        temperature=0,
        instructions="be brief",
        extra_body={"ignore_eos": True},
    )
    assert whole.status == "incomplete" and whole.usage is not None and whole.usage.output_tokens == 8
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "function_call", "call_id": "a", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "3"},
    ]
    tools: Any = [
        {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": True}
    ]
    with client.responses.stream(model=MODEL, input=items, tools=tools, max_output_tokens=8, temperature=0) as stream:
        kinds = [event.type for event in stream]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-1] in ("response.incomplete", "response.completed") and "response.output_text.delta" in kinds


ODD: dict[str, tuple[str, Any, int, str]] = {
    "no JSON": ("chat/completions", b"{", 400, "not JSON"),
    "no object": ("chat/completions", b"[]", 400, "must be a JSON object"),
    "NaN": ("completions", b'{"temperature": NaN}', 400, "NaN is no number"),
    "no model": ("completions", {"prompt": "a"}, 400, "give the name of a model"),
    "unknown model": ("completions", {"model": "x", "prompt": "a"}, 404, "not served"),
    "unknown field": ("completions", {"model": MODEL, "prompt": "a", "temprature": 1}, 400, "temprature"),
    "best_of": ("completions", {"model": MODEL, "prompt": "a", "best_of": 4}, 400, "best_of"),
    "token": ("completions", {"model": MODEL, "prompt": [9999]}, 400, "token ids must be"),
    "no token": ("completions", {"model": MODEL, "prompt": []}, 400, "prompt"),
    "too long": ("completions", {"model": MODEL, "prompt": "a" * 600}, 400, "maximum context length is 512"),
    "too long an input": ("responses", {"model": MODEL, "input": "a" * 600}, 400, "maximum context length is 512"),
    "too many": ("completions", {"model": MODEL, "prompt": "a", "max_tokens": 600}, 400, "max_tokens is 600"),
    "temperature": ("completions", {"model": MODEL, "prompt": "a", "temperature": "1"}, 400, "temperature"),
    "top_p": ("completions", {"model": MODEL, "prompt": "a", "top_p": 0}, 400, "top_p"),
    "bias": ("completions", {"model": MODEL, "prompt": "a", "logit_bias": {"a": 1}}, 400, "logit_bias"),
    "n": ("completions", {"model": MODEL, "prompt": "a", "n": 100}, 400, "at most 68"),
    "options": ("completions", {"model": MODEL, "prompt": "a", "stream_options": {"x": 1}}, 400, "stream_options"),
    "grammar": (
        "completions",
        {"model": MODEL, "prompt": "a", "response_format": {"type": "xml"}},
        400,
        "response_format",
    ),
    "schema": (
        "completions",
        {"model": MODEL, "prompt": "a", "structured_outputs": {"json": '{"not": {}}'}},
        400,
        'structured_outputs: json_schema: keywords that are not supported: ["not"]',
    ),
    "structure": (
        "completions",
        {"model": MODEL, "prompt": "a", "structured_outputs": {"grammar": "x"}},
        400,
        "must hold one of json, regex, choice, or json_object",
    ),
    "messages": ("chat/completions", {"model": MODEL, "messages": []}, 400, "non-empty list"),
    "image": (
        "chat/completions",
        {"model": MODEL, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "a picture is sent as",
    ),
    "template": (
        "chat/completions",
        {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"x": 1}},
        400,
        "does not mention 'x'",
    ),
    "effort": (
        "chat/completions",
        {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "reasoning_effort": "low"},
        400,
        "reasoning_effort: low: the chat template has no variable for it",
    ),
    "effort of a response": (
        "responses",
        {"model": MODEL, "input": "a", "reasoning": {"effort": "most"}},
        400,
        "xhigh",
    ),
    "summary": ("responses", {"model": MODEL, "input": "a", "reasoning": {"summary": "auto"}}, 400, "summary"),
    "top_logprobs": (
        "chat/completions",
        {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "top_logprobs": 1},
        400,
        "logprobs: true",
    ),
    "choice": (
        "chat/completions",
        {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "tool_choice": "required"},
        400,
        "there is no such tool",
    ),
    "store": ("responses", {"model": MODEL, "input": "a", "store": True}, 400, "store=true"),
    "memory": ("responses", {"model": MODEL, "input": "a", "previous_response_id": "x"}, 400, "previous_response_id"),
    "item": ("responses", {"model": MODEL, "input": [{"type": "reasoning"}]}, 400, "input[0]"),
    "search": ("responses", {"model": MODEL, "input": "a", "tools": [{"type": "web_search"}]}, 400, "web_search"),
    "path": ("embeddings", {}, 404, "POST /v1/embeddings is not served"),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_requests_are_refused(url: str, name: str) -> None:
    path, body, status, words = ODD[name]
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = httpx.post(f"{url}/{path}", content=content)
    error = answer.json()["error"]
    assert (answer.status_code, words in error["message"], "\n" in error["message"]) == (status, True, False), error
    assert error["param"] in {None, "model", *body}, error


def test_models_health_and_metrics(url: str, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL] and client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("x")
    base = url.removesuffix("/v1")
    assert httpx.get(f"{base}/health").json() == {"status": "ok"}
    plain(client, [65], max_tokens=6)
    text = httpx.get(f"{base}/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    sampled, first = values["posttrain_completion_tokens_total"], values["posttrain_time_to_first_token_seconds_count"]
    assert int(sampled) >= 6 and int(first) > 0 and values["posttrain_samples_running"] == "0"
    assert int(values['posttrain_requests_total{path="/v1/completions",status="200"}']) > 0
    buckets = [int(v) for name, v in values.items() if name.startswith("posttrain_request_seconds_bucket")]
    assert buckets == sorted(buckets) and buckets[-1] == int(values["posttrain_request_seconds_count"])


def test_adapters_have_names_of_models(
    url: str, client: openai.OpenAI, served: Served, tmp_path: Path, adapter: Path
) -> None:
    def post(path: str, **body: Any) -> tuple[int, str]:
        answer = httpx.post(f"{url}/{path}", json=body)
        return answer.status_code, answer.text

    base = plain(client, [65, 66]).choices[0].text
    assert post("load_lora_adapter", lora_name="other", lora_path=str(adapter))[0] == 200
    assert [model.id for model in client.models.list()] == [MODEL, "other"]
    messages: Any = [{"role": "user", "content": "ab"}]
    for ask in (
        lambda name: client.completions.create(model=name, prompt=[65, 66], max_tokens=16, temperature=0),
        lambda name: client.chat.completions.create(model=name, messages=messages, max_tokens=16, temperature=0),
    ):
        one, other = ask(MODEL), ask("other")
        assert other.model == "other" and one.choices[0] != other.choices[0]
    assert plain(client, [65, 66]).choices[0].text == base
    for body, words in {
        ("other", str(adapter)): "is served already",
        (MODEL, str(adapter)): "is served already",
        (
            "third",
            str(adapter),
        ): "all 1 slots are taken, by other; drop one, or start the server with more --adapter-slots",
        ("third", ""): "needs lora_name and lora_path",
    }.items():
        status, text = post("load_lora_adapter", lora_name=body[0], lora_path=body[1])
        assert status == 400 and words in text
    assert post("unload_lora_adapter", lora_name="other")[0] == 200
    assert post("unload_lora_adapter", lora_name="other")[0] == 404
    assert post("load_lora_adapter", lora_name="a", lora_path=str(tmp_path / "none"))[0] == 400
    with pytest.raises(openai.NotFoundError, match="model 'other' is not served here"):
        ask("other")


def test_many_clients_of_whom_some_hang_up(url: str, client: openai.OpenAI, served: Served) -> None:
    """Each request has the tokens that it has alone; those who left cost nobody anything."""
    alone = [plain(client, [65 + number], max_tokens=20).choices[0].text for number in range(6)]
    left = 0

    async def one(number: int, session: httpx.AsyncClient) -> None:
        nonlocal left
        body: dict[str, Any] = {"model": MODEL, "prompt": [65 + number % 6], "max_tokens": 20, "temperature": 0}
        if number % 8 == 3:
            body |= {"max_tokens": 120, "stream": number % 16 == 3, "ignore_eos": True}
            if body["stream"]:
                async with session.stream("POST", f"{url}/completions", json=body) as stream:
                    await anext(stream.aiter_text())
            else:
                task = asyncio.create_task(session.post(f"{url}/completions", json=body))
                await asyncio.sleep(0.1)
                task.cancel()
            left += 1
        elif number % 8 == 5:
            answer = await session.post(f"{url}/completions", content=b"{" * number)
            assert answer.status_code == 400
        else:
            answer = await session.post(f"{url}/completions", json=body)
            assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == alone[number % 6]

    async def run() -> None:
        limits = httpx.Limits(max_connections=40)
        async with httpx.AsyncClient(timeout=60, limits=limits) as session:
            await asyncio.gather(*(one(number, session) for number in range(40)))

    asyncio.run(run())
    assert left == 5
    until(lambda: served.num_open == 0)
    hung_up = served.metrics.requests["/v1/completions", 499]
    assert hung_up >= 1


def test_limits(client: openai.OpenAI, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full queue is 503, a late answer 504, in a stream an error event; both free what they held."""
    monkeypatch.setattr(served, "limits", Limits(queue=0, timeout_s=60.0))
    served.num_open += served.engine.slots
    with pytest.raises(openai.InternalServerError, match="try again later"):
        plain(client, [65])
    served.num_open -= served.engine.slots
    monkeypatch.setattr(served, "limits", Limits(queue=0, timeout_s=1e-3))
    with pytest.raises(openai.InternalServerError, match="longer than 0.001 s") as late:
        plain(client, [65], max_tokens=100)
    assert late.value.status_code == 504
    with pytest.raises(openai.APIError, match="longer than 0.001 s"):
        list(plain(client, [65], max_tokens=100, stream=True))
    assert math.isfinite(served.metrics.request_s.total)


def test_refusals_name_options_of_serve(tokenizer: Tokenizer, served: Served, adapter: Path) -> None:
    """No field of a configuration, which whoever serves does not write."""
    model = without_padding(tiny_model(num_layers=1, windows=(None,), max_positions=LENGTH), tokenizer)
    sizes: dict[str, Any] = {"slots": 4, "max_length": LENGTH, "decode_steps": 5, "tool_format": "hermes"}
    limits = Limits(queue=1, timeout_s=1.0)
    with pytest.raises(ConfigError, match=r"^serve: --cache-tokens: a cache of .* of --max-length 512; it needs \d+$"):
        Served.of(model, tokenizer, name=MODEL, cache_tokens=64, limits=limits, **sizes)
    narrow = tiny_served(MODEL, LENGTH, adapters=AdapterSlots(count=1, rank=1))
    with pytest.raises(ConfigError, match=r"--adapter x=.* has rank 2 at .*, above --adapter-rank 1"):
        narrow.add_adapter("x", str(adapter))
    bare = replace(tokenizer, hf=copy.copy(tokenizer.hf))
    bare.hf.chat_template = None
    ask = chat_ask(Body({"model": MODEL, "messages": [{"role": "user", "content": "a"}]}))
    plain = Served(served.engine, bare, MODEL, served.vocab_size, "hermes", limits)
    with pytest.raises(Refused, match="has no chat template; start the server with --chat-template"):
        asyncio.run(plain.chat(ask))
