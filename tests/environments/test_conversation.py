"""Conversations with environments: tokens as sampled, replies without loss, and environments that fail."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.data.chat import Renderer
from posttrain.data.messages import Message
from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.diagnosis.rl_causes import conversations_unfinished
from posttrain.environments.conversation import Environments
from posttrain.environments.types import Reply
from posttrain.reward.function import EnvFailure, env_rewards
from posttrain.reward.types import Rewards
from posttrain.rl.metrics import rollout_metrics, sample_metrics
from posttrain.rollout.trajectory import Example, Trajectory
from posttrain.rollout.types import SamplingParams
from posttrain.runtime.user_calls import UserCalls
from tests.diagnosis.evidences import evidence
from tests.environments.helpers import Script, template_names, with_template

WORDS = ("yes", "no", " seven", "\n", "42", "é", "<", "  ", "maybe not", "木", "{}")


def environments(make: Callable[..., Any], **changes: Any) -> Environments:
    plain: dict[str, Any] = {
        "args": {},
        "max_turns": 8,
        "row_tokens": 4096,
        "split_turns": False,
        "unfinished": 0.0,
        "calls": UserCalls("env.fn", timeout_s=60.0, concurrency=8),
        "tool_format": None,
    }
    return Environments(make=make, **plain | changes)


def example(renderer: Renderer, *messages: Message, **row: Any) -> Example:
    tokens = renderer.prompt(messages)
    return Example(index=0, row=row, messages=messages, prompt_tokens=tokens, plain=False)


def hold(
    made: Environments, renderer: Renderer, turns: Sequence[Sequence[int]], prompt: Example, max_tokens: int = 64
) -> tuple[Trajectory, Script]:
    script = Script(turns)
    params = SamplingParams(
        max_tokens=max_tokens, temperature=1.0, stop_token_ids=renderer.tokenizer.stop_ids, key=(0, 0)
    )
    held = made.converse(
        prompt, group=3, sample=1, seed=5, renderer=renderer, params_of=lambda _: params, generate=script
    )
    return asyncio.run(held), script


class Scripted:
    """Environment that gives its replies in order."""

    def __init__(self, replies: Sequence[Reply]):
        self.replies = list(replies)
        self.heard: list[Message] = []

    async def reply(self, message: Message) -> Reply:
        self.heard.append(message)
        return self.replies[len(self.heard) - 1]


def user(text: str, **fields: Any) -> Reply:
    return Reply(messages=[{"role": "user", "content": text}], **fields)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("bytes")


def said(tokenizer: Tokenizer, text: str) -> list[int]:
    return [*tokenizer.encode(text), tokenizer.stop_ids[-1]]


def test_tokens_stay_as_sampled(tokenizer: Tokenizer) -> None:
    """The prompt, each sampled turn, and between them what the template writes; loss on the sampled turns alone."""
    renderer = Renderer(tokenizer, True)
    prompt = example(renderer, {"role": "user", "content": "0-7?"})
    env = Scripted([user("+", reward=0.25, metrics={"near": 2.0}), Reply(done=True, reward=0.5)])
    turns = [said(tokenizer, "3"), said(tokenizer, "5")]
    made, script = hold(environments(lambda: env), renderer, turns, prompt)
    between = [10, *tokenizer.encode("<|im_start|>user\n+<|im_end|>\n<|im_start|>assistant\n")]
    assert list(made.tokens) == [*prompt.prompt_tokens, *turns[0], *between, *turns[1]]
    assert script.prompts[1] == list(made.tokens[: -len(turns[1])])
    assert [t for t, own in zip(made.tokens, made.sampled, strict=True) if own] == [*turns[0], *turns[1]]
    assert [list(made.tokens[turn.start : turn.end]) for turn in made.turns] == turns
    assert [turn.reward for turn in made.turns] == [0.25, 0.5] and env_rewards([made]) == [0.75]
    assert made.metrics == {"near": 2.0} and (made.group, made.sample, made.stop) == (3, 1, "stop")
    assert [message["content"] for message in made.messages] == ["0-7?", "3", "+", "5"]
    unsampled = ~np.asarray(made.sampled)
    assert not np.asarray(made.logps)[unsampled].any() and set(np.asarray(made.versions)[unsampled]) == {-1}
    assert np.asarray(made.logps)[~unsampled].all()


@pytest.mark.thorough
def test_random_conversations_over_real_templates(shared: Path) -> None:
    """A thousand conversations: the tokens are the engine's and what lies between, loss is on the engine's alone, and
    the text is what the template writes for the messages."""
    draw = random.Random(0)
    names = [name for name in template_names(shared) if "gpt-oss" not in name]
    for name in names:
        tokenizer = with_template(shared, name)
        renderer, end = Renderer(tokenizer, True), tokenizer.stop_ids[0]
        for _ in range(143):
            prompt = example(renderer, {"role": "user", "content": _text(draw)})
            texts = [_text(draw) for _ in range(draw.randint(1, 4))]
            turns = [[*tokenizer.encode(text), end] for text in texts]
            replies = [user(_text(draw)) for _ in texts[:-1]]
            env = Scripted([*replies, Reply(done=True)])
            made, script = hold(environments(lambda env=env: env), renderer, turns, prompt, max_tokens=512)
            sampled = [t for t, own in zip(made.tokens, made.sampled, strict=True) if own]
            assert sampled == [token for turn in turns for token in turn]
            assert script.prompts[0] == list(prompt.prompt_tokens)
            if len(texts) > 1:
                # What the engine has read before its last turn is the template's rendering of all messages.
                text = tokenizer.decode(script.prompts[-1], skip_special_tokens=False)
                assert text == renderer.rendered(made.messages[:-1], reply=True), name


def _text(draw: random.Random) -> str:
    # Templates strip the ends of some texts.
    return f"a{''.join(draw.choices(WORDS, k=draw.randint(0, 6)))}z"


def test_a_row_for_each_turn(tokenizer: Tokenizer) -> None:
    renderer = Renderer(tokenizer, True)
    prompt = example(renderer, {"role": "user", "content": "?"})
    env = Scripted([user("+"), user("-"), Reply(done=True, reward=1.0)])
    turns = [said(tokenizer, text) for text in ("a", "b", "c")]
    made, script = hold(environments(lambda: env, split_turns=True), renderer, turns, prompt)
    assert len(made.rows) == 3 and made.num_sampled == 6
    for row, read, turn in zip(made.rows, script.prompts, turns, strict=True):
        assert list(row.tokens) == [*read, *turn] and sum(row.sampled) == len(turn)
    assert list(made.more[1].tokens[:-2]) == renderer.prompt(made.messages[:-1])


@pytest.mark.parametrize("split_turns", [False, True])
@pytest.mark.parametrize(
    ("row_tokens", "max_turns", "max_tokens", "stop", "count", "limit"),
    [
        (4096, 2, 64, "max_turns", 2, "max_turns"),
        (4096, 8, 1, "length", 1, "max_tokens"),
        (90, 8, 64, "length", 4, "row_tokens"),
        (4096, 8, 64, "stop", 5, None),
    ],
)
def test_limits_of_a_conversation(
    tokenizer: Tokenizer,
    row_tokens: int,
    max_turns: int,
    max_tokens: int,
    stop: str,
    count: int,
    limit: str | None,
    split_turns: bool,
) -> None:
    """What ends before the environment is done has the reward `unfinished` beside those that it was paid, and counts
    its limit: without one it would leave its group, and rambling would never be punished."""
    renderer = Renderer(tokenizer, True)
    prompt = example(renderer, {"role": "user", "content": "?"})

    def held(unfinished: float | None, paid: float | None) -> Trajectory:
        env = Scripted([user("+", reward=paid), *[user("+")] * 3, Reply(done=True, reward=1.0)])
        made = environments(
            lambda: env, row_tokens=row_tokens, max_turns=max_turns, split_turns=split_turns, unfinished=unfinished
        )
        return hold(made, renderer, [said(tokenizer, "b")] * 5, prompt, max_tokens)[0]

    for paid in (None, 0.25):
        made = held(-0.5, paid)
        turns = [turn for row in made.rows for turn in row.turns]
        assert made.stop == stop and len(turns) == (4 if split_turns and count == 5 and row_tokens == 90 else count)
        assert all(len(row.tokens) <= row_tokens for row in made.rows)
        assert made.limit == limit
        assert env_rewards([made]) == [(paid or 0.0) + (1.0 if limit is None else -0.5)]
        assert turns[-1].reward == (1.0 if limit is None else -0.5 + ((paid or 0.0) if len(turns) == 1 else 0.0))
        assert env_rewards([held(0.0, paid)]) == [(paid or 0.0) + (limit is None)]
        assert env_rewards([held(None, paid)]) == [(paid or 0.0) + 1.0 if limit is None else None]


def test_metrics_and_a_warning_of_conversations_that_end_too_early(tokenizer: Tokenizer) -> None:
    renderer = Renderer(tokenizer, True)
    prompt = example(renderer, {"role": "user", "content": "?"})

    def held(max_tokens: int) -> Trajectory:
        made = environments(lambda: Scripted([user("+"), Reply(done=True, reward=1.0)]))
        return hold(made, renderer, [said(tokenizer, "b")] * 2, prompt, max_tokens)[0]

    group = [held(1), held(1), held(64)]
    total_PG = np.asarray([env_rewards(group)], np.float32)
    parts_PG = {"env": total_PG, "none": np.full_like(total_PG, np.nan)}
    rewards = Rewards(total_PG=total_PG, parts_PG=parts_PG, errors=[], metrics={}, extras={})
    metrics = rollout_metrics([group], rewards, 0)
    parts = {name for name in metrics if re.fullmatch("rewards/.*/(mean|std)", name)}
    assert parts == {"rewards/env/mean", "rewards/env/std"}, "a reward that no sample has is no metric"
    assert metrics["env/unfinished"] == metrics["env/unfinished_max_tokens"] == 2 / 3
    assert metrics["env/unfinished_max_turns"] == metrics["env/unfinished_row_tokens"] == 0.0
    numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, float)}
    cause = conversations_unfinished(evidence(numbers))
    assert cause is not None and cause.summary.startswith("67% of the conversations end before the environment is done")
    assert cause.evidence == ["67% at max_tokens"] and "raise sampling.max_tokens" in cause.advice
    assert (
        conversations_unfinished(evidence({**numbers, "env/unfinished": 0.4, "completions/clipped_ratio": 0.4})) is None
    )


def test_a_cut_turn_that_ends_its_environment(tokenizer: Tokenizer) -> None:
    """It counts as cut, keeps its reward, and is at no limit; a metric of the environment's own tells nothing."""
    renderer = Renderer(tokenizer, True)
    prompt = example(renderer, {"role": "user", "content": "?"})
    done = Reply(done=True, reward=1.0, metrics={"unfinished_max_turns": 1.0})
    made = environments(lambda: Scripted([done]), unfinished=-1.0)
    (cut, whole) = (hold(made, renderer, [said(tokenizer, "b")], prompt, size)[0] for size in (1, 64))
    assert [(one.stop, one.limit, one.is_cut) for one in (cut, whole)] == [
        ("length", None, True),
        ("stop", None, False),
    ]
    assert env_rewards([cut, whole]) == [1.0, 1.0]
    metrics = sample_metrics([[cut, whole]], 0)
    assert (metrics["completions/clipped_ratio"], metrics["env/unfinished_max_turns"]) == (0.5, 0.0)


