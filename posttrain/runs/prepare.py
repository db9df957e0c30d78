"""Preparation of a run without weights: tokenizer, rows, rewards, losses, and the configuration checked against the
model; shared by `check` and `run`."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posttrain.config import (
    DatasetSection,
    ModelSection,
    OfflineSection,
    RewardModelSection,
    RunConfig,
    TrainSection,
)
from posttrain.config.optimizer import Muon
from posttrain.data.files import files_note
from posttrain.data.packing import PackedBatches, Window
from posttrain.data.pipeline import order, token_fingerprint, window_of
from posttrain.data.sources import Sequences, checked_rows
from posttrain.data.tokenizer import ADD_ROWS, Tokenizer
from posttrain.errors import ConfigError, placed
from posttrain.kernels import grouped_matmul
from posttrain.kernels.attention import dispatch
from posttrain.kernels.attention.call import AttentionCall
from posttrain.kernels.platform import compute_capability, installed
from posttrain.models.activations import check_saved
from posttrain.models.cache import check_decode_kernel
from posttrain.models.config import AttentionConfig, LatentAttentionConfig, ModelConfig, check_recording, check_router
from posttrain.runs.check_loss import check_stage_loss
from posttrain.runtime import processes
from posttrain.runtime.files import digest, write_whole
from posttrain.stages.inputs import EpochSource, Inputs, Prepared, form_notes, prompt_form
from posttrain.stages.table import naming_stage, stage_kind, stage_names
from posttrain.tracking.console import progress
from posttrain.train.qk_clip import check_clip
from posttrain.user_code import is_users
from posttrain.weights.load import check_adapter, check_lora, check_weights, with_adapter
from posttrain.weights.locate import (
    ModelFiles,
    check_added_tokens,
    own_tokenizer,
    refuse_misspelt,
    run_tokenizer,
    tokenizer_name,
    trained_model_files,
    unreachable,
)

CLOCK = "clock.json"
"""File in the run's folder: the time of its start."""


def prepare(config: RunConfig, *, offline_ok: bool, estimate: bool = False) -> Prepared:
    """Load and validate all inputs of a run. ConfigError for the first mistake.

    `offline_ok`: without a network, checks that need the hub become notes. `estimate`: for `num_epochs` over a large
    dataset, return a note instead of `num_steps`.
    """
    name = tokenizer_name(config.model)
    offline = unreachable(name)
    if offline:
        written = config.model.tokenizer or config.model.path
        assert written is not None
        refuse_misspelt("model.path" if config.model.tokenizer is None else "model.tokenizer", written)
    unchecked = offline_ok and offline
    clock = run_clock(Path(config.output))
    tokenizer = None if unchecked else run_tokenizer(name, config.model).at(clock)
    files = trained_model_files(config.model, tokenizer)
    prepared = Prepared(config=config, files=files, counts=read_counts(Path(config.output)))
    _check_model(prepared, offline_ok=offline_ok)
    if unchecked:
        prepared.notes.append(
            f"not checked, no network: tokenizer and rows of every stage (of the tokenizer {name}, if it is on the hub)"
        )
    for index, section in enumerate(config.stages):
        with naming_stage(config, index):
            if unchecked:
                stage_kind(section.kind).check_offline(section)
            else:
                _prepare_stage(prepared, index, offline_ok=offline_ok, estimate=estimate)
    return prepared


def run_clock(output: Path) -> datetime:
    """Start of the run in a folder, the date for its chat templates; the present before it has begun."""
    file = output / CLOCK
    read = processes.agreed(lambda: json.loads(file.read_text(encoding="utf-8")) if file.exists() else None)
    return datetime.fromisoformat(read) if read else datetime.fromtimestamp(processes.agreed(lambda: int(time.time())))


def keep_clock(output: Path, tokenizer: Tokenizer) -> None:
    """Write the start of a run, which later calls of `run_clock` read."""
    if processes.writes() and tokenizer.clock is not None and not (output / CLOCK).exists():
        output.mkdir(parents=True, exist_ok=True)
        write_whole(output / CLOCK, json.dumps(tokenizer.clock.isoformat()))


