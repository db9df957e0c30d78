"""A tiny decoder whose later layers are mixtures of experts: biases, a shared expert, a correction of the choice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from posttrain.mesh import param_sharding
from posttrain.models.config import Compute, MLPConfig, ModelConfig, MoEConfig, RouterConfig, stages_of
from posttrain.models.decoder import Decoder
from tests.tiny import WINDOW, outline, tiny_config

MIXTURE = MoEConfig(
    num_experts=8,
    top_k=3,
    expert=MLPConfig(dim=16, bias=True),
    router=RouterConfig(bias=True, correction=True),
    shared=MLPConfig(dim=12),
    shared_gate=True,
)


def mixture_config(mixture: MoEConfig = MIXTURE, *, num_dense: int = 1, **changes: Any) -> ModelConfig:
    """`tiny_config(**changes)` whose layers from `num_dense` on have the mixture: by default two of three."""
    config = tiny_config(**{"windows": (None, WINDOW, None)} | changes)
    blocks = [replace(b, mlp=mixture) if i >= num_dense else b for i, b in enumerate(config.blocks)]
    return replace(config, stages=stages_of(tuple(blocks)))


def mixture_model(
    config: ModelConfig | None = None,
    *,
    seed: int = 0,
    dtype: DTypeLike = jnp.float32,
    mesh: Mesh | None = None,
    **compute: Any,
) -> Decoder:
    """Random weights, no bias and no norm at its first value; on a mesh the same ones, split."""
    config = mixture_config() if config is None else config
    settings = Compute(dtype=jnp.dtype(dtype), mesh=mesh, **compute)
    weights = outline(config, settings, jnp.dtype(jnp.float32))
    # Not JAX's numbers, whose programs take longer to compile than the model.
    draw = np.random.default_rng(seed)
    arrays = {
        path: jnp.asarray(draw.normal(float(path.endswith("scale")), 0.2, shape), jnp.float32)
        for path, _, shape in weights.shapes()
    }
    if mesh is not None:
        placed = {path: param_sharding(mesh, path, dims, shape) for path, dims, shape in weights.shapes()}
        arrays = jax.device_put(arrays, placed)
    return weights.bind(arrays)
