"""Dataset formats: from a dict row to a training sequence or a prompt, by columns or templates."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from posttrain.config import DatasetSection, SequenceSection
from posttrain.data.chat import Masked, Renderer
from posttrain.data.messages import (
    Message,
    Remarks,
    checked_messages,
    checked_tools,
    is_same,
    json_messages,
    plain_text,
    text_of,
)
from posttrain.data.tokenizer import Tokenizer
from posttrain.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from posttrain.data.pictures import RowPictures

SHORTEST_REPEAT = 4
"""Minimum length of a prompt whose repetition at the start of an answer is no accident."""
IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"}
MAX_PATH = 1024
"""Characters of the longest text that may be the path of a picture."""
MESSAGE_COLUMNS = ("messages", "conversations")
"""Columns whose texts are messages as JSON; a text of any other column is text."""
ROW_FLAGS = ("weight", "train")
"""Columns by which others leave a whole row without loss."""
MEDIA = "the package reads no {column}: remove the column, or the rows"
TEMPLATE = (
    "variables of the chat template are the same for all rows: set model.chat_template_args, and remove the column"
)
UNREAD_OF_PROMPTS = {
    **dict.fromkeys(("video", "videos", "audio", "audios"), MEDIA),
    **dict.fromkeys(("chat_template_kwargs", "enable_thinking", "reasoning_effort"), TEMPLATE),
    "system_prompt": "rename it to system, which is read as the system message, or remove it",
}
"""Remedies for columns that would change a prompt and are not read."""
UNREAD_OF_TRAINING = {
    "documents": "write them into the prompt (dataset.prompt), or remove the column",
    **dict.fromkeys(ROW_FLAGS, "a row has no weight of its own: leave the row out, or set dataset.weight of a dataset"),
}
"""Remedies for columns that would change how a row is trained and are not read."""
Row = Mapping[str, Any]
LossOn = Literal["all", "answers", "last"]
"""Tokens with loss: all of a sequence, completions and assistant turns, or only the last of these."""


@dataclass(frozen=True, eq=False)
class TokenizedExample:
    """Tokenized training sequence. The first token has no context and never has loss."""

    tokens: Int[np.ndarray, " T"]
    loss_mask: Bool[np.ndarray, " T"]
    images: Int[np.ndarray, " T"] | None = None
    """Number of the image whose feature stands at each token, from 1; 0: text. None: without pictures."""
    grids: Int[np.ndarray, "I 2"] | None = None
    """Rows and columns of the images' tokens."""


def use_chat(section: DatasetSection, tokenizer: Tokenizer, columns: Sequence[str]) -> bool:
    """Tell whether rows use the chat template: `section.chat`, else if one exists and rows are not plain `text`."""
    templates = section.prompt is not None or section.completion is not None
    plain = not templates and "text" in columns and not {"messages", "prompt"} & set(columns)
    if plain and section.chat:
        raise ConfigError("dataset.chat is true, but the column text is plain; give messages, or prompt and completion")
    return section.chat if section.chat is not None else tokenizer.chat_template is not None and not plain


def loss_on(section: SequenceSection) -> LossOn:
    return "all" if section.train_on_prompt else "last" if section.last_turn_only else "answers"


