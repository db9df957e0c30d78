"""Reward functions with their settings, the arguments that nothing provides, and a cache of values by arguments."""

from __future__ import annotations

import hashlib
import inspect
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from posttrain.config import Locator, RewardSection
from posttrain.config.locator import callable_of
from posttrain.config.secrets import argument_names, with_secrets
from posttrain.errors import ConfigError, did_you_mean
from posttrain.reward.call import LOGGERS, Convention, convention_of
from posttrain.reward.keywords import Keywords
from posttrain.reward.model import ModelReward, classifier_path
from posttrain.reward.types import RewardFunction
from posttrain.reward.worker import NO_LIMITS, Function, Limits
from posttrain.rollout.trajectory import Trajectory
from posttrain.sandbox.run import missing_protections

PROVIDED = (
    "prompts",
    "completions",
    "completion_tokens",
    "completion_ids",
    "trajectories",
    "trainer_state",
    *LOGGERS,
)
"""Keywords available to every reward function that is called with lists; `completion_ids` is an alias of
`completion_tokens` for compatibility with other frameworks."""
MAX_ENTRIES = 1 << 17
"""Maximum number of values kept; the least recently used go first."""
MODEL_REWARD = "reward_model"
"""Name in metrics; further reward models get a number."""
UNCACHED = ("trajectories", "trainer_state", "log_metric", "log_extra")
"""Arguments that differ between equal samples, or whose effect a cached value would lack."""


@dataclass(frozen=True, kw_only=True)
class Reward:
    """Reward function with its weight; `args` are additional keyword arguments."""

    function: RewardFunction
    weight: float
    args: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None
    """Timeout per step in seconds. None: a reward model, one call without a timeout."""
    name: str = ""
    """Name in metrics and messages; by default the function's name."""
    on_error: Literal["drop"] | float = "drop"
    """Value of a sample on which the function fails; `drop`: the sample has no reward."""
    isolated: Function | None = None
    """Import path of the function in child processes. None: it runs in threads of this process."""
    limits: Limits = NO_LIMITS
    """Limits of the child processes."""
    cache: bool = False
    """Keep values for samples with the same arguments."""
    text: bool | None = None
    """Completions and prompts as strings also for chat rows; None: if the function's annotations say so."""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", getattr(self.function, "__name__", type(self.function).__name__))


def rewards_of(sections: Sequence[RewardSection]) -> list[Reward]:
    """Import the functions of reward sections, and find their reward models."""
    rewards: list[Reward] = []
    for item in sections:
        if item.model is not None:
            number = sum(reward.name.startswith(MODEL_REWARD) for reward in rewards)
            name = item.name or (f"{MODEL_REWARD}_{number + 1}" if number else MODEL_REWARD)
            function: Any = ModelReward(classifier_path(item.model), item.reduce, name)
        else:
            function = callable_of(item.fn, "rewards.fn")
            with_secrets(item.args)  # ConfigError before the first step for a variable that is not set
        isolated = isinstance(item.fn, Locator) and item.isolate != "thread"
        rewards.append(
            Reward(
                function=function,
                weight=item.weight,
                args=item.args,
                name=item.name or "",
                timeout_s=None if item.fn is None else item.timeout_s,
                on_error=item.on_error,
                isolated=(item.fn.object, str(item.fn.folder.resolve())) if isolated else None,
                text=item.text,
                cache=item.cache,
                limits=Limits(item.memory_mib, item.file_mib, item.cpu_s or 0),
            )
        )
    return rewards


class RewardCache:
    """Values of one function, whose other settings do not change. Failures are not kept."""

    def __init__(self, keywords: Keywords, name: str):
        read = keywords.names
        uncached = [argument for argument in UNCACHED if read is None or argument in read]
        if uncached and keywords.convention is Convention.LISTS:
            reason = "reads all its keywords (**)" if read is None else f"takes {uncached[0]}"
            raise ConfigError(
                f"rewards: cache: {name} {reason}; name only arguments that determine the value, or remove cache"
            )
        self._keywords = keywords
        self._values: OrderedDict[bytes, float] = OrderedDict()

    def key(self, sample: Trajectory) -> bytes:
        """Digest of the arguments of one sample."""
        return hashlib.blake2b(pickle.dumps(self._keywords([sample], step=0)), digest_size=16).digest()

    def get(self, key: bytes) -> float | None:
        """Value of an earlier sample with the same arguments."""
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def put(self, key: bytes, value: float) -> None:
        """Keep a value; the least recently used one goes if there are too many."""
        self._values[key] = value
        if len(self._values) > MAX_ENTRIES:
            self._values.popitem(last=False)


ENV_REWARD = "env"
"""Name of the reward that environments and agents give."""


class EnvFailure(Exception):
    """Failure of a sample's environment, as an error of the reward `env`."""

    def __str__(self) -> str:
        return str(self.args[0])


def env_rewards(trajectories: Sequence[Trajectory]) -> list[float | EnvFailure | None]:
    """Sum of the rewards of each sample's turns; None without any, and the failure of an environment that failed."""
    return [EnvFailure(one.error) if one.error is not None else turns_total(one) for one in trajectories]


def turns_total(trajectory: Trajectory) -> float | None:
    """Sum of the rewards of the turns; None if no turn has one."""
    rewards = [turn.reward for row in trajectory.rows for turn in row.turns if turn.reward is not None]
    return float(sum(rewards)) if rewards else None


def missing_arguments(reward: Reward, columns: Sequence[str]) -> list[str]:
    """List required parameters that neither the framework, nor `args`, nor a dataset column provides, one line each."""
    convention = convention_of(reward.function)
    provided = PROVIDED if convention is Convention.LISTS else convention.provided(columns)
    args = argument_names(reward.args)
    known = [*provided, *args, *columns]
    parameters = inspect.signature(reward.function).parameters
    lines = []
    for name, p in parameters.items():
        if p.kind is p.POSITIONAL_ONLY:
            lines.append(f"reward {reward.name}: parameter {name!r} is positional-only; arguments are passed by name")
        elif p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.default is p.empty and name not in known:
            near = did_you_mean(name, known)
            lines.append(f"reward {reward.name}: no column {name!r} in the dataset ({', '.join(columns)}){near}")
    return lines + [
        f"reward {reward.name}: it takes no argument {name!r}, which rewards.args gives"
        for name in args
        if name not in parameters and not _takes_any(parameters)
    ]


def _takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values())


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
