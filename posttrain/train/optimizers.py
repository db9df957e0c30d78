"""Optimisers: optax transformations on float32 values, with moments in fewer bits, float32 masters and stochastic
rounding."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Float

from posttrain.config import MomentType
from posttrain.errors import ConfigError
from posttrain.train.layer_matching import Matching
from posttrain.train.low_precision import (
    Blocks,
    Moment,
    empty_moment,
    moment_value,
    random_words,
    stochastic_bfloat16,
    stored_moment,
    to_nearest,
)
from posttrain.tree import path_str
from posttrain.weights.state import ModelWeights, Parameter, Weights

Tree = TypeVar("Tree")

SIGNED: Mapping[str, bool] = {
    **dict.fromkeys(("ScaleByAdamState.mu", "ScaleByAmsgradState.mu", "ScaleByBeliefState.mu"), True),
    **dict.fromkeys(("ScaleByLionState.mu", "ScaleByNovogradState.mu", "TraceState.trace", "EmaState.ema"), True),
    **dict.fromkeys(("ScaleByAdamState.nu", "ScaleByAmsgradState.nu", "ScaleByAmsgradState.nu_max"), False),
    **dict.fromkeys(("ScaleByBeliefState.nu", "ScaleByRmsState.nu", "ScaleByRmsWithCountState.nu"), False),
    **dict.fromkeys(("ScaleByRssState.sum_of_squares", "FactoredState.v"), False),
    **dict.fromkeys(("ScaleByAdaDeltaState.e_g", "ScaleByAdaDeltaState.e_x"), False),
}
"""Moments of optax's states that 8-bit codes may hold, and whether they are signed: codes without a sign never round a
positive number to 0. Differences of moments and parameters of earlier steps, such as in `optax.contrib`, are none."""

SCHEDULES = frozenset(
    (
        *("ScaleByScheduleState.count", "WrappedScheduleState.count", "WeightDecaySchedule.count"),
        *("InjectHyperparamsState.count", "InjectStatefulHyperparamsState.count"),
    )
)
"""Fields of optax's states that are the argument of a schedule alone."""

Prepare = Callable[[Array], Array]
"""Function that makes an accumulated gradient the mean, clipped one in float32."""


class Trained(dict[str, Parameter]):
    """Declarations of the parameters that an optimizer trains, by path. ConfigError for one that it lacks."""

    def __missing__(self, path: str) -> Parameter:
        raise ConfigError(
            f"optimizer: it was made for other parameters, without {path}; make it of the model that is trained, after "
            "its adapter, and with the layer matching of its trainer"
        )


def trained_parameters(model: ModelWeights, matching: Matching | None = None) -> Trained:
    """Declarations of what a trainer trains: the model's parameters and the projections of its layer matching."""
    declared, trained = model.parameters(), model.trainable()
    projections = {} if matching is None else matching.parameters()
    return Trained({path: one for path, one in declared.items() if path in trained} | projections)


class OptimizerState(NamedTuple):
    """State of `Optimizer`."""

    updates: Array
    """Number of updates so far."""
    inner: Any
    """State of the transformation for all parameters, with its moments as they are stored."""
    masters: dict[str, Array]
    """float32 master weights of low-precision parameters, by path; none with stochastic rounding."""
    average: dict[str, Array]
    """Exponential moving average of the parameters in float32, by path; none without `Optimizer.average`."""


class Average(NamedTuple):
    """Exponential moving average of parameters."""

    decay: float
    start: int
    """Updates after which it begins; up to then it is the parameters themselves."""


