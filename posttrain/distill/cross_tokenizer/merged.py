"""GOLD targets: teacher log-probabilities of token groups whose text is that of a student's token group."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from posttrain.batch import NO_ID, TopK
from posttrain.distill.cross_tokenizer.vocabulary import Vocabulary, joined
from posttrain.kernels.logits.softmax import NO_LOGIT

LEAST = 1e-30
"""Probability that stands for none, so that its logarithm is finite."""


@dataclass(frozen=True, eq=False)
class SharedTokens:
    """Tokens shared by teacher and student: equal text, or special tokens of equal name."""

    table: Int[np.ndarray, " W"]
    """The student's id of each of the teacher's, or `NO_ID`."""
    unshared: Bool[np.ndarray, " V"]
    """The student's ids that are none of the teacher's."""

    @classmethod
    def of(cls, student: Vocabulary, teacher: Vocabulary) -> SharedTokens:
        table = np.full(len(teacher.pieces), NO_ID, np.int64)
        for number in teacher.names:
            found = student.same_as(teacher, number)
            table[number] = NO_ID if found is None else found
        unshared = np.zeros(len(student.pieces), bool)
        unshared[list(student.names)] = True
        unshared[[*table[table != NO_ID], *student.tokenizer.stop_ids]] = False
        return cls(table, unshared)

    def ids(self, ids: Int[np.ndarray, "*B"]) -> Int[np.ndarray, "*B"]:
        """The student's ids for the teacher's."""
        return np.where(ids < len(self.table), self.table[np.minimum(ids, len(self.table) - 1)], NO_ID)

    def top_k(
        self,
        topk: TopK,
        begins: Int[np.ndarray, " G"],
        firsts: tuple[Int[np.ndarray, " G"], Int[np.ndarray, " G"]],
        ends: tuple[Int[np.ndarray, " G"], Int[np.ndarray, " G"]],
    ) -> TopK:
        """Merge arrays [N, k] and [N] over tokens into groups that start at `begins`.

        `firsts`, `ends`: first tokens of groups, and end-of-text tokens, of student and teacher. `token_logps` becomes
        the group's log-probability. The group's first tokens are removed from the top-k: texts that begin with them
        without being the group count in the tail, as do tokens that only the teacher has, whose entries lose their id.
        """
        token_logps = np.asarray(topk.token_logps, np.float64)
        first = token_logps[begins]
        counts = np.diff(np.append(begins, len(token_logps)))
        # Groups of one token keep their bits: nothing is added.
        later = np.where(counts > 1, np.add.reduceat(token_logps, begins) - first, 0.0) if len(begins) else first
        best, logps = np.asarray(topk.ids)[begins], np.asarray(topk.logps)[begins]
        ids = np.where(best == ends[1][:, None], ends[0][:, None], self.ids(best))
        begun = best == firsts[1][:, None]
        gone = begun | (ids == firsts[0][:, None])
        probability = np.exp(np.float64(logps))
        more = np.where((gone & ~begun) | (~gone & (ids == NO_ID)), probability, 0.0).sum(axis=1)
        # Texts that begin with the teacher's first token are in the top-k or in the tail.
        more += np.where(
            begun.any(axis=1), np.where(begun, probability, 0.0).sum(axis=1) * -np.expm1(later), -np.exp(first + later)
        )
        ids = np.where(gone, NO_ID, ids)
        alone = np.where(gone | (ids != NO_ID), np.float32(NO_LOGIT), logps)
        ids, logps = joined(ids, np.where(ids == NO_ID, np.float32(NO_LOGIT), logps))
        tail = _sum(np.asarray(topk.tail)[begins], more)
        return TopK(
            ids=ids.astype(np.int32),
            logps=np.maximum(logps, alone),
            tail=tail,
            scaled_tail=tail,
            token_logps=(first + later).astype(np.float32),
        )


def _sum(tail: Float[np.ndarray, " G"], more: Float[np.ndarray, " G"]) -> Float[np.ndarray, " G"]:
    """Log of tail plus added mass; bitwise the tail where nothing is added."""
    found = np.log(np.maximum(np.exp(np.float64(tail)) + more, LEAST))
    return np.where(more == 0, tail, found).astype(np.float32)


def back_of(covered: Int[np.ndarray, "*B T"]) -> Int[np.ndarray, "*B T"]:
    """`TopK.back` of `Aligned.covered`: a group's later tokens follow its first."""
    places = np.arange(covered.shape[-1], dtype=np.int32)
    first = np.maximum.accumulate(np.where(covered > 0, places, 0), axis=-1)
    return np.where(covered != 0, places - first, -1).astype(np.int32)
