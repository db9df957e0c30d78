"""Rows with images of the reference cases of vision-language models, as `Batch` has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from posttrain.batch import Batch
from posttrain.models.config import VisionConfig
from posttrain.models.decoder import Decoder


class Picture(NamedTuple):
    """Patches of an image in the order of `Batch.patches`, and their rows and columns."""

    patches: np.ndarray
    places: np.ndarray


class VisionCase:
    """A tiny checkpoint of a family, with what transformers computed of texts with images."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.arrays: dict[str, np.ndarray] = dict(np.load(folder / "golden.npz"))
        self.meta: dict[str, Any] = json.loads((folder / "golden_meta.json").read_text())

    def token_rows(self, name: str) -> np.ndarray:
        """True at tokens with a feature."""
        config = json.loads((self.folder / "config.json").read_text())
        image = config["image_token_index"] if "image_token_index" in config else config["image_token_id"]
        return self.arrays[f"{name}_input_ids"] == image

    def pictures(self, vision: VisionConfig) -> list[Picture]:
        arrays, size = self.arrays, vision.patch_size
        pixels = arrays["images_pixel_values"]
        if "images_image_grid_thw" in arrays:
            grids = [tuple(grid[1:]) for grid in arrays["images_image_grid_thw"]]
            ends = np.cumsum([rows * columns for rows, columns in grids])[:-1]
            frames = pixels.reshape(len(pixels), 3, 2, size**2)[:, :, 0]
            return [
                Picture(_levels(part, vision), _blocks(grid, vision.merge))
                for part, grid in zip(np.split(frames, ends), grids, strict=True)
            ]
        if "images_image_position_ids" in arrays:
            return [
                _from_raster(*pair, vision) for pair in zip(pixels, arrays["images_image_position_ids"], strict=True)
            ]
        sizes = arrays.get("images_image_sizes", [image.shape[1:] for image in pixels])
        return [_from_image(image[:, :h, :w], vision) for image, (h, w) in zip(pixels, sizes, strict=True)]


def _blocks(grid: tuple[int, int], merge: int) -> np.ndarray:
    """Places of all patches of a grid, block by block."""
    rows, columns = np.mgrid[: grid[0], : grid[1]]
    places = np.stack([rows, columns], axis=-1).reshape(grid[0] // merge, merge, grid[1] // merge, merge, 2)
    return places.swapaxes(1, 2).reshape(-1, 2).astype(np.int32)


def _levels(normalized: np.ndarray, vision: VisionConfig) -> np.ndarray:
    """Patches [P, 3, values] of normalized pixels as the 256 levels that they were."""
    mean, std = (np.asarray(x)[None, :, None] for x in (vision.mean, vision.std))
    levels = 255 * (normalized * std + mean)
    assert np.abs(levels - np.round(levels)).max() < 1e-2
    return np.round(levels).astype(np.uint8).reshape(len(normalized), -1)


def _from_image(image: np.ndarray, vision: VisionConfig) -> Picture:
    size, (_, height, width) = vision.patch_size, image.shape
    places = _blocks((height // size, width // size), vision.merge)
    cut = [image[:, r * size : (r + 1) * size, c * size : (c + 1) * size] for r, c in places]
    return Picture(_levels(np.stack(cut).reshape(len(cut), 3, -1), vision), places)


def _from_raster(patches: np.ndarray, positions: np.ndarray, vision: VisionConfig) -> Picture:
    """Patches [y, x, channel] by place (x, y), negative for padding."""
    by_place = {(y, x): patch for patch, (x, y) in zip(patches, positions, strict=True) if x >= 0}
    rows, columns = (1 + max(place[axis] for place in by_place) for axis in (0, 1))
    places = _blocks((rows, columns), vision.merge)
    ordered = np.stack([by_place[tuple(place)] for place in places]).reshape(len(places), -1, 3)
    return Picture(_levels(ordered.swapaxes(1, 2), vision), places)


def batch_of(case: VisionCase, model: Decoder, rows: list[tuple[str, ...]], **lengths: int) -> Batch:
    """Rows of the named cases, packed; loss on the answers. `length`, `patches`: of a row, by default the most."""
    vision = model.config.vision
    assert vision is not None
    turned = any(getattr(block.attention.rope, "axes", ()) for block in model.config.blocks)
    pictures, made = case.pictures(vision), []
    for names in rows:
        arrays: dict[str, list[Any]] = {}
        features = images = 0
        for number, name in enumerate(names, 1):
            ids, mask, seen = (
                case.arrays[f"{name}_input_ids"],
                case.arrays[f"{name}_answer_mask"],
                case.token_rows(name),
            )
            mine = [pictures[i] for i in case.arrays[f"{name}_images"]]
            counts = np.asarray([len(one.patches) // vision.merge**2 for one in mine])
            owners = np.repeat(np.arange(len(mine)) + images + 1, counts)
            tokens_of = np.zeros(len(ids), np.int32)
            tokens_of[seen] = owners
            numbers = np.zeros(len(ids), np.int32)
            numbers[seen] = features + np.arange(seen.sum()) + 1
            per_token = {
                "tokens": ids,
                "positions": np.arange(len(ids)),
                "segments": np.full(len(ids), number),
                "loss_weight": np.where(np.arange(len(ids)) > 0, mask, 0).astype(np.float32),
                "image_rows": numbers,
                "images": tokens_of,
                **({"rope_positions": case.arrays[f"{name}_position_ids"].T} if turned else {}),
            }
            per_patch = {
                "patches": np.concatenate([one.patches for one in mine]),
                "patch_places": np.concatenate([one.places for one in mine]),
                "patch_images": np.repeat(np.arange(len(mine)) + images + 1, counts * vision.merge**2),
            }
            for key, value in {**per_token, **per_patch}.items():
                arrays.setdefault(key, []).append(value)
            features, images = features + int(seen.sum()), images + len(mine)
        made.append({key: np.concatenate(parts) for key, parts in arrays.items()})
    longest = {"length": max(len(row["tokens"]) for row in made), "patches": max(len(row["patches"]) for row in made)}
    sizes = longest | lengths

    def padded(key: str, x: np.ndarray) -> np.ndarray:
        whole = sizes["patches" if key.startswith("patch") else "length"]
        dtype = x.dtype if x.dtype in (np.uint8, np.float32) else np.int32
        return np.pad(x, ((0, whole - len(x)), *([(0, 0)] * (x.ndim - 1)))).astype(dtype)

    return Batch(**{key: np.stack([padded(key, row[key]) for row in made]) for key in made[0]})
