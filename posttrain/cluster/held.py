"""Weights between uses: on the devices, or in the host's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
from jax.sharding import Sharding

from posttrain.cluster.transfer import in_host_memory
from posttrain.weights.state import Weights


class HeldWeights:
    """Weights that lie on the devices or, with `offload`, in the host's memory until they are used.

    `read` and `write`: access to where they are kept.
    """

    def __init__(self, read: Callable[[], Weights], write: Callable[[Weights], None], *, offload: bool):
        self._read, self._write, self._offload = read, write, offload
        self._places: dict[str, Sharding] = {}
        if offload:
            self._places = {path: w.sharding for path, w in read().items()}
            self.store(read())

    @classmethod
    def of(cls, weights: Weights, *, offload: bool) -> HeldWeights:
        """Weights that nothing else keeps."""
        kept = dict(weights)
        return cls(lambda: dict(kept), kept.update, offload=offload)

    @property
    def weights(self) -> Weights:
        """Weights where they lie between uses."""
        return self._read()

    def store(self, weights: Weights) -> None:
        """Hold these weights from now on, of the same layout."""
        if self._offload:
            weights = jax.device_put(weights, {path: in_host_memory(self._places[path]) for path in weights})
        self._write(weights)

    @contextmanager
    def on_devices(self) -> Iterator[Weights]:
        """Weights on the devices, for the duration of a use."""
        yield jax.device_put(self._read(), self._places) if self._offload else self._read()

    def change(self, function: Callable[[Weights], Weights]) -> None:
        """Replace the weights by a function of them on the devices."""
        with self.on_devices() as weights:
            self.store(function(weights))
