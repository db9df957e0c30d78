"""Typed reader of `config.json` that records the fields read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from posttrain.errors import ConfigError, did_you_mean

T = TypeVar("T")

NOUNS: Mapping[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
    dict: "a mapping",
}

POSITIVE = frozenset(
    (
        *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "max_position_embeddings"),
        *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "num_experts_per_tok"),
        *("head_dim", "global_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        *("depth", "num_heads", "patch_size", "spatial_merge_size", "window_size", "num_position_embeddings"),
        *("image_size", "mm_tokens_per_image", "pooling_kernel_size", "position_embedding_size"),
        *("kv_lora_rank", "q_lora_rank", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar"),
    )
)
"""Fields that must be positive in every family."""


WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("transformers_version", "dtype", "torch_dtype", "use_cache"), ()),
    **dict.fromkeys(("attention_dropout", "embd_pdrop", "resid_pdrop", "router_jitter_noise"), (0.0,)),
    "output_router_logits": (False,),
    "pretraining_tp": (1,),
}
"""Fields that transformers writes and no family reads -> values without effect here; none for any value."""


class Fields:
    """JSON object with typed access. An explicit null counts as absent, except for `optional`."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json", *, long_context: bool = False):
        self.where = where
        self.long_context_used = False
        self._long_context = long_context
        self.read: dict[str, Any] = {}
        """Fields read so far, with the value returned."""
        self.required: dict[str, Any] = {}
        """Absent fields of which one value is supported, with that value."""
        self._values = {key: value for key, value in values.items() if value is not None}
        self._nulls = values.keys() - self._values.keys()
        self._sections: dict[str, Fields] = {}
        self._idle: set[str] = set()

    @property
    def long_context(self) -> bool:
        """Return True if the run requests the factors for long sequences."""
        self.long_context_used = True
        return self._long_context

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __bool__(self) -> bool:
        return bool(self._values)

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Return the field as type `kind`; required without a default. Raises ConfigError if absent or of another
        type."""
        value = self._values.get(key, default)
        if value is None:
            raise ConfigError(f"{key}: missing in the model's {self.where}")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ConfigError(f"{key}: must be {NOUNS.get(kind, kind.__name__)}, got {value!r}")
        if key in POSITIVE and isinstance(value, int | float) and not 0 < value < math.inf:
            raise ConfigError(f"{key}: must be above 0 and finite, got {value!r}")
        self.read[key] = value
        return value

    def optional(self, key: str, kind: type[T], default: T | None = None) -> T | None:
        """Return the field; None if it is null, or absent without a default."""
        if key in self or (default is not None and key not in self._nulls):
            return self.get(key, kind, default)
        self.read[key] = None
        return None

    def section(self, key: str) -> Fields:
        """Return the object under `key`, each time the same; empty if absent."""
        values = self._values.get(key, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{key}: must be an object, got {values!r}")
        self.read[key] = values or None
        return self._sections.setdefault(key, Fields(values, where=key))

    def refuse(self, key: str, *allowed: Any, why: str) -> None:
        """Raises ConfigError if `key` is present with a value other than `allowed`."""
        value = self._values.get(key)
        self.read[key] = value
        if value is None and allowed:
            self.required[key] = allowed[0]
        if value is not None and value not in allowed:
            raise ConfigError(f"{key}={value!r} is not supported: {why}")

    def without_effect(self, *keys: str) -> None:
        """Accept fields that a file may have and nothing here depends on."""
        self._idle.update(keys)

    def refuse_unread(self, *, allowed: Iterable[str] = ()) -> None:
        """Raises ConfigError for a field that was never read and hence would have no effect, unless its value has none
        in transformers either."""
        for key in self._values.keys() - self.read.keys() - self._idle - set(allowed):
            where = "" if self.where == "config.json" else f"{self.where}: "
            value, idle = self._values[key], WITHOUT_EFFECT.get(key)
            # A loss of the router is added there only where its logits are returned.
            if key == "router_aux_loss_coef" and self._values.get("output_router_logits") is False:
                continue
            if idle is not None:
                if idle and value not in idle:
                    raise ConfigError(f"{where}{key}={value!r} is not supported, only {idle[0]!r}; remove it")
                continue
            raise ConfigError(f"{where}{key}: unknown field{did_you_mean(key, sorted(self.read))}")
