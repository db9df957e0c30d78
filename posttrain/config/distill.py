"""Distillation stages, the features that they match, and their teachers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, model_validator

from posttrain.config.base import Flag, ListOf, LocalPath, PositiveInt, Section
from posttrain.config.optimizer import ANY_KIND, OtherOptimizer
from posttrain.config.rollout import (
    RolloutSection,
    SamplingSection,
    answer_tokens,
    check_drafter_stays,
    check_sampling,
    with_lengths,
)
from posttrain.config.teacher import TeacherSection, check_teachers
from posttrain.config.train import RouterSection, SequenceOptimizer, SequenceSection

LayerMap = dict[int, int] | Literal["uniform", "last"]


def _layer_map(value: Any) -> LayerMap:
    if value in ("uniform", "last"):
        return value
    numbers = [n for pair in value.items() for n in pair] if isinstance(value, dict) else []
    if numbers and all(type(n) is int and n >= 0 for n in numbers):
        return value
    raise ValueError(
        f"must be uniform, last, or layers of the student with those of the teacher, from 0 on: {{1: 5, 3: 11}}; got "
        f"{value!r}"
    )


Layers = Annotated[LayerMap, PlainValidator(_layer_map)]
Weight = Annotated[float, Field(gt=0)]


class HiddenFeatures(Section):
    """Hidden-state matching, arXiv:1909.10351 (TinyBERT)."""

    layers: Layers = "uniform"
    """Mapping of student layers to teacher layers, from 0. `uniform`: all student layers to evenly spaced teacher
    layers, the last to the last; `last`: only the last pair."""
    weight: Weight = 1.0
    """Weight in the loss of the mean over the pairs of layers."""
    loss: Literal["mse", "cosine"] = "cosine"
    """Distance of hidden states: 1 - cosine similarity, or the mean squared error, which depends on the teacher's
    scale."""
    project: Flag = True
    """Learn a projection per pair of layers, which is not part of the student; false requires equal widths."""


class AttentionFeatures(Section):
    """Self-attention relation matching, MiniLMv2, arXiv:2012.15828."""

    layers: Layers = "last"
    """Mapping of student layers to teacher layers, as in `hidden`."""
    weight: Weight = 1.0
    """Weight in the loss of the mean over pairs of layers, relations and heads."""
    relations: Annotated[ListOf[Literal["q", "k", "v"]], Field(min_length=1)] = ("q", "k", "v")
    """Relations to match, of queries, keys and values: KL(teacher || student) of softmax(x x^T / sqrt(size)) over
    previous tokens."""
    heads: PositiveInt | None = None
    """Number of relation heads into which both models are split; by default the student's heads, if they divide the
    teacher's width."""

    def _mistakes(self) -> Iterator[str]:
        if len({*self.relations}) < len(self.relations):
            yield f"relations: each once; got {', '.join(self.relations)}"


class FeaturesSection(Section):
    """Feature distillation: teacher layers to match at the tokens with loss, in addition to the distribution."""

    hidden: HiddenFeatures | None = None
    """Hidden states at the output of layers."""
    attention: AttentionFeatures | None = None
    """Relations among tokens in the attention of layers."""

    def _mistakes(self) -> Iterator[str]:
        if self.hidden is None and self.attention is None:
            yield "set hidden or attention, or both; {} takes the defaults: {hidden: {}}"


