"""SFT of TRL on the rows of `bench/images.py`; prints what it took, and its losses, as a line of JSON.

    PYTHON bench/peers/trl_images.py sft|spread FOLDER --steps N

Needs TRL, and no torchvision: the processor has no part for videos.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer, TrainerCallback
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from trl import SFTConfig, SFTTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from images import EXAMPLES, SKIPPED, rows_of

TEMPLATE = (
    "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{%- if message['content'] is string %}"
    "{{ message['content'] }}{%- else %}{%- for part in message['content'] %}{{ part['text'] if part['type'] == 'text' "
    "else '<|vision_start|><|image_pad|><|vision_end|>' }}{%- endfor %}{%- endif %}{{ '<|im_end|>' }}"
    "{%- if not loop.last %}{{ '\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '\\n<|im_start|>assistant\\n' }}{%- endif %}"
)
"""Ours, for a question and its answer, which ends with its end token."""


class OfImages(Qwen2_5_VLProcessor):
    """Processor without videos."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None: ...


class InOrder(SFTTrainer):
    def _get_train_sampler(self, *_: Any, **__: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


class Clock(TrainerCallback):
    """Time and process time after each step."""

    def __init__(self) -> None:
        self.stamps = [(time.perf_counter(), time.process_time())]

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.stamps = [(time.perf_counter(), time.process_time())]

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.stamps.append((time.perf_counter(), time.process_time()))


def told(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": row["prompt"]}],
        "completion": [{"role": "assistant", "content": row["completion"]}],
        "images": [row["image"]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=("sft", "spread"))
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=12)
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.folder)
    pictures = AutoImageProcessor.from_pretrained(given.folder)
    processor = OfImages(image_processor=pictures, tokenizer=tokenizer, chat_template=TEMPLATE)
    model = AutoModelForImageTextToText.from_pretrained(given.folder, dtype=torch.float32)
    clock, counts = Clock(), []
    with tempfile.TemporaryDirectory() as output:
        trainer = InOrder(
            model,
            args=SFTConfig(
                output_dir=output,
                max_steps=given.steps,
                per_device_train_batch_size=EXAMPLES,
                learning_rate=1e-4,
                lr_scheduler_type="constant",
                weight_decay=0.0,
                max_length=None,
                bf16=False,
                gradient_checkpointing=False,
                use_cpu=True,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list([told(row) for row in rows_of(given.work, given.steps)]),
            processing_class=processor,
            callbacks=[clock],
        )
        collate = trainer.data_collator

        def counted(examples: list[dict[str, Any]]) -> dict[str, Any]:
            batch = collate(examples)
            counts.append(int(batch["attention_mask"].sum()))
            return batch

        trainer.data_collator = counted
        trainer.train()
    seconds = np.diff(np.asarray(clock.stamps), axis=0)
    rates = np.asarray(counts[SKIPPED : given.steps])[:, None] / seconds[SKIPPED:]
    found = {
        "tokens_per_s": float(np.median(rates[:, 0])),
        "tokens_per_cpu_s": float(np.max(rates[:, 1])),
        "step_cpu_s": float(np.min(seconds[SKIPPED:, 1])),
        "first_step_s": float(seconds[0, 0]),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
        "tokens": counts[0],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
