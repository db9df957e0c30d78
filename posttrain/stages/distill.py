"""Distillation stage: a student trained on the top-k or full distributions of its teachers, live or from a cache on
disk, over given sequences or its own samples (GKD, arXiv:2306.13649)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.batch import Batch, model_inputs, rows_per_pass
from posttrain.cluster.cluster import Caching
from posttrain.cluster.reference import FrozenModel, Scorer
from posttrain.config import DatasetSection, DistillSection, ModelSection, TeacherSection
from posttrain.data.chat import Renderer
from posttrain.data.format import loss_on
from posttrain.data.pipeline import Prompts, fingerprint, pictures_of, row_tokenizer
from posttrain.data.prefetch import MAX_BATCHES, MeasuredStream
from posttrain.data.sources import Rows, Sequences
from posttrain.data.tokenizer import Tokenizer
from posttrain.data.unit_cache import json_digest
from posttrain.distill.cache import NO_RECORDS, CacheFolder, TeacherCache, unknown_rows
from posttrain.distill.cross_tokenizer import Aligner
from posttrain.distill.features import check_features, distill_loss, matching_of
from posttrain.distill.targets import TeacherTargets, teacher_shares
from posttrain.distill.teachers import (
    DEFAULT_TOP_K,
    OutsideTeacher,
    TeacherSource,
    aligned_tokenizer,
    computed_in,
    find_teachers,
    load_teacher,
    make_aligners,
    num_ids,
    outside_teacher,
    teacher_digest,
    tokenizers_identity,
)
from posttrain.errors import ConfigError, RunError
from posttrain.evaluation.rollouts import evaluate_prompts
from posttrain.evaluation.sequences import Record
from posttrain.kernels.logits.chunk_stats import Terms
from posttrain.kernels.logits.divergence import Divergence, pack_ids
from posttrain.mesh import row_shards
from posttrain.metrics import Metrics
from posttrain.models.decoder import Decoder
from posttrain.reward.rubric import Rubric
from posttrain.rl.agreement import GAP, check_agreement
from posttrain.rl.assemble import sample_rows
from posttrain.rl.metrics import sample_metrics
from posttrain.rl.sampler import Sampler, Source, collect
from posttrain.rl.teachers import distances, merged_distances, refuse_blind, shares_of
from posttrain.runtime.event_loop import run_async
from posttrain.stages.cluster import engine_metrics, forget_prompts, make_engine, sampler_gate, warm_up
from posttrain.stages.context import StageRun
from posttrain.stages.inputs import EpochSource, Prepared
from posttrain.stages.prompts import PromptInputs, check_cache, pictures_of_prompts, prepare_prompts
from posttrain.stages.sft import (
    SequenceInputs,
    describe_sequences,
    evaluate_held_out,
    prepare_sequences,
    sequences_of,
    train_batches,
)
from posttrain.tracking.console import progress_bar
from posttrain.train.loop import prefetched
from posttrain.train.trainer import Trainer
from posttrain.tree import replace as changed
from posttrain.weights.locate import family_digest

UNREAD_STEPS = 3
"""Abort the run after this many consecutive steps without any token that aligns with the teacher's."""


@dataclass(frozen=True, kw_only=True)
class DistillInputs(SequenceInputs):
    """Inputs of distillation stages."""

    section: DistillSection
    teachers: Sequence[TeacherSource]
    aligners: Mapping[int, Aligner] = field(default_factory=dict)
    """Aligners of teachers with another tokenizer, by teacher number."""
    prompts: PromptInputs | None = None
    """Prompts for on-policy samples of the student."""

    @property
    def epoch_sources(self) -> Sequence[EpochSource] | int:
        """Datasets over which `num_epochs` passes, or the number of prompts, each with a row for its sample."""
        return super().epoch_sources if self.prompts is None else len(self.prompts.examples)

    @property
    def identity(self) -> Mapping[str, Mapping[str, str]]:
        """Digests of all that the rows hold, and of the tokenizers of teachers, by part."""
        return {**super().identity, **tokenizers_identity(self.teachers)}


