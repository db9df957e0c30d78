"""Assembly of training rows: trajectories with advantages, or pairs, packed into a `Batch`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from posttrain.batch import Batch
from posttrain.data.image_rows import ImageRows, sampled_arrays, sharing_arrays, source_of
from posttrain.data.packing import Arrays, RowSpan, common_prefix, image_start, pack
from posttrain.rollout.trajectory import Example, Group, Trajectory

Shares = Callable[[Example], Float[np.ndarray, " N"]]
"""Weight of each teacher for the samples of an example."""
TurnValues = Sequence[Sequence[Sequence[Float[np.ndarray, " T"]]]]
"""Numbers for each token of each row of each sample [P][G][rows]."""
Pair = tuple[Trajectory, Trajectory]
"""Chosen and rejected sample."""

NOT_RECORDED = {"experts": -1}
"""Padding of recorded experts."""
RENAMED = {"tokens_positions": "positions", "tokens_segments": "segments"}


def assemble(
    groups_P: Sequence[Group],
    advantages_PG: Float[np.ndarray, "P G"],
    valid_PG: Bool[np.ndarray, "P G"],
    *,
    like: Trajectory,
    row_tokens: int,
    num_rows: int,
    shares: Shares | None = None,
    version: int | None = None,
    turns_PG: TurnValues | None = None,
    chained: bool = False,
) -> Batch:
    """Pack samples with their advantages into rows [num_rows, row_tokens]; samples that are not valid are dropped.

    `num_rows` is fixed for a run, so that the step compiles once; empty micro-batches are not computed. With recorded
    experts there are fewer rows. `like`: any sample of the step, which tells what is recorded. `shares` become
    `teacher_weights`. `version` of the present weights: adds `staleness`.
    `turns_PG`: advantages by token in place of one for each sample. `chained`: with `samples` and `times`, for returns.
    """
    sequences: list[Arrays] = []
    for p, g in np.argwhere(valid_PG).tolist():
        sample, alike = groups_P[p][g], float(advantages_PG[p, g])
        if sample.num_sampled:
            values: Sequence[Any] = [alike] * len(sample.rows) if turns_PG is None else turns_PG[p][g]
            policies = [_policy(row, of_row, version) for row, of_row in zip(sample.rows, values, strict=True)]
            weights = _of_sample(sample, p * len(groups_P[p]) + g + 1, chained=chained)
            parts = zip(sample.rows, policies, weights, strict=True)
            sequences += [_sample(row, shares) | _images(row) | policy | weight for row, policy, weight in parts]
    empty = _sample(like, shares) | _policy(like, 0.0, version) | _of_sample(like, 0, chained=chained)[0]
    rows, _ = _rows(sequences, empty, row_tokens, num_rows, [like, *(t for group in groups_P for t in group)])
    return _to_batch(rows)


def _of_sample(sample: Trajectory, number: int, *, chained: bool) -> list[Arrays]:
    """Arrays that say what the rows of a sample are of it."""
    counts = [sum(row.sampled) for row in sample.rows]
    made: list[Arrays] = [
        {"sample_shares": np.full(len(row.tokens), count / max(sum(counts), 1), np.float32)}
        for row, count in zip(sample.rows, counts, strict=True)
    ]
    for arrays, times in zip(made, sample.times() if chained else (), strict=False):
        arrays |= {"samples": np.where(times < 0, 0, number).astype(np.int32), "times": np.maximum(times, 0)}
    return made


def sample_rows(
    samples: Sequence[Trajectory], *, row_tokens: int, num_rows: int, shares: Shares | None = None
) -> tuple[Batch, list[RowSpan]]:
    """Pack all samples into rows [num_rows, row_tokens], without advantages. Also where each sample lies."""
    sequences = [_sample(trajectory, shares) | _images(trajectory) for trajectory in samples]
    rows, where = _rows(sequences, _sample(samples[0], shares), row_tokens, num_rows, samples)
    return _to_batch(rows), where


def rows_of(groups_P: Sequence[Group]) -> tuple[list[Trajectory], Int[np.ndarray, " N"]]:
    """Rows of all samples, and the number of each row's sample."""
    samples = [sample for group in groups_P for sample in group]
    rows = [row for sample in samples for row in sample.rows]
    return rows, np.repeat(np.arange(len(samples)), [len(sample.rows) for sample in samples])


def sampled_rows(groups_P: Sequence[Group]) -> tuple[list[Trajectory], Int[np.ndarray, " N"]]:
    """`rows_of` that have sampled tokens; others may be longer than any row of a batch."""
    rows, owners = rows_of(groups_P)
    kept = [number for number, row in enumerate(rows) if any(row.sampled)]
    return [rows[number] for number in kept], owners[kept]


def assemble_pairs(
    pairs: Sequence[Pair], *, row_tokens: int, num_rows: int, groups_P: Sequence[Group], share_prompts: bool
) -> Batch:
    """Pack both samples of each pair side by side into rows [num_rows, row_tokens]; `roles` tell the chosen one.

    `groups_P`: all samples of the step, which tell what is recorded even without any pair. `share_prompts`: the common
    prefix of a pair is in its row once, as the parent sequence of both.
    """
    share: dict[str, bool] = {"share_prompts": share_prompts}
    sequences = [_pair(pair, **share) | _pair_images(pair, **share) for pair in pairs]
    first = groups_P[0][0]
    like = _pair((first, first), share_prompts=False)
    rows, _ = _rows(sequences, like, row_tokens, num_rows, [t for group in groups_P for t in group])
    # Each pair is one segment of the packer; here each of its sequences becomes one.
    before = (3 if share_prompts else 2) * (rows.pop("tokens_segments") - 1)
    part, parent = rows.pop("part"), rows.pop("parent")
    segments = np.where(part > 0, before + part, 0).astype(np.int32)
    parents = np.where(parent > 0, before + parent, 0).astype(np.int32) if share_prompts else None
    del rows["tokens_positions"]
    named: dict[str, Any] = rows
    return Batch(segments=segments, parents=parents, **named)


