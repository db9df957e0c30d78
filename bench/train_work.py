"""One work of `bench/train.py` in a process of its own; prints what it took as a line of JSON.

python bench/train_work.py WORK --steps N
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from posttrain.batch import Batch
from posttrain.cluster.reference import Reference
from posttrain.config import AdamW, LoRA
from posttrain.data.packing import LOOK_AHEAD, PackedBatches, to_batch
from posttrain.kernels.logits.chunk_stats import PLAIN, Terms
from posttrain.kernels.logits.divergence import Divergence
from posttrain.losses.distill import DistillLoss
from posttrain.losses.preference import PreferenceLoss
from posttrain.losses.sft import SFTLoss
from posttrain.models.decoder import Decoder
from posttrain.train.objective import TrainSettings
from posttrain.train.trainer import Trainer
from posttrain.train.transformations import make_optimizer
from posttrain.tree import replace
from posttrain.weights.load import init_model

VOCAB, FIRST = 4096, 3
ROWS, TOKENS = 8, 256
PAIRS, PROMPT, RESPONSE = 4, 64, 192
TOKENS_OF_PAIRS = 2 * PAIRS * (PROMPT + RESPONSE)
"""With both prompts, as peers count them, also where a prompt is computed once."""
RANK, TEMPERATURE = 16, 2.0
SHORTEST, SEQUENCES = 32, 4096
SKIPPED = 2
"""Steps before those that count."""


def config(*, hidden: int = 256, layers: int = 4, head_dim: int = 32, mlp: int = 768) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": head_dim,
        "intermediate_size": mlp,
        "vocab_size": VOCAB,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    }


STUDENT = config()
TEACHER = config(hidden=512, layers=8, head_dim=64, mlp=1536)


@dataclass(frozen=True, kw_only=True)
class Work:
    """Batches, and what a step does with one."""

    trainer: Trainer
    batches: Iterator[Batch]
    complete: Callable[[Batch], Batch] = lambda batch: batch
    """Adds what the step wants of another model."""


def rows_of(
    lengths: list[list[int]], rng: np.random.Generator, width: int, *, unweighted: int = 1, vocab: int = VOCAB
) -> Batch:
    """Random tokens: rows of sequences of these lengths, loss on all but the first `unweighted` of each."""
    shape = (len(lengths), width)
    tokens = rng.integers(FIRST, vocab, shape, dtype=np.int32)
    positions, segments, weight = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    for row, parts in enumerate(lengths):
        start = 0
        for number, length in enumerate(parts, start=1):
            positions[row, start : start + length] = np.arange(length)
            segments[row, start : start + length] = number
            weight[row, start + unweighted : start + length] = 1.0
            start += length
    return Batch(tokens=np.where(segments > 0, tokens, 0), positions=positions, segments=segments, loss_weight=weight)


def spread_lengths(rng: np.random.Generator, count: int) -> Int[np.ndarray, " N"]:
    return rng.integers(SHORTEST, TOKENS + 1, count)


def packed(rng: np.random.Generator) -> Iterator[Batch]:
    """As the product packs a shuffled dataset."""
    examples = [
        {
            "tokens": rng.integers(FIRST, VOCAB, length, dtype=np.int32),
            "loss_weight": (np.arange(length) > 0).astype(np.float32),
        }
        for length in spread_lengths(rng, SEQUENCES).tolist()
    ]
    batches = PackedBatches(
        grain.MapDataset.source(examples).repeat(),
        epoch=SEQUENCES,
        window=LOOK_AHEAD,
        batch_rows=ROWS,
        lengths=dict.fromkeys(("tokens", "loss_weight"), TOKENS),
    )
    yield from map(to_batch, batches)


def batches_of(name: str, rng: np.random.Generator) -> Iterator[Batch]:
    if name == "spread":
        yield from packed(rng)
    while True:
        if name == "spread-padded":
            yield rows_of(spread_lengths(rng, ROWS).reshape(-1, 1).tolist(), rng, TOKENS)
        elif name == "completion":
            yield rows_of([[TOKENS]] * ROWS, rng, TOKENS, unweighted=TOKENS * 3 // 4)
        elif name.startswith("dpo"):
            yield pairs(rng) if name == "dpo-apart" else with_prompts_once(pairs(rng))
        else:
            yield rows_of([[TOKENS]] * ROWS, rng, TOKENS)


def pairs(rng: np.random.Generator) -> Batch:
    """A pair in each row: chosen and rejected, each behind the same prompt."""
    length = PROMPT + RESPONSE
    batch = rows_of([[length, length]] * PAIRS, rng, 2 * length, unweighted=PROMPT)
    tokens = np.asarray(batch.tokens).copy()
    tokens[:, length : length + PROMPT] = tokens[:, :PROMPT]
    sign = np.where(np.asarray(batch.segments) == 1, 1, -1)
    return replace(batch, tokens=tokens, roles=np.where(np.asarray(batch.loss_weight) > 0, sign, 0).astype(np.int32))


def with_prompts_once(batch: Batch) -> Batch:
    """The same pairs as the product lays them out: a prompt but for its last token, and both answers from there on."""
    length, shared = PROMPT + RESPONSE, PROMPT - 1
    kept = np.r_[:length, length + shared : 2 * length]
    parts = np.repeat(np.arange(1, 4, dtype=np.int32), [shared, length - shared, length - shared])
    rows = jax.tree.map(lambda x: np.asarray(x)[:, kept], batch)
    shape = rows.tokens.shape
    return replace(
        rows,
        segments=np.broadcast_to(parts, shape).copy(),
        parents=np.broadcast_to(np.where(parts > 1, 1, 0).astype(np.int32), shape).copy(),
    )


def trainer_of(
    loss: Any, *, lora: LoRA | None = None, terms: Terms = PLAIN, teachers: tuple[Decoder, ...] = ()
) -> Trainer:
    model = init_model(STUDENT, dtype=jnp.float32, lora=lora, seed=0)
    return Trainer(
        model,
        loss,
        make_optimizer(AdamW(learning_rate=1e-4), num_steps=1000, model=model),
        TrainSettings(temperature=1.0, max_grad_norm=1.0, terms=terms),
        teachers=teachers,
    )


def make(name: str) -> Work:
    batches = batches_of(name, np.random.default_rng(0))
    if name == "lora":
        return Work(trainer=trainer_of(SFTLoss(), lora=LoRA(rank=RANK)), batches=batches)
    if name == "distill":
        teacher = init_model(TEACHER, dtype=jnp.float32, lora=None, seed=1)
        terms = Terms(divergence=Divergence(beta=0.0, temperature=TEMPERATURE))
        return Work(trainer=trainer_of(DistillLoss(0.0), terms=terms, teachers=(teacher,)), batches=batches)
    if name.startswith("dpo"):
        trainer = trainer_of(PreferenceLoss())
        reference = Reference(trainer)
        if name == "dpo-cached":
            one = next(batches)
            said = reference.logps(one)
            return Work(trainer=trainer, batches=batches, complete=lambda batch: replace(batch, ref_logps=said))
        return Work(trainer=trainer, batches=batches, complete=reference.for_step)
    return Work(trainer=trainer_of(SFTLoss()), batches=batches)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    work = make(arguments.work)
    start_mib, stamps, useful = peak_mib(), [(time.perf_counter(), time.process_time())], []
    for _ in range(arguments.steps):
        batch = next(work.batches)
        jax.block_until_ready(work.trainer.step(work.complete(batch)))
        stamps.append((time.perf_counter(), time.process_time()))
        useful.append(
            TOKENS_OF_PAIRS if arguments.work.startswith("dpo") else int((np.asarray(batch.segments) > 0).sum())
        )
    seconds = np.diff(np.asarray(stamps), axis=0)
    steady, tokens = seconds[SKIPPED:], np.asarray(useful[SKIPPED:])[:, None]
    best, median = (tokens / steady).max(axis=0), np.median(tokens / steady, axis=0)
    print(
        json.dumps(
            {
                "tokens_per_s": median[0],
                "tokens_per_s_best": best[0],
                "tokens_per_cpu_s": best[1],
                "step_cpu_s": steady[:, 1].min(),
                "first_step_s": seconds[0, 0],
                "first_step_cpu_s": seconds[0, 1],
                "programs": work.trainer.num_programs,
                "peak_mib": peak_mib(),
                "start_mib": start_mib,
            }
        )
    )


if __name__ == "__main__":
    main()
