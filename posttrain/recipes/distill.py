"""Distillation: a student learns what its teachers say of the same tokens, in the step or from a cache on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

from posttrain.batch import rows_per_pass
from posttrain.config import ConfigError, DatasetSection, DistillSection, ModelSection, RunConfig
from posttrain.console import console, progress_bar
from posttrain.data.aligned import Aligner
from posttrain.data.chat import Renderer
from posttrain.data.pipeline import fingerprint, row_tokenizer, token_fingerprint
from posttrain.data.prefetch import MAX_BATCHES, MeasuredStream, Prefetch
from posttrain.data.sources import Rows
from posttrain.data.taught import Taught, teacher_shares
from posttrain.data.teacher_cache import CacheFolder, TeacherCache, fill
from posttrain.data.tokenizer import Tokenizer
from posttrain.kernels.chunk_stats import Terms
from posttrain.kernels.divergence import Divergence
from posttrain.kernels.spans import packed
from posttrain.mesh import make_mesh, row_shards
from posttrain.models.decoder import Decoder
from posttrain.recipes.aligning import aligned_scorer, aligned_tokenizer, theirs
from posttrain.recipes.on_policy import MixedBatches, Samples
from posttrain.recipes.prepare import prepare
from posttrain.recipes.prepare_sequences import SFTInputs
from posttrain.recipes.python import GivenPythonRun
from posttrain.recipes.sequence_evaluation import Record, evaluate
from posttrain.recipes.sft import make_trainer, sequences_of, train_batches
from posttrain.recipes.stage import StageRun
from posttrain.recipes.teachers import (
    DEFAULT_TOP_K,
    OutsideTeacher,
    Scorer,
    TeacherSource,
    computed_in,
    load_teacher,
    num_ids,
    outside_teacher,
    teacher_digest,
    training_devices,
)
from posttrain.reference import FrozenModel
from posttrain.rl.teaching import Scorer as LogpsOf


def run_distill(stage: StageRun, inputs: SFTInputs) -> None:
    """Train one stage of distillation to its end, from its newest checkpoint if there is one."""
    section = inputs.section
    assert isinstance(section, DistillSection)
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
        caches = [
            TeacherCache(
                [folder for _, folder in cache_folders(inputs, source, stage.model, stage.tokenizer, to_write=False)]
            )
            for source in inputs.teachers
        ]
    titles = [source.title for source in inputs.teachers]
    taught = Taught(titles, section.teacher_column, caches, [teacher.top_k for teacher in outside], inputs.aligners)
    trainer = make_trainer(stage, inputs, terms=terms_of(section, inputs.aligners), teachers=teachers)
    sequences = None if section.on_policy == 1 else sequences_of(stage, inputs, taught)
    with ExitStack() as closing:
        batches: MeasuredStream | None = None
        if sequences is not None:
            # Teachers outside of the step are asked for one batch at a time, while the step before runs.
            batches = closing.enter_context(Prefetch(sequences, max_batches=1 if outside else MAX_BATCHES))
        samples = None
        if section.on_policy:
            samples = Samples(stage, inputs, trainer, taught, _scorers(stage, section, teachers, outside))
            closing.callback(samples.close)
            batches = MixedBatches(batches, samples, section.on_policy, stage.seed, lambda: trainer.step_number)
        assert batches is not None

        def evaluate_all() -> Record:
            of_rows = {} if sequences is None else evaluate(trainer, inputs, taught)
            return of_rows if samples is None else of_rows | samples.evaluate()

        seen = None if samples is None else samples.seen
        train_batches(stage, inputs, trainer, batches, evaluate_all, seen)


def _scorers(
    stage: StageRun, section: DistillSection, teachers: Sequence[Decoder], outside: Sequence[OutsideTeacher]
) -> list[LogpsOf]:
    """All teachers, at the temperature that the student samples at."""
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
        unshared=packed(shared[0].unshared) if shared else None,
    )


Source = tuple[DatasetSection, Rows, Renderer]


def sources(inputs: SFTInputs) -> list[Source]:
    """All datasets of a stage by number, the one for evaluation last."""
    section = inputs.section
    found = list(
        zip(
            section.datasets,
            [inputs.rows, *(rows for rows, _ in inputs.mixed)],
            [inputs.renderer, *(renderer for _, renderer in inputs.mixed)],
            strict=True,
        )
    )
    if section.eval_dataset is not None:
        assert inputs.eval_rows is not None and inputs.eval_renderer is not None
        found.append((section.eval_dataset, inputs.eval_rows, inputs.eval_renderer))
    return found


def cache_folders(
    inputs: SFTInputs, source: TeacherSource, model: ModelSection, tokenizer: Tokenizer, *, to_write: bool
) -> list[tuple[Source, CacheFolder]]:
    """Of each dataset the folder of what a teacher says of it, named after the data. `model`: the student's."""
    section = inputs.section
    assert isinstance(section, DistillSection) and section.cache is not None
    folders = []
    for number, (dataset, rows, renderer) in enumerate(sources(inputs)):
        data = fingerprint(dataset, rows)
        tokens = token_fingerprint(rows, row_tokenizer(section, dataset, rows, renderer))
        identity = {
            "teacher": teacher_digest(source, needed=to_write),
            "data": data,
            "tokens": tokens,
            "vocab_size": tokenizer.num_ids,
            "top_k": min(section.top_k or DEFAULT_TOP_K, num_ids(source, tokenizer)),
            "temperature": section.temperature,
            "teacher_column": section.teacher_column,
            **computed_in(source.section, model),
        }
        aligner = aligner_of(inputs, source)
        if aligner is not None:
            identity["aligned"] = token_fingerprint(rows, _read_by(section, aligner, number, (dataset, rows, renderer)))
        # One file may be read through several templates.
        folder = Path(section.cache) / source.title / f"{data}-{tokens}"
        folders.append(((dataset, rows, renderer), CacheFolder(folder, identity, len(rows))))
    return folders


