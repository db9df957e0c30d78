"""Store of the trajectories of online steps: a Parquet file for each recorded step, with a row for each token sequence
of a sample."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from posttrain.data.prompt_images import PromptImages
from posttrain.errors import ConfigError, RunError
from posttrain.reward.types import RewardError, Rewards
from posttrain.rl.assemble import rows_of
from posttrain.rollout.records import FORMAT, META, PICTURES, REWARD, file_of, recorded_steps
from posttrain.rollout.trajectory import Example, Group, Trajectory, Turn
from posttrain.runtime.files import write_whole
from posttrain.tree import Mean

TOKENS = {
    "tokens": np.int32,
    "sampled": np.bool_,
    "logps": np.float32,
    "kept_logps": np.float32,
    "truncation_logps": np.float32,
    "versions": np.int32,
}
"""Columns with a value for each token: 21 bytes before compression."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Scored groups of a step, as they were learned from."""

    before: int
    """Number of optimiser steps before; `step` after it."""
    step: int
    version: int
    """Version of the weights when the step began."""
    groups_P: Sequence[Group]
    rewards: Rewards
    """Without `extras`, which are in the table of samples."""
    advantages_PG: Float[np.ndarray, "P G"] | None
    roles_PG: Int[np.ndarray, "P G"] | None

    @property
    def useful_P(self) -> Bool[np.ndarray, " P"]:
        """Groups that were learned from."""
        assert self.advantages_PG is not None, "preference steps have no advantages"
        return ~np.isnan(self.advantages_PG).all(axis=1)


class TrajectoryStore:
    """Writer of records below `folder` in a thread of its own, of which the newest `keep` steps are kept.

    A record appears under its name once it is whole. RunError of a failed write is raised by the next call; a context
    manager. `start`: the step from which a run goes on; records of later ones, which are made again, are removed.
    """

    def __init__(self, folder: Path, *, keep: int, start: int):
        self._folder, self._keep = folder, keep
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trajectories")
        self._pending: Future[None] | None = None
        for step in recorded_steps(folder):
            if step > start:
                file_of(folder, step).unlink()

    def write(self, recorded: Recorded) -> None:
        """Start writing a record, after the one before is written."""
        self.wait()
        self._pending = self._thread.submit(self._write, recorded)

    def wait(self) -> None:
        """Wait until everything is written."""
        pending, self._pending = self._pending, None
        if pending is not None and (error := pending.exception()) is not None:
            raise RunError(
                f"{self._folder}: trajectories cannot be written ({type(error).__name__}: {error}); make room, or set "
                "record to null"
            ) from error

    def __enter__(self) -> TrajectoryStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown()
        if error is None:
            self.wait()

    def _write(self, recorded: Recorded) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        _write_pictures(recorded.groups_P, self._folder / PICTURES)
        file = file_of(self._folder, recorded.step)
        partial = file.with_suffix(".tmp")
        write_record(recorded, partial)
        partial.rename(file)
        for step in recorded_steps(self._folder)[: -self._keep]:
            file_of(self._folder, step).unlink()


def _write_pictures(groups_P: Sequence[Group], folder: Path) -> None:
    """Write the pictures of samples as the model sees them, once each, by the digests of their pixels."""
    rows, _ = rows_of(groups_P)
    for image in (image for row in rows if row.images is not None for image in row.images.images):
        file = folder / f"{image.digest.hex()}.png"
        if not file.exists():
            folder.mkdir(exist_ok=True)
            write_whole(file, image.png())


def step_before(folder: Path, step: int) -> int:
    """Step whose weights a recorded step begins with; 0: the start."""
    import pyarrow.parquet

    metadata = pyarrow.parquet.read_metadata(file_of(folder, step)).metadata or {}
    return int(json.loads(metadata[META.encode()])["before"])


def write_record(recorded: Recorded, file: Path) -> None:
    """Write a record: numbers of group, sample, dataset row and row of the sample, rewards, advantage, and lists per
    token and turn."""
    import pyarrow.parquet

    columns, meta = _columns(recorded)
    table = pyarrow.table(columns)
    # Nothing that repeats the schema, and no dictionaries of numbers that hardly repeat: small steps stay small.
    small: dict[str, Any] = {"store_schema": False, "write_statistics": False, "use_dictionary": ["stop", "versions"]}
    with pyarrow.parquet.ParquetWriter(file, table.schema, compression="zstd", **small) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({META: json.dumps(meta)})


