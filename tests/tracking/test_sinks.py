"""Files of a run: JSONL that survives a kill and a resume, TensorBoard events that TensorBoard reads."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from posttrain.metrics import Sample
from posttrain.runtime import processes
from posttrain.tracking.history import JsonlSink
from posttrain.tracking.log_files import host_log
from posttrain.tracking.sinks import Sinks, TensorBoardSink, open_sinks
from posttrain.train.loop import Interrupted

pytestmark = pytest.mark.fast

ROW = Sample(
    prompt="Zwei plus zwei?\n",
    completion="**vier** <b>\n```\n    [red]",
    reward=1.5,
    rewards={"correct": 1.0, "format": None},
    advantage=-0.25,
    stop="stop",
    extra={"answer": "4"},
)


def lines(path: Path) -> list[dict]:
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_jsonl_lines_are_strict_and_whole(tmp_path):
    sink = JsonlSink(tmp_path, "0_sft")
    sink.write(1, {"nll": 2.5, "none": math.nan, "big": math.inf, "low": -math.inf})
    first = lines(tmp_path / "metrics.jsonl")
    sink.samples(1, [ROW, ROW])
    samples = lines(tmp_path / "samples.jsonl")
    sink.close()
    assert first[0].pop("time") > 1e9
    assert first == [{"step": 1, "stage": "0_sft", "nll": 2.5, "none": None, "big": "inf", "low": "-inf"}]
    assert len(samples) == 2
    assert samples[0].items() >= {"step": 1, "stage": "0_sft", "prompt": ROW.prompt, "advantage": -0.25}.items()
    assert samples[0]["rewards"] == {"correct": 1.0, "format": None}
    assert samples[0]["extra"] == {"answer": "4"}


def test_text_that_utf8_cannot_hold_is_escaped(tmp_path):
    text = "\ud800 é \u2028 \x00"
    sink = JsonlSink(tmp_path, "0_rl")
    sink.samples(3, [Sample(prompt=text, completion="", reward=None, rewards={}, advantage=None, stop="length")])
    sink.close()
    data = (tmp_path / "samples.jsonl").read_bytes()
    assert json.loads(data)["prompt"] == text
    assert "é".encode() in data
    assert data.count(b"\n") == 1


def test_resuming_drops_later_lines_of_this_stage_only(tmp_path):
    for stage in ("0_sft", "1_rl"):
        sink = JsonlSink(tmp_path, stage)
        for step in range(5):
            sink.write(step, {"x": float(step)})
            sink.samples(step, [ROW])
        sink.close()
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 5, "stage": "1_rl", "to')
    sink = JsonlSink(tmp_path, "1_rl")
    sink.truncate_after(2, evaluation=False)
    sink.write(3, {"x": -1.0})
    sink.close()
    kept = [(line["stage"], line["step"], line["x"]) for line in lines(tmp_path / "metrics.jsonl")]
    assert kept == [("0_sft", i, i) for i in range(5)] + [("1_rl", i, i) for i in range(3)] + [("1_rl", 3, -1.0)]
    assert len(lines(tmp_path / "samples.jsonl")) == 8
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "samples.jsonl"]


def test_the_evaluation_after_the_last_step_is_written_once(tmp_path):
    for start in (-1, 2, 3, 3):
        sinks = open_sinks(
            tmp_path, stage="0_sft", kind="sft", num_steps=3, tensorboard=False, start_step=start, sample_tables=True
        )
        for step in range(start + 1, 4):
            sinks.write(step, {"nll": 1.0})
            if step == 2:
                sinks.write(step, {"eval/nll": 1.0})
        sinks.write(3, {"eval/nll": 2.0})
        sinks.close()
    found = [(line["step"], "eval/nll" in line) for line in lines(tmp_path / "metrics.jsonl")]
    assert found == [(0, False), (1, False), (2, False), (2, True), (3, False), (3, True)]


@pytest.mark.parametrize("tail", [b"", b"{", b'{"step": 9, "stage": "s"}', b"\xc3" * 200_000])
def test_a_torn_last_line_is_dropped_on_opening(tmp_path, tail):
    whole = b'{"step": 1, "stage": "s", "x": 1}\n'
    (tmp_path / "metrics.jsonl").write_bytes(whole + tail)
    sink = JsonlSink(tmp_path, "s")
    sink.write(2, {"x": 2.0})
    sink.close()
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_foreign_line_is_an_error_that_names_it(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "stage": "s"}\n{"step": 1}\n')
    sink = JsonlSink(tmp_path, "s")
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: not a line of metrics .*'stage'.*delete this line"):
        sink.truncate_after(0, evaluation=False)
    assert len(lines(tmp_path / "metrics.jsonl")) == 2


def events(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def test_tensorboard_reads_scalars_and_texts(tmp_path):
    sink = TensorBoardSink(tmp_path, {})
    for step in (1, 2):
        sink.write(step, {"reward": 0.5 * step, "rewards/correct/mean": 1.0, "none": math.nan})
    sink.samples(2, [ROW])
    # Read before it is closed: each write is flushed.
    read = events(tmp_path)
    assert sorted(read.Tags()["scalars"]) == ["rewards/correct/mean", "train/reward"]
    assert [(e.step, e.value) for e in read.Scalars("train/reward")] == [(1, 0.5), (2, 1.0)]
    (text,) = read.Tensors("samples/text")
    assert text.step == 2
    shown = text.tensor_proto.string_val[0].decode()
    assert "    **vier** <b>\n    ```\n        [red]" in shown
    assert "    format = None" in shown
    assert "    answer = 4" in shown
    metadata = read.SummaryMetadata("samples/text")
    assert metadata.plugin_data.plugin_name == "text"
    sink.close()


def test_settings_are_hyperparameters(tmp_path):
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    TensorBoardSink(tmp_path, {"optimizer.learning_rate": 0.5, "packing": True, "loss": "nll"}).close()
    read = events(tmp_path)
    content = read.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    found = HParamsPluginData.FromString(content).session_start_info.hparams
    values = {name: value.WhichOneof("kind") for name, value in found.items()}
    assert values == {"optimizer.learning_rate": "number_value", "packing": "bool_value", "loss": "string_value"}


def test_tables_go_to_a_file_and_a_histogram(tmp_path):
    shares = np.asarray([[0.1, 0.9], [0.333333333, 0.666666667]], np.float32)
    for start in (-1, 1):
        sinks = open_sinks(
            tmp_path, stage="0_sft", kind="sft", num_steps=3, tensorboard=True, start_step=start, sample_tables=True
        )
        assert (tmp_path / "tables.jsonl").exists() == (start == 1)
        for step in (start + 2, start + 3):
            sinks.tables(step, {"moe/share": shares})
        sinks.close()
    written = lines(tmp_path / "tables.jsonl")
    assert [line["step"] for line in written] == [1, 3, 4]
    assert written[0]["moe/share"] == [[0.1, 0.9], [0.33333, 0.66667]]
    read = events(tmp_path / "tensorboard" / "0_sft")
    assert "moe/share" in [*read.Tags()["histograms"], *read.Tags()["tensors"]]


@pytest.mark.filterwarnings("ignore:html5lib's sanitizer:DeprecationWarning")
def test_tensorboard_shows_the_text_as_code(tmp_path):
    from tensorboard.plugins.text.text_plugin import text_array_to_html

    sink = TensorBoardSink(tmp_path, {})
    sink.samples(1, [ROW])
    sink.close()
    (text,) = events(tmp_path).Tensors("samples/text")
    html = text_array_to_html(np.array(text.tensor_proto.string_val[0].decode(), dtype=object), True)
    assert "**vier** &lt;b&gt;" in html
    assert "<strong>Completion</strong>" in html


def test_tensorboard_forgets_later_steps_after_a_resume(tmp_path):
    first = TensorBoardSink(tmp_path, {})
    for step in range(6):
        first.write(step, {"x": float(step)})
    first.close()
    second = TensorBoardSink(tmp_path, {})
    second.truncate_after(2)
    second.write(3, {"x": 30.0})
    second.close()
    assert len(list(tmp_path.iterdir())) == 2
    assert [(e.step, e.value) for e in events(tmp_path).Scalars("train/x")] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0)]


@pytest.mark.thorough
def test_the_writer_imports_no_tensorflow_and_no_torch(tmp_path):
    code = (
        "import sys; from posttrain.tracking.sinks import TensorBoardSink; "
        "assert not {'tensorboard', 'rich'} & set(sys.modules); "
        "s = TensorBoardSink(sys.argv[1], {'a': 1}); s.write(1, {'x': 1.0}); s.samples(1, []); s.close(); "
        "bad = {'tensorflow', 'torch'} & set(sys.modules); "
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=Path(__file__).parents[2])


def test_a_stage_has_all_its_sinks_and_resumes(tmp_path, capsys):
    for start, value in ((-1, 1.0), (1, 2.0)):
        sinks = open_sinks(
            tmp_path, stage="0_sft", kind="sft", num_steps=3, tensorboard=True, start_step=start, sample_tables=True
        )
        for step in range(start + 1, 4):
            sinks.write(step, {"nll": value})
        sinks.samples(3, [ROW])
        sinks.close()
    assert [line["nll"] for line in lines(tmp_path / "metrics.jsonl")] == [1.0, 1.0, 2.0, 2.0]
    assert len(lines(tmp_path / "samples.jsonl")) == 1
    assert [e.value for e in events(tmp_path / "tensorboard" / "0_sft").Scalars("train/nll")] == [1.0, 1.0, 2.0, 2.0]
    printed = capsys.readouterr().out
    assert printed.count(" 1.00 ") >= 4
    assert "vier" in printed
    sinks = open_sinks(
        tmp_path, stage="0_sft", kind="sft", num_steps=3, tensorboard=False, start_step=3, sample_tables=True
    )
    sinks.close()
    assert len(list((tmp_path / "tensorboard" / "0_sft").iterdir())) == 2


def test_all_sinks_are_closed_when_one_fails(tmp_path):
    class Failing:
        def write(self, step, metrics): ...
        def tables(self, step, tables): ...
        def samples(self, step, rows): ...
        def close(self):
            raise OSError("disk full")

    jsonl = JsonlSink(tmp_path, "s")
    with pytest.raises(OSError, match="disk full"):
        Sinks(Failing(), jsonl).close()
    with pytest.raises(ValueError, match="closed file"):
        jsonl.write(1, {"x": 1.0})


def test_each_of_several_processes_has_its_own_metrics_and_log(tmp_path, monkeypatch, capsys):
    """The second one: no metrics of the run, its own without losses, those of steps that are done again once."""
    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "index", lambda: 1)
    for start in (-1, 1):
        sinks = open_sinks(
            tmp_path, stage="0_sft", kind="sft", num_steps=3, tensorboard=True, start_step=start, sample_tables=True
        )
        for step in range(start + 1, 4):
            sinks.write(step, {"loss": 1.0, "step_time": 0.5 + start, "timing_s/data": 0.1})
            monkeypatch.setattr(processes, "_waited_s", processes.waited_s() + 2.0)
        sinks.write(3, {"eval/nll": 2.0})
        sinks.close()
    assert [path.name for path in tmp_path.iterdir()] == ["hosts"]
    found = lines(tmp_path / "hosts/1.jsonl")
    assert [(line["step"], line["step_time"]) for line in found] == [(0, -0.5), (1, -0.5), (2, 1.5), (3, 1.5)]
    assert [line["host/wait_s"] for line in found] == [0.0, 2.0, 0.0, 2.0]
    assert all(line["host/resident_mib"] > 50 and "loss" not in line and "eval/nll" not in line for line in found)

    def fail():
        print("to the user", file=sys.stderr)
        raise ValueError("why")

    with pytest.raises(ValueError, match="why"), host_log(tmp_path):
        fail()
    log = (tmp_path / "hosts/1.log").read_text()
    assert "begun: process 1 of 2" in log and " to the user\n" in log and "ValueError: why\n" in log
    assert log.endswith("ended by ValueError\n") and "Traceback" in log and capsys.readouterr().err == "to the user\n"
    with pytest.raises(Interrupted), host_log(tmp_path):
        raise Interrupted("stopped after step 3", signal.SIGTERM)
    stopped = (tmp_path / "hosts/1.log").read_text().removeprefix(log)
    assert "Traceback" not in stopped and " stopped after step 3\n" in stopped
    assert stopped.endswith("ended by Interrupted\n")
