"""Command line: `posttrain run | launch | check | reward | plan | replay | why | view | schema | fields | env |
distill | generate | chat | serve | evaluate | compare | export | upcycle | upscale | prune`."""

from __future__ import annotations

import json
import signal
import sys
import traceback
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from posttrain.commands import chat, complete_config, complete_override, evaluate, generate, reward, serve
from posttrain.errors import ConfigError, RunError, outside_error
from posttrain.tracking.console import print_lines

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

ConfigPath = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG", help="A YAML file, such as configs/quickstart.yaml.", autocompletion=complete_config
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Dotted overrides, such as stages.rl.num_steps=50.",
        autocompletion=complete_override,
    ),
]


def _print_version(wanted: bool) -> bool:
    if wanted:
        from posttrain import __version__

        print(f"posttrain {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Post-training of language models in JAX: fine-tune, then reinforce, from one YAML file."""


@app.command()
def env() -> None:
    """Print versions, devices, kernels and caches, for a bug report."""
    from posttrain.runs.environment import environment_lines

    for line in environment_lines():
        print(line)


@app.command()
def run(
    config: ConfigPath,
    overrides: Overrides = None,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="End, and do not resume from the one before, if a checkpoint is damaged."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Begin what cannot fit the memory of the devices, as it is known.")
    ] = False,
) -> None:
    """Run all stages of a configuration; the same command resumes an interrupted run."""
    from posttrain.config.yaml_file import load_config

    loaded = load_config(config, overrides or [])
    from posttrain.runtime.join import joined

    with joined(_failure):
        from posttrain.runs import run as recipe
        from posttrain.tracking.console import shown_log

        with shown_log():
            recipe.run(loaded, strict=strict, force=force)


@app.command(context_settings={"allow_interspersed_args": False})
def launch(
    command: Annotated[list[str], typer.Argument(metavar="run CONFIG [KEY=VALUE]...", help="The run, as without it.")],
    processes: Annotated[int, typer.Option(min=1, help="Number of processes.")],
    cpu_devices: Annotated[int, typer.Option(min=1, help="Virtual CPU devices of each process.")] = 1,
) -> None:
    """Run in several processes on this machine's CPU, as on as many hosts; to try such a run."""
    from posttrain.runtime.join import launch as recipe

    raise typer.Exit(recipe(command, num_processes=processes, cpu_devices=cpu_devices))


@app.command()
def check(
    config: Annotated[
        str | None,
        typer.Argument(metavar="[CONFIG]", help="A YAML file; not with --loss.", autocompletion=complete_config),
    ] = None,
    overrides: Overrides = None,
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="N|MACHINE",
            help="Number of devices of the target machine, by default of this machine; or its name, such as v5e-8, "
            "to compile for it as `plan --quick` does.",
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Number of hosts of the target machine; by default of the named one, else 1."),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            metavar="FILE:NAME",
            help="A loss of your own in place of CONFIG, with settings '{fn: FILE:NAME, width: 0.3}': its value and "
            "gradient must not depend on how a batch is split into micro-batches, packed and ordered.",
        ),
    ] = None,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help="Load the model, and sample and score 32 prompts; exit code 1 if most samples are cut or nothing "
            "can be learned from their rewards.",
        ),
    ] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Read at most 256 rows of each dataset, for 20 seconds in all, and say which rows were left out.",
        ),
    ] = False,
) -> None:
    """Validate everything that can be validated without loading weights."""
    if (config is None) == (loss is None):
        raise ConfigError("check: give CONFIG, or --loss FILE:NAME")
    if probe and (config is None or devices is not None or processes is not None):
        raise ConfigError("check: --probe samples on this machine; give CONFIG alone")
    if quick and (config is None or probe):
        raise ConfigError("check: --quick reads few rows of CONFIG; --loss reads none, and --probe samples: give one")
    if quick and devices is not None and not devices.isdecimal():
        raise ConfigError(f"check: --quick compiles nothing; give --devices a number, or {devices} without --quick")
    if loss is not None:
        from posttrain.runs.check_loss import check_loss

        print(check_loss(loss))
        print("ok")
    else:
        assert config is not None
        _check_config(config, overrides or [], devices, processes, quick=quick)
        if probe:
            _probe(config, overrides or [])