def prepare(section: DistillSection, prepared: Prepared) -> tuple[DistillInputs, list[str]]:
    """Load rows, teachers and prompts, and check `features` against the teachers. Also returns notes."""
    if section.on_policy:
        check_cache(section, prepared.config.mesh.row_shards or 1)
    teachers, notes = find_teachers(section, prepared.tokenizer)
    titles, reasons = [teacher.title for teacher in section.teachers], {one.title: one.blind for one in teachers}
    blind = [reasons[title] for title in titles]
    sequences, more = prepare_sequences(
        section,
        prepared,
        distill_loss(section),
        targets=TeacherTargets(titles, section.teacher_column, None, blind=blind),
        has_completions=section.on_policy < 1,
    )
    notes += more
    inputs = DistillInputs(teachers=teachers, **vars(sequences))
    aligners, more = make_aligners(section, teachers, sources(inputs), prepared.tokenizer)
    notes += more
    inputs = replace(inputs, aligners=aligners)
    if section.on_policy:
        prompts, more = prepare_prompts(section, sources(inputs), prepared)
        inputs = replace(inputs, prompts=prompts)
        refuse_blind(teachers, shares_of(section), [*prompts.examples, *prompts.eval_examples])
        notes += more
    return inputs, notes + check_features(section, teachers, prepared.files.config)


def check_offline(section: DistillSection) -> None:
    """Check everything that needs neither tokenizer nor rows."""
    find_teachers(section, None)


def describe(section: DistillSection, inputs: DistillInputs | None, shards: int) -> str:
    """Summarise the stage in one line."""
    teachers = ", ".join(f"{teacher.path} ({_where(teacher, section.cache)})" for teacher in section.teachers)
    own = f"; {section.on_policy:.0%} of the steps on the student's own samples" if section.on_policy else ""
    noun = "teacher" if len(section.teachers) == 1 else "teachers"
    return f"{describe_sequences(section, inputs, shards)}; {noun} {teachers}{own}"


def _where(teacher: TeacherSection, cache: str | None) -> str:
    """Place where a teacher scores the student's rows."""
    if cache is not None:
        return f"from the cache {cache}"
    if teacher.url is not None:
        return f"served at {teacher.url}"
    if teacher.devices == "shared":
        return "on the student's devices in a mesh of its own, before each step"
    if teacher.mesh is not None:
        return f"on {teacher.num_own_devices} devices of its own"
    return "on the student's devices, before each step" if teacher.aligned else "in the training step"


def run(stage: StageRun, inputs: DistillInputs) -> None:
    """Train a distillation stage to its last step, resuming from its newest checkpoint."""
    section = inputs.section
    caches, teachers, outside = None, [], []
    if section.cache is None:
        inside = [source for source in inputs.teachers if not source.section.outside]
        teachers = [load_teacher(source, stage.model, stage.tokenizer, stage.mesh) for source in inside]
        outside = [
            outside_teacher(
                source,
                stage.model,
                stage.tokenizer,
                section,
                section.temperature,
                section.top_k or DEFAULT_TOP_K,
                stage.mesh,
            )
            for source in inputs.teachers[len(inside) :]
        ]
    else:
        caches = [open_cache(stage, inputs, source) for source in inputs.teachers]
    titles = [source.title for source in inputs.teachers]
    targets = TeacherTargets(
        titles,
        section.teacher_column,
        caches,
        [teacher.top_k for teacher in outside],
        inputs.aligners,
        blind=[source.blind for source in inputs.teachers],
    )
    model, features = stage.load_model(), section.features
    settings = replace(
        stage.train_settings(section, temperature=1.0, terms=terms_of(section, inputs.aligners)),
        matching=None if features is None else matching_of(features, model.config, teachers[0].config, stage.seed),
        skip_update=None if section.sampling is None else sampler_gate(model, section.rollout),
    )
    trainer = stage.make_trainer(section, model, inputs.loss, settings, teachers)
    given = None if section.on_policy == 1 else sequences_of(stage, inputs, targets)
    with ExitStack() as closing:
        batches: MeasuredStream | None = None
        if given is not None:
            # Outside teachers are prefetched one batch ahead, while the previous step runs.
            most = 1 if outside else MAX_BATCHES
            batches = closing.enter_context(prefetched(given, trainer, section.steps, max_batches=most))
        samples = None
        if section.on_policy:
            samples = Samples(stage, inputs, trainer, targets, _scorers(stage, section, teachers, outside))
            closing.callback(samples.close)
            batches = MixedBatches(batches, samples, section.on_policy, stage.seed, lambda: trainer.step_number)
        assert batches is not None

        def evaluate_all() -> Record:
            of_rows = {} if given is None else evaluate_held_out(trainer, inputs, targets)
            return of_rows if samples is None else of_rows | samples.evaluate()

        seen = None if samples is None else samples.seen
        train_batches(stage, inputs, trainer, batches, evaluate_all, seen)


