"""Run context of one stage: folder, devices, source model, saved and best model, sinks and checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from posttrain.batch import DraftLoss, ScoreLoss, TokenLoss
from posttrain.config import (
    DistillSection,
    ModelSection,
    OnlineSection,
    PlacementSection,
    ProfileSection,
    Remat,
    RLSection,
    RunConfig,
    SavedActivations,
    SFTSection,
    TrainSection,
)
from posttrain.data.tokenizer import Tokenizer
from posttrain.diagnosis.live import DiagnosisSink
from posttrain.errors import ConfigError, RunError, placed
from posttrain.evaluation.at_k import Record, paired
from posttrain.kernels.logits.chunk_stats import Terms
from posttrain.mesh import mesh_sizes
from posttrain.metrics import Sample, Timer
from posttrain.models.activations import shown_remat
from posttrain.models.adapter import without_dropout
from posttrain.models.decoder import Decoder
from posttrain.runtime import processes
from posttrain.runtime.files import write_whole
from posttrain.statistics import LEVEL, PairedDifference
from posttrain.tracking.console import console, progress_bar
from posttrain.tracking.profile import StepRecorder
from posttrain.tracking.sink import Sink
from posttrain.tracking.sinks import Sinks, open_sinks
from posttrain.train.checkpoint import Checkpointer
from posttrain.train.loop import Every, Resumable, StopRequest, TrainingLoop, check_origin, restore_latest
from posttrain.train.objective import TrainSettings
from posttrain.train.trainer import Trainer
from posttrain.train.transformations import make_optimizer, make_schedule
from posttrain.weights import locate
from posttrain.weights.files import find_folder
from posttrain.weights.load import init_model, load_model, vocabulary_of
from posttrain.weights.lora import ParameterCount, count_parameters, has_lora, parameter_rows
from posttrain.weights.save import SavedTokenizer, save_model

BEST, WHY_BEST = "best", "best.json"
NO_EVIDENCE = "no evidence: no evaluation is significantly better than the start"


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Evaluation on held-out data, and its metrics for the sinks."""

    evaluate: Callable[[], Record]
    metrics: Callable[[Record], Mapping[str, float]]
    difference: Callable[[Record, Record], Record] | None = None
    """Comparison of the evaluations before and after training."""
    decides: str | None = None
    """Metric by which the best model is kept, see `BestModel`; None: none is."""


