"""Images beside packed rows: the arrays of a sequence with pictures, and those of a batch, with patches in buckets."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, UInt8

from posttrain.batch import Batch, ImageFeatures
from posttrain.config import OfflineSection, PairSection, SequenceSection, TrainSection
from posttrain.data.images import Grid, ImagePolicy
from posttrain.data.packing import RowMembers
from posttrain.data.pictures import Picture, PictureError
from posttrain.data.prompt_images import DIGEST_BYTES, PromptImage, PromptImages
from posttrain.data.sources import RowError, Rows
from posttrain.data.tokenizer import Tokenizer
from posttrain.errors import ConfigError
from posttrain.tracking.console import progress

Arrays = dict[str, np.ndarray]

BUCKETS = 4
"""Numbers of patches that a batch can have beside each row, apart from none: each is a program of its own."""
ALIGNED, FEW_ALIGNED = 128, 16
"""Patches are a multiple of the first, as kernels want their keys, or up to it of the second: they pad so few."""

Held = UInt8[np.ndarray, "P C"] | ImageFeatures
"""Patches of a picture, or its features."""


class ImageCache:
    """Patches and features of pictures by content, in at most `limit` bytes of host memory, the least recently used
    forgotten first. For any thread."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_bytes = 0
        self._held: OrderedDict[bytes, Held] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, digest: bytes) -> Held | None:
        """Return what is held of a picture, now the most recently used."""
        with self._lock:
            if digest in self._held:
                self._held.move_to_end(digest)
            return self._held.get(digest)

    def features(self, digest: bytes) -> ImageFeatures | None:
        """Features of a picture, if it has any."""
        held = self.get(digest)
        return held if isinstance(held, ImageFeatures) else None

    def put(self, digest: bytes, held: Held) -> None:
        """Hold this of a picture, in place of what was held of it."""
        with self._lock:
            self._drop(digest)
            self._held[digest] = held
            self.num_bytes += held.nbytes
            while self.num_bytes > self.limit:
                self._drop(next(iter(self._held)))

    def _drop(self, digest: bytes) -> None:
        held = self._held.pop(digest, None)
        self.num_bytes -= 0 if held is None else held.nbytes

    def forget_features(self) -> None:
        """Drop what another tower has computed."""
        with self._lock:
            for digest in [digest for digest, held in self._held.items() if isinstance(held, ImageFeatures)]:
                self._drop(digest)


class BatchPicture(NamedTuple):
    """Picture beside a row of a batch."""

    digest: bytes
    """Digest of its pixels and its grid."""
    row: int
    patches: slice
    """Its patches among those of the row."""

    @property
    def num_patches(self) -> int:
        return self.patches.stop - self.patches.start


def batch_pictures(batch: Batch) -> Iterator[BatchPicture]:
    """Pictures beside the rows of a host batch with patches, in order."""
    numbers_BP, places = np.asarray(batch.patch_images), np.asarray(batch.patch_places)
    patches = np.asarray(batch.patches)
    for row, numbers in enumerate(numbers_BP):
        edges = np.flatnonzero(np.diff(numbers, prepend=0, append=0)).tolist()
        for start, stop in itertools.pairwise(edges):
            if numbers[start]:
                content = hashlib.blake2b(patches[row, start:stop].data, digest_size=DIGEST_BYTES)
                content.update(np.ascontiguousarray(places[row, start:stop]).data)
                yield BatchPicture(content.digest(), row, slice(start, stop))


def picture_features(found: ImageFeatures, row: int, at: slice) -> ImageFeatures:
    """Features of a picture, from those of a call of a tower on the host, in memory of their own."""
    deeper = None if found.deeper is None else np.asarray(found.deeper[row, :, at]).copy()
    return ImageFeatures(features=np.asarray(found.features[row, at]).copy(), deeper=deeper)


