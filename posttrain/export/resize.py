"""Models of another size in Hugging Face layout, pruned, upcycled or upscaled, and verified before they get names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
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
from posttrain.models.config import MoEConfig
from posttrain.models.decoder import Decoder
from posttrain.models.hf import config_from_hf
from posttrain.runtime.files import check_local
from posttrain.stages.inputs import rows_and_renderer
from posttrain.weights.files import find_folder, read_json
from posttrain.weights.load import load_model
from posttrain.weights.lora import count_parameters
from posttrain.weights.prune import Pruning, pruned, pruned_config
from posttrain.weights.save import save_model
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


def _active(model: Decoder) -> int:
    """Number of parameters active for one token."""
    idle = 0
    for mixture in model.config.mixtures:
        assert isinstance(mixture, MoEConfig)
        idle += (mixture.num_experts - mixture.top_k) * 3 * model.config.embed_dim * mixture.expert.dim
    return count_parameters(model).total - idle
