from typing import Any

import numpy as np
import pytest

from posttrain.config import DatasetSection
from posttrain.data.chat import Renderer
from posttrain.data.columns import fill, standard_row, template_columns
from posttrain.data.format import (
    LossOn,
    check_columns,
    prompt_is_text,
    prompt_messages,
    tokenize_example,
    use_chat,
)
from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.errors import ConfigError

pytestmark = pytest.mark.fast

USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("bytes")


def section(**fields: Any) -> DatasetSection:
    return DatasetSection(path="rows.jsonl", **fields)


def parts(
    row: dict[str, Any], tokenizer: Tokenizer, data: DatasetSection, *, loss_on: LossOn = "answers"
) -> tuple[str, str]:
    """The text of a row's sequence, and the part of it that has loss."""
    row, _ = standard_row(row)
    renderer = Renderer(tokenizer, use_chat(data, tokenizer, list(row)))
    (example,) = tokenize_example(row, data, renderer, loss_on)
    assert example.tokens.dtype == np.int32
    assert not example.loss_mask[0]
    texts = (example.tokens, example.tokens[example.loss_mask])
    return tuple(tokenizer.decode(tokens.tolist(), skip_special_tokens=False) for tokens in texts)  # type: ignore[return-value]


TURN = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"


TALK = [USER, ASSISTANT, {"role": "user", "content": "so?"}, {"role": "assistant", "content": "bye"}, USER]


@pytest.mark.parametrize(
    ("row", "both"),
    [
        ({"messages": TALK}, "yo<|im_end|>bye<|im_end|>"),
        ({"prompt": TALK[:1], "completion": TALK[1:]}, "yo<|im_end|>bye<|im_end|>"),
        ({"prompt": TALK[:3], "completion": "bye"}, "bye<|im_end|>"),
    ],
)
def test_loss_on_the_last_turn_alone(tokenizer: Tokenizer, row: dict[str, Any], both: str) -> None:
    (whole, answers), (same, last) = (parts(row, tokenizer, section(), loss_on=on) for on in ("answers", "last"))
    assert whole == same and answers == both and last == "bye<|im_end|>"
    plain = {"prompt": "1", "completion": "2"}
    assert parts(plain, tokenizer, section(chat=False), loss_on="last")[1] == "2<eos>"
    with pytest.raises(ConfigError, match="last_turn_only has no effect on the plain column text"):
        parts({"text": "once"}, tokenizer, section(), loss_on="last")


@pytest.mark.parametrize(
    ("row", "fields"),
    [
        ({"messages": [USER, ASSISTANT]}, {}),
        ({"prompt": "hi", "completion": "yo"}, {}),
        ({"prompt": [USER], "completion": [ASSISTANT]}, {}),
        ({"question": "hi", "answer": "yo"}, {"prompt": "{question}", "completion": "{answer}"}),
        ({"question": "i", "completion": "yo"}, {"prompt": "h{question}"}),
        ({"turns": [USER], "answer": "yo"}, {"prompt": "{turns}", "completion": "{answer}"}),
        ({"messages": np.array([USER, ASSISTANT])}, {}),
        ({"messages": '[{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]'}, {}),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}, {}),
        ({"instruction": "hi", "input": None, "output": "yo"}, {}),
        ({"prompt": [USER], "completion": [{**USER, "content": " hi"}, ASSISTANT]}, {}),
        ({"prompt": "hi", "completion": [USER, ASSISTANT], "history": [], "system": None}, {}),
    ],
)
def test_every_chat_form_is_the_same_sequence(
    tokenizer: Tokenizer, row: dict[str, Any], fields: dict[str, Any]
) -> None:
    assert parts(row, tokenizer, section(**fields)) == (TURN, "yo<|im_end|>")
    assert parts(row, tokenizer, section(**fields), loss_on="all") == (TURN, TURN.removeprefix("<|im_start|>"))
    with_system = parts(row, tokenizer, section(system="S", **fields))
    assert with_system == ("<|im_start|>system\nS<|im_end|>\n" + TURN, "yo<|im_end|>")


def test_columns_of_the_prompt(tokenizer: Tokenizer) -> None:
    """Columns that other tools obey; a template that names them takes them as text."""
    row = {"prompt": "hi", "completion": "yo", "system": "S", "history": [["a", "b"]]}
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, USER, ASSISTANT]
    system = {"role": "system", "content": "S"}
    assert parts(row, tokenizer, section()) == (
        parts({"messages": [system, *talk]}, tokenizer, section())[0],
        "yo<|im_end|>",
    )
    assert parts({"messages": talk, "system": "S"}, tokenizer, section())[0] == parts(row, tokenizer, section())[0]
    named = parts({**row, "history": None}, tokenizer, section(prompt="{system} {prompt}"))[0]
    assert named.startswith("<|im_start|>user\nS hi<|im_end|>")
    assert prompt_messages({"prompt": "hi", "system": "S"}, section()) == [system, USER]
    alpaca = {"instruction": "Add", "input": "1 2", "output": "3", "system": "S"}
    assert parts(alpaca, tokenizer, section())[0].startswith(
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nAdd\n1 2<"
    )
    with pytest.raises(ConfigError, match="instruction and output, and no chat template; give the form of the prompt"):
        check_columns(alpaca, section(), chat=False)


