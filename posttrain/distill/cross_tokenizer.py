"""Distillation across tokenizers: tokens of one text side by side, rows of a teacher's tokens, and a run's aligners."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int

from posttrain.batch import TopK
from posttrain.config import DatasetSection, DistillSection
from posttrain.data.chat import Renderer
from posttrain.data.format import LossOn, TokenizedExample, loss_on, render_answer, tokenize_example, use_chat
from posttrain.data.messages import Message
from posttrain.data.packing import fill_rows
from posttrain.data.pipeline import row_tokenizer
from posttrain.data.sources import Arrays, Rows, Sequences, each_row
from posttrain.data.tokenizer import Tokenizer
from posttrain.distill.teachers import TeacherSource, TopKScorer
from posttrain.distill.vocabulary import SharedTokens, Vocabulary, VocabularyMap, back_of
from posttrain.errors import ConfigError
from posttrain.tree import replace

# Positions in texts are counted in bytes: tokens of byte-level vocabularies may end inside of a character.


class Group(NamedTuple):
    """Tokens `one[0]..one[1]` and `other[0]..other[1]` (stops not included) that have the same text."""

    one: tuple[int, int]
    other: tuple[int, int]

    @property
    def single(self) -> bool:
        """True for one token on each side."""
        return self.one[1] - self.one[0] == 1 == self.other[1] - self.other[0]


def groups(one: Int[np.ndarray, " N1"], other: Int[np.ndarray, " M1"]) -> list[Group]:
    """Split into the smallest groups. Both are rising byte bounds: start of the first token, end of each token.

    >>> groups(np.asarray([0, 3, 5, 9]), np.asarray([0, 5, 7, 9]))
    [Group(one=(0, 2), other=(0, 1)), Group(one=(2, 3), other=(1, 3))]
    """
    common = np.intersect1d(one, other)
    # A token without text belongs to the group before it.
    places = [np.searchsorted(bounds, common, side="right") - 1 for bounds in (one, other)]
    pairs = [list(zip(indices[:-1].tolist(), indices[1:].tolist(), strict=True)) for indices in places]
    return [Group(a, b) for a, b in zip(*pairs, strict=True)]


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


LOOKED_AT = 300
"""Rows of each dataset, spread evenly."""
MOST_UNALIGNED = 0.1
"""Share of the completions' text that the teacher's template may leave out or change."""
MOST_OTHER = 0.3
"""Maximum share of common token starts at which the teacher's token differs from the student's."""
LONGEST_ROW = 1 << 20

Data = tuple[DatasetSection, Rows, Renderer]


def make_aligners(
    section: DistillSection, teachers: Sequence[TeacherSource], data: Sequence[Data], tokenizer: Tokenizer
) -> tuple[dict[int, Aligner], list[str]]:
    """Make the aligner of each cross-tokenizer teacher, by number, and a note of its token coverage.

    ConfigError where the two do not read the same text.
    """
    aligners, notes = {}, []
    for number, source in enumerate(teachers):
        if source.tokenizer is None:
            continue
        student, teacher = Vocabulary(tokenizer), Vocabulary(source.tokenizer)
        aligner = Aligner(
            student=student,
            teacher=teacher,
            renderers=[
                (dataset, Renderer(source.tokenizer, use_chat(dataset, source.tokenizer, rows.columns)))
                for dataset, rows, _ in data
            ],
            map=SharedTokens.of(student, teacher)
            if source.section.tokenizer == "gold"
            else VocabularyMap(student, teacher, section.temperature),
            row_tokens=source.max_positions or LONGEST_ROW,
            loss_on=loss_on(section),
        )
        sample = _look(section, aligner, data)
        aligners[number] = dataclasses.replace(aligner, row_tokens=_row_tokens(section, source, sample))
        notes.append(_note(source, aligners[number], sample))
    return aligners, notes


Found = list[tuple[int, Aligned]]
"""Numbers of the student's tokens with loss, and what became of the sequence."""


