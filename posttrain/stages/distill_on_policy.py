"""On-policy samples of the student in a distillation stage: GKD, arXiv:2306.13649."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from posttrain.batch import Batch
from posttrain.cluster.scorers import Scorer, model_inputs
from posttrain.data.pipeline import Prompts
from posttrain.data.prefetch import MeasuredStream
from posttrain.distill.targets import TeacherTargets
from posttrain.errors import RunError
from posttrain.evaluation.rollouts import evaluate
from posttrain.mesh import row_shards
from posttrain.metrics import Metrics
from posttrain.reward.rubric import Rubric
from posttrain.rl.assemble import sample_rows
from posttrain.rl.metrics import GAP, check_agreement, sample_metrics
from posttrain.rl.sampler import Sampler, collect
from posttrain.rl.source import Source
from posttrain.rl.teachers import distances, merged_distances, shares_of
from posttrain.runtime.event_loop import run_async
from posttrain.stages.context import StageRun
from posttrain.stages.engine import make_engine, warm_up
from posttrain.stages.prompts import check_cache
from posttrain.stages.sequences import DistillInputs
from posttrain.train.trainer import Trainer
from posttrain.tree import replace as changed

UNREAD_STEPS = 3
"""Abort the run after this many consecutive steps without any token that aligns with the teacher's."""


class Samples:
    """Student samples of a dataset's prompts as training rows; `teachers` evaluate them."""

    def __init__(
        self,
        stage: StageRun,
        inputs: DistillInputs,
        trainer: Trainer,
        targets: TeacherTargets,
        teachers: Sequence[Scorer],
    ):
        section = inputs.section
        assert section.sampling is not None and inputs.prompts is not None
        check_cache(section, row_shards(stage.mesh))
        self._section, self._inputs, self._examples = section, inputs.prompts, inputs.prompts.examples
        self._shares, self._aligner = shares_of(section), inputs.aligners.get(0)
        engine = make_engine(
            trainer.model,
            stage.tokenizer,
            section.rollout,
            inputs.prompts.make_engine,
            slots=section.batch_rows,
            max_length=section.row_tokens,
        )
        self._targets = targets
        self._trainer, self._engine, self._teachers = trainer, engine, teachers
        kept = [example.index for example in self._examples]
        prompts = Prompts(section.dataset, inputs.rows, seed=stage.seed, kept=kept)
        self.source = Source(prompts, self._examples)
        self._sampler = Sampler(
            engine=engine,
            renderer=inputs.renderer,
            sampling=section.sampling,
            max_prompt_tokens=inputs.prompts.max_tokens,
            seed=stage.seed,
        )
        self._eval_renderer = inputs.eval_renderer
        self._sample_metrics: Mapping[str, float] = {}
        self._unread_steps = 0
        warm_up(engine, section.rollout, [(self._sampler, [*inputs.prompts.examples, *inputs.prompts.eval_examples])])

    def batch(self, step: int) -> Batch:
        """Batch with one sample for each of the next prompts."""
        self._sync()
        groups = run_async(collect(self._sampler, self.source.take(self._section.batch_rows, step), 1))
        self._sample_metrics = sample_metrics(groups, step)
        rows, length = self._section.batch_rows, self._section.row_tokens
        samples = [group[0] for group in groups]
        made, where = sample_rows(samples, row_tokens=length, num_rows=rows, shares=self._shares)
        kept = changed(model_inputs(made), teacher_weights=made.teacher_weights, sampler_logps=made.sampler_logps)
        if self._aligner is None:
            return self._targets.score(kept)
        order = sorted(range(len(samples)), key=lambda number: (where[number].row, where[number].tokens.start))
        samples = [samples[number] for number in order]
        read = [self._aligner.align_sample(0, s.messages, s.tokens, s.sampled) for s in samples]
        self._unread_steps = 0 if any(one.covered.any() for one in read) else self._unread_steps + 1
        if self._unread_steps >= UNREAD_STEPS:
            raise RunError(
                f"step {step + 1}: no token of any sample aligns with the teacher's for {UNREAD_STEPS} "
                "consecutive steps, so there is no training signal; compare the chat templates of both, and a sample"
            )
        return self._targets.score_samples(kept, read)

    def seen(self, metrics: Metrics) -> Mapping[str, float]:
        """Sample metrics of an on-policy step, else none. RunError if sampler and trainer disagree."""
        if f"{GAP}/mean" not in metrics:
            return {}
        check_agreement(metrics, self._trainer.step_number)
        return self._sample_metrics

    def evaluate(self) -> dict[str, float]:
        """Reverse KL from the teachers on samples of held-out prompts."""
        assert self._eval_renderer is not None
        self._sync()
        sampler = replace(self._sampler, renderer=self._eval_renderer)
        length = self._section.row_tokens

        def measured(groups: Any) -> np.ndarray:
            if self._aligner is not None:
                # The last dataset is the one for evaluation.
                return merged_distances(self._teachers[0], self._aligner, len(self._aligner.renderers) - 1, groups)
            return distances(self._teachers, groups, self._shares, length)

        found = run_async(evaluate(sampler, Rubric([]), self._inputs.eval_examples, distances=measured))
        return {name.replace("eval/distill/kl", "eval/distill/reverse_kl"): x for name, x in found.metrics().items()}

    def close(self) -> None:
        self._engine.close()

    def _sync(self) -> None:
        self._engine.update_weights(self._trainer.model, self._trainer.step_number)


class MixedBatches:
    """Batches of the dataset and of the student's samples, chosen at random in each step by the run's seed."""

    def __init__(
        self, sequences: MeasuredStream | None, samples: Samples, share: float, seed: int, step: Callable[[], int]
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

    def metrics(self) -> dict[str, float]:
        """Time spent waiting for batches of the dataset; none in a step on samples."""
        return {} if self._sequences is None else self._sequences.metrics()

    def state(self) -> dict[str, Any]:
        sequences = None if self._sequences is None else self._sequences.state()
        return {"sequences": sequences, "source": self._samples.source.state()}

    def restore(self, state: dict[str, Any]) -> None:
        if self._sequences is not None:
            self._sequences.restore(state["sequences"])
        self._samples.source.restore(state["source"])
