"""The teachers of a stage: whether they fit the student, their models, and what they say of given sequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from posttrain.batch import TopK, rows_per_pass
from posttrain.config import ConfigError, DistillSection, ModelSection, TeacherSection
from posttrain.console import console
from posttrain.data.hub import hub_is_reachable
from posttrain.data.tokenizer import TOKENIZER_FILES, Tokenizer, load_tokenizer
from posttrain.kernels.top_k import top_k
from posttrain.mesh import BATCH_SPEC, row_shards
from posttrain.models.config import ModelConfig
from posttrain.models.decoder import Decoder
from posttrain.recipes.source import local_or_hub, origin_of_folder, read_model_config, refuse_misspelt
from posttrain.weights.files import find_folder
from posttrain.weights.load import check_weights, load_model
from posttrain.weights.lora import count_parameters
from posttrain.weights.state import ModelWeights, Weights

SAME_TOKENS = 0.99
"""Share of the student's tokens that a teacher must know by the same ids."""


@dataclass(frozen=True, kw_only=True)
class TeacherSource:
    """Where a teacher is to be had."""

    section: TeacherSection
    path: str
    """A folder or a hub id."""

    @property
    def title(self) -> str:
        return self.section.title


def find_teachers(
    section: DistillSection, tokenizer: Tokenizer | None, base_dir: Path
) -> tuple[list[TeacherSource], list[str]]:
    """The teachers, and notes of what is reconciled or cannot be checked. ConfigError for those that do not fit.

    With a cache they need not be there any more.
    """
    found, notes = [], []
    for teacher in section.teachers:
        try:
            path = local_or_hub(teacher.path, base_dir)
            if not Path(path).exists() and not hub_is_reachable():
                refuse_misspelt("teachers", path, base_dir)
            config = read_model_config(ModelSection(path=path), base_dir, vocab_size=None)
        except ConfigError as error:
            if section.cache is None:
                raise ConfigError(f"teachers: {str(error).removeprefix('model.path: ')}") from error
            found.append(TeacherSource(section=teacher, path=teacher.path))
            notes.append(f"teacher {teacher.title} is not there: its cache alone is used")
            continue
        found.append(TeacherSource(section=teacher, path=path))
        if config is None or tokenizer is None:
            notes.append(f"not checked, no network: the teacher {teacher.path}")
            continue
        if section.cache is None and Path(path).is_dir():
            check_weights(Path(path))
        _check_model(section, teacher, config, tokenizer)
        notes += _check_tokens(teacher, path, config, tokenizer)
    return found, notes


def _check_model(section: DistillSection, teacher: TeacherSection, config: ModelConfig, tokenizer: Tokenizer) -> None:
    if section.row_tokens > config.max_positions:
        raise ConfigError(
            f"teachers: row_tokens={section.row_tokens} must be at most max_position_embeddings={config.max_positions} "
            f"of {teacher.path}"
        )
    if tokenizer.num_ids > config.vocab_size:
        raise ConfigError(
            f"teachers: the student's tokenizer has {tokenizer.num_ids:,} token ids, the embedding of {teacher.path} "
            f"only {config.vocab_size:,} rows; give a teacher with the student's tokens"
        )


def _check_tokens(teacher: TeacherSection, path: str, config: ModelConfig, tokenizer: Tokenizer) -> list[str]:
    """ConfigError where the same ids are other tokens: the teacher would speak of another text."""
    notes = []
    surplus = config.vocab_size - tokenizer.num_ids
    if surplus:
        notes.append(f"teacher {teacher.title}: {surplus:,} rows of its vocabulary stand for no token of the student")
    folder = Path(path)
    local = folder.is_dir()
    if (local and not any((folder / name).is_file() for name in TOKENIZER_FILES)) or (
        not local and not hub_is_reachable()
    ):
        return [
            *notes,
            f"not checked: whether the tokens of teacher {teacher.title} are the student's (no tokenizer)",
        ]
    theirs = load_tokenizer(path).hf.get_vocab()
    ours = tokenizer.hf.get_vocab()
    other = {text: (index, theirs[text]) for text, index in ours.items() if theirs.get(text, index) != index}
    by_id = {index: text for text, index in theirs.items()}
    other |= {t: (i, i) for t, i in ours.items() if i in by_id and by_id[i] != t and t not in other}
    if other:
        text, (mine, its) = min(other.items(), key=lambda item: item[1])
        whose = f"id {its}" if its != mine else f"{by_id[mine]!r}"
        raise ConfigError(
            f"teachers: {len(other):,} of the {len(ours):,} tokens are others in {teacher.path}: {text!r} is id {mine} "
            f"for the student, and there {whose}; distil from a model with the student's tokenizer"
        )
    unknown = len(ours.keys() - theirs.keys())
    if unknown > (1 - SAME_TOKENS) * len(ours):
        raise ConfigError(
            f"teachers: {teacher.path} does not know {unknown:,} of the student's {len(ours):,} tokens; "
            "distil from a model with the student's tokenizer"
        )
    if unknown:
        notes.append(f"teacher {teacher.title}: it does not know {unknown:,} of the student's tokens")
    return notes