def _columns(recorded: Recorded) -> tuple[dict[str, Any], dict[str, Any]]:
    """Columns with a value for each row of a sample, and the description of the step."""
    import pyarrow

    rows, owners = rows_of(recorded.groups_P)
    columns: dict[str, Any] = {
        "group": np.asarray([row.group for row in rows], np.int64),
        "sample": np.asarray([row.sample for row in rows], np.int32),
        "row": np.asarray([row.example.index for row in rows], np.int64),
        "stop": [row.stop for row in rows],
        "reward": recorded.rewards.total_PG.ravel()[owners],
        **{f"{REWARD}{name}": part.ravel()[owners] for name, part in recorded.rewards.parts_PG.items()},
    }
    if recorded.advantages_PG is not None:
        columns["advantage"] = recorded.advantages_PG.ravel()[owners]
    if recorded.roles_PG is not None:
        columns["role"] = recorded.roles_PG.ravel().astype(np.int8)[owners]
    ends = np.cumsum([0, *(len(row.tokens) for row in rows)]).astype(np.int32)
    for name, dtype in TOKENS.items():
        flat = np.concatenate([np.asarray(getattr(row, name), dtype) for row in rows])
        columns[name] = pyarrow.ListArray.from_arrays(ends, pyarrow.array(flat))
    if any(row.turns for row in rows):
        first = np.flatnonzero(np.diff(owners, prepend=-1))
        columns["part"] = (np.arange(len(rows)) - first[owners]).astype(np.int32)
        columns["turns"] = [[turn._asdict() for turn in row.turns] for row in rows]
    if any(row.limit is not None for row in rows):
        columns["limit"] = [row.limit for row in rows]
    if any(row.images is not None for row in rows):
        columns["images"] = [None if row.images is None else _images_of(row.images) for row in rows]
    meta: dict[str, Any] = {
        "format": FORMAT,
        "before": recorded.before,
        "step": recorded.step,
        "version": recorded.version,
        "group_size": len(recorded.groups_P[0]),
        "metrics": {name: [float(m.total), float(m.weight)] for name, m in recorded.rewards.metrics.items()},
        "errors": [asdict(error) for error in recorded.rewards.errors],
    }
    if rows[0].experts is not None:
        columns["experts"] = [_bytes_of_experts(row) for row in rows]
        meta["experts"] = list(rows[0].experts.shape[1:])
    return columns, meta


def _images_of(images: PromptImages) -> str:
    """JSON of the runs of tokens of a row's pictures: start, stop and digest."""
    digests = [digest.hex() for digest in images.digests]
    return json.dumps([[start, stop, digests[number - 1]] for start, stop, number in images.runs])


def _bytes_of_experts(sample: Trajectory) -> bytes:
    assert sample.experts is not None, "either every trajectory has recorded experts, or none"
    return sample.experts.astype(np.int16).tobytes()


def read_record(folder: Path, step: int) -> Recorded:
    """Read the record of a step: tokens without texts and messages. Examples have their number and prompt tokens alone.

    ConfigError if there is none, or if another version wrote it.
    """
    import pyarrow.parquet

    file = file_of(folder, step)
    if not file.is_file():
        known = recorded_steps(folder)
        there = f"there are {len(known)}, from {known[0]} to {known[-1]}" if known else "there are none"
        raise ConfigError(f"{folder}: no trajectories of step {step}; {there}")
    table = pyarrow.parquet.read_table(file)
    meta = json.loads((pyarrow.parquet.read_metadata(file).metadata or {}).get(META.encode(), "{}"))
    if meta.get("format") != FORMAT:
        raise ConfigError(f"{file}: has format {meta.get('format')}, this version reads {FORMAT}")
    size = meta["group_size"]
    columns = {name: table.column(name).combine_chunks() for name in table.column_names}
    if "images" in columns:
        raise ConfigError(f"{file}: its samples have pictures, which only the run itself and view read")
    parts_of = columns["part"].to_numpy() if "part" in columns else np.zeros(len(table), np.int32)

    def by_group(name: str) -> np.ndarray:
        return np.asarray(columns[name].to_numpy(zero_copy_only=False))[parts_of == 0].reshape(-1, size)

    parts = {name.removeprefix(REWARD): by_group(name) for name in columns if name.startswith(REWARD)}
    rewards = Rewards(
        total_PG=by_group("reward"),
        parts_PG=parts,
        errors=[RewardError(**error) for error in meta["errors"]],
        metrics={name: Mean(total=total, weight=weight) for name, (total, weight) in meta["metrics"].items()},
        extras={},
    )
    rows = table.drop_columns([name for name in columns if name.startswith(REWARD)]).to_pylist()
    samples: list[Trajectory] = []
    for part, row in zip(parts_of, rows, strict=True):
        one = _trajectory(row, meta.get("experts"))
        if part == 0:
            samples.append(one)
        else:
            samples[-1] = replace(samples[-1], more=[*samples[-1].more, one])
    return Recorded(
        before=meta["before"],
        step=meta["step"],
        version=meta["version"],
        groups_P=[samples[start : start + size] for start in range(0, len(samples), size)],
        rewards=rewards,
        advantages_PG=by_group("advantage") if "advantage" in columns else None,
        roles_PG=by_group("role").astype(np.int32) if "role" in columns else None,
    )


def _trajectory(row: dict[str, Any], experts: Sequence[int] | None) -> Trajectory:
    tokens, sampled = row["tokens"], row["sampled"]
    prompt = tokens[: sampled.index(True)] if True in sampled else tokens
    example = Example(index=row["row"], row={}, messages=(), prompt_tokens=prompt, plain=True)
    return Trajectory(
        group=row["group"],
        example=example,
        sample=row["sample"],
        messages=(),
        text="",
        stop=row["stop"],
        limit=row.get("limit"),
        experts=None if experts is None else np.frombuffer(row["experts"], np.int16).reshape(-1, *experts),
        turns=[Turn(**turn) for turn in row.get("turns", ())],
        **{name: row[name] for name in TOKENS},
    )
