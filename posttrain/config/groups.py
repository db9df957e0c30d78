"""Groups of RL stages: dynamic sampling, curriculum, and asynchronous sampling ahead of the trainer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated

from pydantic import Field

from posttrain.config.base import Flag, ListOf, NonNegativeInt, PositiveInt, Section
from posttrain.config.locator import Named


class RefillSection(Section):
    """Dynamic sampling, DAPO, arXiv:2503.14476 section 3.2: groups without a training signal are replaced."""

    limit: PositiveInt = 3
    """Maximum number of waves per step: each begins as many groups as are missing. After the last one the step trains
    on the useful groups it has (`sampling/refill/short`)."""
    keep: Named = "mixed"
    """Useful groups: `mixed`, those with different rewards, or a function of the rewards_PG of a wave, given as
    `filter`, which returns a mask of its groups. Replaces the filter of the algorithm."""


class CurriculumSection(Section):
    """Draws of prompts by pass rate: the share of a prompt's samples whose reward is above `pass_above`, as a moving
    average over its groups. A prompt without a scored group counts with a pass rate of 0.5."""

    pools: Annotated[ListOf[Annotated[float, Field(ge=0, le=1)]], Field(min_length=2)]
    """Rising bounds of the pools, from 0 to 1: a pool holds the pass rates from its lower bound to below its upper one,
    the last pool also 1."""
    draw: ListOf[Annotated[float, Field(ge=0, le=1)]]
    """Share of each pool in the groups that are begun; the shares add up to 1. The shares of empty pools go to the
    others in proportion."""
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Weight of a prompt's earlier pass rate when another of its groups is scored."""

    def _mistakes(self) -> Iterator[str]:
        if (self.pools[0], self.pools[-1]) != (0.0, 1.0) or any(low >= high for low, high in pairwise(self.pools)):
            yield f"pools={list(self.pools)} must rise from 0 to 1"
        if len(self.draw) != len(self.pools) - 1:
            yield (
                f"draw has {len(self.draw)} shares, and pools={list(self.pools)} bound {len(self.pools) - 1} pools; "
                "give one share for each"
            )
        if not math.isclose(sum(self.draw), 1.0, abs_tol=1e-6):
            yield f"draw={list(self.draw)} adds up to {sum(self.draw):g}; make it 1"


def check_selection(
    refill: RefillSection | None, curriculum: CurriculumSection | None, *, rewards: bool, shuffle: bool
) -> None:
    """Check both sections against the rest of a stage. ValueError where one would have no effect."""
    for name, section in (("refill", refill), ("curriculum", curriculum)):
        if section is not None and not rewards:
            raise ValueError(f"{name} needs rewards, which tell useful prompts; set rewards, or remove {name}")
    if curriculum is not None and not shuffle:
        raise ValueError("dataset.shuffle=false has no effect with curriculum, which draws prompts; remove one of them")


class AsyncSection(Section):
    """Asynchronous RL, arXiv:2505.24298: the next groups are sampled and scored while the trainer learns. Steps take
    groups in the order in which they were begun. With `refill` a step's waves follow each other ahead of it, too."""

    max_staleness: NonNegativeInt = 1
    """Maximum versions of the weights between a token and its update: so many steps of groups are begun ahead. 0: each
    step waits for its own groups, as without this section."""
    in_flight: Flag = False
    """Use new weights from the next dispatch on, also for samples under way. Without, each group is sampled by one
    version, `max_staleness` versions before its step, and a run does not depend on time."""
    stall_s: Annotated[float, Field(gt=0)] = 1800.0
    """Abort the run with a description of what is awaited, when nothing has been sampled or scored for so many seconds
    that the trainer waits."""


def check_async(section: AsyncSection, *, old_logps: str, models_refill: bool, record_routing: bool) -> None:
    """Check the section against the rest of a stage. ValueError where both cannot be. `models_refill`: reward models
    tell which groups are replaced."""
    if models_refill:
        raise ValueError(
            "asynchronous and refill with reward models: they score a step when it is learned from, too late to "
            "replace groups; score with functions, or remove one of asynchronous and refill"
        )
    stale = section.max_staleness > 0
    if stale and old_logps == "self":
        raise ValueError(
            f"asynchronous.max_staleness={section.max_staleness} with old_logps=self: samples come from older weights "
            "than the trainer's; use auto or trainer"
        )
    if section.in_flight and not stale:
        raise ValueError("asynchronous.in_flight has no effect with max_staleness=0; remove one of them")
    if section.in_flight and record_routing:
        raise ValueError(
            "asynchronous.in_flight and rollout.record_routing: a sample would mix the experts of several versions of "
            "the weights; use one of the two"
        )