class DistillSection(SequenceSection):
    """Distillation: the student is trained on the token distributions of its teachers, GKD (arXiv:2306.13649)."""

    kind: Literal["distill"] = "distill"
    teachers: Annotated[ListOf[TeacherSection], Field(min_length=1)]
    """Teacher models, with the student's tokenizer or aligned to it; several need `teacher_column`."""
    teacher_column: str | None = None
    """Dataset column with the name of a row's teacher, or a mapping of names to weights."""
    beta: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Divergence. 0: forward KL (teacher || student). 1: reverse KL. Between: generalised Jensen-Shannon divergence."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of both distributions in the divergence."""
    cross_entropy: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Weight of the cross-entropy on the text in the loss; the divergence has the rest."""
    uld_weight: Annotated[float, Field(ge=0)] | None = None
    """Weight of the L1 distance of sorted probabilities (ULD) over tokens that only one vocabulary has, added to the
    divergence; default 1. Only with a teacher of `tokenizer: gold`."""
    features: FeaturesSection | None = None
    """Match hidden states or attention relations of the teacher's layers too; needs a single teacher in the training
    step."""
    cache: LocalPath | None = None
    """Folder of cached teacher top-k, written by `posttrain distill --cache` or `write_cache`; training then loads no
    teacher."""
    top_k: PositiveInt | None = None
    """Number of most probable tokens per position kept from a cache or from a teacher outside of the training step
    (`url`, `mesh`, `tokenizer: align` or `gold`), plus the sum of the others; default 64."""

    on_policy: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Fraction of steps on completions sampled from the student, one for each of `batch_rows` prompts. With 1 the
    dataset needs no completions (except with a teacher of `tokenizer: gold`, to measure the alignment), and evaluation
    uses samples too."""
    sampling: SamplingSection | None = None
    """Sampling of the student's completions."""
    rollout: RolloutSection = RolloutSection()

    @property
    def records_routing(self) -> bool:
        return self.rollout.record_routing

    def default_lengths(self, max_positions: int) -> dict[str, Any]:
        fields = super().default_lengths(max_positions)
        if self.sampling is not None:
            fields["sampling"] = self.sampling.at_most(answer_tokens(max_positions, 1))
        return fields

    @model_validator(mode="wrap")
    @classmethod
    def _default_lengths(cls, data: Any, build: Any) -> Any:
        row = cls.model_fields["row_tokens"].default
        return with_lengths(data, build, default_row=row, prompts_in_row=1, fills_row=False)

    def _mistakes(self) -> Iterator[str]:
        yield from self._passes()
        yield from self._samples()
        yield from self._live()
        yield from self._which_teacher()
        if self.on_bad_image == "drop" and (self.cache is not None or self.on_policy):
            what = (
                "cache, which holds all rows of the dataset" if self.cache is not None else "on_policy, which samples"
            )
            yield f"on_bad_image=drop cannot be with {what}; remove it, and the rows with such pictures"

    def _passes(self) -> Iterator[str]:
        if 0 < self.on_policy < 1 and self.num_steps is None:
            yield (
                f"num_epochs: steps with on_policy={self.on_policy} draw from the dataset and from samples, and pass "
                "over neither alone; give num_steps"
            )
        if self.num_steps is None and any(teacher.aligned for teacher in self.teachers):
            yield (
                "num_epochs: rows are packed by the teacher's tokens as well (tokenizer: align or gold), so that "
                "passes are not counted before the run; give num_steps"
            )

    def _samples(self) -> Iterator[str]:
        if self.on_policy and self.optimizer.ema is not None:
            yield (
                f"optimizer.ema is for stages that do not sample, and on_policy={self.on_policy} does, by the last "
                "weights; remove one of both"
            )
        if not self.on_policy:
            if self.sampling is not None or self.rollout != RolloutSection():
                yield "sampling and rollout need on_policy, the share of steps on the student's own samples"
            return
        if self.sampling is None:
            yield f"on_policy={self.on_policy} needs sampling: {{max_tokens: ...}}"
            return
        check_sampling(self.sampling, self.row_tokens, self.rollout)
        check_drafter_stays(self.rollout)
        if self.cache is not None:
            yield ("cache: it holds the teachers' top-k on the dataset, not on samples; remove it or on_policy")
        if self.mix:
            yield "mix: prompts are sampled from one dataset; remove mix or on_policy"

    def _live(self) -> Iterator[str]:
        if self.features is None:
            return
        if self.cache is not None:
            yield "features: a cache holds the teachers' top-k, not their layers; remove one of both"
        if len(self.teachers) > 1:
            yield f"features: need a single teacher, and teachers has {len(self.teachers)}; keep one"
        teacher = self.teachers[0]
        if teacher.outside:
            where = (
                "url"
                if teacher.url is not None
                else "mesh"
                if teacher.mesh is not None
                else f"tokenizer: {teacher.tokenizer}"
            )
            yield (
                f"features: teachers with {where} are not in the training step, nor their layers; remove one of both"
            )

    def _which_teacher(self) -> Iterator[str]:
        check_teachers(self.teachers, self.teacher_column, self.temperature, samples=False)
        if self.train_on_prompt and any(teacher.aligned for teacher in self.teachers):
            yield "teachers: tokenizer: align (or gold) is for completions; set train_on_prompt to false"
        self._check_groups()
        if self.top_k is not None and self.cache is None and not any(teacher.outside for teacher in self.teachers):
            yield f"top_k={self.top_k} needs a cache or a teacher outside of the training step; remove it"
        if self.sampling is not None:
            check_teachers(self.teachers, self.teacher_column, self.sampling.temperature, samples=True, groups=True)

    def _check_groups(self) -> None:
        gold = any(teacher.tokenizer == "gold" for teacher in self.teachers)
        if self.uld_weight is not None and not gold:
            raise ValueError(f"uld_weight={self.uld_weight} needs a teacher with tokenizer: gold; remove it")
        if gold and len(self.teachers) > 1:
            raise ValueError(
                f"teachers: tokenizer: gold is for one teacher, and there are {len(self.teachers)}; use align"
            )
        if gold and self.temperature != 1.0:
            raise ValueError(
                f"temperature={self.temperature}: the log-probabilities of a group (tokenizer: gold) are summed at "
                "temperature 1; leave it out, or use align"
            )


class DrafterOptimizer(SequenceOptimizer):
    """AdamW settings of drafters, which begin with random weights."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-3


class DrafterSection(SequenceSection):
    """Block drafter: a small model that proposes a block of tokens at once from the hidden states of the run's model,
    which stays as it is; for `rollout.speculative: {kind: block, path: ...}`. DFlash, arXiv:2602.06036."""

    kind: Literal["drafter"] = "drafter"
    optimizer: Annotated[DrafterOptimizer | OtherOptimizer, Field(discriminator="kind"), ANY_KIND] = DrafterOptimizer()
    """Optimiser: `adamw`, `lion`, `adafactor`, `muon`, or an optax transformation (`fn`)."""
    tokens: Annotated[int, Field(ge=1, le=16)] = 4
    """Number of tokens of a block."""
    window: Annotated[int, Field(ge=1, le=64)] = 8
    """Number of the newest hidden states that it reads."""
    layers: Annotated[int, Field(ge=1, le=8)] = 1
    """Number of its layers; embedding and head are the model's."""

    def _mistakes(self) -> Iterator[str]:
        if self.router != RouterSection():
            yield "router: the model stays as it is, with its routers; remove it"
        if self.optimizer.qk_clip is not None:
            yield "optimizer.qk_clip: the model stays as it is, with its attention; remove it"
