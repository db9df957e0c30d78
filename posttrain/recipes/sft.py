"""Supervised fine-tuning: rows of packed sequences, one token loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from posttrain.batch import Batch
from posttrain.config import SFTSection
from posttrain.console import progress_bar
from posttrain.data.ahead import BatchStream
from posttrain.data.pipeline import SFTBatches, eval_batches
from posttrain.data.taught import Taught
from posttrain.kernels.token_stats import Terms
from posttrain.losses.router import RouterLoss
from posttrain.metrics import Metrics, to_host
from posttrain.models.decoder import Decoder
from posttrain.optim import make_optimizer
from posttrain.recipes.prepare import SFTInputs
from posttrain.recipes.python import PythonRun
from posttrain.recipes.stage import HeldOut, StageRun
from posttrain.trainer import Trainer
from posttrain.tree import Mean


def run_sft(stage: StageRun, inputs: SFTInputs) -> None:
    """Train one SFT stage to its end, from its newest checkpoint if there is one."""
    section = inputs.section
    assert isinstance(section, SFTSection)
    mean_over = stage.tokenizer.num_ids if section.label_smoothing else None
    trainer = make_trainer(stage, inputs, terms=Terms(mean_over=mean_over), noise_alpha=section.noise_alpha)
    train_sequences(stage, inputs, trainer, None)


def make_trainer(
    stage: StageRun,
    inputs: SFTInputs,
    *,
    terms: Terms,
    teachers: Sequence[Decoder] = (),
    noise_alpha: float = 0.0,
) -> Trainer:
    """Of a stage that trains on given sequences."""
    section = inputs.section
    return Trainer(
        stage.load_model(),
        inputs.loss,
        make_optimizer(section.optimizer, section.num_steps),
        temperature=1.0,
        max_grad_norm=section.optimizer.max_grad_norm,
        micro_batch_rows=section.micro_batch_rows,
        mesh=stage.mesh,
        router_loss=RouterLoss(balance_coef=section.router.balance_coef, z_coef=section.router.z_coef),
        correction_rate=section.router.correction_rate,
        dropout_seed=stage.seed,
        terms=terms,
        teachers=teachers,
        noise_alpha=noise_alpha,
    )


def train_sequences(stage: StageRun, inputs: SFTInputs, trainer: Trainer, taught: Taught | None) -> None:
    """All steps and evaluations of a stage, and its model. `taught`: what teachers say of the rows."""
    batches = sequences_of(stage, inputs, taught)
    train_batches(stage, inputs, trainer, batches, lambda: evaluate_sequences(trainer, inputs, taught))


def sequences_of(stage: StageRun, inputs: SFTInputs, taught: Taught | None) -> SFTBatches:
    section = inputs.section
    return SFTBatches(section, inputs.rows, inputs.renderer, seed=stage.seed, mixed=inputs.mixed, taught=taught)


def train_batches(
    stage: StageRun,
    inputs: SFTInputs,
    trainer: Trainer,
    batches: BatchStream,
    evaluate: Callable[[], dict[str, float]],
) -> None:
    """All steps and evaluations of a stage, and its model."""
    section = inputs.section

    # A row that does not fit is an error before the first step, where none may be left out.
    dropped = {} if section.overlong == "error" else {"data/dropped_ratio": inputs.dropped_ratio}

    def step() -> Mapping[str, Any]:
        return {**_with_perplexities(trainer.step(next(batches))), **dropped}

    held_out = HeldOut(evaluate=evaluate, metrics=lambda record: record)
    with stage.opened(trainer, batches, section.num_steps) as (sinks, checkpointer):
        evaluation = held_out if section.eval_dataset is not None else None
        result = stage.train(trainer, step, batches, sinks, checkpointer, section, evaluation)
    stage.finish(trainer.model, result)


def _with_perplexities(metrics: Metrics) -> Metrics:
    """Those of student and teachers at temperature 1, of a step that has teachers."""
    if "distill/teacher_nll" not in metrics:
        return metrics
    names = {"nll": "distill/student_perplexity", "distill/teacher_nll": "distill/teacher_perplexity"}
    means = {name: metrics[source] for source, name in names.items()}
    found = {name: jnp.exp(jnp.asarray(m.total) / m.weight) for name, m in means.items() if isinstance(m, Mean)}
    return {**metrics, **found}


def evaluate_sequences(trainer: Trainer, inputs: SFTInputs, taught: Taught | None) -> dict[str, float]:
    section, rows, renderer = inputs.section, inputs.eval_rows, inputs.eval_renderer
    assert section.eval_dataset is not None and rows is not None and renderer is not None
    with progress_bar(f"evaluating {len(rows):,} held-out rows", len(rows)) as advance:
        held_out = _counted(eval_batches(section, section.eval_dataset, rows, renderer, taught), advance)
        found = to_host(_with_perplexities(trainer.evaluate(held_out)))
    metrics = {f"eval/{name}": value for name, value in found.items()}
    return metrics | {"eval/perplexity": math.exp(metrics["eval/nll"])} if "eval/nll" in metrics else metrics


def _counted(batches: Iterator[Batch], advance: Callable[[int], None]) -> Iterator[Batch]:
    for batch in batches:
        yield batch
        advance(int(np.max(batch.segments, axis=1).sum()))


class SFT(PythonRun):
    """Supervised fine-tuning from Python: `pt.SFT(model="path", dataset="data.jsonl").fit()`.

    Every field of `posttrain.config.SFTSection` is a keyword, as are `output`, `seed` and `mesh`.
    """

    kind = "sft"
    defaults: ClassVar[Mapping[str, Any]] = {
        "batch_rows": 8,
        "overlong": "truncate",
        "optimizer": {"learning_rate": 2e-5, "schedule": "cosine"},
    }
    lora_learning_rate = 2e-4

    @classmethod
    def lengths(cls, given: Mapping[str, Any], max_positions: int | None) -> dict[str, Any]:
        """Rows of 1024 tokens, or of the model's context where that is less."""
        return {"row_tokens": min(1024, max_positions or 1024)}
