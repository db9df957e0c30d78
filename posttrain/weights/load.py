"""Loading models from checkpoints in Hugging Face layout, and initializing them with random weights."""

from __future__ import annotations

import functools
import json
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.stages import Wrapped
from jax.typing import DTypeLike

from posttrain.config import AttentionKernel, DecodeAttention, GroupedKernel, LoRA, Quantize, Remat, Upscale, Vision
from posttrain.data.tokenizer import ADD_ROWS
from posttrain.data.tokenizer_files import PREPROCESSOR, processor_fields, processor_files, refuse_adapter
from posttrain.errors import ConfigError, placed
from posttrain.mesh import OPTIONAL, RULES, TILES, param_sharding
from posttrain.models import hf
from posttrain.models.config import Compute, LatentAttentionConfig, ModelConfig, VisionConfig
from posttrain.models.decoder import Decoder
from posttrain.models.names import CheckpointTensor, ParamSlice, tensors
from posttrain.models.quant import Quantized
from posttrain.models.vision.tower import own_names
from posttrain.tracking.console import progress_bar
from posttrain.weights import peft_load
from posttrain.weights.files import GENERATION, Checkpoint, check_digests, find_folder, read_json
from posttrain.weights.lora import attach_lora, planned_scales
from posttrain.weights.peft_save import peft_refusal
from posttrain.weights.pieces import ParameterReader
from posttrain.weights.quantize import (
    Errors,
    print_errors,
    quantizable,
    quantize_model,
    quantized_outline,
    read_quantized,
)
from posttrain.weights.state import ModelWeights, Weights
from posttrain.weights.upscale import check_adapted, stored_tensors, upscaled_config


def load_model(
    path: str | Path,
    *,
    dtype: DTypeLike | None = None,
    compute_dtype: DTypeLike | None = None,
    lora: LoRA | None = None,
    adapter: str | Path | None = None,
    mesh: Mesh | None = None,
    remat: Remat = "none",
    attention: AttentionKernel = "auto",
    decode_attention: DecodeAttention = "auto",
    grouped_matmul: GroupedKernel = "auto",
    long_context: bool = False,
    num_tokens: int | None = None,
    quantize: Quantize = "none",
    vision: Vision = "none",
    upscale: Upscale | None = None,
    seed: int | None = None,
) -> Decoder:
    """Load a model from a folder in Hugging Face layout or a hub id, with a new adapter (`lora`) or a PEFT adapter
    (`adapter`).

    `dtype`: of the parameters, by default as stored (float32 for float16). `compute_dtype`: of activations, by default
    `dtype`. `long_context`: use the long factors of LongRoPE. `num_tokens`: of the tokenizer; ids from there on get
    probability 0. `quantize`: store the layers' matrices in 8 or 4 bits (frozen base of an adapter); at most one layer
    of one matrix is in `dtype` at a time. `vision`: load the vision tower too, and train what of it. `upscale`:
    copy a band of layers. `seed`: of a new adapter's weights, by default from the system. Raises ConfigError for
    unusable files, and if the tokenizer has more ids than the embedding has rows.
    """
    if lora is not None and adapter is not None:
        raise ConfigError("load_model: lora creates an adapter, adapter loads one; set only one of them")
    if adapter is not None and upscale is not None:
        raise ConfigError("load_model: adapter is of a model without the layers of upscale; set only one of them")
    folder = find_folder(path)
    refuse_adapter(folder)
    check_digests(folder)
    config, wrapper = _described(folder, long_context=long_context, vision=vision)
    if (folder / GENERATION).is_file():
        config = replace(config, generation_json=json.dumps(read_json(folder / GENERATION)))
    wanted = with_tokens(with_adapter(config, adapter, wrapper), num_tokens)
    grown = config if upscale is None else upscaled_config(config, upscale)
    names = hf.family(config.model_type).NAMES
    with ExitStack() as stack:
        checkpoint = Checkpoint(folder, stack, *_own_names(config, wrapper))
        dtype = checkpoint.dtype if dtype is None else jnp.dtype(dtype)
        compute = Compute(
            dtype=jnp.dtype(dtype if compute_dtype is None else compute_dtype),
            remat=remat,
            attention=attention,
            decode_attention=decode_attention,
            grouped_matmul=grouped_matmul,
            mesh=mesh,
        )
        outline = outline_of(grown, compute, dtype)
        shardings = _shardings(outline, mesh)
        target = outline if quantize == "none" else quantized_outline(outline, quantize)
        stored = stored_tensors(config, outline, upscale)
        checkpoint.check(stored, config, names)
        weights, errors = _read_weights(checkpoint, stored, outline, target, shardings, f"loading {path} (MB)")
    model = ModelWeights(target).bind(weights)
    if errors:
        print_errors(errors, quantize)
    if lora is not None:
        attach_lora(model, lora, seed=secrets.randbits(31) if seed is None else seed, mesh=mesh)
    if adapter is not None:
        peft_load.load_adapter(model, adapter, mesh=mesh, text_name=wrapper.text_name if wrapper else None)
    model.config = replace(model.config, num_tokens=wanted.num_tokens)
    return model


