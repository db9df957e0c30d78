"""Rollout engine of a stage: the built-in one, or one named in the configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from posttrain.config import RolloutSection
from posttrain.config.locator import callable_of
from posttrain.data.tokenizer import Tokenizer
from posttrain.errors import ConfigError
from posttrain.models.config import MoEConfig
from posttrain.models.decoder import Decoder
from posttrain.rl.metrics import EXACT, ROUNDED, SamplerGate
from posttrain.rl.sampler import Sampler
from posttrain.rollout.engine import NativeEngine
from posttrain.rollout.shapes import Expected
from posttrain.rollout.trajectory import Example
from posttrain.rollout.types import RolloutEngine
from posttrain.weights.quantize import is_quantized
from posttrain.weights.state import ModelWeights

EngineFactory = Callable[[Decoder, Tokenizer, RolloutSection], Any]


def engine_of(section: RolloutSection) -> EngineFactory | None:
    """Resolve the section's engine factory; None: the built-in engine. ConfigError for an object that is no factory."""
    if section.engine is None:
        return None
    found = callable_of(section.engine, "rollout.engine")
    methods = ("generate", "update_weights", "close")
    # A function may be a factory too; its result is checked when it is made.
    if isinstance(found, type) and (lacks := [name for name in methods if not hasattr(found, name)]):
        raise ConfigError(f"rollout.engine: {section.engine} has no method {', '.join(lacks)}; implement it")
    return found


def make_engine(
    model: Decoder,
    tokenizer: Tokenizer,
    section: RolloutSection,
    factory: EngineFactory | None,
    *,
    slots: int,
    max_length: int,
) -> RolloutEngine:
    """Make the rollout engine. `slots`: default for the built-in engine."""
    if factory is not None:
        made = factory(model, tokenizer, section)
        if not isinstance(made, RolloutEngine):
            raise ConfigError(f"rollout.engine: {section.engine} made a {type(made).__name__}, no RolloutEngine")
        return made
    return NativeEngine(
        model,
        slots=section.slots or slots,
        max_length=max_length,
        decode_steps=section.decode_steps,
        tokenizer_decode=tokenizer.decode,
        version=0,
        record_routing=section.record_routing,
        quantize=section.quantize,
        merge_lora=section.merge_lora,
        cache_tokens=section.cache_tokens,
        tensor=section.tensor,
    )


def sampler_gate(model: Decoder, section: RolloutSection) -> SamplerGate:
    """Veto on updates of a model with samples of this engine, by the precision of its numbers.

    A mixture of experts counts as rounded: rounding may send a token to another expert.
    """
    plain = section.quantize == "none" and not is_quantized(model) and model.compute.dtype == jnp.float32
    mixture = any(isinstance(block.mlp, MoEConfig) for stage in model.config.stages for block in stage.blocks)
    # Accelerators multiply float32 in lower precision by default.
    exact = plain and not mixture and jax.default_backend() == "cpu"
    exact &= all(struct.dtype == jnp.float32 for struct in ModelWeights(model).structs().values())
    return SamplerGate(rounding=EXACT if exact else ROUNDED)


def warm_up(
    engine: RolloutEngine,
    section: RolloutSection,
    prompts: Sequence[tuple[Sampler, Sequence[Example]]],
    *,
    rereads: bool = False,
) -> None:
    """Compile the programs that the built-in engine needs for these prompts, if the section enables it. `rereads`:
    samples may be resumed by later steps."""
    if section.warm_up and isinstance(engine, NativeEngine):
        expected = []
        for sampler, examples in prompts:
            lengths = [len(example.prompt_tokens) for example in examples]
            turns = sampler.conversations
            longest = max(lengths) if turns is None else turns.row_tokens - 1
            expected.append(Expected(params=sampler.params(0, 0), shortest=min(lengths), longest=longest))
        # A failed sample ends the step, discarding the samples beside it.
        engine.warm_up(expected, rereads=rereads)


def engine_metrics(engine: RolloutEngine) -> dict[str, float]:
    """Metrics of the built-in engine; none of others."""
    return engine.metrics() if isinstance(engine, NativeEngine) else {}


def forget_prompts(engine: RolloutEngine) -> None:
    """Clear the built-in engine's prefix cache after other prompts than those of training: keys and values in it would
    change the rounding of training samples."""
    if isinstance(engine, NativeEngine):
        engine.forget_prompts()