def _check_config(
    config: str, overrides: list[str], devices: str | None, processes: int | None, *, quick: bool
) -> None:
    number = None if devices is None or not devices.isdecimal() else int(devices)
    target = None
    if devices is not None and number is None:
        from posttrain.plan.machine import machine, prepare_process

        target = machine(devices)
        number = target.num_devices
        prepare_process(target, quick=True)
    if number == 0:
        raise ConfigError("--devices 0: give a number from 1, or a machine such as v5e-8")
    from posttrain.config.yaml_file import load_config

    loaded = load_config(config, overrides)
    from posttrain.runs import check as recipe

    hosts = processes or (1 if target is None else target.num_hosts)
    found = recipe.quick_check(loaded, number, hosts) if quick else recipe.check(loaded, number, hosts)
    for line in found:
        print(line)
    if target is not None:
        from posttrain.runs.plan import plan

        for line in plan(loaded, target, search=False):
            print(line, flush=True)
    print("ok")


def _probe(config: str, overrides: list[str]) -> None:
    from posttrain.runtime.join import check_alone

    check_alone("check --probe")
    from posttrain.config.yaml_file import load_config
    from posttrain.runs.probe import probe

    found = probe(load_config(config, overrides))
    print_lines(found.lines)
    if found.findings:
        raise typer.Exit(1)


@app.command()
def plan(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG|RUN",
            help="A YAML file; or the output folder of a run, to see planned beside measured.",
            autocompletion=complete_config,
        ),
    ],
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="MACHINE",
            help="Machine: v5e-1 to v5e-256, v5p-8, v6e-8, h100-8, cpu-8, ...; of a run by default its own.",
        ),
    ] = None,
    overrides: Overrides = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Compile in a third of the time, with less optimisation; no search.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With RUN: the table as JSON.")] = False,
) -> None:
    """Memory, traffic, time and price on a machine that need not be there, by compiling for it; nothing is loaded.
    After a run: planned beside measured, per phase."""
    from posttrain.plan.machine import machine, prepare_process
    from posttrain.runs.folder import is_run, machine_of_run

    run = Path(config).expanduser()
    if is_run(run):
        if overrides:
            raise ConfigError(f"plan: {overrides[0]}: a run is planned as it was; plan a configuration to change it")
        target = machine(devices or machine_of_run(run))
        prepare_process(target, quick=quick)
        from posttrain.runs.plan import plan_run

        stages = plan_run(run, target)
        if as_json:
            print(json.dumps([stage.record() for stage in stages], indent=1))
        else:
            print_lines([line for stage in stages for line in stage.lines()])
        return
    if devices is None or as_json:
        missing = "--json is for the folder of a run" if as_json else "give --devices MACHINE, or the folder of a run"
        raise ConfigError(f"plan: {config}: {missing}")
    target = machine(devices)
    prepare_process(target, quick=quick)
    from posttrain.config.yaml_file import load_config
    from posttrain.runs import plan as recipe

    loaded = load_config(config, overrides or [])
    for line in recipe.plan(loaded, target, search=not quick):
        print(line, flush=True)


@app.command()
def replay(
    run: Annotated[str, typer.Argument(help="The output folder of a run, or the folder of one of its RL stages.")],
    step: Annotated[
        int | None, typer.Option(min=1, help="Step whose trajectories were recorded; without it, which there are.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A model's folder or hub id; by default the checkpoint before the step.")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Setting of the stage; may be repeated.")
    ] = None,
) -> None:
    """Repeat the update of a recorded RL step without sampling: its loss and metrics, also with another loss."""
    from posttrain.runs.replay import lines_of, replayable_steps, shown_steps
    from posttrain.runs.replay import replay as recipe

    if step is None:
        whole, others = replayable_steps(run)
        print(f"steps that can be replayed: {shown_steps(whole)}")
        print(f"with --model, since the checkpoint before them is gone: {shown_steps(others)}")
        return
    for line in lines_of(recipe(run, step, model=model, changes=changes or [])):
        print(line)


@app.command()
def why(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="The output folder of a run, or the folder of a stage in it.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="The causes as JSON.")] = False,
) -> None:
    """Say why a run did not learn, or learned something else than was meant: causes, their numbers, what to try."""
    from posttrain.diagnosis.report import why as recipe

    found = recipe(run)
    if as_json:
        print(json.dumps(found.record(), indent=1))
    else:
        print_lines(found.lines())


