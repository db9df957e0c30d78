"""Samples of prompts: Example, Turn, Trajectory, Group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Int

from posttrain.data.messages import Message, Tools, prompt_digest, shown_text
from posttrain.data.prompt_images import PromptImages

Stop = Literal["stop", "length", "abort", "max_turns", "max_rows", "env_error", "env_timeout"]
"""End of a sample: a stop token or the environment, the maximum of tokens, turns or histories, an abort, or a failure
of its environment, which leaves it without a reward."""
Limit = Literal["max_tokens", "max_turns", "max_rows", "row_tokens"]
"""Limit of a sample: `sampling.max_tokens` of a turn, the maximum of turns or of an agent's histories, or
`row_tokens`."""
LIMITS: tuple[Limit, ...] = get_args(Limit)


class SampleEnd(NamedTuple):
    """End of a sample: the fields `stop` and `limit` of its trajectory."""

    stop: Stop
    limit: Limit | None


def sample_end(last: Stop, *, reached: Limit | None, finished: bool, failure: Stop | None) -> SampleEnd:
    """End of a sample, from its last turn and what followed: the only place that tells.

    `last`: stop of the last turn's completion. `reached`: limit that cut this turn, or beyond which the policy was
    asked for another one in vain; None: neither, and limits that were met before the last turn do not count.
    `finished`: the environment was done, or the agent gave a reward. `failure`: of environment or agent.
    """
    if failure is not None:
        return SampleEnd(failure, None)
    # Tokens were missing for the rest of the last turn, or for the messages after it.
    stop: Stop = last
    if reached is not None:
        stop = reached if reached == "max_turns" or reached == "max_rows" else "length"
    return SampleEnd(stop, None if finished else reached)


def is_cut(stop: str) -> bool:
    """Tell whether a sample of this `stop` was cut for want of tokens, whoever scored it then."""
    return stop == "length"


@dataclass(frozen=True, kw_only=True)
class Example:
    """Row of the prompt dataset."""

    index: int
    """Row number in the dataset."""
    row: Mapping[str, Any]
    messages: Sequence[Message]
    prompt_tokens: Sequence[int]
    """Tokens of `messages` with the stage's renderer."""
    plain: bool
    """True if the dataset's prompt is a string: reward functions then get completions as strings, else as message
    lists."""
    images: PromptImages | None = None
    """Pictures of `prompt_tokens`; None: text."""
    tools: Tools | None = None
    """Tools that `prompt_tokens` describe; None: none, or those of an environment."""

    @cached_property
    def prompt_key(self) -> str:
        """Digest of the prompt, see `prompt_digest`."""
        return prompt_digest(self.messages, self.tools)


class Turn(NamedTuple):
    """Sampled turn of a conversation."""

    start: int
    """Position of its first token among the tokens of the trajectory."""
    end: int
    """Position after its last token."""
    reward: float | None
    """Reward that the environment gave it; None: none."""
    time: int = 0
    """Number of its request among those of the sample. Turns of equal numbers follow the order of rows."""


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One sample: tokens as sampled, never tokenised again. A row is one token sequence that the model has read; a
    sample has several (`more`) where turns are split or an agent follows several histories."""

    group: int
    """Number of the group among all that the run has begun."""
    example: Example
    sample: int
    """Sample number within the group."""
    messages: Sequence[Message]
    """Messages of the conversation, including the sampled turns."""
    text: str
    """Text of the last sampled turn without stop token or stop string."""
    tokens: Sequence[int]
    """Tokens of prompt and completion."""
    sampled: Sequence[bool]
    logps: Sequence[float]
    """Log-probabilities of the sampled tokens before truncation (top-k, top-p, min-p); 0 elsewhere."""
    kept_logps: Sequence[float]
    """Log-probability minus the log of the probability of drawing the token, see `Completion`; 0 elsewhere."""
    truncation_logps: Sequence[float]
    """Log of the mass that truncation kept where the token was drawn, see `Completion`; 0 elsewhere."""
    stop: Stop
    """See `sample_end`, as `limit`; the same for all rows of a sample."""
    versions: Sequence[int]
    """Version of the weights that sampled each token; -1 on tokens that were not sampled."""
    experts: Int[np.ndarray, "T M k"] | None = None
    """Experts of each token in each MoE layer, if recorded by the engine; negative where unknown."""
    turns: Sequence[Turn] = ()
    """Sampled turns, with an environment."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the environment reported, summed over turns."""
    limit: Limit | None = None
    """Limit at which the sample ended before its environment was done or its agent gave a reward; None: at none."""
    error: str | None = None
    """Failure of the environment, for `stop` env_error and env_timeout."""
    images: PromptImages | None = None
    """Pictures of `tokens`; None: text."""
    temperature: float | None = None
    """Temperature at which its tokens were drawn, of samples for a loop of one's own; None: that of the stage."""
    more: Sequence[Trajectory] = ()
    """Later rows of the same sample: other turns, or other branches of its history."""

    @property
    def rows(self) -> tuple[Trajectory, ...]:
        """Rows of the sample in order of time: each ends before the next one does."""
        return (self, *self.more)

    @property
    def answer(self) -> Trajectory:
        """Last row, whose prompt, messages and text are those that the sample is scored by."""
        return self.rows[-1]

    @property
    def turns_in_time(self) -> list[tuple[int, Turn]]:
        """Turns of all rows in order of time, each with the number of its row."""
        turns = [(number, turn) for number, row in enumerate(self.rows) for turn in row.turns]
        return sorted(turns, key=lambda one: (one[1].time, one[0], one[1].start))

    def times(self) -> list[Int[np.ndarray, " T"]]:
        """Place of each sampled token among those of the sample in order of time, for each row; -1 elsewhere."""
        places = [np.flatnonzero(row.sampled) for row in self.rows]
        when = [np.zeros(len(row.tokens), np.int64) for row in self.rows]
        for number, turn in self.turns_in_time:
            when[number][turn.start : turn.end] = turn.time
        own = np.concatenate([numbers[at] for numbers, at in zip(when, places, strict=True)])
        # Stable: tokens of equal numbers keep the order of rows and positions.
        ranks = np.empty(len(own), np.int32)
        ranks[np.argsort(own, kind="stable")] = np.arange(len(own))
        result = [np.full(len(row.tokens), -1, np.int32) for row in self.rows]
        for row, at, rank in zip(result, places, np.split(ranks, np.cumsum([len(at) for at in places])), strict=False):
            row[at] = rank
        return result

    @property
    def is_cut(self) -> bool:
        """True if its last answer, or what had to follow, was cut for want of tokens."""
        return is_cut(self.stop)

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens in all rows."""
        return sum(sum(row.sampled) for row in self.rows)

    @property
    def completion_tokens(self) -> list[int]:
        """Sampled tokens of all rows."""
        return [t for row in self.rows for t, sampled in zip(row.tokens, row.sampled, strict=True) if sampled]

    @property
    def shown(self) -> str:
        """Text of the answer for a table; of several turns each message with its role."""
        messages = self.answer.completion_messages
        if len(messages) <= 1:
            return self.answer.text
        return "\n".join(f"{message['role']}: {_content(message)}" for message in messages)

    @property
    def completion_messages(self) -> Sequence[Message]:
        """Messages after the prompt."""
        return self.messages[len(self.example.messages) :]


def _content(message: Message) -> str:
    calls = [f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls", ())]
    return " ".join([shown_text(message), *calls]).strip()


Group = Sequence[Trajectory]
"""All G samples of a prompt."""
