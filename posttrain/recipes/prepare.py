"""Everything of a run that needs no weights: tokenizer, rows, rewards, losses. `check` stops here, `run` goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from posttrain.batch import TokenLoss, rows_per_pass
from posttrain.config import (
    ROW_AXES,
    ComparedSection,
    ConfigError,
    DatasetSection,
    DistillSection,
    ModelSection,
    OnlinePreferenceSection,
    PreferenceSection,
    RewardModelSection,
    RLSection,
    RunConfig,
    SampledSection,
    SequenceSection,
    SFTSection,
    TrainSection,
)
from posttrain.config_file import find_path
from posttrain.data.aligned import Aligner
from posttrain.data.chat import Renderer
from posttrain.data.hub import hub_is_reachable, is_hub_id
from posttrain.data.pipeline import require_one, row_tokenizer
from posttrain.data.sources import FILE_SUFFIXES, Rows
from posttrain.data.taught import Taught
from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.imports import describe_error, did_you_mean, is_object_spec
from posttrain.losses.sft import DFTLoss, SFTLoss
from posttrain.models.config import ModelConfig
from posttrain.models.moe import check_recording, check_router
from posttrain.recipes.aligning import make_aligners
from posttrain.recipes.features import check_features, distill_loss
from posttrain.recipes.inputs import callable_of, each_row, rows_and_renderer
from posttrain.recipes.judged import LOSSES, JudgedInputs, check_units, make_loss, shares_prompts, units_of
from posttrain.recipes.kernels import check_kernels
from posttrain.recipes.prepare_rl import (
    OnlineInputs,
    PromptInputs,
    RLInputs,
    algorithm_of,
    check_cache,
    online_loss,
    prepare_online,
    prepare_prompts,
    prepare_rl,
    refuse_completions,
    rubric_of,
)
from posttrain.recipes.source import local_or_hub, read_model_config, read_wrapper, refuse_misspelt, tokenizer_name
from posttrain.recipes.teachers import TeacherSource, find_teachers
from posttrain.weights.load import check_adapter, check_lora, check_weights

T = TypeVar("T")

CHECKED_ROWS = 20_000
ROW_DEVICES = " x ".join(f"mesh.{axis}" for axis in ROW_AXES)
SFT_LOSSES: dict[str, Callable[[], TokenLoss]] = {"nll": SFTLoss, "dft": DFTLoss}


@dataclass(frozen=True, kw_only=True)
class SFTInputs:
    """Of a stage that trains on given sequences."""

    section: SFTSection | DistillSection
    renderer: Renderer
    rows: Rows
    dropped_ratio: float
    """Share of the rows that `overlong` leaves out."""
    eval_renderer: Renderer | None
    eval_rows: Rows | None
    loss: TokenLoss
    mixed: Sequence[tuple[Rows, Renderer]]
    """Of the datasets in `section.mix`."""
    teachers: Sequence[TeacherSource]
    aligners: Mapping[int, Aligner] = field(default_factory=dict)
    """Of teachers with tokens of their own, by number."""
    prompts: PromptInputs | None = None
    """Of a stage whose student samples."""


Inputs = SFTInputs | RLInputs | OnlineInputs | JudgedInputs


@dataclass
class Prepared:
    config: RunConfig
    base_dir: Path
    tokenizer: Tokenizer | None = None
    """None only where `notes` say that the hub could not be asked."""
    model: ModelConfig | None = None
    """None where only the hub has it and cannot be asked."""
    stages: list[Inputs] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What could not be checked, and why; and what is done otherwise than the configuration says."""


