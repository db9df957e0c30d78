"""Real chat templates on a real tokenizer, and scripted engines for conversations."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain.data.prompt_images import PromptImages
from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.rollout.types import Completion, SamplingParams

BAR = "\uff5c"
"""Vertical line in the control tokens of DeepSeek."""
ENDS = {
    "openai-gpt-oss-120b": ("<|return|>", "<|call|>"),
    "deepseek-ai-DeepSeek-V3.1": (f"<{BAR}end▁of▁sentence{BAR}>",),
    "mistralai-Mistral-Nemo-Instruct-2407": ("</s>",),
    "microsoft-Phi-3.5-mini-instruct": ("<|end|>",),
}
"""Stop tokens of models by template; of the others <|im_end|>."""
CONTROL = re.compile(rf"<[|{BAR}][^|{BAR}<> ]+[|{BAR}]>|\[/?[A-Z_]{{3,}}\]")

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Look a word up.",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string", "description": "The word."}},
                "required": ["text"],
            },
        },
    }
]


def template_names(shared: Path) -> list[str]:
    return sorted(file.stem for file in (shared / "chat_templates").glob("*.jinja"))


def with_template(shared: Path, name: str) -> Tokenizer:
    """The tokenizer of Qwen3 with another model's template, and its control and stop tokens."""
    tokenizer = load_tokenizer(shared / "tokenizers" / "qwen3")
    template = (shared / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    ends = ENDS.get(name, ("<|im_end|>",))
    tokenizer.hf.add_special_tokens({"additional_special_tokens": sorted({*CONTROL.findall(template), *ends})})
    tokenizer.hf.chat_template = template
    tokenizer.hf.eos_token = ends[0]
    tokenizer.hf.bos_token = tokenizer.hf.bos_token or "<|endoftext|>"
    ids = [tokenizer.hf.convert_tokens_to_ids(end) for end in ends]
    return replace(tokenizer, generation={"eos_token_id": ids}, name=name)


def completion(tokens: Sequence[int], *, stop: Any = "stop", version: int = 0) -> Completion:
    count = len(tokens)
    return Completion(
        tokens=tuple(tokens),
        logps=tuple(-0.1 * (at + 1) for at in range(count)),
        kept_logps=(0.0,) * count,
        truncation_logps=(0.0,) * count,
        stop=stop,
        weights_versions=(version,) * count,
    )


class Script:
    """Engine that says given turns in order, cut at `max_tokens`."""

    def __init__(self, turns: Sequence[Sequence[int]]):
        self.turns = list(turns)
        self.prompts: list[list[int]] = []

    async def __call__(
        self, tokens: Sequence[int], params: SamplingParams, images: PromptImages | None = None
    ) -> Completion:
        said = self.turns[len(self.prompts)]
        self.prompts.append(list(tokens))
        if len(said) > params.max_tokens:
            return completion(said[: params.max_tokens], stop="length")
        return completion(said)
