"""Columns of a row: templates over them, other tools' names for them, those that change what a row means, and those
that nothing reads."""

from __future__ import annotations

import string
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from posttrain.config import DatasetSection
from posttrain.data.messages import checked_tools, parse_json_list
from posttrain.errors import ConfigError, did_you_mean

Row = Mapping[str, Any]
RowKind = Literal["sequence", "pair", "answer", "steps", "prompt"]
"""Form in which a stage reads a row: a training sequence, a preference pair, a labelled answer, a prompt with labelled
steps, or a prompt to sample from."""

TOOL_COLUMNS = ("tools", "functions")
"""Columns with tool descriptions: of chat templates, and of OpenAI's older format."""
SYSTEM_COLUMNS = ("system", "system_prompt", "system_message")
"""Columns with the text of a system message."""
IMAGE_COLUMNS = ("images", "image")

TEMPLATE_ARGS = (
    "chat_template_kwargs",
    "enable_thinking",
    "thinking_budget",
    "reasoning_effort",
    "add_generation_prompt",
    "continue_final_message",
)
"""Columns with arguments of the chat template."""
REFUSED_IN_PROMPTS = {
    **dict.fromkeys(
        TEMPLATE_ARGS,
        "arguments of the chat template are the same for all rows; set model.chat_template_args, and remove the column",
    ),
    **dict.fromkeys(("chat_template",), "all rows have one; set model.chat_template, and remove the column"),
    **dict.fromkeys(
        ("video", "videos", "audio", "audios"), "only text and images are read; remove the column, or such rows"
    ),
    **dict.fromkeys(
        ("documents",),
        "no chat template gets documents from it; write them into the prompt (dataset.prompt), or remove the column",
    ),
}
"""Columns that would change the prompt of a row, and what to do about them."""
ROW_WEIGHTS = ("weight", "sample_weight", "loss_weight")
LOSS_FLAGS = ("train", "loss")
LOSS_MASKS = ("loss_mask", "completion_mask", "assistant_mask", "assistant_masks")
FALSE_WORDS = ("0", "0.0", "false", "no")


def fill(template: str, row: Row) -> str:
    """Fill a template with columns (`str.format`). Braces in values are literal; `{{` and `}}` are literal braces in
    the template.

        >>> fill("Q: {question}", {"question": "Is {x} a set?"})
        'Q: Is {x} a set?'
    """
    parts = []
    for literal, column, format_spec, conversion in _parse(template):
        parts.append(literal)
        if column is not None:
            value = value_of(row, column, f"template {template!r}")
            formatter = string.Formatter()
            try:
                parts.append(formatter.format_field(formatter.convert_field(value, conversion), format_spec or ""))
            except (ValueError, TypeError) as error:
                raise ConfigError(f"template {template!r}: column {column!r} cannot be formatted: {error}") from error
    return "".join(parts)


def template_columns(template: str) -> list[str]:
    """Column names in a template. Raises `ConfigError` for unmatched braces."""
    return [column for _, column, _, _ in _parse(template) if column is not None]


def _parse(template: str) -> list[tuple[str, str | None, str | None, str | None]]:
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(f"template {template!r}: {error}; write {{{{ and }}}} for literal braces") from error
    if any(column == "" for _, column, _, _ in parts):
        raise ConfigError(
            f"template {template!r} has empty braces; name a column in them, or write {{{{}}}} for literal ones"
        )
    return parts


def no_column(column: str, row: Row) -> str:
    """Error text for a missing column: the existing columns, and a similar name if there is one."""
    return f"no column {column!r} among {', '.join(row)}{did_you_mean(column, row)}"


def value_of(row: Row, column: str, where: str) -> Any:
    """Value of a column that must be there. ConfigError, which begins with `where`, for a missing or null one."""
    if column not in row:
        raise ConfigError(f"{where}: {no_column(column, row)}")
    if row[column] is None:
        raise ConfigError(f"{where}: column {column!r} is null; remove such rows")
    return row[column]


def is_set(row: Row, column: str) -> bool:
    """Tell whether a row has a column that is neither null nor empty nor false."""
    value = row.get(column)
    return len(value) > 0 if isinstance(value, np.ndarray) else bool(value)


def in_template(column: str, section: DatasetSection) -> bool:
    """Tell whether a template of the section names a column, which is then part of a text and nothing else."""
    templates = [one for one in (section.prompt, section.completion) if one is not None]
    return any(column in template_columns(one) for one in templates)


def obeys(column: str, row: Row, section: DatasetSection) -> bool:
    """Tell whether a column says something of the conversation by its name: it is set, and no template names it."""
    return is_set(row, column) and not in_template(column, section)


def column_tools(row: Row, section: DatasetSection) -> list[dict[str, Any]] | None:
    """Tool descriptions of the columns `TOOL_COLUMNS`. ConfigError for two that differ."""
    named = {
        name: tools
        for name in TOOL_COLUMNS
        if obeys(name, row, section) and (tools := checked_tools(row[name], name)) is not None
    }
    first, *others = named.values() or [None]
    if any(other != first for other in others):
        raise ConfigError(f"the columns {' and '.join(named)} describe different tools; remove one of them")
    return first


