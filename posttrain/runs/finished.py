"""Stages of runs that have begun: their folder, tokenizer and model; models of runs, folders and hubs that generate."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

import jax
from jax.sharding import Mesh

from posttrain.config import (
    DatasetSection,
    DrafterSection,
    ImageSection,
    ModelSection,
    RLSection,
    RunConfig,
    ToolSection,
    Vision,
    trains_on_samples,
)
from posttrain.config.locator import Locator
from posttrain.config.yaml_file import load_recorded
from posttrain.data.images import takes_images
from posttrain.data.tokenizer import PromptForm, Tokenizer, load_tokenizer
from posttrain.data.tokenizer_files import model_end_ids
from posttrain.errors import ConfigError
from posttrain.mesh import single_device_mesh
from posttrain.models.decoder import Decoder
from posttrain.models.hf import add_family
from posttrain.runs.folder import CONFIG_NAME
from posttrain.runs.input_identity import read_inputs
from posttrain.runs.prepare import run_clock
from posttrain.stages.context import RoleDevices, StageRun, read_source
from posttrain.stages.table import stage_kind, stage_names
from posttrain.train.checkpoint import Checkpointer, DamagedCheckpoint
from posttrain.train.loop import StopRequest
from posttrain.weights.load import load_model, vocabulary_of
from posttrain.weights.locate import (
    add_family_file,
    check_added_tokens,
    own_tokenizer,
    read_model_files,
    run_tokenizer,
    tokenizer_name,
    trained_model_files,
)
from posttrain.weights.state import ModelWeights


def find_stage(run: Path) -> tuple[Path, str]:
    """The run's output folder, and the name of the stage. ConfigError for a drafter, which is no model."""
    run = run.expanduser().resolve()
    output, name = _begun_stage(run)
    config = load_recorded(output / CONFIG_NAME)
    if isinstance(config.stages[stage_names(config).index(name)], DrafterSection):
        raise ConfigError(
            f"{run}: trained a drafter, which generates nothing by itself; give its model {config.model.path}, and "
            f"drafts by block={run}"
        )
    return output, name


def _begun_stage(run: Path) -> tuple[Path, str]:
    if (run / CONFIG_NAME).is_file():
        names = stage_names(load_recorded(run / CONFIG_NAME))
        begun = [name for name in names if (run / name / "checkpoints").is_dir()]
        if not begun:
            raise ConfigError(f"{run}: no stage has a checkpoint yet; its stages are {', '.join(names)}")
        return run, begun[-1]
    if (run.parent / CONFIG_NAME).is_file() and (run / "checkpoints").is_dir():
        return run.parent, run.name
    raise ConfigError(
        f"{run}: is neither the output folder of a run (with {CONFIG_NAME}) nor the folder of a stage in it"
    )


def tokenizer_of(output: Path, name: str, config: RunConfig) -> Tokenizer:
    """Tokenizer of the run: saved with the stage's model, else that of the source model."""
    saved, clock = output / name / "model", run_clock(output)
    if saved.is_dir():
        return _with_images(load_tokenizer(saved).at(clock), str(saved), config.model)
    source, adapter = read_source(output / name)
    from_source = config.model.tokenizer is None and source is not None
    own = own_tokenizer(adapter) if from_source and adapter is not None else None
    folder = own or (source if from_source and source is not None else tokenizer_name(config.model))
    tokenizer = _with_images(run_tokenizer(folder, config.model).at(clock), str(source or folder), config.model)
    before = read_inputs(output).get("tokenizer", {})
    changed = [part for part, value in tokenizer.identity.items() if before.get(part, value) != value]
    if changed:
        raise ConfigError(
            f"{output}: the tokenizer {folder} has another {', '.join(changed)} than when the run began; restore it, "
            "or give a model that the run has saved"
        )
    return tokenizer


def _with_images(tokenizer: Tokenizer, path: str, section: ModelSection) -> Tokenizer:
    if section.init is not None:
        return trained_model_files(section, tokenizer).tokenizer or tokenizer
    fields = None if section.vision == "none" else read_model_files(path).hf_json
    return tokenizer if fields is None else tokenizer.for_images(fields, path, section.image)


def open_stage(output: Path, name: str, config: RunConfig, tokenizer: Tokenizer, mesh: Mesh) -> StageRun:
    """Context of a stage that has run, to load its model and make its trainer. ConfigError if its initial model is
    another one today."""
    names = stage_names(config)
    index = names.index(name)
    source_name, adapter = read_source(output / name)
    stage = StageRun(
        name=name,
        kind=config.stages[index].kind,
        sampled=trains_on_samples(config.stages[index]),
        folder=output / name,
        output=output,
        model=config.model.grown if index else config.model,
        source=output / names[index - 1] / "model" if index else None,
        source_name=source_name,
        adapter=adapter,
        seed=config.seed,
        mesh=mesh,
        devices=RoleDevices(),
        tokenizer=tokenizer,
        tensorboard=False,
        profile=None,
        stop=StopRequest(),
    )
    stage.check_source()
    return stage


