"""Agents through the sessions: plain clients, child processes, and agents that fail."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from posttrain.agents.runner import Agents
from posttrain.agents.server import Sessions
from posttrain.config import ImageSection
from posttrain.data.chat import Renderer
from posttrain.data.pictures import Picture, Pictures, data_url
from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.reward.function import env_rewards
from posttrain.reward.keywords import completion_argument, prompt_argument
from posttrain.rl.metrics import sample_metrics
from posttrain.rl.returns import turn_advantages
from posttrain.rl.step import not_cut
from posttrain.rollout.trajectory import Example, Trajectory
from posttrain.rollout.types import SamplingParams
from posttrain.runtime.user_calls import UserCalls
from tests.agents.test_session import Counting


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("bytes")


@pytest.fixture(scope="module")
def sessions() -> Iterator[Sessions]:
    made = Sessions()
    yield made
    made.close()


def run(
    sessions: Sessions,
    tokenizer: Tokenizer,
    agent: Any,
    example: Example | None = None,
    timeout_s: float = 20.0,
    **changes: Any,
) -> Trajectory:
    plain: dict[str, Any] = {
        "args": {},
        "max_turns": 8,
        "max_rows": 3,
        "row_tokens": 400,
        "split_turns": False,
        "tool_format": None,
        "forces_calls": False,
        "unfinished": 0.0,
    }
    max_tokens, wait = changes.pop("max_tokens", 8), changes.pop("wait", 0.0)
    agents = Agents(
        run=agent,
        sessions=sessions,
        calls=UserCalls("env.fn", timeout_s=timeout_s, concurrency=4),
        **plain | changes,
    )
    renderer = Renderer(tokenizer, True)
    prompt: list[Any] = [{"role": "user", "content": "?"}]
    asked = Example(index=0, row={"size": 3}, messages=prompt, prompt_tokens=renderer.prompt(prompt), plain=False)
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, stop_token_ids=tokenizer.stop_ids, key=(0, 0))
    held = agents.converse(
        example or asked,
        group=1,
        sample=2,
        seed=9,
        renderer=renderer,
        params_of=lambda _: params,
        generate=Counting(tokenizer, wait),
    )
    return asyncio.run(held)


def ask(client: openai.OpenAI, messages: list[Any], **fields: Any) -> Any:
    return client.chat.completions.create(model="any", messages=messages, **fields)


def client_of(base_url: str, api_key: str = "x") -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)


def ask_once(base_url: str, messages: list[Any]) -> Any:
    with client_of(base_url) as client:
        return ask(client, messages)


def test_a_plain_client(sessions: Sessions, tokenizer: Tokenizer) -> None:
    """Two turns become a trajectory of two turns with the agent's reward; a stream has the same words."""
    seen: list[Any] = []

    def agent(base_url: str, api_key: str, model: str, size: int, seed: int, messages: list[Any]) -> dict[str, float]:
        with client_of(base_url, api_key) as client:
            first = ask(client, messages)
            later = [*messages, first.choices[0].message, {"role": "user", "content": "+"}]
            text = "".join(c.choices[0].delta.content or "" for c in ask(client, later, stream=True))
            seen.extend([model, size, seed, first.choices[0].message.content, text, first.usage.completion_tokens])
            seen.append(client.models.list().data[0].id)
        return {"reward": 0.5, "won": 1.0}

    made = run(sessions, tokenizer, agent)
    assert seen == ["policy", 3, 9, "1", "2", 2, "policy"]
    assert (made.stop, made.group, made.sample, len(made.turns), made.more) == ("stop", 1, 2, 2, [])
    assert env_rewards([made]) == [0.5] and made.metrics == {"won": 1.0, "rows": 1.0}
    assert [m["content"] for m in made.completion_messages] == ["1", "+", "2"]
    assert np.asarray(made.sampled).sum() == 4


