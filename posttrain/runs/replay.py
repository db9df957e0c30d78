"""Replay of a recorded step: batch, loss and metrics from its trajectories, without sampling."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.batch import Batch
from posttrain.cluster.cluster import Cluster
from posttrain.cluster.sync import Shared
from posttrain.config import RLSection, RunConfig
from posttrain.config.yaml_file import load_config, load_recorded
from posttrain.errors import ConfigError
from posttrain.metrics import Metrics, Timer, to_host
from posttrain.models.decoder import Decoder
from posttrain.rl.act import Acted
from posttrain.rl.algorithms import Algorithm
from posttrain.rl.refill import group_metrics
from posttrain.rl.step import learn
from posttrain.rl.store import Recorded, read_record
from posttrain.rollout.types import Completion, SamplingParams
from posttrain.runs.finished import find_stage, open_stage, tokenizer_of
from posttrain.runs.folder import CONFIG_NAME
from posttrain.runs.run import mesh_of
from posttrain.stages.cluster import make_critic, make_reference
from posttrain.stages.context import StageRun
from posttrain.stages.online import TRAJECTORIES, make_policy_trainer
from posttrain.stages.rl import step_settings
from posttrain.stages.table import stage_names
from posttrain.train.checkpoint import Checkpointer
from posttrain.train.trainer import Trainer
from posttrain.weights.locate import add_family_file
from posttrain.weights.lora import has_lora
from posttrain.weights.state import ModelWeights

MEASURED = (
    *("timing_s/", "perf/", "step_time", "memory/", "rollout/", "sync/", "learning_rate", "data/"),
    *("sampling/refill/", "curriculum/", "env/", "hacking/", "async/"),
)
"""Metrics of the run and of sampling, not of what is learned in the step."""
Observe = Callable[[Any, Trainer, Batch], None]
"""Observer of each update: the loss, the trainer under the weights before the update, and its batch."""


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """Outcome of a replay."""

    step: int
    batches: Sequence[Batch]
    """Batch of each update of the first epoch."""
    metrics: Mapping[str, float]
    logged: Mapping[str, float]
    """Metrics that the run has logged for the step."""


class NoEngine:
    """Engine of a cluster that does not sample."""

    async def generate(self, prompt: Sequence[int], params: SamplingParams) -> Completion:
        raise RuntimeError("a replay does not sample")

    def update_weights(self, model: Decoder, version: int) -> None:
        """Ignore new weights."""

    def close(self) -> None:
        """Hold nothing."""


class ObservedCluster(Cluster):
    """Cluster that calls `observe` before each update of the actor."""

    observe: Callable[[Trainer, Batch], None] | None = None

    def update_actor(self, batch: Batch, *, update: bool) -> Metrics:
        if self.observe is not None:
            self.observe(self.actor, batch)
        return super().update_actor(batch, update=update)


def replay(
    run: str | Path,
    step: int,
    *,
    model: str | Path | None = None,
    changes: Sequence[str] = (),
    observe: Observe | None = None,
) -> Replayed:
    """Repeat step `step` of an RL stage on its recorded trajectories.

    `run`: the output of a run (its last started stage) or the folder of a stage. The weights are those of the
    checkpoint before the step (of step 1: the start), or of `model`, a folder or hub id. `changes`: settings of the
    stage, such as `algorithm.clip_high=0.3`. `observe`: called before each update. ConfigError where trajectories or
    checkpoint are missing.
    """
    output, name = find_stage(Path(run))
    config, section = _configured(output, name, changes)
    add_family_file(config.model)
    tokenizer = tokenizer_of(output, name, config)
    recorded = read_record(output / name / TRAJECTORIES, step)
    stage = open_stage(output, name, config, tokenizer, mesh_of(config))
    weights = [reward.weight for reward in section.rewards]
    if (turns := section.env or section.agent) is not None:
        weights.append(turns.weight)
    of_rewards = dict(zip(recorded.rewards.parts_PG, weights, strict=True))
    algorithm = Algorithm.of(section, of_rewards)
    trainer = make_policy_trainer(stage, section, algorithm.loss)
    cluster = _cluster(stage, section, trainer, algorithm)
    cluster.version = recorded.version
    cluster.observe = None if observe is None else partial(observe, algorithm.loss)
    if model is not None:
        _use_model(trainer, stage, str(model))
    elif recorded.before:
        _restore(trainer, stage.folder, recorded)
    acted = Acted(
        version=recorded.version,
        groups_P=recorded.groups_P,
        rewards=recorded.rewards,
        weights=of_rewards,
        useful_P=None if section.refill is None else recorded.useful_P,
        metrics=group_metrics(recorded.rewards.total_PG, section.pass_above),
    )
    result = learn(cluster, algorithm, acted, step_settings(section, config.seed), Timer())
    return Replayed(
        step=step, batches=result.parts, metrics=to_host(result.metrics), logged=_logged(output, name, step)
    )


def lines_of(found: Replayed) -> list[str]:
    """Table of the metrics as replayed and as logged by the run."""
    names = [name for name in found.metrics if not name.startswith(MEASURED)]
    width = max(map(len, names))
    rows = [f"{'step ' + str(found.step):{width}} {'replayed':>14} {'logged':>14}"]
    for name in names:
        logged = found.logged.get(name, math.nan)
        rows.append(f"{name:{width}} {found.metrics[name]:14.7g} {logged:14.7g}")
    return rows


def _configured(output: Path, name: str, changes: Sequence[str]) -> tuple[RunConfig, RLSection]:
    """Configuration of the run and its stage with the changes. ConfigError for a stage that cannot be replayed."""
    index = stage_names(load_recorded(output / CONFIG_NAME)).index(name)
    config = load_config(output / CONFIG_NAME, [f"stages.{index}.{change}" for change in changes])
    section = config.stages[index]
    if not isinstance(section, RLSection):
        raise ConfigError(f"replay: {name} is a stage of kind {section.kind}; only those of kind rl can be replayed")
    if section.algorithm.entropy_target is not None:
        raise ConfigError(f"replay: {name} has an entropy_target, whose coefficient the record lacks; set it to null")
    if section.teachers:
        raise ConfigError(f"replay: {name} has teachers, which the record lacks; only stages without can be replayed")
    return config, section


def _cluster(stage: StageRun, section: RLSection, trainer: Trainer, algorithm: Algorithm) -> ObservedCluster:
    """Cluster without an engine, of the roles at the start of the stage."""
    reference = make_reference(stage, section, trainer) if algorithm.needs_reference else None
    critic = None if algorithm.critic is None else make_critic(stage, section, algorithm.critic.loss)
    roles: dict[str, Any] = {"reference": reference, "critic": critic}
    trainer.companions.update({name: role for name, role in roles.items() if role is not None})
    return ObservedCluster(trainer, NoEngine(), Shared(trainer), **roles)


def _restore(trainer: Trainer, folder: Path, recorded: Recorded) -> None:
    with Checkpointer(folder / "checkpoints", read_only=True) as checkpointer:
        try:
            # Another algorithm may have no critic or reference of its own.
            state, host = checkpointer.restore(recorded.before, trainer.state(), partial=True)
        except ConfigError as error:
            raise ConfigError(
                f"{error}; to replay step {recorded.step} give a model, or run with checkpoint_every such that a "
                f"checkpoint of step {recorded.before} is kept"
            ) from error
    trainer.restore(state, host["step"], host["skipped_updates"])


def _use_model(trainer: Trainer, stage: StageRun, path: str) -> None:
    """Give the trainer the parameters of another model of the same kind."""
    if has_lora(trainer.model):
        raise ConfigError("replay: the run trains an adapter, which another model does not have; replay a checkpoint")
    given = ModelWeights(replace(stage, source=None, source_name=path).load_model()).read()
    state = trainer.state()
    if lacking := sorted(state["params"].keys() - given.keys()):
        raise ConfigError(f"replay: {path} is a model of another kind: it has no {lacking[0]}")
    trainer.restore({**state, "params": {name: given[name] for name in state["params"]}}, trainer.step_number)


def _logged(output: Path, name: str, step: int) -> Mapping[str, float]:
    """Metrics of a step's training, not of its evaluation; none if the run was stopped before it logged them."""
    found: dict[str, float] = {}
    for text in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if line["stage"] == name and line["step"] == step and "grad_norm" in line:
            found = {key: value for key, value in line.items() if isinstance(value, float) and key != "time"}
    return found
