"""Sampling and scoring of a stage as programs of shapes: layout of the weights, prompts, tokens, and passes of models
that only score, with their work."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from posttrain.batch import IMAGE_ARRAYS, Batch, rows_per_pass
from posttrain.cluster.reference import FrozenModel
from posttrain.config import BlockDrafts, DistillSection, Drafts, ImageSection, OnlineSection, RLSection, RolloutSection
from posttrain.distill.teachers import DEFAULT_TOP_K
from posttrain.mesh import row_shards
from posttrain.models.activations import attention_flops
from posttrain.models.cache import windows_of
from posttrain.models.decoder import Decoder, decoding_config
from posttrain.models.vision.tower import ImagePatches
from posttrain.plan.lowered import (
    batch_of,
    bytes_on_device,
    features_of,
    pictures_of,
    sizes_of,
    total_parameters,
    tower_flops,
    vocabulary_trips,
)
from posttrain.plan.report import (
    CACHE,
    COPYING,
    DECODE,
    DRAFT,
    DRAFT_CACHE,
    DRAFTED,
    ENCODE,
    LAYOUT,
    PREFILL,
    QUANTIZED,
    REFERENCE,
    REWARD_MODELS,
    REWARDS,
    SCORES,
    STATISTICS,
    TEACHERS,
    Held,
    Phase,
    beside,
)
from posttrain.reward.model import scored_shape
from posttrain.rollout.blocks import BLOCK
from posttrain.rollout.decode_weights import DecodeLayout, DecodeWeights, Loaded, choose_placement
from posttrain.rollout.decoding import DecodeRows
from posttrain.rollout.drafting import Speculation, find_drafter
from posttrain.rollout.programs import Expected, PromptPieces
from posttrain.rollout.runner import Runner
from posttrain.rollout.speculative import SpeculativeRows
from posttrain.rollout.types import SamplingParams
from posttrain.stages.cluster import engine_slots
from posttrain.train.programs import placed_shapes
from posttrain.tree import replace
from posttrain.weights.quantize import Copies, CopyShapes
from posttrain.weights.state import ModelWeights, WeightShapes, active_parameters

DEFAULTS = RolloutSection()


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Samples of a step, and the engine's settings for them."""

    rollout: RolloutSection
    slots: int
    prompts: int
    samples: int
    length: int
    """Tokens of the longest sample, with its prompt."""
    answer_tokens: int
    """Tokens that are sampled at once, at most."""
    tokens: int
    """Tokens that are sampled of a sample, at most."""
    share: float = 1.0
    """Share of the steps that sample."""
    keeps_copy: bool = False
    """True if samples of the weights before go on while their copy is made anew."""

    @classmethod
    def of(cls, section: OnlineSection | DistillSection) -> Sampled:
        assert section.sampling is not None
        common: dict[str, Any] = {
            "rollout": section.rollout,
            "length": section.sequence_tokens,
            "answer_tokens": section.sampling.max_tokens,
        }
        if isinstance(section, DistillSection):
            rows, share = section.batch_rows, section.on_policy
            own: dict[str, Any] = {"samples": rows, "tokens": section.sampling.max_tokens, "share": share}
            return cls(slots=section.rollout.slots or rows, prompts=rows, **own, **common)
        return cls(
            slots=engine_slots(section),
            prompts=section.prompts_per_step,
            samples=section.samples_per_step,
            tokens=section.max_sampled_tokens,
            keeps_copy=isinstance(section, RLSection) and section.asynchronous is not None,
            **common,
        )

    @property
    def prompt_tokens(self) -> int:
        return self.length - self.answer_tokens


WEIGHTS_READ = "weights as they are sampled from"
"""Name of what prefill and decode read."""


