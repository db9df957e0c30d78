"""Optimisers from their sections: schedules, one transformation for each kind, groups of parameters with their own."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import Float

from posttrain.config import (
    Adafactor,
    AdamW,
    AnyOptimizer,
    GroupedOptimizer,
    Lion,
    Muon,
    OptimizerSection,
    UserOptimizer,
)
from posttrain.config.optimizer import KINDS, PhaseSection, WidthScaled
from posttrain.errors import ConfigError
from posttrain.models.config import ModelConfig
from posttrain.models.decoder import Decoder
from posttrain.train.layer_matching import Matching
from posttrain.train.muon import is_array, scale_by_muon
from posttrain.train.optimizers import Average, Optimizer, Trained, trained_parameters
from posttrain.tree import map_with_path
from posttrain.weights.state import ADAPTER, DRAFTER, ModelWeights, Parameter

BEFORE_LAYERS, AFTER_LAYERS = ("embed", "layer_inputs", "tower"), ("final_norm", "head", "score", "drafter", "matching")
"""Parts of a model, and of what is trained beside it, whose parameters are before and after the layers."""
BLOCK = r"^stages\.\d+\.blocks\.\d+\."
"""Start of the paths of parameters of layers, left out where names are printed."""
WIDE = "@"
"""End of the names of groups whose learning rates fall with the width of the model."""
SHARED = ("learning_rate", "schedule", "warmup_steps", "weight_decay")
"""Fields that a group of any kind has from its optimiser."""


def make_schedule(section: OptimizerSection, num_steps: int) -> optax.Schedule | None:
    """Learning rate of step 0, 1, ...: linear warm-up from 0 over `warmup_steps`, then the schedule, whose last phase
    ends at `num_steps` unless it has steps of its own. None for a transformation with a rate of its own.

    With warm-up the first step has rate 0, as in Hugging Face's `get_*_schedule_with_warmup`.
    """
    if section.learning_rate is None:
        return None
    peak, warmup = section.learning_rate, section.num_warmup_steps(num_steps)

    def warming(step: Any) -> Float[Array, ""]:
        # Not optax's linear schedule, whose rates from 0 on are differences from the peak.
        return peak * (jnp.asarray(step, jnp.float32) / warmup)

    phases = section.schedule
    if isinstance(phases, str):
        phases = (PhaseSection(kind=phases),)
    parts, starts, at, share = [], [warmup], warmup, 1.0
    for phase in phases:
        length = phase.steps or max(1, num_steps - at)
        end = share if phase.kind == "constant" else phase.end or 0.0
        parts.append(_phase(phase.kind, peak * share, peak * end, length))
        at, share = at + length, end
        starts.append(at)
    if warmup:
        parts.insert(0, warming)
    else:
        starts = starts[1:]
    return parts[0] if len(parts) == 1 else optax.join_schedules(parts, starts[:-1])


def _phase(kind: str, start: float, end: float, length: int) -> optax.Schedule:
    """Rates of steps 0, 1, ... of a phase, which stay at `end` after it."""

    def cosine(step: Any) -> Float[Array, ""]:
        # (1 + cos(pi x)) / 2 without the cancellation of optax's near the end.
        done = jnp.minimum(jnp.asarray(step, jnp.float32) / length, 1.0)
        return end + (start - end) * jnp.cos(0.5 * jnp.pi * done) ** 2

    if kind == "constant":
        return optax.constant_schedule(start)
    return cosine if kind == "cosine" else optax.linear_schedule(start, end, length)


def make_optimizer(
    section: AnyOptimizer,
    num_steps: int,
    seed: int | None = None,
    *,
    model: Decoder,
    matching: Matching | None = None,
) -> Optimizer:
    """Optimiser of a model by the section, with its schedule: what decays and what Muon takes is decided by the roles
    that the layers declare. `matching`: the trainer's layer matching, whose projections it trains too. ConfigError as
    `optimizer_of`."""
    return optimizer_of(section, trained_parameters(ModelWeights(model), matching), model.config, num_steps, seed)


def optimizer_of(
    section: AnyOptimizer, parameters: Trained, config: ModelConfig, num_steps: int, seed: int | None
) -> Optimizer:
    """Optimiser of parameters by their declarations. `config`: of their model.

    ConfigError without the `seed` that stochastic rounding needs, for a function of the user that returns no
    transformation, and for a group as in `groups_of`. Clipping is done by the trainer with `clipped`, since the
    gradient norm is also a metric.
    """
    stored: dict[str, Any] = {
        "moments": section.moments,
        "stochastic_rounding": section.stochastic_rounding,
        "seed": seed,
        "average": None if section.ema is None else Average(section.ema.decay, section.ema.start),
        "parameters": parameters,
    }
    whole = section.clip_adaptive is not None or section.layer_decay is not None
    matrixwise = frozenset(parameters if whole else ())
    if isinstance(section, UserOptimizer):
        stored |= {"elementwise": section.elementwise}
        plain = _of_user(section, num_steps)
        labels = dict.fromkeys(parameters, str(section.kind))
    else:
        stored |= {"recipe": (section, num_steps), "elementwise": True}
        grouping = Grouping.of(section, parameters, config)
        groups = _groups(grouping)
        labels = {path: group.name for group in groups for path in group.paths}
        matrixwise |= {path for one in groups if isinstance(one.section, Adafactor | Muon) for path in one.paths}
        plain = _of_groups(grouping, groups, num_steps)
    made = _wrapped(section, plain, parameters, config)
    return Optimizer(
        transformation=made, matrixwise=matrixwise, labels=labels if section.update_norms else {}, **stored
    )


def _of_groups(grouping: Grouping, groups: Sequence[ParameterGroup], num_steps: int) -> optax.GradientTransformation:
    parts = {
        one.name: _of_kind(one.section, num_steps, grouping.parameters, grouping.decay_mask(one.name)) for one in groups
    }
    transformation = next(iter(parts.values()))
    if len(parts) > 1:
        transformation = optax.partition(parts, lambda params: {path: grouping.name(path) for path in params})
    return transformation


def _with_value_clipped(
    section: OptimizerSection, transformation: optax.GradientTransformation
) -> optax.GradientTransformation:
    return transformation if section.clip_value is None else optax.chain(optax.clip(section.clip_value), transformation)


def _wrapped(
    section: OptimizerSection,
    transformation: optax.GradientTransformation,
    parameters: Trained,
    config: ModelConfig,
) -> optax.GradientTransformation:
    """Transformation with gradients clipped before it, and its updates scaled by the depth of their layer."""
    if section.clip_adaptive is not None:
        clip = each_of_stack(optax.adaptive_grad_clip(section.clip_adaptive), parameters)
        transformation = optax.chain(clip, transformation)
    if section.layer_decay is not None:
        factors = depth_factors(config, parameters, section.layer_decay)

        def scaled(updates: Any, _: Any) -> Any:
            return {path: x * factors[path].reshape(-1, *[1] * (x.ndim - 1)) for path, x in updates.items()}

        transformation = optax.chain(transformation, optax.stateless(scaled))
    return _with_value_clipped(section, transformation)


def depth_factors(config: ModelConfig, parameters: Trained, decay: float) -> dict[str, np.ndarray]:
    """Factors of the learning rate of each parameter: of all layers of a stack [R], or one number [1]."""
    last = config.num_layers - 1
    outside = dict.fromkeys(BEFORE_LAYERS, -1) | dict.fromkeys(AFTER_LAYERS, last)
    factors = {}
    for path, parameter in parameters.items():
        depth = np.asarray([outside[path.split(".")[0]]] if parameter.layers is None else parameter.layers)
        factors[path] = (decay ** (last - depth)).astype(np.float32)
    return factors


class ParameterGroup(NamedTuple):
    """Trained parameters that one transformation updates."""

    name: str
    section: GroupedOptimizer
    """Kind and settings."""
    paths: tuple[str, ...]

    @property
    def label(self) -> str:
        """Kind, with the number of the group in `optimizer.groups`."""
        name, wide, _ = self.name.partition(WIDE)
        kind, _, number = name.partition("_")
        told = ([f"groups.{number}"] if number else []) + (["base_width"] if wide else [])
        return f"{kind} ({', '.join(told)})" if told else kind


def groups_of(section: GroupedOptimizer, model: ModelWeights, matching: Matching | None = None) -> list[ParameterGroup]:
    """Groups of the trained parameters of a model, and of its layer matching. ConfigError for a group that takes none,
    for a setting that is not its kind's, for what is no matrix under `muon`, and for `muon` with nothing to take."""
    return _groups(Grouping.of(section, trained_parameters(model, matching), model.model.config))


