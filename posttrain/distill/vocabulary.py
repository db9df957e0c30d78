"""Vocabularies of two tokenizers: texts of their tokens, the map of a teacher's ids to a student's, shared tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from posttrain.batch import NO_ID, TopK
from posttrain.data.tokenizer import Tokenizer
from posttrain.data.tokenizer_files import byte_characters
from posttrain.errors import ConfigError
from posttrain.kernels.logits.softmax import NO_LOGIT

UNKNOWN = -1


class Vocabulary:
    """Byte text of each token of a tokenizer. ConfigError for an unsupported decoder."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.by_name: dict[str, int] = tokenizer.hf.get_vocab()
        added = tokenizer.hf.added_tokens_decoder
        self.controls = frozenset(number for number, token in added.items() if token.special)
        text_of = _reader(tokenizer)
        self.pieces = [b""] * tokenizer.num_ids
        self.by_text: dict[bytes, int] = {}
        for name, number in sorted(self.by_name.items(), key=lambda item: (_is_byte(item[0]), item[1])):
            text = added[number].content.encode() if number in added else text_of(name)
            self.pieces[number] = text
            if number not in self.controls and text:
                # A byte by its name comes after the token that is written for it.
                self.by_text.setdefault(text, number)
        self.names = {number: name for name, number in self.by_name.items()}
        self._longest = max(map(len, self.by_text))

    def same_as(self, other: Vocabulary, number: int) -> int | None:
        """Token of this vocabulary with the text of a token of another one; of several, that with the same name."""
        name, text, control = other.names.get(number), other.pieces[number], number in other.controls
        same = None if name is None else self.by_name.get(name)
        if same is not None and self.pieces[same] == text and (same in self.controls) == control:
            return same
        return None if control or not text else self.by_text.get(text)

    def first_of(self, text: bytes) -> int:
        """First token of a text that continues another text; `NO_ID` if there is none."""
        if (same := self.by_text.get(text)) is not None:
            return same
        readable = text.decode(errors="ignore")
        if readable and text.startswith(readable.encode()):
            tokens, _ = self.tokenizer.encode_spans(readable, continues=True, literal=True)
            return tokens[0] if tokens else NO_ID
        starts = (text[:length] for length in range(min(len(text), self._longest), 0, -1))
        return next((self.by_text[start] for start in starts if start in self.by_text), NO_ID)


class VocabularyMap:
    """Map of a teacher's distribution to the first student tokens of its tokens' texts.

    A token maps to the student's token of the same text, else to the first token of its text in the student's
    tokenization, else to the tail. The teacher's own tail stays there too: each probability is too small by at most
    that tail, and by the texts that the student tokenises across two teacher tokens. `temperature`: of the divergence.
    """

    def __init__(self, student: Vocabulary, teacher: Vocabulary, temperature: float):
        self._student, self._teacher, self._temperature = student, teacher, temperature
        self._table = np.full(len(teacher.pieces) + 1, UNKNOWN, np.int64)
        self._table[-1] = NO_ID

    def ids(self, ids: Int[np.ndarray, "*B"]) -> Int[np.ndarray, "*B"]:
        """The student's ids for the teacher's."""
        at = np.minimum(ids, len(self._table) - 1)
        for number in np.unique(at[self._table[at] == UNKNOWN]).tolist():
            self._table[number] = self._find(number)
        return self._table[at]

    def _find(self, number: int) -> int:
        same, text = self._student.same_as(self._teacher, number), self._teacher.pieces[number]
        if same is not None:
            return same
        return NO_ID if number in self._teacher.controls or not text else self._student.first_of(text)

    def top_k(
        self,
        topk: TopK,
        tokens: Int[np.ndarray, " N"],
        ends: tuple[Int[np.ndarray, " N"], Int[np.ndarray, " N"]],
    ) -> TopK:
        """Map arrays [N, k] and [N]. `tokens`: the student's. `ends`: end-of-text tokens of student and teacher."""
        mine, its = ends
        theirs = np.asarray(topk.ids)
        ids = np.where(theirs == its[:, None], mine[:, None], self.ids(theirs))
        logps = np.asarray(topk.logps)
        lost = ids == NO_ID
        ids, logps_of_ids = merge_duplicates(ids, np.where(lost, np.float32(NO_LOGIT), logps))
        here = ids == tokens[:, None]
        own = np.where(here, logps_of_ids, NO_LOGIT).max(axis=1).astype(np.float32)
        return TopK(
            ids=ids.astype(np.int32),
            logps=logps_of_ids,
            tail=_with(topk.tail, logps, lost, 1.0),
            scaled_tail=_with(topk.scaled_tail, logps, lost, self._temperature),
            token_logps=np.where(here.any(axis=1), own, topk.token_logps),
        )


