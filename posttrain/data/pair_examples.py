"""Packed batches of preference pairs, labelled answers and labelled steps; a unit (pair) is never split across rows."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from posttrain.batch import Batch
from posttrain.config import DatasetSection, PairSection
from posttrain.data.chat import Masked, Renderer
from posttrain.data.cuts import Cut, cut_of
from posttrain.data.format import prompt_conversation, refuse_pictures
from posttrain.data.image_rows import (
    ImageRows,
    PictureSource,
    keys_of,
    most_patches,
    picture_digests,
    sharing_arrays,
    with_images,
)
from posttrain.data.images import Grid
from posttrain.data.messages import prompt_digest
from posttrain.data.packing import PackedBatches, Window, common_prefix, image_start, to_batch
from posttrain.data.pipeline import (
    Stream,
    drops_bad_images,
    fingerprint,
    order,
    rendering_identity,
    token_fingerprint,
    window_of,
)
from posttrain.data.preference import (
    CHOSEN,
    TokenizedAnswer,
    answered_prompt,
    is_paired,
    labelled_answers,
    margin,
    mismatched,
    pair_answers,
    pair_pictures,
    steps,
)
from posttrain.data.sources import RowError, Rows, SequenceCache, Sequences
from posttrain.errors import ConfigError
from posttrain.tree import replace as changed

PairExample = dict[str, np.ndarray]
"""Arrays over the tokens of a unit: one or two sequences that belong together."""


@runtime_checkable
class KnownLogps(Protocol):
    """Cached reference log-probabilities of a unit's weighted tokens, in order."""

    def __call__(self, index: int, unit: PairExample) -> Float[np.ndarray, " N"]: ...