def picture_size(merge: int, count: int) -> int:
    """Number of patches with which a picture of `count` of them goes through a tower alone: of two numbers in each
    octave, so that it depends on nothing beside it; `merge`: patches a side of a token."""
    unit = math.lcm(merge**2, FEW_ALIGNED if count <= ALIGNED else ALIGNED)
    whole = 1 << (math.ceil(count / unit) - 1).bit_length()
    return unit * (whole * 3 // 4 if whole > 2 and count <= unit * whole * 3 // 4 else whole)


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


def sampled_arrays(images: PromptImages, num_tokens: int) -> Arrays:
    """`image_arrays` of a sampled sequence of so many tokens, with the keys of its pictures."""
    numbers, grids = images.padded(num_tokens), np.asarray(images.grids, np.int32)
    return image_arrays(images.policy, numbers, grids) | source_of(images)


def source_of(images: PromptImages) -> Arrays:
    """Keys of pictures by what is in them, so that those of a group are encoded once in a row."""
    return {"source": np.asarray([[_content_key(image)] for image in images.images])}


def _content_key(image: PromptImage) -> int:
    return int.from_bytes(image.digest[:8], "little") >> 1


def keys_of(grids: Int[np.ndarray, "I 2"], *place: int) -> Int[np.ndarray, "I K"]:
    """Array `source` of the pictures of a sequence: the place of their row, and their numbers in it."""
    return np.asarray([[*place, number] for number in range(len(grids))])


class PictureSource(NamedTuple):
    """Rows, and the pictures of one."""

    rows: Rows
    pictures: Callable[[Mapping[str, Any]], Sequence[Picture]]

    drop: bool = False
    """Leave out rows with pictures that cannot be read, instead of an error."""

    def patches(self, policy: ImagePolicy, index: int, number: int) -> UInt8[np.ndarray, "P C"] | None:
        """Patches of a picture of a row; None for one that is left out. RowError for one that cannot be read."""
        try:
            with self.rows.named(index) as row:
                return policy.patches(self.pictures(row)[number].pixels())
        except RowError as error:
            if self.drop and self.rows.leaves_out(index, error):
                return None
            raise

    @property
    def fingerprint(self) -> str:
        """Hash of the pictures of all rows; of one that is left out its name."""
        contents = hashlib.sha256()
        for index in progress(range(len(self.rows)), f"comparing the pictures of {self.rows.name}", len(self.rows)):
            try:
                with self.rows.named(index) as row:
                    pictures = self.pictures(row)
            except RowError as error:
                if not self.drop or not isinstance(error.__cause__, PictureError):
                    raise
                contents.update(str(error).encode())
                continue
            for picture in pictures:
                contents.update(f"{index} {self._content(picture)} ".encode())
        return contents.hexdigest()[:16]

    def _content(self, picture: Picture) -> str:
        try:
            return picture.digest
        except OSError as error:
            if not self.drop:
                raise PictureError(f"{picture.name} cannot be read: {error.strerror or error}") from error
            return picture.name


def picture_digests(pictures: Sequence[Picture]) -> Int[np.ndarray, " N"]:
    """The first 64 bits of the digest of each picture."""
    return np.asarray([int(picture.digest[:16], 16) for picture in pictures], np.uint64).view(np.int64)


Key = tuple[int, ...]
"""Row of the array `source`, which tells where a picture is."""


@dataclass(frozen=True)
class ImageRows:
    """Arrays of batches of packed rows with pictures. Pictures of one key are in a row, and go through the tower, once.

    `row_patches`: size of the largest bucket; `decode`: patches by the key of a picture, None for one whose sequences
    are left out.
    """

    policy: ImagePolicy
    row_patches: int
    decode: Callable[[Key], UInt8[np.ndarray, "P C"] | None]

    @classmethod
    def of(
        cls, section: OfflineSection, tokenizer: Tokenizer, sources: Mapping[int, PictureSource]
    ) -> ImageRows | None:
        """Maker of the image arrays of a stage's batches; None for a model without images. `sources`: rows of pictures
        by the first number of a key; the others are the row's, and the picture's in it."""
        if not tokenizer.has_images:
            return None
        policy = tokenizer.images
        return cls(policy, most_patches(section, tokenizer), lambda key: sources[key[0]].patches(policy, *key[1:]))

    @classmethod
    def of_samples(cls, samples: Sequence[PromptImages | None], row_tokens: int) -> ImageRows | None:
        """Maker of the image arrays of batches of sampled sequences; None if all are text."""
        held = [one for one in samples if one is not None]
        if not held:
            return None
        policy, by_key = held[0].policy, {_content_key(image): image for one in held for image in one.images}
        merge = policy.settings.merge
        most = bucket_sizes(merge, row_tokens * merge**2)[-1]
        return cls(policy, most, lambda key: by_key[key[0]].patches())

    def __call__(self, rows: RowMembers, shape: tuple[int, int]) -> tuple[RowMembers, Arrays]:
        """Rows of a batch of this shape without the sequences that are left out, and its arrays; none without a picture
        in it, which is then the same as one of text."""
        keys = list({key: None for of_row in rows for one in of_row if "images" in one for key, _ in _pictures(one)})
        if not keys:
            return rows, {}
        with ThreadPoolExecutor(min(len(keys), os.cpu_count() or 1)) as pool:
            decoded = dict(zip(keys, pool.map(self.decode, keys), strict=True))
        patches_of = {key: patches for key, patches in decoded.items() if patches is not None}
        if len(patches_of) < len(keys):
            there = [[one for one in of_row if _keys(one) <= patches_of.keys()] for of_row in rows]
            return self([of_row for of_row in there if of_row], shape)
        return rows, self._arrays(rows, shape, patches_of)

    def _arrays(
        self, rows: RowMembers, shape: tuple[int, int], patches_of: Mapping[Key, UInt8[np.ndarray, "P C"]]
    ) -> Arrays:
        held = [[one for one in of_row if "images" in one] for of_row in rows]
        grids_of = [{key: grid for one in of_row for key, grid in _pictures(one)} for of_row in held]
        counts = [sum(map(self.policy.num_patches, grids.values())) for grids in grids_of]
        sizes = bucket_sizes(self.policy.settings.merge, self.row_patches)
        size = next(size for size in sizes if size >= max(counts))
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
            here = {name: array[row] for name, array in arrays.items()}
            self._fill_tokens(here, of_row, self._fill_patches(here, grids_of[row], patches_of))
        return arrays

    def _fill_patches(
        self, row: Arrays, grids: Mapping[Key, Grid], patches_of: Mapping[Key, UInt8[np.ndarray, "P C"]]
    ) -> dict[Key, int]:
        """Write the patches of a row's pictures. Returns the number of features before each."""
        before: dict[Key, int] = {}
        patches = features = 0
        for number, (key, grid) in enumerate(grids.items(), start=1):
            beside, found = slice(patches, patches + self.policy.num_patches(grid)), patches_of[key]
            if len(found) != beside.stop - beside.start:
                raise ConfigError(
                    f"a picture ({', '.join(map(str, key))}) has another size than before; restore its file"
                )
            row["patches"][beside] = found
            row["patch_images"][beside] = number
            row["patch_places"][beside] = self.policy.places(grid)
            before[key] = features
            patches, features = beside.stop, features + grid.rows * grid.columns
        return before

    def _fill_tokens(self, row: Arrays, members: Sequence[Mapping[str, np.ndarray]], before: Mapping[Key, int]) -> None:
        """Write images, features and positions of a row's sequences, whose numbers of images go on."""
        start = images = 0
        for one in members:
            tokens = slice(start, start + len(one["tokens"]))
            start = tokens.stop
            if "rope_positions" in row:
                plain = one.get("positions", np.arange(len(one["tokens"]), dtype=np.int32))
                row["rope_positions"][tokens] = one.get("rope_positions", plain[:, None])
            if "images" not in one:
                continue
            there, places = one["images"] > 0, list[np.ndarray]()
            for key, grid in _pictures(one):
                places.append(before[key] + np.arange(grid.rows * grid.columns))
            places_F = np.concatenate(places)
            row["images"][tokens] = np.where(there, one["images"] + images, 0)
            row["image_rows"][tokens] = np.where(there, places_F[np.maximum(one["image_rows"] - 1, 0)] + 1, 0)
            images += int(one["images"].max())


def _keys(one: Mapping[str, np.ndarray]) -> set[Key]:
    """Keys of a sequence's pictures."""
    return {key for key, _ in _pictures(one)} if "images" in one else set()


def _pictures(one: Mapping[str, np.ndarray]) -> list[tuple[Key, Grid]]:
    """Keys and grids of a sequence's pictures, in order."""
    keys, grids = ((tuple(map(int, row)) for row in one[name]) for name in ("source", "grids"))
    return [(key, Grid(*grid)) for key, grid in zip(keys, grids, strict=True)]


def bucket_sizes(merge: int, wanted: int) -> list[int]:
    """Sizes of the buckets of patches up to the wanted one, which is rounded up; `merge`: patches a side of a token."""
    parts = [math.ceil(wanted * part / BUCKETS) for part in range(1, BUCKETS + 1)]
    aligned = [math.lcm(merge**2, FEW_ALIGNED if part <= ALIGNED else ALIGNED) for part in parts]
    return sorted({math.ceil(part / size) * size for part, size in zip(parts, aligned, strict=True)})


def most_patches(section: OfflineSection, tokenizer: Tokenizer) -> int:
    """Most image patches beside a row of a stage, by default as many as its tokens can be of; 0 for a model without
    images. ConfigError for `row_patches` without such a model."""
    if not tokenizer.has_images:
        if section.row_patches is not None:
            raise ConfigError(f"row_patches={section.row_patches} has no effect: the model takes no images; remove it")
        return 0
    return largest_bucket(section, tokenizer.images.settings.merge)


def largest_bucket(section: TrainSection, merge: int) -> int:
    """Most image patches beside a row for a model that merges so many a side."""
    wanted = section.row_patches if isinstance(section, OfflineSection) else None
    return bucket_sizes(merge, section.row_tokens * merge**2 if wanted is None else wanted)[-1]


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


def bad_image_metrics(state: Mapping[str, Any]) -> dict[str, float]:
    """Metric `data/bad_images`: rows left out for a picture up to a state of the batches."""
    return {"data/bad_images": float(sum(map(len, state.get("bad_images", ()))))}


def bad_image_note(rows: Rows, checked: Sequence[int]) -> list[str]:
    """Line about checked rows that were left out for a picture."""
    if not (count := rows.left_out(checked)):
        return []
    what = "rows" if len(checked) == len(rows) else "rows checked"
    return [f"{count:,} of {len(checked):,} {what} of {rows.name} have a picture that cannot be read, and are left out"]


def no_picture_note(total: int, what: str, rows: Rows) -> list[str]:
    """Line about rows without pictures, for a model that sees."""
    return [
        f"none of {total:,} {what} of {rows.name} has a picture, in column image or images or in messages; columns: "
        f"{', '.join(rows.columns)}"
    ]


def picture_note(
    grids: Sequence[Int[np.ndarray, "I 2"]], total: int, what: str, rows: Rows, tokenizer: Tokenizer
) -> list[str]:
    """Line about the pictures of checked sequences (or pairs) of `rows`, of which those with pictures have `grids`."""
    if not grids:
        return no_picture_note(total, what, rows) if tokenizer.sees else []
    what = f"{what} of {rows.name}"
    sizes = np.concatenate(grids).prod(axis=1)
    return [
        f"{len(sizes):,} pictures in {len(grids):,} of {total:,} {what}: "
        f"{sizes.min():,} to {sizes.max():,} tokens each, together {sizes.sum():,}"
    ]