class Group(NamedTuple):
    """Parameters that are updated together, with their state."""

    params: Weights
    inner: Any
    masters: dict[str, Array]
    average: dict[str, Array]


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Update rule: any optax transformation, on float32 gradients, states, and master weights of low-precision
    parameters, so that updates below their rounding accumulate.

    It returns parameters, not differences, and reads each gradient where it is used. `moments` stores what the state
    has in the shape of a matrix in fewer bits, and `stochastic_rounding` the parameters without masters. Both are
    rounded stochastically: with beta2 = 0.999 a second moment changes by less than half the distance of two bfloat16
    numbers, and would never decay. The random bits are a function of `seed`, number of the update, path and layer.
    `elementwise`: the transformation updates each element on its own, but for parameters in `matrixwise`, of which it
    updates each on its own. Stacks of matrices are then rounded layer by layer, those in `matrixwise` one after the
    other, so that there is no second tree of gradients or parameters; otherwise it gets all of them in float32.
    """

    transformation: optax.GradientTransformation = field(compare=False)
    recipe: Hashable = field(default_factory=object)
    """Values that the transformation is a function of; by default it is equal to no other."""
    elementwise: bool = False
    matrixwise: frozenset[str] = field(default=frozenset(), compare=False)
    moments: MomentType = "float32"
    stochastic_rounding: bool = False
    seed: int | None = None
    average: Average | None = None
    parameters: Trained = field(default_factory=Trained, compare=False)
    """Declarations of what it trains; a trainer gives its own to an optimizer without any."""
    labels: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Group of each parameter, where norms of update and weights are metrics."""

    def __post_init__(self) -> None:
        if self.rounds and self.seed is None:
            raise ConfigError("optimizer: give seed: moments in 16 or 8 bits and stochastic_rounding draw random bits")

    def with_parameters(self, trained: Trained) -> Optimizer:
        """This optimizer for parameters of a trainer. ConfigError for one that was made for others."""
        if not self.parameters:
            return replace(self, parameters=trained)
        for path in trained:
            self.parameters[path]
        return self

    @property
    def rounds(self) -> bool:
        return self.moments != "float32" or self.stochastic_rounding

    def init(self, params: Weights) -> OptimizerState:
        """State before the first update. ConfigError for a state that is not `elementwise`, or cannot be saved."""
        full = {path: p.astype(jnp.float32) for path, p in params.items()}
        inner = jax.tree.map(jnp.asarray, self.transformation.init(full))
        self._check(inner, params)
        low = {} if self.stochastic_rounding else {path: full[path] for path, p in params.items() if is_low(p)}
        average = {} if self.average is None else full
        return OptimizerState(jnp.zeros((), jnp.int32), self._empty(inner, params), low, average)

    def _check(self, inner: Any, params: Weights) -> None:
        for place in _places(inner, params):
            leaf, shape = place.leaf, params[place.path].shape if place.path else ()
            if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
                raise ConfigError(
                    f"optimizer: {place.name} of its state is {leaf.dtype}, and a checkpoint holds numbers; keep "
                    "jax.random.key_data of a key"
                )
            counts = place.path is not None or jnp.issubdtype(leaf.dtype, jnp.integer)
            alone = self.elementwise and place.path not in self.matrixwise
            if alone and (leaf.shape != shape or not counts):
                whose = "all parameters together" if place.path is None else f"{place.path} {list(shape)}"
                raise ConfigError(
                    f"optimizer.elementwise: {place.name} of its state, {leaf.dtype}{list(leaf.shape)}, belongs to "
                    f"{whose}, and not to single elements; remove elementwise"
                )

    def _empty(self, inner: Any, params: Weights) -> Any:
        """State as it is stored: what has the shape of a matrix or a table in fewer bits."""

        def stored(place: Place) -> Moment:
            param = params.get(place.path or "")
            if param is None or not self._is_stored(place, param):
                return place.leaf
            if self.moments == "int8" and place.field not in SIGNED:
                raise ConfigError(
                    f"optimizer.moments=int8: {place.name} of its state, {place.field or 'no field of a named tuple'}, "
                    "is no moment that 8-bit codes are known to hold; use bfloat16 or float32, or keep moments in "
                    "optax.ScaleByAdamState or optax.TraceState"
                )
            like = empty_moment(param, self.moments, signed=SIGNED.get(place.field, True))
            return stored_moment(place.leaf, like, to_nearest(param.shape))

        leaves = [stored(place) for place in _places(inner, params)]
        return jax.tree.unflatten(jax.tree.structure(inner), leaves)

    def _is_stored(self, place: Place, param: Array) -> bool:
        assert place.path is not None
        if self.moments == "float32" or self.parameters[place.path].role not in ("kernel", "embedding"):
            return False
        return place.leaf.shape == param.shape and jnp.issubdtype(place.leaf.dtype, jnp.floating)

    def update(
        self,
        gradients: Weights,
        state: OptimizerState,
        params: Weights,
        prepare: Prepare,
        usable: Array | None,
        factors: Mapping[str, Array] = MappingProxyType({}),
        *,
        at: Array | None = None,
    ) -> tuple[Weights, OptimizerState]:
        """Updated parameters and state; those given, bitwise, where `usable` is False. None: it is True. `factors` of
        some stacks, which broadcast to them, multiply what the update gives. `at`: number of steps before this one,
        skipped ones included, which schedules read; None: the number of updates."""
        step = state.updates + 1
        key = None if self.seed is None else jax.random.fold_in(jax.random.key(self.seed), step)
        keys = {} if key is None else {path: jax.random.fold_in(key, zlib.crc32(path.encode())) for path in params}

        def one(
            group: Group, gradients: Weights, keys: dict[str, Array], factors: Mapping[str, Array] = factors
        ) -> Group:
            new = self._updated(group, {path: prepare(g) for path, g in gradients.items()}, keys, factors, step)
            return new if usable is None else jax.tree.map(lambda n, o: jnp.where(usable, n, o), new, group)

        inner = at_step(state.inner, params, state.updates if at is None else at)
        whole = Group(params, inner, state.masters, state.average)
        # Rounding takes temporaries as large as it reads.
        stacks = [path for path, g in gradients.items() if self.elementwise and self.rounds and g.ndim > 2]
        rest = [path for path in params if path not in stacks]
        parts = [one(_part(whole, rest), {path: gradients[path] for path in rest}, keys)] if rest else []
        for path in stacks:
            part = _part(whole, [path])
            at_once = path in self.matrixwise
            parts.append(
                one(part, {path: gradients[path]}, keys)
                if at_once
                else _by_layer(one, part, gradients[path], keys[path], factors.get(path))
            )
        new = _joined(whole, parts)
        updates = step if usable is None else jnp.where(usable, step, state.updates)
        return new.params, OptimizerState(updates, new.inner, new.masters, new.average)

    def _updated(
        self, group: Group, gradients: Weights, keys: dict[str, Array], factors: Mapping[str, Array], step: Array
    ) -> Group:
        full = {path: group.masters.get(path, p).astype(jnp.float32) for path, p in group.params.items()}
        values = self._values(group.inner, group.params)
        changes, inner = self.transformation.update(gradients, values, full)
        new = {path: full[path] + changes[path] for path in full}
        new |= {path: new[path] * factor for path, factor in factors.items() if path in new}
        halves = {path: jax.random.split(key) for path, key in keys.items()} if self.rounds else {}
        params = {}
        for path, before in group.params.items():
            if self.stochastic_rounding and is_low(before):
                params[path] = stochastic_bfloat16(new[path], random_words(halves[path][1], before.shape)[0])
            else:
                params[path] = new[path].astype(before.dtype)
        inner = self._stored(inner, group, {path: half[0] for path, half in halves.items()})
        average = {path: self._averaged(old, new[path], step) for path, old in group.average.items()}
        return Group(params, inner, {path: new[path] for path in group.masters}, average)

    def _averaged(self, old: Array, new: Array, step: Array) -> Array:
        assert self.average is not None
        decay = jnp.where(step > self.average.start, jnp.float32(self.average.decay), 0.0)
        return decay * old + (1.0 - decay) * new

    def _values(self, inner: Any, params: Weights) -> Any:
        """State in float32."""
        if self.moments == "float32":
            return inner
        places = list(_places(inner, params))
        leaves = [moment_value(place.leaf) if _has_shape(place, params) else place.leaf for place in places]
        return jax.tree.unflatten(jax.tree.structure(inner, is_leaf=_is_blocks), leaves)

    def _stored(self, inner: Any, group: Group, keys: dict[str, Array]) -> Any:
        """New state as the old one is stored. ConfigError for another structure, which would recompile each step."""
        before, after = list(_places(group.inner, group.params)), list(_places(inner, group.params))
        if [place.name for place in before] != [place.name for place in after]:
            raise ConfigError("optimizer: its update returns a state of another structure than its init")
        used = dict.fromkeys(group.params, 0)
        leaves: list[Moment] = []
        for old, new in zip(before, after, strict=True):
            if self.moments == "float32" or not _has_shape(old, group.params):
                leaves.append(jnp.asarray(new.leaf).astype(old.leaf.dtype))
                continue
            assert old.path is not None
            pair, half = divmod(used[old.path], 2)
            used[old.path] += 1
            key = jax.random.fold_in(keys[old.path], pair) if pair else keys[old.path]
            leaves.append(stored_moment(new.leaf, old.leaf, random_words(key, new.leaf.shape)[half]))
        return jax.tree.unflatten(jax.tree.structure(group.inner, is_leaf=_is_blocks), leaves)


