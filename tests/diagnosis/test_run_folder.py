"""Diagnosis of a run's folder: what is read of it, the command, the sink of a live run, and the end of a real one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import posttrain as pt
from posttrain.diagnosis.evidence import read_evidence, read_warnings
from posttrain.diagnosis.live import DiagnosisSink
from posttrain.errors import ConfigError
from posttrain.tracking.history import JsonlSink
from posttrain.tracking.sink import Sink
from tests.diagnosis.evidences import HEALTHY, MODEL, STEPS, section
from tests.stages.runs import ROWS, inside, posttrain, rl_stage, write_run

REWARD = """
def right(completions, answer):
    return [float(text == one) for text, one in zip(completions, answer)]
def boxed(completions, answer):
    return [float(text == f"<{one}>") for text, one in zip(completions, answer)]
"""
DEAD = {"reward": 0.0, "pass_rate": 0.0, "frac_mixed": 0.0, "frac_all_bad": 1.0, "update_skipped": 1.0}


def lines(columns: Mapping[str, Any], steps: int = STEPS) -> list[dict[str, float]]:
    """Metrics of a healthy run with other columns, without noise."""
    values = {name: np.broadcast_to(np.asarray(v, float), (STEPS,)) for name, v in {**HEALTHY, **columns}.items()}
    return [{name: float(column[i]) for name, column in values.items()} for i in range(steps)]


def write_folder(folder: Path, columns: Mapping[str, Any], reward: str = "right") -> Path:
    """A run's folder of a few kilobytes."""
    (folder / "mine.py").write_text(REWARD)
    rows = [{"prompt": f"{n}=", "answer": str(n)} for n in range(20)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stage = rl_stage(
        dataset={"path": str(folder / "rows.jsonl"), "chat": False}, rewards=[{"fn": f"{folder / 'mine.py'}:{reward}"}]
    )
    run = folder / "run"
    (run / "0-rl").mkdir(parents=True)
    config = {"output": str(run), "seed": 0, "model": {"path": "model"}, "stages": [stage]}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    sink = JsonlSink(run, "0-rl")
    for step, line in enumerate(lines(columns), start=1):
        sink.write(step, line)
    sink.close()
    return run


@pytest.mark.parametrize(("reward", "name"), [("right", "too_hard"), ("boxed", "format_never_asked")])
def test_the_answers_of_the_data_are_scored(tmp_path: Path, reward: str, name: str) -> None:
    run = write_folder(tmp_path, DEAD, reward)
    (evidence,) = read_evidence(run)
    assert evidence.answers.missing is None and evidence.answers.num_rows == 20
    assert evidence.answers.rewards.tolist() == [float(reward == "right")] * 20
    assert evidence.answers.wrong.tolist() == [0.0] * 20
    assert [cause.name for cause in pt.why(run).causes] == [name]


@pytest.mark.parametrize(
    "code", ["import os; os._exit(1)", "raise SystemExit(3)", "undefined()", "print('noise'); import nothing_at_all"]
)
def test_a_reward_that_cannot_be_called_is_no_fault(tmp_path: Path, code: str) -> None:
    run = write_folder(tmp_path, DEAD)
    (tmp_path / "mine.py").write_text(f"def right(completions, answer):\n    {code}\n")
    assert [cause.name for cause in pt.why(run).causes] == ["too_hard"]


def test_the_command_loads_no_jax(tmp_path: Path) -> None:
    run = write_folder(tmp_path, DEAD, "boxed")
    code = "import sys; from posttrain.cli import main\ntry: main()\nfinally: print('JAX', 'jax' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.argv = ['posttrain', 'why', {str(run)!r}]\n{code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "1. nothing was learned at all in 40 of 40 steps" in done.stdout and "try: the reward asks" in done.stdout
    assert "JAX False" in done.stdout


def test_the_command(tmp_path: Path) -> None:
    run = write_folder(tmp_path, {})
    told = posttrain("why", run)
    assert told.code == 0 and told.out.splitlines()[1].strip() == "nothing stands out"
    assert told.out.startswith("0-rl: 40 steps; reward 0.3")
    assert posttrain("why", run / "0-rl").out == told.out
    assert json.loads(posttrain("why", run, "--json").out)[0]["causes"] == []
    assert "is no run" in posttrain("why", tmp_path).err
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="has no step yet"):
        pt.why(run)


