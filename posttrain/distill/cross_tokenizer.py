"""Distillation across tokenizers: maps of vocabularies, tokens of one text side by side, rows of a teacher's tokens."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from posttrain.batch import NO_ID, TopK
from posttrain.config import DatasetSection
from posttrain.data.chat import Renderer
from posttrain.data.format import LossOn, TokenizedExample, tokenize_example
from posttrain.data.messages import Message, Tools
from posttrain.data.packing import fill_rows
from posttrain.data.sources import Sequences
from posttrain.data.tokenizer import Tokenizer
from posttrain.data.tokenizer_files import byte_characters
from posttrain.errors import ConfigError
from posttrain.kernels.logits.softmax import NO_LOGIT
from posttrain.tree import replace

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


# Positions in texts are counted in bytes: tokens of byte-level vocabularies may end inside of a character.


class TokenGroup(NamedTuple):
    """Tokens `one[0]..one[1]` and `other[0]..other[1]` (stops not included) that have the same text."""

    one: tuple[int, int]
    other: tuple[int, int]

    @property
    def single(self) -> bool:
        """True for one token on each side."""
        return self.one[1] - self.one[0] == 1 == self.other[1] - self.other[0]


def groups(one: Int[np.ndarray, " N1"], other: Int[np.ndarray, " M1"]) -> list[TokenGroup]:
    """Split into the smallest groups. Both are rising byte bounds: start of the first token, end of each token.

    >>> groups(np.asarray([0, 3, 5, 9]), np.asarray([0, 5, 7, 9]))
    [TokenGroup(one=(0, 2), other=(0, 1)), TokenGroup(one=(2, 3), other=(1, 3))]
    """
    common = np.intersect1d(one, other)
    # A token without text belongs to the group before it.
    places = [np.searchsorted(bounds, common, side="right") - 1 for bounds in (one, other)]
    pairs = [list(zip(indices[:-1].tolist(), indices[1:].tolist(), strict=True)) for indices in places]
    return [TokenGroup(a, b) for a, b in zip(*pairs, strict=True)]


@dataclass(frozen=True)
class Run:
    """Consecutive tokens with loss, such as an answer."""

    first: int
    """Position of its first token."""
    bounds: Int[np.ndarray, " N1"]
    text: bytes
    end: int | None
    """Position of its stop token; None if the sequence is cut before it."""


def runs(
    tokens: Sequence[int], mask: Bool[np.ndarray, " T"], pieces: Sequence[bytes], stop_ids: Collection[int]
) -> list[Run]:
    """Find the runs of a sequence. `pieces`: bytes of each token id. Text after the last stop token of a run is cut."""
    result = []
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        ends = [place for place in range(start, stop) if tokens[place] in stop_ids]
        texts = [pieces[token] for token in tokens[start : ends[-1] if ends else stop]]
        bounds = np.cumsum([0, *map(len, texts)])
        result.append(Run(start, bounds, b"".join(texts), ends[-1] if ends else None))
    return result


class Pairs(NamedTuple):
    """Places in two sequences where tokens of the same text begin, rising."""

    one: Int[np.ndarray, " N"]
    other: Int[np.ndarray, " N"]
    one_stop: Int[np.ndarray, " N"]
    """Position after the group's last token."""
    other_stop: Int[np.ndarray, " N"]
    same_text: int
    """Bytes of the first sequence's runs that the other has as well."""
    single: int
    """Bytes of `same_text` in groups of one token on each side."""
    text: int
    """All bytes of the first sequence's runs."""


def pair_runs(one: Sequence[Run], other: Sequence[Run]) -> Pairs:
    """Align the runs of both sequences in order. Text that only one of two runs has gets no pair."""
    places: list[tuple[int, int, int, int]] = []
    same_text = single = 0
    for a, b in zip(one, other, strict=False):
        shift = _shift(a.text, b.text)
        if shift is None:
            continue
        matched = groups(a.bounds, b.bounds + shift)
        places += [
            (a.first + g.one[0], b.first + g.other[0], a.first + g.one[1], b.first + g.other[1]) for g in matched
        ]
        same_text += min(len(a.text), len(b.text) + shift) - max(0, shift)
        single += sum(int(a.bounds[g.one[1]] - a.bounds[g.one[0]]) for g in matched if g.single)
        if a.end is not None and b.end is not None and len(a.text) == len(b.text) + shift:
            places.append((a.end, b.end, a.end + 1, b.end + 1))
    one_at, other_at, one_stop, other_stop = np.asarray(places, np.int64).reshape(-1, 4).T
    return Pairs(one_at, other_at, one_stop, other_stop, same_text, single, sum(len(run.text) for run in one))


