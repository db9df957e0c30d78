"""Environments of RL stages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from posttrain.config.base import Flag, PositiveInt, Section
from posttrain.config.locator import located


class EnvSection(Section):
    """Environment: conversations of several turns, one object for each sample."""

    fn: Annotated[Any, AfterValidator(located)] = None
    """Maker of environments: `envs/guess.py:Guess`, `package.module:make`, or in Python the class or function itself.
    It is called with the keywords that it names: dataset columns, `row`, `args`, `tools` and `seed`, an integer that is
    the same for all samples of a group. By default, with `tools`, the environment that answers their calls, until a
    turn has none."""
    args: dict[str, Any] = {}
    """Additional keyword arguments of `fn`."""
    max_turns: PositiveInt = 8
    """Maximum number of turns of the policy."""
    timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """Deadline in seconds of each call of the environment. A sample whose environment fails or exceeds it ends there
    and has no reward, see `on_error`."""
    concurrency: PositiveInt = 64
    """Maximum number of concurrent calls."""
    weight: float = 1.0
    """Weight of the reward `env`, the sum of the rewards of a sample's turns, beside `rewards`."""
    on_error: Literal["drop"] | float = "drop"
    """Value of the reward `env` of samples whose environment fails. `drop`: the sample has no reward and is excluded
    from its group."""
    keep_thinking: Flag = False
    """Keep the thinking of earlier turns in the conversation where the chat template drops it."""
    split_turns: Flag = False
    """One training row for each turn, whose prompt is the template's rendering of all messages before, for templates
    that change earlier turns. By default a conversation is one row."""
