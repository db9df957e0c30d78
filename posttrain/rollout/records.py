"""Records of trajectories, read by column without JAX: rollouts with their numbers, and the tokens of one of them."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.errors import ConfigError

FORMAT = 4
META = "posttrain"
"""Key of the description of the step in a file's metadata."""
PICTURES = "pictures"
"""Folder of the samples' pictures, beside the records."""
REWARD = "rewards."
"""Prefix of the columns of single reward functions."""


def file_of(folder: Path, step: int) -> Path:
    """File of the record of a step."""
    return folder / f"{step:08d}.parquet"


def recorded_steps(folder: Path) -> list[int]:
    """Steps with a record, in order."""
    return sorted(int(file.stem) for file in folder.glob("*.parquet") if file.stem.isdecimal())


@dataclass(kw_only=True)
class Rollout:
    """Sample of a recorded step; `None` stands for NaN."""

    group: int
    sample: int
    row: int
    stop: str
    reward: float | None
    advantage: float | None
    role: int | None
    rewards: dict[str, float | None]
    prompt_tokens: int
    sampled_tokens: int
    staleness: int | None
    """Updates of the weights between the oldest token and the step."""
    parts: int = 1
    """Number of token sequences."""


@dataclass(kw_only=True)
class Sequence:
    """Token sequence of a sample."""

    tokens: np.ndarray
    sampled: np.ndarray
    values: dict[str, np.ndarray] = field(default_factory=dict)
    """`logps`, `kept_logps`, `versions` of each token."""
    turns: list[dict[str, Any]] = field(default_factory=list)


def read_pictures(file: Path, group: int, sample: int) -> list[Path]:
    """Files of the pictures of a sample, in the order of its tokens, each once."""
    import pyarrow.compute as pc

    parquet, _ = _open(file)
    if "images" not in parquet.schema_arrow.names:
        return []
    table = parquet.read(columns=["group", "sample", "images"])
    table = table.filter((pc.field("group") == group) & (pc.field("sample") == sample))
    runs = [run for text in table.column("images").to_pylist() if text for run in json.loads(text)]
    return [file.parent / PICTURES / f"{digest}.png" for digest in dict.fromkeys(digest for _, _, digest in runs)]


def _one_of_each(images: str | None, length: int) -> np.ndarray:
    """Places of tokens as they are shown: of each picture's the first alone."""
    kept = np.ones(length, bool)
    seen = None
    for start, stop, digest in json.loads(images or "[]"):
        # The rows of a picture may be apart by a token.
        again = seen == (digest, start - 1)
        kept[start if again else start + 1 : stop] = False
        seen = digest, stop
    return kept


def read_rollouts(file: Path) -> list[Rollout]:
    """Rollouts of a record, without the columns of tokens. ConfigError for another version's record."""
    parquet, meta = _open(file)
    names = parquet.schema_arrow.names
    rewards = [name for name in names if name.startswith(REWARD)]
    optional = [name for name in ("advantage", "role", "part") if name in names]
    table = parquet.read(columns=["group", "sample", "row", "stop", "reward", *rewards, *optional, "versions"])
    column = {name: table.column(name).to_pylist() for name in table.column_names if name != "versions"}
    found: list[Rollout] = []
    for i, versions in enumerate(_lists(table, "versions")):
        own = versions >= 0
        oldest = int(versions[own].min()) if own.any() else None
        if column["part"][i] if "part" in column else 0:
            last, age = found[-1], None if oldest is None else meta["version"] - oldest
            last.sampled_tokens += int(own.sum())
            last.staleness = max((n for n in (last.staleness, age) if n is not None), default=None)
            last.parts += 1
            continue
        found.append(
            Rollout(
                group=column["group"][i],
                sample=column["sample"][i],
                row=column["row"][i],
                stop=column["stop"][i],
                reward=_number(column["reward"][i]),
                advantage=_number(column["advantage"][i]) if "advantage" in column else None,
                role=column["role"][i] if "role" in column else None,
                rewards={name.removeprefix(REWARD): _number(column[name][i]) for name in rewards},
                prompt_tokens=int(own.argmax()) if own.any() else len(own),
                sampled_tokens=int(own.sum()),
                staleness=None if oldest is None else meta["version"] - oldest,
            )
        )
    return found


def read_tokens(file: Path) -> dict[tuple[int, int], list[Sequence]]:
    """Token sequences of all samples of a record by group and sample, with one token for each picture; `versions` tell
    what was sampled."""
    parquet, _ = _open(file)
    images = ["images"] if "images" in parquet.schema_arrow.names else []
    table = parquet.read(columns=["group", "sample", "tokens", "versions", *images])
    found: dict[tuple[int, int], list[Sequence]] = {}
    places = zip(table.column("group").to_pylist(), table.column("sample").to_pylist(), strict=True)
    of_rows = table.column("images").to_pylist() if images else [None] * len(table)
    lists = zip(_lists(table, "tokens"), _lists(table, "versions"), of_rows, strict=True)
    for place, (tokens, versions, own) in zip(places, lists, strict=True):
        kept = _one_of_each(own, len(tokens))
        found.setdefault(place, []).append(Sequence(tokens=tokens[kept], sampled=versions[kept] >= 0))
    return found


def read_sample(file: Path, group: int, sample: int) -> list[Sequence]:
    """Token sequences of a sample with everything that is recorded of them; none if there is no such sample."""
    import pyarrow.compute as pc

    parquet, _ = _open(file)
    turns = ["turns"] if "turns" in parquet.schema_arrow.names else []
    per_token = ["tokens", "sampled", "logps", "kept_logps", "versions"]
    table = parquet.read(columns=["group", "sample", *per_token, *turns])
    table = table.filter((pc.field("group") == group) & (pc.field("sample") == sample))
    return [
        Sequence(
            tokens=np.asarray(one["tokens"], np.int64),
            sampled=np.asarray(one["sampled"], bool),
            values={name: np.asarray(one[name]) for name in ("logps", "kept_logps", "versions")},
            turns=one.get("turns") or [],
        )
        for one in table.to_pylist()
    ]


def _open(file: Path) -> tuple[Any, dict[str, Any]]:
    import pyarrow.parquet

    parquet = pyarrow.parquet.ParquetFile(file)
    meta = json.loads((parquet.metadata.metadata or {}).get(META.encode(), "{}"))
    if meta.get("format") != FORMAT:
        raise ConfigError(f"{file}: has format {meta.get('format')}, this version reads {FORMAT}")
    return parquet, meta


def _lists(table: Any, name: str) -> list[np.ndarray]:
    """Values of a column of lists, an array for each row."""
    column = table.column(name).combine_chunks()
    ends = np.cumsum([0, *column.value_lengths().to_pylist()])
    flat = column.flatten().to_numpy(zero_copy_only=False)
    return [flat[start:end] for start, end in itertools.pairwise(ends)]


def _number(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value
