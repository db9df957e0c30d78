"""Records of a teacher's best ids, the cache on disk, and which teacher a row has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.batch import NO_ID, Batch, TopK
from posttrain.data.sources import Sequences
from posttrain.data.unit_cache import UnitCache
from posttrain.distill import cache as teacher_cache
from posttrain.distill.cache import CacheFolder, RecordFormat, TeacherCache, unknown_rows, write_records
from posttrain.distill.targets import TeacherTargets, teacher_shares
from posttrain.errors import ConfigError
from posttrain.kernels.logits.divergence import Divergence, divergence
from posttrain.kernels.logits.softmax import NO_LOGIT

pytestmark = pytest.mark.fast

IDENTITY = {"teacher": "t", "vocab_size": 512, "top_k": 4, "temperature": 1.0}


def said_of(tokens: np.ndarray, k: int = 4, vocab_size: int = 512) -> TopK:
    """Something different for each token."""
    draw = [np.random.default_rng(int(token)) for token in tokens]
    probs = np.stack([np.sort(rng.dirichlet(np.full(k + 1, 0.1)) + 1e-9)[::-1] for rng in draw]).astype(np.float32)
    return TopK(
        ids=np.stack([rng.choice(vocab_size, k, replace=False) for rng in draw]),
        logps=np.log(probs[:, :k]),
        tail=np.log(probs[:, k]),
        scaled_tail=np.log(probs[:, k]) + 0.5,
        token_logps=np.log(probs[:, 0]) - 1,
    )


@pytest.mark.parametrize("vocab_size", [2, 512, 151_936, 262_208])
def test_records(vocab_size: int) -> None:
    """Ids are exact; the others as exact as a KL needs; 64 ids of any known vocabulary take at most 256 bytes."""
    k = min(64, vocab_size)
    form = RecordFormat(vocab_size, k)
    said = said_of(np.arange(50), k, vocab_size)
    records = form.encode(said)
    assert records.shape == (50, form.num_bytes) and form.num_bytes <= 256
    found = form.decode(records.reshape(5, 10, -1))
    np.testing.assert_array_equal(found.ids.reshape(50, k), said.ids)
    lost = np.exp(said.logps) * np.abs(found.logps.reshape(50, k) - said.logps)
    assert lost.sum(axis=1).max() < 2e-3
    for name in ("tail", "scaled_tail", "token_logps"):
        np.testing.assert_allclose(getattr(found, name).ravel(), getattr(said, name), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("vocab_size", [261, 512])
def test_ids_of_no_token_stay_so(vocab_size: int, beta: float) -> None:
    """As they come from a teacher of other tokens; 512 ids would fill 9 bits, and the student likes the last."""
    said = said_of(np.arange(6), 8, vocab_size)
    said.ids[:, 2:5] = NO_ID
    said.logps[:, 2:4] = NO_LOGIT
    form = RecordFormat(vocab_size, 8)
    found = form.decode(form.encode(said))
    np.testing.assert_array_equal(found.ids, said.ids)
    np.testing.assert_array_equal(found.logps[:, 2:4], said.logps[:, 2:4])
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 6, vocab_size)), jnp.float32).at[:, :, -1].set(8.0)
    kind = Divergence(beta=beta, temperature=1.0)
    # What only `gold` keeps: the share of a token that the student has not.
    said.logps[:, 4] = found.logps[:, 4] = NO_LOGIT
    before, after = (divergence(logits, jax.tree.map(lambda x: jnp.asarray(x)[None], t), kind) for t in (said, found))
    np.testing.assert_allclose(after, before, rtol=5e-3, atol=5e-3)
    assert np.all(np.isfinite(after)) and np.all(np.asarray(after) < 50)


def test_what_is_too_improbable_is_kept_as_the_least() -> None:
    none = np.asarray([-np.inf, -1e30], np.float32)
    said = TopK(ids=np.zeros((2, 1), np.int64), logps=none[:, None], tail=none, scaled_tail=none, token_logps=none)
    form = RecordFormat(8, 1)
    found = form.decode(form.encode(said))
    assert (found.logps == -32).all() and (found.tail == -32).all()


def sequences_of(row: int) -> Sequences:
    """Row 3 is left out; row 4 is three sequences, of which one is dropped; the first two tokens have no loss."""
    made: Sequences = []
    for part, length in enumerate({3: [], 4: [4, 0, 6]}.get(row, [3 + row % 5])):
        tokens = (100 * row + 10 * part + np.arange(length)).astype(np.int32)
        made.append({"tokens": tokens, "loss_weight": (np.arange(length) > 1).astype(np.float32)} if length else None)
    return made


def score(sequences: Sequence[Any]) -> Iterator[TopK]:
    for sequence in sequences:
        yield said_of(sequence["tokens"][sequence["loss_weight"] > 0])


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_cache, "SHARD_SEQUENCES", 4)


def opened(folder: Path, **changes: Any) -> TeacherCache:
    made = CacheFolder(folder, {**IDENTITY, **changes})
    return TeacherCache(made.create(), made.format)


def test_written_in_parts_and_read_by_sequence(tmp_path: Path, small_shards: None) -> None:
    """What a stopped call has scored stays; nothing is scored twice, and any order of rows finds its own records."""
    cache = opened(tmp_path)

    def stopped(row: int) -> Any:
        if row == 6:
            raise KeyboardInterrupt
        return sequences_of(row)

    with pytest.raises(KeyboardInterrupt):
        write_records(cache, range(10), stopped, score, lambda _: None)
    cache = opened(tmp_path)
    assert unknown_rows(cache.units, range(10), sequences_of) == [5, 6, 7, 8, 9]
    scored: list[np.ndarray] = []

    def counted(sequences: Sequence[Any]) -> Iterator[TopK]:
        scored.extend(sequence["tokens"] for sequence in sequences)
        return score(sequences)

    write_records(cache, [*range(4, 10), 7], sequences_of, counted, lambda _: None)
    assert len(scored) == 5 and unknown_rows(cache.units, range(10), sequences_of) == []

    rows = [9, 1, 5, 4]
    for whole in (cache, opened(tmp_path)):
        places = np.zeros((len(rows) + 1, 8), np.int64)
        read_from = []
        for row in rows:
            for sequence, found in zip(sequences_of(row), whole.places(sequences_of(row)), strict=True):
                assert (sequence is None) == (found is None)
                if sequence is not None and found is not None:
                    assert ((found > 0) == (sequence["loss_weight"] > 0)).all()
                    places[len(read_from), : len(found)] = found
                    read_from.append(sequence)
        read = whole.read(places)
        for index, sequence in enumerate(read_from):
            at = np.flatnonzero(sequence["loss_weight"])
            np.testing.assert_array_equal(read.ids[index, at], said_of(sequence["tokens"][at]).ids)


def test_a_corrected_row_alone_is_scored_anew(tmp_path: Path, small_shards: None) -> None:
    """And only that of which the teacher reads other tokens, asks at other places, or sees another picture."""
    cache = opened(tmp_path)
    write_records(cache, range(10), sequences_of, score, lambda _: None)

    def changed(row: int) -> Any:
        return sequences_of(25) if row == 5 else sequences_of(row)

    assert unknown_rows(cache.units, range(10), changed) == [5]
    with pytest.raises(ConfigError, match="has no records of this text"):
        cache.places(changed(5))
    scored = list[Any]()

    def counted(sequences: Sequence[Any]) -> Iterator[TopK]:
        scored.extend(sequences)
        return score(sequences)

    write_records(cache, range(10), changed, counted, lambda _: None)
    assert len(scored) == 1 and scored[0]["tokens"].tolist() == [2500, 2501, 2502]
    assert unknown_rows(cache.units, range(10), sequences_of) == [], "those of the row before stay"
    (sequence,) = sequences_of(1)
    assert sequence is not None
    others = {
        "tokens": sequence["tokens"] + 1,
        "loss_weight": 1 - sequence["loss_weight"],
        "files": np.asarray([7]),
        "rope_positions": np.zeros(4, np.int32),
    }
    for name, value in others.items():
        with pytest.raises(ConfigError, match="no records"):
            cache.places([{**sequence, name: value}])


def test_a_cache_of_other_things_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is empty; write it with posttrain distill --cache"):
        CacheFolder(tmp_path, IDENTITY).open()
    first = CacheFolder(tmp_path, IDENTITY).create()
    assert CacheFolder(tmp_path, IDENTITY).open().folder == first.folder
    for name, value in {"teacher": "u", "top_k": 8, "temperature": 2.0}.items():
        with pytest.raises(ConfigError, match=f"written with {name}=.*, and now it is {value!r}"):
            CacheFolder(tmp_path, {**IDENTITY, name: value}).open()
    with pytest.raises(ConfigError, match="written with images=None, and now it is 'p'"):
        CacheFolder(tmp_path, {**IDENTITY, "images": "p"}).open()
    # A teacher that is not there any more cannot be compared, unless there are records of two.
    unknown = CacheFolder(tmp_path, {**IDENTITY, "teacher": None})
    assert unknown.open().folder == first.folder
    other = CacheFolder(tmp_path, {**IDENTITY, "teacher": "u"}).create()
    assert other.folder != first.folder
    with pytest.raises(ConfigError, match="records of 2 states of teacher"):
        unknown.open()


def test_many_shards_are_read_through_few_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of open files of a process is bounded, whatever the number of shards."""
    monkeypatch.setattr(teacher_cache, "SHARD_SEQUENCES", 1)
    cache = opened(tmp_path)
    write_records(cache, range(200, 500), sequences_of, score, lambda _: None)
    assert len(list(cache.units.folder.glob("shard-*"))) == 300
    again = UnitCache(cache.units.folder)
    before = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").is_dir() else 0
    found = []
    for row in range(200, 500):
        (sequence,) = sequences_of(row)
        assert sequence is not None
        (places,) = TeacherCache(again, cache.format).places([sequence])
        assert places is not None
        topk = TeacherCache(again, cache.format).read(places[None])
        found.append(topk.ids[0, -1])
        np.testing.assert_array_equal(topk.ids[0, -1], said_of(sequence["tokens"][-1:]).ids[0])
    assert len(found) == 300
    if before:
        assert len(list(Path("/proc/self/fd").iterdir())) - before <= 130


