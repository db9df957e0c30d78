"""Images of requests: calls of the tower, patches and features by content, and features at the tokens of prompts."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Float, Int, UInt8

from posttrain.batch import ImageFeatures
from posttrain.data.image_rows import ALIGNED, ImageCache, picture_features
from posttrain.data.prompt_images import PromptImage, PromptImages
from posttrain.data.tokenizer import Tokenizer
from posttrain.errors import ConfigError
from posttrain.mesh import by_rows
from posttrain.models.config import ModelConfig
from posttrain.models.decoder import Decoder
from posttrain.models.vision.tower import ImagePatches
from posttrain.rollout.paged import Pool
from posttrain.tree import pytree

Features = Mapping[bytes, ImageFeatures]
"""Features of images by digest."""

CALL_PATCHES = 4096
"""Patches of a row in one call of the tower, but for an image with more."""
MAX_DECODERS = 8
"""Threads that decode pictures."""


@pytree
class PromptFeatures:
    """Images of `PromptPieces`, whose features stand at their tokens; 0 at those of text."""

    features: Float[Array, "N T D"]
    deeper: Float[Array, "N K T D"] | None
    images: Int[Array, "N T"]
    """Number of each token's image in its sequence, from 1; 0: text."""
    rope_positions: Int[Array, "N T 3"] | None
    """See `Batch`."""


def encode(model: Decoder, pool: Pool, images: ImagePatches, *, mesh: Mesh | None) -> tuple[Pool, ImageFeatures]:
    """Run images through the tower; the pool stays as it is."""
    assert model.tower is not None
    return pool, model.tower.features(by_rows(images, mesh), model.compute)


class PromptCache:
    """Patches of images until they are encoded, then features, which other threads decode into a cache of so many
    bytes. For any thread."""

    def __init__(self, limit: int) -> None:
        self.kept = ImageCache(limit)
        self.hits = self.encoded = 0
        """Images that a call needed and found, and those that it had to encode, since `metrics`."""
        self._loading: dict[PromptImage, Future[None]] = {}
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(min(MAX_DECODERS, os.cpu_count() or 1), "images")

    def load(self, images: PromptImages) -> list[Future[None]]:
        """Decode the images whose digest is not known, each once, in other threads. The futures raise PictureError for
        those that cannot be."""
        with self._lock:
            for image in images.images:
                if not image.is_known and image not in self._loading:
                    self._loading[image] = self._threads.submit(self._load, image)
            return [self._loading[image] for image in images.images if image in self._loading]

    def load_all(self, images: Iterable[PromptImages | None]) -> None:
        """Wait until the digests of all images are known. PictureError for a picture that cannot be decoded."""
        for loading in [self.load(one) for one in images if one is not None]:
            for done in loading:
                done.result()

    def _load(self, image: PromptImage) -> None:
        try:
            patches = image.patches()
            if self.kept.get(image.digest) is None:
                self.kept.put(image.digest, patches)
        finally:
            with self._lock:
                self._loading.pop(image, None)

    def features(self, images: Iterable[PromptImage]) -> tuple[dict[bytes, ImageFeatures], list[PromptImage]]:
        """Features of those images that have them, and the others, each once."""
        found: dict[bytes, ImageFeatures] = {}
        missing: dict[bytes, PromptImage] = {}
        for image in images:
            features = self.kept.features(image.digest)
            if features is None:
                missing[image.digest] = image
            else:
                found[image.digest] = features
        self.hits, self.encoded = self.hits + len(found), self.encoded + len(missing)
        return found, list(missing.values())

    def patches(self, images: Sequence[PromptImage]) -> Iterator[UInt8[np.ndarray, "P C"]]:
        """Patches of each image, decoded again where they were forgotten."""

        def one(image: PromptImage) -> UInt8[np.ndarray, "P C"]:
            held = self.kept.get(image.digest)
            return held if isinstance(held, np.ndarray) else image.patches()

        return self._threads.map(one, images)

    def metrics(self) -> dict[str, float]:
        """Images that the tower encoded since the last call, and the share of those needed that were
        there already."""
        hits, encoded, self.hits, self.encoded = self.hits, self.encoded, 0, 0
        if not hits + encoded:
            return {}
        return {"rollout/images_encoded": float(encoded), "rollout/image_hit_rate": hits / (hits + encoded)}

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class Place(NamedTuple):
    """Place of an image's features in the results of a call."""

    image: PromptImage
    row: int
    start: int


class TowerCall(NamedTuple):
    inputs: ImagePatches
    places: list[Place]

    def results(self, found: ImageFeatures) -> Iterator[tuple[bytes, ImageFeatures]]:
        """Features of each image, from those of the call on the host."""
        for image, row, start in self.places:
            yield image.digest, picture_features(found, row, slice(start, start + image.num_tokens))


def tower_calls(cache: PromptCache, images: Sequence[PromptImage], rows: int) -> Iterator[TowerCall]:
    """Calls that encode the images, as many to one as fit beside `rows` rows, the largest first."""
    left = sorted(images, key=lambda image: -image.num_patches)
    while left:
        most, taken = max(CALL_PATCHES, left[0].num_patches), [0] * rows
        chosen: list[tuple[PromptImage, int]] = []
        rest = []
        for image in left:
            row = int(np.argmin(taken))
            if taken[row] + image.num_patches <= most:
                chosen.append((image, row))
                taken[row] += image.num_patches
            else:
                rest.append(image)
        yield _tower_call(cache, chosen, rows, max(taken))
        left = rest


