"""SFT stage: packed sequences and a token loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from posttrain.batch import TokenLoss
from posttrain.config import SFTSection, UserObject
from posttrain.config.locator import FORMS
from posttrain.data.prefetch import Prefetch
from posttrain.errors import ConfigError, did_you_mean
from posttrain.kernels.logits.chunk_stats import Terms
from posttrain.losses.sft import DFTLoss, SFTLoss
from posttrain.stages.context import StageRun
from posttrain.stages.inputs import Prepared
from posttrain.stages.sequences import (
    SequenceInputs,
    describe_sequences,
    evaluate_held_out,
    prepare_sequences,
    sequences_of,
    train_batches,
)
from posttrain.train.objective import TrainSettings

SFT_LOSSES: dict[str, Callable[[], TokenLoss]] = {"nll": SFTLoss, "dft": DFTLoss}


@dataclass(frozen=True, kw_only=True)
class SFTInputs(SequenceInputs):
    """Inputs of SFT stages."""

    section: SFTSection


def prepare(section: SFTSection, prepared: Prepared) -> tuple[SFTInputs, list[str]]:
    """Load rows and loss. Also returns notes about dropped rows."""
    inputs, notes = prepare_sequences(section, prepared, sft_loss(section))
    return SFTInputs(**vars(inputs)), notes


def check_offline(section: SFTSection) -> None:
    """Check everything that needs neither tokenizer nor rows."""
    sft_loss(section)


def describe(section: SFTSection, inputs: SFTInputs | None, shards: int) -> str:
    """Summarise the stage in one line."""
    return describe_sequences(section, inputs, shards)


def run(stage: StageRun, inputs: SFTInputs) -> None:
    """Train an SFT stage to its last step, resuming from its newest checkpoint."""
    section = inputs.section
    settings = train_settings(section, stage.tokenizer.num_ids, dropout_seed=stage.seed)
    trainer = stage.make_trainer(section, stage.load_model(), inputs.loss, settings)
    with Prefetch(sequences_of(stage, inputs, None)) as batches:
        train_batches(stage, inputs, trainer, batches, lambda: evaluate_held_out(trainer, inputs, None))


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
        f"loss: {section.loss!r} is unknown{did_you_mean(section.loss, SFT_LOSSES)}; "
        f"there are {', '.join(SFT_LOSSES)}, or give your own as {FORMS}"
    )
