"""SFT stage: packed sequences and a token loss. Its trainer and training loop also serve distillation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from posttrain.config import DistillSection, SFTSection
from posttrain.data.pipeline import SFTBatches
from posttrain.data.prefetch import MeasuredStream, Prefetch
from posttrain.distill.features import matching_of
from posttrain.distill.targets import TeacherTargets
from posttrain.evaluation.sequences import Record, difference, evaluate, metrics_of, with_perplexities
from posttrain.kernels.logits.chunk_stats import Terms
from posttrain.losses.router import RouterLoss
from posttrain.metrics import Metrics
from posttrain.models.decoder import Decoder
from posttrain.stages.context import HeldOut, StageRun
from posttrain.stages.sequences import SequenceInputs
from posttrain.train.optim import make_optimizer
from posttrain.train.programs import Refuse
from posttrain.train.trainer import Trainer


def run(stage: StageRun, inputs: SequenceInputs) -> None:
    """Train an SFT stage to its last step, resuming from its newest checkpoint."""
    section = inputs.section
    assert isinstance(section, SFTSection)
    mean_over = stage.tokenizer.num_ids if section.label_smoothing else None
    trainer = make_sequence_trainer(stage, inputs, terms=Terms(mean_over=mean_over), noise_alpha=section.noise_alpha)
    with Prefetch(sequences_of(stage, inputs, None)) as batches:
        train_batches(stage, inputs, trainer, batches, lambda: evaluate_held_out(trainer, inputs, None))


def evaluate_held_out(trainer: Trainer, inputs: SequenceInputs, targets: TeacherTargets | None) -> Record:
    """Evaluate the stage's held-out rows."""
    assert inputs.eval_rows is not None and inputs.eval_renderer is not None
    return evaluate(trainer, inputs.section, inputs.eval_rows, inputs.eval_renderer, targets)


def make_sequence_trainer(
    stage: StageRun,
    inputs: SequenceInputs,
    *,
    terms: Terms,
    teachers: Sequence[Decoder] = (),
    noise_alpha: float = 0.0,
    refuse: Refuse | None = None,
) -> Trainer:
    """Make the trainer of a stage with a sequence loss. `refuse`: veto on updates, see `Trainer`."""
    section, model = inputs.section, stage.load_model()
    features = section.features if isinstance(section, DistillSection) else None
    return Trainer(
        model,
        inputs.loss,
        make_optimizer(section.optimizer, section.steps),
        temperature=1.0,
        max_grad_norm=section.optimizer.max_grad_norm,
        micro_batch_rows=section.micro_batch_rows,
        mesh=stage.mesh,
        router_loss=RouterLoss(balance_coef=section.router.balance_coef, z_coef=section.router.z_coef),
        correction_rate=section.router.correction_rate,
        dropout_seed=stage.seed,
        terms=terms,
        teachers=teachers,
        matching=None if features is None else matching_of(features, model.config, teachers[0].config, stage.seed),
        noise_alpha=noise_alpha,
        refuse=refuse,
    )


def sequences_of(stage: StageRun, inputs: SequenceInputs, targets: TeacherTargets | None) -> SFTBatches:
    section = inputs.section
    return SFTBatches(section, inputs.rows, inputs.renderer, seed=stage.seed, mixed=inputs.mixed, targets=targets)


def train_batches(
    stage: StageRun,
    inputs: SequenceInputs,
    trainer: Trainer,
    batches: MeasuredStream,
    evaluate_all: Callable[[], Record],
    seen: Callable[[Metrics], Mapping[str, float]] | None = None,
) -> None:
    """Run all steps and evaluations of a stage, then save its model. `seen`: additional metrics of a step."""
    section = inputs.section
    # With overlong=error, a row that does not fit is an error before the first step.
    dropped = {} if section.overlong == "error" else {"data/dropped_ratio": inputs.dropped_ratio}
    held_out = None
    if section.eval_dataset is not None:
        held_out = HeldOut(evaluate=evaluate_all, metrics=metrics_of, difference=difference)
    with stage.training(trainer, batches, section, held_out) as training:
        for _ in training:
            metrics = trainer.step(next(batches))
            sampled = {} if seen is None else seen(metrics)
            training.log({**with_perplexities(metrics), **dropped, **batches.metrics(), **sampled})
