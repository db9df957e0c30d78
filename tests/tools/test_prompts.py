"""Tools in conversations of templates without them: what the policy sees, token by token."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest

from posttrain.data.chat import Renderer
from posttrain.data.messages import Message
from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.data.turns import check_turns
from posttrain.errors import ConfigError
from posttrain.tools.formats import make_format
from posttrain.tools.prompts import ToolText

SCHEMA = {
    "type": "function",
    "function": {"name": "lookup", "description": "Look up.", "parameters": {"type": "object", "properties": {}}},
}
ASKED: list[Message] = [{"role": "user", "content": "How much fat?"}]
RESULTS: list[Message] = [
    {"role": "tool", "tool_call_id": f"call0000{i}", "name": "lookup", "content": f"{i} g"} for i in range(2)
]


@pytest.fixture(scope="module")
def tokenizer(shared: Path) -> Tokenizer:
    return load_tokenizer(shared / "tokenizers/qwen3")


def renderer(tokenizer: Tokenizer, template: str, tool_format: str) -> Renderer:
    hf = copy.copy(tokenizer.hf)
    hf.chat_template = template
    changed = replace(tokenizer, hf=hf).with_stop_tokens(["<|endoftext|>"])
    return Renderer(changed, True, ToolText(changed, tool_format))


def gemma(shared: Path) -> str:
    text = json.loads((shared / "goldens/chat/gemma3_training.json").read_text())["chat_template"]
    return str(text).replace("<end_of_turn>", "<|im_end|>")


def test_gemma_is_told_of_tools_and_gets_results_as_a_user(shared: Path, tokenizer: Tokenizer) -> None:
    """Red with a user message for each result: its template wants them to alternate with those of the model."""
    made = renderer(tokenizer, gemma(shared), "auto")
    prompt = made.rendered(ASKED, [SCHEMA], reply=True)
    described = json.dumps(SCHEMA["function"])
    form = "```tool_code\nNAME(ARGUMENT='VALUE')\n```"
    assert prompt.startswith(f"<start_of_turn>user\nYou can call these functions:\n{described}\nTo call ")
    assert prompt.endswith(f"in this form:\n{form}\n\nHow much fat?<|im_end|>\n<start_of_turn>model\n")
    last = tokenizer.hf.convert_tokens_to_ids("<|im_end|>")
    delta = tokenizer.decode(made.between(ASKED, RESULTS, [SCHEMA], last=last), skip_special_tokens=False)
    results = "```tool_output\n0 g\n```\n```tool_output\n1 g\n```"
    assert delta == f"\n<start_of_turn>user\n{results}<|im_end|>\n<start_of_turn>model\n"
    check_turns(made, [ASKED], ["tool"], tools=[SCHEMA], keep_thinking=False)


@pytest.mark.parametrize("name", ["microsoft-Phi-3.5-mini-instruct", "HuggingFaceTB-SmolLM3-3B"])
def test_templates_without_tools(shared: Path, tokenizer: Tokenizer, name: str) -> None:
    template = (shared / "chat_templates" / f"{name}.jinja").read_text().replace("<|end|>", "<|im_end|>")
    made = renderer(tokenizer, template, "hermes")
    asked: list[Message] = [{"role": "system", "content": "Be brief. /no_think"}, *ASKED]
    prompt = made.rendered(asked, [SCHEMA], reply=True)
    assert prompt.index("Be brief.") < prompt.index('"name": "lookup"') < prompt.index("How much fat?")
    check_turns(made, [asked], ["tool"], tools=[SCHEMA], keep_thinking=True)
    turn = made.rendered(
        [*asked, {"role": "assistant", "content": "So:", "tool_calls": [_call("lookup")]}, *RESULTS],
        [SCHEMA],
        reply=True,
    )
    text = turn[turn.rindex("So:") : turn.index("<|im_end|>", turn.rindex("So:"))]
    (call,) = make_format("hermes", made.tokenizer, [SCHEMA]).parse(text).calls
    assert (call.name, call.arguments) == ("lookup", {"x": 1})


def test_templates_with_tools_write_them_themselves(shared: Path, tokenizer: Tokenizer) -> None:
    template = (shared / "chat_templates" / "Qwen-Qwen3-0.6B.jinja").read_text()
    made = renderer(tokenizer, template, "auto")
    plain = Renderer(made.tokenizer, True)
    assert made.prompt(ASKED, [SCHEMA]) == plain.prompt(ASKED, [SCHEMA])
    assert made.between(ASKED, RESULTS, [SCHEMA], last=None) == plain.between(ASKED, RESULTS, [SCHEMA], last=None)


def test_a_template_of_no_known_format_is_refused(shared: Path, tokenizer: Tokenizer) -> None:
    template = (shared / "chat_templates" / "HuggingFaceTB-SmolLM3-3B.jinja").read_text()
    made = renderer(tokenizer, template, "auto")
    assert made.prompt(ASKED) != [], "without tools no format is needed"
    with pytest.raises(ConfigError, match="tool_format=auto: .* set tool_format to"):
        made.prompt(ASKED, [SCHEMA])


def _call(name: str) -> dict[str, object]:
    return {"type": "function", "id": "call00000", "function": {"name": name, "arguments": {"x": 1}}}
