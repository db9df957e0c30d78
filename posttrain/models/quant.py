"""Quantized weight matrices (4 or 8 bits) with scales; read like parameters, never trained."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Int8, Shaped, UInt8

from posttrain.config import CacheDtype, Quantize
from posttrain.errors import ConfigError
from posttrain.mesh import TILES

TILE = 64
"""Preferred tile size: inputs per scale for 4-bit codes; the closest even divisor of the input size is used."""

TYPES: dict[str, Any] = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn, "int4": jnp.int4, "nf4": "nf4"}
PER_OUTPUT = ("int8", "fp8")
"""Kinds with one scale per output."""

CACHE_LIMITS = {"int8": (127.0, 7), "fp8": (448.0, 9)}
"""Largest number of the codes of a vector, and the exponent of the power of two above it."""

EXPONENT_BYTES = 4
"""Bytes of a vector's exponent after its codes, so that vectors begin at whole words."""

# fmt: off
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on
"""Values of the nf4 codes: QLoRA, arXiv:2305.14314, appendix E."""

NUMBERS = {"nf4": NF4, "int4": tuple(map(float, (*range(8), *range(-8, 0))))}
"""Values of the 4-bit codes."""

Shape = tuple[str, tuple[str, ...], tuple[int, ...]]
"""Path, dimension names and shape of a parameter."""


class QuantizedParam(nnx.Param):
    """Frozen parameter of a quantized matrix."""


class Quantized(nnx.Module):
    """Quantized replacement of a parameter [*L, in, out]: value(code) * scale per tile of inputs, in `dtype`.

    It reads like the parameter. `codes` have its shape, or half of `in` where two 4-bit codes share a byte; `scales`
    are [*L, tiles, out].
    """

    def __init__(
        self,
        codes: Shaped[Array, "*L rows out"] | jax.ShapeDtypeStruct,
        scales: Float[Array, "*L tiles out"] | jax.ShapeDtypeStruct,
        dims: tuple[str, ...],
        *,
        kind: Quantize,
        dtype: np.dtype,
    ):
        self.kind = kind
        self.dtype = np.dtype(dtype)
        tiled = (*dims[:-2], dims[-2] + TILES, dims[-1])
        self.codes = QuantizedParam(codes, dims=dims if kind in PER_OUTPUT else tiled)
        self.scales = QuantizedParam(scales, dims=tiled)

    @property
    def shape(self) -> tuple[int, ...]:
        return _plain("", self.codes.get_metadata("dims"), self.codes.shape)[2]

    def get_metadata(self, name: str) -> Any:
        assert name == "dims", name
        return _plain("", self.codes.get_metadata("dims"), self.codes.shape)[1]

    def __getitem__(self, index: Any) -> Float[Array, "*L in out"]:
        """Dequantize: all with `...`, or the given leading indices."""
        return self._values(self.codes[index], self.scales[index])

    def product(self, function: Callable[[Array, Array], Array], x: Float[Array, "*B in"]) -> Float[Array, "*B out"]:
        """function(x, W). The backward pass dequantizes W again instead of saving it for all layers."""

        def run(x: Array, codes: Array, scales: Array) -> Array:
            return function(x, self._values(codes, scales).astype(x.dtype))

        return jax.checkpoint(run)(x, self.codes[...], self.scales[...])

    def _values(self, codes: Array, scales: Array) -> Array:
        return jax.lax.stop_gradient(dequantized(codes, scales, self.kind, self.dtype))


def quantized(
    matrix: Float[Array, "*L in out"], kind: Quantize
) -> tuple[Shaped[Array, "*L rows out"], Float[Array, "*L tiles out"]]:
    """Quantize to codes and scales: the largest magnitude of each tile gets the largest code."""
    import qwix

    # Column by column: qwix flattens its nf4 input, which would gather a sharded matrix.
    column: Any = functools.partial(qwix.quantize, qtype=TYPES[kind], tiled_axes={0: tile_size(kind, matrix.shape[-2])})
    column = jax.vmap(column, in_axes=-1, out_axes=-1)
    for _ in matrix.shape[:-2]:
        column = jax.vmap(column)
    quantized = column(matrix.astype(jnp.float32))
    codes, scales = quantized.qvalue, quantized.scale.astype(_scale_type(kind))
    return codes if kind in PER_OUTPUT else _packed(codes, scales.shape[-2]), scales


