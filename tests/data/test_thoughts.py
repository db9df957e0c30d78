"""Thoughts before a structured content: whole, the rest of one that the prompt opens, in a channel, or none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.data.chat import Renderer
from posttrain.data.grammar import Grammar, GrammarCompiler
from posttrain.data.thoughts import Place, in_thought, marks_of, place_of
from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.rollout.types import grammar_of

pytest.importorskip("llguidance")
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
BEGIN = "{% if add_generation_prompt %}<|im_start|>assistant\n"
SWITCH = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
TEMPLATES = {
    "none": f"{TURNS}{BEGIN}{{% endif %}}",
    "think": f"{TURNS}{BEGIN}{SWITCH}",
    "opened": f"{TURNS}{BEGIN}<think>\n{{% endif %}}",
    "gemma4": f"{TURNS}{BEGIN}{SWITCH}".replace("<think>\n\n</think>\n\n", "<|channel>thought\n<channel|>"),
    "gpt_oss": "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}{# <|channel|> #}",
}
MARKS = (
    "<think>", "</think>", "<|channel>", "<channel|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>",
)  # fmt: skip
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
JSON = '{"a": 1}'
FINAL = "<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>Hm {<|end|><|start|>assistant"


def tokenizer_of(template: str, *, special: bool) -> Tokenizer:
    """Bytes, with marks that are control tokens or text."""
    tokenizer = load_tokenizer("bytes")
    if special:
        tokenizer.hf.add_special_tokens({"additional_special_tokens": [*MARKS]}, replace_extra_special_tokens=False)
    tokenizer.hf.chat_template = template
    return tokenizer


def fits(renderer: Renderer, text: str, said: str = "hi", grammar: Grammar | None = None) -> bool:
    """Whether a sample after a chat's prompt may be this text, and end there."""
    tokenizer = renderer.tokenizer
    prompt = renderer.prompt([{"role": "user", "content": said}])
    return allows(renderer, prompt, text, Grammar.json_schema(SCHEMA) if grammar is None else grammar, tokenizer)


def allows(renderer: Renderer, prompt: Sequence[int], text: str, grammar: Grammar, tokenizer: Tokenizer) -> bool:
    end = tokenizer.stop_ids[0]
    wanted = grammar_of(renderer, grammar)
    assert wanted is not None
    constraint = GrammarCompiler(tokenizer, tokenizer.num_ids).start(wanted, prompt, [end])
    for token in [*tokenizer.encode(text), end]:
        bits = np.unpackbits(constraint.allowed.view(np.uint8), bitorder="little")
        if not bits[token]:
            return False
        constraint.advance([token])
    return True


@pytest.mark.parametrize("special", [True, False], ids=["control tokens", "text"])
@pytest.mark.parametrize(
    ("name", "args", "allowed", "refused"),
    [
        ("none", {}, [JSON], [f"<think>\n</think>{JSON}"]),
        ("think", {}, [JSON, f"<think>\nHm {{\n</think>\n\n{JSON}", f"<think></think>{JSON}"], [f"Hm</think>{JSON}"]),
        ("think", {"enable_thinking": True}, [JSON, f"<think>\nHm\n</think>\n\n{JSON}"], []),
        ("think", {"enable_thinking": False}, [JSON], [f"<think>\nHm\n</think>\n\n{JSON}"]),
        ("opened", {}, [f"Hm {{\n</think>\n\n{JSON}", f"</think>{JSON}"], [JSON, "Hm"]),
        ("gemma4", {}, [JSON, f"<|channel>thought\nHm<channel|>{JSON}"], [f"<think></think>{JSON}"]),
        ("gemma4", {"enable_thinking": False}, [JSON], [f"<|channel>thought\nHm<channel|>{JSON}"]),
        ("gpt_oss", {}, [f"{FINAL}{JSON}", f"{ANALYSIS}{FINAL}{JSON}"], [JSON, ANALYSIS, f"{ANALYSIS}{JSON}"]),
    ],
)  # fmt: skip
def test_what_may_stand_before_the_content(
    name: str, args: dict[str, Any], allowed: list[str], refused: list[str], special: bool
) -> None:
    """A thought unless the user switched it off; one that the prompt opened ends before the content."""
    tokenizer = tokenizer_of(TEMPLATES[name], special=special).with_template_args(args)
    renderer = Renderer(tokenizer, True)
    assert [text for text in allowed if not fits(renderer, text)] == []
    assert [text for text in refused if fits(renderer, text)] == []
    # What the user says about marks tells nothing.
    for said in ("what is <think>?", "</think>", f"{FINAL}", "<|channel>"):
        assert fits(renderer, allowed[0], said) and not any(fits(renderer, text, said) for text in refused)


