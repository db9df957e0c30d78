"""Cross-tokenizer teachers: alignment and token coverage, checked before a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from posttrain.batch import TopK
from posttrain.config import DatasetSection, DistillSection
from posttrain.data.chat import Renderer
from posttrain.data.format import loss_on, use_chat
from posttrain.data.pipeline import row_tokenizer
from posttrain.data.sequence_cache import Arrays, Sequences
from posttrain.data.sources import Rows, each_row
from posttrain.data.tokenizer import Tokenizer
from posttrain.distill.cross_tokenizer.merged import SharedTokens
from posttrain.distill.cross_tokenizer.rows import Aligned, Aligner
from posttrain.distill.cross_tokenizer.vocabulary import Vocabulary, VocabularyMap
from posttrain.distill.teachers import TeacherSource, TopKScorer
from posttrain.errors import ConfigError

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
        made = Aligner(
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
        found = _look(section, made, data)
        aligners[number] = replace(made, row_tokens=_row_tokens(section, source, found))
        notes.append(_note(source, aligners[number], found))
    return aligners, notes


Found = list[tuple[int, Aligned]]
"""Numbers of the student's tokens with loss, and what became of the sequence."""


def _look(section: DistillSection, aligner: Aligner, data: Sequence[Data]) -> Found:
    found: Found = []
    for number, (dataset, rows, renderer) in enumerate(data):
        tokenize = row_tokenizer(section, dataset, rows, renderer)
        chosen = range(0, len(rows), -(-len(rows) // LOOKED_AT))
        for index, sequences in zip(chosen, each_row(rows, chosen, "alignment", tokenize), strict=True):
            with rows.named(index) as row:
                pairs = zip(sequences, aligner.align(number, row, sequences), strict=True)
            found += [(int((one["loss_weight"] > 0).sum()), a) for one, a in pairs if one is not None and a is not None]
    return found


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
            if one is None or made is None
            else made.part_of(one) | {"covered": made.covered, "teacher_tokens": made.tokens, "scored": made.scored}
            for one, made in zip(sequences, aligned, strict=True)
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
        for made, topk in zip(sequences, score([teacher_sequence(one) for one in sequences]), strict=True):
            mine, its = (made["tokens"], made["covered"]), (made["teacher_tokens"], made["scored"])
            yield aligner.translate(topk, mine, its)

    return scored
