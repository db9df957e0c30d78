"""Hugging Face `config.json` -> `ModelConfig`: family registry and helpers shared by family files."""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from posttrain.config import Vision
from posttrain.errors import ConfigError, did_you_mean
from posttrain.models import families
from posttrain.models import vision as multimodal
from posttrain.models.config import (
    Activation,
    AttentionConfig,
    BlockConfig,
    LatentAttentionConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    Rope,
    stages_of,
)
from posttrain.models.fields import Fields
from posttrain.models.names import Names
from posttrain.models.rope import max_positions
from posttrain.runtime.files import digest
from posttrain.user_code import import_transformers, run_module

CAUSAL, SEEING, CLASSIFIER = "ForCausalLM", "ForConditionalGeneration", "ForSequenceClassification"
"""Suffixes of class names in transformers."""

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
"""`hidden_act` -> activation."""


@runtime_checkable
class Family(Protocol):
    """Interface of a family file `families/<model_type>.py`."""

    ARCHITECTURE: str
    """Class name in transformers, for `config.json`."""
    NAMES: Names

    def config_from_hf(self, hf: Fields) -> ModelConfig: ...


@runtime_checkable
class Wrapper(Protocol):
    """Interface of a multimodal model's file `vision/<model_type>.py`, of which the text part may be loaded alone."""

    ARCHITECTURE: str
    """Class name in transformers."""

    def text_config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Return the `config.json` of the text part."""
        ...

    def text_name(self, name: str) -> str | None:
        """Return the text model's name of a tensor; None: not part of it."""
        ...

    def stored_name(self, name: str) -> str:
        """Return the name under which transformers saves a tensor of the text part."""
        ...

    def with_vision(self, config: ModelConfig, hf: Fields) -> ModelConfig:
        """Add the vision tower of a `config.json` to the text model. Raises ConfigError for unsupported features."""
        ...


_LINEAR = "its linear attention layers need a recurrent state instead of keys and values, which the decoder lacks"
_STATE_SPACE = "its state-space layers need a recurrent state instead of keys and values, which the decoder lacks"

UNSUPPORTED: Mapping[str, str] = {
    "qwen3_next": f"{_LINEAR}; use a qwen3 or qwen3_moe",
    "qwen3_5": _LINEAR,
    "qwen3_5_moe": _LINEAR,
    "kimi_linear": _LINEAR,
    "minimax": _LINEAR,
    "olmo_hybrid": f"{_LINEAR}; use an olmo3",
    "granitemoehybrid": f"{_STATE_SPACE}; use a granite",
    "falcon_h1": _STATE_SPACE,
    "nemotron_h": _STATE_SPACE,
    "jamba": _STATE_SPACE,
    "bamba": _STATE_SPACE,
    "mamba": _STATE_SPACE,
    "mamba2": _STATE_SPACE,
    "lfm2": "its short convolution layers need a state, which the decoder lacks",
}
"""`model_type` that no family file can support -> reason."""


ADDED: dict[str, tuple[str, str]] = {}
"""Families registered from user files: their path and a digest of their text, by module name."""


