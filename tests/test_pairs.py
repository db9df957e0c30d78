"""Pairs of features of a stage: each runs two steps whose invariants hold, or is refused by name.

Every sampled token is learned from once per epoch, credit adds up, and a run that was killed in its second step ends
with the same bits. `python -m tests.pairs` writes the table of the documentation.
"""

from __future__ import annotations

import functools
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet
import pytest

from posttrain.batch import Batch
from posttrain.cluster.reference import Reference
from posttrain.losses import policy, reduce
from posttrain.losses.ratios import ImportanceSampling
from posttrain.losses.sft import SFTLoss
from posttrain.rl import algorithms, async_loop
from posttrain.rl import step as rl_step
from posttrain.rl.returns import RewardKL
from posttrain.rl.step import learn
from posttrain.train.objective import TrainSettings
from posttrain.train.trainer import Trainer
from posttrain.weights.load import init_model
from tests.often import often
from tests.oracles import (
    Rollouts,
    Sample,
    credit_of_tokens,
    keep_highest_entropies,
    policy_loss_reference,
    total_reward,
)
from tests.pairs import (
    BASE,
    LENGTH,
    PAGE,
    STAGES,
    Pair,
    Refusals,
    merged,
    page,
    pairs,
    refusals,
    refused,
    write,
    write_teacher,
)
from tests.stages.runs import INIT, lines, posttrain
from tests.tiny import sgd

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


class OfRow(NamedTuple):
    """What a model says of the tokens of a row, float64."""

    logps: np.ndarray
    entropy: np.ndarray


class Observed(NamedTuple):
    """A step of RL for the oracle."""

    run: Rollouts
    tokens: list[tuple[int, ...]]
    """Tokens of each row."""
    updates: list[tuple[Batch, list[np.ndarray], float]]
    """Batch, log-probabilities of all rows before the update, and loss of each update."""


def stats_of(trainer: Trainer, rows: list[Any], weights: Any = None) -> list[OfRow]:
    """Statistics of the model, each row by itself, in passes of 16."""
    found = []
    for start in range(0, len(rows), 16):
        some = rows[start : start + 16]
        arrays = np.zeros((4, 16, 64), np.int32)
        for number, row in enumerate(some):
            size = len(row.tokens)
            arrays[0, number, :size] = row.tokens
            arrays[1, number, :size] = np.arange(size)
            arrays[2, number, :size] = 1
            arrays[3, number, :size] = row.sampled
        alone = Batch(
            tokens=arrays[0], positions=arrays[1], segments=arrays[2], loss_weight=arrays[3].astype(np.float32)
        )
        made = trainer.stats(alone, weights)
        for number, row in enumerate(some):
            size = len(row.tokens)
            logps, entropy = (np.asarray(x)[number, :size].astype(np.float64) for x in (made.logps, made.entropy))
            found.append(OfRow(logps, entropy))
    return found


