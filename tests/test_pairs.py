"""Pairs of features of a stage: each runs two steps as `tests.oracles` has them, or is refused by name.

A run that was killed in its second step ends with the same bits. `python -m tests.pairs` writes the table of the
documentation.
"""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import yaml
from numpy.testing import assert_allclose, assert_array_equal

from posttrain.batch import Batch
from posttrain.rl import async_loop
from posttrain.rl import step as rl_step
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
from tests.rl_faults import FAULTS
from tests.rl_observer import Observer
from tests.stages.runs import lines, posttrain

KEPT: dict[str, list[Pair]] = {
    "rl": [],
    "sft": [("truncate", "mix")],
    "preference": [],
    "distill": [],
    "reward_model": [],
    "online_preference": [],
    "drafter": [],
}
"""Pairs that run each time; all others with `-m pairs`."""
ROUNDING, NARROW = 1e-5, 0.05
"""Between log-probabilities of one sample beside others, in float32 and in fewer bits; 5e-7 were seen in float32."""
NONE_LEFT = [("mask", "grammar"), ("mask", "tools"), ("reject", "grammar"), ("reject", "tools"), ("reject", "vision")]
"""Pairs whose sampler keeps so little of the mass that the bound on the ratio leaves no token."""


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_teacher(tmp_path_factory.mktemp("pairs") / "teacher")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "pairs_cache"))


@pytest.fixture(autouse=True)
def frozen() -> Iterator[None]:
    """Leave the programs that pairs share out of the collection that ends each run."""
    yield
    gc.collect()
    gc.freeze()


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
    evaluations: list[dict[str, Any]]


def run(file: Path, devices: int, *, killed_at: int = 0, observer: Observer | None = None) -> Learned:
    """Run RL to the end. `killed_at`: keep the files of this step, as a kill in the next one would leave them."""
    batches: list[Batch] = []
    step = Trainer.step

    def spied(self: Trainer, batch: Batch, *, update: bool = True) -> Any:
        if batch.behaviour_logps is not None:
            if killed_at and len(batches) == killed_at:
                keep_as_killed(file, killed_at)
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

    # `MonkeyPatch` would forget the programs, which pairs share; no program is traced of these.
    with (
        mock.patch.object(Trainer, "step", spied),
        mock.patch.object(rl_step, "learn", learned),
        mock.patch.object(async_loop, "learn", learned),
    ):
        outcome = posttrain("run", file, devices=devices)
    assert outcome.code == 0, outcome.out + outcome.err
    told = lines(file.parent / "out")
    return Learned(
        batches, [line for line in told if "grad_norm" in line], [line for line in told if "eval/reward" in line]
    )


def keep_as_killed(file: Path, step: int) -> None:
    """Keep the files of a run as a kill after this step leaves them. Its checkpoint is written behind the training."""
    out = file.parent / "out"
    (checkpoints,) = out.glob("0-*/checkpoints")
    end = time.monotonic() + 60
    while not (checkpoints / str(step) / "commit_success.txt").exists():
        assert time.monotonic() < end, f"no checkpoint {step} in {checkpoints}"
        time.sleep(0.005)
    shutil.copytree(out, file.parent / "killed")


def take_killed(file: Path) -> dict[str, bytes]:
    """Put the run that was killed in the place of the whole one, of which the files of models are returned."""
    out = file.parent / "out"
    expected = saved(out)
    shutil.rmtree(out)
    (file.parent / "killed").rename(out)
    return expected


def saved(out: Path) -> dict[str, bytes]:
    """Files of the trained model and of a drafter."""
    return {file.name: file.read_bytes() for file in out.glob("0-*/*/*.safetensors")}


def cases(*kinds: str) -> list[Any]:
    """Pairs of these stages that run: those of `KEPT` each time, all with `-m pairs`."""
    made = []
    for kind in kinds:
        never = set(refused(kind))
        for pair in pairs(STAGES[kind]):
            if pair not in never:
                made.append(pytest.param(kind, *pair, marks=() if pair in KEPT[kind] else pytest.mark.pairs))
    return made


