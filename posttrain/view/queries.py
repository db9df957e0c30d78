"""Index of the rollouts of a run, an SQLite file in the cache that one process writes and others read, and its queries:
pages of rollouts, one rollout, prompts by pass rate, two steps side by side."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.errors import ConfigError
from posttrain.rollout.trajectory import is_cut
from posttrain.runtime.files import cache_folder

VERSION = 3
"""Version of the tables below; an index of another one is made anew."""
TABLES = """
CREATE TABLE files(
    stage TEXT, step INTEGER, source TEXT, size INTEGER, mtime_ns INTEGER, rollouts INTEGER, texts INTEGER,
    PRIMARY KEY(stage, step, source)
) WITHOUT ROWID;
CREATE TABLE rollouts(
    id INTEGER PRIMARY KEY, stage TEXT, step INTEGER, source TEXT, grp INTEGER, sample INTEGER, row INTEGER, stop TEXT,
    reward REAL, advantage REAL, role INTEGER, staleness INTEGER, prompt_tokens INTEGER, sampled_tokens INTEGER,
    parts INTEGER, rewards TEXT
);
CREATE INDEX of_step ON rollouts(stage, step, grp, sample);
CREATE INDEX of_stop ON rollouts(stage, stop);
CREATE INDEX of_prompt ON rollouts(stage, row, step, reward);
CREATE TABLE texts(id INTEGER PRIMARY KEY, prompt TEXT, completion TEXT, pieces TEXT);
CREATE VIRTUAL TABLE search USING fts5(
    prompt, completion, content='texts', content_rowid='id', tokenize='trigram', detail='none'
);
CREATE TABLE token_texts(token INTEGER PRIMARY KEY, text TEXT);
CREATE TABLE facts(name TEXT PRIMARY KEY, value TEXT);
"""
RECORD, SAMPLES = "record", "samples"
"""Sources of rollouts: a step's record of trajectories, or the table of samples."""


def cache_of(key: str) -> Path:
    """Cache folder of a run."""
    return cache_folder("view") / key


def make_index(file: Path) -> None:
    """Make an empty index, unless there is one of this version."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.parent.chmod(0o700)  # completions are for the user who asked for them
    if file.exists():
        with connection(file) as known:
            if known.execute("PRAGMA user_version").fetchone()[0] == VERSION:
                return
        for suffix in ("", "-wal", "-shm"):
            file.with_name(file.name + suffix).unlink(missing_ok=True)
    with connection(file) as new:
        new.execute("PRAGMA journal_mode=WAL")
        new.executescript(TABLES)
        new.execute(f"PRAGMA user_version={VERSION}")


class connection:
    """Connection to an index, closed at the end of the block; what the block wrote is kept unless it raised."""

    def __init__(self, file: Path):
        self._file = file

    def __enter__(self) -> sqlite3.Connection:
        self._open = sqlite3.connect(self._file, timeout=30)
        self._open.row_factory = sqlite3.Row
        self._open.execute("PRAGMA synchronous=OFF")
        return self._open

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self._open.commit()
        self._open.close()


SORTS = ("step", "row", "reward", "advantage", "staleness", "sampled_tokens", "prompt_tokens", "stop", "parts")
RANGES = ("step", "reward", "advantage", "staleness", "sampled_tokens")
EQUALS = ("step", "row", "grp", "sample", "role")
PREVIEW = 160
"""Characters of a text in a table."""
PAGE, MAX_PAGE = 50, 500
INDEXED = 3
"""Fewest characters of a search that the index of texts knows; shorter ones read all texts."""
STOPS = """
WITH RECURSIVE next(stop) AS (
    SELECT min(stop) FROM rollouts WHERE stage = ?
    UNION ALL SELECT (SELECT min(r.stop) FROM rollouts r WHERE r.stage = ? AND r.stop > next.stop) FROM next
    WHERE next.stop IS NOT NULL
) SELECT stop FROM next WHERE stop IS NOT NULL
"""
"""Stop reasons of a stage, each found in the index by the one before it."""
BINS = 12
"""Number of intervals of steps of a prompt's pass rate."""


