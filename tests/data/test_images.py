"""Pictures as in the library: pixels, patches, tokens and positions of each family; files in odd formats; batches."""

from __future__ import annotations

import base64
import copy
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from posttrain.batch import Batch
from posttrain.config import DatasetSection, ImageSection, SFTSection
from posttrain.data.chat import Renderer
from posttrain.data.format import TokenizedExample, prompt_messages, refuse_pictures, tokenize_example
from posttrain.data.image_rows import bucket_sizes, image_arrays, picture_note, with_images
from posttrain.data.images import Grid, policy_of
from posttrain.data.packing import LOOK_AHEAD, PackedBatches, fit_to_row
from posttrain.data.pictures import MAX_PIXELS, Picture, PictureError, picture_of, written
from posttrain.data.pipeline import make_batches
from posttrain.data.sources import load_rows
from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.errors import ConfigError

FAMILIES = ("gemma3", "gemma4", "gemma4_bidirectional", "mistral3", "qwen2_5_vl", "qwen3_vl")
ENDS = {"gemma3": ["<end_of_turn>"], "gemma4": ["<turn|>"], "gemma4_bidirectional": ["<turn|>"]}
IMAGE = {"type": "image"}


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [text(part) if isinstance(part, str) else part for part in parts]}


def answer(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


CASES = {
    "one": [user(IMAGE, "What is it?"), answer("A red disc.")],
    "two": [user("Left ", IMAGE, " right ", IMAGE, " Which is larger?"), answer("The 2nd, by 3.")],
    "turns": [
        {"role": "system", "content": "Be brief."},
        user("See ", IMAGE),
        answer("Ok."),
        user(IMAGE, "And this?"),
        answer("No."),
    ],
    "all": [user(IMAGE, IMAGE, "x", IMAGE), answer("?")],
}
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ '<|vision_start|><|image_pad|><|vision_end|>' if p.type == 'image' else p.text }}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
)
MODEL = {"model_type": "qwen2_5_vl", "vision_config": {"patch_size": 2, "spatial_merge_size": 2}}
"""Tokens of 4 x 4 pixels."""


def tokenizer_of(section: ImageSection | None = None) -> Tokenizer:
    plain = load_tokenizer("bytes")
    hf = copy.deepcopy(plain.hf)
    hf.add_special_tokens({"additional_special_tokens": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]})
    hf.chat_template = TEMPLATE
    return replace(plain, hf=hf).for_images(MODEL, "", section or ImageSection(min_pixels=16, max_pixels=1024))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_of()


def drawn(seed: int, size: tuple[int, int] = (8, 12)) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(pixels)


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def example(tokenizer: Tokenizer, row: dict[str, Any], **fields: Any) -> TokenizedExample:
    section = DatasetSection(path="rows.jsonl", **fields)
    (one,) = tokenize_example(row, section, Renderer(tokenizer, True), "answers")
    return one


def batch(tokenizer: Tokenizer, rows: list[dict[str, Any]], **fields: Any) -> Batch:
    settings = {"batch_rows": 1, "row_tokens": 512, "seed": None, **fields}
    return next(iter(make_batches(rows, tokenizer, **settings)))


