"""What people read: aligned lines, tables that keep to the width, bars that leave nothing behind."""

from __future__ import annotations

import io
import logging
import math
import re
import time

import pytest
from rich.cells import cell_len
from rich.console import Console

from posttrain.metrics import Sample
from posttrain.tracking import steps as steps_module
from posttrain.tracking.console import console, cut, printable, progress, progress_bar, shown_log
from posttrain.tracking.steps import LAYOUTS, Trend, means_of_functions

pytestmark = pytest.mark.fast

RL = {
    "reward": 0.51234,
    "reward_stderr": 0.0312,
    "completions/mean_length": 131.25,
    "completions/clipped_ratio": 0.125,
    "frac_reward_zero_std": 0.25,
    "perf/tokens_per_s": 12345.6,
    "step_time": 1.234,
    "loss": 77.0,
    "perf/compilations": 0.0,
    "perf/compile_s": 0.0,
}
SFT = {"nll": 1.29451, "learning_rate": 3e-4, "grad_norm": 0.98765, "perf/tokens_per_s": 999.0, "step_time": 0.05}


def ConsoleSink(kind: str, num_steps: int, output: Console | None = None, *, tables: bool = True):
    return steps_module.ConsoleSink(kind, num_steps, output, sample_tables=tables)


def capture(width: int = 100, **kwargs) -> Console:
    return Console(file=io.StringIO(), width=width, force_jupyter=False, highlight=False, **kwargs)


def text_of(output: Console) -> str:
    assert isinstance(output.file, io.StringIO)
    return output.file.getvalue()


def test_an_rl_step_is_one_line_that_leads_with_the_reward():
    output = capture()
    sink = ConsoleSink("rl", 50, output)
    sink.write(3, RL)
    sink.write(4, RL | {"perf/compilations": 2.0, "perf/compile_s": 3.25})
    sink.write(5, {"reward": -12.0})
    sink.close()
    assert text_of(output).splitlines() == [
        "trend: mean of the last 10 steps less that of the 10 before; left: time to go",
        "cut off: answers that max_tokens ended; signal: groups with unequal rewards; kl: of the policy and the",
        "reference, nats a token; grad: norm of the gradient; lr: learning rate",
        " step        reward   trend    best  length  cut off  signal      kl    grad      lr  s/step    left",
        " 3/50  0.512 ±0.031       -   0.512     131      12%     75%       -       -       -    1.23    58 s",
        " 4/50  0.512 ±0.031       -   0.512     131      12%     75%       -       -       -    1.23    57 s"
        "  compiled 2 programs in 3.2 s",
        " 5/50         -12.0       -   0.512       -        -       -       -       -       -       -    56 s",
    ]


def test_an_sft_step_leads_with_the_nll_and_evaluations_have_their_own_line():
    output = capture()
    sink = ConsoleSink("sft", 5, output)
    sink.write(0, {"eval/nll": 2.0, "eval/num_tokens": 1000.0})
    sink.write(1, SFT | {"eval/nll": 1.5})
    sink.write(2, {"timing_s/data": 1.0})
    sink.write(2, SFT | {"nll": math.nan})
    assert text_of(output).splitlines() == [
        " 0/5  eval/nll 2  eval/num_tokens 1000",
        "trend: mean of the last 10 steps less that of the 10 before; left: time to go",
        "step      nll   trend     best        lr    grad  tokens/s  s/step    left",
        " 1/5     1.29       -     1.29  0.000300   0.988       999  0.0500     0 s",
        " 1/5  eval/nll 1.5",
        " 2/5      nan       -     1.29  0.000300   0.988       999  0.0500     0 s",
    ]


@pytest.mark.parametrize("kind", sorted(LAYOUTS))
def test_lines_keep_to_their_columns(kind):
    """Eighty, but for RL, whose rate, KL and gradient say why nothing is learned."""
    output = capture()
    layout = LAYOUTS[kind]
    everything = {**RL, **SFT, layout.headline: -0.0123, "reward_stderr": 0.123}
    names = ["rewards/accuracies", "rewards/margins", "frac_ties", "distill/kl", "distill/teacher_nll", "loss"]
    sink = ConsoleSink(kind, 1000, output)
    sink.write(999, {**dict.fromkeys(names, -1.2345), **everything})
    sink.close()
    assert max(len(line) for line in text_of(output).splitlines()) <= (104 if kind == "rl" else 80)