def _look(section: DistillSection, aligner: Aligner, data: Sequence[Data]) -> Found:
    sample: Found = []
    for number, (dataset, rows, renderer) in enumerate(data):
        tokenize = row_tokenizer(section, dataset, rows, renderer)
        chosen = range(0, len(rows), -(-len(rows) // LOOKED_AT))
        for index, sequences in zip(chosen, each_row(rows, chosen, "alignment", tokenize), strict=True):
            with rows.named(index) as row:
                pairs = zip(sequences, aligner.align(number, row, sequences), strict=True)
            sample += [
                (int((one["loss_weight"] > 0).sum()), a) for one, a in pairs if one is not None and a is not None
            ]
    return sample


def _row_tokens(section: DistillSection, source: TeacherSource, found: Found) -> int:
    """Teacher row length in proportion to the student's rows, and no shorter than a sequence."""
    mine = sum(len(aligned.covered) for _, aligned in found)
    its = [len(aligned.tokens) for _, aligned in found]
    needed = max(-(-section.row_tokens * sum(its) // mine), *its, 2)
    return needed if source.max_positions is None else min(needed, source.max_positions)


def _note(source: TeacherSource, aligner: Aligner, found: Found) -> str:
    """Format the coverage of a teacher. ConfigError if too little is aligned."""
    text, same, single = (sum(getattr(a.pairs, name) for _, a in found) for name in ("text", "same_text", "single"))
    begin, num_covered = sum(len(a.pairs.one) for _, a in found), sum(int((a.covered != 0).sum()) for _, a in found)
    covered = num_covered / sum(count for count, _ in found)
    other, unaligned = 1 - num_covered / max(begin, 1), 1 - same / max(text, 1)
    if unaligned > MOST_UNALIGNED or not covered:
        raise ConfigError(
            f"teachers: {unaligned:.1%} of the completions' text is not what teacher {source.title} reads of the same "
            f"rows (at most {MOST_UNALIGNED:.0%} may be), and {covered:.1%} of the tokens have a target; compare the "
            "chat templates of both, or set dataset.chat to false"
        )
    alike = f"{single / max(text, 1):.1%} of the text is in tokens that both have alike, {unaligned:.1%} is not aligned"
    if aligner.shared is not None:
        groups = num_covered / max(begin, 1)
        return (
            f"teacher {source.title}: its own tokens, in rows of {aligner.row_tokens}; it teaches {covered:.1%} of the "
            f"student's tokens, in groups of {groups:.2f} ({alike}); {aligner.shared.unshared.sum():,} of the "
            f"student's {len(aligner.student.names):,} tokens are not its own"
        )
    if other > MOST_OTHER:
        raise ConfigError(
            f"teachers: where a token begins in both, that of teacher {source.title} is another than the student's at "
            f"{other:.1%} of the places (at most {MOST_OTHER:.0%} may be): its tokens are too short for this student"
        )
    return (
        f"teacher {source.title}: its own tokens, in rows of {aligner.row_tokens}; it teaches {covered:.1%} of the "
        f"student's tokens ({alike}); where a token begins in both, it is another at {other:.1%} of the places"
    )


def aligned_tokenizer(section: DistillSection, aligner: Aligner, number: int, data: Data) -> Callable[[int], Sequences]:
    """Make a row tokenizer with loss only at aligned tokens, and with the arrays of `Aligned`."""
    dataset, rows, renderer = data
    tokenize = row_tokenizer(section, dataset, rows, renderer)

    def align(index: int) -> Sequences:
        sequences = tokenize(index)
        with rows.named(index) as row:
            aligned = aligner.align(number, row, sequences)
        return [
            None
            if one is None or match is None
            else match.part_of(one) | {"covered": match.covered, "teacher_tokens": match.tokens, "scored": match.scored}
            for one, match in zip(sequences, aligned, strict=True)
        ]

    return align


def teacher_sequence(made: Mapping[str, np.ndarray]) -> Arrays:
    """Teacher tokens of an aligned sequence, with loss weight on the scored ones."""
    return {"tokens": made["teacher_tokens"], "loss_weight": (made["scored"] != 0).astype(np.float32)}


def aligned_scorer(
    aligner: Aligner, score: TopKScorer
) -> Callable[[Sequence[Mapping[str, np.ndarray]]], Iterator[TopK]]:
    """Make a scorer of `aligned_tokenizer` sequences that returns top-k in the student's tokens."""

    def scored(sequences: Sequence[Mapping[str, np.ndarray]]) -> Iterator[TopK]:
        for sequence, topk in zip(sequences, score([teacher_sequence(one) for one in sequences]), strict=True):
            mine, its = (sequence["tokens"], sequence["covered"]), (sequence["teacher_tokens"], sequence["scored"])
            yield aligner.translate(topk, mine, its)

    return scored