@pytest.mark.parametrize("family", FAMILIES)
def test_pixels_and_tokens_are_those_of_the_library(family: str, shared: Path) -> None:
    folder = shared / "goldens" / "vision" / family
    golden = dict(np.load(folder / "golden.npz"))
    model = json.loads((folder / "config.json").read_text())
    plain = load_tokenizer(folder).with_stop_tokens(ENDS.get(family, ()))
    tokenizer = plain.for_images(model, str(folder), ImageSection())
    policy, kind = tokenizer.images, tokenizer.images.family
    files = [folder / "images" / f"{number}.png" for number in range(3)]
    pictures = [Picture(file.name, file) for file in files]
    grids = [policy.grid_of(picture) for picture in pictures]
    assert [rows * columns for rows, columns in grids] == golden["image_tokens_per_image"].tolist()
    mean, std = (np.float32(one)[:, None, None] for one in (kind.mean or (0, 0, 0), kind.std or (1, 1, 1)))
    side, before, expected = policy.settings.patch, 0, golden["images_pixel_values"]
    for number, (picture, grid) in enumerate(zip(pictures, grids, strict=True)):
        patches, places = policy.patches(picture.pixels()), policy.places(grid)
        assert patches.dtype == np.uint8
        values = (patches.reshape(-1, 3, side, side) / np.float32(255) - mean) / std
        if family.startswith("qwen"):
            both = expected[before : before + len(patches)].reshape(-1, 3, 2, side, side)
            before += len(patches)
            assert np.array_equal(both[:, :, 0], both[:, :, 1])
            theirs = both[:, :, 0]
        elif family.startswith("gemma4"):
            at = {
                (row, column): n for n, (column, row) in enumerate(golden["images_image_position_ids"][number].tolist())
            }
            order = [at[row, column] for row, column in places.tolist()]
            theirs = expected[number, order].reshape(-1, side, side, 3).transpose(0, 3, 1, 2)
        else:
            rows = expected[number].reshape(3, -1, side, expected.shape[3] // side, side)
            theirs = rows[:, places[:, 0], :, places[:, 1]]
        np.testing.assert_allclose(values, theirs, atol=1e-5)
    for name, messages in CASES.items():
        said = messages[1:] if (family, name) == ("mistral3", "turns") else messages
        row = {"messages": said, "images": [str(files[number]) for number in golden[f"{name}_images"]]}
        one, ids = example(tokenizer, row), golden[f"{name}_input_ids"]
        assert one.images is not None and one.grids is not None
        assert one.tokens[: len(ids)].tolist() == ids.tolist()
        if f"{name}_mm_token_type_ids" in golden:
            assert (one.images > 0)[: len(ids)].tolist() == (golden[f"{name}_mm_token_type_ids"] > 0).tolist()
        if name != "all":
            assert one.loss_mask.tolist() == (golden[f"{name}_answer_mask"] > 0).tolist()
            rope = policy.rope_positions(one.images, [Grid(*grid) for grid in one.grids.tolist()])
            places = golden[f"{name}_position_ids"]
            assert np.array_equal(places, np.arange(len(ids)) if rope is None else rope.T)


@pytest.mark.parametrize(
    ("file", "like"),
    [
        *((name, "path") for name in ("exif_3.jpg", "exif_6.jpg", "exif_8.jpg", "animated.gif", "aspect_300.png")),
        *(
            (name, "path")
            for name in ("bilevel.png", "cmyk.jpg", "gray.png", "one_pixel.png", "palette.png", "rgb.png")
        ),
        *((name, "pil") for name in ("rgba.png", "gray_alpha.png", "palette_transparent.png")),
    ],
)
def test_pictures_are_upright_and_over_white(file: str, like: str, shared: Path) -> None:
    folder = shared / "goldens" / "vision" / "image_modes"
    expected = np.load(folder / "golden.npz")[f"{file.replace('.', '_')}_from_{like}"]
    with Image.open(folder / file) as opened:
        for source in (folder / file, (folder / file).read_bytes(), opened):
            picture = Picture("image", source)
            assert picture.size == expected.shape[1::-1]
            assert np.array_equal(np.asarray(picture.pixels()), expected)


def test_16_bit_gray_keeps_its_shades() -> None:
    shades = np.asarray([[0, 257, 65535, 32896]], np.uint16)
    picture = Picture("image", png(Image.fromarray(shades)))
    assert np.asarray(picture.pixels())[0, :, 0].tolist() == [0, 1, 255, 128]


def test_gray_of_32_bits_is_refused_and_transparent_gray_is_white() -> None:
    """An int32 array may hold 8 or 16 bits; a colour of a 16-bit PNG may be transparent."""
    gray = Image.fromarray(np.asarray([[0, 200]], np.int32))
    with pytest.raises(ConfigError, match="32 bits"):
        Picture("x", gray).pixels()
    image = Image.fromarray(np.asarray([[0, 257 * 10, 1]], np.uint16))
    held = io.BytesIO()
    image.save(held, "PNG", transparency=0)
    assert np.asarray(Picture("x", held.getvalue()).pixels())[0, :, 0].tolist() == [255, 10, 0]


def bomb() -> bytes:
    """PNG of a few bytes with more pixels than may be decoded, by its header."""
    whole = bytearray(png(Image.new("1", (8, 8))))
    side = int(MAX_PIXELS**0.5) + 1
    whole[16:24] = side.to_bytes(4, "big") * 2
    import zlib

    whole[29:33] = zlib.crc32(whole[12:29]).to_bytes(4, "big")
    return bytes(whole)


@pytest.mark.parametrize(
    ("held", "reason"),
    [
        (b"no picture", r"images\[0\] is no picture; these are read: PNG"),
        (bomb(), r"images\[0\] has 8193 x 8193 pixels by its header, more than 67,108,864"),
        (png(drawn(0))[:-40], r"images\[0\] cannot be decoded: "),
        ("http://host/a.png", r"images\[0\] is the URL http://host/a.png, and nothing is fetched"),
        ("data:image/png,abc", r"images\[0\] is a data: URL without base64"),
        ("missing.png", r"images\[0\] \(missing.png\): no file .*missing.png"),
        ({"path": None, "bytes": None}, r"images\[0\] is a mapping with path, bytes; it needs bytes or path"),
        (3, r"images\[0\] is a int; a picture is a path"),
        (Image.new("F", (4, 4)), r"images\[0\] cannot be decoded: its values are floating-point numbers"),
        (Image.new("RGB", (0, 4)), r"images\[0\] has 0 x 4 pixels"),
        (png(Image.new("RGB", (900, 1))), r"images\[0\]: 900 x 1 pixels: one side is more than 200 times"),
    ],
)
def test_a_bad_picture_is_named_with_its_row(held: Any, reason: str, tokenizer: Tokenizer) -> None:
    rows = [{"messages": CASES["one"], "images": [drawn(0)]}, {"messages": CASES["one"], "images": [held]}]
    with pytest.raises(ConfigError, match=rf"^rows row 1: {reason}"):
        batch(tokenizer, rows)


@pytest.mark.parametrize(
    "held",
    [b"no picture", bomb(), png(drawn(0))[:-40], "missing.png", {"path": None, "bytes": None}],
    ids=["content", "size", "end", "file", "none"],
)
@pytest.mark.parametrize("packing", [True, False])
def test_a_row_with_a_bad_picture_is_left_out(
    held: Any, packing: bool, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where it is found only when it is decoded, behind packing: the batch is that of the other rows."""
    good = [{"messages": CASES["one"], "images": [drawn(number)]} for number in (0, 1)]
    sizes: dict[str, Any] = {"row_tokens": 512, "batch_rows": 4, "seed": None, "packing": packing}

    def made(rows: list[Any]) -> list[Batch]:
        return list(make_batches(rows, tokenizer, on_bad_image="drop", **sizes))

    (found,) = made([good[0], {"messages": CASES["one"], "images": [held]}, good[1]])
    assert "WARNING: rows row 1: images[0]" in " ".join(capsys.readouterr().out.split())
    (expected,) = made(good)
    for name, array in vars(expected).items():
        assert np.array_equal(getattr(found, name), array), name
    with pytest.raises(ConfigError, match="every row of rows has a picture that cannot be read"):
        made([{"messages": CASES["one"], "images": [b"no picture"]}])


def test_each_form_of_a_picture_is_the_same(tmp_path: Path) -> None:
    content = png(drawn(0))
    (tmp_path / "a.png").write_bytes(content)
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    forms = ["a.png", tmp_path / "a.png", content, drawn(0), url, {"bytes": content, "path": "b"}, {"path": "a.png"}]
    for form in [*forms, {"url": url}, {"bytes": None, "path": str(tmp_path / "a.png")}]:
        picture = picture_of(form, "image", tmp_path)
        assert np.array_equal(np.asarray(picture.pixels()), np.asarray(drawn(0)))


def test_pictures_in_memory_are_written_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in Python is resumed from a file of its rows, which lies elsewhere."""
    (tmp_path / "a.png").write_bytes(png(drawn(0)))
    monkeypatch.chdir(tmp_path)
    parts = [{"type": "image", "path": "a.png"}, {"type": "image", "image": drawn(0)}]
    images = ["a.png", drawn(0), {"bytes": png(drawn(0)), "path": None}]
    row = json.loads(json.dumps(written({"images": images, "image": "no file", "messages": [user(*parts)], "n": 1})))
    assert (row["image"], row["n"]) == ("no file", 1)
    for held in [*row["images"], *({k: v for k, v in p.items() if k != "type"} for p in row["messages"][0]["content"])]:
        picture = picture_of(held, "image", Path("/nowhere"))
        assert np.array_equal(np.asarray(picture.pixels()), np.asarray(drawn(0)))
    assert written({"text": b"x", "path": "a.png"}) == {"text": b"x", "path": "a.png"}


def test_a_run_is_not_resumed_on_other_pictures(tokenizer: Tokenizer, tmp_path: Path) -> None:
    def stream(seed: int) -> Any:
        drawn(seed).save(tmp_path / "a.png")
        rows = [{"messages": CASES["one"], "image": str(tmp_path / "a.png")}]
        return make_batches(rows, tokenizer, batch_rows=1, row_tokens=128, seed=0)

    state = stream(0).state()
    stream(0).restore(state)
    with pytest.raises(ConfigError, match="cannot resume: pictures was"):
        stream(1).restore(state)


def test_each_form_of_a_row_is_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Holes, parts with pictures, and pictures before the first user's text."""
    one, two = drawn(0), drawn(1, (16, 4))
    expected = example(tokenizer, {"messages": [user(one_part(one), one_part(two), "Hi"), answer("!")]})
    rows = [
        {"messages": [user(IMAGE, IMAGE, "Hi"), answer("!")], "images": [one, two]},
        {"messages": [{"role": "user", "content": "Hi"}, answer("!")], "images": [one, two]},
        {"prompt": "Hi", "completion": "!", "images": [{"bytes": png(one), "path": None}, {"bytes": png(two)}]},
        {"prompt": [user(one_part(one), IMAGE, "Hi")], "completion": [answer("!")], "image": two},
    ]
    for row in rows:
        assert example(tokenizer, row).tokens.tolist() == expected.tokens.tolist()
    marked = {"messages": [{"role": "user", "content": "<image><image>Hi"}, answer("!")], "images": [one, two]}
    assert example(tokenizer, marked, image_marker="<image>").tokens.tolist() == expected.tokens.tolist()
    with pytest.raises(ConfigError, match="hold <image> as often as the row has pictures, and it would be text"):
        example(tokenizer, marked)
    assert "<image><image>Hi" in tokenizer.decode(example(tokenizer, marked, image_marker="<other>").tokens.tolist())


def test_a_column_that_names_a_picture_is_not_passed_over(tokenizer: Tokenizer, tmp_path: Path) -> None:
    drawn(0).save(tmp_path / "a.png")
    section = DatasetSection(path=tmp_path / "rows.jsonl", completion="{caption}", prompt="?")
    row = {"photo": "a.png", "caption": "A disc."}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(
        ConfigError, match=r"column 'photo' names a picture \(a.png\); only the columns image and images"
    ):
        tokenize_example(row, section, Renderer(tokenizer, chat=True), "answers")
    other = tokenize_example({**row, "photo": "b.png"}, section, Renderer(tokenizer, chat=True), "answers")[0]
    assert other.images is None
    (line,) = picture_note([], 1, "sequences", load_rows(section), tokenizer)
    assert line.startswith("none of 1 sequences of ") and line.endswith("columns: photo, caption")


def one_part(image: Image.Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"}}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": CASES["two"], "images": [drawn(0)]}, "is image 2 of the messages, and the row has 1"),
        ({"messages": CASES["one"], "images": [drawn(0)] * 2}, "has 2 pictures in its columns, and its messages 1"),
        ({"messages": CASES["one"], "image": drawn(0), "images": [drawn(0)]}, "in both columns images and image"),
        (
            {"messages": [user("a"), {**user(IMAGE), "role": "assistant"}], "image": drawn(0)},
            "images are for messages of users and tools",
        ),
        ({"text": "a", "image": drawn(0)}, "the column image has no place beside the plain column text"),
    ],
)
def test_counts_and_places_must_fit(row: dict[str, Any], reason: str, tokenizer: Tokenizer) -> None:
    renderer = Renderer(tokenizer, "text" not in row)
    with pytest.raises(ConfigError, match=reason):
        tokenize_example(row, DatasetSection(path="rows.jsonl"), renderer, "answers")