def prepare(config: RunConfig, base_dir: Path, *, offline_ok: bool) -> Prepared:
    """Load and validate all inputs of a run. ConfigError for the first mistake.

    With `offline_ok`, what only the hub can answer becomes a note when there is no network.
    """
    prepared = Prepared(config=config, base_dir=base_dir)
    name = tokenizer_name(config.model, base_dir)
    offline = _unreachable(name)
    if offline:
        refuse_misspelt("model.path" if config.model.tokenizer is None else "model.tokenizer", name, base_dir)
    if offline_ok and offline:
        _read_model(prepared, offline_ok=offline_ok)
        prepared.notes.append(
            f"not checked, no network: tokenizer and rows of every stage (of the tokenizer {name}, if it is on the hub)"
        )
        for index, section in enumerate(config.stages):
            with _naming_stage(config, index):
                _check_offline(section, base_dir)
        return prepared
    prepared.tokenizer = load_tokenizer(name).with_stop_tokens(config.model.stop_tokens)
    _read_model(prepared, offline_ok=offline_ok)
    for index, section in enumerate(config.stages):
        with _naming_stage(config, index):
            remote = [path for path in _dataset_paths(section, base_dir) if _unreachable(path)]
            for path in remote:
                refuse_misspelt("dataset.path", path, base_dir)
            if offline_ok and remote:
                names = ", ".join(remote)
                prepared.notes.append(f"stages.{index}: not checked, no network: dataset {names}, if it is on the hub")
                _check_offline(section, base_dir)
            elif isinstance(section, PreferenceSection | RewardModelSection):
                judged, notes = _prepare_judged(section, prepared.tokenizer, prepared)
                prepared.stages.append(judged)
                prepared.notes += [f"{stage_names(config)[index]}: {note}" for note in notes]
            elif isinstance(section, OnlinePreferenceSection):
                check_cache(section, config.mesh.row_shards or 1)
                mixture = prepared.model is not None and bool(prepared.model.mixtures)
                online = prepare_online(section, prepared.tokenizer, base_dir, config.model, mixture=mixture)
                prepared.stages.append(online)
            elif isinstance(section, RLSection):
                check_cache(section, config.mesh.row_shards or 1)
                prompted, notes = prepare_rl(section, prepared.tokenizer, base_dir)
                prepared.stages.append(prompted)
                prepared.notes += [f"{stage_names(config)[index]}: {note}" for note in notes]
            else:
                if isinstance(section, DistillSection) and section.on_policy:
                    check_cache(section, config.mesh.row_shards or 1)
                inputs, notes = _prepare_sft(section, prepared.tokenizer, base_dir)
                if isinstance(section, DistillSection):
                    notes += check_features(section, inputs.teachers, prepared.model, base_dir)
                prepared.stages.append(inputs)
                prepared.notes += [f"{stage_names(config)[index]}: {note}" for note in notes]
    return prepared


@contextmanager
def _naming_stage(config: RunConfig, index: int) -> Iterator[None]:
    """Put the stage's number before each line of an error, where there are several."""
    try:
        yield
    except ConfigError as error:
        if len(config.stages) == 1:
            raise
        raise ConfigError("\n".join(f"stages.{index}: {line}" for line in str(error).splitlines())) from error


def _read_model(prepared: Prepared, *, offline_ok: bool) -> None:
    """Fill in `model`, and hold the configuration against it."""
    config, tokenizer = prepared.config, prepared.tokenizer
    if tokenizer is None and config.model.init is not None and "vocab_size" not in config.model.init:
        prepared.notes.append("not checked: model.init, whose vocab_size is the tokenizer's")
        return
    vocab_size = None if tokenizer is None else tokenizer.vocab_size
    model = read_model_config(config.model, prepared.base_dir, vocab_size=vocab_size)
    if model is None:
        assert config.model.path is not None
        refuse_misspelt("model.path", config.model.path, prepared.base_dir)
        prepared.notes.append(f"not checked, no network: the model {config.model.path}, if it is on the hub")
        return
    prepared.model = model
    _check_weights(config.model, prepared.base_dir)
    if model.scalar_head and not all(isinstance(section, RewardModelSection) for section in config.stages):
        raise ConfigError(f"model.path: {config.model.path} is a reward model, which scores answers and writes none")
    if tokenizer is not None:
        prepared.tokenizer = tokenizer.for_model(model.vocab_size)
    if config.model.lora is not None and (reason := check_lora(model, config.model.lora, config.model.quantize)):
        prepared.notes.append(f"model.lora: {reason}; of this adapter there is only export --to merged")
    if config.model.adapter is not None:
        _check_adapter(prepared, model)
    if config.model.tokenizer is not None and vocab_size is not None and vocab_size > model.vocab_size:
        raise ConfigError(
            f"model.tokenizer: {config.model.tokenizer} has {vocab_size} tokens, the model only {model.vocab_size}; "
            + ("raise model.init.vocab_size" if config.model.init is not None else "give the model's own tokenizer")
        )
    prepared.notes += check_kernels(config, model, here=not offline_ok)
    for index, section in enumerate(config.stages):
        if section.row_tokens > model.max_positions:
            raise ConfigError(
                f"stages.{index}: row_tokens={section.row_tokens} must be at most {_context_of(config.model, model)}"
            )
        with _naming_stage(config, index):
            adapter = config.model.lora is not None or config.model.adapter is not None
            _check_mixture(section, model, adapter=adapter)


