"""One counter of steps in a whole run: critic warm-up, batches without a signal, several epochs, a kill in the middle.

The table is computed by hand. Eight batches of rollouts, of two epochs each, are 16 steps; the critic learns alone from
the first two batches, and the fifth has no reward."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.cluster.reference import Reference
from posttrain.config import AdamW
from posttrain.losses.sft import SFTLoss
from posttrain.train.checkpoint import Checkpointer
from posttrain.train.objective import TrainSettings
from posttrain.train.trainer import Trainer
from posttrain.train.transformations import make_optimizer
from tests.stages.runs import fork, lines, posttrain, rl_stage, steps, weights, write_run
from tests.tiny import tiny_model
from tests.train.test_trainer import rows

STEPS = 16
PEAK = 0.01
RATES = [0.0, 0.005, *(PEAK * (1 - n / 14) for n in range(14))]
"""Rates of steps 1, 2, ...: two of warm-up, then a line to 0, which step 17 would have."""
SKIPPED = {1, 2, 3, 4, 9, 10}
"""Steps without an update of the actor: those of the critic's warm-up, and of the batch without a reward."""
SILENT = {9, 10}
"""Steps without an update of the critic."""
REFRESHED = (2, 4, 6, 8)
"""Versions of the weights, one a batch, after which the reference is the actor."""
SAVED = (6, 10, 16)
"""Ends of batches in which a multiple of 5 lies, and the last."""
EVALUATED = (0, 4, 6, 10, 12, 16)
"""Before the first step, ends of batches in which a multiple of 3 lies, and the last."""

REWARD = '''
import os
import signal
import time
from pathlib import Path


def kill_once(step):
    """Kill the run whose process the test has noted, at this step, once its checkpoint of step 10 is written."""
    folder = Path(__file__).parent
    if step != 12 or not (folder / "victim").exists():
        return
    while not (folder / "out" / "0-rl" / "checkpoints" / "10").is_dir():
        time.sleep(0.01)
    victim = int((folder / "victim").read_text())
    (folder / "victim").unlink()
    os.kill(victim, signal.SIGKILL)
    time.sleep(60)


def share(completion_tokens, trainer_state, log_metric, **_):
    """Share of tokens below 128, of which about a half are at random; none after 8 steps."""
    kill_once(trainer_state.global_step)
    log_metric("global_step", trainer_state.global_step)
    if trainer_state.global_step == 8:
        return [None for _ in completion_tokens]
    return [sum(t < 128 for t in c) / len(c) + 0.01 * len(set(c)) for c in completion_tokens]
'''


def test_the_average_counts_updates_and_the_schedule_steps(tmp_path: Path) -> None:
    """Six steps by hand, resumed behind a skipped one: of the updates 1, 2, 3 the average begins with the third."""
    flags, path = [True, False, True, False, True, False], "embed.embedding"

    def made() -> Trainer:
        model, ema = tiny_model(num_layers=1, windows=(None,)), {"decay": 0.75, "start": 2}
        section = AdamW(learning_rate=0.1, schedule="linear", beta1=0.0, beta2=0.0, eps=1e-30, ema=ema)
        settings = TrainSettings(temperature=1.0, max_grad_norm=1e9)
        return Trainer(model, SFTLoss(), make_optimizer(section, 6, model=model), settings)

    trainer, average, rates = made(), np.zeros(()), []
    for step, update in enumerate(flags):
        before = np.asarray(trainer.params[path], np.float64)
        trainer.step(rows(step), update=update)
        after = np.asarray(trainer.params[path], np.float64)
        rates.append(np.abs(after - before).max())
        if step in (0, 2):
            average = after
        if step == 4:
            average = 0.75 * average + 0.25 * after
        np.testing.assert_allclose(trainer.state()["opt_state"].average[path], average, atol=1e-6)
        if step == 3:
            with Checkpointer(tmp_path) as checkpointer:
                checkpointer.save(4, trainer.state(), {})
                state, _ = checkpointer.restore(4, trainer.state())
            trainer = made()
            trainer.restore(state, 4)
    # The rate falls by a sixth a step, 0 after the last one.
    np.testing.assert_allclose(rates, [0.1, 0.0, 0.1 * 4 / 6, 0.0, 0.1 * 2 / 6, 0.0], rtol=1e-4)
    assert (trainer.step_number, int(trainer.state()["opt_state"].updates)) == (6, 3)


