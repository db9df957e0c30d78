"""From groups and advantages, or from pairs, to a `Batch`: trajectories packed into rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from posttrain.batch import Batch
from posttrain.data.packing import common_prefix, places
from posttrain.rl.types import Example, Group, Trajectory

Shares = Callable[[Example], Float[np.ndarray, " N"]]
"""How much each teacher counts for the samples of an example."""
Pair = tuple[Trajectory, Trajectory]
"""The chosen and the rejected one."""


def assemble(
    groups_P: Sequence[Group],
    advantages_PG: Float[np.ndarray, "P G"],
    valid_PG: Bool[np.ndarray, "P G"],
    *,
    row_tokens: int,
    num_rows: int,
    shares: Shares | None = None,
    version: int | None = None,
) -> Batch:
    """Host rows [num_rows, row_tokens], of recorded experts fewer. Samples without a valid reward are left out.

    `num_rows` is fixed for a run, so that the step compiles once; rows that packing does not need stay empty, and
    empty micro-batches are not computed. `shares` become `teacher_weights`; `version` of the weights of now: the batch
    has the `staleness` of its tokens.
    """
    kept = [
        (trajectory, float(advantage))
        for group, advantages, valids in zip(groups_P, advantages_PG, valid_PG, strict=True)
        for trajectory, advantage, valid in zip(group, advantages, valids, strict=True)
        if valid
    ]
    assert len(kept) <= num_rows, "num_rows must hold one trajectory per row"
    where = places([len(trajectory.tokens) for trajectory, _ in kept], row_tokens)
    recorded = [trajectory.experts for group in groups_P for trajectory in group]
    batch = _empty(num_rows, row_tokens, recorded, [place.row for place in where])
    shape = batch["tokens"].shape
    batch |= {name: np.zeros(shape, np.float32) for name in ("advantages", "behaviour_logps")}
    if version is not None:
        batch["staleness"] = np.zeros(shape, np.int32)
    if shares is not None:
        batch["teacher_weights"] = np.zeros((*shape, len(shares(groups_P[0][0].example))), np.float32)
    for (trajectory, advantage), place in zip(kept, where, strict=True):
        whole = Piece(trajectory, 0, len(trajectory.tokens), {"advantages": advantage})
        _put(batch, place.row, place.start, place.number, whole)
        _put_origin(batch, place.row, place.start, trajectory, version)
        if shares is not None:
            span = slice(place.start, place.start + len(trajectory.tokens))
            batch["teacher_weights"][place.row, span] = shares(trajectory.example)
    return Batch(**batch)


@dataclass(frozen=True)
class Piece:
    """The tokens `first .. stop` of a trajectory. `judged`: by array, what stands on the sampled ones alone."""

    trajectory: Trajectory
    first: int
    stop: int
    judged: Mapping[str, float]

    def __len__(self) -> int:
        return self.stop - self.first


def assemble_pairs(
    pairs: Sequence[Pair], *, row_tokens: int, num_rows: int, groups_P: Sequence[Group], share_prompts: bool
) -> Batch:
    """Host rows [num_rows, row_tokens] with both sequences of a pair side by side; `roles` say which is the chosen.

    `groups_P`: all samples of the step, which say what is recorded even where no pair is left. `share_prompts`: what
    both begin with stands in the row once, as a sequence from which both go on.
    """
    assert len(pairs) <= num_rows, "num_rows must hold one pair per row"
    parts = [_pieces(pair, _shared_tokens(pair) if share_prompts else 0) for pair in pairs]
    where = places([sum(len(piece) for piece in pieces) for pieces in parts], row_tokens)
    recorded = [trajectory.experts for group in groups_P for trajectory in group]
    batch = _empty(num_rows, row_tokens, recorded, [place.row for place in where])
    for name in ("roles", "parents") if share_prompts else ("roles",):
        batch[name] = np.zeros(batch["tokens"].shape, np.int32)
    segments = np.zeros(num_rows, np.int32)
    # A row's pairs stand in their order.
    for pieces, (row, _, start) in zip(parts, where, strict=True):
        prompt = int(segments[row]) + 1
        for piece in pieces:
            segments[row] += 1
            _put(batch, row, start, int(segments[row]), piece)
            if piece.first:
                batch["parents"][row, start : start + len(piece)] = prompt
            start += len(piece)
    return Batch(**batch)


def _pieces(pair: Pair, shared: int) -> list[Piece]:
    """What both begin with, if that is anything, and the rest of each."""
    answers = [
        Piece(trajectory, shared, len(trajectory.tokens), {"roles": role})
        for trajectory, role in zip(pair, (1.0, -1.0), strict=True)
    ]
    return [Piece(pair[0], 0, shared, {}), *answers] if shared else answers


def _shared_tokens(pair: Pair) -> int:
    """Of the prompt all but its last token, which each answer has before it: as in rows of given pairs."""
    first = [max(int(np.argmax(trajectory.sampled)) - 1, 0) for trajectory in pair]
    return common_prefix(*(np.asarray(t.tokens[:length], np.int64) for t, length in zip(pair, first, strict=True)))


def _empty(num_rows: int, length: int, recorded: Sequence[np.ndarray | None], used: Sequence[int]) -> dict[str, Any]:
    """Rows without a token. Of recorded experts, which take hundreds of bytes for a token, as many as are `used`,
    rounded up to the next of `num_rows` divided by 1, 2, 4 or 8, each of which is another program of the step."""
    experts = [array for array in recorded if array is not None]
    assert len(experts) in (0, len(recorded)), "either every trajectory has recorded experts, or none"
    least = max(used, default=0) + 1
    sizes = [-(-num_rows // part) for part in (8, 4, 2)] if experts else []
    shape = (next((size for size in sizes if size >= least), num_rows), length)
    integers = {name: np.zeros(shape, np.int32) for name in ("tokens", "positions", "segments")}
    floats = {name: np.zeros(shape, np.float32) for name in ("loss_weight", "sampler_logps")}
    routing = {"experts": np.full((*shape, *experts[0].shape[1:]), -1, np.int16)} if experts else {}
    return {**integers, **floats, **routing}


def _put(
    batch: Mapping[str, np.ndarray],
    row: int,
    start: int,
    segment: int,
    piece: Piece,
) -> None:
    trajectory, part = piece.trajectory, slice(piece.first, piece.stop)
    span = slice(start, start + piece.stop - piece.first)
    sampled = np.asarray(trajectory.sampled)[part]
    batch["tokens"][row, span] = trajectory.tokens[part]
    batch["positions"][row, span] = np.arange(piece.first, piece.stop)
    batch["segments"][row, span] = segment
    batch["loss_weight"][row, span] = sampled
    batch["sampler_logps"][row, span] = np.where(sampled, trajectory.logps[part], 0.0)
    for name, value in piece.judged.items():
        batch[name][row, span] = np.where(sampled, value, 0)
    if trajectory.experts is not None:
        batch["experts"][row, span] = trajectory.experts[part]


def _put_origin(
    batch: Mapping[str, np.ndarray], row: int, start: int, trajectory: Trajectory, version: int | None
) -> None:
    """How probable each sampled token was where it was drawn, and how many updates of the weights ago that was."""
    span, sampled = slice(start, start + len(trajectory.tokens)), np.asarray(trajectory.sampled)
    drawn = np.asarray(trajectory.logps, np.float32) - np.asarray(trajectory.kept_logps, np.float32)
    batch["behaviour_logps"][row, span] = np.where(sampled, drawn, 0.0)
    if version is not None:
        batch["staleness"][row, span] = np.where(sampled, version - np.asarray(trajectory.versions), 0)
