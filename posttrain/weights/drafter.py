"""Block drafters beside their targets: new ones, their files, and what they fit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from posttrain.config import DrafterSection
from posttrain.errors import ConfigError
from posttrain.mesh import param_sharding
from posttrain.models.config import ModelConfig
from posttrain.models.decoder import Decoder
from posttrain.models.drafter import BlockDrafter, DrafterConfig
from posttrain.runtime.files import check_local, whole_folder
from posttrain.weights.state import DRAFTER, ModelWeights
from posttrain.weights.tensor_file import Outline, open_tensors, write_tensors

CONFIG, WEIGHTS = "drafter.json", "drafter.safetensors"
"""Files of a drafter's folder."""
PLACES = ("model", "drafter")
"""Folders of stages in which one is: that of a stage of kind `drafter`, and one trained beside a model."""


@dataclass(frozen=True, kw_only=True)
class StoredDrafter:
    """Drafter of a folder."""

    config: DrafterConfig
    target: str
    """Family and layers of the model that it was trained with."""
    arrays: Mapping[str, np.ndarray]


def drafter_config(section: DrafterSection, target: ModelConfig) -> DrafterConfig:
    """Sizes of a section's drafter for a model."""
    sizes = {"tokens": section.tokens, "window": section.window, "layers": section.layers}
    return DrafterConfig(embed_dim=target.embed_dim, vocab_size=target.vocab_size, **sizes)


def attach_drafter(
    model: Decoder,
    config: DrafterConfig,
    *,
    seed: int,
    mesh: Mesh | None = None,
    arrays: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Add a drafter to a model, which is frozen beside it: a new one, or one of these arrays."""
    dtype = model.embed.embedding[...].dtype
    model.drafter = nnx.data(BlockDrafter(config, dtype=dtype, rngs=nnx.Rngs(jax.random.key(seed))))
    if arrays is not None:
        for name, weight in model.drafter.weights.items():
            weight[...] = jnp.asarray(arrays[name], dtype)
    if mesh is not None:
        weights = ModelWeights(model)
        new, dims = weights.read(lambda path: path.startswith(DRAFTER)), weights.dims()
        places = {path: param_sharding(mesh, path, dims[path], x.shape) for path, x in new.items()}
        weights.write(jax.device_put(new, places))


def save_drafter(model: Decoder, path: str | Path) -> None:
    """Save the drafter of a model as a folder, written atomically. ConfigError for a folder of other files."""
    assert model.drafter is not None
    target = Path(check_local(path)).expanduser().resolve()
    if target.exists() and {entry.name for entry in target.iterdir()} - {CONFIG, WEIGHTS}:
        raise ConfigError(f"{target} is not the folder of a drafter; give a new or empty one")
    arrays = {name: np.asarray(x) for name, x in sorted(model.drafter.arrays().items())}
    fields = {"target": described(model.config), **asdict(model.drafter.config)}
    with whole_folder(target) as new:
        (new / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        outlines = [Outline(name, x.dtype, x.shape) for name, x in arrays.items()]
        write_tensors(new / WEIGHTS, outlines, arrays.values())


def described(config: ModelConfig) -> str:
    return f"{config.model_type} of {config.num_layers} layers"


def drafter_folder(path: str | Path) -> Path:
    """Folder of a drafter: the one given, or below that of the stage or of the run which trained it. ConfigError where
    there is none."""
    given = Path(path).expanduser()
    folders = [given, *(folder for name in PLACES for folder in (given / name, *sorted(given.glob(f"*/{name}"))))]
    folder = next((folder for folder in folders if (folder / CONFIG).is_file()), None)
    if folder is None:
        raise ConfigError(f"{path} has no {CONFIG}; give the folder of a drafter, as a stage of kind drafter leaves it")
    return folder


def read_drafter(path: str | Path) -> StoredDrafter:
    """Read a drafter's folder, or that of the stage or of the run which trained it. ConfigError where there is none, or
    a part is missing."""
    folder = drafter_folder(path)
    try:
        fields = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        target = fields.pop("target")
        config = DrafterConfig(**fields)
        shapes = {name: tensor.shape for name, tensor in config.parameters.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{folder / CONFIG}: not the description of a drafter ({error}); copy it again") from error
    arrays: dict[str, np.ndarray] = {}
    with ExitStack() as stack:
        stored = open_tensors(folder / WEIGHTS, stack)
        for name, shape in shapes.items():
            if name not in stored or stored[name].shape != shape:
                raise ConfigError(f"{folder / WEIGHTS}: {name} of shape {shape} is not there; copy it again")
            arrays[name] = np.empty(shape, jnp.bfloat16 if stored[name].kind == "BF16" else np.float32)
            for task in stored[name].reads(arrays[name], tuple(slice(0, size) for size in shape)):
                task()
    return StoredDrafter(config=config, target=target, arrays=arrays)


def check_drafter(found: StoredDrafter, target: ModelConfig, where: str) -> None:
    """ConfigError for the drafter of another model."""
    config = found.config
    if (config.embed_dim, config.vocab_size) != (target.embed_dim, target.vocab_size) or (
        found.target != described(target)
    ):
        raise ConfigError(
            f"{where}: the drafter was trained with a {found.target}, width {config.embed_dim} and "
            f"{config.vocab_size:,} tokens; the model is a {described(target)}, width {target.embed_dim} and "
            f"{target.vocab_size:,} tokens; train one with it (kind: drafter)"
        )
