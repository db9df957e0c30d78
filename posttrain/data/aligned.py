"""A teacher with other tokens: it reads the same rows in its own, and speaks where a token begins in both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from posttrain.batch import Batch, TopK
from posttrain.config import DatasetSection
from posttrain.data.align import Pairs, pair, runs
from posttrain.data.chat import Renderer
from posttrain.data.format import tokenize_example
from posttrain.data.vocabulary import Vocabulary, VocabularyMap


class Aligned(NamedTuple):
    """A sequence of the student's, and the same text in the teacher's tokens.

    The n-th token that is taught is the student's for the n-th that the teacher is asked of.
    """

    taught: Int[np.ndarray, " T"]
    """Of the student's tokens: 0 where nothing is said of it, else 1 + the student's token that ends the text."""
    tokens: Int[np.ndarray, " U"]
    asked: Int[np.ndarray, " U"]
    """Of the teacher's tokens: 0, or 1 + the teacher's token that ends the text."""
    pairs: Pairs

    def part_of(self, sequence: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The student's sequence with loss only where it is taught."""
        return {**sequence, "loss_weight": np.where(self.taught > 0, sequence["loss_weight"], np.float32(0))}


@dataclass(frozen=True, kw_only=True, eq=False)
class Aligner:
    """`row_tokens`: how many of its own tokens the teacher reads of a row; what follows them has no teacher."""

    student: Vocabulary
    teacher: Vocabulary
    renderers: Sequence[tuple[DatasetSection, Renderer]]
    """The teacher's, for each dataset by its number."""
    map: VocabularyMap
    row_tokens: int

    def align(self, dataset: int, row: Mapping[str, Any], sequence: Mapping[str, np.ndarray]) -> Aligned:
        """Of the sequence that a row became. A token is taught where the teacher's there stands for it."""
        section, renderer = self.renderers[dataset]
        theirs = tokenize_example(row, section, renderer, train_on_prompt=False)
        tokens, mask = theirs.tokens[: self.row_tokens], theirs.loss_mask[: self.row_tokens]
        mine = sequence["tokens"]
        own_stops, its_stops = self.student.tokenizer.stop_ids, self.teacher.tokenizer.stop_ids
        own_runs = runs(mine.tolist(), sequence["loss_weight"] > 0, self.student.pieces, own_stops)
        its_runs = runs(tokens.tolist(), mask, self.teacher.pieces, its_stops)
        pairs = pair(own_runs, its_runs)
        own_end = next((int(mine[run.end]) for run in own_runs if run.end is not None), own_stops[0])
        its_end = next((int(tokens[run.end]) for run in its_runs if run.end is not None), its_stops[0])
        found = tokens[pairs.other]
        same = np.where(found == its_end, own_end, self.map.ids(found)) == mine[pairs.one]
        taught, asked = np.zeros(len(mine), np.int32), np.zeros(len(tokens), np.int32)
        taught[pairs.one[same]], asked[pairs.other[same]] = 1 + own_end, 1 + its_end
        return Aligned(taught, tokens, asked, pairs)

    def translate(
        self, said: TopK, tokens: Int[np.ndarray, " N"], taught: Int[np.ndarray, " N"], asked: Int[np.ndarray, " N"]
    ) -> TopK:
        """What the teacher said where it was asked, arrays [N, k] and [N], in the student's tokens."""
        return self.map.top_k(said, tokens, (taught - 1, asked - 1))

    def place(self, said: TopK, batch: Batch, taught: Int[np.ndarray, "B T"], asked: Int[np.ndarray, "B U"]) -> TopK:
        """What the teacher said of its rows, at the student's tokens; elsewhere it is zeros."""
        there, at = np.nonzero(taught), np.nonzero(asked)
        found = jax.tree.map(lambda x: np.asarray(x)[at], said)

        def spread(x: np.ndarray) -> np.ndarray:
            whole = np.zeros((*taught.shape, *x.shape[1:]), x.dtype)
            whole[there] = x
            return whole

        tokens = np.asarray(batch.tokens)[there]
        placed: TopK = jax.tree.map(spread, self.translate(found, tokens, taught[there], asked[at]))
        return placed