def tokenize_example(row: Row, section: DatasetSection, renderer: Renderer, loss: LossOn) -> list[TokenizedExample]:
    """Tokens and loss mask of a row: from templates, `messages`, `prompt` with `completion`, or `text`.

    One sequence, or one for each assistant turn if the chat template rewrites earlier turns. Raises `ConfigError` if
    columns are missing or a value has the wrong type.
    """
    kind = _kind(section, list(row))
    tools = row_tools(row, section)
    if kind != "text" and renderer.chat != use_chat(section, renderer.tokenizer, list(row)):
        raise ConfigError("the first row is plain text and this one is not; set dataset.chat for all rows")
    prompt, answer = row_messages(row, section, renderer)
    messages = [*prompt, *answer]
    if kind == "text":
        if section.system is not None:
            raise ConfigError(
                "dataset.system has no place in the plain column text; give messages, or prompt and completion"
            )
        if tools:
            raise ConfigError("tools have no place in the plain column text; give messages, or prompt and completion")
        if loss == "last":
            raise ConfigError(
                "last_turn_only has no effect on the plain column text; give messages, or prompt and completion"
            )
        sequences = [renderer.text(_string(row, "text"))]
    elif renderer.chat or kind == "messages":
        sequences = renderer.conversations(messages, first=_first(messages, len(prompt), loss), tools=tools)
    else:
        sequences = [render_answer(prompt, answer, renderer, tools)]
    if loss == "all" and any("weight" in message for message in messages):
        raise ConfigError("weight: 0 of a message has no effect with train_on_prompt, which trains on everything")
    if loss == "all" and len(sequences) > 1:
        raise ConfigError(
            f"train_on_prompt: chat template of {renderer.tokenizer.name} rewrites earlier turns, so that each turn is "
            "a sequence whose prompt repeats them; remove it, or set model.chat_template to one that keeps them"
        )
    return [_example(masked, loss, renderer.tokenizer) for masked in sequences]


def row_messages(row: Row, section: DatasetSection, renderer: Renderer) -> Spoken:
    """Messages of a training row, those with loss last; none of a plain text. ConfigError for pictures without a
    place."""
    kind, pictures = _kind(section, list(row)), row_pictures(row, section, renderer)
    if kind == "text":
        if pictures is not None and pictures.left:
            raise ConfigError(
                "pictures have no place in the plain column text; give messages, or prompt and completion"
            )
        return Spoken([], [])
    if kind == "messages":
        said = _with_system(checked_messages(row["messages"], "messages", pictures), row, section)
        return Spoken([], said if pictures is None else pictures.placed(said))
    prompt, answer = prompt_messages(row, section, pictures), answer_messages(row, section.completion, "completion")
    return spoken(prompt if pictures is None else pictures.placed(prompt), answer, "completion", renderer.remarks)


def _example(masked: Masked, loss: LossOn, tokenizer: Tokenizer) -> TokenizedExample:
    tokens, mask = np.asarray(masked.tokens, np.int32), np.asarray(masked.mask, bool)
    if masked.images is None:
        return TokenizedExample(tokens, np.arange(len(tokens)) > 0 if loss == "all" else mask)
    if loss == "all":
        mask = (np.arange(len(tokens)) > 0) & ~np.isin(tokens, tokenizer.image_ids)
    return TokenizedExample(tokens, mask, np.asarray(masked.images, np.int32), np.asarray(masked.grids, np.int32))


def row_pictures(row: Row, section: DatasetSection, renderer: Renderer) -> RowPictures | None:
    """Pictures of a row, by columns that no template names; None for a model without images, which does not read the
    columns: that is a remark."""
    names = [name for name in ("images", "image") if _obeys(name, row, section)]
    if not renderer.tokenizer.has_images:
        if section.image_marker is not None:
            raise ConfigError(f"dataset.image_marker: the model of {renderer.tokenizer.name} takes no images")
        if names:
            renderer.remarks.add("images", f"the column {names[0]} is not read: the model takes no images")
        return None
    from posttrain.data.pictures import RowPictures

    found = section.path.found
    folder = section.path.folder if found is None else found if found.is_dir() else found.parent
    if not names and (column := _names_a_picture(row, section, folder)) is not None:
        raise ConfigError(
            f"column {column!r} names a picture ({row[column]}); only the columns image and images are read: rename it"
        )
    return RowPictures({name: row[name] for name in names}, folder, section.image_marker)


def refuse_pictures(row: Row, section: DatasetSection, renderer: Renderer) -> None:
    """ConfigError for pictures in columns of a row whose reader takes none, while the model does."""
    pictures = row_pictures(row, section, renderer)
    if section.image_marker is not None or (pictures is not None and pictures.left):
        raise ConfigError(
            "the row has pictures, which only SFT reads yet; remove the columns images, image, and dataset.image_marker"
        )


