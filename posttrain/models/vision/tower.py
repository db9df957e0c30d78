"""Vision towers: parameters as the checkpoint has them, the layers that all towers share, placement of features."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Int, UInt8

from posttrain.batch import IMAGE_ARRAYS, Batch, HostArray, ImageFeatures
from posttrain.errors import ConfigError
from posttrain.kernels.attention.dispatch import attention
from posttrain.models.activations import rematerialized
from posttrain.models.adapter import Adapter
from posttrain.models.config import Compute, Encoded, Images, ModelConfig, Role, TowerTensor, VisionConfig
from posttrain.models.layers import Adaptable, Init, normal, param, rms_normed
from posttrain.models.rope import Tables, apply_rope, default_frequencies
from posttrain.tree import pytree

LAYERS = "layers."
"""Beginning of the keys of tensors that are stacked over a tower's layers."""

PROJECTOR = "projector."
"""Beginning of the keys of the projector's tensors."""

UNREAD = re.compile(
    r"(model\.)?(vision_tower\.(vision_model\.)?(head\.|embeddings\.position_ids$)|audio_tower\.|embed_audio\.)"
)
"""Tensors of multimodal checkpoints that nothing here reads: SigLIP's pooling head and position ids, sound."""

PLACES = ("image_rows", "images")
"""Arrays of `Batch` that place features at tokens."""

Params = Mapping[str, Array]

Names = Callable[[str], str | None]


@pytree
class ImageInputs:
    """Arrays of a batch's images, as in `Batch`; without patches those of text in a model with multimodal RoPE."""

    rope_positions: Int[Array, "B T 3"] | None
    image_rows: Int[Array, "B T"] | None
    images: Int[Array, "B T"] | None
    patches: UInt8[Array, "B P C"] | None
    patch_images: Int[Array, "B P"] | None
    patch_places: Int[Array, "B P 2"] | None
    encoded: ImageFeatures | None = None
    """Features of the patches, which are then not read."""

    @classmethod
    def of(cls, batch: Batch, config: ModelConfig, number: int = 0) -> ImageInputs | None:
        """Images of a batch for a model; None for text. `number`: that of the model in `Batch.encoded`. Raises
        ConfigError for arrays that the model would ignore or cannot read."""
        arrays = {name: None if (x := getattr(batch, name)) is None else jnp.asarray(x) for name in IMAGE_ARRAYS}
        given = [name for name, x in arrays.items() if x is not None]
        if not given:
            return None
        vision = config.vision
        if vision is None:
            raise ConfigError(
                f"model.vision: {config.model_type} is loaded without a vision tower, and the batch has "
                f"{', '.join(given)}; set model.vision to frozen if the checkpoint has one, or remove the images"
            )
        turned = config.turns_by_axes
        encoded = None if batch.encoded is None else batch.encoded[number]
        read = IMAGE_ARRAYS[1:] if encoded is None else PLACES
        wanted = {"rope_positions": turned} | dict.fromkeys(read, True)
        missing = [name for name, needed in wanted.items() if needed and arrays[name] is None]
        if (arrays["patches"] is not None or set(given) - {"rope_positions"}) and missing:
            raise ConfigError(f"batch: has {', '.join(given)} and lacks {', '.join(missing)} for {vision.model_type}")
        if not turned and arrays["rope_positions"] is not None:
            raise ConfigError(f"batch: has rope_positions, but {vision.model_type} turns by positions; leave them out")
        patches, block, values = arrays["patches"], vision.merge**2, 3 * vision.patch_size**2
        if patches is not None and (patches.shape[1] % block or patches.shape[2] != values):
            raise ConfigError(
                f"batch: patches are {patches.shape[1]} of {patches.shape[2]} values a row; {vision.model_type} needs "
                f"a multiple of {block} of {values} values"
            )
        return cls(**arrays, encoded=None if encoded is None else jax.tree.map(jnp.asarray, encoded))

    @classmethod
    def turned(cls, rope_positions: Int[Array, "B T 3"] | None) -> ImageInputs | None:
        """Positions of multimodal RoPE alone; None in families that turn by plain positions."""
        if rope_positions is None:
            return None
        absent: dict[str, Any] = dict.fromkeys(IMAGE_ARRAYS)
        return cls(**{**absent, "rope_positions": rope_positions})


@pytree
class ImagePatches:
    """Images of one call of a tower alone; see `Batch`."""

    patches: UInt8[Array | HostArray, "B P C"]
    patch_images: Int[Array | HostArray, "B P"]
    patch_places: Int[Array | HostArray, "B P 2"]