class RolloutShapes:
    """Rollout engine as shapes: its largest prefill call and its largest decode call."""

    def __init__(
        self,
        model: Decoder,
        mesh: Mesh,
        *,
        slots: int,
        max_length: int,
        steps: int,
        max_tokens: int,
        memory: int,
        settings: RolloutSection = DEFAULTS,
        draft: Decoder | None = None,
        image: ImageSection | None = None,
    ):
        """`memory`: bytes of a device; `settings`: split and copies of the weights, cache, drafts; `draft`: their
        model; `image`: limits of the pictures that prompts of a model with a tower are full of, None: of text."""
        source, self.mesh = ModelWeights(model), mesh
        self.base = arrays = placed_shapes(source, mesh)
        self.copy: CopyShapes | None = None
        if settings.quantize != "none" or settings.merge_lora:
            self.copy = Copies(settings.quantize).shapes(model, arrays)
            source, arrays = self.copy.outline, {**self.copy.shared, **self.copy.own}
        placement = choose_placement(settings.tensor, source, arrays, memory, slots=slots)
        self.loaded = Loaded.of(source, arrays, 0, placement)
        cache: dict[str, Any] = {"cache_tokens": settings.cache_tokens, "kind": settings.cache_dtype}
        if settings.speculative is not None:
            cache["speculation"] = _speculation(settings.speculative, model, draft, mesh)
        record = settings.record_routing
        self.runner = Runner.of(self.loaded, slots=slots, max_length=max_length, steps=steps, record=record, **cache)
        params = SamplingParams(max_tokens=max_tokens, temperature=1.0, stop_token_ids=(), key=(0, 0))
        longest = max_length - max_tokens
        calls = self.runner.examples([Expected(params=params, shortest=longest, longest=longest)], rereads=False)
        self.num_programs = len(calls)
        prompts = [call for call in calls if isinstance(call, PromptPieces) and call.context is None]
        self.prompts = max(prompts, key=lambda call: call.tokens.size)
        """Inputs of the largest prefill call of whole prompts."""
        self.pictures: ImagePatches | None = None
        """Inputs of the largest call of the tower."""
        if image is not None and model.config.vision is not None:
            shape, lanes = self.prompts.tokens.shape, self.runner.shapes.lanes
            self.prompts = replace(self.prompts, images=features_of(model, *shape))
            in_lane = self.runner.shapes.slots * longest
            self.pictures = pictures_of(model.config, lanes, longest, in_lane, image)
        plain = (call for call in calls if isinstance(call, DecodeRows))
        self.rows = max(plain, key=lambda call: call.context.size)
        """Inputs of the decode call with all slots and the widest table."""
        drafted = (call for call in calls if isinstance(call, SpeculativeRows))
        self.drafted = max(drafted, key=lambda call: call.rows.context.size, default=None)
        """The same with drafts."""

    @classmethod
    def of(
        cls,
        sampled: Sampled,
        model: Decoder,
        mesh: Mesh,
        memory: int,
        draft: Decoder | None = None,
        image: ImageSection | None = None,
    ) -> RolloutShapes:
        """Engine of a stage on a mesh; the model is that of the trainer."""
        there: Decoder = nnx.merge(*nnx.split(model))
        there.compute = dataclasses.replace(model.compute, mesh=mesh)
        return cls(
            there,
            mesh,
            slots=sampled.slots,
            max_length=sampled.length,
            steps=sampled.rollout.decode_steps,
            max_tokens=sampled.answer_tokens,
            memory=memory,
            settings=sampled.rollout,
            draft=draft,
            image=image,
        )

    @property
    def layout(self) -> DecodeLayout:
        return self.runner.programs.layout_of(self.loaded)

    @cached_property
    def weights(self) -> DecodeWeights:
        """Shapes of the weights that both programs read: the trainer's own, and those made for sampling."""
        return self.layout.shapes(self.loaded)

    @property
    def unread(self) -> int:
        """Bytes on a device of weights that are there, but not read as they lie."""
        own = {} if self.copy is None else self.copy.own
        return bytes_on_device((self.base, own)) - bytes_on_device(self.weights.own)

    @property
    def draft(self) -> Loaded | None:
        """Draft model as it is sampled from."""
        drafter = self.runner.drafter
        return None if drafter is None else drafter.loaded

    @cached_property
    def draft_sizes(self) -> dict[str, int]:
        """Bytes on a device of what drafts: of a draft model also its cache with weights made for sampling."""
        if self.draft is None:
            block = {} if self.runner.drafter is None else self.runner.drafter.weights
            return {DRAFT: bytes_on_device(block)} if block else {}
        derived = self.runner.programs.layout_of(self.draft).derived
        pool = bytes_on_device(self.runner.draft_pool_shapes(self.draft))
        return {DRAFT: bytes_on_device(self.draft.arrays), DRAFT_CACHE: pool + bytes_on_device(derived)}

    def draft_read(self, draft: Loaded) -> tuple[dict[str, int], int]:
        """Bytes on a device of the draft model's weights that are read as they lie, by name, and of the others."""
        read = bytes_on_device(self.runner.programs.layout_of(draft).shapes(draft).own)
        return {DRAFT: read}, bytes_on_device(draft.arrays) - read

    def cache_read(self, length: float) -> float:
        """Bytes of the cache that a device reads for a token of every slot, whose rows have so many positions."""
        shapes, model = self.runner.pool_shapes(self.loaded), self.loaded.source.model
        windows, rows = windows_of(decoding_config(model.config, self.mesh)), self.rows.tokens.shape[0]
        stored = [
            (x, window) for arrays in (shapes.keys, shapes.values) for x, window in zip(arrays, windows, strict=True)
        ]
        return sum(
            bytes_on_device(x) * min(1.0, min(length, window or length) * rows / (x.shape[1] * x.shape[2] * BLOCK))
            for x, window in stored
            if x is not None
        )

    def lower_prefill(self) -> jax.stages.Lowered:
        return self.runner.lower(self.loaded, self.prompts)

    def lower_decode(self) -> jax.stages.Lowered:
        return self.runner.lower(self.loaded, self.rows)