def at_step(inner: Any, params: Weights, step: Array) -> Any:
    """State of a transformation whose schedules are at a step, from 0. Counts of moments, such as Adam's for the
    correction of their bias, stay: they count the gradients in them."""
    places = list(_places(inner, params))
    leaves = [jnp.asarray(step, x.leaf.dtype) if x.field in SCHEDULES else x.leaf for x in places]
    return jax.tree.unflatten(jax.tree.structure(inner, is_leaf=_is_blocks), leaves)


def _by_layer(one: Callable[..., Group], group: Group, gradient: Array, key: Array, factor: Array | None) -> Group:
    """Update a stack of matrices layer by layer in place."""
    (path,) = group.params
    start, structure = jax.tree.flatten(group)

    def layer(index: Array, stack: list[Array]) -> list[Array]:
        def here(x: Array) -> Array:
            return jax.lax.dynamic_index_in_dim(x, index, keepdims=False)

        # Every layer has the counts from before the update.
        own = [here(x) if before.ndim else before for x, before in zip(stack, start, strict=True)]
        layers, keys = jax.tree.unflatten(structure, own), {path: jax.random.fold_in(key, index)}
        factors = {} if factor is None else {path: here(factor)}
        new = jax.tree.leaves(one(layers, {path: here(gradient)}, keys, factors))
        pairs = zip(stack, new, strict=True)
        return [jax.lax.dynamic_update_index_in_dim(x, y, index, 0) if x.ndim else y for x, y in pairs]

    done: Group = jax.tree.unflatten(structure, jax.lax.fori_loop(0, gradient.shape[0], layer, start))
    return done


