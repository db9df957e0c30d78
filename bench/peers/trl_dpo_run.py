"""What TRL's DPO trainer logs, step by step, on the pairs of the golden `run_dpo`.

    PYTHON bench/peers/trl_dpo_run.py

makes `TRL_LOG` of tests/train/test_preference_e2e.py, with the Python of an environment that has TRL. Pairs go to its
collator as token ids, in order; a line of JSON a step.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, models
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

GOLDENS = Path(__file__).resolve().parents[2] / "tests" / "goldens"


class OfTokens(DPOTrainer):
    """Takes pairs of token ids as they are, in order."""

    def _prepare_dataset(self, dataset: Dataset, *_: Any, **__: Any) -> Dataset:
        return dataset

    def _get_train_sampler(self, *_: Any, **__: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def main() -> None:
    cases = json.loads((GOLDENS / "losses" / "e2e.json").read_text())["cases"]
    given = next(case for case in cases if case["name"] == "run_dpo")["args"]
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<bos>": 1, "<eos>": 2}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    model, reference = (AutoModelForCausalLM.from_pretrained(GOLDENS / "models" / "llama") for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:
        arguments = DPOConfig(
            output_dir=folder,
            beta=given["beta"],
            learning_rate=given["lr"],
            lr_scheduler_type=given["schedule"],
            per_device_train_batch_size=given["per_device_train_batch_size"],
            gradient_accumulation_steps=given["gradient_accumulation_steps"],
            max_steps=given["max_steps"],
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
        )
        trainer = OfTokens(
            model=model,
            ref_model=reference,
            args=arguments,
            train_dataset=Dataset.from_list(given["data"]),
            processing_class=tokenizer,
        )
        trainer.train()
    names = ("loss", "grad_norm", "logps/chosen", "logps/rejected", "rewards/chosen", "rewards/rejected")
    for line in trainer.state.log_history[: given["max_steps"]]:
        print(json.dumps({name: line[name] for name in (*names, "rewards/margins", "rewards/accuracies")}))


if __name__ == "__main__":
    main()
