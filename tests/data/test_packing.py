import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.format import TokenizedExample
from posttrain.data.packing import best_fit, fit_to_row, pack
from posttrain.errors import ConfigError

pytestmark = pytest.mark.fast

ROW_TOKENS = 16


def example(length: int, prompt: int = 1) -> TokenizedExample:
    return TokenizedExample(np.arange(1, 1 + length, dtype=np.int32), np.arange(length) >= prompt)


def slow_best_fit(lengths: list[int], room: int) -> list[list[int]]:
    """The lengths in each row: one sequence after the other, each row looked at by itself."""
    rows: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in rows if sum(row) + length <= room]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            rows.append([length])
    return rows


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, ROW_TOKENS), max_size=30))
def test_best_fit_is_its_slow_twin(lengths: list[int]) -> None:
    rows = best_fit(np.asarray(lengths, int).reshape(-1, 1), np.asarray([ROW_TOKENS]))
    made = sorted(sorted((lengths[member] for member in row), reverse=True) for row in rows)
    assert made == sorted(slow_best_fit(lengths, ROW_TOKENS))
    assert sorted(member for row in rows for member in row) == list(range(len(lengths)))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 16), st.integers(0, 40)), max_size=20))
def test_all_lengths_of_a_sequence_fit(lengths: list[tuple[int, int]]) -> None:
    rows = best_fit(np.asarray(lengths, int).reshape(-1, 2), np.asarray([16, 40]))
    assert sorted(member for row in rows for member in row) == list(range(len(lengths)))
    assert all(sum(lengths[m][0] for m in row) <= 16 and sum(lengths[m][1] for m in row) <= 40 for row in rows)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, ROW_TOKENS), max_size=20), st.integers(0, 3))
def test_packed_sequences_are_found_again(lengths: list[int], spare: int) -> None:
    """Side by side from the start of each row, in their order; padding elsewhere."""
    sequences = [
        {"tokens": np.full(length, 1 + number, np.int32), "score": np.full((length, 2), number, np.int16)}
        for number, length in enumerate(lengths)
    ]
    like = {"tokens": np.zeros(0, np.int32), "score": np.zeros((0, 2), np.int16)}
    count = len(best_fit(np.asarray(lengths, int).reshape(-1, 1), np.asarray([ROW_TOKENS])))
    rows, where = pack(sequences, ROW_TOKENS, num_rows=count + spare, like=like, padding={"score": -1})
    assert rows["tokens"].shape == (count + spare, ROW_TOKENS) and rows["score"].dtype == np.int16
    for number, (sequence, (row, tokens)) in enumerate(zip(sequences, where, strict=True)):
        for name, array in sequence.items():
            np.testing.assert_array_equal(rows[name][row, tokens], array)
        np.testing.assert_array_equal(rows["tokens_positions"][row, tokens], np.arange(lengths[number]))
        before = [other for other, place in enumerate(where) if place.row == row and place.tokens.start < tokens.start]
        assert (rows["tokens_segments"][row, tokens] == 1 + len(before)).all() and max(before, default=-1) < number
        assert tokens.start == sum(lengths[other] for other in before)
    empty = rows["tokens_segments"] == 0
    assert empty.sum() == rows["tokens"].size - sum(lengths)
    assert not rows["tokens"][empty].any() and (rows["score"][empty] == -1).all()


def test_overlong_examples() -> None:
    long = example(20, prompt=3)
    (cut,) = fit_to_row(long, 16, "truncate")
    assert cut is not None
    np.testing.assert_array_equal(cut.tokens, long.tokens[:16])
    np.testing.assert_array_equal(cut.loss_mask, long.loss_mask[:16])
    assert fit_to_row(long, 16, "drop") == [None]
    assert fit_to_row(example(20, prompt=18), 16, "truncate") == [None], "no token with loss would be left"
    with pytest.raises(
        ConfigError, match="it has 20 tokens, more than row_tokens=16; raise row_tokens, or set overlong"
    ):
        fit_to_row(long, 16, "error")
    fitting = example(16)
    assert all(fit_to_row(fitting, 16, how)[0] is fitting for how in ("truncate", "drop", "error"))
