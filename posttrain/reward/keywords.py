"""Keyword arguments of the calls of reward functions, which need no devices."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.config.secrets import with_secrets
from posttrain.data.messages import text_of
from posttrain.reward.call import LOGGERS, Convention, TrainerState, annotates_text, convention_of
from posttrain.rollout.trajectory import Trajectory


class Keywords:
    """Keyword arguments of the calls of one function."""

    def __init__(self, function: Callable[..., Any], args: Mapping[str, Any], *, text: bool | None):
        self._args = args
        self.convention = convention_of(function)
        self.names = accepted(function)
        """Arguments that the function reads; None: all, because it reads its `**kwargs`."""
        self._given = text
        self._text = True if text is None and annotates_text(function) else text

    @property
    def loggers(self) -> list[str]:
        """Loggers that the function names."""
        return [name for name in LOGGERS if self._reads(name)] if self.convention is Convention.LISTS else []

    def __call__(self, samples: Sequence[Trajectory], step: int) -> dict[str, Any]:
        """Arguments of a call, without the loggers."""
        if self.convention is not Convention.LISTS:
            rows = [self._read(row_of(self.convention, sample, text=self._given)) for sample in samples]
            return {"rows": rows, "args": with_secrets(self._args)}
        return self._read({**self._columns(samples), **self._provided(samples, step), **with_secrets(self._args)})

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


def accepted(function: Callable[..., Any]) -> frozenset[str] | None:
    """Names of the arguments that the function reads; None: all available ones, because it reads its `**kwargs`."""
    parameters = inspect.signature(function).parameters
    rest = next((name for name, p in parameters.items() if p.kind is p.VAR_KEYWORD), None)
    return None if rest is not None and _reads_variable(function, rest) else frozenset(parameters)


def _reads_variable(function: Callable[..., Any], variable: str) -> bool:
    """Return False only if the code of a plain function never loads the variable."""
    code = getattr(function, "__code__", None)
    if code is None or hasattr(function, "__wrapped__") or variable in code.co_cellvars:
        return True
    loads = [i.argval for i in dis.get_instructions(code) if i.opname.startswith("LOAD_FAST")]
    return any(variable == loaded or (isinstance(loaded, tuple) and variable in loaded) for loaded in loads)