@pytest.mark.by_case
@pytest.mark.parametrize(("kind", "a", "b"), cases("rl"))
def test_a_pair_runs(tmp_path: Path, teacher: Path, kind: str, a: str, b: str) -> None:
    """A pair of features runs for two steps, and once more from where a kill in the second leaves it."""
    fields = merged(BASE[kind], STAGES[kind][a].stage, STAGES[kind][b].stage)
    half = fields.get("updates", 1) * fields.get("update_epochs", 1)
    file, devices, whole = check_rl(tmp_path, teacher, a, b, killed_at=half)
    expected = take_killed(file)
    again = run(file, devices)
    assert len(again.batches) == half, "the second step alone is done again"
    if not depends_on_time(fields):
        assert saved(file.parent / "out") == expected
    elif not fields.get("asynchronous", {}).get("in_flight"):
        for before, after in zip(whole.batches[half:], again.batches, strict=True):
            assert_array_equal(np.asarray(after.tokens), np.asarray(before.tokens))
            atol = NARROW if {"dtype", "bfloat16", "rollout.quantize", "cache_dtype"} & {a, b} else ROUNDING
            assert_allclose(np.asarray(after.sampler_logps), np.asarray(before.sampler_logps), atol=atol)


def depends_on_time(fields: dict[str, Any]) -> bool:
    """Tell whether time decides what the engine computes at once, and so how log-probabilities are rounded, or, with
    weights in flight, which weights sample a token."""
    ahead = fields.get("asynchronous")
    return "agent" in fields or (bool(ahead.get("in_flight")) if ahead else "env" in fields)


def check_rl(folder: Path, teacher: Path, a: str, b: str, *, killed_at: int = 0) -> tuple[Path, int, Learned]:
    """Run a pair of RL for two steps, and compare all that it did with the oracle. Returns its file, number of devices
    and what it learned from."""
    file, devices = write(folder, teacher, "rl", a, b), STAGES["rl"][a].devices + STAGES["rl"][b].devices - 1
    observer = Observer(yaml.safe_load(file.read_text()), [teacher, teacher / "second"])
    whole = run(file, devices, killed_at=killed_at, observer=observer)
    assert len(observer.steps) == 2
    observer.check()
    assert all(np.isfinite(line["loss"]) for line in whole.told)
    if (a, b) not in NONE_LEFT:
        assert any(line["grad_norm"] > 0 for line in whole.told)
    if "truncated" in (a, b) and "tools" not in (a, b):
        assert any(sample.cut for step in observer.steps for group in step.run.groups for sample in group)
    if "eval_dataset" in (a, b):
        assert len(whole.evaluations) >= 2
        observer.check_evaluations(whole.evaluations)
    if "speculative" in (a, b):
        # The last step may sample none; beside a grammar nothing is drafted.
        constrained = bool({"grammar", "tools"} & {a, b})
        assert any(line["rollout/speculative/share"] > 0 for line in whole.told) != constrained
        assert all(line.get("drafter/grad_norm", 0.0) > 0 for line in whole.told)
    return file, devices, whole


@pytest.mark.parametrize("name", often(FAULTS, "lowest entropies"))
def test_a_seeded_fault_turns_its_pair_red(
    tmp_path: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The pair itself is run by another test. It is the comparison that fails, or the gate of sampler and trainer, and
    not the run."""
    (a, b), place, attribute, wrong = FAULTS[name]
    monkeypatch.setattr(place, attribute, wrong(getattr(place, attribute)))
    with pytest.raises(AssertionError) as error:
        check_rl(tmp_path, teacher, a, b)
    frames = [f"{entry.path.name}:{entry.name}" for entry in error.traceback]
    compared = any(frame.startswith("rl_observer.py") for frame in frames) or frames[-1] == "test_pairs.py:check_rl"
    told = str(error.value)
    assert compared or "rl_observer.py" in told or "disagree" in told, told
