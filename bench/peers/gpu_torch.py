"""One work of `bench/gpu.py` by transformers and PyTorch; prints what it took as a line of JSON.

python bench/peers/gpu_torch.py WORK [--tiny]

bfloat16, scaled_dot_product_attention, layers and loss compiled, AdamW fused with moments in bfloat16, the layers'
inputs kept where `posttrain` keeps only those; adapters by PEFT; decoding with transformers' compiled static cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpu_work import FIRST, MODELS, WORKS, Decode, Train, decoded, tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def settled() -> float:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def build(size: str) -> Any:
    torch.manual_seed(0)
    fields = {name: value for name, value in MODELS[size].items() if name != "model_type"}
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(LlamaConfig(**fields), dtype=torch.bfloat16, attn_implementation="sdpa")


def train(work: Train) -> dict[str, float]:
    model = build(work.size)
    if work.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    model.train()
    if work.remat:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    decoder = model.get_base_model() if work.lora else model
    for layer in decoder.model.layers:
        layer.compile()
    vocab = MODELS[work.size]["vocab_size"]
    tokens = torch.randint(FIRST, vocab, (work.rows, work.tokens), device=DEVICE)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)

    @torch.compile
    def loss_of(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        logits = (hidden[:, :-1] @ head.T).float()
        return torch.nn.functional.cross_entropy(logits.reshape(-1, vocab), tokens[:, 1:].reshape(-1))

    def step() -> torch.Tensor:
        hidden = decoder.model(input_ids=tokens, use_cache=False).last_hidden_state
        loss = loss_of(hidden, decoder.lm_head.weight)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    start = settled()
    loss = float(step())
    first = settled() - start
    taken = []
    for _ in range(7):
        start = settled()
        step()
        taken.append(settled() - start)
    median = statistics.median(taken[2:])
    return {"step_s": median, "tokens_per_s": work.rows * work.tokens / median, "first_step_s": first, "loss": loss}


@torch.no_grad()
def decode(work: Decode) -> dict[str, float]:
    model = build(work.size).eval()
    model.generation_config.cache_implementation = "static"
    prompts = torch.randint(FIRST, MODELS[work.size]["vocab_size"], (work.slots, work.prompt), device=DEVICE)

    def draw(new: int) -> float:
        start = settled()
        done = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=new,
            min_new_tokens=new,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert done.shape[1] == work.prompt + new
        return settled() - start

    first = draw(work.new)
    draw(2)
    whole, prefill = min(draw(work.new) for _ in range(2)), min(draw(2) for _ in range(2))
    return decoded(work, whole, prefill) | {"first_batch_s": first}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=list(WORKS))
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    work = tiny(WORKS[arguments.work]) if arguments.tiny else WORKS[arguments.work]
    torch.backends.cuda.matmul.allow_tf32 = True
    found = train(work) if isinstance(work, Train) else decode(work) if isinstance(work, Decode) else {}
    if DEVICE == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    print(json.dumps(found | {"torch": torch.__version__}))


if __name__ == "__main__":
    main()
