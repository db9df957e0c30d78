"""Learning rates by width: the best one of decoders of several widths, plain and with `optimizer.base_width`.

    python bench/width.py [--kind adamw|muon] [--widths 32 64 128] [--steps N] [--seeds N]

Decoders of 2 layers, heads of 16, MLP of 4 times the width, an untied head, and weights of standard deviation
0.5 / sqrt(width), all from `model.init`, learn stories (../shared) from scratch with 8 rows of 32 tokens a step, the
first tenth with a rising rate, at seven rates a factor of 2 apart. The loss is the mean over the last fifth of the
steps. All rates of a width are one program, mapped over them; every rate sees the same rows. `base_width` is the first
width, for which both are the same. The least of the parabola through the three points around the best shows where
between two rates it lies.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from posttrain.config import AdamW, Muon
from posttrain.data.tokenizer import load_tokenizer
from posttrain.train.transformations import make_optimizer
from posttrain.weights.load import init_model
from posttrain.weights.state import ModelWeights

SHARED = Path(__file__).resolve().parents[2] / "shared"
ROWS, LENGTH = 8, 32
RATES = [2.0**power for power in range(-11, -4)]


def stories() -> np.ndarray:
    """Tokens of all stories, one after the other, in rows."""
    tokenizer = load_tokenizer(SHARED / "models" / "stories260k")
    lines = (SHARED / "data" / "text" / "tinystories_v2gpt4_train_head.jsonl").read_text().splitlines()
    ids = np.concatenate([[1, *tokenizer.encode(json.loads(line)["text"])] for line in lines])
    return ids[: len(ids) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1).astype(np.int32)


def losses(kind: str, width: int, base: int | None, steps: int, seed: int, rows: np.ndarray) -> np.ndarray:
    """Loss by rate."""
    fields: dict[str, Any] = {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": width // 16}
    fields |= {"num_key_value_heads": width // 16, "head_dim": 16, "num_hidden_layers": 2, "vocab_size": 512}
    fields |= {"model_type": "llama", "max_position_embeddings": 128, "rms_norm_eps": 1e-6}
    fields |= {"tie_word_embeddings": False, "initializer_range": 0.5 / width**0.5}
    model = init_model(fields, dtype=jnp.float32, seed=seed)
    weights = ModelWeights(model)
    section = Muon(learning_rate=1.0) if kind == "muon" else AdamW(learning_rate=1.0, beta2=0.95, base_width=base)
    rule = make_optimizer(section, steps, model=model).transformation
    positions = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), (ROWS, LENGTH))

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        bound = weights.bind(params)
        hidden = bound(tokens[:, :-1], positions, jnp.ones_like(positions))[0]
        return optax.softmax_cross_entropy_with_integer_labels(bound.logits(hidden), tokens[:, 1:]).mean()

    @jax.jit
    @partial(jax.vmap, in_axes=(0, None))
    def run(rate: jax.Array, batches: jax.Array) -> jax.Array:
        def step(carry: Any, at: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
            params, state = carry
            number, tokens = at
            value, grads = jax.value_and_grad(loss)(params, tokens)
            updates, state = rule.update(grads, state, params)
            now = rate * jnp.minimum(1.0, (number + 1) / (0.1 * steps))
            return (jax.tree.map(lambda p, u: p + now * u, params, updates), state), value

        params = weights.read()
        return jax.lax.scan(step, (params, rule.init(params)), (jnp.arange(steps), batches))[1]

    order = np.random.default_rng(seed).permutation(len(rows))[: steps * ROWS]
    curves = run(jnp.asarray(RATES), jnp.asarray(rows[order].reshape(steps, ROWS, -1)))
    return np.asarray(curves[:, -steps // 5 :].mean(axis=1))


def best(values: np.ndarray) -> float:
    """Rate of the least loss, between the points by the parabola through three of them."""
    values = np.where(np.isfinite(values), values, 99.0)
    at = int(np.clip(values.argmin(), 1, len(values) - 2))
    left, here, right = values[at - 1 : at + 2]
    bent = left - 2 * here + right
    shift = 0.5 * (left - right) / bent if bent > 0 else 0.0
    return float(2.0 ** (np.log2(RATES[at]) + np.clip(shift, -1, 1)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=["adamw", "muon"], default="adamw")
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=1)
    chosen = parser.parse_args()
    rows = stories()
    print("base_width | width | " + " | ".join(f"{rate:.2g}" for rate in RATES) + " | best rate", flush=True)
    for base in (None, chosen.widths[0])[: 1 if chosen.kind == "muon" else 2]:
        for width in chosen.widths:
            if base == width:
                continue
            each = [losses(chosen.kind, width, base, chosen.steps, seed, rows) for seed in range(chosen.seeds)]
            mean = np.mean(each, axis=0)
            print(f"{base} | {width} | " + " | ".join(f"{x:.3f}" for x in mean) + f" | {best(mean):.2g}", flush=True)


if __name__ == "__main__":
    main()