@pytest.mark.parametrize(
    "grammar", [Grammar.regex("(yes|no)[0-9]"), Grammar.choice(["yes1", "no"]), Grammar.regex("yes1|\\{.*\\}")]
)
def test_every_kind_of_grammar_lets_thoughts_come_first(grammar: Grammar) -> None:
    for name, thought in (("think", "<think>\nHm\n</think>\n\n"), ("opened", "Hm\n</think>\n\n")):
        renderer = Renderer(tokenizer_of(TEMPLATES[name], special=False), True)
        assert fits(renderer, f"{thought}yes1", grammar=grammar) and not fits(renderer, thought, grammar=grammar)
        assert fits(renderer, "yes1", grammar=grammar) is (name == "think")


def test_prompts_without_a_template() -> None:
    """The text is all, but the rest of a thought with which the prompt ends."""
    tokenizer = tokenizer_of(TEMPLATES["think"], special=False)
    plain, grammar = Renderer(tokenizer, False), Grammar.json_schema(SCHEMA)
    assert allows(plain, tokenizer.encode("Write:"), JSON, grammar, tokenizer)
    assert not allows(plain, tokenizer.encode("Write:"), f"<think></think>{JSON}", grammar, tokenizer)
    opened = tokenizer.encode("<|im_start|>assistant\n<think>\nOkay, ")
    assert allows(plain, opened, f"so</think>{JSON}", grammar, tokenizer)
    assert not allows(plain, opened, JSON, grammar, tokenizer)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("think", "<|im_start|>assistant\n", Place.BEGINNING),
        ("think", "<|im_start|>assistant\n<think>\nOne.", Place.THOUGHT),
        ("think", "<|im_start|>assistant\n<think>\nOne.</think>\nTwo", Place.CONTENT),
        ("think", "<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n", Place.BEGINNING),
        ("think", "a <think> b", Place.BEGINNING),
        ("think", "a <think>\n", Place.THOUGHT),
        ("gemma4", "<|im_start|>model\n<|channel>thought\n", Place.THOUGHT),
        ("gpt_oss", "<|start|>user<|message|>?<|end|><|start|>assistant", Place.BEGINNING),
        ("gpt_oss", "<|start|>assistant<|channel|>analysis<|message|>One", Place.THOUGHT),
        ("gpt_oss", "<|start|>assistant<|channel|>analysis<|message|>One<|end|><|start|>assistant", Place.BEGINNING),
        ("gpt_oss", "<|start|>assistant<|channel|>final<|message|>", Place.CONTENT),
    ],
)
def test_where_a_prompt_leaves_its_turn(name: str, text: str, place: Place, special: bool) -> None:
    tokenizer = tokenizer_of(TEMPLATES[name], special=special)
    prompt = tokenizer.encode(text)
    assert place_of(tokenizer, prompt, marks_of(tokenizer)) is place
    assert in_thought(tokenizer, prompt) is (place is Place.THOUGHT)


@pytest.mark.parametrize(
    ("file", "args", "place"),
    [
        ("Qwen-Qwen3-0.6B", {}, Place.BEGINNING),
        ("Qwen-Qwen3-0.6B", {"enable_thinking": False}, Place.CONTENT),
        ("HuggingFaceTB-SmolLM3-3B", {"enable_thinking": False}, Place.CONTENT),
        ("deepseek-ai-DeepSeek-V3.1", {"thinking": True}, Place.THOUGHT),
        ("deepseek-ai-DeepSeek-V3.1", {}, Place.CONTENT),
        ("openai-gpt-oss-120b", {}, Place.BEGINNING),
        ("Qwen-Qwen2.5-7B-Instruct", {}, Place.BEGINNING),
    ],
)
def test_published_templates(shared: Path, file: str, args: dict[str, Any], place: Place) -> None:
    tokenizer = load_tokenizer("bytes")
    tokenizer.hf.chat_template = (shared / "chat_templates" / f"{file}.jinja").read_text()
    tokenizer = tokenizer.with_template_args(args)
    prompt = Renderer(tokenizer, True).prompt([{"role": "user", "content": "hi"}])
    assert place_of(tokenizer, prompt, marks_of(tokenizer)) is place