def _with(tail: Any, logps: Float[np.ndarray, "N k"], lost: Any, temperature: float) -> Float[np.ndarray, " N"]:
    """Log of the tail mass plus that of the `lost` ids; bitwise the tail if none is lost."""
    tail = np.asarray(tail)
    more = np.where(lost, np.exp(np.float64(logps) / temperature), 0.0).sum(axis=1)
    added = np.log(np.exp(np.float64(tail)) + more, where=more > 0, out=np.zeros(len(tail)))
    return np.where(more > 0, added, tail).astype(np.float32)


def merge_duplicates(
    ids: Int[np.ndarray, "N k"], logps: Float[np.ndarray, "N k"]
) -> tuple[Int[np.ndarray, "N k"], Float[np.ndarray, "N k"]]:
    """Merge duplicate ids: each stays at its first place with its summed probability; bitwise the same without any."""
    order = np.argsort(ids, axis=1, kind="stable")
    ranked, probability = (np.take_along_axis(x, order, axis=1) for x in (ids, np.exp(np.float64(logps))))
    again = np.zeros(ids.shape, bool)
    again[:, 1:] = ranked[:, 1:] == ranked[:, :-1]
    first = np.flatnonzero(~again)
    if not again.any():
        return ids, logps
    sums = np.add.reduceat(probability.ravel(), first)
    several = (np.diff(np.append(first, ids.size)) > 1) & (ranked.ravel()[first] != NO_ID)
    ids, logps = ids.copy(), logps.copy()
    rows, places = np.nonzero(again)
    ids[rows, order[rows, places]], logps[rows, order[rows, places]] = NO_ID, NO_LOGIT
    rows, places = np.divmod(first[several], ids.shape[1])
    logps[rows, order[rows, places]] = np.minimum(np.log(sums[several]), 0.0)
    return ids, logps


def _is_byte(name: str) -> bool:
    return len(name) == 6 and name.startswith("<0x") and name.endswith(">")


def _reader(tokenizer: Tokenizer) -> Any:
    """Make the function from the name of a token to its bytes."""
    decoder = json.dumps(json.loads(tokenizer.hf.backend_tokenizer.to_str()).get("decoder"))
    if "ByteLevel" in decoder:
        byte_of = {character: byte for byte, character in enumerate(byte_characters())}

        def byte_level(name: str) -> bytes:
            return bytes(byte_of[character] for character in name) if set(name) <= byte_of.keys() else name.encode()

        return byte_level
    if "ByteFallback" in decoder or "Metaspace" in decoder:
        return lambda name: bytes([int(name[3:5], 16)]) if _is_byte(name) else name.replace("▁", " ").encode()
    raise ConfigError(
        f"tokenizer {tokenizer.name}: the text of its tokens is not known (decoder {decoder[:80]}); "
        "tokenizer: align (or gold) is for byte-level and SentencePiece vocabularies"
    )


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
            same = student.same_as(teacher, number)
            table[number] = NO_ID if same is None else same
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
        ids, logps = merge_duplicates(ids, np.where(ids == NO_ID, np.float32(NO_LOGIT), logps))
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
    added = np.log(np.maximum(np.exp(np.float64(tail)) + more, LEAST))
    return np.where(more == 0, tail, added).astype(np.float32)


def back_of(covered: Int[np.ndarray, "*B T"]) -> Int[np.ndarray, "*B T"]:
    """`TopK.back` of `Aligned.covered`: a group's later tokens follow its first."""
    places = np.arange(covered.shape[-1], dtype=np.int32)
    first = np.maximum.accumulate(np.where(covered > 0, places, 0), axis=-1)
    return np.where(covered != 0, places - first, -1).astype(np.int32)
