"""Supervised fine-tuning: rows of packed sequences, one token loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from posttrain.data.pipeline import SFTBatches, eval_batches
from posttrain.metrics import to_host
from posttrain.optim import make_optimizer
from posttrain.recipes.prepare import SFTInputs
from posttrain.recipes.python import PythonRun
from posttrain.recipes.stage import StageRun
from posttrain.trainer import Trainer


def run_sft(stage: StageRun, inputs: SFTInputs) -> None:
    """Train one SFT stage to its end, from its newest checkpoint if there is one."""
    section = inputs.section
    trainer = Trainer(
        stage.load_model(),
        inputs.loss,
        make_optimizer(section.optimizer, section.num_steps),
        temperature=1.0,
        max_grad_norm=section.optimizer.max_grad_norm,
        micro_batch_rows=section.micro_batch_rows,
        mesh=stage.mesh,
    )
    batches = SFTBatches(section, inputs.rows, inputs.renderer, seed=stage.seed)

    def evaluate() -> dict[str, float]:
        assert section.eval_dataset is not None and inputs.eval_rows is not None and inputs.eval_renderer is not None
        held_out = eval_batches(section, section.eval_dataset, inputs.eval_rows, inputs.eval_renderer)
        metrics = {f"eval/{name}": value for name, value in to_host(trainer.evaluate(held_out)).items()}
        return metrics | {"eval/perplexity": math.exp(metrics["eval/nll"])} if "eval/nll" in metrics else metrics

    with stage.opened(trainer, batches, section.num_steps) as (sinks, checkpointer):
        result: dict[str, Mapping[str, float]] = {}
        if section.eval_dataset is not None:
            result["before"] = stage.remember("before", evaluate)
            if trainer.step_number == 0:
                sinks.write(0, result["before"])
        stage.train(
            trainer,
            lambda: trainer.step(next(batches)),
            batches,
            sinks,
            checkpointer,
            section,
            evaluate if section.eval_dataset is not None else None,
        )
        if section.eval_dataset is not None:
            result["after"] = evaluate()
            sinks.write(section.num_steps, result["after"])
    stage.finish(trainer.model, result)


class SFT(PythonRun):
    """Supervised fine-tuning from Python: `pt.SFT(model="path", dataset="data.jsonl").fit()`.

    Every field of `posttrain.config.SFTSection` is a keyword, as are `output`, `seed` and `mesh`.
    """

    kind = "sft"
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_steps": 100,
        "batch_rows": 8,
        "overlong": "truncate",
        "optimizer": {"learning_rate": 2e-5, "schedule": "cosine"},
    }
    lora_learning_rate = 2e-4

    @classmethod
    def lengths(cls, given: Mapping[str, Any], max_positions: int | None) -> dict[str, Any]:
        """Rows of 1024 tokens, or of the model's context where that is less."""
        return {"row_tokens": min(1024, max_positions or 1024)}
