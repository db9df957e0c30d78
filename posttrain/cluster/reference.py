"""Models that only score, and where their weights lie: references, teachers, reward models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Float

from posttrain.batch import Batch, TopK, own_routing, rows_per_pass, teacher_batch
from posttrain.cluster.sync import HeldWeights, model_on, moved
from posttrain.kernels.logits.token_stats import token_stats, top_k
from posttrain.kernels.platform import platform_of, traced_for
from posttrain.mesh import BATCH_SPEC, row_shards
from posttrain.models.decoder import Decoder
from posttrain.runtime.profiler import span
from posttrain.runtime.xla import compile_options
from posttrain.train.optimizers import is_low
from posttrain.train.trainer import Trainer
from posttrain.tree import replace
from posttrain.weights.state import ModelWeights, Weights, WeightShapes, without_adapter


class FrozenModel:
    """Frozen model (teacher, reward model) on its mesh: scores of host rows, `rows` of them per forward pass.

    `temperature`: of `logps`, and of the divergence that `top_k` serves. `k`: number of ids of `top_k`. `offload`: its
    weights are in the host's memory between uses.
    """

    def __init__(
        self,
        model: Decoder,
        mesh: Mesh,
        *,
        temperature: float,
        rows: int | None = None,
        k: int = 1,
        offload: bool = False,
    ):
        self._weights, self._mesh, self._rows = ModelWeights(model), mesh, rows
        self.held = HeldWeights(self._weights.read, self._weights.write, offload=offload)
        vocab_size = model.config.vocab_size

        def logps(model: Decoder, hidden: Array, batch: Batch) -> Array:
            stats = token_stats(
                model.logits,
                hidden,
                jnp.asarray(batch.tokens),
                jnp.asarray(batch.segments),
                temperature=temperature,
                vocab_size=vocab_size,
                only=jnp.asarray(batch.loss_weight) != 0,
                mesh=mesh,
            )
            return stats.logps

        def best(model: Decoder, hidden: Array, batch: Batch) -> TopK:
            return top_k(
                model.logits,
                hidden,
                jnp.asarray(batch.tokens),
                k=k,
                temperature=temperature,
                vocab_size=vocab_size,
                only=jnp.asarray(batch.loss_weight) != 0,
                mesh=mesh,
            )

        def scores(model: Decoder, hidden: Array, batch: Batch) -> Array:
            return model.scores(hidden)

        self._logps, self._top_k, self._scores = map(self._program, (logps, best, scores))

    @property
    def weights(self) -> Weights:
        """Parameters by path, where they lie between uses."""
        return self.held.weights

    def arrays(self) -> Iterable[Array]:
        """Arrays held between uses."""
        return self.held.weights.values()

    def at(self, temperature: float) -> FrozenModel:
        """This model at another temperature."""
        return FrozenModel(self._weights.model, self._mesh, temperature=temperature, rows=self._rows)

    def logps(self, batch: Batch) -> Float[np.ndarray, "B T"]:
        """Log-probabilities of the tokens that have a weight."""
        return self._in_passes(self._logps, batch)

    def top_k(self, batch: Batch) -> TopK:
        """Most probable ids at each token that has a weight."""
        return self._in_passes(self._top_k, batch)

    def scores(self, batch: Batch) -> Float[np.ndarray, "B T"]:
        """Scores of a reward model at each token."""
        return self._in_passes(self._scores, batch)

    def lower_logps(self, weights: WeightShapes, batch: Batch) -> jax.stages.Lowered:
        """Lower `logps` of one pass for weights and a batch of shapes."""
        return self._logps.lower(weights, self._shapes(batch))

    def lower_top_k(self, weights: WeightShapes, batch: Batch) -> jax.stages.Lowered:
        """Lower `top_k` of one pass for weights and a batch of shapes."""
        return self._top_k.lower(weights, self._shapes(batch))

    def lower_scores(self, weights: WeightShapes, batch: Batch) -> jax.stages.Lowered:
        """Lower `scores` of one pass for weights and a batch of shapes."""
        return self._scores.lower(weights, self._shapes(batch))

    def _shapes(self, batch: Batch) -> Any:
        place = NamedSharding(self._mesh, BATCH_SPEC)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), batch)

    def _program(self, read: Callable[[Decoder, Array, Batch], Any]) -> jax.stages.Wrapped:
        """Compile a forward pass and what is read of its hidden states."""

        def forward(weights: Weights, batch: Batch) -> Any:
            model = self._weights.bind(weights)
            tokens, positions, segments = map(jnp.asarray, (batch.tokens, batch.positions, batch.segments))
            hidden, *_ = model.forward(tokens, positions, segments, images=model.images_of(batch))
            return read(model, hidden, batch)

        return jax.jit(traced_for(self._mesh, forward), compiler_options=compile_options(platform_of(self._mesh)))

    def _in_passes(self, program: Callable[[Weights, Batch], Any], batch: Batch) -> Any:
        """Run a program over all rows, in passes of one shape; zeros for empty rows at the end."""
        assert batch.parents is None, "sequences with parents are scored by the trainer"
        total, used = batch.shape[0], np.flatnonzero(np.asarray(batch.segments).any(axis=1))
        rows = rows_per_pass(total, self._rows, row_shards(self._mesh))
        # Features of pictures may be by the tower of another model.
        host, parts = jax.tree.map(np.asarray, replace(own_routing(batch), encoded=None)), []
        with self.held.on_devices() as weights:
            for start in range(0, int(used[-1]) + 1 if used.size else 1, rows):
                part = jax.tree.map(lambda x, start=start: _padded(x[start : start + rows], rows), host)
                placed = jax.device_put(part, NamedSharding(self._mesh, BATCH_SPEC))
                parts.append(jax.device_get(program(weights, placed)))
        return jax.tree.map(lambda *x: _padded(np.concatenate(x)[:total], total), *parts)


def _padded(x: np.ndarray, rows: int) -> np.ndarray:
    return np.pad(x, ((0, rows - len(x)), *((0, 0) for _ in x.shape[1:])))


@runtime_checkable
class Scorer(Protocol):
    """A model that scores the tokens of host rows, wherever it is."""

    def logps(self, batch: Batch) -> Float[np.ndarray, "B T"]: ...


class Teachers:
    """Several scorers as one."""

    def __init__(self, scorers: Sequence[Scorer]):
        self.scorers = tuple(scorers)

    @span("teacher/logps")
    def logps(self, batch: Batch) -> Float[np.ndarray, "B T"]:
        """Log-probabilities of the batch's tokens; of several teachers the mean, weighted by `teacher_weights`."""
        if batch.teacher_weights is None:
            if len(self.scorers) != 1:
                raise ValueError(
                    f"{len(self.scorers)} teachers: the batch has no teacher_weights, which one teacher needs not"
                )
            return self.scorers[0].logps(batch)
        shares = np.moveaxis(np.asarray(batch.teacher_weights), -1, 0)
        total = np.zeros(batch.shape, np.float32)
        for number, (share, teacher) in enumerate(zip(shares, self.scorers, strict=True)):
            if share.any():
                # A teacher with weight 0 may return NaN; mask it before multiplying.
                total += np.where(share > 0, share * teacher.logps(teacher_batch(batch, number)), 0.0)
        return total


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

    With `refresh_every`, after so many versions the copy becomes `mixup` x actor + (1 - `mixup`) x copy, an average
    that is kept in float32.
    """

    def __init__(self, actor: Trainer, *, offload: bool = False, refresh_every: int | None = None, mixup: float = 1.0):
        self._actor, self._refresh_every, self._mixup = actor, refresh_every, mixup
        self._held = HeldWeights.of(jax.tree.map(jnp.copy, actor.params), offload=offload)
        moving = refresh_every is not None and mixup < 1.0
        self._average = HeldWeights.of(wide_average(actor.params) if moving else {}, offload=offload)

    @span("reference/logps")
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
            refresh_average(self._actor.params, self._held, self._average, self._mixup)

    def arrays(self) -> Iterable[Array]:
        return [*self._held.weights.values(), *self._average.weights.values()]

    def state(self) -> dict[str, Any]:
        return {} if self._refresh_every is None else average_state(self._held, self._average)

    def restore(self, state: Mapping[str, Any]) -> None:
        restore_average(state, self._held, self._average)


class WithoutAdapter:
    """The actor's model without its adapter: no copy."""

    def __init__(self, actor: Trainer):
        self._actor = actor

    @span("reference/logps")
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
        moving = follows is not None and refresh_every is not None and mixup < 1.0
        trained = frozenset(follows.params) if follows is not None and moving else frozenset[str]()
        with self._model.held.on_devices() as own:
            wide = wide_average({path: own[path] for path in trained if path in own})
        self._average = HeldWeights.of(wide, offload=offload)

    @classmethod
    def of_actor(cls, actor: Trainer, mesh: Mesh, **settings: Any) -> ModelReference:
        """Copy of the actor on other devices."""
        return cls(model_on(actor.model, mesh), mesh, follows=actor, **settings)

    @span("reference/logps")
    def logps(self, batch: Batch) -> Float[np.ndarray, "B T"]:
        # Zeros at tokens without a weight, as the trainer's.
        return self._model.logps(own_routing(batch))

    def refresh(self, version: int) -> None:
        if self._follows is None or self._refresh_every is None or version % self._refresh_every:
            return
        params, held = self._follows.params, self._model.held
        with held.on_devices() as own:
            places = {path: own[path].sharding for path in params if path in own}
        refresh_average(moved({path: params[path] for path in places}, places), held, self._average, self._mixup)

    def arrays(self) -> Iterable[Array]:
        return [*self._model.arrays(), *self._average.weights.values()]

    def state(self) -> dict[str, Any]:
        return {} if self._refresh_every is None else average_state(self._model.held, self._average)

    def restore(self, state: Mapping[str, Any]) -> None:
        restore_average(state, self._model.held, self._average)


