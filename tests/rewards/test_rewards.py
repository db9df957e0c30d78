"""The reward files that come with the project, on answers whose score is plain."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from rewards import arithmetic, gsm8k, soft_overlong, stories


def test_held_out_sums_are_never_trained_on() -> None:
    train = {row["prompt"] for seed in (0, 1) for row in arithmetic.problems(count=5000, seed=seed, held_out=False)}
    held_out = {row["prompt"] for seed in (0, 1) for row in arithmetic.problems(count=2000, seed=seed, held_out=True)}
    assert len(held_out) > 500
    assert not train & held_out


def test_pupils_forget_only_carries_and_the_answer_stays_right() -> None:
    rows = arithmetic.problems(count=4000, seed=0, held_out=False, forgotten=0.65)
    carries = []
    for row in rows:
        a, b = map(int, row["prompt"][:-1].split("+"))
        assert row["answer"] == str(a + b)
        if a % 10 + b < 10:
            assert row["completion"] == row["answer"]
        else:
            assert row["completion"] in (str(a + b), str(a + b - 10))
            carries.append(row["completion"] != row["answer"])
    assert abs(sum(carries) / len(carries) - 0.65) < 0.04
    assert arithmetic.correct(["55", " 55 ", "55.", "5", ""], ["55"] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 72", 72.0),
        ("so 3 + 4 = 7\n#### $1,007", 1007.0),
        ("The answer is -3.5.", -3.5),
        ("first 1 then 2", 2.0),
        ("#### none", None),
        ("nothing", None),
        ("#### 5 and not 6", 5.0),
    ],
)
def test_final_number(text: str, number: float | None) -> None:
    assert gsm8k.final_number(text) == number


def test_every_gsm8k_answer_is_its_own_right_answer(shared: Path) -> None:
    rows = [json.loads(line) for line in (shared / "data/math/gsm8k_test.jsonl").read_text().splitlines()]
    answers = [row["answer"] for row in rows]
    assert all(gsm8k.correct(answers, answers))
    assert all(gsm8k.has_marker(answers))
    assert sum(gsm8k.correct(answers[1:], answers[:-1])) < 0.1 * len(answers)
    assert gsm8k.correct(["no number"], ["#### 3"]) == [0.0]


def test_story_rewards() -> None:
    texts = ['"Hi," said Tom. The end.', "Tom ran", "He said “go!”"]
    stops = [SimpleNamespace(stop=stop) for stop in ("stop", "stop", "length")]
    assert stories.ends_properly(texts, trajectories=stops) == [1.0, 0.0, 0.0]
    assert stories.has_dialogue(texts) == [1.0, 0.0, 1.0]


def test_openings_are_first_sentences(shared: Path) -> None:
    path = shared / "data/text/tinystories_v2gpt4_train_head.jsonl"
    rows = stories.openings(path=path, skip=0, limit=1400)
    held_out = stories.openings(path=path, skip=1400, limit=128)
    assert (len(rows), len(held_out)) == (1400, 128)
    assert all(row["prompt"][-1] in ".!?" for row in rows)
    assert all(20 <= len(row["prompt"]) <= 162 for row in rows)


def test_pairs_are_right_and_wrong_sums() -> None:
    rows = arithmetic.pairs(count=200, seed=0, held_out=False)
    assert len(rows) > 50
    for row in rows:
        a, b = map(int, row["prompt"].rstrip("=").split("+"))
        assert int(row["chosen"]) == a + b == int(row["rejected"]) + 10


def test_soft_overlong() -> None:
    """By the cases of the equation: free, on the line, at its ends, beyond."""
    lengths = (0, 79, 80, 81, 90, 99, 100, 150)
    made = soft_overlong.penalty([[1] * length for length in lengths], max_tokens=100, buffer_tokens=20)
    assert made == pytest.approx([0, 0, 0, -0.05, -0.5, -0.95, -1, -1])
    assert str(made[0]) == "0.0", "not -0.0, which a table would show"
    for buffer in (0, 101):
        with pytest.raises(ValueError, match=f"buffer_tokens={buffer} must be from 1 to max_tokens=100"):
            soft_overlong.penalty([[1]], max_tokens=100, buffer_tokens=buffer)
