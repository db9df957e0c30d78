"""Two tokenizations of one text: groups, and a teacher's distribution in the student's tokens."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.batch import NO_ID, TopK
from posttrain.config import DatasetSection
from posttrain.data.chat import Renderer
from posttrain.data.format import tokenize_example
from posttrain.data.packing import sequence
from posttrain.data.sources import load_rows
from posttrain.data.tokenizer import load_tokenizer
from posttrain.distill.cross_tokenizer import (
    Aligner,
    Run,
    SharedTokens,
    Vocabulary,
    VocabularyMap,
    back_of,
    groups,
    pair_runs,
    runs,
)
from posttrain.tree import replace
from tests.often import often


@st.composite
def two_splits(draw: st.DrawFn) -> tuple[bytes, np.ndarray, np.ndarray]:
    text = draw(st.binary(max_size=24))
    inner = st.lists(st.integers(0, len(text)), max_size=12)
    bounds = [np.asarray([0, *sorted(draw(inner)), len(text)]) for _ in range(2)]
    return text, bounds[0], bounds[1]


@given(two_splits())
def test_groups_are_the_smallest_with_one_text(case: tuple[bytes, np.ndarray, np.ndarray]) -> None:
    text, one, other = case
    found = groups(one, other)
    for sides, bounds in ((("one"), one), (("other"), other)):
        edges = [getattr(group, sides) for group in found]
        assert all(a[1] == b[0] for a, b in pairwise(edges)), "groups follow one another"
        if text:
            assert edges[-1][1] == len(bounds) - 1, "and hold all tokens"
    for group in found:
        (a, b), (c, d) = group
        assert text[one[a] : one[b]] == text[other[c] : other[d]] != b""
        assert not set(one[a + 1 : b]) & set(other[c + 1 : d]) - {one[b], one[a]}, "none can be divided"


def run_of(text: bytes, bounds: np.ndarray, first: int, end: int | None) -> Run:
    return Run(first, bounds, text, end)


@given(two_splits(), st.binary(max_size=6), st.binary(max_size=6))
def test_pairs_begin_with_the_same_text(
    case: tuple[bytes, np.ndarray, np.ndarray], before: bytes, after: bytes
) -> None:
    """The other text may have more around it; then nothing ends together, and a place that is not sure has no pair."""
    text, one, other = case
    whole = before + text + after
    shifted = np.concatenate([[0], other + len(before), [len(whole)]])
    a, b = run_of(text, one, 3, 3 + len(one) - 1), run_of(whole, shifted, 7, 7 + len(shifted) - 1)
    found = pair_runs([a], [b])
    for mine, its in zip(found.one, found.other, strict=True):
        if mine == a.end:
            assert its == b.end and whole.endswith(text)
        else:
            assert whole[shifted[its - 7] :].startswith(text[one[mine - 3] :])
    assert found.same_text in (0, len(text)) and found.single <= found.same_text
    assert (np.diff(found.one) > 0).all() and (np.diff(found.other) > 0).all()


@pytest.mark.parametrize(
    ("one", "other", "pairs"),
    [
        # The first token has no loss, and both rows end within the text.
        (b"pon a time th", b"nce upon a time", {3: 8, 4: 9, 9: 14}),
        (b"nce upon a time", b"pon a time th", {8: 3, 9: 4, 14: 9}),
        (b"abababab", b"babababa", {}),
        (b"a long text that ends", b"ends otherwise", {}),
    ],
)
def test_texts_that_overlap_in_part(one: bytes, other: bytes, pairs: dict[int, int]) -> None:
    """Single bytes. What repeats itself has no sure place, and texts that share less than a half are not looked at."""
    a, b = (run_of(text, np.arange(len(text) + 1), 0, None) for text in (one, other))
    found = pair_runs([a], [b])
    assert dict(zip(found.one.tolist(), found.other.tolist(), strict=True)).items() >= pairs.items()
    assert bool(pairs) == bool(found.same_text) and found.same_text in (0, 10)


def test_runs_end_at_their_stop_tokens() -> None:
    pieces = [b"a", b"bc", b"</s>", b"\n"]
    tokens, mask = [0, 1, 0, 2, 3, 1, 1], np.asarray([0, 1, 1, 1, 1, 0, 1], bool)
    first, second = runs(tokens, mask, pieces, (2,))
    assert (first.first, first.text, first.end, first.bounds.tolist()) == (1, b"bca", 3, [0, 2, 3])
    assert (second.first, second.text, second.end) == (6, b"bc", None)


@pytest.fixture(scope="module")
def vocabularies(shared: Path) -> dict[str, Vocabulary]:
    folders = {name: shared / "tokenizers" / name for name in ("qwen3", "gpt2", "mistral-7b-instruct")}
    found = {name: load_tokenizer(folder) for name, folder in folders.items()}
    found["gpt2"] = found["gpt2"].with_stop_tokens(["<|endoftext|>"])
    found |= {"bytes": load_tokenizer("bytes"), "stories": load_tokenizer(shared / "models" / "stories260k")}
    return {name: Vocabulary(tokenizer) for name, tokenizer in found.items()}


@pytest.mark.parametrize(
    "name", often(["qwen3", "gpt2", "mistral-7b-instruct", "bytes", "stories"], "mistral-7b-instruct")
)
def test_pieces_are_what_the_tokens_say(vocabularies: dict[str, Vocabulary], name: str) -> None:
    vocabulary = vocabularies[name]
    for text in ("The naïve “cat” 😀 ran.\n\n  12+30=42", "x = {'a': 1}\n\tend"):
        tokens = vocabulary.tokenizer.encode_spans(text, continues=True)[0]
        assert b"".join(vocabulary.pieces[token] for token in tokens) == text.encode()
        for token in tokens:
            assert vocabulary.by_text[vocabulary.pieces[token]] == token


@pytest.mark.parametrize(
    "name", often(["qwen3", "gpt2", "mistral-7b-instruct", "bytes"], "gpt2", "mistral-7b-instruct", "bytes")
)
def test_equal_vocabularies_change_nothing(vocabularies: dict[str, Vocabulary], name: str) -> None:
    vocabulary = vocabularies[name]
    count = vocabulary.tokenizer.num_ids
    known = np.asarray(sorted(vocabulary.names))
    found = VocabularyMap(vocabulary, vocabulary, 1.0).ids(known)
    np.testing.assert_array_equal(found, known)
    said = said_of(np.random.default_rng(0), known, 50, 20)
    ends = (np.full(50, vocabulary.tokenizer.end_id),) * 2
    same = VocabularyMap(vocabulary, vocabulary, 2.0).top_k(said, np.zeros(50, np.int64) + count, ends)
    for field in ("ids", "logps", "tail", "scaled_tail", "token_logps"):
        np.testing.assert_array_equal(getattr(same, field), getattr(said, field), err_msg=field)


def said_of(rng: np.random.Generator, ids: np.ndarray, rows: int, k: int, temperature: float = 2.0) -> TopK:
    """The k best of a random distribution over `ids`."""
    logits = rng.normal(size=(rows, len(ids))) * 4
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    best = np.argsort(-log_p, axis=1)[:, :k]
    others = log_p.copy()
    np.put_along_axis(others, best, -np.inf, axis=1)
    tails = [np.log(np.maximum(np.exp(others / t).sum(axis=1), 1e-30)).astype(np.float32) for t in (1.0, temperature)]
    logps = np.take_along_axis(log_p, best, axis=1).astype(np.float32)
    return TopK(
        ids=ids[best].astype(np.int32), logps=logps, tail=tails[0], scaled_tail=tails[1], token_logps=logps[:, -1]
    )


def test_the_error_of_the_best_ids_is_at_most_their_tail(vocabularies: dict[str, Vocabulary]) -> None:
    """Stories in bytes: all ids give that of the next byte, 32 of 512 miss at most what they leave."""
    student, teacher = vocabularies["bytes"], vocabularies["stories"]
    ids = np.asarray([number for number in teacher.names if number not in teacher.controls])
    mapping = VocabularyMap(student, teacher, 1.0)
    ends = (np.full(8, student.tokenizer.end_id), np.full(8, teacher.tokenizer.end_id))

    def next_byte(k: int) -> tuple[np.ndarray, TopK]:
        said = said_of(np.random.default_rng(1), ids, 8, k, 1.0)
        found = mapping.top_k(said, np.zeros(8, np.int64), ends)
        dense = np.zeros((8, 256))
        for row, (numbers, logps) in enumerate(zip(found.ids, found.logps, strict=True)):
            there = numbers != NO_ID
            assert len(set(numbers[there])) == there.sum(), "an id stands only once"
            dense[row, numbers[there]] = np.exp(np.float64(logps[there]))
        np.testing.assert_allclose(dense.sum(axis=1) + np.exp(np.float64(found.tail)), 1, atol=1e-5)
        return dense, said

    exact, said = next_byte(len(ids))
    expected = np.zeros((8, 256))
    for row in range(8):
        for number, logp in zip(said.ids[row], said.logps[row], strict=True):
            expected[row, teacher.pieces[number][0]] += np.exp(np.float64(logp))
    np.testing.assert_allclose(exact, expected, atol=1e-6)
    rough, said = next_byte(32)
    tail = np.exp(np.float64(said.tail))
    assert (rough <= exact + 1e-6).all() and (np.abs(exact - rough).sum(axis=1) <= tail + 1e-5).all()
    assert np.abs(exact - rough).sum() > 1e-3


def aligner_of(
    student: Vocabulary, teacher: Vocabulary, dataset: DatasetSection, row_tokens: int = 4096, merged: bool = False
) -> Aligner:
    renderer = Renderer(teacher.tokenizer, chat=False)
    mapping = SharedTokens.of(student, teacher) if merged else VocabularyMap(student, teacher, 1.0)
    return Aligner(
        student=student,
        teacher=teacher,
        renderers=[(dataset, renderer)],
        map=mapping,
        row_tokens=row_tokens,
        loss_on="answers",
    )


LEAST_TAUGHT = {
    ("qwen3", "gpt2"): 0.6,
    ("gpt2", "qwen3"): 0.6,
    ("qwen3", "mistral-7b-instruct"): 0.6,
    ("mistral-7b-instruct", "gpt2"): 0.6,
    ("bytes", "qwen3"): 0.2,
    ("qwen3", "bytes"): 0.05,
    ("gpt2", "gpt2"): 1.0,
}


@pytest.mark.parametrize(("one", "other"), often(LEAST_TAUGHT, *list(LEAST_TAUGHT)[:1]))
def test_real_answers(shared: Path, vocabularies: dict[str, Vocabulary], one: str, other: str) -> None:
    """300 of GSM8K: where the student is taught, the same text follows on both sides."""
    dataset = DatasetSection(
        path=str(shared / "data/math/gsm8k_train.jsonl"), prompt="{question}\n", completion="{answer}", chat=False
    )
    rows = load_rows(dataset)
    student, teacher = vocabularies[one], vocabularies[other]
    aligner = aligner_of(student, teacher, dataset)
    own = Renderer(student.tokenizer, chat=False)
    taught = loss = text = same = single = begin = 0
    for index in range(300):
        made = sequence(*tokenize_example(rows[index], dataset, own, "answers"))
        (found,) = aligner.align(0, rows[index], [made])
        assert found is not None
        places, asked = np.flatnonzero(found.covered), np.flatnonzero(found.scored)
        assert len(places) == len(asked)
        for mine, its in zip(places[::7], asked[::7], strict=True):
            rest_of = [
                b"".join(side.pieces[token] for token in tokens[place:-1])
                for side, tokens, place in ((student, made["tokens"], mine), (teacher, found.tokens, its))
            ]
            assert rest_of[0] == rest_of[1]
        assert (made["loss_weight"][places] > 0).all() and found.covered[-1], "the end is taught as well"
        taught, loss = taught + len(places), loss + int(made["loss_weight"].sum())
        begin += len(found.pairs.one)
        text, same, single = text + found.pairs.text, same + found.pairs.same_text, single + found.pairs.single
    assert same >= 0.99 * text
    assert taught / loss >= LEAST_TAUGHT[one, other] and (taught / begin >= 0.75) == (
        one != "qwen3" or other != "bytes"
    )


@pytest.mark.thorough
@pytest.mark.parametrize(("one", "other"), [("qwen3", "mistral-7b-instruct"), ("bytes", "qwen3"), ("gpt2", "bytes")])
def test_merged_groups_of_real_answers(shared: Path, vocabularies: dict[str, Vocabulary], one: str, other: str) -> None:
    """All tokens are in groups, and the tokens of the n-th group on both sides have one text."""
    dataset = DatasetSection(
        path=str(shared / "data/math/gsm8k_train.jsonl"), prompt="{question}\n", completion="{answer}", chat=False
    )
    rows = load_rows(dataset)
    student, teacher = vocabularies[one], vocabularies[other]
    aligner, own = aligner_of(student, teacher, dataset, merged=True), Renderer(student.tokenizer, chat=False)
    for index in range(30):
        made = sequence(*tokenize_example(rows[index], dataset, own, "answers"))
        (found,) = aligner.align(0, rows[index], [made])
        assert found is not None
        assert (found.covered[made["loss_weight"] > 0] != 0).mean() > 0.97 and found.covered[-1] > 0 < found.scored[-1]
        texts = []
        for side, tokens, spoken in (
            (student, made["tokens"], found.covered),
            (teacher, found.tokens, found.scored),
        ):
            begins, group = spoken > 0, np.cumsum(spoken > 0)
            assert not (back_of(spoken)[begins]).any() and (back_of(spoken)[spoken < 0] > 0).all()
            inside = [tokens[(group == n) & (spoken != 0)] for n in range(1, begins.sum())]
            texts.append([b"".join(side.pieces[token] for token in group) for group in inside])
        assert texts[0] == texts[1] and all(texts[0])


def test_shared_tokens_have_one_text(vocabularies: dict[str, Vocabulary]) -> None:
    """Whatever their names; the others are marked on the student's side."""
    student, teacher = vocabularies["qwen3"], vocabularies["mistral-7b-instruct"]
    shared = SharedTokens.of(student, teacher)
    numbers = np.flatnonzero(shared.table != NO_ID)
    assert 10_000 < len(numbers) < len(teacher.pieces)
    assert all(teacher.pieces[n] == student.pieces[shared.table[n]] for n in numbers.tolist())
    assert not shared.unshared[shared.table[numbers]].any() and shared.unshared.sum() > 50_000
    said = said_of(np.random.default_rng(0), np.asarray(sorted(student.names)), 6, 9, 1.0)
    begins, first = np.asarray([0, 2, 3]), said.ids[:, 0].astype(np.int64)
    said = replace(said, token_logps=said.logps[:, 0], tail=said.tail)
    ends = (np.full(3, student.tokenizer.end_id),) * 2
    found = SharedTokens.of(student, student).top_k(said, begins, (first[begins], first[begins]), ends)
    np.testing.assert_allclose(found.token_logps, [said.logps[:2, 0].sum(), said.logps[2, 0], said.logps[3:, 0].sum()])
    np.testing.assert_array_equal(found.ids[:, 1:], said.ids[begins, 1:])
    assert (found.ids[:, 0] == NO_ID).all() and found.tail[1] == said.tail[2], "a single token changes no bit"
    total = np.exp(found.logps).sum(axis=1) + np.exp(found.tail) + np.exp(found.token_logps)
    np.testing.assert_allclose(total, 1.0, rtol=1e-5)