def prompt_messages(row: Row, section: DatasetSection, pictures: RowPictures | None = None) -> list[Message]:
    """Prompt messages of a row: a plain string is one user message, after the columns `system` and `history`.

    `pictures`: those of the row, which others than readers of images refuse.
    """
    value = _value(row, section.prompt, "prompt")
    listed = [_message("user", value)] if isinstance(value, str) else value
    messages = listed if pictures is None and listed is not value else checked_messages(listed, "prompt", pictures)
    if messages[-1]["role"] == "assistant":
        raise ConfigError("the prompt ends with an assistant message; it must end before the reply")
    return _with_system([*_history(row, section), *messages], row, section)


def prompt_is_text(row: Row, section: DatasetSection) -> bool:
    """Tell whether the row's prompt is a string; reward functions then get completions as strings, else as message
    lists."""
    return isinstance(_value(row, section.prompt, "prompt"), str)


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
            value = _column(row, column, f"template {template!r}")
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


def _kind(section: DatasetSection, columns: Sequence[str]) -> str:
    if section.prompt is not None or section.completion is not None:
        return "prompt"
    if "messages" in columns:
        return "messages"
    if "prompt" in columns and "completion" in columns:
        return "prompt"
    if "text" in columns:
        return "text"
    raise ConfigError(
        f"the row has columns {', '.join(columns)}; SFT needs messages, or prompt and completion, or text, "
        'or templates such as prompt: "{question}", completion: "{answer}"'
    )


def _first(messages: Sequence[Message], first: int, loss: LossOn) -> int:
    """Number of the first message that may have loss."""
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    return max(first, turns[-1]) if turns and loss == "last" else first


def answer_messages(row: Row, template: str | None, column: str, pictures: RowPictures | None = None) -> list[Message]:
    """Messages of an answer: a plain string is one assistant message. `pictures`: those of a prompt that the answer may
    repeat."""
    value = _value(row, template, column)
    return [_message("assistant", value)] if isinstance(value, str) else checked_messages(value, column, pictures)


def render_answer(
    prompt: Sequence[Message],
    answer: Sequence[Message],
    renderer: Renderer,
    tools: Any = None,
) -> Masked:
    """Render prompt and answer as one sequence with loss on the answer."""
    if not renderer.chat:
        return renderer.completion(plain_text(prompt, "user", tools), plain_text(answer, "assistant"))
    return renderer.conversation([*prompt, *answer], first=len(prompt), tools=tools)


def _value(row: Row, template: str | None, column: str) -> str | list[Any]:
    """Text of a template or column; a message list if the column, or the template's only field, holds one."""
    source = f"{{{column}}}" if template is None else template
    columns = template_columns(source)
    if template is None and column not in row:
        example = "{question}" if column == "prompt" else "{answer}"
        raise ConfigError(
            f"dataset.{column} (by default): {no_column(column, row)}; "
            f"give dataset.{column}, a template over the columns such as {example!r}"
        )
    if source == f"{{{columns[0] if columns else ''}}}":
        value = _column(
            row, columns[0], f"dataset.{column}={source!r}" if template else f"dataset.{column} (by default)"
        )
        if isinstance(value, list | tuple | np.ndarray):
            return list(value)
        if isinstance(value, Mapping) and {"role", "from"} & set(value):
            return [value]
        if isinstance(value, str) and columns[0] in MESSAGE_COLUMNS and (messages := json_messages(value)) is not None:
            return messages
        if template is None and not isinstance(value, str):
            raise ConfigError(
                f"column {column!r} holds a {type(value).__name__}; it must be a string or a message list"
            )
    return fill(source, row)


def no_column(column: str, row: Row) -> str:
    """Error text for a missing column: the existing columns, and a similar name if there is one."""
    return f"no column {column!r} among {', '.join(row)}{did_you_mean(column, row)}"


def _column(row: Row, column: str, where: str) -> Any:
    if column not in row:
        raise ConfigError(f"{where}: {no_column(column, row)}")
    if row[column] is None:
        raise ConfigError(f"{where}: column {column!r} is null; remove such rows")
    return row[column]


