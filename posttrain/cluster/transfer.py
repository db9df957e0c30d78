"""Transfer of weights between meshes and memories; weights between uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import jax
from jax.sharding import Mesh, Sharding

from posttrain.mesh import param_sharding
from posttrain.models.decoder import Decoder
from posttrain.runtime import processes
from posttrain.weights.state import ModelWeights, Weights

BYTES_AT_ONCE = 1 << 30
"""Bytes under way at once."""


def shardings_on(mesh: Mesh, weights: ModelWeights) -> dict[str, Sharding]:
    """Sharding of every parameter on a mesh. ConfigError if an axis does not divide its dimension."""
    return {path: param_sharding(mesh, path, dims, shape) for path, dims, shape in weights.shapes()}


def moved(arrays: Weights, to: Mapping[str, Sharding], *, bytes_at_once: int = BYTES_AT_ONCE) -> Weights:
    """Copy each array to where `to` says; an array that lies there is copied as well, never shared.

    At most `bytes_at_once`, or one array that is larger, are under way.
    """
    done: Weights = {}
    for piece in _pieces(arrays, bytes_at_once):
        done |= jax.block_until_ready(processes.copied(piece, {path: to[path] for path in piece}))
    return done


def _pieces(arrays: Weights, bytes_at_once: int) -> Iterator[Weights]:
    piece: Weights = {}
    size = 0
    for path, array in arrays.items():
        if piece and size + array.nbytes > bytes_at_once:
            yield piece
            piece, size = {}, 0
        piece[path] = array
        size += array.nbytes
    if piece:
        yield piece


def model_on(model: Decoder, mesh: Mesh, *, bytes_at_once: int = BYTES_AT_ONCE) -> Decoder:
    """Copy of a model on another mesh."""
    weights = ModelWeights(model)
    copy = weights.bind(moved(weights.read(), shardings_on(mesh, weights), bytes_at_once=bytes_at_once))
    copy.compute = replace(model.compute, mesh=mesh)
    return copy


def in_host_memory(sharding: Sharding) -> Sharding:
    """Same sharding, in the memory of the devices' hosts."""
    return sharding.with_memory_kind("pinned_host")


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