def quantized_shape(matrix: Any, kind: Quantize) -> Quantized:
    """Quantized shape of an abstract parameter. Raises ConfigError if it does not divide into tiles."""
    *lead, inputs, outputs = matrix.shape
    tiles, packed = inputs // tile_size(kind, inputs), kind not in PER_OUTPUT
    rows, dtype = (inputs // 2, jnp.uint8) if packed else (inputs, TYPES[kind])
    codes = jax.ShapeDtypeStruct((*lead, rows, outputs), dtype)
    scales = jax.ShapeDtypeStruct((*lead, tiles, outputs), _scale_type(kind))
    return Quantized(codes, scales, matrix.get_metadata("dims"), kind=kind, dtype=matrix.dtype)


def _scale_type(kind: Quantize) -> np.dtype:
    return jnp.dtype(jnp.float32 if kind in PER_OUTPUT else jnp.bfloat16)


def dequantized(
    codes: Shaped[Array, "*L rows out"], scales: Float[Array, "*L tiles out"], kind: Quantize, dtype: DTypeLike
) -> Float[Array, "*L in out"]:
    """value(code) * scale, computed in float32 and rounded once to `dtype`."""
    *lead, tiles, outputs = scales.shape
    halves = 1 if kind in PER_OUTPUT else 2
    tiled = codes.reshape(*lead, tiles, 1, -1, outputs)
    if kind in PER_OUTPUT:
        numbers = tiled.astype(jnp.float32)
    else:
        # Both halves of a tile by broadcasting: a concatenation would first write each of them in float32.
        tiled = jnp.broadcast_to(tiled, (*lead, tiles, halves, *tiled.shape[-2:]))
        shift = jnp.asarray([0, 4], jnp.uint8).reshape(*(1 for _ in lead), 1, halves, 1, 1)
        numbers = _looked_up((tiled >> shift) & 15, NUMBERS[kind])
    values = (numbers * scales.astype(jnp.float32)[..., None, None, :]).astype(dtype)
    if halves > 1:
        # One pass from codes to values. Inside of a product XLA:TPU would write codes and scales broadcast.
        values = jax.lax.optimization_barrier(values)
    return values.reshape(*lead, -1, outputs)


def _packed(codes: Shaped[Array, "*L in out"], tiles: int) -> UInt8[Array, "*L rows out"]:
    """Pack the second half of each tile into the upper 4 bits of the first: a shard of whole tiles is self-contained.

    JAX's own 4-bit dtypes take a whole byte on some platforms and in some programs.
    """
    bits = codes.astype(jnp.int8).astype(jnp.uint8) & 15
    low, high = jnp.split(bits.reshape(*codes.shape[:-2], tiles, -1, codes.shape[-1]), 2, axis=-2)
    return (low | (high << 4)).reshape(*codes.shape[:-2], -1, codes.shape[-1])


def _looked_up(codes: UInt8[Array, "*L"], numbers: Sequence[float]) -> Float[Array, "*L"]:
    """values[code] by bitwise selects: unlike the gather of qwix they fuse with the consumer, sharded or not."""
    choices: list[Any] = [np.float32(number) for number in numbers]
    for bit in range(4):
        is_set = (codes & (1 << bit)) != 0
        choices = [jnp.where(is_set, high, low) for low, high in zip(choices[::2], choices[1::2], strict=True)]
    return choices[0]


@functools.cache
def tile_size(kind: Quantize, num_inputs: int) -> int:
    """Inputs per scale. Raises ConfigError if 4-bit codes cannot be paired."""
    if kind in PER_OUTPUT:
        return num_inputs
    if num_inputs % 2:
        raise ConfigError(f"quantize={kind}: a matrix has an odd number of inputs, {num_inputs}; use int8 or fp8")
    sizes = [size for size in range(2, num_inputs + 1, 2) if num_inputs % size == 0]
    return min(sizes, key=lambda size: abs(math.log(size / TILE)))


def squared_error(matrix: Float[Array, "*L in out"], replaced: Float[Array, "*L in out"]) -> Float[Array, " 2"]:
    """Sums of squared differences and of squared values of `matrix`."""
    wide = matrix.astype(jnp.float32)
    return jnp.stack([jnp.sum(jnp.square(wide - replaced.astype(jnp.float32))), jnp.sum(jnp.square(wide))])


def plain_shapes(shapes: Iterable[Shape]) -> list[Shape]:
    """Shapes of all parameters as if none were quantized."""
    return [_plain(*shape) for shape in shapes if not shape[0].endswith(".scales")]


def _plain(path: str, dims: tuple[str, ...], shape: tuple[int, ...]) -> Shape:
    """Shape of the dequantized matrix from its codes, which are packed in pairs if the dimension name says so."""
    path = path.removesuffix(".codes")
    if not dims or not dims[-2:][0].endswith(TILES):
        return path, dims, shape
    *lead, rows, outputs = shape
    return path, (*dims[:-2], dims[-2].removesuffix(TILES), dims[-1]), (*lead, 2 * rows, outputs)


def packed(x: Float[Array, "*B H"], kind: CacheDtype) -> Int8[Array, "*B P"]:
    """Codes of each vector in 8 bits, and the exponent of its scale behind them: the least power of two with which the
    largest number fits, so that packing what was unpacked changes nothing, in bfloat16 neither."""
    largest, half = CACHE_LIMITS[kind]
    wide = x.astype(jnp.float32)
    mantissa, exponent = jnp.frexp(jnp.max(jnp.abs(wide), axis=-1, keepdims=True))
    exponent = jnp.clip(exponent - half + (mantissa > largest / 2.0**half), -100, 100)
    scaled = wide * _power_of_two(-exponent)
    if kind == "int8":
        codes = jnp.round(scaled).astype(jnp.int8)
    else:
        codes = jax.lax.bitcast_convert_type(scaled.astype(jnp.float8_e4m3fn), jnp.int8)
    exponents = jnp.broadcast_to(exponent.astype(jnp.int8), (*x.shape[:-1], EXPONENT_BYTES))
    return jnp.concatenate([codes, exponents], axis=-1)


def unpacked(stored: Int8[Array, "*B P"], kind: CacheDtype, dtype: DTypeLike) -> Float[Array, "*B H"]:
    """Vectors of `packed`, exact in `dtype`."""
    codes, exponent = stored[..., :-EXPONENT_BYTES], stored[..., -1:].astype(jnp.int32)
    values = codes if kind == "int8" else jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    return values.astype(dtype) * _power_of_two(exponent).astype(dtype)


def _power_of_two(exponent: Int[Array, "*B"]) -> Float[Array, "*B"]:
    """2^exponent, exactly, from -126 to 127."""
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