class Failing:
    def __init__(self, how: str):
        self.how = how

    def reply(self, message: Message) -> Any:
        match self.how:
            case "hang":
                time.sleep(6)
            case "raise":
                raise OSError("no route to the game")
            case "exit":
                raise SystemExit(3)
            case "wrong":
                return "right"
            case "nan":
                return Reply(done=True, reward=float("nan"))
            case "silent":
                return Reply()
            case "role":
                return Reply(messages=[{"role": "umpire", "content": "out"}])
        return Reply(done=True, reward=1.0)


FAULTS = {
    "hang": ("env_timeout", "reply: no answer within 1 s"),
    "raise": ("env_error", "no route to the game"),
    "exit": ("env_error", "SystemExit"),
    "wrong": ("env_error", "returned a str, not a Reply"),
    "nan": ("env_error", "the reward nan"),
    "silent": ("env_error", "no messages and is not done"),
    "role": ("env_error", "role='umpire'"),
}


def test_environments_that_fail(tokenizer: Tokenizer) -> None:
    """Each failure ends its own sample with its type; the others go on beside it, and the loop is not blocked."""
    renderer = Renderer(tokenizer, True)
    prompt = example(renderer, {"role": "user", "content": "?"})
    made = environments(lambda how: Failing(how), calls=UserCalls("env.fn", timeout_s=1.0, concurrency=32))
    params = SamplingParams(max_tokens=8, temperature=1.0, stop_token_ids=tokenizer.stop_ids, key=(0, 0))
    hows = [*FAULTS, *["fine"] * 20]

    async def all_at_once() -> tuple[list[Trajectory], float]:
        late = 0.0

        async def watch() -> None:
            nonlocal late
            while True:
                before = time.monotonic()
                await asyncio.sleep(0.005)
                late = max(late, time.monotonic() - before)

        watcher = asyncio.create_task(watch())
        talks = [
            made.converse(
                Example(
                    index=0,
                    row={"how": how},
                    messages=prompt.messages,
                    prompt_tokens=prompt.prompt_tokens,
                    plain=False,
                ),
                group=0,
                sample=n,
                seed=0,
                renderer=renderer,
                params_of=lambda _: params,
                generate=Script([said(tokenizer, "a")]),
            )
            for n, how in enumerate(hows)
        ]
        found = await asyncio.gather(*talks)
        watcher.cancel()
        return found, late

    found, late = asyncio.run(all_at_once())
    rewards = env_rewards(found)
    for one, how, reward in zip(found, hows, rewards, strict=True):
        if how == "fine":
            assert (one.stop, one.error, reward) == ("stop", None, 1.0)
            continue
        stop, text = FAULTS[how]
        assert one.stop == stop and one.error is not None and text in one.error, (how, one.error)
        assert isinstance(reward, EnvFailure) and str(reward) == one.error
    assert late < 0.5, "a blocking environment has stopped the loop"
    assert made.calls.hung == 1


def test_a_prompt_of_its_own_and_what_make_is_given(tokenizer: Tokenizer) -> None:
    renderer = Renderer(tokenizer, True)
    prompt = example(renderer, {"role": "user", "content": "?"}, size=3)
    closed = []

    class Own:
        def __init__(self, size: int, seed: int, hint: str):
            self.given = (size, seed, hint)

        def start(self) -> list[Message]:
            return [{"role": "system", "content": f"{self.given}"}, {"role": "user", "content": "go"}]

        def reply(self, message: Message) -> Reply:
            return Reply(done=True)

        def close(self) -> None:
            closed.append(self.given)

    made, script = hold(environments(Own, args={"hint": "x"}), renderer, [said(tokenizer, "a")], prompt)
    assert closed == [(3, 5, "x")]
    assert script.prompts[0] == renderer.prompt(made.messages[:2]) == list(made.example.prompt_tokens)
    assert made.completion_messages == [{"role": "assistant", "content": "a"}] and env_rewards([made]) == [None]
