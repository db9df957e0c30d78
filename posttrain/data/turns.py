"""Checks of chat templates: an assistant turn must end with a stop token; between several sampled turns a template must
not write what depends on earlier ones, and must leave their text as it was sampled."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, cast

from posttrain.data.chat import Masked, Renderer
from posttrain.data.messages import Message, squeezed
from posttrain.data.templates import STAND_IN_TEXT, THINK, THINK_END, opened_thought, stand_in_turn
from posttrain.errors import ConfigError

ReplyRole = Literal["user", "tool"]
Tools = Sequence[dict[str, Any]] | None
THOUGHT = "posttrain_stand_in_of_a_thought"
THINKING_TURN = f"{THINK}\n{THOUGHT}\n{THINK_END}\n\n{STAND_IN_TEXT}"
REPLY = "posttrain_stand_in_of_a_reply"
HARMONY = "<|channel|>final<|message|>"
"""Header that GPT-OSS samples itself before the text of a turn."""
NO_END = "give a template that ends it with a stop token (model.chat_template)"
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
        renderer.prompt_with_images(prompt, tools)  # which checks that tools and messages are in it
        for role in roles:
            _check(renderer, list(prompt), role, tools, keep_thinking)


def _check(renderer: Renderer, prompt: list[Message], role: ReplyRole, tools: Tools, keep_thinking: bool) -> None:
    replies = environment_reply(role)
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


def environment_reply(role: ReplyRole) -> list[Message]:
    """Messages of an environment that answers in this role."""
    if role == "user":
        return [{"role": "user", "content": REPLY}]
    return [{"role": "tool", "content": REPLY, "name": "lookup", "tool_call_id": "call00001"}]


def _turns(renderer: Renderer, role: ReplyRole) -> Iterator[tuple[bool, Message]]:
    """Turns without and with thinking, in the form that the template knows."""
    plain = stand_in_turn(environment_reply(role))
    template = str(renderer.tokenizer.chat_template)
    # Where the prompt opens the thought, no turn is sampled without one.
    if not renderer.opens_thought:
        yield False, plain
    if THINK in template and (role == "user" or (renderer.opens_thought and "reasoning_content" not in template)):
        yield True, {**plain, "content": THINKING_TURN}
    elif THINK in template and "reasoning_content" in template:
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
    opened = opened_thought(start)
    if not text.startswith(start.removesuffix(opened)):
        return "changes the prompt"
    if opened:
        kept = text.startswith(start) and squeezed(text[len(start) :]).startswith(squeezed(THOUGHT))
        return None if kept else "drops the thinking of earlier turns"
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


def stop_notes(renderer: Renderer, sequences: Iterable[Masked]) -> list[str]:
    """Warning if no stop token ends the last assistant turn of a sequence: a model trained on it does not learn to
    stop. At most one, about the first such sequence.
    """
    tokenizer, stops = renderer.tokenizer, renderer.tokenizer.stop_ids
    for tokens, mask, *_ in sequences if renderer.chat else ():
        last = len(mask) - 1 - mask[::-1].index(True)
        first = last + 1 - [*mask[last::-1], False].index(False)
        if any(token in stops for token in tokens[first : last + 1]):
            continue
        near = [*tokens[last : max(first, last - 1) - 1 : -1], *tokens[last + 1 : last + 2], renderer.next_token()]
        ends = [token for token in near if token in tokenizer.hf.added_tokens_decoder]
        named, known = (tokenizer.hf.convert_ids_to_tokens(list(ids)) for ids in (ends[:1], stops))
        ending = f"with {named[0]!r}" if named else "without a token of its own"
        remedy = f"set model.stop_tokens: {json.dumps(named, ensure_ascii=False)}" if named else NO_END
        return [
            f"WARNING: sampling stops at {', '.join(known) or 'no token'}, but the chat template of {tokenizer.name} "
            f"ends an assistant turn {ending}, so that the model does not learn to stop; {remedy}"
        ]
    return []


def sampled_stop_notes(renderer: Renderer, prompt: Sequence[Message], tools: Tools = None) -> list[str]:
    """Warning of `stop_notes` for a turn that is sampled after `prompt`."""
    if not renderer.chat:
        return []
    try:
        turn = stand_in_turn([])
        if renderer.opens_thought:
            turn["content"] = THINKING_TURN
        made = renderer.conversation([*prompt, turn], first=len(prompt), tools=tools)
    except ConfigError:  # a template that writes prompts alone
        return []
    return stop_notes(renderer, [made])
