"""The student's own samples in a stage of distillation: GKD with a share of on-policy data, arXiv:2306.13649."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from posttrain.batch import Batch
from posttrain.config import DistillSection
from posttrain.data.ahead import BatchStream
from posttrain.data.pipeline import PromptBatches
from posttrain.data.taught import Taught
from posttrain.mesh import row_shards
from posttrain.recipes.prepare_rl import check_cache
from posttrain.recipes.prepare_sequences import SFTInputs
from posttrain.recipes.rollouts import make_engine, warm_up
from posttrain.recipes.stage import StageRun
from posttrain.recipes.teachers import shares_of
from posttrain.reference import model_inputs
from posttrain.rl.aio import run_async
from posttrain.rl.assemble import assemble
from posttrain.rl.collect import Sampler, collect
from posttrain.rl.evaluate import evaluate
from posttrain.rl.rewards import Rubric
from posttrain.rl.teaching import Scorer, distances
from posttrain.trainer import Trainer
from posttrain.tree import replace as changed


class Samples:
    """What the student samples of the prompts of a dataset, as rows to train on. `teachers` measure it."""

    def __init__(
        self, stage: StageRun, inputs: SFTInputs, trainer: Trainer, taught: Taught, teachers: Sequence[Scorer]
    ):
        section = inputs.section
        assert isinstance(section, DistillSection) and section.sampling is not None and inputs.prompts is not None
        check_cache(section, row_shards(stage.mesh))
        self._section, self._inputs, self._examples = section, inputs.prompts, inputs.prompts.examples
        self._shares = shares_of(section)
        engine = make_engine(
            trainer.model,
            stage.tokenizer,
            section.rollout,
            inputs.prompts.make_engine,
            slots=section.batch_rows,
            max_length=section.row_tokens,
        )
        self._taught = taught
        self._trainer, self._engine, self._teachers = trainer, engine, teachers
        self.prompts = PromptBatches(section.dataset, inputs.rows, prompts_per_step=section.batch_rows, seed=stage.seed)
        self._sampler = Sampler(
            engine=engine,
            renderer=inputs.renderer,
            sampling=section.sampling,
            max_prompt_tokens=inputs.prompts.max_tokens,
            seed=stage.seed,
        )
        self._eval_renderer = inputs.eval_renderer
        warm_up(engine, section.rollout, [(self._sampler, [*inputs.prompts.examples, *inputs.prompts.eval_examples])])

    def batch(self, step: int) -> Batch:
        """One sample of each of the next prompts."""
        self._sync()
        examples = [self._examples[index] for index in next(self.prompts)]
        groups = run_async(collect(self._sampler, examples, 1, step))
        zeros = np.zeros((len(groups), 1), np.float32)
        rows, length = self._section.batch_rows, self._section.row_tokens
        made = assemble(groups, zeros, zeros == 0, row_tokens=length, num_rows=rows, shares=self._shares)
        return self._taught.ask(changed(model_inputs(made), teacher_weights=made.teacher_weights))

    def evaluate(self) -> dict[str, float]:
        """The reverse KL from the teachers on samples of held-out prompts."""
        assert self._eval_renderer is not None
        self._sync()
        sampler = replace(self._sampler, renderer=self._eval_renderer)
        length = self._section.row_tokens

        def measured(groups: Any) -> np.ndarray:
            return distances(self._teachers, groups, self._shares, length)

        found = run_async(evaluate(sampler, Rubric([]), self._inputs.eval_examples, distances=measured))
        return {name.replace("eval/distill/kl", "eval/distill/reverse_kl"): x for name, x in found.metrics().items()}

    def close(self) -> None:
        self._engine.close()

    def _sync(self) -> None:
        self._engine.update_weights(self._trainer.model, self._trainer.step_number)


class MixedBatches:
    """Batches of the dataset and of the student's samples: a coin for each step, under the run's seed, says which."""

    def __init__(
        self, sequences: BatchStream | None, samples: Samples, share: float, seed: int, step: Callable[[], int]
    ):
        self._sequences, self._samples, self._share, self._seed, self._step = sequences, samples, share, seed, step

    def sampled(self, step: int) -> bool:
        return self._sequences is None or bool(np.random.default_rng([self._seed, step]).random() < self._share)

    def __next__(self) -> Batch:
        step = self._step()
        if self.sampled(step):
            return self._samples.batch(step)
        assert self._sequences is not None
        return next(self._sequences)

    def state(self) -> dict[str, Any]:
        sequences = None if self._sequences is None else self._sequences.state()
        return {"sequences": sequences, "prompts": self._samples.prompts.state()}

    def restore(self, state: dict[str, Any]) -> None:
        if self._sequences is not None:
            self._sequences.restore(state["sequences"])
        self._samples.prompts.restore(state["prompts"])