@dataclass
class Where:
    """Conditions of a query with their values."""

    conditions: list[str] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)

    def add(self, condition: str, *values: Any) -> None:
        self.conditions.append(condition)
        self.values.extend(values)

    @property
    def sql(self) -> str:
        return f"WHERE {' AND '.join(self.conditions)}" if self.conditions else ""


def where(given: Mapping[str, str]) -> Where:
    """Conditions of a filter: `stage`, `stop`, `text`, one of EQUALS, `NAME_min` and `NAME_max` of RANGES. ConfigError
    for a value that is not a number."""
    found = Where()
    for name in ("stage", "stop"):
        if given.get(name):
            found.add(f"r.{name} = ?", given[name])
    for name in EQUALS:
        if given.get(name):
            found.add(f"r.{name} = ?", number(given, name))
    for name in RANGES:
        if given.get(f"{name}_min"):
            found.add(f"r.{name} >= ?", number(given, f"{name}_min"))
        if given.get(f"{name}_max"):
            found.add(f"r.{name} <= ?", number(given, f"{name}_max"))
    if given.get("text"):
        _add_text(found, given["text"])
    return found


def number(given: Mapping[str, str], name: str) -> float:
    """Finite number of a parameter; ConfigError for anything else."""
    try:
        if math.isfinite(found := float(given[name])):
            return found
        raise ValueError
    except KeyError:
        raise ConfigError(f"{name}: is missing; give a number") from None
    except ValueError:
        raise ConfigError(f"{name}={given[name]!r} is not a number; give one, or leave it empty") from None


def whole(given: Mapping[str, str], name: str, least: int = 0) -> int:
    """Whole number of a parameter, as an index can hold it; ConfigError for anything else."""
    found = number(given, name)
    if not (found.is_integer() and least <= found < 1 << 53):
        raise ConfigError(f"{name}={given[name]!r} must be a whole number from {least} on")
    return int(found)


def _add_text(found: Where, text: str) -> None:
    literal = not set(text) & set("%_")
    if len(text) >= INDEXED:
        # In a pattern, % and _ stand for anything: the index then only narrows down what is compared.
        pattern = f"%{text.replace('%', '_')}%"
        each = "SELECT rowid FROM search WHERE {} LIKE ?"
        found.add(f"r.id IN ({each.format('prompt')} UNION {each.format('completion')})", pattern, pattern)
        if literal:
            return
    inside = "instr(lower(prompt), lower(?)) OR instr(lower(completion), lower(?))"
    found.add(f"r.id IN (SELECT id FROM texts WHERE {inside})", text, text)


def rollouts(index: sqlite3.Connection, given: Mapping[str, str]) -> dict[str, Any]:
    """Page of rollouts: `total`, and `rows` with previews of texts. Besides the filter: `sort` (one of SORTS, or
    `rewards/NAME`), `order`, `offset`, `limit`. ConfigError for a column that is unknown."""
    chosen = where(given)
    order, values = _order(given.get("sort") or "step", given.get("order") == "asc")
    total = index.execute(f"SELECT count(*) FROM rollouts r {chosen.sql}", chosen.values).fetchone()[0]
    limit, offset = _page(given)
    rows = index.execute(
        f"SELECT r.*, substr(t.prompt, -{PREVIEW}) prompt, substr(t.completion, 1, {PREVIEW}) completion "
        f"FROM (SELECT r.* FROM rollouts r {chosen.sql} ORDER BY {order} LIMIT ? OFFSET ?) r "
        f"LEFT JOIN texts t ON t.id = r.id ORDER BY {order}",
        [*chosen.values, *values, limit, offset, *values],
    )
    return {"total": total, "rows": [_rollout(row) for row in rows]}


def _page(given: Mapping[str, str]) -> tuple[int, int]:
    """Numbers of rows on a page, and before it."""
    limit = whole(given, "limit", 1) if given.get("limit") else PAGE
    return min(limit, MAX_PAGE), whole(given, "offset") if given.get("offset") else 0