def test_trend_best_and_time_to_go():
    """Red if compilation counted as the time of a step, or a rising loss as the better one."""
    trend = Trend("nll", False, 100)
    assert trend.shown == "-" and math.isnan(trend.best) and math.isnan(trend.left_s)
    trend.add(1, {"nll": 9.0, "step_time": 50.0, "perf/compilations": 9.0})
    assert math.isnan(trend.left_s)  # a step that compiles says nothing about the others
    for step in range(2, 22):
        trend.add(step, {"nll": 8.0 if step < 12 else 7.5, "step_time": 2.0, "perf/compilations": 0.0})
        assert trend.left_s == 2.0 * (100 - step)
    assert (trend.shown, trend.best, trend.left_s) == ("-0.5", 7.5, 158.0)
    trend.add(22, {"nll": math.nan, "step_time": 2.0})
    assert trend.best == 7.5


def test_steps_that_all_compile_have_a_time_to_go_in_the_end():
    trend = Trend("nll", False, 100)
    for step in range(1, 4):
        assert math.isnan(trend.left_s)
        trend.add(step, {"nll": 9.0, "step_time": 5.0, "perf/compilations": 1.0})
    assert trend.left_s == 97 * 5


def test_names_of_rewards_are_cut_between_their_words():
    """Red if `advantage` breaks at 80 columns, or a name of a reward inside a word."""
    output = capture(80)
    rewards = {"has_only_numbers": 1.0, "format": 0.5}
    ConsoleSink("rl", 10, output).samples(4, [sample(rewards=rewards)])
    words = [line.split() for line in text_of(output).splitlines()[1:6]]
    assert {"advantage", "only_", "numbers"} <= {word for line in words for word in line}


def test_the_final_table_has_each_reward():
    metrics = {"eval/reward": 1.5, "eval/rewards/exact/mean": 0.375, "eval/rewards/short/mean": 0.5}
    before, after = {"metrics": metrics}, {"metrics": metrics | {"eval/rewards/exact/mean": 0.4}}
    assert means_of_functions(before, after) == [("exact", "0.375", "0.400"), ("short", "0.500", "0.500")]
    alone = {"metrics": {"eval/rewards/exact/mean": 0.375}}
    assert means_of_functions(alone, alone) == []
    assert means_of_functions(alone, before)[1] == ("short", "-", "0.500"), "no mean is shown as none"
    assert means_of_functions(before, alone)[1] == ("short", "0.500", "-")


def test_a_terminal_redraws_one_line():
    output = capture(force_terminal=True, color_system=None)
    sink = ConsoleSink("sft", 3, output)
    sink.write(1, SFT)
    output.print("a note")
    sink.write(2, SFT)
    sink.write(3, SFT)
    sink.close()
    printed = text_of(output)
    assert "\r\x1b[2K 1/3" in printed and "\r\x1b[2Ka note\n" in printed
    assert [line for line in printed.splitlines() if " 2/3" in line and line.endswith("s")] == []
    lines = [line.rpartition("\x1b[2K")[2] for line in printed.split("\n")]
    assert [line[:6] for line in lines] == ["trend:", "step  ", "a note", " 3/3  ", ""]


def test_evaluations_of_judged_answers_have_intervals():
    output = capture()
    sink = ConsoleSink("preference", 5, output)
    margins = {"eval/rewards/margins": 0.0512, "eval/rewards/margins_low": 0.04, "eval/rewards/margins_high": 0.0625}
    accuracy = dict(zip(("", "_low", "_high"), (0.6, 0.55, 0.65), strict=True))
    of_pairs = {f"eval/rewards/accuracies{end}": value for end, value in accuracy.items()}
    sink.write(0, {"eval/loss": 0.5, **margins, **of_pairs, "eval/logps/chosen": -3.0})
    sink.write(5, {"eval/loss": 0.5, **margins})
    assert text_of(output).splitlines() == [
        " 0/5  held-out accuracy 0.600 (0.550 to 0.650), margin 0.0512 (0.04 to 0.0625), loss 0.5000",
        " 5/5  held-out margin 0.0512 (0.04 to 0.0625), loss 0.5000",
    ]


