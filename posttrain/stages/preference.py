"""Preference and reward model stages: preference pairs or labelled answers, one loss, and a reference if the loss needs
one, or a scalar head on the decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import jax
import numpy as np

from posttrain.batch import Batch
from posttrain.cluster.reference import Reference
from posttrain.cluster.reference_cache import check_scored, model_key, with_reference, with_reference_of_all
from posttrain.config import (
    AttentionKernel,
    DatasetSection,
    Locator,
    OnlinePreferenceSection,
    PairSection,
    PreferenceSection,
    RewardModelSection,
    UserObject,
)
from posttrain.config.locator import FORMS, checked_settings
from posttrain.config.other_names import meant_kind
from posttrain.data.chat import Renderer
from posttrain.data.columns import RowKind, unread_columns, unread_note
from posttrain.data.cuts import RowCuts
from posttrain.data.image_rows import bad_image_metrics, bad_image_note, most_patches, picture_note
from posttrain.data.pair_examples import ComparisonBatches, PairExamples
from posttrain.data.pipeline import rendering_identity
from posttrain.data.preference import is_paired, labelled_answers
from posttrain.data.sources import checked_rows, each_row
from posttrain.data.turns import stop_notes
from posttrain.errors import ConfigError
from posttrain.evaluation.pairs import PairEvaluation, with_margins
from posttrain.kernels.attention.dispatch import supports_parents
from posttrain.kernels.logits.chunk_stats import Terms
from posttrain.losses.pairs import Needs, PairLoss
from posttrain.losses.preference import KINDS, KTOLoss, PreferenceLoss
from posttrain.losses.reference_free import CPOLoss, ORPOLoss, SimPOLoss
from posttrain.losses.reward_model import BradleyTerryLoss, ProcessLoss
from posttrain.models.decoder import Decoder
from posttrain.runtime.files import cache_folder
from posttrain.stages.context import HeldOut, StageRun
from posttrain.stages.inputs import EpochSource, Prepared, describe_rows, rows_and_renderer
from posttrain.train.loop import prefetched
from posttrain.train.trainer import Trainer
from posttrain.weights.locate import family_digest
from posttrain.weights.scalar_head import add_scalar_head, with_padding

PREFERENCE_LOSSES: Mapping[str, tuple[type, Mapping[str, Any]]] = {
    "dpo": (PreferenceLoss, {"kinds": ("sigmoid",)}),
    **{kind: (PreferenceLoss, {"kinds": (kind,)}) for kind in KINDS},
    "kto": (KTOLoss, {"kind": "kto"}),
    "apo_zero_unpaired": (KTOLoss, {"kind": "apo_zero_unpaired"}),
    "orpo": (ORPOLoss, {}),
    "cpo": (CPOLoss, {"kind": "sigmoid"}),
    "cpo_hinge": (CPOLoss, {"kind": "hinge"}),
    "cpo_ipo": (CPOLoss, {"kind": "ipo"}),
    "simpo": (SimPOLoss, {}),
}
"""Loss class of each name, with the fields that the name sets."""

REWARD_LOSSES: Mapping[str, tuple[type, Mapping[str, Any]]] = {
    "bradley_terry": (BradleyTerryLoss, {}),
    "process": (ProcessLoss, {}),
}

LOSSES = {"preference": PREFERENCE_LOSSES, "reward_model": REWARD_LOSSES}
"""Losses by stage kind."""

CompleteBatch = Callable[[Batch], Batch]


@dataclass(frozen=True, kw_only=True)
class PairInputs:
    """Inputs of preference and reward model stages."""

    section: PreferenceSection | RewardModelSection
    loss: Any
    """Loss: a `PairLoss`."""
    units: PairExamples
    eval_units: PairExamples | None
    cuts: Mapping[str, float]
    """Metrics of what the training dataset loses; empty if it loses nothing."""

    @property
    def terms(self) -> Terms:
        """Statistics that the loss needs beside log-probabilities."""
        return Terms(squares=self.loss.needs.squares)

    @property
    def renderers(self) -> Sequence[Renderer]:
        """Renderer of the dataset that is trained on."""
        return [self.units.renderer]

    @property
    def epoch_sources(self) -> Sequence[EpochSource]:
        """Units over which `num_epochs` passes."""
        units = self.units
        identity = units.identity | rendering_identity(units.renderer)
        return [
            EpochSource(self.section.dataset, units.rows, len(units), units.as_sequences, identity, units.most_patches)
        ]

    @property
    def identity(self) -> Mapping[str, Mapping[str, str]]:
        """Digests of all that the rows hold, and of the pictures that they show, by dataset and part."""
        held_out = {} if self.eval_units is None else {"eval_dataset": self.eval_units.identity}
        return {"dataset": self.units.identity, **held_out}


def prepare(section: PreferenceSection | RewardModelSection, prepared: Prepared) -> tuple[PairInputs, list[str]]:
    """Load the inputs. Also returns a note per dataset with dropped units."""
    loss = pair_loss(section)
    if isinstance(section, PreferenceSection) and loss.needs.reference and section.reference != "live":
        cache_folder("reference")
    kernel = prepared.config.model.attention
    share_prompts = shares_prompts(section, loss.needs, kernel, jax.default_backend(), mixture=prepared.mixture)
    most_patches(section, prepared.tokenizer)
    examples: list[PairExamples] = []
    cuts: list[Mapping[str, float]] = []
    notes: list[str] = []
    for dataset in section.all_datasets:
        rows = rows_and_renderer(dataset, prepared.tokenizer)
        units = units_of(section, dataset, *rows, loss, share_prompts=share_prompts)
        chosen, grids = checked_rows(len(units)), list[np.ndarray]()
        tokens = list[int]()
        ratio, lines = check_units(units, _left_out(units, chosen, grids, tokens))
        of_units = [units.cuts[number] for number in chosen if number in units.cuts]
        lost = RowCuts.of(of_units, len(chosen), sum(tokens))
        lines += lost.truncation_note(f"{_noun(units)}{_checked(chosen, units)}", units.rows.name, section.row_tokens)
        what = "pairs" if units.kind == "pairs" else "answers"
        lines += picture_note(grids, len(chosen), f"{what}{_checked(chosen, units)}", units.rows, prepared.tokenizer)
        lines += bad_image_note(units.rows, sorted({units.row_of(number) for number in chosen}))
        kind: RowKind = "steps" if units.kind == "steps" else "answer"
        kind = "pair" if kind == "answer" and is_paired(units.rows.columns, dataset) else kind
        seen, others = prepared.tokenizer.has_images, ["margin"] if units.margins else []
        unread = unread_columns(units.rows.all_columns, dataset, kind, images=seen, others=others)
        examples.append(units)
        # What is equal is dropped too.
        cuts.append(lost.metrics | {"data/dropped_ratio": ratio} if ratio or any(lost.cut) else {})
        notes += [*lines, *_stop_notes(section, units), *units.rows.notes, *unread_note(units.rows.name, unread)]
    inputs = PairInputs(
        section=section,
        loss=loss,
        units=examples[0],
        eval_units=examples[1] if len(examples) > 1 else None,
        cuts=cuts[0],
    )
    return inputs, notes


def _stop_notes(section: PairSection, units: PairExamples) -> list[str]:
    """Warning about answers that no stop token ends; reward models do not learn to stop."""
    first = next((index for index in range(len(units.rows)) if index not in units.rows.bad_images), None)
    if not isinstance(section, PreferenceSection) or first is None:
        return []
    with units.rows.named(first) as row:
        return stop_notes(units.renderer, [a.masked for a in labelled_answers(row, units.dataset, units.renderer)])


def pair_loss(section: PreferenceSection | RewardModelSection) -> Any:
    loss = make_loss(section.loss, LOSSES[section.kind])
    if isinstance(section, PreferenceSection) and section.reference is not None and not loss.needs.reference:
        raise ConfigError(
            f"reference: {section.reference} has no effect: the loss {loss_name(section.loss)} needs no reference; "
            "remove it"
        )
    return loss


def check_offline(section: PreferenceSection | RewardModelSection) -> None:
    """Check everything that needs neither tokenizer nor rows."""
    pair_loss(section)


def describe(section: PreferenceSection | RewardModelSection, inputs: PairInputs | None, shards: int) -> str:
    """Summarise the stage in one line."""
    rows = "" if inputs is None else f"{len(inputs.units.rows):,} dataset rows, loss {loss_name(section.loss)}, "
    return rows + describe_rows(section, shards)


def loss_name(spec: str | Mapping[str, Any] | UserObject) -> str:
    """Name of a loss in the configuration: its kind, its kinds, or the user's."""
    kind = spec.get("kind") if isinstance(spec, Mapping) else spec
    return " + ".join(map(str, kind)) if isinstance(kind, list | tuple) else str(kind)


