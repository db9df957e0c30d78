"""Profiles: the table of a recorded step against a slow twin, devices of a TPU's trace, and the reading of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.tracking.profile import NUM_STABLE, PATIENCE, StepRecorder, advice, describe_profile
from posttrain.tracking.trace import (
    UNEXPLAINED,
    Op,
    PhaseTime,
    Span,
    TimeTable,
    Trace,
    busy,
    innermost,
    own_times,
    time_table,
)

pytestmark = pytest.mark.fast

INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), max_size=8)


@given(INTERVALS)
def test_the_innermost_span_began_last(intervals: list[tuple[int, int]]) -> None:
    """Against a look at every unit of time."""
    spans = [Span(float(start), float(start + length), str(n), {}) for n, (start, length) in enumerate(intervals)]
    pieces = list(innermost(spans, 5.0, 25.0))
    assert pieces[0][0] == 5 and pieces[-1][1] == 25
    assert all(left[1] == right[0] for left, right in pairwise(pieces))
    for left, right, found in pieces:
        for time in range(int(left), int(right)):
            active = [span for span in spans if span.start <= time < span.end]
            assert (found is None) == (not active)
            assert found is None or found.start == max(span.start for span in active)


@given(INTERVALS)
def test_busy_time_and_own_times(intervals: list[tuple[int, int]]) -> None:
    ops = sorted(Op(float(start), float(start + length), str(n), "") for n, (start, length) in enumerate(intervals))
    union = busy(ops)
    covered = {time for op in ops for time in range(int(op.start), int(op.end))}
    assert {time for left, right in union for time in range(int(left), int(right))} == covered
    assert all(left[1] < right[0] for left, right in pairwise(union))
    assert len(list(own_times(ops))) == len(ops)


def test_an_operation_has_not_the_time_of_its_parts() -> None:
    loop, first, second = Op(0.0, 10.0, "while", "p"), Op(1.0, 4.0, "dot", "p"), Op(4.0, 9.0, "copy", "p")
    assert {op.name: own for op, own in own_times([loop, first, second])} == {"while": 2, "dot": 3, "copy": 5}


TPU_TRACE = """
planes {
  name: "/host:CPU"
  lines {
    name: "python" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 0 duration_ps: 100000 stats { metadata_id: 1 int64_value: 7 } }
    events { metadata_id: 2 offset_ps: 0 duration_ps: 40000 }
    events { metadata_id: 3 offset_ps: 10000 duration_ps: 20000
             stats { metadata_id: 2 int64_value: 2 } stats { metadata_id: 3 int64_value: 8 } }
    events { metadata_id: 4 offset_ps: 40000 duration_ps: 58000 }
    events { metadata_id: 5 offset_ps: 0 duration_ps: 1000 }
  }
  event_metadata { key: 1 value { id: 1 name: "step" } }
  event_metadata { key: 2 value { id: 2 name: "phase rollout" } }
  event_metadata { key: 3 value { id: 3 name: "phase rollout/decode" } }
  event_metadata { key: 4 value { id: 4 name: "phase update" } }
  event_metadata { key: 5 value { id: 5 name: "anything" } }
  stat_metadata { key: 1 value { id: 1 name: "step_num" } }
  stat_metadata { key: 2 value { id: 2 name: "rows" } }
  stat_metadata { key: 3 value { id: 3 name: "slots" } }
}
planes {
  name: "/device:TPU:0"
  lines {
    name: "XLA Modules" timestamp_ns: 1000
    events { metadata_id: 3 offset_ps: 0 duration_ps: 100000 }
  }
  lines {
    name: "XLA Ops" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 10000 duration_ps: 10000 stats { metadata_id: 1 str_value: "jit_decode" } }
    events { metadata_id: 2 offset_ps: 50000 duration_ps: 29000 stats { metadata_id: 1 str_value: "jit_update" } }
  }
  event_metadata { key: 1 value { id: 1 name: "%dot.3 = f32[8,8] dot(a, b)" } }
  event_metadata { key: 2 value { id: 2 name: "all-gather.1" } }
  event_metadata { key: 3 value { id: 3 name: "jit_update" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_module" } }
}
"""


def test_a_trace_of_a_tpu() -> None:
    """Spans of the host beside the operations of a device; the line of whole programs is not counted again."""
    profile_data = jax.profiler.ProfileData
    data = profile_data.from_serialized_xspace(profile_data.text_proto_to_serialized_xspace(TPU_TRACE))
    table = time_table(Trace.of(data), compilations=2)
    assert list(table.steps) == [7] and table.seconds == pytest.approx(100e-9) and table.compilations == 2
    phases = {phase.name: phase for phase in table.phases}
    assert {name: round(phase.share, 9) for name, phase in phases.items()} == {
        "update": 0.58,
        "rollout": 0.2,
        "rollout/decode": 0.2,
        UNEXPLAINED: 0.02,
    }
    assert phases["rollout/decode"].device_busy == pytest.approx(0.5)
    assert phases["update"].device_busy == pytest.approx(0.5) and phases["rollout"].device_busy == 0
    assert table.programs == pytest.approx({"jit_update": 29e-9, "jit_decode": 10e-9})
    assert table.kinds == pytest.approx({"network": 29e-9, "products": 10e-9})
    assert table.ops[0][:2] == ("all-gather.1", "jit_update")
    assert table.tail == pytest.approx(0.2)
    text = "\n".join(describe_profile(table, Path("there")))
    assert "profile of step 7" in text and "98.0% of it explained" in text and "recompiling: 2 programs" in text


def table_of(tail: float = 0.0, compilations: float = 0.0, network: float = 0.0, **shares: float) -> TimeTable:
    """Table of a step of a second, in whose phases the devices always compute."""
    phases = [
        PhaseTime(name=name.replace("__", "/"), seconds=share, share=share, calls=1.0, device_busy=1.0)
        for name, share in shares.items()
    ]
    kinds = {"network": network, "products": 1 - network}
    return TimeTable(
        steps=[1],
        seconds=1.0,
        phases=sorted(phases, key=lambda phase: -phase.share),
        programs={"p": 1.0},
        kinds=kinds,
        ops=[],
        tail=tail,
        compilations=compilations,
    )


@pytest.mark.parametrize(
    ("table", "causes"),
    [
        (table_of(update=0.99, data=0.01), ["nothing stands out"]),
        (table_of(update=0.5, data=0.5), ["waiting for data: 50%"]),
        (table_of(update=0.6, rewards=0.4), ["rewards: 40%"]),
        (table_of(update=0.7, sync=0.3), ["sync: 30%"]),
        (table_of(update=0.6, checkpoint=0.4), ["checkpoint: 40%"]),
        (table_of(update=1.0, network=0.5), ["network: devices spend 50%"]),
        (table_of(update=0.4, rollout__decode=0.6, tail=0.5), ["rollout tail: 50%"]),
        (table_of(update=0.6, data=0.4, compilations=1.0), ["recompiling: 1 programs", "waiting for data: 40%"]),
    ],
)
def test_what_makes_a_step_slow(table: TimeTable, causes: list[str]) -> None:
    assert [line[: len(cause)] for line, cause in zip(advice(table), causes, strict=True)] == causes


def test_devices_that_wait_for_the_host() -> None:
    busy_table = table_of(update=0.5, rollout__decode=0.5)
    idle = [replace(phase, device_busy=0.1) for phase in busy_table.phases]
    lines = advice(replace(busy_table, phases=idle))
    assert [line.split(":")[0] for line in lines] == ["host-bound update", "host-bound rollout"]
    assert advice(replace(busy_table, phases=idle, programs={}))[0].startswith("nothing stands out")


@pytest.mark.parametrize(
    ("seconds", "first"),
    [
        ([9.0, 1.0, 1.0, 1.0, 1.05], NUM_STABLE + 2),
        ([1.0, 2.0] * PATIENCE, PATIENCE + 1),
    ],
)
def test_auto_waits_for_stable_steps(
    seconds: list[float], first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Path] = []
    module = "posttrain.tracking.profile"
    monkeypatch.setattr(f"{module}.start_recording", started.append)
    monkeypatch.setattr(f"{module}.stop_recording", lambda folder: folder)
    recorder = StepRecorder(tmp_path / "profile", "auto", 1000)
    for step, value in enumerate(seconds, 1):
        recorder.start_if_due(step, lambda: None)
        assert not recorder.recording, step
        recorder.observe(value)
        if step + 1 == first:
            break
    recorder.start_if_due(first, lambda: None)
    assert recorder.recording and started == [tmp_path / "profile"]
    assert [recorder.ends(step) for step in (first, first + 1, first + 2)] == [False, False, True]
    recorder.close()
    assert not recorder.recording


def test_auto_in_a_short_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last steps, however long they took."""
    monkeypatch.setattr("posttrain.tracking.profile.start_recording", lambda folder: None)
    monkeypatch.setattr("posttrain.tracking.profile.stop_recording", lambda folder: folder)
    recorder = StepRecorder(tmp_path, "auto", 5)
    for step in (1, 2):
        recorder.start_if_due(step, lambda: None)
        assert not recorder.recording
    recorder.start_if_due(3, lambda: None)
    assert recorder.recording and recorder.ends(5)
    recorder.close()
