"""A tiny decoder whose later layers are mixtures of experts: biases, a shared expert, a correction of the choice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from posttrain.mesh import param_sharding
from posttrain.models.config import Compute, MLPConfig, ModelConfig, MoEConfig, RouterConfig, stages_of
from posttrain.models.decoder import Decoder
from posttrain.models.weights import ModelWeights
from tests.tiny import tiny_config

MIXTURE = MoEConfig(
    num_experts=8,
    top_k=3,
    expert=MLPConfig(dim=16, bias=True),
    router=RouterConfig(bias=True, correction=True),
    shared=MLPConfig(dim=12),
    shared_gate=True,
)


def mixture_config(mixture: MoEConfig = MIXTURE, *, num_dense: int = 1, **changes: Any) -> ModelConfig:
    """`tiny_config(**changes)` whose layers from `num_dense` on have the mixture."""
    config = tiny_config(**changes)
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

    def build(seed: Any) -> Decoder:
        return Decoder(config, settings, dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(jax.random.key(seed)))

    @jax.jit
    def draw(seed: Any) -> Any:
        arrays = ModelWeights(build(seed)).read()
        keys = jax.random.split(jax.random.key(seed + 1), len(arrays))
        # So that biases, norms and corrections count.
        noise = {p: 0.1 * jax.random.normal(k, arrays[p].shape) for k, p in zip(keys, sorted(arrays), strict=True)}
        return jax.tree.map(jnp.add, arrays, noise)

    weights = ModelWeights(nnx.eval_shape(build, jnp.uint32(seed)))
    arrays = draw(jnp.uint32(seed))
    if mesh is not None:
        placed = {path: param_sharding(mesh, path, dims, shape) for path, dims, shape in weights.shapes()}
        arrays = jax.device_put(arrays, placed)
    return weights.bind(arrays)
