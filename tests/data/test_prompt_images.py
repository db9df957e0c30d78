"""Pictures of prompts: tokens, features and positions as in training rows, keys of a prefix cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from posttrain.config import ImageSection
from posttrain.data.chat import Prompt, Renderer
from posttrain.data.images import Grid
from posttrain.data.messages import checked_messages
from posttrain.data.pictures import RowPictures
from posttrain.data.prompt_images import PromptImages
from posttrain.data.tokenizer import Tokenizer
from posttrain.errors import ConfigError
from tests.data.test_images import IMAGE, answer, drawn, example, tokenizer_of, user


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_of()


def prompt(tokenizer: Tokenizer, *messages: Any, images: list[Any]) -> Prompt:
    checked = checked_messages(list(messages), "messages", RowPictures({"images": images}, Path()))
    return Renderer(tokenizer, True).prompt_with_images(checked)


def test_prompts_have_the_images_of_training_rows(tokenizer: Tokenizer) -> None:
    """Tokens, features and positions, also of a conversation that goes on with another picture."""
    asked, more = user("A ", IMAGE, " or ", IMAGE), user(IMAGE, "And?")
    pictures, said = [drawn(0), drawn(1, (12, 4)), drawn(2, (8, 4))], [asked, answer("No."), more]
    whole = example(tokenizer, {"messages": [*said, answer("Yes.")], "images": pictures})
    found = prompt(tokenizer, asked, images=pictures[:2])
    assert found.images is not None and whole.images is not None and whole.grids is not None
    before = checked_messages(said, "messages", RowPictures({"images": pictures}, Path()))
    turn = tokenizer.encode("No.")
    delta = Renderer(tokenizer, True).between_with_images(before[:1], before[2:], last=turn[-1])
    assert delta.images is not None
    tokens, start = [*found.tokens, *turn, *delta.tokens], len(found.tokens) + len(turn)
    images = found.images.extended(start, delta.images)
    assert tokens == whole.tokens[: len(tokens)].tolist()
    assert images.padded(len(tokens)).tolist() == whole.images[: len(tokens)].tolist()
    assert images.grids == tuple(Grid(*grid) for grid in whole.grids.tolist())
    rope = tokenizer.images.rope_positions(whole.images, images.grids)
    assert rope is not None
    assert np.array_equal(images.rope_positions(0, len(whole.tokens)), rope)
    assert np.array_equal(images.rope_positions(5, start), rope[5:start])
    assert rope[-1, 0] == len(rope) - 1 + images.rope_delta
    cut = images.cut(start)
    assert cut is not None and cut.digests == found.images.digests
    with pytest.raises(ValueError, match="end within image 3"):
        images.cut(images.spans[2][0] + 1)
    with pytest.raises(ConfigError, match="have pictures, and are read as text alone"):
        Renderer(tokenizer, True).prompt(before[:1])


def test_keys_tell_pictures_apart(tokenizer: Tokenizer) -> None:
    """By pixels, shape and settings, not by the name of the file; those of text are its tokens."""
    asked = user("A ", IMAGE, "?")
    one, same, other = (prompt(tokenizer, asked, images=[drawn(seed)]) for seed in (0, 0, 1))
    assert one.images is not None and same.images is not None and other.images is not None
    assert one.tokens == other.tokens
    keys, there = one.images.keys(one.tokens), one.images.padded(len(one.tokens)) > 0
    assert keys == same.images.keys(same.tokens)
    assert [k for k, t in zip(keys, there, strict=True) if not t] == [
        k for k, t in zip(one.tokens, there, strict=True) if not t
    ]
    own, others = (
        {k for k, t in zip(x.images.keys(x.tokens), there, strict=True) if t} for x in (one, other) if x.images
    )
    assert len(own) == len(others) == there.sum() and max(own | others) < 0 and not own & others
    wide = prompt(tokenizer_of(ImageSection(min_pixels=16, max_pixels=64)), asked, images=[drawn(0)])
    assert wide.images is not None and wide.images.digests != one.images.digests
    flat = Image.new("RGB", (8, 4)), Image.new("RGB", (4, 8))
    digests = [prompt(tokenizer, asked, images=[image]).images for image in flat]
    assert digests[0] is not None and digests[1] is not None and digests[0].digests != digests[1].digests


def test_other_tokens_and_other_files_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    drawn(0).save(tmp_path / "a.png")
    found = prompt(tokenizer, user(IMAGE), images=[tmp_path / "a.png"]).images
    assert found is not None and len(found.digests) == 1
    with pytest.raises(ValueError, match="they must be as many, and in order"):
        PromptImages(found.images, found.numbers[: found.spans[0][1] - 1]).offsets  # noqa: B018
    drawn(1).save(tmp_path / "a.png")
    with pytest.raises(ConfigError, match="has other pixels than before"):
        found.images[0].patches()
