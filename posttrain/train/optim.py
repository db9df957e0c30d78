"""AdamW with schedules, float32 master weights of low-precision parameters, and global norm clipping."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Float

from posttrain.config import OptimizerSection
from posttrain.tree import map_with_path

Tree = TypeVar("Tree")

UNDECAYED = ("bias", "scale", "correction", "sinks")
"""Last path components excluded from weight decay: biases, norm scales, router bias corrections, attention sinks."""


def decay_mask(params: Any) -> Any:
    """True for parameters with weight decay. By name, since a stacked bias has as many dimensions as a matrix."""
    return map_with_path(lambda path, _: re.split(r"[._]", path)[-1] not in UNDECAYED, params)


def make_schedule(section: OptimizerSection, num_steps: int) -> optax.Schedule:
    """Learning rate of step 0, 1, ...: linear warm-up from 0 over `warmup_steps`, then the schedule down to 0 at
    `num_steps`.

    With warm-up the first step has rate 0, as in Hugging Face's `get_*_schedule_with_warmup`.
    """
    peak, warmup, kind = section.learning_rate, section.warmup_steps, section.schedule

    def schedule(step: Any) -> Float[Array, ""]:
        step = jnp.asarray(step, jnp.float32)
        done = jnp.clip((step - warmup) / max(1, num_steps - warmup), 0.0, 1.0)
        if kind == "constant":
            factor = jnp.ones(())
        elif kind == "linear":
            factor = 1.0 - done
        else:
            # (1 + cos(pi x)) / 2 without cancellation near the end.
            factor = jnp.cos(0.5 * jnp.pi * done) ** 2
        return peak * jnp.where(step < warmup, step / max(1, warmup), factor)

    return schedule


def make_optimizer(section: OptimizerSection, num_steps: int) -> optax.GradientTransformation:
    """AdamW, arXiv:1711.05101, with the section's schedule; moments and master weights are float32.

    Clipping is done by the trainer with `clipped`, since the gradient norm is also a metric.
    """
    return with_master_weights(
        optax.adamw(
            make_schedule(section, num_steps),
            b1=section.beta1,
            b2=section.beta2,
            eps=section.eps,
            weight_decay=section.weight_decay,
            mask=decay_mask,
        )
    )


class MasterState(NamedTuple):
    """State of the inner optimizer, and float32 master weights of low-precision parameters."""

    inner: Any
    masters: Any
    """Master weights; `optax.MaskedNode` (no leaf) for 32-bit parameters."""


def with_master_weights(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Run `tx` in float32 on master weights of bfloat16 parameters, so that updates below their rounding accumulate.

    The returned update moves each parameter to its rounded master. `params` is required in `update`.
    """

    def init(params: Any) -> MasterState:
        masters = jax.tree.map(lambda p: p.astype(jnp.float32) if _is_low(p) else optax.MaskedNode(), params)
        return MasterState(inner=tx.init(_full(params, masters)), masters=masters)

    def update(grads: Any, state: MasterState, params: Any = None) -> tuple[Any, MasterState]:
        if params is None:
            raise ValueError("with_master_weights: update needs params; call tx.update(grads, state, params)")
        full = _full(params, state.masters)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, full)
        updates, inner = tx.update(grads, state.inner, full)
        moved = optax.apply_updates(full, updates)
        masters = jax.tree.map(lambda p, new: new if _is_low(p) else optax.MaskedNode(), params, moved)
        updates = jax.tree.map(
            lambda p, u, new: new - p.astype(jnp.float32) if _is_low(p) else u, params, updates, moved
        )
        return updates, MasterState(inner=inner, masters=masters)

    return optax.GradientTransformation(init, update)


def rounded_masters(params: Mapping[str, Array], state: Any) -> dict[str, Array]:
    """Parameters that have master weights, read from those in the state.

    They are what `update` moves them to. Unlike the sum of a parameter and its update, they need no float32 array
    besides the masters.
    """
    masters = state.masters if isinstance(state, MasterState) else {}
    return {path: masters[path].astype(p.dtype) for path, p in params.items() if _is_low(p) and path in masters}


def global_norm(grads: Any) -> Float[Array, ""]:
    """Square root of the sum of all squares, in float32."""
    squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)]
    return jnp.sqrt(jnp.sum(jnp.stack(squares)))


def clipped(grads: Tree, norm: Float[Array, ""], max_norm: float) -> Tree:
    """Clip gradients of this global norm: multiply by min(1, max_norm / norm).

    Gradients within `max_norm` are returned unchanged (bitwise). A norm that is not finite makes every gradient NaN.
    """
    factor = jnp.where(jnp.isfinite(norm), max_norm / jnp.maximum(norm, max_norm), jnp.nan)
    return jax.tree.map(lambda g: (g.astype(jnp.float32) * factor).astype(g.dtype), grads)


def _is_low(parameter: Any) -> bool:
    return jnp.issubdtype(parameter.dtype, jnp.floating) and parameter.dtype.itemsize < 4


def _full(params: Any, masters: Any) -> Any:
    """Parameters in float32: the master weight if there is one."""
    return jax.tree.map(lambda p, m: m if _is_low(p) else p, params, masters)
