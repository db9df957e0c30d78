"""One work of `bench/gpu.py` in a process of its own; prints what it took as a line of JSON.

python bench/gpu_work.py WORK [--tiny] [--kernels]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

FIRST = 3
"""First token id of random sequences."""

ONE_B = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
"""Shapes of Llama 3.2 1B."""

EIGHT_B = ONE_B | {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "head_dim": 128,
    "intermediate_size": 14336,
    "tie_word_embeddings": False,
}
"""Shapes of Llama 3.1 8B."""

TINY = ONE_B | {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 256,
}
MODELS: dict[str, dict[str, Any]] = {"1b": ONE_B, "8b": EIGHT_B, "tiny": TINY}


@dataclass(frozen=True)
class Train:
    """A step of SFT on full rows, in bfloat16: AdamW with moments of `moments` and no float32 masters, or adapters of
    rank 16 on all linear layers of attention and MLP."""

    size: str
    lora: bool
    rows: int = 4
    tokens: int = 2048
    remat: bool = False
    """Keep only the layers' inputs for the backward pass."""
    moments: str = "bfloat16"


@dataclass(frozen=True)
class Decode:
    """Samples of `new` tokens each, all at once."""

    size: str
    slots: int
    prompt: int = 128
    new: int = 256


@dataclass(frozen=True)
class Step:
    """A GRPO step in bfloat16: sampling, reference and update, `prompts` x `group` samples."""

    size: str
    prompts: int
    group: int
    prompt: int = 128
    new: int = 256


@dataclass(frozen=True)
class Attention:
    """Forward and backward pass of one layer's attention, by each kernel; two sequences to a row."""

    size: str
    rows: int = 4
    tokens: int = 2048


Work = Train | Decode | Step | Attention

WORKS: dict[str, Work] = {
    "attention-1b": Attention("1b"),
    "attention-8b": Attention("8b"),
    "sft-1b": Train("1b", lora=False),
    "lora-1b": Train("1b", lora=True),
    "sft-8b": Train("8b", lora=False, rows=2, remat=True, moments="int8"),
    "lora-8b": Train("8b", lora=True),
    "decode-1b-64": Decode("1b", 64),
    "decode-1b-256": Decode("1b", 256),
    "decode-8b-64": Decode("8b", 64),
    "decode-8b-256": Decode("8b", 256),
    "grpo-1b": Step("1b", 8, 8),
}


def tiny(work: Work) -> Work:
    """The same work small enough for a CPU."""
    match work:
        case Train(lora=lora, remat=remat, moments=moments):
            return Train("tiny", lora, rows=2, tokens=64, remat=remat, moments=moments)
        case Decode():
            return Decode("tiny", 4, prompt=16, new=32)
        case Step():
            return Step("tiny", 2, 2, prompt=16, new=16)
        case Attention():
            return Attention("tiny", rows=1, tokens=64)


# --- counts ---------------------------------------------------------------------------------------------------------


def layer_matrices(config: Mapping[str, Any]) -> int:
    """Parameters of all layers' matrices."""
    heads, kv_heads, head_dim = (config[f] for f in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    body = 2 * (heads + kv_heads) * head_dim + 3 * config["intermediate_size"]
    return config["num_hidden_layers"] * config["hidden_size"] * body


def head_matrix(config: Mapping[str, Any]) -> int:
    return config["hidden_size"] * config["vocab_size"]


def train_flops(work: Train) -> float:
    """Multiply-adds x 2 of the model itself: forward and two products backward, one where the weights are frozen;
    causal attention; nothing that is computed again."""
    config = MODELS[work.size]
    attention = config["num_hidden_layers"] * config["num_attention_heads"] * config["head_dim"] * work.tokens
    forward = 2 * (layer_matrices(config) + head_matrix(config) + attention)
    passes = 2 if work.lora else 3
    return work.rows * work.tokens * (passes * forward + (2 * attention if work.lora else 0))


def decode_bytes(work: Decode) -> float:
    """Bytes that a token of every slot must read: all matrices, and keys and values at the mean length."""
    config = MODELS[work.size]
    position = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    return 2 * (layer_matrices(config) + head_matrix(config) + work.slots * (work.prompt + work.new / 2) * position)


# --- works ----------------------------------------------------------------------------------------------------------


TRACED: list[Callable[[], Any]] = []
"""What a trace with `--kernels` runs once, given by a work when it has been measured."""


def kernels(call: Callable[[], Any]) -> list[str]:
    """The kernels that take longest in a call: milliseconds, times, name."""
    from posttrain.tracking.trace import Trace

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        trace = Trace.read(next(Path(folder).rglob("*.xplane.pb")))
    taken, times = Counter[str](), Counter[str]()
    for op in (op for ops in trace.ops.values() for op in ops):
        taken[op.name] += op.end - op.start
        times[op.name] += 1
    return [f"{total / 1e6:.3f} ms, {times[name]} x {name}" for name, total in taken.most_common(25)]


def seconds(call: Callable[[], Any], times: int = 5) -> float:
    """Median wall time of calls that return device arrays, after two."""
    taken = []
    for _ in range(2 + times):
        start = time.perf_counter()
        jax.block_until_ready(call())
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[2:])


