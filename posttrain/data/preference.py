"""Preference data formats: rows with `chosen` and `rejected`, with `completion` and `label`, or with steps and
labels."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from posttrain.config import DatasetSection
from posttrain.data.chat import Masked, Renderer
from posttrain.data.columns import Row, no_column
from posttrain.data.format import (
    Conversation,
    answer_messages,
    prompt_conversation,
    prompt_messages,
    row_pictures,
    spoken,
    with_tools,
)
from posttrain.data.messages import Message, checked_messages, is_same, pictures_in, prompt_digest
from posttrain.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from posttrain.data.pictures import Picture

CHOSEN, REJECTED, MISMATCHED = 1, -1, 2
"""Roles of an answer's tokens, see `Batch.roles`."""
SIDES = ("chosen", "rejected")
RENAME = "rename yours in the data, or with a function of your own (dataset.path: file.py:function)"


class TokenizedAnswer(NamedTuple):
    """Tokenized prompt and answer with the answer's role, and the keys of the prompt's pictures."""

    masked: Masked
    role: int
    pictures: tuple[str, ...] = ()

    @property
    def prompt(self) -> tuple[list[int], tuple[str, ...]]:
        """Tokens before the answer, and the pictures among them."""
        return self.masked.tokens[: self.masked.mask.index(True)], self.pictures


def is_paired(columns: Sequence[str], section: DatasetSection) -> bool:
    """Tell whether rows hold pairs. ConfigError if they hold neither pairs nor labelled completions."""
    if "chosen" in columns and "rejected" in columns:
        return True
    if ({"completion", "messages"} & set(columns) or section.completion is not None) and "label" in columns:
        return False
    missing = [name for name in ("chosen", "rejected", "completion", "label") if name not in columns]
    near = [f"{name!r}{hint}" for name in missing if (hint := did_you_mean(name, columns))]
    raise ConfigError(
        f"the row has columns {', '.join(columns)}; it needs chosen and rejected, or completion and label, "
        f"beside the prompt; missing: {', '.join(near) or ', '.join(map(repr, missing))}"
        + ("" if near else f'; dataset.completion: "{{answer}}" makes a completion of another column, else {RENAME}')
    )


def pair_answers(row: Row, section: DatasetSection, renderer: Renderer) -> list[TokenizedAnswer] | None:
    """Chosen and rejected sequence of a row; None if they are equal."""
    if not is_paired(list(row), section):
        raise ConfigError("the row holds one completion with a label; this loss needs pairs: chosen and rejected")
    chosen, rejected = _pair_parts(row, section, renderer)
    answers = [_answer(side, renderer, role) for side, role in ((chosen, CHOSEN), (rejected, REJECTED))]
    return None if answers[0].masked.tokens == answers[1].masked.tokens else answers


def labelled_answers(row: Row, section: DatasetSection, renderer: Renderer) -> list[TokenizedAnswer]:
    """Desirable or undesirable answer of a row; both answers of a pair."""
    if is_paired(list(row), section):
        return pair_answers(row, section, renderer) or []
    label = _label(row["label"], "column 'label' must be")
    sides = _labelled_parts(row, section, renderer)
    return [_answer(sides, renderer, CHOSEN if label else REJECTED)]


def answered_prompt(row: Row, section: DatasetSection, renderer: Renderer) -> str:
    """Digest of the prompt that a row's answers have, also of one that both sides of a pair begin with."""
    pair = is_paired(list(row), section)
    parts = _pair_parts(row, section, renderer)[0] if pair else _labelled_parts(row, section, renderer)
    return prompt_digest(parts.prompt, parts.tools)


def pair_pictures(row: Row, section: DatasetSection, renderer: Renderer) -> list[Picture]:
    """Pictures of a row's prompt, in order."""
    pair = is_paired(list(row), section)
    parts = _pair_parts(row, section, renderer)[0] if pair else _labelled_parts(row, section, renderer)
    return pictures_in(parts.prompt)


