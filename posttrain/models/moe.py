"""Mixture of experts (MoE): router, grouped expert MLPs, expert parallelism. No token is dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from posttrain.batch import RouterStats
from posttrain.config import RematName
from posttrain.kernels.grouped_matmul import grouped_matmul, reads_stacks, stacked_matmul
from posttrain.kernels.platform import platform_of
from posttrain.mesh import TOKEN_AXIS, param_sharding, row_axes, row_shards, token_shards
from posttrain.models.activations import rematerialized
from posttrain.models.adapter import Adapter
from posttrain.models.config import Compute, MLPConfig, MoEConfig
from posttrain.models.forward_state import Context, ForwardState, LayerIndex
from posttrain.models.layers import MLP, Adaptable, Init, Linear, gated, normal, param
from posttrain.models.quant import PER_OUTPUT, Quantized, QuantizedParam

NO_EXPERT = -1
"""Expert number of tokens that need none."""


class ExpertStack(nnx.Param):
    """Matrices of the experts of all layers in a stage, of which a layer reads its own: the scan does not slice it."""


class Router(nnx.Module):
    """Router: float32 scores of all experts per token, and top-k selection."""

    def __init__(self, config: MoEConfig, repeats: int, embed_dim: int, init: Init):
        self.config = config
        shape = (embed_dim, config.num_experts)
        self.proj = Linear(repeats, ("embed", "router"), shape, init, bias=config.router.bias)
        self.correction = (
            param(jnp.zeros((repeats, config.num_experts), jnp.float32), ("layers", "router"), "correction")
            if config.router.correction
            else None
        )

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T E"]:
        return self.proj(x.astype(jnp.float32))

    def scores(self, logits: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        if self.config.router.score == "sigmoid":
            return jax.nn.sigmoid(logits)
        return jax.nn.softmax(logits, axis=-1)

    def choose(self, scores: Float[Array, "B T E"]) -> Int[Array, "B T k"]:
        """Select the `top_k` experts, within the best groups if there are groups."""
        c = self.config.router
        scores = jax.lax.stop_gradient(scores)
        if self.correction is not None:
            scores = scores + self.correction[...][None, None]
        if c.num_groups > 1:
            grouped = scores.reshape(*scores.shape[:-1], c.num_groups, -1)
            best_two = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
            threshold = jax.lax.top_k(best_two, c.top_groups)[1]
            in_top_groups = jnp.any(jax.nn.one_hot(threshold, c.num_groups, dtype=bool), axis=-2)
            scores = jnp.where(in_top_groups[..., None], grouped, -jnp.inf).reshape(scores.shape)
        return jax.lax.top_k(scores, self.config.top_k)[1]

    def weights(self, scores: Float[Array, "B T E"], experts: Int[Array, "B T k"]) -> Float[Array, "B T k"]:
        """Weight of each selected expert."""
        chosen = jnp.take_along_axis(scores, experts, axis=-1)
        if self.config.router.normalize:
            chosen = chosen / (jnp.sum(chosen, axis=-1, keepdims=True) + 1e-20)
        return chosen * self.config.router.scale


class Experts(Adaptable):
    """Gated MLPs of all experts, stacked."""

    def __init__(self, config: MoEConfig, repeats: int, embed_dim: int, init: Init):
        self.config: MLPConfig = config.expert
        self.limit = config.swiglu_limit
        self.num_experts = config.num_experts
        lead, dim = (repeats, config.num_experts), config.expert.dim
        up, down = ("layers", "expert", "embed", "mlp"), ("layers", "expert", "mlp", "embed")
        self.gate = param(normal(init, (*lead, embed_dim, dim)), up, "kernel")
        self.up = param(normal(init, (*lead, embed_dim, dim)), up, "kernel")
        self.down = param(normal(init, (*lead, dim, embed_dim)), down, "kernel")
        biases = config.expert.bias
        self.gate_bias = param(jnp.zeros((*lead, dim), init.dtype), (*up[:2], "mlp"), "bias") if biases else None
        self.up_bias = param(jnp.zeros((*lead, dim), init.dtype), (*up[:2], "mlp"), "bias") if biases else None
        self.down_bias = (
            param(jnp.zeros((*lead, embed_dim), init.dtype), (*up[:2], "embed"), "bias") if biases else None
        )
        self.adapters = nnx.Dict({})
        self.layer: Any = nnx.data(None)
        """Number of each layer in an `ExpertStack`."""

    def matrices(self) -> Mapping[str, Any]:
        return {"gate": self.gate, "up": self.up, "down": self.down}

    def read_stacks(self, compute: Compute) -> None:
        """Read the matrices where they lie from now on, without a gradient, if a kernel can: for a loop over tokens.

        Not those that each layer must make first: of other dtypes, quantized, or split over `fsdp`.
        """
        gathered = compute.mesh is not None and compute.mesh.shape["fsdp"] > 1
        if gathered or not reads_stacks(compute.grouped_matmul, platform_of(compute.mesh), str(compute.dtype)):
            return
        for name, matrix in self.matrices().items():
            if isinstance(matrix, nnx.Param) and matrix.dtype == compute.dtype:
                stack = matrix.get_value()
                setattr(self, name, ExpertStack(stack, dims=matrix.get_metadata("dims")))
                self.layer = nnx.Variable(jnp.arange(len(stack), dtype=jnp.int32), dims=("layers",))

    def __call__(
        self, x: Float[Array, "N D"], experts: Int[Array, "N k"], weights: Float[Array, "N k"], compute: Compute
    ) -> Float[Array, "N D"]:
        """Weighted sum of the selected experts' outputs."""
        if not any(isinstance(matrix, Quantized) for matrix in self.matrices().values()):
            return self._computed(x, experts, weights, compute)
        graph, state = nnx.split(self)

        def run(state: Any, x: Array, experts: Array, weights: Array) -> Array:
            return nnx.merge(graph, state)._computed(x, experts, weights, compute)

        # Otherwise the backward pass would save the dequantized matrices of all layers.
        return rematerialized(run, "full" if compute.remat == "none" else compute.remat)(state, x, experts, weights)

    def _computed(
        self, x: Float[Array, "N D"], experts: Int[Array, "N k"], weights: Float[Array, "N k"], compute: Compute
    ) -> Float[Array, "N D"]:
        if compute.mesh is None or compute.mesh.size == 1:
            self._dequantize()
            return self._mixture(x, experts, weights, compute)
        return self._on_mesh(x, experts, weights, compute, compute.mesh)

    def _dequantize(self) -> None:
        for name, matrix in self.matrices().items():
            if isinstance(matrix, Quantized):
                setattr(self, name, nnx.Param(matrix[...], dims=matrix.get_metadata("dims"), role="kernel"))

    def _axes(self, mesh: Mesh) -> list[tuple[Any, ...]]:
        """Mesh axes that split the arrays of a layer, in the order of `nnx.to_flat_state`."""

        def axes(variable: Any) -> tuple[Any, ...]:
            dims = variable.get_metadata("dims")
            dims = dims if isinstance(variable, ExpertStack) else dims[1:]
            return tuple(param_sharding(mesh, "experts", dims, variable.shape).spec)

        quantized = [matrix for matrix in self.matrices().values() if isinstance(matrix, Quantized)]
        if any(m.kind not in PER_OUTPUT and axes(m) != axes(m.scales) for m in quantized):
            # The codes of a tile are split.
            self._dequantize()
        return [axes(variable) for _, variable in nnx.to_flat_state(nnx.state(self))]

    def _on_mesh(
        self,
        x: Float[Array, "N D"],
        experts: Int[Array, "N k"],
        weights: Float[Array, "N k"],
        compute: Compute,
        mesh: Mesh,
    ) -> Float[Array, "N D"]:
        """Expert parallelism: each device sorts only its own tokens, and applies its own experts to those of its group
        on the axis `expert`. Quantized matrices are gathered as codes.

        Under GSPMD alone, sorting all tokens would gather them on every device.
        """
        # Inside `shard_map` a device has only a part of the sums over inputs.
        self.fix_gains()
        axes = self._axes(mesh)
        graph, flat = _flat(self)
        by_token = (*row_axes(mesh), *[TOKEN_AXIS] * (TOKEN_AXIS in mesh.axis_names))
        padding = ((0, -x.shape[0] % (row_shards(mesh) * token_shards(mesh))), (0, 0))
        tokens = jnp.pad(x, padding), jnp.pad(experts, padding, constant_values=NO_EXPERT), jnp.pad(weights, padding)

        def local(tokens: tuple[Array, Array, Array], arrays: list[Array]) -> Float[Array, "1 n D"]:
            gathered = [_whole(array, of) for array, of in zip(arrays, axes, strict=True)]
            here = _bound(graph, flat, gathered)
            here._dequantize()
            if here.down_bias is not None:
                # Partial outputs are summed over `tensor`; add the bias in one shard only.
                here.down_bias.set_value(jnp.where(jax.lax.axis_index("tensor") == 0, here.down_bias[...], 0))
            if mesh.shape["expert"] == 1:
                return here._mixture(*tokens, compute)[None]
            return here._of_group(tokens, compute)[None]

        parts = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(PartitionSpec(by_token), [PartitionSpec(*of) for of in axes]),
            out_specs=PartitionSpec("tensor", by_token),
            check_vma=False,
        )(tokens, [_as_read(w, x.dtype) for w in flat.values()])
        # Summing outside `shard_map` avoids communication over `tensor` in the backward pass.
        return jnp.sum(parts, axis=0)[: x.shape[0]]

    def _mixture(
        self, x: Float[Array, "N D"], experts: Int[Array, "N k"], weights: Float[Array, "N k"], compute: Compute
    ) -> Float[Array, "N D"]:
        """Weighted sum of the outputs of the experts, all of which are here."""
        ordered = Sorted.of(experts, self.num_experts)
        rows = ordered.rows(0, self.num_experts, 0, experts.size)
        out = self._outputs(_masked(x[rows.assignment // experts.shape[1]], rows), rows, compute)
        # Restore token order by a gather: unlike a scatter its sum has a fixed order.
        back = _masked(out, rows)[jnp.argsort(rows.assignment)].reshape(*experts.shape, -1)
        return jnp.sum(back * weights[..., None].astype(back.dtype), axis=1)

    def _outputs(self, x: Float[Array, "C D"], rows: ExpertRows, compute: Compute) -> Float[Array, "C D"]:
        """Output of each row's expert; undefined in rows that are not used."""
        platform = platform_of(compute.mesh)

        def grouped(y: Array, w: Array) -> Array:
            return grouped_matmul(y, w, rows.sizes, kernel=compute.grouped_matmul, platform=platform)

        def product(y: Array, name: RematName, bias: nnx.Param | None) -> Array:
            matrix, w = self.matrices()[name], None
            if isinstance(matrix, ExpertStack):
                out = stacked_matmul(y, matrix[...], self.layer[...], rows.sizes, platform=platform)
            else:
                w = matrix[...]
                out = grouped(y, w.astype(y.dtype))
            if adapter := self.adapters.get(name):
                assert isinstance(adapter, Adapter), "rows of experts are in another order"
                out = adapter.added(out, adapter.down(y, grouped), w, grouped, rows.expert)
            if bias is not None:
                out = out + bias[...].astype(y.dtype).at[rows.expert].get(mode="fill", fill_value=0)
            return checkpoint_name(out, name)

        hidden = gated(
            self.config.activation, product(x, "gate", self.gate_bias), product(x, "up", self.up_bias), self.limit
        )
        return product(hidden, "down", self.down_bias)

    def _of_group(
        self, tokens: tuple[Float[Array, "n D"], Int[Array, "n k"], Float[Array, "n k"]], compute: Compute
    ) -> Float[Array, "n D"]:
        """Weighted sum of the experts' outputs for the tokens of a device, inside `jax.shard_map`.

        Each device has the tokens of its group on the axis `expert`, and computes the rows of its own experts in a
        buffer that fits them if the router uses all experts about alike. What does not fit is computed in further
        rounds.
        """
        x, experts, weights = tokens
        top_k = experts.shape[1]
        ordered = Sorted.of(experts, self.num_experts).gathered("expert")
        sources = ordered.order.shape[0]
        num_here = self.num_experts // sources
        first = jax.lax.axis_index("expert") * num_here
        size = capacity(ordered.order.size, sources)
        graph, flat = _flat(self)

        def one(number: Array, values: tuple[Array, Array, list[Array]], numbers: tuple[Sorted, Array]) -> Array:
            x, weights, arrays = values
            ordered, first = numbers
            rows = ordered.rows(first, num_here, number * size, size)
            token = rows.assignment // top_k
            out = _bound(graph, flat, arrays)._outputs(_masked(x[token], rows), rows, compute)
            weight = weights.reshape(-1)[rows.assignment].astype(out.dtype)
            # Masked before they are weighted: the gradient of the weights reads them.
            return jax.ops.segment_sum(_masked(out, rows) * weight[:, None], token, num_segments=x.shape[0])

        group = [jax.lax.all_gather(array, "expert", tiled=True) for array in (x, weights)]
        rounds = -(-ordered.total(first, num_here) // size)
        values = (*group, [variable[...] for variable in flat.values()])
        out = summed_over_rounds(one, rounds, values, (ordered, first))
        return jax.lax.psum_scatter(out, "expert", tiled=True)


def _flat(layer: Experts) -> tuple[Any, dict[Any, Any]]:
    """Graph of a layer, and its variables by path."""
    graph, state = nnx.split(layer)
    return graph, dict(nnx.to_flat_state(state))


def _as_read(variable: Any, dtype: DTypeLike) -> Array:
    """Array of a variable, in `dtype` unless it holds codes or the number of a layer."""
    array: Array = variable[...]
    is_float = jnp.issubdtype(array.dtype, jnp.floating) and not isinstance(variable, QuantizedParam)
    return array.astype(dtype) if is_float else array


def _bound(graph: Any, paths: Iterable[Any], arrays: list[Array]) -> Experts:
    layer: Experts = nnx.merge(graph, nnx.from_flat_state(zip(paths, arrays, strict=True)))
    return layer


def _masked(x: Float[Array, "C D"], rows: ExpertRows) -> Float[Array, "C D"]:
    """0 in rows that are not used, as is the gradient."""
    return jnp.where(rows.used[:, None], x, 0)


class MoE(nnx.Module):
    def __init__(self, config: MoEConfig, repeats: int, embed_dim: int, init: Init):
        self.config = config
        self.router = Router(config, repeats, embed_dim, init)
        self.experts = Experts(config, repeats, embed_dim, init)
        self.shared = MLP(config.shared, repeats, embed_dim, init) if config.shared is not None else None
        gate = (repeats, ("embed", "router"), (embed_dim, 1), init)
        self.shared_gate = Linear(*gate, bias=False) if config.shared_gate else None

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, state: ForwardState, index: LayerIndex
    ) -> Float[Array, "B T D"]:
        logits = self.router.logits(x)
        scores = self.router.scores(logits)
        experts = chosen = self.router.choose(scores)
        if context.experts is not None:
            recorded = context.experts[index.moe]
            experts = jnp.where(recorded < 0, chosen, recorded)
        weights = self.router.weights(scores, experts)
        state.routing.append((router_stats(logits, scores, experts, chosen, context.segments), experts))
        # Padding would be routed alike, to the devices of few experts.
        experts = jnp.where(context.segments[..., None] > 0, experts, NO_EXPERT)
        flat = [array.reshape(-1, array.shape[-1]) for array in (x, experts, weights)]
        out = self.experts(flat[0], flat[1], flat[2], context.compute).reshape(x.shape)
        if self.shared is None:
            return out
        shared = self.shared(x)
        return out + (shared if self.shared_gate is None else jax.nn.sigmoid(self.shared_gate(x)) * shared)


def _whole(array: Array, axes: tuple[Any, ...]) -> Array:
    """All-gather a parameter shard over `fsdp` and `context`."""
    for dim, split in enumerate(axes):
        if "fsdp" in (split if isinstance(split, tuple) else (split,)):
            array = jax.lax.all_gather(array, split, axis=dim, tiled=True)
    return array


def router_stats(
    logits: Float[Array, "B T E"],
    scores: Float[Array, "B T E"],
    experts: Int[Array, "B T k"],
    chosen: Int[Array, "B T k"],
    segments: Int[Array, "B T"],
) -> RouterStats:
    """Router statistics of real tokens, for the `experts` used and those the router has `chosen`.

    The balance of a sequence is E / k * sum_e share_e * mean probability_e, 1 for uniform use. Shares count how often
    each expert was selected and carry no gradient. Computed per sequence, arXiv:2412.19437, eq. 17, so that no split of
    the batch changes it.
    """
    num_experts, length = logits.shape[-1], logits.shape[1]
    real = (segments > 0).astype(jnp.float32)
    probs = scores / jnp.sum(scores, axis=-1, keepdims=True)
    used = jnp.sum(jax.nn.one_hot(experts, num_experts, dtype=jnp.float32), axis=-2) * real[..., None]

    def by_sequence(values: Array, segments: Array) -> Array:
        return jax.ops.segment_sum(values, segments, num_segments=length + 1)[segments]

    counts = jax.vmap(by_sequence)(used, segments)
    lengths = jnp.maximum(jax.vmap(by_sequence)(real, segments), 1.0)
    shares = jax.lax.stop_gradient(counts / lengths[..., None])
    balance = jnp.sum(shares * probs, axis=-1) * num_experts / experts.shape[-1]
    log_z = jax.nn.logsumexp(logits, axis=-1)
    replaced = jnp.sum(~jnp.any(experts[..., :, None] == chosen[..., None, :], axis=-1), axis=-1)
    # xlogy: the derivative of 0 log 0 is NaN.
    entropy = -jnp.sum(jax.scipy.special.xlogy(probs, probs), axis=-1)
    return RouterStats(
        load=jnp.sum(used, axis=(0, 1)),
        balance=jnp.sum(balance * real),
        z=jnp.sum(log_z * log_z * real),
        entropy=jax.lax.stop_gradient(jnp.sum(entropy * real)),
        replaced=jnp.sum(replaced * real),
    )


SLACK = 1.25
"""Rows of a device's buffer per row of a device if the router uses all experts alike."""

TILE = 512
"""A buffer is a multiple of this many rows, the largest row tile of the grouped products."""


class ExpertRows(NamedTuple):
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

    def rows(self, first: int | Array, num_here: int, start: int | Array, capacity: int) -> ExpertRows:
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
        return ExpertRows(assignment, run // sources, jnp.diff(per_expert, prepend=0).astype(jnp.int32))


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


def _rounds_forward(
    function: Callable[[Array, Any, Any], Array], rounds: Array, values: Any, numbers: Any
) -> tuple[Array, tuple[Any, ...]]:
    first, pull = jax.vjp(lambda values: function(jnp.int32(0), values, numbers), values)
    return _further(function, rounds, values, numbers, first), (pull, rounds, values, numbers)


def _rounds_backward(
    function: Callable[[Array, Any, Any], Array], saved: tuple[Any, ...], d_out: Array
) -> tuple[None, Any, None]:
    pull, rounds, values, numbers = saved

    def body(state: tuple[Array, Any]) -> tuple[Array, Any]:
        number, total = state
        (more,) = jax.vjp(lambda values: function(number, values, numbers), values)[1](d_out)
        return number + 1, jax.tree.map(jnp.add, total, more)

    first = (jnp.int32(1), pull(d_out)[0])
    return None, jax.lax.while_loop(lambda state: state[0] < rounds, body, first)[1], None


summed_over_rounds.defvjp(_rounds_forward, _rounds_backward)