def test_a_short_row_of_the_teacher_teaches_its_beginning(vocabularies: dict[str, Vocabulary]) -> None:
    student = vocabularies["bytes"]
    dataset = DatasetSection(path="none.jsonl", chat=False)
    row = {"prompt": "1+1=", "completion": "two, and that is all"}
    made = sequence(*tokenize_example(row, dataset, Renderer(student.tokenizer, chat=False), "answers"))
    (whole,) = aligner_of(student, student, dataset).align(0, row, [made])
    assert whole is not None
    (cut,) = aligner_of(student, student, dataset, row_tokens=12).align(0, row, [made])
    assert cut is not None
    np.testing.assert_array_equal(whole.covered > 0, made["loss_weight"] > 0)
    np.testing.assert_array_equal(np.flatnonzero(cut.covered), np.flatnonzero(made["loss_weight"])[:7])
    assert len(cut.tokens) == 12


def test_ends_of_texts_stand_for_one_another(vocabularies: dict[str, Vocabulary]) -> None:
    """Through two chat templates: the teacher's end of a turn is the student's."""
    sides = vocabularies["bytes"], vocabularies["qwen3"]
    student, teacher = (side.tokenizer for side in sides)
    dataset = DatasetSection(path="none.jsonl")
    talk = [{"role": role, "content": text} for role, text in (("user", "Why?"), ("assistant", "As it is so."))]
    aligner = Aligner(
        student=sides[0],
        teacher=sides[1],
        renderers=[(dataset, Renderer(teacher, chat=True))],
        map=VocabularyMap(*sides, 1.0),
        row_tokens=64,
        loss_on="answers",
    )
    made = sequence(*tokenize_example({"messages": talk}, dataset, Renderer(student, chat=True), "answers"))
    (found,) = aligner.align(0, {"messages": talk}, [made])
    assert found is not None
    ends = student.encode("<|im_end|>")[0], teacher.encode("<|im_end|>")[0]
    last = np.flatnonzero(found.covered)[-1], np.flatnonzero(found.scored)[-1]
    assert (made["tokens"][last[0]], found.tokens[last[1]]) == ends
    assert (found.covered[last[0]], found.scored[last[1]]) == (1 + ends[0], 1 + ends[1])
    assert found.pairs.same_text == found.pairs.text == len("As it is so.")
    ids = VocabularyMap(sides[0], vocabularies["gpt2"], 1.0).ids(np.asarray([50256, 13, 99999]))
    assert ids.tolist() == [NO_ID, ord("."), NO_ID]