def check_weights(folder: Path) -> None:
    """Raises ConfigError if the weights in a folder do not match its `config.json`; only file headers are read."""
    config, wrapper = _described(folder, long_context=False)
    names = hf.family(config.model_type).NAMES
    with ExitStack() as stack:
        checkpoint = Checkpoint(folder, stack, *_own_names(config, wrapper))
        outline = outline_of(config, Compute.of(jnp.float32), jnp.dtype(jnp.float32))
        checkpoint.check(tensors(config, names, ModelWeights(outline).shapes()), config, names, values=False)


def _described(folder: Path, *, long_context: bool, vision: Vision = "none") -> tuple[ModelConfig, hf.Wrapper | None]:
    """Parse `config.json` into the configuration and the multimodal wrapper, if any."""
    fields = read_json(folder / "config.json")
    with placed(f"{folder / 'config.json'}: "):
        config = hf.config_from_hf(fields, long_context=long_context, vision=vision)
        config = config if config.vision is None else replace(config, vision=with_processor(config.vision, folder))
        return config, hf.text_part(fields)[1]


def _own_names(config: ModelConfig, wrapper: hf.Wrapper | None) -> list[Callable[[str], str | None]]:
    """Names of stored tensors as the model has them, for `Checkpoint`."""
    return [] if wrapper is None else [own_names(config.vision, wrapper.text_name)]


