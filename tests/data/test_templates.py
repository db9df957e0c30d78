"""Chat templates that posttrain brings, and arguments of templates."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.config import ModelSection
from posttrain.data.chat import Renderer
from posttrain.data.templates import effort_arguments
from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.data.tokenizer_files import shipped_templates
from posttrain.errors import ConfigError
from posttrain.weights.locate import run_tokenizer
from tests.environments.helpers import TOOLS, with_template

pytestmark = pytest.mark.fast

ORIGINALS = {"qwen3": "Qwen-Qwen3-0.6B", "phi3.5": "microsoft-Phi-3.5-mini-instruct"}
CALL = {"type": "function", "id": "call00001", "function": {"name": "lookup", "arguments": {"text": "wörd", "n": [1]}}}


def with_text(tokenizer: Tokenizer, template: str) -> Tokenizer:
    tokenizer = replace(tokenizer, hf=load_tokenizer("bytes").hf if tokenizer.name == "bytes" else tokenizer.hf)
    tokenizer.hf.chat_template = template
    return tokenizer


def conversation(random: np.random.Generator, name: str) -> tuple[list[dict[str, Any]], Any]:
    """Some messages whose earlier turns the original template keeps as they are."""
    word = lambda: "".join(random.choice(list("ab \n<é")) for _ in range(random.integers(1, 9))) + "."  # noqa: E731
    talk = [{"role": "system", "content": word()}] if random.integers(2) else []
    tools = TOOLS if name == "qwen3" and random.integers(2) else None
    if name != "qwen3":
        for _ in range(random.integers(1, 4)):
            talk += [{"role": "user", "content": word()}, {"role": "assistant", "content": word()}]
        return talk, None
    talk.append({"role": "user", "content": word()})
    for _ in range(random.integers(0, 3) if tools else 0):
        calls = [CALL] * random.integers(1, 3)
        talk.append({"role": "assistant", "content": word(), "reasoning_content": word(), "tool_calls": calls})
        talk += [{"role": "tool", "content": word(), "tool_call_id": "call00001"}] * len(calls)
    said = {"role": "assistant", "content": word()}
    inside = {**said, "content": f"<think>\n{word()}\n</think>\n\n{said['content']}"}
    return [*talk, [said, {**said, "reasoning_content": word()}, inside][random.integers(3)]], tools


@pytest.mark.parametrize("name", ORIGINALS)
def test_equal_to_the_models_own(shared: Path, name: str) -> None:
    """The same text and tokens, and the loss that is derived of the original, where that keeps earlier turns."""
    own = Renderer(with_template(shared, ORIGINALS[name]), chat=True)
    other = with_template(shared, ORIGINALS[name])
    other.hf.chat_template = shipped_templates()[name].read_text(encoding="utf-8")
    ours = Renderer(other, chat=True)
    random = np.random.default_rng(0)
    for _ in range(24):
        talk, tools = conversation(random, name)
        assert ours.rendered(talk, tools, reply=False) == own.rendered(talk, tools, reply=False)  # type: ignore[arg-type]
        assert ours.prompt(talk[:-1], tools) == own.prompt(talk[:-1], tools)  # type: ignore[arg-type]
        (mine,) = ours.conversations(talk, tools=tools)  # type: ignore[arg-type]
        theirs = own.conversations(talk, tools=tools)[-1]  # type: ignore[arg-type]
        # Of several turns the original makes several sequences, in which no token begins with an earlier turn.
        if sum(message["role"] == "assistant" for message in talk) == 1:
            assert mine == theirs


def test_names_of_templates() -> None:
    talk = [
        {"role": r, "content": c} for r, c in (("user", "a"), ("assistant", " b"), ("user", "c"), ("assistant", "d"))
    ]
    expected = {
        "chatml": ("<|im_start|>assistant\n< b<|im_end|>>\n<|im_start|>user\n", "<|im_end|>"),
        "llama3": ("<|start_header_id|>assistant<|end_header_id|>\n\n<b<|eot_id|>><|start_header_id|>", "<|eot_id|>"),
        "phi3.5": ("<|assistant|>\n< b<|end|>>\n<|user|>\n", "<|end|>"),
        "qwen3": ("<|im_start|>assistant\n<<think>\n\n</think>\n\n b<|im_end|>>\n<|im_start|>user", "<|im_end|>"),
    }
    assert expected.keys() == shipped_templates().keys()
    for name, (text, _) in expected.items():
        model = ModelSection.model_validate({"init": {}, "tokenizer": "bytes", "chat_template": name})
        tokenizer = run_tokenizer("bytes", model)
        (found,) = Renderer(tokenizer, chat=True).conversations(talk)  # type: ignore[arg-type]
        marked = "".join(
            ("<" if loss and not before else "") + piece + (">" if loss and not after else "")
            for piece, before, loss, after in zip(
                (tokenizer.decode([token], skip_special_tokens=False) for token in found.tokens),
                [False, *found.mask],
                found.mask,
                [*found.mask[1:], False],
                strict=False,
            )
        )
        assert text in marked, (name, marked)
    wrong = ModelSection.model_validate({"init": {}, "tokenizer": "bytes", "chat_template": "chatlm"})
    with pytest.raises(ConfigError, match="model.chat_template: chatlm: no such file .*one of chatml, llama3, phi3.5"):
        run_tokenizer("bytes", wrong)


def test_arguments_reach_every_rendering_and_are_saved(tmp_path: Path) -> None:
    args = {"enable_thinking": False, "note": {"a": ['"é😀"', None, 1.5, True]}}
    template = (
        "{% if enable_thinking is defined and enable_thinking is false %}quiet {{ note.a | join('|') }}: {% endif %}"
    )
    (tmp_path / "t.jinja").write_text(template + "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    section = {"init": {}, "tokenizer": "bytes", "chat_template": str(tmp_path / "t.jinja"), "chat_template_args": args}
    tokenizer = run_tokenizer("bytes", ModelSection.model_validate(section))
    tokenizer.save(tmp_path / "saved")
    asked: Any = [{"role": "user", "content": "a"}]
    answered = [*asked, {"role": "assistant", "content": "b"}]
    for one in (tokenizer, load_tokenizer(tmp_path / "saved"), tokenizer.at(datetime(2026, 1, 1))):
        renderer = Renderer(one, chat=True)
        assert one.decode(renderer.prompt(asked)) == 'quiet "é😀"|None|1.5|True: a'
        assert one.decode(renderer.conversation(answered).tokens) == 'quiet "é😀"|None|1.5|True: ab'
    # Values of a reader come before those that are saved.
    loud = load_tokenizer(tmp_path / "saved").with_template_args({"enable_thinking": True})
    assert loud.decode(Renderer(loud, chat=True).prompt(asked)) == "a"
    for wrong, said in (
        ({"enable_thinkin": 1}, "of bytes does not mention 'enable_thinkin'; did you mean 'enable_thinking'"),
        ({"messages": 1}, "messages is what posttrain gives"),
    ):
        with pytest.raises(ConfigError, match=re.escape("model.chat_template_args: ") + ".*" + said):
            run_tokenizer("bytes", ModelSection.model_validate({**section, "chat_template_args": wrong}))


def test_a_conversation_that_may_not_begin_with_an_answer_is_named() -> None:
    template = "{{ messages[0].content }}{% for m in messages[1:] %}{{ m.content }}{% endfor %}"
    tokenizer = load_tokenizer("bytes")._with_templates(template)
    talk: Any = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(ConfigError, match="refuses a conversation that begins with an assistant message"):
        Renderer(tokenizer, chat=True).conversations([*talk, {"role": "assistant", "content": "c"}])


@pytest.mark.parametrize("content", ["", " ", "x"])
def test_empty_answers_are_told(content: str) -> None:
    model = ModelSection.model_validate({"init": {}, "tokenizer": "bytes", "chat_template": "chatml"})
    renderer = Renderer(run_tokenizer("bytes", model), chat=True)
    talk: Any = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
    renderer.conversations(talk)
    assert ("empty" in renderer.remarks.texts) == (content != "x")


@pytest.mark.parametrize(
    ("template", "effort", "expected"),
    [
        ("{{ reasoning_effort or 'medium' }}", "low", {"reasoning_effort": "low"}),
        ("{{ reasoning_effort }}", "none", {"reasoning_effort": "none"}),
        ("{% if enable_thinking %}x{% endif %}", "none", {"enable_thinking": False}),
        ("{{ thinking }}{{ reasoning_effort }}", "none", {"thinking": False}),
        ("{{ thinking }}{{ reasoning_effort }}", "high", {"reasoning_effort": "high"}),
        ("{% if enable_thinking %}x{% endif %}", "low", "low: the chat template knows no effort, only enable_thinking"),
        ("{{ messages }}", "none", "none: the chat template has no variable for it; leave it out"),
    ],
)
def test_an_effort_is_a_variable_of_the_template(template: str, effort: str, expected: Any) -> None:
    if isinstance(expected, dict):
        assert effort_arguments(template, effort) == expected
        return
    with pytest.raises(ConfigError, match=expected):
        effort_arguments(template, effort)
