"""Writing of teacher caches: each sequence is scored once, and a corrected row alone is scored anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from jax.sharding import Mesh

from posttrain.batch import TopK
from posttrain.cluster.reference import FrozenModel
from posttrain.config import DistillSection, RunConfig
from posttrain.data.pipeline import images_of
from posttrain.data.tokenizer import Tokenizer
from posttrain.distill.cache import TeacherCache, unknown_rows, write_records
from posttrain.distill.teachers import (
    DEFAULT_TOP_K,
    TeacherSource,
    TopKScorer,
    aligned_scorer,
    load_teacher,
    outside_teacher,
)
from posttrain.errors import ConfigError
from posttrain.mesh import make_mesh, row_shards
from posttrain.runs.folder import remember_versions
from posttrain.runs.prepare import keep_clock, prepare
from posttrain.stages.context import training_devices
from posttrain.stages.distill import CachedRows, DistillInputs, aligner_of, cache_folder, cached_rows
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
            _write_cache(config, inputs, source, prepared.tokenizer, mesh)
            console().print(f"teacher {source.title}: its cache is whole", markup=False)


def _write_cache(
    config: RunConfig, inputs: DistillInputs, source: TeacherSource, tokenizer: Tokenizer, mesh: Mesh
) -> None:
    """Score the rows of which a teacher's cache has no records; the teacher is loaded only if there are any."""
    folder = cache_folder(inputs, source, config.model, tokenizer, to_write=True)
    cache = TeacherCache(folder.create(), folder.format)
    remember_versions(cache.units.folder)
    left: list[tuple[CachedRows, list[int]]] = []
    for data in cached_rows(inputs, source):
        if not cache.units.is_complete(data.digest):
            with progress_bar(f"comparing {data.rows.name} with {cache.units.folder}"):
                left.append((data, unknown_rows(cache.units, range(len(data.rows)), data.tokenize)))
    if any(rows for _, rows in left):
        score = _scorer(config, inputs, source, tokenizer, mesh, folder.format.k)
        for data, rows in left:
            with progress_bar(f"{source.title} into {cache.units.folder}", len(rows)) as advance:
                write_records(cache, rows, data.tokenize, score, advance)
            size = folder.format.num_bytes
            line = f"{cache.units.folder}: {len(rows):,} of {len(data.rows):,} rows scored, {size} bytes for each token"
            console().print(line, markup=False, soft_wrap=True)
    for data, _ in left:
        cache.units.mark_complete(data.digest)


def _scorer(
    config: RunConfig, inputs: DistillInputs, source: TeacherSource, tokenizer: Tokenizer, mesh: Mesh, k: int
) -> Callable[[Sequence[Mapping[str, np.ndarray]]], Iterator[TopK]]:
    """Load a teacher. Function from sequences to their records, in the student's tokens."""
    section, aligner = inputs.section, aligner_of(inputs, source)
    if source.section.outside:
        wanted = section.top_k or DEFAULT_TOP_K
        teacher = outside_teacher(source, config.model, tokenizer, section, section.temperature, wanted, mesh)
    else:
        model = load_teacher(source, config.model, tokenizer, mesh)
        teacher = FrozenModel(model, mesh, temperature=section.temperature, k=k)
    if aligner is not None:
        # Teachers of other tokens read no pictures.
        return aligned_scorer(aligner, TopKScorer(teacher, section, row_shards(mesh), aligner.row_tokens, None))
    images = images_of(section, dict(enumerate(data_of(inputs))))
    return TopKScorer(teacher, section, row_shards(mesh), section.row_tokens, images)
