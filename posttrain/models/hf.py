"""What families share: reading `config.json`, writing it, and the names of tensors in Hugging Face checkpoints."""

from __future__ import annotations

import difflib
import importlib
import json
import pkgutil
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from posttrain.config import ConfigError
from posttrain.models import families
from posttrain.models.config import (
    Activation,
    AttentionConfig,
    BlockConfig,
    LinearScaling,
    Llama3Scaling,
    MLPConfig,
    ModelConfig,
    Rope,
    stages_of,
)

T = TypeVar("T")

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
"""`hidden_act` -> ours; the first name of an activation is the one that is written."""


@dataclass(frozen=True)
class Name:
    """A tensor's name in the checkpoint; `{layer}` is the index of its layer."""

    hf: str
    transpose: bool = False
    """Stored as [out, in], where ours is [in, out]."""


@runtime_checkable
class Family(Protocol):
    """What a file `families/<model_type>.py` has."""

    ARCHITECTURE: str
    """Name of the transformers class, for `config.json`."""
    NAMES: Mapping[str, Name]
    """Our parameter path, within its block for what a block holds -> the tensor's name."""

    def config_from_hf(self, hf: Mapping[str, Any]) -> ModelConfig: ...


def _linear(path: str, hf: str) -> dict[str, Name]:
    return {f"{path}.kernel": Name(f"{hf}.weight", transpose=True), f"{path}.bias": Name(f"{hf}.bias")}


DECODER_NAMES: Mapping[str, Name] = {
    "embed.embedding": Name("model.embed_tokens.weight"),
    "attention_norm.scale": Name("model.layers.{layer}.input_layernorm.weight"),
    **_linear("attention.q", "model.layers.{layer}.self_attn.q_proj"),
    **_linear("attention.k", "model.layers.{layer}.self_attn.k_proj"),
    **_linear("attention.v", "model.layers.{layer}.self_attn.v_proj"),
    **_linear("attention.o", "model.layers.{layer}.self_attn.o_proj"),
    "mlp_norm.scale": Name("model.layers.{layer}.post_attention_layernorm.weight"),
    **_linear("mlp.gate", "model.layers.{layer}.mlp.gate_proj"),
    **_linear("mlp.up", "model.layers.{layer}.mlp.up_proj"),
    **_linear("mlp.down", "model.layers.{layer}.mlp.down_proj"),
    "final_norm.scale": Name("model.norm.weight"),
    "head.kernel": Name("lm_head.weight", transpose=True),
}
"""Names of a Llama-like decoder."""


def family(model_type: str) -> Family:
    """The family's file. ConfigError for an unknown one."""
    known = sorted(module.name for module in pkgutil.iter_modules(families.__path__))
    if model_type not in known:
        near = difflib.get_close_matches(model_type, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"model_type={model_type!r} is not supported; {hint}known: {', '.join(known)}")
    return cast(Family, importlib.import_module(f"{families.__name__}.{model_type}"))


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The description in a `config.json`, of whatever family. ConfigError where it asks for what we do not have."""
    if "quantization_config" in hf:
        raise ConfigError("quantization_config: quantised checkpoints are not supported; use the unquantised one")
    return replace(family(get(hf, "model_type", str)).config_from_hf(hf), hf_json=json.dumps(hf))


INIT_KEYS = (
    *("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings"),
    *("initializer_range", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "attention_bias"),
    *("mlp_bias", "tie_word_embeddings", "use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)


def config_from_init(fields: Mapping[str, Any]) -> ModelConfig:
    """The description of a model made from scratch. ConfigError for an unknown field."""
    for key in fields:
        if key not in INIT_KEYS:
            near = difflib.get_close_matches(key, INIT_KEYS, n=1)
            raise ConfigError(f"{key}: unknown field" + (f"; did you mean {near[0]!r}?" if near else ""))
    config = family(get(fields, "model_type", str)).config_from_hf(fields)
    tokens = {key: value for key, value in fields.items() if key.endswith("_token_id")}
    return replace(config, hf_json=json.dumps(describe(config) | tokens))


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` of a model: the one that it was loaded with, or one made from its description."""
    if config.hf_json is not None:
        return cast(dict[str, Any], json.loads(config.hf_json))
    made = describe(config)
    if family(config.model_type).config_from_hf(made) != config:
        raise ConfigError(f"the family {config.model_type!r} has no config.json for this model: {config}")
    return made