def _shift(one: bytes, other: bytes) -> int | None:
    """Offset of `other` in `one`, negative if it begins before; None if they do not overlap unambiguously.

    Templates put text before an answer, and first tokens of plain texts have no loss: the ends are looked at first.
    Rows that are too short cut both texts.
    """
    if one.endswith(other) or other.endswith(one):
        return len(one) - len(other)
    for longer, shorter, sign in ((one, other, 1), (other, one, -1)):
        at = longer.find(shorter)
        if shorter and at >= 0:
            return sign * at if at == longer.rfind(shorter) else None
    offsets = [sign * at for sign, a, b in ((1, one, other), (-1, other, one)) for at in _overlaps(a, b)]
    return offsets[0] if len(offsets) == 1 else None


def _overlaps(one: bytes, other: bytes) -> list[int]:
    """Offsets in `one` whose suffix begins `other`, with at least half of the shorter text in common."""
    least = -(-min(len(one), len(other)) // 2)
    starts = range(max(len(one) - len(other), 0) + 1, len(one) - least + 1) if least else ()
    return [at for at in starts if other.startswith(one[at:])]


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


def aligned_sequences(sequences: Sequences, aligned: Sequence[Aligned | None]) -> Sequences:
    """Student sequences with loss only at covered tokens, of a group at its first; with the arrays of the alignment."""
    return [
        None
        if one is None or match is None
        else {
            **one,
            "loss_weight": np.where(match.covered > 0, one["loss_weight"], np.float32(0)),
            "covered": match.covered,
            "teacher_tokens": match.tokens,
            "scored": match.scored,
        }
        for one, match in zip(sequences, aligned, strict=True)
    ]


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
        self,
        dataset: int,
        messages: Sequence[Message],
        tokens: Sequence[int],
        sampled: Sequence[bool],
        tools: Tools | None = None,
    ) -> Aligned:
        """Align a sampled completion, the last of the messages. `tools`: those that its prompt describes."""
        *prompt, turn = messages
        # A character of which the student sampled only the first bytes is no text.
        answer: Message = {**turn, "content": str(turn["content"]).rstrip("\ufffd")}
        theirs = self.renderers[dataset][1].answer(prompt, [answer], tools)
        mine = TokenizedExample(np.asarray(tokens, np.int32), np.asarray(sampled, bool))
        return self._paired(mine, TokenizedExample(np.asarray(theirs.tokens, np.int32), np.asarray(theirs.mask, bool)))

    def _paired(self, own: TokenizedExample, its: TokenizedExample) -> Aligned:
        tokens, mask = its.tokens[: self.row_tokens], its.loss_mask[: self.row_tokens]
        mine = own.tokens
        own_stops, its_stops = self.student.tokenizer.stop_ids, self.teacher.tokenizer.stop_ids
        own_runs = runs(mine.tolist(), own.loss_mask, self.student.pieces, own_stops)
        its_runs = runs(tokens.tolist(), mask, self.teacher.pieces, its_stops)
        pairs = pair_runs(own_runs, its_runs)
        own_end = next((int(mine[run.end]) for run in own_runs if run.end is not None), own_stops[0])
        its_end = next((int(tokens[run.end]) for run in its_runs if run.end is not None), its_stops[0])
        covered, scored = np.zeros(len(mine), np.int32), np.zeros(len(tokens), np.int32)
        one, other = pairs.one, pairs.other
        if isinstance(self.map, SharedTokens):
            covered[_inside(one, pairs.one_stop)] = scored[_inside(other, pairs.other_stop)] = -1
        else:
            theirs = tokens[other]
            same = np.where(theirs == its_end, own_end, self.map.ids(theirs)) == mine[one]
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
        scored_topk = jax.tree.map(lambda x: np.asarray(x)[at], topk)

        def spread(x: np.ndarray) -> np.ndarray:
            whole = np.zeros((*covered.shape, *x.shape[1:]), x.dtype)
            whole[there] = x
            return whole

        return self.grouped(jax.tree.map(spread, self.translate(scored_topk, mine, its)), covered)

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
