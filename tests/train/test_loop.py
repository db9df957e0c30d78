"""The loop around steps: what it calls when, what it writes, how it stops."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_array_less

from posttrain import cli
from posttrain.batch import Batch
from posttrain.errors import ConfigError
from posttrain.losses.sft import SFTLoss
from posttrain.metrics import Sample, to_host
from posttrain.train import loop as fit
from posttrain.train.checkpoint import Checkpointer
from posttrain.train.loop import Every, Interrupted, Origin, StopRequest, TrainingLoop, restore_latest, stop_on_signals
from posttrain.train.objective import TrainSettings
from posttrain.train.trainer import Trainer
from tests.tiny import sgd, tiny_model

ORIGIN = Origin(name="base", parts={"config.json": "1", "model.safetensors": "2"})


class Counting:
    """Batches whose tokens depend on how many came before."""

    def __init__(self) -> None:
        self.taken = 0

    def __next__(self) -> Batch:
        self.taken += 1
        tokens = ((np.arange(16).reshape(2, 8) * 7 + self.taken) % 512).astype(np.int32)
        ones = np.ones_like(tokens)
        return Batch(
            tokens=tokens,
            positions=np.broadcast_to(np.arange(8, dtype=np.int32), (2, 8)).copy(),
            segments=ones,
            loss_weight=ones.astype(np.float32),
        )

    def state(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def restore(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]


class Written:
    def __init__(self, data: Counting) -> None:
        self.lines: list[tuple[int, Mapping[str, float]]] = []
        self.taken: list[int] = []
        """Batches that were taken when the line was written."""
        self.data = data

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.lines.append((step, metrics))
        self.taken.append(self.data.taken)

    def tables(self, step: int, tables: Mapping[str, Any]) -> None:
        raise AssertionError

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        raise AssertionError

    def close(self) -> None:
        raise AssertionError


class Loop:
    """A trainer with all that a `TrainingLoop` takes."""

    def __init__(self, folder: Path):
        model = tiny_model(num_layers=1, windows=(None,))
        self.trainer = Trainer(model, SFTLoss(), sgd(0.1), TrainSettings(temperature=1.0, max_grad_norm=1.0))
        self.data, self.stop, self.folder = Counting(), StopRequest(), folder
        self.sink = Written(self.data)
        self.evaluations: list[int] = []

    def run(
        self,
        num_steps: int,
        *,
        checkpoint: int = 1000,
        evaluation: int | None = None,
        origin: Origin = ORIGIN,
        strict: bool = False,
    ) -> list[int]:
        def evaluate() -> dict[str, float]:
            self.evaluations.append(self.trainer.step_number)
            return {"eval/x": 1.0}

        with Checkpointer(self.folder) as checkpointer:
            restored = restore_latest(self.trainer, self.data, checkpointer, origin, strict=strict)
            with TrainingLoop(
                self.trainer,
                self.data,
                origin=origin,
                num_steps=num_steps,
                checkpointer=checkpointer,
                sink=self.sink,
                learning_rate=optax.constant_schedule(0.5),
                every=Every(checkpoint=checkpoint, evaluation=evaluation),
                evaluate=evaluate,
                stop=self.stop,
                ended=restored.ended_of == num_steps,
            ) as steps:
                for number in steps:
                    steps.log(self.step())
                    assert number == self.trainer.step_number
        return [*restored.damaged]

    def step(self) -> Mapping[str, Any]:
        """Done when it returns: a CPU, too, may run a program in another thread."""
        return jax.block_until_ready(self.trainer.step(next(self.data)))

    @property
    def saved(self) -> list[int]:
        return sorted(int(entry.name) for entry in self.folder.iterdir() if entry.name.isdigit())


def test_what_happens_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(tmp_path)
    for module in ("metrics", "train.loop"):
        peak = f"posttrain.{module}.device_peak_gib"
        monkeypatch.setattr(peak, lambda: 10.0 * (loop.trainer.step_number > 0) + len(loop.evaluations))
    loop.run(5, checkpoint=2, evaluation=2)
    peaks = [(step, name, value) for step, line in loop.sink.lines for name, value in line.items() if "memory/" in name]
    names = "memory/step/peak_gib", "memory/evaluation/peak_gib"
    assert peaks == [(1, names[0], 10.0), (2, names[1], 11.0), (4, names[1], 12.0)], "where it rose"
    assert [step for step, metrics in loop.sink.lines if "timing_s/evaluation" in metrics] == [2, 4]
    assert [step for step, metrics in loop.sink.lines if "grad_norm" in metrics] == [1, 2, 3, 4, 5]
    assert loop.evaluations == [2, 4] and loop.saved == [4, 5]
    assert [step for step, metrics in loop.sink.lines if metrics.get("timing_s/checkpoint", 0) > 0] == [3, 5]
    _, metrics = loop.sink.lines[0]
    assert metrics["learning_rate"] == 0.5 and metrics["num_tokens"] == 16
    assert metrics["perf/tokens_per_s"] == pytest.approx(16 / metrics["step_time"])
    assert [step for step, metrics in loop.sink.lines if "timing_s/evaluation" in metrics] == [2, 4]
    loop.run(5)
    assert loop.data.taken == 5


def test_damaged_checkpoints_are_set_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The step before is resumed from, loudly and bitwise; with `strict`, or without an intact one, nothing is."""
    loop = Loop(tmp_path)
    loop.run(4, checkpoint=2)
    last = jax.device_get(loop.trainer.params)
    (tmp_path / "4" / "host" / "metadata").write_bytes(b"{}")
    with pytest.raises(ConfigError, match=r"step 4 is damaged \(.*\); restore it from a copy, or run without --strict"):
        Loop(tmp_path).run(4, strict=True)
    assert loop.saved == [2, 4]
    again = Loop(tmp_path)
    capsys.readouterr()
    assert again.run(4, checkpoint=2) == [4] and again.saved == [2, 4] and again.data.taken == 4
    told = " ".join(capsys.readouterr().out.split())
    assert told.count("WARNING: ") == 1 and f"; it is now {tmp_path / 'damaged-4'}, and" in told
    assert [step for step, _ in again.sink.lines] == [3, 4]
    jax.tree.map(np.testing.assert_array_equal, again.trainer.params, last)
    assert Loop(tmp_path).run(4) == []
    for step in (2, 4):
        shutil.rmtree(tmp_path / str(step) / "arrays")
    with pytest.raises(ConfigError, match="step 2 is damaged .*no intact one is left"):
        Loop(tmp_path).run(4)
    assert loop.saved == [2, 4]


