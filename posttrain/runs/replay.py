"""Replay of a recorded step: batch, loss and metrics from its trajectories, without sampling, and the loss of each
token."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from posttrain.batch import Batch, TokenStats
from posttrain.cluster.cluster import Cluster
from posttrain.cluster.sync import Shared
from posttrain.config import RLSection, RunConfig
from posttrain.config.yaml_file import load_config, load_recorded
from posttrain.data.prompt_images import PromptImages
from posttrain.errors import ConfigError
from posttrain.losses.policy import PolicyLoss
from posttrain.losses.reduce import Reduction
from posttrain.metrics import Metrics, Timer, to_host
from posttrain.models.decoder import Decoder
from posttrain.rl.algorithms import Algorithm
from posttrain.rl.collector import ScoredRollouts
from posttrain.rl.metrics import group_metrics
from posttrain.rl.step import learn
from posttrain.rl.store import Recorded, read_record, step_before
from posttrain.rollout.records import recorded_steps
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

SHOWN_STEPS = 20
"""Steps that a line names."""
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

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, *, images: PromptImages | None = None
    ) -> Completion:
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
    rollouts = ScoredRollouts(
        version=recorded.version,
        groups_P=recorded.groups_P,
        rewards=recorded.rewards,
        weights=of_rewards,
        useful_P=None if section.refill is None else recorded.useful_P,
        metrics=group_metrics(recorded.rewards.total_PG, section.pass_above),
    )
    result = learn(cluster, algorithm, rollouts, step_settings(section, config.seed), Timer())
    return Replayed(
        step=step, batches=result.parts, metrics=to_host(result.metrics), logged=_logged(output, name, step)
    )


def shown_steps(steps: Sequence[int]) -> str:
    """Numbers of steps in a line, of many the newest."""
    newest = ", ".join(map(str, steps[-SHOWN_STEPS:])) or "none"
    return newest if len(steps) <= SHOWN_STEPS else f"{newest} and {len(steps) - SHOWN_STEPS} earlier ones"


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
    critic = None if algorithm.critic is None else make_critic(stage, section, algorithm.critic.loss, trainer.model)
    roles: dict[str, Any] = {"reference": reference, "critic": critic}
    trainer.companions.update({name: role for name, role in roles.items() if role is not None})
    return ObservedCluster(trainer, NoEngine(), Shared(trainer), **roles)


def replayable_steps(run: str | Path) -> tuple[list[int], list[int]]:
    """Recorded steps of an RL stage whose weights are there, the start or the checkpoint before them, and the others,
    which need a model. `run`: as in `replay`."""
    output, name = find_stage(Path(run))
    records = output / name / TRAJECTORIES
    with Checkpointer(output / name / "checkpoints", read_only=True) as checkpointer:
        known = {0, *checkpointer.steps()}
    steps = recorded_steps(records)
    whole = [step for step in steps if step_before(records, step) in known]
    return whole, sorted({*steps} - {*whole})


def _restore(trainer: Trainer, folder: Path, recorded: Recorded) -> None:
    with Checkpointer(folder / "checkpoints", read_only=True) as checkpointer:
        try:
            # Another algorithm may have no critic or reference of its own.
            state, host = checkpointer.restore(recorded.before, trainer.state(), partial=True)
        except ConfigError as error:
            raise ConfigError(
                f"{error}; to replay step {recorded.step} give a model, or run with checkpoint_every such that a "
                f"checkpoint of step {recorded.before} is kept; without either there are the steps "
                f"{shown_steps(replayable_steps(folder)[0])}"
            ) from error
    trainer.restore(state, host["step"])


def _use_model(trainer: Trainer, stage: StageRun, path: str) -> None:
    """Give the trainer the parameters of another model of the same kind."""
    if has_lora(trainer.model):
        raise ConfigError("replay: the run trains an adapter, which another model does not have; replay a checkpoint")
    own = replace(stage, source=None, source_name=path, model=stage.model.grown)
    given = ModelWeights(own.load_model()).read()
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


Columns = dict[str, np.ndarray]
PLACE = ("update", "group", "sample", "part", "position")
"""Columns that name a token: the update of the step, its sample, token sequence of the sample, position in it."""


@dataclass(frozen=True, kw_only=True)
class TokenLosses:
    """Loss of each token of a step. A token is in several updates if the step has several epochs."""

    columns: Columns
    """`PLACE`, then `weight`, `advantage`, `logp`, `old_logp`, `ref_logp` (NaN: none), `entropy` (NaN: none), `ratio`,
    `clipped` (-1 at the lower bound, 1 at the upper), `loss`, `share`."""
    loss: float
    """Loss of the step as replayed; the sum of `share`."""
    logged: float
    """Loss of the step as the run logged it."""


@dataclass(frozen=True, kw_only=True)
class _Update:
    batch: Batch
    values: Columns
    """Arrays [B, T]; `total` is what each token adds to the sum of the loss."""
    weight: float


def token_losses(run: str | Path, step: int) -> TokenLosses:
    """Replay step `step` of an RL stage (see `replay`) and return the loss of each token.

    ConfigError where the step cannot be replayed, and for a loss of one's own.
    """
    updates: list[_Update] = []
    found = replay(run, step, observe=lambda *seen: updates.append(_observed(*seen)))
    output, name = find_stage(Path(run))
    recorded = read_record(output / name / TRAJECTORIES, step)
    weight = sum(update.weight for update in updates)
    parts = [part for number, update in enumerate(updates) for part in _sequences(number, update, recorded, weight)]
    if not parts:
        raise ConfigError(f"view: step {step} has no sample in its loss; look at another step")
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return TokenLosses(columns=columns, loss=found.metrics["loss"], logged=found.logged.get("loss", float("nan")))


def shares(reduce: Reduction, values: Float[np.ndarray, "B T"], batch: Batch) -> tuple[Float[np.ndarray, "B T"], float]:
    """Part of each token in the total of a reduction, and the reduction's weight. Reductions are linear in their
    values: a token's part is its value times the derivative of the total."""
    weight, segments = jnp.asarray(batch.loss_weight), jnp.asarray(batch.segments)
    of_samples = None if batch.sample_shares is None else jnp.asarray(batch.sample_shares)
    slope = jax.grad(lambda x: reduce(x, weight, segments, of_samples).total)(jnp.asarray(values))
    reduced = reduce(jnp.asarray(values), weight, segments, of_samples)
    return np.asarray(slope, np.float64) * values, float(reduced.weight)