def load_teacher(source: TeacherSource, model: ModelSection, tokenizer: Tokenizer, mesh: Mesh) -> Decoder:
    """Its model on the mesh, where ids without a token are impossible, as for the student."""
    rows = read_model_config(ModelSection(path=source.path), Path.cwd(), vocab_size=None)
    assert rows is not None
    teacher = load_model(
        source.path,
        dtype=source.section.dtype or model.dtype,
        compute_dtype=model.compute_dtype,
        mesh=mesh,
        attention=model.attention,
        grouped_matmul=model.grouped_matmul,
        num_tokens=tokenizer.num_ids if tokenizer.num_ids < rows.vocab_size else None,
        quantize=source.section.quantize,
    )
    size = count_parameters(teacher).total
    console().print(f"teacher {source.title}: {teacher.config.model_type}, {size:,} parameters", highlight=False)
    return teacher


def teacher_digest(source: TeacherSource, *, needed: bool) -> str | None:
    """Of a teacher's weights; None where they are not on this machine, and are not `needed`."""
    if not needed and not Path(source.path).is_dir():
        return None
    origin = origin_of_folder(source.path, find_folder(source.path))
    return " ".join(f"{name}:{part}" for name, part in sorted(origin.parts.items()))


class Scorer:
    """What a model says of sequences: several are packed into a row, and all rows of a pass have one shape."""

    def __init__(self, model: Decoder, section: DistillSection, mesh: Mesh, *, k: int):
        self._weights = ModelWeights(model)
        self._mesh = mesh
        self._rows = rows_per_pass(section.batch_rows, section.micro_batch_rows, row_shards(mesh))
        self._row_tokens = section.row_tokens

        def said(weights: Weights, tokens: jax.Array, positions: jax.Array, segments: jax.Array) -> TopK:
            bound = self._weights.bind(weights)
            hidden, _ = bound(tokens, positions, segments)
            return top_k(
                bound.logits,
                hidden,
                tokens,
                k=k,
                temperature=section.temperature,
                vocab_size=bound.config.vocab_size,
            )

        self._said = jax.jit(said)

    def __call__(self, sequences: Sequence[Mapping[str, np.ndarray]]) -> Iterator[TopK]:
        """Of each sequence in turn what is said of its tokens with loss, arrays [N, k] and [N]."""
        free = np.full(self._rows, self._row_tokens)
        window: list[tuple[Mapping[str, np.ndarray], int, int]] = []
        for sequence in sequences:
            length = len(sequence["tokens"])
            if not (free >= length).any():
                yield from self._pass(window)
                window, free = [], np.full(self._rows, self._row_tokens)
            row = int(np.argmax(free >= length))
            window.append((sequence, row, self._row_tokens - int(free[row])))
            free[row] -= length
        if window:
            yield from self._pass(window)

    def _pass(self, window: Sequence[tuple[Mapping[str, np.ndarray], int, int]]) -> Iterator[TopK]:
        tokens, positions, segments = np.zeros((3, self._rows, self._row_tokens), np.int32)
        for number, (sequence, row, start) in enumerate(window, start=1):
            span = slice(start, start + len(sequence["tokens"]))
            tokens[row, span] = sequence["tokens"]
            positions[row, span] = np.arange(len(sequence["tokens"]))
            segments[row, span] = number
        placed = jax.device_put((tokens, positions, segments), NamedSharding(self._mesh, BATCH_SPEC))
        found = jax.device_get(self._said(self._weights.read(), *map(jnp.asarray, placed)))
        for sequence, row, start in window:
            at = start + np.flatnonzero(sequence["loss_weight"])
            yield jax.tree.map(lambda x, row=row, at=at: x[row, at], found)