def wide_average(weights: Weights) -> Weights:
    """float32 copies of the parameters of fewer bits, in which an average of them moves: a share of a difference below
    half the distance of two of their numbers would be rounded away at each refresh."""
    return {path: w.astype(jnp.float32) for path, w in weights.items() if is_low(w)}


def refresh_average(new: Weights, held: HeldWeights, average: HeldWeights, share: float) -> None:
    """Move held weights towards new ones by a share: the `average` in float32, the held ones rounded from it."""
    with held.on_devices() as own, average.on_devices() as wide:
        mine = {path: w for path, w in own.items() if path in new}
        result = mixed(new, {**mine, **wide}, share)
        held.store({**own, **{path: w.astype(own[path].dtype) for path, w in result.items()}})
        average.store({path: result[path] for path in wide})


def average_state(held: HeldWeights, average: HeldWeights) -> dict[str, Any]:
    """Arrays of a checkpoint: what the average has in float32 is not saved a second time in fewer bits."""
    with held.on_devices() as own, average.on_devices() as wide:
        return {**own, **wide}


def restore_average(state: Mapping[str, Any], held: HeldWeights, average: HeldWeights) -> None:
    """Inverse of `average_state`; nothing for an empty state, of a reference that does not move."""
    if state:
        held.store({path: state[path].astype(w.dtype) for path, w in held.weights.items()})
        average.store({path: state[path] for path in average.weights})


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