@dataclass(frozen=True, kw_only=True)
class StageRun:
    """Run context of one stage: folder, model source, mesh, sinks, checkpoints and training loop."""

    name: str
    kind: str
    sampled: bool
    """True if the stage trains on its own samples."""
    folder: Path
    """Folder below the run's output; holds checkpoints and, when the stage is finished, `model/` and `result.json`."""
    output: Path
    model: ModelSection
    source: Path | None
    """Model of the previous stage; None: the configuration's model."""
    source_name: str | None
    """Folder or hub id of the configuration's model."""
    adapter: str | None
    """Folder or hub id of the adapter whose training the stage continues."""
    seed: int
    mesh: Mesh
    devices: RoleDevices
    tokenizer: Tokenizer
    tensorboard: bool
    profile: ProfileSection | None
    stop: StopRequest
    trackers: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Dotted names and values of the configuration, for dashboards."""
    watchers: Sequence[Sink] = ()
    """Sinks of the caller, in addition to the run's own."""
    gather_once: bool = False
    """Gather the weights once an update, see `TrainSettings`."""
    strict: bool = False
    """End where the newest checkpoint is damaged, in place of resuming from the one before."""
    write_run: Callable[[], None] | None = None
    """Writes what a call changes of the run's folder, before the first step; None: the stage is not run."""

    @property
    def model_folder(self) -> Path:
        return self.folder / "model"

    def load_model(self) -> Decoder:
        """Load the model at the start of the stage; deterministic."""
        m = self.model
        common: dict[str, Any] = {
            "dtype": m.dtype,
            "compute_dtype": m.compute_dtype,
            "lora": m.lora,
            "quantize": m.quantize,
            "mesh": self.mesh,
            "remat": m.remat,
            "attention": m.attention,
            "decode_attention": m.decode_attention,
            "grouped_matmul": m.grouped_matmul,
            "seed": self.seed,
            "vision": m.vision,
        }
        if self.path is None:
            model = init_model(self._init, **common)
        else:
            num_tokens = self._num_tokens(vocabulary_of(self.path, self.adapter))
            own: dict[str, Any] = {"long_context": m.long_context, "adapter": _relative(self.adapter)}
            model = load_model(self.path, num_tokens=num_tokens, upscale=m.upscale, **own, **common)
            if self.sampled:
                # The trainer's model would differ from the sampler's.
                without_dropout(model)
        print_parameters(model)
        return model

    def train_settings(self, section: TrainSection, *, temperature: float, terms: Terms) -> TrainSettings:
        """Settings of the stage's trainer, with dropout where the stage does not train on its own samples."""
        seed = None if self.sampled else self.seed
        return TrainSettings.of(section, temperature=temperature, dropout_seed=seed, terms=terms)

    def make_trainer(
        self,
        section: TrainSection,
        model: Decoder,
        loss: TokenLoss | ScoreLoss | DraftLoss,
        settings: TrainSettings,
        teachers: Sequence[Decoder] = (),
    ) -> Trainer:
        """Make the trainer of `model` on the stage's mesh, with the section's optimizer."""
        optimizer = make_optimizer(section.optimizer, section.steps, self.seed, model=model, matching=settings.matching)
        settings = replace(settings, gather_once=self.gather_once)
        return Trainer(model, loss, optimizer, settings, mesh=self.mesh, teachers=teachers)

    def _num_tokens(self, rows: int) -> int | None:
        """Number of embedding rows that are tokens; None: all, or more tokens than rows."""
        ids = self.tokenizer.num_ids
        if ids == rows:
            return None
        what = "the rest is never sampled" if ids < rows else "a text with one of the tokens beyond is refused"
        console().print(f"vocabulary: {ids:,} token ids, {rows:,} rows in the embedding; {what}", highlight=False)
        return ids if ids < rows else None

    @property
    def path(self) -> str | Path | None:
        """Path or hub id of the stage's model; None: random weights."""
        return self.source or self.source_name

    @property
    def _init(self) -> dict[str, Any]:
        assert self.model.init is not None
        return locate.init_fields(self.model.init, self.tokenizer)

    @cached_property
    def origin(self) -> locate.Origin:
        """Origin of the weights from which the stage's checkpoints continue."""
        if self.path is None:
            return locate.origin_of_init(self._init, self.seed)
        origin = locate.origin_of_folder(str(self.path), find_folder(self.path), self.model.upscale)
        if self.adapter is None:
            return origin
        adapter = locate.origin_of_adapter(find_folder(self.adapter))
        parts = {f"adapter/{file}": digest for file, digest in adapter.items()}
        return replace(origin, parts={**origin.parts, **parts})

    def check_source(self) -> None:
        """ConfigError if the stage began with another model than it would load now; a new one begins with this."""
        source = self.remember(
            "source",
            lambda: {
                "name": _relative(self.origin.name),
                "parts": self.origin.parts,
                "adapter": _relative(self.adapter),
            },
        )
        check_origin(self.folder, source["parts"], self.origin)

    @contextmanager
    def training(
        self, trainer: Trainer, data: Resumable, section: TrainSection, held_out: HeldOut | None
    ) -> Iterator[Training]:
        """Open checkpoints, restore trainer and data from the newest one, and only then write to the run's folder.

        After the last step write result and model; the model's folder marks the stage as finished.
        """
        # Also before the first checkpoint: the initial evaluation belongs to this model.
        self.check_source()
        processes.check_same(f"{self.name}: the data", json.dumps(data.state(), sort_keys=True))
        num_steps, best = section.steps, self._best(section, held_out)
        with Checkpointer(self.folder / "checkpoints") as checkpointer:
            restored = restore_latest(trainer, data, checkpointer, self.origin, strict=self.strict)
            # A stage that was ended, and whose steps have grown since, goes on.
            ended = restored.ended_of == num_steps
            if self.write_run is not None:
                self.write_run()
            if trainer.step_number:
                console().print(f"resuming after step {trainer.step_number} of {num_steps}")
            start = trainer.step_number if trainer.step_number else -1
            diagnosis = self._diagnosis(section, start)
            sinks = open_sinks(
                self.output,
                stage=self.name,
                kind=self.kind,
                num_steps=trainer.step_number if ended else num_steps,
                tensorboard=self.tensorboard,
                start_step=start,
                sample_tables=isinstance(section, OnlineSection | SFTSection) and section.samples_every is not None,
                trackers=self.trackers,
                settings=self.settings,
                watchers=[*diagnosis, *self.watchers],
            )
            try:
                if restored.damaged:
                    sinks.write(trainer.step_number, {"checkpoint/damaged": float(len(restored.damaged))})
                with TrainingLoop(
                    trainer,
                    data,
                    origin=self.origin,
                    num_steps=num_steps,
                    checkpointer=checkpointer,
                    sink=sinks,
                    learning_rate=make_schedule(section.optimizer, num_steps),
                    every=Every(checkpoint=section.checkpoint_every, evaluation=section.eval_every),
                    evaluate=None if held_out is None else lambda: training.evaluate(),
                    stop=self.stop,
                    ended=ended,
                    recorder=self._recorder(num_steps),
                ) as loop:
                    training = Training(self, section, loop, trainer, sinks, held_out, best, diagnosis)
                    yield training
            finally:
                sinks.close()
        assert loop.is_done, "the body must do all steps"
        if section.optimizer.ema is not None and section.optimizer.ema.keep_last:
            save_model(trainer.model, self.folder / "last", tokenizer=self.tokenizer)
        with trainer.averaged():
            self._finish(trainer.model, training.result)

    def _diagnosis(self, section: TrainSection, start: int) -> list[DiagnosisSink]:
        """Sink of the diagnosis, in the process that writes files."""
        if not processes.writes():
            return []
        sink = DiagnosisSink(self.output, self.name, section, kind=self.kind, model=self.model, start_step=start)
        return [sink]

    def _best(self, section: TrainSection, held_out: HeldOut | None) -> BestModel | None:
        if held_out is None or held_out.decides is None:
            return None
        looks = 1 if section.eval_every is None else 1 + (section.steps - 1) // section.eval_every
        return BestModel(self.folder, held_out.decides, looks, self.tokenizer)

    def _recorder(self, num_steps: int) -> StepRecorder | None:
        if self.profile is None or not processes.writes():
            return None
        return StepRecorder(self.folder / "profile", self.profile.steps, num_steps)

    def _finish(self, model: Decoder, result: Mapping[str, Any]) -> None:
        if processes.writes():
            (self.folder / "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
        with progress_bar(f"saving {self.model_folder}"):
            save_model(model, self.model_folder, tokenizer=self.tokenizer)
        processes.wait_for_all(f"model of {self.name}")

    def remember(self, name: str, make: Callable[[], Any]) -> Any:
        """Return `make()`, stored as JSON in the stage's folder for resumed runs; all processes make it together."""
        file = self._file(name)
        if not processes.agreed(file.exists):
            text = json.dumps(make())
            if processes.writes():
                write_whole(file, text)
            processes.wait_for_all(str(file))
        return json.loads(file.read_text(encoding="utf-8"))

    def with_remat(self, chosen: Remat) -> StageRun:
        """Context with the activations chosen for `remat: auto`, or those with which the stage began."""
        kept = self.remember("remat", lambda: chosen if isinstance(chosen, str) else chosen.model_dump(mode="json"))
        remat: Remat = SavedActivations(**kept) if isinstance(kept, dict) else kept
        made = f"{self.name}: remat auto: {shown_remat(remat)}"
        console().print(made if remat == chosen else f"{made}, as when the stage began", markup=False, soft_wrap=True)
        return replace(self, model=self.model.model_copy(update={"remat": remat}))

    def with_gather(self, chosen: bool) -> StageRun:
        """Context that gathers weights once an update as chosen, or as when the stage began."""
        return replace(self, gather_once=self.remember("gather", lambda: chosen))

    def forget(self, name: str) -> None:
        """Remove a value stored by `remember`."""
        if processes.writes():
            self._file(name).unlink(missing_ok=True)

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.json"


class Training:
    """Training of a stage, step by step: iterate, and `log` the metrics of each step.

    Held-out data is evaluated before the first and after the last step, once each per run, even if it is resumed.
    """

    def __init__(
        self,
        stage: StageRun,
        section: TrainSection,
        loop: TrainingLoop,
        trainer: Trainer,
        sinks: Sinks,
        held_out: HeldOut | None,
        best: BestModel | None,
        diagnosis: Sequence[DiagnosisSink],
    ):
        self.sinks, self.folder = sinks, stage.folder
        self.result: dict[str, Any] = {}
        """Evaluations `before` and `after`, their `difference`, the `best` model if one is kept, and after which step a
        callback has `ended` the stage."""
        self._stage, self._loop, self._trainer = stage, loop, trainer
        self._held_out, self._best, self._diagnosis = held_out, best, diagnosis
        monitor = section.monitor if isinstance(section, OnlineSection) else None
        self._stops = monitor is not None and monitor.on_alarm == "stop"
        self._latest: dict[int, Record] = {}
        """Record of the newest evaluation between two steps, by its step."""

    def __iter__(self) -> Iterator[int]:
        """Yield the number of each remaining step, from 1."""
        self._evaluate("before", 0)
        if not self._loop.is_done:
            # Evaluated with other weights, if the newest checkpoints were removed.
            self._stage.forget("after")
        yield from self._loop
        if self._loop.ended:
            self.result["ended"] = self._trainer.step_number
        with self._trainer.averaged():
            self._evaluate("after", self._trainer.step_number)
            if self._best is not None:
                self._consider(self.result["after"])
                self.result["best"] = self._best.result()
        if self._held_out is not None and self._held_out.difference is not None:
            self.result["difference"] = self._held_out.difference(self.result["before"], self.result["after"])

    def evaluate(self) -> Mapping[str, float]:
        """Evaluate between two steps, and keep the model if it is the best so far."""
        assert self._held_out is not None
        with self._trainer.averaged():
            self._consider(found := self._held_out.evaluate())
        self._latest = {self._trainer.step_number: found}
        return self._held_out.metrics(found)

    @property
    def num_hacks(self) -> int:
        """Kinds of reward hacking that the diagnosis has told so far; 0 in processes that write no files."""
        return sum(len(sink.hacks) for sink in self._diagnosis)

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Log the metrics of the completed step. RunError, in every process, for a hack with `on_alarm: stop`."""
        self._loop.log(metrics)
        if self._stops:
            hacks = processes.agreed(lambda: [hack for sink in self._diagnosis for hack in sink.hacks])
            if hacks:
                raise RunError(
                    f"{hacks[0]}; monitor.on_alarm=stop. Change the reward and start anew, or set on_alarm: warn"
                )

    def write_samples(self, draw: Callable[[], tuple[Sequence[Sample], Mapping[str, float]]]) -> None:
        """Draw samples between two steps, by the weights that evaluations have, and write them with their metrics."""
        self._loop.flush()
        timer = Timer()
        with timer("samples"), self._trainer.averaged():
            samples, metrics = draw()
        step = self._trainer.step_number
        self.sinks.samples(step, samples)
        self.sinks.write(step, {**metrics, **timer.metrics()})

    def _consider(self, found: Record) -> None:
        if self._best is not None:
            self._best.consider(self._trainer.step_number, self.result["before"], found, self._trainer.model)

    def _evaluate(self, when: str, step: int) -> None:
        held_out = self._held_out
        if held_out is None:
            return
        # A stage may end where it was evaluated just now.
        known = self._latest.get(step)
        self.result[when] = self._stage.remember(when, held_out.evaluate if known is None else lambda: known)
        if self._trainer.step_number == step and known is None:
            self.sinks.write(step, held_out.metrics(self.result[when]))


def _relative(name: str | None) -> str | None:
    """Path from the current folder if below it, so that a moved project finds it; other names are unchanged."""
    below = name is not None and Path(name).is_absolute() and Path(name).is_relative_to(Path.cwd())
    return str(Path(name).relative_to(Path.cwd())) if name is not None and below else name


def read_source(folder: Path) -> tuple[str | None, str | None]:
    """Folders or hub ids of a stage's model and adapter; None: random weights, no adapter, or a stage never begun."""
    file = folder / "source.json"
    source = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"name": None}
    return None if source["name"] == locate.RANDOM_WEIGHTS else source["name"], source.get("adapter")


