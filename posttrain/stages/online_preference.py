"""Online preference optimisation: pairs of the policy's own samples, ranked by rewards. OAIF, arXiv:2402.04792."""

from __future__ import annotations

from pathlib import Path

from posttrain.config import OnlinePreferenceSection
from posttrain.kernels.logits.chunk_stats import Terms
from posttrain.metrics import Timer
from posttrain.rl.online_dpo import OnlineLoss, PairSettings, online_step
from posttrain.rl.step import StepResult
from posttrain.stages.context import StageRun
from posttrain.stages.online import describe_steps, make_trainer, open_rollouts, prompt_batches, train
from posttrain.stages.pairs import shares_prompts
from posttrain.stages.prepared import Prepared
from posttrain.stages.prompts import OnlineInputs, check_rewards, online_loss, prepare_scored


def prepare(section: OnlinePreferenceSection, prepared: Prepared) -> tuple[OnlineInputs, list[str]]:
    """Load prompts, rewards and the loss."""
    loss = online_loss(section, prepared.base_dir)
    share = shares_prompts(section, loss.needs, prepared.config.model, mixture=prepared.mixture)
    scored = prepare_scored(section, prepared.require_tokenizer(), prepared.base_dir, None)
    return OnlineInputs(loss=loss, share_prompts=share, **vars(scored)), []


def check_offline(section: OnlinePreferenceSection, base_dir: Path) -> None:
    """Check all that needs neither tokenizer nor rows."""
    check_rewards(section, base_dir)
    online_loss(section, base_dir)


def describe(section: OnlinePreferenceSection, inputs: OnlineInputs | None, shards: int) -> str:
    """Summarise the stage in one line."""
    compared = "" if inputs is None else f"; the best against the worst by {type(inputs.loss).__name__}"
    return describe_steps(section, inputs, compared)


def run(stage: StageRun, inputs: OnlineInputs) -> None:
    """Train one stage to its end, from its newest checkpoint if there is one."""
    section = inputs.section
    terms = Terms(squares=inputs.loss.needs.squares)
    trainer = make_trainer(stage, section, OnlineLoss(pairs=inputs.loss), terms)
    rollouts = open_rollouts(stage, inputs, trainer, keep_reference=True)
    prompts = prompt_batches(inputs, stage.seed)
    settings = PairSettings(
        group_size=section.group_size,
        row_tokens=section.row_tokens,
        num_rows=section.step_rows,
        share_prompts=inputs.share_prompts,
    )

    async def step(timer: Timer) -> StepResult:
        examples_P = [inputs.examples[index] for index in next(prompts)]
        return await online_step(rollouts.cluster, inputs.rubric, rollouts.sampler, examples_P, settings, timer)

    train(stage, rollouts, prompts, step)