class Observer:
    """Looks at steps of RL from outside. The reference is followed here, too: `mixup` of the new weights each time."""

    def __init__(self, fields: dict[str, Any], teacher: Path):
        self.fields, self.teacher = fields, teacher
        self.steps: list[Observed] = []
        self.rows: list[Any] = []
        self.reference: dict[str, np.ndarray] | None = None

    def begin(self, cluster: Any, rollouts: Any) -> None:
        actor = cluster.actor
        now = {path: np.asarray(x, np.float64) for path, x in actor.params.items()}
        moving = self.fields.get("reference", {})
        if self.reference is None:
            self.reference = now
        elif "refresh_every" in moving:
            share = moving.get("mixup", 1.0)
            self.reference = {path: share * x + (1 - share) * self.reference[path] for path, x in now.items()}
        self.rows, groups = [], []
        useful = rollouts.rewards.total_PG.max(1) > rollouts.rewards.total_PG.min(1)
        for p, group in enumerate(rollouts.groups_P):
            made = []
            for g, sample in enumerate(group):
                first = len(self.rows)
                self.rows += sample.rows
                turns = [(first + n, t.start, t.end, t.reward or 0.0) for n, t in sample.turns_in_time]
                rewards = {name: float(part[p, g]) for name, part in rollouts.rewards.parts_PG.items()}
                made.append(Sample(rewards, range(first, len(self.rows)), sample.stop == "length", turns))
            if "refill" not in self.fields or useful[p]:
                groups.append((group[0].group, made))
        old = stats_of(actor, self.rows)
        weights = {**actor.weights, **self.placed(actor)}
        ref = stats_of(actor, self.rows, weights)
        taught = stats_of(teacher_trainer(self.teacher), self.rows) if "teachers" in self.fields else ref
        arrays = [np.asarray(row.logps, np.float64) for row in self.rows]
        drawn = [x - np.asarray(row.kept_logps) for x, row in zip(arrays, self.rows, strict=True)]
        run = Rollouts(
            groups=[made for _, made in sorted(groups, key=lambda one: one[0])],
            weights=rollouts.weights,
            sampled=[np.asarray(row.sampled, bool) for row in self.rows],
            sampler=arrays,
            behaviour=drawn,
            old=[np.asarray(one.logps) for one in old],
            entropy=[np.asarray(one.entropy) for one in old],
            ref=[np.asarray(one.logps) for one in ref],
            teacher=[np.asarray(one.logps) for one in taught],
        )
        self.steps.append(Observed(run, [tuple(row.tokens) for row in self.rows], []))

    def placed(self, actor: Trainer) -> dict[str, jax.Array]:
        assert self.reference is not None
        own = actor.params
        return {
            path: jax.device_put(x.astype(own[path].dtype), own[path].sharding) for path, x in self.reference.items()
        }

    def update(self, batch: Batch, before: list[OfRow], loss: float) -> None:
        self.steps[-1].updates.append((batch, [np.asarray(one.logps) for one in before], loss))

    def check(self) -> None:
        """The loss of each update, and the advantage of each of its tokens, are the oracle's."""
        algorithm = self.fields["algorithm"]
        coef = self.fields.get("teacher_coef", 1.0) if "teachers" in self.fields else None
        speeds = {"importance_sampling", "quantize", "cache_dtype", "asynchronous"}
        weighted = bool(speeds & (self.fields.keys() | algorithm.keys() | self.fields.get("rollout", {}).keys()))
        for step in self.steps:
            run, masked = step.run, algorithm.get("truncated") == "mask"
            samples = [s for group in run.groups for s in group if not (masked and s.cut)]
            samples = [s for s in samples if any(run.sampled[row].any() for row in s.rows)]
            samples = [s for s in samples if not np.isnan(total_reward(s, run.weights))]
            credit = credit_of_tokens(run, algorithm, coef)
            if "top_entropy" in algorithm:
                learned = [row for s in samples for row in s.rows]
                keep_highest_entropies(credit, learned, run, algorithm["top_entropy"])
            for batch, new, loss in step.updates:
                self.check_credit(batch, step, credit)
                seen = Counter(tokens for tokens, _, _ in segments(batch))
                part = [s for s in samples if all(step.tokens[r] in seen or not run.sampled[r].any() for r in s.rows)]
                expected = policy_loss_reference(run, part, credit, new, algorithm, weighted=weighted)
                np.testing.assert_allclose(loss, expected, rtol=2e-3, atol=2e-5)

    def check_credit(self, batch: Batch, step: Observed, credit: list[np.ndarray]) -> None:
        """Equal rows may be of samples with different rewards."""
        for tokens, place, row in segments(batch):
            got = np.asarray(batch.advantages)[row, place]
            alike = [one for own, one in zip(step.tokens, credit, strict=True) if own == tokens]
            assert any(np.allclose(got, one, rtol=1e-3, atol=1e-3) for one in alike), (got, alike)


@functools.cache
def teacher_trainer(folder: Path) -> Trainer:
    """The teacher, as something that tells its log-probabilities."""
    fields = {**INIT, "vocab_size": 261, "max_position_embeddings": LENGTH}
    model = init_model(fields, dtype=jnp.float32, seed=1)
    return Trainer(model, SFTLoss(), sgd(0.0), TrainSettings(temperature=1.0, max_grad_norm=1.0))


class Learned(NamedTuple):
    """What a run learned from."""

    batches: list[Batch]
    """Batch of each update of the actor."""
    records: list[list[dict[str, Any]]]
    """Rows of the record of each online step."""
    told: list[dict[str, Any]]


