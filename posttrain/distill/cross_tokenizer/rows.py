"""Rows of a teacher with another tokenizer: its own tokens of the same text, aligned to the student's.

With `shared` (GOLD), targets are of groups of tokens that have the same text on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from posttrain.batch import TopK
from posttrain.config import DatasetSection
from posttrain.data.chat import Renderer
from posttrain.data.format import LossOn, TokenizedExample, render_answer, tokenize_example
from posttrain.data.messages import Message
from posttrain.data.packing import fill_rows
from posttrain.data.sequence_cache import Sequences
from posttrain.distill.cross_tokenizer.align import Pairs, pair, runs
from posttrain.distill.cross_tokenizer.merged import SharedTokens, back_of
from posttrain.distill.cross_tokenizer.vocabulary import Vocabulary, VocabularyMap
from posttrain.errors import ConfigError
from posttrain.tree import replace

Mine = tuple[Int[np.ndarray, "*B"], Int[np.ndarray, "*B"]]
"""Student tokens, and their alignment (`Aligned.covered`)."""

Its = tuple[Int[np.ndarray, "*C"], Int[np.ndarray, "*C"]]
"""Teacher tokens in rows of another length, and their alignment (`Aligned.scored`)."""


class Aligned(NamedTuple):
    """Student sequence aligned with the same text in the teacher's tokens.

    The n-th covered student token corresponds to the n-th scored teacher token; in both arrays the later tokens of a
    group are -1.
    """

    covered: Int[np.ndarray, " T"]
    """Per student token: 0 without a target, else 1 + the student's token that ends the text."""
    tokens: Int[np.ndarray, " U"]
    scored: Int[np.ndarray, " U"]
    """Per teacher token: 0, or 1 + the teacher's token that ends the text."""
    pairs: Pairs

    def part_of(self, sequence: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Student sequence with loss only at covered tokens; of a group, at its first token."""
        return {**sequence, "loss_weight": np.where(self.covered > 0, sequence["loss_weight"], np.float32(0))}


@dataclass(frozen=True, kw_only=True, eq=False)
class Aligner:
    """Aligner of student rows with a teacher's tokens. `row_tokens`: row length of the teacher; text beyond it has no
    target."""

    student: Vocabulary
    teacher: Vocabulary
    renderers: Sequence[tuple[DatasetSection, Renderer]]
    """Dataset sections and renderers of the teacher, by dataset number."""
    map: VocabularyMap | SharedTokens
    row_tokens: int
    loss_on: LossOn
    """Tokens of the rows that have loss."""

    @property
    def shared(self) -> SharedTokens | None:
        """Shared tokens of a GOLD teacher, whose targets are token groups; else None."""
        return self.map if isinstance(self.map, SharedTokens) else None

    def align(self, dataset: int, row: Mapping[str, Any], sequences: Sequences) -> list[Aligned | None]:
        """Align a tokenised row. A student token has a target where the teacher's aligned token maps to it."""
        section, renderer = self.renderers[dataset]
        theirs = tokenize_example(row, section, renderer, self.loss_on)
        if len(theirs) != len(sequences):
            raise ConfigError(
                f"teachers: the chat template of {renderer.tokenizer.name} makes {len(theirs)} sequences of the row, "
                f"the student's {len(sequences)}: one of them rewrites earlier turns; set model.chat_template to one "
                "that does as the teacher's, or last_turn_only"
            )
        own = [None if s is None else TokenizedExample(s["tokens"], s["loss_weight"] > 0) for s in sequences]
        return [None if one is None else self._paired(one, its) for one, its in zip(own, theirs, strict=True)]

    def align_sample(
        self, dataset: int, messages: Sequence[Message], tokens: Sequence[int], sampled: Sequence[bool]
    ) -> Aligned:
        """Align a sampled completion, the last of the messages."""
        *prompt, turn = messages
        # A character of which the student sampled only the first bytes is no text.
        answer: Message = {**turn, "content": str(turn["content"]).rstrip("\ufffd")}
        theirs = render_answer(prompt, [answer], self.renderers[dataset][1])
        mine = TokenizedExample(np.asarray(tokens, np.int32), np.asarray(sampled, bool))
        return self._paired(mine, TokenizedExample(np.asarray(theirs.tokens, np.int32), np.asarray(theirs.mask, bool)))

    def _paired(self, own: TokenizedExample, its: TokenizedExample) -> Aligned:
        tokens, mask = its.tokens[: self.row_tokens], its.loss_mask[: self.row_tokens]
        mine = own.tokens
        own_stops, its_stops = self.student.tokenizer.stop_ids, self.teacher.tokenizer.stop_ids
        own_runs = runs(mine.tolist(), own.loss_mask, self.student.pieces, own_stops)
        its_runs = runs(tokens.tolist(), mask, self.teacher.pieces, its_stops)
        pairs = pair(own_runs, its_runs)
        own_end = next((int(mine[run.end]) for run in own_runs if run.end is not None), own_stops[0])
        its_end = next((int(tokens[run.end]) for run in its_runs if run.end is not None), its_stops[0])
        covered, scored = np.zeros(len(mine), np.int32), np.zeros(len(tokens), np.int32)
        one, other = pairs.one, pairs.other
        if isinstance(self.map, SharedTokens):
            covered[_inside(one, pairs.one_stop)] = scored[_inside(other, pairs.other_stop)] = -1
        else:
            found = tokens[other]
            same = np.where(found == its_end, own_end, self.map.ids(found)) == mine[one]
            one, other = one[same], other[same]
        covered[one], scored[other] = 1 + own_end, 1 + its_end
        return Aligned(covered, tokens, scored, pairs)

    def translate(self, topk: TopK, mine: Mine, its: Its) -> TopK:
        """Translate teacher top-k at aligned positions, arrays [N, k] and [N], to the student's tokens.

        `mine`, `its`: the tokens of both sides with `Aligned.covered` and `scored`.
        """
        (tokens, covered), (theirs, scored) = ((x[0][x[1] > 0], x[1][x[1] > 0]) for x in (mine, its))
        ends = covered - 1, scored - 1
        if isinstance(self.map, SharedTokens):
            begins = np.flatnonzero(its[1][its[1] != 0] > 0)
            return self.map.top_k(topk, begins, (tokens, theirs), ends)
        return self.map.top_k(topk, tokens, ends)

    def place(self, topk: TopK, mine: Mine, its: Its) -> TopK:
        """Place the teacher's top-k at the aligned student tokens; zeros elsewhere."""
        covered = mine[1]
        there, at = np.nonzero(covered > 0), np.nonzero(its[1])
        found = jax.tree.map(lambda x: np.asarray(x)[at], topk)

        def spread(x: np.ndarray) -> np.ndarray:
            whole = np.zeros((*covered.shape, *x.shape[1:]), x.dtype)
            whole[there] = x
            return whole

        return self.grouped(jax.tree.map(spread, self.translate(found, mine, its)), covered)

    def grouped(self, topk: TopK, covered: Int[np.ndarray, "B T"]) -> TopK:
        """Add the token groups, for a GOLD teacher."""
        return topk if self.shared is None else replace(topk, back=back_of(covered))


def teacher_rows(sequences: Sequence[Aligned], row_tokens: int) -> dict[str, np.ndarray]:
    """Teacher tokens of aligned sequences, one per row, as `fill_rows` makes them, with their alignment `scored`."""
    rows = [[{"tokens": one.tokens.astype(np.int32), "scored": one.scored}] for one in sequences]
    return fill_rows(rows, {"tokens": row_tokens, "scored": row_tokens}, num_rows=len(rows), like=rows[0][0])


def _inside(begins: Int[np.ndarray, " N"], stops: Int[np.ndarray, " N"]) -> Int[np.ndarray, " M"]:
    """Positions inside consecutive spans."""
    return np.concatenate([np.arange(a, b) for a, b in zip(begins, stops, strict=True)] or [begins])
