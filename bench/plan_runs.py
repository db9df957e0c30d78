"""Configurations of `bench/plan.py`: random models of 5 to 150 million parameters, with little made-up data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROWS = 256
REWARDS = '''
def low(completion_tokens, **_):
    """Share of tokens below 128: about a half at random."""
    return [sum(t < 128 for t in c) / len(c) for c in completion_tokens]
'''


def _init(hidden: int, layers: int, vocabulary: int, family: str = "qwen3") -> dict[str, Any]:
    return {
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128,
        "head_dim": 64,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }


M5, M25 = _init(256, 4, 4096), _init(512, 6, 8192)
M75, M150 = _init(768, 8, 16384), _init(1024, 8, 32768)
M50, M100 = _init(640, 8, 12288), _init(896, 8, 20480, "llama")


def _model(init: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"init": init, "tokenizer": "bytes", **more}


def _stage(rows: int, length: int, **more: Any) -> dict[str, Any]:
    data = {"path": "rows.jsonl", "chat": False}
    return {"kind": "sft", "dataset": data, "num_steps": 3, "batch_rows": rows, "row_tokens": length, **more}


def _pairs(rows: int, length: int, **more: Any) -> dict[str, Any]:
    data = {"path": "pairs.jsonl", "chat": False}
    return {"kind": "preference", "dataset": data, "num_steps": 3, "batch_rows": rows, "row_tokens": length, **more}


def _rl(prompts: int, length: int, **more: Any) -> dict[str, Any]:
    return {
        "kind": "rl",
        "dataset": {"path": "rows.jsonl", "chat": False},
        "rewards": [{"fn": "rewards.py:low"}],
        "num_steps": 3,
        "prompts_per_step": prompts,
        "group_size": 8,
        "row_tokens": length,
        "max_prompt_tokens": length // 2,
        "overlong": "drop",
        "sampling": {"max_tokens": length // 4},
        **more,
    }


Runs = dict[str, tuple[dict[str, Any], dict[str, Any]]]
BFLOAT16, LORA = {"dtype": "bfloat16"}, {"lora": {"rank": 16}}
EVALUATED = {"eval_dataset": {"path": "rows.jsonl", "chat": False, "limit": 32}}

RUNS: Runs = {
    "sft 5M": (_model(M5), _stage(8, 256)),
    "sft 5M, one sequence a row": (_model(M5), _stage(16, 128, packing=False)),
    "sft 25M": (_model(M25), _stage(8, 256)),
    "sft 25M bfloat16": (_model(M25, **BFLOAT16), _stage(8, 256)),
    "sft 25M long rows": (_model(M25), _stage(2, 1024)),
    "sft 25M in micro-batches": (_model(M25), _stage(16, 256, micro_batch_rows=2)),
    "sft 25M evaluated": (_model(M25), _stage(8, 256, **EVALUATED)),
    "sft 75M, each step saved": (_model(M75), _stage(4, 256, checkpoint_every=1)),
    "sft 75M bfloat16 remat": (_model(M75, remat="full", **BFLOAT16), _stage(8, 256)),
    "sft 150M": (_model(M150), _stage(2, 256)),
    "sft 150M bfloat16": (_model(M150, **BFLOAT16), _stage(4, 256)),
    "lora 75M": (_model(M75, **LORA), _stage(4, 256)),
    "lora 150M bfloat16": (_model(M150, **LORA, **BFLOAT16), _stage(4, 256)),
    "lora 75M on int8": (_model(M75, quantize="int8", **LORA), _stage(4, 256)),
    "dpo 25M live": (_model(M25), _pairs(8, 256, reference="live")),
    "dpo 75M cached": (_model(M75), _pairs(4, 256, reference="cached")),
    "simpo 25M bfloat16": (_model(M25, **BFLOAT16), _pairs(8, 256, loss="simpo")),
    "grpo 5M": (_model(M5), _rl(8, 128)),
    "grpo 25M with KL": (_model(M25), _rl(4, 128, algorithm={"kind": "grpo", "kl_coef": 0.05})),
    "grpo 75M bfloat16": (_model(M75, **BFLOAT16), _rl(4, 128)),
}
"""Model and stage by name."""

HELD_OUT: Runs = {
    "sft 50M, each step saved": (_model(M50), _stage(6, 384, checkpoint_every=1)),
    "sft 100M bfloat16, moments too": (_model(M100, **BFLOAT16), _stage(4, 128, optimizer={"moments": "bfloat16"})),
    "lora 100M remat dots": (_model(M100, remat="dots", **LORA), _stage(8, 256)),
    "dpo 50M live bfloat16": (_model(M50, **BFLOAT16), _pairs(4, 512, reference="live")),
    "grpo 50M with KL": (_model(M50), _rl(4, 192, algorithm={"kind": "grpo", "kl_coef": 0.05}, micro_batch_rows=8)),
    "grpo 100M lora": (_model(M100, **LORA), _rl(2, 256)),
}
"""Configurations that no change of the prediction has looked at."""


_TINY = {**_init(128, 1, 320), "intermediate_size": 384}
SMALLEST: Runs = {
    "sft": (_model(_TINY), _stage(1, 64)),
    "rl": (
        _model(_TINY),
        _rl(2, 64) | {"group_size": 2},
    ),
}
"""Runs whose arrays take next to nothing."""


def write(folder: Path, model: dict[str, Any], stage: dict[str, Any]) -> Path:
    """Write a configuration with its rows, pairs and rewards; the run goes to `folder/out`."""
    rows = [{"prompt": f"{i}+1= ", "completion": f"{i + 1}" * 3} for i in range(1000, 1000 + ROWS)]
    pairs = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": str(i)} for i in range(1000, 1000 + ROWS)]
    for name, lines in (("rows", rows), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "rewards.py").write_text(REWARDS)
    config = {"output": str(folder / "out"), "seed": 3, "tensorboard": False, "model": model, "stages": [stage]}
    file = folder / "run.yaml"
    # JSON is YAML.
    file.write_text(json.dumps(config))
    return file
