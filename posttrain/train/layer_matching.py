"""Feature distillation: which student layers match which teacher layers, and the distance between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from posttrain.kernels.features import HiddenLoss, RelationPair, hidden_distance, relation_divergence
from posttrain.kernels.logits.chunks import predicting
from posttrain.models.activations import HIDDEN, Features, Taps


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

    def shapes(self) -> dict[str, tuple[tuple[str, str], tuple[int, int]]]:
        """Dimension names and shape of each projection, by path."""
        return {} if self.widths is None else {_path(own): (("embed", "latent"), self.widths) for own, _ in self.hidden}

    def projections(self) -> dict[str, Float[np.ndarray, "D E"]]:
        """Initial projections: the identity for equal widths, else random."""
        draw, result = np.random.default_rng(self.seed), {}
        for path, (_, (own, other)) in self.shapes().items():
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
