"""Run: check everything, resume each stage, then print evaluations before and after, and the files written."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from posttrain.config import OnlineSection, PlacementSection, Remat, RunConfig, TrainSection, trains_on_samples
from posttrain.config.yaml_file import stage_settings
from posttrain.diagnosis.causes import Cause
from posttrain.diagnosis.live import end_of_run, tell
from posttrain.diagnosis.report import StageDiagnosis
from posttrain.diagnosis.words import count
from posttrain.errors import ConfigError, OutsideError, outside_error
from posttrain.evaluation.at_k import paired
from posttrain.evaluation.sequences import PROMPTS, SEQUENCES
from posttrain.kernels.platform import platform_of
from posttrain.mesh import make_mesh, row_shards
from posttrain.runs.folder import Growth, claimed, remember_devices, remember_versions
from posttrain.runs.prepare import keep_clock, prepare, write_counts
from posttrain.runtime import join, processes
from posttrain.runtime.files import check_writable
from posttrain.runtime.xla import enable_compile_cache
from posttrain.stages.context import RoleDevices, StageRun, role_devices, training_devices
from posttrain.stages.inputs import Prepared
from posttrain.stages.table import check_processes, check_row_tokens, row_notes, stage_kind, stage_names
from posttrain.statistics import PairedDifference, count_rows, paired_difference, prompt_numbers
from posttrain.tracking.console import console, cut, printable
from posttrain.tracking.log_files import RunLog, host_log
from posttrain.tracking.metrics_server import LastMetrics, MetricsSink, serving
from posttrain.tracking.sink import CallbackSink, OnSamples, OnStep, Sink
from posttrain.tracking.steps import means_of_functions, shown_number, with_interval
from posttrain.tracking.trackers import check_dashboards
from posttrain.train.loop import StopRequest, stop_on_signals
from posttrain.weights.locate import ModelFiles


def run(
    config: RunConfig,
    *,
    on_step: OnStep | None = None,
    on_samples: OnSamples | None = None,
    strict: bool = False,
    force: bool = False,
) -> list[str]:
    """Run the remaining steps of all stages; return the names of those that were trained.

    `on_step`, `on_samples`: functions that are called as `CallbackSink` says. `strict`: end where the newest checkpoint
    is damaged. `force`: begin what cannot fit the devices. Raises ConfigError for mistakes, before
    any work, Interrupted, and OutsideError.
    """
    enable_compile_cache()
    mesh = mesh_of(config)
    check_writable(Path(config.output))
    check_dashboards(tensorboard=config.tensorboard, trackers=config.trackers)
    log = RunLog()
    with log.copying(), serving(config.metrics_server) as last:
        prepared = prepare(config, offline_ok=False)
        config = prepared.config
        output, names = Path(config.output), stage_names(config)
        chosen = _memory_choices(config, prepared.files, mesh, force=force)
        with _outside_failures(output), claimed(prepared) as growth, host_log(output):
            log.claim(output)
            with stop_on_signals() as stop:
                for note in prepared.notes + row_notes(config, row_shards(mesh)):
                    console().print(note, markup=False, soft_wrap=True)
                watchers = [CallbackSink(on_step, on_samples, stop.end_stage)] if on_step or on_samples else []
                trained = _train_stages(prepared, mesh, watchers, stop, chosen, growth, log, last, strict=strict)
        results = [json.loads((output / name / "result.json").read_text(encoding="utf-8")) for name in names]
        if not trained:
            _print_nothing_trained(output, _finished(output / names[-1]))
        print_summary(output, names, results, config)
    return trained


def _train_stages(
    prepared: Prepared,
    mesh: Mesh,
    watchers: Sequence[Sink],
    stop: StopRequest,
    chosen: Sequence[Chosen],
    growth: Growth,
    log: RunLog,
    last: LastMetrics | None,
    *,
    strict: bool,
) -> list[str]:
    """Run the stages that are not done, each from the model of the one before; return their names."""
    config, output, names = prepared.config, Path(prepared.config.output), stage_names(prepared.config)
    source, trained = None, []

    def write_run() -> None:
        """Write what this call changes of the run's folder: a stage calls it when its data and its checkpoint are
        verified, so that a call that is refused changes nothing."""
        if processes.writes():
            write_counts(output, prepared.counts)
            keep_clock(output, prepared.tokenizer)
            remember_devices(output, config.mesh.slices)
            remember_versions(output)
            growth.write()
            log.open()

    for name, inputs, form, own in zip(names, prepared.stages, prepared.forms, chosen, strict=True):
        folder = output / name
        if processes.writes():
            folder.mkdir(exist_ok=True)
        stage = StageRun(
            name=name,
            kind=inputs.section.kind,
            sampled=trains_on_samples(inputs.section),
            folder=folder,
            output=output,
            model=config.model if source is None else config.model.grown,
            source=source,
            source_name=prepared.files.path,
            adapter=None if config.model.adapter is None else config.model.adapter.resolved,
            seed=config.seed,
            mesh=mesh,
            devices=role_devices(config, getattr(inputs.section, "placement", PlacementSection()), jax.devices()),
            tokenizer=prepared.tokenizer.with_form(form),
            tensorboard=config.tensorboard,
            profile=config.profile,
            stop=stop,
            trackers=config.trackers,
            settings=stage_settings(config, names.index(name)),
            watchers=watchers if last is None else [*watchers, MetricsSink(last, name)],
            strict=strict,
            write_run=write_run,
        )
        source = stage.model_folder
        if name not in growth.names and processes.agreed(source.exists):
            console().print(f"{name}: done before; its model is {source}")
            continue
        if processes.any_of(stop.requested):
            raise stop.interrupted(f"stopped before {name}")
        trained.append(name)
        stop.begin_stage()
        if config.model.remat == "auto":
            stage = stage.with_remat(own.remat)
        if own.gather_once is not None:
            stage = stage.with_gather(own.gather_once)
            console().print(f"{name}: gather: {'update' if stage.gather_once else 'layer'}", highlight=False)
        console().rule(f"{name}: {inputs.section.steps} steps", align="left")
        kind = stage_kind(stage.kind)
        print_placement(inputs.section, mesh, stage.devices, kind.roles(inputs))
        kind.run(stage, inputs)
        gc.collect()  # trainer and programs form a cycle that keeps the weights alive
    return trained


class Chosen(NamedTuple):
    """Settings of a stage that are decided by the memory of the devices."""

    remat: Remat
    gather_once: bool | None
    """None where weights can only be gathered in each layer."""


SUSPECT = 64
"""Part of the host's memory, one over this, below which the weights of a run on CPU leave no doubt that it fits."""


