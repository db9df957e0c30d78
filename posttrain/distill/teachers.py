"""Teachers of a run: their files, tokenizers, devices and scores, and the aligners of those with other tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from posttrain.batch import TopK, rows_per_pass
from posttrain.cluster.http_teacher import ServedTeacher
from posttrain.cluster.reference import FrozenModel
from posttrain.config import (
    DatasetSection,
    DistillSection,
    ImageSection,
    ModelSection,
    RLSection,
    TeacherSection,
    Vision,
)
from posttrain.data.chat import Renderer
from posttrain.data.format import loss_on, use_chat
from posttrain.data.image_rows import ImageRows
from posttrain.data.images import policy_of, takes_images
from posttrain.data.packing import pack, to_batch
from posttrain.data.pipeline import row_tokenizer
from posttrain.data.sources import Arrays, Rows, Sequences, each_row
from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.data.tokenizer_files import TOKENIZER_FILES, processor_files
from posttrain.distill.cross_tokenizer import (
    Aligned,
    Aligner,
    SharedTokens,
    Vocabulary,
    VocabularyMap,
    aligned_sequences,
)
from posttrain.errors import ConfigError
from posttrain.mesh import make_mesh
from posttrain.models.config import ModelConfig
from posttrain.models.decoder import Decoder
from posttrain.runtime.hub import hub_is_reachable
from posttrain.tracking.console import console
from posttrain.weights.files import find_folder, local_weights
from posttrain.weights.load import check_weights, load_model
from posttrain.weights.locate import ModelFiles, origin_of_folder, read_model_files, refuse_misspelt
from posttrain.weights.lora import count_parameters

DEFAULT_TOP_K = 64

MAX_LOGPROBS_OF_VLLM = 20
"""Its default, docs.vllm.ai, vllm.config.model."""

SERVED = "a server is sent tokens alone"
"""Reason why a teacher reads no pictures."""
OTHER_TOKENS = "distil from a model with the student's tokenizer, or set the teacher's tokenizer: align (or gold)"

SAME_TOKENS = 0.99
"""Share of the student's tokens that a teacher must know by the same ids."""


@dataclass(frozen=True, kw_only=True)
class TeacherSource:
    """Teacher of a stage, and the files that describe it."""

    section: TeacherSection
    files: ModelFiles
    blind: str | None = None
    """Reason why it reads no pictures, or not those of the student."""

    @property
    def path(self) -> str:
        """Absolute folder, or hub id."""
        assert self.files.path is not None
        return self.files.path

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer of a cross-tokenizer teacher; None: the student's."""
        return self.files.tokenizer if self.section.aligned else None

    @property
    def max_positions(self) -> int | None:
        """Context length, if known."""
        return None if self.files.config is None else self.files.config.max_positions

    @property
    def title(self) -> str:
        return self.section.title


def find_teachers(
    section: DistillSection | RLSection, tokenizer: Tokenizer | None
) -> tuple[list[TeacherSource], list[str]]:
    """Describe the teachers; also returns notes about differences and impossible checks. ConfigError for a mismatch.

    With a cache the teachers' files may be missing.
    """
    sources, notes = [], []
    cached = isinstance(section, DistillSection) and section.cache is not None
    if isinstance(section, DistillSection) and cached and section.beta > 0:
        notes.append(
            f"beta={section.beta:g} from a cache is a lower bound: the mass beyond top_k counts as one outcome, so a "
            "student that divides it otherwise than its teacher is not held to that; exact with the teacher in the step"
        )
    if isinstance(section, DistillSection) and section.cache is not None and not Path(section.cache).is_dir():
        notes.append(f"cache: {section.cache} is not there yet; posttrain distill --cache writes it")
    for teacher in in_order(section):
        notes += _check_limit(section, teacher)
        try:
            path = teacher.path.resolved
            if not Path(path).exists() and not hub_is_reachable():
                refuse_misspelt("teachers", teacher.path)
            files = read_model_files(path)
        except ConfigError as error:
            if not cached and teacher.url is None:
                raise ConfigError(f"teachers: {str(error).removeprefix('model.path: ')}") from error
            files = ModelFiles(path=str(teacher.path), hf_json=None, config=None)
            if teacher.aligned:
                sources.append(TeacherSource(section=teacher, files=_with_tokenizer(teacher, files, tokenizer)))
                continue
            sources.append(TeacherSource(section=teacher, files=files, blind=None if cached else SERVED))
            what = "its cache alone is used" if cached else "not checked: whether its tokens are the student's"
            notes.append(f"teacher {teacher.title} is not there: {what}")
            continue
        config = files.config
        if config is None or tokenizer is None:
            sources.append(TeacherSource(section=teacher, files=files))
            notes.append(f"not checked, no network: the teacher {teacher.path}")
            continue
        if config.scalar_head:
            raise ConfigError(f"teachers: {teacher.path} is a reward model, which cannot generate")
        if not cached and teacher.url is None and files.local is not None:
            check_weights(files.local)
        blind = _blind(teacher, files, tokenizer)
        if blind is None and not teacher.url:
            files = read_model_files(path, vision="frozen")
        if teacher.aligned:
            files = _with_tokenizer(teacher, files, tokenizer)
        else:
            _check_model(section, teacher, config, tokenizer)
            notes += _check_tokens(teacher, files, config, tokenizer)
        sources.append(TeacherSource(section=teacher, files=files, blind=blind))
    return sources, notes


