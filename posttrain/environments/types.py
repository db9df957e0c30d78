"""Interface of environments, Env and Reply, and of conversations with them or with agents."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from posttrain.data.chat import Renderer
from posttrain.data.messages import Message
from posttrain.data.prompt_images import PromptImages
from posttrain.rollout.trajectory import Example, Trajectory
from posttrain.rollout.types import Completion, SamplingParams


@dataclass(frozen=True, kw_only=True)
class Reply:
    """Answer of an environment to a turn of the policy."""

    messages: Sequence[Message] = ()
    """Messages after the turn, from the user or from tools; without any the conversation must be done."""
    done: bool = False
    reward: float | None = None
    """Reward of the turn; None: none. Their sum is the reward `env` of the sample."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers to log as `env/<name>`, means over samples of their sums over turns."""


@runtime_checkable
class Env(Protocol):
    """Environment of one sample, used once. Methods may be coroutines.

    Optional: `start() -> Sequence[Message]`, the prompt in place of the dataset's; `tools`, a sequence of `Tool`;
    `close()`, called at the end in any case. A run that resumes in the middle of a conversation makes the environment
    anew and gives it the same turns again.
    """

    def reply(self, message: Message) -> Reply | Awaitable[Reply]:
        """Answer an assistant message; its `tool_calls` are parsed where the environment has tools, and
        `malformed_calls` are those that cannot be read."""
        ...


@runtime_checkable
class Conversations(Protocol):
    """Conversations of a stage, held with environments or by agents."""

    @property
    def row_tokens(self) -> int:
        """Maximum number of tokens of a conversation."""
        ...

    async def converse(
        self,
        example: Example,
        *,
        group: int,
        sample: int,
        seed: int,
        renderer: Renderer,
        params_of: Callable[[int], SamplingParams],
        generate: Callable[[Sequence[int], SamplingParams, PromptImages | None], Awaitable[Completion]],
    ) -> Trajectory:
        """Hold the conversation of one sample. `seed`: the same for all samples of a group. `params_of`: settings of
        the n-th request of the same tokens. `generate`: sampler of a turn; its failures are raised."""
        ...

    def check(self, renderer: Renderer, examples: Sequence[Example], *, keep_thinking: bool) -> None:
        """Check columns, and that the chat template allows conversations. ConfigError if not."""
        ...

    def close(self) -> None:
        """End threads and servers."""
        ...


EnvFactory = Callable[..., Env]
"""Maker of environments, called for each sample with the keywords that it names: dataset columns, `args` of the
configuration, and `seed`, the same for all samples of a group."""
