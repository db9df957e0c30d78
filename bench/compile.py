"""CPU seconds to trace and compile a training step and a decoding step, by depth.

    python bench/compile.py [--best-of 2]

The process's own seconds, so that other work on the machine does not count. Layers of hidden size 128; `pattern`: all
alike, or five with a window and one without, as in gemma3. Stages are scanned as on an accelerator; `as on CPU` are
short stacks as a CPU's programs have them, gradient and decoding, for comparison.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from posttrain.kernels.logits.token_stats import token_stats
from posttrain.models import decoder
from posttrain.models.cache import empty_cache
from posttrain.train.objective import UNROLLED_LAYERS_ON_CPU
from posttrain.weights.load import init_model
from posttrain.weights.state import ModelWeights

PATTERNS = {"alike": ["full_attention"], "5 + 1": ["sliding_attention"] * 5 + ["full_attention"]}
FEW, MANY = {"alike": 4, "5 + 1": 12}, 48
"""Layers; the fewest that are scanned."""


def make_model(pattern: str, num_layers: int) -> decoder.Decoder:
    kinds = PATTERNS[pattern]
    fields = {
        "model_type": "qwen3",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 1024,
        "max_position_embeddings": 512,
        "use_sliding_window": True,
        "sliding_window": 64,
        "layer_types": [kinds[i % len(kinds)] for i in range(num_layers)],
    }
    return init_model(fields, dtype=jnp.float32, seed=0)


def training(model: decoder.Decoder) -> tuple[Any, tuple[Any, ...]]:
    weights = ModelWeights(model)
    tokens = jnp.zeros((4, 128), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(128, dtype=jnp.int32), tokens.shape)

    def loss(arrays: Any) -> Any:
        bound = weights.bind(arrays)
        hidden, _ = bound(tokens, positions, jnp.ones_like(tokens))
        stats = token_stats(bound.logits, hidden, tokens, jnp.ones_like(tokens), temperature=1.0, vocab_size=1024)
        return stats.logps.sum()

    return jax.jit(jax.grad(loss)), (weights.read(),)


def decoding(model: decoder.Decoder) -> tuple[Any, tuple[Any, ...]]:
    weights = ModelWeights(model)
    cache = empty_cache(decoder.decoding_config(model.config, None), 4, 128, jnp.dtype(jnp.float32))
    ones = jnp.ones((4, 1), jnp.int32)

    def step(arrays: Any, cache: Any) -> Any:
        bound = weights.bind(arrays).for_decoding()
        hidden, cache = bound(ones, ones, ones, cache)
        return bound.logits(hidden), cache

    return jax.jit(step, donate_argnums=1), (weights.read(), cache)


def seconds(program: Any, args: tuple[Any, ...], best_of: int) -> tuple[float, float]:
    times = []
    for _ in range(best_of):
        jax.clear_caches()
        start = time.process_time()
        lowered = program.lower(*args)
        traced = time.process_time()
        lowered.compile()
        times.append((traced - start, time.process_time() - traced))
    return min(trace for trace, _ in times), min(compiled for _, compiled in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--best-of", type=int, default=2)
    best_of = parser.parse_args().best_of
    table = Table("program", "pattern", "stages", "few layers: trace + compile s", f"{MANY} layers", "ratio")
    default = decoder.SPLIT_LAYERS["cpu"]
    for name, make in {"training": training, "decoding": decoding}.items():
        for pattern, few in FEW.items():
            for stages, limit in {"scanned": 0, "as on CPU": default}.items():
                decoder.SPLIT_LAYERS["cpu"] = limit
                models = [make_model(pattern, num_layers) for num_layers in (few, MANY)]
                for model in models:
                    model.unroll = limit > 0 and model.config.num_layers <= UNROLLED_LAYERS_ON_CPU
                times = [seconds(*make(model), best_of) for model in models]
                shown = [f"{trace:.2f} + {compiled:.2f}" for trace, compiled in times]
                row = name, pattern, stages, f"{few}: {shown[0]}", shown[1], f"{sum(times[1]) / sum(times[0]):.2f}"
                table.add_row(*row)
                print(*row, flush=True)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
