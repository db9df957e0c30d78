"""Optimisers: one section for each kind with its own fields, and groups of parameters with settings of their own."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from posttrain.config.base import (
    Flag,
    FunctionArguments,
    ListOf,
    MomentType,
    NonNegativeInt,
    PositiveInt,
    Section,
    Text,
)
from posttrain.config.locator import UserObject

PhaseKind = Literal["constant", "linear", "cosine"]
Rate = Annotated[float, Field(gt=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
NonNegative = Annotated[float, Field(ge=0)]


class PhaseSection(Section):
    """Phase of a learning rate schedule: from where the phase before ended, at first the peak, to `end`."""

    kind: PhaseKind
    """Form: `constant`, `linear` or `cosine`."""
    steps: PositiveInt | None = None
    """Steps of the phase; only the last one may leave them out, and lasts to the end of the stage."""
    end: NonNegative | None = None
    """Rate at the end, as a share of the peak; by default 0. A `constant` phase stays where it is."""

    def _mistakes(self) -> Iterator[str]:
        if self.kind == "constant" and self.end is not None:
            yield "end is for linear and cosine phases; a constant one stays where it is"


Schedule = PhaseKind | ListOf[PhaseSection]


def _steps_or_share(value: Any) -> Any:
    if (type(value) is int and value >= 0) or (isinstance(value, str) and re.fullmatch(r"\d{1,2}(\.\d+)?%", value)):
        return value
    raise ValueError("must be a number of steps, or a share of the stage's steps such as 3%")


StepsOrShare = Annotated[int | str, BeforeValidator(_steps_or_share)]


class AverageSection(Section):
    """Exponential moving average of the trained parameters: after each update decay * average + (1 - decay) * new."""

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """Weight of the average before; it spans about 1 / (1 - decay) updates."""
    start: NonNegativeInt = 0
    """Updates after which it begins; up to then it is the parameters themselves."""
    keep_last: Flag = False
    """Save the parameters of the last update too, in `last` beside `model`, which is the average."""


class OptimizerSection(Section):
    """Fields of every optimiser."""

    learning_rate: Rate | None
    """Peak learning rate. The default is for full training with AdamW; that of adapters (`model.lora`, `model.adapter`)
    is 10 times higher. Other kinds have none."""
    schedule: Schedule = "constant"
    """Learning rate schedule: from the peak after `warmup_steps` down to 0 at the last step, or constant; or phases one
    after the other: `[{kind: constant, steps: 800}, {kind: linear, end: 0.1}]`. It reads the number of the step, also
    where updates before were skipped."""
    warmup_steps: StepsOrShare = 0
    """Steps of linear warm-up from 0 to the peak, or a share of the stage's steps, such as `3%`, rounded up."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    clip_value: Rate | None = None
    """Largest size of each number of the gradient, after `max_grad_norm`."""
    clip_adaptive: Rate | None = None
    """Largest norm of the gradient of each output of a matrix as a share of its weights' norm, after the other two:
    adaptive gradient clipping, arXiv:2102.06171, such as 0.01."""
    layer_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Factor of the learning rate from each layer to the one before it: the last layer, final norm and head have the
    rate itself, embeddings and a vision tower that of a layer before the first."""
    update_norms: Flag = False
    """Write the norms of update and weights of each group of parameters, and whether the gradient was clipped."""
    qk_clip: Rate | None = None
    """Largest attention logit of a head: after an update in whose forward pass a head had a larger one, its queries and
    keys are scaled down to it. With `kind: muon` this is MuonClip, arXiv:2507.20534, whose value is 100."""
    ema: AverageSection | None = None
    """Exponential moving average of the weights, 4 bytes per parameter: evaluations and the saved model are its, and
    training goes on with the weights themselves. For stages that do not sample."""
    moments: MomentType = "float32"
    """Storage of moments, of what the optimiser keeps in the shape of matrices and tables: with `adamw` 8, 4 or 2.1
    bytes per parameter, with `muon` and `lion` half. `bfloat16` and `int8` (codes with a scale per block of 64) are
    rounded stochastically; those of biases and norms stay float32."""
    stochastic_rounding: Flag = False
    """Round updated bfloat16 parameters stochastically, without float32 master weights: 4 bytes per parameter less.
    Needs `model.dtype: bfloat16`."""

    def _mistakes(self) -> Iterator[str]:
        if not isinstance(self.schedule, str):
            if not self.schedule:
                yield "schedule: give a kind, or at least one phase"
            elif any(phase.steps is None for phase in self.schedule[:-1]):
                yield "schedule: every phase but the last needs steps"

    def num_warmup_steps(self, num_steps: int) -> int:
        """Steps of warm-up in a stage of so many."""
        if isinstance(self.warmup_steps, int):
            return self.warmup_steps
        # Exactly: 7 % of 100 steps are 7, where 0.07 * 100 is a little more.
        return math.ceil(Decimal(self.warmup_steps.removesuffix("%")) * num_steps / 100)

    def fixed_steps(self, num_steps: int) -> int:
        """Steps that the schedule must have room for in a stage of so many, and one of the phase after them."""
        phases = () if isinstance(self.schedule, str) else self.schedule
        return self.num_warmup_steps(num_steps) + sum(phase.steps or 1 for phase in phases)


class GroupSection(Section):
    """Parameters with an optimiser or settings of their own. A field that is not set is the optimiser's if that is of
    the same kind, `learning_rate` and `weight_decay` always; else the kind's default."""

    match: Text
    """Regular expression, searched in posttrain's parameter paths, such as `embed`, `attention.(q|k)`, `norm`, `bias`,
    `experts`. Each parameter is in the first group that matches; a group without any is an error."""
    kind: Literal["adamw", "lion", "adafactor", "muon"] | None = None
    """Kind of optimiser; by default that which the parameters have without the group."""
    learning_rate: Rate | None = None
    """Peak learning rate, with the schedule of the optimiser."""
    weight_decay: NonNegative | None = None
    """Weight decay of all that the group matches, norms and biases included, but for router corrections."""
    beta1: Beta | None = None
    beta2: Beta | None = None
    eps: Rate | None = None
    momentum: Beta | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Fields that are set, but for what names the group."""
        own = {name: getattr(self, name) for name in type(self).model_fields if name not in ("match", "kind")}
        return {name: value for name, value in own.items() if value is not None}

    def _mistakes(self) -> Iterator[str]:
        try:
            re.compile(self.match)
        except re.error as error:
            yield f"match: {self.match!r} is not a valid regular expression: {error}"
        if self.kind is not None:
            yield from _lacking(f"match {self.match!r}", self, KINDS[self.kind])


class GroupedOptimizer(OptimizerSection):
    """Fields of the optimisers that are built in."""

    learning_rate: Rate
    """Peak learning rate. The default is for full training with AdamW; that of adapters (`model.lora`, `model.adapter`)
    is 10 times higher. Other kinds have none."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay, times the learning rate; biases, norms, attention sinks and router corrections have
    none."""
    groups: ListOf[GroupSection] = ()
    """Parameters with an optimiser or settings of their own: `groups: [{match: embed, learning_rate: 1e-4}]`."""

    def _mistakes(self) -> Iterator[str]:
        for number, group in enumerate(self.groups):
            # Those of Muon without a kind may be AdamW's, which is known with the model.
            if group.kind is None and not isinstance(self, Muon):
                yield from _lacking(f"groups.{number}", group, type(self))


class WidthScaled(GroupedOptimizer):
    """Fields of the optimisers whose updates have the same size whatever the gradient's."""

    base_width: PositiveInt | None = None
    """Width (`hidden_size`) of the model for which the learning rates were found. Those of matrices that read the
    hidden states, in layers and an untied head, are multiplied by base_width / hidden_size, as in muP
    (arXiv:2203.03466); embeddings, norms and biases keep theirs. Muon does as much by `scale`."""


