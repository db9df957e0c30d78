"""Rotary position embedding (RoPE): frequencies of every `rope_type`, and the rotation."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from posttrain.errors import ConfigError
from posttrain.kernels.platform import platform_of
from posttrain.models.config import Rope
from posttrain.models.fields import Fields

Tables = tuple[Float[Array, "B T half"], Float[Array, "B T half"]]


def default_frequencies(theta: float, dim: int) -> np.ndarray:
    """theta^(-2i / dim), float32 as in transformers."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.float32(1.0) / np.float32(theta) ** exponents


def linear_interpolation(frequencies: np.ndarray, factor: float) -> np.ndarray:
    """Linear position interpolation, arXiv:2306.15595."""
    return frequencies / np.float32(factor)


def llama3(frequencies: np.ndarray, *, factor: float, low: float, high: float, original: int) -> np.ndarray:
    """Frequency-dependent scaling of Llama 3.1, arXiv:2407.21783, section 3.2."""
    wavelength = 2 * np.pi / frequencies
    keep = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / factor


def yarn(
    theta: float, dim: int, *, factor: float, original: int, beta_fast: float, beta_slow: float, truncate: bool
) -> np.ndarray:
    """YaRN (NTK by parts), arXiv:2309.00071, section 3.2: interpolates low-frequency pairs only."""

    def pair_with(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_with(beta_fast), pair_with(beta_slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    stretched = np.clip((np.arange(dim // 2) - first) / (last - first), 0.0, 1.0)
    frequencies = default_frequencies(theta, dim)
    return frequencies / factor * stretched + frequencies * (1 - stretched)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """YaRN attention factor 1 + 0.1 weight ln(factor), arXiv:2309.00071, eq. 22."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def rope_from_hf(
    hf: Fields,
    head_dim: int,
    *,
    theta: float = 10_000.0,
    rotary_factor: float | None = None,
    layer_type: str | None = None,
    interleaved: bool = False,
) -> Rope:
    """RoPE from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`.

    `theta`, `rotary_factor`: the family's defaults; None: it always rotates the whole head. `layer_type`: the entry to
    use if `rope_parameters` has one per layer type. Raises ConfigError for unknown types and for missing or unknown
    fields.
    """
    fields = _section(hf)
    if layer_type is not None and layer_type in fields:
        fields = fields.section(layer_type)
    base = (fields if "rope_theta" in fields else hf).get("rope_theta", float, theta)
    part = (fields if "partial_rotary_factor" in fields else hf).get(
        "partial_rotary_factor", float, rotary_factor or 1.0
    )
    if rotary_factor is None and part != 1.0 and _kind(fields) != "proportional":
        raise ConfigError(f"partial_rotary_factor={part} is not supported: models of this type rotate the whole head")
    frequencies, magnitude = _kinds(_kind(fields), fields, hf, base, head_dim, part)
    fields.refuse_unread(allowed=("original_max_position_embeddings", "finetuned"))
    if 2 * len(frequencies) > head_dim:
        raise ConfigError(f"head_dim={head_dim} with partial_rotary_factor={part} cannot be split into pairs for RoPE")
    return Rope(frequencies=tuple(map(float, frequencies)), magnitude=magnitude, interleaved=interleaved)


def default_rope(theta: float, head_dim: int) -> Rope:
    """Plain RoPE over the whole head."""
    return Rope(frequencies=tuple(map(float, default_frequencies(theta, head_dim))))


def max_positions(hf: Fields) -> int:
    """Maximum positions: `max_position_embeddings`, for YaRN at least the extended length, since it may be unchanged
    there.

    For LongRoPE, the range of the selected set of factors.
    """
    positions, fields = hf.get("max_position_embeddings", int), _section(hf)
    if _kind(fields) == "yarn" and "factor" in fields:
        return max(positions, round(_original(fields, hf) * fields.get("factor", float)))
    if _kind(fields) not in LONGROPE or hf.long_context:
        return positions
    return min(positions, _original(fields, hf))


LONGROPE = ("longrope", "su")


def _section(hf: Fields) -> Fields:
    """Return `rope_scaling`, else `rope_parameters`: of both transformers reads the first, where it is not empty."""
    scaling = hf.section("rope_scaling")
    return scaling if "rope_parameters" not in hf or scaling else hf.section("rope_parameters")


def _kind(fields: Fields) -> str:
    return fields.get("rope_type", str, fields.get("type", str, "default"))


def _original(fields: Fields, hf: Fields) -> int:
    """Original (unextended) positions; as in transformers, the field outside the section takes precedence."""
    key = "original_max_position_embeddings"
    if key in hf or key in fields:
        return (hf if key in hf else fields).get(key, int)
    return hf.get("max_position_embeddings", int)


def _kinds(kind: str, fields: Fields, hf: Fields, theta: float, head_dim: int, part: float) -> tuple[np.ndarray, float]:
    """Frequencies and attention factor."""
    dim = int(head_dim * part)
    if kind in ("default", "dynamic"):
        # Dynamic scaling begins beyond `max_position_embeddings`, where no row may be.
        if kind == "dynamic":
            fields.get("factor", float)
        return default_frequencies(theta, dim), 1.0
    if kind == "linear":
        return linear_interpolation(default_frequencies(theta, dim), fields.get("factor", float)), 1.0
    if kind == "proportional":
        # Pairs span the whole head; unrotated ones have frequency 0.
        turned = np.arange(head_dim // 2) < int(part * head_dim // 2)
        return linear_interpolation(
            default_frequencies(theta, head_dim), fields.get("factor", float, 1.0)
        ) * turned, 1.0
    if kind == "llama3":
        return llama3(
            default_frequencies(theta, dim),
            factor=fields.get("factor", float),
            low=fields.get("low_freq_factor", float),
            high=fields.get("high_freq_factor", float),
            original=_original(fields, hf),
        ), 1.0
    if kind == "yarn":
        return _yarn_from_hf(fields, hf, theta, dim)
    if kind in LONGROPE:
        return _longrope_from_hf(fields, hf, theta, dim)
    known = "default, dynamic, linear, llama3, yarn, longrope, proportional"
    raise ConfigError(f"{fields.where}: rope_type {kind!r} is not supported; known: {known}")


def _yarn_from_hf(fields: Fields, hf: Fields, theta: float, dim: int) -> tuple[np.ndarray, float]:
    original = _original(fields, hf)
    factor = fields.get("factor", float, hf.get("max_position_embeddings", int) / original)
    weights = fields.optional("mscale", float), fields.optional("mscale_all_dim", float)
    if weights[0] and weights[1]:
        magnitude = yarn_magnitude(factor, weights[0]) / yarn_magnitude(factor, weights[1])
    else:
        magnitude = yarn_magnitude(factor)
    frequencies = yarn(
        theta,
        dim,
        factor=factor,
        original=original,
        beta_fast=fields.get("beta_fast", float, 32.0),
        beta_slow=fields.get("beta_slow", float, 1.0),
        truncate=fields.get("truncate", bool, True),
    )
    return frequencies, fields.get("attention_factor", float, magnitude)


def _longrope_from_hf(fields: Fields, hf: Fields, theta: float, dim: int) -> tuple[np.ndarray, float]:
    """LongRoPE, arXiv:2402.13753: a scale per pair. transformers selects the set of factors by the longest row of a
    batch, which makes a row depend on its neighbours; here the run selects it."""
    original = _original(fields, hf)
    factor = fields.get("factor", float, hf.get("max_position_embeddings", int) / original)
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    frequencies = default_frequencies(theta, dim)
    sets = {name: fields.get(name, list) for name in ("short_factor", "long_factor")}
    for name, values in sets.items():
        if len(values) != len(frequencies):
            raise ConfigError(
                f"{fields.where}: {name} must have {len(frequencies)} numbers, one for each pair; got {len(values)}"
            )
    stretch = np.asarray(sets["long_factor" if hf.long_context else "short_factor"], np.float32)
    return frequencies / stretch, fields.get("attention_factor", float, default)


def rope_tables(rope: Rope, positions: Int[Array, "B T"], by_axis: Int[Array, "B T 3"] | None = None) -> Tables:
    """Cosines and sines of every position times the attention factor, float32. `by_axis`: as `Batch.rope_positions`."""
    frequencies = jnp.asarray(rope.frequencies, jnp.float32)
    turned = positions[..., None] if by_axis is None or not rope.axes else by_axis[..., np.asarray(rope.axes)]
    angles = turned.astype(jnp.float32) * frequencies[None, None]
    return jnp.cos(angles) * rope.magnitude, jnp.sin(angles) * rope.magnitude


def apply_rope(x: Float[Array, "B T N H"], tables: Tables, *, interleaved: bool) -> Float[Array, "B T N H"]:
    """Rotate the pairs of each head; remaining dimensions pass through."""
    if platform_of(None) == "tpu" and x.dtype == jnp.bfloat16 and x.shape[1] > 1:
        return rotate_lanes(x, tables, interleaved=interleaved)
    cos, sin = (table[:, :, None, :] for table in tables)
    pairs = cos.shape[-1]
    wide, rest = x[..., : 2 * pairs].astype(jnp.float32), x[..., 2 * pairs :]
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = jnp.split(wide, 2, axis=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    joined = jnp.stack(turned, axis=-1).reshape(wide.shape) if interleaved else jnp.concatenate(turned, axis=-1)
    return jnp.concatenate([joined.astype(x.dtype), rest], axis=-1)


def rotate_lanes(x: Float[Array, "B T N H"], tables: Tables, *, interleaved: bool) -> Float[Array, "B T N H"]:
    """Rotate as `apply_rope` does, for bfloat16 on TPU: x cos + (x P) sin, where P swaps the numbers of each pair and
    negates one, exactly. Halves of 64 numbers would fill half of the lanes, and be written twice as large."""
    pairs, rest = tables[0].shape[-1], x.shape[-1] - 2 * tables[0].shape[-1]
    swap = np.zeros((x.shape[-1], x.shape[-1]), np.float32)
    first = np.arange(0, 2 * pairs, 2) if interleaved else np.arange(pairs)
    second = first + (1 if interleaved else pairs)
    swap[second, first], swap[first, second] = -1.0, 1.0

    def lanes(table: Array, fill: float) -> Array:
        both = jnp.repeat(table, 2, axis=-1) if interleaved else jnp.concatenate([table, table], axis=-1)
        return jnp.pad(both, ((0, 0), (0, 0), (0, rest)), constant_values=fill)[:, :, None]

    return _rotated(x, jnp.asarray(swap, x.dtype), lanes(tables[0], 1.0), lanes(tables[1], 0.0))


@jax.custom_vjp
def _rotated(x: Array, swap: Array, cos: Array, sin: Array) -> Array:
    swapped = jax.lax.dot_general(x, swap, (((3,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return (x.astype(jnp.float32) * cos + swapped * sin).astype(x.dtype)


def _rotated_forward(x: Array, swap: Array, cos: Array, sin: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return _rotated(x, swap, cos, sin), (swap, cos, sin)


def _rotated_backward(saved: tuple[Array, Array, Array], gradient: Array) -> tuple[Array, None, None, None]:
    """Rotate by the negative angle: the derivative's own form would round its products with sines to bfloat16."""
    swap, cos, sin = saved
    return _rotated(gradient, swap, cos, -sin), None, None, None


_rotated.defvjp(_rotated_forward, _rotated_backward)
