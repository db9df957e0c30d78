"""KTO: preference loss on single answers labelled desirable or undesirable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from posttrain.batch import Batch, LossOutput, TokenStats
from posttrain.losses.pairs import Needs, Sequences, log_ratios, output, sequences_of
from posttrain.tree import Mean

Kind = Literal["kto", "apo_zero_unpaired"]


@dataclass(frozen=True, kw_only=True)
class KTOLoss:
    """Kahneman-Tversky optimization, arXiv:2402.01306: 1 - sigmoid(+-(beta * log-ratio - beta * KL)).

    Answers have the role 1 (desirable), -1 (undesirable) or 2 (answer to another prompt; their mean log-ratio estimates
    the KL of policy and reference, clipped at 0, without a gradient). `apo_zero_unpaired`, arXiv:2408.06266, has no KL.
    """

    kind: Kind = "kto"
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"KTOLoss.kind={self.kind!r} must be one of {', '.join(get_args(Kind))}")
        if self.beta <= 0 or self.desirable_weight < 0 or self.undesirable_weight < 0:
            raise ValueError(
                f"KTOLoss.beta={self.beta} must be positive, desirable_weight={self.desirable_weight} and "
                f"undesirable_weight={self.undesirable_weight} not negative"
            )

    @property
    def needs(self) -> Needs:
        return Needs(rows="answers_and_others" if self.kind == "kto" else "answers", reference=True)

    @property
    def needs_whole_batch(self) -> bool:
        """True for `kto`: the KL is a mean over the batch."""
        return self.kind == "kto"

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput:
        """Raises ValueError if `batch.roles` or `batch.ref_logps` is None."""
        sequences = sequences_of(stats, batch)
        ratios = log_ratios(sequences, "KTOLoss")
        counted = sequences.lengths > 0
        good, bad = (sequences.roles == 1) & counted, (sequences.roles == -1) & counted
        kl = self._kl(sequences, ratios)
        signed = self.beta * (ratios - kl.total / jnp.maximum(kl.weight, 1.0))
        losses = jnp.where(
            good,
            self.desirable_weight * (1 - jax.nn.sigmoid(signed)),
            jnp.where(bad, self.undesirable_weight * jax.nn.sigmoid(signed), 0.0),
        )
        loss = Mean(total=losses.sum(), weight=(good | bad).sum().astype(losses.dtype))
        metrics = {"kl": kl} if self.kind == "kto" else {}
        for name, mask in (("chosen", good), ("rejected", bad)):
            weight = mask.sum().astype(losses.dtype)
            for what, values in (("rewards", self.beta * ratios), ("logps", sequences.logps)):
                metrics[f"{what}/{name}"] = Mean(total=jnp.where(mask, values, 0.0).sum(), weight=weight)
        return output(loss, metrics, stats, batch)

    def _kl(self, sequences: Sequences, ratios: Float[Array, "B S"]) -> Mean:
        mismatched = (sequences.roles == 2) & (sequences.lengths > 0)
        weight = mismatched.sum().astype(ratios.dtype)
        if self.kind != "kto":
            return Mean(total=jnp.zeros_like(weight), weight=weight)
        total = jax.lax.stop_gradient(jnp.where(mismatched, ratios, 0.0).sum())
        return Mean(total=jnp.maximum(total, 0.0), weight=weight)