class AdamW(WidthScaled):
    """AdamW, arXiv:1711.05101."""

    kind: Literal["adamw"] = "adamw"
    beta1: Beta = 0.9
    beta2: Beta = 0.999
    eps: Rate = 1e-8


class Lion(WidthScaled):
    """Lion, arXiv:2302.06675: the sign of a mix of momentum and gradient; rates are 3 to 10 times below AdamW's."""

    kind: Literal["lion"] = "lion"
    beta1: Beta = 0.9
    """Share of the momentum in the update."""
    beta2: Beta = 0.99
    """Decay of the momentum."""


class Adafactor(GroupedOptimizer):
    """Adafactor, arXiv:1804.04235: second moments of a matrix as one number a row and a column, for each matrix of a
    stack."""

    kind: Literal["adafactor"] = "adafactor"
    momentum: Beta | None = None
    """Decay of a first moment, which takes 4 bytes per parameter; by default there is none."""
    decay_rate: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """Exponent c of the decay 1 - t^-c of second moments at step t."""
    clip_threshold: Annotated[float, Field(gt=0)] = 1.0
    """Largest root mean square of the update of a matrix, before the learning rate."""
    parameter_scale: Flag = True
    """Multiply the update by the root mean square of the parameter: rates are then relative, such as 1e-3."""
    min_factored: PositiveInt = 128
    """Smallest dimension of matrices whose second moments are factored."""


