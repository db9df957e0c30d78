"""Decoder-only transformer for all families: embedding, stages of blocks, final norm, head; rematerialization."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jaxtyping import Float, Int

from posttrain.batch import Batch, RouterStats
from posttrain.kernels.platform import computed_once, platform_of, unstack_layers
from posttrain.mesh import head_shards
from posttrain.models.activations import (
    BLOCK_INPUT,
    DOWN,
    HIDDEN,
    PROJECTION,
    Features,
    StageTaps,
    TapArrays,
    Taps,
    check_saved,
    product_inputs,
    rematerialized,
    split_tokens,
    whole_rows,
)
from posttrain.models.attention import Attention, LatentAttention
from posttrain.models.cache import KVCache, PagedCache
from posttrain.models.config import (
    BlockConfig,
    Compute,
    LatentAttentionConfig,
    ModelConfig,
    MoEConfig,
    Rope,
    StageConfig,
)
from posttrain.models.forward_state import Context, ForwardState, LayerIndex, Routing, StoredKeys
from posttrain.models.layers import MLP, Adaptable, Embedding, Init, LayerInputs, Linear, RMSNorm, ScalarHead
from posttrain.models.moe import Experts, ExpertStack, MoE
from posttrain.models.rope import Tables, rope_tables
from posttrain.models.vision.tower import ImageInputs, PlacedImages, Tower

if TYPE_CHECKING:
    from posttrain.models.drafter import BlockDrafter

SPLIT_LAYERS = {"cpu": 32, "gpu": 64}
"""Maximum depth up to which decoding unrolls the layers, by platform: a scan there copies weights at every token, on a
CPU the cache as well. On TPU products read slices of a stack in place."""

NO_TOKEN = -1e30
"""Logit of an id without a token: probability 0, finite so that its product with the probability is 0."""

FusedPart = Literal["attention", "mlp"]
FUSIBLE: dict[FusedPart, type[Attention | MLP]] = {"attention": Attention, "mlp": MLP}


class Block(nnx.Module):
    """Residual block: attention and MLP (or MoE) with their norms."""

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

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, state: ForwardState, index: LayerIndex
    ) -> Float[Array, "B T D"]:
        mesh = context.token_mesh
        inputs = product_inputs(x if self.attention_norm is None else self.attention_norm(x), mesh)
        out = split_tokens(self.attention(inputs, context, state, index), mesh)
        x = self._add(x, checkpoint_name(out, PROJECTION), self.attention_post_norm)
        inputs = x if self.mlp_norm is None else self.mlp_norm(x)
        if isinstance(self.mlp, MoE):
            out = self.mlp(whole_rows(inputs, mesh), context, state, index)
        else:
            out = self.mlp(product_inputs(inputs, mesh))
        return self._add(x, checkpoint_name(split_tokens(out, mesh), DOWN), self.mlp_post_norm)

    def _add(self, x: Float[Array, "B T D"], new: Float[Array, "B T D"], norm: RMSNorm | None) -> Float[Array, "B T D"]:
        new = new if norm is None else norm(new)
        scale = self.config.residual_scale
        return x + (new if scale == 1.0 else new * jnp.asarray(scale, new.dtype))


class LayerCarry(NamedTuple):
    """Values passed from layer to layer."""

    x: Float[Array, "B T D"]
    cache: KVCache | PagedCache | None
    kept: dict[str, StoredKeys]


BlockRouting = list[tuple[RouterStats, Int[Array, "B T k"]]]
LargestLogits = dict[str, Float[Array, "R B N"]]
"""Largest attention logit of each head in each row, for all repeats of a block, by its path: `stages.0.blocks.0`."""
ByRepeat = tuple[BlockRouting, list[Float[Array, "*R B N"]]]
"""Routing and largest attention logits of the blocks of a pattern."""
OfLayer = tuple[LayerCarry, BlockRouting, TapArrays, list[Float[Array, "B N"]]]
"""Carry, routing, collected activations and largest attention logits of a layer."""
ScanCarry = tuple[LayerCarry, list[TapArrays]]
"""Scan carry over the repeats of a stage: layer carry and collected activations."""


class DecoderStage(nnx.Module):
    """Blocks of one pattern, each with the stacked weights of all repeats."""

    def __init__(self, config: StageConfig, model: ModelConfig, first: LayerIndex, init: Init):
        self.repeats = config.repeats
        self.first = first
        self.moe = tuple(isinstance(block.mlp, MoEConfig) for block in config.blocks)
        block_class = cast(type[Block], model.block or Block)
        self.blocks = nnx.List([block_class(block, model, config.repeats, init) for block in config.blocks])

    def __call__(
        self, layer_carry: LayerCarry, context: Context, *, unroll: bool
    ) -> tuple[LayerCarry, list[tuple[RouterStats, Int[Array, "R B T k"]]], Features, list[Float[Array, "R B N"]]]:
        """Apply the layers in order.

        Returns the carry, the routing of each MoE block in the pattern stacked over repeats, the collected activations,
        and the largest attention logits of each block, if they are asked for.
        """
        parts: list[Any] = [nnx.split(block, ExpertStack, ...) for block in self.blocks]
        taps = None
        if context.taps is not None:
            configs = [block.config for block in self.blocks]
            taps = StageTaps(context.taps, configs, self.repeats, int(self.first.layer))

        def pattern(carry: ScanCarry, inputs: tuple[list[Any], int | Array]) -> tuple[ScanCarry, ByRepeat]:
            layer_carry, collected = carry
            routing: BlockRouting = []
            largest: list[Array] = []
            for index, (graph, stacks, _) in enumerate(parts):
                names = () if taps is None else taps.names(index)
                layer_carry, block_routing, tapped, block_largest = self._block(
                    index, graph, layer_carry, (stacks, inputs[0][index]), inputs[1], context, names
                )
                routing += block_routing
                largest += block_largest
                if taps is not None:
                    collected = taps.put(collected, index, inputs[1], {HIDDEN: layer_carry.x, **tapped})
            return (layer_carry, collected), (routing, largest)

        weights = [state for *_, state in parts]
        carry: ScanCarry = (layer_carry, [] if taps is None else taps.empty(layer_carry.x))
        if self.repeats > 1 and not unroll:
            carry, by_repeat = jax.lax.scan(pattern, carry, (weights, jnp.arange(self.repeats, dtype=jnp.int32)))
        else:
            leaves, tree = jax.tree.flatten(weights)
            layers = zip(*(unstack_layers(w, jnp.minimum(context.segments[0, 0], 0)) for w in leaves), strict=True)
            # Trace the pattern once for several repeats.
            one, number = (pattern, int) if self.repeats == 1 else (jax.jit(pattern), jnp.int32)
            repeats = []
            for repeat, here in enumerate(layers):
                carry, of_repeat = one(carry, (jax.tree.unflatten(tree, here), number(repeat)))
                repeats.append(of_repeat)
            by_repeat = jax.tree.map(lambda *repeats: jnp.stack(repeats), *repeats)
        routing, largest = by_repeat
        return carry[0], routing, {} if taps is None else taps.by_layer(carry[1]), largest

    def _block(
        self,
        index: int,
        graph: Any,
        layer_carry: LayerCarry,
        weights: tuple[Any, Any],
        repeat: int | Array,
        context: Context,
        names: Sequence[str],
    ) -> OfLayer:
        """One layer under the run's `remat` policy."""

        def run(layer_carry: LayerCarry, weights: tuple[Any, Any]) -> OfLayer:
            state = ForwardState(cache=layer_carry.cache, kept=dict(layer_carry.kept))
            block: Block = nnx.merge(graph, *weights)
            x = block(checkpoint_name(layer_carry.x, BLOCK_INPUT), context, state, self._layer_index(index, repeat))
            if block.config.deepstack and context.placed is not None:
                x = context.placed.deeper(x, self._layer_index(index, repeat).layer)
            tapped = {name: state.projected[name] for name in names if name != HIDDEN}
            tapped = {name: heads.reshape(*heads.shape[:2], -1) for name, heads in tapped.items()}
            largest = [] if state.largest is None else [state.largest]
            return LayerCarry(x, state.cache, state.kept), state.routing, tapped, largest

        done: OfLayer = rematerialized(run, context.compute.remat)(layer_carry, weights)
        return done

    def _layer_index(self, index: int, repeat: int | Array) -> LayerIndex:
        before = sum(self.moe[:index])
        return LayerIndex(
            slot=self.first.slot + index,
            repeat=repeat,
            layer=self.first.layer + repeat * len(self.moe) + index,
            moe=self.first.moe + repeat * sum(self.moe) + before,
        )

    def split_repeats(self) -> list[DecoderStage]:
        """Split into stages with one repeat each, slicing the stacked weights."""
        graph, weights = nnx.split(self)
        pieces = []
        for repeat in range(self.repeats):
            piece = nnx.merge(graph, jax.tree.map(lambda w, r=repeat: w[r : r + 1], weights))
            piece.repeats = 1
            piece.first = self._layer_index(0, repeat)
            pieces.append(piece)
        return pieces


