"""What goes into a rollout engine and what comes out; engines are told apart by nothing else."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

StopReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one completion is drawn. ValueError for a value outside its range."""

    max_tokens: int
    temperature: float
    """0: greedy."""
    top_k: int = 0
    """0: off."""
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    """Strings that end the sample: its last token is the one that completes a string, and may hold text beyond it."""
    stop_token_ids: tuple[int, ...]
    key: tuple[int, int]
    """Two uint32 words, see `sample_key`. The token at position p is drawn with fold_in(key, p) and nothing else."""

    def __post_init__(self) -> None:
        rules = {
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "temperature": (math.isfinite(self.temperature) and self.temperature >= 0, "finite and not negative"),
            "top_k": (self.top_k >= 0, "0 (off) or positive"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p < 1, "at least 0 and below 1"),
            "stop": (all(self.stop), "strings that are not empty"),
            "stop_token_ids": (all(token >= 0 for token in self.stop_token_ids), "token ids, not negative"),
            "key": (all(0 <= word < 2**32 for word in self.key), "two words of 32 bits"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise ValueError(f"sampling.{name}={getattr(self, name)!r}: must be {rule}")


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What was sampled after a prompt: one entry per token in every field but `stop` and `experts`."""

    tokens: tuple[int, ...]
    """The stop token included, where the sample ended by one."""
    logps: tuple[float, ...]
    """float32: of the temperature-scaled distribution before truncation; at temperature 0 of the unscaled one."""
    kept_logps: tuple[float, ...]
    """Log of the probability mass that top-k, top-p and min-p kept; 0 without truncation."""
    stop: StopReason
    weights_versions: tuple[int, ...]
    experts: Int[np.ndarray, "T M k"] | None = None
    """Of an engine that records them, the experts that each token of prompt and sample went to in each mixture; -1 for
    the last token, which the model has not read."""


@runtime_checkable
class RolloutEngine(Protocol):
    async def generate(self, prompt: Sequence[int], params: SamplingParams) -> Completion: ...

    def update_weights(self, model: Any, version: int) -> None: ...

    def close(self) -> None: ...


def sample_key(seed: int, step: int, prompt: int, sample: int) -> tuple[int, int]:
    """The random key of one sample: 64 bits of BLAKE2b over four 64-bit integers, the same on every platform.

    >>> sample_key(0, 0, 0, 0) != sample_key(0, 0, 0, 1)
    True
    """
    digest = hashlib.blake2b(struct.pack("<4q", seed, step, prompt, sample), digest_size=8).digest()
    first, second = struct.unpack("<2I", digest)
    return first, second