def _order(sort: str, ascending: bool) -> tuple[str, list[Any]]:
    direction = "ASC" if ascending else "DESC"
    last = f"r.step {direction}, r.grp, r.sample, r.id"
    if sort.startswith("rewards/"):
        path = '$."' + sort.removeprefix("rewards/").replace('"', "") + '"'
        return f"json_extract(r.rewards, ?) {direction} NULLS LAST, {last}", [path]
    if sort not in SORTS:
        raise ConfigError(f"sort={sort}: unknown column; use one of {', '.join(SORTS)}, or rewards/NAME")
    return (
        f"r.step {direction}, r.grp, r.sample, r.id" if sort == "step" else f"r.{sort} {direction} NULLS LAST, {last}"
    ), []


def _rollout(row: sqlite3.Row) -> dict[str, Any]:
    return {**dict(row), "rewards": json.loads(row["rewards"])}


def rollout(index: sqlite3.Connection, number: int) -> dict[str, Any] | None:
    """Rollout with its whole texts as pieces of kind `prompt`, `sampled` and `given`; None if it is not there."""
    row = index.execute("SELECT * FROM rollouts WHERE id = ?", (number,)).fetchone()
    if row is None:
        return None
    text = index.execute("SELECT * FROM texts WHERE id = ?", (number,)).fetchone()
    pieces = None
    if text is not None:
        pieces = [["prompt", text["prompt"]], ["sampled", text["completion"]]]
        pieces = json.loads(text["pieces"]) if text["pieces"] is not None else pieces
    # The table of samples knows no groups: there those of one prompt are shown together.
    alike = "r.grp = ?" if row["source"] == RECORD else "t.prompt = ?"
    group = index.execute(
        "SELECT r.id, r.sample, r.reward, r.stop FROM rollouts r LEFT JOIN texts t ON t.id = r.id "
        f"WHERE r.stage = ? AND r.step = ? AND r.source = ? AND {alike} ORDER BY r.sample",
        (row["stage"], row["step"], row["source"], row["grp"] if row["source"] == RECORD else text["prompt"]),
    )
    return {**_rollout(row), "pieces": pieces, "group": [dict(one) for one in group]}


def token_texts(index: sqlite3.Connection, tokens: Sequence[int]) -> dict[int, str]:
    """Texts of token ids."""
    found: dict[int, str] = {}
    unique = list(dict.fromkeys(tokens))
    for start in range(0, len(unique), 500):
        part = unique[start : start + 500]
        marks = ",".join("?" * len(part))
        found |= dict(
            map(tuple, index.execute(f"SELECT token, text FROM token_texts WHERE token IN ({marks})", part).fetchall())
        )
    return found


def stages(index: sqlite3.Connection) -> list[dict[str, Any]]:
    """Stages with rollouts: their number, steps from the newest on, stop reasons, reward functions."""
    found = []
    counts = index.execute(
        "SELECT stage, sum(rollouts) rollouts FROM files GROUP BY stage HAVING sum(rollouts) > 0"
    ).fetchall()
    for row in counts:
        of_stage = (row["stage"],)
        stops = index.execute(STOPS, of_stage * 2)
        steps = index.execute("SELECT DISTINCT step FROM files WHERE stage = ? ORDER BY step DESC", of_stage)
        some = index.execute(
            "SELECT rewards FROM rollouts WHERE stage = ? ORDER BY step DESC LIMIT 1", of_stage
        ).fetchone()
        found.append(
            {
                **dict(row),
                "stops": [one["stop"] for one in stops],
                "steps": [one["step"] for one in steps],
                "rewards": list(json.loads(some["rewards"])),
            }
        )
    return found


def progress(index: sqlite3.Connection) -> dict[str, Any]:
    """Progress of the indexer: records in the run, indexed, with texts; and its last error."""
    facts = dict(map(tuple, index.execute("SELECT name, value FROM facts").fetchall()))
    counts = index.execute("SELECT count(*), coalesce(sum(texts), 0) FROM files WHERE source = 'record'").fetchone()
    known = {"indexed": counts[0], "texts": counts[1], "error": facts.get("error")}
    return {"records": int(facts["records"]) if "records" in facts else None, **known}


