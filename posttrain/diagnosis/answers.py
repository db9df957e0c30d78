"""Right answers of a dataset's own rows, scored by the reward functions of a stage, without JAX."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.config import Locator, OnlineSection, RewardSection, TrainSection
from posttrain.config.locator import callable_of
from posttrain.config.yaml_file import load_recorded
from posttrain.data.format import prompt_is_text, prompt_messages
from posttrain.data.sources import Rows, load_rows
from posttrain.errors import ConfigError
from posttrain.reward.call import CallError, call_reward
from posttrain.reward.keywords import Keywords
from posttrain.reward.lab.cases import Case, Kind, LabRow, answer_of, sample_of
from posttrain.runtime.event_loop import run_async

NUM_ROWS = 64
"""Rows whose answers are scored: the interval of a share is then at most 0.24 wide."""
TIMEOUT_S = 60.0
"""Time for all calls of reward functions; beyond it the answers count as not scored."""
TOO_LONG = f"the reward functions took more than {TIMEOUT_S:g} s"
CONFIG = "config.yaml"
"""Settings in the folder of a run."""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Right answers of rows and their rewards."""

    rows: Sequence[int] = ()
    """Row numbers in the dataset."""
    texts: Sequence[str] = ()
    prompts: Sequence[str] = ()
    rewards: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """Reward of each right answer; NaN: none applies."""
    wrong: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """Reward of another row's answer in its place, where that differs; NaN elsewhere."""
    num_rows: int | None = None
    """Number of rows of the dataset; None: unknown."""
    missing: str | None = None
    """Reason why nothing was scored; None: it was."""

    @property
    def scored(self) -> bool:
        return bool(np.isfinite(self.rewards).any())

    def text_of(self, row: int) -> str | None:
        """Right answer of a row; None if it was not read."""
        return self.texts[self.rows.index(row)] if row in self.rows else None


def no_answers(rows: Sequence[int] = ()) -> Answers:
    """Answers of a stage without any."""
    return Answers(missing="the stage has no rewards")


def score_answers(run: Path, stage: str, section: TrainSection, rows: Sequence[int] = ()) -> Answers:
    """Score the answers of these rows of the training data, or of its first ones; never raises: `missing` says why
    there are none. Reward models are not asked.

    User code may hang or end its process: functions with a name in a file are called in a child, which reads the
    settings from the run's folder, others in a thread.
    """
    if not isinstance(section, OnlineSection):
        return no_answers()
    if all(
        isinstance(reward.fn, Locator) and not reward.fn.startswith(("<", "__main__")) for reward in section.rewards
    ):
        return _in_child(run, stage, rows)
    found: list[Answers] = []
    thread = threading.Thread(target=lambda: found.append(_score(section, rows)), daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    return found[0] if found else Answers(missing=TOO_LONG)


PROGRAM = "import sys; from posttrain.diagnosis.answers import main; main(*sys.argv[1:])"


def _in_child(run: Path, stage: str, rows: Sequence[int]) -> Answers:
    # Its standard output is that of the user's code too: the answers are in a file.
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "answers.json"
        command = [sys.executable, "-c", PROGRAM, str(run), stage, json.dumps(list(rows)), str(file)]
        paths = os.pathsep.join(path for path in sys.path if path)
        try:
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=TIMEOUT_S,
                check=False,
                env={**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"},
            )
        except subprocess.TimeoutExpired:
            return Answers(missing=TOO_LONG)
        if not file.is_file():
            return Answers(missing="the process of the reward functions has ended")
        read = json.loads(file.read_text(encoding="utf-8"))
    read |= {name: np.asarray(read[name], np.float64) for name in ("rewards", "wrong")}
    return Answers(**read)


def main(run: str, stage: str, rows: str, file: str) -> None:
    """Score the answers of a run's stage, in the child process, and write them to a file."""
    section = load_recorded(Path(run) / CONFIG).stages[int(stage.partition("-")[0])]
    assert isinstance(section, OnlineSection)
    found = asdict(_score(section, json.loads(rows)))
    found |= {name: found[name].tolist() for name in ("rewards", "wrong")}
    whole = Path(f"{file}.part")
    whole.write_text(json.dumps(found), encoding="utf-8")
    whole.rename(file)


def _score(section: OnlineSection, wanted: Sequence[int]) -> Answers:
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
