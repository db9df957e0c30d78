"""Proof that a written checkpoint is the model: it is read again by other means, and both are asked the same."""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from posttrain.config import ConfigError
from posttrain.data.tokenizer import Tokenizer
from posttrain.models.decoder import Decoder
from posttrain.weights.load import load_model
from posttrain.weights.state import ModelWeights, without_adapter

Reader = Literal["transformers", "posttrain"]

TEXTS = (
    "Once upon a time there was a little girl who asked: how many apples are 17 + 25?",
    "def area(radius: float) -> float:\n    return 3.14159 * radius ** 2  # in m²",
    "Die Prüfung umfaßt 12 Fälle; 東京は日本の首都です。 Привет, мир! 🙂",
)
SAMPLE_TOKENS = 48
EXACT_NATS = 2e-4
"""Largest difference of log-probabilities that two float32 implementations may have."""
ROUNDED_NATS = 0.05
"""Mean difference that storing merged weights in bfloat16 may make."""
ROUNDED_SHARE = 0.2
"""Share of the adapter's own effect that storing merged weights in bfloat16 may cost."""


class ProofError(Exception):
    """The checkpoint that was written is not the model."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """How far the written checkpoint is from the model, in nats of log-probability."""

    reader: Reader
    num_tensors: int
    largest: float
    mean: float

    def __str__(self) -> str:
        return (
            f"read again with {self.reader}: {self.num_tensors} tensors; log-probabilities differ by "
            f"{self.mean:.1e} nats on average, {self.largest:.1e} at most"
        )


def default_reader(*, adapter: bool) -> Reader:
    """transformers, which shares no code with us, where it (and PEFT for an adapter) can run."""
    needed = ("torch", "peft") if adapter else ("torch",)
    return "transformers" if all(importlib.util.find_spec(name) is not None for name in needed) else "posttrain"


def prove(
    model: Decoder, folder: Path, tokenizer: Tokenizer | None, reader: Reader, *, base: str | None = None
) -> Proof:
    """Compare the checkpoint in `folder` with `model`, whose adapter is applied and not merged. With `base`, the folder
    holds an adapter for that model.

    ProofError for tensors that are missing, left over or misshapen, and for other log-probabilities.
    """
    tokens = sample_tokens(model.config.vocab_size, tokenizer)
    expected = _logps(_in_float32(model), tokens)
    read = {"transformers": _read_with_transformers, "posttrain": _read_with_posttrain}[reader]
    found, num_tensors = read(folder, tokens, base)
    if found.shape != expected.shape:
        raise ProofError(f"{folder}: the vocabulary is {found.shape[-1]}, the model's is {expected.shape[-1]}")
    differences = np.abs(found - expected)
    proof = Proof(
        reader=reader, num_tensors=num_tensors, largest=float(differences.max()), mean=float(differences.mean())
    )
    weights = ModelWeights(model)
    adapted = weights.trainable() != frozenset(weights.read())
    rounded = adapted and base is None and model.embed.embedding[...].dtype != jnp.float32
    if not rounded and not proof.largest <= EXACT_NATS:
        raise ProofError(f"{folder}: is not the model: {proof}; {EXACT_NATS:.0e} is allowed")
    if rounded:
        plain = _logps(_in_float32(weights.bind(without_adapter(weights.read()))), tokens)
        allowed = min(ROUNDED_NATS, ROUNDED_SHARE * float(np.abs(plain - expected).mean()))
        if not proof.mean <= max(allowed, EXACT_NATS):
            raise ProofError(f"{folder}: is not the model: {proof}; {allowed:.1e} on average is allowed")
    return proof


def sample_tokens(vocab_size: int, tokenizer: Tokenizer | None) -> Int[np.ndarray, "B T"]:
    """Rows of text, where there is a tokenizer, and rows of ids from the whole vocabulary."""
    draw = np.random.default_rng(0).integers(0, vocab_size, (2, SAMPLE_TOKENS))
    if tokenizer is None:
        return draw.astype(np.int32)
    encoded = [tokenizer.encode(text) for text in TEXTS]
    texts = [(ids * (SAMPLE_TOKENS // max(len(ids), 1) + 1))[:SAMPLE_TOKENS] for ids in encoded if ids]
    return np.concatenate([np.asarray(texts, np.int32).reshape(-1, SAMPLE_TOKENS), draw.astype(np.int32)])


def _in_float32(model: Decoder) -> Decoder:
    copy = nnx.merge(*nnx.split(model))
    copy.compute = replace(model.compute, dtype=jnp.dtype(jnp.float32))
    # Other programs know nothing of the tokens that there are.
    copy.config = replace(model.config, num_tokens=None)
    return copy


def _logps(model: Decoder, tokens: Int[np.ndarray, "B T"]) -> Float[np.ndarray, "B T V"]:
    """Log-probabilities of every token of the vocabulary after each prefix, a row at a time."""
    weights = ModelWeights(model)

    @jax.jit
    def run(arrays: Any, row: Array) -> Array:
        bound = weights.bind(arrays)
        positions = jnp.arange(row.shape[1], dtype=jnp.int32)[None]
        with jax.default_matmul_precision("highest"):
            hidden, _ = bound(row, positions, jnp.ones_like(row))
            return jax.nn.log_softmax(bound.logits(hidden), axis=-1)

    return np.concatenate([np.asarray(run(weights.read(), jnp.asarray(row[None]))) for row in tokens])


def _read_with_posttrain(
    folder: Path, tokens: Int[np.ndarray, "B T"], base: str | None
) -> tuple[Float[np.ndarray, "B T V"], int]:
    try:
        if base is None:
            model = load_model(folder, compute_dtype=jnp.float32)
        else:
            model = load_model(base, adapter=folder, compute_dtype=jnp.float32)
    except ConfigError as error:
        raise ProofError(str(error)) from error
    return _logps(model, tokens), _count_tensors(folder)


def _read_with_transformers(
    folder: Path, tokens: Int[np.ndarray, "B T"], base: str | None
) -> tuple[Float[np.ndarray, "B T V"], int]:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        # The default for mixtures of experts refuses some widths on CPU.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder if base is None else base,
            dtype=torch.float32,
            output_loading_info=True,
            experts_implementation="eager",
        )
        if base is not None:
            from peft import PeftModel

            with warnings.catch_warnings():
                # PEFT and transformers of one month may not agree on names yet.
                warnings.simplefilter("ignore", FutureWarning)
                loaded = PeftModel.from_pretrained(loaded[0], str(folder)), loaded[1]
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ProofError(f"{folder}: transformers cannot read it: {' '.join(str(error).split())[:500]}") from error
    model, info = loaded
    faults = [
        f"{what.replace('_', ' ')}: {', '.join(map(str, sorted(info[what])))}"
        for what in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if info[what]
    ]
    if faults:
        raise ProofError(f"{folder}: transformers finds {'; '.join(faults)[:2000]}")
    model.eval()
    with torch.no_grad():
        rows = [model(torch.from_numpy(row[None].astype(np.int64))).logits.float() for row in tokens]
        return np.concatenate([torch.log_softmax(row, dim=-1).numpy() for row in rows]), _count_tensors(folder)


def _count_tensors(folder: Path) -> int:
    from safetensors import safe_open

    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as opened:
            total += len(opened.keys())
    return total