def sampling_phases(sampled: Sampled, rollout: RolloutShapes, held: Sequence[Held], own: str) -> Iterator[Phase]:
    """Layout of the weights, if any are laid out, once a step; then prompts and tokens. `own`: name of the weights."""
    model, devices, prompts = rollout.loaded.source.model, rollout.mesh.size, rollout.prompts.tokens
    shared: dict[str, Any] = {
        "role": "sampler",
        "mesh": rollout.mesh,
        "parameters": sizes_of(rollout.base)
        | sizes_of(rollout.loaded.arrays)
        | sizes_of(dict(enumerate(rollout.weights.derived))),
    }
    yield from _made_for_sampling(sampled, rollout, held, own, shared)
    # What the sampler has elsewhere lies beside the trainer's.
    unread = {"weights before layout": rollout.unread} if rollout.unread else {}
    there = beside(held, rollout.mesh, DECODE, own, QUANTIZED, CACHE) | unread
    active, weights = active_parameters(model), bytes_on_device(rollout.weights)
    pool = bytes_on_device(rollout.runner.pool_shapes(rollout.loaded))
    if (pictures := rollout.pictures) is not None:
        yield _encoding(sampled, rollout, pictures, {WEIGHTS_READ: weights, CACHE: pool}, there, shared)
    yield Phase(
        name=PREFILL,
        lower=rollout.lower_prefill,
        # Samples of a group share their prompt's blocks.
        runs=sampled.share * math.ceil(sampled.prompts * sampled.prompt_tokens / prompts.size),
        trips=(),
        flops=(2 * active * prompts.size + attention_flops(model.config, *prompts.shape)) / devices,
        read=float(weights),
        own={WEIGHTS_READ: weights, CACHE: pool},
        beside=there,
        **shared,
    )
    slots = rollout.rows.tokens.shape[0]
    mean_length = sampled.prompt_tokens + sampled.answer_tokens / 2
    yield Phase(
        name=DECODE,
        lower=rollout.lower_decode,
        runs=sampled.share * sampled.tokens * math.ceil(sampled.samples / slots),
        trips=(1,),
        flops=2 * active * slots / devices,
        read=weights * active / total_parameters(model) + rollout.cache_read(mean_length),
        own={WEIGHTS_READ: weights, CACHE: pool},
        beside=there,
        **shared,
    )
    if rollout.drafted is not None:
        yield _drafted(rollout, {WEIGHTS_READ: weights, CACHE: pool}, there, shared)


