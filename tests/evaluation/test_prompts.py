"""Prompts are told apart by all that the model sees of them, and rows of one prompt are one unit of every interval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from posttrain.batch import Batch
from posttrain.data.messages import prompt_digest
from posttrain.data.pictures import Picture
from posttrain.evaluation.sequences import _prompts
from posttrain.tree import replace
from tests.data.test_preference import units

pytestmark = pytest.mark.fast


def asked(content: Any, **fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content, **fields}]


def test_a_prompt_is_all_that_the_model_sees(tmp_path: Path) -> None:
    """Pictures by their content, not by their files or sizes."""
    for name, shade in (("a", 10), ("same", 10), ("other", 11)):
        Image.new("RGB", (4, 4), (shade, 0, 0)).save(tmp_path / f"{name}.bmp")
    sizes = {(tmp_path / f"{name}.bmp").stat().st_size for name in ("a", "same", "other")}
    assert len(sizes) == 1

    def shown(name: str) -> list[dict[str, Any]]:
        return asked(
            [{"type": "image", "image": Picture(name, tmp_path / f"{name}.bmp")}, {"type": "text", "text": "?"}]
        )

    tool = {"type": "function", "function": {"name": "look"}}
    prompts = [
        prompt_digest(asked("1+1?")),
        prompt_digest(asked("1+2?")),
        prompt_digest([{"role": "system", "content": "Be brief."}, *asked("1+1?")]),
        prompt_digest(asked("1+1?"), [tool]),
        prompt_digest(shown("a")),
        prompt_digest(shown("other")),
    ]
    assert len(set(prompts)) == len(prompts)
    assert prompt_digest(shown("same")) == prompts[4] and prompt_digest(asked("1+1?")) == prompts[0]


def test_prompts_of_pairs_also_where_both_sides_begin_with_them() -> None:
    told = [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}, {"prompt": "1+1=", "chosen": "two", "rejected": "no"}]
    told.append({"prompt": "1+2=", "chosen": "3", "rejected": "4"})
    pairs = units(told)
    keys = [pairs.prompt(n) for n in range(3)]
    assert keys[0] == keys[1] != keys[2]


def test_prompts_of_sequences_are_what_stands_before_their_loss() -> None:
    """Two answers to one prompt, one to another, a text with loss from its beginning, and padding."""
    tokens = np.asarray([[7, 8, 9, 1, 7, 8, 9, 2, 2], [7, 8, 6, 1, 4, 4, 4, 0, 0]], np.int32)
    segments = np.asarray([[1, 1, 1, 1, 2, 2, 2, 2, 2], [1, 1, 1, 1, 2, 2, 2, 0, 0]], np.int32)
    weight = np.asarray([[0, 0, 0, 1, 0, 0, 0, 1, 1], [0, 0, 0, 1, 0, 1, 1, 0, 0]], np.float32)
    batch = Batch(tokens=tokens, positions=np.zeros_like(tokens), segments=segments, loss_weight=weight)
    first, second, third, text = _prompts(batch)
    assert first == second and len({first, third, text}) == 3
    pictures = {
        "images": np.asarray([[0, 1, 0, 0, 0, 2, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0, 0]], np.int32),
        "patch_images": np.asarray([[1, 2], [1, 0]], np.int32),
    }
    same = np.full((2, 2, 3), 5, np.uint8)
    one, again, *_ = _prompts(replace(batch, patches=same, **pictures))
    other = same.copy()
    other[0, 1] = 6
    assert one == again != _prompts(replace(batch, patches=other, **pictures))[1]
    assert len(_prompts(replace(batch, loss_weight=np.where(segments == 1, 0, weight)))) == 2