def _blind(teacher: TeacherSection, files: ModelFiles, tokenizer: Tokenizer) -> str | None:
    """Reason why a teacher cannot read pictures as the student does, by the same patches and tokens; None: it can."""
    if not tokenizer.sees:
        return "the student reads none"
    if teacher.url is not None:
        return SERVED
    if teacher.aligned:
        return f"tokenizer: {teacher.tokenizer} aligns texts alone"
    if files.hf_json is None or not takes_images(files.hf_json):
        return "it has no vision tower of a known family"
    assert files.path is not None
    theirs = policy_of(files.hf_json, processor_files(files.path), ImageSection(), files.path)
    return theirs.difference(tokenizer.images)


def _check_limit(section: DistillSection | RLSection, teacher: TeacherSection) -> list[str]:
    """Note the server option that a request will need."""
    if teacher.url is None or teacher.server != "vllm" or not isinstance(section, DistillSection):
        return []
    k = section.top_k or DEFAULT_TOP_K
    if k <= MAX_LOGPROBS_OF_VLLM:
        return []
    return [f"teacher {teacher.title}: its vLLM server needs --max-logprobs {k}, for {k} log-probabilities per token"]


def _with_tokenizer(teacher: TeacherSection, files: ModelFiles, student: Tokenizer | None) -> ModelFiles:
    assert files.path is not None
    try:
        tokenizer = load_tokenizer(files.path).at(None if student is None else student.clock)
        return replace(files, tokenizer=tokenizer)
    except ConfigError as error:
        raise ConfigError(
            f"teachers: tokenizer: {teacher.tokenizer} needs the teacher's own tokenizer: {error}"
        ) from error


def _check_model(
    section: DistillSection | RLSection, teacher: TeacherSection, config: ModelConfig, tokenizer: Tokenizer
) -> None:
    if section.row_tokens > config.max_positions:
        raise ConfigError(
            f"teachers: row_tokens={section.row_tokens} must be at most max_position_embeddings={config.max_positions} "
            f"of {teacher.path}"
        )
    if tokenizer.num_ids > config.vocab_size:
        raise ConfigError(
            f"teachers: the student's tokenizer has {tokenizer.num_ids:,} token ids, the embedding of {teacher.path} "
            f"only {config.vocab_size:,} rows; {OTHER_TOKENS}"
        )


def _check_tokens(teacher: TeacherSection, files: ModelFiles, config: ModelConfig, tokenizer: Tokenizer) -> list[str]:
    """Compare the vocabularies. ConfigError if the same ids are other tokens: the scores would be of another text."""
    notes = []
    surplus = config.vocab_size - tokenizer.num_ids
    if surplus:
        notes.append(f"teacher {teacher.title}: {surplus:,} rows of its vocabulary stand for no token of the student")
    folder = files.local
    there = any((folder / name).is_file() for name in TOKENIZER_FILES) if folder else hub_is_reachable()
    if not there:
        return [
            *notes,
            f"not checked: whether the tokens of teacher {teacher.title} are the student's (no tokenizer)",
        ]
    assert files.path is not None
    theirs = load_tokenizer(files.path).hf.get_vocab()
    ours = tokenizer.hf.get_vocab()
    other = {text: (index, theirs[text]) for text, index in ours.items() if theirs.get(text, index) != index}
    by_id = {index: text for text, index in theirs.items()}
    other |= {t: (i, i) for t, i in ours.items() if i in by_id and by_id[i] != t and t not in other}
    if other:
        text, (mine, its) = min(other.items(), key=lambda item: item[1])
        whose = f"id {its}" if its != mine else f"{by_id[mine]!r}"
        raise ConfigError(
            f"teachers: {len(other):,} of the {len(ours):,} tokens are others in {teacher.path}: {text!r} is id {mine} "
            f"for the student, and there {whose}; {OTHER_TOKENS}"
        )
    unknown = len(ours.keys() - theirs.keys())
    if unknown > (1 - SAME_TOKENS) * len(ours):
        raise ConfigError(
            f"teachers: {teacher.path} does not know {unknown:,} of the student's {len(ours):,} tokens; {OTHER_TOKENS}"
        )
    if unknown:
        notes.append(f"teacher {teacher.title}: it does not know {unknown:,} of the student's tokens")
    return notes