class Decoder(nnx.Module):
    """Decoder-only transformer; families differ by `config`.

    >>> hidden, _ = model(tokens, positions, segments)  # doctest: +SKIP
    >>> logits = model.logits(hidden)  # doctest: +SKIP
    """

    def __init__(self, config: ModelConfig, compute: Compute, *, dtype: np.dtype, rngs: nnx.Rngs):
        check_saved(config, compute.remat)
        self.config = config
        self.compute = compute
        self.unroll = False  # unroll the repeats of a pattern instead of scanning
        init = Init(config.initializer_range, dtype, rngs)
        self.embed = Embedding(config.vocab_size, config.embed_dim, init, scale=config.embed_scale)
        self.layer_inputs = LayerInputs(config, config.layer_inputs, init) if config.layer_inputs else None
        self.stages = nnx.List(
            [DecoderStage(s, config, first, init) for s, first in zip(config.stages, first_layers(config), strict=True)]
        )
        self.final_norm = RMSNorm(
            (), "embed", config.embed_dim, eps=config.norm_eps, dtype=dtype, offset=config.norm_offset
        )
        shape = (config.embed_dim, config.vocab_size)
        plain = config.tie_embeddings or config.scalar_head
        self.head = None if plain else Linear(1, ("embed", "vocab"), shape, init, bias=False)
        self.score = ScalarHead(config.embed_dim, init) if config.scalar_head else None
        self.tower = None if config.vision is None else Tower(config.vision, init)
        self.drafter: BlockDrafter | None = nnx.data(None)
        """Block drafter that is trained on the frozen model."""

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segments: Int[Array, "B T"],
        cache: KVCache | PagedCache | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache | PagedCache | None]:
        """Return hidden states after the final norm (input of `logits`) and the updated cache."""
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
        images: ImageInputs | None = None,
        placed: PlacedImages | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache | PagedCache | None, Routing | None]:
        """Forward pass that also returns the MoE routing (None: the model has no MoE layer).

        `experts`: routing to replay, such as the sampler's; the router chooses where negative. `noise` is added to the
        token embeddings. `parents`: as in `Batch`; not with a cache. `images`: with patches in rows without a cache
        only. `placed`: images that the tower has encoded before.
        """
        inputs = (tokens, positions, segments, cache, None, experts, noise, parents, images, False, placed)
        return self._forward(*inputs)[:3]

    def images_of(self, batch: Batch, number: int = 0) -> ImageInputs | None:
        """Images of a batch; None for text. `number`: that of the model in `Batch.encoded`. Raises ConfigError for
        arrays that do not fit the model."""
        return ImageInputs.of(batch, self.config, number) if batch.has_images else None

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
        images: ImageInputs | None = None,
        largest: bool = False,
    ) -> tuple[Float[Array, "B T D"], Routing | None, Features, LargestLogits]:
        """Forward pass without a cache that also returns collected activations and, with `largest`, the largest
        attention logits."""
        inputs = (tokens, positions, segments, None, taps, experts, noise, parents, images, largest)
        hidden, _, routing, collected, logits = self._forward(*inputs)
        return hidden, routing, collected, logits

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
        images: ImageInputs | None,
        largest: bool,
        placed: PlacedImages | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache | PagedCache | None, Routing | None, Features, LargestLogits]:
        assert cache is None or parents is None, "a cache row holds one sequence; parents need packed rows"
        assert cache is None or images is None or images.patches is None, "patches need rows without a cache"
        if placed is None and self.tower is not None and images is not None:
            placed = self.tower(images, self.compute)
        if placed is not None:
            tokens = placed.without_images(tokens)
        x = self.embed(tokens, self.compute.dtype, self.compute.mesh)
        if noise is not None:
            x = x + noise.astype(x.dtype)
        x, seen = (x, None) if placed is None else (placed(x), placed.rows > 0)
        ropes, by_axis = list(_ropes(self.config)), None if images is None else images.rope_positions

        def make() -> list[Tables]:
            return [rope_tables(rope, positions, by_axis) for rope in ropes]

        tables = computed_once(make, segments[0, 0] >= 0, self.compute.mesh) if cache is None else make()
        context = Context(
            positions=positions,
            segments=segments,
            parents=parents,
            rope=dict(zip(ropes, tables, strict=True)),
            compute=self.compute,
            experts=experts,
            layer_inputs=None if self.layer_inputs is None else self.layer_inputs(tokens, x, self.compute.mesh, seen),
            taps=taps,
            token_mesh=self.compute.mesh if cache is None else None,
            placed=placed,
            largest=largest,
        )
        x = split_tokens(x, context.token_mesh)
        layer_carry, routings, features, logits = LayerCarry(x, cache, {}), [], Features(), LargestLogits()
        for number, stage in enumerate(self.stages):
            layer_carry, routing, collected, of_blocks = stage(layer_carry, context, unroll=self.unroll)
            features |= collected
            logits |= {f"stages.{number}.blocks.{block}": one for block, one in enumerate(of_blocks)}
            if routing:
                # [R, pattern, ...] -> [layers, ...]
                stacked = jax.tree.map(lambda *blocks: jnp.stack(blocks, axis=1), *routing)
                routings.append(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), stacked))
        hidden = whole_rows(self.final_norm(layer_carry.x), context.token_mesh)
        if not routings:
            return hidden, layer_carry.cache, None, features, logits
        stats, chosen = jax.tree.map(lambda *stages: jnp.concatenate(stages), *routings)
        return hidden, layer_carry.cache, Routing(experts=chosen, stats=stats), features, logits

    def for_decoding(self, *, fuse: Collection[FusedPart] = ()) -> Decoder:
        """Return a copy for a decoding loop over single tokens; call it outside the loop, under `jit`.

        On CPU and GPU slices of stacked weights are copies, so they are made once here instead of per token, as are
        the DoRA gains on all platforms. On TPU experts are read from the stacks of all layers. `fuse`: parts whose
        products of one input become one, which accelerators read faster.
        The cache must be allocated for `decoding_config`.
        """
        config = decoding_config(self.config, self.compute.mesh)
        sliced = nnx.merge(*nnx.split(self))
        for _, node in list(nnx.iter_graph(sliced)):
            if isinstance(node, Adaptable):
                node.fix_gains()
        fusible = tuple(FUSIBLE[part] for part in fuse)
        for _, node in list(nnx.iter_graph(sliced)):
            if isinstance(node, fusible):
                node.fuse(head_shards(self.compute.mesh))
        if platform_of(self.compute.mesh) == "tpu" and self.head is not None:
            sliced.embed.widen()
        if config is not self.config:
            sliced.stages = nnx.List([piece for stage in sliced.stages for piece in stage.split_repeats()])
            for stage, first in zip(sliced.stages, first_layers(config), strict=True):
                stage.first = first
            sliced.config = config
        for _, node in list(nnx.iter_graph(sliced)):
            if isinstance(node, Experts):
                node.read_stacks(self.compute)
        return sliced

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """float32 logits; for log-probabilities of long rows use `token_stats`, which works in chunks."""
        c = self.config
        assert self.score is None, "a reward model has scores instead of logits"
        logits = self.embed.logits(hidden) if self.head is None else self.head.logits(hidden)
        if c.logits_scale != 1.0:
            logits = logits * c.logits_scale
        if c.logits_soft_cap is not None:
            logits = c.logits_soft_cap * jnp.tanh(logits / c.logits_soft_cap)
        if c.num_tokens is not None:
            logits = jnp.where(jnp.arange(c.vocab_size)[None, None] < c.num_tokens, logits, NO_TOKEN)
        return logits

    def scores(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T"]:
        """float32 score of every token from the scalar head, which depends on all tokens up to it."""
        assert self.score is not None, "only a reward model has scores"
        return self.score(hidden)


def _ropes(config: ModelConfig) -> dict[Rope, None]:
    """Distinct RoPE configurations in order, so that each table is traced once, not per layer."""
    blocks = (block for stage in config.stages for block in stage.blocks)
    return dict.fromkeys(rope for block in blocks if (rope := block.attention.rope))


def first_layers(config: ModelConfig) -> list[LayerIndex]:
    """Layer indices of the first layer of each stage."""
    firsts, index = [], LayerIndex(0, 0, 0, 0)
    for stage in config.stages:
        firsts.append(index)
        moe = sum(isinstance(block.mlp, MoEConfig) for block in stage.blocks)
        index = LayerIndex(
            index.slot + len(stage.blocks), 0, index.layer + stage.num_layers, index.moe + moe * stage.repeats
        )
    return firsts


def decoding_config(config: ModelConfig, mesh: Mesh | None) -> ModelConfig:
    """Configuration of `Decoder.for_decoding` on the platform of the mesh."""
    if config.num_layers > SPLIT_LAYERS.get(platform_of(mesh), 0):
        return config
    if all(stage.repeats == 1 for stage in config.stages):
        return config
    stages = tuple(replace(s, repeats=1) for s in config.stages for _ in range(s.repeats))
    return replace(config, stages=stages)
