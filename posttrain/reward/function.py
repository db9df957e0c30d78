"""Reward functions with their settings, the keyword arguments of their calls, those that a function names, and a cache
of values by these."""

from __future__ import annotations

import dis
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
from posttrain.data.messages import text_of
from posttrain.errors import ConfigError, did_you_mean
from posttrain.reward.call import LOGGERS, Convention, TrainerState, annotates_text, convention_of
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


class Keywords:
    """Keyword arguments of the calls of one function."""

    def __init__(self, reward: Reward):
        self._reward = reward
        self.convention = convention_of(reward.function)
        self.names = accepted(reward.function)
        """Arguments that the function reads; None: all, because it reads its `**kwargs`."""
        self._text = True if reward.text is None and annotates_text(reward.function) else reward.text

    @property
    def loggers(self) -> list[str]:
        """Loggers that the function names."""
        return [name for name in LOGGERS if self._reads(name)] if self.convention is Convention.LISTS else []

    def __call__(self, samples: Sequence[Trajectory], step: int) -> dict[str, Any]:
        """Arguments of a call, without the loggers."""
        if self.convention is not Convention.LISTS:
            rows = [self._read(row_of(self.convention, sample, text=self._reward.text)) for sample in samples]
            return {"rows": rows, "args": with_secrets(self._reward.args)}
        return self._read(
            {**self._columns(samples), **self._provided(samples, step), **with_secrets(self._reward.args)}
        )

    def _reads(self, name: str) -> bool:
        return self.names is None or name in self.names

    def _read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if self._reads(name)}

    def _columns(self, samples: Sequence[Trajectory]) -> dict[str, list[Any]]:
        rows = [sample.example.row for sample in samples]
        return {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}

    def _provided(self, samples: Sequence[Trajectory], step: int) -> dict[str, Any]:
        tokens = [s.completion_tokens for s in samples] if self._reads("completion_tokens") else []
        tokens = tokens or ([s.completion_tokens for s in samples] if self._reads("completion_ids") else [])
        makers: dict[str, Callable[[], Any]] = {
            "prompts": lambda: [prompt_argument(s, text=self._text) for s in samples],
            "completions": lambda: [completion_argument(s, text=self._text) for s in samples],
            "completion_tokens": lambda: tokens,
            "completion_ids": lambda: tokens,
            "trajectories": lambda: list(samples),
            "trainer_state": lambda: TrainerState(global_step=step),
        }
        return {name: make() for name, make in makers.items() if self._reads(name)}


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


def prompt_argument(sample: Trajectory, *, text: bool | None) -> Any:
    """Prompt as reward functions get it: the last message's text, or all messages. `text`: None: text where the
    dataset's prompt is one."""
    example = sample.answer.example
    return text_of(example.messages[-1]) if _as_text(sample, text) else list(example.messages)


def completion_argument(sample: Trajectory, *, text: bool | None) -> Any:
    """Completion as reward functions get it, in the form of `prompt_argument`: the text of the last turn, or all
    messages after the prompt."""
    return sample.answer.text if _as_text(sample, text) else list(sample.answer.completion_messages)


def _as_text(sample: Trajectory, text: bool | None) -> bool:
    return sample.answer.example.plain if text is None else text


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


def row_of(convention: Convention, sample: Trajectory, *, text: bool | None) -> dict[str, Any]:
    """Arguments for one sample in a convention of single samples, including all columns of its row; None in a column
    that the convention has a default for counts as absent."""
    row = sample.example.row
    defaults: dict[str, Any] = {"answer": "", "info": {}, "task": "default"}
    if convention is Convention.VERL:
        nested = row.get("reward_model")
        defaults = {"extra_info": {}}
        defaults |= {"ground_truth": nested["ground_truth"]} if isinstance(nested, Mapping) else {}
    keywords = defaults | {name: value for name, value in row.items() if value is not None or name not in defaults}
    if convention is Convention.VERL:
        return {**keywords, "solution_str": sample.answer.text}
    keywords |= {"prompt": prompt_argument(sample, text=text), "completion": completion_argument(sample, text=text)}
    return {**keywords, "state": dict(keywords)}


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


def accepted(function: RewardFunction) -> frozenset[str] | None:
    """Names of the arguments that the function reads; None: all available ones, because it reads its `**kwargs`."""
    parameters = inspect.signature(function).parameters
    rest = next((name for name, p in parameters.items() if p.kind is p.VAR_KEYWORD), None)
    return None if rest is not None and _reads_variable(function, rest) else frozenset(parameters)


def _reads_variable(function: RewardFunction, variable: str) -> bool:
    """Return False only if the code of a plain function never loads the variable."""
    code = getattr(function, "__code__", None)
    if code is None or hasattr(function, "__wrapped__") or variable in code.co_cellvars:
        return True
    loads = [i.argval for i in dis.get_instructions(code) if i.opname.startswith("LOAD_FAST")]
    return any(variable == loaded or (isinstance(loaded, tuple) and variable in loaded) for loaded in loads)


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
