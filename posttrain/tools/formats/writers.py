"""Writers of tool calls in each format, for prompts that describe a format and for turns that a template does not
write."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.tools.formats.pieces import Call

Writer = Callable[[Sequence[Call]], str]


def write_calls(name: str, calls: Sequence[Call]) -> str:
    """Write calls in the format of that name, so that its reader finds them again. Formats with one call in a turn
    (gpt_oss) take one."""
    return WRITERS[name](calls)


def _hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_named(call, 'arguments')}\n</tool_call>" for call in calls)


def _qwen_coder(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n<function={call.name}>\n{_tags(call)}</function>\n</tool_call>" for call in calls)


def _tags(call: Call) -> str:
    texts = {key: value if isinstance(value, str) else _json(value) for key, value in call.arguments.items()}
    return "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())


def _llama3(calls: Sequence[Call]) -> str:
    return "; ".join(_named(call, "parameters") for call in calls)


def _mistral(calls: Sequence[Call]) -> str:
    return f"[TOOL_CALLS]{_list(calls)}"


def _phi(calls: Sequence[Call]) -> str:
    return f"<|tool_call|>{_list(calls)}<|/tool_call|>"


def _deepseek(calls: Sequence[Call]) -> str:
    written = [f"<｜tool▁call▁begin｜>{c.name}<｜tool▁sep｜>{_json(c.arguments)}<｜tool▁call▁end｜>" for c in calls]
    return f"<｜tool▁calls▁begin｜>{''.join(written)}<｜tool▁calls▁end｜>"


def _gpt_oss(calls: Sequence[Call]) -> str:
    (call,) = calls
    return f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>{_json(call.arguments)}"


def _gemma(calls: Sequence[Call]) -> str:
    return "```tool_code\n" + "\n".join(map(_python, calls)) + "\n```"


def _pythonic(calls: Sequence[Call]) -> str:
    return f"[{', '.join(map(_python, calls))}]"


def _python(call: Call) -> str:
    return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"


def _list(calls: Sequence[Call]) -> str:
    return f"[{', '.join(_named(call, 'arguments') for call in calls)}]"


def _named(call: Call, key: str) -> str:
    return _json({"name": call.name, key: call.arguments})


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


WRITERS: Mapping[str, Writer] = {
    "hermes": _hermes,
    "qwen_coder": _qwen_coder,
    "llama3": _llama3,
    "mistral": _mistral,
    "gemma": _gemma,
    "deepseek": _deepseek,
    "gpt_oss": _gpt_oss,
    "phi": _phi,
    "pythonic": _pythonic,
}