class Muon(GroupedOptimizer):
    """Muon: momentum of each matrix, orthogonalised. It takes the matrices of attention, MLPs and experts in the
    layers, each of a stack and each expert by itself; AdamW with the same rate and decay takes all else: embeddings,
    head, routers, scalar heads, adapters, the vision tower, norms and biases."""

    kind: Literal["muon"] = "muon"
    momentum: Beta = 0.95
    nesterov: Flag = True
    """Orthogonalise gradient + momentum * buffer in place of the buffer."""
    iteration: Literal["polar_express", "newton_schulz"] = "polar_express"
    """Polynomials of the orthogonalisation: `polar_express` (arXiv:2505.16932), which brings singular values to 1, or
    `newton_schulz` with the coefficients of the original Muon, which brings those that are
    not tiny between 0.18 and 1.20 in five iterations."""
    num_iterations: PositiveInt = 5
    scale: Literal["rms", "original"] = "rms"
    """Scale of the update of a matrix [in, out]: `rms`, 0.2 sqrt(max(in, out)), with which learning rates are those of
    AdamW (arXiv:2502.16982); `original`, sqrt(max(1, out / in)), with rates such as 0.02."""
    per_head: Flag = False
    """Orthogonalise the part of each head of queries, keys, values and attention outputs by itself."""
    beta1: Beta = 0.9
    """beta1 of AdamW for all else, as `beta2` and `eps`."""
    beta2: Beta = 0.95
    eps: Rate = 1e-8


class UserOptimizer(OptimizerSection):
    """Optax transformation: one of optax's, or one of your own."""

    kind: Literal["user"] = "user"
    fn: UserObject
    """Function that returns an `optax.GradientTransformation`: `optax:lamb`, `file.py:name`, or in Python the function
    or the transformation itself. It gets the schedule as `learning_rate`, and `num_steps` if it names it."""
    args: FunctionArguments = {}
    """Additional keyword arguments of the function. `NAME_env: VARIABLE` gives `NAME`, a secret, from the
    environment."""
    learning_rate: Rate | None = None
    """Peak learning rate; required, but for a transformation made in Python, which has its own."""
    elementwise: Flag = False
    """Promise that each element of a parameter is updated on its own, as by `optax:lion`, and unlike `optax:adafactor`.
    Stacks of matrices are then rounded layer by layer, with less memory."""

    def _mistakes(self) -> Iterator[str]:
        if isinstance(self.fn.fn, str) or callable(self.fn.fn):
            if self.learning_rate is None:
                yield f"learning_rate is required beside fn: {self.fn}; rates of optimisers differ"
        elif self.learning_rate is not None or self.schedule != "constant" or self.warmup_steps or self.args:
            yield "learning_rate, schedule, warmup_steps and args are for a function (fn); a transformation has its own"


OtherOptimizer = Lion | Adafactor | Muon | UserOptimizer
"""Kinds whose defaults are the same in all stages."""
AnyOptimizer = AdamW | OtherOptimizer
KINDS: Mapping[str, type[GroupedOptimizer]] = {"adamw": AdamW, "lion": Lion, "adafactor": Adafactor, "muon": Muon}


def _lacking(place: str, group: GroupSection, kind: type[GroupedOptimizer]) -> Iterator[str]:
    """Mistakes of settings that the kind of a group does not have."""
    name = kind.model_fields["kind"].default
    for setting in group.settings:
        if setting not in kind.model_fields:
            having = [other for other, section in KINDS.items() if setting in section.model_fields]
            yield f"{place}: {setting} is a field of {' and '.join(having)}, not of {name}"


def _with_kind(value: Any) -> Any:
    """Fields of an optimiser with its kind; a function or transformation becomes its `fn`."""
    if isinstance(value, OptimizerSection):
        fields = {name: getattr(value, name) for name in value.model_fields_set}
        value = {**fields, "kind": type(value).model_fields["kind"].default}
    if isinstance(value, str) and value in KINDS:
        return {"kind": value}
    if not isinstance(value, Mapping):
        return value if value is None else {"kind": "user", "fn": value}
    return {"kind": "user" if "fn" in value else "adamw", **value}


ANY_KIND = BeforeValidator(_with_kind)
"""Validator by which a union of optimisers takes AdamW and `UserOptimizer` without `kind`, and a kind's word."""
