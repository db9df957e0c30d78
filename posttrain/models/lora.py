"""Low-rank adapters on a decoder's linear layers, arXiv:2106.09685."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Float

from posttrain.config import ConfigError, LoRA
from posttrain.mesh import param_sharding
from posttrain.models.decoder import Decoder
from posttrain.models.layers import Linear
from posttrain.models.weights import ModelWeights


def linears(model: Decoder) -> dict[str, Linear]:
    """Every linear layer under its dotted path, such as `stages.0.blocks.0.attention.q`."""
    found = {path: node for path, node in nnx.iter_graph(model) if isinstance(node, Linear)}
    return {".".join(map(str, path)): node for path, node in found.items()}


def attach_lora(model: Decoder, lora: LoRA, *, seed: int, mesh: Mesh | None = None) -> None:
    """Put an adapter that changes nothing yet on every linear layer that a target matches.

    ConfigError for a target that matches no layer or the head, and for a model that already has an adapter.
    """
    if has_lora(model):
        raise ConfigError("lora: the model already has an adapter; merge it first")
    layers = linears(model)
    chosen = {path for target in lora.targets for path in _matches(target, layers)}
    alpha = 2.0 * lora.rank if lora.alpha is None else lora.alpha
    # Folded, because `init_model` draws the base from the same seed.
    rngs = nnx.Rngs(jax.random.fold_in(jax.random.key(seed), 1))
    for path in sorted(chosen):
        layer = layers[path]
        layer.add_lora(lora.rank, alpha / lora.rank, rngs)
        if mesh is not None:
            for name, variable in {"lora_a": layer.lora_a, "lora_b": layer.lora_b}.items():
                sharding = param_sharding(mesh, f"{path}.{name}", variable.get_metadata("dims"), variable.shape)
                variable.set_value(jax.device_put(variable[...], sharding))


def _matches(target: str, layers: Mapping[str, Linear]) -> list[str]:
    try:
        pattern = re.compile(target)
    except re.error as error:
        raise ConfigError(f"lora.targets: {target!r} is no regular expression: {error}") from error
    found = [path for path in layers if pattern.search(path)]
    if "head" in found:
        raise ConfigError(f"lora.targets: {target!r} matches head, which takes no adapter; use attention, mlp")
    if not found:
        names = sorted({path.split("blocks.")[1].split(".", 1)[1] for path in layers if path != "head"})
        raise ConfigError(f"lora.targets: {target!r} matches no linear layer; there are {', '.join(names)}")
    return found


def has_lora(model: Decoder) -> bool:
    return any(layer.lora_a is not None for layer in linears(model).values())


def delta(layer: Linear) -> Float[Array, "L D F"]:
    """What the adapter adds to the kernel: scale * A B, in float32."""
    a, b = layer.lora_a[...].astype(jnp.float32), layer.lora_b[...].astype(jnp.float32)
    return layer.lora_scale * jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def merged(model: Decoder) -> Decoder:
    """A model without adapter that computes the same: kernels W + scale * A B, added in float32, kept in their type.

    The given model stays as it is; parameters without an adapter are shared with it.
    """
    weights = ModelWeights(model)
    copy = weights.bind(weights.read())
    for layer in linears(copy).values():
        if layer.lora_a is not None:
            kernel = layer.kernel[...]
            layer.kernel.set_value((kernel.astype(jnp.float32) + delta(layer)).astype(kernel.dtype))
            layer.lora_a, layer.lora_b, layer.lora_scale = nnx.data(None), nnx.data(None), 0.0
    return copy


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    trainable: int
    total: int

    @property
    def share(self) -> float:
        return self.trainable / self.total


def count_parameters(model: Decoder) -> ParameterCount:
    """Parameters that training changes, and all of them, the adapter's included."""

    weights = ModelWeights(model)
    return ParameterCount(
        trainable=sum(w.size for w in weights.read(weights.trainable().__contains__).values()),
        total=sum(w.size for w in weights.read().values()),
    )