def make_loss(spec: str | Mapping[str, Any] | UserObject, known: Mapping[str, tuple[type, Mapping[str, Any]]]) -> Any:
    """Make the loss of a configuration. ConfigError for invalid settings."""
    loss = spec.make("loss", positional=2) if isinstance(spec, UserObject) else _known_loss(spec, known)
    if not isinstance(loss, PairLoss):
        raise ConfigError(f"loss: {spec} does not declare its needs; add a property needs -> posttrain.Needs")
    return loss


def _known_loss(spec: str | Mapping[str, Any], known: Mapping[str, tuple[type, Mapping[str, Any]]]) -> Any:
    """Make a loss of the package from its name or names and its settings."""
    settings = {"kind": spec} if isinstance(spec, str) else dict(spec)
    kind = settings.pop("kind", None)
    loss_class, fixed = _named(kind, known)
    values = checked_settings(loss_class, settings, "loss", str(kind), Locator("loss"), names=fixed)
    try:
        return loss_class(**fixed, **values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"loss: {error}") from error


def _named(kind: Any, known: Mapping[str, tuple[type, Mapping[str, Any]]]) -> tuple[type, Mapping[str, Any]]:
    """Class of one loss kind, or of several DPO kinds, with the fields that the name sets."""
    if isinstance(kind, str) and kind in known:
        return known[kind]
    names = list(kind) if isinstance(kind, list | tuple) else [kind]
    wrong = [name for name in names if name not in known]
    if wrong or not names:
        first = (wrong or [None])[0]
        raise ConfigError(
            f"loss: kind {first!r} is unknown{meant_kind(str(first), known)}; "
            f"there are {', '.join(known)}, or give your own as {FORMS}"
        )
    several = [known[name] for name in names]
    if any(loss_class is not PreferenceLoss for loss_class, _ in several):
        raise ConfigError(f"loss: kind {names}: several are only possible of {', '.join(KINDS)}")
    return PreferenceLoss, {"kinds": sum((fixed["kinds"] for _, fixed in several), ())}