def test_whose_a_row_is() -> None:
    titles = ["small", "large"]
    np.testing.assert_array_equal(teacher_shares({"t": "large"}, "t", titles), [0, 1])
    np.testing.assert_allclose(teacher_shares({"t": {"small": 3, "large": 1}}, "t", titles), [0.75, 0.25])
    np.testing.assert_array_equal(teacher_shares({"t": {"small": 2, "large": None}}, "t", titles), [1, 0])
    for value, text in [("larg", "did you mean 'large'"), ({"small": 0}, "one must be positive"), (3, "holds a int")]:
        with pytest.raises(ConfigError, match=text):
            teacher_shares({"t": value}, "t", titles)
    with pytest.raises(ConfigError, match="no column 't'"):
        teacher_shares({"u": 1}, "t", titles)


def test_arrays_of_a_row(tmp_path: Path, small_shards: None) -> None:
    caches = []
    for name in ("small", "large"):
        caches.append(opened(tmp_path / name))
        write_records(caches[-1], range(10), sequences_of, score, lambda _: None)
    taught = TeacherTargets(["small", "large"], "t", caches)
    _, none, arrays = taught.arrays(0, {"t": "large"}, sequences_of(4))
    sequence = sequences_of(4)[2]
    assert none is None and sequence is not None and arrays is not None
    assert list(arrays) == list(taught.lengths(16))
    assert not arrays["teacher_place_0"].any() and arrays["teacher_place_1"].any()
    zeros = np.zeros((1, len(sequence["tokens"])), np.int32)
    weight = sequence["loss_weight"][None]
    batch = Batch(tokens=zeros, positions=zeros, segments=zeros, loss_weight=weight)
    made = taught.batch(batch, {name: array[None] for name, array in arrays.items()})
    assert made.teachers is not None and len(made.teachers) == 2 and made.teacher_weights is not None
    np.testing.assert_array_equal(made.teacher_weights[0, 0], [0, 1])
    at = np.flatnonzero(sequence["loss_weight"])
    np.testing.assert_array_equal(made.teachers[1].ids[0, at], said_of(sequence["tokens"][at]).ids)