def _check_adapter(prepared: Prepared, model: ModelConfig) -> None:
    section = prepared.config.model
    assert section.adapter is not None
    reward = all(isinstance(stage, RewardModelSection) for stage in prepared.config.stages)
    try:
        name = local_or_hub(section.adapter, prepared.base_dir)
        if _unreachable(name):
            prepared.notes.append(f"not checked, no network: model.adapter {name}, which run downloads")
            return
        check_adapter(model, name, read_wrapper(section, prepared.base_dir), reward=reward)
    except ConfigError as error:
        raise ConfigError(f"model.adapter: {error}") from error


def _context_of(section: ModelSection, model: ModelConfig) -> str:
    """The model's number of positions, and how there may be more."""
    limit = f"max_position_embeddings={model.max_positions} of the model"
    whole = json.loads(model.hf_json).get("max_position_embeddings", 0)
    if section.path is None or section.long_context or whole <= model.max_positions:
        return limit
    return f"{model.max_positions}, for which the model's short RoPE factors are; model.long_context=true takes {whole}"


def _check_weights(section: ModelSection, base_dir: Path) -> None:
    """ConfigError where the model is a folder here whose weights are not those of its `config.json`."""
    folder = None if section.path is None else Path(local_or_hub(section.path, base_dir))
    if folder is not None and folder.is_dir():
        try:
            check_weights(folder)
        except ConfigError as error:
            raise ConfigError(f"model.path: {error}") from error


def _check_mixture(section: TrainSection, model: ModelConfig, *, adapter: bool) -> None:
    """ConfigError where the stage asks for what only a mixture of experts has."""
    router = section.router
    check_router(model, router.balance_coef > 0 or router.z_coef > 0, router.correction_rate, adapter=adapter)
    if isinstance(section, SampledSection | DistillSection) and section.rollout.record_routing:
        check_recording(model)


def stage_names(config: RunConfig) -> list[str]:
    """Folder names: number and name, so that a listing shows the order."""
    return [f"{index}-{section.name or section.kind}" for index, section in enumerate(config.stages)]


def row_notes(config: RunConfig, shards: int | None) -> list[str]:
    """Where the rows of a forward pass are not as many as the configuration says.

    `shards`: the devices that share them; None where it is not known before the run.
    """
    notes = []
    for name, section in zip(stage_names(config), config.stages, strict=True):
        wanted = section.micro_batch_rows
        if wanted is None:
            continue
        start = f"{name}: micro_batch_rows={wanted}"
        if shards is None:
            notes.append(f"{start} is rounded up to a multiple of {ROW_DEVICES}, which only the devices say")
        elif (rows := rows_per_pass(rows_per_step(section), wanted, shards)) > wanted:
            notes.append(f"{start} becomes {rows}, a multiple of {ROW_DEVICES} = {shards}")
    return notes