def prompts(index: sqlite3.Connection, given: Mapping[str, str], pass_above: float) -> dict[str, Any]:
    """Page of prompts (dataset rows) by pass rate over time: `bins` are intervals of steps. `sort`: `rate`, `change`
    (last bin with samples less the first), `count` or `row`."""
    stage = given.get("stage", "")
    span = index.execute(
        "SELECT min(step), max(step) FROM rollouts WHERE stage = ? AND row IS NOT NULL", (stage,)
    ).fetchone()
    if span[0] is None:
        return {"total": 0, "rows": [], "bins": []}
    first, width = span[0], max(1, -(-(span[1] - span[0] + 1) // BINS))
    count = -(-(span[1] - first + 1) // width)
    counted: dict[int, list[list[int]]] = {}
    for row, position, samples, passed in index.execute(
        "SELECT row, (step - ?) / ?, count(*), sum(reward > ?) FROM rollouts "
        "WHERE stage = ? AND row IS NOT NULL AND reward IS NOT NULL GROUP BY 1, 2",
        (first, width, pass_above, stage),
    ):
        counted.setdefault(row, [[0, 0] for _ in range(count)])[position] = [samples, passed]
    rows = [_prompt(row, bins) for row, bins in counted.items()]
    sort = given.get("sort") or "rate"
    if sort not in ("rate", "change", "count", "row"):
        raise ConfigError(f"sort={sort}: unknown column; use rate, change, count or row")
    rows.sort(key=lambda one: (one[sort], one["row"]), reverse=given.get("order") == "desc")
    limit, offset = _page(given)
    page = rows[offset : offset + limit]
    for one in page:
        text = index.execute(
            f"SELECT substr(t.prompt, 1, {PREVIEW}) FROM rollouts r JOIN texts t ON t.id = r.id "
            "WHERE r.stage = ? AND r.row = ? LIMIT 1",
            (stage, one["row"]),
        ).fetchone()
        one["prompt"] = None if text is None else text[0]
    return {"total": len(rows), "rows": page, "bins": [first + width * position for position in range(count)]}


def _prompt(row: int, bins: Sequence[Sequence[int]]) -> dict[str, Any]:
    rates = [passed / samples if samples else None for samples, passed in bins]
    known = [rate for rate in rates if rate is not None]
    samples, passed = sum(b[0] for b in bins), sum(b[1] for b in bins)
    return {"row": row, "count": samples, "rate": passed / samples, "change": known[-1] - known[0], "bins": rates}


def step_summary(index: sqlite3.Connection, stage: str, step: int) -> dict[str, Any]:
    """Samples of a step by dataset row, and means over them. A step that only the table of samples knows has a choice
    of its samples (`whole` is false), so that no mean is known; `row` is then the text of the prompt."""
    rows = index.execute(
        f"SELECT r.*, substr(t.prompt, -{PREVIEW}) prompt, substr(t.completion, 1, {PREVIEW}) completion, "
        "t.prompt whole_prompt FROM rollouts r LEFT JOIN texts t ON t.id = r.id "
        "WHERE r.stage = ? AND r.step = ? ORDER BY r.grp, r.sample",
        (stage, step),
    ).fetchall()
    whole = all(row["source"] == RECORD for row in rows)
    samples = []
    for row in rows:
        sample = _rollout(row)
        prompt = sample.pop("whole_prompt")
        samples.append(sample if whole else {**sample, "row": prompt})
    functions = list(samples[0]["rewards"]) if samples else []
    means = {"reward": _mean([one["reward"] for one in samples])}
    means |= {f"rewards/{name}": _mean([one["rewards"].get(name) for one in samples]) for name in functions}
    means["sampled tokens"] = _mean([one["sampled_tokens"] for one in samples])
    means["staleness"] = _mean([one["staleness"] for one in samples])
    means["cut at the maximum length"] = _mean([float(is_cut(one["stop"])) for one in samples])
    known = means if whole else dict.fromkeys(means)
    return {"stage": stage, "step": step, "samples": samples, "means": known, "whole": whole}


def _mean(values: Sequence[float | int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