def test_pictures_of_agents(sessions: Sessions, shared: Path) -> None:
    """An agent gets the pictures of its prompt as it sends them. A history that goes on keeps them, with later ones;
    the same words about another picture are a row of their own."""
    checkpoint = shared / "goldens" / "vision" / "gemma3"
    fields = json.loads((checkpoint / "config.json").read_text())
    seeing = load_tokenizer(str(checkpoint)).for_images(fields, str(checkpoint), ImageSection())
    red, blue = (Picture(name, Image.new("RGB", (40, 40), name)) for name in ("red", "blue"))
    prompt: list[Any] = [{"role": "user", "content": [{"type": "image", "image": red}, {"type": "text", "text": "?"}]}]
    tokens, images = Renderer(seeing, True).prompt_with_images(prompt)
    row = {"images": Pictures([red])}
    example = Example(index=0, row=row, messages=prompt, prompt_tokens=tokens, plain=False, images=images)

    def agent(base_url: str, messages: list[Any], images: list[str]) -> float:
        other = {"type": "image_url", "image_url": {"url": data_url(blue)}}
        assert messages[0]["content"][0] == {"type": "image_url", "image_url": {"url": images[0]}}
        with client_of(base_url) as client:
            first = ask(client, messages).choices[0].message
            ask(client, [*messages, first, {"role": "user", "content": [other]}])
            swapped = {"role": "user", "content": [other, messages[0]["content"][1]]}
            ask(client, [swapped, first, {"role": "user", "content": "+"}])
        return 1.0

    made = run(sessions, seeing, agent, example)
    assert made.error is None and len(made.more) == 1 and made.images is not None, made
    assert [image.picture.pixels().getpixel((0, 0)) for image in made.images.images] == [(255, 0, 0), (0, 0, 255)]
    assert made.example.images is not None and images is not None and made.example.images.digests == images.digests
    assert list(made.example.prompt_tokens) == list(tokens) and len(made.turns) == 2
    (other,) = made.more
    assert other.images is not None and other.images.digests == made.images.digests[1:]


def test_several_choices_and_forks_are_rows(sessions: Sessions, tokenizer: Tokenizer) -> None:
    async def agent(base_url: str) -> float:
        client = openai.AsyncOpenAI(base_url=base_url, api_key="x", max_retries=0)
        answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}], n=2)
        assert sorted(str(choice.message.content) for choice in answer.choices) == ["1", "2"]
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?" * 500}])
        await client.close()
        return 1.0

    made = run(sessions, tokenizer, agent)
    assert len(made.rows) == 2 and made.stop == "length" and made.metrics["refused_context_length_exceeded"] == 1.0
    assert env_rewards([made]) == [1.0]


def test_histories_are_rows_in_order_of_time(sessions: Sessions, tokenizer: Tokenizer) -> None:
    """A sub-agent between two turns of the first history: the last turn in time is rewarded, and is the answer."""

    def agent(base_url: str) -> float:
        with client_of(base_url) as client:
            plan = [{"role": "user", "content": "plan"}]
            said = ask(client, plan).choices[0].message
            ask(client, [{"role": "user", "content": "act"}])
            ask(client, [*plan, said, {"role": "user", "content": "+"}])
        return 1.0

    made = run(sessions, tokenizer, agent)
    assert [row.messages[0]["content"] for row in made.rows] == ["act", "plan"]
    assert made.answer.text == "3" and made.shown.startswith("assistant: 1") and env_rewards([made]) == [1.0]
    assert prompt_argument(made, text=True) == "plan" and completion_argument(made, text=True) == "3"
    turns = [(row, turn.start < turn.end, turn.reward) for row, turn in made.turns_in_time]
    assert turns == [(1, True, None), (0, True, None), (1, True, 1.0)]
    assert [times[times >= 0].tolist() for times in made.times()] == [[2, 3], [0, 1, 4, 5]]
    (values,) = turn_advantages([[made, replace(made, sample=1)]], np.asarray([[1.0, 0.0]]), {"env": 1.0})
    assert all((value[np.asarray(row.sampled)] > 0.5).all() for row, value in zip(made.rows, values[0], strict=True))


COMMAND = """
import json, os, sys, openai
row = json.load(open(os.environ["POSTTRAIN_ROW_FILE"]))
how = row["how"]
assert how == "long" or json.loads(os.environ["POSTTRAIN_ROW"]) == row
client = openai.OpenAI()
said = client.chat.completions.create(model="m", messages=row["messages"]).choices[0].message.content
if how == "hang":
    import subprocess, time
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    print(child.pid, file=open(row["file"], "w"), flush=True)
    time.sleep(300)
if how == "raise":
    raise ValueError("the agent has a bug")
print("said", said)
if how == "leave":
    import subprocess
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    print(child.pid, file=open(row["file"], "w"), flush=True)
print(json.dumps({"reward": 0.25, "length": len(said)}))
"""


