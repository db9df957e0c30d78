"""Sequences that are made once: the same arrays, within a bound, for all that ask for them alike."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.config import DatasetSection, SFTSection
from posttrain.data import sources
from posttrain.data.chat import Renderer
from posttrain.data.pair_examples import ComparisonBatches
from posttrain.data.pipeline import SFTBatches
from posttrain.data.sources import Rows, SequenceCache, Sequences
from posttrain.data.tokenizer import load_tokenizer
from tests.data.test_preference import TABLE, units


def arrays(number: int, lengths: list[int]) -> Sequences:
    parts = [np.arange(number, number + length, dtype=np.int32) for length in lengths]
    return [{"tokens": part, "weight": (part % 3).astype(np.float32)} if part.size else None for part in parts]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), min_size=1, max_size=9),
    st.integers(1, 16),
    st.integers(0, 600),
)
def test_sequences_are_as_made(lengths: list[list[int]], chunk: int, max_bytes: int) -> None:
    calls: Counter[int] = Counter()

    def make(number: int) -> Sequences:
        calls[number] += 1
        return arrays(number, lengths[number])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "CHUNK_TOKENS", chunk)
        cache = SequenceCache(make, len(lengths), max_bytes=max_bytes)
        numbers = list(np.random.default_rng(0).permutation(len(lengths)).tolist())
        for number in numbers * 3:
            for found, expected in zip(cache(number), arrays(number, lengths[number]), strict=True):
                assert (found is None) == (expected is None)
                for name in expected or {}:
                    assert found is not None and expected is not None
                    np.testing.assert_array_equal(found[name], expected[name])
                    assert found[name].dtype == expected[name].dtype
    kept = [number for number, count in calls.items() if count == 1]
    assert cache.num_kept == len(kept) and set(calls.values()) <= {1, 3}
    assert 8 * sum(sum(lengths[number]) for number in kept) <= max_bytes
    # At the end of a chunk of eight bytes a token a sequence may leave its room empty.
    assert len(kept) == len(lengths) or max_bytes < 8 * sum(max(chunk, sum(of_one)) for of_one in lengths)


def test_an_sft_row_is_tokenised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By all streams over the rows, and in every epoch; another layout of the rows is another sequence."""
    calls: Counter[str] = Counter()
    plain = Renderer.completion

    def counted(self: Renderer, prompt: str, completion: str) -> Any:
        calls[prompt] += 1
        return plain(self, prompt, completion)

    monkeypatch.setattr(Renderer, "completion", counted)
    table = [{"prompt": f"{i}:", "completion": "n" * (1 + i % 5)} for i in range(11)]
    rows = Rows("rows", table, 0, len(table))
    dataset = DatasetSection(path="rows.jsonl", chat=False)
    renderer = Renderer(load_tokenizer("bytes"), chat=False)

    def stream(**fields: Any) -> SFTBatches:
        layout = {"batch_rows": 2, "row_tokens": 24, **fields}
        return SFTBatches(SFTSection(dataset=dataset, **layout), rows, renderer, seed=0)

    for batches in (stream(), stream(batch_rows=3), stream(packing=False)):
        assert len(list(islice(batches, 20))) == 20
    assert set(calls.values()) == {1} and len(calls) == 11
    whole = next(stream(train_on_prompt=True)).loss_weight.sum()
    assert whole > next(stream()).loss_weight.sum() and set(calls.values()) == {2}


def test_a_judged_row_is_tokenised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for what a reference says of it; units of another kind are made anew."""
    found = units(TABLE)
    made = [found(index) for index in range(len(found))]
    with monkeypatch.context() as patch:
        patch.setattr(Renderer, "completion", None)
        told = replace(found, ref_logps=lambda index, unit: np.full(int((unit["loss_weight"] > 0).sum()), -1.0 - index))
        for index, unit in enumerate(made):
            again = told(index)
            assert unit is not None and again is not None
            assert set(again) == {*unit, "ref_logps"} and all(np.array_equal(unit[n], again[n]) for n in unit)
            np.testing.assert_array_equal(again["ref_logps"], np.where(unit["loss_weight"] > 0, -1.0 - index, 0))
        assert len(list(islice(ComparisonBatches(found, seed=1), 5))) == 5
    with_margins = replace(found, margins=True)(3)
    assert with_margins is not None and with_margins["margins"].max() == 3