def _memory_choices(config: RunConfig, files: ModelFiles, mesh: Mesh, *, force: bool) -> list[Chosen]:
    """`model.remat` and `mesh.gather` of each stage. ConfigError for `auto` where it cannot be decided and, without
    `force`, for a stage whose arrays do not fit the devices."""
    own, stated = config.model.remat, _stated_memory(mesh)
    memory = processes.agreed(lambda: stated or host_memory(mesh))
    gathers = mesh.shape["fsdp"] > 1 and (platform_of(mesh) != "cpu" or config.mesh.gather != "auto")
    model = files.config
    size = 0 if model is None else 2 * model.embed_dim * (model.vocab_size + 4 * model.num_layers * model.embed_dim)
    suspect = stated is not None or size > memory // SUSPECT
    if own != "auto" and (model is None or not (gathers or (suspect and not force))):
        return [Chosen(own, None) for _ in config.stages]
    from posttrain.runs.memory import choices_of

    limit = None if force or not suspect else memory
    return [
        Chosen(*choices_of(name, section, config, files, mesh, memory, limit))
        for name, section in zip(stage_names(config), config.stages, strict=True)
    ]


def _stated_memory(mesh: Mesh) -> int | None:
    """Bytes that programs can use on a device of the mesh, where its backend says so."""
    return (mesh.local_devices[0].memory_stats() or {}).get("bytes_limit")


