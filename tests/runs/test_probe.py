"""The probe before a run: stops where samples are cut, no group is mixed or the reward is constant; trains nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.data.tokenizer_files import FIRST_CONTROL_ID
from tests.stages.runs import Outcome, few_devices, posttrain, rl_stage, sft_stage, write_run

END = FIRST_CONTROL_ID + 2
ENDS = f"stages.rl.sampling.logit_bias={{{END}: 2.0}}"
"""Override with which most samples end in time."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("probe")
    write_run(folder, rl_stage(prompts_per_step=4, sampling={"max_tokens": 6, "allowed_token_ids": [48, 49, END]}))
    (folder / "probed.py").write_text(
        "def first(completions):\n    return [float(c[:1] == '1') for c in completions]\n\n"
        "def constant(completions):\n    return [0.5 for _ in completions]\n\n"
        "def by_prompt(completions, prompts):\n    return [float(len(p) > 4) for p in prompts]\n"
    )
    return folder


def probed(folder: Path, function: str, *overrides: str) -> Outcome:
    rewards = f"stages.rl.rewards=[{{fn: {folder / 'probed.py'}:{function}}}]"
    with few_devices(1):
        return posttrain("check", folder / "run.yaml", "--probe", rewards, *overrides)


def test_what_can_be_learned_passes(folder: Path) -> None:
    outcome = probed(folder, "first", ENDS)
    assert outcome.code == 0, outcome.err[-900:]
    assert "probe of 0-rl" in outcome.out and "24 prompts x 4 samples" in outcome.out
    assert "groups with different rewards" in outcome.out and "prompt: " in outcome.out
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("function", "overrides", "code"),
    [
        ("constant", [ENDS], "CONSTANT"),
        ("by_prompt", [ENDS], "UNMIXED"),
        ("first", ["stages.rl.sampling.ignore_eos=true"], "CUT"),
    ],
)
def test_what_cannot_be_learned_stops(folder: Path, function: str, overrides: list[str], code: str) -> None:
    outcome = probed(folder, function, *overrides)
    assert outcome.code == 1, (outcome.out, outcome.err)
    assert f"probe: {code}: " in outcome.out


def test_a_model_that_is_not_there_yet(tmp_path: Path) -> None:
    file = write_run(tmp_path, sft_stage(), rl_stage())
    assert "run that first, then probe" in posttrain("check", file, "--probe").error
    assert "give CONFIG alone" in posttrain("check", file, "--probe", "--devices", "8").error