app.command()(reward)


@app.command()
def view(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Output folders of runs, or folders that hold some.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0: any free one.")] = 0,
) -> None:
    """Browse runs in a local page, live or finished: curves, rollouts, prompts, and the loss of each token."""
    from posttrain.view.serve import view as recipe

    recipe(runs, port=port)


@app.command()
def schema() -> None:
    """Print the JSON schema of configurations, for completion and validation in editors."""
    from posttrain.config.describe import json_schema

    print(json.dumps(json_schema(), indent=1))


@app.command()
def fields(
    kind: Annotated[
        str | None,
        typer.Argument(metavar="[KIND]", help="sft, rl, distill, ...; without one the run's own. Or a word for all."),
    ] = None,
    word: Annotated[
        str, typer.Argument(metavar="[WORD]", help="Part of a name or a description; the run's own fields too.")
    ] = "",
) -> None:
    """List the fields of a kind of stage, or those with a word in them: type, default, meaning."""
    from posttrain.config.describe import find_fields

    print(find_fields(kind, word))


@app.command()
def distill(
    config: ConfigPath,
    overrides: Overrides = None,
    cache: Annotated[
        bool, typer.Option("--cache", help="Write the teachers' top-k to their caches; can be resumed.")
    ] = False,
) -> None:
    """Write the teacher caches of distill stages; posttrain run then trains without loading their teachers."""
    from posttrain.config.yaml_file import load_config

    loaded = load_config(config, overrides or [])
    if not cache:
        raise ConfigError("distill: give --cache to write the teachers' top-k; posttrain run trains the student")
    from posttrain.runtime.join import check_alone

    check_alone("distill --cache")
    from posttrain.runs.write_teacher_cache import write_caches
    from posttrain.tracking.console import shown_log

    with shown_log():
        write_caches(loaded)


app.command()(generate)
app.command()(chat)
app.command()(serve)
app.command()(evaluate)


@app.command()
def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN...", help="Output folders of runs.")],
    metric: Annotated[
        list[str] | None,
        typer.Option(help="May be repeated; by default the stage's main metric, and its held-out value."),
    ] = None,
    stage: Annotated[str | None, typer.Option(help="Name such as 0-sft; by default the last of each run.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the curves on one plot per metric: .svg or .html.")] = None,
) -> None:
    """Compare runs: curves, means over seeds, settings that differ, and tests over the prompts that they share."""
    from posttrain.results.compare import compare as recipe

    found = recipe(*runs, metrics=metric or [], stage=stage)
    print_lines(found.lines())
    if save is not None:
        print(found.save(save))


@app.command()
def upcycle(
    source: Annotated[str, typer.Argument(help="A dense model: a folder in Hugging Face layout or a hub id.")],
    out: Annotated[Path, typer.Argument(help="A new folder for the MoE model.")],
    experts: Annotated[int, typer.Option(help="Experts per layer.")],
    top_k: Annotated[int, typer.Option(help="Experts per token.")],
    mode: Annotated[
        Literal["copy", "split"],
        typer.Option(help="copy: each expert is the dense MLP. split: top_k experts are the dense MLP together."),
    ],
    shared: Annotated[int, typer.Option(help="Shared experts, which every token has.")] = 0,
    dense_layers: Annotated[int, typer.Option(help="First layers that stay dense.")] = 0,
    noise: Annotated[float, typer.Option(help="Noise of routed experts, in deviations of their weights.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Random seed of router and noise.")] = 0,
) -> None:
    """Convert a dense model into an equivalent MoE model, and verify it."""
    from posttrain.export.resize import upcycle as recipe
    from posttrain.weights.upcycle import Upcycling

    shape: dict[str, int] = {"experts": experts, "top_k": top_k, "shared": shared, "dense_layers": dense_layers}
    print(recipe(source, out, Upcycling(mode=mode, noise=noise, **shape), seed=seed))


@app.command()
def upscale(
    source: Annotated[str, typer.Argument(help="A model: a folder in Hugging Face layout or a hub id.")],
    out: Annotated[Path, typer.Argument(help="A new folder for the deeper model.")],
    layers: Annotated[tuple[int, int], typer.Option(help="First layer of the band, from 0, and the one after it.")],
    start: Annotated[Literal["identity", "copy"], typer.Option(help="What copies add: nothing, or all.")] = "identity",
) -> None:
    """Write a model with a copy of a band of its layers behind it, and verify it; see also `model.upscale`."""
    from posttrain.config import Upscale
    from posttrain.export.resize import upscale as recipe

    print(recipe(source, out, Upscale(layers=layers, start=start)))