class Place(NamedTuple):
    """Leaf of a transformation's state."""

    name: str
    """Dotted path of the leaf."""
    path: str | None
    """Parameter whose state it is; None: of all."""
    field: str
    """Innermost named tuple that holds it, and its field there: `ScaleByAdamState.nu`."""
    leaf: Any


def _places(inner: Any, params: Weights) -> Iterator[Place]:
    """Leaves of a transformation's state, by structure: below a mapping of the parameters is the state of one."""
    for keys, leaf in jax.tree_util.tree_leaves_with_path(inner, is_leaf=_is_blocks):
        node, path, field = inner, None, ""
        for key in keys:
            if isinstance(key, jax.tree_util.GetAttrKey):
                field, node = f"{type(node).__name__}.{key.name}", getattr(node, key.name)
            elif isinstance(key, jax.tree_util.DictKey):
                path, node = key.key if _is_by_path(node, params) else path, node[key.key]
            elif isinstance(key, jax.tree_util.SequenceKey):
                node = node[key.idx]
            else:  # a node of a class that is known only to who registered it
                break
        yield Place(path_str(keys), path, field, leaf)


def _is_blocks(node: Any) -> bool:
    return isinstance(node, Blocks)


def _is_by_path(node: Any, params: Weights) -> bool:
    return isinstance(node, dict) and node.keys() == params.keys()