def host_memory(mesh: Mesh) -> int:
    """Part of the host's memory for each of its devices, which share it on CPU."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(mesh.local_devices)


def _print_nothing_trained(output: Path, when: str) -> None:
    console().print(
        f"NOTHING WAS TRAINED: {output} holds this run, finished on {when} with the same settings and code; these are "
        f"its results. To train again give another output, such as output={output}-2, or delete the folder.",
        style="bold yellow",
        markup=False,
        soft_wrap=True,
    )


def _finished(folder: Path) -> str:
    """Date and time at which a stage was finished."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime((folder / "result.json").stat().st_mtime))


def mesh_of(config: RunConfig) -> Mesh:
    """Mesh of the run. ConfigError if the run cannot use it or all processes, or if these have not joined."""
    if jax.process_count() != processes.count():
        raise ConfigError(
            f"this host is one of {jax.process_count()}, which have not joined; use posttrain run, or call "
            "jax.distributed.initialize() first"
        )
    mesh = make_mesh(config.mesh, training_devices(config))
    check_row_tokens(config, mesh.shape["context"])
    check_processes(config, processes.count(), row_shards(mesh))
    return mesh


@contextlib.contextmanager
def _outside_failures(output: Path) -> Iterator[None]:
    """Say of failures outside of the program, such as a full disk, where the same command resumes."""
    join.tell(partial(_goes_on, output))
    try:
        yield
    except Exception as error:
        if (found := outside_error(error, processes.peer())) is None:
            raise
        raise OutsideError(f"{found}; the same command {_goes_on(output)}", found.code) from error


def _goes_on(output: Path) -> str:
    """Words for the same command after a failure outside of the program."""
    steps = [folder for folder in output.glob("*/checkpoints/*") if folder.name.isdecimal()]
    newest = max(steps, key=lambda folder: (int(folder.parts[-3].partition("-")[0]), int(folder.name)), default=None)
    return "begins again" if newest is None else f"resumes after step {newest.name} of {newest.parts[-3]}"


NUM_ANSWERS = 6
ANSWER_CELLS = 240
"""Maximum width of a text in the table, in terminal cells."""


def print_summary(output: Path, names: Sequence[str], results: Sequence[Mapping[str, Any]], config: RunConfig) -> None:
    """Print a table per evaluated RL stage, perplexities of SFT stages, and the paths of the files written."""
    out = console()
    stages = end_of_run(output, writes=processes.writes())
    for name, result in zip(names, results, strict=True):
        if "samples" in result.get("after", {}):
            _print_answers(name, result, stages[name].hack if name in stages else None)
            _print_values(name, result)
        elif "metrics" in result.get("after", {}):
            _print_judged(name, result)
        elif "eval/perplexity" in result.get("after", {}):
            _print_sequences(name, result)
        if "ended" in result:
            out.print(f"{name}: ended after step {result['ended']}, as a callback has asked", markup=False)
        _print_causes(output, stages.get(name))
    files = [
        ("model", output / names[-1] / "model"),
        ("metrics", output / "metrics.jsonl"),
        ("samples", output / "samples.jsonl"),
        ("settings", output / "config.yaml"),
    ]
    if config.tensorboard:
        files.append(("tensorboard", output / "tensorboard"))
    for title, path in files:
        if path.exists():
            out.print(f"{title:12} {path}", markup=False, soft_wrap=True)


def _print_causes(output: Path, stage: StageDiagnosis | None) -> None:
    """Print the first cause for which a stage did not learn, or learned something else, and that it made no update;
    nothing of a healthy one."""
    if stage is None or (stage.updated and not stage.causes):
        return
    tell(stage.head)
    for first in stage.causes[:1]:
        tell(f"{stage.name}: {first.summary}; try: {first.advice}")
    others = f" (and {count(len(stage.causes) - 1, 'other cause')})" if len(stage.causes) > 1 else ""
    console().print(f"{'why':12} posttrain why {output}{others}", markup=False, soft_wrap=True)