def column_system(row: Row, section: DatasetSection) -> str | None:
    """System message of the columns `SYSTEM_COLUMNS`. ConfigError for what is no text, and for two that differ."""
    named = {name: row[name] for name in SYSTEM_COLUMNS if obeys(name, row, section)}
    for name, value in named.items():
        if not isinstance(value, str):
            raise ConfigError(
                f"column {name!r} holds a {type(value).__name__}; it must be the text of a system message"
            )
    if len(set(named.values())) > 1:
        raise ConfigError(f"the columns {' and '.join(named)} differ, and there is one system message; remove one")
    return next(iter(named.values()), None)


def refuse_meanings(row: Row, section: DatasetSection, *, trained: bool, read: Collection[str] = ()) -> None:
    """ConfigError for a column that would change the prompt of a row, or the loss of a `trained` one, and that nothing
    obeys. `read`: columns that a reward function or the like takes by name."""
    for name, remedy in REFUSED_IN_PROMPTS.items():
        # A column of booleans says something by being false too.
        there = is_set(row, name) or (name in row and row[name] is not None and _is_false(row[name]))
        if there and name not in read and not in_template(name, section):
            raise ConfigError(f"column {name!r} is not obeyed: {remedy}")
    if not trained:
        return
    for name in (*ROW_WEIGHTS, *LOSS_FLAGS, *LOSS_MASKS):
        if name not in row or row[name] is None or in_template(name, section):
            continue
        value = row[name]
        weighs = name in ROW_WEIGHTS and not _is_one(value)
        silences = name in LOSS_FLAGS and _is_false(value)
        masks = name in LOSS_MASKS and is_set(row, name)
        if weighs or silences or masks:
            raise ConfigError(
                f"column {name!r} is {str(value)[:40]!r} and is not obeyed: all rows have the same weight. Remove such "
                "rows, or rename or remove the column; weight: 0 in an assistant message leaves that turn without loss"
            )


def _is_false(value: Any) -> bool:
    return str(value).strip().lower() in FALSE_WORDS


def _is_one(value: Any) -> bool:
    return str(value).strip().lower() in ("", "1", "1.0", "true")


def standard_row(row: Row) -> tuple[dict[str, Any], str | None]:
    """Row with columns as other tools have them under our names, and a remark about that.

    ShareGPT: `conversations` become `messages`, or `prompt` beside `chosen`. Alpaca: `instruction` and `input` become
    `prompt`, `output` becomes `completion`. Columns that are there already are kept. ConfigError for `conversations`
    that are text and no JSON.
    """
    if {"messages", "prompt", "text"} & set(row):
        return dict(row), None
    pair = {"chosen", "rejected"} <= set(row)
    if isinstance(row.get("conversations"), list | str):
        name, said = ("prompt" if pair else "messages"), row["conversations"]
        listed = parse_json_list(said, "conversations") if isinstance(said, str) else said
        return {**row, name: listed}, f"the column conversations is read as {name}"
    if isinstance(row.get("instruction"), str) and (pair or "output" in row):
        parts = [row["instruction"], row.get("input")]
        prompt = {"prompt": "\n".join(str(part) for part in parts if part)}
        answer = {} if pair or "completion" in row else {"completion": row["output"]}
        remark = "the columns instruction and input are read as prompt" + (", output as completion" if answer else "")
        return {**row, **prompt, **answer}, remark
    return dict(row), None


def unread_columns(
    columns: Iterable[str], section: DatasetSection, kind: RowKind, *, images: bool, others: Collection[str] = ()
) -> list[str]:
    """Columns that a stage does not read, in order. `images`: the model takes pictures; `others`: columns that
    something else reads, such as a reward function."""
    columns = list(columns)
    names = set(columns)
    read = _answer_columns(names, section, kind) | {*others, *TOOL_COLUMNS, *SYSTEM_COLUMNS, "history"}
    read |= set(IMAGE_COLUMNS) if images else set()
    return [name for name in columns if name not in read]


def _answer_columns(names: set[str], section: DatasetSection, kind: RowKind) -> set[str]:
    """Columns of the prompt and of what is trained."""
    # Columns as other tools have them are read where ours are missing.
    renamed = not {"messages", "prompt", "text"} & names
    sharegpt = {"conversations"} if renamed else set()
    alpaca = {"instruction", "input"} if renamed and not sharegpt & names else set()
    prompt = {"prompt", *sharegpt, *alpaca} if section.prompt is None else {*template_columns(section.prompt)}
    output = {"completion"} | ({"output"} if alpaca and "completion" not in names else set())
    completion = output if section.completion is None else {*template_columns(section.completion)}
    if kind == "pair":
        return prompt | {"chosen", "rejected"}
    if kind == "steps":
        return prompt | {"completions", "labels"}
    if kind == "prompt":
        return prompt
    if kind == "answer":
        return prompt | completion | {"label"} | ({"messages"} if "completion" not in names else set())
    templates = section.prompt is not None or section.completion is not None
    if templates or ({"prompt", "completion"} <= names and "messages" not in names) or alpaca & names:
        return prompt | completion
    return {"messages", *sharegpt} if {"messages", *sharegpt} & names else {"text"}


def unread_note(name: str, columns: Sequence[str]) -> list[str]:
    """Line about columns of a dataset that are not read."""
    return [f"{name}: columns that are not read: {', '.join(columns)}"] if columns else []