def with_processor(vision: VisionConfig, folder: Path) -> VisionConfig:
    """Set normalization and files of the image processor that a checkpoint comes with. Raises ConfigError."""
    files = processor_files(str(folder))
    fields = processor_fields(files)
    vision = replace(vision, files=tuple((name, content.decode()) for name, content in files.items()))
    if fields.get("do_rescale") is False or abs(255 * fields.get("rescale_factor", 1 / 255) - 1) > 1e-6:
        raise ConfigError(f"{PREPROCESSOR}: do_rescale and rescale_factor must give pixels from 0 to 1, by 1/255")
    if fields.get("do_normalize") is False:
        return replace(vision, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    numbers = {key: fields.get(f"image_{key}") or getattr(vision, key) for key in ("mean", "std")}
    if wrong := next((key for key, value in numbers.items() if len(value) != 3), None):
        raise ConfigError(f"{PREPROCESSOR}: image_{wrong} must be three numbers, got {numbers[wrong]}")
    mean, std = (tuple(map(float, numbers[key])) for key in ("mean", "std"))
    return replace(vision, mean=mean, std=std)


def _read_weights(
    checkpoint: Checkpoint,
    stored: Sequence[CheckpointTensor],
    outline: Decoder,
    target: Decoder,
    shardings: Mapping[str, NamedSharding | None],
    description: str,
) -> tuple[Weights, Errors]:
    """Read the parameters of `target`, which is `outline` unless quantized."""
    params = {".".join(map(str, path)): v.get_value() for path, v in nnx.to_flat_state(nnx.state(outline))}
    sources: dict[str, dict[tuple[int, ...], tuple[CheckpointTensor, ParamSlice]]] = {path: {} for path in params}
    for tensor in stored:
        for part in tensor.parts:
            sources[part.param][part.index] = tensor, part
    megabytes = sum(p.size * p.dtype.itemsize for p in params.values()) // 10**6
    with progress_bar(description, megabytes) as advance, ParameterReader(checkpoint, advance) as reader:
        weights, errors = Weights(), Errors()
        matrices = {} if target is outline else {path: site.matrix for path, site in quantizable(target).items()}
        quantized = {path: matrix for path, matrix in matrices.items() if isinstance(matrix, Quantized)}
        for path, p in params.items():
            if path in quantized:
                read, errors[path] = read_quantized(reader, path, quantized[path], shardings[path], sources[path])
                weights |= read
            else:
                weights[path] = reader.read(p.shape, p.dtype, shardings[path], sources[path])
        return weights, errors


def init_model(
    hf_config: Mapping[str, Any],
    *,
    dtype: DTypeLike,
    seed: int,
    compute_dtype: DTypeLike | None = None,
    lora: LoRA | None = None,
    mesh: Mesh | None = None,
    remat: Remat = "none",
    attention: AttentionKernel = "auto",
    decode_attention: DecodeAttention = "auto",
    grouped_matmul: GroupedKernel = "auto",
    num_tokens: int | None = None,
    quantize: Quantize = "none",
    vision: Vision = "none",
) -> Decoder:
    """Initialize a model with random weights from the fields of a `config.json`; each device draws only its own
    shard. `vision`: unless `none`, with a vision tower."""
    dtype = jnp.dtype(dtype)
    config = with_tokens(hf.config_from_init(hf_config, vision=vision), num_tokens)
    compute = Compute(
        dtype=jnp.dtype(dtype if compute_dtype is None else compute_dtype),
        remat=remat,
        attention=attention,
        decode_attention=decode_attention,
        grouped_matmul=grouped_matmul,
        mesh=mesh,
    )
    outline, draw = random_weights(config, compute, dtype, quantize)
    weights, errors = draw(jnp.uint32(seed))
    model = ModelWeights(outline).bind(weights)
    if errors:
        print_errors(errors, quantize)
    if lora is not None:
        attach_lora(model, lora, seed=seed, mesh=mesh)
    return model


@functools.lru_cache(maxsize=8)
def random_weights(
    config: ModelConfig, compute: Compute, dtype: np.dtype, quantize: Quantize
) -> tuple[Decoder, Wrapped]:
    """Model as shapes, not to be changed, and the program that draws its weights from a seed; compiled once in a
    process."""
    outline = outline_of(config, compute, dtype)
    if quantize != "none":
        outline = quantized_outline(outline, quantize)

    def draw(seed: jax.Array) -> tuple[Weights, Errors]:
        rngs = nnx.Rngs(jax.random.key(seed))
        model = Decoder(config, compute, dtype=dtype, rngs=rngs)
        errors = quantize_model(model, quantize) if quantize != "none" else Errors()
        return ModelWeights(model).read(), errors

    return outline, jax.jit(draw, out_shardings=(_shardings(outline, compute.mesh), None))


def check_lora(
    config: ModelConfig, lora: LoRA, quantize: Quantize = "none", upscale: Upscale | None = None
) -> str | None:
    """Raises ConfigError if the adapter does not fit the model, or quantization its sizes, or if it leaves layers of
    `upscale` without effect; no weights are needed.

    Returns the reason if PEFT cannot represent the adapter, which can then only be merged; None if it can.
    """
    outline = outline_of(config, Compute.of(jnp.float32), jnp.dtype(jnp.float32))
    if upscale is not None:
        check_adapted(outline, upscale, planned_scales(outline, lora))
    if quantize != "none":
        outline = quantized_outline(outline, quantize)
    nnx.eval_shape(lambda model: attach_lora(model, lora, seed=0), outline)
    return peft_refusal(outline, planned_scales(outline, lora), dora=lora.dora, dropout=lora.dropout)


def check_adapter(config: ModelConfig, adapter: str | Path, wrapper: hf.Wrapper | None, *, reward: bool) -> list[str]:
    """Return the adapter's `target_modules` that the model lacks.

    Raises ConfigError if a PEFT adapter does not fit the model or the run (`reward`: it trains a reward model).
    """
    outline = outline_of(config, Compute.of(jnp.float32), jnp.dtype(jnp.float32))
    outline = peft_load.adapter_outline(outline, adapter, text_name=wrapper.text_name if wrapper else None)
    if outline.score is not None and not reward:
        raise ConfigError(
            f"{adapter}: is an adapter of a reward model, which cannot generate; use one of a causal language model"
        )
    return peft_load.absent_targets(outline, adapter, text_name=wrapper.text_name if wrapper else None)


def with_adapter(config: ModelConfig, adapter: str | Path | None, wrapper: hf.Wrapper | None) -> ModelConfig:
    """Set the vocabulary of a PEFT adapter: where its author added tokens, another than its base's."""
    if adapter is None:
        return config
    outline = outline_of(config, Compute.of(jnp.float32), jnp.dtype(jnp.float32))
    return peft_load.adapted_config(outline, adapter, wrapper.text_name if wrapper else None)


def vocabulary_of(path: str | Path, adapter: str | Path | None = None) -> int:
    """Rows of the embedding of a model with an adapter, from the files' headers."""
    config, wrapper = _described(find_folder(path), long_context=False)
    return with_adapter(config, adapter, wrapper).vocab_size


def with_tokens(config: ModelConfig, num_tokens: int | None) -> ModelConfig:
    """Set the tokenizer's number of ids. Raises ConfigError if the embedding has fewer rows."""
    if num_tokens is None or num_tokens == config.vocab_size:
        return config
    if num_tokens > config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {num_tokens:,} token ids, the model's embedding only {config.vocab_size:,} rows; "
            f"give the model's own tokenizer, or {ADD_ROWS}"
        )
    return replace(config, num_tokens=num_tokens)


