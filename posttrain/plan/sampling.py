"""Sampling of a stage as programs of shapes: layout of the weights, prompts and tokens, with their work."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from posttrain.config import RLSection, RolloutSection
from posttrain.models.activations import attention_flops
from posttrain.models.cache import windows_of
from posttrain.models.decoder import Decoder, decoding_config
from posttrain.plan.lowered import active_parameters, bytes_on_device, sizes_of, total_parameters
from posttrain.plan.report import CACHE, DECODE, LAYOUT, PREFILL, Held, Phase, beside
from posttrain.rollout.blocks import BLOCK
from posttrain.rollout.decode_weights import DecodeLayout, DecodeWeights, Loaded, choose_placement
from posttrain.rollout.programs import Expected, PromptPieces
from posttrain.rollout.runner import Runner
from posttrain.rollout.speculative import SpeculativeRows
from posttrain.rollout.types import SamplingParams
from posttrain.stages.cluster import engine_slots
from posttrain.train.programs import placed_shapes
from posttrain.weights.state import ModelWeights

DEFAULTS = RolloutSection()

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
    ):
        """`memory`: bytes of a device; `settings`: split of the weights, cache."""
        source, self.mesh = ModelWeights(model), mesh
        arrays = placed_shapes(source, mesh)
        placement = choose_placement(settings.tensor, source, arrays, memory, slots=slots)
        self.loaded = Loaded.of(source, arrays, 0, placement)
        cache: dict[str, Any] = {"cache_tokens": settings.cache_tokens, "kind": settings.cache_dtype}
        self.runner = Runner.of(self.loaded, slots=slots, max_length=max_length, steps=steps, record=False, **cache)
        params = SamplingParams(max_tokens=max_tokens, temperature=1.0, stop_token_ids=(), key=(0, 0))
        longest = max_length - max_tokens
        calls = self.runner.examples([Expected(params=params, shortest=longest, longest=longest)], rereads=False)
        self.num_programs = len(calls)
        prompts = [call for call in calls if isinstance(call, PromptPieces) and call.context is None]
        self.prompts = max(prompts, key=lambda call: call.tokens.size)
        """Inputs of the largest prefill call of whole prompts."""
        plain = (call for call in calls if not isinstance(call, PromptPieces | SpeculativeRows))
        self.rows = max(plain, key=lambda call: call.context.size)
        """Inputs of the decode call with all slots and the widest table."""

    @classmethod
    def of(cls, section: RLSection, model: Decoder, mesh: Mesh, memory: int) -> RolloutShapes:
        """Engine of a stage on a mesh; the model is that of the trainer."""
        there: Decoder = nnx.merge(*nnx.split(model))
        there.compute = dataclasses.replace(model.compute, mesh=mesh)
        return cls(
            there,
            mesh,
            slots=engine_slots(section),
            max_length=section.sequence_tokens,
            steps=section.rollout.decode_steps,
            max_tokens=section.sampling.max_tokens,
            memory=memory,
            settings=section.rollout,
        )

    @property
    def layout(self) -> DecodeLayout:
        return self.runner.programs.layout_of(self.loaded)

    @cached_property
    def weights(self) -> DecodeWeights:
        """Shapes of the weights that both programs read: the trainer's own, and those made for sampling."""
        return self.layout.shapes(self.loaded)

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


def sampling_phases(section: RLSection, rollout: RolloutShapes, held: Sequence[Held], own: str) -> Iterator[Phase]:
    """Layout of the weights, if any are laid out, once a step; then prompts and tokens. `own`: name of the weights."""
    model, devices, prompts = rollout.loaded.source.model, rollout.mesh.size, rollout.prompts.tokens
    arrays, derived = rollout.loaded.arrays, dict(enumerate(rollout.weights.derived))
    shared: dict[str, Any] = {
        "role": "sampler",
        "mesh": rollout.mesh,
        "parameters": sizes_of(arrays) | sizes_of(derived),
    }
    if derived:
        yield Phase(
            name=LAYOUT,
            lower=lambda: rollout.layout.lowered,
            runs=1,
            trips=(),
            flops=0.0,
            read=float(bytes_on_device(arrays) + bytes_on_device(derived)),
            own={own: bytes_on_device(arrays)},
            beside=beside(held, rollout.mesh, LAYOUT, own),
            **shared,
        )
    # What the sampler has elsewhere lies beside the trainer's.
    unread = bytes_on_device(arrays) - bytes_on_device(rollout.weights.own)
    there = beside(held, rollout.mesh, DECODE, own, CACHE) | ({"weights before layout": unread} if unread else {})
    active, weights = active_parameters(model), bytes_on_device(rollout.weights)
    pool = bytes_on_device(rollout.runner.pool_shapes(rollout.loaded))
    prompt_tokens = section.sequence_tokens - section.sampling.max_tokens
    yield Phase(
        name=PREFILL,
        lower=rollout.lower_prefill,
        # Samples of a group share their prompt's blocks.
        runs=math.ceil(section.prompts_per_step * prompt_tokens / prompts.size),
        trips=(),
        flops=(2 * active * prompts.size + attention_flops(model.config, *prompts.shape)) / devices,
        read=float(weights),
        own={WEIGHTS_READ: weights, CACHE: pool},
        beside=there,
        **shared,
    )
    slots = rollout.rows.tokens.shape[0]
    mean_length = prompt_tokens + section.sampling.max_tokens / 2
    yield Phase(
        name=DECODE,
        lower=rollout.lower_decode,
        runs=section.max_sampled_tokens * math.ceil(section.samples_per_step / slots),
        trips=(1,),
        flops=2 * active * slots / devices,
        read=weights * active / total_parameters(model) + rollout.cache_read(mean_length),
        own={WEIGHTS_READ: weights, CACHE: pool},
        beside=there,
        **shared,
    )
