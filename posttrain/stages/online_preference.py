"""Online preference stage: pairs of the policy's own samples, ranked by rewards. OAIF, arXiv:2402.04792."""

from __future__ import annotations

from contextlib import closing

from posttrain.config import OnlinePreferenceSection
from posttrain.kernels.logits.chunk_stats import Terms
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
    make_act,
    make_policy_trainer,
    open_rollouts,
)
from posttrain.stages.pair_inputs import loss_name, shares_prompts
from posttrain.stages.prompts import OnlinePreferenceInputs, check_rewards, online_loss, prepare_scored
from posttrain.stages.watch import monitor_of


def prepare(section: OnlinePreferenceSection, prepared: Prepared) -> tuple[OnlinePreferenceInputs, list[str]]:
    """Load prompts, rewards and the loss. Also returns a note per dataset with dropped prompts."""
    loss = online_loss(section)
    share = shares_prompts(section, loss.needs, prepared.config.model, mixture=prepared.mixture)
    scored, notes = prepare_scored(section, prepared, None)
    return OnlinePreferenceInputs(loss=loss, share_prompts=share, **vars(scored)), notes


def check_offline(section: OnlinePreferenceSection) -> None:
    """Check everything that needs neither tokenizer nor rows."""
    check_rewards(section)
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
        act = make_act(rollouts, in_flight=section.prompts_per_step, max_staleness=0)
        settings = PairSettings(
            row_tokens=section.row_tokens,
            num_rows=section.step_rows,
            share_prompts=inputs.share_prompts,
        )
        held_out = held_out_prompts(rollouts)
        monitor = monitor_of(section, rubric)
        state = RolloutState(act.source, cluster, monitor=monitor)
        with stage.training(trainer, state, section, held_out) as training, closing(cluster.engine):
            cluster.sync_weights()
            with StepReport(rollouts, training, monitor) as report:
                for _ in training:
                    timer = Timer()
                    report(run_async(online_step(cluster, act, settings, timer)), timer)