def outline_of(config: ModelConfig, compute: Compute, dtype: np.dtype) -> Decoder:
    """Abstract decoder: shapes instead of arrays."""
    return nnx.clone(_outline(config, compute, dtype))


@functools.lru_cache(maxsize=16)
def _outline(config: ModelConfig, compute: Compute, dtype: np.dtype) -> Decoder:
    """Original of the copies: a check and a run ask for the same one several times, and to trace it takes long."""
    return nnx.eval_shape(lambda: Decoder(config, compute, dtype=dtype, rngs=nnx.Rngs(0)))


def _shardings(model: Decoder, mesh: Mesh | None) -> dict[str, NamedSharding | None]:
    """Sharding of each parameter; None: default device."""
    if mesh is None:
        return {path: None for path, _, _ in ModelWeights(model).shapes()}
    check_mesh(model, mesh.shape)
    return {path: param_sharding(mesh, path, dims, shape) for path, dims, shape in ModelWeights(model).shapes()}


SPLIT_FIELDS = {"embed": "hidden_size", "mlp": "intermediate_size", "expert": "num_experts"}
"""Parameter dimension name -> field of `config.json`."""


def check_mesh(model: Decoder, sizes: Mapping[str, int]) -> None:
    """Raises ConfigError if a mesh axis does not divide a dimension that it splits; the message lists valid sizes."""
    splits: dict[str, dict[str, int]] = {axis: {} for axis in sizes}
    for block in model.config.blocks:
        if not isinstance(block.attention, LatentAttentionConfig):
            # The single head of a latent cache is replicated on every device.
            splits["tensor"][f"num_kv_heads={block.attention.num_kv_heads}"] = block.attention.num_kv_heads
        splits["tensor"][f"num_heads={block.attention.num_heads}"] = block.attention.num_heads
    for path, dims, shape in ModelWeights(model).shapes():
        for dim, size in zip(dims, shape, strict=True):
            for axis in () if dim in OPTIONAL or dim.endswith(TILES) else RULES[dim][:1]:
                name = (
                    f"{SPLIT_FIELDS[dim]}={size}" if dim in SPLIT_FIELDS else f"the dimension {dim} ({size}) of {path}"
                )
                splits[axis].setdefault(name, size)
    for axis, split in splits.items():
        wrong = next((name for name, size in split.items() if size % sizes[axis]), None)
        if wrong is not None:
            common = math.gcd(*split.values())
            *first, last = [str(n) for n in range(1, common + 1) if common % n == 0]
            raise ConfigError(
                f"mesh.{axis}={sizes[axis]} must divide {wrong} of {model.config.model_type}; "
                f"use {', '.join(first)}{' or ' if first else ''}{last}"
            )
