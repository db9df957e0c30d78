"""Reference policies: the actor at the start, without its adapter, a moving copy, or another checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Float

from posttrain.batch import Batch
from posttrain.cluster.scorers import FrozenModel, own_routing
from posttrain.cluster.transfer import HeldWeights, model_on, moved
from posttrain.models.decoder import Decoder
from posttrain.train.trainer import Trainer
from posttrain.tree import replace
from posttrain.weights.state import Weights, without_adapter


@runtime_checkable
class ReferencePolicy(Protocol):
    """Model that the KL penalty compares the actor with."""

    def logps(self, batch: Batch) -> Float[np.ndarray, "B T"]:
        """Log-probabilities of the batch's tokens, at the actor's temperature."""
        ...

    def arrays(self) -> Iterable[Array]:
        """Arrays held beside the actor's."""
        ...

    def refresh(self, version: int) -> None:
        """Follow the actor, whose weights have this version now, if the policy does."""
        ...

    def state(self) -> dict[str, Any]:
        """Arrays that a checkpoint must hold; none if the policy never changes."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Reference:
    """The actor at construction, on the actor's devices. Only trained parameters are copied: an adapter and the modules
    trained in full beside it; the base is shared.

    With `refresh_every`, after so many versions the copy becomes `mixup` x actor + (1 - `mixup`) x copy.
    """

    def __init__(self, actor: Trainer, *, offload: bool = False, refresh_every: int | None = None, mixup: float = 1.0):
        self._actor, self._refresh_every, self._mixup = actor, refresh_every, mixup
        self._held = HeldWeights.of(jax.tree.map(jnp.copy, actor.params), offload=offload)

    def logps(self, batch: Batch) -> Float[np.ndarray, "B T"]:
        with self._held.on_devices() as own:
            return np.asarray(self._actor.stats(own_routing(batch), {**self._actor.weights, **own}).logps)

    def added_to(self, batch: Batch) -> Batch:
        """Add reference log-probabilities to the batch."""
        return replace(batch, ref_logps=self.logps(batch))

    def for_step(self, batch: Batch) -> Batch:
        """`added_to` for the actor's next step; the first step is compiled in the meantime."""
        self._actor.compile_ahead(replace(batch, ref_logps=np.zeros(batch.shape, np.float32)), own_routing(batch))
        return self.added_to(batch)

    def refresh(self, version: int) -> None:
        if self._refresh_every is not None and version % self._refresh_every == 0:
            self._held.change(lambda own: mixed(self._actor.params, own, self._mixup))

    def arrays(self) -> Iterable[Array]:
        return self._held.weights.values()

    def state(self) -> dict[str, Any]:
        if self._refresh_every is None:
            return {}
        with self._held.on_devices() as own:
            return dict(own)

    def restore(self, state: Mapping[str, Any]) -> None:
        if state:
            self._held.store(dict(state))


class WithoutAdapter:
    """The actor's model without its adapter: no copy."""

    def __init__(self, actor: Trainer):
        self._actor = actor

    def logps(self, batch: Batch) -> Float[np.ndarray, "B T"]:
        return np.asarray(self._actor.stats(own_routing(batch), without_adapter(self._actor.weights)).logps)

    def arrays(self) -> Iterable[Array]:
        return ()

    def refresh(self, version: int) -> None:
        """Do nothing: the base never changes."""

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        assert not state


class ModelReference:
    """Another model, or a copy of the actor on other devices: `model` on `mesh`, `rows` per forward pass."""

    def __init__(
        self,
        model: Decoder,
        mesh: Mesh,
        *,
        temperature: float,
        rows: int | None,
        offload: bool = False,
        follows: Trainer | None = None,
        refresh_every: int | None = None,
        mixup: float = 1.0,
    ):
        """`follows`: the actor that `refresh` copies, with `refresh_every` and `mixup` as in `Reference`."""
        self._model = FrozenModel(model, mesh, temperature=temperature, rows=rows, offload=offload)
        self._follows, self._refresh_every, self._mixup = follows, refresh_every, mixup

    @classmethod
    def of_actor(cls, actor: Trainer, mesh: Mesh, **settings: Any) -> ModelReference:
        """Copy of the actor on other devices."""
        return cls(model_on(actor.model, mesh), mesh, follows=actor, **settings)

    def logps(self, batch: Batch) -> Float[np.ndarray, "B T"]:
        # Zeros at tokens without a weight, as the trainer's.
        return self._model.logps(own_routing(batch))

    def refresh(self, version: int) -> None:
        if self._follows is None or self._refresh_every is None or version % self._refresh_every:
            return
        params, held = self._follows.params, self._model.held

        def followed(own: Weights) -> Weights:
            mine = {path: own[path] for path in params if path in own}
            there = moved({path: params[path] for path in mine}, {path: w.sharding for path, w in mine.items()})
            return {**own, **mixed(there, mine, self._mixup)}

        held.change(followed)

    def arrays(self) -> Iterable[Array]:
        return self._model.arrays()

    def state(self) -> dict[str, Any]:
        if self._refresh_every is None:
            return {}
        with self._model.held.on_devices() as own:
            return dict(own)

    def restore(self, state: Mapping[str, Any]) -> None:
        if state:
            self._model.held.store(dict(state))


@jax.jit
def _mixed(new: Weights, old: Weights, share: Array) -> Weights:
    def mix(a: Array, b: Array) -> Array:
        return (share * a.astype(jnp.float32) + (1 - share) * b.astype(jnp.float32)).astype(b.dtype)

    return {path: mix(new[path], old[path]) for path in old}


def mixed(new: Weights, old: Weights, share: float) -> Weights:
    """share x new + (1 - share) x old in float32, in the type of the old ones; a copy of the new ones for share 1."""
    if share == 1.0:
        return {path: jnp.copy(new[path]) for path in old}
    return _mixed(new, old, jnp.float32(share))
