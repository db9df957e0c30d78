"""Image policies of model families: size, patches, tokens and positions of a picture."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, UInt8

from posttrain.config import ImageSection
from posttrain.data.messages import parts_of
from posttrain.data.pictures import Picture, PictureError
from posttrain.data.tokenizer_files import PREPROCESSOR, PROCESSOR, json_bytes, new_names, processor_fields
from posttrain.errors import ConfigError

BILINEAR, BICUBIC = 2, 3
"""Filters by their numbers in Pillow and in files."""
HALF = (0.5, 0.5, 0.5)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
MOST_RATIO = 200
"""Most sides' ratio of Qwen's pictures."""

Size = tuple[int, int]
"""Width and height."""
Span = tuple[int, int]


class Grid(NamedTuple):
    """Tokens of an image, row by row."""

    rows: int
    columns: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Tokens around and of an image, as texts of special tokens."""

    marker: str
    """Text of an image in the chat template."""
    others: tuple[str, ...] = ()
    """Texts that the template writes around the marker."""
    before: str = ""
    """Text that stands for the marker before the image's tokens."""
    after: str = ""
    token: str
    """Token whose embedding an image feature replaces."""
    row_end: str | None = None
    """Token after each row of the grid; no feature replaces it."""
    end: str | None = None
    """Token in place of the last `row_end`."""

    @property
    def written(self) -> str:
        """Text that a template writes for an image."""
        begin, end = self.others or ("", "")
        return f"{begin}{self.marker}{end}"

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts that only a template may write."""
        named = (self.marker, *self.others, self.before.strip(), self.after.strip(), self.token, self.row_end, self.end)
        return tuple(dict.fromkeys(text for text in named if text))

    def tokens(self, grid: Grid) -> list[str]:
        """Tokens of an image between `before` and `after`."""
        if self.row_end is None or self.end is None:
            return [self.token] * (grid.rows * grid.columns)
        row = [self.token] * grid.columns
        return [*([*row, self.row_end] * (grid.rows - 1)), *row, self.end]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a family's image processor, with those of the configuration in their place."""

    patch: int
    """Pixels of a patch's side."""
    merge: int
    """Patches of a side of the block that becomes one token."""
    values: Mapping[str, Any]
    """Limits of size by name."""

    @property
    def unit(self) -> int:
        """Pixels of a token's side."""
        return self.patch * self.merge


@dataclass(frozen=True, kw_only=True)
class ImageFamily:
    """Images of a model family."""

    layout: Layout
    resized: Callable[[Size, Settings], Size]
    """Size to which a picture of some size is resized: multiples of `Settings.unit`."""
    resample: int
    mean: tuple[float, ...] | None
    """Mean and standard deviation of the file's normalization, which the tower does; None: it does without."""
    std: tuple[float, ...] | None
    axes: bool = False
    """Tokens have multimodal RoPE positions."""


def _fixed(size: Size, settings: Settings) -> Size:
    return settings.values["width"], settings.values["height"]


def _qwen(size: Size, settings: Settings) -> Size:
    (width, height), unit = size, settings.unit
    least, most = settings.values["min_pixels"], settings.values["max_pixels"]
    if max(size) / min(size) > MOST_RATIO:
        raise PictureError(f"{width} x {height} pixels: one side is more than {MOST_RATIO} times the other; crop it")
    new_height, new_width = round(height / unit) * unit, round(width / unit) * unit
    if new_height * new_width > most:
        ratio = math.sqrt(height * width / most)
        new_height = max(unit, math.floor(height / ratio / unit) * unit)
        new_width = max(unit, math.floor(width / ratio / unit) * unit)
    elif new_height * new_width < least:
        ratio = math.sqrt(least / (height * width))
        new_height, new_width = (math.ceil(side * ratio / unit) * unit for side in (height, width))
    return new_width, new_height