def print_parameters(model: Decoder) -> None:
    count = count_parameters(model)
    line = f"model: {model.config.model_type}, {model.config.num_layers} layers, {count.total:,} parameters"
    if count.trainable != count.total:
        line += f", {count.trainable:,} trained ({count.trainable / count.total:.2%})"
    console().print(f"{line}; {jax.device_count()} x {jax.devices()[0].device_kind}", highlight=False)
    if has_lora(model):
        _print_trained(parameter_rows(model))


def _print_trained(rows: Sequence[ParameterCount]) -> None:
    from rich.table import Column, Table

    table = Table("module", *(Column(name, justify="right") for name in ("parameters", "trained", "share")))
    for row in rows:
        table.add_row(row.kind, f"{row.total:,}", f"{row.trainable:,}", f"{row.share:.2%}")
    console().print(table)


class BestModel:
    """Model of the best evaluation, in `best/` of a stage's folder; `best.json` beside it says which step, and why.

    An evaluation is the best if its `metric` is above that at the start, and above that of the model saved before, each
    with p < 0.05 / `looks` in a paired test over prompts. `looks`, at least the number of evaluations after the start:
    the chance that a run without any effect saves a model is below 0.05 (Bonferroni).
    """

    def __init__(self, folder: Path, metric: str, looks: int, tokenizer: SavedTokenizer):
        self._folder, self._metric, self._tokenizer = folder, metric, tokenizer
        self._most, self._looks = round(1.0 - LEVEL, 12) / looks, looks

    def consider(self, step: int, start: Record, found: Record, model: Decoder) -> None:
        """Save the model if its evaluation is the best so far. A resumed run may consider a step again."""
        against_start, known = paired(start, found, self._metric), self._known()
        against_best = None if known is None else paired(known, found, self._metric)
        if not self._is_better(against_start) or (known is not None and not self._is_better(against_best)):
            return
        save_model(model, self._folder / BEST, tokenizer=self._tokenizer)
        why = {
            "step": step,
            "metric": self._metric,
            "p_below": self._most,
            "evaluations": self._looks,
            "against_start": _plain(against_start),
            "against_step": None if known is None else known["step"],
            "against_best": _plain(against_best),
            "values": {self._metric: found["values"][self._metric]},
        }
        if processes.writes():
            write_whole(self._folder / WHY_BEST, json.dumps(why))
        processes.wait_for_all(f"best model of step {step}")
        console().print(f"best model so far: step {step}, {self._metric} {against_start} above the start", markup=False)

    def result(self) -> dict[str, Any]:
        """Content of `best.json` without the values of prompts; without a best model, that there is no evidence."""
        known = self._known()
        if known is None:
            return {"step": None, "evidence": NO_EVIDENCE, "p_below": self._most, "evaluations": self._looks}
        return {name: value for name, value in known.items() if name != "values"}

    def _is_better(self, difference: PairedDifference | None) -> bool:
        return difference is not None and difference.mean > 0 and difference.p_value < self._most

    def _known(self) -> Mapping[str, Any] | None:
        file = self._folder / WHY_BEST
        if not processes.agreed(file.exists):
            return None
        known: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return known