@dataclass(frozen=True, kw_only=True)
class PairExamples:
    """Units of comparison of a dataset, by number: pairs, labelled answers, labelled answers each with a mismatched
    one (KTO), or steps."""

    section: PairSection
    dataset: DatasetSection
    rows: Rows
    renderer: Renderer
    kind: Literal["pairs", "answers", "answers_and_others", "steps"]
    weigh_prompts: bool = False
    """Loss weight on prompts of chosen answers too."""
    margins: bool = False
    ref_logps: KnownLogps | None = None
    share_prompts: bool = False
    """Store the common prefix of a unit's two sequences once per row, as their parent segment. Requires units of two
    without loss on prompts."""

    def __len__(self) -> int:
        return len(self.rows) * self._per_row

    @property
    def _per_row(self) -> int:
        """Units per row: a pair serves as two labelled answers."""
        return 2 if self.kind.startswith("answers") and is_paired(self.rows.columns, self.dataset) else 1

    def row_of(self, index: int) -> int:
        """Number of a unit's row."""
        return index // self._per_row

    def prompt(self, index: int) -> str:
        """Digest of a unit's prompt, the same for units with the same prompt."""
        row = self.rows[self.row_of(index)]
        if self.kind == "steps":
            prompt, _, tools = prompt_conversation(row, self.dataset, self.renderer, trained=True)
            return prompt_digest(prompt, tools)
        return answered_prompt(row, self.dataset, self.renderer)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of a unit's arrays."""
        names = ("tokens", "positions", "part", "parent", "roles", "loss_weight", "unit")
        return names + ("margins",) * self.margins + ("ref_logps",) * (self.ref_logps is not None)

    @cached_property
    def _tokenised(self) -> SequenceCache:
        """Cache of tokenised units without reference log-probabilities, shared by units with and without them."""
        return self.rows.sequences(self._key, lambda index: [self._tokenise(index)], len(self))

    @property
    def cuts(self) -> dict[int, Cut]:
        """Losses of units by `overlong`, by number."""
        return self.rows.cuts.setdefault(self._key, {})

    @property
    def _key(self) -> Hashable:
        """Key of all that a unit depends on beside its rows and reference log-probabilities."""
        section = self.section
        fitting = (section.row_tokens, section.overlong, section.row_patches)
        kind = (self.kind, self.weigh_prompts, self.margins, self.share_prompts)
        return (repr(self.dataset), self.renderer, *fitting, *kind)

    def __call__(self, index: int) -> PairExample | None:
        """Arrays of a unit; None if it is dropped: too long, or two answers that are equal, or equal once truncated."""
        (unit,) = self._tokenised(index)
        if unit is None or self.ref_logps is None:
            return unit
        logps = np.zeros(len(unit["tokens"]), np.float32)
        logps[unit["loss_weight"] > 0] = self.ref_logps(index, unit)
        return {**unit, "ref_logps": logps}

    @cached_property
    def _answer_lengths(self) -> dict[tuple[int, int], int]:
        """Number of tokens of the answers that were read so far, by row and side."""
        return {}

    def as_sequences(self, index: int) -> Sequences:
        """Unit as the only sequence of its number, for readers of rows with several."""
        return [self(index)]

    def _tokenise(self, index: int) -> PairExample | None:
        row = self.row_of(index)
        try:
            return self._unit(index, row)
        except RowError as error:
            if self._drop and self.rows.leaves_out(row, error):
                return None
            raise

    @property
    def _drop(self) -> bool:
        return drops_bad_images(self.section, self.dataset)

    def _unit(self, index: int, row: int) -> PairExample | None:
        with self.rows.named(row) as values:
            if self.kind == "steps":
                refuse_pictures(values, self.dataset, self.renderer)
            sequences = self._sequences(index)
            fitted = self._fit(sequences) if sequences else None
            self._count(index, sequences, fitted)
            if fitted is None or self._cut_equal(index, sequences, fitted):
                return None
            unit = self._with_images(_arrays(index, fitted, self._shared(fitted)), row, fitted)
            if unit is None:
                return None
            better = margin(values) if self.margins else 0.0
        if self.margins:
            unit["margins"] = np.where(unit["roles"] == CHOSEN, better, 0.0).astype(np.float32)
        return unit

    def _count(
        self, index: int, sequences: Sequence[LabelledSequence], fitted: Sequence[LabelledSequence] | None
    ) -> None:
        """Note what a unit loses by `overlong`."""
        before = sum(len(one.tokens) for one in sequences)
        after = None if fitted is None else sum(len(one.tokens) for one in fitted)
        if sequences and after != before:
            self.cuts[index] = cut_of([before], [after])

    def _with_images(self, unit: PairExample, row: int, fitted: Sequence[LabelledSequence]) -> PairExample | None:
        """Unit with the pictures of its prompt, which all its sequences take from one encoding."""
        grids = np.asarray(fitted[0].grids, np.int32).reshape(-1, 2)
        images = [np.zeros(len(one.tokens), np.int32) if one.images is None else one.images for one in fitted]
        if not any(one.any() for one in images):
            return unit
        shared, tokenizer = self._shared(fitted), self.renderer.tokenizer
        pieces = [(one, slice(shared, None)) for one in images]
        beside = sharing_arrays(tokenizer.images, [(images[0], slice(0, shared)), *pieces] if shared else pieces, grids)
        files = picture_digests(self.pictures.pictures(self.rows[row]))
        kept = {"source": keys_of(beside["grids"], 0, row), "files": files[: len(beside["grids"])]}
        return with_images(unit, beside | kept, self.section, tokenizer)

    @property
    def pictures(self) -> PictureSource:
        return PictureSource(self.rows, lambda row: pair_pictures(row, self.dataset, self.renderer), self._drop)

    @property
    def identity(self) -> dict[str, str]:
        """Digest of all that the rows hold, and for a model of pictures of those that they show, by part."""
        identity = {"dataset": fingerprint(self.dataset, self.rows)}
        if self.renderer.tokenizer.has_images:
            key = ("pictures of pairs", repr(self.dataset), self._drop)
            identity["pictures"] = self.rows.known(key, lambda: self.pictures.fingerprint)
        return identity

    @property
    def most_patches(self) -> int:
        """Most image patches beside a row."""
        return most_patches(self.section, self.renderer.tokenizer)

    def _sequences(self, index: int) -> list[LabelledSequence]:
        row, side = divmod(index, self._per_row)
        if self.kind == "steps":
            masked, roles = steps(self.rows[row], self.dataset, self.renderer)
            return [LabelledSequence.of(masked, np.asarray(roles))]
        if self.kind == "pairs":
            answers = pair_answers(self.rows[row], self.dataset, self.renderer) or []
        else:
            answers = self._single(row, side)
        tokenizer = self.renderer.tokenizer
        special = tokenizer.image_ids if tokenizer.has_images else []
        return [
            LabelledSequence.of(a.masked, a.role, whole=self.weigh_prompts and a.role == CHOSEN, special=special)
            for a in answers
        ]

    def _single(self, row: int, side: int) -> list[TokenizedAnswer]:
        answer = self._labelled_answer(row, side)
        if answer is None or self.kind == "answers":
            return [] if answer is None else [answer]
        other = self._other(answer, row, side)
        if other is None:
            raise ConfigError("the KL of KTO needs answers to other prompts; give at least two rows with other prompts")
        return [answer, mismatched(answer, other)]

    def _other(self, answer: TokenizedAnswer, row: int, side: int) -> TokenizedAnswer | None:
        """Answer of the next row with another prompt that fits into a row beside `answer`, which is the same in every
        epoch: the length of a neighbour drops no row. Of an answer beside which none fits, the next of another prompt.
        None: there is no other prompt."""
        nearest = None
        # Places for the other answer, beside the answer and the prompt that both share or repeat.
        alone = LabelledSequence.of(answer.masked, answer.role)
        prompt = len(answer.prompt[0])
        room = self.section.row_tokens + self._shared([alone, alone]) - len(alone.tokens) - prompt
        for step in range(1, len(self.rows)):
            number = (row + step) % len(self.rows)
            if nearest is not None and self._answer_lengths.get((number, side), room) > room:
                continue
            candidate = self._other_answer(number, side)
            if candidate is None or candidate.prompt == answer.prompt:
                continue
            nearest = candidate if nearest is None else nearest
            if len(candidate.masked.tokens) - len(candidate.prompt[0]) <= room:
                return candidate
            if room < 1:
                return nearest
        return nearest

    def _labelled_answer(self, row: int, side: int) -> TokenizedAnswer | None:
        with self.rows.named(row) as values:
            answers = labelled_answers(values, self.dataset, self.renderer)
        return answers[side] if answers else None

    def _other_answer(self, row: int, side: int) -> TokenizedAnswer | None:
        """Labelled answer of a row that may be left out; its length is kept, for later searches."""
        try:
            answer = self._labelled_answer(row, side)
            if answer is not None:
                self._answer_lengths[row, side] = len(answer.masked.tokens) - len(answer.prompt[0])
            return answer
        except RowError as error:
            if self._drop and self.rows.leaves_out(row, error):
                return None
            raise

    def _fit(self, sequences: Sequence[LabelledSequence]) -> list[LabelledSequence] | None:
        """Sequences truncated to a row; None: the unit is dropped."""
        lengths, shared = [len(one.tokens) for one in sequences], self._shared(sequences)
        limit = self.section.row_tokens + shared
        if sum(lengths) <= limit:
            return list(sequences)
        if self.section.overlong == "error":
            less = f" - {shared} (what both begin with)" if shared else ""
            raise ConfigError(
                f"it has {' + '.join(map(str, lengths))}{less} tokens, which must share "
                f"row_tokens={self.section.row_tokens}; raise row_tokens, or set overlong to truncate or drop"
            )
        if self.section.overlong == "drop":
            return None
        half = limit // len(sequences)
        longest = max(half, limit - min(lengths)) if len(sequences) == 2 and min(lengths) < half else half
        cut = [one.part(slice(longest)) for one in sequences]
        whole = all(
            of.images is None or image_start(of.images, len(one.tokens)) == len(one.tokens)
            for of, one in zip(sequences, cut, strict=True)
        )
        return cut if whole and all(one.weight.any() for one in cut) else None

    def _cut_equal(self, index: int, sequences: Sequence[LabelledSequence], fitted: Sequence[LabelledSequence]) -> bool:
        """Tell whether truncation made chosen and rejected equal: both labels would be of the same tokens."""
        mine, (row, side) = fitted[0].tokens, divmod(index, self._per_row)
        if self.kind == "pairs":
            return np.array_equal(mine, fitted[1].tokens)
        if self._per_row == 1 or len(mine) == len(sequences[0].tokens):
            return False
        other = self._labelled_answer(row, 1 - side)
        return other is not None and np.array_equal(mine, other.masked.tokens[: len(mine)])

    def _shared(self, sequences: Sequence[LabelledSequence]) -> int:
        """Number of prompt tokens stored once per row: all but the last, which each answer keeps.

        The hidden state that predicts an answer's first token is thus computed in the answer's own segment.
        """
        if not self.share_prompts:
            return 0
        prompts = [one.tokens[: max(int(np.argmax(one.weight > 0)) - 1, 0)] for one in sequences]
        shared = common_prefix(*prompts)
        return shared if sequences[0].images is None else image_start(sequences[0].images, shared)