def live(run: Path, start_step: int = -1, **settings: Any) -> DiagnosisSink:
    return DiagnosisSink(run, "0-rl", section(**settings), kind="rl", model=MODEL, start_step=start_step)


def fed(sink: Sink, given: Sequence[Mapping[str, float]], first: int = 1) -> None:
    for step, line in enumerate(given, start=first):
        sink.write(step, line)


FELL = {"reward": np.where(np.arange(STEPS) < 1, 0.6, 0.0), "kl": np.where(np.arange(STEPS) < 1, 0.0, 7.0)}


def test_a_live_run_tells_each_cause_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sink = JsonlSink(tmp_path, "0-rl")
    fed(sink, lines(FELL, 30))
    sink.close()
    fed(live(tmp_path), lines(FELL, 30))
    printed = capsys.readouterr().out
    assert printed.count("WARNING, step 3: the policy was destroyed") == 1 and "learning_rate" in printed
    assert [(line["step"], line["name"], line["stage"]) for line in read_warnings(tmp_path)] == [
        (3, "rate_too_large", "0-rl")
    ]
    # What was told before the step from which it resumes is known, what was told later is told again.
    fed(live(tmp_path, start_step=5), lines(FELL)[5:30], first=6)
    assert "destroyed" not in capsys.readouterr().out
    fed(live(tmp_path, start_step=2), lines(FELL)[2:30], first=3)
    assert len(read_warnings(tmp_path)) == 1


def test_a_healthy_run_tells_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fed(live(tmp_path), lines({}))
    assert capsys.readouterr().out == "" and not (tmp_path / "warnings.jsonl").exists()


def test_a_hack_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sink = live(tmp_path)
    fed(sink, lines({"hacking/length_correlation": 0.95}))
    assert capsys.readouterr().out.count("REWARD HACKING, step 3: ") == 1
    assert len(sink.hacks) == len(live(tmp_path, start_step=STEPS).hacks) == 1


def test_a_hack_stops_the_run_if_told_to(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def long(completions):\n    return [float(len(text)) for text in completions]\n")
    stage = rl_stage(
        rewards=[{"fn": f"{tmp_path / 'mine.py'}:long"}],
        num_steps=5,
        group_size=8,
        row_tokens=32,
        sampling={"max_tokens": 12, "stop_token_ids": list(range(0, 250, 9))},
        monitor={"on_alarm": "stop"},
    )
    with inside(tmp_path):
        file = write_run(tmp_path, stage)
        for _ in range(2):
            outcome = posttrain("run", file)
            assert outcome.code == 1, outcome.out + outcome.err
            assert "step 3: reward hacking: " in outcome.err and "monitor.on_alarm=stop" in outcome.err


def test_a_fault_of_the_diagnosis_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("posttrain.diagnosis.live.diagnose", lambda _: 1 / 0)
    fed(live(tmp_path), lines({}))
    assert capsys.readouterr().out.count("the diagnosis of 0-rl has failed") == 1


def test_the_end_of_a_run_without_an_update(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def constant(completions):\n    return [0.5 for _ in completions]\n")
    rows = [{**row, "answer": str(number)} for number, row in enumerate(ROWS)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stage = rl_stage(
        rewards=[{"fn": f"{tmp_path / 'mine.py'}:constant"}],
        dataset={"path": str(tmp_path / "sums.jsonl"), "chat": False},
        num_steps=4,
    )
    with inside(tmp_path):
        outcome = posttrain("run", write_run(tmp_path, stage))
    assert outcome.code == 0, outcome.err
    # The model has random weights: its answers are cut too, which comes first.
    assert "WARNING, step 3: nothing was learned at all in 3 of 3 steps" in outcome.out
    assert "NO UPDATE WAS MADE" in outcome.out and f"posttrain why {tmp_path / 'out'}" in outcome.out
    causes = pt.why(tmp_path / "out").causes
    assert [cause.name for cause in causes] == ["answers_cut", "reward_constant"]
    assert "the reward gives 0.5 to right and to wrong answers" in causes[1].summary
    assert {line["name"] for line in read_warnings(tmp_path / "out")} == {"answers_cut", "reward_constant"}
