"""Layer matching: distance of hidden states and attention relations to a teacher's, in chunks of contexts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from posttrain.kernels.logits.layout import ChunkPlan, chunk_plan, predicting, scatter_to_tokens, take_tokens
from posttrain.kernels.logits.softmax import NO_LOGIT
from posttrain.models.activations import HIDDEN, Features, Taps
from posttrain.weights.state import Parameter


class Relation(NamedTuple):
    """Matched attention relation: student layer, teacher layer, projection (q, k or v), number of relation heads."""

    student: int
    teacher: int
    name: str
    heads: int


@dataclass(frozen=True, kw_only=True)
class Matching:
    """Layer matching: (student, teacher) pairs counted from 0; at least one pair or relation."""

    hidden: tuple[tuple[int, int], ...] = ()
    kind: HiddenLoss = "cosine"
    widths: tuple[int, int] | None = None
    """Widths of student and teacher, for a learned projection per pair; None: no projection."""
    relations: tuple[Relation, ...] = ()
    seed: int
    """Seed of the projections."""

    @property
    def student(self) -> Taps:
        return self._taps(0)

    @property
    def teacher(self) -> Taps:
        return self._taps(1)

    def _taps(self, side: int) -> Taps:
        layers = {HIDDEN: frozenset(pair[side] for pair in self.hidden)}
        for name in ("q", "k", "v"):
            layers[name] = frozenset((r.student, r.teacher)[side] for r in self.relations if r.name == name)
        return Taps(layers={name: layers_of_name for name, layers_of_name in layers.items() if layers_of_name})

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Shape of each projection, by path."""
        return {} if self.widths is None else {_path(own): self.widths for own, _ in self.hidden}

    def parameters(self) -> dict[str, Parameter]:
        """Declaration of each projection."""
        return {path: Parameter("kernel", ("embed", "latent")) for path in self.shapes()}

    def projections(self) -> dict[str, Float[np.ndarray, "D E"]]:
        """Initial projections: the identity for equal widths, else random."""
        draw, result = np.random.default_rng(self.seed), {}
        for path, (own, other) in self.shapes().items():
            matrix = np.eye(own) if own == other else draw.normal(0, own**-0.5, (own, other))
            result[path] = matrix.astype(np.float32)
        return result

    def __call__(
        self,
        student: Features,
        teacher: Features,
        projections: Mapping[str, Float[Array, "D E"]],
        segments: Int[Array, "B T"],
        only: Bool[Array, "B T"],
    ) -> dict[str, Float[Array, "B T"]]:
        """Feature distances as fields of `TokenStats`, means over pairs. Teacher features have no gradient."""
        counts, teacher = predicting(segments, only), jax.lax.stop_gradient(teacher)
        stats = {}
        if self.hidden:
            distances = [
                hidden_distance(
                    student[own][HIDDEN], teacher[other][HIDDEN], projections.get(_path(own)), counts, self.kind
                )
                for own, other in self.hidden
            ]
            stats["hidden_distance"] = jnp.mean(jnp.stack(distances), axis=0)
        if self.relations:
            related = [
                RelationPair(student[own][n], teacher[other][n], heads) for own, other, n, heads in self.relations
            ]
            stats["relation_divergence"] = relation_divergence(related, segments, counts)
        return stats


def _path(layer: int) -> str:
    return f"matching.{layer}.projection"


# Distances are computed in chunks of the predicting contexts: no T x T array is materialized in either pass.

CHUNK_ELEMENTS = 1 << 22
"""Elements per chunk: 16 MiB in float32; value and gradient hold a few such arrays."""

MIN_CHUNK_TOKENS = 16
"""Minimum tokens of a row per chunk, so that long rows do not become products of single vectors."""

TINY = 1e-12
"""Lower bound of a squared vector norm used as a divisor."""

HiddenLoss = Literal["mse", "cosine"]
Contexts = Bool[Array, "B Tc"]
"""Mask over the Tc = T - 1 contexts that predict a token: `token_stats.predicting`."""


def hidden_distance(
    student: Float[Array, "B T D"],
    teacher: Float[Array, "B T E"],
    projection: Float[Array, "D E"] | None,
    counts: Contexts,
    kind: HiddenLoss,
) -> Float[Array, "B T"]:
    """`mse`: mean((P s - t)^2) over the teacher's dimensions, arXiv:1909.10351 eq. 9; `cosine`: 1 - cos(P s, t).

    Computed from the hidden states of the contexts in `counts`, stored at the tokens that they predict; 0 elsewhere.
    """

    def distance(_: Any, chunk: tuple[Array, Array]) -> Float[Array, "B C"]:
        s, t = chunk
        if projection is not None:
            s = jnp.einsum("bcd,de->bce", s, projection.astype(s.dtype), preferred_element_type=jnp.float32)
        s, t = s.astype(jnp.float32), t.astype(jnp.float32)
        if kind == "mse":
            return jnp.mean(jnp.square(s - t), axis=-1)
        lengths = (jnp.maximum(jnp.sum(jnp.square(x), axis=-1), TINY) for x in (s, t))
        student_inverse, teacher_inverse = map(jax.lax.rsqrt, lengths)
        return 1.0 - jnp.sum(s * t, axis=-1) * student_inverse * teacher_inverse

    return _over_contexts(distance, (student, teacher), _in_chunks(counts, teacher.shape[2]))


