"""Asynchronous reinforcement learning: sampling ahead of the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from posttrain.config.base import Flag, NonNegativeInt, Section


class AsyncSection(Section):
    """Asynchronous RL, arXiv:2505.24298: the next groups are sampled and scored while the trainer learns. Steps take
    groups in the order in which they were begun."""

    max_staleness: NonNegativeInt = 1
    """Maximum versions of the weights between a token and its update: so many steps of groups are begun ahead. 0: each
    step waits for its own groups, as without this section."""
    in_flight: Flag = False
    """Use new weights from the next dispatch on, also for samples under way. Without, each group is sampled by one
    version, `max_staleness` versions before its step, and a run does not depend on time."""
    stall_s: Annotated[float, Field(gt=0)] = 1800.0
    """Abort the run with a description of what is awaited, when nothing has been sampled or scored for so many seconds
    that the trainer waits."""


def check_async(section: AsyncSection, *, old_logps: str, others: Mapping[str, bool], record_routing: bool) -> None:
    """Check the section against the rest of a stage. ValueError where both cannot be. `others`: fields that choose
    groups by who ends first or by their rewards, where they are set."""
    reasons = {
        "oversample_prompts": "asynchronous samples ahead already; remove one of them",
        "refill": "which groups are begun would depend on rewards that are not there yet; remove one of them",
    }
    for name, reason in reasons.items():
        if others[name]:
            raise ValueError(f"asynchronous and {name}: {reason}")
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
