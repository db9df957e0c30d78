"""Online preference stage: pairs of the policy's own samples, ranked by rewards. OAIF, arXiv:2402.04792."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import Any

import jax

from posttrain.config import OnlinePreferenceSection
from posttrain.errors import ConfigError
from posttrain.kernels.logits.chunk_stats import Terms
from posttrain.losses.preference import KINDS
from posttrain.metrics import Timer
from posttrain.rl.online_dpo import OnlineLoss, PairSettings, online_step
from posttrain.runtime.event_loop import run_async
from posttrain.stages.context import StageRun
from posttrain.stages.inputs import Prepared
from posttrain.stages.online import (
    RolloutState,
    StepReport,
    describe_steps,
    held_out_prompts,
    make_collector,
    make_policy_trainer,
    open_rollouts,
)
from posttrain.stages.preference import PREFERENCE_LOSSES, loss_name, make_loss, shares_prompts
from posttrain.stages.prompts import RolloutInputs, build_rewards, prepare_scored


@dataclass(frozen=True, kw_only=True)
class OnlinePreferenceInputs(RolloutInputs):
    """Inputs of online preference stages."""

    section: OnlinePreferenceSection
    loss: Any
    """Loss: a `PairLoss` on pairs and a reference."""
    share_prompts: bool


def prepare(section: OnlinePreferenceSection, prepared: Prepared) -> tuple[OnlinePreferenceInputs, list[str]]:
    """Load prompts, rewards and the loss. Also returns a note per dataset with dropped prompts."""
    loss = online_loss(section)
    kernel = prepared.config.model.attention
    share = shares_prompts(section, loss.needs, kernel, jax.default_backend(), mixture=prepared.mixture)
    scored, notes = prepare_scored(section, prepared, None, *build_rewards(section))
    return OnlinePreferenceInputs(loss=loss, share_prompts=share, **vars(scored)), notes


def check_offline(section: OnlinePreferenceSection) -> None:
    """Check everything that needs neither tokenizer nor rows."""
    build_rewards(section)
    online_loss(section)


def describe(section: OnlinePreferenceSection, inputs: OnlinePreferenceInputs | None, shards: int) -> str:
    """Summarise the stage in one line."""
    compared = "" if inputs is None else f"; the best against the worst by loss {loss_name(section.loss)}"
    return describe_steps(section, inputs, compared)


def run(stage: StageRun, inputs: OnlinePreferenceInputs) -> None:
    """Train an online preference stage to its last step, resuming from its newest checkpoint."""
    section, rubric = inputs.section, inputs.rubric
    with rubric.running():
        loss = OnlineLoss(pairs=inputs.loss)
        trainer = make_policy_trainer(stage, section, loss, Terms(squares=inputs.loss.needs.squares))
        rollouts = open_rollouts(stage, inputs, trainer, keep_reference=True)
        cluster = rollouts.cluster
        collector = make_collector(rollouts, steps_per_version=1)
        settings = PairSettings(
            row_tokens=section.row_tokens,
            num_rows=section.step_rows,
            share_prompts=inputs.share_prompts,
        )
        held_out = held_out_prompts(rollouts)
        state = RolloutState(collector.source, cluster, monitor=inputs.monitor)
        with stage.training(trainer, state, section, held_out) as training, closing(cluster.engine):
            cluster.sync_weights(cluster.version)
            with StepReport(rollouts, training) as report:
                for _ in training:
                    timer = Timer()
                    report(run_async(online_step(cluster, collector, settings, timer)), timer)


def online_loss(section: OnlinePreferenceSection) -> Any:
    """Make the loss. ConfigError for a loss that does not compare pairs with a reference, or needs values that samples
    lack."""
    loss = make_loss(section.loss, PREFERENCE_LOSSES)
    needs = loss.needs
    if needs.rows != "pairs" or not needs.reference or needs.prompts or needs.margins:
        raise ConfigError(
            f"loss: {loss_name(section.loss)!r} is not for online preference, which compares two samples against the "
            f"start of the stage, without margins and without a loss on prompts; use a kind of DPO: {', '.join(KINDS)}"
        )
    return loss