def _scorers(
    stage: StageRun, section: DistillSection, teachers: Sequence[Decoder], outside: Sequence[OutsideTeacher]
) -> list[Scorer]:
    """Scorers of all teachers, at the student's sampling temperature."""
    assert section.sampling is not None
    rows = rows_per_pass(section.batch_rows, section.micro_batch_rows, row_shards(stage.mesh))
    inside = [FrozenModel(t, stage.mesh, temperature=section.sampling.temperature, rows=rows) for t in teachers]
    return [*inside, *(teacher.at(section.sampling.temperature) for teacher in outside)]


def terms_of(section: DistillSection, aligners: Mapping[int, Aligner]) -> Terms:
    shared = [aligner.shared for aligner in aligners.values() if aligner.shared is not None]
    sampled = None if section.sampling is None else section.sampling.temperature
    return Terms(
        divergence=Divergence(beta=section.beta, temperature=section.temperature),
        sampling_temperature=None if sampled == 1.0 else sampled,
        unshared=pack_ids(shared[0].unshared) if shared else None,
    )


DatasetRows = tuple[DatasetSection, Rows, Renderer]


def sources(inputs: DistillInputs) -> list[DatasetRows]:
    """Datasets of a stage by number, the evaluation dataset last."""
    section = inputs.section
    datasets = list(
        zip(
            section.datasets,
            [inputs.rows, *(rows for rows, _ in inputs.mixed)],
            [inputs.renderer, *(renderer for _, renderer in inputs.mixed)],
            strict=True,
        )
    )
    if section.eval_dataset is not None:
        assert inputs.eval_rows is not None and inputs.eval_renderer is not None
        datasets.append((section.eval_dataset, inputs.eval_rows, inputs.eval_renderer))
    return datasets


def cache_folder(
    inputs: DistillInputs, source: TeacherSource, model: ModelSection, tokenizer: Tokenizer, *, to_write: bool
) -> CacheFolder:
    """Cache of a teacher's records of the stage. `model` and `tokenizer`: the student's."""
    section, aligner = inputs.section, aligner_of(inputs, source)
    assert section.cache is not None
    identity = {
        "teacher": teacher_digest(source, needed=to_write),
        "vocab_size": tokenizer.num_ids,
        "top_k": min(section.top_k or DEFAULT_TOP_K, num_ids(source, tokenizer)),
        "temperature": section.temperature,
        "tokenizer": source.section.tokenizer,
        **computed_in(source.section, model),
    }
    family = family_digest(model)
    if family is not None:
        identity["family"] = family
    if aligner is not None:
        # Its ids are translated to the student's, by the texts of both.
        readers = (aligner.student.tokenizer, aligner.teacher.tokenizer)
        identity["vocabularies"] = [one.identity["vocabulary"] for one in readers]
    elif "images" in tokenizer.identity:
        # What the teacher sees of a picture depends on how it is resized.
        identity["images"] = tokenizer.identity["images"]
    return CacheFolder(Path(section.cache) / source.title, identity)


@dataclass(frozen=True, kw_only=True)
class CachedRows:
    """Rows of one dataset whose sequences a teacher's cache holds."""

    rows: Rows
    tokenize: Callable[[int], Sequences]
    """Sequences of a row; none of one in which the teacher has no share."""
    digest: str
    """Digest of all that makes the sequences."""


