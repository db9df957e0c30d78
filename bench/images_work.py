"""One work of `bench/images.py` in a process of its own; prints what it took as a line of JSON.

python bench/images_work.py WORK FOLDER --steps N
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from images import EPOCH_STEPS, EPOCHS, EXAMPLES, MODEL, QWEN3, SKIPPED, WORKS, rows_of
from train_work import peak_mib

import posttrain as pt
from posttrain.batch import Batch
from posttrain.config import AdamW, ImageSection
from posttrain.data.pipeline import SFTBatches, make_batches
from posttrain.data.prefetch import Prefetch
from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.losses.sft import SFTLoss
from posttrain.models import hf
from posttrain.train.objective import TrainSettings
from posttrain.train.trainer import Trainer
from posttrain.train.transformations import make_optimizer
from posttrain.weights.load import init_model, load_model
from posttrain.weights.locate import init_fields
from posttrain.weights.save import save_model

ROW_TOKENS = {"sft": 192 + 1, "spread": 384}
PROMPTS, GROUP, NEW = 4, 8, 64


def make(folder: Path) -> None:
    """Save random models with their processors, in Hugging Face layout."""
    for fields, where in ((MODEL, folder), (QWEN3, folder / "qwen3")):
        tokenizer = load_tokenizer("bytes").for_new_images(fields["model_type"])
        whole = hf.config_to_hf(hf.config_from_init(init_fields(fields, tokenizer), vision="tower"))
        model = init_model(whole, dtype=jnp.float32, seed=0, vision="tower")
        save_model(model, where, tokenizer=tokenizer.for_images(whole, None, ImageSection()))


def batches_of(work: str, tokenizer: Tokenizer, steps: int) -> Iterator[Batch]:
    """Examples of a step in rows of their own, in order, or packed into rows of the same number of tokens."""
    rows, packed = rows_of(work, steps), work == "spread"
    return make_batches(
        rows,
        tokenizer,
        batch_rows=EXAMPLES // 2 if packed else EXAMPLES,
        row_tokens=ROW_TOKENS[work],
        seed=0 if packed else None,
        packing=packed,
    )


def sft(work: str, folder: Path, steps: int) -> dict[str, Any]:
    fields = json.loads((folder / "config.json").read_text())
    tokenizer = load_tokenizer(folder).for_images(fields, folder, ImageSection())
    model = load_model(folder, dtype=jnp.float32, vision="tower")
    optimizer = make_optimizer(AdamW(learning_rate=1e-4, weight_decay=0.0), steps, seed=0, model=model)
    trainer = Trainer(model, SFTLoss(), optimizer, TrainSettings(temperature=1.0, max_grad_norm=1.0))
    batches, stamps, counts, losses = batches_of(work, tokenizer, steps), [now()], [], []
    for _ in range(steps):
        batch = next(batches)
        losses.append(float(trainer.step(batch)["loss"].value()))
        # Without the line break that the template ends a sequence with, which TRL is not given.
        counts.append(int(((np.asarray(batch.segments) > 0) & (np.asarray(batch.positions) > 0)).sum()))
        stamps.append(now())
    return speeds(stamps, counts) | {"losses": losses}


def epochs(work: str, folder: Path) -> dict[str, Any]:
    """Epochs with a frozen tower, in the order of a stage, and the losses of all steps."""
    fields = json.loads((folder / "config.json").read_text())
    tokenizer = load_tokenizer(folder).for_images(fields, folder, ImageSection())
    model = load_model(folder, dtype=jnp.float32, vision="frozen")
    optimizer = make_optimizer(AdamW(learning_rate=1e-4, weight_decay=0.0), EPOCHS * EPOCH_STEPS, seed=0, model=model)
    settings = TrainSettings(temperature=1.0, max_grad_norm=1.0, image_cache_bytes=2**30 if work == "kept" else 0)
    trainer = Trainer(model, SFTLoss(), optimizer, settings)
    rows = rows_of("sft", EPOCH_STEPS)
    made = make_batches(rows, tokenizer, batch_rows=EXAMPLES, row_tokens=ROW_TOKENS["sft"], seed=0, packing=False)
    assert isinstance(made, SFTBatches)
    stamps, counts, losses = [now()], [], []
    with Prefetch(made, begin=trainer.begin) as batches:
        for _ in range(EPOCHS * EPOCH_STEPS):
            batch = next(batches)
            losses.append(float(trainer.step(batch)["loss"].value()))
            counts.append(int((np.asarray(batch.segments) > 0).sum()))
            stamps.append(now())
    first = speeds(stamps[: EPOCH_STEPS + 1], counts[:EPOCH_STEPS])
    later = speeds(stamps[EPOCH_STEPS - SKIPPED :], counts[EPOCH_STEPS - SKIPPED :])
    return later | {"first_epoch": first["tokens_per_cpu_s"], "losses": losses}


def grpo(work: str, folder: Path, steps: int) -> dict[str, Any]:
    """Steps of a run, in which prompts have a picture, or as many tokens of text."""
    seen, frozen, rows = work != "grpo-text", work.endswith("kept"), []
    for row in rows_of("sft", 1 if frozen else -(-steps * PROMPTS // EXAMPLES)):
        picture = {"image": row["image"]} if seen else {}
        # A picture of 64 tokens stands between two marks.
        rows.append({"prompt": row["prompt"] + ("" if seen else row["completion"][:66].ljust(66, ".")), **picture})
    stamps, found = [now()], list[Mapping[str, Any]]()
    vision = "frozen" if frozen else "tower" if seen else "none"

    def on_step(_: int, metrics: Mapping[str, Any]) -> None:
        stamps.append(now())
        found.append(metrics)

    with tempfile.TemporaryDirectory() as output:
        pt.RL(
            model={"path": str(folder), "vision": vision, "dtype": "float32"},
            dataset=rows,
            rewards=[capitals],
            algorithm={"kind": "grpo", "kl_coef": 0.05 if frozen else 0.0},
            rollout={"image_cache_mib": 0 if work == "grpo-not-kept" else 1024},
            num_steps=steps,
            prompts_per_step=PROMPTS,
            group_size=GROUP,
            row_tokens=ROW_TOKENS["sft"],
            sampling={"max_tokens": NEW, "temperature": 1.0, "ignore_eos": True},
            optimizer={"learning_rate": 1e-5},
            checkpoint_every=steps,
            output=output,
            seed=0,
        ).fit(on_step=on_step)
    names = ("perf/tflops", "perf/tower_ratio", "completions/mean_length", "timing_s/update", "rollout/prefill_s")
    last = {name: float(found[-1][name]) for name in names if name in found[-1]}
    return speeds(stamps, [PROMPTS * GROUP * NEW] * len(found)) | last


def capitals(completions: list[str], **_: Any) -> list[float]:
    return [float(sum("A" <= letter <= "Z" for letter in text)) for text in completions]


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def speeds(stamps: list[tuple[float, float]], counts: list[int]) -> dict[str, Any]:
    seconds = np.diff(np.asarray(stamps), axis=0)
    rates = np.asarray(counts[SKIPPED:])[:, None] / seconds[SKIPPED:]
    return {
        "tokens_per_s": float(np.median(rates[:, 0])),
        "tokens_per_cpu_s": float(np.max(rates[:, 1])),
        "step_cpu_s": float(np.min(seconds[SKIPPED:, 1])),
        "first_step_s": float(seconds[0, 0]),
        "peak_mib": peak_mib(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=("make", *WORKS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    if arguments.work == "make":
        make(arguments.folder)
        return
    if arguments.work in ("kept", "not-kept"):
        print(json.dumps(epochs(arguments.work, arguments.folder / "qwen3")))
        return
    run = grpo if arguments.work.startswith("grpo") else sft
    print(json.dumps(run(arguments.work, arguments.folder, arguments.steps)))


if __name__ == "__main__":
    main()
