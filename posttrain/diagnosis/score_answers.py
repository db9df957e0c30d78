"""Scores of the data's own answers, from a process of their own: user code may hang or end it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from posttrain.config import Locator, OnlineSection, TrainSection
from posttrain.diagnosis.answers import Answers, no_answers

TIMEOUT_S = 60.0
"""Time for all calls of reward functions; beyond it the answers count as not scored."""
TOO_LONG = f"the reward functions took more than {TIMEOUT_S:g} s"


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
    from posttrain.diagnosis.scoring import score

    found: list[Answers] = []
    thread = threading.Thread(target=lambda: found.append(score(section, rows)), daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    return found[0] if found else Answers(missing=TOO_LONG)


PROGRAM = "import sys; from posttrain.diagnosis.scoring import main; main(*sys.argv[1:])"


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
