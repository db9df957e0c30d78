"""SFT stage: packed sequences and a token loss; rows, loop and held-out evaluation that distillation shares."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from posttrain.batch import DraftLoss, TokenLoss
from posttrain.config import DatasetSection, DistillSection, SequenceSection, SFTSection, UserObject
from posttrain.config.locator import FORMS
from posttrain.config.other_names import meant_kind
from posttrain.data.chat import Masked, Renderer
from posttrain.data.columns import unread_columns, unread_note
from posttrain.data.cuts import RowCuts, mean_metrics
from posttrain.data.format import tokenize_example
from posttrain.data.image_rows import bad_image_metrics, bad_image_note, most_patches, picture_note
from posttrain.data.pipeline import (
    RowTargets,
    SFTBatches,
    rendering_identity,
    require_one,
    row_tokenizer,
    rows_identity,
    sequences_key,
)
from posttrain.data.prefetch import MeasuredStream
from posttrain.data.sources import Rows, checked_rows, each_row
from posttrain.data.turns import stop_notes
from posttrain.errors import ConfigError
from posttrain.evaluation.sequences import (
    Record,
    evaluate_sequences,
    sequence_differences,
    sequence_metrics,
    with_perplexities,
)
from posttrain.kernels.logits.chunk_stats import Terms
from posttrain.losses.sft import DFTLoss, SFTLoss
from posttrain.metrics import Metrics
from posttrain.stages.context import HeldOut, StageRun
from posttrain.stages.inputs import EpochSource, Prepared, describe_rows, rows_and_renderer
from posttrain.train.loop import prefetched
from posttrain.train.objective import TrainSettings
from posttrain.train.trainer import Trainer

if TYPE_CHECKING:
    from posttrain.stages.held_out_samples import HeldOutPrompts, HeldOutSamples

STOP_ROWS = 8
"""Rows of a dataset, spread evenly, whose turns must end with a stop token."""


@dataclass(frozen=True, kw_only=True)
class SequenceInputs:
    """Inputs of stages that train on given sequences."""

    section: SequenceSection
    renderer: Renderer
    rows: Rows
    cuts: Mapping[str, float]
    """Metrics of what the training datasets lose by `overlong`."""
    eval_renderer: Renderer | None
    eval_rows: Rows | None
    loss: TokenLoss | DraftLoss
    mixed: Sequence[tuple[Rows, Renderer]]
    """Rows and renderers of the datasets in `section.mix`."""

    @property
    def renderers(self) -> Sequence[Renderer]:
        """Renderers of the datasets that are trained on."""
        return [self.renderer, *(renderer for _, renderer in self.mixed)]

    @property
    def epoch_sources(self) -> Sequence[EpochSource] | int:
        """Datasets over which `num_epochs` passes."""
        data = zip(self.section.datasets, [(self.rows, self.renderer), *self.mixed], strict=True)
        tokenizer = self.renderer.tokenizer
        patches = most_patches(self.section, tokenizer)
        return [
            EpochSource(
                one,
                rows,
                len(rows),
                row_tokenizer(self.section, one, rows, r),
                rendering_identity(r) | rows_identity(self.section, one, rows, r),
                patches,
            )
            for one, (rows, r) in data
        ]

    @property
    def identity(self) -> Mapping[str, Mapping[str, str]]:
        """Digests of all that the rows hold, and of the pictures that they show, by dataset and part."""
        names = ["dataset", *(f"mix.{number}" for number in range(len(self.mixed)))]
        sources = list(zip(names, self.section.datasets, [(self.rows, self.renderer), *self.mixed], strict=True))
        if self.section.eval_dataset is not None:
            assert self.eval_rows is not None and self.eval_renderer is not None
            sources.append(("eval_dataset", self.section.eval_dataset, (self.eval_rows, self.eval_renderer)))
        return {name: rows_identity(self.section, dataset, *source) for name, dataset, source in sources}


def prepare_sequences(
    section: SequenceSection,
    prepared: Prepared,
    loss: TokenLoss | DraftLoss,
    *,
    targets: RowTargets | None = None,
    has_completions: bool = True,
    scored: Collection[str] | None = (),
) -> tuple[SequenceInputs, list[str]]:
    """Load rows. Also returns notes about dropped rows.

    `targets`: teacher targets of the rows. `has_completions`: whether rows are trained on, instead of being prompts.
    `scored`: columns of the held-out rows that functions read; None: all.
    """
    most_patches(section, prepared.tokenizer)
    notes: list[str] = []
    sources = []
    dropped: list[RowCuts] = []
    for dataset in section.all_datasets:
        sources.append(rows_and_renderer(dataset, prepared.tokenizer))
        if has_completions:
            read = scored if dataset is section.eval_dataset else ()
            lost, more = _check_sequences(section, dataset, *sources[-1], targets, read)
            dropped.append(lost)
            notes += more
    num_trained = len(section.datasets)
    (rows, renderer), *mixed = sources[:num_trained]
    eval_rows, eval_renderer = (None, None) if section.eval_dataset is None else sources[-1]
    inputs = SequenceInputs(
        section=section,
        renderer=renderer,
        rows=rows,
        cuts=mean_metrics(dropped[:num_trained], [one.weight for one in section.datasets]) if has_completions else {},
        eval_renderer=eval_renderer,
        eval_rows=eval_rows,
        loss=loss,
        mixed=mixed,
    )
    return inputs, notes


def describe_sequences(section: SequenceSection, inputs: SequenceInputs | None, shards: int) -> str:
    """Summarise the stage in one line."""
    rows = ""
    if inputs is not None:
        rows = f"{len(inputs.rows) + sum(len(more) for more, _ in inputs.mixed):,} dataset rows, "
    return rows + describe_rows(section, shards)


def _check_sequences(
    section: SequenceSection,
    dataset: DatasetSection,
    rows: Rows,
    renderer: Renderer,
    targets: RowTargets | None,
    read: Collection[str] | None,
) -> tuple[RowCuts, list[str]]:
    """Tokenise the rows of `checked_rows` as in training, to find mistakes early.

    Returns what they lose by `overlong`, and notes: about that, and about rows with a sequence for each turn.
    """
    tokenize = row_tokenizer(section, dataset, rows, renderer, targets)
    chosen = checked_rows(len(rows))
    dropped = total = split = tokens = whole = kept = 0
    grids: list[np.ndarray] = []
    for sequences in each_row(rows, chosen, "rows", tokenize):
        lengths = [len(one["tokens"]) for one in sequences if one is not None]
        grids += [one["grids"] for one in sequences if one is not None and "grids" in one]
        total += len(sequences)
        kept += sum(lengths)
        dropped += len(sequences) - len(lengths)
        if len(sequences) > 1:
            split += 1
            tokens += sum(lengths)
            whole += max(lengths, default=0)
    if dropped == total:
        require_one(rows, tokenize, section.row_tokens)
    checked = "" if len(chosen) == len(rows) else " checked"
    notes = picture_note(grids, total, f"sequences{checked}", rows, renderer.tokenizer)
    notes += bad_image_note(rows, chosen)
    if split and section.overlong == "split" and not renderer.chat:
        notes.append(
            f"{split:,} of {len(chosen):,} rows{checked} of {rows.name} are split into {total - len(chosen) + split:,} "
            f"sequences of at most row_tokens={section.row_tokens} (overlong: split)"
        )
    elif split:
        notes.append(
            f"{split:,} of {len(chosen):,} rows{checked} of {rows.name} are trained as a sequence for each assistant "
            f"turn, in all {total - len(chosen) + split:,} with {tokens / max(whole, 1):.1f} times the tokens, because "
            f"the chat template of {renderer.tokenizer.name} writes earlier turns differently once others follow; a "
            "model.chat_template that keeps them makes one sequence of each row"
        )
    if long := dropped - rows.left_out(chosen):
        notes.append(
            f"{long:,} of {total:,} {'sequences' if split else 'rows'}{checked} of {rows.name} are dropped: longer "
            f"than row_tokens={section.row_tokens} (overlong: {section.overlong})"
        )
    of_rows = rows.cuts[sequences_key(section, dataset, renderer)]
    left_out = rows.left_out(chosen)
    lost = RowCuts.of([of_rows[index] for index in chosen if index in of_rows], total, kept, left_out)
    notes += lost.truncation_note(f"{'sequences' if split else 'rows'}{checked}", rows.name, section.row_tokens)
    teacher = [section.teacher_column] if isinstance(section, DistillSection) and section.teacher_column else []
    seen = renderer.tokenizer.has_images
    known = rows.all_columns if read is None else (*teacher, *read)
    unread = unread_columns(rows.all_columns, dataset, "sequence", images=seen, others=known)
    notes += _stop_notes(dataset, rows, renderer) + rows.notes + unread_note(rows.name, unread)
    return lost, notes


def _stop_notes(dataset: DatasetSection, rows: Rows, renderer: Renderer) -> list[str]:
    """Warning about assistant turns that no stop token ends, from a few rows."""
    masks = []
    chosen = range(0, len(rows), -(-len(rows) // STOP_ROWS)) if renderer.chat else ()
    for index in (one for one in chosen if one not in rows.bad_images):
        with rows.named(index) as row:
            examples = tokenize_example(row, dataset, renderer, "answers")
        masks += [Masked(example.tokens.tolist(), example.loss_mask.tolist()) for example in examples]
    return stop_notes(renderer, masks)


def evaluate_held_out(trainer: Trainer, inputs: SequenceInputs, targets: RowTargets | None) -> Record:
    """Evaluate the stage's held-out rows."""
    assert inputs.eval_rows is not None and inputs.eval_renderer is not None
    return evaluate_sequences(trainer, inputs.section, inputs.eval_rows, inputs.eval_renderer, targets)