def train(work: Train) -> dict[str, float]:
    import jax.numpy as jnp
    from train_work import rows_of

    from posttrain.config import AdamW, LoRA
    from posttrain.losses.sft import SFTLoss
    from posttrain.metrics import to_host
    from posttrain.train.objective import TrainSettings
    from posttrain.train.trainer import Trainer
    from posttrain.train.transformations import make_optimizer
    from posttrain.weights.load import init_model

    config = MODELS[work.size]
    adapter = LoRA(rank=16) if work.lora else None
    model = init_model(config, dtype=jnp.bfloat16, seed=0, lora=adapter, remat="full" if work.remat else "none")
    optimizer = (
        AdamW(learning_rate=1e-5)
        if work.lora
        else AdamW(learning_rate=1e-5, moments=work.moments, stochastic_rounding=True)
    )
    trainer = Trainer(
        model,
        SFTLoss(),
        make_optimizer(optimizer, num_steps=1000, seed=0, model=model),
        TrainSettings(temperature=1.0, max_grad_norm=1.0),
    )
    batch = rows_of([[work.tokens]] * work.rows, np.random.default_rng(0), work.tokens, vocab=config["vocab_size"])
    start = time.perf_counter()
    loss = to_host(trainer.step(batch))["loss"]
    first = time.perf_counter() - start
    step = seconds(lambda: trainer.step(batch))
    TRACED.append(lambda: trainer.step(batch))
    return {"step_s": step, "tokens_per_s": work.rows * work.tokens / step, "first_step_s": first, "loss": loss}


def decode(work: Decode) -> dict[str, float]:
    import jax.numpy as jnp

    from posttrain.rollout.engine import NativeEngine
    from posttrain.rollout.types import SamplingParams, sample_key
    from posttrain.weights.load import init_model

    config = MODELS[work.size]
    model = init_model(config, dtype=jnp.bfloat16, seed=0)
    engine = NativeEngine(
        model, slots=work.slots, max_length=work.prompt + work.new, decode_steps=32, tokenizer_decode=None
    )
    prompts = np.random.default_rng(0).integers(FIRST, config["vocab_size"], (work.slots, work.prompt)).tolist()

    def draw(number: int, new: int) -> float:
        """Seconds of a batch, of which no prefix is known."""
        engine.update_weights(model, number)
        params = [
            SamplingParams(max_tokens=new, temperature=1.0, stop_token_ids=(), key=sample_key(0, number, 0, slot))
            for slot in range(work.slots)
        ]
        start = time.perf_counter()
        done = engine.generate_all(prompts, params)
        taken = time.perf_counter() - start
        assert all(len(one.tokens) == new for one in done)
        return taken

    first = draw(1, work.new)
    draw(2, 1)
    whole, prefill = min(draw(n, work.new) for n in (3, 4)), min(draw(n, 1) for n in (5, 6))
    TRACED.append(lambda: draw(7, min(work.new, 65)))
    return decoded(work, whole, prefill) | {"first_batch_s": first}


def decoded(work: Decode, whole: float, prefill: float) -> dict[str, float]:
    """Figures of a batch from its seconds, and those of one with a single new token."""
    token = (whole - prefill) / (work.new - 1)
    return {
        "token_ms": 1000 * token,
        "tokens_per_s": work.slots * work.new / whole,
        "prefill_s": prefill,
    }


