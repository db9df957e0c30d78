"""Verification of a written checkpoint: it is read by an independent reader and compared on the same inputs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from posttrain.data.tokenizer import Tokenizer
from posttrain.export.readers import (
    ProofError,
    Reader,
    answers,
    in_float32,
    read_with_posttrain,
    read_with_transformers,
    sample_tokens,
    start_of,
    without_placeholders,
)
from posttrain.models.decoder import Decoder
from posttrain.runs.folder import remember_versions
from posttrain.weights.state import ModelWeights, without_adapter

EXACT = 2e-4
"""Largest difference of log-probabilities in nats, or of scores, that two float32 implementations may have."""
ROUNDED = 0.05
"""Mean difference that storing merged weights in bfloat16 may make."""
ROUNDED_SHARE = 0.2
"""Share of the adapter's own effect that storing merged weights in bfloat16 may cost."""


@contextmanager
def proved_folder(out: Path) -> Iterator[Path]:
    """Yield `out` with the ending `.unproved`, to write and prove; it gets its name, and the versions that made it,
    unless the block raises."""
    unproved = out.with_name(f"{out.name}.unproved")
    if unproved.exists():
        shutil.rmtree(unproved)
    yield unproved
    remember_versions(unproved)
    unproved.rename(out)


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Distance of the written checkpoint from the model, in nats of log-probability or in reward scores."""

    reader: Reader
    num_tensors: int
    scores: bool
    largest: float
    mean: float
    tensors: str | None = None
    """Result of the tensor comparison with the source checkpoint, if there is one."""
    tokenizer: str | None = None
    """Results of reading configuration and tokenizer with other versions of transformers."""

    def __str__(self) -> str:
        what, unit = ("scores", "") if self.scores else ("log-probabilities", " nats")
        own = (
            " (the code that wrote it; install torch for a reader that shares none)"
            if self.reader == "posttrain"
            else ""
        )
        compared = "".join(f"; {told}" for told in (self.tensors, self.tokenizer) if told is not None)
        return (
            f"read again with {self.reader}{own}: {self.num_tensors} tensors; {what} differ by "
            f"{self.mean:.1e}{unit} on average, {self.largest:.1e} at most{compared}"
        )


def prove(
    model: Decoder, folder: Path, tokenizer: Tokenizer | None, reader: Reader, *, base: str | None = None
) -> Proof:
    """Compare the checkpoint in `folder` with `model`, whose adapter is applied and not merged. With `base`, the folder
    holds an adapter for that model.

    ProofError for tensors that are missing, left over or misshapen, and for other log-probabilities or scores.
    """
    scores = model.config.scalar_head
    tokens = without_placeholders(sample_tokens(model.config.vocab_size, tokenizer), model.config)
    expected = answers(in_float32(model), tokens)
    read = {"transformers": read_with_transformers, "posttrain": read_with_posttrain}[reader]
    found = read(folder, tokens, base, scores=scores, start=start_of(model, folder if base is None else base))
    if found.shape != expected.shape:
        raise ProofError(f"{folder}: the vocabulary is {found.shape[-1]}, the model's is {expected.shape[-1]}")
    differences = np.abs(found - expected)
    proof = Proof(
        reader=reader,
        num_tensors=_count_tensors(folder),
        scores=scores,
        largest=float(differences.max()),
        mean=float(differences.mean()),
    )
    weights = ModelWeights(model)
    adapted = weights.trainable() != frozenset(weights.read())
    rounded = adapted and base is None and model.embed.embedding[...].dtype != jnp.float32
    # Scores may be of any size.
    exact = EXACT * max(1.0, float(np.abs(expected).max())) if scores else EXACT
    if not rounded and not proof.largest <= exact:
        raise ProofError(f"{folder}: is not the model: {proof}; {exact:.0e} is allowed")
    if rounded:
        plain = answers(in_float32(weights.bind(without_adapter(weights.read()))), tokens)
        allowed = min(ROUNDED, ROUNDED_SHARE * float(np.abs(plain - expected).mean()))
        if not proof.mean <= max(allowed, exact):
            raise ProofError(f"{folder}: is not the model: {proof}; {allowed:.1e} on average is allowed")
    return proof


def _count_tensors(folder: Path) -> int:
    from safetensors import safe_open

    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as opened:
            total += len(opened.keys())
    return total
