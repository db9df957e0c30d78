"""Text between turns: what real templates write, and templates that change earlier turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain.data.chat import Renderer
from posttrain.data.messages import Message
from posttrain.data.tokenizer import load_tokenizer
from posttrain.data.turns import REPLY, check_turns, environment_reply
from posttrain.errors import ConfigError
from tests.environments.helpers import TOOLS, template_names, with_template
from tests.often import often

PROMPT: list[Message] = [{"role": "user", "content": "Hi"}]
WITH_SYSTEM: list[Message] = [{"role": "system", "content": "Be short."}, *PROMPT]

REFUSED = {
    ("Qwen-Qwen3-0.6B", "user"): "drops the thinking",
    ("deepseek-ai-DeepSeek-V3.1", "user"): "drops the thinking",
    ("openai-gpt-oss-120b", "user"): "drops the thinking",
}
WITHOUT_TOOLS = ("microsoft-Phi-3.5-mini-instruct", "deepseek-ai-DeepSeek-V3.1", "HuggingFaceTB-SmolLM3-3B")


@pytest.mark.parametrize("part", often(range(3), 1))
def test_real_templates(shared: Path, part: int) -> None:
    """Every template is proven for user messages and for tools, or refused by name with the remedy."""
    names = template_names(shared)
    assert len(names) == 8
    for name in names[part::3]:
        renderer = Renderer(with_template(shared, name), True)
        for role, tools in (("user", None), ("tool", TOOLS)):
            reason = REFUSED.get((name, role))
            if role == "tool" and name in WITHOUT_TOOLS:
                reason = "does not write them into the prompt"
            if reason is None:
                check_turns(renderer, [PROMPT], [role], tools=tools, keep_thinking=False)
                continue
            with pytest.raises(ConfigError, match=reason) as refused:
                check_turns(renderer, [PROMPT], [role], tools=tools, keep_thinking=False)
            assert name in str(refused.value) and "model.chat_template" in str(refused.value)
            if reason == "drops the thinking":
                check_turns(renderer, [PROMPT], [role], tools=tools, keep_thinking=True)


def test_templates_that_move_what_was_said(shared: Path) -> None:
    """Mistral writes system message and tools before the last user message only."""
    renderer = Renderer(with_template(shared, "mistralai-Mistral-Nemo-Instruct-2407"), True)
    for prompt, tools in ((WITH_SYSTEM, None), (PROMPT, TOOLS)):
        with pytest.raises(ConfigError, match="changes the prompt when a user message follows"):
            check_turns(renderer, [prompt], ["user"], tools=tools, keep_thinking=False)


def test_the_end_of_a_turn_is_written_once(shared: Path) -> None:
    """A sampled end of turn is not repeated; another stop, or none, is followed by the template's."""
    tokenizer = load_tokenizer(shared / "tokenizers" / "qwen3")
    renderer, end = Renderer(tokenizer, True), tokenizer.hf.convert_tokens_to_ids("<|im_end|>")
    other = tokenizer.hf.convert_tokens_to_ids("<|endoftext|>")
    assert {end, other} <= {*tokenizer.stop_ids}
    reply = f"\n<|im_start|>user\n{REPLY}<|im_end|>\n<|im_start|>assistant\n"
    for last, expected in ((end, reply), (other, f"<|im_end|>{reply}"), (17, f"<|im_end|>{reply}")):
        tokens = renderer.between(PROMPT, environment_reply("user"), last=last)
        assert tokenizer.decode(tokens, skip_special_tokens=False) == expected


def test_control_tokens_of_a_reply_are_characters(shared: Path) -> None:
    tokenizer = load_tokenizer(shared / "tokenizers" / "qwen3")
    renderer = Renderer(tokenizer, True)
    messages: list[Message] = [{"role": "user", "content": "<|im_end|>now"}]
    tokens = renderer.between(PROMPT, messages, last=None)
    assert tokens.count(tokenizer.hf.convert_tokens_to_ids("<|im_end|>")) == 2
    assert "<|im_end|>now" in tokenizer.decode(tokens, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("{{ message.content[:3] if loop.first and not loop.last else message.content }}", "changes the prompt"),
        (
            "{{ message.content ~ (loop.length if loop.first else '') }}",
            "changes the prompt",
        ),
        ("{{ '' if message.role == 'user' and not loop.first else message.content }}", "leaves the reply out"),
        ("{{ ('note ' if message.role == 'assistant' else '') ~ message.content }}", "'note ' before earlier turns"),
        ("{{ message.content ~ (loop.index if loop.last else '') }}", "other text before a user message"),
    ],
)
def test_faulty_templates(change: str, reason: str) -> None:
    tokenizer = load_tokenizer("bytes")
    template = "{%- for message in messages %}<|im_start|>CHANGE<|im_end|>{%- endfor %}"
    ending = "{%- if add_generation_prompt %}<|im_start|>{%- endif %}"
    tokenizer.hf.chat_template = template.replace("CHANGE", change) + ending
    prompt: Any = [{"role": "user", "content": "abcdef"}]
    with pytest.raises(ConfigError, match=reason):
        check_turns(Renderer(tokenizer, True), [prompt], ["user"], tools=None, keep_thinking=False)


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ("<think>\n{{ m.content.split('<think>\n')[-1] }}", None),
        ("{{ m.content.split('</think>')[-1] }}", "drops the thinking"),
        ("<think></think>{{ m.content.split('</think>')[-1] }}", "drops the thinking"),
        ("<think>\n{{ m.content }}", "drops the thinking"),
    ],
)
def test_prompts_that_open_the_thought(turn: str, reason: str | None) -> None:
    """What is sampled between turns is a thought and an answer: earlier ones must follow the prompt, or be kept."""
    tokenizer = load_tokenizer("bytes")
    tokenizer.hf.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}A:TURN<|im_end|>{% else %}U:{{ m.content }}{% endif %}"
        "{% endfor %}{{ 'A:<think>\n' if add_generation_prompt }}"
    ).replace("TURN", turn)
    renderer = Renderer(tokenizer, True)
    check_turns(renderer, [PROMPT], ["user", "tool"], tools=None, keep_thinking=True)
    if reason is None:
        check_turns(renderer, [PROMPT], ["user", "tool"], tools=None, keep_thinking=False)
        return
    with pytest.raises(ConfigError, match=f"{reason}.*env.keep_thinking"):
        check_turns(renderer, [PROMPT], ["user"], tools=None, keep_thinking=False)
