"""Online preference optimisation: pairs of the policy's own samples, ranked by rewards. OAIF, arXiv:2402.04792."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, ClassVar

from posttrain.api import SampledPythonRun
from posttrain.kernels.logits.chunk_stats import Terms
from posttrain.metrics import Timer
from posttrain.rl.online_dpo import OnlineLoss, PairSettings, online_step
from posttrain.rl.step import StepResult
from posttrain.rl.types import Example
from posttrain.stages.context import StageRun
from posttrain.stages.prompts import OnlineInputs
from posttrain.stages.sampled import SampledRun, make_trainer, train


def run_online(stage: StageRun, inputs: OnlineInputs) -> None:
    """Train one stage to its end, from its newest checkpoint if there is one."""
    with inputs.rubric.running():
        train(stage, _OnlineRun(stage, inputs))


class _OnlineRun(SampledRun):
    def __init__(self, stage: StageRun, inputs: OnlineInputs):
        section = inputs.section
        terms = Terms(squares=inputs.loss.needs.squares)
        super().__init__(
            stage, inputs, make_trainer(stage, section, OnlineLoss(pairs=inputs.loss), terms), keep_reference=True
        )
        self.settings = PairSettings(
            group_size=section.group_size,
            row_tokens=section.row_tokens,
            num_rows=section.step_rows,
            share_prompts=inputs.share_prompts,
        )

    def learn(self, examples_P: Sequence[Example], timer: Timer) -> Coroutine[Any, Any, StepResult]:
        return online_step(self.cluster, self.scored.rubric, self.sampler, examples_P, self.settings, timer)


class OnlinePreference(SampledPythonRun):
    """Online DPO from Python: `pt.OnlinePreference(model="path", dataset="data.jsonl", rewards=[correct]).fit()`.

    Every field of `posttrain.config.OnlinePreferenceSection` is a keyword, as are `output`, `seed` and `mesh`.
    """

    kind = "online_preference"
    defaults: ClassVar[Mapping[str, Any]] = {**SampledPythonRun.defaults, "group_size": 4}
    sequences = 2