def _groups(grouping: Grouping) -> list[ParameterGroup]:
    section, parameters = grouping.section, grouping.parameters
    taken: dict[str, list[str]] = {}
    for path in sorted(parameters):
        taken.setdefault(grouping.name(path), []).append(path)
    for number, one in enumerate(section.groups):
        if not any(name.partition(WIDE)[0].endswith(f"_{number}") for name in taken):
            trained = sorted({re.sub(BLOCK, "", path) for path in parameters})
            raise ConfigError(
                f"optimizer.groups.{number}: {one.match!r} matches no trained parameter that no group before takes; "
                f"trained: {', '.join(trained)}"
            )
    if isinstance(section, Muon) and not any(name.startswith("muon") for name in taken):
        own, why = ("lora_", "those of an adapter are factors of low rank")
        if any(path.startswith(DRAFTER) for path in parameters):
            own, why = DRAFTER, "a drafter has others"
        raise ConfigError(
            f"optimizer: muon takes the matrices between hidden states, and none of them is trained here: {why}; use "
            f"adamw, or name them: groups: [{{match: {own}, kind: muon}}]"
        )
    groups = [ParameterGroup(name, grouping.settings(name), tuple(paths)) for name, paths in taken.items()]
    for group in groups:
        if "_" in group.name and all(parameters[path].role == "correction" for path in group.paths):
            raise ConfigError(
                f"optimizer.groups: {group.paths[0]} follows the load of the experts, and no optimizer; match others"
            )
        vectors = [path for path in group.paths if not parameters[path].is_matrix]
        if isinstance(group.section, Muon) and vectors:
            raise ConfigError(f"optimizer.groups: muon takes matrices, and {vectors[0]} is none; match it elsewhere")
    return groups


