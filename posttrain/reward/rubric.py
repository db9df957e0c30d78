"""Reward functions: any callable that takes the keywords it names; a rubric sums several with weights."""

from __future__ import annotations

import asyncio
import contextlib
import dis
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from posttrain.data.chat import Message
from posttrain.errors import ConfigError, did_you_mean
from posttrain.metrics import merge
from posttrain.reward.call import LOGGERS, check_values
from posttrain.reward.processes import ProcessCaller, RewardServer
from posttrain.reward.scoring import Caller, Failure, RewardScores, Scoring
from posttrain.reward.threads import ThreadCaller
from posttrain.reward.types import RewardError, RewardFunction, Rewards
from posttrain.reward.worker import Function
from posttrain.rollout.trajectory import Group, Trajectory
from posttrain.tracking.console import cut
from posttrain.tree import Mean

PROVIDED = ("prompts", "completions", "completion_tokens", "completion_ids", "trajectories", *LOGGERS)
"""Keywords available to every reward function; `completion_ids` is an alias of `completion_tokens` for compatibility
with other frameworks."""

SHOWN_CELLS = 80
"""Maximum number of characters of a sample in an error message."""


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

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", getattr(self.function, "__name__", type(self.function).__name__))


def missing_arguments(reward: Reward, columns: Sequence[str]) -> list[str]:
    """List required parameters that neither the framework, nor `args`, nor a dataset column provides, one line each."""
    known = [*PROVIDED, *reward.args, *columns]
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
        for name in reward.args
        if name not in parameters and not _takes_any(parameters)
    ]