def num_ids(source: TeacherSource, tokenizer: Tokenizer) -> int:
    """Number of token ids in a teacher's top-k. `tokenizer`: the student's."""
    return (source.tokenizer or tokenizer).num_ids


def load_teacher(source: TeacherSource, model: ModelSection, tokenizer: Tokenizer, mesh: Mesh) -> Decoder:
    """Load a teacher on the mesh; embedding rows without a token have probability 0, as for the student."""
    vision: Vision = "none" if source.blind else "frozen"
    files = source.files if source.files.config else read_model_files(source.path, vision=vision)
    assert files.config is not None
    ids = num_ids(source, tokenizer)
    teacher = load_model(
        source.path,
        **computed_in(source.section, model),
        mesh=mesh,
        vision="none" if files.config.vision is None else "frozen",
        attention=model.attention,
        grouped_matmul=model.grouped_matmul,
        num_tokens=ids if ids < files.config.vocab_size else None,
    )
    size = count_parameters(teacher).total
    console().print(f"teacher {source.title}: {teacher.config.model_type}, {size:,} parameters", highlight=False)
    return teacher


def computed_in(teacher: TeacherSection, model: ModelSection) -> dict[str, Any]:
    """Precision settings that change a teacher's outputs; by default the student's."""
    dtype = teacher.dtype or model.dtype
    return {"quantize": teacher.quantize, "dtype": dtype, "compute_dtype": model.compute_dtype or dtype}


def teacher_digest(source: TeacherSource, *, needed: bool) -> str | None:
    """Digest of a teacher's weights; None where they are not on this machine, and are not `needed`."""
    if source.section.url is not None:
        return f"{source.section.model or source.section.path} at a server"
    folder = find_folder(source.path) if needed else local_weights(source.path)
    if folder is None:
        return None
    origin = origin_of_folder(source.path, folder)
    return " ".join(f"{name}:{part}" for name, part in sorted(origin.parts.items()))


def tokenizers_identity(sources: Sequence[TeacherSource]) -> dict[str, Mapping[str, str]]:
    """Digests of the tokenizers by which teachers of other tokens read the text, by teacher and part."""
    return {
        f"tokenizer of teacher {source.title}": source.tokenizer.identity
        for source in sources
        if source.tokenizer is not None
    }


def in_order(section: DistillSection | RLSection) -> list[TeacherSection]:
    """Teachers in the order of the training step: those inside it first."""
    return sorted(section.teachers, key=lambda teacher: teacher.outside)


OutsideTeacher = FrozenModel | ServedTeacher


def outside_teacher(
    source: TeacherSource,
    model: ModelSection,
    tokenizer: Tokenizer,
    section: DistillSection | RLSection,
    temperature: float,
    k: int = 1,
    mesh: Mesh | None = None,
) -> OutsideTeacher:
    """Make a teacher outside the training step: at its server, on its own mesh, or (cross-tokenizer) on `mesh`, that of
    training."""
    ids = num_ids(source, tokenizer)
    k = min(k, ids)
    if source.section.url is not None:
        return ServedTeacher(source.section, num_ids=ids, k=k)
    if source.section.mesh is not None:
        mesh = teacher_mesh(source.section, own_devices(section.teachers, jax.devices())[source.title], mesh)
    assert mesh is not None
    teacher = load_teacher(source, model, tokenizer, mesh)
    return FrozenModel(teacher, mesh, temperature=temperature, rows=section.micro_batch_rows, k=k)