def rows_per_step(section: TrainSection) -> int:
    """Rows of one optimiser step: of RL the worst case, one sample per row; of online preference one pair per row."""
    if isinstance(section, SampledSection):
        return section.step_rows
    assert isinstance(section, SequenceSection | ComparedSection)
    return section.batch_rows


def _dataset_paths(section: TrainSection, base_dir: Path) -> list[str]:
    """Of those that are not found from here or from the configuration's folder."""
    return [dataset.path for dataset in _datasets(section) if find_path(dataset.path, base_dir) is None]


def _datasets(section: TrainSection) -> list[DatasetSection]:
    return [dataset for dataset in (*section.datasets, section.eval_dataset) if dataset is not None]


def _unreachable(name: str) -> bool:
    path = Path(name)
    local = name == "bytes" or path.exists() or is_object_spec(name) or path.suffix in FILE_SUFFIXES
    return not local and is_hub_id(name) and not hub_is_reachable()


def _check_offline(section: TrainSection, base_dir: Path) -> None:
    """What can be said of a stage without its rows."""
    if isinstance(section, SampledSection):
        refuse_completions(section)
        rubric_of(section, base_dir)
    if isinstance(section, RLSection):
        algorithm_of(section, base_dir)
    elif isinstance(section, OnlinePreferenceSection):
        online_loss(section, base_dir)
    elif isinstance(section, SFTSection | DistillSection):
        _sequence_loss(section, base_dir)
    elif isinstance(section, PreferenceSection | RewardModelSection):
        _judged_loss(section, base_dir)
    if isinstance(section, DistillSection | RLSection):
        find_teachers(section, None, base_dir)


def _prepare_sft(
    section: SFTSection | DistillSection, tokenizer: Tokenizer, base_dir: Path
) -> tuple[SFTInputs, list[str]]:
    """The inputs, and a line for each dataset of which rows are left out, and what teachers need."""
    loss = _sequence_loss(section, base_dir)
    teachers: list[TeacherSource] = []
    notes: list[str] = []
    if isinstance(section, DistillSection):
        teachers, notes = find_teachers(section, tokenizer, base_dir)
    sources, dropped = [], []
    given = not (isinstance(section, DistillSection) and section.on_policy == 1)
    for dataset in section.datasets:
        sources.append(rows_and_renderer(dataset, tokenizer, base_dir))
        if not given:
            dropped.append(0.0)
            continue
        ratio, more = _check_sequences(section, dataset, *sources[-1])
        dropped.append(ratio)
        notes += more
    (rows, renderer), *mixed = sources
    eval_rows, eval_renderer = None, None
    if section.eval_dataset is not None:
        eval_rows, eval_renderer = rows_and_renderer(section.eval_dataset, tokenizer, base_dir)
        notes += _check_sequences(section, section.eval_dataset, eval_rows, eval_renderer)[1] if given else []
    aligners: dict[int, Aligner] = {}
    if isinstance(section, DistillSection):
        held_out_rows = [] if eval_rows is None or eval_renderer is None else [(eval_rows, eval_renderer)]
        data = [(d, *source) for d, source in zip(_datasets(section), [*sources, *held_out_rows], strict=True)]
        aligners, more = make_aligners(section, teachers, data, tokenizer)
        notes += more
    prompts = None
    if isinstance(section, DistillSection) and section.on_policy:
        held_out = None if eval_rows is None or eval_renderer is None else (eval_rows, eval_renderer)
        prompts = prepare_prompts(section, (rows, renderer), held_out, tokenizer, base_dir)
    inputs = SFTInputs(
        section=section,
        renderer=renderer,
        rows=rows,
        dropped_ratio=_mean(dropped, [dataset.weight for dataset in section.datasets]),
        eval_renderer=eval_renderer,
        eval_rows=eval_rows,
        loss=loss,
        mixed=mixed,
        teachers=teachers,
        aligners=aligners,
        prompts=prompts,
    )
    return inputs, notes


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)


