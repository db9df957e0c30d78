"""The one decoder: embedding, stages of blocks, final norm, head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Int

from posttrain.batch import RouterStats
from posttrain.kernels.layout import computed_once, layers_of
from posttrain.models.attention import Attention
from posttrain.models.cache import KVCache
from posttrain.models.config import BlockConfig, Compute, LatentAttentionConfig, ModelConfig, MoEConfig, Rope
from posttrain.models.config import Stage as StageConfig
from posttrain.models.context import Context, Place, Routing, Stored, Tape
from posttrain.models.heads import ScalarHead
from posttrain.models.latent import LatentAttention
from posttrain.models.layers import MLP, Adaptable, Embedding, Init, LayerInputs, Linear, RMSNorm
from posttrain.models.moe import MoE
from posttrain.models.pages import PagedCache
from posttrain.models.remat import BLOCK_INPUT, rematerialized
from posttrain.models.rope import Tables, rope_tables
from posttrain.models.taps import HIDDEN, Features, Given, StageTaps, Taps

SPLIT_LAYERS_ON_CPU = 32
"""Up to this depth decoding on a CPU unrolls the layers: a scan copies weights and cache at every token."""

NO_TOKEN = -1e30
"""Logit of an id without a token: its probability is 0, also where it is multiplied by the logit."""


class Block(nnx.Module):
    """A residual block."""

    def __init__(self, config: BlockConfig, model: ModelConfig, repeats: int, init: Init):
        self.config = config

        def make_norm(where: str) -> RMSNorm | None:
            wanted = config.norms in (where, "sandwich")
            return RMSNorm.of(model, repeats, "embed", model.embed_dim, init) if wanted else None

        self.attention_norm, self.mlp_norm = make_norm("pre"), make_norm("pre")
        self.attention_post_norm, self.mlp_post_norm = make_norm("post"), make_norm("post")
        self.attention: Attention | LatentAttention = (
            LatentAttention(config.attention, model, repeats, init)
            if isinstance(config.attention, LatentAttentionConfig)
            else Attention(config.attention, model, repeats, init)
        )
        self.mlp: MLP | MoE = (
            MoE(config.mlp, repeats, model.embed_dim, init)
            if isinstance(config.mlp, MoEConfig)
            else MLP(config.mlp, repeats, model.embed_dim, init)
        )

    def __call__(self, x: Float[Array, "B T D"], context: Context, tape: Tape, place: Place) -> Float[Array, "B T D"]:
        inputs = x if self.attention_norm is None else self.attention_norm(x)
        x = self._add(x, self.attention(inputs, context, tape, place), self.attention_post_norm)
        inputs = x if self.mlp_norm is None else self.mlp_norm(x)
        out = self.mlp(inputs, context, tape, place) if isinstance(self.mlp, MoE) else self.mlp(inputs)
        return self._add(x, out, self.mlp_post_norm)

    def _add(self, x: Float[Array, "B T D"], new: Float[Array, "B T D"], norm: RMSNorm | None) -> Float[Array, "B T D"]:
        new = new if norm is None else norm(new)
        scale = self.config.residual_scale
        return x + (new if scale == 1.0 else new * jnp.asarray(scale, new.dtype))


class Passed(NamedTuple):
    """What goes from layer to layer."""

    x: Float[Array, "B T D"]
    cache: KVCache | PagedCache | None
    kept: dict[str, Stored]


RoutingOf = list[tuple[RouterStats, Int[Array, "B T k"]]]
Carry = tuple[Passed, list[Given]]
"""From repeat to repeat of a stage: also what is tapped so far."""


class Stage(nnx.Module):
    """The blocks of a pattern, each holding the stacked weights of all its repeats."""

    def __init__(self, config: StageConfig, model: ModelConfig, first: Place, init: Init):
        self.repeats = config.repeats
        self.first = first
        self.moe = tuple(isinstance(block.mlp, MoEConfig) for block in config.blocks)
        block_class = cast(type[Block], model.block or Block)
        self.blocks = nnx.List([block_class(block, model, config.repeats, init) for block in config.blocks])

    def __call__(
        self, passed: Passed, context: Context, *, unroll: bool
    ) -> tuple[Passed, list[tuple[RouterStats, Int[Array, "R B T k"]]], Features]:
        """The layers in order; also the routing of each mixture of experts in the pattern, stacked over the repeats,
        and what is tapped."""
        parts = [nnx.split(block) for block in self.blocks]
        taps = None
        if context.taps is not None:
            configs = [block.config for block in self.blocks]
            taps = StageTaps(context.taps, configs, self.repeats, int(self.first.layer))

        def pattern(carry: Carry, inputs: tuple[list[Any], int | Array]) -> tuple[Carry, RoutingOf]:
            passed, taken = carry
            routing: RoutingOf = []
            for index, (graph, _) in enumerate(parts):
                names = () if taps is None else taps.names(index)
                passed, of_block, given = self._block(index, graph, passed, inputs[0][index], inputs[1], context, names)
                routing += of_block
                if taps is not None:
                    taken = taps.put(taken, index, inputs[1], {HIDDEN: passed.x, **given})
            return (passed, taken), routing

        weights = [state for _, state in parts]
        carry: Carry = (passed, [] if taps is None else taps.empty(passed.x))
        if self.repeats > 1 and not unroll:
            carry, routing = jax.lax.scan(pattern, carry, (weights, jnp.arange(self.repeats, dtype=jnp.int32)))
        else:
            leaves, tree = jax.tree.flatten(weights)
            layers = zip(*(layers_of(w, jnp.minimum(context.segments[0, 0], 0)) for w in leaves), strict=True)
            # Traced once for all of several.
            one, number = (pattern, int) if self.repeats == 1 else (jax.jit(pattern), jnp.int32)
            routings = []
            for repeat, here in enumerate(layers):
                carry, of_repeat = one(carry, (jax.tree.unflatten(tree, here), number(repeat)))
                routings.append(of_repeat)
            routing = jax.tree.map(lambda *repeats: jnp.stack(repeats), *routings)
        return carry[0], routing, {} if taps is None else taps.by_layer(carry[1])

    def _block(
        self,
        index: int,
        graph: Any,
        passed: Passed,
        weights: Any,
        repeat: int | Array,
        context: Context,
        names: Sequence[str],
    ) -> tuple[Passed, RoutingOf, Given]:
        """One layer, of which the backward pass keeps what the run's `remat` says; and what it hands out."""

        def run(passed: Passed, weights: Any) -> tuple[Passed, RoutingOf, Given]:
            tape = Tape(cache=passed.cache, kept=dict(passed.kept))
            block: Block = nnx.merge(graph, weights)
            x = block(checkpoint_name(passed.x, BLOCK_INPUT), context, tape, self._place(index, repeat))
            given = {name: tape.projected[name] for name in names if name != HIDDEN}
            given = {name: heads.reshape(*heads.shape[:2], -1) for name, heads in given.items()}
            return Passed(x, tape.cache, tape.kept), tape.routing, given

        return rematerialized(run, context.compute.remat)(passed, weights)

    def _place(self, index: int, repeat: int | Array) -> Place:
        before = sum(self.moe[:index])
        return Place(
            slot=self.first.slot + index,
            repeat=repeat,
            layer=self.first.layer + repeat * len(self.moe) + index,
            moe=self.first.moe + repeat * sum(self.moe) + before,
        )

    def split_repeats(self) -> list[Stage]:
        """One stage of a single repeat for each of its own, weights sliced out of the stacks."""
        graph, weights = nnx.split(self)
        pieces = []
        for repeat in range(self.repeats):
            piece = nnx.merge(graph, jax.tree.map(lambda w, r=repeat: w[r : r + 1], weights))
            piece.repeats = 1
            piece.first = self._place(0, repeat)
            pieces.append(piece)
        return pieces


