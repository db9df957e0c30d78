"""Live display in a notebook: one output, updated with curves, samples and the time to go; elsewhere plain lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain.metrics import Sample
from posttrain.tracking import notebook, sinks
from posttrain.tracking.notebook import NotebookSink
from posttrain.tracking.sinks import in_notebook
from posttrain.tracking.steps import ConsoleSink

pytestmark = pytest.mark.fast


class Handle:
    def __init__(self, page: Any) -> None:
        self.pages = [page.data]

    def update(self, page: Any) -> None:
        self.pages.append(page.data)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Handle]:
    import IPython.display

    handles: list[Handle] = []

    def display(page: Any, *, display_id: bool) -> Handle:
        assert display_id
        handles.append(Handle(page))
        return handles[-1]

    monkeypatch.setattr(IPython.display, "display", display)
    return handles


def test_one_output_is_updated(shown: list[Handle], monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if a step made an output of its own, or the page did not escape what the model wrote."""
    sink = NotebookSink("0-rl", "rl", 4)
    sink.write(0, {"eval/reward": 0.1})
    monkeypatch.setattr(notebook, "EVERY_S", 0.0)
    for step in range(1, 5):
        sink.write(step, {"reward": step / 4, "step_time": 2.0, "grad_norm": 1.0, "loss": 0.0})
        sink.samples(step, [sample()])
    sink.close()
    (handle,) = shown
    assert len(handle.pages) >= 5
    assert "step 2 of 4, reward 0.500, trend -, best 0.500, 4 s to go" in handle.pages[2]
    last = handle.pages[-1]
    assert last.count("<polyline") == 3 and "&lt;b&gt;" in last and "<b>two" not in last and "done" in last


def sample() -> Sample:
    return Sample(prompt="1+1=", completion="<b>two", reward=1.0, rewards={}, advantage=0.0, stop="stop")


@pytest.mark.parametrize("kernel", [True, False])
def test_only_a_kernel_gets_it(
    tmp_path: Path, shown: list[Handle], monkeypatch: pytest.MonkeyPatch, kernel: bool
) -> None:
    assert not in_notebook()
    monkeypatch.setattr(sinks, "in_notebook", lambda: kernel)
    opened = sinks.open_sinks(
        tmp_path, stage="0-sft", kind="sft", num_steps=1, tensorboard=False, start_step=-1, sample_tables=False
    )
    assert isinstance(opened._sinks[0], NotebookSink if kernel else ConsoleSink)
    opened.close()
    assert len(shown) == int(kernel)
