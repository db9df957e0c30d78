"""Environments and agents: who answers the model within a conversation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from posttrain.config.base import Arguments, Flag, ListOf, PositiveInt, Section, Text
from posttrain.config.locator import located


class EnvSection(Section):
    """Environment: conversations of several turns, one object for each sample."""

    fn: Annotated[Any, AfterValidator(located)] = None
    """Maker of environments: `envs/guess.py:Guess`, `package.module:make`, or in Python the class or function itself.
    It is called with the keywords that it names: dataset columns, `row`, `args`, `tools` and `seed`, an integer that is
    the same for all samples of a group. By default, with `tools`, the environment that answers their calls, until a
    turn has none."""
    args: Arguments = {}
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
    unfinished: Literal["drop"] | float = 0.0
    """Reward of a conversation that ends before the environment is done, added to those that its turns have: a turn cut
    at `sampling.max_tokens`, `max_turns`, or `row_tokens`. `drop`: it has no reward `env`, and without other rewards is
    excluded from its group."""
    keep_thinking: Flag = False
    """Keep the thinking of earlier turns in the conversation where the chat template drops it."""
    split_turns: Flag = False
    """One training row for each turn, whose prompt is the template's rendering of all messages before, for templates
    that change earlier turns. By default a conversation is one row. Weights and returns of a sample are the same."""


class AgentSection(Section):
    """Agent with a loop of its own, run once for each sample, which talks to the policy through an OpenAI-compatible
    endpoint on this machine."""

    fn: Annotated[Any, AfterValidator(located)] = None
    """Function `agents/mine.py:play`, or in Python the function itself, sync or async. It is called with the keywords
    that it names: `base_url`, `api_key`, `model`, `messages` (the row's prompt), dataset columns, `row`, `args` and
    `seed`, an integer that is the same for all samples of a group. It returns the reward, None, or a mapping with
    `reward` and metrics."""
    command: ListOf[Text] = ()
    """Command in place of `fn`, run in a child process: `[python, agent.py]`. It finds `OPENAI_BASE_URL`,
    `OPENAI_API_KEY`, and the keywords as JSON in the file `POSTTRAIN_ROW_FILE`, and in `POSTTRAIN_ROW` up to 100 KiB;
    the reward is in the last line that it prints, such as `{"reward": 1}`."""
    args: Arguments = {}
    """Additional keywords."""
    timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Deadline of a sample in seconds, after which a command is killed and the sample has no reward, see `on_error`."""
    concurrency: PositiveInt = 64
    """Maximum number of agents that run at once."""
    max_turns: PositiveInt = 16
    """Maximum number of requests of a sample."""
    max_rows: PositiveInt = 4
    """Maximum number of histories of a sample, each a training row of its own: a request that goes on from an earlier
    turn than the last, or from none, begins another."""
    weight: float = 1.0
    """Weight of the reward `env`, which the agent returns, beside `rewards`."""
    on_error: Literal["drop"] | float = "drop"
    """Value of the reward `env` of samples whose agent fails. `drop`: the sample has no reward and is excluded from its
    group."""
    unfinished: Literal["drop"] | float = 0.0
    """Reward of a sample whose agent gives none after the endpoint has refused it a request for `max_turns`, `max_rows`
    or `row_tokens`: it returns None, or fails with that error. `drop`: it has no reward `env`, and without other
    rewards is excluded from its group."""
    keep_thinking: Flag = False
    """Keep the thinking of earlier turns in the conversation where the chat template drops it."""
    split_turns: Flag = False
    """One training row for each request, rendered by the template, for templates that change earlier turns; `max_rows`
    must then allow them."""

    @model_validator(mode="after")
    def _one(self) -> AgentSection:
        if (self.fn is None) == (not self.command):
            raise ValueError("an agent is a function (fn) or a command; set one of them")
        return self
