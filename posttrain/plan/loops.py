"""Trip counts of loops that a program learns at run time, at most."""

from __future__ import annotations

from jax.sharding import Mesh

from posttrain.kernels.logits.chunks import chunk_length
from posttrain.kernels.logits.vocab_sharding import VocabSharding


def vocabulary_trips(mesh: Mesh, rows: int, length: int, vocab_size: int) -> int:
    """Chunks of the loss over the vocabulary if every token of the fullest row counts."""
    return -(-(length - 1) // chunk_length(rows, length, vocab_size, VocabSharding.of(mesh)))
