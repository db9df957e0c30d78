"""Best-fit packing of this package beside grain's: `python bench/packing.py [--sequences N]`, as a table.

CPU time for sequences that are in memory; grain's packer reads them without threads, the cheapest way that it has.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import grain
import numpy as np
from grain.experimental import BestFitPackIterDataset

from posttrain.data.packing import LOOK_AHEAD, PackedBatches

BATCH_ROWS = 8
BINS = (64, 512)
"""Rows that grain's packer fills at the same time."""
Arrays = dict[str, np.ndarray]
Lengths = Callable[[np.random.Generator, int], np.ndarray]

WORKS: dict[str, tuple[int, Lengths]] = {
    "problems of the quick start, 7 to 14": (64, lambda rng, n: rng.integers(7, 15, n)),
    "even, 32 to 256": (256, lambda rng, n: rng.integers(32, 257, n)),
    "log-normal, median 200": (1024, lambda rng, n: np.clip(rng.lognormal(np.log(200), 0.8, n), 8, 1024).astype(int)),
}
"""Tokens of a row, and of the sequences."""


def source(rng: np.random.Generator, lengths: np.ndarray) -> Any:
    examples = [
        {"tokens": np.full(length, number + 1, np.int32), "loss_weight": np.ones(length, np.float32)}
        for number, length in enumerate(lengths.tolist())
    ]
    return grain.MapDataset.source(examples).shuffle(seed=0)


def ours(examples: Any, row_tokens: int) -> PackedBatches:
    lengths = dict.fromkeys(("tokens", "loss_weight"), row_tokens)
    return PackedBatches(examples, epoch=len(examples), window=LOOK_AHEAD, batch_rows=BATCH_ROWS, lengths=lengths)


def grains(examples: Any, row_tokens: int, bins: int) -> Any:
    read = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    lengths = dict.fromkeys(("tokens", "loss_weight"), row_tokens)
    packed = BestFitPackIterDataset(examples.to_iter_dataset(read), length_struct=lengths, num_packing_bins=bins)
    return iter(packed.batch(BATCH_ROWS, drop_remainder=False))


def measure(name: str, make: Callable[[], Iterator[Arrays]], lengths: np.ndarray) -> None:
    start = time.process_time()
    stream: Any = make()
    tokens, slowest = [], 0.0
    while True:
        before = time.process_time()
        batch = next(stream, None)
        if batch is None:
            break
        slowest = max(slowest, time.process_time() - before)
        tokens.append(batch["tokens"])
    seconds = time.process_time() - start
    whole = np.concatenate(tokens[:-1])
    counts = np.bincount(np.concatenate(tokens).ravel(), minlength=len(lengths) + 1)[1:]
    once = bool((counts == lengths).all())
    resumed = resume(make, len(tokens) // 2)
    print(
        f"| {name} | {(whole > 0).mean():.2%} | {1000 * 1000 * seconds / len(lengths):.1f} | {1000 * slowest:.1f} | "
        f"{'yes' if once else 'NO'} | {resumed} |",
        flush=True,
    )


def resume(make: Callable[[], Iterator[Arrays]], step: int) -> str:
    """Milliseconds until the first batch, where the batches after `step` are those of a stream that was not stopped."""
    stream: Any = make()
    for _ in islice(stream, step):
        pass
    state = stream.get_state()
    expected = list(islice(stream, 5))
    start = time.process_time()
    again: Any = make()
    again.set_state(state)
    found = [next(again)]
    seconds = time.process_time() - start
    found += islice(again, 4)
    same = all(np.array_equal(a["tokens"], b["tokens"]) for a, b in zip(found, expected, strict=True))
    return f"{1000 * seconds:.0f}" if same else "OTHER BATCHES"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=16_384)
    arguments = parser.parse_args()
    print("| sequences, row | packer | fill | ms for 1,000 | slowest batch, ms | each whole and once | resume, ms |")
    print("|---|---|---|---|---|---|---|")
    for work, (row_tokens, draw) in WORKS.items():
        rng = np.random.default_rng(0)
        lengths = draw(rng, arguments.sequences)
        examples = source(rng, lengths)
        title = f"{work}, {row_tokens:,}"
        measure(f"{title} | posttrain", lambda e=examples, r=row_tokens: ours(e, r), lengths)
        for bins in BINS:
            measure(f"{title} | grain, {bins} bins", lambda e=examples, r=row_tokens, b=bins: grains(e, r, b), lengths)


if __name__ == "__main__":
    main()