def test_a_row_copies_no_vocabulary(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a vocabulary of 150,000 texts takes as long as ten rows."""
    row = {"image": drawn(0, (32, 32)), "prompt": "?", "completion": "a"}
    expected = example(tokenizer, row).tokens
    monkeypatch.setattr(type(tokenizer.hf), "get_vocab", lambda self: pytest.fail("the vocabulary is copied"))
    assert list(example(tokenizer, row).tokens) == list(expected)


def test_a_typed_placeholder_is_text(tokenizer: Tokenizer) -> None:
    typed = "<|vision_start|><|image_pad|><|vision_end|>"
    row = {"messages": [user(IMAGE, typed), answer(f"I see {typed}")], "image": drawn(0)}
    one = example(tokenizer, row)
    assert one.images is not None
    assert (one.tokens == tokenizer.image_id).sum() == (one.images > 0).sum() == 6
    assert tokenizer.decode(one.tokens.tolist()).count("<|image_pad|>") == 2


def test_image_tokens_are_never_labels(tokenizer: Tokenizer) -> None:
    row = {"messages": CASES["two"], "images": [drawn(0), drawn(1)]}
    section = DatasetSection(path="rows.jsonl")
    (one,) = tokenize_example(row, section, Renderer(tokenizer, True), "all")
    assert one.images is not None and not one.loss_mask[one.images > 0].any()
    assert one.loss_mask.sum() == len(one.tokens) - 1 - 12 - 4


def test_an_image_is_never_cut(tokenizer: Tokenizer) -> None:
    one = example(tokenizer, {"messages": CASES["turns"], "images": [drawn(0), drawn(1)]})
    assert one.images is not None
    first, last = (np.flatnonzero(one.images == 2)[at] for at in (0, -1))
    for length in range(int(first) + 1, int(last) + 1):
        assert fit_to_row(one, length, "truncate") == [None]
    (kept,) = fit_to_row(one, int(first), "truncate")
    assert kept is not None and kept.grids is not None and len(kept.grids) == 1
    (whole,) = fit_to_row(one, int(last) + 1, "truncate")
    assert whole is not None and whole.grids is not None and len(whole.grids) == 2


def test_a_batch_holds_images_beside_its_rows(tokenizer: Tokenizer) -> None:
    """Features go on through a row; each patch belongs to the image of the tokens that take it."""
    one, two = drawn(0, (8, 12)), drawn(1, (16, 4))
    rows = [
        {"messages": [user("No picture"), answer("!")], "images": []},
        {"messages": CASES["two"], "images": [one, two]},
        {"messages": [user(IMAGE), answer("!")], "images": [one]},
    ]
    made = batch(tokenizer, rows)
    assert made.images is not None and made.image_rows is not None and made.patches is not None
    assert made.patch_images is not None and made.patch_places is not None and made.rope_positions is not None
    grids = [tokenizer.images.grid(image.size) for image in (one, two, one)]
    assert sorted(made.image_rows[made.image_rows > 0].tolist()) == list(range(1, 6 + 4 + 6 + 1))
    used = np.flatnonzero(made.patch_images[0])
    assert used.tolist() == list(range(len(used)))
    expected = np.concatenate([tokenizer.images.patches(image) for image in (one, two, one)])
    assert np.array_equal(made.patches[0, used], expected) and not made.patches[0, len(used) :].any()
    assert np.array_equal(made.patch_places[0, used], np.concatenate([tokenizer.images.places(g) for g in grids]))
    blocks = made.patch_images[0, used].reshape(-1, 4)
    tokens = made.image_rows[0] > 0
    assert (blocks[made.image_rows[0, tokens] - 1] == made.images[0, tokens, None]).all()
    for segment in range(1, 4):
        here = made.segments[0] == segment
        (row,) = [row for row in rows if len(example(tokenizer, row).tokens) == here.sum()]
        alone = batch(tokenizer, [row], row_tokens=int(here.sum()))
        if alone.rope_positions is None:
            assert np.array_equal(made.rope_positions[0, here, 0], np.arange(here.sum()))
        else:
            assert np.array_equal(made.rope_positions[0, here], alone.rope_positions[0])
    assert not made.rope_positions[0, made.segments[0] == 0].any()


def test_swapped_pictures_change_the_patches_alone(tokenizer: Tokenizer) -> None:
    one, two = drawn(0), drawn(1)
    made, swapped, twice = (
        batch(tokenizer, [{"messages": CASES["two"], "images": images}])
        for images in ([one, two], [two, one], [one, one])
    )
    assert np.array_equal(made.tokens, swapped.tokens) and np.array_equal(made.images, swapped.images)
    assert np.array_equal(made.patches[0, :24], swapped.patches[0, 24:48])
    assert not np.array_equal(made.patches, swapped.patches)
    assert np.array_equal(twice.patches[0, :24], twice.patches[0, 24:48])
    assert np.array_equal(twice.images, made.images)


def test_a_batch_without_pictures_is_one_of_text(tokenizer: Tokenizer) -> None:
    rows = [{"messages": [user("No picture"), answer("!")], "images": []}]
    made, text_only = batch(tokenizer, rows), batch(replace(tokenizer, vision=None), rows)
    assert made.patches is made.images is made.rope_positions is None
    assert np.array_equal(made.tokens, text_only.tokens)


def test_sizes_are_settings_and_saved(tmp_path: Path, tokenizer: Tokenizer) -> None:
    small = tokenizer_of(ImageSection(min_pixels=16, max_pixels=64))
    row = {"messages": CASES["one"], "image": drawn(0, (16, 16))}
    assert [(one.images > 0).sum() for one in (example(tokenizer, row), example(small, row))] == [16, 4]
    small.save(tmp_path)
    files = {"preprocessor_config.json": (tmp_path / "preprocessor_config.json").read_bytes()}
    assert policy_of(MODEL, files, ImageSection(), "saved").settings == small.images.settings
    with pytest.raises(ConfigError, match="model.image.longest_edge: images of a qwen2_5_vl have min_pixels and max"):
        tokenizer_of(ImageSection(longest_edge=8))
    with pytest.raises(ConfigError, match="min_pixels=99 is more than max_pixels=50; lower it"):
        tokenizer_of(ImageSection(min_pixels=99, max_pixels=50))


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ({"do_resize": False}, "do_resize=False is not supported; True is"),
        ({"resample": 0}, "resample=0 is not supported; 3 is"),
        ({"image_mean": [0.5, 0.5, 0.5]}, "image_mean=.* is not supported"),
        ({"crop_margins": 3}, "crop_margins=3 is not known"),
        ({"patch_size": 3}, "patch_size=3 is not the tower's, 2"),
    ],
)
def test_processors_that_do_something_else_are_refused(field: dict[str, Any], reason: str) -> None:
    files = {"preprocessor_config.json": json.dumps(field).encode()}
    with pytest.raises(ConfigError, match=f"m: preprocessor_config.json: {reason}"):
        policy_of(MODEL, files, ImageSection(), "m")


def beside(one: TokenizedExample, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    assert one.images is not None and one.grids is not None
    return image_arrays(tokenizer.images, one.images, one.grids)


def test_row_patches_bound_rows_and_batches_have_few_sizes(tokenizer: Tokenizer) -> None:
    def section(**fields: Any) -> SFTSection:
        return SFTSection(dataset={"path": "x.jsonl"}, row_tokens=512, row_patches=512, **fields)

    plain, small, large = ({"images": [drawn(0, (side, side))] * 2} for side in (4, 16, 32))
    lengths = []
    for row in (small, large, small, large):
        one = example(tokenizer, {"messages": CASES["two"], **row})
        sized = with_images({"tokens": one.tokens}, beside(one, tokenizer), section(), tokenizer)
        assert sized is not None
        lengths.append(sized)
    assert [len(one["patches"]) for one in lengths] == [128, 512, 128, 512]
    packed = PackedBatches(
        [[one] for one in lengths], epoch=4, window=LOOK_AHEAD, batch_rows=4, lengths={"tokens": 512}, row_patches=512
    )
    assert sorted(next(packed)["tokens_segments"].max(axis=1).tolist()) == [0, 1, 1, 2]
    huge = example(tokenizer, {"messages": CASES["all"], "images": [drawn(0, (32, 32))] * 3})
    with pytest.raises(
        ConfigError, match="its 3 pictures have 768 patches, and beside a row are 512; raise row_patches"
    ):
        with_images({}, beside(huge, tokenizer), section(), tokenizer)
    assert with_images({}, beside(huge, tokenizer), section(overlong="drop"), tokenizer) is None
    made = [batch(tokenizer, [{"messages": CASES["two"], **row}]) for row in (plain, small, large)]
    assert [one.patches.shape[1] for one in made] == [512, 512, 512]
    assert bucket_sizes(tokenizer.images.settings.merge, 4096) == [1024, 2048, 3072, 4096]
    few = batch(tokenizer, [{"messages": CASES["one"], "images": [drawn(0, (16, 16))]}], row_tokens=96)
    assert few.patches.shape[1] == 96, "few patches are not padded to a kernel's tile"
    assert bucket_sizes(2, 64) == [16, 32, 48, 64] and bucket_sizes(2, 640) == [256, 384, 512, 640]


def test_other_stages_refuse_pictures(tokenizer: Tokenizer) -> None:
    """By name, before anything is compiled: they would train on the text alone."""
    row, section = {"prompt": "Hi", "image": drawn(0)}, DatasetSection(path="x.jsonl")
    with pytest.raises(ConfigError, match="the row has pictures, which labelled steps do not take"):
        refuse_pictures(row, section, Renderer(tokenizer, True))
    refuse_pictures(row, section, Renderer(replace(tokenizer, vision=None), True))
    with pytest.raises(ConfigError, match="images are for messages of users and tools, to a model with images"):
        prompt_messages({"prompt": [user(IMAGE)]}, section)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])
def test_base64_without_its_scheme(kind: str, tmp_path: Path) -> None:
    """Alone, in lines, in the alphabet of URLs and without padding it is the picture."""
    file = io.BytesIO()
    Image.frombytes("RGB", (60, 40), np.random.default_rng(0).bytes(7200)).save(file, kind)
    whole = base64.b64encode(file.getvalue()).decode()
    lines = base64.encodebytes(file.getvalue()).decode()
    of_urls = base64.urlsafe_b64encode(file.getvalue()).decode().rstrip("=")
    for text in (whole, lines, of_urls):
        assert picture_of(text, "row 0: image", tmp_path).content() == file.getvalue()
        assert picture_of({"bytes": text, "path": None}, "row 0: image", tmp_path).size == (60, 40)


@pytest.mark.parametrize("text", ["x" * 300, "a/" * 3000, "iVBORw0KGgo" + "!" * 5000, "a\0.png"])
def test_texts_that_are_neither_path_nor_picture(text: str, tmp_path: Path) -> None:
    with pytest.raises(PictureError, match=r"row 0: image is a text of .* neither a path nor base64 of a picture"):
        picture_of(text, "row 0: image", tmp_path)
    row = {"prompt": "q", "completion": "a", "note": f"{text}.png"}
    tokenize_example(row, DatasetSection(path="rows.jsonl"), Renderer(load_tokenizer("bytes"), True), "answers")
