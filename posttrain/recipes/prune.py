"""A smaller model cut out of a checkpoint, written in Hugging Face layout and read again before it gets its name."""

from __future__ import annotations

import shutil
from pathlib import Path

from posttrain.config import ConfigError
from posttrain.data.tokenizer import TOKENIZER_FILES, load_tokenizer
from posttrain.models.hf import config_from_hf
from posttrain.recipes.proof import prove
from posttrain.recipes.proof_readers import Reader, default_reader
from posttrain.weights.files import find_folder, read_json
from posttrain.weights.load import load_model
from posttrain.weights.lora import count_parameters
from posttrain.weights.prune import Pruning, pruned, pruned_config
from posttrain.weights.save import save_model


def prune(source: str, out: Path, plan: Pruning, *, reader: Reader | None = None) -> str:
    """Write the smaller model, with the tokenizer where `source` has one; the result says what was written.

    ConfigError for what cannot be pruned; ProofError where what was written is not the model in memory: it is then left
    beside `out` under `.unproved`.
    """
    out = out.expanduser()
    if out.exists():
        raise ConfigError(f"prune: {out} exists; give a new folder")
    folder = find_folder(source)
    pruned_config(config_from_hf(read_json(folder / "config.json")), plan)
    whole = load_model(folder)
    model = pruned(whole, plan)
    tokenizer = load_tokenizer(folder) if any((folder / name).is_file() for name in TOKENIZER_FILES) else None
    unproved = out.with_name(f"{out.name}.unproved")
    if unproved.exists():
        shutil.rmtree(unproved)
    save_model(model, unproved, tokenizer=tokenizer)
    proof = prove(model, unproved, tokenizer, reader or default_reader(adapter=False))
    unproved.rename(out)
    before, after = count_parameters(whole).total, count_parameters(model).total
    return f"{model.config.model_type}: {after:,} of {before:,} parameters\n{proof}"