def _prepare_stage(prepared: Prepared, index: int, *, offline_ok: bool, estimate: bool) -> None:
    """Add the inputs of a stage, or a note if they are on a hub that cannot be reached."""
    config, section = prepared.config, prepared.config.stages[index]
    paths = [dataset.path for dataset in section.all_datasets if dataset.path.found is None]
    remote = [path for path in paths if unreachable(path)]
    for path in remote:
        refuse_misspelt("dataset.path", path)
    if offline_ok and remote:
        names = ", ".join(remote)
        prepared.notes.append(f"stages.{index}: not checked, no network: dataset {names}, if it is on the hub")
        stage_kind(section.kind).check_offline(section)
        return
    inputs, notes = stage_kind(section.kind).prepare(section, prepared)
    if is_users(inputs.loss):
        check_stage_loss(section, inputs.loss)
    inputs, more = with_steps(inputs, config.seed, prepared.counts, estimate=estimate)
    forms = form_notes(prepared.tokenizer, prompt_form(inputs.renderers), section.datasets)
    prepared.add(index, inputs)
    files = [note for dataset in section.all_datasets if (note := files_note(dataset)) is not None]
    # Training and held-out rows of one file have the same notes.
    told = dict.fromkeys([*files, *forms, *more, *notes])
    prepared.notes += [f"{stage_names(config)[index]}: {note}" for note in told]


def _check_model(prepared: Prepared, *, offline_ok: bool) -> None:
    """Check the configuration against the model, and resolve default lengths."""
    config, files = prepared.config, prepared.files
    model, tokenizer = files.config, files.tokenizer
    if model is None and config.model.path is None:
        prepared.notes.append("not checked: model.init, whose vocab_size is the tokenizer's")
        return
    if model is None:
        assert config.model.path is not None
        refuse_misspelt("model.path", config.model.path)
        prepared.notes.append(f"not checked, no network: the model {config.model.path}, if it is on the hub")
        return
    config = prepared.config = fit_lengths(config, model.max_positions)
    if config.model.remat != "auto":
        check_saved(model, config.model.remat)
    _check_weights(files)
    if model.scalar_head and not all(isinstance(section, RewardModelSection) for section in config.stages):
        raise ConfigError(f"model.path: {config.model.path} is a reward model, which cannot generate")
    if config.model.adapter is not None:
        model = _check_adapter(prepared, model)
    sized = None if tokenizer is None else tokenizer.for_model(model.vocab_size)
    prepared.files = replace(files, config=model, tokenizer=sized)
    if config.model.lora is not None and (
        reason := check_lora(model, config.model.lora, config.model.quantize, config.model.upscale)
    ):
        prepared.notes.append(f"model.lora: {reason}; of this adapter there is only export --to merged")
    if config.model.tokenizer is not None and tokenizer is not None and tokenizer.vocab_size > model.vocab_size:
        raise ConfigError(
            f"model.tokenizer: {config.model.tokenizer} has {tokenizer.vocab_size} tokens, the model only "
            f"{model.vocab_size}; "
            + (
                "raise model.init.vocab_size"
                if config.model.init is not None
                else "give the model's own, or " + ADD_ROWS
            )
        )
    prepared.notes += check_kernels(config, model, here=not offline_ok)
    for index, section in enumerate(config.stages):
        if section.row_tokens > model.max_positions:
            raise ConfigError(
                f"stages.{index}: row_tokens={section.row_tokens} must be at most {_context_of(config.model, model)}"
            )
        with naming_stage(config, index):
            adapter = config.model.lora is not None or config.model.adapter is not None
            _check_mixture(section, model, adapter=adapter)
            if section.optimizer.qk_clip is not None:
                check_clip(model, adapter=adapter)
            # Modules that are trained in full, or a tower, may have matrices for it, which the loaded model tells.
            alone = config.model.lora is not None and not config.model.lora.modules_to_save
            if alone and config.model.vision != "tower" and isinstance(section.optimizer, Muon):
                _check_muon_of_adapter(section.optimizer)


def _check_muon_of_adapter(section: Muon) -> None:
    """Raises ConfigError for Muon without groups of its own where an adapter alone is trained."""
    if not any(group.kind == "muon" for group in section.groups):
        raise ConfigError(
            "optimizer: muon takes the matrices between hidden states, and of model.lora none is trained: those of an "
            "adapter are factors of low rank; use adamw, or name them: groups: [{match: lora_, kind: muon}]"
        )


