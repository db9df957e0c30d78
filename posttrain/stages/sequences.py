"""Inputs of SFT and distillation stages besides weights: rows, a loss, teachers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from posttrain.batch import TokenLoss
from posttrain.config import DatasetSection, DistillSection, Locator, SFTSection
from posttrain.data.chat import Renderer
from posttrain.data.pipeline import require_one, row_tokenizer
from posttrain.data.sources import Rows, checked_rows, each_row
from posttrain.distill.cross_tokenizer.rows import Aligner
from posttrain.distill.cross_tokenizer.teachers import make_aligners
from posttrain.distill.features import distill_loss
from posttrain.distill.targets import TeacherTargets
from posttrain.distill.teachers import TeacherSource, find_teachers
from posttrain.errors import ConfigError, did_you_mean
from posttrain.losses.sft import DFTLoss, SFTLoss
from posttrain.stages.inputs import Prepared, callable_of, describe_rows, rows_and_renderer
from posttrain.stages.prompts import PromptInputs, prepare_prompts
from posttrain.user_code import describe_error, is_object_spec

SFT_LOSSES: dict[str, Callable[[], TokenLoss]] = {"nll": SFTLoss, "dft": DFTLoss}


@dataclass(frozen=True, kw_only=True)
class SequenceInputs:
    """Inputs of stages that train on given sequences."""

    section: SFTSection | DistillSection
    renderer: Renderer
    rows: Rows
    dropped_ratio: float
    """Share of rows dropped by `overlong`."""
    eval_renderer: Renderer | None
    eval_rows: Rows | None
    loss: TokenLoss
    mixed: Sequence[tuple[Rows, Renderer]]
    """Rows and renderers of the datasets in `section.mix`."""
    teachers: Sequence[TeacherSource]
    aligners: Mapping[int, Aligner] = field(default_factory=dict)
    """Aligners of teachers with another tokenizer, by teacher number."""
    prompts: PromptInputs | None = None
    """Prompts for on-policy samples of the student."""


def prepare(section: SFTSection | DistillSection, prepared: Prepared) -> tuple[SequenceInputs, list[str]]:
    """Load rows, loss and teachers. Also returns notes about dropped rows and teachers."""
    tokenizer = prepared.tokenizer
    loss = sequence_loss(section)
    teachers: list[TeacherSource] = []
    notes: list[str] = []
    if isinstance(section, DistillSection):
        teachers, notes = find_teachers(section, tokenizer)
    given = not (isinstance(section, DistillSection) and section.on_policy == 1)
    sources, dropped = [], []
    for dataset in section.all_datasets:
        sources.append(rows_and_renderer(dataset, tokenizer))
        ratio, more = _check_sequences(section, dataset, *sources[-1]) if given else (0.0, [])
        dropped.append(ratio)
        notes += more
    num_trained = len(section.datasets)
    (rows, renderer), *mixed = sources[:num_trained]
    held_out = None if section.eval_dataset is None else sources[-1]
    aligners: dict[int, Aligner] = {}
    prompts = None
    if isinstance(section, DistillSection):
        data = [(dataset, *source) for dataset, source in zip(section.all_datasets, sources, strict=True)]
        aligners, more = make_aligners(section, teachers, data, tokenizer)
        notes += more
        if section.on_policy:
            prompts, more = prepare_prompts(section, (rows, renderer), held_out, tokenizer)
            notes += more
    inputs = SequenceInputs(
        section=section,
        renderer=renderer,
        rows=rows,
        dropped_ratio=_mean(dropped[:num_trained], [dataset.weight for dataset in section.datasets]),
        eval_renderer=None if held_out is None else held_out[1],
        eval_rows=None if held_out is None else held_out[0],
        loss=loss,
        mixed=mixed,
        teachers=teachers,
        aligners=aligners,
        prompts=prompts,
    )
    return inputs, notes


def check_offline(section: SFTSection | DistillSection) -> None:
    """Check everything that needs neither tokenizer nor rows."""
    sequence_loss(section)


def describe(section: SFTSection | DistillSection, inputs: SequenceInputs | None, shards: int) -> str:
    """Summarise the stage in one line."""
    rows = ""
    if inputs is not None:
        rows = f"{len(inputs.rows) + sum(len(more) for more, _ in inputs.mixed):,} dataset rows, "
    return rows + describe_rows(section, shards)


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)


def _check_sequences(
    section: SFTSection | DistillSection, dataset: DatasetSection, rows: Rows, renderer: Renderer
) -> tuple[float, list[str]]:
    """Tokenise the rows of `checked_rows` as in training, to find mistakes early.

    Returns the share of dropped rows, and a note about them.
    """
    targets = None
    if isinstance(section, DistillSection):
        targets = TeacherTargets([teacher.title for teacher in section.teachers], section.teacher_column, None)
    tokenize = row_tokenizer(section, dataset, rows, renderer, targets)
    chosen = checked_rows(len(rows))
    dropped = [made is None for made in each_row(rows, chosen, "rows", tokenize)].count(True)
    if dropped == len(chosen):
        require_one(rows, tokenize, section.row_tokens)
    checked = "" if len(chosen) == len(rows) else " checked"
    note = (
        f"{dropped:,} of {len(chosen):,} rows{checked} of {rows.name} are dropped: longer than "
        f"row_tokens={section.row_tokens} (overlong: {section.overlong})"
    )
    return dropped / len(chosen), [note] if dropped else []


def sequence_loss(section: SFTSection | DistillSection) -> TokenLoss:
    if isinstance(section, DistillSection):
        return distill_loss(section)
    if section.label_smoothing:
        return SFTLoss(section.label_smoothing)
    if section.loss in SFT_LOSSES:
        return SFT_LOSSES[section.loss]()
    if is_object_spec(section.loss):
        return _own_loss(section.loss)
    raise ConfigError(
        f"loss: {section.loss!r} is unknown{did_you_mean(section.loss, SFT_LOSSES)}; "
        f"there are {', '.join(SFT_LOSSES)}, or name your own as module:Class"
    )


def _own_loss(spec: Locator) -> TokenLoss:
    made = callable_of(spec, "loss")
    if not isinstance(made, type):
        raise ConfigError(f"loss: {spec} is a {type(made).__name__}; set a class whose objects take (stats, batch)")
    try:
        loss = made()
    except Exception as error:
        raise ConfigError(f"loss: {spec}() raised {describe_error(error)}; it is made without arguments") from error
    if not callable(loss):
        raise ConfigError(f"loss: {spec} has no __call__(stats, batch)")
    return loss