class LabelledSequence(NamedTuple):
    """Sequence with the loss weight and the role of each token, and its pictures as in `Masked`."""

    tokens: Int[np.ndarray, " T"]
    weight: Float[np.ndarray, " T"]
    roles: Int[np.ndarray, " T"]
    images: Int[np.ndarray, " T"] | None = None
    grids: tuple[Grid, ...] = ()

    @classmethod
    def of(
        cls, masked: Masked, role: int | np.ndarray, *, whole: bool = False, special: Sequence[int] = ()
    ) -> LabelledSequence:
        """Label a sequence. `whole`: loss weight on the prompt too, except on `special` tokens of images."""
        mask = np.asarray(masked.mask, bool)
        tokens = np.asarray(masked.tokens, np.int32)
        weight = (np.arange(len(mask)) > 0) & ~np.isin(tokens, special) if whole else mask
        roles = np.where(mask, role, 0).astype(np.int32)
        images = None if masked.images is None else np.asarray(masked.images, np.int32)
        return cls(tokens, weight.astype(np.float32), roles, images, masked.grids)

    def part(self, part: slice) -> LabelledSequence:
        images = None if self.images is None else self.images[part]
        return LabelledSequence(self.tokens[part], self.weight[part], self.roles[part], images, self.grids)


def _arrays(index: int, sequences: Sequence[LabelledSequence], shared: int) -> PairExample:
    """Concatenate a unit's sequences. `part`: number of a token's sequence in the unit; `parent`: number of its parent
    sequence."""
    pieces = [one.part(slice(shared, None)) for one in sequences]
    if shared:
        pieces = [sequences[0].part(slice(shared)), *pieces]
    lengths, starts = [len(one.tokens) for one in pieces], [0] + [shared] * (len(pieces) - 1)
    parents = [0] + [1 if shared else 0] * (len(pieces) - 1)
    return {
        "tokens": np.concatenate([one.tokens for one in pieces]),
        "loss_weight": np.concatenate([one.weight for one in pieces]),
        "roles": np.concatenate([one.roles for one in pieces]),
        "positions": np.concatenate(
            [np.arange(s, s + n, dtype=np.int32) for s, n in zip(starts, lengths, strict=True)]
        ),
        "part": np.repeat(np.arange(1, len(pieces) + 1, dtype=np.int32), lengths),
        "parent": np.repeat(np.asarray(parents, np.int32), lengths),
        "unit": np.full(sum(lengths), index, np.int32),
    }