def write(folder: Path) -> Path:
    # Adam without memory moves every element with a gradient by the rate.
    sign = {"learning_rate": PEAK, "schedule": "linear", "warmup_steps": 2, "beta1": 0.0, "beta2": 0.0, "eps": 1e-30}
    stage = rl_stage(
        num_steps=STEPS,
        update_epochs=2,
        rewards=[{"fn": "counted.py:share"}],
        algorithm={"kind": "ppo", "kl_coef": 0.05, "critic": {"warmup": 2, "optimizer": sign}},
        reference={"refresh_every": 2},
        optimizer=sign,
        checkpoint_every=5,
        eval_every=3,
        eval_dataset={"path": "rows.jsonl", "chat": False, "limit": 2},
    )
    file = write_run(folder, stage)
    (folder / "counted.py").write_text(REWARD)
    return file


class Recorded:
    """What a run does, by the counters that it has there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.moved: dict[str, list[float]] = {"actor": [], "critic": []}
        self.refreshed: list[int] = []
        self.saved: list[int] = []
        step, refresh, save = Trainer.step, Reference.refresh, Checkpointer.save

        def stepping(trainer: Trainer, *given: Any, **named: Any) -> Any:
            before = {path: np.asarray(x, np.float64) for path, x in trainer.params.items()}
            metrics = step(trainer, *given, **named)
            change = [np.abs(np.asarray(x, np.float64) - before[path]).max() for path, x in trainer.params.items()]
            self.moved["critic" if trainer.model.config.scalar_head else "actor"].append(max(change))
            return metrics

        def refreshing(reference: Reference, version: int) -> None:
            before = {path: id(x) for path, x in reference._held.weights.items()}
            refresh(reference, version)
            if before != {path: id(x) for path, x in reference._held.weights.items()}:
                self.refreshed.append(version)

        def saving(checkpointer: Checkpointer, number: int, *given: Any, **named: Any) -> None:
            self.saved.append(number)
            save(checkpointer, number, *given, **named)

        monkeypatch.setattr(Trainer, "step", stepping)
        monkeypatch.setattr(Reference, "refresh", refreshing)
        monkeypatch.setattr(Checkpointer, "save", saving)


def check_lines(output: Path) -> None:
    """What a run tells: each line is that of the last step of its batch."""
    trained = [line for line in lines(output) if "grad_norm" in line]
    ends = [*range(2, STEPS + 1, 2)]
    assert [line["step"] for line in trained] == ends
    np.testing.assert_allclose([line["learning_rate"] for line in trained], [RATES[end - 1] for end in ends], rtol=1e-6)
    assert [line["update_skipped"] for line in trained] == [float(end in SKIPPED) for end in ends]
    assert [line["critic/update_skipped"] for line in trained] == [float(end in SILENT) for end in ends]
    told = [line["rewards/share/global_step"] for line in trained]
    assert told == [end - 2 for end in ends]
    evaluated = [line for line in lines(output) if "eval/reward" in line]
    assert [line["step"] for line in evaluated] == [*EVALUATED]


def test_one_counter_of_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        recorded = Recorded(patch)
        whole = posttrain("run", write(tmp_path / "whole"))
    assert whole.code == 0, whole.err
    for role, skipped in (("actor", SKIPPED), ("critic", SILENT)):
        expected = [0.0 if step in skipped else RATES[step - 1] for step in range(1, STEPS + 1)]
        np.testing.assert_allclose(recorded.moved[role], expected, rtol=1e-3, atol=1e-8, err_msg=role)
    assert recorded.refreshed == [*REFRESHED]
    assert recorded.saved == [*SAVED]
    check_lines(tmp_path / "whole" / "out")
    # Killed after step 12, of which nothing is in a checkpoint.
    file, output = write(tmp_path / "killed"), tmp_path / "killed" / "out"
    process = fork("run", file)
    (tmp_path / "killed" / "victim").write_text(str(process.pid))
    process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL
    assert steps(output, "0-rl")[-1] == 12
    resumed = posttrain("run", file)
    assert resumed.code == 0 and "resuming after step 10 of 16" in resumed.out, resumed.out + resumed.err
    check_lines(output)
    assert weights(output, "0-rl") == weights(tmp_path / "whole" / "out", "0-rl")
    kept = {int(folder.name) for folder in (output / "0-rl" / "checkpoints").iterdir() if folder.name.isdigit()}
    assert kept == {*SAVED[-2:]}