class Decoder(nnx.Module):
    """A decoder-only transformer; what differs between families is in `config`.

    >>> hidden, _ = model(tokens, positions, segments)  # doctest: +SKIP
    >>> logits = model.logits(hidden)  # doctest: +SKIP
    """

    def __init__(self, config: ModelConfig, compute: Compute, *, dtype: np.dtype, rngs: nnx.Rngs):
        self.config = config
        self.compute = compute
        self.unroll = False  # repeats of a pattern one after the other, and not in a loop
        init = Init(config.initializer_range, dtype, rngs)
        self.embed = Embedding(config.vocab_size, config.embed_dim, init, scale=config.embed_scale)
        self.layer_inputs = LayerInputs(config, config.layer_inputs, init) if config.layer_inputs else None
        self.stages = nnx.List(
            [Stage(s, config, first, init) for s, first in zip(config.stages, first_places(config), strict=True)]
        )
        self.final_norm = RMSNorm(
            (), "embed", config.embed_dim, eps=config.norm_eps, dtype=dtype, offset=config.norm_offset
        )
        shape = (config.embed_dim, config.vocab_size)
        plain = config.tie_embeddings or config.scalar_head
        self.head = None if plain else Linear(1, ("embed", "vocab"), shape, init, bias=False)
        self.score = ScalarHead(config.embed_dim, init) if config.scalar_head else None

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segments: Int[Array, "B T"],
        cache: KVCache | PagedCache | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache | PagedCache | None]:
        """Hidden states after the final norm, ready for `logits`, and the cache with these tokens written into it."""
        hidden, cache, _ = self.forward(tokens, positions, segments, cache)
        return hidden, cache

    def forward(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segments: Int[Array, "B T"],
        cache: KVCache | PagedCache | None = None,
        *,
        experts: Int[Array, "M B T k"] | None = None,
        noise: Float[Array, "B T D"] | None = None,
        parents: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache | PagedCache | None, Routing | None]:
        """As calling the model, and the routing of its mixtures of experts (None: it has none).

        `experts`: those to use, such as the ones that a sampler used; the router chooses where they are negative.
        `noise` is added to the embedded tokens. `parents`: as `Batch` has them; not with a cache.
        """
        return self._forward(tokens, positions, segments, cache, None, experts, noise, parents)[:3]

    def features(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segments: Int[Array, "B T"],
        taps: Taps | None,
        *,
        experts: Int[Array, "M B T k"] | None = None,
        noise: Float[Array, "B T D"] | None = None,
        parents: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Routing | None, Features]:
        """As `forward` without a cache, and what layers hand out."""
        hidden, _, routing, found = self._forward(tokens, positions, segments, None, taps, experts, noise, parents)
        return hidden, routing, found

    def _forward(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segments: Int[Array, "B T"],
        cache: KVCache | PagedCache | None,
        taps: Taps | None,
        experts: Int[Array, "M B T k"] | None,
        noise: Float[Array, "B T D"] | None,
        parents: Int[Array, "B T"] | None,
    ) -> tuple[Float[Array, "B T D"], KVCache | PagedCache | None, Routing | None, Features]:
        assert cache is None or parents is None, "a row of the cache is one sequence"
        x = self.embed(tokens, self.compute.dtype)
        if noise is not None:
            x = x + noise.astype(x.dtype)
        ropes = list(_ropes(self.config))

        def make() -> list[Tables]:
            return [rope_tables(rope, positions) for rope in ropes]

        tables = computed_once(make, segments[0, 0] >= 0, self.compute.mesh) if cache is None else make()
        context = Context(
            positions=positions,
            segments=segments,
            parents=parents,
            rope=dict(zip(ropes, tables, strict=True)),
            compute=self.compute,
            experts=experts,
            layer_inputs=None if self.layer_inputs is None else self.layer_inputs(tokens, x),
            taps=taps,
        )
        passed, routings, features = Passed(x, cache, {}), [], Features()
        for stage in self.stages:
            passed, routing, found = stage(passed, context, unroll=self.unroll)
            features |= found
            if routing:
                # [R, pattern, ...] -> [layers, ...]
                stacked = jax.tree.map(lambda *blocks: jnp.stack(blocks, axis=1), *routing)
                routings.append(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), stacked))
        hidden = self.final_norm(passed.x)
        if not routings:
            return hidden, passed.cache, None, features
        stats, chosen = jax.tree.map(lambda *stages: jnp.concatenate(stages), *routings)
        return hidden, passed.cache, Routing(experts=chosen, stats=stats), features

    def for_decoding(self) -> Decoder:
        """The same function, for a loop over single tokens; call it outside of the loop, under `jit`.

        On CPU the slices of stacked weights are real copies, so they are made once here instead of at every token, as
        are the norms of DoRA everywhere. The cache must be one for `decoding_config`.
        """
        config = decoding_config(self.config)
        sliced = nnx.merge(*nnx.split(self))
        for _, node in nnx.iter_graph(sliced):
            if isinstance(node, Adaptable):
                node.fix_gains()
        if config is self.config:
            return sliced
        sliced.stages = nnx.List([piece for stage in sliced.stages for piece in stage.split_repeats()])
        for stage, first in zip(sliced.stages, first_places(config), strict=True):
            stage.first = first
        sliced.config = config
        return sliced

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """float32 logits; for log-probabilities of long rows use `token_stats`, which never holds all of them."""
        c = self.config
        assert self.score is None, "a reward model has scores, no logits"
        logits = self.embed.logits(hidden) if self.head is None else self.head.logits(hidden)
        if c.logits_scale != 1.0:
            logits = logits * c.logits_scale
        if c.logits_soft_cap is not None:
            logits = c.logits_soft_cap * jnp.tanh(logits / c.logits_soft_cap)
        if c.num_tokens is not None:
            logits = jnp.where(jnp.arange(c.vocab_size)[None, None] < c.num_tokens, logits, NO_TOKEN)
        return logits

    def scores(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T"]:
        """The scalar head's float32 number of every token, which tells of all up to it."""
        assert self.score is not None, "only a reward model has scores"
        return self.score(hidden)


def _ropes(config: ModelConfig) -> dict[Rope, None]:
    """Those that differ, in order: tables made for every layer would be traced for every layer."""
    blocks = (block for stage in config.stages for block in stage.blocks)
    return dict.fromkeys(rope for block in blocks if (rope := block.attention.rope))


def first_places(config: ModelConfig) -> list[Place]:
    """Where the first layer of each stage stands."""
    places, place = [], Place(0, 0, 0, 0)
    for stage in config.stages:
        places.append(place)
        moe = sum(isinstance(block.mlp, MoEConfig) for block in stage.blocks)
        place = Place(
            place.slot + len(stage.blocks), 0, place.layer + stage.num_layers, place.moe + moe * stage.repeats
        )
    return places


def decoding_config(config: ModelConfig) -> ModelConfig:
    """The stages of `Decoder.for_decoding` on this platform."""
    if jax.default_backend() != "cpu" or config.num_layers > SPLIT_LAYERS_ON_CPU:
        return config
    if all(stage.repeats == 1 for stage in config.stages):
        return config
    stages = tuple(replace(s, repeats=1) for s in config.stages for _ in range(s.repeats))
    return replace(config, stages=stages)
