"""Checkpoints in Hugging Face layout, in and out, and random weights."""

from __future__ import annotations

import json
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, Sharding
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from posttrain.config import ConfigError, LoRA
from posttrain.console import progress
from posttrain.mesh import param_sharding
from posttrain.models import hf
from posttrain.models.config import ModelConfig
from posttrain.models.decoder import Decoder
from posttrain.models.lora import attach_lora, has_lora, merged
from posttrain.models.weights import ModelWeights, Weights

MAX_SHARD_BYTES = 5 * 10**9
"""Size that no file of weights exceeds, unless one tensor does."""

MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
"""What a folder may hold that `save_model` replaces."""

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@runtime_checkable
class SavedTokenizer(Protocol):
    """What `save_model` needs of a tokenizer."""

    @property
    def stop_ids(self) -> Sequence[int]: ...

    def save(self, path: str | Path) -> None: ...


def load_model(
    path: str | Path,
    *,
    dtype: DTypeLike | None = None,
    compute_dtype: DTypeLike | None = None,
    lora: LoRA | None = None,
    mesh: Mesh | None = None,
    remat: bool = False,
    seed: int | None = None,
) -> Decoder:
    """The model of a folder in Hugging Face layout or of a hub id.

    `dtype`: of the parameters, by default as on disk (float32 for float16). `compute_dtype`: of activations, by default
    `dtype`. `seed`: of a new adapter's weights, by default drawn from the system. ConfigError for unusable files.
    """
    folder = find_folder(path)
    fields = _read_json(folder / "config.json")
    try:
        config = hf.config_from_hf(fields)
    except ConfigError as error:
        raise ConfigError(f"{folder / 'config.json'}: {error}") from error
    with ExitStack() as stack:
        checkpoint = Checkpoint(folder, stack)
        dtype = checkpoint.dtype if dtype is None else jnp.dtype(dtype)
        outline = _outline(config, dtype, compute_dtype, remat)
        shardings = _shardings(outline, mesh)
        tensors = hf.tensors(config, _shapes(outline))
        checkpoint.check(tensors, config)
        weights: Weights = {
            param: jax.device_put(checkpoint.read([t for t in tensors if t.param == param], dtype), sharding)
            for param, sharding in progress(shardings.items(), f"loading {path}", len(shardings))
        }
    model = ModelWeights(outline).bind(weights)
    if lora is not None:
        attach_lora(model, lora, seed=secrets.randbits(31) if seed is None else seed, mesh=mesh)
    return model


def init_model(
    hf_config: Mapping[str, Any],
    *,
    dtype: DTypeLike,
    seed: int,
    compute_dtype: DTypeLike | None = None,
    lora: LoRA | None = None,
    mesh: Mesh | None = None,
    remat: bool = False,
) -> Decoder:
    """A model with random weights from the fields of a `config.json`; each device draws only its own part."""
    config = hf.config_from_init(hf_config)
    outline = _outline(config, jnp.dtype(dtype), compute_dtype, remat)

    def draw(seed: jax.Array) -> Weights:
        rngs = nnx.Rngs(jax.random.key(seed))
        types = {"dtype": jnp.dtype(dtype), "compute_dtype": outline.compute_dtype}
        return ModelWeights(Decoder(config, **types, remat=remat, rngs=rngs)).read()

    model = ModelWeights(outline).bind(jax.jit(draw, out_shardings=_shardings(outline, mesh))(jnp.uint32(seed)))
    if lora is not None:
        attach_lora(model, lora, seed=seed, mesh=mesh)
    return model


def save_model(model: Decoder, path: str | Path, *, tokenizer: SavedTokenizer | None = None) -> None:
    """Write a folder that transformers loads, an adapter merged into its base; the folder appears whole or not at all.

    ConfigError where the folder holds something that no model folder has, which replacing it would lose.
    """
    target = Path(path).expanduser().resolve()
    _check_replaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as temporary:
        new = Path(temporary) / "new"
        new.mkdir()
        if tokenizer is not None:
            tokenizer.save(new)
        config = hf.config_to_hf(model.config)
        config["dtype" if "dtype" in config else "torch_dtype"] = model.embed.embedding[...].dtype.name
        generation = {key: config[key] for key in SPECIAL_TOKENS if config.get(key) is not None}
        if tokenizer is not None and tokenizer.stop_ids:
            ids = list(tokenizer.stop_ids)
            generation["eos_token_id"] = ids[0] if len(ids) == 1 else ids
        # transformers fills in a family's usual ids where there are none.
        _write_json(new / "config.json", generation | config)
        _write_json(new / "generation_config.json", generation)
        _write_weights(new, merged(model) if has_lora(model) else model)
        if target.exists():
            target.rename(Path(temporary) / "old")
        new.rename(target)