class Grouping(NamedTuple):
    """Assignment of parameters to groups."""

    section: GroupedOptimizer
    parameters: Trained
    width: int
    """Width of the model."""

    @classmethod
    def of(cls, section: GroupedOptimizer, parameters: Trained, config: ModelConfig) -> Grouping:
        if isinstance(section, WidthScaled) and section.base_width is not None:
            tables = [path for path, one in parameters.items() if one.role == "embedding" and "vocab" in one.dims]
            if tables and config.tie_embeddings and not config.scalar_head:
                raise ConfigError(
                    "optimizer.base_width: a tied table of tokens would need one rate as input, which stays, and "
                    "another as output, which falls with the width; untie it (tie_word_embeddings), or remove this"
                )
            if any(ADAPTER in path for path in parameters):
                raise ConfigError("optimizer.base_width is for training in full, not for adapters; remove it")
        return cls(section, parameters, config.embed_dim)

    def name(self, path: str) -> str:
        """Kind of the optimiser of a parameter, with the number of its group if it is in one, and `WIDE` if its rate
        falls with the width."""
        name = self._plain_name(path)
        scaled = isinstance(self.section, WidthScaled) and self.section.base_width is not None
        wide = scaled and self.parameters[path].reads_hidden and issubclass(KINDS[name.partition("_")[0]], WidthScaled)
        return f"{name}{WIDE}" if wide else name

    def _plain_name(self, path: str) -> str:
        kind = type(self.section).model_fields["kind"].default
        if kind == "muon" and not self.parameters[path].is_hidden:
            kind = "adamw"
        for number, group in enumerate(self.section.groups):
            if re.search(group.match, path):
                return f"{group.kind or kind}_{number}"
        return str(kind)

    def decay_mask(self, name: str) -> Callable[[Any], Any]:
        """Parameters of the group of this name with weight decay: all of a group with a decay of its own, but for
        router corrections, which follow the load of the experts and not the optimizer."""
        number = name.partition(WIDE)[0].partition("_")[2]
        if not number or self.section.groups[int(number)].weight_decay is None:
            return lambda params: map_with_path(lambda path, _: self.parameters[path].decays, params)
        return lambda params: map_with_path(lambda path, _: self.parameters[path].role != "correction", params)

    def settings(self, name: str) -> GroupedOptimizer:
        """Settings of the group of this name."""
        plain, wide, _ = name.partition(WIDE)
        word, _, number = plain.partition("_")
        kind, section = KINDS[word], self.section
        group = section.groups[int(number)].settings if number else {}
        if lacking := [field for field in group if field not in kind.model_fields]:
            raise ConfigError(f"optimizer.groups.{number}: {lacking[0]} is no field of {word}, which takes some")
        related = isinstance(section, kind) or (isinstance(section, Muon) and kind is AdamW)
        fields = [f for f in kind.model_fields if f in type(section).model_fields and f not in ("kind", "groups")]
        own = {field: getattr(section, field) for field in fields if related or field in SHARED}
        found = kind(**own | group)
        if not wide:
            return found
        assert isinstance(section, WidthScaled) and section.base_width is not None
        return found.model_copy(update={"learning_rate": found.learning_rate * section.base_width / self.width})


