"""Layout of logits: chunks of the contexts that predict, and the vocabulary split over devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, Float, Int, Shaped

from posttrain.batch import HostArray
from posttrain.kernels.logits.softmax import NO_LOGIT
from posttrain.kernels.platform import platform_of, traced_for
from posttrain.mesh import row_axes

# Logits of a chunk are split over V, so that collectives carry tokens and sums, never the head: chunks of hidden states
# are gathered over `VOCAB_AXES`, and their gradients are reduce-scattered back to the rows.

STORAGE_AXES = ("tensor", "fsdp", "context")
"""Mesh axes that split the stored head: over them it is resharded by an all-to-all."""

VOCAB_AXES = (*STORAGE_AXES, "expert")
"""Mesh axes that split V in a loss."""

GROUP_AXIS = "fsdp_group"
"""Axis of groups of `fsdp`, in the mesh that a loss has of its own where they are too many to share one vocabulary."""

MAX_PARTS = 16
"""Maximum parts of V over `fsdp`. Every device gathers the hidden states of its group, 8 MiB of a device's 4,096 tokens
of 1,024 numbers, and of the head the part that its group stores elsewhere, V / 16 of 297 MiB: more parts send more."""


class VocabSharding(NamedTuple):
    """Layout of a loss over the vocabulary on a mesh; without one, or on one device, arrays stay as they are."""

    mesh: Mesh | None

    @classmethod
    def of(cls, mesh: Mesh | None) -> VocabSharding:
        """Layout on the devices of `mesh`, of which at most `MAX_PARTS` of `fsdp` share one vocabulary."""
        return cls(None if mesh is None else grouped_mesh(mesh))

    @property
    def splits(self) -> bool:
        return self.mesh is not None and self.mesh.size > 1

    @property
    def axes(self) -> tuple[str, ...]:
        return () if self.mesh is None else tuple(axis for axis in VOCAB_AXES if axis in self.mesh.axis_names)

    @property
    def shards(self) -> int:
        """Number of parts of the vocabulary."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def row_axes(self) -> tuple[str, ...]:
        """Axes of the rows of a batch."""
        axes = row_axes(self.mesh)
        if self.mesh is None or GROUP_AXIS not in self.mesh.axis_names:
            return axes
        at = axes.index("fsdp")
        return (*axes[:at], GROUP_AXIS, *axes[at:])

    @property
    def group_axes(self) -> tuple[str, ...]:
        """Row axes over which no vocabulary is split; they come first in the order of the rows."""
        return tuple(axis for axis in self.row_axes if axis not in VOCAB_AXES)

    @property
    def groups(self) -> int:
        """Number of groups of rows that share all parts of the vocabulary."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[axis] for axis in self.group_axes)

    def rows(self, x: Shaped[Array, "B ..."]) -> Shaped[Array, "B ..."]:
        """Rows as those of a batch: over all row axes."""
        return self._constrained(x, self.row_axes)

    def gathered(self, x: Shaped[Array, "B ..."]) -> Shaped[Array, "B ..."]:
        """Rows of a group on all of its devices."""
        # Without the first constraint a whole row would be gathered for a slice of it.
        return self._constrained(self.rows(x), self.group_axes)

    def split(self, logits: Float[Array, "B C V"]) -> Float[Array, "B C V"]:
        return self._constrained(logits, self.group_axes, None, self.axes)

    def resharded(self, x: Array, vocab_dim: int | None) -> Array:
        """A stored parameter with V split: in whole parts and one step after the other, or XLA would replicate it."""
        if not self.splits or vocab_dim is None:
            return self.parameter(x, vocab_dim)
        missing = -x.shape[vocab_dim] % self.shards
        padded = jnp.pad(x, [(0, missing if dim == vocab_dim else 0) for dim in range(x.ndim)])
        stored = tuple(axis for axis in self.axes if axis in STORAGE_AXES)
        spec: list[Any] = [stored if dim == vocab_dim else None for dim in range(x.ndim)]
        if self.mesh is not None and GROUP_AXIS in self.mesh.axis_names:
            # Storage splits another dimension over all of `fsdp`: it is gathered from the groups after the exchange.
            groups = self.mesh.shape[GROUP_AXIS]
            other = (dim for dim, size in enumerate(x.shape) if dim != vocab_dim and size % groups == 0)
            if (dim := next(other, None)) is not None:
                padded = self._constrained(padded, *(GROUP_AXIS if n == dim else one for n, one in enumerate(spec)))
        padded = self._constrained(padded, *spec)
        whole = jax.lax.slice_in_dim(self.parameter(padded, vocab_dim), 0, x.shape[vocab_dim], axis=vocab_dim)
        return self.parameter(whole, vocab_dim)

    def parameter(self, x: Array, vocab_dim: int | None) -> Array:
        """A parameter of the head, or its gradient, with V split."""
        return self._constrained(x, *(self.axes if dim == vocab_dim else None for dim in range(x.ndim)))

    def by_group(self, x: Array, vocab_dim: int | None) -> Array:
        """The same per group [G, ...]: each device has that of its own group."""
        spec = (self.axes if dim == vocab_dim else None for dim in range(x.ndim - 1))
        return self._constrained(x, self.group_axes, *spec)

    def equal_parts(self, logits: Float[Array, "B C V"]) -> Float[Array, "B C W"]:
        """Logits padded with impossible ids to equal parts of V: XLA would gather others for a lookup of ids."""
        return self.split(_cut_or_padded(logits, -(-logits.shape[-1] // self.shards) * self.shards))

    def chosen(self, x: Float[Array, "B C V"], ids: Int[Array, "B C"]) -> Float[Array, "B C 1"]:
        """Values of one id each; on a mesh by a sum, because XLA would gather x if its parts are not equal."""
        if not self.splits:
            return jnp.take_along_axis(x, ids[..., None], axis=-1)
        at = ids[..., None] == jax.lax.broadcasted_iota(ids.dtype, x.shape, 2)
        return jnp.sum(jnp.where(at, x, 0.0), axis=-1, keepdims=True)

    def top_k(self, x: Float[Array, "B C V"], k: int) -> tuple[Float[Array, "B C k"], Int[Array, "B C k"]]:
        """Largest k values and their ids: those of each part of V first, of which only k leave a device."""
        if self.shards == 1:
            values, ids = jax.lax.top_k(x, k)
            return values, ids
        size = -(-x.shape[-1] // self.shards)
        padded = jnp.pad(x, ((0, 0), (0, 0), (0, size * self.shards - x.shape[-1])), constant_values=-jnp.inf)
        spec = PartitionSpec(self.group_axes, None, self.axes)

        def of_part(part: Float[Array, "b C S"]) -> tuple[Float[Array, "b C n"], Int[Array, "b C n"]]:
            values, ids = jax.lax.top_k(part, min(k, size))
            return values, ids + size * jax.lax.axis_index(self.axes)

        values, ids = self._on_each_device(of_part, spec, (spec, spec))(padded)
        values, ids = (self._constrained(found, self.group_axes) for found in (values, ids))
        values, places = jax.lax.top_k(values, k)
        return values, jnp.take_along_axis(ids, places, axis=-1)

    def resized(self, logits: Float[Array, "B C W"], vocab_size: int) -> Float[Array, "B C V"]:
        """Logits cut or padded with impossible ids to another vocabulary, whose parts begin at other ids.

        Each device gets the few ids that its neighbour has of its own part. XLA alone would gather the logits.
        """
        size, wanted = (-(-width // self.shards) for width in (logits.shape[-1], vocab_size))
        halo = (self.shards - 1) * (size - wanted) if wanted < size else self.shards * (wanted - size)
        if self.shards == 1 or not 0 < halo <= size:
            return _cut_or_padded(logits, vocab_size)
        assert self.mesh is not None
        spec = PartitionSpec(self.group_axes, None, self.axes)
        # `ppermute` counts devices in the order of the mesh.
        ordered = tuple(axis for axis in self.mesh.axis_names if axis in self.axes)
        devices = np.arange(self.shards).reshape([self.mesh.shape[axis] for axis in ordered])
        devices = devices.transpose([ordered.index(axis) for axis in self.axes]).ravel()
        neighbours = tuple(zip(devices.tolist(), np.roll(devices, -1).tolist(), strict=True))

        def local(part: Float[Array, "b C S"]) -> Float[Array, "b C R"]:
            index = jax.lax.axis_index(self.axes)
            if wanted < size:
                before = jax.lax.ppermute(part[..., -halo:], ordered, neighbours)
                start, joined = halo - index * (size - wanted), (before, part)
            else:
                after = jax.lax.ppermute(part[..., :halo], ordered, tuple((to, one) for one, to in neighbours))
                after = jnp.where(index == self.shards - 1, NO_LOGIT, after)
                start, joined = index * (wanted - size), (part, after)
            return jax.lax.dynamic_slice_in_dim(jnp.concatenate(joined, axis=-1), start, wanted, axis=2)

        padded = _cut_or_padded(logits, size * self.shards)
        parts = self._on_each_device(local, spec, spec)(padded)
        return _cut_or_padded(parts, vocab_size)

    def _on_each_device(self, function: Callable[..., Any], inputs: Any, outputs: Any) -> Callable[..., Any]:
        """Map a function over devices; the mesh may be another than that of the program around it."""
        assert self.mesh is not None
        split = jax.shard_map(function, mesh=self.mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
        return traced_for(self.mesh, split)

    def _constrained(self, x: Array, *spec: str | tuple[str, ...] | None) -> Array:
        if self.mesh is None or not self.splits:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(*spec)))


ONE_DEVICE = VocabSharding(None)


def grouped_mesh(mesh: Mesh) -> Mesh:
    """The same devices in the same order, with `fsdp` as `GROUP_AXIS` x `fsdp` where it is more than `MAX_PARTS`.

    As it is if `fsdp` has no divisor of at least half of that: with few parts each device would hold most of the head.
    """
    size = mesh.shape.get("fsdp", 1)
    parts = max(n for n in range(1, MAX_PARTS + 1) if size % n == 0)
    if size <= MAX_PARTS or 2 * parts < MAX_PARTS:
        return mesh
    at = mesh.axis_names.index("fsdp")
    shape, names = mesh.devices.shape, mesh.axis_names
    devices = mesh.devices.reshape(*shape[:at], size // parts, parts, *shape[at + 1 :])
    axes = (*names[:at], GROUP_AXIS, *names[at:])
    return Mesh(devices, axes, axis_types=(AxisType.Auto,) * len(axes))


def _cut_or_padded(logits: Float[Array, "B C W"], vocab_size: int) -> Float[Array, "B C V"]:
    cut = logits[..., :vocab_size]
    missing = vocab_size - cut.shape[-1]
    return jnp.pad(cut, ((0, 0), (0, 0), (0, missing)), constant_values=NO_LOGIT) if missing else cut


Parameters = list[Array | None]
"""Parameters of a head, or their gradients, by position; None where another list has it."""


class HeadFunction(NamedTuple):
    """Head as a function of hidden states and of all arrays that it reads."""

    function: Callable[..., Array]
    vocab_dims: tuple[int | None, ...]
    """Vocabulary dimension of each parameter."""
    sharding: VocabSharding

    def by_group(self, parameters: Parameters) -> Parameters:
        """Copies of the parameters per group [G, ...], so that a gradient of each exists; as they are for one group."""
        groups = self.sharding.groups
        copied = [None if x is None or groups == 1 else jnp.broadcast_to(x, (groups, *x.shape)) for x in parameters]
        return parameters if groups == 1 else self.laid_out(copied)

    def laid_out(self, parameters: Parameters) -> Parameters:
        """Parameters, or their gradients, of `by_group` with V split."""
        place = self.sharding.parameter if self.sharding.groups == 1 else self.sharding.by_group
        return [None if x is None else place(x, dim) for x, dim in zip(parameters, self.vocab_dims, strict=True)]

    def over_groups(self, gradients: Parameters) -> Parameters:
        """Gradients summed over the groups: the only collective whose operand has the size of the head."""
        if self.sharding.groups == 1:
            return self.laid_out(gradients)
        totals = [None if x is None else jnp.sum(x, axis=0) for x in gradients]
        return [
            None if x is None else self.sharding.parameter(x, n) for x, n in zip(totals, self.vocab_dims, strict=True)
        ]

    def logits(
        self, hidden: Float[Array, "B C D"], parameters: Sequence[Any], by_group: Sequence[bool] | None = None
    ) -> Float[Array, "B C V"]:
        """float32 logits of gathered hidden states. `by_group`: parameters that are given per group [G, ...]."""
        groups = self.sharding.groups
        if groups == 1:
            logits = self.function(hidden, *parameters)
        else:
            axes = [0 if one else None for one in by_group or [False] * len(parameters)]
            parts = hidden.reshape(groups, -1, *hidden.shape[1:])
            logits = jax.vmap(self.function, in_axes=(0, *axes))(parts, *parameters)
            logits = logits.reshape(-1, *logits.shape[2:])
        return self.sharding.split(logits.astype(jnp.float32))


def head_function(
    logits_of: Callable[[Any], Array], hidden: jax.ShapeDtypeStruct, sharding: VocabSharding
) -> tuple[HeadFunction, tuple[Array, ...]]:
    """Hoist the arrays that `logits_of` closes over, and split those with a vocabulary dimension once for all chunks.

    `hidden`: shape of a chunk over all rows. A dimension is the vocabulary's if it has its size: a wrong guess would
    cost speed, not exactness.
    """
    if hidden.shape[0] % sharding.groups:
        raise ValueError(
            f"{hidden.shape[0]} rows: the size of {sharding.group_axes}, {sharding.groups}, must divide them"
        )
    rows = hidden.shape[0] // sharding.groups
    traced = jax.make_jaxpr(logits_of)(jax.ShapeDtypeStruct((rows, *hidden.shape[1:]), hidden.dtype))
    vocab = traced.out_avals[0].shape[-1]

    def function(x: Array, *parameters: Array) -> Array:
        (logits,) = jaxpr_as_fun(ClosedJaxpr(traced.jaxpr, parameters))(x)
        return logits

    arrays = [x if isinstance(x, Array) else jnp.asarray(x) for x in traced.consts]
    dims = tuple(max((n for n, size in enumerate(x.shape) if size == vocab), default=None) for x in arrays)
    parameters = tuple(sharding.resharded(x, n) for x, n in zip(arrays, dims, strict=True))
    return HeadFunction(function, dims, sharding), parameters


CHUNK_ELEMENTS = 1 << 20
"""Maximum logits of a CPU alive at once: 4 MiB in float32. Value and gradient hold about four such arrays."""

MIN_CHUNK_TOKENS = 128
"""Minimum tokens per chunk of a CPU for large vocabularies: with fewer, reading the head dominates."""

ACCELERATOR_CHUNK_ELEMENTS = 1 << 26
"""Maximum logits of a GPU or TPU alive at once: 256 MiB in float32."""

MIN_TOKENS = {"tpu": 512, "gpu": 1024}
"""The same of a TPU or GPU. Devices that split the vocabulary take as many times more tokens at once. A GPU holds the
whole float32 gradient of the head, which each chunk reads and writes."""

TILE = 16
"""Rows of a bfloat16 tile of a TPU, which chunks of more tokens are multiples of."""

MAX_GATHERED_TOKENS = 1 << 15
"""Maximum tokens of a chunk over the devices that share the vocabulary: each holds the hidden states of all of them."""


def chunk_length(rows: int, length: int, vocab: int, sharding: VocabSharding = ONE_DEVICE) -> int:
    """Tokens of a row per chunk: as many as fit the devices' limits of elements or make their minimum of tokens.

    At least 1, and at most half a row, so that even a small problem never materializes B x T x V.
    """
    platform = "cpu" if sharding.mesh is None else platform_of(sharding.mesh)
    accelerator = platform in MIN_TOKENS
    elements, minimum = CHUNK_ELEMENTS, MIN_CHUNK_TOKENS
    if accelerator:
        elements, minimum = ACCELERATOR_CHUNK_ELEMENTS, MIN_TOKENS[platform]
    tokens = max(elements // -(-vocab // sharding.shards), minimum * sharding.shards)
    if sharding.splits:
        tokens = min(tokens, MAX_GATHERED_TOKENS)
    tokens = max(1, tokens // -(-rows // sharding.groups))
    if accelerator and tokens > TILE:
        tokens -= tokens % TILE
    return min(tokens, max(1, (length + 1) // 2))


def predicting(segments: Int[Array | HostArray, "B T"], only: Bool[Array, "B T"] | None = None) -> Bool[Array, "B Tc"]:
    """Mask of the Tc = T - 1 contexts whose next token is in the same sequence and in `only`."""
    counts = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    return jnp.asarray(counts if only is None else counts & only[:, 1:])


class ChunkPlan(NamedTuple):
    """Order in which contexts are computed: predicting contexts of each row first."""

    order: Int[Array, "B T"]
    back: Int[Array, "B T"]
    """Index of each context in `order` (inverse permutation)."""
    num_chunks: Int[Array, ""]
    """Number of chunks with at least one predicting context."""


def chunk_plan(counts: Bool[Array, "B T"], chunk: int) -> ChunkPlan:
    """Build the plan for the contexts in `counts`, padded to whole chunks."""
    length = counts.shape[1]
    padded = jnp.pad(counts, ((0, 0), (0, max(-length % chunk, 1 - length))))
    order = jnp.argsort(~padded, axis=1, stable=True)
    num_chunks = -(-jnp.max(jnp.sum(counts, axis=1), initial=0) // chunk)
    return ChunkPlan(order=order, back=jnp.argsort(order, axis=1), num_chunks=num_chunks)


def scatter_to_tokens(x: Array, plan: ChunkPlan, counts: Bool[Array, "B Tc"]) -> Array:
    """Move context values from plan order to the tokens that they predict; 0 where not in `counts`."""
    x = take_tokens(x, plan.back)[:, : counts.shape[1]]
    rest = (1,) * (x.ndim - 2)
    return jnp.pad(jnp.where(counts.reshape(*counts.shape, *rest), x, 0), ((0, 0), (1, 0), *((0, 0),) * len(rest)))


def take_tokens(x: Array, order: Int[Array, "B C"]) -> Array:
    """Gather along axis 1 by indices that are in bounds."""
    order = order.reshape(*order.shape, *(1 for _ in x.shape[2:]))
    return jnp.take_along_axis(x, order, axis=1, mode="promise_in_bounds")