def _plain(difference: PairedDifference | None) -> dict[str, Any] | None:
    return None if difference is None else asdict(difference)


@dataclass(frozen=True, kw_only=True)
class RoleDevices:
    """Devices that roles of a stage have for themselves; None: the actor's."""

    rollout: Sequence[jax.Device] | None = None
    reference: Sequence[jax.Device] | None = None
    critic: Sequence[jax.Device] | None = None


def devices_of_teachers(config: RunConfig, num_devices: int) -> int:
    """Number of devices reserved by teachers of any stage. ConfigError if none is left for training."""
    stages = [stage for stage in config.stages if isinstance(stage, DistillSection | RLSection)]
    taken = max((sum(one.num_own_devices for one in stage.teachers) for stage in stages), default=0)
    if taken >= num_devices:
        raise ConfigError(f"teachers: their meshes take {taken} devices, and there are {num_devices}; leave some")
    return taken


def num_training_devices(config: RunConfig, num_devices: int) -> int:
    """Number of devices that no teacher and no role of any stage reserves. ConfigError if none is left, or if a teacher
    that shares them has a mesh of another size."""
    left = num_devices - devices_of_teachers(config, num_devices)
    stages = [stage for stage in config.stages if isinstance(stage, OnlineSection)]
    taken = max((stage.placement.num_own_devices for stage in stages), default=0)
    if taken >= left:
        raise ConfigError(
            f"placement: roles take {taken} devices for themselves, and {left} of {num_devices} are there for them and "
            "the actor; leave some"
        )
    taught = [stage for stage in config.stages if isinstance(stage, DistillSection | RLSection)]
    for teacher in (one for stage in taught for one in stage.teachers):
        if teacher.mesh is not None and teacher.devices == "shared":
            with placed(f"teachers: {teacher.title}: "):
                mesh_sizes(teacher.mesh, left - taken)
    return left - taken


def training_devices(config: RunConfig) -> list[jax.Device]:
    """Devices that no teacher and no role of any stage reserves. ConfigError if none is left."""
    devices = jax.devices()
    return devices[: num_training_devices(config, len(devices))]


def role_devices(config: RunConfig, placement: PlacementSection, devices: Sequence[jax.Device]) -> RoleDevices:
    """Devices of the roles of a stage, out of all: those before the teachers', the rollout engine's last."""
    left = devices[: len(devices) - devices_of_teachers(config, len(devices))]
    devices_of: dict[str, Sequence[jax.Device] | None] = {}
    for role in ("rollout", "reference", "critic"):
        count = getattr(placement, role).devices
        devices_of[role] = None if count is None else left[-count:]
        left = left[: len(left) - (count or 0)]
    return RoleDevices(**devices_of)