def _made_for_sampling(
    sampled: Sampled, rollout: RolloutShapes, held: Sequence[Held], own: str, shared: dict[str, Any]
) -> Iterator[Phase]:
    """Copy of the weights that is sampled from, and its layout, if they are."""
    base, arrays, derived = rollout.base, rollout.loaded.arrays, rollout.weights.derived
    work: dict[str, Any] = {"runs": sampled.share, "trips": (), "flops": 0.0}
    if (copy := rollout.copy) is not None:
        # Where samples go on meanwhile, those of the old weights stay.
        names = (own,) if sampled.keeps_copy else (own, QUANTIZED)
        yield Phase(
            name=COPYING,
            lower=lambda: copy.lowered,
            read=float(bytes_on_device(base) + bytes_on_device(copy.own)),
            own={own: bytes_on_device(base)},
            beside=beside(held, rollout.mesh, COPYING, *names),
            **work,
            **shared,
        )
    if derived:
        unlaid = bytes_on_device((base, {} if copy is None else copy.own)) - bytes_on_device(arrays)
        yield Phase(
            name=LAYOUT,
            lower=lambda: rollout.layout.lowered,
            read=float(bytes_on_device(arrays) + bytes_on_device(derived)),
            own={own: bytes_on_device(arrays)},
            beside=beside(held, rollout.mesh, LAYOUT, own, QUANTIZED) | ({"other weights": unlaid} if unlaid else {}),
            **work,
            **shared,
        )


def _encoding(
    sampled: Sampled,
    rollout: RolloutShapes,
    pictures: ImagePatches,
    own: dict[str, int],
    there: dict[str, int],
    shared: dict[str, Any],
) -> Phase:
    """Features of the pictures of a step, whose prompts are full of them; those of a group are encoded once."""
    config, places = rollout.loaded.source.model.config, np.asarray(pictures.patch_places)
    vision = config.vision
    assert vision is not None
    rows, size = pictures.patch_images.shape
    work = vision.work(np.asarray(pictures.patch_images[:1]), places[:1])
    in_prompt = sampled.prompt_tokens * vision.merge**2
    tower = {name: x for name, x in rollout.base.items() if name.startswith("tower")}
    return Phase(
        name=ENCODE,
        lower=lambda: rollout.runner.lower(rollout.loaded, pictures),
        runs=sampled.share * math.ceil(sampled.prompts * in_prompt / (rows * size)),
        trips=(),
        flops=rows * work.total / rollout.mesh.size,
        tower=rows * work.total / rollout.mesh.size,
        read=float(bytes_on_device(tower)),
        own=own,
        beside=there,
        **shared,
    )


def _speculation(drafts: Drafts, model: Decoder, draft: Decoder | None, mesh: Mesh) -> Speculation:
    if isinstance(drafts, BlockDrafts):
        found = find_drafter(drafts, model.config)
        return Speculation(tokens=drafts.tokens or found.config.tokens, block=found)
    weights = None if draft is None else placed_shapes(ModelWeights(draft), mesh)
    return Speculation(tokens=drafts.tokens, model=draft, weights=weights)


def _drafted(rollout: RolloutShapes, own: dict[str, int], there: dict[str, int], shared: dict[str, Any]) -> Phase:
    """Decoding with drafts. `own`: arrays of the model, `there`: what lies beside a program without drafts."""
    drafted, sizes = rollout.drafted, rollout.draft_sizes
    assert drafted is not None
    read, unread = ({}, 0) if rollout.draft is None else rollout.draft_read(rollout.draft)
    return Phase(
        name=DRAFTED,
        lower=lambda: rollout.runner.lower(rollout.loaded, drafted),
        # How many tokens a pass of the model makes is known when it runs.
        runs=0,
        trips=(1,),
        flops=0.0,
        read=0.0,
        own=own | sizes | read,
        beside={name: size for name, size in there.items() if name not in sizes}
        | ({"draft model before layout": unread} if unread else {}),
        **shared,
    )


def held_by_engine(rollout: RolloutShapes, *, given_up: bool) -> Iterator[Held]:
    """Arrays of the engine; `given_up`: its cache is, where a step samples and then learns."""
    during = [LAYOUT, ENCODE, PREFILL, DECODE, DRAFTED] if given_up else None
    pool = bytes_on_device(rollout.runner.pool_shapes(rollout.loaded))
    yield Held(name=CACHE, mesh=rollout.mesh, size=pool, only_in=during)
    if rollout.copy is not None:
        yield Held(name=QUANTIZED, mesh=rollout.mesh, size=bytes_on_device(rollout.copy.own))
    for name, size in rollout.draft_sizes.items():
        yield Held(name=name, mesh=rollout.mesh, size=size, only_in=during if name == DRAFT_CACHE else None)


def held_scorer(model: Decoder, mesh: Mesh, name: str = TEACHERS) -> Held:
    """Weights of a model that only scores."""
    return Held(name=name, mesh=mesh, size=bytes_on_device(placed_shapes(ModelWeights(model), mesh)))


