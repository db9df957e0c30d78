"""MoE load balancing: auxiliary and z losses, bias correction (DeepSeek-V3), load metrics."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from posttrain.batch import Batch, LossOutput, RouterStats, ScoreStats, TokenStats
from posttrain.tree import Mean


@dataclass(frozen=True, kw_only=True)
class RouterLoss:
    """MoE auxiliary loss balance_coef * balance + z_coef * z, both means over MoE layers and tokens.

    balance: E / k * sum_e share_e * mean probability_e of each sequence, arXiv:2412.19437 eq. 17; 1 for uniform use of
    experts (k in transformers, whose `router_aux_loss_coef` is balance_coef / k). z: squared log-partition of router
    logits, arXiv:2202.08906 eq. 5.
    """

    balance_coef: float = 0.0
    z_coef: float = 0.0

    def __post_init__(self) -> None:
        if self.balance_coef < 0 or self.z_coef < 0:
            raise ValueError(
                f"RouterLoss.balance_coef={self.balance_coef} and z_coef={self.z_coef} must not be negative"
            )

    @property
    def on(self) -> bool:
        return self.balance_coef > 0 or self.z_coef > 0

    def __call__(self, stats: RouterStats) -> Float[Array, ""]:
        """Sum over MoE layers and tokens; its weight is their number."""
        return self.balance_coef * jnp.sum(stats.balance) + self.z_coef * jnp.sum(stats.z)


def router_means(stats: RouterStats, num_tokens: Float[Array, ""]) -> dict[str, Mean]:
    """Router metrics, means over MoE layers and tokens: `moe/balance_loss`, `moe/z_loss`, `moe/router_entropy` in nats,
    and `moe/replaced_ratio`, the share of replayed experts that the router would not have chosen."""
    weight = num_tokens * stats.load.shape[0]
    return {
        "moe/balance_loss": Mean(total=jnp.sum(stats.balance), weight=weight),
        "moe/z_loss": Mean(total=jnp.sum(stats.z), weight=weight),
        "moe/router_entropy": Mean(total=jnp.sum(stats.entropy), weight=weight),
        "moe/replaced_ratio": Mean(total=jnp.sum(stats.replaced), weight=jnp.sum(stats.load)),
    }


def load_metrics(load: Float[Array, "M E"]) -> dict[str, Array]:
    """Load metrics from the experts' shares of all selections in a step; 1 / E each for uniform use.

    `moe/share`: table of each expert of each MoE layer. `moe/load_max_share` and `moe/load_min_share`: extremes over
    all layers. Means over layers: `moe/load_entropy`, in nats, at most log E, and `moe/max_violation`, E * largest
    share - 1, arXiv:2408.15664 eq. 4.
    """
    shares = load / jnp.maximum(jnp.sum(load, axis=-1, keepdims=True), 1.0)
    return {
        "moe/share": shares,
        "moe/load_max_share": jnp.max(shares),
        "moe/load_min_share": jnp.min(shares),
        "moe/load_entropy": -jnp.mean(jnp.sum(jax.scipy.special.xlogy(shares, shares), axis=-1)),
        "moe/max_violation": jnp.mean(jnp.max(shares, axis=-1) * load.shape[-1] - 1.0),
    }


def updated_correction(correction: Float[Array, "M E"], load: Float[Array, "M E"], rate: float) -> Float[Array, "M E"]:
    """Updated bias correction after a step: + rate for an expert below the mean load, - rate above; arXiv:2408.15664.

    Loads are counts: their sum and E times each are exact, where a mean may miss the load that is equal to it.
    """
    total = jnp.sum(load, axis=-1, keepdims=True)
    return correction + rate * jnp.sign(total - load.shape[-1] * load)


AnyLoss = Callable[[Any, Batch], LossOutput]


def weight_of(loss: AnyLoss, batch: Batch, *, scores: bool) -> Array:
    """Weight of a loss on a batch, computed with dummy statistics, since it must not depend on the model.

    `scores`: the model has a scalar head.
    """
    return jnp.asarray(loss(_stats_of(jnp.zeros(batch.tokens.shape, jnp.float32), scores), batch).loss.weight)


def _stats_of(logps: Float[Array, "B T"], scores: bool) -> TokenStats | ScoreStats:
    """Dummy statistics with every field that a loss may read."""
    if scores:
        return ScoreStats(scores=logps)
    others = {field.name: -logps for field in dataclasses.fields(TokenStats) if field.name != "logps"}
    return TokenStats(logps=logps, **others)


def check_weight(loss: AnyLoss, batch: Batch, *, scores: bool) -> None:
    """Raises ValueError if the weight of a loss depends on the model's output.

    The share of the router loss in a micro-batch's gradient needs the whole batch's weight beforehand.
    """

    @jax.jit
    def weights(batch: Batch) -> tuple[Array, Array]:
        draw = -jnp.abs(jax.random.normal(jax.random.key(0), batch.tokens.shape))
        return weight_of(loss, batch, scores=scores), jnp.asarray(loss(_stats_of(draw, scores), batch).loss.weight)

    first, second = jax.device_get(weights(batch))
    if not math.isclose(first, second, rel_tol=1e-5):
        raise ValueError(
            f"router: balance_coef and z_coef need a loss whose weight depends on the batch only; that of "
            f"{type(loss).__name__} is {first} or {second} for different log-probabilities: count tokens or sequences "
            "of the batch, or set both coefficients to 0"
        )