@pytest.mark.thorough
def test_a_child_process(sessions: Sessions, tokenizer: Tokenizer, tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    script.write_text(COMMAND, encoding="utf-8")
    command = (sys.executable, str(script))
    made = run(sessions, tokenizer, command, args={"how": "well"})
    assert env_rewards([made]) == [0.25] and made.metrics["length"] == 1.0 and len(made.turns) == 1
    failed = run(sessions, tokenizer, command, args={"how": "raise"})
    assert failed.stop == "env_error" and failed.error is not None
    assert "exit code 1: ValueError: the agent has a bug" in failed.error and len(failed.turns) == 1
    long = run(sessions, tokenizer, command, args={"how": "long", "text": "x" * 300_000})
    assert env_rewards([long]) == [0.25], long.error
    # What it has started is killed with it, in a session of its own and with its output open, and costs no reward.
    file = tmp_path / "pid"
    leaving = run(sessions, tokenizer, command, args={"how": "leave", "file": str(file)})
    assert env_rewards([leaving]) == [0.25] and _gone(int(file.read_text()))
    start = time.monotonic()
    hanging = run(sessions, tokenizer, command, timeout_s=3.0, args={"how": "hang", "file": str(file)})
    assert hanging.stop == "env_timeout", hanging.error
    assert time.monotonic() - start < 8.0 and _gone(int(file.read_text()))


def _gone(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return not status.exists() or "State:\tZ" in status.read_text()


@pytest.mark.parametrize("how", ["raise", "wrapped", "none", "paid", "bug"])
def test_an_agent_that_is_refused_a_request(sessions: Sessions, tokenizer: Tokenizer, how: str) -> None:
    """One that only goes on talking has the reward `unfinished` and stays in its group; a bug remains an error."""

    def agent(base_url: str) -> float | None:
        messages: list[Any] = [{"role": "user", "content": "?"}]
        try:
            while True:
                ask_once(base_url, messages)
        except openai.PermissionDeniedError as error:
            if how == "raise":
                raise
            if how == "wrapped":
                raise ValueError("the agent gave up") from error
        if how == "bug":
            raise KeyError("score")
        return 0.75 if how == "paid" else None

    made = run(sessions, tokenizer, agent, max_turns=2, unfinished=-1.0)
    if how == "bug":
        assert made.stop == "env_error" and made.error is not None and "KeyError: 'score'" in made.error
        return
    assert (made.stop, made.error) == ("max_turns", None)
    assert env_rewards([made]) == [0.75 if how == "paid" else -1.0]
    assert made.limit == (None if how == "paid" else "max_turns")


WHOLE: list[Any] = [{"role": "user", "content": "?"}]
LONG: list[Any] = [{"role": "user", "content": "?" * 500}]


def ends(agent: list[Any], **changes: Any) -> Any:
    """Agent that asks for each of the messages, takes refusals, and returns its last item."""
    *asked, outcome = agent

    def play(base_url: str) -> Any:
        for messages in asked:
            fields = {"max_tokens": messages[1]} if isinstance(messages, tuple) else {}
            try:
                with client_of(base_url) as client:
                    ask(client, messages[0] if isinstance(messages, tuple) else messages, **fields)
            except (openai.BadRequestError, openai.PermissionDeniedError):
                pass
        if outcome == "bug":
            raise ValueError("no refusal")
        return outcome

    return play, changes


@pytest.mark.parametrize(
    ("made", "stop", "limit", "reward"),
    [
        (ends([WHOLE, 0.5]), "stop", None, 0.5),
        (ends([WHOLE, None]), "stop", None, None),
        # The answer is cut, and the agent scores it, or leaves it.
        (ends([WHOLE, 0.5], max_tokens=1), "length", None, 0.5),
        (ends([WHOLE, None], max_tokens=1), "length", "max_tokens", -1.0),
        (ends([WHOLE, "bug"], max_tokens=1), "env_error", None, None),
        (ends([WHOLE, None], tight=1), "length", "row_tokens", -1.0),
        # A request's own max_tokens is no limit of the run, but its answer is cut.
        (ends([(WHOLE, 1), None]), "length", None, None),
        (ends([(WHOLE, 1), WHOLE, 0.5]), "stop", None, 0.5),
        # A refused request ends a sample, unless the agent reacts with another one.
        (ends([WHOLE, LONG, 0.5]), "length", None, 0.5),
        (ends([WHOLE, LONG, None]), "length", "row_tokens", -1.0),
        (ends([LONG, WHOLE, 0.5]), "stop", None, 0.5),
        (ends([LONG, WHOLE, None]), "stop", None, None),
        (ends([LONG, WHOLE, "bug"]), "env_error", None, None),
        (ends([LONG, WHOLE, 0.5], max_tokens=1), "length", None, 0.5),
        (ends([WHOLE, WHOLE, WHOLE, None], max_turns=2), "max_turns", "max_turns", -1.0),
        (ends([WHOLE, WHOLE, LONG, WHOLE, 0.5], max_turns=2), "max_turns", None, 0.5),
        (ends([WHOLE, WHOLE, 0.5], max_rows=1), "max_rows", None, 0.5),
        (ends([WHOLE, WHOLE, None], max_rows=1), "max_rows", "max_rows", -1.0),
        (ends([LONG, 0.5]), "env_error", None, None),
    ],
)
def test_how_a_sample_of_an_agent_ends(
    sessions: Sessions, tokenizer: Tokenizer, made: Any, stop: str, limit: str | None, reward: float | None
) -> None:
    """By its last turn, and what was refused after it: metrics and the overlong filter read this alone."""
    agent, changes = made
    if "tight" in changes:
        changes = {"row_tokens": len(Renderer(tokenizer, True).prompt(WHOLE)) + 1}
    sample = run(sessions, tokenizer, agent, unfinished=-1.0, **changes)
    assert (sample.stop, sample.limit, sample.is_cut) == (stop, limit, stop == "length"), sample.error
    assert {row.stop for row in sample.rows} == {stop}
    assert env_rewards([sample]) == [reward] or (stop == "env_error" and sample.error is not None)
    if sample.turns:
        metrics = sample_metrics([[sample]], 0)
        assert metrics["completions/clipped_ratio"] == float(stop == "length")
        assert metrics["env/unfinished"] == float(limit is not None)
    assert not_cut([[sample]]).tolist() == [[stop != "length"]]


def test_the_last_of_parallel_histories_ends_a_sample(sessions: Sessions, tokenizer: Tokenizer) -> None:
    """A refusal while another turn is sampled is the last word, although that turn ends after it."""

    async def agent(base_url: str) -> float:
        client = openai.AsyncOpenAI(base_url=base_url, api_key="x", max_retries=0)
        answer = asyncio.create_task(client.chat.completions.create(model="m", messages=WHOLE))
        await asyncio.sleep(0.05)
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await client.chat.completions.create(model="m", messages=LONG)
        await answer
        await client.close()
        return 1.0

    made = run(sessions, tokenizer, agent, wait=0.3)
    assert (made.stop, made.limit) == ("length", None)


LONG = [{"role": "user", "content": "x" * 900}]


@pytest.mark.parametrize(
    ("requests", "stop", "limit"),
    [
        (["whole"], "stop", None),
        (["cut"], "length", None),
        (["cut", "whole"], "stop", None),
        (["whole", "cut"], "length", None),
        (["long", "whole"], "stop", None),
        (["long", "cut"], "length", None),
        (["whole", "long"], "length", "row_tokens"),
        (["long", "whole", "long"], "length", "row_tokens"),
        (["whole"] * 4, "max_turns", "max_turns"),
        (["whole", "whole", "cut"], "length", None),
        (["odd", "whole", "odd"], "stop", None),
    ],
)
def test_the_end_is_that_of_the_last_turn_and_what_followed(
    sessions: Sessions, tokenizer: Tokenizer, requests: list[str], stop: str, limit: str | None
) -> None:
    """A refusal or a cut answer that another answer followed is no end; `unfinished` is paid for the last alone."""

    def agent(base_url: str) -> None:
        with client_of(base_url) as client:
            for request in requests:
                messages = {"long": LONG, "odd": []}.get(request, [{"role": "user", "content": request}])
                with contextlib.suppress(openai.APIStatusError):
                    ask(client, messages, max_tokens=1 if request == "cut" else 8)

    made = run(sessions, tokenizer, agent, max_turns=3, max_rows=8, unfinished=-1.0)
    assert (made.stop, made.is_cut, made.error) == (stop, stop == "length", None)
    assert made.limit == limit
    np.testing.assert_equal(env_rewards([made]), [None if limit is None else -1.0])


@pytest.mark.parametrize(
    ("agent", "error"),
    [
        (lambda base_url: None, "ended without a request"),
        (lambda base_url: ask_once(base_url, [{"role": "user", "content": "?"}]) and float("nan"), "reward=nan"),
        (lambda base_url: ask_once(base_url, []), "non-empty list"),
        (lambda: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_agents_that_fail(sessions: Sessions, tokenizer: Tokenizer, agent: Callable[..., Any], error: str) -> None:
    made = run(sessions, tokenizer, agent)
    assert made.stop == "env_error" and made.error is not None and error in made.error


def test_an_engine_that_fails_is_no_failure_of_the_agent(sessions: Sessions, tokenizer: Tokenizer) -> None:
    async def broken(tokens: Any, params: Any, images: Any) -> Any:
        raise FloatingPointError("not finite")

    agents = Agents(
        run=lambda base_url: ask_once(base_url, [{"role": "user", "content": "?"}]),
        sessions=sessions,
        unfinished=0.0,
        calls=UserCalls("env.fn", timeout_s=20.0, concurrency=4),
        args={},
        max_turns=8,
        max_rows=3,
        row_tokens=400,
        split_turns=False,
        tool_format=None,
        forces_calls=False,
    )
    example = Example(index=0, row={}, messages=[], prompt_tokens=[1], plain=False)
    params = SamplingParams(max_tokens=8, temperature=1.0, stop_token_ids=tokenizer.stop_ids, key=(0, 0))
    held = agents.converse(
        example,
        group=1,
        sample=2,
        seed=9,
        renderer=Renderer(tokenizer, True),
        params_of=lambda _: params,
        generate=broken,
    )
    with pytest.raises(FloatingPointError):
        asyncio.run(held)


ODD_REQUESTS = {
    b"[" * 100_000: "nested too deeply",
    b'{"x": ' + b"[" * 700 + b"]" * 700 + b', "messages": [{"role": "user", "content": "a"}]}': "at most 100 levels",
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}': "lone surrogate",
    b'{"n": true, "messages": [{"role": "user", "content": "a"}]}': "n: true must be a whole number from 1 to 128",
    b'{"stop": {"a": 1}, "messages": [{"role": "user", "content": "a"}]}': "must be strings that are not empty",
    b'{"n": 9, "messages": [{"role": "user", "content": "a"}]}': "n: 9 must be at most 8: each choice",
    b'{"tool_choice": "required", "messages": [{"role": "user", "content": "a"}]}': "tool_choice",
    b'{"logit_bias": {"1": 1}, "messages": [{"role": "user", "content": "a"}]}': "logit_bias is not supported",
    b'{"response_format": {"type": "json_object"}, "messages": [{"role": "user", "content": "a"}]}': "response_format",
    b'{"parallel_tool_calls": false, "messages": [{"role": "user", "content": "a"}]}': "parallel_tool_calls",
    b'{"n": 20000, "messages": [{"role": "user", "content": "a"}]}': "n: 20000 must be a whole number from 1 to 128",
    b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "data:;base64,AAAA"}]}]}': (
        "messages: the model takes no pictures"
    ),
    b" " * ((64 << 20) + 1): "must be at most 64 MiB",
}