def trained_model(stage: StageRun, step: int | None) -> Decoder:
    """Model of the stage at a checkpoint: its initial model with the trained parameters. `step`: None: the newest."""
    model = stage_kind(stage.kind).load_model(stage)
    weights = ModelWeights(model)
    with Checkpointer(stage.folder / "checkpoints", read_only=True) as checkpointer:
        if not (steps := checkpointer.steps()):
            raise ConfigError(f"{stage.folder}: has no checkpoint yet")
        chosen = steps[0] if step is None else step
        like = {"params": jax.tree.map(_shape, weights.read(weights.trainable().__contains__))}
        try:
            state, _ = checkpointer.restore(chosen, like, partial=True)
        except DamagedCheckpoint as error:
            others = [one for one in steps if one != chosen]
            raise ConfigError(f"{error}; {f'give --step {others[0]}' if others else 'it is the only one'}") from error
    weights.write(state["params"])
    return model


def _shape(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


@dataclass(frozen=True, kw_only=True)
class Generator:
    """Model that generates, and its tokenizer with the form of the prompts that it was trained on."""

    name: str
    model: Decoder
    tokenizer: Tokenizer
    tools: Sequence[ToolSection] = ()
    """Tools that the run's policy was trained to call."""
    tool_format: str = "auto"


def load_generator(name: str, *, adapter: str | None = None, family: str | None = None) -> Generator:
    """Load a model that generates. `name`: a folder in Hugging Face layout, a hub id, or the folder of a run or of one
    of its stages, of which it is the final model, or that of the newest checkpoint.

    `adapter`: PEFT's adapter of a model; `family`: a file with its family. ConfigError for a path without a model, and
    for a model that scores and does not generate.
    """
    folder = Path(name).expanduser()
    if any((place / CONFIG_NAME).is_file() for place in (folder, folder.resolve().parent)):
        for option, value in {"adapter": adapter, "family": family}.items():
            if value is not None:
                raise ConfigError(f"--{option} is for a model, and {name} is a run, which has its own; remove it")
        found = _of_run(*find_stage(folder), name)
    else:
        found = _of_model(name, adapter, family)
    if found.model.config.scalar_head:
        raise ConfigError(f"model {name}: is a reward model, which scores texts and generates none; give another")
    return found


def _of_run(output: Path, stage_name: str, name: str) -> Generator:
    config = load_recorded(output / CONFIG_NAME)
    add_family_file(config.model)
    tokenizer = tokenizer_of(output, stage_name, config)
    section, saved = config.stages[stage_names(config).index(stage_name)], output / stage_name / "model"
    if saved.is_dir():
        model = load_model(saved, vision=_vision(tokenizer))
    else:
        # Standard output is that of the answers.
        with redirect_stdout(sys.stderr):
            model = trained_model(open_stage(output, stage_name, config, tokenizer, single_device_mesh()), None)
    if not saved.is_dir():
        tokenizer = tokenizer.with_form(_form_of(section.datasets[0], tokenizer))
    found = Generator(name=name, model=model, tokenizer=tokenizer)
    if isinstance(section, RLSection) and section.env is not None and section.env.fn is None:
        return replace(found, tools=section.tools, tool_format=section.tool_format)
    return found


def _form_of(data: DatasetSection, tokenizer: Tokenizer) -> PromptForm | None:
    """Form of the prompts of a run that has saved no model yet, as far as its configuration tells."""
    if data.chat is None and data.system is None:
        return tokenizer.form
    chat = tokenizer.chats if data.chat is None else data.chat
    return PromptForm(chat=chat, system=tokenizer.system if data.system is None else data.system)


def _seeing(tokenizer: Tokenizer, name: str) -> Tokenizer:
    """Tokenizer of a model, for its images too if it takes any; a processor that is not supported is a warning."""
    fields = read_model_files(name).hf_json
    if fields is None or not takes_images(fields):
        return tokenizer
    try:
        return tokenizer.for_images(fields, name, ImageSection())
    except ConfigError as error:
        print(f"WARNING: {error}; the model reads text alone", file=sys.stderr)
        return tokenizer


def _vision(tokenizer: Tokenizer) -> Vision:
    """Vision tower of a model that generates."""
    return "frozen" if tokenizer.sees else "none"


def _of_model(name: str, adapter: str | None, family: str | None) -> Generator:
    if not Path(name).expanduser().exists() and name.startswith(("/", ".", "~")):
        raise ConfigError(f"model {name}: no such folder{Locator(name).suggestion}")
    if family is not None:
        add_family(family)
    own = None if adapter is None else own_tokenizer(adapter)
    tokenizer = load_tokenizer(own or name)
    if own is not None:
        tokenizer = tokenizer.with_stop_ids(model_end_ids(name))
    tokenizer = _seeing(tokenizer, name)
    model = load_model(name, adapter=adapter, vision=_vision(tokenizer))
    if adapter is not None and model.config.resized:
        check_added_tokens(tokenizer, adapter, vocabulary_of(name), model.config.vocab_size, named=False)
    return Generator(name=name, model=model, tokenizer=tokenizer)
