"""Checkpoint files in Hugging Face layout: lookup, validation, tensor access."""

from __future__ import annotations

import difflib
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from posttrain.config import Locator
from posttrain.errors import ConfigError
from posttrain.models.config import AttentionConfig, ModelConfig
from posttrain.models.names import LAYER, CheckpointTensor, Names
from posttrain.models.vision.tower import UNREAD
from posttrain.runtime import processes
from posttrain.runtime.files import file_digest
from posttrain.weights.tensor_file import CHUNK_BYTES, Readable, Region, Task, merge_mxfp4, open_tensors, split_fp8

LOGGER = logging.getLogger("posttrain.weights")

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"

DIGESTS = "digests.json"
"""File of a folder that `save_model` wrote, with digests of its weights; configurations may be edited."""

FLOATS = ("F64", "F32", "F16", "BF16")
"""CheckpointTensor types that can become parameters."""
OTHER_WEIGHTS = ("*.bin", "*.pth", "*.pt", "*.gguf")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
"""Patterns of files to download from a hub repository: config, weights, tokenizer."""
HUB_OTHERS = ["*/*", "consolidated*"]
"""Patterns of files not to download: the same weights in other layouts."""


def find_folder(path: str | Path) -> Path:
    """Resolve the folder of a checkpoint: local, or downloaded from the hub (cached). Raises ConfigError."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ConfigError(f"model {path}: is a file; give the folder with config.json")
    if isinstance(path, Path) or path.startswith(("/", ".", "~")) or path.count("/") > 1:
        raise ConfigError(f"model {path}: no such folder{Locator(str(path)).suggestion}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(path, allow_patterns=HUB_FILES, ignore_patterns=HUB_OTHERS))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"model {path}: not a local folder, and the Hugging Face hub did not provide it ({reason}); give an "
            f"existing folder, or check the id and the network{Locator(path).suggestion}"
        ) from error


def local_weights(path: str) -> Path | None:
    """Folder of a model whose weights are on this machine as a whole, in its own or the hub's cache; else None."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        local: dict[str, Any] = {"allow_patterns": HUB_FILES, "ignore_patterns": HUB_OTHERS, "local_files_only": True}
        folder = Path(path) if Path(path).is_dir() else Path(snapshot_download(path, **local))
        _weight_files(folder)
    except (ConfigError, LocalEntryNotFoundError, HFValidationError):
        return None
    return folder


def check_digests(folder: Path) -> None:
    """ConfigError if weights differ from what was saved, in a folder that has digests; each process checks some."""
    if not (folder / DIGESTS).is_file():
        return
    saved = sorted(read_json(folder / DIGESTS).items())[processes.index() :: processes.count()]
    changed = [name for name, value in saved if (folder / name).is_file() and file_digest(folder / name) != value]
    if changed:
        raise ConfigError(
            f"{folder}: {', '.join(changed)} {'differ' if changed[1:] else 'differs'} from what was saved; copy it "
            f"again, or delete {DIGESTS} there if it was changed on purpose"
        )


def _unused_names(config: ModelConfig, names: Names) -> set[str]:
    """Tensors in files for layers that reuse other layers' keys and values."""
    keys = ("attention.k.kernel", "attention.v.kernel", "attention.k_norm.scale")
    return {
        names[key].hf.format(layer=layer)
        for layer, block in enumerate(config.blocks)
        if isinstance(block.attention, AttentionConfig) and block.attention.reuses is not None
        for key in keys
    }


