"""Pictures in `pt.generate`, `pt.evaluate`, the chat and the command line, of a model as it is downloaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import posttrain as pt
from posttrain.chat import Chat, Terminal
from posttrain.data.messages import parts_of
from posttrain.errors import ConfigError
from posttrain.generation import complete, with_pictures
from posttrain.runs.finished import Generator, load_generator
from tests.images import VisionCase

ASKED = "What is it?"


@pytest.fixture(scope="module")
def case(shared: Path) -> VisionCase:
    return VisionCase(shared / "goldens" / "vision" / "qwen2_5_vl")


@pytest.fixture(scope="module")
def generator(case: VisionCase) -> Generator:
    return load_generator(str(case.folder))


@pytest.fixture(scope="module")
def picture(case: VisionCase) -> Path:
    (number,) = case.arrays["gen_one_images"] if "gen_one_images" in case.arrays else case.arrays["one_images"]
    return case.folder / "images" / f"{number}.png"


@pytest.fixture
def chat(generator: Generator) -> Iterator[Chat]:
    chat = Chat(generator, max_new_tokens=6, max_length=128)
    yield chat
    chat.close()


@pytest.mark.thorough
def test_a_picture_is_described(case: VisionCase, generator: Generator, picture: Path) -> None:
    """In a part of a message, and beside a text; with the tokenizer as it is loaded alone."""
    expected = tuple(case.arrays["gen_one_tokens"].tolist())
    said: list[Any] = [{"role": "user", "content": [{"type": "image", "path": str(picture)}, ASKED]}]
    parts, beside = (
        complete(generator.model, tokenizer, prompt, max_new_tokens=10)[0].completion.tokens
        for tokenizer, prompt in (
            (pt.load_tokenizer(case.folder), said),
            (generator.tokenizer, with_pictures([ASKED], [picture])),
        )
    )
    gone = set(generator.tokenizer.unsampled_ids)
    assert not gone & set(expected) and parts == beside == expected[: len(parts)]


@pytest.mark.thorough
def test_a_chat_keeps_its_pictures(chat: Chat, picture: Path, tmp_path: Path) -> None:
    """In later turns, in a file, and in the terminal."""
    first = chat.ask(ASKED, images=[picture.read_bytes()])
    chat.ask("And now?")
    chat.save(tmp_path / "chat.jsonl")
    saved = [json.loads(line) for line in (tmp_path / "chat.jsonl").read_text().splitlines()]
    assert saved[0]["content"][0]["image"].startswith("data:image")
    chat.load(tmp_path / "chat.jsonl")
    assert chat.complete(saved[:1]) == first
    chat.begin(None)
    terminal = Terminal(chat)
    assert terminal._handled(f"/image {picture}") and terminal._handled(ASKED)
    (asked, _) = chat.messages
    assert terminal._last == first and parts_of(asked)[0]["type"] == "image"
    with pytest.raises(ConfigError, match="no file nothing.png"):
        terminal._handled("/image nothing.png")


@pytest.mark.thorough
def test_prompts_with_pictures_are_evaluated(generator: Generator, picture: Path) -> None:
    rows = [{"prompt": ASKED, "image": str(picture)}, {"prompt": ASKED}]

    def seen(completions: list[str], images: list[Any], **_: Any) -> list[float]:
        return [float(len(one)) for one in images]

    found = pt.evaluate((generator.model, generator.tokenizer), rows, seen, max_tokens=4)
    assert [group[0].images is not None for group in found.groups] == [True, False]
    json.dumps(found.record())


def test_pictures_without_a_place_are_refused() -> None:
    with pytest.raises(ConfigError, match="images are for texts"):
        with_pictures([[{"role": "user", "content": "?"}]], ["a.png"])
    assert with_pictures(["?"], []) == ["?"]
