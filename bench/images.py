"""Training on pictures: SFT of a small Qwen2.5-VL beside TRL, and GRPO with pictures beside as many tokens of text.

    python bench/images.py [--work NAME ...] [--rounds N] [--steps N] [--cores N] [--trl PYTHON] [--json FILE]

A random model: text of hidden 256 x 4 layers, 8 heads on 4 of 32, MLP 768, vocabulary 4,096; a tower of 128 x 4 layers,
one of them without windows; float32, all of it trained by AdamW.

`sft`: 8 examples a step, a picture of 224 x 224 pixels (256 patches, 64 tokens), a question and 78 bytes of answer,
192 tokens; the rows are the same and in order, so that losses are compared step by step. `spread`: pictures of 56 to
224 pixels a side and answers of 16 to 128 bytes, packed by us and padded by TRL, which packs no pictures. `grpo`: 4
prompts with a picture x 8 samples of 64 tokens; `grpo-text`: the same with 66 tokens of text in the picture's place.

`kept` and `not-kept`: three epochs of 32 examples as of `sft` for a Qwen3-VL with deepstack and a frozen tower, with
its features kept and with the tower in each step; speeds are medians of the steps of the first epoch and of the others.
`grpo-kept` and `grpo-not-kept`: as `grpo` with a frozen tower of the same model and a reference, over 8 prompts.

Tokens are those of sequences, image tokens among them, or those sampled; decoding of pictures is in the time. Each run
is a process of its own, and they take turns. On a busy machine give `--cores 1` and compare tokens per CPU second.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

HERE = Path(__file__).resolve().parent
WORKS = ("sft", "spread", "kept", "not-kept", "grpo", "grpo-text", "grpo-kept", "grpo-not-kept")
EXAMPLES = 8
"""Examples of a step of SFT."""
SKIPPED = 2
"""Steps before those that count."""
QUESTION = "What is in the picture here?"
MODEL: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "text_config": {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
        "tie_word_embeddings": True,
    },
    "vision_config": {
        "depth": 4,
        "hidden_size": 128,
        "num_heads": 4,
        "intermediate_size": 384,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [3],
        "out_hidden_size": 256,
        "hidden_act": "silu",
    },
}
QWEN3: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "text_config": MODEL["text_config"] | {"head_dim": 32, "rope_scaling": {"mrope_section": [6, 5, 5]}},
    "vision_config": {
        "depth": 4,
        "hidden_size": 128,
        "num_heads": 4,
        "intermediate_size": 384,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 256,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [1, 2],
        "hidden_act": "gelu_pytorch_tanh",
    },
}
EPOCHS, EPOCH_STEPS = 3, 4
"""Epochs of `kept`, and steps of each."""


def rows_of(work: str, steps: int) -> list[dict[str, Any]]:
    """Rows of a run: random pictures, whose sides need no resizing, and random letters."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(steps * EXAMPLES):
        sides, length = (224, 224), 78
        if work == "spread":
            sides, length = tuple(28 * rng.integers(2, 9, 2)), int(rng.integers(16, 129))
        pixels = rng.integers(0, 256, (*sides, 3), dtype=np.uint8)
        answer = bytes(rng.integers(65, 91, length, dtype=np.uint8)).decode()
        rows.append({"prompt": QUESTION, "completion": answer, "image": Image.fromarray(pixels)})
    return rows


def run(engine: str, work: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One process of one engine. RuntimeError with the end of its output where it fails."""
    script = HERE / "images_work.py" if engine == "posttrain" else HERE / "peers" / "trl_images.py"
    python = sys.executable if engine == "posttrain" else arguments.trl
    threads = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "HF_HUB_OFFLINE": "1"}
    command = [python, str(script), work, str(folder), *([] if work == "make" else ["--steps", str(arguments.steps)])]
    done = subprocess.run(command, env=os.environ | threads, capture_output=True, text=True, check=False)
    line = next((line for line in reversed(done.stdout.splitlines()) if line.startswith("{")), "{}")
    if done.returncode:
        raise RuntimeError(f"{engine}, {work}: ended with code {done.returncode}\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(line)
    return found


def best_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of CPU time and memory the better one over the rounds, of the median speed the median."""
    return {
        **runs[-1],
        "tokens_per_s": statistics.median(r["tokens_per_s"] for r in runs),
        "tokens_per_cpu_s": max(r["tokens_per_cpu_s"] for r in runs),
        **{name: min(r[name] for r in runs) for name in ("step_cpu_s", "first_step_s", "peak_mib")},
    }


def show(work: str, found: dict[str, dict[str, Any]]) -> None:
    ours = found["posttrain"]
    for engine, one in found.items():
        times = " and ".join(f"{ours[name] / one[name]:.2f}" for name in ("tokens_per_s", "tokens_per_cpu_s"))
        print(
            f"{work}: {engine}: {one['tokens_per_s']:,.0f} tokens/s, {one['tokens_per_cpu_s']:,.0f} per CPU second "
            f"(ours {times} times); step {one['step_cpu_s']:.3f} CPU s, first {one['first_step_s']:.1f} s, "
            f"{one['peak_mib']:,.0f} MiB"
        )
    if "first_epoch" in ours:
        first, later = ours["first_epoch"], ours["tokens_per_cpu_s"]
        print(f"{work}: {first:,.0f} tokens per CPU second in the first epoch, {later:,.0f} later")
    if work == "sft" and "trl" in found:
        apart = np.abs(np.asarray(ours["losses"]) - np.asarray(found["trl"]["losses"]))
        print(f"sft: losses {ours['losses'][0]:.4f} to {ours['losses'][-1]:.4f}, at most {apart.max():.1e} apart")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--cores", type=int, help="use only so many")
    parser.add_argument("--trl", help="the Python of an environment with TRL")
    parser.add_argument("--json", type=Path, help="append what was found to this file")
    arguments = parser.parse_args()
    if arguments.cores:
        os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: arguments.cores]))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run("posttrain", "make", folder, arguments)
        runs: dict[str, dict[str, list[dict[str, Any]]]] = {
            work: {e: [] for e in ("posttrain", *(["trl"] if arguments.trl and work in ("sft", "spread") else []))}
            for work in arguments.work
        }
        for _ in range(arguments.rounds):
            for work, engines in runs.items():
                for engine, done in engines.items():
                    done.append(run(engine, work, folder, arguments))
    for work, engines in runs.items():
        found = {engine: best_of(done) for engine, done in engines.items()}
        show(work, found)
        if arguments.json:
            with arguments.json.open("a") as file:
                file.write(json.dumps({"work": work, "cores": len(os.sched_getaffinity(0)), **found}) + "\n")


if __name__ == "__main__":
    main()
