"""What of a student's layers shall become as in a teacher's, and how far it is from that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from posttrain.kernels.features import HiddenLoss, Related, hidden_distance, relation_divergence
from posttrain.kernels.logits.chunks import predicting
from posttrain.models.taps import HIDDEN, Features, Taps


class Relation(NamedTuple):
    """A student's layer, the teacher's, which projection of both (q, k or v), and into how many heads it is split."""

    student: int
    teacher: int
    name: str
    heads: int


@dataclass(frozen=True, kw_only=True)
class Matching:
    """Pairs of layers, the student's first, which count from 0; at least one pair or relation."""

    hidden: tuple[tuple[int, int], ...] = ()
    kind: HiddenLoss = "cosine"
    widths: tuple[int, int] | None = None
    """Of student and teacher: each pair has a learned projection from the one to the other. None: it has none."""
    relations: tuple[Relation, ...] = ()
    seed: int
    """Of the projections."""

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
        return Taps(layers={name: wanted for name, wanted in layers.items() if wanted})

    def shapes(self) -> dict[str, tuple[tuple[str, str], tuple[int, int]]]:
        """Names of the dimensions and shape of each projection, by path."""
        return {} if self.widths is None else {_path(own): (("embed", "latent"), self.widths) for own, _ in self.hidden}

    def projections(self) -> dict[str, Float[np.ndarray, "D E"]]:
        """As training begins: the identity where the widths are equal, else random."""
        draw, made = np.random.default_rng(self.seed), {}
        for path, (_, (own, other)) in self.shapes().items():
            matrix = np.eye(own) if own == other else draw.normal(0, own**-0.5, (own, other))
            made[path] = matrix.astype(np.float32)
        return made

    def __call__(
        self,
        student: Features,
        teacher: Features,
        projections: Mapping[str, Float[Array, "D E"]],
        segments: Int[Array, "B T"],
        only: Bool[Array, "B T"],
    ) -> dict[str, Float[Array, "B T"]]:
        """Fields of `TokenStats`; means over the pairs. What comes of the teacher has no gradient."""
        counts, teacher = predicting(segments, only), jax.lax.stop_gradient(teacher)
        found = {}
        if self.hidden:
            distances = [
                hidden_distance(
                    student[own][HIDDEN], teacher[other][HIDDEN], projections.get(_path(own)), counts, self.kind
                )
                for own, other in self.hidden
            ]
            found["hidden_distance"] = jnp.mean(jnp.stack(distances), axis=0)
        if self.relations:
            related = [Related(student[own][n], teacher[other][n], heads) for own, other, n, heads in self.relations]
            found["relation_divergence"] = relation_divergence(related, segments, counts)
        return found


def _path(layer: int) -> str:
    return f"matching.{layer}.projection"
