"""Pairs of features of a stage: each runs two steps whose invariants hold, or is refused by name.

Every sampled token is learned from once per epoch, credit adds up, and a run that was killed in its second step ends
with the same bits. `python -m tests.pairs` writes the table of the documentation.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet
import pytest

from posttrain.batch import Batch
from posttrain.rollout.drafting import Pace
from posttrain.train.trainer import Trainer
from tests.often import often
from tests.pairs import BASE, PAGE, STAGES, Pair, Refusals, merged, page, pairs, refusals, refused, write, write_teacher
from tests.stages.runs import lines, posttrain

KEPT: dict[str, list[Pair]] = {
    "rl": [],
    "sft": [("truncate", "mix")],
    "preference": [],
    "distill": [],
}
"""Pairs that run each time; all others in thorough runs."""


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_teacher(tmp_path_factory.mktemp("pairs") / "teacher")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "pairs_cache"))


def test_refusals_name_the_pair_and_the_page_has_them(tmp_path: Path, teacher: Path) -> None:
    """A refusal names a field of each feature, or the page would not help whoever meets it. All other pairs run in
    another test."""
    found: dict[str, Refusals] = {}
    for kind, features in STAGES.items():
        refusing = refusals(tmp_path, teacher, kind, refused(kind))
        for pair, reason in refusing.items():
            for name in pair:
                feature = features[name]
                chosen = feature.stage.get("algorithm", {})
                fields = {name, *feature.stage, *feature.model, *chosen, chosen.get("kind", name)}
                fields -= {"algorithm", "kind"}
                assert reason is not None and any(field in reason for field in fields), (kind, pair, reason)
        found[kind] = dict.fromkeys(pairs(features)) | refusing
    assert PAGE.read_text() == page(found), "run `python -m tests.pairs`"


class Learned(NamedTuple):
    """What a run learned from."""

    batches: list[Batch]
    """Batch of each update of the actor."""
    records: list[list[dict[str, Any]]]
    """Rows of the record of each online step."""
    told: list[dict[str, Any]]


def run(file: Path, kind: str, devices: int, monkeypatch: pytest.MonkeyPatch, *, killed_at: int = 0) -> Learned:
    """Run to the end. `killed_at`: keep the files of this step, as a kill in the next one would leave them."""
    batches: list[Batch] = []
    out, step = file.parent / "out", Trainer.step

    def spied(self: Trainer, batch: Batch, *, update: bool = True) -> Any:
        if kind != "rl" or batch.behaviour_logps is not None:
            if killed_at and len(batches) == killed_at:
                wait_for(out / f"0-{kind}" / "checkpoints" / str(killed_at))
                shutil.copytree(out, file.parent / "killed")
            batches.append(batch)
        return step(self, batch, update=update)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", spied)
        patch.setattr(Pace, "choose", lambda self, rows: True)
        outcome = posttrain("run", file, devices=devices)
    assert outcome.code == 0, outcome.out + outcome.err
    files = sorted((out / f"0-{kind}" / "trajectories").glob("*.parquet"))
    records = [pyarrow.parquet.read_table(one).to_pylist() for one in files]
    return Learned(batches, records, [line for line in lines(out) if "grad_norm" in line])


def wait_for(folder: Path) -> None:
    """Wait until the checkpoint is whole, which is written behind the training."""
    end = time.monotonic() + 60
    while not (folder / "commit_success.txt").exists():
        assert time.monotonic() < end, f"no checkpoint {folder}"
        time.sleep(0.005)


def segments(batch: Batch) -> Iterator[tuple[tuple[int, ...], slice, int]]:
    """Tokens, place and row of each sequence of a batch."""
    for row, ids in enumerate(np.asarray(batch.segments)):
        for number in np.unique(ids[ids > 0]):
            where = np.flatnonzero(ids == number)
            place = slice(int(where[0]), int(where[-1]) + 1)
            yield tuple(np.asarray(batch.tokens)[row, place].tolist()), place, row


def check_samples(learned: Learned, fields: dict[str, Any]) -> None:
    """Each sample is in as many updates as there are epochs, its sampled tokens with the sample's advantage, or with a
    critic with its reward as their return (gamma and lambda are 1, and all is paid at the end)."""
    each = fields.get("updates", 1) * fields.get("update_epochs", 1)
    assert len(learned.batches) == each * len(learned.records) == 2 * each
    for step, record in enumerate(learned.records):
        masked = fields["algorithm"].get("truncated") == "mask"
        rows = [
            row
            for row in record
            if not np.isnan(row["advantage"] + row["reward"])
            and any(row["sampled"])
            and not (masked and row["stop"] == "length")
        ]
        expected: Counter[tuple[int, ...]] = Counter(tuple(row["tokens"]) for row in rows)
        values: dict[tuple[int, ...], list[float]] = {}
        for row in rows:
            values.setdefault(tuple(row["tokens"]), []).append(row["reward" if critic(fields) else "advantage"])
        seen: Counter[tuple[int, ...]] = Counter()
        for batch in learned.batches[step * each : (step + 1) * each]:
            for tokens, place, row in segments(batch):
                weight = np.asarray(batch.loss_weight)[row, place] > 0
                sampled = next(r["sampled"] for r in rows if tuple(r["tokens"]) == tokens)
                assert weight.tolist() == sampled
                seen[tokens] += 1
                if plain_credit(fields):
                    array = batch.returns if critic(fields) else batch.advantages
                    got = np.asarray(array)[row, place][weight]
                    assert any(np.allclose(got, value, atol=1e-4) for value in values[tokens]), (got, values[tokens])
        epochs = fields.get("update_epochs", 1)
        assert seen == Counter({tokens: epochs * count for tokens, count in expected.items()})


def critic(fields: dict[str, Any]) -> bool:
    return fields["algorithm"]["kind"] == "ppo"


def plain_credit(fields: dict[str, Any]) -> bool:
    """True if nothing is added to the advantage or the return of a token beside that of its sample."""
    algorithm = fields["algorithm"]
    added = {"teachers", "top_entropy", "turn_advantages"} & (fields.keys() | algorithm.keys())
    return not added and not (critic(fields) and algorithm.get("kl_in") == "reward")


def check_groups(learned: Learned, fields: dict[str, Any]) -> None:
    """Advantages add up to 0 where samples are compared."""
    if critic(fields) or fields["algorithm"]["kind"] == "reinforce_plus_plus":
        return
    for record in learned.records:
        first = {(row["group"], row["sample"]): row["advantage"] for row in record}
        found = np.asarray([value for value in first.values() if not np.isnan(value)])
        assert abs(found.sum()) < 1e-3 * max(1, len(found)), found


def check_turns(learned: Learned, *, cut: bool) -> None:
    """No turn of a sample that is better or worse than the others of its group goes without credit. `cut`: tokens of
    low entropy have none."""
    for batch, record in zip(learned.batches, learned.records, strict=False):
        told = {tuple(row["tokens"]): row["advantage"] for row in record}
        for tokens, place, row in segments(batch):
            weight = np.asarray(batch.loss_weight)[row, place] > 0
            if abs(told.get(tokens, 0.0)) > 0.1:
                credit = np.abs(np.asarray(batch.advantages)[row, place][weight])
                assert np.all(credit[credit != 0] > 1e-3) if cut else credit.min() > 1e-3


def cases(*kinds: str) -> list[Any]:
    """Pairs of these stages that run; a part of them each time."""
    every = [(kind, *pair) for kind in kinds for pair in pairs(STAGES[kind]) if pair not in refused(kind)]
    return often(every, *[(kind, *pair) for kind in kinds for pair in KEPT[kind]])


@pytest.mark.by_case
@pytest.mark.parametrize(("kind", "a", "b"), cases("rl"))
def test_a_pair_runs(tmp_path: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch, kind: str, a: str, b: str) -> None:
    check_pair(tmp_path, teacher, monkeypatch, kind, a, b)


def saved(folder: Path, kind: str) -> dict[str, bytes]:
    """Files of the trained model and of a drafter."""
    return {file.name: file.read_bytes() for file in (folder / "out" / f"0-{kind}").glob("*/*.safetensors")}


def check_pair(folder: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch, kind: str, a: str, b: str) -> None:
    """Run a pair of features for two steps, and once more from where a kill in the second leaves it."""
    one, other = STAGES[kind][a], STAGES[kind][b]
    devices, fields = max(one.devices, other.devices), merged(BASE[kind], one.stage, other.stage)
    file, half = write(folder, teacher, kind, a, b), fields.get("updates", 1) * fields.get("update_epochs", 1)
    whole = run(file, kind, devices, monkeypatch, killed_at=half)
    assert all(np.isfinite(line["loss"]) for line in whole.told)
    assert any(line["grad_norm"] > 0 for line in whole.told)
    if kind == "rl":
        check_samples(whole, fields)
        check_groups(whole, fields)
        if "turn_advantages" in fields["algorithm"] and half == 1:
            check_turns(whole, cut="top_entropy" in (a, b))
    if "speculative" in (a, b):
        assert any(line["rollout/speculative/share"] > 0 for line in whole.told), "the last step may sample none"
        assert all(line["drafter/grad_norm"] > 0 for line in whole.told)
    expected = saved(folder, kind)
    shutil.rmtree(folder / "out")
    (folder / "killed").rename(folder / "out")
    again = run(file, kind, devices, monkeypatch)
    assert len(again.batches) == half, "the second step alone is done again"
    if "in_flight" not in (a, b):  # there time decides which weights sample a token
        assert saved(folder, kind) == expected
