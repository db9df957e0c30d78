"""Documents of the project: their code blocks, and a folder in which these find what they name."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import yaml
from PIL import Image

import posttrain as pt
from posttrain.config.yaml_file import build_config
from posttrain.data.tokenizer_files import build_byte_tokenizer
from posttrain.errors import ConfigError
from posttrain.models.config import Compute
from posttrain.models.hf import config_from_hf
from posttrain.weights.lora import attach_lora
from tests.tiny import random_model, tiny_model

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "bench" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
PYTHON, YAML, SHELL = ("python", "py"), ("yaml", "yml"), ("bash", "sh", "shell", "console")
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w-]*)(?P<rest>[^\n]*)\n(?P<text>.*?)^(?P=indent)```\s*$", re.M | re.S
)
TITLE = re.compile(r'title="([^"]+)"')

STAGE = {"dataset": {"path": "d"}, "num_steps": 1000, "row_tokens": 64, "optimizer": {"learning_rate": 0.1}}
ROLLOUTS = {"prompts_per_step": 1, "group_size": 2, "sampling": {"max_tokens": 2}, "rewards": [{"fn": "a:b"}]}
STAGES: dict[str, dict[str, Any]] = {
    "sft": {**STAGE, "batch_rows": 1},
    "preference": {**STAGE, "batch_rows": 1},
    "reward_model": {**STAGE, "batch_rows": 1},
    "drafter": {**STAGE, "batch_rows": 1},
    "distill": {**STAGE, "batch_rows": 1, "teachers": [{"path": "t"}]},
    "rl": {**STAGE, **ROLLOUTS},
    "online_preference": {**STAGE, **ROLLOUTS},
}
"""The least that a stage of each kind must say."""


@dataclass(frozen=True)
class Block:
    """A code block of a document."""

    language: str
    text: str
    line: int
    title: str = ""
    document: Path = ROOT / "README.md"

    @property
    def name(self) -> str:
        return f"{self.document.stem}-{self.language or 'plain'}-line-{self.line}"


def blocks(text: str, document: Path = ROOT / "README.md") -> list[Block]:
    return [
        Block(
            found["language"],
            textwrap.dedent(found["text"]),
            text[: found.start()].count("\n") + 1,
            "".join(TITLE.findall(found["rest"])),
            document,
        )
        for found in FENCE.finditer(text)
    ]


def blocks_of(document: Path, *languages: str) -> list[Block]:
    return [block for block in blocks(document.read_text(encoding="utf-8"), document) if block.language in languages]


def all_blocks(*languages: str) -> list[Block]:
    return [block for document in DOCUMENTS for block in blocks_of(document, *languages)]


def is_part_of_a_file(text: str, *patterns: str) -> bool:
    """Whether a file that is tested elsewhere holds the block as it stands."""
    wanted = "\n" + text.strip("\n") + "\n"
    return any(wanted in "\n" + path.read_text() + "\n" for pattern in patterns for path in ROOT.glob(pattern))


def is_whole(data: object) -> bool:
    """Whether a YAML block is a whole configuration."""
    return isinstance(data, dict) and {"model", "output"} <= data.keys() and bool({"kind", "stages"} & data.keys())


def parse(text: str) -> Any:
    """As a configuration is read, whose numbers are those of YAML 1.2."""
    from posttrain.config.yaml_file import _parse

    return _parse(text, "block")[0]


def titled(documents: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Files that documents spell out: name and text; Python of one name is one file."""
    python: dict[str, str] = {}
    for document in documents:
        for block in blocks_of(document, *YAML, *PYTHON):
            if block.title.endswith(".py") and "/" not in block.title:
                python[block.title] = python.get(block.title, "") + block.text
            elif block.title:
                yield block.title, block.text
    yield from python.items()


def write_folder(folder: Path, documents: Sequence[Path] = DOCUMENTS) -> Path:
    """What the documents take for granted: the models of the quick start and of stories, tiny here, with an adapter of
    the last, and the files they spell out."""
    words = pt.load_tokenizer(ROOT / "configs" / "stories")
    tokenizer = pt.load_tokenizer("bytes")
    for trained, seed in (("sft_stories/0-sft", 0), ("quickstart/0-sft", 0), ("quickstart/1-rl", 1)):
        of_stories = trained.startswith("sft_stories")
        vocabulary = {"vocab_size": words.vocab_size} if of_stories else {}
        model = tiny_model(seed, num_layers=2, windows=(None,), max_positions=4096, intermediate_size=256, **vocabulary)
        pt.save_model(model, folder / "runs" / trained / "model", tokenizer=words if of_stories else tokenizer)
    attach_lora(model, pt.LoRA(rank=4, targets=("q_proj",)), seed=0)
    pt.save_adapter(model, folder / "adapters" / "sums")
    write_photographs(folder)
    for name, text in titled(documents):
        if name.endswith((".yaml", ".py")) and not (ROOT / name).exists():
            (folder / name).write_text(text)
    return folder


TOWER = {"model_type": "qwen2_5_vl_vision", "depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1,
         "out_hidden_size": 16, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
         "fullatt_block_indexes": [0], "hidden_act": "silu", "in_channels": 3, "tokens_per_second": 2}  # fmt: skip
TEXT = {"model_type": "qwen2_5_vl_text", "vocab_size": 264, "hidden_size": 16, "intermediate_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
        "mrope_section": [2, 3, 3]}, "tie_word_embeddings": True,
        "bos_token_id": 257, "eos_token_id": 260}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ '<|vision_start|><|image_pad|><|vision_end|>' if p.type == 'image' else p.text }}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
)


def write_photographs(folder: Path) -> None:
    """What the page on images takes for granted: a multimodal model, tiny here, and captions of photographs."""
    hf = build_byte_tokenizer()
    hf.add_special_tokens({"additional_special_tokens": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]})
    hf.chat_template, hf.eos_token = TEMPLATE, "<|im_end|>"
    hf.save_pretrained(folder / "vision-tokenizer")
    fields = {"model_type": "qwen2_5_vl", "text_config": TEXT, "vision_config": TOWER, "image_token_id": 263,
              "vision_start_token_id": 261, "vision_end_token_id": 262, "tie_word_embeddings": True}  # fmt: skip
    model = random_model(config_from_hf(fields, vision="frozen"), Compute.of(jnp.float32), dtype=jnp.float32, seed=0)
    pt.save_model(
        model, folder / "Qwen" / "Qwen2.5-VL-3B-Instruct", tokenizer=pt.load_tokenizer(folder / "vision-tokenizer")
    )
    (folder / "photos").mkdir()
    lines = ["image,caption"]
    for number, colour in enumerate(("red", "blue", "green", "white")):
        Image.new("RGB", (60, 40 + number), colour).save(folder / "photos" / f"{number}.jpg")
        lines.append(f"photos/{number}.jpg,A {colour} wall.")
    Image.new("RGB", (50, 40), "red").save(folder / "photos" / "new.jpg")
    (folder / "captions.csv").write_text("\n".join(lines) + "\n")


def check_fields(data: dict[str, Any]) -> None:
    """ConfigError unless the fields are right in a stage of some kind, or in the run around it."""
    kinds = [data["kind"]] if "kind" in data else list(STAGES)
    for kind in kinds:
        run = {"output": "o", "seed": 0, "model": {"path": "m"}, **STAGES.get(kind, {}), "kind": kind, **data}
        try:
            build_config(run)
            return
        except ConfigError as found:
            error = found
    raise error


def dump(data: Any) -> str:
    return yaml.safe_dump(data, sort_keys=False)
