"""Sick and healthy runs: the cause of each is named first, and of healthy ones none. See `sick.py` for their making."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.diagnosis.causes import Cause
from posttrain.diagnosis.diagnose import diagnose
from posttrain.diagnosis.evidence import read_evidence
from tests.diagnosis.sick import CASES, HEALTHY, KEPT_RUNS, make, unpack

KEPT = sorted(KEPT_RUNS.glob("*.zip"))
NEW_SEED = 100
"""Seed on which no threshold was set."""


def causes_of(run: Path) -> list[Cause]:
    return [cause for evidence in read_evidence(run) for cause in diagnose(evidence)]


def check_first(name: str, causes: list[Cause]) -> None:
    names, wanted = [cause.name for cause in causes], CASES[name].cause
    assert names[:1] == ([] if wanted == HEALTHY else [wanted]), (name, names)
    for cause in causes:
        texts = (cause.summary, cause.advice, *cause.evidence)
        assert all(text and "nan" not in text.split() for text in texts), texts


@pytest.mark.parametrize("archive", KEPT, ids=lambda archive: archive.stem)
def test_the_cause_of_a_kept_run_comes_first(archive: Path, tmp_path: Path) -> None:
    check_first(archive.stem.rpartition("-")[0], causes_of(unpack(archive, tmp_path)))


def test_every_kind_of_run_is_kept() -> None:
    assert {archive.stem.rpartition("-")[0] for archive in KEPT} == {*CASES}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the runs, whose models to begin from are trained once."""
    return tmp_path_factory.mktemp("sick")


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_the_cause_of_a_new_run_comes_first(name: str, trained: Path) -> None:
    check_first(name, causes_of(make(name, NEW_SEED, trained)))
