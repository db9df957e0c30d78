"""Notes about the reward functions of a stage: how each is called, and what its sandbox cannot prevent here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from posttrain.reward.conventions import Convention, convention_of
from posttrain.reward.function import Reward
from posttrain.sandbox.run import missing_protections

SANDBOX = "posttrain.sandbox"
STYLES = {
    Convention.VERL: "for each sample, as a compute_score of verl",
    Convention.VERIFIERS: "for each sample, as a reward function of verifiers",
}


def reward_notes(rewards: Sequence[Reward]) -> list[str]:
    """Lines about functions with the convention of another framework, and about missing protections of sandboxes."""
    styles = [(reward.name, convention_of(reward.function)) for reward in rewards]
    lines = [f"reward {name}: called {STYLES[style]}" for name, style in styles if style in STYLES]
    if any(_uses_sandbox(reward.function) for reward in rewards):
        lines += missing_protections()
    return lines


def _uses_sandbox(function: Callable[..., Any]) -> bool:
    """Tell whether the function's module has imported something of the sandbox."""
    names = getattr(function, "__globals__", {}).values()
    return any((getattr(value, "__module__", None) or "").startswith(SANDBOX) for value in names)
