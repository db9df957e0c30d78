"""Pictures of a token sequence that is sampled from: their tokens, patches, digests and positions."""

from __future__ import annotations

import hashlib
import io
import itertools
from array import array
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Int, UInt8

from posttrain.data.images import Grid, ImagePolicy
from posttrain.data.pictures import Picture, PictureError

DIGEST_BYTES = 16
KEYS = 2**62
"""Number of different keys of image tokens."""


@dataclass(frozen=True, eq=False)
class PromptImage:
    """Picture as a model reads it; its file or its bytes are decoded whenever its patches are asked for."""

    policy: ImagePolicy
    picture: Picture
    grid: Grid

    @classmethod
    def of(cls, picture: Picture, policy: ImagePolicy) -> PromptImage:
        """Image of a picture, whose header is read. PictureError for one that cannot be read or resized."""
        return cls(policy, picture, policy.grid_of(picture))

    @classmethod
    def known(cls, picture: Picture, policy: ImagePolicy, digest: bytes) -> PromptImage:
        """Image of a picture whose digest is known: another one is a PictureError when it is decoded."""
        image = cls.of(picture, policy)
        vars(image)["digest"] = digest
        return image

    @property
    def num_tokens(self) -> int:
        """Number of tokens with a feature of the image."""
        return self.grid.rows * self.grid.columns

    @property
    def num_patches(self) -> int:
        return self.policy.num_patches(self.grid)

    def patches(self) -> UInt8[np.ndarray, "P C"]:
        """Decode the patches, see `ImagePolicy.patches`. PictureError for a picture that is no longer the same."""
        image = self.picture.pixels()
        if self.policy.grid(image.size) != self.grid:
            raise PictureError(f"{self.picture.name} has another size than before; restore its file")
        patches = self.policy.patches(image)
        settings = self.policy.model_type, self.grid, self.policy.settings, self.policy.family.resample
        new = hashlib.blake2b(repr(settings).encode(), digest_size=DIGEST_BYTES)
        new.update(patches.tobytes())
        if vars(self).setdefault("digest", new.digest()) != new.digest():
            raise PictureError(f"{self.picture.name} has other pixels than before; restore its file")
        return patches

    def png(self) -> bytes:
        """Picture as the model sees it, resized, as a PNG file."""
        image, file = self.picture.pixels(), io.BytesIO()
        image.resize(self.policy.resized(image.size), self.policy.family.resample).save(file, "PNG")
        return file.getvalue()

    @property
    def is_known(self) -> bool:
        """True once it was decoded, so that `digest` is at hand."""
        return "digest" in vars(self)

    @cached_property
    def digest(self) -> bytes:
        """Digest of the resized pixels and of the processor's settings."""
        self.patches()
        known: bytes = vars(self)["digest"]
        return known