def describe(config: ModelConfig) -> dict[str, Any]:
    """Every field of a Llama-like `config.json` in the style of the hub, which all versions of transformers read."""
    attention, mlp = config.blocks[0].attention, config.blocks[0].mlp
    windows = [block.attention.window for block in config.blocks]
    made: dict[str, Any] = {
        "architectures": [family(config.model_type).ARCHITECTURE],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": mlp.dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": next(name for name, ours in ACTIVATIONS.items() if ours == mlp.activation),
        "max_position_embeddings": config.max_positions,
        "initializer_range": config.initializer_range,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": attention.rope.theta,
        "rope_scaling": _describe_scaling(attention.rope),
        "attention_bias": attention.out_bias,
        "mlp_bias": mlp.bias,
        "tie_word_embeddings": config.tie_embeddings,
    }
    if any(windows):
        made |= {
            "use_sliding_window": True,
            "sliding_window": max(window or 0 for window in windows),
            "max_window_layers": 0,
            "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        }
    return made


def _describe_scaling(rope: Rope) -> dict[str, Any] | None:
    scaling = rope.scaling
    if scaling is None:
        return None
    if isinstance(scaling, LinearScaling):
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_positions,
    }


def get(hf: Mapping[str, Any], key: str, kind: type[T], default: T | None = None) -> T:
    """`hf[key]` of the type `kind`; without a default it is required. An explicit null counts as absent."""
    value = hf.get(key)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"{key}: the model's config.json must have it")
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise ConfigError(f"{key}: must be {kind.__name__}, got {value!r}")
    return value


def rope(hf: Mapping[str, Any]) -> Rope:
    """RoPE from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`. ConfigError for other kinds."""
    where = "rope_parameters" if hf.get("rope_parameters") is not None else "rope_scaling"
    fields = dict(get(hf, where, dict, {}))
    theta = get(fields if "rope_theta" in fields else hf, "rope_theta", float, 10_000.0)
    kind = fields.get("rope_type", fields.get("type", "default"))
    fields = {k: v for k, v in fields.items() if k not in ("rope_theta", "rope_type", "type")}
    if {**hf, **fields}.get("partial_rotary_factor") not in (None, 1.0):
        raise ConfigError("partial_rotary_factor: rotating a part of the head is not supported for this family")
    fields.pop("partial_rotary_factor", None)
    keys = {
        "default": set(fields) & {"original_max_position_embeddings"},
        "linear": {"factor"},
        "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    }
    if kind not in keys:
        raise ConfigError(f"{where}: rope_type {kind!r} is not supported; known: {', '.join(keys)}")
    if set(fields) != keys[kind]:
        raise ConfigError(f"{where}: rope_type {kind!r} takes {sorted(keys[kind])}, got {sorted(fields)}")
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, scaling=LinearScaling(factor=get(fields, "factor", float)))
    return Rope(
        theta=theta,
        scaling=Llama3Scaling(
            factor=get(fields, "factor", float),
            low_freq_factor=get(fields, "low_freq_factor", float),
            high_freq_factor=get(fields, "high_freq_factor", float),
            original_max_positions=get(fields, "original_max_position_embeddings", int),
        ),
    )


