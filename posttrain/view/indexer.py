"""Indexer: a process that follows run folders and writes their rollouts to the index, numbers first, then texts."""

from __future__ import annotations

import itertools
import json
import os
import sqlite3
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.data.tokenizer import CONTEXT_TOKENS
from posttrain.errors import ConfigError
from posttrain.rollout.records import Rollout, read_rollouts, read_tokens
from posttrain.view.folder import RunFolder
from posttrain.view.queries import RECORD, SAMPLES, connection

POLL_S = 1.0
BATCH = 16
"""Number of files between commits."""
INSERT = (
    "INSERT INTO rollouts(stage, step, source, grp, sample, row, stop, reward, advantage, role, staleness, "
    "prompt_tokens, sampled_tokens, parts, rewards) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)"
)


class Indexer:
    """Writer of the index of a run."""

    def __init__(self, run: RunFolder, file: Path):
        self._run, self._file = run, file
        self._tokenizer: Any = None
        self._tokenizer_error: str | None = None
        self._tokens: set[int] | None = None

    def numbers(self) -> bool:
        """Index the newest records that are not in the index, and drop those that are gone; True if more are left."""
        with connection(self._file) as index:
            index.execute("BEGIN IMMEDIATE")  # another process may index the same run
            there = self._records()
            known = {
                (row["stage"], row["step"]): (row["size"], row["mtime_ns"])
                for row in index.execute("SELECT * FROM files WHERE source = ?", (RECORD,))
            }
            for place in known.keys() - {place for place, (_, stamp) in there.items() if known.get(place) == stamp}:
                _remove(index, *place, RECORD)
                known.pop(place)
                # The table of samples is read again: it may have the step.
                index.execute("DELETE FROM files WHERE stage = '' AND source = ?", (SAMPLES,))
            new = sorted(there.keys() - known.keys(), key=lambda place: (place[0], -place[1]))
            for place in new[:BATCH]:
                self._add(index, *place, *there[place])
            self._samples(index)
            _fact(index, "records", len(there))
        return len(new) > BATCH

    def texts(self) -> bool:
        """Index texts of the newest records without them; True if there were any."""
        with connection(self._file) as index:
            rows = index.execute(
                "SELECT stage, step FROM files WHERE source = ? AND NOT texts ORDER BY step DESC LIMIT ?",
                (RECORD, BATCH),
            ).fetchall()
        if not rows or self._load_tokenizer() is None:
            return False
        for row in rows:
            with connection(self._file) as index:
                index.execute("BEGIN IMMEDIATE")
                self._add_texts(index, row["stage"], row["step"])
        return True

    def note_error(self, text: str) -> None:
        """Write an error for the page."""
        with connection(self._file) as index:
            _fact(index, "error", text)

    def forget_error(self) -> None:
        """Remove the error of an earlier process."""
        with connection(self._file) as index:
            index.execute("DELETE FROM facts WHERE name = 'error'")

    def _records(self) -> dict[tuple[str, int], tuple[Path, tuple[int, int]]]:
        found = {}
        for stage in self._run.stages():
            for entry in _entries(self._run.path / stage.name / "trajectories"):
                stem, _, suffix = entry.name.partition(".")
                if suffix == "parquet" and stem.isdecimal():
                    stat = entry.stat()
                    found[stage.name, int(stem)] = Path(entry.path), (stat.st_size, stat.st_mtime_ns)
        return found

    def _add(self, index: sqlite3.Connection, stage: str, step: int, file: Path, stamp: tuple[int, int]) -> None:
        try:
            rollouts = read_rollouts(file)
        except FileNotFoundError:
            return  # the run has removed it since
        except ConfigError as error:
            _fact(index, "error", str(error))
            rollouts = []
        _remove(index, stage, step, SAMPLES)
        index.executemany(INSERT, [_row(stage, step, RECORD, rollout) for rollout in rollouts])
        counts = len(rollouts), int(not rollouts)
        index.execute("INSERT INTO files VALUES (?,?,?,?,?,?,?)", (stage, step, RECORD, *stamp, *counts))

    def _samples(self, index: sqlite3.Connection) -> None:
        """Index the table of samples, for steps without a record."""
        file = self._run.path / "samples.jsonl"
        if not file.is_file():
            return
        stat = file.stat()
        stamp = (stat.st_size, stat.st_mtime_ns)
        known = index.execute("SELECT size, mtime_ns FROM files WHERE stage = '' AND source = ?", (SAMPLES,)).fetchone()
        if known is not None and tuple(known) == stamp:
            return
        for row in index.execute("SELECT DISTINCT stage, step FROM files WHERE source = ?", (SAMPLES,)).fetchall():
            _remove(index, row["stage"], row["step"], SAMPLES)
        recorded = {tuple(row) for row in index.execute("SELECT stage, step FROM files WHERE source = ?", (RECORD,))}
        counts: dict[tuple[str, int], int] = {}
        for text in file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
            if text.endswith("\n"):
                _add_sample(index, json.loads(text), recorded, counts)
        index.execute("INSERT INTO files VALUES ('',0,?,?,?,0,1)", (SAMPLES, *stamp))
        for place, last in counts.items():
            index.execute("INSERT INTO files VALUES (?,?,?,0,0,?,1)", (*place, SAMPLES, last + 1))

    def _add_texts(self, index: sqlite3.Connection, stage: str, step: int) -> None:
        file = self._run.path / stage / "trajectories" / f"{step:08d}.parquet"
        of_file = (stage, step, RECORD)
        if (
            index.execute(
                "SELECT 1 FROM files WHERE stage = ? AND step = ? AND source = ? AND NOT texts", of_file
            ).fetchone()
            is None
        ):
            return
        try:
            sequences = read_tokens(file)
        except FileNotFoundError:
            return
        ids = {
            (row["grp"], row["sample"]): row["id"]
            for row in index.execute("SELECT id, grp, sample FROM rollouts WHERE stage = ? AND step = ?", (stage, step))
        }
        spans = [(place, *span) for place, parts in sequences.items() for span in _spans(parts)]
        texts = self._tokenizer.decode_each([span[2:] for span in spans], skip_special_tokens=False)
        pieces: dict[tuple[int, int], list[tuple[str, str]]] = {}
        for (place, kind, *_), text in zip(spans, texts, strict=True):
            pieces.setdefault(place, []).append((kind, text))
        for place, found in pieces.items():
            if place in ids:
                _add_text(index, ids[place], found)
        self._add_tokens(index, np.unique(np.concatenate([one.tokens for each in sequences.values() for one in each])))
        index.execute("UPDATE files SET texts = 1 WHERE stage = ? AND step = ? AND source = ?", of_file)

    def _add_tokens(self, index: sqlite3.Connection, tokens: np.ndarray) -> None:
        if self._tokens is None:
            self._tokens = {row["token"] for row in index.execute("SELECT token FROM token_texts")}
        new = [int(token) for token in tokens if int(token) not in self._tokens]
        self._tokens.update(new)
        # After any text, so that a word keeps the space before it.
        before = self._tokenizer.encode(".")
        texts = self._tokenizer.decode_each([(before, [token]) for token in new], skip_special_tokens=False)
        index.executemany("INSERT OR IGNORE INTO token_texts VALUES (?,?)", zip(new, texts, strict=True))

    def _load_tokenizer(self) -> Any:
        """Tokenizer of the run, loaded once; None and a fact in the index if it cannot be."""
        if self._tokenizer is None and self._tokenizer_error is None:
            try:
                self._tokenizer = _tokenizer_of(self._run)
            except ConfigError as error:
                self._tokenizer_error = str(error)
                self.note_error(f"texts: {error}")
        return self._tokenizer