def aligner_of(inputs: SFTInputs, source: TeacherSource) -> Aligner | None:
    return inputs.aligners.get([one.title for one in inputs.teachers].index(source.title))


def _read_by(section: DistillSection, aligner: Aligner, number: int, data: Source) -> Any:
    tokenize = aligned_tokenizer(section, aligner, number, data)

    def read(row: int) -> Any:
        made = tokenize(row)
        return None if made is None else theirs(made)

    return read


def write_caches(config: RunConfig, base_dir: Path) -> None:
    """Write what is missing of the caches of all stages. ConfigError where no stage has one."""
    prepared = prepare(config, base_dir, offline_ok=False)
    assert prepared.tokenizer is not None
    for note in prepared.notes:
        console().print(note, markup=False, soft_wrap=True)
    mesh = make_mesh(config.mesh, training_devices(config))
    cached = [section for section in config.stages if isinstance(section, DistillSection) and section.cache is not None]
    if not cached:
        raise ConfigError("distill --cache: no stage of kind distill has a cache; give a folder: cache: runs/cache")
    for inputs in prepared.stages:
        if inputs.section not in cached:
            continue
        assert isinstance(inputs, SFTInputs)
        for source in inputs.teachers:
            folders = cache_folders(inputs, source, config.model, prepared.tokenizer, to_write=True)
            for _, folder in folders:
                folder.claim()
            left = []
            for number, (data, folder) in enumerate(folders):
                reader = _reader(inputs, source, number, data)
                with progress_bar(f"comparing {folder.folder}"):
                    shards = folder.unfit(reader)
                if shards:
                    left.append((folder, shards, reader))
            if left:
                section = inputs.section
                assert isinstance(section, DistillSection)
                if source.section.outside:
                    teacher = outside_teacher(
                        source,
                        config.model,
                        prepared.tokenizer,
                        section,
                        section.temperature,
                        section.top_k or DEFAULT_TOP_K,
                        mesh,
                    )
                else:
                    model = load_teacher(source, config.model, prepared.tokenizer, mesh)
                    k = left[0][0].format.k
                    teacher = FrozenModel(model, mesh, temperature=section.temperature, k=k)
                aligner = aligner_of(inputs, source)
                length = section.row_tokens if aligner is None else aligner.row_tokens
                _write(inputs, source, Scorer(teacher, section, row_shards(mesh), length), left)
            console().print(f"teacher {source.title}: its cache is whole", markup=False)


RowReader = Callable[[int], Any]
"""Of the number of a row; None where nothing is said of it."""


def _reader(inputs: SFTInputs, source: TeacherSource, number: int, data: Source) -> RowReader:
    """What a teacher is asked of a dataset."""
    section, aligner = inputs.section, aligner_of(inputs, source)
    assert isinstance(section, DistillSection)
    if aligner is None:
        tokenize: RowReader = row_tokenizer(section, *data)
    else:
        tokenize = aligned_tokenizer(section, aligner, number, data)
    return lambda row: tokenize(row) if _has_share(section, source, data[1], row) else None


def _write(
    inputs: SFTInputs, source: TeacherSource, scorer: Scorer, left: Sequence[tuple[CacheFolder, list[int], RowReader]]
) -> None:
    aligner = aligner_of(inputs, source)
    score = scorer if aligner is None else aligned_scorer(aligner, scorer)
    for folder, shards, reader in left:
        with progress_bar(f"{source.title} into {folder.folder}", sum(len(folder.rows(s)) for s in shards)) as advance:
            fill(folder, shards, reader, score, advance)
        size = folder.format.num_bytes
        line = f"{folder.folder}: {folder.num_rows:,} rows, {size} bytes for each token"
        console().print(line, markup=False, soft_wrap=True)


def _has_share(section: DistillSection, source: TeacherSource, rows: Rows, row: int) -> bool:
    if section.teacher_column is None:
        return True
    titles = [teacher.title for teacher in section.teachers]
    return bool(teacher_shares(rows[row], section.teacher_column, titles)[titles.index(source.title)] > 0)


class Distill(GivenPythonRun):
    """Distillation from Python: `pt.Distill(model="student", teacher="teacher", dataset="data.jsonl").fit()`.

    Every field of `posttrain.config.DistillSection` is a keyword, as are `output`, `seed` and `mesh`. `teacher`: a path
    or hub id, or a mapping of `TeacherSection`; for several give `teachers`.
    """

    kind = "distill"
    defaults: ClassVar[Mapping[str, Any]] = {
        **GivenPythonRun.defaults,
        "optimizer": {"learning_rate": 5e-5, "schedule": "cosine"},
    }
    lora_learning_rate = 2e-4
    row_tokens = 1024

    def __init__(self, model: Any, teacher: Any = None, dataset: Any = None, **fields: Any):
        if teacher is not None:
            if "teachers" in fields:
                raise ConfigError("pt.Distill: give teacher, or several as teachers")
            fields["teachers"] = [{"path": str(teacher)} if isinstance(teacher, str | Path) else teacher]
        super().__init__(model, dataset, **fields)
