"""Rows of the experts of a device, sorted by expert: all at once, or as many rounds as a bounded buffer takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

SLACK = 1.25
"""Rows of a device's buffer per row of a device if the router uses all experts alike."""

TILE = 512
"""A buffer is a multiple of this many rows, the largest row tile of the grouped products."""


class Rows(NamedTuple):
    """One row per selected expert of a token, sorted by expert; an assignment i is the choice i % k of token i // k."""

    assignment: Int[Array, " C"]
    expert: Int[Array, " C"]
    """Local number; the number of local experts for rows that are not used."""
    sizes: Int[Array, " E"]
    """Rows of each expert."""

    @property
    def used(self) -> Bool[Array, " C"]:
        return self.expert < self.sizes.shape[0]


class Sorted(NamedTuple):
    """Assignments of one or several devices, each sorted by expert."""

    order: Int[Array, "S A"]
    """Assignments of each source in the order of their experts, numbered through all sources."""
    counts: Int[Array, "S E"]
    """Assignments of each source to each expert of the model."""

    @classmethod
    def of(cls, experts: Int[Array, "N k"], num_experts: int) -> Sorted:
        """Sort the assignments of one device; numbers outside of 0 <= e < num_experts are of no expert."""
        numbers = experts.reshape(-1)
        numbers = jnp.where((numbers >= 0) & (numbers < num_experts), numbers, num_experts)
        counts = jnp.sum(numbers[:, None] == jnp.arange(num_experts)[None], axis=0, dtype=jnp.int32)
        return cls(jnp.argsort(numbers, stable=True)[None].astype(jnp.int32), counts[None])

    def gathered(self, axis: str) -> Sorted:
        """Those of all devices along a mesh axis, inside `jax.shard_map`."""
        first = jax.lax.axis_index(axis) * self.order.shape[1]
        return Sorted(*(jax.lax.all_gather(x, axis, tiled=True) for x in (self.order + first, self.counts)))

    def total(self, first: int | Array, num_here: int) -> Int[Array, ""]:
        """Rows of the `num_here` experts from `first`."""
        return jnp.sum(jax.lax.dynamic_slice_in_dim(self.counts, first, num_here, axis=1))

    def rows(self, first: int | Array, num_here: int, start: int | Array, capacity: int) -> Rows:
        """Rows `start` to `start + capacity` of the `num_here` experts from `first`, by expert and then by source."""
        sources = self.order.shape[0]
        before = jnp.cumsum(self.counts, axis=1) - self.counts
        counts, before = (
            jax.lax.dynamic_slice_in_dim(x, first, num_here, axis=1).T.reshape(-1) for x in (self.counts, before)
        )
        ends = jnp.cumsum(counts)
        row = start + jnp.arange(capacity)
        run = jnp.searchsorted(ends, row, side="right", method="compare_all")
        # Where the run of a source and an expert lies in `order`, relative to its rows.
        shift = jnp.tile(jnp.arange(sources) * self.order.shape[1], num_here) + before - (ends - counts)
        place = row + shift.at[run].get(mode="fill", fill_value=0)
        assignment = self.order.reshape(-1).at[place].get(mode="clip")
        per_expert = jnp.clip(ends[sources - 1 :: sources] - start, 0, capacity)
        return Rows(assignment, run // sources, jnp.diff(per_expert, prepend=0).astype(jnp.int32))


def capacity(assignments: int, sources: int) -> int:
    """Rows of the buffer of a device for the `assignments` of all `sources`."""
    wanted = -(-int(assignments * SLACK) // sources)
    return min(assignments, -(-wanted // TILE) * TILE)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def summed_over_rounds(
    function: Callable[[Array, Any, Any], Float[Array, "N D"]], rounds: Int[Array, ""], values: Any, numbers: Any
) -> Float[Array, "N D"]:
    """Sum of function(round, values, numbers) over rounds, at least one, known at run time; differentiated by `values`.

    The first round keeps what its backward pass needs, the others, which are rare, compute it again.
    """
    return _further(function, rounds, values, numbers, function(jnp.int32(0), values, numbers))


def _further(
    function: Callable[[Array, Any, Any], Array], rounds: Array, values: Any, numbers: Any, first: Array
) -> Array:
    def body(state: tuple[Array, Array]) -> tuple[Array, Array]:
        number, total = state
        return number + 1, total + function(number, values, numbers)

    total: Array = jax.lax.while_loop(lambda state: state[0] < rounds, body, (jnp.int32(1), first))[1]
    return total


def _forward(
    function: Callable[[Array, Any, Any], Array], rounds: Array, values: Any, numbers: Any
) -> tuple[Array, tuple[Any, ...]]:
    first, pull = jax.vjp(lambda values: function(jnp.int32(0), values, numbers), values)
    return _further(function, rounds, values, numbers, first), (pull, rounds, values, numbers)


def _backward(
    function: Callable[[Array, Any, Any], Array], saved: tuple[Any, ...], d_out: Array
) -> tuple[None, Any, None]:
    pull, rounds, values, numbers = saved

    def body(state: tuple[Array, Any]) -> tuple[Array, Any]:
        number, total = state
        (more,) = jax.vjp(lambda values: function(number, values, numbers), values)[1](d_out)
        return number + 1, jax.tree.map(jnp.add, total, more)

    first = (jnp.int32(1), pull(d_out)[0])
    return None, jax.lax.while_loop(lambda state: state[0] < rounds, body, first)[1], None


summed_over_rounds.defvjp(_forward, _backward)