def add_families(folder: str | Path) -> None:
    """Add a folder to search for family files, after those of the package. Raises ConfigError if it does not exist.

    >>> add_families("no/such/folder")
    Traceback (most recent call last):
    posttrain.errors.ConfigError: families no/such/folder: there is no such folder
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ConfigError(f"families {folder}: there is no such folder")
    families.__path__.append(str(path.resolve()))


def add_family(file: str | Path) -> None:
    """Register a family from a file. Raises ConfigError if it does not exist, or the package has the family.

    >>> add_family("no/such/family.py")
    Traceback (most recent call last):
    posttrain.errors.ConfigError: family no/such/family.py: there is no such Python file
    """
    path = Path(file).expanduser().resolve()
    if path.suffix != ".py" or not path.is_file():
        raise ConfigError(f"family {file}: there is no such Python file")
    name = f"{families.__name__}.{path.stem}"
    if path.stem in _packaged():
        raise ConfigError(f"family {file}: the package has a family {path.stem}; the file's name is the model_type")
    content = digest(path.read_bytes())
    if name in ADDED and ADDED[name] == (str(path), content):
        return
    try:
        module = run_module(name, path)
    except Exception as error:
        raise ConfigError(f"family {file}: cannot be imported ({type(error).__name__}: {error})") from error
    if missing := [part for part in ("ARCHITECTURE", "NAMES", "config_from_hf") if part not in vars(module)]:
        del sys.modules[name]
        raise ConfigError(f"family {file}: lacks {', '.join(missing)}")
    ADDED[name] = str(path), content


WRAPPERS = frozenset(module.name for module in pkgutil.iter_modules(multimodal.__path__)) - {"tower"}
"""`model_type` of each multimodal model."""


def _packaged() -> list[str]:
    return sorted({module.name for module in pkgutil.iter_modules(families.__path__)} | WRAPPERS)


def family_module(model_type: str) -> Any:
    """Import the file of a family or wrapper. Raises ConfigError for an unknown one."""
    known = sorted({*_packaged(), *(name.rsplit(".", 1)[-1] for name in ADDED)})
    if model_type not in known:
        if model_type in UNSUPPORTED:
            raise ConfigError(f"model_type={model_type!r} is not supported: {UNSUPPORTED[model_type]}")
        near = did_you_mean(model_type, known)
        raise ConfigError(f"model_type={model_type!r} is not supported{near}; known: {', '.join(known)}")
    package = multimodal if model_type in WRAPPERS else families
    return importlib.import_module(f"{package.__name__}.{model_type}")


def family(model_type: str) -> Family:
    return cast(Family, family_module(model_type))


def text_part(hf: Mapping[str, Any]) -> tuple[dict[str, Any], Wrapper | None]:
    """Return the text model's `config.json` and its multimodal wrapper, if any."""
    module = family_module(Fields(hf).get("model_type", str))
    return (module.text_config(hf), module) if isinstance(module, Wrapper) else (dict(hf), None)


class NoLongContext(ConfigError):
    """Raised if `long_context` is set for a model with one set of RoPE factors."""


def config_from_hf(hf: Mapping[str, Any], *, long_context: bool = False, vision: Vision = "none") -> ModelConfig:
    """Parse a `config.json` of any family. Raises ConfigError for unsupported features.

    `long_context`: use the long-sequence factors of a model with two sets; raises NoLongContext if it has one set.
    `vision`: unless `none`, the vision tower too, and what is trained of it.
    """
    text, wrapper = text_part(hf)
    fields = Fields(_with_positions(text), long_context=long_context)
    _check_quantization(fields.optional("quantization_config", dict))
    config = family(fields.get("model_type", str)).config_from_hf(fields)
    if long_context and not fields.long_context_used:
        raise NoLongContext(
            f"long_context: this {config.model_type} has no second set of RoPE factors; remove the option"
        )
    written = {key: text[key] for key in text if key not in NOT_WRITTEN}
    if config.further_layers:
        written["num_nextn_predict_layers"] = 0
    scored = is_classifier(dict(hf))
    written |= classifier_fields(written) if scored and wrapper is not None else {}
    config = replace(config, scalar_head=scored, hf_json=json.dumps(written))
    return config if vision == "none" else _with_vision(config, hf, wrapper, vision)


def _with_vision(config: ModelConfig, hf: Mapping[str, Any], wrapper: Wrapper | None, train: Vision) -> ModelConfig:
    if wrapper is None or not hf.get("vision_config"):
        raise ConfigError(f"model.vision={train}: this {config.model_type} has no vision tower; set it to none")
    config = wrapper.with_vision(config, Fields(hf))
    assert config.vision is not None
    written = config.vision.written_fields({key: hf[key] for key in hf if key not in NOT_WRITTEN})
    return replace(config, vision=replace(config.vision, train=train), hf_json=json.dumps(written))