def run(
    file: Path,
    kind: str,
    devices: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    killed_at: int = 0,
    observer: Observer | None = None,
) -> Learned:
    """Run to the end. `killed_at`: keep the files of this step, as a kill in the next one would leave them."""
    batches: list[Batch] = []
    out, step = file.parent / "out", Trainer.step

    def spied(self: Trainer, batch: Batch, *, update: bool = True) -> Any:
        if kind != "rl" or batch.behaviour_logps is not None:
            if killed_at and len(batches) == killed_at:
                wait_for(out / f"0-{kind}" / "checkpoints" / str(killed_at))
                shutil.copytree(out, file.parent / "killed")
            batches.append(batch)
            if observer is not None:
                before = stats_of(self, observer.rows)
                told = step(self, batch, update=update)
                observer.update(batch, before, told["loss"].value())
                return told
        return step(self, batch, update=update)

    def learned(cluster: Any, algorithm: Any, rollouts: Any, *others: Any) -> Any:
        if observer is not None:
            observer.begin(cluster, rollouts)
        return learn(cluster, algorithm, rollouts, *others)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", spied)
        patch.setattr(rl_step, "learn", learned)
        patch.setattr(async_loop, "learn", learned)
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
    observer = None if kind != "rl" or critic(fields) else Observer(fields, teacher)
    whole = run(file, kind, devices, monkeypatch, killed_at=half, observer=observer)
    if observer is not None:
        observer.check()
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


def unweighted(self: Any, proximal: Any, behaviour: Any, mask: Any, ids: Any) -> Any:
    ratio, metrics = IMPORTANCE(self, proximal, behaviour, mask, ids)
    return jnp.ones_like(ratio), metrics


def first_reward(parts_PG: Any, weights: Any, penalties_PG: Any) -> Any:
    first = next(iter(parts_PG))
    return DECOUPLED({first: parts_PG[first]}, weights, penalties_PG)


IMPORTANCE, DECOUPLED, PENALTY = ImportanceSampling.__call__, algorithms.decoupled, RewardKL.__call__
ENTROPIES, LEVEL, COUNTS, TEACHERS = (
    rl_step.top_entropy,
    policy.level_log_ratio,
    reduce.sample_counts,
    rl_step.add_teachers,
)
FAULTS: dict[str, tuple[str, str, Any, str, Callable[..., Any]]] = {
    "reward penalised with the wrong sign": ("kl_in", "top_entropy", RewardKL, "__call__", lambda *x: -PENALTY(*x)),
    "importance weights all 1": ("importance_sampling", "truncated", ImportanceSampling, "__call__", unweighted),
    "lowest entropies": (
        *("top_entropy", "kl_in", rl_step, "top_entropy"),
        lambda parts, entropies, share: ENTROPIES(parts, [-one for one in entropies], share),
    ),
    "first reward alone": ("gdpo", "curriculum", algorithms, "decoupled", first_reward),
    "token ratios": ("gspo", "update_epochs", policy, "level_log_ratio", lambda _, *x: LEVEL("token", *x)),
    "rows counted as samples": ("agent", "teachers", reduce, "sample_counts", lambda w, s, _: COUNTS(w, s, None)),
    "teacher pushed away": (
        *("teachers", "truncated", rl_step, "add_teachers"),
        lambda batch, teacher, coef: TEACHERS(batch, teacher, -coef),
    ),
    "standing reference": ("agent", "reference", Reference, "refresh", lambda *_: None),
}
"""Pair, place and substitute of each seeded fault."""


@pytest.mark.parametrize("name", often(FAULTS, "lowest entropies"))
def test_a_seeded_fault_turns_its_pair_red(
    tmp_path: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    a, b, place, attribute, substitute = FAULTS[name]
    fields = merged(BASE["rl"], STAGES["rl"][a].stage, STAGES["rl"][b].stage)

    def red(folder: Path) -> bool:
        observer = Observer(fields, teacher)
        run(write(folder, teacher, "rl", a, b), "rl", 1, monkeypatch, observer=observer)
        try:
            observer.check()
        except AssertionError:
            return True
        return False

    assert not red(tmp_path / "right")
    monkeypatch.setattr(place, attribute, substitute)
    assert red(tmp_path / "wrong")