class NumberedRows(NamedTuple):
    """Batch with the unit number of each token."""

    batch: Batch
    units: Int[np.ndarray, "B T"]


class ComparisonBatches(Stream):
    """Endless host batches of `batch_rows` rows; every epoch holds each unit once, in a new order."""

    def __init__(self, units: PairExamples, *, seed: int) -> None:
        section, dataset, self._units = units.section, units.dataset, units
        window = window_of(section, [dataset])
        identity = {
            **units.identity,
            "tokens": token_fingerprint(units.rows, replace(units, ref_logps=None).as_sequences),
            **rendering_identity(units.renderer),
            "seed": seed,
            "shuffle": dataset.shuffle,
            "batch_rows": section.batch_rows,
            "row_tokens": section.row_tokens,
            "packing": section.packing,
            "overlong": section.overlong,
            "units": units.kind,
            "share_prompts": units.share_prompts,
            "window": str(window),
        }
        numbers = order(len(units), shuffle=dataset.shuffle, seed=seed)
        super().__init__(_packed(units, numbers.map(units.as_sequences), window), identity, [units.rows])

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return self.numbered().batch

    def numbered(self) -> NumberedRows:
        """Next batch with the unit numbers of its tokens."""
        return _to_batch(next(self._iterator), self._units)


def all_rows(units: PairExamples) -> Iterator[NumberedRows]:
    """Iterate once over the units in fixed order; the last batch is filled with empty rows."""
    import grain

    section = units.section
    window = Window.of(packing=section.packing, ordered=False, batch_rows=section.batch_rows)
    for arrays in _packed(units, grain.MapDataset.range(len(units)).map(units.as_sequences), window):
        yield _to_batch(arrays, units)


def _packed(units: PairExamples, examples: Any, window: Window) -> PackedBatches:
    section = units.section
    lengths = dict.fromkeys(units.names, section.row_tokens)
    return PackedBatches(
        examples,
        epoch=len(units),
        window=window,
        batch_rows=section.batch_rows,
        lengths=lengths,
        row_patches=units.most_patches,
        images=ImageRows.of(section, units.renderer.tokenizer, {0: units.pictures}),
    )


def _to_batch(rows: dict[str, np.ndarray], units: PairExamples) -> NumberedRows:
    """Convert packed units, one segment each, to a batch with one segment per sequence."""
    before = (3 if units.share_prompts else 2) * (rows["tokens_segments"] - 1)
    segments, parents = (np.where(rows[n] > 0, before + rows[n], 0).astype(np.int32) for n in ("part", "parent"))
    batch = changed(
        to_batch({**rows, "tokens_positions": rows["positions"], "tokens_segments": segments}),
        parents=parents if units.share_prompts else None,
        roles=rows["roles"],
        margins=rows.get("margins"),
        ref_logps=rows.get("ref_logps"),
    )
    return NumberedRows(batch, rows["unit"])
