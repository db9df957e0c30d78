"""Writing of teacher caches: each dataset is scored once; existing parts are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from posttrain.cluster.reference import FrozenModel
from posttrain.config import DistillSection, RunConfig
from posttrain.data.pipeline import images_of, row_tokenizer
from posttrain.data.sources import Rows, Sequences
from posttrain.distill.cache import CacheFolder, write_shards
from posttrain.distill.targets import teacher_shares
from posttrain.distill.teachers import (
    DEFAULT_TOP_K,
    TeacherSource,
    TopKScorer,
    aligned_scorer,
    aligned_tokenizer,
    load_teacher,
    outside_teacher,
)
from posttrain.errors import ConfigError
from posttrain.mesh import make_mesh, row_shards
from posttrain.runs.folder import remember_versions
from posttrain.runs.prepare import keep_clock, prepare
from posttrain.stages.context import training_devices
from posttrain.stages.distill import DatasetRows, DistillInputs, aligner_of, cache_folders
from posttrain.stages.distill import sources as data_of
from posttrain.tracking.console import console, progress_bar


def write_caches(config: RunConfig) -> None:
    """Write the missing parts of all stages' caches. ConfigError if no stage has one."""
    prepared = prepare(config, offline_ok=False, estimate=True)
    config = prepared.config
    for note in prepared.notes:
        console().print(note, markup=False, soft_wrap=True)
    # The run reads the cache of the same rendered rows.
    keep_clock(Path(config.output), prepared.tokenizer)
    mesh = make_mesh(config.mesh, training_devices(config))
    cached = [section for section in config.stages if isinstance(section, DistillSection) and section.cache is not None]
    if not cached:
        raise ConfigError("distill --cache: no stage of kind distill has a cache; set a folder: cache: runs/cache")
    for inputs in prepared.stages:
        if inputs.section not in cached:
            continue
        assert isinstance(inputs, DistillInputs)
        for source in inputs.teachers:
            folders = cache_folders(inputs, source, config.model, prepared.tokenizer, to_write=True)
            for _, folder in folders:
                folder.claim()
                remember_versions(folder.folder)
            left = []
            for number, (data, folder) in enumerate(folders):
                reader = _reader(inputs, source, number, data)
                with progress_bar(f"comparing {folder.folder}"):
                    shards = folder.unfit(reader)
                if shards:
                    left.append((folder, shards, reader))
            if left:
                section = inputs.section
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
                # Teachers of other tokens read no pictures.
                images = None if aligner is not None else images_of(section, dict(enumerate(data_of(inputs))))
                _write(inputs, source, TopKScorer(teacher, section, row_shards(mesh), length, images), left)
            console().print(f"teacher {source.title}: its cache is whole", markup=False)


RowReader = Callable[[int], Sequences]
"""Function from a row number to its sequences; none without teacher targets."""


def _reader(inputs: DistillInputs, source: TeacherSource, number: int, data: DatasetRows) -> RowReader:
    """Make the reader of the rows that a teacher scores."""
    section, aligner = inputs.section, aligner_of(inputs, source)
    if aligner is None:
        tokenize: RowReader = row_tokenizer(section, *data, number=number)
    else:
        tokenize = aligned_tokenizer(section, aligner, number, data)
    return lambda row: tokenize(row) if _has_share(section, source, data[1], row) else []


def _write(
    inputs: DistillInputs,
    source: TeacherSource,
    scorer: TopKScorer,
    left: Sequence[tuple[CacheFolder, list[int], RowReader]],
) -> None:
    aligner = aligner_of(inputs, source)
    score = scorer if aligner is None else aligned_scorer(aligner, scorer)
    for folder, shards, reader in left:
        with progress_bar(f"{source.title} into {folder.folder}", sum(len(folder.rows(s)) for s in shards)) as advance:
            write_shards(folder, shards, reader, score, advance)
        size = folder.format.num_bytes
        line = f"{folder.folder}: {folder.num_rows:,} rows, {size} bytes for each token"
        console().print(line, markup=False, soft_wrap=True)


def _has_share(section: DistillSection, source: TeacherSource, rows: Rows, row: int) -> bool:
    if section.teacher_column is None:
        return True
    titles = [teacher.title for teacher in section.teachers]
    return bool(teacher_shares(rows[row], section.teacher_column, titles)[titles.index(source.title)] > 0)