def teacher_phases(
    section: DistillSection | RLSection, teachers: Sequence[tuple[Decoder, Mesh]], held: Sequence[Held], like: Batch
) -> Iterator[Phase]:
    """Scores of teachers outside of the training step: log-probabilities of samples, or the top-k of rows; of rows
    `like` those of a batch."""
    for model, mesh in teachers:
        there = _beside_scorer(held, model, mesh, SCORES, TEACHERS)
        yield _of_rows(section, model, mesh, like, role="teacher", name=SCORES, held=TEACHERS, there=there)


def reference_phase(section: OnlineSection, model: Decoder, mesh: Mesh, held: Sequence[Held], like: Batch) -> Phase:
    """Log-probabilities of a reference with all of its weights."""
    there = beside(held, mesh, STATISTICS, REFERENCE)
    return _of_rows(section, model, mesh, like, role="reference", name=STATISTICS, held=REFERENCE, there=there)


def _of_rows(
    section: DistillSection | OnlineSection,
    model: Decoder,
    mesh: Mesh,
    like: Batch,
    *,
    role: str,
    name: str,
    held: str,
    there: Mapping[str, int],
) -> Phase:
    total, updates = section.step_rows, section.updates if isinstance(section, RLSection) else 1
    rows = rows_per_pass(total, section.pass_rows, row_shards(mesh))
    pictures = {name: None if (x := getattr(like, name)) is None else x[:rows] for name in IMAGE_ARRAYS}
    batch = replace(batch_of(rows, section.row_tokens), **pictures)
    if isinstance(section, DistillSection):
        k = min(section.top_k or DEFAULT_TOP_K, model.config.num_tokens or model.config.vocab_size)
        lower = FrozenModel(model, mesh, temperature=section.temperature, rows=rows, k=k).lower_top_k
    else:
        lower = FrozenModel(model, mesh, temperature=section.sampling.temperature, rows=rows).lower_logps
    trips = (vocabulary_trips(mesh, rows, section.row_tokens, model.config.vocab_size),)
    runs = -(-total // rows) * updates
    return _scoring(model, mesh, batch, lower, role=role, name=name, held=held, runs=runs, trips=trips, beside=there)


def reward_phases(sampled: Sampled, models: Sequence[Decoder], mesh: Mesh, held: Sequence[Held]) -> Iterator[Phase]:
    """Scores of all samples of a step by reward models, each sample in a row that is as long as the longest."""
    for model in models:
        rows, width = scored_shape(sampled.samples, sampled.length, mesh, model.config.max_positions)
        lower = FrozenModel(model, mesh, temperature=1.0, rows=rows).lower_scores
        there = _beside_scorer(held, model, mesh, REWARDS, REWARD_MODELS)
        work: dict[str, Any] = {"role": "reward model", "name": REWARDS, "held": REWARD_MODELS, "runs": 1, "trips": ()}
        yield _scoring(model, mesh, batch_of(rows, width), lower, beside=there, **work)


def _scoring(
    model: Decoder,
    mesh: Mesh,
    batch: Batch,
    lower: Callable[[WeightShapes, Batch], jax.stages.Lowered],
    *,
    held: str,
    **work: Any,
) -> Phase:
    """One pass of a model with all of its weights, `held` by a name."""
    weights, tower = placed_shapes(ModelWeights(model), mesh), tower_flops(model, batch, None)
    rows, length = batch.shape
    flops = 2 * active_parameters(model) * rows * length + attention_flops(model.config, rows, length)
    return Phase(
        lower=lambda: lower(weights, batch),
        flops=(flops + tower) / mesh.size,
        tower=tower / mesh.size,
        read=float(bytes_on_device(weights)),
        own={held: bytes_on_device(weights)},
        parameters=sizes_of(weights),
        mesh=mesh,
        **work,
    )


def _beside_scorer(held: Sequence[Held], model: Decoder, mesh: Mesh, phase: str, name: str) -> dict[str, int]:
    """Bytes beside a model that scores: of those with its `name` on these devices, it is an argument."""
    there, own = beside(held, mesh, phase), held_scorer(model, mesh).size
    left = there.pop(name, own) - own
    return there | ({f"other {name}": left} if left else {})