def hf_tensors(model: Decoder) -> Iterator[tuple[str, np.ndarray]]:
    """The model's tensors under their Hugging Face names and in their layout, one after the other on the host.

    An adapter is not part of them: give `merged(model)`.
    """
    weights = ModelWeights(model).read()
    for tensor in _tensors(model):
        yield tensor.name, _to_host(weights, tensor)


def find_folder(path: str | Path) -> Path:
    """The folder of a checkpoint: a local one, or a hub repository's, downloaded once."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ConfigError(f"model {path}: is a file; give the folder that holds config.json")
    if isinstance(path, Path) or path.startswith(("/", ".", "~")) or path.count("/") > 1:
        raise ConfigError(f"model {path}: there is no such folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors"]))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(
            f"model {path}: is no local folder, and the Hugging Face hub did not give it ({reason}); give an existing "
            "folder, or check the id and the network"
        ) from error


class Checkpoint:
    """The open safetensors files of a folder."""

    def __init__(self, folder: Path, stack: ExitStack):
        self._folder = folder
        self._files: dict[str, Any] = {}
        for file in _weight_files(folder):
            try:
                handle = stack.enter_context(safe_open(file, framework="numpy"))
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{file}: is damaged or incomplete ({error}); copy it anew") from error
            self._files |= dict.fromkeys(handle.keys(), handle)

    @property
    def dtype(self) -> np.dtype:
        """bfloat16 where every tensor is, else float32, which holds the rest exactly."""
        kinds = {file.get_slice(name).get_dtype() for name, file in self._files.items()}
        if unknown := kinds - {"F32", "F16", "BF16"}:
            raise ConfigError(f"{self._folder}: tensors of type {', '.join(sorted(unknown))} are not supported")
        return jnp.dtype(jnp.bfloat16 if kinds == {"BF16"} else jnp.float32)

    def check(self, tensors: Sequence[hf.Tensor], config: ModelConfig) -> None:
        """One ConfigError with every tensor that is missing, unknown or of another shape."""
        expected = {tensor.name: tensor for tensor in tensors}
        extra = {name for name in self._files if name not in expected and not name.endswith("rotary_emb.inv_freq")}
        faults = [f"missing {name}" for name in expected if name not in self._files]
        if config.tie_embeddings:
            names = hf.family(config.model_type).NAMES
            embedding, head = names["embed.embedding"].hf, names["head.kernel"].hf
            if head in extra and embedding in self._files:
                extra.remove(head)
                if not np.array_equal(self._files[head].get_tensor(head), self._files[embedding].get_tensor(embedding)):
                    faults.append(f"{head} differs from {embedding}, although tie_word_embeddings is true")
        faults += [f"unknown {name}" for name in sorted(extra)]
        for name, tensor in expected.items():
            if name in self._files:
                shape = tuple(self._files[name].get_slice(name).get_shape())
                if shape != tensor.shape:
                    faults.append(f"{name} is {shape}, config.json says {tensor.shape}")
        if faults:
            raise ConfigError(f"{self._folder}: the tensors do not fit config.json: {'; '.join(faults)}")

    def read(self, tensors: Sequence[hf.Tensor], dtype: np.dtype) -> np.ndarray:
        """One parameter: its tensors, stacked where it is."""
        rows = [self._files[tensor.name].get_tensor(tensor.name) for tensor in tensors]
        rows = [row.T if tensor.transpose else row for row, tensor in zip(rows, tensors, strict=True)]
        if tensors[0].index is None:
            return np.ascontiguousarray(rows[0], dtype)
        return np.stack(rows).astype(dtype, copy=False)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]
    elif index.is_file():
        names = _read_json(index).get("weight_map")
        if not isinstance(names, dict):
            raise ConfigError(f"{index}: must have weight_map, the file of each tensor")
        files = [folder / name for name in sorted(set(names.values()))]
    else:
        raise ConfigError(f"{folder}: has neither model.safetensors nor model.safetensors.index.json")
    if absent := [file.name for file in files if not file.is_file()]:
        raise ConfigError(f"{folder}: {', '.join(absent)} of {index.name} not there")
    return files


def check_lora(config: ModelConfig, lora: LoRA) -> None:
    """ConfigError where the adapter does not fit the model; no weights are needed."""
    outline = _outline(config, jnp.dtype(jnp.float32), None, remat=False)
    nnx.eval_shape(lambda model: attach_lora(model, lora, seed=0), outline)


def _outline(config: ModelConfig, dtype: np.dtype, compute_dtype: DTypeLike | None, remat: bool) -> Decoder:
    """A decoder with shapes in place of arrays."""
    compute = dtype if compute_dtype is None else jnp.dtype(compute_dtype)
    return nnx.eval_shape(lambda: Decoder(config, dtype=dtype, compute_dtype=compute, remat=remat, rngs=nnx.Rngs(0)))


def _shapes(model: Decoder) -> list[tuple[str, tuple[str, ...], tuple[int, ...]]]:
    """Path, names of dimensions and shape of every parameter."""
    shapes = {".".join(map(str, path)): v.shape for path, v in nnx.iter_graph(model) if isinstance(v, nnx.Param)}
    return [(path, dims, shapes[path]) for path, dims in ModelWeights(model).dims().items()]


def _shardings(model: Decoder, mesh: Mesh | None) -> dict[str, Sharding | None]:
    """Where each parameter goes; None: the default device."""
    if mesh is None:
        return {path: None for path, _, _ in _shapes(model)}
    tensor = mesh.shape["tensor"]
    for block in model.config.blocks:
        for name, heads in (("num_kv_heads", block.attention.num_kv_heads), ("num_heads", block.attention.num_heads)):
            if heads % tensor:
                raise ConfigError(
                    f"mesh.tensor={tensor} must divide {name}={heads} of {model.config.model_type}; "
                    f"use {' or '.join(str(n) for n in range(1, heads + 1) if heads % n == 0)}"
                )
    return {path: param_sharding(mesh, path, dims, shape) for path, dims, shape in _shapes(model)}


def _tensors(model: Decoder) -> list[hf.Tensor]:
    return hf.tensors(model.config, [shape for shape in _shapes(model) if ".lora_" not in shape[0]])


def _to_host(weights: Weights, tensor: hf.Tensor) -> np.ndarray:
    value = weights[tensor.param]
    array = np.asarray(value if tensor.index is None else value[tensor.index])
    return np.ascontiguousarray(array.T) if tensor.transpose else array


def _write_weights(folder: Path, model: Decoder) -> None:
    weights = ModelWeights(model).read()
    shards: list[list[hf.Tensor]] = [[]]
    sizes = {t.name: int(np.prod(t.shape)) * weights[t.param].dtype.itemsize for t in _tensors(model)}
    for tensor in _tensors(model):
        if shards[-1] and sum(sizes[t.name] for t in shards[-1]) + sizes[tensor.name] > MAX_SHARD_BYTES:
            shards.append([])
        shards[-1].append(tensor)
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        files = ["model.safetensors"]
    for file, shard in zip(files, shards, strict=True):
        # transformers refuses a file without this entry.
        save_file({t.name: _to_host(weights, t) for t in shard}, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        places = {t.name: file for file, shard in zip(files, shards, strict=True) for t in shard}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        _write_json(folder / "model.safetensors.index.json", index)


def _check_replaceable(target: Path) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise ConfigError(f"save_model: {target} is a file; give a folder")
    entries = sorted(target.iterdir())
    foreign = [e.name for e in entries if e.is_dir() or not any(e.match(pattern) for pattern in MODEL_FILES)]
    if foreign or (entries and not (target / "config.json").is_file()):
        names = ", ".join(foreign or [e.name for e in entries])
        raise ConfigError(f"save_model: {target} is not a model's folder, it holds {names}; give a new or empty folder")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file; give the folder of a checkpoint in Hugging Face layout") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is no JSON ({error})") from error
    if not isinstance(read, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return read


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