def _print_answers(name: str, result: Mapping[str, Any], hack: Cause | None) -> None:
    from rich.table import Table
    from rich.text import Text

    out = console()
    before, after = result["before"], result["after"]
    measure = after["measure"]
    table = Table(title=f"{name}: held-out {measure}, {count_rows(after['prompts'])}", title_justify="left")
    for column in ("prompt", "before", measure, "after", measure):
        table.add_column(column, overflow="fold")
    pairs = list(zip(before["samples"], after["samples"], strict=True))
    # Changed completions come first; a stable sort keeps the dataset's order among them.
    pairs.sort(key=lambda pair: pair[0][measure] == pair[1][measure])
    for old, new in pairs[:NUM_ANSWERS]:
        values = (shown_number(old[measure]), shown_number(new[measure]))
        texts = (old["prompt"], old["completion"], values[0], new["completion"], values[1])
        table.add_row(*(Text(cut(printable(str(text), out.encoding), ANSWER_CELLS, out.encoding)) for text in texts))
    table.add_section()
    table.add_row(f"mean {measure}, 95 % interval", _interval(before), "", _interval(after), "")
    for function, old_mean, new_mean in means_of_functions(before, after):
        table.add_row(Text(f"mean {function}"), old_mean, "", new_mean, "")
    out.print(table)
    line = _difference(result, measure)
    out.print(line if hack is None else f"{line}; BUT {hack.summary}", markup=False, soft_wrap=True)


def _print_values(name: str, result: Mapping[str, Any]) -> None:
    """Print metrics of k samples, those of further datasets, before and after, and which model is the best."""
    before, after = (result[when]["metrics"] for when in ("before", "after"))
    for metric, found in result["difference"].items():
        if metric in (f"eval/{other}" for other in ("reward", "distill/kl")):
            continue  # in the table
        own = metric.removeprefix("eval/")
        shares = " -> ".join(with_interval(metrics, own) for metrics in (before, after))
        what = _in_words("difference", PairedDifference(**found))
        console().print(f"{name}: held-out {own} {shares}; {what}", markup=False, soft_wrap=True)
    if "best" in result:
        console().print(f"{name}: {_best(result['best'])}", markup=False, soft_wrap=True)


def _best(best: Mapping[str, Any]) -> str:
    """Describe which model is in `best/`, and why."""
    bar = f"{best['evaluations']} evaluations, p below {best['p_below']:.2g}"
    if best["step"] is None:
        return f"no best model: {best['evidence']} ({bar})"
    found = PairedDifference(**best["against_start"])
    words = _in_words(f"difference of {best['metric']} from the start", found).removesuffix(", significant")
    return f"best/ has the model of step {best['step']}; {words} ({bar})"


def _difference(result: Mapping[str, Any], measure: str) -> str:
    """Describe the paired difference on the same prompts, which excludes the variance between prompts."""
    before, after = result["before"], result["after"]
    found = paired(before, after, next(iter(after["values"])))
    if found is None:
        return f"difference: fewer than two prompts have a {measure} before and after"
    return _in_words("difference over the same prompts", found)


def _in_words(what: str, found: PairedDifference) -> str:
    chance = "p < 0.001" if found.p_value < 0.001 else f"p = {found.p_value:.3f}"
    words = "significant" if found.significant else "not significant"
    interval = f"{found.mean:+.3f} ({found.low:+.3f} to {found.high:+.3f})"
    return f"{what}: {interval}, {chance}, {words}"