def teacher_mesh(teacher: TeacherSection, own: Sequence[jax.Device] | None, training: Mesh | None) -> Mesh:
    """Make the mesh of a teacher that has one: on its `own` devices, or on those of `training`, which it shares."""
    assert teacher.mesh is not None
    if own is not None:
        return make_mesh(teacher.mesh, own)
    assert training is not None
    return make_mesh(teacher.mesh, training.devices.ravel().tolist())


def own_devices(
    teachers: Sequence[TeacherSection], devices: Sequence[jax.Device]
) -> dict[str, Sequence[jax.Device] | None]:
    """Devices that each teacher has for itself, by title: the last ones belong to the first such teacher."""
    found: dict[str, Sequence[jax.Device] | None] = {}
    for teacher in teachers:
        count = teacher.num_own_devices
        found[teacher.title] = devices[len(devices) - count :] if count else None
        devices = devices[: len(devices) - count]
    return found


class TopKScorer:
    """Teacher top-k of sequences, packed into rows of one shape."""

    def __init__(
        self,
        teacher: OutsideTeacher,
        section: DistillSection,
        shards: int,
        row_tokens: int,
        images: ImageRows | None = None,
    ):
        self._teacher, self._images = teacher, images
        self._rows = rows_per_pass(section.batch_rows, section.micro_batch_rows, shards)
        self._row_tokens = row_tokens

    def __call__(self, sequences: Sequence[Mapping[str, np.ndarray]]) -> Iterator[TopK]:
        """Yield the top-k of each sequence's tokens with loss, arrays [N, k] and [N]."""
        if not sequences:
            return
        like = {name: sequences[0][name] for name in ("tokens", "loss_weight")}
        patches = 0 if self._images is None else self._images.row_patches
        rows, where = pack(sequences, self._row_tokens, like=like, row_patches=patches, images=self._images)
        topk = self._teacher.top_k(to_batch(_whole_passes(rows, self._rows)))
        for sequence, (row, tokens) in zip(sequences, where, strict=True):
            at = tokens.start + np.flatnonzero(sequence["loss_weight"])
            yield jax.tree.map(lambda x, row=row, at=at: x[row, at], topk)


def _whole_passes(rows: Mapping[str, np.ndarray], num_rows: int) -> dict[str, np.ndarray]:
    """Pad with empty rows to a multiple of `num_rows`, so that every pass has one shape."""
    return {name: np.pad(x, ((0, -len(x) % num_rows), *((0, 0) for _ in x.shape[1:]))) for name, x in rows.items()}


# Positions in texts are counted in bytes: tokens of byte-level vocabularies may end inside of a character.


LOOKED_AT = 300
"""Rows of each dataset, spread evenly."""
MOST_UNALIGNED = 0.1
"""Share of the completions' text that the teacher's template may leave out or change."""
MOST_OTHER = 0.3
"""Maximum share of common token starts at which the teacher's token differs from the student's."""
LONGEST_ROW = 1 << 20

Data = tuple[DatasetSection, Rows, Renderer]


def make_aligners(
    section: DistillSection, teachers: Sequence[TeacherSource], data: Sequence[Data], tokenizer: Tokenizer
) -> tuple[dict[int, Aligner], list[str]]:
    """Make the aligner of each cross-tokenizer teacher, by number, and a note of its token coverage.

    ConfigError where the two do not read the same text.
    """
    aligners, notes = {}, []
    for number, source in enumerate(teachers):
        if source.tokenizer is None:
            continue
        student, teacher = Vocabulary(tokenizer), Vocabulary(source.tokenizer)
        aligner = Aligner(
            student=student,
            teacher=teacher,
            renderers=[
                (dataset, Renderer(source.tokenizer, use_chat(dataset, source.tokenizer, rows.columns)))
                for dataset, rows, _ in data
            ],
            map=SharedTokens.of(student, teacher)
            if source.section.tokenizer == "gold"
            else VocabularyMap(student, teacher, section.temperature),
            row_tokens=source.max_positions or LONGEST_ROW,
            loss_on=loss_on(section),
        )
        sample = _look(section, aligner, data)
        aligners[number] = replace(aligner, row_tokens=_row_tokens(section, source, sample))
        notes.append(_note(source, aligners[number], sample))
    return aligners, notes


Found = list[tuple[int, Aligned]]
"""Numbers of the student's tokens with loss, and what became of the sequence."""


