"""AdamW with schedules, master weights or stochastic rounding of low-precision parameters, and gradient clipping."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Float

from posttrain.config import OptimizerSection
from posttrain.train.low_precision import (
    Moment,
    empty_moment,
    moment_value,
    random_words,
    stochastic_bfloat16,
    stored_moment,
)
from posttrain.tree import map_with_path
from posttrain.weights.state import Weights

Tree = TypeVar("Tree")

UNDECAYED = ("bias", "scale", "correction", "sinks")
"""Last path components excluded from weight decay: biases, norm scales, router bias corrections, attention sinks."""

Prepare = Callable[[Array], Array]
"""Function that makes an accumulated gradient the mean, clipped one in float32."""


@runtime_checkable
class Optimizer(Protocol):
    """Update rule. It returns parameters, not differences, and reads each gradient where it is used: no second tree of
    either exists."""

    def init(self, params: Any) -> Any: ...

    def update(
        self, gradients: Weights, state: Any, params: Weights, prepare: Prepare, usable: Array | None
    ) -> tuple[Weights, Any]:
        """Updated parameters and state; those given, bitwise, where `usable` is False. None: it is True."""
        ...


def decay_mask(params: Any) -> Any:
    """True for parameters with weight decay. By name, since a stacked bias has as many dimensions as a matrix."""
    return map_with_path(lambda path, _: decays(path), params)


def decays(path: str) -> bool:
    return re.split(r"[._]", path)[-1] not in UNDECAYED


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


def make_optimizer(section: OptimizerSection, num_steps: int, seed: int | None = None) -> Optimizer:
    """AdamW of the section, with its schedule. Raises ValueError without the `seed` that stochastic rounding needs.

    Clipping is done by the trainer with `clipped`, since the gradient norm is also a metric.
    """
    adam = AdamW(section=section, schedule=make_schedule(section, num_steps), seed=seed)
    if adam.rounds and seed is None:
        raise ValueError("make_optimizer: give seed: moments in 16 or 8 bits and stochastic_rounding draw random bits")
    return adam


class AdamState(NamedTuple):
    """State of `AdamW`, by path."""

    updates: Array
    """Number of updates so far."""
    mu: dict[str, Moment]
    nu: dict[str, Moment]
    masters: dict[str, Array]
    """float32 master weights of low-precision parameters; none with stochastic rounding."""


class Slot(NamedTuple):
    """One parameter with its state."""

    param: Array
    mu: Moment
    nu: Moment
    master: Array | None


class Rates(NamedTuple):
    """Scalars of one update."""

    learning_rate: Array
    corrections: tuple[Array, Array]
    """1 - beta^count of both moments."""


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """AdamW, arXiv:1711.05101, in float32 on master weights of low-precision parameters, so that updates below their
    rounding accumulate.

    `section.moments` stores the moments of matrices in fewer bits, and `section.stochastic_rounding` the parameters
    without masters. All of these are rounded stochastically: with beta2 = 0.999 a second moment changes by less than
    half the distance of two bfloat16 numbers, and would never decay. The random bits are a function of seed, number of
    the update, path and layer.
    """

    section: OptimizerSection
    schedule: optax.Schedule
    seed: int | None

    @property
    def rounds(self) -> bool:
        return self.section.moments != "float32" or self.section.stochastic_rounding

    def init(self, params: Weights) -> AdamState:
        low = {} if self.section.stochastic_rounding else {path: p for path, p in params.items() if _is_low(p)}
        return AdamState(
            updates=jnp.zeros((), jnp.int32),
            mu={path: self._empty(path, p, signed=True) for path, p in params.items()},
            nu={path: self._empty(path, p, signed=False) for path, p in params.items()},
            masters={path: p.astype(jnp.float32) for path, p in low.items()},
        )

    def _empty(self, path: str, param: Any, *, signed: bool) -> Moment:
        small = param.ndim < 2 or not decays(path)
        return empty_moment(param, "float32" if small else self.section.moments, signed=signed)

    def update(
        self, gradients: Weights, state: AdamState, params: Weights, prepare: Prepare, usable: Array | None
    ) -> tuple[Weights, AdamState]:
        step = state.updates + 1
        betas = self.section.beta1, self.section.beta2
        rates = Rates(self.schedule(state.updates), (1 - betas[0] ** step, 1 - betas[1] ** step))
        key = None if self.seed is None else jax.random.fold_in(jax.random.key(self.seed), step)
        slots = {}
        for path, param in params.items():
            slot = Slot(param, state.mu[path], state.nu[path], state.masters.get(path))
            own = None if key is None else jax.random.fold_in(key, zlib.crc32(path.encode()))

            def one(slot: Slot, gradient: Array, key: Array | None, path: str = path) -> Slot:
                new = self._updated(slot, prepare(gradient), rates, key, decays(path))
                return new if usable is None else jax.tree.map(lambda n, o: jnp.where(usable, n, o), new, slot)

            slots[path] = self._by_layer(one, slot, gradients[path], own)
        new_state = AdamState(
            updates=step if usable is None else jnp.where(usable, step, state.updates),
            mu={path: slot.mu for path, slot in slots.items()},
            nu={path: slot.nu for path, slot in slots.items()},
            masters={path: slot.master for path, slot in slots.items() if slot.master is not None},
        )
        return {path: slot.param for path, slot in slots.items()}, new_state

    def _by_layer(self, one: Callable[..., Slot], slot: Slot, gradient: Array, key: Array | None) -> Slot:
        """Update a stack of matrices layer by layer in place, since rounding takes temporaries as large as it reads."""
        if key is None or not self.rounds or gradient.ndim < 3:
            return one(slot, gradient, key)

        def layer(index: Array, stack: Slot) -> Slot:
            here = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), (stack, gradient))
            new = one(*here, jax.random.fold_in(key, index))
            return jax.tree.map(lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, index, 0), stack, new)

        return jax.lax.fori_loop(0, gradient.shape[0], layer, slot)

    def _updated(self, slot: Slot, gradient: Array, rates: Rates, key: Array | None, decayed: bool) -> Slot:
        section, (first, second) = self.section, rates.corrections
        full = slot.param.astype(jnp.float32) if slot.master is None else slot.master
        mu = (1 - section.beta1) * gradient + section.beta1 * moment_value(slot.mu)
        nu = (1 - section.beta2) * jnp.square(gradient) + section.beta2 * moment_value(slot.nu)
        change = (mu / first) / (jnp.sqrt(nu / second) + section.eps)
        if decayed and section.weight_decay:
            change += section.weight_decay * full
        new = full - rates.learning_rate * change
        if not self.rounds:
            return Slot(new.astype(slot.param.dtype), mu, nu, None if slot.master is None else new)
        assert key is not None
        keys = jax.random.split(key)
        for_mu, for_nu = random_words(keys[0], gradient.shape)
        if slot.master is None and _is_low(slot.param):
            param = stochastic_bfloat16(new, random_words(keys[1], gradient.shape)[0])
        else:
            param = new.astype(slot.param.dtype)
        master = None if slot.master is None else new
        return Slot(param, stored_moment(mu, slot.mu, for_mu), stored_moment(nu, slot.nu, for_nu), master)


@dataclass(frozen=True)
class OptaxOptimizer:
    """Any optax transformation as an `Optimizer`, without master weights."""

    transformation: optax.GradientTransformation

    def init(self, params: Weights) -> Any:
        return self.transformation.init(params)

    def update(
        self, gradients: Weights, state: Any, params: Weights, prepare: Prepare, usable: Array | None
    ) -> tuple[Weights, Any]:
        updates, new_state = self.transformation.update(jax.tree.map(prepare, gradients), state, params)
        sums = {path: p.astype(jnp.float32) + updates[path].astype(jnp.float32) for path, p in params.items()}
        # An optimizer may adopt the gradient's dtype; a changed dtype would recompile the next step.
        new_state = jax.tree.map(lambda new, old: jnp.asarray(new).astype(old.dtype), new_state, state)
        new = {path: sums[path].astype(p.dtype) for path, p in params.items()}, new_state
        return new if usable is None else jax.tree.map(lambda n, o: jnp.where(usable, n, o), new, (params, state))


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
