"""Images beside packed rows: the arrays of a sequence with pictures, and those of a batch, with patches in buckets."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, UInt8

from posttrain.config import OfflineSection, PairSection, SequenceSection
from posttrain.data.images import Grid, ImagePolicy
from posttrain.data.pictures import Picture
from posttrain.data.sources import Rows, picked
from posttrain.data.tokenizer import Tokenizer
from posttrain.errors import ConfigError
from posttrain.runtime.files import digest

Arrays = dict[str, np.ndarray]

BUCKETS = 4
"""Numbers of patches that a batch can have beside each row, apart from none: each is a program of its own."""
ALIGNED = 128
"""Patches are a multiple of so many, as kernels want their keys."""


def image_arrays(policy: ImagePolicy, images_T: Int[np.ndarray, " T"], grids: Int[np.ndarray, "I 2"]) -> Arrays:
    """Arrays of a sequence with pictures beside its tokens: image and feature of each token, its positions in
    multimodal RoPE, and the grids. `patches` takes no memory, and only has the length."""
    listed = [Grid(int(rows), int(columns)) for rows, columns in grids]
    count = sum(map(policy.num_patches, listed))
    rope = policy.rope_positions(images_T, listed)
    return {
        "images": images_T,
        "image_rows": np.where(images_T > 0, np.cumsum(images_T > 0), 0).astype(np.int32),
        **({} if rope is None else {"rope_positions": rope}),
        "grids": grids,
        "patches": np.broadcast_to(np.uint8(0), (count,)),
    }


def sharing_arrays(
    policy: ImagePolicy,
    sequences: Sequence[tuple[Int[np.ndarray, " T"], slice]],
    grids: Int[np.ndarray, "I 2"],
) -> Arrays:
    """Arrays of sequences that share the pictures of their prompt, laid end to end: each has images of its own in the
    mask, and all take the same features. `sequences`: image of each token of a whole sequence, and the part of it."""
    there = grids[: max(int(images_T.max(initial=0)) for images_T, _ in sequences)]
    parts = []
    for number, (images_T, part) in enumerate(sequences):
        whole = image_arrays(policy, images_T, there)
        of_part: Arrays = {n: whole[n][part] for n in ("images", "image_rows", "rope_positions") if n in whole}
        numbers = of_part["images"]
        of_part["images"] = np.where(numbers > 0, numbers + number * len(there), 0).astype(np.int32)
        parts.append(of_part)
    joined: Arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return {**joined, "grids": there, "patches": whole["patches"]}


class PictureSource(NamedTuple):
    """Rows, and the pictures of one."""

    rows: Rows
    pictures: Callable[[Mapping[str, Any]], Sequence[Picture]]

    def patches(self, policy: ImagePolicy, index: int, count: int) -> UInt8[np.ndarray, "P C"]:
        """Patches of a row's first pictures. ConfigError with the row."""
        with self.rows.named(index) as row:
            return np.concatenate([policy.patches(picture.pixels()) for picture in self.pictures(row)[:count]])

    @property
    def fingerprint(self) -> str:
        """Hash of the files of pictures in up to 64 rows."""
        contents = []
        for index in picked(len(self.rows)):
            with self.rows.named(index) as row:
                contents += [digest(picture.content()) for picture in self.pictures(row)]
        return digest(" ".join(contents))