def test_odd_requests_are_refused(sessions: Sessions, tokenizer: Tokenizer) -> None:
    told: list[tuple[int, str]] = []

    def agent(base_url: str) -> float:
        for body in ODD_REQUESTS:
            response = httpx.post(f"{base_url}/chat/completions", content=body)
            told.append((response.status_code, response.json()["error"]["message"]))
        return 1.0

    run(sessions, tokenizer, agent)
    assert [status for status, _ in told] == [400] * 12 + [413]
    for (_, message), words in zip(told, ODD_REQUESTS.values(), strict=True):
        assert words in message and "\n" not in message


def test_addresses_are_secret(sessions: Sessions, tokenizer: Tokenizer) -> None:
    """A session that has ended, or never was, is not served."""
    urls: list[str] = []

    def agent(base_url: str) -> float:
        urls.append(base_url)
        ask_once(base_url, [{"role": "user", "content": "?"}])
        return 1.0

    run(sessions, tokenizer, agent)
    for url in (urls[0], urls[0].replace("/v1", "x/v1")):
        with pytest.raises(openai.NotFoundError):
            ask_once(url, [{"role": "user", "content": "?"}])


def test_the_key_of_a_session(tokenizer: Tokenizer) -> None:
    """Where others can reach the server, an address is not enough."""
    told: list[int] = []

    def agent(base_url: str, api_key: str) -> float:
        body = {"messages": [{"role": "user", "content": "?"}]}
        for key in ("", "x", api_key):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            told.append(httpx.post(f"{base_url}/chat/completions", json=body, headers=headers).status_code)
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            told.append(len(client.responses.create(model="policy", input="?").output))
        return 1.0

    outside = Sessions("127.0.0.2")
    made = run(outside, tokenizer, agent)
    outside.close()
    assert (told, made.error, len(made.rows)) == ([401, 401, 200, 1], None, 2)
