"""Index of a run's rollouts: an SQLite file in the cache, written by one process and read by others meanwhile."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from posttrain.runtime.files import cache_folder

VERSION = 2
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