def _observed(loss: Any, trainer: Trainer, batch: Batch) -> _Update:
    """Loss of each token of an update, under the weights before it."""
    if not isinstance(loss, PolicyLoss):
        raise ConfigError(
            f"view: {type(loss).__name__} is a loss of your own; only a PolicyLoss is known token by token"
        )
    kept = list[TokenStats]()
    trainer.evaluate([batch], each=lambda _, stats: kept.append(stats))
    (stats,) = kept
    tokens = loss.tokens(stats, batch)
    mask = np.asarray(tokens.terms.mask)

    def masked(values: object) -> np.ndarray:
        return np.where(mask, np.asarray(values, np.float32), np.float32(0))

    per_token = masked(tokens.loss)
    total, weight = shares(loss.reduce, per_token, batch)
    # -1 below, 1 above: no token is beyond both.
    clipped = np.zeros(mask.shape, np.int8)
    for name, changed in tokens.bounded.items():
        clipped[np.asarray(changed)] = -1 if name == "low" else 1
    absent = np.full(mask.shape, np.nan, np.float32)
    values = {
        "weight": np.asarray(batch.loss_weight, np.float32),
        "advantage": masked(tokens.terms.advantages),
        "logp": np.asarray(stats.logps, np.float32),
        "old_logp": masked(tokens.proximal),
        "ref_logp": absent if batch.ref_logps is None else masked(batch.ref_logps),
        "entropy": absent if stats.entropy is None else np.asarray(stats.entropy, np.float32),
        "ratio": masked(tokens.terms.ratio),
        "clipped": clipped,
        "loss": per_token,
        "total": total,
    }
    return _Update(batch=batch, values=values, weight=weight)


def _sequences(number: int, update: _Update, recorded: Recorded, weight: float) -> Iterator[Columns]:
    """Columns of each sequence of an update's batch, with its place in the record."""
    place_of = _places(recorded)
    batch = update.batch
    tokens, segments = np.asarray(batch.tokens), np.asarray(batch.segments)
    logps, advantages = np.asarray(batch.sampler_logps, np.float32), np.asarray(batch.advantages)
    for row in range(segments.shape[0]):
        for segment in range(1, int(segments[row].max(initial=0)) + 1):
            where = np.flatnonzero(segments[row] == segment)
            learned = np.asarray(batch.loss_weight)[row, where] > 0
            mean = float(advantages[row, where][learned].mean()) if learned.any() else 0.0
            group, sample, part = place_of(_key(tokens[row, where], logps[row, where]), mean)
            columns = {name: array[row, where] for name, array in update.values.items()}
            named = {"update": number, "group": group, "sample": sample, "part": part}
            yield {
                **{name: np.full(len(where), value, np.int64) for name, value in named.items()},
                "position": np.arange(len(where), dtype=np.int32),
                **{name: array for name, array in columns.items() if name != "total"},
                "share": columns["total"] / weight if weight else columns["total"] * 0,
            }


def _places(recorded: Recorded) -> Callable[[bytes, float], tuple[int, int, int]]:
    """Lookup of a packed sequence's group, sample and part by its tokens and their log-probabilities. Equal sequences
    are told apart by their advantage; each is found once."""
    known: dict[bytes, list[tuple[float, tuple[int, int, int]]]] = defaultdict(list)
    for p, group in enumerate(recorded.groups_P):
        for g, sample in enumerate(group):
            advantage = 0.0 if recorded.advantages_PG is None else float(recorded.advantages_PG[p, g])
            for part, one in enumerate(sample.rows):
                sampled = np.asarray(one.sampled, bool)
                key = _key(one.tokens, np.where(sampled, np.asarray(one.logps, np.float32), np.float32(0)))
                known[key].append((advantage, (sample.group, sample.sample, part)))

    def place_of(key: bytes, advantage: float) -> tuple[int, int, int]:
        left = known[key]
        best = min(range(len(left)), key=lambda i: np.nan_to_num(abs(left[i][0] - advantage), nan=np.inf))
        return left.pop(best)[1]

    return place_of


def _key(tokens: Sequence[int] | np.ndarray, logps: np.ndarray) -> bytes:
    return np.asarray(tokens, np.int32).tobytes() + np.asarray(logps, np.float32).tobytes()