def encoded(
    cache: PromptCache, images: Iterable[PromptImage], rows: int, run: Callable[[ImagePatches], ImageFeatures]
) -> Features:
    """Features of images by digest, which the cache has, or `run` makes of calls beside `rows` rows."""
    found, missing = cache.features(images)
    for call in tower_calls(cache, missing, rows):
        for digest, features in call.results(run(call.inputs)):
            found[digest] = features
            cache.kept.put(digest, features)
    return found


def patches_size(merge: int, count: int) -> int:
    """Smallest number of patches that a call is compiled for with room for `count` of them; `merge`: patches a side of
    a token."""
    aligned = math.lcm(merge**2, ALIGNED)
    return int(aligned * 2 ** math.ceil(math.log2(max(count, aligned) / aligned)))


def _tower_call(cache: PromptCache, chosen: Sequence[tuple[PromptImage, int]], rows: int, count: int) -> TowerCall:
    policy = chosen[0][0].policy
    block, size = policy.settings.merge**2, patches_size(policy.settings.merge, count)
    patches = np.zeros((rows, size, 3 * policy.settings.patch**2), np.uint8)
    numbers, positions = np.zeros((rows, size), np.int32), np.zeros((rows, size, 2), np.int32)
    taken, places = [0] * rows, []
    decoded = cache.patches([image for image, _ in chosen])
    for number, ((image, row), own) in enumerate(zip(chosen, decoded, strict=True), 1):
        at = slice(taken[row], taken[row] + image.num_patches)
        patches[row, at], numbers[row, at] = own, number
        positions[row, at] = policy.places(image.grid)
        places.append(Place(image, row, taken[row] // block))
        taken[row] = at.stop
    arrays = {"patches": patches, "patch_images": numbers, "patch_places": positions}
    return TowerCall(ImagePatches(**jax.device_put(arrays)), places)


@dataclass(frozen=True)
class PicturedPiece:
    """Piece of a prompt with images, in which some of its tokens are."""

    images: PromptImages
    start: int
    end: int

    @classmethod
    def of(cls, images: PromptImages | None, start: int, end: int) -> PicturedPiece | None:
        """Piece with tokens of images, or behind some that its positions depend on; None for others."""
        if images is None:
            return None
        found = cls(images, start, end)
        return found if images.turns_by_axes or found.needed else None

    @property
    def needed(self) -> list[PromptImage]:
        """Images of its tokens."""
        numbers = np.unique(self.images.numbers[self.start : self.end])
        return [self.images.images[number - 1] for number in numbers if number]


def prompt_features(
    model: Decoder,
    shape: tuple[int, int],
    pieces: Mapping[int, PicturedPiece],
    found: Features,
) -> PromptFeatures:
    """Features at the tokens of a call's pieces, by row of its shape."""
    config, dtype = model.config, model.compute.dtype
    assert config.vision is not None
    levels, width = config.deepstack, config.vision.embed_dim
    features, images = np.zeros((*shape, width), dtype), np.zeros(shape, np.int32)
    deeper = np.zeros((shape[0], levels, shape[1], width), dtype) if levels else None
    rope = np.zeros((*shape, 3), np.int32) if config.turns_by_axes else None
    for row, piece in pieces.items():
        numbers = piece.images.numbers[piece.start : piece.end]
        offsets = piece.images.offsets[piece.start : piece.end]
        images[row, : len(numbers)] = numbers
        for number in np.unique(numbers[numbers > 0]):
            there = np.flatnonzero(numbers == number)
            encoded = found[piece.images.images[number - 1].digest]
            features[row, there] = encoded.features[offsets[there]]
            if deeper is not None and encoded.deeper is not None:
                deeper[row][:, there] = encoded.deeper[:, offsets[there]]
        if rope is not None:
            rope[row, : piece.end - piece.start] = piece.images.rope_positions(piece.start, piece.end)
    arrays = {"features": features, "deeper": deeper, "images": images, "rope_positions": rope}
    return PromptFeatures(**jax.device_put(arrays))


def check_images(
    config: ModelConfig, prompt: Sequence[int], images: PromptImages, *, drafts: bool
) -> Sequence[tuple[int, int]]:
    """Places of images that must be read at once. ConfigError or ValueError for images that the model cannot read.
    `drafts`: it samples with a draft model."""
    vision = config.vision
    if vision is None:
        raise ConfigError(
            "generate: the prompt has pictures, and the model is loaded without its vision tower; load it with "
            "vision=frozen"
        )
    if drafts:
        raise ConfigError(
            "generate: the prompt has pictures, which a draft model does not see; use drafts by lookup (ngram), or none"
        )
    images.check(len(prompt), vision.model_type, vision.patch_size, vision.merge)
    return images.spans if config.sees_ahead else ()


def image_options(config: ModelConfig, tokenizer: Tokenizer | None, cache_mib: int) -> dict[str, Any]:
    """Size of the cache of images, and tokens of images, which no sample has: behind one a model would look for a
    picture. ConfigError for a model with a tower and no tokenizer that knows them."""
    if config.vision is None:
        return {}
    if tokenizer is None:
        raise ConfigError(
            "model.vision: the engine of a model with a tower needs its tokenizer, which knows the tokens of images"
        )
    return {"image_bytes": cache_mib * 2**20, "forbidden": tokenizer.unsampled_ids}


def without(logits: Float[Array, "R V"], forbidden: tuple[int, ...]) -> Float[Array, "R V"]:
    """Logits of the tokens that are not forbidden, -inf elsewhere."""
    gone = np.zeros((1, logits.shape[1]), bool)
    gone[:, list(forbidden)] = True
    return jnp.where(gone, -jnp.inf, logits)