def activation(hf: Mapping[str, Any]) -> Activation:
    name = get(hf, "hidden_act", str, "silu")
    if name not in ACTIVATIONS:
        raise ConfigError(f"hidden_act={name!r} is not supported; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def windows(hf: Mapping[str, Any]) -> list[int | None]:
    """Sliding window of each layer, in the convention of Qwen2: the layers from `max_window_layers` on have it."""
    num_layers = get(hf, "num_hidden_layers", int)
    window = get(hf, "sliding_window", int, 4096) if get(hf, "use_sliding_window", bool, False) else None
    first = get(hf, "max_window_layers", int, 28)
    default = ["sliding_attention" if window and i >= first else "full_attention" for i in range(num_layers)]
    kinds = get(hf, "layer_types", list, default)
    if len(kinds) != num_layers:
        raise ConfigError(f"layer_types: must name num_hidden_layers={num_layers} layers, got {len(kinds)}")
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise ConfigError(f"layer_types: {sorted(unknown)} not supported; known: full_attention, sliding_attention")
    if window is None and "sliding_attention" in kinds:
        raise ConfigError("layer_types: sliding_attention needs use_sliding_window=true and sliding_window")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def decoder_config(
    hf: Mapping[str, Any],
    *,
    num_kv_heads: int,
    windows: Sequence[int | None],
    qk_norm: bool = False,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
) -> ModelConfig:
    """A Llama-like decoder; what its families do differently comes as arguments."""
    embed_dim, num_heads = get(hf, "hidden_size", int), get(hf, "num_attention_heads", int)
    if num_heads % num_kv_heads:
        raise ConfigError(f"num_key_value_heads={num_kv_heads} must divide num_attention_heads={num_heads}")
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=get(hf, "head_dim", int, embed_dim // num_heads),
        rope=rope(hf),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
    )
    mlp = MLPConfig(dim=get(hf, "intermediate_size", int), activation=activation(hf), bias=mlp_bias)
    blocks = tuple(BlockConfig(attention=replace(attention, window=window), mlp=mlp) for window in windows)
    return ModelConfig(
        model_type=get(hf, "model_type", str),
        vocab_size=get(hf, "vocab_size", int),
        embed_dim=embed_dim,
        norm_eps=get(hf, "rms_norm_eps", float, 1e-6),
        tie_embeddings=get(hf, "tie_word_embeddings", bool, False),
        max_positions=get(hf, "max_position_embeddings", int),
        stages=stages_of(blocks),
        initializer_range=get(hf, "initializer_range", float, 0.02),
    )


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One tensor of a checkpoint, and where it stands in our stacked parameters."""

    name: str
    param: str
    """Our dotted path."""
    index: int | None
    """Its place in the parameter's leading dimension; None: the parameter is not stacked."""
    transpose: bool
    shape: tuple[int, ...]
    """As stored in the checkpoint."""


_BLOCK_PATH = re.compile(r"stages\.(\d+)\.blocks\.(\d+)\.(.+)")


def tensors(config: ModelConfig, params: Iterable[tuple[str, tuple[str, ...], tuple[int, ...]]]) -> list[Tensor]:
    """The checkpoint's tensors behind our parameters (path, names of dimensions, shape), in the same order."""
    names = family(config.model_type).NAMES
    found: list[Tensor] = []
    for path, dims, shape in params:
        layers, key = _layers(config, path)
        stacked = dims[0] == "layers"
        for index, layer in enumerate(layers):
            name = names[key]
            one = shape[1:] if stacked else shape
            found.append(
                Tensor(
                    name=name.hf.format(layer=layer),
                    param=path,
                    index=index if stacked else None,
                    transpose=name.transpose,
                    shape=one[::-1] if name.transpose else one,
                )
            )
    return found


def _layers(config: ModelConfig, path: str) -> tuple[range, str]:
    """Indices of the layers that a parameter holds, and its key in the family's table."""
    match = _BLOCK_PATH.fullmatch(path)
    if match is None:
        return range(1), path
    stage, block = int(match[1]), int(match[2])
    first = sum(s.num_layers for s in config.stages[:stage]) + block
    period, repeats = len(config.stages[stage].blocks), config.stages[stage].repeats
    return range(first, first + period * repeats, period), match[3]