@app.command()
def prune(
    source: Annotated[str, typer.Argument(help="A model: a folder in Hugging Face layout or a hub id.")],
    out: Annotated[Path, typer.Argument(help="A new folder for the smaller model.")],
    layer: Annotated[list[int] | None, typer.Option(help="Layer to keep, from 0; repeatable. By default all.")] = None,
    mlp_dim: Annotated[int | None, typer.Option(help="Neurons to keep in each MLP.")] = None,
    embed_dim: Annotated[int | None, typer.Option(help="Dimensions to keep of the residual stream.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key-value heads to keep, each with its query heads.")] = None,
    experts: Annotated[int | None, typer.Option(help="Experts to keep of each layer, as one dense MLP.")] = None,
    text: Annotated[str | None, typer.Option(help="Dataset on which the usage of experts is counted.")] = None,
) -> None:
    """Prune a smaller model from a large one, as the initial student for distillation."""
    from posttrain.export.resize import prune as recipe
    from posttrain.weights.prune import Pruning

    plan = Pruning(
        layers=tuple(layer) if layer else None, mlp_dim=mlp_dim, embed_dim=embed_dim, kv_heads=kv_heads, experts=experts
    )
    print(recipe(source, out, plan, text=text))


class Target(StrEnum):
    HF = "hf"
    PEFT = "peft"
    MERGED = "merged"


class Reader(StrEnum):
    TRANSFORMERS = "transformers"
    POSTTRAIN = "posttrain"


@app.command()
def export(
    run: Annotated[str, typer.Argument(help="The output folder of a run, or the folder of one of its stages.")],
    to: Annotated[
        Target, typer.Option(help="hf: a model; merged: the adapter merged into its base; peft: the adapter alone.")
    ],
    out: Annotated[str | None, typer.Argument(help="A new folder; by default one in the stage's folder.")] = None,
    step: Annotated[int | None, typer.Option(min=0, help="By default the newest checkpoint.")] = None,
    reader: Annotated[
        Reader | None, typer.Option(help="Library that reads it back; by default transformers if torch is installed.")
    ] = None,
    also_read_with: Annotated[
        list[str] | None, typer.Option(help="Python of another environment whose transformers must read the same.")
    ] = None,
) -> None:
    """Export a run's model for other tools, read it back, and fail if the two differ."""
    from posttrain.export.export import export as recipe

    folder, proof = recipe(
        Path(run),
        None if out is None else Path(out),
        to.value,
        step=step,
        reader=None if reader is None else reader.value,
        pythons=also_read_with or (),
    )
    print(f"{folder}: {proof}")


def _failure(error: BaseException) -> tuple[str, int]:
    """Last words of the command, and its exit code. Errors that no user makes have a traceback as well."""
    if isinstance(error, ConfigError):
        return "\n".join(f"error: {line}" for line in str(error).splitlines()), 2
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 128 + (error.args[0] if error.args else signal.SIGINT)
    # Looked up, not imported: importing jax here would slow down `--help`.
    fit, proof = sys.modules.get("posttrain.train.loop"), sys.modules.get("posttrain.export.readers")
    if fit is not None and isinstance(error, fit.Interrupted):
        return f"{error}; run the same command again to resume", 128 + error.number
    if (outside := outside_error(error)) is not None:
        return f"error: {outside}", outside.code
    if isinstance(error, FloatingPointError | RunError) or (proof is not None and isinstance(error, proof.ProofError)):
        return f"error: {error}", 1
    return f"{''.join(traceback.format_exception(error))}", 1


def main() -> None:
    """Entry point. Exit codes: 2 after mistakes of users, with a line for each; 1 after failures; 74 and 75 after those
    of the disk and of another process (`errors`); 128 + N after signal N."""
    code: int | str | None = 0
    try:
        app(prog_name="posttrain")
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        text, code = _failure(error)
        print(text, file=sys.stderr)
    if (join := sys.modules.get("posttrain.runtime.join")) is not None:
        join.leave(code)
    sys.exit(code)
