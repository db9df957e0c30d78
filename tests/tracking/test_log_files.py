"""The log of a run's first process: what it has printed, each line once, without what a terminal draws in place."""

from __future__ import annotations

import io
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from posttrain.errors import ConfigError
from posttrain.runtime import processes
from posttrain.tracking import console as console_module
from posttrain.tracking.console import console, progress_bar
from posttrain.tracking.log_files import LOG_NAME, RunLog
from posttrain.tracking.steps import ConsoleSink
from posttrain.train.loop import Interrupted
from tests.stages.runs import posttrain, sft_stage, write_run


class Terminal(io.StringIO):
    """Stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def texts(folder: Path) -> list[str]:
    """Lines of the log without their times."""
    stamp = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ?")
    found = (folder / LOG_NAME).read_text(encoding="utf-8").splitlines()
    assert all(stamp.match(line) for line in found)
    return [stamp.sub("", line, count=1) for line in found]


def logged(folder: Path, say: object) -> list[str]:
    """Lines of a log between its first and its last."""
    log = RunLog()
    with log.copying():
        log.claim(folder)
        log.open()
        say()  # type: ignore[operator]
    first, *between, last = texts(folder)
    assert first.startswith("begun: ") and last == "ended"
    return between


@contextmanager
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """Terminal of both streams."""
    shown = Terminal()
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    console_module.console.cache_clear()
    yield shown
    console_module.console.cache_clear()


def test_lines_of_both_streams_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def say() -> None:
        console().print("a table or a line", style="bold yellow")
        print("of a reward", "function")
        sys.stderr.writelines(["a warning", " of two parts\n"])
        sys.stdout.write("never ended")

    assert logged(tmp_path, say) == ["a table or a line", "of a reward function", "a warning of two parts"]
    out, err = capsys.readouterr()
    assert out == "a table or a line\nof a reward function\nnever ended" and err == "a warning of two parts\n"


def test_no_progress_bar_and_no_colour_of_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def say() -> None:
        console().print("[bold red]a warning[/bold red]")
        with progress_bar("scoring", 9, delay_s=0.0) as advance:
            for _ in range(9):
                advance(1)
                time.sleep(0.05)
            print("said while the bar is drawn")
        sys.stderr.write("\r 10%|#  \r100%|###\n")

    with on_terminal(monkeypatch) as terminal:
        found = logged(tmp_path, say)
    assert "\x1b[" in terminal.getvalue() and "━" in terminal.getvalue(), "the bar was drawn, in colours"
    assert found[:2] == ["a warning", "said while the bar is drawn"]
    assert re.fullmatch(r"scoring: 9 in \d\.\d s", found[2]) and found[3:] == ["100%|###"]


def test_steps_that_a_terminal_redraws_are_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def say() -> None:
        sink = ConsoleSink("sft", 3, sample_tables=False)
        for step in range(1, 4):
            sink.write(step, {"nll": 1.0 / step, "update_skipped": float(step == 2)})
        sink.close()

    with on_terminal(monkeypatch):
        found = [line for line in logged(tmp_path, say) if "/3" in line]
    assert [line.split()[:2] for line in found] == [["1/3", "1.00"], ["2/3", "0.500"], ["3/3", "0.333"]]
    assert "update skipped" in found[1] and "\r" not in "".join(found)


def test_a_call_that_is_refused_leaves_no_log(tmp_path: Path) -> None:
    """That of an error has what came before it, its traceback or its one line, and goes on in the next call."""

    def fail(error: BaseException, folder: Path | None) -> None:
        log = RunLog()
        with log.copying():
            if folder is not None:
                log.claim(folder)
            print("loading")
            raise error

    for error, folder in (
        (ConfigError("output: other settings"), None),
        (ConfigError("dataset was another"), tmp_path),
        (ValueError("before a folder"), None),
    ):
        with pytest.raises(type(error)):
            fail(error, folder)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="why"):
        fail(ValueError("why"), tmp_path)
    found = texts(tmp_path)
    assert found[1] == "loading" and "ValueError: why" in found and found[-1] == "ended by ValueError"
    with pytest.raises(Interrupted):
        fail(Interrupted("stopped after step 3", signal.SIGINT), tmp_path)
    more = texts(tmp_path)[len(found) :]
    assert more[0].startswith("begun: ") and more[1:] == ["loading", "stopped after step 3", "ended by Interrupted"]


def test_the_second_of_two_processes_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "index", lambda: 1)
    before = sys.stdout
    log = RunLog()
    with log.copying():
        log.claim(tmp_path)
        log.open()
        assert sys.stdout is before
    assert not list(tmp_path.iterdir())


def test_a_run_and_its_next_call_share_a_log(tmp_path: Path) -> None:
    file = write_run(tmp_path, sft_stage(num_steps=2))
    first = posttrain("run", file)
    assert first.code == 0, first.err
    found = texts(tmp_path / "out")
    printed = [line.rstrip() for line in (first.out + first.err).splitlines() if line.strip()]
    assert found[0].startswith("begun: ") and found[-1] == "ended"
    assert sorted(found[1:-1]) == sorted(printed)
    assert posttrain("run", file).code == 0 and texts(tmp_path / "out") == found, "nothing was trained"
    grown = posttrain("run", file, "stages.0.num_steps=3")
    assert grown.code == 0, grown.err
    more = texts(tmp_path / "out")
    assert more[: len(found)] == found and "0-sft: num_steps grows from 2 to 3" in more[len(found) :]
    assert any("3/3" in line for line in more[len(found) :]) and more[-1] == "ended"
