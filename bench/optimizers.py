"""Loss against tokens of a small model from random weights on stories, for each optimiser.

    PYTHONPATH=. python bench/optimizers.py [--kinds adamw muon muonclip] [--rate R ...] [--seeds N] [--steps N]
                                            [--limit TAU] [--constant]

The model has the shape of stories260k (5 layers of 64, 8 heads) and its tokenizer; a step has 16 rows of 128 tokens of
stories, one after the other, none twice. The loss is that of 64 held-out rows. `--rate`: peak learning rates, each run
by itself; 20 steps of warm-up and then a line to 0, or with `--constant` the peak. `muonclip` is Muon with
`qk_clip: TAU`.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import posttrain as pt
from posttrain.config import AdamW, AnyOptimizer, Muon
from posttrain.data.tokenizer import load_tokenizer
from posttrain.losses.sft import SFTLoss
from posttrain.metrics import to_host
from posttrain.train.objective import TrainSettings
from posttrain.train.transformations import make_optimizer
from posttrain.weights.load import init_model

SHARED = Path(__file__).resolve().parents[2] / "shared"
MODEL, TEXT = SHARED / "models/stories260k", SHARED / "data/text/tinystories_v2gpt4_train_head.jsonl"
ROWS, LENGTH, HELD_OUT = 16, 128, 64
FIELDS = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


@functools.cache
def tokens() -> np.ndarray:
    """Rows of stories, one after the other."""
    tokenizer = load_tokenizer(MODEL)
    stories = [json.loads(line)["text"] for line in TEXT.read_text().splitlines()]
    ids = np.concatenate([[1, *tokenizer.encode(story)] for story in stories])
    return ids[: len(ids) // LENGTH * LENGTH].reshape(-1, LENGTH).astype(np.int32)


def batch_of(rows: np.ndarray) -> pt.Batch:
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), rows.shape).copy()
    weight = np.ones(rows.shape, np.float32)
    weight[:, 0] = 0.0
    return pt.Batch(tokens=rows, positions=positions, segments=np.ones_like(rows), loss_weight=weight)


def section_of(kind: str, rate: float, limit: float, *, constant: bool) -> AnyOptimizer:
    plan: dict[str, Any] = {"learning_rate": rate, "schedule": "constant" if constant else "linear", "warmup_steps": 20}
    if kind == "adamw":
        return AdamW(**plan, weight_decay=0.1, beta2=0.95)
    return Muon(**plan, weight_decay=0.1, qk_clip=limit if kind == "muonclip" else None)


def losses(kind: str, rate: float, seed: int, arguments: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Held-out loss at each tenth of the run, with the largest attention logit where it is known."""
    model = init_model({"vocab_size": 512, **FIELDS}, dtype=np.float32, seed=seed)
    section = section_of(kind, rate, arguments.limit, constant=arguments.constant)
    optimizer = make_optimizer(section, arguments.steps, 0, model=model)
    settings = TrainSettings(temperature=1.0, max_grad_norm=1.0, qk_clip=section.qk_clip)
    trainer = pt.Trainer(model, SFTLoss(), optimizer, settings)
    order = np.random.default_rng(seed).permutation(len(tokens()) - HELD_OUT) + HELD_OUT
    held_out = [batch_of(part) for part in tokens()[:HELD_OUT].reshape(-1, ROWS, LENGTH)]
    for step in range(arguments.steps):
        rows = tokens()[np.take(order, range(step * ROWS, (step + 1) * ROWS), mode="wrap")]
        metrics = to_host(trainer.step(batch_of(rows)))
        if (step + 1) % (arguments.steps // 10) == 0:
            found = {name: metrics[name] for name in metrics if name.startswith("attention/")}
            loss = to_host(trainer.evaluate(held_out))["loss"]
            yield {"tokens": (step + 1) * ROWS * LENGTH, "loss": loss, "grad_norm": metrics["grad_norm"], **found}


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", nargs="+", default=["adamw", "muon", "muonclip"])
    parser.add_argument("--rate", nargs="+", type=float, default=[3e-3])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--limit", type=float, default=100.0)
    parser.add_argument("--constant", action="store_true")
    arguments = parser.parse_args(given)
    for kind in arguments.kinds:
        for rate in arguments.rate:
            runs = [[*losses(kind, rate, seed, arguments)] for seed in range(arguments.seeds)]
            for at in range(len(runs[0])):
                row: dict[str, Any] = {"kind": kind, "rate": rate, "tokens": runs[0][at]["tokens"]}
                for name in runs[0][at]:
                    values = [run[at][name] for run in runs]
                    row[name] = values[0] if name == "tokens" else [round(x, 3) for x in values]
                row["mean"] = round(statistics.mean(run[at]["loss"] for run in runs), 3)
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