def _check_adapter(prepared: Prepared, base: ModelConfig) -> ModelConfig:
    """Check the adapter against its base; return the configuration of both."""
    adapter, wrapper, tokenizer = prepared.config.model.adapter, prepared.files.wrapper, prepared.files.tokenizer
    assert adapter is not None
    reward = all(isinstance(stage, RewardModelSection) for stage in prepared.config.stages)
    with placed("model.adapter: "):
        if unreachable(adapter.resolved):
            prepared.notes.append(f"not checked, no network: model.adapter {adapter}, which run downloads")
            return base
        model = with_adapter(base, adapter.resolved, wrapper)
        absent = check_adapter(model, adapter.resolved, wrapper, reward=reward)
        if tokenizer is not None and model.resized:
            named = prepared.config.model.tokenizer is not None
            check_added_tokens(tokenizer, adapter.resolved, base.vocab_size, model.vocab_size, named=named)
    if prepared.config.model.tokenizer is None and own_tokenizer(adapter.resolved) is not None:
        prepared.notes.append(f"model.adapter: the tokenizer is that of {adapter}; for another set model.tokenizer")
    if absent:
        prepared.notes.append(f"model.adapter: the model has no {', '.join(absent)} of its target_modules; ignored")
    return model


def _context_of(section: ModelSection, model: ModelConfig) -> str:
    """Maximum context of the model, and how to extend it."""
    limit = f"max_position_embeddings={model.max_positions} of the model"
    whole = json.loads(model.hf_json).get("max_position_embeddings", 0)
    if section.path is None or section.long_context or whole <= model.max_positions:
        return limit
    return f"{model.max_positions}, for which the model's short RoPE factors are; model.long_context=true takes {whole}"


def _check_weights(files: ModelFiles) -> None:
    """Check a local model folder. ConfigError if its weights do not match its `config.json`."""
    if files.local is not None:
        with placed("model.path: "):
            check_weights(files.local)


def _check_mixture(section: TrainSection, model: ModelConfig, *, adapter: bool) -> None:
    """Check MoE settings. ConfigError if the stage uses a setting that needs an MoE model."""
    router = section.router
    if router.balance_coef or router.z_coef or router.correction_rate:
        check_router(model, router.correction_rate, adapter=adapter)
    if section.records_routing:
        check_recording(model)


def fit_lengths(config: RunConfig, max_positions: int) -> RunConfig:
    """Resolve default lengths to the model's context; explicit lengths are unchanged."""
    return config.model_copy(update={"stages": tuple(_fit_stage(stage, max_positions) for stage in config.stages)})


def _fit_stage(section: TrainSection, max_positions: int) -> TrainSection:
    if "row_tokens" in section.model_fields_set or section.row_tokens <= max_positions:
        return section
    fitted = section.default_lengths(max_positions)
    # A copy would not validate explicit lengths against the resolved ones.
    given = {name: getattr(section, name) for name in section.model_fields_set}
    try:
        return type(section).model_validate({**given, **fitted})
    except ValueError as error:
        raise ConfigError(
            f"row_tokens is by default max_position_embeddings={max_positions} of the model, which does not hold "
            f"sampling.max_tokens={fitted['sampling'].max_tokens} beside a prompt; lower it"
        ) from error


PLATFORMS = ("cpu", "gpu", "tpu")


def check_kernels(config: RunConfig, model: ModelConfig, *, here: bool) -> list[str]:
    """Check kernels. ConfigError for a kernel that no platform supports for this model, and with `here` for one that
    this machine does not support.

    Returns a note for each kernel that only another machine supports.
    """
    notes = []
    if config.model.attention != "auto":
        requests = list(_attention_requests(config, model))
        notes += _check_kernel("attention", config.model.attention, dispatch.select_attention, requests, here=here)
    if config.model.grouped_matmul != "auto" and model.mixtures:
        request = grouped_matmul.GroupedMatmulCall(platform="", dtype=_dtype(config), tokamax=True)
        notes += _check_kernel(
            "grouped_matmul", config.model.grouped_matmul, grouped_matmul.select, [request], here=here
        )
    check_decode_kernel(config.model.decode_attention, model, jnp.dtype(_dtype(config)), max(1, config.mesh.tensor))
    return notes


def _check_kernel(
    field: str, kernel: str, select: Callable[[str, Any], str], requests: list[Any], *, here: bool
) -> list[str]:
    try:
        for request in requests:
            select(kernel, replace(request, platform=jax.default_backend(), tokamax=installed("tokamax")))
    except ConfigError as error:
        if here or not any(_serves(kernel, select, requests, platform) for platform in PLATFORMS):
            raise ConfigError(f"model.{field}={kernel}: {error}") from error
        return [f"model.{field}={kernel}: not on this machine: {error}"]
    return []