def _of_kind(
    section: GroupedOptimizer,
    num_steps: int,
    parameters: Mapping[str, Parameter],
    mask: Callable[[Any], Any],
) -> optax.GradientTransformation:
    rate = make_schedule(section, num_steps)
    assert rate is not None
    decay: dict[str, Any] = {"weight_decay": section.weight_decay, "mask": mask}
    if isinstance(section, AdamW):
        betas: dict[str, Any] = {"b1": section.beta1, "b2": section.beta2, "eps": section.eps}
        return optax.adamw(rate, **betas, **decay) if section.weight_decay else optax.adam(rate, **betas)
    if isinstance(section, Lion):
        return optax.lion(rate, b1=section.beta1, b2=section.beta2, **decay)
    assert isinstance(section, Adafactor | Muon)
    direction = scale_by_muon(section, parameters) if isinstance(section, Muon) else _adafactor(section, parameters)
    return optax.chain(direction, optax.add_decayed_weights(**decay), optax.scale_by_learning_rate(rate))


def _of_user(section: UserOptimizer, num_steps: int) -> optax.GradientTransformation:
    found = section.fn.load("optimizer.fn")
    if isinstance(found, optax.GradientTransformation):
        if section.learning_rate is not None:
            raise ConfigError(
                f"optimizer.learning_rate: {section.fn} is a transformation with its own; name a function"
            )
        return found
    if not callable(found):
        raise ConfigError(f"optimizer.fn: {section.fn} is a {type(found).__name__}; name a function")
    inputs: dict[str, Any] = {"learning_rate": make_schedule(section, num_steps)}
    if "num_steps" in inspect.signature(found).parameters:
        inputs["num_steps"] = num_steps
    made = dataclasses.replace(section.fn, settings=section.args).call("optimizer.fn", **inputs)
    if not isinstance(made, optax.GradientTransformation):
        raise ConfigError(
            f"optimizer.fn: {section.fn} returned a {type(made).__name__}; return an optax.GradientTransformation"
        )
    return made


def _adafactor(section: Adafactor, parameters: Mapping[str, Parameter]) -> optax.GradientTransformation:
    made = optax.adafactor(
        min_dim_size_to_factor=section.min_factored,
        decay_rate=section.decay_rate,
        multiply_by_parameter_scale=section.parameter_scale,
        clipping_threshold=section.clip_threshold,
        momentum=section.momentum,
    )
    return optax.chain(each_of_stack(made, parameters), optax.scale(-1.0))


def each_of_stack(
    transformation: optax.GradientTransformation, parameters: Mapping[str, Parameter]
) -> optax.GradientTransformation:
    """Transformation of each parameter by itself, and of each layer and expert of a stack."""

    def mapped(function: Callable[..., Any], path: str) -> Callable[..., Any]:
        for _ in range(parameters[path].num_stacked):
            function = jax.vmap(function)
        return function

    def init(params: Any) -> Any:
        return {path: mapped(transformation.init, path)(p) if is_array(p) else p for path, p in params.items()}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        arrays = [path for path, x in updates.items() if is_array(x)]
        done = {path: mapped(transformation.update, path)(updates[path], state[path], params[path]) for path in arrays}
        return (
            {**updates, **{path: new for path, (new, _) in done.items()}},
            {**state, **{path: new for path, (_, new) in done.items()}},
        )

    return optax.GradientTransformation(init, update)
