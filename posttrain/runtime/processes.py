"""Processes of one run: which one this is, what they agree on, and arrays over the devices of all of them; Pathways,
where one process controls the devices of all hosts through the package `pathwaysutils`."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import time
from collections.abc import Callable
from itertools import count as counter
from typing import Any, TypeVar

import jax
import numpy as np
from jax import Array
from jax._src import distributed
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from posttrain.errors import LOST, ConfigError, OutsideError, outside_error

# Every process runs the same program on the same host data. The first one alone writes files and prints; what depends
# on files, signals or time is decided by it, or by all together, since a program that one of them does not run hangs.

T = TypeVar("T")

WAIT_S = 3600
"""Longest wait for another process: longer than any step, evaluation or download that one has before another."""

_calls = counter()
_waited_s = 0.0


class SameEverywhere(Exception):
    """Exception that every process raises at the same place, so that none waits for another."""


def count() -> int:
    """Number of processes of the run."""
    return distributed.global_state.num_processes


def index() -> int:
    """Number of this process, from 0."""
    return distributed.global_state.process_id


def writes() -> bool:
    """Tell whether this process writes the run's files and prints: the first one does."""
    return index() == 0


def peer() -> str | None:
    """Name of a process that is not this one; None: there is no other."""
    if count() < 3:
        return f"process {1 - index()} of 2" if count() == 2 else None
    return f"another of the {count()} processes"


def is_lost(error: BaseException | None) -> bool:
    """Tell whether an error comes from another process that is gone, for which nothing may wait then."""
    found = None if error is None or count() == 1 else outside_error(error, peer())
    return found is not None and found.code == LOST


def store() -> Any:
    """Key-value store of the processes; only where there are several."""
    client = distributed.global_state.client
    assert client is not None, "a single process has no store"
    return client


def agreed(make: Callable[[], T]) -> T:
    """Value of the first process, for all of them: what it alone decides. `make` returns JSON; others do not call it.

    All processes must call it in the same order. OutsideError where the first one takes longer than `WAIT_S`.
    """
    if count() == 1:
        return make()
    key = f"posttrain/agreed/{next(_calls)}"
    if writes():
        value = make()
        store().key_value_set(key, json.dumps(value))
        return value
    decided: T = json.loads(_value(key))
    return decided


def wait_for_all(what: str) -> None:
    """Wait until every process is here: files that the first one wrote before are there for the others."""
    if count() > 1:
        _waiting(lambda: store().wait_at_barrier(f"posttrain/{next(_calls)}/{what}", WAIT_S * 1000))


def check_same(what: str, value: str) -> None:
    """ConfigError in a process whose value is not that of the first one."""
    if agreed(lambda: value) != value:
        raise ConfigError(f"{what}: process {index()} has another than process 0; give all of them the same")


def any_of(flag: bool) -> bool:
    """Tell whether the flag is set in any process."""
    if count() == 1:
        return flag
    key = f"posttrain/any/{next(_calls)}"
    store().key_value_set(f"{key}/{index()}", json.dumps(flag))
    return agreed(lambda: any(json.loads(_value(f"{key}/{number}")) for number in range(count())))


def all_gathered(value: T) -> list[T]:
    """Values of all processes, in their order, as pickles over the devices' network; all must call it."""
    if count() == 1:
        return [value]
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    key = f"posttrain/sizes/{next(_calls)}"
    store().key_value_set(f"{key}/{index()}", str(len(data)))
    # Processes may arrive at very different times, and a collective operation of CPU processes waits shortly.
    sizes = [int(_value(f"{key}/{number}")) for number in range(count())]
    wait_for_all(key)
    # Few sizes: each is another program.
    padded = np.zeros(1 << (max(sizes) - 1).bit_length(), np.uint8)
    padded[: len(data)] = data
    found = np.asarray(multihost_utils.process_allgather(padded))
    return [pickle.loads(found[number, :size].tobytes()) for number, size in enumerate(sizes)]


class Votes:
    """Requests of any process, numbers from 0, of which all see the largest after the same step without waiting: one
    step after it was made."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._most = jax.jit(lambda wishes: wishes.max(), out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._before: Array | None = None

    def __call__(self, asked: int) -> int:
        """Largest request of the call before; with a single process, of this one."""
        if count() == 1:
            return asked
        before, places = self._before, NamedSharding(self._mesh, PartitionSpec(self._mesh.axis_names))
        asked_of_each = np.full(self._mesh.size, asked, np.int32)
        self._before = self._most(
            jax.make_array_from_callback(asked_of_each.shape, places, lambda at: asked_of_each[at])
        )
        return 0 if before is None else int(before)


def on_devices(tree: Any, shardings: Any) -> Any:
    """Host arrays, the same in every process, as arrays over the devices of all. `shardings`: one, or a tree of them.

    Each process transfers only what its own devices hold.
    """
    if count() == 1:
        return jax.device_put(tree, shardings)
    if isinstance(shardings, Sharding):
        return jax.tree.map(lambda x: _on_devices(np.asarray(x), shardings), tree)
    return jax.tree.map(lambda x, sharding: _on_devices(np.asarray(x), sharding), tree, shardings)


def _on_devices(values: np.ndarray, sharding: Sharding) -> Array:
    return jax.make_array_from_callback(values.shape, sharding, lambda at: values[at])


def on_host(tree: Any) -> Any:
    """Host copies of whole arrays, in every process; all must call it, since it gathers what they do not hold."""
    return jax.device_get(tree) if count() == 1 else jax.tree.map(_on_host, tree)


def _on_host(array: Any) -> np.ndarray:
    if isinstance(array, Array) and not (array.is_fully_addressable or array.is_fully_replicated):
        gathered: np.ndarray = multihost_utils.process_allgather(array, tiled=True)
        return gathered
    return np.asarray(array)


def _value(key: str) -> str:
    return _waiting(lambda: str(store().blocking_key_value_get(key, WAIT_S * 1000)))


def waited_s() -> float:
    """Seconds in which this process has waited for another so far, outside of the devices' programs."""
    return _waited_s


def _waiting(wait: Callable[[], T]) -> T:
    global _waited_s
    begun = time.perf_counter()
    try:
        return wait()
    except jax.errors.JaxRuntimeError as error:
        raise OutsideError(f"{peer()} has vanished ({str(error).splitlines()[0][:200]})", LOST) from error
    finally:
        _waited_s += time.perf_counter() - begun


def _through_pathways() -> bool:
    """Tell whether JAX reaches its devices through the proxy of Pathways."""
    return "proxy" in os.environ.get("JAX_PLATFORMS", "").split(",")


def initialize_pathways() -> None:
    """Register the proxy with JAX, before it is used; no effect elsewhere. ConfigError without `pathwaysutils`."""
    if _through_pathways():
        _pathways("pathwaysutils").initialize()


def copied(tree: Any, shardings: Any) -> Any:
    """Copies of arrays where `shardings` say, also on other devices. Under Pathways they go from device to device, and
    a plan serves for all transfers of one kind; never by way of the controller."""
    if _through_pathways():
        found = _pathways("pathwaysutils.experimental.reshard")
        return found.reshard(tree, shardings, may_alias=False, cache_resharding_plans=True)
    return jax.device_put(tree, shardings, may_alias=False)


def _pathways(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError("JAX_PLATFORMS=proxy needs the package pathwaysutils; install it in the image") from error