def _serves(kernel: str, select: Callable[[str, Any], str], requests: list[Any], platform: str) -> bool:
    try:
        for request in requests:
            select(kernel, replace(request, platform=platform))
    except ConfigError:
        return False
    return True


def _dtype(config: RunConfig) -> str:
    return config.model.compute_dtype or config.model.dtype


def _attention_requests(config: RunConfig, model: ModelConfig) -> Iterator[AttentionCall]:
    """Attention calls of the run: whole rows in training; the KV cache of a sampler uses "auto"."""
    for row_tokens in {section.row_tokens for section in config.stages}:
        for kind in {block.attention for block in model.blocks}:
            yield AttentionCall(
                platform="",
                rows=1,
                num_queries=row_tokens // max(1, config.mesh.context),
                num_keys=row_tokens,
                dtype=_dtype(config),
                parents=False,
                same_tokens=True,
                row_shards=1,
                head_shards=max(1, config.mesh.tensor),
                token_shards=max(1, config.mesh.context),
                tokamax=True,
                # Without a local GPU, that of the probable target.
                compute_capability=compute_capability(None) or 9.0,
                largest=any(section.optimizer.qk_clip is not None for section in config.stages),
                **_head_shape(kind),
            )


def _head_shape(kind: AttentionConfig | LatentAttentionConfig) -> dict[str, Any]:
    """Shape of one layer's heads."""
    if isinstance(kind, LatentAttentionConfig):
        sizes = {"num_kv_heads": kind.num_heads, "head_dim": kind.nope_dim + kind.rope_dim, "value_dim": kind.value_dim}
        return {"num_heads": kind.num_heads, **sizes, "soft_cap": None, "sinks": False}
    sizes = {"num_kv_heads": kind.num_kv_heads, "head_dim": kind.head_dim, "value_dim": kind.head_dim}
    return {"num_heads": kind.num_heads, **sizes, "soft_cap": kind.soft_cap, "sinks": kind.sinks}


Lengths = list[tuple[int, int] | None]
"""Tokens and image patches of a row's sequences; None for a dropped one."""
COUNTS = "epochs.json"
"""File in the run's folder: number of rows by digest of the count's inputs."""


def read_counts(output: Path) -> dict[str, int]:
    """Read the counts of earlier calls of the run."""
    file = output / COUNTS
    counts: dict[str, int] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return counts


def write_counts(output: Path, counts: Mapping[str, int]) -> None:
    """Write the counts for later calls of the run; no file without any."""
    if counts:
        write_whole(output / COUNTS, json.dumps(counts, indent=1))


def with_steps(inputs: Inputs, seed: int, counts: dict[str, int], *, estimate: bool) -> tuple[Inputs, list[str]]:
    """Resolve `num_steps` of the inputs' section; also returns a note if they come from epochs.

    `counts`: counts of the run so far, to which a new one is added. `estimate`: for a large dataset, return only a note
    with an estimate from a sample of its rows, and leave the section unchanged.
    """
    section = inputs.section
    num_epochs = section.epochs
    if num_epochs is None:
        return inputs, []
    passes = f"num_epochs={num_epochs:g}"
    sources = inputs.epoch_sources
    if isinstance(sources, int):
        return _resolved(inputs, section, math.ceil(num_epochs * sources), passes)
    key = f"rows-{_digest(section, num_epochs, seed, sources)}"
    if key not in counts:
        sampled, whole = sum(len(checked_rows(one.count)) for one in sources), sum(one.count for one in sources)
        estimated = estimate and sampled < whole
        rows = _num_rows(section, num_epochs, seed, sources, sampled=estimated)
        if estimated:
            steps = math.ceil(rows * whole / sampled / section.batch_rows)
            return inputs, [
                f"{passes} is about {steps:,} steps of {section.batch_rows} rows, estimated from {sampled:,} of "
                f"{whole:,} sequences; run counts them all, once"
            ]
        counts[key] = rows
    return _resolved(inputs, section, counts[key], passes)


FEW_STEPS = 50
"""Updates below which a note says that there are few."""