def cached_rows(inputs: DistillInputs, source: TeacherSource) -> list[CachedRows]:
    """Rows that a teacher scores, by dataset."""
    section, aligner = inputs.section, aligner_of(inputs, source)
    titles = [teacher.title for teacher in section.teachers]
    teacher = titles.index(source.title)

    def reader(number: int, data: DatasetRows) -> Callable[[int], Sequences]:
        dataset, rows, renderer = data
        if aligner is None:
            tokenize = row_tokenizer(section, dataset, rows, renderer, number=number)
        else:
            tokenize = aligned_tokenizer(section, aligner, number, data)
        column = section.teacher_column
        if column is None:
            return tokenize
        return lambda row: tokenize(row) if teacher_shares(rows[row], column, titles)[teacher] > 0 else []

    made = []
    for number, (dataset, rows, renderer) in enumerate(sources(inputs)):
        key = {
            "data": fingerprint(dataset, rows),
            "section": repr(dataset),
            "fit": [section.row_tokens, section.overlong, section.row_patches, loss_on(section)],
            "rendering": dict(renderer.tokenizer.identity),
            "column": None if section.teacher_column is None else [section.teacher_column, titles, teacher],
            "aligned": None if aligner is None else [dict(aligner.teacher.tokenizer.identity), aligner.row_tokens],
            "pictures": pictures_of(dataset, rows, renderer).fingerprint if renderer.tokenizer.has_images else None,
        }
        made.append(CachedRows(rows=rows, tokenize=reader(number, (dataset, rows, renderer)), digest=json_digest(key)))
    return made


def open_cache(stage: StageRun, inputs: DistillInputs, source: TeacherSource) -> TeacherCache:
    """Cache of a teacher, to train from. ConfigError if a row of the stage has no records in it."""
    folder = cache_folder(inputs, source, stage.model, stage.tokenizer, to_write=False)
    units = folder.open()
    begun_with = stage.remember(f"records-{source.title}", lambda: units.folder.name)
    if begun_with != units.folder.name:
        raise ConfigError(
            f"cannot resume: cache: {stage.folder} was trained from the records {folder.folder / begun_with}, and now "
            f"they are {units.folder}: of another teacher or of other settings; restore them, or start a new run with "
            "another output folder"
        )
    for data in cached_rows(inputs, source):
        if units.is_complete(data.digest):
            continue
        with progress_bar(f"comparing {data.rows.name} with {units.folder}"):
            unknown = unknown_rows(units, range(len(data.rows)), data.tokenize)
        if unknown:
            raise ConfigError(
                f"cache: of {len(data.rows):,} rows of {data.rows.name}, {len(unknown):,} (row "
                f"{data.rows.start + unknown[0]} is the first): {units.folder} {NO_RECORDS}"
            )
    return TeacherCache(units, folder.format)


def aligner_of(inputs: DistillInputs, source: TeacherSource) -> Aligner | None:
    return inputs.aligners.get([one.title for one in inputs.teachers].index(source.title))


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
        indices = [example.index for example in self._examples]
        pictures = pictures_of_prompts(self._examples)
        prompts = Prompts(section.dataset, inputs.rows, seed=stage.seed, kept=indices, pictures=pictures)
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
        self._release_cache()
        self._sample_metrics = {**sample_metrics(groups, step), **engine_metrics(self._engine)}
        rows, length = self._section.batch_rows, self._section.row_tokens
        samples = [group[0] for group in groups]
        batch, where = sample_rows(samples, row_tokens=length, num_rows=rows, shares=self._shares)
        scored = changed(model_inputs(batch), teacher_weights=batch.teacher_weights, sampler_logps=batch.sampler_logps)
        if self._aligner is None:
            return self._targets.score(scored)
        order = sorted(range(len(samples)), key=lambda number: (where[number].row, where[number].tokens.start))
        samples = [samples[number] for number in order]
        read = [self._aligner.align_sample(0, s.messages, s.tokens, s.sampled, s.example.tools) for s in samples]
        self._unread_steps = 0 if any(one.covered.any() for one in read) else self._unread_steps + 1
        if self._unread_steps >= UNREAD_STEPS:
            raise RunError(
                f"step {step + 1}: no token of any sample aligns with the teacher's for {UNREAD_STEPS} "
                "consecutive steps, so there is no training signal; compare the chat templates of both, and a sample"
            )
        return self._targets.score_samples(scored, read)

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

        step, examples = self._trainer.step_number, self._inputs.eval_examples
        evaluation = run_async(evaluate_prompts(sampler, Rubric([]), examples, step=step, distances=measured))
        self._release_cache()
        forget_prompts(self._engine)
        return {
            name.replace("eval/distill/kl", "eval/distill/reverse_kl"): x for name, x in evaluation.metrics().items()
        }

    def close(self) -> None:
        self._engine.close()

    def _release_cache(self) -> None:
        """Free the memory of the engine's cache, whose prefixes end with the update."""
        if isinstance(self._engine, Caching):
            self._engine.release_cache()

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