class RelationPair(NamedTuple):
    """Queries, keys or values of one layer of student and teacher, all heads concatenated, to be split into `heads`."""

    student: Float[Array, "B T _D"]
    teacher: Float[Array, "B T _E"]
    heads: int


def relation_divergence(
    related: Sequence[RelationPair], segments: Int[Array, "B T"], counts: Contexts
) -> Float[Array, "B T"]:
    """Mean over `related` and heads of KL(R_teacher || R_student), MiniLMv2, arXiv:2012.15828 eq. 4-5.

    R = softmax(x_i . x_j / sqrt(head size)) over tokens j <= i of the same sequence. Stored at the tokens predicted by
    the contexts i in `counts`; 0 elsewhere.
    """
    stacks: dict[tuple[int, int], list[tuple[Array, Array, float]]] = {}
    for one in related:
        s, t = _split(one.student, one.heads), _split(one.teacher, one.heads)
        stacks.setdefault((s.shape[-1], t.shape[-1]), []).append((s, t, 1.0 / (one.heads * len(related))))
    total, chunks = jnp.zeros(segments.shape, jnp.float32), _in_chunks(counts, segments.shape[1])
    for parts in stacks.values():
        student, teacher = (jnp.concatenate([part[side] for part in parts]) for side in (0, 1))
        share = jnp.concatenate([jnp.full(len(s), share) for s, _, share in parts])

        @jax.checkpoint
        def add(total: Array, head: tuple[Array, Array, Array]) -> tuple[Array, None]:
            return total + head[2] * _head_divergence(head[0], head[1], segments, chunks), None

        total, _ = jax.lax.scan(add, total, (student, teacher, share))
    return total


def _head_divergence(
    student: Float[Array, "B T D"], teacher: Float[Array, "B T E"], segments: Int[Array, "B T"], chunks: _Chunks
) -> Float[Array, "B T"]:
    places = jnp.arange(segments.shape[1])

    def log_relation(x: Array, keys: Array, visible: Array) -> Float[Array, "B C T"]:
        scores = jnp.einsum("bcd,btd->bct", x, keys, preferred_element_type=jnp.float32)
        return jax.nn.log_softmax(jnp.where(visible, scores * x.shape[-1] ** -0.5, NO_LOGIT), axis=-1)

    def kl(order: Int[Array, "B C"], chunk: tuple[Array, Array]) -> Float[Array, "B C"]:
        visible = segments[:, None, :] == take_tokens(segments, order)[:, :, None]
        visible &= places[None, None] <= order[:, :, None]
        log_s, log_t = (log_relation(x, keys, visible) for x, keys in zip(chunk, (student, teacher), strict=True))
        return jnp.sum(jnp.where(visible, jnp.exp(log_t) * (log_t - log_s), 0.0), axis=-1)

    return _over_contexts(kl, (student, teacher), chunks)


def _split(x: Float[Array, "B T W"], heads: int) -> Float[Array, "R B T H"]:
    return jnp.moveaxis(x.reshape(*x.shape[:2], heads, -1), 2, 0)


class _Chunks(NamedTuple):
    """Order of contexts and number of contexts of a row per chunk."""

    plan: ChunkPlan
    counts: Contexts
    size: int


def _in_chunks(counts: Contexts, width: int) -> _Chunks:
    """Chunks for arrays with `width` elements per context; at most half a row per chunk."""
    rows, length = counts.shape
    size = max(1, min(max(CHUNK_ELEMENTS // (rows * width), MIN_CHUNK_TOKENS), (length + 1) // 2))
    return _Chunks(chunk_plan(counts, size), counts, size)


def _over_contexts(
    function: Callable[[Any, Any], Float[Array, "B C"]], arrays: Any, chunks: _Chunks
) -> Float[Array, "B T"]:
    """Apply `function` to context indices [B, C] and the gathered `arrays` [B, T, ...], chunk by chunk.

    Chunks without a predicting context are skipped; the backward pass recomputes each chunk.
    """
    plan, counts, size = chunks
    order = jnp.minimum(plan.order, counts.shape[1])

    def split(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(len(x), -1, size, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def chunk_result(index: Array, order: Array, chunk: Any) -> Array:
        def skip(order: Array, _: Any) -> Array:
            return jnp.zeros(order.shape, jnp.float32)

        return jax.lax.cond(index < plan.num_chunks, function, skip, order, chunk)

    def body(_: None, chunk: Any) -> tuple[None, Array]:
        return None, chunk_result(*chunk)

    inputs = (split(order), jax.tree.map(lambda x: split(take_tokens(x, order)), arrays))
    _, values = jax.lax.scan(body, None, (jnp.arange(len(inputs[0])), *inputs))
    return scatter_to_tokens(jnp.moveaxis(values, 0, 1).reshape(len(order), -1), plan, counts)