def stored_name(config: ModelConfig, name: str) -> str:
    """Name under which a tensor of the model is saved; text tensors of a multimodal model have others than alone."""
    vision = config.vision
    if vision is None or name == SCORE or any(name.startswith(start) for start in vision.prefixes):
        return name
    stored = cast(Wrapper, family_module(vision.model_type)).stored_name(name)
    # transformers knows the names of its older versions for models that generate alone.
    return module_name(config, name) if config.scalar_head and stored == name else stored


SCORE = "score.weight"
"""Tensor of a sequence classifier's head."""


def classifier_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that make a model's `config.json` that of a sequence classifier with one label. Raises ConfigError for a
    model of another kind."""
    names = fields.get("architectures") or []
    suffix = next((one for one in (CAUSAL, SEEING, CLASSIFIER) if str(next(iter(names), "")).endswith(one)), None)
    if len(names) != 1 or suffix is None:
        raise ConfigError(f"model: architectures={names} of config.json is no model {CAUSAL}; give a text model")
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {"architectures": [names[0].removesuffix(suffix) + CLASSIFIER], **labels}


def is_classifier(fields: dict[str, object]) -> bool:
    """Return True if a `config.json` is of a sequence classifier. Raises ConfigError for more than one label."""
    names = fields.get("architectures")
    if not isinstance(names, list) or not names or not str(names[0]).endswith(CLASSIFIER):
        return False
    # As transformers: without names there are num_labels, by default two.
    labels = fields.get("id2label") or {str(n): "" for n in range(int(str(fields.get("num_labels") or 2)))}
    if not isinstance(labels, dict) or len(labels) != 1:
        raise ConfigError(f"id2label: a reward model needs exactly one label, got {labels!r}")
    return True


def _with_positions(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add `max_position_embeddings` where it is absent: the default of the family in transformers."""
    if hf.get("max_position_embeddings") is not None:
        return hf
    known = import_transformers().CONFIG_MAPPING
    default = vars(known[hf["model_type"]]()) if hf.get("model_type") in known else {}
    return {**hf, "max_position_embeddings": default.get("max_position_embeddings")}


NOT_WRITTEN = ("quantization_config", "auto_map")
"""Fields not written by `save_model`, which writes full precision and no custom code."""

DEQUANTIZED: Mapping[str, Mapping[str, Any]] = {"mxfp4": {}, "fp8": {"fmt": "e4m3", "weight_block_size": [128, 128]}}
"""`quant_method` of checkpoints that are dequantized on loading -> required values of other fields."""


def _check_quantization(quantization: Mapping[str, Any] | None) -> None:
    if quantization is None:
        return
    method: Any = quantization.get("quant_method")
    if method not in DEQUANTIZED:
        raise ConfigError(
            f"quantization_config: weights quantized by {method!r} are not supported, only {', '.join(DEQUANTIZED)}; "
            "use a checkpoint of the same model with full weights"
        )
    for key, value in DEQUANTIZED[method].items():
        # transformers does not write the format, which has one value.
        if (actual := quantization.get(key, value if key == "fmt" else None)) != value:
            raise ConfigError(
                f"quantization_config: {method} with {key}={actual} is not supported, only {value}; "
                "use a checkpoint of the same model with full weights"
            )


NEUTRAL_KEYS = ("architectures", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "model_type")
"""Fields of every `config.json` that no family needs to read."""


def module_name(config: ModelConfig, name: str) -> str:
    """Name of a tensor of the model in the memory of transformers 5, by which PEFT finds its module."""
    if config.vision is None:
        return name
    if name.startswith(tuple(config.vision.prefixes)):
        return f"model.{name.removeprefix('model.').replace('vision_tower.vision_model.', 'vision_tower.', 1)}"
    return f"model.language_{name}" if name.startswith("model.") else name


