"""A step of training by a peer, as its driver in FOLDER does it.

    python bench/peers/train_peer.py FOLDER peer_trl|peer_tunix ITEM [--spread] --steps N

The first step ends when its result is there: Tunix asks for the next batch, which is all that its driver sees, as soon
as the device has the program. `--spread`: sequences of 32 to 256 tokens, with the peer's own defaults in padded rows.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

SHORTEST = 32


class Ragged(np.ndarray):
    """Tokens [N, T] that turn into lists without their padding."""

    def tolist(self) -> Any:
        return [np.asarray(row)[np.asarray(row) > 0].tolist() for row in self]


def spread_lengths(common: Any, steps: int) -> None:
    """Have the driver draw sequences of different lengths."""
    uniform = common.rng_tokens
    useful = []

    def spread(seed: int, *shape: int, vocab: int) -> np.ndarray:
        tokens = uniform(seed, *shape, vocab=vocab)
        lengths = np.random.default_rng(seed).integers(SHORTEST, shape[-1] + 1, shape[:-1])
        useful.append(lengths.sum() / steps)
        return np.where(np.arange(shape[-1]) < lengths[..., None], tokens, common.PAD).view(Ragged)

    common.rng_tokens = spread
    common.step_tokens = lambda item: float(useful[0])


def wait_for_first(tunix: Any) -> None:
    """Have the driver's clock wait for the arrays of the first step; later steps overlap as Tunix lets them."""

    def batches(self: Any) -> Iterator[Any]:
        for number, batch in enumerate(self.b):
            if number == 1:
                jax = importlib.import_module("jax")
                jax.block_until_ready(jax.live_arrays())
            if number:
                self.c.tick()
            yield batch

    tunix.Clocked.__iter__ = batches


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("peer", choices=("peer_trl", "peer_tunix"))
    parser.add_argument("item")
    parser.add_argument("--spread", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    sys.path.insert(0, arguments.folder)
    common, driver = importlib.import_module("common"), importlib.import_module(arguments.peer)
    if arguments.spread:
        spread_lengths(common, arguments.steps)
    if arguments.peer == "peer_tunix":
        wait_for_first(driver)
    driver.run(arguments.item, "s1", arguments.steps, {})


if __name__ == "__main__":
    main()
