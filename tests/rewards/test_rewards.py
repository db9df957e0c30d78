"""The reward files that come with the project, on answers whose score is plain."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from posttrain.data.tokenizer import load_tokenizer
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


def test_held_out_stories_have_other_children_things_and_places() -> None:
    """By their words alone: no seed and no count mixes the sets."""
    names = [*stories.GIRLS, *stories.BOYS], stories.THINGS, stories.PLACES
    sets = []
    for held_out in (False, True):
        words = [re.findall(r"\w+", row["text"]) for row in stories.stories(count=500, seed=0, held_out=held_out)]
        sets.append({tuple(next(w for w in one if w in group) for group in names) for one in words})
    assert not sets[0] & sets[1]
    assert len(sets[0]) > 400, "few stories are of the same child, thing and place"


def test_openings_are_first_sentences_and_pairs_differ_in_their_ends() -> None:
    whole = [row["text"] for row in stories.stories(count=200, seed=0, held_out=True)]
    openings = stories.openings(count=200, seed=0, held_out=True)
    assert [row["prompt"] + row["completion"] for row in openings] == whole
    assert all(re.fullmatch(r"[^.!?]+\.", row["prompt"]) for row in openings)
    spoken = stories.has_dialogue([row["completion"] for row in openings])
    assert 0.2 < sum(spoken) / len(spoken) < 0.4
    for text, row in zip(whole, stories.pairs(count=200, seed=0, held_out=True), strict=True):
        assert text.startswith(row["prompt"]) and row["chosen"] != row["rejected"]
        assert re.search("happy|friend|laughed|smiled", row["chosen"])
        assert re.search("cried|never|angry|sad", row["rejected"])


def test_the_answer_stands_in_the_story() -> None:
    for row in stories.questions(count=200, seed=0, held_out=False):
        answer = re.sub("^(to the|the|a) ", "", row["completion"].strip(" .").lower())
        assert answer in row["prompt"].lower(), row


def test_the_tokenizer_of_stories_has_their_words() -> None:
    tokenizer = load_tokenizer(Path(__file__).resolve().parents[2] / "configs/stories")
    text = " ".join(row["text"] for row in stories.stories(count=100, seed=9, held_out=True))
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert len(tokens) < 1.25 * len(text.split()), "punctuation is most of what is more than a token a word"
    assert tokenizer.hf.eos_token == "<end>" and tokenizer.vocab_size < 800


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