def config_from_init(hf: Mapping[str, Any], *, vision: Vision = "none") -> ModelConfig:
    """Parse the configuration of a model initialized from scratch; `vision`: with a tower, unless `none`. Raises
    ConfigError for a field its family does not read.

    The resulting `config.json` has every field, so that other tools' defaults do not matter.
    """
    if vision != "none":
        return _multimodal_from_init(hf, vision)
    fields = Fields(hf)
    module = family(fields.get("model_type", str))
    if isinstance(module, Wrapper):
        model_type = fields.get("model_type", str)
        raise ConfigError(f"model_type={model_type!r}: a new model of it has a vision tower; set model.vision to tower")
    config = module.config_from_hf(fields)
    fields.refuse_unread(allowed=NEUTRAL_KEYS)
    if config.further_layers:
        raise ConfigError(f"num_nextn_predict_layers={config.further_layers}: a new model has no such layers; use 0")
    defaults = {key: value for key, value in fields.read.items() if value is not None}
    return replace(config, hf_json=json.dumps({"architectures": [module.ARCHITECTURE], **dict(hf), **defaults}))


PARTS = ("text_config", "vision_config")
"""Fields of a multimodal model with those of its text model and of its tower."""
TEXT_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
"""Sizes that a new text model does not take from the defaults of its family."""


def _multimodal_from_init(hf: Mapping[str, Any], train: Vision) -> ModelConfig:
    outer = Fields(hf)
    if lacking := [part for part in PARTS if not isinstance(hf.get(part), dict)]:
        raise ConfigError(
            f"{' and '.join(lacking)}: missing; a new model with a tower has the fields of its text model in "
            "text_config and those of the tower in vision_config"
        )
    text_sizes = outer.section("text_config")
    for size in TEXT_SIZES:
        text_sizes.get(size, int)
    text, wrapper = text_part(hf)
    if wrapper is None:
        raise ConfigError(
            f"model_type={hf['model_type']!r}: has no vision tower; these have: {', '.join(sorted(WRAPPERS))}"
        )
    fields = Fields(text, where="text_config")
    config = family(fields.get("model_type", str)).config_from_hf(fields)
    fields.refuse_unread(allowed=NEUTRAL_KEYS)
    config = wrapper.with_vision(config, outer)
    assert config.vision is not None
    tower = outer.section("vision_config")
    tower.refuse_unread(allowed=NEUTRAL_KEYS)
    ids = [key for key in hf if key.endswith(("_token_id", "_token_index"))]
    outer.refuse_unread(allowed=(*NEUTRAL_KEYS, *PARTS, *ids, "tie_word_embeddings"))
    parts = {"text_config": _whole(hf["text_config"], fields), "vision_config": _whole(hf["vision_config"], tower)}
    own = {"architectures": [wrapper.ARCHITECTURE], "tie_word_embeddings": config.tie_embeddings}
    written = own | _whole({**hf, **parts}, outer)
    return replace(config, vision=replace(config.vision, train=train), hf_json=json.dumps(written))