class Rubric:
    """Scores groups with all reward functions. Without any, as in pure on-policy distillation, every total is 0."""

    def __init__(self, rewards: Sequence[Reward]):
        names = [reward.name for reward in rewards]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ConfigError(
                f"rewards: the name {repeated[0]!r} is used twice; metrics need distinct names: "
                "set `name` of one of them"
            )
        self.rewards = tuple(rewards)
        isolated = list(dict.fromkeys(reward.isolated for reward in rewards if reward.isolated is not None))
        self._server = RewardServer(isolated)
        self._callers: dict[str, Caller] = {
            reward.name: ThreadCaller(reward.function, reward.name)
            if reward.isolated is None
            else ProcessCaller(self._server, isolated.index(reward.isolated), reward.name)
            for reward in rewards
        }

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Keep the child process alive, importing its functions in the background; on exit all child processes have
        ended."""
        if self._server.functions:
            self._server.start()
        try:
            yield
        finally:
            for caller in self._callers.values():
                caller.close()
            self._server.close()

    async def score(self, groups_P: Sequence[Group], advance: Callable[[int], None] | None = None) -> Rewards:
        """Score all samples. `advance(1)` is called per finished function. ConfigError for arguments that cannot be
        pickled."""
        group_size = len(groups_P[0])
        samples = [trajectory for group in groups_P for trajectory in group]
        models = asyncio.Lock()

        async def scored(reward: Reward) -> RewardScores:
            if reward.timeout_s is None:
                async with models:  # programs of two models running at once could deadlock on each other's collectives
                    scores = await _score_by_model(reward, samples)
            else:
                names = _accepted(reward.function)

                def keywords(indexes: Sequence[int]) -> Mapping[str, Any]:
                    return _keywords(reward, names, [samples[index] for index in indexes])

                loggers = [name for name in LOGGERS if names is None or name in names]
                caller = self._callers[reward.name]
                scores = await Scoring(caller, keywords, loggers, len(samples), reward.timeout_s).run()
            if advance is not None:
                advance(1)
            return scores

        found = await asyncio.gather(*(scored(reward) for reward in self.rewards))
        return _gather(self.rewards, found, (len(groups_P), group_size))


def _gather(rewards: Sequence[Reward], found: Sequence[RewardScores], shape: tuple[int, int]) -> Rewards:
    parts: dict[str, np.ndarray] = {}
    errors: list[RewardError] = []
    dropped = np.zeros(shape, bool)
    for reward, scores in zip(rewards, found, strict=True):
        values = parts[reward.name] = np.asarray(scores.values, np.float32).reshape(shape)
        for index, (kind, message) in sorted(scores.failures.items()):
            prompt, sample = divmod(index, shape[1])
            errors.append(RewardError(function=reward.name, prompt=prompt, sample=sample, kind=kind, error=message))
            if reward.on_error == "drop":
                dropped[prompt, sample] = True
            else:
                values[prompt, sample] = reward.on_error
    total = _weighted_sum(rewards, parts, shape)
    total[dropped] = np.nan
    metrics = {
        f"rewards/{reward.name}/{name}": Mean(total=float(np.sum(values)), weight=float(len(values)))
        for reward, scores in zip(rewards, found, strict=True)
        for name, values in scores.metrics.items()
    }
    extras = {name: values for scores in found for name, values in scores.extras.items()}
    notes = [f"reward {r.name}: {s.note}" for r, s in zip(rewards, found, strict=True) if s.note is not None]
    return Rewards(total_PG=total, parts_PG=parts, errors=errors, metrics=metrics, extras=extras, notes=notes)


def joined(parts: Sequence[Rewards]) -> Rewards:
    """Rewards of groups that were scored in several calls, in the order of the calls. Extras that a call did not give
    are None there."""
    if len(parts) == 1:
        return parts[0]
    before = np.cumsum([0, *(len(part.total_PG) for part in parts)])
    extras = dict.fromkeys(name for part in parts for name in part.extras)
    return Rewards(
        total_PG=np.concatenate([part.total_PG for part in parts]),
        parts_PG={name: np.concatenate([part.parts_PG[name] for part in parts]) for name in parts[0].parts_PG},
        errors=[
            replace(error, prompt=error.prompt + int(first))
            for first, part in zip(before, parts, strict=False)
            for error in part.errors
        ],
        metrics=merge(*(part.metrics for part in parts)),
        extras={
            name: [value for part in parts for value in part.extras.get(name, [None] * part.total_PG.size)]
            for name in extras
        },
        notes=list(dict.fromkeys(note for part in parts for note in part.notes)),
    )


async def _score_by_model(reward: Reward, samples: Sequence[Trajectory]) -> RewardScores:
    """Score with a reward model in one call; its exceptions abort the run."""
    values, errors = check_values(await asyncio.to_thread(reward.function, samples), len(samples))
    return RewardScores(values, {index: Failure("error", message) for index, message in errors.items()})


def _weighted_sum(rewards: Sequence[Reward], parts: Mapping[str, np.ndarray], shape: tuple[int, int]) -> np.ndarray:
    """Sum over the functions that apply; NaN if none does."""
    if not rewards:
        return np.zeros(shape, np.float32)
    stacked = np.stack([parts[r.name] * np.float32(r.weight) for r in rewards])
    return np.where(np.isnan(stacked).all(axis=0), np.nan, np.nansum(stacked, axis=0)).astype(np.float32)


def error_lines(rewards: Rewards, groups_P: Sequence[Group]) -> list[str]:
    """Report one line per failed function (number of samples and the first error with its sample), then the notes."""
    count = sum(map(len, groups_P))
    lines = list(rewards.notes)
    for name in dict.fromkeys(error.function for error in rewards.errors):
        errors = [error for error in rewards.errors if error.function == name]
        first = min(errors, key=lambda error: (error.prompt, error.sample))
        text = groups_P[first.prompt][first.sample].text
        lines.append(
            f"reward {name}: no value for {len(errors)} of {count} samples; the first, {first.kind}: {first.error}; "
            f"sample {first.sample} of prompt {first.prompt}: {cut(repr(text), SHOWN_CELLS)}"
        )
    return lines


def _keywords(reward: Reward, names: frozenset[str] | None, samples: Sequence[Trajectory]) -> dict[str, Any]:
    """Keyword arguments of a call, without the loggers. `names`: arguments that the function reads; None: all."""
    rows = [s.example.row for s in samples]
    columns = {name: [row[name] for row in rows] for name in rows[0] if all(name in row for row in rows)}
    provided: dict[str, Callable[[], Any]] = {
        "prompts": lambda: [_prompt(s) for s in samples],
        "completions": lambda: [s.text if s.example.plain else [_turn(s)] for s in samples],
        "completion_tokens": lambda: tokens,
        "completion_ids": lambda: tokens,
        "trajectories": lambda: list(samples),
    }
    wanted = [name for name in provided if names is None or name in names]
    tokens = [s.completion_tokens for s in samples] if {"completion_tokens", "completion_ids"} & {*wanted} else []
    keywords = {**columns, **{name: provided[name]() for name in wanted}, **reward.args}
    return keywords if names is None else {name: value for name, value in keywords.items() if name in names}


def _accepted(function: RewardFunction) -> frozenset[str] | None:
    """Names of the arguments that the function reads; None: all available ones, because it reads its `**kwargs`."""
    parameters = inspect.signature(function).parameters
    rest = next((name for name, p in parameters.items() if p.kind is p.VAR_KEYWORD), None)
    return None if rest is not None and _reads(function, rest) else frozenset(parameters)


def _reads(function: RewardFunction, variable: str) -> bool:
    """Return False only if the code of a plain function never loads the variable."""
    code = getattr(function, "__code__", None)
    if code is None or hasattr(function, "__wrapped__") or variable in code.co_cellvars:
        return True
    loads = [i.argval for i in dis.get_instructions(code) if i.opname.startswith("LOAD_FAST")]
    return any(variable == found or (isinstance(found, tuple) and variable in found) for found in loads)


def _takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _prompt(sample: Trajectory) -> Any:
    return sample.example.messages[-1]["content"] if sample.example.plain else list(sample.example.messages)


def _turn(sample: Trajectory) -> Message:
    return {"role": "assistant", "content": sample.text}
