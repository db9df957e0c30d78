"""Rollout engine."""

from __future__ import annotations

from pydantic import model_validator

from posttrain.config.base import Flag, PositiveInt, RolloutQuantize, SamplerTensor, Section
from posttrain.config.locator import Locator


class RolloutSection(Section):
    """Rollout engine."""

    slots: PositiveInt | None = None
    """Maximum number of sequences decoded concurrently; by default all samples of a step."""
    decode_steps: PositiveInt = 32
    """Maximum number of tokens decoded per dispatch."""
    record_routing: Flag = False
    """Record the sampler's MoE routing and replay it in training (R3), arXiv:2510.11370."""
    quantize: RolloutQuantize = "none"
    """Sample from a copy of the weights in 8 bits (adapters merged), remade after every update; also in evaluations.
    Its error: `sampling/logp_difference/mean`. The copy (`rollout/copy_mib`) needs memory in addition to the trainer's
    weights; with `none` there is no copy. It is smaller than that of `merge_lora`, and faster only if decoding is
    limited by memory bandwidth: matrices are dequantized layer by layer to `compute_dtype`, also from fp8, which most
    platforms emulate (the run reports it)."""
    merge_lora: Flag = False
    """Sample from a copy of the weights with the LoRA adapter merged, remade after every update: faster decoding for
    more memory."""
    tensor: SamplerTensor = "auto"
    """Number of devices that each weight is split over while samples run; the other devices hold copies and sample rows
    of their own. A trainer's `mesh.fsdp` would gather every weight at every token: where it is above 1 the weights are
    laid out anew once after each update, which takes memory until the samples are done. `auto`: the smallest number
    from `mesh.tensor` to `mesh.fsdp` x `mesh.tensor` with which the copy takes at most a quarter of a device's memory;
    `trained`, no copy, if none does and where `mesh.fsdp` is 1."""
    cache_tokens: PositiveInt | None = None
    """KV cache size in tokens; by default `slots` sequences of `row_tokens`. A smaller cache preempts the youngest
    samples and recomputes them later; a larger one keeps more shared prefixes."""
    warm_up: Flag = True
    """Compile all programs that the dataset's prompts can need before the first step; otherwise each when first used.
    """
    engine: Locator | None = None
    """Custom rollout engine: `module:Engine` or `file.py:Engine`, called with (model, tokenizer, this section), with
    the methods of `posttrain.rollout.types.RolloutEngine`. The fields above apply to the built-in engine only."""

    @model_validator(mode="after")
    def _of_the_engine(self) -> RolloutSection:
        plain = RolloutSection.model_construct()
        others = [name for name in RolloutSection.model_fields if getattr(self, name) != getattr(plain, name)]
        if self.engine is not None and (others := [name for name in others if name != "engine"]):
            raise ValueError(f"{', '.join(others)}: supported by the built-in engine, not by {self.engine}; remove it")
        return self
