"""Check of chat templates for conversations of several sampled turns: what a template writes between two turns must not
depend on earlier ones, and must leave their text as it was sampled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, cast

from posttrain.data.chat import STAND_IN_TEXT, Message, Renderer, stand_in_turn
from posttrain.errors import ConfigError

ReplyRole = Literal["user", "tool"]
Tools = Sequence[dict[str, Any]] | None
THOUGHT = "posttrain_stand_in_of_a_thought"
REPLY = "posttrain_stand_in_of_a_reply"
HARMONY = "<|channel|>final<|message|>"
"""Header that GPT-OSS samples itself before the text of a turn."""
REMEDIES = (
    "use a template that keeps earlier turns as they are (model.chat_template), or env.split_turns, which makes a "
    "training row of each turn"
)


def check_turns(
    renderer: Renderer,
    prompts: Sequence[Sequence[Message]],
    roles: Sequence[ReplyRole],
    *,
    tools: Tools,
    keep_thinking: bool,
) -> None:
    """Check that conversations can go on token by token after each of `prompts` with messages of `roles`.

    `keep_thinking`: earlier turns keep their thinking where the template would drop it. ConfigError with the remedy for
    a template that changes earlier turns.
    """
    if not renderer.chat:
        return
    for prompt in prompts:
        if tools and any(
            tool["function"]["name"] not in renderer.rendered(prompt, tools, reply=True) for tool in tools
        ):
            raise ConfigError(
                f"tools: chat template of {renderer.tokenizer.name} does not write them into the prompt; use a model "
                "and a template for tool calls (model.chat_template), or describe them in dataset.system"
            )
        for role in roles:
            _check(renderer, list(prompt), role, tools, keep_thinking)


def _check(renderer: Renderer, prompt: list[Message], role: ReplyRole, tools: Tools, keep_thinking: bool) -> None:
    replies = reply_of(role)
    earlier: list[Message] = [*prompt, stand_in_turn(replies), *replies]
    deltas = [renderer.between(before, replies, tools, last=None) for before in (prompt, earlier)]
    if deltas[0] != deltas[1]:
        raise _refusal(renderer, f"writes other text before a {role} message once there are earlier turns")
    for before in (prompt, earlier):
        for thinks, turn in _turns(renderer, role):
            if thinks and keep_thinking:
                continue
            if reason := _changed(renderer, before, turn, replies, tools, thinks=thinks):
                raise _refusal(renderer, f"{reason} when a {role} message follows", thinks=thinks)


def reply_of(role: ReplyRole) -> list[Message]:
    """Messages of an environment that answers in this role."""
    if role == "user":
        return [{"role": "user", "content": REPLY}]
    return [{"role": "tool", "content": REPLY, "name": "lookup", "tool_call_id": "call00001"}]


def _turns(renderer: Renderer, role: ReplyRole) -> Iterator[tuple[bool, Message]]:
    """Turns without and with thinking, in the form that the template knows."""
    plain = stand_in_turn(reply_of(role))
    template = str(renderer.tokenizer.chat_template)
    yield False, plain
    if "<think>" in template and role == "user":
        yield True, {**plain, "content": f"<think>\n{THOUGHT}\n</think>\n\n{STAND_IN_TEXT}"}
    elif "<think>" in template and "reasoning_content" in template:
        yield True, {**plain, "reasoning_content": THOUGHT}
    elif "message.thinking" in template and role == "user":
        yield True, cast(Message, {**plain, "thinking": THOUGHT})


def _changed(
    renderer: Renderer, before: list[Message], turn: Message, replies: list[Message], tools: Tools, *, thinks: bool
) -> str | None:
    """Change that the template makes to the text before the reply; None without one."""
    start = renderer.rendered(before, tools, reply=True)
    text = renderer.rendered([*before, turn, *replies], tools, reply=True)
    if REPLY not in text[text.rfind(STAND_IN_TEXT) :]:
        return "leaves the reply out"
    if not text.startswith(start):
        return "changes the prompt"
    if thinks:
        return None if THOUGHT in text else "drops the thinking of earlier turns"
    # A turn with calls begins with them, in the words of the template.
    written = text[len(start) :]
    if "tool_calls" in turn or written.removeprefix(HARMONY).startswith(STAND_IN_TEXT):
        return None
    return f"writes {written[: written.find(STAND_IN_TEXT)]!r} before earlier turns"


def _refusal(renderer: Renderer, reason: str, *, thinks: bool = False) -> ConfigError:
    keep = "set env.keep_thinking to keep it, " if thinks else ""
    return ConfigError(
        f"env: chat template of {renderer.tokenizer.name} {reason}, so the tokens of a conversation are not those of "
        f"its prompt; {keep}{REMEDIES}"
    )
