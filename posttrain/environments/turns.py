"""Turns of a sample: the assistant's message, and the reward `env` that its environment gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

from posttrain.data.chat import Renderer
from posttrain.data.messages import Message
from posttrain.rollout.trajectory import Trajectory
from posttrain.rollout.transcript import Transcript
from posttrain.rollout.types import Completion, SamplingParams, reply_of
from posttrain.tools.types import ToolFormat


def message_of(
    prompt: Sequence[int],
    completion: Completion,
    renderer: Renderer,
    params: SamplingParams,
    tool_format: ToolFormat | None,
) -> tuple[Message, str]:
    """Message of a turn, with its tool calls where a format is given, and its text. `prompt`: all tokens before."""
    text = reply_of(renderer, prompt, completion.tokens, params)
    if tool_format is None:
        return {"role": "assistant", "content": text}, text
    raw = reply_of(renderer, prompt, completion.tokens, replace(params, skip_special_tokens=False))
    turn = tool_format.parse(raw)
    message: Message = {"role": "assistant", "content": turn.content}
    if turn.calls:
        message["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in turn.calls
        ]
    if turn.malformed:
        message["malformed_calls"] = list(turn.malformed)
    return message, text


Limit = Literal["max_tokens", "max_turns", "max_rows", "row_tokens"]
"""Limit at which a conversation ends before its environment is done: `sampling.max_tokens` of a turn, the maximum of
turns or of an agent's histories, or `row_tokens`. A sample counts it in its metric `unfinished_<limit>`."""
UNFINISHED: tuple[Limit, ...] = get_args(Limit)


def limit_of(trajectory: Trajectory) -> Limit | None:
    """Limit at which the conversation of a sample ended; None if it came to its end."""
    return next((limit for limit in UNFINISHED if trajectory.metrics.get(f"unfinished_{limit}")), None)


def pay_unfinished(rows: Sequence[Transcript], reward: float | None) -> None:
    """Add the reward of an unfinished conversation to its last turn; None: remove those of all turns."""
    taken = [row for row in rows if row.turns]
    if reward is not None and taken:
        taken[-1].reward((taken[-1].turns[-1].reward or 0.0) + reward)
    elif reward is None:
        for row in taken:
            row.turns = [turn._replace(reward=None) for turn in row.turns]
