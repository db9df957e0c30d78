"""Models, batches and engines as shapes on a mesh, from the fields of a `config.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from posttrain.batch import Batch
from posttrain.config import SamplerTensor
from posttrain.models import hf
from posttrain.models.config import Compute
from posttrain.models.decoder import Decoder
from posttrain.rollout.decode_weights import DecodeWeights, DecodeWeightsCache, Loaded, choose_placement
from posttrain.rollout.programs import DecodeRows, PromptPieces
from posttrain.rollout.runner import Runner
from posttrain.rollout.shapes import Expected
from posttrain.rollout.types import SamplingParams
from posttrain.train.programs import placed_shapes
from posttrain.weights.load import outline_of
from posttrain.weights.state import ModelWeights

POLICY_ARRAYS = ("old_logps", "sampler_logps", "behaviour_logps", "ref_logps", "advantages", "sample_shares")
"""Float arrays of a batch of samples."""


def model_of(fields: Mapping[str, Any], compute: Compute, dtype: np.dtype) -> Decoder:
    """Model as shapes from the fields of a `config.json`."""
    return outline_of(hf.config_from_hf(dict(fields)), compute, dtype)


def batch_of(rows: int, length: int, *, arrays: tuple[str, ...] = ()) -> Batch:
    """Batch [rows, length] for its shapes, without memory for them; `arrays`: optional float arrays that it has."""

    def blank(dtype: type) -> np.ndarray:
        return np.broadcast_to(np.zeros((), dtype), (rows, length))

    batch = Batch(
        tokens=blank(np.int32), positions=blank(np.int32), segments=blank(np.int32), loss_weight=blank(np.float32)
    )
    more: dict[str, Any] = {name: blank(np.float32) for name in arrays}
    return dataclasses.replace(batch, **more)


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
        tensor: SamplerTensor = "auto",
        cache_tokens: int | None = None,
    ):
        """`memory`: bytes of a device; `tensor`: see `NativeEngine`."""
        source = ModelWeights(model)
        arrays = placed_shapes(source, mesh)
        self.loaded = Loaded.of(source, arrays, 0, choose_placement(tensor, source, arrays, memory))
        self.runner = Runner.of(
            self.loaded, slots=slots, max_length=max_length, steps=steps, record=False, cache_tokens=cache_tokens
        )
        params = SamplingParams(max_tokens=max_tokens, temperature=1.0, stop_token_ids=(), key=(0, 0))
        longest = max_length - max_tokens
        calls = self.runner.examples([Expected(params=params, shortest=longest, longest=longest)], rereads=False)
        self.num_programs = len(calls)
        prompts = [call for call in calls if isinstance(call, PromptPieces) and call.context is None]
        rows = [call for call in calls if isinstance(call, DecodeRows)]
        self.prompts = max(prompts, key=lambda call: call.tokens.size)
        """Inputs of the largest prefill call of whole prompts."""
        self.rows = max(rows, key=lambda call: call.context.size)
        """Inputs of the decode call with all slots and the widest table."""

    @cached_property
    def weights(self) -> DecodeWeights:
        """Shapes of the weights that both programs read: the trainer's own, and those made for sampling."""
        return DecodeWeightsCache().shapes(self.loaded)

    def lower_prefill(self) -> jax.stages.Lowered:
        return self.runner.lower(self.loaded, self.prompts)

    def lower_decode(self) -> jax.stages.Lowered:
        return self.runner.lower(self.loaded, self.rows)