def sequences_of(stage: StageRun, inputs: SequenceInputs, targets: RowTargets | None) -> SFTBatches:
    section = inputs.section
    return SFTBatches(section, inputs.rows, inputs.renderer, seed=stage.seed, mixed=inputs.mixed, targets=targets)


def train_batches(
    stage: StageRun,
    inputs: SequenceInputs,
    trainer: Trainer,
    batches: MeasuredStream,
    evaluate_all: Callable[[], Record],
    seen: Callable[[Metrics], Mapping[str, float]] | None = None,
    samples: HeldOutSamples | None = None,
) -> None:
    """Run all steps and evaluations of a stage, then save its model. `seen`: additional metrics of a step; `samples`:
    those of held-out prompts between steps."""
    section = inputs.section
    # With overlong=error, a row that does not fit is an error before the first step.
    dropping = section.on_bad_image == "drop"
    dropped = inputs.cuts if section.overlong != "error" or dropping else {}
    held_out = None
    if section.eval_dataset is not None:
        held_out = HeldOut(evaluate=evaluate_all, metrics=sequence_metrics, difference=sequence_differences)
    with stage.training(trainer, batches, section, held_out) as training:
        for step in training:
            if samples is not None:
                samples.before(training)
            metrics = trainer.step(next(batches))
            sampled = {} if seen is None else seen(metrics)
            bad = bad_image_metrics(batches.state()) if dropping else {}
            training.log({**with_perplexities(metrics), **dropped, **bad, **batches.metrics(), **sampled})
            if samples is not None:
                samples.after(training, step)