def _print_judged(name: str, result: Mapping[str, Any]) -> None:
    """Print accuracy on held-out pairs before and after, and rewards."""
    out, metrics = console(), result["after"]["metrics"]
    if "preferred" in result["after"]:
        before, after = (result[key]["preferred"] for key in ("before", "after"))
        shares = " -> ".join(with_interval(result[key]["metrics"], "preferred_ratio") for key in ("before", "after"))
        prompts = result["after"]["prompts"]
        what = f"{name}: chosen answer preferred, {count_rows(prompts, 'held-out pairs')}: {shares}"
        out.print(what, markup=False, soft_wrap=True)
        if len(after) > 1:
            found = paired_difference(before, after, prompt_numbers(prompts))
            out.print(_in_words("difference over the same pairs", found), markup=False)
    judged = "steps" if "eval/calibration/ece" in metrics else "answers"
    pairs = "eval/preferred_ratio" in metrics
    if "eval/rewards/accuracies_low" in metrics:
        what = "the chosen answer has the greater reward" if pairs else f"{judged} classified correctly"
        out.print(f"{name}: {what}: {with_interval(metrics, 'rewards/accuracies')}", markup=False, soft_wrap=True)
    if "eval/rewards/margins_low" in metrics:
        better = "right steps" if judged == "steps" and not pairs else "chosen answers"
        what = f"by how much rewards of {better} are greater"
        out.print(f"{name}: {what}: {with_interval(metrics, 'rewards/margins', '.3g')}", markup=False, soft_wrap=True)


def _print_sequences(name: str, result: Mapping[str, Any]) -> None:
    """Print metrics of held-out sequences before and after, and their paired difference."""
    for metric, difference in (("eval/distill/kl", "eval/distill/kl"), ("eval/perplexity", "eval/nll")):
        if metric not in result["after"]:
            continue
        shares = " -> ".join(with_interval(result[key], metric.removeprefix("eval/")) for key in ("before", "after"))
        console().print(f"{name}: held-out {metric.removeprefix('eval/')} {shares}", markup=False, soft_wrap=True)
        rows = count_rows(result["after"][SEQUENCES][PROMPTS], "sequences")
        what = f"difference of {difference.removeprefix('eval/')} over the same {rows}"
        found = PairedDifference(**result["difference"][difference])
        console().print(_in_words(what, found), markup=False, soft_wrap=True)


def _interval(evaluation: Mapping[str, Any]) -> str:
    return f"{evaluation['mean']:.3f} ({evaluation['low']:.3f} to {evaluation['high']:.3f})"


SHARED = "the actor's"


def print_placement(section: TrainSection, mesh: Mesh, devices: RoleDevices, roles: Sequence[str]) -> None:
    """Print the table, if the stage uses more than one device or offloads a role. `roles`: those beside the actor."""
    rows = placement_rows(section, mesh, devices, roles)
    apart = {where for _, where, *_ in rows} - {SHARED}
    if mesh.size == 1 and len(apart) == 1 and not any(offload for *_, offload in rows):
        return
    from rich.table import Table

    table = Table("role", "devices", "mesh", "in host memory")
    for row in rows:
        table.add_row(*row)
    console().print(table)


def placement_rows(
    section: TrainSection, mesh: Mesh, devices: RoleDevices, roles: Sequence[str]
) -> list[tuple[str, str, str, str]]:
    """Role, its devices, axes of its mesh, and what it offloads."""
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    actor = shown_devices(list(mesh.devices.flat))
    if not isinstance(section, OnlineSection):
        return [("trainer", actor, axes, "")]
    place = section.placement
    rows = [("actor", actor, axes, "optimizer" if place.optimizer.offload else "")]
    placed = {
        "rollout": (devices.rollout, False),
        "reference": (devices.reference, place.reference.offload),
        "critic": (devices.critic, place.critic.offload),
    }
    for role in roles:
        own, offload = placed[role]
        where = SHARED if own is None else shown_devices(own)
        rows.append((role, where, axes if own is None else "", "weights" if offload else ""))
    return rows


def shown_devices(devices: Sequence[jax.Device]) -> str:
    """Kind and numbers of devices: `4 x TPU v5e: 0-3`."""
    ids = sorted(device.id for device in devices)
    runs: list[list[int]] = []
    for number in ids:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    named = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
    return f"{len(ids)} x {devices[0].device_kind}: {named}"
