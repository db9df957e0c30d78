"""Upcycling of a dense checkpoint to an MoE model, verified to be the same function before it gets its name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from posttrain.data.tokenizer import load_tokenizer
from posttrain.data.tokenizer_files import TOKENIZER_FILES
from posttrain.errors import ConfigError
from posttrain.export.proof import Proof, prove, proved_folder
from posttrain.export.readers import Reader, default_reader
from posttrain.models.config import MoEConfig
from posttrain.models.decoder import Decoder
from posttrain.models.hf import config_from_hf
from posttrain.runtime.files import check_local
from posttrain.weights.files import find_folder, read_json
from posttrain.weights.load import load_model
from posttrain.weights.lora import count_parameters
from posttrain.weights.save import save_model
from posttrain.weights.upcycle import Upcycling, upcycled, upcycled_config


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


def _active(model: Decoder) -> int:
    """Number of parameters active for one token."""
    idle = 0
    for mixture in model.config.mixtures:
        assert isinstance(mixture, MoEConfig)
        idle += (mixture.num_experts - mixture.top_k) * 3 * model.config.embed_dim * mixture.expert.dim
    return count_parameters(model).total - idle
