"""Mixtures of experts: a router sends each token to a few of many MLPs. None is dropped."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from posttrain.kernels.grouped_matmul import grouped_matmul
from posttrain.models.config import GroupedKernel, MLPConfig, MoEConfig
from posttrain.models.context import Context, Place, RouterStats, Tape
from posttrain.models.layers import MLP, Init, Linear, gated, normal, param


class Router(nnx.Module):
    """Scores of all experts for each token, in float32, and the choice of the best."""

    def __init__(self, config: MoEConfig, repeats: int, embed_dim: int, init: Init):
        self.config = config
        shape = (embed_dim, config.num_experts)
        self.proj = Linear(repeats, ("embed", "router"), shape, init, bias=config.router.bias)
        self.correction = (
            param(jnp.zeros((repeats, config.num_experts), jnp.float32), ("layers", "router"))
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
        """The `top_k` best experts, within the best groups where there are groups."""
        c = self.config.router
        scores = jax.lax.stop_gradient(scores)
        if self.correction is not None:
            scores = scores + self.correction[...]
        if c.num_groups > 1:
            grouped = scores.reshape(*scores.shape[:-1], c.num_groups, -1)
            best_two = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
            threshold = jax.lax.top_k(best_two, c.top_groups)[1]
            kept = jnp.any(jax.nn.one_hot(threshold, c.num_groups, dtype=bool), axis=-2)
            scores = jnp.where(kept[..., None], grouped, -jnp.inf).reshape(scores.shape)
        return jax.lax.top_k(scores, self.config.top_k)[1]

    def weights(self, scores: Float[Array, "B T E"], experts: Int[Array, "B T k"]) -> Float[Array, "B T k"]:
        """How much of each chosen expert a token gets."""
        chosen = jnp.take_along_axis(scores, experts, axis=-1)
        if self.config.router.normalize:
            chosen = chosen / (jnp.sum(chosen, axis=-1, keepdims=True) + 1e-20)
        return chosen * self.config.router.scale


class Experts(nnx.Module):
    """The gated MLPs of all experts, stacked."""

    def __init__(self, config: MoEConfig, repeats: int, embed_dim: int, init: Init):
        self.config: MLPConfig = config.expert
        self.limit = config.swiglu_limit
        self.num_experts = config.num_experts
        lead, dim = (repeats, config.num_experts), config.expert.dim
        up, down = ("layers", "expert", "embed", "mlp"), ("layers", "expert", "mlp", "embed")
        self.gate = param(normal(init, (*lead, embed_dim, dim)), up)
        self.up = param(normal(init, (*lead, embed_dim, dim)), up)
        self.down = param(normal(init, (*lead, dim, embed_dim)), down)
        biases = config.expert.bias
        self.gate_bias = param(jnp.zeros((*lead, dim), init.dtype), (*up[:2], "mlp")) if biases else None
        self.up_bias = param(jnp.zeros((*lead, dim), init.dtype), (*up[:2], "mlp")) if biases else None
        self.down_bias = param(jnp.zeros((*lead, embed_dim), init.dtype), (*up[:2], "embed")) if biases else None

    def __call__(
        self,
        x: Float[Array, "N D"],
        experts: Int[Array, "N k"],
        weights: Float[Array, "N k"],
        *,
        kernel: GroupedKernel,
    ) -> Float[Array, "N D"]:
        """sum over the chosen experts of weight * expert(x)."""
        top_k = experts.shape[1]
        order = jnp.argsort(experts.reshape(-1), stable=True)
        sizes = jnp.bincount(experts.reshape(-1), length=self.num_experts).astype(jnp.int32)
        of_row = experts.reshape(-1)[order]
        rows = x[order // top_k]

        def product(y: Array, w: nnx.Param, bias: nnx.Param | None) -> Array:
            out = grouped_matmul(y, w[...].astype(y.dtype), sizes, kernel=kernel)
            return out if bias is None else out + bias[...].astype(y.dtype)[of_row]

        hidden = gated(
            self.config.activation,
            product(rows, self.gate, self.gate_bias),
            product(rows, self.up, self.up_bias),
            self.limit,
        )
        out = product(hidden, self.down, self.down_bias)
        # Back to the tokens' order by a gather, whose sum does not depend on the order of a scatter.
        back = out[jnp.argsort(order)].reshape(*experts.shape, -1)
        return jnp.sum(back * weights[..., None].astype(back.dtype), axis=1)


class MoE(nnx.Module):
    def __init__(self, config: MoEConfig, repeats: int, embed_dim: int, init: Init):
        self.config = config
        self.router = Router(config, repeats, embed_dim, init)
        self.experts = Experts(config, repeats, embed_dim, init)
        self.shared = MLP(config.shared, repeats, embed_dim, init) if config.shared is not None else None
        gate = (repeats, ("embed", "router"), (embed_dim, 1), init)
        self.shared_gate = Linear(*gate, bias=False) if config.shared_gate else None

    def __call__(self, x: Float[Array, "B T D"], context: Context, tape: Tape, place: Place) -> Float[Array, "B T D"]:
        logits = self.router.logits(x)
        scores = self.router.scores(logits)
        experts = self.router.choose(scores) if context.experts is None else context.experts[place.moe]
        weights = self.router.weights(scores, experts)
        tape.routing.append((router_stats(logits, scores, experts, context.segments), experts))
        flat = (array.reshape(-1, array.shape[-1]) for array in (x, experts, weights))
        out = self.experts(*flat, kernel=context.compute.grouped_matmul).reshape(x.shape)
        if self.shared is None:
            return out
        shared = self.shared(x)
        return out + (shared if self.shared_gate is None else jax.nn.sigmoid(self.shared_gate(x)) * shared)


def router_stats(
    logits: Float[Array, "B T E"],
    scores: Float[Array, "B T E"],
    experts: Int[Array, "B T k"],
    segments: Int[Array, "B T"],
) -> RouterStats:
    """Statistics of the real tokens. The balance of a sequence is E / k * sum_e share_e * mean probability_e.

    The shares count how often each expert was chosen and carry no gradient; the balance is 1 where all are used alike.
    By sequence, arXiv:2412.19437, eq. 17: then no split of the batch changes it.
    """
    num_experts, length = logits.shape[-1], logits.shape[1]
    real = (segments > 0).astype(jnp.float32)
    probs = scores / jnp.sum(scores, axis=-1, keepdims=True)
    chosen = jnp.sum(jax.nn.one_hot(experts, num_experts, dtype=jnp.float32), axis=-2) * real[..., None]

    def by_sequence(values: Array, segments: Array) -> Array:
        return jax.ops.segment_sum(values, segments, num_segments=length + 1)[segments]

    counts = jax.vmap(by_sequence)(chosen, segments)
    lengths = jnp.maximum(jax.vmap(by_sequence)(real, segments), 1.0)
    shares = jax.lax.stop_gradient(counts / lengths[..., None])
    balance = jnp.sum(shares * probs, axis=-1) * num_experts / experts.shape[-1]
    log_z = jax.nn.logsumexp(logits, axis=-1)
    # xlogy: the derivative of 0 log 0 is not a number.
    entropy = -jnp.sum(jax.scipy.special.xlogy(probs, probs), axis=-1)
    return RouterStats(
        load=jnp.sum(chosen, axis=(0, 1)),
        balance=jnp.sum(balance * real),
        z=jnp.sum(log_z * log_z * real),
        entropy=jax.lax.stop_gradient(jnp.sum(entropy * real)),
    )
