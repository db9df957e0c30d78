"""Gemma 4, text: KV sharing between layers, per-layer inputs, experts beside the dense MLP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from posttrain.errors import ConfigError
from posttrain.models.config import (
    AttentionConfig,
    BlockConfig,
    Compute,
    LayerInputsConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    RouterConfig,
)
from posttrain.models.decoder import Block
from posttrain.models.families import gemma2
from posttrain.models.fields import Fields
from posttrain.models.forward_state import Context, ForwardState, LayerIndex
from posttrain.models.hf import activation, attention_config, decoder_config, layer_types
from posttrain.models.layers import MLP, Init, Linear, RMSNorm, gated, param
from posttrain.models.moe import Experts, MoE, Router
from posttrain.models.names import LAYER, Name, linear
from posttrain.models.rope import rope_from_hf

ARCHITECTURE = "Gemma4ForCausalLM"
GATE_UP = ("mlp.experts.gate", "mlp.experts.up")
NAMES = {
    **gemma2.NAMES,
    "layer_inputs.embed.embedding": Name("model.embed_tokens_per_layer.weight"),
    "layer_inputs.projection.kernel": Name("model.per_layer_model_projection.weight", transpose=True),
    "layer_inputs.norm.scale": Name("model.per_layer_projection_norm.weight"),
    **linear("input_gate", f"{LAYER}.per_layer_input_gate"),
    **linear("input_projection", f"{LAYER}.per_layer_projection"),
    "input_norm.scale": Name(f"{LAYER}.post_per_layer_input_norm.weight"),
    "scale": Name(f"{LAYER}.layer_scalar"),
    "mlp.shared.norm.scale": Name(f"{LAYER}.pre_feedforward_layernorm.weight"),
    "mlp.shared.post_norm.scale": Name(f"{LAYER}.post_feedforward_layernorm_1.weight"),
    **linear("mlp.shared.gate", f"{LAYER}.mlp.gate_proj"),
    **linear("mlp.shared.up", f"{LAYER}.mlp.up_proj"),
    **linear("mlp.shared.down", f"{LAYER}.mlp.down_proj"),
    "mlp.router.norm.scale": Name(f"{LAYER}.router.scale"),
    **linear("mlp.router.proj", f"{LAYER}.router.proj"),
    "mlp.router.scale": Name(f"{LAYER}.router.per_expert_scale"),
    "mlp.experts.norm.scale": Name(f"{LAYER}.pre_feedforward_layernorm_2.weight"),
    "mlp.experts.post_norm.scale": Name(f"{LAYER}.post_feedforward_layernorm_2.weight"),
    **{path: Name(f"{LAYER}.experts.gate_up_proj", transpose=True, fused=GATE_UP) for path in GATE_UP},
    "mlp.experts.down": Name(f"{LAYER}.experts.down_proj", transpose=True),
}

ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
}
"""Default `rope_parameters`."""


def config_from_hf(hf: Fields) -> ModelConfig:
    hf.refuse("use_bidirectional_attention", False, "vision", why="attention between text tokens is causal")
    kinds = [
        (i % 6 and "sliding_attention") or "full_attention" for i in range(1, hf.get("num_hidden_layers", int) + 1)
    ]
    # The last layer is always full attention.
    kinds = [*layer_types(hf, kinds)[:-1], "full_attention"]
    attentions = _attentions(hf, kinds)
    wide = 2 if hf.get("use_double_wide_mlp", bool, False) else 1
    mlp = MLPConfig(
        dim=hf.get("intermediate_size", int), activation=activation(hf, "hidden_activation", "gelu_pytorch_tanh")
    )
    mlps = [mlp if attention.reuses is None else replace(mlp, dim=wide * mlp.dim) for attention in attentions]
    dim, vocab_size = hf.get("hidden_size_per_layer_input", int, 256), hf.get("vocab_size", int)
    inputs_vocab = hf.get("vocab_size_per_layer_input", int, 262_144)  # also written where there are no inputs
    inputs = LayerInputsConfig(vocab_size=inputs_vocab, dim=dim) if dim else None
    if inputs is not None and inputs.vocab_size < vocab_size:
        raise ConfigError(f"vocab_size_per_layer_input={inputs.vocab_size} must be at least vocab_size={vocab_size}")
    config = decoder_config(
        hf,
        attentions,
        _mixtures(hf, mlps) if hf.get("enable_moe_block", bool, False) else mlps,
        block={"norms": "sandwich"},
        embed_scale=hf.get("hidden_size", int) ** 0.5,
        logits_soft_cap=hf.optional("final_logit_softcapping", float),
        tie_embeddings=True,
        layer_inputs=inputs,
    )
    return replace(config, block=Gemma4Block)


def _mixtures(hf: Fields, mlps: Sequence[MLPConfig]) -> list[MoEConfig]:
    """MoE with the dense MLP of each layer as shared expert."""
    num_experts, top_k = hf.get("num_experts", int), hf.get("top_k_experts", int)
    expert = replace(mlps[0], dim=hf.get("moe_intermediate_size", int))
    return [
        MoEConfig(num_experts=num_experts, top_k=top_k, expert=expert, router=RouterConfig(), shared=mlp)
        for mlp in mlps
    ]


def _attentions(hf: Fields, kinds: Sequence[str]) -> list[AttentionConfig]:
    """Attention of each layer; the last layers reuse keys and values of the last earlier layer of their type."""
    window, bias = hf.get("sliding_window", int, 512), hf.get("attention_bias", bool, False)
    keys_as_values = hf.get("attention_k_eq_v", bool, False)
    ropes = Fields({"rope_parameters": hf.get("rope_parameters", dict, ROPES)})
    first = len(kinds) - hf.get("num_kv_shared_layers", int, 0)
    own, reusing = kinds[: max(first, 0)], kinds[max(first, 0) :]
    if missing := set(reusing) - set(own):
        raise ConfigError(
            f"num_kv_shared_layers={len(kinds) - first} leaves no layer of type {', '.join(sorted(missing))} "
            "whose keys and values the others can reuse"
        )
    attentions = []
    for i, (kind, sizes) in enumerate(zip(kinds, _head_sizes(hf, kinds), strict=True)):
        local, head_dim = kind == "sliding_attention", sizes.get("head_dim", int)
        attention = attention_config(
            sizes,
            rope=rope_from_hf(ropes, head_dim, layer_type=kind),
            head_dim=head_dim,
            scale=1.0,
            window=window if local else None,
            qk_norm="head",
            value_norm=True,
            keys_as_values=keys_as_values and not local,
            qkv_bias=bias,
            out_bias=bias,
            keeps=kind if i < first and kind in reusing and kind not in own[i + 1 :] else None,
            reuses=kind if i >= first else None,
        )
        sizes.refuse_unread()
        attentions.append(attention)
    return attentions


def _head_sizes(hf: Fields, kinds: Sequence[str]) -> list[Fields]:
    """Number and size of heads in each layer."""
    plain = {
        "num_attention_heads": hf.get("num_attention_heads", int),
        "num_key_value_heads": hf.get("num_key_value_heads", int, 4),
        "head_dim": hf.get("head_dim", int, 256),
    }
    if "per_layer_config" in hf:
        changes = {str(layer): change for layer, change in hf.get("per_layer_config", dict).items()}
        if strange := [layer for layer in changes if not (layer.isdecimal() and int(layer) < len(kinds))]:
            raise ConfigError(f"per_layer_config: {', '.join(strange)} is not a layer index; use 0 to {len(kinds) - 1}")
        by_layer = {int(layer): change for layer, change in changes.items()}
    else:
        change = {"head_dim": hf.get("global_head_dim", int, 512)}
        if heads := hf.optional("num_global_key_value_heads", int) if hf.get("attention_k_eq_v", bool, False) else None:
            change["num_key_value_heads"] = heads
        by_layer = {i: change for i, kind in enumerate(kinds) if kind == "full_attention"}
    return [Fields(plain | by_layer.get(i, {}), where=f"per_layer_config.{i}") for i in range(len(kinds))]


class Gemma4Block(Block):
    """Block with a per-layer input and a scaled output. In an MoE layer the experts run beside the dense MLP, each with
    its own norms."""

    def __init__(self, config: BlockConfig, model: ModelConfig, repeats: int, init: Init):
        super().__init__(config, model, repeats, init)
        mlp, dim = config.mlp, model.embed_dim
        if isinstance(mlp, MoEConfig):
            assert isinstance(self.mlp, MoE) and mlp.shared is not None
            self.mlp_norm = None
            self.mlp.router = Gemma4Router(mlp, model, repeats, init)
            self.mlp.experts = Gemma4Experts(mlp, model, repeats, init)
            self.mlp.shared = Gemma4MLP(mlp.shared, model, repeats, init)
        self.activation = mlp.expert.activation if isinstance(mlp, MoEConfig) else mlp.activation
        size = model.layer_inputs.dim if model.layer_inputs else 0
        gate, projection = (("embed", "latent"), (dim, size)), (("latent", "embed"), (size, dim))
        self.input_gate = Linear(repeats, *gate, init, bias=False) if size else None
        self.input_projection = Linear(repeats, *projection, init, bias=False) if size else None
        self.input_norm = _norm(model, repeats, init) if size else None
        self.scale = param(jnp.ones((repeats, 1), init.dtype), ("layers", "latent"), "buffer")

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, state: ForwardState, index: LayerIndex
    ) -> Float[Array, "B T D"]:
        x = super().__call__(x, context, state, index)
        if self.input_gate is not None:
            assert (
                self.input_projection is not None and self.input_norm is not None and context.layer_inputs is not None
            )
            inputs = gated(self.activation, self.input_gate(x), context.layer_inputs[index.layer])
            x = x + self.input_norm(self.input_projection(inputs))
        return x * self.scale[...][0].astype(x.dtype)


def _norm(model: ModelConfig, repeats: int, init: Init) -> RMSNorm:
    return RMSNorm((repeats,), "embed", model.embed_dim, eps=model.norm_eps, dtype=init.dtype)


class Gemma4Router(Router):
    """Router on normalized tokens, with a scale per expert."""

    def __init__(self, config: MoEConfig, model: ModelConfig, repeats: int, init: Init):
        super().__init__(config, repeats, model.embed_dim, init)
        self.norm = _norm(model, repeats, init)
        self.scale = param(jnp.ones((repeats, config.num_experts), init.dtype), ("layers", "router"), "norm")

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T E"]:
        return super().logits(self.norm(x.astype(jnp.float32)) * x.shape[-1] ** -0.5)

    def weights(self, scores: Float[Array, "B T E"], experts: Int[Array, "B T k"]) -> Float[Array, "B T k"]:
        return super().weights(scores, experts) * self.scale[...].astype(jnp.float32)[experts]


class Gemma4Experts(Experts):
    """Experts with pre- and post-norm."""

    def __init__(self, config: MoEConfig, model: ModelConfig, repeats: int, init: Init):
        super().__init__(config, repeats, model.embed_dim, init)
        self.norm, self.post_norm = _norm(model, repeats, init), _norm(model, repeats, init)

    def __call__(
        self, x: Float[Array, "N D"], experts: Int[Array, "N k"], weights: Float[Array, "N k"], compute: Compute
    ) -> Float[Array, "N D"]:
        return self.post_norm(super().__call__(self.norm(x), experts, weights, compute))


class Gemma4MLP(MLP):
    """Dense MLP with pre- and post-norm."""

    def __init__(self, config: MLPConfig, model: ModelConfig, repeats: int, init: Init):
        super().__init__(config, repeats, model.embed_dim, init)
        self.norm, self.post_norm = _norm(model, repeats, init), _norm(model, repeats, init)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.post_norm(super().__call__(self.norm(x)))