def test_plain_forms(tokenizer: Tokenizer) -> None:
    row = {"prompt": "Q: {1} ", "completion": "two"}
    assert parts(row, tokenizer, section(chat=False)) == ("<bos>Q: {1} two<eos>", "two<eos>")
    assert parts(row, tokenizer, section(chat=False), loss_on="all")[1] == "Q: {1} two<eos>"
    assert parts({"text": "Once"}, tokenizer, section()) == ("<bos>Once<eos>", "Once<eos>")
    assert not use_chat(section(), tokenizer, ["text"])
    assert use_chat(section(), tokenizer, ["prompt", "completion"])
    assert use_chat(section(), tokenizer, ["prompt", "answer"])
    assert use_chat(section(prompt="{text}"), tokenizer, ["text"])
    assert not use_chat(section(chat=False), tokenizer, ["messages"])


def test_rows_of_another_kind_than_the_first(tokenizer: Tokenizer) -> None:
    """Red without: they lose the chat template for the first row's sake."""
    first = Renderer(tokenizer, use_chat(section(), tokenizer, ["text"]))
    with pytest.raises(ConfigError, match="the first row is plain text and this one is not"):
        tokenize_example({"prompt": "hi", "completion": "yo"}, section(), first, "answers")


def test_loss_of_a_completion_of_several_messages(tokenizer: Tokenizer) -> None:
    row = {"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT, USER, ASSISTANT]}
    assert parts(row, tokenizer, section())[1] == "yo<|im_end|>yo<|im_end|>"


def test_rl_prompts() -> None:
    assert prompt_messages({"prompt": "hi"}, section()) == [USER]
    assert prompt_messages({"prompt": [USER]}, section(system="S"))[0] == {"role": "system", "content": "S"}
    assert prompt_messages({"q": "h"}, section(prompt="{q}i")) == [USER]
    assert prompt_is_text({"prompt": "hi"}, section())
    assert prompt_is_text({"q": "h"}, section(prompt="{q}i"))
    assert not prompt_is_text({"prompt": [USER]}, section())
    assert not prompt_is_text({"q": [USER]}, section(prompt="{q}"))
    with pytest.raises(ConfigError, match="the prompt ends with an assistant message"):
        prompt_messages({"prompt": [USER, ASSISTANT]}, section())


def test_templates_take_values_as_they_are() -> None:
    row = {"a": r"\frac{1}{2} {b} {{x}}", "b": 3, "Water_(g)": 1.25}
    assert fill("{a}|{b}|{{b}}|{Water_(g):.1f}", row) == r"\frac{1}{2} {b} {{x}}|3|{b}|1.2"
    assert template_columns("x {a} {{no}} {b}") == ["a", "b"]


@pytest.mark.parametrize(
    ("row", "fields", "message"),
    [
        (
            {"question": "q", "answer": "a"},
            {"prompt": "{qestion}"},
            r"no column 'qestion' among question, answer; did you mean 'q",
        ),
        ({"question": "q", "answer": "a"}, {"prompt": "{question}"}, r"dataset.completion .*no column 'completion'"),
        (
            {"prompt": "q", "answer": "a"},
            {"system": "S", "prompt": "{prompt}"},
            r"among prompt, answer; give dataset.completion, a template over the columns such as '\{answer\}'",
        ),
        ({"question": "q"}, {}, r"columns question; SFT needs messages, or prompt and completion, or text"),
        ({"q": None, "completion": "a"}, {"prompt": "{q}"}, r"column 'q' is null"),
        ({"q": "q", "completion": "a"}, {"prompt": r"\boxed{}{q}"}, r"has empty braces"),
        ({"q": "q", "completion": "a"}, {"prompt": "{q"}, r"template '\{q': .*write \{\{ and \}\}"),
        ({"prompt": 3, "completion": "a"}, {}, r"column 'prompt' holds a int"),
        ({"text": 3}, {}, r"column 'text' holds a int"),
        ({"text": "a"}, {"chat": True}, r"dataset.chat is true, but the column text is plain"),
        ({"text": "a"}, {"system": "S"}, r"dataset.system has no place in the plain column text"),
        ({"q": "q", "completion": "a"}, {"prompt": "{q:.2f}"}, r"column 'q' cannot be formatted:"),
        ({"messages": "hi"}, {}, r"'messages' must hold a non-empty list of messages; it holds 'hi'"),
        ({"messages": []}, {}, r"must hold a non-empty list"),
        ({"messages": [{"content": "x"}]}, {}, r"messages\[0\] must be a message with role and content"),
        ({"messages": [{"role": "usr", "content": "x"}]}, {}, r"messages\[0\].role='usr': .*did you mean 'user'\?"),
        ({"messages": [USER, {"role": "assistant"}]}, {}, r"messages\[1\] has neither content nor tool_calls"),
        ({"messages": [{"role": "system", "content": ""}, ASSISTANT]}, {"system": "S"}, "brings a system message"),
        ({"messages": [USER, ASSISTANT]}, {"chat": False}, "messages need a chat template"),
        (
            {"prompt": [USER], "completion": [USER | {"content": "ho"}, ASSISTANT]},
            {},
            "completion begins with a user mess",
        ),
        (
            {"prompt": "a", "completion": "b", "system": "S"},
            {"system": "T"},
            "dataset.system is set, but the row brings a",
        ),
        (
            {"prompt": "a", "completion": "b", "history": "c"},
            {},
            "column 'history' holds 'c'; it must be a list of pairs",
        ),
        ({"prompt": "a", "completion": "b", "system": 1}, {}, "column 'system' holds a int"),
    ],
)
def test_errors(tokenizer: Tokenizer, row: dict[str, Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parts(row, tokenizer, section(**fields))
    assert "\n" not in str(caught.value)
