"""Chat templates as texts: their marks of assistant turns, arguments, the time, and turns that stand for others."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from posttrain.data.messages import Message
from posttrain.errors import ConfigError, did_you_mean
from posttrain.user_code import import_transformers

GIVEN = ("messages", "tools", "add_generation_prompt", "strftime_now")
"""Variables of templates that posttrain sets itself."""
THINKING = ("enable_thinking", "thinking")
"""Variables of templates that switch thinking."""
EFFORT = "reasoning_effort"
"""Variable of templates that say how much to think."""
STAND_IN_TEXT = "posttrain_stand_in_of_a_turn"
"""Content of the assistant turn that stands for a sampled one."""
THINK = "<think>"
THINK_END = "</think>"
"""Marks of a thought in the text of a turn."""
OPENED = re.compile(rf"{THINK}\s*\Z")
"""End of a prompt that opens a thought, which the turn goes on with and ends."""
GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)


def marks_generation(template: str) -> bool:
    """Tell whether a chat template marks assistant turns with `{% generation %}`, ignoring its comments."""
    return GENERATION_MARKER.search(COMMENT.sub("", template)) is not None


def at_time(clock: datetime | None, template: str) -> str:
    """Chat template whose `strftime_now` writes a fixed time, for the rendering that follows."""
    if clock is None or "strftime_now" not in template:
        return template
    # The library compiles each text once: with the comment this one has globals of its own.
    template = f"{{# {clock.isoformat()} #}}\n{template}"
    compiled = import_transformers("utils.chat_template_utils")._compile_jinja_template(template)
    compiled.globals["strftime_now"] = clock.strftime
    return template


def with_arguments(template: str, args: Mapping[str, Any], name: str) -> str:
    """Chat template with values for its variables, unless its reader sets them. `name`: the tokenizer's, for errors.

    ConfigError for a variable that the template does not mention, and for one that posttrain sets.
    """
    known = variables(template)
    for key in args:
        if key in GIVEN:
            raise ConfigError(f"chat_template_args: {key} is what posttrain gives the template; remove it")
        if key not in known:
            raise ConfigError(
                f"chat_template_args: the chat template of {name} does not mention {key!r}{did_you_mean(key, known)}"
            )
    sets = (
        f"{{% if {key} is not defined or {key} is none %}}{{% set {key} = {_literal(value)} %}}{{% endif %}}"
        for key, value in args.items()
    )
    return "".join(sets) + f"\n{template}" if args else template


def variables(template: str) -> set[str]:
    """Names of variables that a chat template mentions."""
    import jinja2.nodes

    compiled = import_transformers("utils.chat_template_utils")._compile_jinja_template(template)
    return {node.name for node in compiled.environment.parse(template).find_all(jinja2.nodes.Name)}


def effort_arguments(template: str, effort: str) -> dict[str, Any]:
    """Value of the variable with which a chat template asks for this effort of reasoning. ConfigError without one."""
    known = variables(template)
    switch = next((name for name in THINKING if name in known), None)
    if effort == "none" and switch is not None:
        return {switch: False}
    if EFFORT in known:
        return {EFFORT: effort}
    if switch is not None:
        raise ConfigError(f"{effort}: the chat template knows no effort, only {switch}; give none, or leave it out")
    raise ConfigError(f"{effort}: the chat template has no variable for it; leave it out")


def _literal(value: Any) -> str:
    """Value as an expression of Jinja. ConfigError for what YAML cannot hold."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(str(key))}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return json.dumps(value, ensure_ascii=False)  # Jinja reads no surrogate pairs
    raise ConfigError(
        f"chat_template_args: {value!r} is a {type(value).__name__}; give texts, numbers, lists, mappings"
    )


def opened_thought(prompt: str) -> str:
    """Mark and white space with which a prompt opens the thought of its turn; empty if the turn begins otherwise.

    >>> opened_thought("<|assistant|><think>\\n"), opened_thought("<|assistant|><think>\\n</think>")
    ('<think>\\n', '')
    """
    opened = OPENED.search(prompt)
    return "" if opened is None else opened.group()


def split_thought(message: Mapping[str, Any]) -> tuple[str, str]:
    """Thought of an assistant message as it is written behind its opening mark, closing mark included, and the content
    after it. The thought is empty if there is none, and without marks if it has a key of its own."""
    content = str(message.get("content") or "")
    if keyed := str(message.get("reasoning_content") or message.get("thinking") or ""):
        return keyed, content
    if THINK_END not in content:
        return "", content
    thought, _, answer = content.partition(THINK_END)
    return f"{thought.lstrip().removeprefix(THINK)}{THINK_END}", answer


def stand_in_turn(messages: Sequence[Message]) -> Message:
    """Assistant turn before `messages`, with a call for each tool message among them."""
    calls = [
        {
            "type": "function",
            "id": message.get("tool_call_id", "call00000"),
            "function": {"name": message.get("name", "tool"), "arguments": {"text": STAND_IN_TEXT}},
        }
        for message in messages
        if message["role"] == "tool"
    ]
    turn: Message = {"role": "assistant", "content": STAND_IN_TEXT}
    return {**turn, "tool_calls": calls} if calls else turn


def after_turn(text: str, ends: Sequence[str], name: str, *, calls: bool) -> str:
    """Text after a stand-in turn, from its end of turn on, one of `ends`. `calls`: the turn has tool calls. `name`: the
    tokenizer's, for errors."""
    at = text.rfind(STAND_IN_TEXT)
    if at < 0:
        raise ConfigError(f"chat template of {name} does not write the content of assistant turns")
    rest = text[at + len(STAND_IN_TEXT) :]
    if not calls:
        stripped = rest.lstrip()
        return stripped if stripped.startswith(tuple(ends)) else rest
    places = [rest.find(end) for end in ends if end in rest]
    if not places:
        raise ConfigError(
            f"chat template of {name} ends tool calls without a stop token ({', '.join(ends)}); name its token in "
            "model.stop_tokens"
        )
    return rest[min(places) :]


def end_at_stop(tokens: list[int], begins: list[bool], mask: list[bool], stops: Collection[int]) -> list[bool]:
    """Remove loss after the first stop token of each derived turn: those tokens are never sampled. `begins`: tokens
    that begin a turn."""
    ended, weighted = False, []
    for token, begin, loss in zip(tokens, begins, mask, strict=True):
        ended = ended and not begin
        weighted.append(loss and not ended)
        ended = ended or (loss and token in stops)
    return weighted


def render(template: str, clock: datetime | None, name: str, **given: Any) -> tuple[str, list[tuple[int, int]]]:
    """Text of messages in the form of a template, and the spans that it marks as generated. ConfigError for messages
    that it refuses. `given`: its variables; `name`: the tokenizer's, for errors."""
    import jinja2

    messages, marks = given.pop("messages"), marks_generation(template)
    try:
        texts, spans = import_transformers("utils.chat_template_utils").render_jinja_template(
            [messages], chat_template=at_time(clock, template), return_assistant_tokens_mask=marks, **given
        )
    except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
        roles = [message["role"] for message in messages]
        what = f"messages with roles {roles}" if roles else "a conversation that begins with an assistant message"
        raise ConfigError(
            f"chat template of {name} refuses {what}: {' '.join(str(error).split())}; change the messages, "
            "or set dataset.chat to false"
        ) from error
    return texts[0], list(spans[0]) if marks else []
