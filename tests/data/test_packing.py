import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.batch import Batch
from posttrain.config import ConfigError
from posttrain.data.format import Example
from posttrain.data.packing import fit_to_row, pack, pad_rows, sequence, to_batch
from tests.data.batches import efficiency, sequences

ROW_TOKENS = 16


def example(length: int, start: int = 1, prompt: int = 1) -> Example:
    return Example(np.arange(start, start + length, dtype=np.int32), np.arange(length) >= prompt)


def packed(lengths: list[int], *, packing: bool, window_rows: int = 3) -> list[Batch]:
    import grain

    data = [sequence(example(n, start=100 * i + 1, prompt=1 + n // 3)) for i, n in enumerate(lengths)]
    source = grain.MapDataset.source(data).to_iter_dataset()
    rows = pack(source, row_tokens=ROW_TOKENS, window_rows=window_rows, packing=packing).batch(2, drop_remainder=False)
    return [to_batch(pad_rows(batch, 2)) for batch in rows]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(2, ROW_TOKENS), min_size=1, max_size=20), st.booleans())
def test_packing_keeps_every_sequence_whole(lengths: list[int], packing: bool) -> None:
    batches = packed(lengths, packing=packing)
    found = {int(tokens[0]): (tokens, weight) for batch in batches for tokens, weight in sequences(batch)}
    assert len(found) == sum(1 for batch in batches for _ in sequences(batch)) == len(lengths)
    for i, length in enumerate(lengths):
        tokens, weight = found[100 * i + 1]
        np.testing.assert_array_equal(tokens, np.arange(100 * i + 1, 100 * i + 1 + length))
        np.testing.assert_array_equal(weight, (np.arange(length) >= 1 + length // 3).astype(np.float32))
    for batch in batches:
        check_layout(batch)
        assert packing or batch.segments.max() <= 1


def check_layout(batch: Batch) -> None:
    assert batch.shape == (2, ROW_TOKENS)
    dtypes = [array.dtype for array in (batch.tokens, batch.positions, batch.segments, batch.loss_weight)]
    assert dtypes == [np.int32, np.int32, np.int32, np.float32]
    assert np.all(np.asarray(batch.loss_weight)[np.asarray(batch.segments) == 0] == 0)
    assert np.all(np.asarray(batch.loss_weight)[np.asarray(batch.positions) == 0] == 0)
    for segments, positions in zip(batch.segments, batch.positions, strict=True):
        real = segments[segments > 0]
        np.testing.assert_array_equal(segments[: len(real)], real)  # padding only at the end
        assert list(dict.fromkeys(real.tolist())) == list(range(1, len(set(real.tolist())) + 1))
        for segment in set(real.tolist()):
            here = positions[segments == segment]
            np.testing.assert_array_equal(here, np.arange(len(here)))


def test_packing_fills_rows() -> None:
    lengths = [4] * 24
    assert [efficiency(batch) for batch in packed(lengths, packing=True, window_rows=2)] == [1.0, 1.0, 1.0]
    assert len(packed(lengths, packing=False, window_rows=2)) == 12
    assert efficiency(packed(lengths, packing=False)[0]) == 0.25


def test_overlong_examples() -> None:
    long = example(20, prompt=3)
    cut = fit_to_row(long, 16, "truncate")
    assert cut is not None
    np.testing.assert_array_equal(cut.tokens, long.tokens[:16])
    np.testing.assert_array_equal(cut.loss_mask, long.loss_mask[:16])
    assert fit_to_row(long, 16, "drop") is None
    assert fit_to_row(example(20, prompt=18), 16, "truncate") is None, "no token with loss would be left"
    with pytest.raises(
        ConfigError, match="it has 20 tokens, more than row_tokens=16; raise row_tokens, or set overlong"
    ):
        fit_to_row(long, 16, "error")
    fitting = example(16)
    assert all(fit_to_row(fitting, 16, how) is fitting for how in ("truncate", "drop", "error"))