def _whole(given: Mapping[str, Any], fields: Fields) -> dict[str, Any]:
    """Fields as given, with the values of those that were left out."""
    read = {key: value for key, value in fields.read.items() if value is not None and not isinstance(value, dict)}
    return {**{key: value for key, value in read.items() if key != "model_type"}, **fields.required, **given}


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return the `config.json` of a model."""
    return cast(dict[str, Any], json.loads(config.hf_json))


def activation(hf: Fields, key: str = "hidden_act", default: str = "silu") -> Activation:
    name = hf.get(key, str, default)
    if name not in ACTIVATIONS:
        raise ConfigError(f"{key}={name!r} is not supported; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def layer_types(hf: Fields, default: Sequence[str]) -> list[str]:
    """Type of each layer. Raises ConfigError for a wrong count or unknown types."""
    kinds = hf.get("layer_types", list, list(default))
    if len(kinds) != len(default):
        raise ConfigError(f"layer_types: must name num_hidden_layers={len(default)} layers, got {len(kinds)}")
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise ConfigError(f"layer_types: {sorted(unknown)} not supported; known: full_attention, sliding_attention")
    return kinds


def qwen_windows(hf: Fields) -> list[int | None]:
    """Sliding window of each layer as in Qwen2: layers from `max_window_layers` on have it."""
    num_layers = hf.get("num_hidden_layers", int)
    used, window = hf.get("use_sliding_window", bool, False), hf.optional("sliding_window", int, 4096)
    window = window if used else None
    first = hf.get("max_window_layers", int, 28)
    kinds = layer_types(
        hf, ["sliding_attention" if window and i >= first else "full_attention" for i in range(num_layers)]
    )
    if window is None and "sliding_attention" in kinds:
        raise ConfigError("layer_types: sliding_attention needs use_sliding_window=true and sliding_window")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def attention_config(
    hf: Fields, *, rope: Rope | None, head_dim: int, default_kv_heads: int | None = None, **changes: Any
) -> AttentionConfig:
    """Grouped-query attention; `changes` override fields of plain causal attention.

    `default_kv_heads`: default of `num_key_value_heads` where it may be absent; null means as many as query heads.
    """
    num_heads, key = hf.get("num_attention_heads", int), "num_key_value_heads"
    number = hf.get(key, int) if default_kv_heads is None else hf.optional(key, int, default_kv_heads)
    num_kv_heads = num_heads if number is None else number
    if num_heads % num_kv_heads:
        raise ConfigError(f"num_key_value_heads={num_kv_heads} must divide num_attention_heads={num_heads}")
    plain = AttentionConfig(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, rope=rope, scale=head_dim**-0.5
    )
    return replace(plain, **changes)


def head_dim_of(hf: Fields) -> int:
    """`head_dim`, by default `hidden_size / num_attention_heads`."""
    return hf.get("head_dim", int, hf.get("hidden_size", int) // hf.get("num_attention_heads", int))


def mlp_config(hf: Fields, *, bias: bool = False, dim: str = "intermediate_size") -> MLPConfig:
    return MLPConfig(dim=hf.get(dim, int), activation=activation(hf), bias=bias)


def windowed(attention: AttentionConfig, windows: Sequence[int | None]) -> list[AttentionConfig]:
    """Attention of each layer, differing only in the window."""
    return [replace(attention, window=window) for window in windows]


def decoder_config(
    hf: Fields,
    attentions: Sequence[AttentionConfig | LatentAttentionConfig],
    mlps: Sequence[MLPConfig | MoEConfig],
    *,
    block: Mapping[str, Any] | None = None,
    **changes: Any,
) -> ModelConfig:
    """Decoder with these layers; `block`: fields of every `BlockConfig`.

    `changes`: fields of `ModelConfig`; `norm_eps` and `tie_embeddings` are only defaults for absent fields.
    """
    num_layers = hf.get("num_hidden_layers", int)
    if num_layers < 1:
        raise ConfigError(f"num_hidden_layers={num_layers} must be at least 1")
    blocks = [
        BlockConfig(attention=attention, mlp=mlp, **(block or {}))
        for attention, mlp in zip(attentions, mlps, strict=True)
    ]
    plain = ModelConfig(
        model_type=hf.get("model_type", str),
        vocab_size=hf.get("vocab_size", int),
        embed_dim=hf.get("hidden_size", int),
        norm_eps=hf.get("rms_norm_eps", float, changes.pop("norm_eps", 1e-6)),
        tie_embeddings=hf.get("tie_word_embeddings", bool, changes.pop("tie_embeddings", False)),
        max_positions=max_positions(hf),
        stages=stages_of(tuple(blocks)),
        initializer_range=hf.get("initializer_range", float, 0.02),
    )
    return replace(plain, **changes)
