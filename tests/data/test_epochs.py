"""Passes over the data as optimiser steps: counted on the stream that training reads."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.config import DatasetSection, SFTSection
from posttrain.data.chat import Renderer
from posttrain.data.epochs import rows_of_epochs
from posttrain.data.pipeline import SFTBatches, row_tokenizer, window_of
from posttrain.data.sources import load_rows
from posttrain.data.tokenizer import load_tokenizer


@pytest.mark.parametrize("num_epochs", [1.0, 3.0, 0.4])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"packing": False},
        {"overlong": "drop", "row_tokens": 20},
        {"dataset": {"shuffle": False}},
        {"mix": ["other.jsonl"]},
    ],
)
def test_the_counted_rows_hold_the_passes(tmp_path: Path, fields: dict[str, Any], num_epochs: float) -> None:
    for name, count in (("rows", 300), ("other", 90)):
        rows = [{"prompt": f"{name}{i}:", "completion": "n" * (1 + i * 7 % 13)} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = DatasetSection(path=str(tmp_path / "rows.jsonl"), chat=False, **fields.pop("dataset", {}))
    mix = [DatasetSection(path=str(tmp_path / path), chat=False, weight=0.5) for path in fields.pop("mix", [])]
    settings = {"row_tokens": 48, "batch_rows": 1, "overlong": "truncate", **fields}
    section = SFTSection(dataset=dataset, mix=tuple(mix), **settings)
    renderer = Renderer(load_tokenizer("bytes"), chat=False)
    sources = [(load_rows(one), renderer) for one in section.datasets]
    tokenizers = [row_tokenizer(section, one, *source) for one, source in zip(section.datasets, sources, strict=True)]
    made = [[tokenize(i) for i in range(len(rows))] for tokenize, (rows, _) in zip(tokenizers, sources, strict=True)]
    lengths = [[None if one is None else len(one["tokens"]) for one in of_one] for of_one in made]
    window = window_of(section, section.datasets)
    found = rows_of_epochs(section, section.datasets, lengths, window=window, num_epochs=num_epochs, seed=5)

    stream = SFTBatches(section, *sources[0], seed=5, mixed=sources[1:])
    held = [int(np.max(next(stream).segments)) for _ in range(found)]
    if not mix:
        kept = sum(length is not None for length in lengths[0])
        assert (kept < 300) == (section.overlong == "drop")
        wanted = num_epochs * kept
        # A part of a pass is counted in draws, of which some are left out.
        assert sum(held) >= math.floor(wanted) - 5 and (num_epochs < 1 or sum(held) == wanted)
    else:
        assert sum(held) >= math.ceil(num_epochs * 390) > sum(held[:-1])
