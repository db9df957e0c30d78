"""Hacks are found soon after simulated hacking begins, and not in honest training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from posttrain.diagnosis.causes import Cause, find_causes
from posttrain.diagnosis.diagnose import diagnose
from posttrain.diagnosis.evidence import Evidence, RecordedSample
from posttrain.diagnosis.hacks import HACKS as CHECKS
from posttrain.rl.monitor import Monitor
from tests.diagnosis.evidences import MODEL, evidence, names, section
from tests.rl.streams import CLEAN, HACKS, Stream

pytestmark = pytest.mark.fast

ONSET, WITHIN = 30, 25
CLEAN_STEPS = 130
"""Steps of each of the honest streams."""
CAUSES = {
    "length": "pays_for_length",
    "repetition": "pays_for_repetition",
    "copy": "pays_for_copies",
    "format": "pays_for_form",
    "leak": "pays_for_told_answers",
    "verifier": "fails_verifier",
}


def correct(completions: list[str], answer: list[str]) -> list[float]:
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def form(completions: list[str]) -> list[float]:
    return [float(bool(text)) for text in completions]


def stream_evidence(stream: Stream, count: int, seed: int = 0) -> Iterator[Evidence]:
    """Evidence after each step of a stream."""
    monitor = Monitor(verifier="verifier" if "verifier" in stream.weights else None)
    functions = {"correct": correct, "judge": form, "form": form, "verifier": correct}
    rewards = [{"fn": functions[name], "weight": weight, "name": name} for name, weight in stream.weights.items()]
    given, lines = section(rewards=rewards), []
    for step, (groups_P, scored) in enumerate(stream.steps(count, seed), start=1):
        metrics = monitor.measure(groups_P, scored) | {
            "reward": float(scored.total_PG.mean()),
            "completions/mean_length": float(np.mean([one.num_sampled for group in groups_P for one in group])),
            **{f"rewards/{name}/mean": float(part.mean()) for name, part in scored.parts_PG.items()},
        }
        lines.append({"step": step, **metrics})
        yield Evidence(name="0-rl", kind="rl", section=given, model=MODEL, steps=list(lines))


def first_found(stream: Stream, count: int, seed: int = 0) -> tuple[int, list[Cause]]:
    for step, given in enumerate(stream_evidence(stream, count, seed), start=1):
        if found := find_causes(given, CHECKS):
            return step, found
    return count, []


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", list(HACKS))
def test_hacking_is_found(kind: str) -> None:
    step, found = first_found(replace(HACKS[kind], onset=ONSET), ONSET + WITHIN)
    assert [cause.name for cause in found][:1] == [CAUSES[kind]] and found[0].hack
    assert ONSET < step <= ONSET + WITHIN


@pytest.mark.thorough
@pytest.mark.parametrize("name", list(CLEAN))
def test_honest_training_has_none(name: str) -> None:
    """A fault: causes of small changes, or of longer answers whose length the reward does not follow."""
    assert first_found(CLEAN[name], CLEAN_STEPS)[1] == []


LONGER = {"completions/mean_length": np.linspace(4, 16, 40)}


def test_a_reward_that_pays_for_length() -> None:
    """The gain is 0.4, and the fifths are 9.8 tokens apart: a slope of 0.0165 explains 40 % of the gain."""
    assert names(evidence({**LONGER, "hacking/length_slope": 0.03})) == ["pays_for_length"]
    assert names(evidence({**LONGER, "hacking/length_slope": 0.012})) == []
    assert names(evidence({"hacking/length_slope": 0.05})) == []
    # Rewards of 0 and 1: the right answers are the longer ones.
    assert names(evidence({**LONGER, "hacking/length_slope": 0.05, "hacking/reward_values": 2.0})) == []
    (cause,) = diagnose(evidence({**LONGER, "hacking/length_slope": 0.05}))
    assert "within groups +0.05 a token, which explains" in cause.summary and "do not raise" in cause.advice
    assert names(evidence({**LONGER, "hacking/length_slope": 0.05}, settings={"monitor": None})) == []


def test_a_reward_that_is_the_length() -> None:
    assert names(evidence({"hacking/length_correlation": 0.95}, steps=3)) == ["pays_for_length"]
    assert names(evidence({"hacking/length_correlation": 0.85}, steps=3)) == []


def test_a_reward_that_pays_answers_without_an_end() -> None:
    """At the limit all lengths are equal, so that no correlation shows it; and more tokens would not help."""
    endless = {"completions/clipped_ratio": np.linspace(0, 1, 40), "hacking/length_spread": 0.0}
    (cause,) = diagnose(evidence(endless))
    assert cause.name == "pays_for_length" and "do not raise sampling.max_tokens" in cause.advice
    assert names(evidence({"completions/clipped_ratio": np.linspace(0, 0.4, 40)})) == []


def constant_records(share: float) -> list[RecordedSample]:
    """Eight prompts: in the first step 4 answers of each, in the last one text in so many of them."""
    draw = np.random.default_rng(0)
    return [
        RecordedSample(step=step, group=step * 8 + row, row=row, reward=1.0, stop="stop", prompt=(), tokens=tokens)
        for step in (1, 40)
        for row in range(8)
        for _ in range(25)
        for tokens in [(1,) if step == 40 and draw.random() < share else tuple(draw.integers(9, 999, 3).tolist())]
    ]


def test_one_answer_to_every_prompt() -> None:
    assert names(evidence({}, records=constant_records(0.9))) == ["pays_for_constant"]
    assert names(evidence({}, records=constant_records(0.5))) == []