def _has_shape(place: Place, params: Weights) -> bool:
    """Tell whether a leaf has the shape of its parameter, and holds numbers that are rounded."""
    if place.path is None:
        return False
    return _is_blocks(place.leaf) or (
        place.leaf.shape == params[place.path].shape and jnp.issubdtype(place.leaf.dtype, jnp.floating)
    )


def _part(whole: Group, paths: Sequence[str]) -> Group:
    """Some of the parameters, as a tree of their own."""

    def own(node: Any) -> Any:
        return {path: node[path] for path in paths} if _is_by_path(node, whole.params) else node

    inner = jax.tree.map(own, whole.inner, is_leaf=lambda node: _is_by_path(node, whole.params))
    masters, average = (
        {path: arrays[path] for path in paths if path in arrays} for arrays in (whole.masters, whole.average)
    )
    return Group({path: whole.params[path] for path in paths}, inner, masters, average)


def _joined(whole: Group, parts: Sequence[Group]) -> Group:
    """Inverse of `_part` for all parameters; what belongs to all of them is that of the first part."""

    def merged(found: Sequence[Any], like: dict[str, Any]) -> dict[str, Any]:
        every = {path: value for one in found for path, value in one.items()}
        return {path: every[path] for path in like}

    def joined(node: Any, *found: Any) -> Any:
        return merged(found, node) if _is_by_path(node, whole.params) else found[0]

    states = [part.inner for part in parts]
    inner = jax.tree.map(joined, whole.inner, *states, is_leaf=lambda node: _is_by_path(node, whole.params))
    return Group(
        merged([part.params for part in parts], whole.params),
        inner,
        merged([part.masters for part in parts], whole.masters),
        merged([part.average for part in parts], whole.average),
    )


def parameter_of(keys: Sequence[Any], weights: Mapping[str, Any]) -> str | None:
    """Parameter whose state lies at these keys of an optimizer's state; None: that of all."""
    named = [key.key for key in keys if getattr(key, "key", None) in weights]
    return named[-1] if named else None


def state_bytes(optimizer: Optimizer, params: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of the state and master weights of each parameter, given as shapes; counters are left out."""
    total = dict.fromkeys(params, 0)
    for keys, leaf in jax.tree_util.tree_leaves_with_path(jax.eval_shape(optimizer.init, dict(params))):
        if (path := parameter_of(keys, params)) is not None:
            total[path] += leaf.size * leaf.dtype.itemsize
    return total


def global_norm(grads: Any) -> Float[Array, ""]:
    """Square root of the sum of all squares, in float32."""
    squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)]
    return jnp.sqrt(jnp.sum(jnp.stack(squares)))


def update_metrics(before: Weights, after: Weights, labels: Mapping[str, str]) -> dict[str, Float[Array, ""]]:
    """Norms of an update and of the weights after it, by group: `update_norm/muon`, `weight_norm/muon`."""
    found: dict[str, Array] = {}
    for label in sorted({labels[path] for path in after if path in labels}):
        new = {path: x.astype(jnp.float32) for path, x in after.items() if labels.get(path) == label}
        change = {path: x - before[path].astype(jnp.float32) for path, x in new.items()}
        found |= {f"update_norm/{label}": global_norm(change), f"weight_norm/{label}": global_norm(new)}
    return found


def clipped(grads: Tree, norm: Float[Array, ""], max_norm: float) -> Tree:
    """Clip gradients of this global norm: multiply by min(1, max_norm / norm).

    Gradients within `max_norm` are returned unchanged (bitwise). A norm that is not finite makes every gradient NaN.
    """
    factor = jnp.where(jnp.isfinite(norm), max_norm / jnp.maximum(norm, max_norm), jnp.nan)
    return jax.tree.map(lambda g: (g.astype(jnp.float32) * factor).astype(g.dtype), grads)


def is_low(parameter: Any) -> bool:
    """Tell whether an array holds floating-point numbers of less than 32 bits."""
    return jnp.issubdtype(parameter.dtype, jnp.floating) and parameter.dtype.itemsize < 4