def test_the_header_comes_again():
    output = capture()
    sink = ConsoleSink("sft", 45, output)
    for step in range(1, 46):
        sink.write(step, SFT)
    printed = text_of(output).splitlines()
    assert [i for i, line in enumerate(printed) if "nll" in line] == [1, 22, 43]
    assert len(printed) == 49
    assert len({len(line) for line in printed[1:]}) == 1


def test_fast_steps_are_thinned_but_first_compiled_and_last_are_there():
    output = capture()
    sink = ConsoleSink("sft", 10_000, output)
    start = time.monotonic()
    for step in range(1, 1001):
        sink.write(step, SFT | {"perf/compilations": float(step == 700), "perf/compile_s": 0.1})
    sink.close()
    seconds = time.monotonic() - start
    shown = [int(line.split("/")[0]) for line in text_of(output).splitlines() if "/" in line and "nll" not in line]
    assert shown[0] == 1
    assert shown[-1] == 1000
    assert 700 in shown
    assert len(shown) <= 4 + seconds
    output = capture()
    sink = ConsoleSink("sft", 1000, output)
    for step in (998, 999, 1000):
        sink.write(step, SFT)
    assert text_of(output).splitlines()[-1].lstrip().startswith("1000/1000")


def sample(**changes) -> Sample:
    fields = {
        "prompt": "Q: " + "how many? " * 40 + "END",
        "completion": "First line\nsecond [bold]not markup[/bold] \x1b[31m\u200b " + "and more " * 80,
        "reward": 0.75,
        "rewards": {"correct": 1.0, "format": None},
        "advantage": -1.25,
        "stop": "length",
    }
    return Sample(**(fields | changes))


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("wide", [False, True])
def test_samples_keep_to_the_width_and_are_not_interpreted(width, wide):
    output = capture(width, force_terminal=True, color_system=None)
    rows = [sample(completion="数学" * 300) if wide else sample(), sample(prompt="", completion="", reward=None)]
    ConsoleSink("rl", 10, output).samples(4, rows)
    printed = text_of(output)
    assert max(cell_len(line) for line in printed.splitlines()) <= width
    body = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if line.startswith("│")]
    columns = ["".join(cells) for cells in zip(*body, strict=True)]
    assert columns[0].startswith("…")
    assert columns[0].endswith("END")
    assert columns[1].replace(" ", "").startswith("数学" * 9 if wide else r"Firstline\nsecond")
    assert columns[1].endswith("…")
    if width == 160 and not wide:
        assert r"\nsecond [bold]not markup[/bold] \x1b[31m\u200b and more" in columns[1]
    assert columns[2:] == ["0.75-", "11", "--", "-1.25-1.25", "lengthlength"]
    assert "\x1b" not in printed
    assert len(printed.splitlines()) < 22
    output = capture(width)
    ConsoleSink("rl", 10, output).samples(4, [])
    assert "completion" in text_of(output)


def test_without_samples_every_there_is_one_table_at_the_end():
    output = capture()
    sink = ConsoleSink("rl", 10, output, tables=False)
    for step in (1, 10):
        sink.write(step, RL)
        sink.samples(step, [sample()])
    assert "completion" not in text_of(output)
    sink.close()
    assert text_of(output).count("completion") == 1 and "step 10" in text_of(output)


def test_one_reward_function_needs_no_column_of_its_own():
    output = capture()
    ConsoleSink("rl", 10, output).samples(4, [sample(rewards={"correct": 0.75})])
    assert "correct" not in text_of(output)


def test_cutting_counts_terminal_cells():
    assert cut("abc", 3) == "abc"
    assert cut("abcd", 3) == "ab…"
    assert cut("abcd", 3, keep_end=True) == "…cd"
    assert cut("数学数学", 6) == "数学…"
    assert cut("数学数学", 6, keep_end=True) == "…数学"