@dataclass(frozen=True, eq=False)
class PromptImages:
    """Pictures of a token sequence, in the order of their tokens; at least one."""

    images: tuple[PromptImage, ...]
    numbers: Int[np.ndarray, " T"]
    """Number of the image whose feature stands at each token, from 1; 0: text, as are all tokens beyond."""

    @classmethod
    def of(cls, images: Sequence[PromptImage], numbers: Sequence[int] | Int[np.ndarray, " T"]) -> PromptImages | None:
        """Pictures of a sequence; None without one."""
        return cls(tuple(images), np.asarray(numbers, np.int32)) if images else None

    @property
    def policy(self) -> ImagePolicy:
        return self.images[0].policy

    @property
    def grids(self) -> tuple[Grid, ...]:
        """Rows and columns of tokens of each image."""
        return tuple(image.grid for image in self.images)

    @property
    def digests(self) -> tuple[bytes, ...]:
        """Digest of each image; decodes those whose digest is not known yet."""
        return tuple(image.digest for image in self.images)

    def extended(self, num_tokens: int, later: PromptImages) -> PromptImages:
        """Pictures of a sequence that goes on: its first `num_tokens` tokens with these, then tokens with `later`."""
        after = np.where(later.numbers > 0, later.numbers + len(self.images), 0)
        return PromptImages((*self.images, *later.images), np.concatenate([self.padded(num_tokens), after]))

    def after(self, num_tokens: int) -> PromptImages:
        """Pictures of a sequence that begins with so many tokens of text before these."""
        return PromptImages(self.images, np.pad(self.numbers, (num_tokens, 0)))

    def cut(self, num_tokens: int) -> PromptImages | None:
        """Pictures of the first `num_tokens` tokens; None without one. ValueError for an end within one."""
        numbers = self.numbers[:num_tokens]
        count = int(numbers.max(initial=0))
        if count in self.numbers[num_tokens:] and count:
            raise ValueError(f"images: the first {num_tokens} tokens end within image {count}")
        return PromptImages.of(self.images[:count], numbers)

    def padded(self, num_tokens: int) -> Int[np.ndarray, " T"]:
        """`numbers` of so many tokens. ValueError if there are more image tokens."""
        if self.numbers[num_tokens:].any():
            raise ValueError(f"images: the sequence has {num_tokens} tokens, and some of an image are beyond")
        return np.pad(self.numbers[:num_tokens], (0, max(0, num_tokens - len(self.numbers))))

    @cached_property
    def offsets(self) -> Int[np.ndarray, " T"]:
        """Number of each token's feature among those of its image, from 0; 0: also text. ValueError for an image with
        more or fewer tokens than features, or out of order."""
        counts = [image.num_tokens for image in self.images]
        expected = np.repeat(np.arange(1, len(counts) + 1), counts)
        if not np.array_equal(self.numbers[self.numbers > 0], expected):
            raise ValueError(
                f"images: the sequence has {int((self.numbers > 0).sum())} image tokens for {len(counts)} images of "
                f"{counts} tokens; they must be as many, and in order"
            )
        offsets = np.zeros(len(self.numbers), np.int32)
        offsets[self.numbers > 0] = np.concatenate([np.arange(count) for count in counts])
        return offsets

    def texts(self, tokens: Sequence[int]) -> list[int]:
        """Tokens of text among these."""
        return np.asarray(tokens, np.int64)[self.padded(len(tokens)) == 0].tolist()

    def check(self, num_tokens: int, model_type: str, patch: int, merge: int) -> None:
        """ValueError for images that a prompt of so many tokens cannot have, or a model of these sizes cannot read."""
        settings = self.policy.settings
        if (self.policy.model_type, settings.patch, settings.merge) != (model_type, patch, merge):
            raise ValueError(
                f"images: made for {self.policy.model_type} with patches of {settings.patch} pixels; the model is "
                f"{model_type} with patches of {patch}; use its own tokenizer"
            )
        numbers = self.padded(num_tokens)
        if numbers[-1]:
            raise ValueError("images: the prompt ends in a picture; text must follow, such as the beginning of a turn")
        assert self.offsets.shape == self.numbers.shape

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Place of the first token of each image, and that after its last."""
        places = [np.flatnonzero(self.numbers == number) for number in range(1, len(self.images) + 1)]
        return tuple((int(at[0]), int(at[-1]) + 1) for at in places)

    @property
    def runs(self) -> list[list[int]]:
        """Runs of tokens of one image: start, stop and number."""
        edges = np.flatnonzero(np.diff(self.numbers, prepend=0, append=0)).tolist()
        runs = [[start, stop, int(self.numbers[start])] for start, stop in itertools.pairwise(edges)]
        return [run for run in runs if run[2]]

    @property
    def turns_by_axes(self) -> bool:
        """True for multimodal RoPE."""
        return self.policy.family.axes

    @cached_property
    def _rope(self) -> Int[np.ndarray, "T 3"]:
        rope = self.policy.rope_positions(self.numbers, self.grids)
        assert rope is not None, "the family turns by plain positions"
        return rope

    @cached_property
    def rope_delta(self) -> int:
        """Number added to the position of a token behind the images for multimodal RoPE; 0 in other families."""
        return int(self._rope.max()) + 1 - len(self.numbers) if self.turns_by_axes else 0

    def rope_positions(self, start: int, end: int) -> Int[np.ndarray, "T 3"]:
        """Multimodal RoPE of the tokens from `start` to `end`, of text behind the images too."""
        plain = np.arange(max(start, len(self.numbers)), end, dtype=np.int32)[:, None] + self.rope_delta
        return np.concatenate([self._rope[start:end], np.broadcast_to(plain, (len(plain), 3))])

    def keys(self, tokens: Sequence[int]) -> MutableSequence[int]:
        """Keys of tokens in a prefix cache: those of text are their ids, those of an image its content and the place
        within it, negative."""
        keys = np.asarray(tokens, np.int64).copy()
        there = np.flatnonzero(self.padded(len(keys)) > 0)
        bases = np.asarray([int.from_bytes(digest[:8], "little") % KEYS for digest in self.digests], np.int64)
        keys[there] = -1 - bases[self.numbers[there] - 1] - self.offsets[there]
        return array("q", keys.tolist())