def _check_sequences(
    section: SFTSection | DistillSection, dataset: DatasetSection, rows: Rows, renderer: Renderer
) -> tuple[float, list[str]]:
    """Tokenize rows as training will, so that mistakes show before it: all, or `CHECKED_ROWS` spread evenly.

    The share of those that are left out, and a line that says so.
    """
    taught = None
    if isinstance(section, DistillSection):
        taught = Taught([teacher.title for teacher in section.teachers], section.teacher_column, None)
    tokenize = row_tokenizer(section, dataset, rows, renderer, taught)
    chosen = range(0, len(rows), -(-len(rows) // CHECKED_ROWS))
    dropped = [made is None for made in each_row(rows, chosen, "rows", tokenize)].count(True)
    if dropped == len(chosen):
        require_one(rows, tokenize, section.row_tokens)
    looked_at = "" if len(chosen) == len(rows) else " looked at"
    note = (
        f"{dropped:,} of {len(chosen):,} rows{looked_at} of {rows.name} are left out, for they do not fit "
        f"row_tokens={section.row_tokens} (overlong: {section.overlong})"
    )
    return dropped / len(chosen), [note] if dropped else []


def _prepare_judged(
    section: PreferenceSection | RewardModelSection, tokenizer: Tokenizer, prepared: Prepared
) -> tuple[JudgedInputs, list[str]]:
    """The inputs, and a line for each dataset of which units are left out."""
    loss = _judged_loss(section, prepared.base_dir)
    mixture = prepared.model is not None and bool(prepared.model.mixtures)
    share_prompts = shares_prompts(section, loss.needs, prepared.config.model, mixture=mixture)
    made, ratios, notes = [], [], []
    for dataset in _datasets(section):
        found = rows_and_renderer(dataset, tokenizer, prepared.base_dir)
        units = units_of(section, dataset, *found, loss, share_prompts=share_prompts)
        chosen = range(0, len(units), -(-len(units) // CHECKED_ROWS))
        ratio, lines = check_units(units, (unit is None for unit in each_row(units.rows, chosen, "rows", units)))
        made.append(units)
        ratios.append(ratio)
        notes += lines
    inputs = JudgedInputs(
        section=section,
        loss=loss,
        units=made[0],
        eval_units=made[1] if len(made) > 1 else None,
        dropped_ratio=ratios[0],
    )
    return inputs, notes


def _judged_loss(section: PreferenceSection | RewardModelSection, base_dir: Path) -> Any:
    loss = make_loss(section.loss, LOSSES[section.kind], lambda spec: callable_of(spec, "loss", base_dir))
    if isinstance(section, PreferenceSection) and section.reference is not None and not loss.needs.reference:
        raise ConfigError(
            f"reference: {section.reference} has no effect: {type(loss).__name__} needs no reference; remove it"
        )
    return loss


def _own_loss(spec: str, base_dir: Path) -> TokenLoss:
    made = callable_of(spec, "loss", base_dir)
    if not isinstance(made, type):
        raise ConfigError(f"loss: {spec} is a {type(made).__name__}; name a class whose objects take (stats, batch)")
    try:
        loss = made()
    except Exception as error:
        raise ConfigError(f"loss: {spec}() raised {describe_error(error)}; it is made without arguments") from error
    if not callable(loss):
        raise ConfigError(f"loss: {spec} has no __call__(stats, batch)")
    return loss


def _sequence_loss(section: SFTSection | DistillSection, base_dir: Path) -> TokenLoss:
    if isinstance(section, DistillSection):
        return distill_loss(section)
    if section.label_smoothing:
        return SFTLoss(section.label_smoothing)
    if section.loss in SFT_LOSSES:
        return SFT_LOSSES[section.loss]()
    if is_object_spec(section.loss):
        return _own_loss(section.loss, base_dir)
    raise ConfigError(
        f"loss: {section.loss!r} is unknown{did_you_mean(section.loss, SFT_LOSSES)}; "
        f"there are {', '.join(SFT_LOSSES)}, or name your own as module:Class"
    )
