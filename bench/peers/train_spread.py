"""Fine-tuning by a peer on sequences of 32 to 256 tokens, with its own defaults: padded rows.

    python bench/peers/train_spread.py FOLDER peer_trl|peer_tunix --steps N

FOLDER holds the peers' drivers, whose work `sft` this runs over other data.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

import numpy as np

SHORTEST = 32


class Ragged(np.ndarray):
    """Tokens [N, T] that turn into lists without their padding."""

    def tolist(self) -> Any:
        return [np.asarray(row)[np.asarray(row) > 0].tolist() for row in self]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("peer", choices=("peer_trl", "peer_tunix"))
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    sys.path.insert(0, arguments.folder)
    common: Any = importlib.import_module("common")
    uniform = common.rng_tokens
    useful = []

    def spread(seed: int, *shape: int, vocab: int) -> np.ndarray:
        tokens = uniform(seed, *shape, vocab=vocab)
        lengths = np.random.default_rng(seed).integers(SHORTEST, shape[-1] + 1, shape[:-1])
        useful.append(lengths.sum() / arguments.steps)
        return np.where(np.arange(shape[-1]) < lengths[..., None], tokens, common.PAD).view(Ragged)

    common.rng_tokens = spread
    common.step_tokens = lambda item: float(useful[0])
    importlib.import_module(arguments.peer).run("sft", "s1", arguments.steps, {})


if __name__ == "__main__":
    main()