@dataclass(frozen=True)
class ImageRows:
    """Arrays of batches of packed rows with pictures.

    `row_patches`: size of the largest bucket; `sources`: rows of pictures by the first number of the array `source`,
    whose second is the row's.
    """

    policy: ImagePolicy
    row_patches: int
    sources: Mapping[int, PictureSource]

    @classmethod
    def of(
        cls, section: OfflineSection, tokenizer: Tokenizer, sources: Mapping[int, PictureSource]
    ) -> ImageRows | None:
        """Maker of the image arrays of a stage's batches; None for a model without images."""
        return cls(tokenizer.images, most_patches(section, tokenizer), sources) if tokenizer.has_images else None

    def __call__(self, rows: Sequence[Sequence[Mapping[str, np.ndarray]]], shape: tuple[int, int]) -> Arrays:
        """Arrays of a batch of this shape; none without a picture in it, which is then the same as one of text."""
        members = [one for of_row in rows for one in of_row if "images" in one]
        if not members:
            return {}
        workers = min(len(members), os.cpu_count() or 1)
        with ThreadPoolExecutor(workers) as pool:
            pixels = dict(zip(map(id, members), pool.map(self._patches, members), strict=True))
        counts = [sum(len(one.get("patches", ())) for one in of_row) for of_row in rows]
        size = next(size for size in bucket_sizes(self.policy, self.row_patches) if size >= max(counts))
        width = 3 * self.policy.settings.patch**2
        arrays: Arrays = {
            "images": np.zeros(shape, np.int32),
            "image_rows": np.zeros(shape, np.int32),
            "patches": np.zeros((shape[0], size, width), np.uint8),
            "patch_images": np.zeros((shape[0], size), np.int32),
            "patch_places": np.zeros((shape[0], size, 2), np.int32),
        }
        if self.policy.family.axes:
            arrays["rope_positions"] = np.zeros((*shape, 3), np.int32)
        for row, of_row in enumerate(rows):
            self._fill({name: array[row] for name, array in arrays.items()}, of_row, pixels)
        return arrays

    def _fill(
        self, row: Arrays, members: Sequence[Mapping[str, np.ndarray]], pixels: dict[int, UInt8[np.ndarray, "P C"]]
    ) -> None:
        """Write the sequences of a row, whose numbers of images and features go on from one to the next."""
        start = images = features = patches = 0
        for one in members:
            tokens = slice(start, start + len(one["tokens"]))
            start = tokens.stop
            if "rope_positions" in row:
                plain = one.get("positions", np.arange(len(one["tokens"]), dtype=np.int32))
                row["rope_positions"][tokens] = one.get("rope_positions", plain[:, None])
            if "images" not in one:
                continue
            there = one["images"] > 0
            row["images"][tokens] = np.where(there, one["images"] + images, 0)
            row["image_rows"][tokens] = np.where(there, one["image_rows"] + features, 0)
            beside = slice(patches, patches + len(one["patches"]))
            grids = [Grid(*map(int, grid)) for grid in one["grids"]]
            numbers = np.arange(images + 1, images + 1 + len(grids), dtype=np.int32)
            row["patches"][beside] = pixels[id(one)]
            row["patch_images"][beside] = np.repeat(numbers, [self.policy.num_patches(grid) for grid in grids])
            row["patch_places"][beside] = np.concatenate([self.policy.places(grid) for grid in grids])
            images, patches = images + int(one["images"].max()), beside.stop
            features += int(one["image_rows"].max())

    def _patches(self, one: Mapping[str, np.ndarray]) -> UInt8[np.ndarray, "P C"]:
        """Patches of a sequence. ConfigError for a picture whose file has another size now."""
        number, index = map(int, one["source"])
        patches = self.sources[number].patches(self.policy, index, len(one["grids"]))
        if len(patches) != len(one["patches"]):
            raise ConfigError(f"a picture of row {index} has another size than before; restore its file")
        return patches


def bucket_sizes(policy: ImagePolicy, wanted: int) -> list[int]:
    """Sizes of the buckets of patches up to the wanted one, which is rounded up."""
    aligned = math.lcm(policy.settings.merge**2, ALIGNED)
    return sorted({math.ceil(wanted * part / BUCKETS / aligned) * aligned for part in range(1, BUCKETS + 1)})


def most_patches(section: OfflineSection, tokenizer: Tokenizer) -> int:
    """Most image patches beside a row of a stage, by default as many as its tokens can be of; 0 for a model without
    images. ConfigError for `row_patches` without such a model."""
    if not tokenizer.has_images:
        if section.row_patches is not None:
            raise ConfigError(f"row_patches={section.row_patches} has no effect: the model takes no images; remove it")
        return 0
    default = section.row_tokens * tokenizer.images.settings.merge**2
    return bucket_sizes(tokenizer.images, default if section.row_patches is None else section.row_patches)[-1]


def with_images(
    one: Arrays, beside: Arrays, section: SequenceSection | PairSection, tokenizer: Tokenizer
) -> Arrays | None:
    """Sequence with the arrays of its pictures; None for one dropped for more patches than fit beside a row."""
    if not tokenizer.tower:
        raise ConfigError("the row has pictures, and model.vision=none loads no tower; set it to frozen")
    most = most_patches(section, tokenizer)
    if len(beside["patches"]) <= most:
        return one | beside
    if section.overlong == "error":
        raise ConfigError(
            f"its {len(beside['grids'])} pictures have {len(beside['patches']):,} patches, and beside a row are "
            f"{most:,}; raise row_patches, make pictures smaller (model.image), or set overlong to drop"
        )
    return None


def picture_note(grids: Sequence[Int[np.ndarray, "I 2"]], total: int, what: str) -> list[str]:
    """Line about the pictures of checked sequences (or pairs), of which those with pictures have `grids`."""
    if not grids:
        return []
    sizes = np.concatenate(grids).prod(axis=1)
    return [
        f"{len(sizes):,} pictures in {len(grids):,} of {total:,} {what}: "
        f"{sizes.min():,} to {sizes.max():,} tokens each, together {sizes.sum():,}"
    ]
