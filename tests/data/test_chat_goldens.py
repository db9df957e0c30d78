"""Renderings, tokens and assistant spans against transformers with templates of TRL; the texts stay in ../shared."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.chat import Masked, Renderer
from posttrain.data.tokenizer import load_tokenizer
from posttrain.errors import ConfigError

pytestmark = pytest.mark.fast

GOLDENS = Path(__file__).parent.parent / "goldens" / "chat"
TEMPLATES = ("gemma3_training", "llama3_1", "qwen2_5_training", "qwen3", "qwen3_training")

ARGUMENTS_NOT_OFFERED = {"continue_final", "no_think_gen"}
"""Cases that pass `continue_final_message` or `enable_thinking`, which the renderer does not take."""
WITHOUT_TOOLS = {"gemma3_training"}
"""Templates that leave tools out, which is refused."""
ESCAPED = {"control_token_in_user"}
"""The reference turns control tokens of a user's text into control tokens; here they stay text. See test_chat.py."""


def spans(mask: list[bool]) -> list[list[int]]:
    edges = [i for i in range(len(mask) + 1) if (i < len(mask) and mask[i]) != (i > 0 and mask[i - 1])]
    return [list(pair) for pair in zip(edges[::2], edges[1::2], strict=True)]


def renderer_of(golden: dict[str, Any]) -> Renderer:
    tokenizer = load_tokenizer(GOLDENS / "byte_tokenizer")
    tokenizer.hf.chat_template = golden["chat_template"]
    tokenizer.hf.bos_token, tokenizer.hf.eos_token = golden["bos_token"], golden["eos_token"]
    return Renderer(tokenizer, chat=True)


@pytest.mark.parametrize("template", TEMPLATES)
def test_agrees_with_transformers(shared: Path, template: str) -> None:
    golden = json.loads((shared / "goldens" / "chat" / f"{template}.json").read_text())
    renderer = renderer_of(golden)
    compared = 0
    for case in golden["cases"]:
        if case["name"] in ARGUMENTS_NOT_OFFERED:
            continue
        tools = golden[case["tools"]] if case["tools"] else None
        if "error" not in case and tools and template in WITHOUT_TOOLS:
            with pytest.raises(ConfigError, match="does not write them into the prompt|leaves out"):
                renderer.prompt(case["messages"], tools=tools)
            continue
        if "error" in case:
            with pytest.raises(ConfigError, match="refuses messages with roles"):
                renderer.prompt(case["messages"], tools=tools)
            continue
        if case["kwargs"].get("add_generation_prompt"):
            tokens = renderer.prompt(case["messages"], tools=tools)
        else:
            masked = conversation(renderer, template, case, tools)
            if masked is None:
                continue
            tokens = masked.tokens
            if "assistant_token_spans" in case and case["name"] not in ESCAPED:
                assert spans(masked.mask) == case["assistant_token_spans"], case["name"]
        assert renderer.tokenizer.decode(tokens, skip_special_tokens=False) == case["rendered"], case["name"]
        if case["name"] not in ESCAPED:
            assert len(tokens) == case["n_tokens"], case["name"]
            assert hashlib.sha256(json.dumps(tokens).encode()).hexdigest() == case["ids_sha256"], case["name"]
        compared += 1
    assert compared >= 6


def conversation(renderer: Renderer, template: str, case: dict[str, Any], tools: Any) -> Masked | None:
    """`None` where Qwen3's own template rewrites earlier turns, which must be an error."""
    turns = [i for i, message in enumerate(case["messages"]) if message["role"] == "assistant"]
    if template == "qwen3" and len(turns) > 1 and case["name"] != "thinking_tool_call":
        with pytest.raises(ConfigError, match=r"changes the text of messages 0..[0-9] when message [0-9] follows"):
            renderer.conversation(case["messages"], tools=tools)
        last = renderer.conversation(case["messages"], first=turns[-1], tools=tools)
        prompt = renderer.prompt(case["messages"][: turns[-1]], tools=tools)
        assert last.tokens[: len(prompt)] == prompt
        assert spans(last.mask)[0][0] == len(prompt)
        return None
    return renderer.conversation(case["messages"], tools=tools)


def test_derived_mask_is_the_marked_mask(shared: Path) -> None:
    """Without its marks a template gives the same spans, but for what follows the end of a turn."""
    golden = json.loads((shared / "goldens" / "chat" / "qwen3_training.json").read_text())
    marked = renderer_of(golden)
    plain = golden["chat_template"].replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
    derived = renderer_of({**golden, "chat_template": plain})
    case = next(case for case in golden["cases"] if case["name"] == "multi_turn")
    newline = len(marked.tokenizer.encode("\n"))
    with_marks, without = marked.conversation(case["messages"]), derived.conversation(case["messages"])
    assert with_marks.tokens == without.tokens
    assert [[start, stop - newline] for start, stop in spans(with_marks.mask)] == spans(without.mask)