@pytree
class PlacedImages:
    """Features of a batch's images, and the tokens whose embeddings they are."""

    features: Float[Array, "B N D"]
    added: Float[Array, "K B N D"] | None
    rows: Int[Array, "B T"]
    images: Int[Array, "B T"]
    fill: Int[Array, ""]

    def without_images(self, tokens: Int[Array, "B T"]) -> Int[Array, "B T"]:
        """Tokens with one of the table's in place of image tokens, whose ids may be beyond it."""
        return jnp.where(self.rows > 0, self.fill, tokens)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Embeddings with image features in their places."""
        return jnp.where((self.rows > 0)[..., None], self._at_tokens(self.features).astype(x.dtype), x)

    def deeper(self, x: Float[Array, "B T D"], layer: int | Array) -> Float[Array, "B T D"]:
        """Hidden states after a layer with its own image features added."""
        assert self.added is not None
        found = self._at_tokens(jax.lax.dynamic_index_in_dim(self.added, layer, keepdims=False))
        return x + jnp.where((self.rows > 0)[..., None], found.astype(x.dtype), jnp.zeros((), x.dtype))

    def _at_tokens(self, features: Float[Array, "B N D"]) -> Float[Array, "B T D"]:
        return jax.vmap(lambda row, index: row[index])(features, jnp.maximum(self.rows - 1, 0))


class StoredMatrix:
    """Matrix [*layers, in, out] that a parameter has as [*layers, out, in]; reads like a parameter."""

    def __init__(self, stored: nnx.Param[Array]):
        self.stored = stored
        *lead, out, into = stored.shape
        self.shape, self.dtype = (*lead, into, out), stored.dtype

    def __getitem__(self, index: Any) -> Float[Array, "*L in out"]:
        return self.stored[index].mT

    def get_metadata(self, name: str) -> tuple[str, ...]:
        """Names of the dimensions."""
        assert name == "dims"
        *lead, out, into = self.stored.get_metadata(name)
        return (*lead, into, out)

    def set_value(self, value: Float[Array, "*L in out"]) -> None:
        self.stored.set_value(value.mT)


class TowerMatrix(Adaptable):
    """Matrix of a tower by itself, merged as the parameter has it."""

    def __init__(self, tower: Tower, name: str):
        self.weight = getattr(tower, name)
        self.adapters = nnx.Dict({name: tower.adapters[name]})

    def matrices(self) -> Mapping[str, Any]:
        return {name: StoredMatrix(self.weight) for name in self.adapters}

    def merged(self, name: str) -> Float[Array, "*L out in"]:
        return super().merged(name).mT


class Tower(Adaptable):
    """Tower and projector of a model; frozen unless `VisionConfig.train` or an adapter says so, never quantized."""

    def __init__(self, config: VisionConfig, init: Init):
        self.config = config
        self.adapters = nnx.Dict({})
        for key, tensor in config.tensors().items():
            # A number of a layer is a vector of one.
            shape, layers = tensor.shape or (1,), ("layers",) if "{layer}" in tensor.name else ()
            whole = (config.depth, *shape) if layers else shape
            value = normal(init, whole) if tensor.start is None else jnp.full(whole, tensor.start, init.dtype)
            # A matrix is split over devices where they divide its outputs.
            dims = ("tower", *["latent"] * (len(shape) - 1)) if len(shape) > 1 else ("latent",) * len(shape)
            setattr(self, key, param(value, (*layers, *dims), tensor.role))

    def __call__(self, images: ImageInputs, compute: Compute) -> PlacedImages | None:
        """Encode the images, unless they are, and prepare their placement; None without any."""
        if images.patches is None and images.encoded is None:
            return None
        assert images.image_rows is not None and images.images is not None
        encoded = self.features(images, compute) if images.encoded is None else images.encoded
        return self.placed(encoded, images.image_rows, images.images)

    def features(self, images: Images, compute: Compute) -> ImageFeatures:
        """Features of all images, as arrays of a batch."""
        encoded = self.encode(images, compute)
        deeper = jnp.stack(encoded.deeper, axis=1) if encoded.deeper else None
        return ImageFeatures(features=encoded.features, deeper=deeper)

    def encode(self, images: Images, compute: Compute) -> Encoded:
        """Features of all images, see `VisionConfig.encode`; in profiles a part of the program named `vision tower`."""
        params = {key: getattr(self, key)[...] for key in self.config.tensors()}
        for key, adapter in self.adapters.items():
            assert isinstance(adapter, Adapter), "a tower cannot hold several adapters"
            name, kernel = key.removesuffix(".weight"), self.matrices()[key][...]
            params |= {f"{name}.lora_a": adapter.lora_a[...], f"{name}.lora_b": adapter.scaled_b(compute.dtype)}
            params |= {} if adapter.lora_magnitude is None else {f"{name}.gain": adapter.gain(kernel)}
        with jax.named_scope("vision tower"):
            return self.config.encode(params, images, compute)

    def matrices(self) -> Mapping[str, Any]:
        """Matrices of linear layers; not those that embed patches and positions."""
        return {
            key: StoredMatrix(getattr(self, key)) for key, tensor in self.config.tensors().items() if tensor.adaptable
        }

    def placed(
        self,
        encoded: ImageFeatures,
        rows: Int[Array, "B T"],
        images: Int[Array, "B T"],
    ) -> PlacedImages:
        """Features in the places of tokens. `rows`: as `Batch.image_rows`."""
        fill = jnp.asarray(self.config.fill_id, jnp.int32)
        added = None if encoded.deeper is None else jnp.moveaxis(jnp.asarray(encoded.deeper), 1, 0)
        return PlacedImages(features=jnp.asarray(encoded.features), added=added, rows=rows, images=images, fill=fill)


# Declarations of parameters, by their name in the checkpoint without a prefix.

Declared = dict[str, TowerTensor]


def table(prefix: str, declared: Declared, *, key: str = "") -> Declared:
    """Declarations by key, with the prefix of their names in the checkpoint."""
    return {f"{key}{name}": replace(tensor, name=f"{prefix}{name}") for name, tensor in declared.items()}


def parameter(name: str, shape: tuple[int, ...], role: Role, *, start: float | None = None) -> Declared:
    """Declaration of one parameter, which begins at `start`, by default with random numbers."""
    return {name: TowerTensor(name=name, shape=shape, role=role, start=start)}


def norm(name: str, width: int, *, bias: bool, start: float = 1.0) -> Declared:
    """Declaration of a norm's scale, with its bias."""
    scale = parameter(f"{name}.weight", (width,), "norm", start=start)
    return scale | (parameter(f"{name}.bias", (width,), "bias", start=0.0) if bias else {})