def _tokenizer_of(run: RunFolder) -> Any:
    from posttrain.config.yaml_file import load_recorded
    from posttrain.runs.finished import tokenizer_of

    config = load_recorded(run.path / "config.yaml")
    recorded = [stage.name for stage in run.stages() if (run.path / stage.name / "trajectories").is_dir()]
    return tokenizer_of(run.path, recorded[-1], config)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def _spans(parts: Sequence[Any]) -> list[tuple[str, list[int], list[int]]]:
    """Tokens of a sample cut where sampling begins and ends: kinds `prompt`, `sampled` and `given` (by the
    environment), the tokens before, and the tokens."""
    found = []
    for part in parts:
        tokens = part.tokens.tolist()
        cuts = [0, *(np.flatnonzero(np.diff(part.sampled.astype(np.int8))) + 1), len(part.tokens)]
        for start, end in itertools.pairwise(cuts):
            if end > start:
                kind = "sampled" if part.sampled[start] else "prompt" if start == 0 else "given"
                found.append((kind, tokens[max(0, start - CONTEXT_TOKENS) : start], tokens[start:end]))
    return found


def _row(stage: str, step: int, source: str, one: Rollout) -> tuple[Any, ...]:
    numbers = one.reward, one.advantage, one.role, one.staleness, one.prompt_tokens, one.sampled_tokens, one.parts
    return stage, step, source, one.group, one.sample, one.row, one.stop, *numbers, json.dumps(one.rewards)


