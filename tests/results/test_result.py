"""Results in Python: metrics, samples, curves, the model's answers, and a run that was stopped."""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import posttrain as pt
from posttrain.runs.finished import load_generator
from posttrain.tracking.records import read_metrics
from posttrain.weights.state import ModelWeights
from tests.stages.runs import INIT, ROWS, few_devices, inside, posttrain


def low(completion_tokens: Any, **_: Any) -> list[float]:
    return [sum(t < 128 for t in c) / len(c) for c in completion_tokens]


def rl(**changes: Any) -> pt.RL:
    data = {"path": "rows.jsonl", "chat": False}
    small: dict[str, Any] = {"prompts_per_step": 2, "group_size": 4, "micro_batch_rows": 4, "num_steps": 2}
    small |= {"sampling": {"max_tokens": 6}, "row_tokens": 16, "tensorboard": False, "seed": 0}
    return pt.RL({"init": INIT, "tokenizer": "bytes"}, data, rewards=[low], **{**small, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("results")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    with inside(folder), few_devices(1):
        yield folder


@pytest.fixture(scope="module")
def done(folder: Path) -> tuple[pt.RunResult, list[tuple[int, set[str]]]]:
    seen: list[tuple[int, set[str]]] = []
    run = rl(output="done", eval_dataset={"path": "rows.jsonl", "chat": False, "limit": 3})
    return run.fit(on_step=lambda step, metrics: seen.append((step, set(metrics)))), seen


def test_metrics_samples_and_curves(done: tuple[pt.RunResult, Any]) -> None:
    result, seen = done
    assert result.finished and not result.running and list(result.trained) == ["0-rl"]
    assert [row["step"] for row in result.metrics] == [0, 1, 2]
    assert len(result.metrics.column("reward")) == 2 and "eval/reward" in result.metrics[2]
    assert list(result.metrics.to_pandas()["step"]) == [0, 1, 2]
    assert {"prompt", "completion", "reward", "advantage"} <= set(result.samples[0])
    assert [step for step, _ in seen] == [0, 1, 2, 2] and "reward" in seen[1][1]
    curves = result.plot("reward", "grad_norm")
    assert set(curves.series) == {"reward", "grad_norm"} and "reward" in repr(curves).splitlines()[0]
    assert curves._repr_html_().count("<polyline") == 2
    with pytest.raises(pt.ConfigError, match="no metric 'rewards'; did you mean 'reward'"):
        result.plot("rewards")


def test_a_notebook_shows_curves_and_answers(done: tuple[pt.RunResult, Any]) -> None:
    page = done[0]._repr_html_()
    assert page.count("<svg") == 2 and page.count("<tr>") == 1 + 3 + 1 and "95 % interval" in page
    text = repr(done[0])
    assert "0-rl, finished, 2 steps" in text and len(text.splitlines()) <= 3
    made_by = f"posttrain {pt.__version__}, jax {jax.__version__}, python {platform.python_version()}"
    assert made_by in text and made_by in page
    assert [one["numpy"] for one in done[0].versions] == [np.__version__]
    evaluated = done[0].output / "evaluated.json"
    told = posttrain(
        "evaluate", done[0].output, "--data", "rows.jsonl", "--limit", "2", "--write", evaluated, "--max-tokens", "2"
    )
    assert told.code == 0, told
    assert json.loads(evaluated.read_text())["versions"] == dict(done[0].versions[-1])


@pytest.mark.thorough
def test_answers_and_export(done: tuple[pt.RunResult, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    result = done[0]
    texts = iter(["1+1=", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(texts))
    typed = result.chat(max_new_tokens=4)
    plain = pt.generate(result.load_model(), result.load_tokenizer(), "1+1=", max_new_tokens=4, chat=False)
    asked = {"role": "user", "content": "1+1="}
    assert [typed] == [result.chat([asked], max_new_tokens=4)] == plain
    with pytest.raises(pt.ConfigError, match="without a chat template the model continues one message"):
        result.chat([asked, {"role": "assistant", "content": "2"}, asked])
    assert (result.export("hf", reader="posttrain") / "config.json").exists()


def test_a_run_generates_as_its_data_was_rendered(done: tuple[pt.RunResult, Any]) -> None:
    """Red if a run on plain prompts were given the chat template that its tokenizer has."""
    result = done[0]
    model, tokenizer = result.load_model(), result.load_tokenizer()
    assert tokenizer.chat_template is not None
    (plain,) = pt.generate(model, tokenizer, "1+1=", max_new_tokens=4, chat=False)
    said = posttrain("generate", "done/0-rl", "1+1=", "--max-tokens", "4", "--logprobs", "0")
    assert json.loads(said.out)["text"] == plain, said.err
    assert "--adapter is for a model, and done is a run" in posttrain("generate", "done", "1", "--adapter", "a").error


def test_a_run_is_evaluated_as_it_was(done: tuple[pt.RunResult, Any]) -> None:
    """Of the run's own prompts and rewards the means are those that its last evaluation had."""
    result, after = done[0], done[0].results[0]["after"]
    assert len(after["samples"]) == len(done[0].results[0]["before"]["samples"]) == 3
    again = pt.evaluate(result, rewards=[low])
    assert list(again.values) == ["low"] and again.values["low"].tolist() == pytest.approx(after["values"]["reward"])
    interval = again.intervals["low"]
    assert (interval.mean, interval.low, interval.high, interval.n) == pytest.approx(
        (after["mean"], after["low"], after["high"], 3)
    )
    assert all(one.mean == 0 for one in again.difference(again).values()) and "over 3 rows, 3 prompts" in repr(again)

    def half(completions: Any, answer: Any) -> list[float | None]:
        return [None if one == "2" else 0.5 for one in answer]

    model = result.load_model(), result.load_tokenizer()
    two = pt.evaluate(model, ROWS[:3], [low, half], samples=2, temperature=1.0, max_tokens=6, chat=False)
    assert list(two.intervals) == ["reward", "low", "half"] and two.rewards["half"].shape == (3, 2)
    assert two.intervals["half"].n == 2 and "half: 2 of 6 samples have none" in repr(two)
    whole = pt.evaluate(model, ROWS[:3], [low], skip_special_tokens=False, max_tokens=6, chat=False)
    assert whole.intervals["low"].n == 3, "one field alone, without a stage's rule of its training samples"
    with pytest.raises(ValueError, match="different prompts"):
        two.difference(pt.evaluate(model, ROWS[:2], [low], max_tokens=6, chat=False))
    with pytest.raises(pt.ConfigError, match="evaluate: give dataset; only a run"):
        pt.evaluate(model, rewards=[low])
    with pytest.raises(pt.ConfigError, match="2 samples of a prompt would be equal at temperature 0"):
        pt.evaluate(model, ROWS[:3], [low], samples=2)


def test_attach_reads_a_folder(done: tuple[pt.RunResult, Any], folder: Path) -> None:
    again = pt.attach("done")
    assert again.finished and list(again.trained) == [] and again.metrics == done[0].metrics
    with pytest.raises(pt.ConfigError, match="attach: dome is not the output folder .*did you mean 'done'"):
        pt.attach("dome")


@pytest.mark.parametrize("interactive", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_the_stop_button(
    folder: Path, monkeypatch: pytest.MonkeyPatch, interactive: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """Red if an interrupt in a notebook raised, or one of a script went on, or ended it with a traceback."""
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    if not interactive:
        monkeypatch.delattr(sys, "ps1")
    run = rl(output=f"stopped-{interactive}", num_steps=3)

    def stop(step: int, metrics: Any) -> None:
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)

    if not interactive:
        with pytest.raises(KeyboardInterrupt) as stopped_script:
            run.fit(on_step=stop)
        assert isinstance(stopped_script.value, SystemExit) and stopped_script.value.code == 130
        last = capfd.readouterr().err.splitlines()[-1]
        assert last.startswith("stopped after step 1 of 3") and last.endswith("; run the same script again to resume")
        return
    stopped = run.fit(on_step=stop)
    assert not stopped.finished and "stopped after step 1" in repr(stopped) and stopped.results == []
    newest = load_generator(str(stopped.output))
    assert not newest.tokenizer.chats and not same_weights(newest.model, load_generator("done").model)
    with pytest.raises(pt.RunError, match="is not finished, so it has no final model; call fit"):
        stopped.model_path  # noqa: B018
    assert run.fit().finished
    assert same_weights(load_generator(str(run.fit().output)).model, run.fit().load_model())


def same_weights(one: pt.Decoder, other: pt.Decoder) -> bool:
    first, second = (ModelWeights(model).read() for model in (one, other))
    return all(np.array_equal(first[path], second[path]) for path in first)


def test_a_growing_file_is_read_to_its_last_whole_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "stage": "s", "x": "inf", "y": null}\n{"step": 2, "st')
    assert read_metrics(tmp_path) == [{"step": 1, "stage": "s", "x": float("inf"), "y": None}]
