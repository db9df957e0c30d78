"""Depth upscaling: a model with a copy of a band of its layers behind that band."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from posttrain.config import Upscale
from posttrain.errors import ConfigError
from posttrain.models import hf
from posttrain.models.config import AttentionConfig, MLPConfig, ModelConfig, stages_of
from posttrain.models.decoder import Decoder
from posttrain.models.fields import Fields
from posttrain.models.names import CheckpointTensor, ParamSlice, layers_of, tensors
from posttrain.weights.state import ModelWeights

LISTS = ("layer_types", "no_rope_layers")
"""Fields of a `config.json` with an entry for each layer."""
OUTPUTS = r"attention\.o\.(kernel|bias)|mlp\.(shared\.)?down\.(kernel|bias)|mlp\.experts\.down(_bias)?"
"""Parameters of a block whose zeros make it the identity."""
NORMS = r"(attention|mlp)_post_norm\.scale"
"""The same where norms follow attention and MLP: through a norm of zeros gradients would be as large as 1 / eps."""


def source_layers(plan: Upscale, num_layers: int) -> list[int]:
    """Layer of the source from which each layer is copied. ConfigError for a band that the model does not have."""
    first, end = plan.layers
    if end > num_layers:
        raise ConfigError(f"upscale: layers=[{first}, {end}]: the model has {num_layers} layers; end at {num_layers}")
    return [*range(end), *range(first, num_layers)]


def upscaled_config(config: ModelConfig, plan: Upscale) -> ModelConfig:
    """Configuration of the deeper model; every copy is of its layer's kind. ConfigError if no `config.json` of the
    family says so, and for layers that cannot be copied."""
    order = source_layers(plan, config.num_layers)
    _check_layers(config, plan)
    fields = json.loads(config.hf_json)
    read = Fields(fields)
    hf.family(config.model_type).config_from_hf(read)
    changed = fields | _layer_fields(fields | read.read, config, order)
    before, after = hf.config_from_hf(fields).blocks, hf.config_from_hf(changed)
    if after.blocks != tuple(before[layer] for layer in order):
        raise ConfigError(
            f"upscale: layers={list(plan.layers)}: no config.json of {config.model_type} has layers of these kinds in "
            "this order; take a band of layers of one kind"
        )
    blocks = tuple(config.blocks[layer] for layer in order)
    return replace(config, stages=stages_of(blocks), hf_json=after.hf_json, further_layers=0)


def _check_layers(config: ModelConfig, plan: Upscale) -> None:
    if config.vision is not None:
        raise ConfigError("upscale: layers are copied of the text part alone; set vision: none, or remove upscale")
    shared = [b for b in config.blocks if isinstance(b.attention, AttentionConfig) and b.attention.reuses is not None]
    if shared or config.layer_inputs is not None:
        what = "share keys and values with other layers" if shared else "have inputs of their own for every token"
        raise ConfigError(f"upscale: layers of this {config.model_type} {what}, so they cannot be copied")
    if config.block is not None and plan.start == "identity":
        raise ConfigError(
            f"upscale: start=identity: blocks of {config.model_type} are of their own kind, and no zeros make them the "
            "identity; set start: copy"
        )


def _layer_fields(known: Mapping[str, Any], config: ModelConfig, order: Sequence[int]) -> dict[str, Any]:
    """Fields of the deeper model's `config.json` that say what each layer is."""
    changes: dict[str, Any] = {"num_hidden_layers": len(order)}
    changes |= {name: [known[name][layer] for layer in order] for name in LISTS if known.get(name)}
    dense = [at for at, layer in enumerate(order) if isinstance(config.blocks[layer].mlp, MLPConfig)]
    if "mlp_only_layers" in known:
        changes |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}
    if "first_k_dense_replace" in known:
        changes["first_k_dense_replace"] = len(dense)
    return changes


def zero_paths(model: Decoder, plan: Upscale) -> dict[str, list[int]]:
    """Parameters of the deeper model that begin as zeros in copied layers, with their layers there."""
    config, (first, end) = model.config, plan.layers
    copies = range(end, 2 * end - first) if plan.start == "identity" else range(0)
    found = {}
    for path, _, _ in ModelWeights(model).shapes():
        prefix, name, layers = layers_of(config, path)
        if not prefix:
            continue
        pattern = OUTPUTS if config.blocks[layers[0]].norms == "pre" else NORMS
        if re.fullmatch(pattern, name) and (zeros := [layer for layer in layers if layer in copies]):
            found[path] = zeros
    return found


def stored_tensors(source: ModelConfig, outline: Decoder, plan: Upscale | None) -> list[CheckpointTensor]:
    """Tensors of the source's checkpoint with the slices of the model, deeper with a plan, that are read from each."""
    config, names, shapes = outline.config, hf.family(source.model_type).NAMES, ModelWeights(outline).shapes()
    if plan is None:
        return tensors(config, names, shapes)
    zeros = zero_paths(outline, plan)
    stored = tensors(config, names, shapes, source_layers(plan, source.num_layers))

    def part(one: ParamSlice) -> ParamSlice:
        if one.param not in zeros or layers_of(config, one.param)[2][one.index[0]] not in zeros[one.param]:
            return one
        # Norms multiply by offset + scale.
        return replace(one, fill=-config.norm_offset if one.param.endswith("norm.scale") else 0.0)

    return [replace(tensor, parts=tuple(map(part, tensor.parts))) for tensor in stored]


def check_adapted(model: Decoder, plan: Upscale, adapted: Mapping[str, Sequence[float]]) -> None:
    """ConfigError for an adapter that leaves copies the identity. `adapted`: scales by layer of adapted matrices."""
    zeros = zero_paths(model, plan)
    if norms := [path for path in zeros if path.endswith("norm.scale")]:
        raise ConfigError(
            f"model.upscale: start=identity: the norms behind the layers of {model.config.model_type} begin as zeros "
            f"({layers_of(model.config, norms[0])[1]}), which an adapter does not train; set start: copy, or train all "
            "parameters"
        )
    for path, layers in zeros.items():
        stacked, name = layers_of(model.config, path)[2], layers_of(model.config, path)[1]
        scales = adapted.get(path)
        if not name.endswith("bias") and (scales is None or not all(scales[stacked.index(n)] for n in layers)):
            raise ConfigError(
                f"model.upscale: start=identity: {name} of the copied layers {layers[0]} to {layers[-1]} begins as "
                "zeros, and lora leaves it out, so they would never do anything; add it to lora.targets and its layers "
                "to lora.layers, or set start: copy"
            )