def _sample(trajectory: Trajectory, shares: Shares | None) -> Arrays:
    """Per-token arrays of a sample."""
    sampled = np.asarray(trajectory.sampled, bool)
    arrays: Arrays = {
        "tokens": np.asarray(trajectory.tokens, np.int32),
        "loss_weight": sampled.astype(np.float32),
        "sampler_logps": np.where(sampled, np.asarray(trajectory.logps, np.float32), np.float32(0)),
    }
    if trajectory.experts is not None:
        arrays["experts"] = np.asarray(trajectory.experts, np.int16)
    if shares is not None:
        weights = np.asarray(shares(trajectory.example), np.float32)
        arrays["teacher_weights"] = np.broadcast_to(weights, (len(sampled), len(weights)))
    return arrays


def _policy(trajectory: Trajectory, advantage: float | Float[np.ndarray, " T"], version: int | None) -> Arrays:
    """Advantage, behaviour log-probability and staleness of each sampled token."""
    sampled = np.asarray(trajectory.sampled, bool)
    drawn = np.asarray(trajectory.logps, np.float32) - np.asarray(trajectory.kept_logps, np.float32)
    arrays: Arrays = {
        "advantages": np.where(sampled, np.asarray(advantage, np.float32), np.float32(0)),
        "behaviour_logps": np.where(sampled, drawn, np.float32(0)),
    }
    if version is not None:
        arrays["staleness"] = np.where(sampled, version - np.asarray(trajectory.versions), 0).astype(np.int32)
    return arrays


def _pair(pair: Pair, *, share_prompts: bool) -> Arrays:
    """Per-token arrays of a pair. `part`: sequence number in the pair; `parent`: that of its parent sequence."""
    shared = _shared_tokens(pair) if share_prompts else 0
    pieces = [({"roles": 0, "part": 1, "parent": 0}, pair[0], slice(0, shared))] if shared else []
    for role, trajectory in zip((1, -1), pair, strict=True):
        numbers = {"roles": role, "part": len(pieces) + 1, "parent": 1 if shared else 0}
        pieces.append((numbers, trajectory, slice(shared, len(trajectory.tokens))))
    parts = []
    for numbers, trajectory, span in pieces:
        part = {name: array[span] for name, array in _sample(trajectory, None).items()}
        length, sampled = len(part["tokens"]), part["loss_weight"] > 0
        part["positions"] = np.arange(span.start, span.start + length, dtype=np.int32)
        part |= {name: np.full(length, number, np.int32) for name, number in numbers.items()}
        part["roles"] = np.where(sampled, part["roles"], 0).astype(np.int32)
        parts.append(part)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _pair_images(pair: Pair, *, share_prompts: bool) -> Arrays:
    """Arrays of the pictures of a pair's prompt, which are encoded once; none of text."""
    images = pair[0].images
    if images is None:
        return {}
    shared, numbers = _shared_tokens(pair) if share_prompts else 0, [images.padded(len(one.tokens)) for one in pair]
    pieces = [(numbers[0], slice(0, shared))] if shared else []
    pieces += [(one, slice(shared, len(one))) for one in numbers]
    return sharing_arrays(images.policy, pieces, np.asarray(images.grids, np.int32)) | source_of(images)


def _images(trajectory: Trajectory) -> Arrays:
    """Arrays of a sample's pictures; none of text."""
    return {} if trajectory.images is None else sampled_arrays(trajectory.images, len(trajectory.tokens))


def _shared_tokens(pair: Pair) -> int:
    """Length of the common prompt prefix, without the last prompt token, which precedes each answer."""
    first = [max(int(np.argmax(trajectory.sampled)) - 1, 0) for trajectory in pair]
    shared = common_prefix(*(np.asarray(t.tokens[:length], np.int64) for t, length in zip(pair, first, strict=True)))
    images = pair[0].images
    return shared if images is None else image_start(images.padded(len(pair[0].tokens)), shared)


def _rows(
    sequences: Sequence[Arrays], like: Arrays, row_tokens: int, num_rows: int, samples: Sequence[Trajectory]
) -> tuple[Arrays, list[RowSpan]]:
    """Pack sequences into `num_rows` rows. Recorded experts take hundreds of bytes a token: then into as few rows as
    hold them, rounded up to `num_rows` divided by 1, 2, 4 or 8, each of which is another program of the step."""
    recorded = [trajectory.experts is not None for trajectory in samples]
    assert all(recorded) or not any(recorded), "either every trajectory has recorded experts, or none"
    assert len(sequences) <= num_rows, "num_rows must hold one sequence per row"
    images = ImageRows.of_samples([row.images for sample in samples for row in sample.rows], row_tokens)
    beside: dict[str, Any] = {} if images is None else {"images": images, "row_patches": images.row_patches}
    rows, where = pack(sequences, row_tokens, num_rows=num_rows, like=like, padding=NOT_RECORDED, **beside)
    if any(recorded):
        least = 1 + max((span.row for span in where), default=0)
        sizes = [-(-num_rows // part) for part in (8, 4, 2)]
        used = next((size for size in sizes if size >= least), num_rows)
        rows = {name: array[:used] for name, array in rows.items()}
    return rows, where


def _to_batch(rows: Arrays) -> Batch:
    named: dict[str, Any] = {RENAMED.get(name, name): array for name, array in rows.items()}
    return Batch(**named)
