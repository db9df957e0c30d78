"""Block drafter: proposes all tokens of a block in one pass, from the target's newest hidden states."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int, Shaped

from posttrain.batch import Batch, DraftStats
from posttrain.models.config import Role
from posttrain.models.layers import Init, normal, param, rms_normed

NORM_EPS = 1e-6
SHORTENED = 8
"""One of so many blocks is trained on fewer hidden states than the window has."""

Logits = Callable[[Float[Array, "B T D"]], Float[Array, "B T V"]]


class DrafterTensor(NamedTuple):
    """Declaration of a drafter's parameter."""

    role: Role
    sizes: tuple[tuple[str, int], ...]
    """Name and size of each dimension."""

    @property
    def dims(self) -> tuple[str, ...]:
        return tuple(dim for dim, _ in self.sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.sizes)


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Sizes of a drafter, and those of its target."""

    embed_dim: int
    vocab_size: int
    tokens: int
    """Tokens of a block."""
    window: int
    """Newest hidden states that it reads."""
    layers: int

    @property
    def heads(self) -> tuple[int, int]:
        """Number of attention heads and their size: a quarter of the target's width in all."""
        number = max(1, min(4, self.embed_dim // 16), self.embed_dim // 256)
        return number, max(1, self.embed_dim // (4 * number))

    @property
    def rank(self) -> int:
        """Rank of what the token before a place adds to the logits there."""
        return min(32, max(8, self.embed_dim // 8))

    @property
    def parameters(self) -> Mapping[str, DrafterTensor]:
        """Declarations by name."""
        embed, heads = ("embed", self.embed_dim), ("latent", math.prod(self.heads))
        inner, hidden = ("latent", self.embed_dim), ("latent", self.embed_dim)
        rank = ("latent", self.rank)
        of_layer = {
            "attention_norm": DrafterTensor("norm", (embed,)),
            **dict.fromkeys(("q", "k", "v"), DrafterTensor("kernel", (embed, heads))),
            "o": DrafterTensor("kernel", (heads, embed)),
            "mlp_norm": DrafterTensor("norm", (embed,)),
            **dict.fromkeys(("gate", "up"), DrafterTensor("kernel", (embed, hidden))),
            "down": DrafterTensor("kernel", (hidden, embed)),
        }
        layers = {f"{name}_{layer}": tensor for layer in range(self.layers) for name, tensor in of_layer.items()}
        return {
            "hidden": DrafterTensor("kernel", (embed, inner)),
            "token": DrafterTensor("kernel", (embed, inner)),
            "ages": DrafterTensor("embedding", (("latent", self.window), embed)),
            "places": DrafterTensor("embedding", (("latent", self.tokens + 1), embed)),
            **layers,
            "final_norm": DrafterTensor("norm", (embed,)),
            "follows_in": DrafterTensor("kernel", (embed, rank)),
            "follows_out": DrafterTensor("kernel", (rank, ("vocab", self.vocab_size))),
        }

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self.parameters.values())


class BlockDrafter(nnx.Module):
    """Parameters of a drafter beside its target, which trains them."""

    def __init__(self, config: DrafterConfig, *, dtype: np.dtype, rngs: nnx.Rngs):
        self.config = config
        self.weights: nnx.Dict[Any] = nnx.Dict({})
        for name, tensor in config.parameters.items():
            init = Init(0.02 if tensor.role == "embedding" else tensor.shape[0] ** -0.5, dtype, rngs)
            value = jnp.ones(tensor.shape, dtype) if tensor.role == "norm" else normal(init, tensor.shape)
            value = jnp.zeros_like(value) if name == "follows_out" else value
            self.weights[name] = param(value, tensor.dims, tensor.role)

    def arrays(self) -> dict[str, Array]:
        return {name: weight[...] for name, weight in self.weights.items()}


def propose(
    config: DrafterConfig,
    weights: Mapping[str, Array],
    hidden: Float[Array, "N W D"],
    known: Int[Array, " N"],
    newest: Float[Array, "N D"],
) -> Float[Array, "N k D"]:
    """Inputs of the target's head for each place of the block behind the newest token.

    Places attend to the block and to what the target's hidden states are projected to, as in DFlash
    (arXiv:2602.06036), of the window's newest `known` instead of the whole context. `newest`: embedding of the newest
    token, whose hidden state is not there yet.
    """
    dtype = hidden.dtype
    w = {name: x.astype(dtype) for name, x in weights.items()}
    there = jnp.arange(config.window)[None] >= config.window - known[:, None]
    before = jnp.where(there[..., None], _normed(hidden) @ w["hidden"] + w["ages"][None], 0)
    first = _normed(newest) @ w["token"] + before[:, -1]
    x = first[:, None] + w["places"][None]
    visible = jnp.pad(there, ((0, 0), (0, config.tokens + 1)), constant_values=True)
    for layer in range(config.layers):
        own = {name.removesuffix(f"_{layer}"): x for name, x in w.items() if name.endswith(f"_{layer}")}
        x = x + _attended(config, own, _normed(x, own["attention_norm"]), before, visible)
        inputs = _normed(x, own["mlp_norm"])
        x = x + (jax.nn.silu(inputs @ own["gate"]) * (inputs @ own["up"])) @ own["down"]
    return _normed(x[:, 1:], w["final_norm"])


def following(weights: Mapping[str, Array], before: Float[Array, "N D"]) -> Float[Array, "N V"]:
    """Logits that the token before a place, given by its embedding, adds there.

    The states of a block's places do not know which tokens are drafted at those before: low rank, so that the
    head is read once for all of them.
    """
    inner, out = (weights[name].astype(before.dtype) for name in ("follows_in", "follows_out"))
    return (_normed(before) @ inner) @ out


def _normed(x: Float[Array, "*B D"], scale: Float[Array, " D"] | None = None) -> Float[Array, "*B D"]:
    x = rms_normed(x, NORM_EPS).astype(x.dtype)
    return x if scale is None else x * scale.reshape(*[1] * (x.ndim - 1), -1)


def _attended(
    config: DrafterConfig,
    w: Mapping[str, Array],
    x: Float[Array, "N k1 D"],
    before: Float[Array, "N W D"],
    visible: Bool[Array, "N S"],
) -> Float[Array, "N k1 D"]:
    number, size = config.heads
    read = jnp.concatenate([before, x], axis=1)
    q, k, v = ((y @ w[name]).reshape(*y.shape[:2], number, size) for y, name in ((x, "q"), (read, "k"), (read, "v")))
    scores = jnp.einsum("nqhd,nkhd->nhqk", q, k, preferred_element_type=jnp.float32) * size**-0.5
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf), axis=-1).astype(x.dtype)
    return jnp.einsum("nhqk,nkhd->nqhd", weights, v).reshape(*x.shape[:2], -1) @ w["o"]


class Blocks(NamedTuple):
    """Blocks of rows, which cover them without a gap: A of each."""

    starts: Int[Array, "B A"]
    """Places of the newest tokens."""
    before: Int[Array, "B A W"]
    """Places of the hidden states that are read."""
    known: Int[Array, "B A"]
    """Number of them that are of the same sequence, and that the block is trained on."""
    drafted: Int[Array, "B A k"]
    valid: Bool[Array, "B A k"]
    """True for drafted places of the same sequence."""

    @classmethod
    def of(cls, config: DrafterConfig, batch: Batch) -> Blocks:
        """The first block of a row begins at a place that its tokens choose, so that another packing has others."""
        tokens, segments = jnp.asarray(batch.tokens), jnp.asarray(batch.segments)
        count, length = -(-batch.shape[1] // config.tokens), batch.shape[1]
        numbers = jnp.arange(count, dtype=jnp.int32)
        starts = jnp.sum(tokens, axis=1, keepdims=True) % config.tokens + config.tokens * numbers[None]
        segment = jnp.where(starts < length, _taken(segments, starts), 0)[..., None]
        places = starts[..., None] + jnp.arange(-config.window, config.tokens + 1, dtype=jnp.int32)[None, None]
        within = (places >= 0) & (places < length) & (segment > 0) & (_taken(segments, places) == segment)
        shorter = numbers // SHORTENED % (config.window + 1)
        most = jnp.where(numbers % SHORTENED == 0, shorter, config.window)[None]
        before, drafted = np.s_[..., : config.window], np.s_[..., config.window + 1 :]
        known = jnp.minimum(jnp.sum(within[before], axis=-1), most)
        return cls(starts, places[before], known, places[drafted], within[drafted])


def _taken(rows: Shaped[Array, "B T *D"], places: Int[Array, B * A]) -> Array:
    return jax.vmap(lambda row, places: jnp.take(row, places, axis=0, mode="clip"))(rows, places)


def block_stats(
    drafter: BlockDrafter, batch: Batch, hidden: Float[Array, "B T D"], embedded: Float[Array, "B T D"], logits: Logits
) -> DraftStats:
    """Divergence of the drafts from the target at the tokens of rows."""
    config, weights, (rows, length) = drafter.config, drafter.arrays(), batch.shape
    hidden, embedded = jax.lax.stop_gradient((hidden, embedded))
    blocks = Blocks.of(config, batch)
    count = blocks.starts.size
    states = propose(
        config,
        weights,
        _taken(hidden, blocks.before).reshape(count, config.window, -1),
        blocks.known.reshape(count),
        _taken(embedded, blocks.starts).reshape(count, -1),
    ).reshape(*blocks.drafted.shape, -1)

    @jax.checkpoint
    def compared(_: None, inputs: tuple[Array, Array]) -> tuple[None, tuple[Array, Array]]:
        """Compare one place of all blocks, so that no more logits are held at once."""
        target = jax.lax.stop_gradient(jax.nn.log_softmax(logits(_taken(hidden, inputs[1]))))
        before = _taken(embedded, inputs[1]).reshape(count, -1)
        follows = following(weights, before).reshape(*inputs[1].shape, -1)
        draft = jax.nn.log_softmax(logits(inputs[0]) + follows)
        divergence = jnp.sum(jnp.exp(target) * (target - draft), axis=-1)
        return None, (divergence, jnp.sum(jnp.exp(jnp.minimum(target, draft)), axis=-1))

    _, found = jax.lax.scan(compared, None, (jnp.moveaxis(states, 2, 0), jnp.moveaxis(blocks.drafted - 1, 2, 0)))
    divergence, overlap = (jnp.moveaxis(x, 0, 2) for x in found)
    order = jnp.broadcast_to(jnp.arange(1, config.tokens + 1, dtype=jnp.int32)[None, None], blocks.valid.shape)
    reached = jax.lax.stop_gradient(jnp.cumprod(jnp.where(blocks.valid, overlap, 0.0), axis=-1))
    places = jnp.where(blocks.valid, blocks.drafted, length).reshape(rows, -1)

    def by_token(x: Array) -> Array:
        put = jax.vmap(lambda values, places: jnp.zeros(length, x.dtype).at[places].set(values, mode="drop"))
        return put(x.reshape(rows, -1), places)

    names = ("order", "divergence", "overlap", "reached")
    return DraftStats(**dict(zip(names, map(by_token, (order, divergence, overlap, reached)), strict=True)))