def _string(row: Row, column: str) -> str:
    value = _column(row, column, "plain text")
    if not isinstance(value, str):
        raise ConfigError(f"column {column!r} holds a {type(value).__name__}; it must be a string")
    return value


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _with_system(messages: list[Message], row: Row, section: DatasetSection) -> list[Message]:
    """Messages after the system message of the section, or of the column `system`."""
    _refuse_unread(row, section, UNREAD_OF_PROMPTS)
    own = row.get("system") if _obeys("system", row, section) else None
    if own is not None and not isinstance(own, str):
        raise ConfigError(f"column 'system' holds a {type(own).__name__}; it must be the text of a system message")
    texts = [text for text in (section.system, own) if text]
    begins = messages[0]["role"] in ("system", "developer")
    if len(texts) + begins > 1:
        where = "dataset.system is set, but the row" if section.system else "the column system is set, but the row also"
        raise ConfigError(f"{where} brings a system message; remove one of them")
    return [_message("system", texts[0]), *messages] if texts else messages


def _history(row: Row, section: DatasetSection) -> list[Message]:
    """Messages of the column `history`: earlier turns as pairs of a question and an answer."""
    pairs = row.get("history") if _obeys("history", row, section) else None
    if pairs is None:
        return []
    if not isinstance(pairs, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
        raise ConfigError(
            f"column 'history' holds {str(pairs)[:60]!r}; it must be a list of pairs of a question and an answer; "
            "rename it if it is something else"
        )
    return [_message(role, text) for pair in pairs for role, text in zip(("user", "assistant"), pair, strict=True)]


def _obeys(column: str, row: Row, section: DatasetSection) -> bool:
    """Tell whether a column is part of the prompt by its name: no template names it."""
    value = row.get(column)
    there = len(value) > 0 if isinstance(value, np.ndarray) else bool(value)
    return there and _is_in_no_template(column, section)


def _is_in_no_template(column: str, section: DatasetSection) -> bool:
    templates = [one for one in (section.prompt, section.completion) if one is not None]
    return all(column not in template_columns(one) for one in templates)


def row_tools(row: Row, section: DatasetSection) -> list[dict[str, Any]] | None:
    """Tools of a training row, of the column `tools` or OpenAI's older `functions`; None without any.

    ConfigError for both, and for columns that would change how the row is trained and are not read.
    """
    _refuse_unread(row, section, UNREAD_OF_PROMPTS | UNREAD_OF_TRAINING)
    names = [name for name in ("tools", "functions") if _obeys(name, row, section)]
    of_columns = [tools for name in names if (tools := checked_tools(row[name])) is not None]
    if len(of_columns) > 1 and of_columns[0] != of_columns[1]:
        raise ConfigError("the columns tools and functions describe different tools; keep one of them")
    return of_columns[0] if of_columns else None


def _refuse_unread(row: Row, section: DatasetSection, remedies: Mapping[str, str]) -> None:
    """ConfigError for a column of `remedies` that says something and that no template names."""
    for column, remedy in remedies.items():
        value = row.get(column)
        # A row that is trained as others says nothing by its flag; a variable of the template does also as false.
        says = str(value).strip().lower() not in ("1", "1.0", "true", "") if column in ROW_FLAGS else _says(value)
        if value is not None and says and _is_in_no_template(column, section):
            raise ConfigError(f"column {column!r} ({str(value)[:40]}) is not read; {remedy.format(column=column)}")


def _says(value: Any) -> bool:
    """Tell whether a value is not empty; numbers and booleans never are."""
    return len(value) > 0 if isinstance(value, str | list | tuple | Mapping | np.ndarray) else value is not None


def _names_a_picture(row: Row, section: DatasetSection, folder: Path) -> str | None:
    """Column of a row without messages that holds the path of a picture and is part of no template."""
    if any(isinstance(value, list | tuple | np.ndarray) for value in row.values()):
        return None
    paths = {name: Path(value) for name, value in row.items() if isinstance(value, str) and len(value) < MAX_PATH}
    named = (name for name, path in paths.items() if path.suffix.lower() in IMAGE_SUFFIXES)
    return next((name for name in named if _obeys(name, row, section) and (folder / paths[name]).is_file()), None)


def prompt_columns(row: Row, section: DatasetSection) -> list[str]:
    """Columns of a row that are part of the prompt by their names."""
    plain = "text" in row and not {"messages", "prompt"} & set(row)
    return [] if plain else [column for column in ("system", "history") if _obeys(column, row, section)]


def check_columns(row: Row, section: DatasetSection, *, chat: bool) -> None:
    """ConfigError for a row of Alpaca's columns that has no chat template to be rendered by."""
    if not chat and section.prompt is None and "instruction" in row and standard_row(row)[1] is not None:
        raise ConfigError(
            "the row has columns instruction and output, and no chat template; give the form of the prompt in "
            'dataset.prompt, such as "{instruction}\\n{input}\\n", and dataset.completion'
        )


class Spoken(NamedTuple):
    """Messages before an answer, and those of the answer."""

    prompt: list[Message]
    answer: list[Message]


def spoken(prompt: list[Message], answer: list[Message], column: str, remarks: Remarks) -> Spoken:
    """Prompt and answer without the prompt that some datasets repeat in front of it, with its system message.

    ConfigError for an answer that begins with another role than assistant, and with another system message. A text that
    begins with that of the prompt is a remark.
    """
    begins = answer[0]["role"] in ("system", "developer")
    own, said = prompt[0]["role"] in ("system", "developer"), answer[begins:]
    asked = prompt[own:]
    repeats = [n for n in range(len(asked), 0, -1) if len(said) > n and all(map(is_same, asked[-n:], said))]
    # An answer that begins with the assistant repeats a prompt only as a whole.
    if repeats and (repeats[0] == len(asked) or said[0]["role"] != "assistant"):
        said = said[repeats[0] :]
        if begins and own and not is_same(prompt[0], answer[0]):
            raise ConfigError(f"{column} begins with another system message than the prompt; give one of them")
        prompt = [answer[0], *prompt] if begins and not own else prompt
    elif begins:
        said = answer
    if not said or said[0]["role"] != "assistant":
        role = said[0]["role"] if said else answer[-1]["role"]
        raise ConfigError(
            f"{column} begins with a {role} message after the prompt; it must begin with an assistant message, or "
            "repeat the prompt before it"
        )
    # A text that is messages as JSON stays text outside of the columns for messages: say so.
    texts = {"the prompt": prompt[-1], column: said[0]}
    for where, message in texts.items():
        if json_messages(text_of(message)) is not None:
            remarks.add(
                "json",
                f"{where} is a text that holds messages as JSON; only messages and conversations are read as such",
            )
    asks = text_of(prompt[-1]).strip()
    if len(asks) >= SHORTEST_REPEAT and said[0].get("content", "").lstrip().startswith(asks):
        remarks.add(column, f"{column} begins with the text of the prompt {asks[:40]!r}, which is then written twice")
    return Spoken(prompt, said)


def standard_row(row: Row) -> tuple[dict[str, Any], str | None]:
    """Row with columns as other tools have them under our names, and a remark about that.

    ShareGPT: `conversations` become `messages`, or `prompt` beside `chosen`. Alpaca: `instruction` and `input` become
    `prompt`, `output` becomes `completion`. Columns that are there already are kept.
    """
    if {"messages", "prompt", "text"} & set(row):
        return dict(row), None
    pair = {"chosen", "rejected"} <= set(row)
    talk = row.get("conversations")
    if isinstance(talk, list | str):
        name = "prompt" if pair else "messages"
        talk = json_messages(talk) or talk if isinstance(talk, str) else talk
        return {**row, name: talk}, f"the column conversations is read as {name}"
    if isinstance(row.get("instruction"), str) and (pair or "output" in row):
        parts = [row["instruction"], row.get("input")]
        prompt = {"prompt": "\n".join(str(part) for part in parts if part)}
        answer = {} if pair or "completion" in row else {"completion": row["output"]}
        remark = "the columns instruction and input are read as prompt" + (", output as completion" if answer else "")
        return {**row, **prompt, **answer}, remark
    return dict(row), None