def _resolved(inputs: Inputs, section: OfflineSection, num_rows: int, passes: str) -> tuple[Inputs, list[str]]:
    """Inputs with the steps that hold `num_rows` rows, and a note that says how many these are."""
    num_steps = math.ceil(num_rows / section.batch_rows)
    try:
        section.check_warmup(num_steps)
    except ValueError as error:
        raise ConfigError(f"{error}, which {passes} makes of the data") from error
    counted = section.model_copy(update={"num_steps": num_steps, "num_epochs": None})
    resolved: Any = inputs
    note = f"{passes} is num_steps={num_steps:,} of {section.batch_rows} rows"
    if num_steps < FEW_STEPS and section.batch_rows > 1:
        fewer = max(1, num_rows // FEW_STEPS)
        more = f"batch_rows={fewer} makes {math.ceil(num_rows / fewer):,} of the same passes"
        note += f" of {section.row_tokens} tokens: few updates; {more}"
    return replace(resolved, section=counted), [note]


def _num_rows(
    section: OfflineSection, num_epochs: float, seed: int, sources: Sequence[EpochSource], *, sampled: bool
) -> int:
    """Number of rows that hold `num_epochs` passes over all sequences, or over the sampled ones."""
    datasets = [one.dataset for one in sources]
    lengths: list[list[Lengths]] = [
        _lengths(one, checked_rows(one.count) if sampled else range(one.count)) for one in sources
    ]
    return rows_of_epochs(
        section,
        datasets,
        lengths,
        window=window_of(section, datasets),
        num_epochs=num_epochs,
        seed=seed,
        row_patches=sources[0].row_patches,
    )


def _lengths(source: EpochSource, chosen: Sequence[int]) -> list[Lengths]:
    """Tokens and image patches of each row's sequences; None for a dropped one."""
    title = f"counting the tokens of {source.rows.name}"
    made = (source.tokenize(index) for index in progress(chosen, title, len(chosen)))
    return [[None if one is None else (len(one["tokens"]), len(one.get("patches", ()))) for one in row] for row in made]


def _digest(section: OfflineSection, num_epochs: float, seed: int, sources: Sequence[EpochSource]) -> str:
    """Hash of everything that the count depends on."""
    data = [
        [dict(of.identity), token_fingerprint(of.rows, of.tokenize), of.count, of.dataset.shuffle] for of in sources
    ]
    weights = [of.dataset.weight for of in sources]
    settings: dict[str, Any] = {"num_epochs": num_epochs, "seed": seed, "data": data, "weights": weights}
    settings |= {name: getattr(section, name) for name in ("batch_rows", "row_tokens", "packing", "overlong")}
    settings |= {} if section.row_patches is None else {"row_patches": section.row_patches}
    return digest(json.dumps(settings, sort_keys=True))


def rows_of_epochs(
    section: OfflineSection,
    datasets: Sequence[DatasetSection],
    lengths: Sequence[Sequence[Lengths]],
    *,
    window: Window,
    num_epochs: float,
    seed: int,
    row_patches: int = 0,
) -> int:
    """Minimum number of rows, in training order, that hold `num_epochs` times the number of sequences.

    `lengths`: tokens and patches of the sequences of each row of each dataset; None for dropped ones. Packs the same
    stream as training, with stand-ins for the tokens.
    """
    import grain

    streams = [
        order(len(of_one), shuffle=dataset.shuffle, seed=seed + number).map(_StandIns(of_one))
        for number, (dataset, of_one) in enumerate(zip(datasets, lengths, strict=True))
    ]
    stream = streams[0] if len(streams) == 1 else grain.MapDataset.mix(streams, [one.weight for one in datasets])
    epoch = sum(map(len, lengths))
    wanted = sum(one is not None for draw in range(math.ceil(num_epochs * epoch)) for one in stream[draw])
    if not section.packing:
        return wanted
    packed = PackedBatches(
        stream,
        epoch=epoch,
        window=window,
        batch_rows=1,
        lengths={"tokens": section.row_tokens},
        row_patches=row_patches,
    )
    rows = held = 0
    while held < wanted:
        held += int(next(packed)["tokens_segments"].max())
        rows += 1
    return rows


class _StandIns:
    """Arrays of the given lengths by number, without tokens."""

    def __init__(self, lengths: Sequence[Lengths]):
        longest = max((one[0] for row in lengths for one in row if one is not None), default=0)
        self._lengths, self._zeros = lengths, np.zeros(longest, np.int8)

    def __call__(self, index: int) -> Sequences:
        return [None if one is None else self._arrays(one) for one in self._lengths[index]]

    def _arrays(self, length: tuple[int, int]) -> dict[str, np.ndarray]:
        tokens, patches = length
        beside = {"patches": np.broadcast_to(np.uint8(0), (patches,))} if patches else {}
        return {"tokens": self._zeros[:tokens], **beside}