class Checkpoint:
    """Open safetensors files of a folder. `text_name`: maps a stored name to ours, None for other parts of the
    model."""

    def __init__(self, folder: Path, stack: ExitStack, text_name: Callable[[str], str | None] = lambda name: name):
        self._folder = folder
        stored = [tensor for file in _weight_files(folder) for tensor in open_tensors(file, stack).items()]
        named = [(text_name(name), tensor) for name, tensor in stored]
        self._unread = [name for (name, _), (own, _) in zip(stored, named, strict=True) if own is None]
        rest, matrices = split_fp8({name: tensor for name, tensor in named if name is not None})
        self._tensors = merge_mxfp4(rest) | matrices

    @property
    def dtype(self) -> np.dtype:
        """bfloat16 if at least half of the values are stored in it, else float32, which represents float16 exactly."""
        sizes = Counter[str]()
        for tensor in self._tensors.values():
            sizes[tensor.kind] += math.prod(tensor.shape)
        return jnp.dtype(jnp.bfloat16 if 2 * sizes["BF16"] >= sizes.total() else jnp.float32)

    @property
    def largest(self) -> int:
        """Number of elements in the largest tensor."""
        return max(math.prod(tensor.shape) for tensor in self._tensors.values())

    def reads(self, tensor: CheckpointTensor, out: np.ndarray, region: Region) -> Iterator[Task]:
        """Tasks that read `tensor[region]`, as stored, into `out`."""
        return self._tensors[tensor.name].reads(out, region)

    def check(
        self, tensors: Sequence[CheckpointTensor], config: ModelConfig, names: Names, *, values: bool = True
    ) -> None:
        """Raises one ConfigError listing every tensor that is missing, unknown, or has another shape or an unsupported
        type.

        Without `values` only headers are read: a head that is tied to the embedding may still differ from it.
        """
        if values and config.vision is not None and self._unread:
            parts = ", ".join(sorted({f"{part[0]}*" for name in self._unread if (part := UNREAD.match(name))}))
            LOGGER.warning(
                "%s: %d tensors are not read, and a saved model lacks them: %s", self._folder, len(self._unread), parts
            )
        expected, found = {tensor.name: tensor for tensor in tensors}, self._tensors
        extra = {name for name in found if name not in expected and not name.endswith(".inv_freq")}
        extra = self._without_further_layers(extra, config, warn=values) - _unused_names(config, names)
        faults = []
        if config.tie_embeddings:
            embedding, head = names["embed.embedding"].hf, names["head.kernel"].hf
            if head in extra and embedding in found:
                extra.remove(head)
                if values and not _equal(found[head], found[embedding]):
                    faults.append(
                        f"{head} differs from {embedding}, although tie_word_embeddings is true; set it to false in "
                        "config.json if the head is the model's own, else remove the tensor"
                    )
        present = {name: (found[name], tensor) for name, tensor in expected.items() if name in found}
        names_left = {_pattern(name) for name in extra} - {_pattern(name) for name in expected}
        faults += summary({name: "missing" for name in expected if name not in found}, near=names_left)
        faults += summary(dict.fromkeys(sorted(extra), "unknown"))
        faults += summary(
            {
                name: f"shape {stored.shape}, config.json says {tensor.shape}"
                for name, (stored, tensor) in present.items()
                if stored.shape != tensor.shape
            }
        )
        faults += summary(
            {
                name: f"type {stored.kind} is not supported"
                for name, (stored, _) in present.items()
                if stored.kind not in FLOATS
            }
        )
        if faults:
            raise ConfigError(f"{self._folder}: tensors do not match config.json: {'; '.join(faults)}")

    def _without_further_layers(self, names: set[str], config: ModelConfig, *, warn: bool) -> set[str]:
        last = config.num_layers + config.further_layers
        starts = tuple(LAYER.format(layer=layer) + "." for layer in range(config.num_layers, last))
        further = {name for name in names if name.startswith(starts)}
        if further and warn:
            LOGGER.warning("%s: %d tensors of multi-token prediction layers are not loaded", self._folder, len(further))
        return names - further


def summary(faults: Mapping[str, str], *, near: Collection[str] = ()) -> list[str]:
    """One line per fault for all tensors whose names differ only in numbers.

    `near`: name patterns from which the most similar is suggested.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name, what in faults.items():
        groups.setdefault((_pattern(name), what), []).append(name)
    lines = []
    for (pattern, what), members in groups.items():
        similar = difflib.get_close_matches(pattern, sorted(near), n=1, cutoff=0.75)
        hint = f" (the files have {similar[0]})" if similar else ""
        shown = members[0] if len(members) == 1 else f"{pattern} ({len(members):,} tensors)"
        lines.append(f"{shown}: {what}{hint}")
    return lines


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _equal(a: Readable, b: Readable) -> bool:
    """Return True if two matrices are equal, reading in chunks."""
    if a.shape != b.shape or not {a.kind, b.kind} <= set(FLOATS):
        return False
    rows = max(1, CHUNK_BYTES // (4 * a.shape[1]))
    for start in range(0, a.shape[0], rows):
        region = slice(start, min(start + rows, a.shape[0])), slice(0, a.shape[1])
        first, second = (np.empty((region[0].stop - start, a.shape[1]), np.float32) for _ in range(2))
        for task in (*a.reads(first, region), *b.reads(second, region)):
            task()
        if not np.array_equal(first, second):
            return False
    return True


def _weight_files(folder: Path) -> list[Path]:
    index = folder / WEIGHTS_INDEX
    if (folder / WEIGHTS).is_file():
        files = [folder / WEIGHTS]
    elif index.is_file():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict):
            raise ConfigError(f"{index}: needs weight_map, the file of each tensor")
        files = [folder / name for name in sorted(set(names.values()))]
    else:
        others = sorted(file.name for pattern in OTHER_WEIGHTS for file in folder.glob(pattern))
        hint = f"; {others[0]} is not read, convert it to safetensors" if others else ""
        raise ConfigError(f"{folder}: has neither {WEIGHTS} nor {WEIGHTS_INDEX}{hint}")
    if absent := [file.name for file in files if not file.is_file()]:
        raise ConfigError(f"{folder}: {', '.join(absent)} listed in {index.name} not found")
    return files


def read_json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file; give the folder of a checkpoint in Hugging Face layout") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(read, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return read
