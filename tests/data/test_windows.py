"""Packed batches: nothing lost, doubled or split, full rows, the same after every resume, and no order by length."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.batch import packing_metrics
from posttrain.data import packing
from posttrain.data.format import TokenizedExample
from posttrain.data.packing import LOOK_AHEAD, PackedBatches, Window, sequence, to_batch
from posttrain.metrics import to_host
from tests.data.batches import efficiency, sequences

ROW_TOKENS = 16
SMALL = Window(sequences=5, rows=2)
LENGTHS = dict.fromkeys(("tokens", "loss_weight"), ROW_TOKENS)


def arrays(number: int, length: int) -> dict[str, np.ndarray] | None:
    """Sequence `number`, of which each token is known; of no length: left out."""
    tokens = np.arange(1000 * number, 1000 * number + length, dtype=np.int32)
    return sequence(TokenizedExample(tokens, np.arange(length) > length // 3)) if length else None


def batches(lengths: list[int], *, endless: bool = False, shuffle: bool = False, **changes: Any) -> PackedBatches:
    numbers = grain.MapDataset.range(len(lengths))
    numbers = numbers.shuffle(seed=1) if shuffle else numbers
    examples = (numbers.repeat() if endless else numbers).map(lambda number: [arrays(number, lengths[number])])
    layout = {"window": SMALL, "batch_rows": 2, "lengths": LENGTHS} | changes
    return PackedBatches(examples, epoch=len(lengths), **layout)


def numbers_of(made: Iterator[dict[str, np.ndarray]]) -> list[int]:
    return [int(tokens[0]) // 1000 for batch in made for tokens, _ in sequences(to_batch(batch))]


some_lengths = st.lists(st.integers(0, ROW_TOKENS), min_size=1, max_size=24).filter(any)
some_windows = st.sampled_from([SMALL, LOOK_AHEAD, Window(sequences=1, rows=0), Window(sequences=1, rows=2)])


@settings(max_examples=40, deadline=None)
@given(some_lengths, some_windows)
def test_every_sequence_stands_whole_and_once(lengths: list[int], window: Window) -> None:
    found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for made in batches(lengths, window=window):
        batch = to_batch(made)
        check_layout(batch)
        assert window.rows or np.max(batch.segments) <= 1, "one sequence is one row"
        for tokens, weight in sequences(batch):
            assert int(tokens[0]) // 1000 not in found
            found[int(tokens[0]) // 1000] = tokens, weight
    assert sorted(found) == [number for number, length in enumerate(lengths) if length]
    for number, (tokens, weight) in found.items():
        expected = arrays(number, lengths[number])
        assert expected is not None
        np.testing.assert_array_equal(tokens, expected["tokens"])
        np.testing.assert_array_equal(weight, expected["loss_weight"])


def check_layout(batch: Any) -> None:
    assert batch.shape == (2, ROW_TOKENS)
    dtypes = [array.dtype for array in (batch.tokens, batch.positions, batch.segments, batch.loss_weight)]
    assert dtypes == [np.int32, np.int32, np.int32, np.float32]
    assert not batch.loss_weight[(batch.segments == 0) | (batch.positions == 0)].any()
    for segments, positions in zip(batch.segments, batch.positions, strict=True):
        real = segments[segments > 0]
        np.testing.assert_array_equal(segments[: len(real)], real, "padding stands at the end")
        assert list(dict.fromkeys(real.tolist())) == list(range(1, len(set(real.tolist())) + 1))
        for segment in set(real.tolist()):
            here = positions[segments == segment]
            np.testing.assert_array_equal(here, np.arange(len(here)))


@pytest.mark.thorough
@settings(max_examples=4, deadline=None)
@given(some_lengths, some_windows, st.integers(1, 4))
def test_resumed_at_any_step_the_batches_are_the_same(lengths: list[int], window: Window, batch_rows: int) -> None:
    def stream() -> PackedBatches:
        return batches(lengths, endless=True, shuffle=True, window=window, batch_rows=batch_rows)

    whole, states, expected = stream(), [], []
    for _ in range(6):
        states.append(json.dumps(whole.get_state()))
        expected.append(next(whole))
    resumed = stream()
    for step in reversed(range(len(states))):
        resumed.set_state(json.loads(states[step]))
        assert json.dumps(resumed.get_state()) == states[step]
        for batch in expected[step:]:
            made = next(resumed)
            assert made.keys() == batch.keys() and all(np.array_equal(made[name], batch[name]) for name in made)
    assert max(map(len, states)) < 40


@pytest.mark.thorough
@settings(max_examples=10, deadline=None)
@given(some_lengths)
def test_every_epoch_holds_each_sequence_once(lengths: list[int]) -> None:
    seen = numbers_of(islice(batches(lengths, endless=True, shuffle=True, batch_rows=1), 40))
    count = len(lengths) - lengths.count(0)
    epochs = [Counter(seen[start : start + count]) for start in range(0, len(seen) - count + 1, count)]
    assert epochs and all(epoch == Counter(n for n, length in enumerate(lengths) if length) for epoch in epochs)


@pytest.fixture(scope="module")
def spread() -> list[list[int]]:
    """The lengths in each row of two windows of sequences of an eighth of a row to a whole one."""
    examples = [[{"tokens": np.ones(length)}] for length in np.random.default_rng(0).integers(32, 257, 4096)]
    source, layout = grain.MapDataset.source(examples), {"lengths": {"tokens": 256}, "window": LOOK_AHEAD}
    made = PackedBatches(source, epoch=4096, batch_rows=8, **layout)
    return [np.bincount(row)[1:].tolist() for batch in made for row in batch["tokens_segments"]]


def test_rows_are_full(spread: list[list[int]]) -> None:
    assert sum(map(sum, spread)) / (256 * len(spread)) >= 0.97


def test_early_rows_are_like_late_ones(spread: list[list[int]]) -> None:
    """In each quarter of a window the mean of a row's longest, of its tokens and of its number of sequences is that of
    the window, within four standard errors; and in the order in which rows were opened it is far off."""
    window = spread[: len(spread) // 2]
    for measure in (max, sum, len):
        values = np.asarray([measure(row) for row in window if row], float)
        assert max(map(abs, apart(values))) < 4
        assert max(map(abs, apart(np.sort(values)))) > 8


def apart(values: np.ndarray) -> list[float]:
    """By how many standard errors the mean of each quarter is off."""
    quarters = np.array_split(values, 4)
    return [float((q.mean() - values.mean()) / (values.std() / np.sqrt(len(q)))) for q in quarters]


def test_short_sequences_fill_rows_too() -> None:
    """More than a window of them stand in a row: it then takes more, and only the last row of a window has room."""
    lengths = np.random.default_rng(0).integers(1, 4, 1200).tolist()
    made = list(batches(lengths, window=Window(sequences=5, rows=40)))
    assert np.mean([efficiency(to_batch(batch)) for batch in made]) > 0.98


def test_rows_in_order_run_ahead_by_about_a_batch() -> None:
    lengths = np.random.default_rng(0).integers(2, 17, 400).tolist()
    window = Window.of(packing=True, ordered=True, batch_rows=4)
    order = numbers_of(batches(lengths, window=window, batch_rows=4))
    ahead = max(number - place for place, number in enumerate(order))
    assert 0 < ahead <= 16 and order != sorted(order)
    assert numbers_of(batches(lengths, window=Window.of(packing=False, ordered=False, batch_rows=4))) == sorted(order)


def test_a_window_of_long_rows_ends_where_the_host_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [ROW_TOKENS] * 40
    stream = batches(lengths, window=LOOK_AHEAD, batch_rows=12)
    next(stream)
    assert stream.get_state() == {"start": 0, "row": 12}
    monkeypatch.setattr(packing, "MOST_TOKENS", 10 * ROW_TOKENS)
    stream = batches(lengths, window=LOOK_AHEAD, batch_rows=12)
    next(stream)
    assert stream.get_state() == {"start": 10, "row": 2}


def test_what_stands_beside_is_packed_by_its_own_length() -> None:
    """Two of three fit by their own tokens, the third only by the tokens of another reader."""
    own, other = [8, 8, 4], [4, 4, 20]
    examples = [
        [{"tokens": np.full(n, i + 1, np.int32), "other": np.full(m, i + 1, np.int64), "vector": np.ones((n, 3))}]
        for i, (n, m) in enumerate(zip(own, other, strict=True))
    ]
    (made,) = PackedBatches(
        grain.MapDataset.source(examples),
        epoch=3,
        window=LOOK_AHEAD,
        batch_rows=3,
        lengths={"tokens": 16, "other": 20, "vector": 16},
        numbered=("tokens", "other"),
    )
    np.testing.assert_array_equal(made["tokens_segments"].max(axis=1), [2, 1, 0])
    np.testing.assert_array_equal(made["other"], [[1] * 4 + [2] * 4 + [0] * 12, [3] * 20, [0] * 20])
    np.testing.assert_array_equal(made["other_positions"][0], [*range(4), *range(4), *[0] * 12])
    np.testing.assert_array_equal(made["vector"].sum(axis=(1, 2)), [48, 12, 0])
    assert made["other"].dtype == np.int64 and "vector_segments" not in made


def test_how_full_the_rows_are() -> None:
    (made,) = batches([9, 9, 3], batch_rows=4)
    found = to_host(packing_metrics(to_batch(made)))
    assert found["data/filled_ratio"] == pytest.approx((9 + 9 + 3) / (2 * ROW_TOKENS)), "of rows that hold any"
    empty = {name: np.zeros_like(array) for name, array in made.items()}
    assert np.isnan(to_host(packing_metrics(to_batch(empty)))["data/filled_ratio"])
