"""Reference cases and a packer for the tests of this folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from posttrain.batch import Batch, TokenStats

FOLDER = Path(__file__).parents[1] / "goldens" / "losses"

PER_TOKEN = ("logps", "entropy", "loss_weight", "sampler_logps", "behaviour_logps")
PER_TOKEN += ("old_logps", "ref_logps", "advantages")


@dataclass(frozen=True)
class Golden:
    cases: list[dict[str, Any]]
    arrays: dict[str, np.ndarray]


def read_golden(name: str) -> Golden:
    cases = json.loads((FOLDER / f"{name}.json").read_text())["cases"]
    with np.load(FOLDER / f"{name}.npz") as arrays:
        return Golden(cases, dict(arrays))


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Golden]:
    return read_golden


@dataclass(frozen=True)
class Rows:
    """Sequences laid out in rows; `where[i]` is the row and the slice of sequence i."""

    stats: TokenStats
    batch: Batch
    where: dict[int, tuple[int, slice]]


Sequences = list[dict[str, np.ndarray]]


@pytest.fixture(scope="session")
def sequences() -> Sequences:
    """Six answers of unequal lengths behind prompts of unequal lengths, off-policy enough to clip some tokens."""
    rng = np.random.default_rng(0)
    made = []
    for prompt, length in [(3, 6), (1, 4), (2, 9), (4, 1), (2, 5), (1, 7)]:
        logps = -rng.exponential(1.0, prompt + length)
        one = {name: logps + rng.normal(0, 0.3, logps.shape) for name in ("sampler_logps", "old_logps", "ref_logps")}
        one["behaviour_logps"] = one["sampler_logps"] + 0.1
        one |= {"logps": logps, "entropy": rng.uniform(0, 3, logps.shape)}
        one["advantages"] = np.full(logps.shape, rng.normal())
        one["loss_weight"] = (np.arange(prompt + length) >= prompt).astype(float)
        made.append({name: one[name].astype(np.float32) for name in PER_TOKEN})
    made[2]["loss_weight"][5:7] = 0.0
    return made


@pytest.fixture(scope="session")
def lay_out() -> Callable[..., Rows]:
    import jax.numpy as jnp

    from posttrain.batch import Batch, TokenStats

    def rows_of(sequences: Sequences, layout: Sequence[Sequence[int]], row_tokens: int) -> Rows:
        shape = (len(layout), row_tokens)
        arrays = {name: np.zeros(shape, np.float32) for name in PER_TOKEN}
        positions, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        where = {}
        for row, indices in enumerate(layout):
            start = 0
            for segment, index in enumerate(indices, start=1):
                place = slice(start, start + len(sequences[index]["logps"]))
                where[index] = (row, place)
                for name in PER_TOKEN:
                    arrays[name][row, place] = sequences[index][name]
                positions[row, place] = np.arange(place.stop - start)
                segments[row, place] = segment
                start = place.stop
        stats = TokenStats(logps=jnp.asarray(arrays.pop("logps")), entropy=jnp.asarray(arrays.pop("entropy")))
        batch = Batch(tokens=np.zeros(shape, np.int32), positions=positions, segments=segments, **arrays)
        return Rows(stats, batch, where)

    return rows_of
