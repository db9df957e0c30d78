"""Runs whose sampler disagrees with the trainer: they end at once, name the cause, and keep the weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stages.runs import posttrain, rl_stage, write_run

ENGINE = """
from dataclasses import replace

import posttrain as pt


class Cooler:
    def __init__(self, model, tokenizer, section):
        self._engine = pt.NativeEngine(
            model, slots=8, max_length=16, decode_steps=8, tokenizer_decode=tokenizer.decode, version=0
        )

    async def generate(self, prompt, params):
        return await self._engine.generate(prompt, replace(params, temperature=0.05))

    def update_weights(self, model, version):
        self._engine.update_weights(model, version)

    def close(self):
        self._engine.close()
"""


LOSS = """
import posttrain as pt
from posttrain.losses.policy import DAPO


class Bare:
    kl_coef = 0.0

    def __call__(self, stats, batch):
        return pt.LossOutput(loss=DAPO(stats, batch).loss, metrics={})
"""


BARE = {"algorithm": {"kind": "grpo", "loss": "loss_of_test.py:Bare"}}


@pytest.mark.thorough
@pytest.mark.parametrize("own", [{}, BARE])
def test_a_run_names_the_cause(tmp_path: Path, own: dict[str, Any]) -> None:
    """Also with a loss of the user's, which measures no gap."""
    file = write_run(tmp_path, rl_stage(rollout={"engine": "engine_of_test.py:Cooler"}, **own))
    (tmp_path / "loss_of_test.py").write_text(LOSS)
    (tmp_path / "engine_of_test.py").write_text(ENGINE)
    done = posttrain("run", file)
    assert done.code != 0
    cause = "Likely cause: temperature: the sampler's numbers are those of temperature 0.05, the trainer's 1"
    assert "step 1: sampler and trainer disagree by" in done.err and cause in " ".join(done.err.split())