def test_output_that_is_not_unicode_gets_escapes():
    assert printable("a\tb\ud800é±…", "utf-8") == "a\\tb\\ud800é±…"
    assert printable("é±…", "ascii") == "\\xe9+-..."
    buffer = io.BytesIO()
    output = Console(file=io.TextIOWrapper(buffer, encoding="ascii"), width=100, force_jupyter=False)
    sink = ConsoleSink("rl", 10, output)
    sink.write(1, RL)
    sink.samples(1, [sample(completion="数" * 400)])
    output.file.flush()
    assert b"0.512 +-0.031" in buffer.getvalue()
    assert b"\\u6570" in buffer.getvalue()


def test_the_console_is_plain_without_a_terminal(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    console.cache_clear()
    try:
        assert console().width == 80
        ConsoleSink("rl", 10).write(1, RL)
        assert "0.512 ±0.031" in capsys.readouterr().out
    finally:
        console.cache_clear()


def test_progress_of_short_work_is_silent_and_long_work_closes_with_one_line(capsys):
    assert list(progress(iter("abc"), "Reading", 3)) == ["a", "b", "c"]
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""
    output = capture()
    with progress_bar("Reading [x]", 2000, delay_s=0.05, output=output) as advance:
        for _ in range(4):
            time.sleep(0.02)
            advance(500)
    (line,) = text_of(output).splitlines()
    assert re.match(r"Reading \[x\]: 2,000 in \d", line)
    output = capture()
    with pytest.raises(KeyError), progress_bar("Reading", delay_s=0.0, output=output):
        raise KeyError
    assert text_of(output) == ""


def test_a_log_gets_a_line_now_and_then():
    output = capture()
    with progress_bar("Reading", 10, delay_s=0.0, every_s=0.05, closing=False, output=output) as advance:
        advance(3)
        time.sleep(0.4)
    told = text_of(output).splitlines()
    assert len(told) >= 2 and all(re.fullmatch(r"Reading: 3 of 10 after \d+ s", line) for line in told)
    with progress_bar("Waiting", delay_s=0.0, every_s=0.05, closing=False, output=output):
        time.sleep(0.15)
    assert re.fullmatch(r"Waiting: \d+ s", text_of(output).splitlines()[-1])


def test_a_step_says_what_went_wrong_in_it():
    output = capture(width=200)
    sink = ConsoleSink("rl", 1000, output)
    lost = {"rewards/errors": 0.125, "rewards/timeouts": 0.0, "rewards/invalid": 0.25, "update_skipped": 1.0}
    sink.write(1, RL | {"rewards/errors": 0.0, "rewards/invalid": 0.0, "update_skipped": 0.0})
    sink.write(2, RL | lost)
    sink.close()
    *_, line = text_of(output).splitlines()
    assert line.startswith("   2/1000  ")
    assert line.endswith("  rewards failed 12.50%  no reward 25.00%  update skipped")


def test_no_reward_has_no_error():
    output = capture(width=200)
    sink = ConsoleSink("rl", 10, output)
    sink.write(1, RL | {"reward": math.nan, "reward_stderr": math.nan})
    assert "nan" in text_of(output) and "±" not in text_of(output)


def test_a_terminal_shows_a_bar_and_removes_it():
    output = capture(force_terminal=True)
    with progress_bar("Compiling", delay_s=0.02, output=output), progress_bar("In it", delay_s=0.02, output=output):
        time.sleep(0.3)
    printed = text_of(output)
    assert "\x1b[2K" in printed
    assert "Compiling" in printed
    after = printed.rsplit("\x1b[2K", 1)[1]
    assert [line.split(":")[0] for line in after.splitlines() if line] == [
        "In it",
        "Compiling",
    ] or "Compiling: 0." in after
    output = capture(force_terminal=True)
    with progress_bar("Again", 10, delay_s=0.02, output=output) as advance:
        advance(5)
        time.sleep(0.3)
        advance(5)
    assert "5/10" in text_of(output)


def test_the_log_is_shown_once_and_only_meanwhile(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture):
    logger = logging.getLogger("posttrain.kernels")
    with shown_log():
        logger.info("kernel [a] for b")
    assert capsys.readouterr().out == "kernel [a] for b\n"
    assert caplog.records == []  # what stands for the handlers of others
    with caplog.at_level(logging.INFO):
        logger.info("kernel c")
    assert capsys.readouterr().out == "" and caplog.messages == ["kernel c"]
