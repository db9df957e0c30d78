"""Models made of others in Hugging Face layout, pruned, upcycled, upscaled or averaged, and verified before they get
names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from posttrain.config import DatasetSection, Locator, Upscale
from posttrain.data.format import tokenize_example
from posttrain.data.packing import fill_rows
from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.data.tokenizer_files import TOKENIZER_FILES
from posttrain.errors import ConfigError
from posttrain.export.proof import Proof, prove, proved_folder
from posttrain.export.readers import Reader, default_reader
from posttrain.models.config import ModelConfig, MoEConfig
from posttrain.models.decoder import Decoder
from posttrain.models.hf import config_from_hf
from posttrain.runtime.files import check_local
from posttrain.stages.inputs import rows_and_renderer
from posttrain.weights.files import find_folder, read_json
from posttrain.weights.load import load_model
from posttrain.weights.lora import count_parameters, has_lora
from posttrain.weights.prune import Pruning, pruned, pruned_config
from posttrain.weights.save import save_model
from posttrain.weights.state import ModelWeights, is_quantized
from posttrain.weights.upcycle import Upcycling, upcycled, upcycled_config
from posttrain.weights.upscale import upscaled_config

TEXT_ROWS = 64
TEXT_TOKENS = 256
"""Tokens per row for counting the use of experts."""


def prune(source: str, out: Path, plan: Pruning, *, text: str | None = None, reader: Reader | None = None) -> str:
    """Write the smaller model, with the tokenizer if `source` has one; returns a description.

    `text`: a dataset on which the use of experts is counted, where `plan` keeps some. ConfigError for what cannot be
    pruned; ProofError if the written model differs; it then stays beside `out` as `.unproved`.
    """
    out = Path(check_local(out)).expanduser()
    if out.exists():
        raise ConfigError(f"prune: {out} exists; give a new folder")
    if (plan.experts is None) != (text is None):
        raise ConfigError("prune: experts are kept by their use on a text, and no others need one; give both or none")
    folder = find_folder(source)
    pruned_config(config_from_hf(read_json(folder / "config.json")), plan)
    whole = load_model(folder)
    tokenizer = load_tokenizer(folder) if any((folder / name).is_file() for name in TOKENIZER_FILES) else None
    load = None
    if text is not None:
        if tokenizer is None:
            raise ConfigError(f"prune: {source} has no tokenizer, by which text would show which experts are used")
        load = expert_load(whole, first_tokens(text, tokenizer))
    model = pruned(whole, plan, load)
    with proved_folder(out) as unproved:
        save_model(model, unproved, tokenizer=tokenizer)
        proof = prove(model, unproved, tokenizer, reader or default_reader(adapter=False))
    before, after = count_parameters(whole).total, count_parameters(model).total
    return f"{model.config.model_type}: {after:,} of {before:,} parameters\n{proof}"


def first_tokens(path: str, tokenizer: Tokenizer) -> list[np.ndarray]:
    """The beginnings of the first rows of a dataset."""
    section = DatasetSection(path=Locator(path), limit=TEXT_ROWS)
    rows, renderer = rows_and_renderer(section, tokenizer)
    made = [one for i in range(len(rows)) for one in tokenize_example(rows[i], section, renderer, "answers")]
    return [one.tokens[:TEXT_TOKENS] for one in made]


def expert_load(model: Decoder, sequences: Sequence[np.ndarray]) -> Float[np.ndarray, "L E"]:
    """Count how often each MoE layer chooses each expert, over all tokens."""
    arrays = [{"tokens": np.asarray(sequence, np.int32)} for sequence in sequences]
    length = max(map(len, sequences))
    rows = fill_rows([[one] for one in arrays], {"tokens": length}, num_rows=len(arrays), like=arrays[0])
    tokens, positions, segments = (rows[f"tokens{name}"] for name in ("", "_positions", "_segments"))
    routing = jax.jit(lambda *inputs: model.forward(*inputs)[2])(tokens, positions, segments)
    assert routing is not None
    return np.asarray(routing.stats.load)


@dataclass(frozen=True, kw_only=True)
class Upcycled:
    """Result of upcycling."""

    model_type: str
    dense_parameters: int
    parameters: int
    active_parameters: int
    """Parameters active for one token."""
    proof: Proof
    """Proof against the dense model; with noise, against the noisy mixture."""

    def __str__(self) -> str:
        return (
            f"{self.model_type}: {self.parameters:,} parameters, {self.active_parameters:,} of them for each token, of "
            f"{self.dense_parameters:,} dense ones\n{self.proof}"
        )


def upcycle(source: str, out: Path, plan: Upcycling, *, seed: int, reader: Reader | None = None) -> Upcycled:
    """Write the mixture in Hugging Face layout, with the tokenizer where `source` has one.

    Without noise the proof is that its log-probabilities are those of the dense model. ConfigError for what cannot be
    upcycled; ProofError if the written model differs; it then stays beside `out` as `.unproved`.
    """
    out = Path(check_local(out)).expanduser()
    if out.exists():
        raise ConfigError(f"upcycle: {out} exists; give a new folder")
    folder = find_folder(source)
    upcycled_config(config_from_hf(read_json(folder / "config.json")), plan)
    dense = load_model(folder)
    model = upcycled(dense, plan, seed=seed)
    tokenizer = load_tokenizer(folder) if any((folder / name).is_file() for name in TOKENIZER_FILES) else None
    with proved_folder(out) as unproved:
        save_model(model, unproved, tokenizer=tokenizer)
        proof = prove(model if plan.noise else dense, unproved, tokenizer, reader or default_reader(adapter=False))
    return Upcycled(
        model_type=model.config.model_type,
        dense_parameters=count_parameters(dense).total,
        parameters=count_parameters(model).total,
        active_parameters=_active(model),
        proof=proof,
    )


def upscale(source: str, out: Path, plan: Upscale, *, reader: Reader | None = None) -> str:
    """Write the deeper model in Hugging Face layout, with the tokenizer where `source` has one; returns a description.

    With `start: identity` the proof is that its log-probabilities are those of the source. ConfigError for what cannot
    be upscaled; ProofError if the written model differs; it then stays beside `out` as `.unproved`.
    """
    out = Path(check_local(out)).expanduser()
    if out.exists():
        raise ConfigError(f"upscale: {out} exists; give a new folder")
    folder = find_folder(source)
    upscaled_config(config_from_hf(read_json(folder / "config.json")), plan)
    plain, model = load_model(folder), load_model(folder, upscale=plan)
    tokenizer = load_tokenizer(folder) if any((folder / name).is_file() for name in TOKENIZER_FILES) else None
    with proved_folder(out) as unproved:
        save_model(model, unproved, tokenizer=tokenizer)
        proved = plain if plan.start == "identity" else model
        proof = prove(proved, unproved, tokenizer, reader or default_reader(adapter=False))
    counts = " of ".join(f"{count_parameters(one).total:,}" for one in (model, plain))
    layers = " of ".join(str(one.config.num_layers) for one in (model, plain))
    return f"{model.config.model_type}: {layers} layers, {counts} parameters\n{proof}"


def average(models: Sequence[str | Path], out: str | Path, *, reader: Reader | None = None) -> str:
    """Write the mean of the weights of saved models of one shape, such as `model`, `best` and `last` of a stage or the
    models of several seeds, with the tokenizer of the first; returns a description.

    Sums are in float32, and the mean has the type of the first. Routers' corrections are averaged too. ConfigError for
    adapters, whose product is not that of their means, for quantised weights, and for another family or other shapes;
    ProofError if the written model differs; it then stays beside `out` as `.unproved`.
    """
    out = Path(check_local(out)).expanduser()
    if out.exists():
        raise ConfigError(f"average: {out} exists; give a new folder")
    if len(models) < 2:
        raise ConfigError(f"average: a mean needs several models, got {len(models)}")
    folders = [find_folder(str(one)) for one in models]
    first = _whole_model(folders[0])
    weights = ModelWeights(first)
    sums = {path: np.asarray(x, np.float32) for path, x in weights.read().items()}
    for folder in folders[1:]:
        _check_same(first.config, weights.structs(), other := _whole_model(folder), f"{folders[0]} and {folder}")
        for path, x in ModelWeights(other).read().items():
            sums[path] = sums[path] + np.asarray(x, np.float32)
    types = {path: x.dtype for path, x in weights.structs().items()}
    weights.write({path: jnp.asarray(total / len(folders), types[path]) for path, total in sums.items()})
    tokenizer = load_tokenizer(folders[0]) if any((folders[0] / name).is_file() for name in TOKENIZER_FILES) else None
    with proved_folder(out) as unproved:
        save_model(first, unproved, tokenizer=tokenizer)
        proof = prove(first, unproved, tokenizer, reader or default_reader(adapter=False))
    return f"{first.config.model_type}: mean of {len(folders)} models\n{proof}"


def _whole_model(folder: Path) -> Decoder:
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"average: {folder} is an adapter, and the mean of its factors is not that of their products; give models "
            "with it merged, by posttrain export --to merged"
        )
    model = load_model(folder)
    if is_quantized(model) or has_lora(model):
        raise ConfigError(f"average: {folder} has quantised weights or an adapter; give models of plain weights")
    return model


def _check_same(config: ModelConfig, shapes: Mapping[str, jax.ShapeDtypeStruct], other: Decoder, names: str) -> None:
    """Raises ConfigError if another model is not of the same family and shapes."""
    if (kind := other.config.model_type) != config.model_type:
        raise ConfigError(f"average: {names} are of two families, {config.model_type} and {kind}")
    theirs = {path: x.shape for path, x in ModelWeights(other).structs().items()}
    for path in sorted({*shapes, *theirs}):
        ours = shapes[path].shape if path in shapes else None
        if ours != theirs.get(path):
            raise ConfigError(f"average: {names} differ: {path} is {ours} and {theirs.get(path)}")
    if other.config.blocks != config.blocks:
        raise ConfigError(f"average: {names} have the same shapes and other settings of their layers")


def _active(model: Decoder) -> int:
    """Number of parameters active for one token."""
    idle = 0
    for mixture in model.config.mixtures:
        assert isinstance(mixture, MoEConfig)
        idle += (mixture.num_experts - mixture.top_k) * 3 * model.config.embed_dim * mixture.expert.dim
    return count_parameters(model).total - idle