def shares_prompts(
    section: PairSection | OnlinePreferenceSection,
    needs: Needs,
    kernel: AttentionKernel,
    platform: str,
    *,
    mixture: bool,
) -> bool:
    """Resolve `share_prompts`. ConfigError if it is set but not supported."""
    if needs.rows not in ("pairs", "answers_and_others") or needs.prompts:
        if section.share_prompts is True:
            why = "has a weight on prompts" if needs.prompts else "takes one answer to a prompt"
            raise ConfigError(f"share_prompts: true has no effect: the loss {why}; remove it")
        return False
    known = supports_parents(kernel, platform)
    if section.share_prompts is True and kernel != "auto" and not known:
        raise ConfigError(
            f"share_prompts: the kernel of model.attention={kernel} does not support shared "
            "prompts; use blockwise or auto, or remove share_prompts"
        )
    return known and not mixture if section.share_prompts == "auto" else section.share_prompts


def units_of(
    section: PairSection,
    dataset: DatasetSection,
    rows: Any,
    renderer: Any,
    loss: PairLoss,
    *,
    share_prompts: bool,
) -> PairExamples:
    needs = loss.needs
    if dataset.completion is not None and (needs.rows in ("pairs", "steps") or is_paired(rows.columns, dataset)):
        raise ConfigError(
            f"dataset.completion={dataset.completion!r} has no effect on {rows.name}: the answers are the columns "
            + ("completions and labels" if needs.rows == "steps" else "chosen and rejected")
            + "; remove it"
        )
    return PairExamples(
        section=section,
        dataset=dataset,
        rows=rows,
        renderer=renderer,
        kind=needs.rows,
        weigh_prompts=needs.prompts,
        margins=needs.margins,
        share_prompts=share_prompts,
    )


def _left_out(units: PairExamples, chosen: Sequence[int], grids: list[np.ndarray], tokens: list[int]) -> Iterator[bool]:
    """Tell of each unit whether it is dropped; the pictures of others are added to `grids`, and their numbers of tokens
    to `tokens`."""
    for unit in each_row(units.rows, chosen, "rows", units):
        tokens += [] if unit is None else [len(unit["tokens"])]
        grids += [] if unit is None or "grids" not in unit else [unit["grids"]]
        yield unit is None


def _checked(numbers: Sequence[Any], units: PairExamples) -> str:
    return "" if len(numbers) == len(units) else " checked"


def _noun(units: PairExamples) -> str:
    return "rows" if len(units) == len(units.rows) else "answers"