def matrices(shapes: Mapping[str, tuple[int, int]], *, bias: bool) -> Declared:
    """Declarations of linear layers: weights [out, in] that may have an adapter, with their biases."""
    declared: Declared = {}
    for name, shape in shapes.items():
        weight = f"{name}.weight"
        declared[weight] = TowerTensor(name=weight, shape=shape, role="kernel", start=None, adaptable=True)
        declared |= parameter(f"{name}.bias", shape[:1], "bias", start=0.0) if bias else {}
    return declared


def tower_name(vision: VisionConfig, name: str) -> str | None:
    """Return the name of a stored tensor without what depends on the version of transformers; None: not the tower's."""
    known = {re.sub(r"\{layer\}", "0", tensor.name) for tensor in vision.tensors().values()}
    bare = name.removeprefix("model.")
    forms = (name, bare, f"model.{bare}", bare.replace("vision_tower.", "vision_tower.vision_model.", 1))
    return next((form for form in forms if re.sub(r"\.layers\.\d+\.|\.blocks\.\d+\.", _first, form) in known), None)


def own_names(vision: VisionConfig | None, text_name: Names | None) -> Names:
    """Names of stored tensors as the model has them; None: of a part that is not loaded. Beside a tower those are
    `UNREAD` alone: others keep their names. `text_name`: of a multimodal family's `Wrapper`."""
    named: Names = text_name or (lambda name: name)
    if vision is None:
        return named

    def own(name: str) -> str | None:
        if UNREAD.match(name):
            return None
        return tower_name(vision, name) or named(name) or name

    return own


def _first(match: re.Match[str]) -> str:
    return re.sub(r"\d+", "0", match[0])


# Layers, as functions of parameters by key.


def pixels(config: VisionConfig, patches: UInt8[Array, "B P C"]) -> Float[Array, "B P C"]:
    """(x / 255 - mean) / std of each channel, float32."""
    size = config.patch_size**2
    mean, std = (np.repeat(np.asarray(x, np.float32), size)[None, None] for x in (config.mean, config.std))
    return (patches.astype(jnp.float32) * np.float32(1 / 255) - mean) / std


def linear(params: Params, name: str, x: Float[Array, "B P F"]) -> Float[Array, "B P G"]:
    """x W^T + b; W [out, *in] as in the checkpoint."""
    weight = params[f"{name}.weight"].astype(x.dtype)
    y = adapted(params, name, x, jnp.einsum("bpi,oi->bpo", x, weight.reshape(weight.shape[0], -1)))
    bias = params.get(f"{name}.bias")
    return y if bias is None else y + bias.astype(x.dtype)[None, None]


