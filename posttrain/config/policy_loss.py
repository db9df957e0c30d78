"""Parts of the policy loss: surrogate, importance sampling weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from posttrain.config.base import Section

Level = Literal["token", "sequence_mean", "sequence_sum"]
"""Level of ratios and weights, see `RLSection.ratio`."""


class ImportanceSection(Section):
    """Importance sampling weights pi_old / pi_behaviour of the surrogate, for samples from another policy than the
    trainer's."""

    apply: Literal["auto", "always", "never"] = "auto"
    """Condition for weights. `auto`: if the sampler's distribution differs from the trainer's: top-k, top-p, min-p,
    penalties, logit bias, allowed tokens, `rollout.quantize` or `asynchronous`."""
    level: Level = "token"
    """Level of the weights: per token, or per sequence as exp of the mean (geometric) or sum of its log-ratios."""
    bound: Literal["truncate", "mask", "reject"] = "truncate"
    """Treatment of weights beyond `low` and `high`: `truncate` to the bound (TIS), `mask` the token with weight 0 (MIS;
    with a `level` of sequences the sequence), or `reject` every sequence with such a token."""
    low: Annotated[float, Field(ge=0, lt=1)] | None = None
    high: Annotated[float, Field(gt=1)] | None = 2.0


class SurrogateSection(Section):
    """Surrogate of the policy loss: the objective as a function of ratio and advantage."""

    kind: Literal["clip", "cispo", "sapo", "vespo", "gmpo"]
    """Surrogate: PPO's `clip`; `cispo`, arXiv:2506.13585; `sapo`, arXiv:2511.20347; `vespo`, arXiv:2602.10693; `gmpo`,
    arXiv:2507.20673, whose clip bounds are of log-ratios."""
    temperature_positive: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of `sapo` for positive advantages; a larger one bounds the ratio more."""
    temperature_negative: Annotated[float, Field(gt=0)] = 1.05
    k_positive: Annotated[float, Field(gt=0)] = 2.0
    """Exponent k of the weight w^k exp(rate (1 - w)) of `vespo` for positive advantages."""
    k_negative: Annotated[float, Field(gt=0)] = 3.0
    rate_positive: Annotated[float, Field(gt=0)] = 3.0
    rate_negative: Annotated[float, Field(gt=0)] = 2.0

    @model_validator(mode="after")
    def _of_the_kind(self) -> SurrogateSection:
        plain = SurrogateSection.model_construct(kind=self.kind)
        own = {"sapo": ("temperature_",), "vespo": ("k_", "rate_")}.get(self.kind, ())
        others = [
            name
            for name in SurrogateSection.model_fields
            if getattr(self, name) != getattr(plain, name) and not name.startswith(own)
        ]
        if others:
            raise ValueError(f"{', '.join(others)} without effect on the surrogate {self.kind}; remove it")
        return self
