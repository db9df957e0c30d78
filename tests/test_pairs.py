"""Pairs of features of a stage: each runs two steps as `tests.oracles` has them, or is refused by name.

A run that was killed in its second step ends with the same bits. `python -m tests.pairs` writes the table of the
documentation.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from posttrain.batch import Batch
from posttrain.cluster.reference import Reference
from posttrain.losses import policy, reduce
from posttrain.losses.ratios import ImportanceSampling
from posttrain.rl import algorithms, async_loop
from posttrain.rl import step as rl_step
from posttrain.rl.returns import RewardKL
from posttrain.rl.step import learn
from posttrain.train.trainer import Trainer
from tests.often import often
from tests.pairs import (
    BASE,
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
from tests.rl_observer import Observer
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
        # A drafter learns from rows of tokens alone.
        if observer is not None and (batch.behaviour_logps is not None or batch.returns is not None):
            return observer.step(self, batch, lambda: step(self, batch, update=update))
        return step(self, batch, update=update)

    def learned(cluster: Any, algorithm: Any, rollouts: Any, *others: Any) -> Any:
        if observer is None:
            return learn(cluster, algorithm, rollouts, *others)
        observer.begin(cluster, rollouts)
        result = learn(cluster, algorithm, rollouts, *others)
        observer.end(result)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", spied)
        patch.setattr(rl_step, "learn", learned)
        patch.setattr(async_loop, "learn", learned)
        outcome = posttrain("run", file, devices=devices)
    assert outcome.code == 0, outcome.out + outcome.err
    return Learned(batches, [line for line in lines(out) if "grad_norm" in line])


def wait_for(folder: Path) -> None:
    """Wait until the checkpoint is whole, which is written behind the training."""
    end = time.monotonic() + 60
    while not (folder / "commit_success.txt").exists():
        assert time.monotonic() < end, f"no checkpoint {folder}"
        time.sleep(0.005)


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


def observer_of(file: Path, teacher: Path) -> Observer:
    """Observer of a run, which knows its configuration as it is written."""
    return Observer(yaml.safe_load(file.read_text()), [teacher, teacher / "second"])


def check_pair(folder: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch, kind: str, a: str, b: str) -> None:
    """Run a pair of features for two steps, and once more from where a kill in the second leaves it."""
    one, other = STAGES[kind][a], STAGES[kind][b]
    devices, fields = one.devices + other.devices - 1, merged(BASE[kind], one.stage, other.stage)
    file, half = write(folder, teacher, kind, a, b), fields.get("updates", 1) * fields.get("update_epochs", 1)
    observer = observer_of(file, teacher) if kind == "rl" else None
    whole = run(file, kind, devices, monkeypatch, killed_at=half, observer=observer)
    if observer is not None:
        assert len(observer.steps) == 2
        observer.check()
    assert all(np.isfinite(line["loss"]) for line in whole.told)
    assert any(line["grad_norm"] > 0 for line in whole.told)
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
    devices = STAGES["rl"][a].devices + STAGES["rl"][b].devices - 1

    def red(folder: Path) -> bool:
        file = write(folder, teacher, "rl", a, b)
        observer = observer_of(file, teacher)
        run(file, "rl", devices, monkeypatch, observer=observer)
        try:
            observer.check()
        except AssertionError:
            return True
        return False

    assert not red(tmp_path / "right")
    monkeypatch.setattr(place, attribute, substitute)
    assert red(tmp_path / "wrong")
