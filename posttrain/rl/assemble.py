"""Packing of sampled trajectories into the rows of a training `Batch`: groups with advantages, or preference pairs."""

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
"""Weight of each teacher for the samples of an example."""
Pair = tuple[Trajectory, Trajectory]
"""Chosen and rejected trajectory."""


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
    """Pack trajectories into host arrays [num_rows, row_tokens]. Samples without a valid reward are dropped.

    `num_rows` is fixed for a run so that the step compiles once; unused rows stay empty, and empty micro-batches are
    skipped. Arrays of recorded experts may have fewer rows. `shares` become `teacher_weights`. `version`: current
    version of the weights, from which the batch gets `staleness` per token.
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
        whole = TrajectoryPiece(trajectory, 0, len(trajectory.tokens), {"advantages": advantage})
        _put(batch, place.row, place.start, place.number, whole)
        _put_origin(batch, place.row, place.start, trajectory, version)
        if shares is not None:
            span = slice(place.start, place.start + len(trajectory.tokens))
            batch["teacher_weights"][place.row, span] = shares(trajectory.example)
    return Batch(**batch)


@dataclass(frozen=True)
class TrajectoryPiece:
    """Tokens `first .. stop` of a trajectory. `sampled_values`: constants for its sampled tokens, by array name."""

    trajectory: Trajectory
    first: int
    stop: int
    sampled_values: Mapping[str, float]

    def __len__(self) -> int:
        return self.stop - self.first


def assemble_pairs(
    pairs: Sequence[Pair], *, row_tokens: int, num_rows: int, groups_P: Sequence[Group], share_prompts: bool
) -> Batch:
    """Pack pairs into host arrays [num_rows, row_tokens], both sequences of a pair in one row; `roles` marks the chosen
    one.

    `groups_P`: all samples of the step, which determine the recorded arrays even without any pair. `share_prompts`:
    store the common prefix of a pair once, as the parent segment of both.
    """
    assert len(pairs) <= num_rows, "num_rows must hold one pair per row"
    parts = [_pieces(pair, _shared_tokens(pair) if share_prompts else 0) for pair in pairs]
    where = places([sum(len(piece) for piece in pieces) for pieces in parts], row_tokens)
    recorded = [trajectory.experts for group in groups_P for trajectory in group]
    batch = _empty(num_rows, row_tokens, recorded, [place.row for place in where])
    for name in ("roles", "parents") if share_prompts else ("roles",):
        batch[name] = np.zeros(batch["tokens"].shape, np.int32)
    segments = np.zeros(num_rows, np.int32)
    # Pairs of a row are in order.
    for pieces, (row, _, start) in zip(parts, where, strict=True):
        prompt = int(segments[row]) + 1
        for piece in pieces:
            segments[row] += 1
            _put(batch, row, start, int(segments[row]), piece)
            if piece.first:
                batch["parents"][row, start : start + len(piece)] = prompt
            start += len(piece)
    return Batch(**batch)


def _pieces(pair: Pair, shared: int) -> list[TrajectoryPiece]:
    """Common prefix (if any) and the remainders of both sequences."""
    answers = [
        TrajectoryPiece(trajectory, shared, len(trajectory.tokens), {"roles": role})
        for trajectory, role in zip(pair, (1.0, -1.0), strict=True)
    ]
    return [TrajectoryPiece(pair[0], 0, shared, {}), *answers] if shared else answers


def _shared_tokens(pair: Pair) -> int:
    """Length of the shared prompt without its last token, which each completion keeps, as for offline pairs."""
    first = [max(int(np.argmax(trajectory.sampled)) - 1, 0) for trajectory in pair]
    return common_prefix(*(np.asarray(t.tokens[:length], np.int64) for t, length in zip(pair, first, strict=True)))


def _empty(num_rows: int, length: int, recorded: Sequence[np.ndarray | None], used: Sequence[int]) -> dict[str, Any]:
    """Arrays of empty rows. Recorded experts take hundreds of bytes per token: their arrays have as many rows as are
    `used`, rounded up to `num_rows` divided by 1, 2, 4 or 8, each a separate compilation of the step."""
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
    piece: TrajectoryPiece,
) -> None:
    trajectory, part = piece.trajectory, slice(piece.first, piece.stop)
    span = slice(start, start + piece.stop - piece.first)
    sampled = np.asarray(trajectory.sampled)[part]
    batch["tokens"][row, span] = trajectory.tokens[part]
    batch["positions"][row, span] = np.arange(piece.first, piece.stop)
    batch["segments"][row, span] = segment
    batch["loss_weight"][row, span] = sampled
    batch["sampler_logps"][row, span] = np.where(sampled, trajectory.logps[part], 0.0)
    for name, value in piece.sampled_values.items():
        batch[name][row, span] = np.where(sampled, value, 0)
    if trajectory.experts is not None:
        batch["experts"][row, span] = trajectory.experts[part]


def _put_origin(
    batch: Mapping[str, np.ndarray], row: int, start: int, trajectory: Trajectory, version: int | None
) -> None:
    """Write the behaviour log-probability of each sampled token and its staleness in weight updates."""
    span, sampled = slice(start, start + len(trajectory.tokens)), np.asarray(trajectory.sampled)
    drawn = np.asarray(trajectory.logps, np.float32) - np.asarray(trajectory.kept_logps, np.float32)
    batch["behaviour_logps"][row, span] = np.where(sampled, drawn, 0.0)
    if version is not None:
        batch["staleness"][row, span] = np.where(sampled, version - np.asarray(trajectory.versions), 0)