def _add_text(index: sqlite3.Connection, number: int, pieces: Sequence[tuple[str, str]]) -> None:
    simple = [kind for kind, _ in pieces] in (["prompt"], ["prompt", "sampled"])
    prompt = pieces[0][1] if pieces[0][0] == "prompt" else ""
    completion = "\n".join(text for kind, text in pieces if kind != "prompt")
    # The table of samples may hold half of a surrogate pair, which neither SQLite nor UTF-8 does.
    prompt, completion = (text.encode("utf-8", "backslashreplace").decode() for text in (prompt, completion))
    kept = None if simple else json.dumps(pieces)
    index.execute("INSERT INTO texts VALUES (?,?,?,?)", (number, prompt, completion, kept))
    index.execute("INSERT INTO search(rowid, prompt, completion) VALUES (?,?,?)", (number, prompt, completion))


def _add_sample(
    index: sqlite3.Connection, line: dict[str, Any], recorded: set[Any], counts: dict[tuple[str, int], int]
) -> None:
    place = line["stage"], line["step"]
    if place in recorded:
        return
    number = counts[place] = counts.get(place, -1) + 1
    numbers = line["reward"], line["advantage"], line["extra"].get("role")
    values = (*place, SAMPLES, None, number, None, line["stop"], *numbers, None, None, None, 1)
    inserted = index.execute(INSERT, (*values, json.dumps(line["rewards"])))
    assert inserted.lastrowid is not None
    _add_text(index, inserted.lastrowid, [("prompt", line["prompt"]), ("sampled", line["completion"])])


def _remove(index: sqlite3.Connection, stage: str, step: int, source: str) -> None:
    of_file = (stage, step, source)
    ids = "SELECT id FROM rollouts WHERE stage = ? AND step = ? AND source = ?"
    index.execute(
        "INSERT INTO search(search, rowid, prompt, completion) "
        f"SELECT 'delete', id, prompt, completion FROM texts WHERE id IN ({ids})",
        of_file,
    )
    index.execute(f"DELETE FROM texts WHERE id IN ({ids})", of_file)
    index.execute("DELETE FROM rollouts WHERE stage = ? AND step = ? AND source = ?", of_file)
    index.execute("DELETE FROM files WHERE stage = ? AND step = ? AND source = ?", of_file)


def _fact(index: sqlite3.Connection, name: str, value: object) -> None:
    index.execute("INSERT OR REPLACE INTO facts VALUES (?,?)", (name, str(value)))


def index_all(indexers: Sequence[Indexer], *, texts: bool = True) -> None:
    """Bring indexes up to date: numbers of all runs first, then texts."""
    while any([indexer.numbers() for indexer in indexers]):  # noqa: C419 - each has its turn
        pass
    while texts and any([indexer.texts() for indexer in indexers]):  # noqa: C419
        for indexer in indexers:
            indexer.numbers()


def main() -> None:
    """Follow the runs of standard input, a line each with run folder and index file, until it ends."""
    indexers: list[Indexer] = []

    def read() -> None:
        for line in sys.stdin:
            run, file = map(Path, json.loads(line))
            indexer = Indexer(RunFolder(run), file)
            indexer.forget_error()
            indexers.append(indexer)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        _follow(list(indexers))
        time.sleep(POLL_S)


def _follow(indexers: Sequence[Indexer]) -> None:
    """Index what is new. An error ends the process, and is shown in the page."""
    try:
        index_all(indexers)
    except Exception as error:
        for indexer in indexers:
            indexer.note_error(f"the index is not up to date: {type(error).__name__}: {error}; start view again")
        raise


if __name__ == "__main__":
    main()
