"""Calls of reward functions on the right answers of a dataset's own rows, without JAX."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.config import OnlineSection, RewardSection
from posttrain.config.locator import callable_of
from posttrain.config.yaml_file import load_recorded
from posttrain.data.format import prompt_is_text, prompt_messages
from posttrain.data.sources import Rows, load_rows
from posttrain.diagnosis.answers import CONFIG, NUM_ROWS, Answers
from posttrain.errors import ConfigError
from posttrain.reward.call import CallError, call_reward
from posttrain.reward.keywords import Keywords
from posttrain.reward.lab.cases import Case, Kind, LabRow, answer_of, sample_of
from posttrain.runtime.event_loop import run_async


def main(run: str, stage: str, rows: str, file: str) -> None:
    """Score the answers of a run's stage, in the child process, and write them to a file."""
    section = load_recorded(Path(run) / CONFIG).stages[int(stage.partition("-")[0])]
    assert isinstance(section, OnlineSection)
    found = asdict(score(section, json.loads(rows)))
    found |= {name: found[name].tolist() for name in ("rewards", "wrong")}
    whole = Path(f"{file}.part")
    whole.write_text(json.dumps(found), encoding="utf-8")
    whole.rename(file)


def score(section: OnlineSection, wanted: Sequence[int]) -> Answers:
    """Score the answers of these rows, or of all, of which `NUM_ROWS` are taken; `missing` says why there are none."""
    try:
        data = load_rows(section.dataset)
        # In the order of the dataset, spread over the rows that were sampled.
        places = [row for row in wanted if row < len(data)] or list(range(len(data)))
        places = places[:: max(1, len(places) // NUM_ROWS)][:NUM_ROWS]
        read = [_lab_row(data, row, section) for row in places]
    except (ConfigError, OSError, ImportError) as error:
        return Answers(missing=str(error).splitlines()[0])
    except Exception as error:  # a loader of the user's own
        return Answers(missing=f"{type(error).__name__}: {error}")
    answers = [row.golden for row in read]
    prompts = [row.prompt for row in read]
    made = Answers(rows=places, texts=answers, prompts=prompts, num_rows=len(data), missing="no reward function")
    functions = [reward for reward in section.rewards if reward.fn is not None and reward.weight]
    if not functions or any(reward.model is not None for reward in section.rewards):
        return made
    # Each row's answer, and in its place the next one of another row that differs.
    others = [
        next((text for text in answers[i + 1 :] + answers[:i] if text != answers[i]), None) for i in range(len(read))
    ]
    try:
        right = _total(functions, read, answers)
        wrong = _total(functions, read, [other or "" for other in others])
    except (ConfigError, CallError) as error:
        return replace(made, missing=str(error))
    return replace(made, rewards=right, wrong=np.where([one is None for one in others], math.nan, wrong), missing=None)


def _lab_row(data: Rows, row: int, section: OnlineSection) -> LabRow:
    with data.named(row) as columns:
        answer = answer_of(columns, None)
        messages = prompt_messages(columns, section.dataset)
        plain = prompt_is_text(columns, section.dataset)
    return LabRow(row=columns, messages=messages, plain=plain, golden=answer, answer=answer.strip())


def _total(functions: Sequence[RewardSection], rows: Sequence[LabRow], texts: Sequence[str]) -> np.ndarray:
    """Weighted sum of the functions' values of texts, one for each row."""
    samples = [
        sample_of(row, Case(row=number, kind=Kind.GOLDEN, text=text), 0, lambda text: list(text.encode()))
        for number, (row, text) in enumerate(zip(rows, texts, strict=True))
    ]
    total = np.full(len(rows), math.nan)
    for reward in functions:
        function: Any = callable_of(reward.fn, "rewards.fn")
        keywords = Keywords(function, reward.args, text=reward.text)
        scores = call_reward(function, keywords(samples, 0), keywords.loggers, len(samples), _wait)
        values = reward.weight * np.asarray(scores.values, np.float64)
        total = np.where(np.isnan(total), values, np.where(np.isnan(values), total, total + values))
    return total


def _wait(made: Awaitable[Any]) -> Any:
    async def waited() -> Any:
        return await made

    return run_async(waited())