def _labelled_parts(row: Row, section: DatasetSection, renderer: Renderer) -> Conversation:
    """Prompt and answer of a row with a label."""
    pictures = row_pictures(row, section, renderer)
    if "messages" in row and "completion" not in row and section.completion is None:
        said = checked_messages(row["messages"], "messages", pictures)
        at = max((number for number, one in enumerate(said) if one["role"] != "assistant"), default=-1) + 1
        if not 0 < at < len(said):
            raise ConfigError("messages with a label must hold a prompt and end with an assistant message")
        row, answer, column = {**row, "prompt": said[:at]}, said[at:], "messages"
    else:
        answer, column = answer_messages(row, section.completion, "completion"), "completion"
    prompt = prompt_messages(row, section, pictures)
    sides = spoken(prompt if pictures is None else pictures.placed(prompt), answer, column, renderer.remarks)
    return with_tools(sides, row, section, renderer)


def mismatched(answer: TokenizedAnswer, other: TokenizedAnswer) -> TokenizedAnswer:
    """Combine the prompt of one sequence with the answer of another."""
    (prompt, pictures), rest = answer.prompt, len(other.prompt[0])
    tokens = prompt + other.masked.tokens[rest:]
    mask = [False] * len(prompt) + other.masked.mask[rest:]
    images = answer.masked.images
    if images is not None:
        images = images[: len(prompt)] + [0] * (len(tokens) - len(prompt))
    return TokenizedAnswer(Masked(tokens, [False, *mask[1:]], images, answer.masked.grids), MISMATCHED, pictures)


def _label(value: Any, rule: str) -> bool:
    """Label of an answer or a step, in CSV a text."""
    known = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
    text = str(value).strip().lower()
    if not isinstance(value, bool | np.bool_ | str | Real) or text not in known:
        raise ConfigError(f"{rule} true or false, got {value!r}")
    return known[text]


def margin(row: Row) -> float:
    """Preference margin of a pair: the column `margin`, 0 without it; in CSV a text, empty for none."""
    value = row.get("margin")
    if value is None or value == "":
        return 0.0
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, str | Real) else float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"column 'margin' must be a finite number, got {value!r}")
    return number


def steps(row: Row, section: DatasetSection, renderer: Renderer) -> tuple[Masked, list[int]]:
    """Tokens of a prompt with its steps, loss mask (last token of each step), and the role of every token.

    Columns: `prompt`, `completions` (texts of the steps), `labels` (true: a correct step). A step ends with a newline.
    """
    texts, labels = (_list(row, name) for name in ("completions", "labels"))
    if len(texts) != len(labels) or not texts:
        raise ConfigError(f"there are {len(texts)} completions and {len(labels)} labels; each step needs one label")
    prompt, _, tools = prompt_conversation(row, section, renderer, trained=True)
    tokens = renderer.prompt(prompt, tools)
    mask, roles = [False] * len(tokens), [0] * len(tokens)
    for text, label in zip(texts, labels, strict=True):
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(f"column 'completions' must hold the texts of steps, got {text!r}")
        if "\n" in text.rstrip():
            raise ConfigError(f"column 'completions': a step ends with its first newline, and {text!r} has one within")
        ids = renderer.tokenizer.encode_spans(f"{text.rstrip()}\n", continues=True)[0]
        tokens = [*tokens, *ids]
        mask += [False] * (len(ids) - 1) + [True]
        roles += [0] * (len(ids) - 1) + [CHOSEN if _label(label, "column 'labels' must hold") else REJECTED]
    return Masked(tokens, mask), roles


def _list(row: Row, column: str) -> list[Any]:
    if column not in row:
        raise ConfigError(f"{no_column(column, row)}; {RENAME}")
    if not isinstance(row[column], list | tuple | np.ndarray):
        raise ConfigError(f"column {column!r} holds a {type(row[column]).__name__}; it must be a list")
    return list(row[column])