def check_units(units: PairExamples, left_out: Iterable[bool]) -> tuple[float, list[str]]:
    """Share of dropped units, and a note about them. ConfigError if all are dropped."""
    drops = list(left_out)
    rows = map(units.row_of, checked_rows(len(units)))
    dropped, bad = sum(drops), sum(row in units.rows.bad_images for row in rows)
    if dropped == len(drops):
        raise ConfigError(
            f"every row of {units.rows.name} is dropped: longer than row_tokens={units.section.row_tokens}, with "
            "answers that are equal in it, or with a picture that cannot be read (on_bad_image); raise row_tokens, or "
            "use different answers"
        )
    checked = _checked(drops, units)
    note = (
        f"{dropped - bad:,} of {len(drops):,} {_noun(units)}{checked} of {units.rows.name} are dropped: longer than "
        f"row_tokens={units.section.row_tokens} (overlong: {units.section.overlong}), or both answers "
        "are the same in it"
    )
    return dropped / len(drops), [note] if dropped > bad else []


@dataclass(frozen=True, kw_only=True)
class PairData:
    """Units, and functions that complete a batch of them: with reference log-probabilities that the units lack."""

    units: PairExamples
    eval_units: PairExamples | None
    complete: CompleteBatch
    for_step: CompleteBatch


def run(stage: StageRun, inputs: PairInputs) -> None:
    """Train a preference stage to its last step, resuming from its newest checkpoint."""
    settings = stage.train_settings(inputs.section, temperature=1.0, terms=inputs.terms)
    trainer = stage.make_trainer(inputs.section, stage.load_model(), inputs.loss, settings)
    train_pairs(stage, inputs, trainer, _referenced(stage, inputs, trainer))


def run_reward_model(stage: StageRun, inputs: PairInputs) -> None:
    """Train a reward model to the last step of its stage, resuming from its newest checkpoint."""
    settings = stage.train_settings(inputs.section, temperature=1.0, terms=inputs.terms)
    trainer = stage.make_trainer(inputs.section, load_reward_model(stage), inputs.loss, settings)
    train_pairs(stage, inputs, trainer, plain_data(inputs))


def load_reward_model(stage: StageRun) -> Decoder:
    """Load the stage's initial model, with a new scalar head unless it has one."""
    model = stage.load_model()
    add_scalar_head(model, seed=stage.seed, mesh=stage.mesh)
    tokenizer = stage.tokenizer
    model.config = with_padding(model.config, tokenizer.hf.pad_token_id, tokenizer.stop_ids)
    return model


def train_pairs(stage: StageRun, inputs: PairInputs, trainer: Trainer, data: PairData) -> None:
    """Run all steps and evaluations of a stage on pairs or labelled answers, then save its model."""
    batches = prefetched(ComparisonBatches(data.units, seed=stage.seed), trainer, inputs.section.steps)
    held_out = None
    if data.eval_units is not None:
        evaluation = PairEvaluation(trainer, inputs.loss, data.eval_units, data.complete)
        held_out = HeldOut(evaluate=evaluation, metrics=itemgetter("metrics"))
    with batches, stage.training(trainer, batches, inputs.section, held_out) as training:
        for _ in training:
            metrics = trainer.step(data.for_step(next(batches)))
            bad = bad_image_metrics(batches.state()) if inputs.section.on_bad_image == "drop" else {}
            training.log({**with_margins(metrics), **inputs.cuts, **bad, **batches.metrics()})


def plain_data(inputs: PairInputs) -> PairData:
    """Data of a loss without a reference."""
    return PairData(units=inputs.units, eval_units=inputs.eval_units, complete=_unchanged, for_step=_unchanged)


def _referenced(stage: StageRun, inputs: PairInputs, trainer: Trainer) -> PairData:
    section, units, eval_units = inputs.section, inputs.units, inputs.eval_units
    assert isinstance(section, PreferenceSection)
    if not inputs.loss.needs.reference:
        return plain_data(inputs)
    if section.reference == "live":
        reference = Reference(trainer)
        return PairData(units=units, eval_units=eval_units, complete=reference.added_to, for_step=reference.for_step)
    key = model_key(
        trainer,
        stage.origin.parts,
        quantize=stage.model.quantize,
        dtype=stage.model.dtype,
        long_context=stage.model.long_context,
        num_tokens=stage.tokenizer.num_ids,
        family=family_digest(stage.model),
    )
    known = with_reference(units, trainer, key, stage.folder, seed=stage.seed, num_steps=section.steps)
    held_out = None if eval_units is None else with_reference_of_all(eval_units, trainer, key, stage.folder)
    return PairData(units=known, eval_units=held_out, complete=check_scored, for_step=check_scored)


def _unchanged(batch: Batch) -> Batch:
    return batch