def adapted(params: Params, name: str, x: Float[Array, "B P F"], y: Float[Array, "B P *G"]) -> Float[Array, "B P *G"]:
    """Output y of a matrix with its adapter, if it has one: gain * (y + x A B)."""
    if f"{name}.lora_a" not in params:
        return y
    a, b, outputs = params[f"{name}.lora_a"].astype(x.dtype), params[f"{name}.lora_b"].astype(x.dtype), y.shape[2:]
    y = y + jnp.tensordot(jnp.einsum("bpi,ir->bpr", x, a), b.reshape(-1, *outputs), 1)
    gain = params.get(f"{name}.gain")
    return y if gain is None else y * gain.astype(y.dtype).reshape(1, 1, *outputs)


def layer_norm(params: Params, name: str, x: Float[Array, "B P D"], eps: float) -> Float[Array, "B P D"]:
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    scale, bias = (params[f"{name}.{part}"].astype(jnp.float32)[None, None] for part in ("weight", "bias"))
    return (wide * scale + bias).astype(x.dtype)


def rms_norm(
    params: Params, name: str, x: Float[Array, "*B D"], eps: float, *, offset: float = 0.0
) -> Float[Array, "*B D"]:
    scale = params[f"{name}.weight"].astype(jnp.float32) + offset
    return (rms_normed(x, eps) * scale.reshape((1,) * (x.ndim - 1) + scale.shape)).astype(x.dtype)


def gelu(x: Array, *, tanh: bool) -> Array:
    return jax.nn.gelu(x, approximate=tanh)


def within_images(
    q: Float[Array, "B P N H"],
    k: Float[Array, "B P N H"],
    v: Float[Array, "B P N H"],
    images: Int[Array, "B P"],
    scale: float,
    compute: Compute,
) -> Float[Array, "B P F"]:
    """Attention of all patches of an image, or of a window, whose number they have."""
    positions = jnp.broadcast_to(jnp.arange(q.shape[1], dtype=jnp.int32)[None], q.shape[:2])
    out = attention(
        q,
        k.swapaxes(1, 2),
        v.swapaxes(1, 2),
        q_positions=positions,
        k_positions=positions,
        q_segments=images,
        k_segments=images,
        q_parents=None,
        window=None,
        scale=scale,
        soft_cap=None,
        sinks=None,
        kernel="auto",
        mesh=compute.mesh,
        images=(images, images),
        ahead=q.shape[1],
    ).heads
    return out.reshape(*q.shape[:2], -1)


def heads(x: Float[Array, "B P F"], num_heads: int) -> Float[Array, "B P N H"]:
    return x.reshape(*x.shape[:2], num_heads, -1)


def place_tables(places: Int[Array, "B P 2"], head_dim: int, theta: float, *, alternating: bool = False) -> Tables:
    """Cosines and sines that turn the first half of a head's pairs by rows and the second by columns.

    Frequencies are those of half a head for both or, `alternating`, the even ones of a head for rows and the odd ones
    for columns.
    """
    whole = default_frequencies(theta, head_dim if alternating else head_dim // 2)
    rows, columns = (whole[0::2], whole[1::2]) if alternating else (whole, whole)
    by_axis = (places[..., axis, None].astype(jnp.float32) * f[None, None] for axis, f in enumerate((rows, columns)))
    angles = jnp.concatenate(list(by_axis), axis=-1)
    return jnp.cos(angles), jnp.sin(angles)


def turned(x: Float[Array, "B P N H"], tables: Tables) -> Float[Array, "B P N H"]:
    return apply_rope(x, tables, interleaved=False)


Body = Callable[[Params, Array, Any], Array]
"""Layer of a tower: its parameters, hidden states and what a scan gives each layer."""


def run_layers(
    params: Params, body: Body, x: Float[Array, "B P D"], compute: Compute, layers: range, given: Any = None
) -> Float[Array, "B P D"]:
    """Apply a part of the tower's layers, rematerialized as the decoder's. `given`: arrays with a number of each of the
    tower's layers first."""

    def stacked(x: Array) -> Array:
        return x[layers.start : layers.stop]

    mine = {key.removeprefix(LAYERS): stacked(w) for key, w in params.items() if key.startswith(LAYERS)}
    run = rematerialized(lambda x, layer: (body(layer[0], x, layer[1]), None), compute.remat)
    x, _ = jax.lax.scan(run, x, (mine, jax.tree.map(stacked, given)))
    return x


def check_heads(width: int, num_heads: int, parts: int) -> None:
    """Raises ConfigError unless heads divide the width, and `parts` divide a head."""
    if width % (num_heads * parts):
        raise ConfigError(
            f"vision_config: the tower's hidden_size={width} must be a multiple of {parts * num_heads}, for "
            f"{num_heads} heads" + (f" of a multiple of {parts}" if parts > 1 else "")
        )


def blocks(x: Float[Array, "B P D"], merge: int) -> Float[Array, "B N m D"]:
    """Patches of each block that a feature merges."""
    return x.reshape(x.shape[0], -1, merge**2, x.shape[-1])