def _look(section: DistillSection, aligner: Aligner, data: Sequence[Data]) -> Found:
    sample: Found = []
    for number, (dataset, rows, renderer) in enumerate(data):
        tokenize = row_tokenizer(section, dataset, rows, renderer)
        chosen = range(0, len(rows), -(-len(rows) // LOOKED_AT))
        # A quick check may end before all of them.
        for index, sequences in zip(chosen, each_row(rows, chosen, "alignment", tokenize), strict=False):
            with rows.named(index) as row:
                pairs = zip(sequences, aligner.align(number, row, sequences), strict=True)
            sample += [
                (int((one["loss_weight"] > 0).sum()), a) for one, a in pairs if one is not None and a is not None
            ]
    return sample


def _row_tokens(section: DistillSection, source: TeacherSource, found: Found) -> int:
    """Teacher row length in proportion to the student's rows, and no shorter than a sequence."""
    mine = sum(len(aligned.covered) for _, aligned in found)
    its = [len(aligned.tokens) for _, aligned in found]
    needed = max(-(-section.row_tokens * sum(its) // mine), *its, 2)
    return needed if source.max_positions is None else min(needed, source.max_positions)


def _note(source: TeacherSource, aligner: Aligner, found: Found) -> str:
    """Format the coverage of a teacher. ConfigError if too little is aligned."""
    text, same, single = (sum(getattr(a.pairs, name) for _, a in found) for name in ("text", "same_text", "single"))
    begin, num_covered = sum(len(a.pairs.one) for _, a in found), sum(int((a.covered != 0).sum()) for _, a in found)
    covered = num_covered / sum(count for count, _ in found)
    other, unaligned = 1 - num_covered / max(begin, 1), 1 - same / max(text, 1)
    if unaligned > MOST_UNALIGNED or not covered:
        raise ConfigError(
            f"teachers: {unaligned:.1%} of the completions' text is not what teacher {source.title} reads of the same "
            f"rows (at most {MOST_UNALIGNED:.0%} may be), and {covered:.1%} of the tokens have a target; compare the "
            "chat templates of both, or set dataset.chat to false"
        )
    alike = f"{single / max(text, 1):.1%} of the text is in tokens that both have alike, {unaligned:.1%} is not aligned"
    if aligner.shared is not None:
        groups = num_covered / max(begin, 1)
        return (
            f"teacher {source.title}: its own tokens, in rows of {aligner.row_tokens}; it teaches {covered:.1%} of the "
            f"student's tokens, in groups of {groups:.2f} ({alike}); {aligner.shared.unshared.sum():,} of the "
            f"student's {len(aligner.student.names):,} tokens are not its own"
        )
    if other > MOST_OTHER:
        raise ConfigError(
            f"teachers: where a token begins in both, that of teacher {source.title} is another than the student's at "
            f"{other:.1%} of the places (at most {MOST_OTHER:.0%} may be): its tokens are too short for this student"
        )
    return (
        f"teacher {source.title}: its own tokens, in rows of {aligner.row_tokens}; it teaches {covered:.1%} of the "
        f"student's tokens ({alike}); where a token begins in both, it is another at {other:.1%} of the places"
    )


def aligned_tokenizer(section: DistillSection, aligner: Aligner, number: int, data: Data) -> Callable[[int], Sequences]:
    """Make a row tokenizer with loss only at aligned tokens, and with the arrays of `Aligned`."""
    dataset, rows, renderer = data
    tokenize = row_tokenizer(section, dataset, rows, renderer)

    def align(index: int) -> Sequences:
        sequences = tokenize(index)
        with rows.named(index) as row:
            return aligned_sequences(sequences, aligner.align(number, row, sequences))

    return align


def teacher_sequence(made: Mapping[str, np.ndarray]) -> Arrays:
    """Teacher tokens of an aligned sequence, with loss weight on the scored ones."""
    return {"tokens": made["teacher_tokens"], "loss_weight": (made["scored"] != 0).astype(np.float32)}


def aligned_scorer(
    aligner: Aligner, score: TopKScorer
) -> Callable[[Sequence[Mapping[str, np.ndarray]]], Iterator[TopK]]:
    """Make a scorer of `aligned_tokenizer` sequences that returns top-k in the student's tokens."""

    def scored(sequences: Sequence[Mapping[str, np.ndarray]]) -> Iterator[TopK]:
        for sequence, topk in zip(sequences, score([teacher_sequence(one) for one in sequences]), strict=True):
            mine, its = (sequence["tokens"], sequence["covered"]), (sequence["teacher_tokens"], sequence["scored"])
            yield aligner.translate(topk, mine, its)

    return scored