def _gemma4(size: Size, settings: Settings) -> Size:
    (width, height), unit = size, settings.unit
    most = settings.values["max_soft_tokens"]
    ratio = math.sqrt(most * unit**2 / (height * width))
    new_height, new_width = (math.floor(side * ratio / unit) * unit for side in (height, width))
    if not new_height and not new_width:
        raise PictureError(f"{width} x {height} pixels do not make a patch; raise max_soft_tokens")
    if not new_height:
        return min(math.floor(width / height) * unit, most * unit), unit
    if not new_width:
        return unit, min(math.floor(height / width) * unit, most * unit)
    return new_width, new_height


def _mistral3(size: Size, settings: Settings) -> Size:
    ratio = max(size) / settings.values["longest_edge"]
    shrunk = [math.floor(side / ratio) if ratio > 1 else side for side in size]
    if not all(shrunk):
        raise PictureError(f"{size[0]} x {size[1]} pixels: shrunk to longest_edge, a side vanishes; crop it")
    width, height = (-(-side // settings.unit) * settings.unit for side in shrunk)
    return width, height


_VISION = Layout(marker="<|image_pad|>", others=("<|vision_start|>", "<|vision_end|>"), token="<|image_pad|>")
_QWEN: dict[str, Any] = {"layout": _VISION, "resized": _qwen, "resample": BICUBIC, "axes": True}

FAMILIES: Mapping[str, ImageFamily] = {
    "gemma3": ImageFamily(
        layout=Layout(
            marker="<start_of_image>",
            before="\n\n<start_of_image>",
            after="<end_of_image>\n\n",
            token="<image_soft_token>",
        ),
        resized=_fixed,
        resample=BILINEAR,
        mean=HALF,
        std=HALF,
    ),
    "qwen2_5_vl": ImageFamily(**_QWEN, mean=CLIP_MEAN, std=CLIP_STD),
    "qwen3_vl": ImageFamily(**_QWEN, mean=HALF, std=HALF),
    "gemma4": ImageFamily(
        layout=Layout(marker="<|image|>", before="<|image>", after="<image|>", token="<|image|>"),
        resized=_gemma4,
        resample=BICUBIC,
        mean=None,
        std=None,
    ),
    "mistral3": ImageFamily(
        layout=Layout(marker="[IMG]", token="[IMG]", row_end="[IMG_BREAK]", end="[IMG_END]"),
        resized=_mistral3,
        resample=BICUBIC,
        mean=CLIP_MEAN,
        std=CLIP_STD,
    ),
}
"""By `model_type`."""


@dataclass(frozen=True, kw_only=True)
class ImagePolicy:
    """Policy of a model by which pictures become patches and tokens; the same in training, sampling and export."""

    model_type: str
    family: ImageFamily
    settings: Settings

    def resized(self, size: Size) -> Size:
        """Size to which a picture is resized. PictureError for an extreme shape."""
        return self.family.resized(size, self.settings)

    def grid(self, size: Size) -> Grid:
        """Tokens of a picture of this size: lengths need no pixels."""
        width, height = self.resized(size)
        return Grid(height // self.settings.unit, width // self.settings.unit)

    def grid_of(self, picture: Picture) -> Grid:
        """Tokens of a picture. PictureError with its name."""
        size = picture.size
        try:
            return self.grid(size)
        except PictureError as error:
            raise PictureError(f"{picture.name}: {error}") from error

    def difference(self, other: ImagePolicy) -> str | None:
        """Difference by which another model's images are not these, in tokens or patches; None without any."""
        mine, its = self.settings, other.settings
        pairs: dict[str, tuple[Any, Any]] = {
            "image token": (self.family.layout.token, other.family.layout.token),
            "patch size": (mine.patch, its.patch),
            "patches that become a token": (mine.merge**2, its.merge**2),
            "size of pictures": (mine.values.get("width"), its.values.get("width")),
            "multimodal RoPE": (self.family.axes, other.family.axes),
        }
        return next((f"its {name} is {one}, not {two}" for name, (one, two) in pairs.items() if one != two), None)

    def num_patches(self, grid: Grid) -> int:
        return grid.rows * grid.columns * self.settings.merge**2

    def placed(self, text: str, spans: Sequence[Span], stand_ins: Sequence[str], name: str) -> tuple[str, list[Span]]:
        """Rendered text in which stand-ins, between the layout's texts, take the places of the markers, and spans of it
        that have moved with them. ConfigError for a template that writes more or fewer; `name`: the tokenizer's."""
        layout = self.family.layout
        first, *pieces = text.split(layout.marker)
        if len(pieces) != len(stand_ins):
            raise ConfigError(
                f"chat template of {name} writes {len(pieces)} images of {len(stand_ins)}; use the template of the "
                "model with its images (model.chat_template)"
            )
        places = np.cumsum([len(first), *(len(layout.marker) + len(piece) for piece in pieces[:-1])])
        added = len(layout.before) + 1 + len(layout.after) - len(layout.marker)

        def moved(at: int) -> int:
            return at + added * int((places[: len(pieces)] < at).sum())

        whole = [
            first,
            *(f"{layout.before}{one}{layout.after}{piece}" for one, piece in zip(stand_ins, pieces, strict=True)),
        ]
        return "".join(whole), [(moved(begin), moved(end)) for begin, end in spans]

    def holes(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages as templates take them: they write where an image stands, and nothing of it."""
        parts = [[{"type": "image"} if p["type"] == "image" else p for p in parts_of(one)] for one in messages]
        return [{**one, "content": of} if of else dict(one) for one, of in zip(messages, parts, strict=True)]

    def numbers(self, text: str, spans: Sequence[Span], stand_ins: Sequence[str]) -> list[int]:
        """Number of the image of each token, from 1, by the span of its stand-in in the text; 0: text."""
        of = {character: index for index, character in enumerate(stand_ins, start=1)}
        return [of.get(text[begin], 0) if end == begin + 1 else 0 for begin, end in spans]

    def saved(self, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """Files of a tokenizer and a processor, with these settings in the processor's."""
        values = dict(self.settings.values)
        if "min_pixels" in values:
            values |= {"size": {"shortest_edge": values["min_pixels"], "longest_edge": values["max_pixels"]}}
        elif "longest_edge" in values:
            values = {"size": {"longest_edge": values["longest_edge"]}}
        elif "width" in values:
            values = {"size": values}
        whole, processor = {**files}, json.loads(files.get(PROCESSOR, b"{}"))
        if PREPROCESSOR in files or "image_processor" not in processor:
            whole[PREPROCESSOR] = json_bytes({**processor_fields(files), **values})
        if "image_processor" in processor:
            processor["image_processor"] = {**processor["image_processor"], **values}
            whole[PROCESSOR] = json_bytes(processor)
        return whole

    def patches(self, image: Any) -> UInt8[np.ndarray, "P C"]:
        """Patches [channel, y, x] of a decoded picture, block after block of those that become one token."""
        width, height = self.resized(image.size)
        sized = image.resize((width, height), self.family.resample)
        merge, patch = self.settings.merge, self.settings.patch
        pixels = np.asarray(sized, np.uint8)
        blocks = pixels.reshape(height // self.settings.unit, merge, patch, -1, merge, patch, 3)
        return blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3 * patch**2)

    def places(self, grid: Grid) -> Int[np.ndarray, "P 2"]:
        """Row and column of each patch, in the order of `patches`."""
        merge = self.settings.merge
        rows, columns = np.indices((grid.rows * merge, grid.columns * merge), np.int32)
        both = np.stack([rows, columns], axis=-1).reshape(grid.rows, merge, grid.columns, merge, 2)
        return both.transpose(0, 2, 1, 3, 4).reshape(-1, 2)

    def rope_positions(self, images_T: Int[np.ndarray, " T"], grids: Sequence[Grid]) -> Int[np.ndarray, "T 3"] | None:
        """Time, row and column of each token for multimodal RoPE; None in families that turn by plain positions.

        Text moves all three on by one; an image stands at one time, and moves on by its longer side.
        `images_T`: number of each token's image, from 1; 0: text.
        """
        if not self.family.axes:
            return None
        positions = np.zeros((len(images_T), 3), np.int32)
        edges = np.flatnonzero(np.diff(images_T, prepend=-1, append=-1))
        current = 0
        for begin, end in itertools.pairwise(edges.tolist()):
            number = int(images_T[begin])
            if number == 0:
                positions[begin:end] = current + np.arange(end - begin)[:, None]
                current += end - begin
                continue
            rows, columns = np.indices(grids[number - 1])
            positions[begin:end] = current
            positions[begin:end, 1] += rows.reshape(-1)
            positions[begin:end, 2] += columns.reshape(-1)
            current += max(grids[number - 1])
        return positions


OBEYED = {"size", "patch_size", "merge_size", "min_pixels", "max_pixels", "max_soft_tokens", "pooling_kernel_size"}
"""Fields of a preprocessor that a policy reads."""
REQUIRED = {
    "do_resize": True,
    "do_rescale": True,
    "do_convert_rgb": True,
    "do_pad": True,
    "do_pan_and_scan": False,
    "do_center_crop": False,
    "rescale_factor": 1 / 255,
}
"""Fields of which one value is built."""
IDLE = {
    "image_processor_type",
    "processor_class",
    "feature_extractor_type",
    "auto_map",
    "data_format",
    "device",
    "disable_grouping",
    "default_to_square",
    "input_data_format",
    "return_tensors",
    "image_seq_length",
    "pan_and_scan_min_crop_size",
    "pan_and_scan_max_num_crops",
    "pan_and_scan_min_ratio_to_activate",
    "temporal_patch_size",
    "crop_size",
    "_processor_class",
}
"""Fields without a say in the pixels of still images."""


def takes_images(model: Mapping[str, Any]) -> bool:
    """Tell whether a model takes images, by its `config.json`."""
    return model.get("model_type") in FAMILIES and bool(model.get("vision_config"))


def new_processor(model: Mapping[str, Any]) -> dict[str, bytes]:
    """Files of the processor of a new model, from its `config.json`; sizes are added by `ImagePolicy.saved`."""
    names, family = new_names(model["model_type"]), FAMILIES[model["model_type"]]
    fields: dict[str, Any] = {key: REQUIRED[key] for key in ("do_convert_rgb", "do_resize", "do_rescale")}
    fields |= {"rescale_factor": REQUIRED["rescale_factor"], "do_normalize": True, "resample": family.resample}
    fields |= {"image_mean": list(family.mean or ()), "image_std": list(family.std or ())}
    fields["image_processor_type"] = names.image_processor
    processor: dict[str, Any] = {"processor_class": names.processor}
    settings = _settings(model["model_type"], model, {}, "model.init")
    if "min_pixels" in settings.values:
        fields |= {"patch_size": settings.patch, "merge_size": settings.merge, "temporal_patch_size": 2}
    else:
        processor["image_seq_length"] = model.get("mm_tokens_per_image", 256)
    processor["image_processor"] = fields
    return {PREPROCESSOR: json_bytes(fields), PROCESSOR: json_bytes(processor)}


def policy_of(model: Mapping[str, Any], files: Mapping[str, bytes], section: ImageSection, name: str) -> ImagePolicy:
    """Policy of a model from its `config.json` and processor files.

    ConfigError for a model without images, for fields that are not known or ask for something else, and for settings
    that the family lacks. `name`: the model's, for errors.
    """
    model_type = str(model.get("model_type"))
    if not takes_images(model):
        raise ConfigError(f"images: {name} takes none; models of these families do: {', '.join(FAMILIES)}")
    family, fields, where = FAMILIES[model_type], processor_fields(files), f"{name}: {PREPROCESSOR}"
    _check_fields(fields, family, where)
    own = _settings(model_type, model, fields, where)
    limits = {
        "min_pixels": section.min_pixels,
        "max_pixels": section.max_pixels,
        "longest_edge": section.longest_edge,
        "max_soft_tokens": section.max_soft_tokens,
    }
    given = {key: value for key, value in limits.items() if value is not None}
    for key in given:
        if key not in own.values:
            has = " and ".join(one for one in own.values if one in limits)
            raise ConfigError(
                f"model.image.{key}: "
                + (f"images of a {model_type} have {has}" if has else f"images of a {model_type} have one size")
            )
    values = {**own.values, **given}
    if values.get("min_pixels", 0) > values.get("max_pixels", math.inf):
        raise ConfigError(
            f"model.image: min_pixels={values['min_pixels']} is more than max_pixels={values['max_pixels']}; lower it"
        )
    return ImagePolicy(model_type=model_type, family=family, settings=replace(own, values=values))


def _check_fields(fields: Mapping[str, Any], family: ImageFamily, where: str) -> None:
    """ConfigError for fields that are not known, and for values that are not built."""
    required: dict[str, Any] = dict(REQUIRED) | {"do_normalize": family.mean is not None, "resample": family.resample}
    if family.mean is not None:
        required |= {"image_mean": list(family.mean), "image_std": list(family.std or ())}
    known = {*OBEYED, *IDLE, *required, "image_mean", "image_std"}
    for key, value in fields.items():
        if key not in known:
            raise ConfigError(f"{where}: {key}={value!r} is not known; remove it if it changes nothing")
        if key in required and value is not None and not _equal(value, required[key]):
            raise ConfigError(f"{where}: {key}={value!r} is not supported; {required[key]!r} is")


def _equal(value: Any, expected: Any) -> bool:
    if isinstance(expected, list) and isinstance(value, list) and len(value) == len(expected):
        return all(map(_equal, value, expected))
    if isinstance(expected, float) and isinstance(value, int | float):
        return math.isclose(value, expected, rel_tol=1e-6)
    return bool(value == expected)


def _settings(model_type: str, model: Mapping[str, Any], fields: Mapping[str, Any], where: str) -> Settings:
    """Settings by the files of a model, with the defaults of transformers."""
    size, vision = fields.get("size") or {}, model["vision_config"]
    if model_type == "gemma3":
        side, patch = vision.get("image_size", 896), vision.get("patch_size", 14)
        tokens_side = math.isqrt(model.get("mm_tokens_per_image", 256))
        values = {"width": size.get("width", side), "height": size.get("height", side)}
        if set(values.values()) != {side} or (side // patch) % tokens_side:
            raise ConfigError(f"{where}: size={size} is not the tower's image_size={side}")
        return Settings(patch=patch, merge=side // patch // tokens_side, values=values)
    if model_type == "gemma4":
        patch, merge = vision.get("patch_size", 16), vision.get("pooling_kernel_size", 3)
        _same(fields, "patch_size", patch, where)
        _same(fields, "pooling_kernel_size", merge, where)
        return Settings(patch=patch, merge=merge, values={"max_soft_tokens": fields.get("max_soft_tokens", 280)})
    if model_type == "mistral3":
        patch, merge = vision.get("patch_size", 14), model.get("spatial_merge_size", 2)
        return Settings(patch=patch, merge=merge, values={"longest_edge": size.get("longest_edge", 1540)})
    patch, merge = (
        vision.get("patch_size", 14 if model_type == "qwen2_5_vl" else 16),
        vision.get("spatial_merge_size", 2),
    )
    _same(fields, "patch_size", patch, where)
    _same(fields, "merge_size", merge, where)
    least = fields.get("min_pixels") or size.get("shortest_edge") or 4 * (patch * merge) ** 2
    most = fields.get("max_pixels") or size.get("longest_edge") or 16384 * (patch * merge) ** 2
    return Settings(patch=patch, merge=merge, values={"min_pixels": least, "max_pixels": most})


def _same(fields: Mapping[str, Any], key: str, value: int, where: str) -> None:
    """ConfigError for a field that differs from the tower's."""
    if fields.get(key, value) != value:
        raise ConfigError(f"{where}: {key}={fields[key]} is not the tower's, {value}")