def step(work: Step) -> dict[str, float]:
    import jax.numpy as jnp
    import rl
    import rl_work

    from posttrain.config import AdamW
    from posttrain.weights.load import init_model

    model = init_model(MODELS[work.size], dtype=jnp.bfloat16, seed=0)
    steps, samples = 4, work.prompts * work.group
    shape = rl.Work(work.prompts, work.group, work.prompt, (work.new,) * work.group)
    optimizer = AdamW(learning_rate=1e-6, moments="bfloat16", stochastic_rounding=True)
    bench = rl_work.build(shape, steps, model, optimizer, micro_batch_rows=max(1, samples // 4))
    found = [bench.step(number) for number in range(steps)]
    best = min(found[2:], key=lambda one: one["wall"])
    phases = {name.replace("timing_s/", "") + "_s": taken for name, taken in best.items() if "timing_s/" in name}
    return {
        "step_s": best["wall"],
        "tokens_per_s": best["count"] / best["wall"],
        "first_step_s": found[0]["wall"],
        **phases,
    }


def attend(work: Attention) -> dict[str, Any]:
    """TFLOP per second of each kernel, or why it cannot serve."""
    import jax.numpy as jnp

    from posttrain.kernels.attention.dispatch import SUPPORT, attention

    config = MODELS[work.size]
    heads, kv_heads, width = (config[f] for f in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    rng, half = np.random.default_rng(0), work.tokens // 2
    q = jnp.asarray(rng.normal(size=(work.rows, work.tokens, heads, width)), jnp.bfloat16)
    k, v = (jnp.asarray(rng.normal(size=(work.rows, kv_heads, work.tokens, width)), jnp.bfloat16) for _ in range(2))
    positions = jnp.tile(jnp.arange(half, dtype=jnp.int32), (work.rows, 2))
    segments = jnp.repeat(jnp.asarray([[1, 2]], jnp.int32), half, axis=1).repeat(work.rows, axis=0)
    places = {"q_positions": positions, "k_positions": positions, "q_segments": segments, "k_segments": segments}
    rest = {"q_parents": None, "window": None, "scale": width**-0.5, "soft_cap": None, "sinks": None, "mesh": None}
    # Of two causal sequences; backward 2.5 times forward.
    flops = 3.5 * 2 * work.rows * heads * width * work.tokens * half
    found: dict[str, Any] = {}
    for kernel in ("auto", *SUPPORT):
        if kernel == "reference" or (kernel == "splash" and jax.default_backend() != "tpu"):
            continue

        def loss(q: jax.Array, k: jax.Array, v: jax.Array, kernel: Any = kernel) -> jax.Array:
            return jnp.sum(attention(q, k, v, **places, **rest, kernel=kernel).heads.astype(jnp.float32))

        try:
            program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, k, v).compile()
            found[f"{kernel}_tflops"] = flops / seconds(lambda program=program: program(q, k, v)) / 1e12
        except Exception as error:  # what a kernel's compiler raises is its own affair; it is shown
            found[f"{kernel}_error"] = f"{type(error).__name__}: {str(error)[:300]}"
    return found


def ceilings() -> dict[str, float]:
    """TFLOP per second of a large bfloat16 product, and TB per second of a copy, read and written."""
    import jax.numpy as jnp

    size = 8192 if jax.default_backend() != "cpu" else 256
    x = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    product = jax.jit(lambda x: x @ x)
    long = jax.random.normal(jax.random.key(1), (16 * size * size,), jnp.bfloat16)
    copy = jax.jit(lambda x: x + jnp.bfloat16(1))
    return {
        "product_tflops": 2 * size**3 / seconds(lambda: product(x)) / 1e12,
        "copy_tbytes": 4 * long.size / seconds(lambda: copy(long)) / 1e12,
    }


def run(name: str, *, small: bool) -> dict[str, Any]:
    if name == "ceilings":
        return ceilings()
    work = tiny(WORKS[name]) if small else WORKS[name]
    found: dict[str, Any]
    match work:
        case Train():
            found = train(work)
        case Decode():
            found = decode(work)
        case Step():
            found = step(work)
        case Attention():
            found = attend(work)
    stats = jax.devices()[0].memory_stats() or {}
    peak = {"peak_gib": stats["peak_bytes_in_use"] / 2**30} if "peak_bytes_in_use" in stats else {}
    return found | peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=["ceilings", *WORKS])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--kernels", action="store_true", help="also the kernels that take longest")
    arguments = parser.parse_args()
    found = run(arguments.work, small=arguments.tiny)
    if arguments.kernels and TRACED:
        found["kernels"] = kernels(TRACED[0])
    print(json.dumps(found | {"device": jax.devices()[0].device_kind}))


if __name__ == "__main__":
    main()
