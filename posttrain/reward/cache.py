"""Cache of a reward function's values by the arguments that it reads, in memory."""

from __future__ import annotations

import hashlib
import pickle
from collections import OrderedDict

from posttrain.errors import ConfigError
from posttrain.reward.conventions import Convention
from posttrain.reward.function import Keywords
from posttrain.rollout.trajectory import Trajectory

MAX_ENTRIES = 1 << 17
"""Maximum number of values kept; the least recently used go first."""
UNCACHED = ("trajectories", "trainer_state", "log_metric", "log_extra")
"""Arguments that differ between equal samples, or whose effect a cached value would lack."""

Key = bytes


class RewardCache:
    """Values of one function, whose other settings do not change. Failures are not kept."""

    def __init__(self, keywords: Keywords, name: str):
        read = keywords.names
        uncached = [argument for argument in UNCACHED if read is None or argument in read]
        if uncached and keywords.convention is Convention.LISTS:
            reason = "reads all its keywords (**)" if read is None else f"takes {uncached[0]}"
            raise ConfigError(
                f"rewards: cache: {name} {reason}; name only arguments that determine the value, or remove cache"
            )
        self._keywords = keywords
        self._values: OrderedDict[Key, float] = OrderedDict()

    def key(self, sample: Trajectory) -> Key:
        """Digest of the arguments of one sample."""
        return hashlib.blake2b(pickle.dumps(self._keywords([sample], step=0)), digest_size=16).digest()

    def get(self, key: Key) -> float | None:
        """Value of an earlier sample with the same arguments."""
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def put(self, key: Key, value: float) -> None:
        """Keep a value; the least recently used one goes if there are too many."""
        self._values[key] = value
        if len(self._values) > MAX_ENTRIES:
            self._values.popitem(last=False)