def _answer(sides: Conversation, renderer: Renderer, role: int) -> TokenizedAnswer:
    if pictures_in(sides.answer):
        raise ConfigError(
            "an answer holds a picture in a later message; pairs and labelled answers have them in prompts"
        )
    masked = renderer.answer(sides.prompt, sides.answer, sides.tools)
    if not any(masked.mask):
        raise ConfigError("an answer has no token with loss; it must not be empty")
    return TokenizedAnswer(masked, role, tuple(picture.key for picture in pictures_in(sides.prompt)))


def _pair_parts(row: Row, section: DatasetSection, renderer: Renderer) -> tuple[Conversation, Conversation]:
    """Prompt and answer of both sides; without a prompt column the prompt is what chosen and rejected begin with."""
    values = [row[name] for name in SIDES]
    for name, value in zip(SIDES, values, strict=True):
        if value is None:
            raise ConfigError(f"column {name!r} is null; remove such rows")
    of_sides = [row_pictures(row, section, renderer) for _ in SIDES]
    answers = [answer_messages(row, None, name, pictures) for name, pictures in zip(SIDES, of_sides, strict=True)]
    pictures = row_pictures(row, section, renderer)
    texts = [isinstance(value, str) for value in values]
    if any(texts) and not all(texts):
        raise ConfigError("one of chosen and rejected is a string and the other a list of messages; give the same")
    if section.prompt is None and "prompt" not in row:
        if all(texts):
            if pictures is not None and pictures.left:
                raise ConfigError(
                    "pictures have no place in chosen and rejected without a prompt; give the column prompt"
                )
            return _implicit_text(values, row, section, renderer)
        shared = _shared(*answers)
        pictures, implied = of_sides[0], {**row, "prompt": answers[0][:shared]}
        prompt, answers = prompt_messages(implied, section, pictures), [a[shared:] for a in answers]
    else:
        prompt = prompt_messages(row, section, pictures)
    prompt = prompt if pictures is None else pictures.placed(prompt)
    for name, answer in zip(SIDES, answers, strict=True):
        if not answer or answer[-1]["role"] != "assistant":
            raise ConfigError(f"{name} must end with an assistant message after the prompt")
    chosen, rejected = (
        spoken(prompt, answer, name, renderer.remarks) for name, answer in zip(SIDES, answers, strict=True)
    )
    if len(chosen.prompt) != len(rejected.prompt) or not all(map(is_same, chosen.prompt, rejected.prompt)):
        raise ConfigError("chosen and rejected begin with different system messages; they must answer the same prompt")
    sides = (chosen.answer, rejected.answer)
    first, second = (with_tools(Conversation(chosen.prompt, answer), row, section, renderer) for answer in sides)
    if first.tools != second.tools:
        raise ConfigError("chosen and rejected describe different tools; they must answer the same prompt")
    return first, second


def _shared(chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """Number of messages of the prompt with which both begin."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) - 1 and is_same(chosen[shared], rejected[shared]):
        shared += 1
    while shared and chosen[shared - 1]["role"] == "assistant":
        shared -= 1
    sides = [[picture.key for picture in pictures_in(side[:shared])] for side in (chosen, rejected)]
    if sides[0] != sides[1]:
        raise ConfigError("chosen and rejected have different pictures in the prompt; they must answer the same one")
    if shared == 0:
        raise ConfigError("chosen and rejected share no message, and there is no prompt; give the column prompt")
    return shared


def _implicit_text(
    values: Sequence[str], row: Row, section: DatasetSection, renderer: Renderer
) -> tuple[Conversation, Conversation]:
    if renderer.chat or section.system is not None:
        raise ConfigError(
            "chosen and rejected are whole texts without a prompt, which no chat template fits; "
            "set dataset.chat to false, or give the column prompt"
        )
    chosen, rejected = values
    length = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), min(map(len, values)))
    # A word with a common beginning belongs to the answers, and so does the space before it.
    shared = re.sub(r" ?[^\s]*$", "", chosen[:length])

    def side(value: str) -> Conversation:
        answer: Message = {"role": "assistant", "content": value[len(shared) :]}
        asked: Message = {"role": "user", "content": shared}
        return with_tools(Conversation([asked], [answer]), row, section, renderer)

    return side(chosen), side(rejected)