SFT_LOSSES: dict[str, Callable[[], TokenLoss]] = {"nll": SFTLoss, "dft": DFTLoss}


@dataclass(frozen=True, kw_only=True)
class SFTInputs(SequenceInputs):
    """Inputs of SFT stages."""

    section: SFTSection
    prompts: HeldOutPrompts | None = None
    """Held-out prompts that are sampled between steps; None: none are."""


def prepare(section: SFTSection, prepared: Prepared) -> tuple[SFTInputs, list[str]]:
    """Load rows and loss. Also returns notes about dropped rows."""
    loss = sft_loss(section)
    if section.samples_every is None:
        inputs, notes = prepare_sequences(section, prepared, loss)
        return SFTInputs(**vars(inputs)), notes
    # Stages without samples load nothing of RL.
    from posttrain.stages.held_out_samples import columns_read, prepare_samples

    inputs, notes = prepare_sequences(section, prepared, loss, scored=columns_read(section))
    prompts, more = prepare_samples(section, prepared)
    return SFTInputs(prompts=prompts, **vars(inputs)), notes + more


def one_process(section: SFTSection) -> str | None:
    """Reason why a stage runs in a single process; None: in any number of them."""
    return None if section.samples_every is None else "samples_every works in one process only"


def check_offline(section: SFTSection) -> None:
    """Check everything that needs neither tokenizer nor rows."""
    sft_loss(section)
    if section.samples_every is not None:
        from posttrain.stages.held_out_samples import check_rewards

        check_rewards(section)


def describe(section: SFTSection, inputs: SFTInputs | None, shards: int) -> str:
    """Summarise the stage in one line."""
    return describe_sequences(section, inputs, shards)


def run(stage: StageRun, inputs: SFTInputs) -> None:
    """Train an SFT stage to its last step, resuming from its newest checkpoint."""
    section = inputs.section
    settings = train_settings(section, stage.tokenizer.num_ids, dropout_seed=stage.seed)
    trainer = stage.make_trainer(section, stage.load_model(), inputs.loss, settings)
    with ExitStack() as stack:
        samples = None
        if inputs.prompts is not None:
            from posttrain.stages.held_out_samples import HeldOutSamples

            samples = stack.enter_context(HeldOutSamples.running(stage, section, inputs.prompts, trainer))
        batches = stack.enter_context(prefetched(sequences_of(stage, inputs, None), trainer, section.steps))
        train_batches(
            stage, inputs, trainer, batches, lambda: evaluate_held_out(trainer, inputs, None), samples=samples
        )


def train_settings(section: SFTSection, num_ids: int, *, dropout_seed: int) -> TrainSettings:
    """Settings of the trainer. `num_ids`: ids that have a token, over which labels are smoothed."""
    terms = Terms(mean_over=num_ids if section.label_smoothing else None)
    settings = TrainSettings.of(section, temperature=1.0, dropout_seed=dropout_seed, terms=terms)
    return replace(settings, noise_alpha=section.noise_alpha)


def sft_loss(section: SFTSection) -> TokenLoss:
    if section.label_smoothing:
        return SFTLoss(section.label_smoothing)
    if isinstance(section.loss, UserObject):
        return section.loss.make("loss", positional=2)
    if section.loss in SFT_LOSSES:
        return SFT_LOSSES[section.loss]()
    raise ConfigError(
        f"loss: {section.loss!r} is unknown{meant_kind(section.loss, SFT_LOSSES)}; "
        f"there are {', '.join(SFT_LOSSES)}, or give your own as {FORMS}"
    )
