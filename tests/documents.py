"""Documents of the project: their code blocks, and a folder in which these find what they name."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import posttrain as pt
from posttrain.config.yaml_file import build_config
from posttrain.errors import ConfigError
from posttrain.weights.lora import attach_lora
from tests.tiny import tiny_model

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

STAGE = {"dataset": {"path": "d"}, "num_steps": 1, "row_tokens": 64, "optimizer": {"learning_rate": 0.1}}
ROLLOUTS = {"prompts_per_step": 1, "group_size": 2, "sampling": {"max_tokens": 2}, "rewards": [{"fn": "a:b"}]}
STAGES: dict[str, dict[str, Any]] = {
    "sft": {**STAGE, "batch_rows": 1},
    "preference": {**STAGE, "batch_rows": 1},
    "reward_model": {**STAGE, "batch_rows": 1},
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
    """What the documents take for granted: the models of the quick start, tiny here, with an adapter of the last, and
    the files they spell out."""
    tokenizer = pt.load_tokenizer("bytes")
    for stage, seed in (("0-sft", 0), ("1-rl", 1)):
        model = tiny_model(seed, num_layers=2, windows=(None,), max_positions=4096, intermediate_size=256)
        pt.save_model(model, folder / "runs" / "quickstart" / stage / "model", tokenizer=tokenizer)
    attach_lora(model, pt.LoRA(rank=4, targets=("q_proj",)), seed=0)
    pt.save_adapter(model, folder / "adapters" / "sums")
    for name, text in titled(documents):
        if name.endswith((".yaml", ".py")) and not (ROOT / name).exists():
            (folder / name).write_text(text)
    return folder


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