def test_a_line_waits_for_the_dispatch_of_the_next_step_and_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where steps still run when they were dispatched, as on an accelerator: 1 and 2 wait; 3 comes before its
    evaluation, 4 before its checkpoint, 5 before the end."""
    monkeypatch.setattr(fit, "_are_ready", lambda metrics: False)
    loop, by_hand = Loop(tmp_path), Loop(tmp_path / "other")
    loop.run(5, checkpoint=4, evaluation=3)
    written = zip(loop.sink.lines, loop.sink.taken, strict=True)
    told = [(step, "eval/x" in metrics, taken) for (step, metrics), taken in written]
    assert told == [(1, False, 2), (2, False, 3), (3, False, 3), (3, True, 3), (4, False, 4), (5, False, 5)]
    for step, metrics in loop.sink.lines:
        if "eval/x" not in metrics:
            expected = to_host(by_hand.step())
            assert {name: metrics[name] for name in expected} == expected and by_hand.trainer.step_number == step
            assert metrics["step_time"] > 0


@pytest.mark.parametrize("on_host", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_step_that_is_done_is_written_at_once_with_its_own_time(tmp_path: Path, on_host: bool) -> None:
    """A line that waited would tell the time of the next step."""
    loop, entered, left = Loop(tmp_path), [], []
    on_device = loop.step

    def step() -> Mapping[str, Any]:
        entered.append(time.perf_counter())
        metrics = on_device()
        time.sleep(0.3 if loop.data.taken == 2 else 0.0)
        left.append(time.perf_counter())
        return to_host(metrics) if on_host else metrics

    loop.step = step  # type: ignore[method-assign]
    loop.run(4)
    assert loop.sink.taken == [1, 2, 3, 4]
    told = [metrics["step_time"] for _, metrics in loop.sink.lines]
    latest = np.subtract([*entered[1:], time.perf_counter()], [entered[0] - 1, *left[:-1]])
    assert_array_less(np.subtract(left, entered), told)
    assert_array_less(told[1:], latest[1:])


def test_what_was_done_before_an_error_is_written(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    whole = loop.step

    def step() -> Mapping[str, Any]:
        if loop.data.taken == 2:
            raise ValueError("no third batch")
        return whole()

    loop.step = step  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no third batch"):
        loop.run(5)
    assert [step for step, _ in loop.sink.lines] == [1, 2] and loop.saved == []


def test_a_checkpoint_continues_only_the_model_it_was_made_over(tmp_path: Path) -> None:
    Loop(tmp_path).run(1)
    parts = {"config.json": "1", "model-00001.safetensors": "2"}
    with pytest.raises(ConfigError) as caught:
        Loop(tmp_path).run(2, origin=Origin(name="other/base", parts=parts))
    for words in (
        f"{tmp_path / '1'}: the initial model differs",
        "in other/base model-00001.safetensors is new, model.safetensors is gone since",
        "use another output, or restore the old model",
    ):
        assert words in str(caught.value)
    with pytest.raises(ConfigError, match="config.json has changed since"):
        Loop(tmp_path).run(2, origin=Origin(name="base", parts={**ORIGIN.parts, "config.json": "3"}))
    Loop(tmp_path).run(2, origin=Origin(name="moved", parts=ORIGIN.parts))


def test_resumed_is_never_stopped(tmp_path: Path) -> None:
    whole, first, second = (Loop(tmp_path / name) for name in ("whole", "parts", "parts"))
    whole.run(4)
    first.run(2)
    second.run(4)
    assert [step for step, _ in second.sink.lines] == [3, 4] and second.data.taken == 4
    for path, value in whole.trainer.params.items():
        np.testing.assert_array_equal(value, second.trainer.params[path])


def test_stop_saves_and_says_where(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    with stop_on_signals() as loop.stop:
        os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Interrupted, match="stopped after step 1 of 3") as stopped:
        loop.run(3)
    assert loop.saved == [1] and cli._failure(stopped.value)[1] == 143


def test_stop_in_the_last_step_is_an_end(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.stop.requested = True
    loop.run(1)
    assert loop.saved == [1]


def test_an_end_is_kept_in_its_checkpoint(tmp_path: Path) -> None:
    """A stage of as many steps is over, one of more goes on."""
    first, again, grown = (Loop(tmp_path) for _ in range(3))
    first.stop.end_stage()
    first.run(5)
    again.run(5)
    grown.run(3)
    assert (first.saved, first.trainer.step_number, again.trainer.step_number) == ([1, 3], 1, 1)
    assert not again.sink.lines and [step for step, _ in grown.sink.lines] == [2, 3]


def test_gradient_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.run(1)
    params = loop.trainer.params
    spoiled = {**params, "final_norm.scale": jnp.full_like(params["final_norm.scale"], jnp.nan)}
    loop.trainer.restore({**loop.trainer.state(), "params": spoiled}, 1)
    loop.folder = tmp_path / "other"
    with pytest.raises(FloatingPointError, match="step 2: the gradient norm is nan"):
        loop.run(5, checkpoint=4)
    assert loop.trainer.step_number == 2
    assert not [entry for entry in (tmp_path / "other").iterdir() if entry.name.isdigit()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_interrupts(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(number)
    with stop_on_signals() as stop:
        os.kill(os.getpid(), number)
        assert stop.requested and "stopping after this step" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt) as ended:
            os.kill(os.getpid(), number)
    assert cli._failure(ended.value) == ("interrupted", 128 + number)
    assert signal.getsignal(number) is before


def test_other_threads_leave_signals_alone() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with stop_on_signals() as stop:
            seen.append((stop.requested, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, before)]
