"""Probe of a run before it trains: a few prompts, sampled by the real model and scored by the real rewards."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from jax.sharding import Mesh

from posttrain.config import OnlineSection, RunConfig, trains_on_samples
from posttrain.errors import ConfigError
from posttrain.reward.lab.findings import Finding, sample_findings
from posttrain.reward.lab.report import describe_samples, finding_lines
from posttrain.reward.types import Rewards
from posttrain.rl.sampler import IssuedGroup, Sampler, collect
from posttrain.rollout.trajectory import Group
from posttrain.runs.prepare import prepare
from posttrain.runs.run import mesh_of
from posttrain.runtime.event_loop import run_async
from posttrain.stages.cluster import make_engine
from posttrain.stages.context import RoleDevices, StageRun
from posttrain.stages.inputs import Prepared
from posttrain.stages.prompts import RolloutInputs
from posttrain.stages.table import stage_names
from posttrain.tracking.console import progress_bar
from posttrain.train.loop import StopRequest

NUM_PROMPTS = 32


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Samples of a stage's model before training, in words, and reasons not to train."""

    lines: Sequence[str]
    findings: Sequence[Finding]


def probe(config: RunConfig) -> Probe:
    """Sample a group of each of 32 prompts of the first online stage, and score them. Nothing is trained or written.

    ConfigError without such a stage, or if it starts from a model that an earlier stage has not left yet.
    """
    mesh = mesh_of(config)
    prepared = prepare(config, offline_ok=False)
    index = _first_online(prepared.config)
    names = stage_names(prepared.config)
    source = Path(prepared.config.output) / names[index - 1] / "model" if index else None
    if source is not None and not source.exists():
        raise ConfigError(
            f"--probe: {names[index]} starts from the model that {names[index - 1]} leaves in {source.parent}; run "
            "that first, then probe"
        )
    inputs = prepared.stages[index]
    assert isinstance(inputs, RolloutInputs)
    stage = _stage(prepared, index, source, mesh)
    groups_P, rewards = _sampled(stage, inputs)
    findings = [one for one in sample_findings(groups_P, rewards) if inputs.section.scored or one.code == "cut"]
    lines = [f"probe of {stage.name}", *describe_samples(groups_P, rewards), *finding_lines("probe", findings)]
    return Probe(lines=lines, findings=findings)


def _stage(prepared: Prepared, index: int, source: Path | None, mesh: Mesh) -> StageRun:
    config, section = prepared.config, prepared.stages[index].section
    name = stage_names(config)[index]
    return StageRun(
        name=name,
        kind=section.kind,
        sampled=trains_on_samples(section),
        folder=Path(config.output) / name,
        output=Path(config.output),
        model=config.model if source is None else config.model.grown,
        source=source,
        source_name=prepared.files.path,
        adapter=None if config.model.adapter is None else config.model.adapter.resolved,
        seed=config.seed,
        mesh=mesh,
        devices=RoleDevices(),
        tokenizer=prepared.tokenizer,
        tensorboard=False,
        profile=None,
        stop=StopRequest(),
    )


def _first_online(config: RunConfig) -> int:
    found = [index for index, section in enumerate(config.stages) if isinstance(section, OnlineSection)]
    if not found:
        raise ConfigError("--probe: no stage samples completions and scores them")
    return found[0]


def _sampled(stage: StageRun, inputs: RolloutInputs) -> tuple[list[Group], Rewards]:
    """Groups of prompts from the whole dataset, and their rewards."""
    section = inputs.section
    examples = inputs.examples[:: max(1, len(inputs.examples) // NUM_PROMPTS)][:NUM_PROMPTS]
    groups = [IssuedGroup(number=number, example=example, version=0) for number, example in enumerate(examples)]
    count = len(groups) * section.group_size
    with ExitStack() as stack:
        stack.enter_context(inputs.rubric.running())
        if inputs.conversations is not None:
            stack.callback(inputs.conversations.close)
        engine = make_engine(
            stage.load_model(),
            stage.tokenizer,
            section.rollout,
            inputs.make_engine,
            slots=min(count, section.samples_in_flight),
            max_length=section.sequence_tokens,
        )
        stack.enter_context(closing(engine))
        inputs.rubric.load_models(stage.mesh, inputs.renderer, count)
        sampler = Sampler(
            engine=engine,
            renderer=inputs.renderer,
            sampling=section.sampling,
            max_prompt_tokens=inputs.max_prompt_tokens,
            seed=stage.seed,
            conversations=inputs.conversations,
        )

        async def acted() -> tuple[list[Group], Rewards]:
            with progress_bar(f"probe: {len(groups)} prompts", count) as advance:
                found = await collect(sampler, groups, section.group_size, advance)
            return found, await inputs.rubric.score(found)

        return run_async(acted())
