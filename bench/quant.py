"""What a sampler's quantised copy of the weights costs and gives: memory, distance from the trainer, speed.

    PYTHONPATH=. python bench/quant.py [--model PATH] [--rounds N] [--kinds KIND ...]

32 prompts of 64 tokens, 64 new ones each, at temperature 1 from a model in float32: by default a random decoder of
hidden 256 x 4 layers, vocabulary 4,096. `none` samples from the trainer's arrays, the others from a copy beside them;
they take turns. `difference`: mean |log p of the sampler - log p of the trainer| of the sampled tokens, in nats;
`ratio`: mean |p / p - 1| of the same. Random weights are flat: give `--model` for a trained one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

from native import FIELDS

from posttrain.config import RolloutQuantize
from posttrain.models.decoder import Decoder
from posttrain.rollout.engine import NativeEngine
from posttrain.rollout.types import Completion, SamplingParams, sample_key
from posttrain.weights.load import init_model, load_model
from posttrain.weights.state import ModelWeights

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 32, 64, 64


class Sampler:
    def __init__(self, model: Decoder, kind: RolloutQuantize):
        self.engine = NativeEngine(
            model,
            slots=PROMPTS,
            max_length=PROMPT_TOKENS + NEW_TOKENS,
            decode_steps=32,
            tokenizer_decode=None,
            quantize=kind,
        )
        self.model = model
        self.wall_s, self.cpu_s = list[float](), list[float]()
        self.gaps = list[np.ndarray]()

    def draw(self, step: int, *, timed: bool) -> None:
        draw = np.random.default_rng(step)
        prompts = draw.integers(3, self.model.config.vocab_size, (PROMPTS, PROMPT_TOKENS)).tolist()
        keys = [sample_key(0, step, 0, i) for i in range(PROMPTS)]
        params = [SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, stop_token_ids=(), key=key) for key in keys]
        self.engine.update_weights(self.model, step + 1)
        wall, cpu = time.perf_counter(), time.process_time()
        completions = self.engine.generate_all(prompts, params)
        if timed:
            self.wall_s.append(time.perf_counter() - wall)
            self.cpu_s.append(time.process_time() - cpu)
            self.gaps.append(self._gaps(prompts, completions))

    def _gaps(self, prompts: list[list[int]], completions: list[Completion]) -> np.ndarray:
        tokens = np.asarray([[*p, *c.tokens] for p, c in zip(prompts, completions, strict=True)], np.int32)
        logps = trainer_logps(self.model, tokens)[:, PROMPT_TOKENS - 1 :]
        return np.asarray([c.logps for c in completions]) - logps


def trainer_logps(model: Decoder, tokens: np.ndarray) -> np.ndarray:
    weights = ModelWeights(model)

    @jax.jit
    def run(arrays: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        bound = weights.bind(arrays)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        logps = jax.nn.log_softmax(bound.logits(bound(tokens, positions, jnp.ones_like(tokens))[0][:, :-1]))
        return jnp.take_along_axis(logps, tokens[:, 1:, None], axis=-1)[..., 0]

    return np.asarray(run(weights.read(), jnp.asarray(tokens)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint instead of random weights")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--kinds", nargs="+", default=["none", "int8", "fp8"])
    arguments = parser.parse_args()
    if arguments.model is None:
        model = init_model(FIELDS, dtype=jnp.float32, seed=0)
    else:
        model = load_model(arguments.model, dtype=jnp.float32)
    samplers = {kind: Sampler(model, kind) for kind in arguments.kinds}
    for step in range(arguments.rounds + 1):
        for sampler in samplers.values():
            sampler.draw(step, timed=step > 0)
    size = sum(w.nbytes for w in ModelWeights(model).read().values()) / 2**20
    print(f"weights {size:.2f} MiB in float32; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"{'':<6}{'copy MiB':>10}{'difference':>12}{'ratio':>9}{'tokens/s':>10}{'tokens/CPU s':>14}")
    for kind, sampler in samplers.items():
        gap, new = np.stack(sampler.gaps), PROMPTS * NEW_TOKENS
        own = sampler.engine.metrics()["rollout/copy_mib"]
        print(
            f"{kind:<6}{own:>10.2f}{np.abs(gap).mean():>12.2e}{np.abs(np.expm1(-gap)).mean():>9.1e}"
            f"{new / min(sampler.wall_s):>10,.0f}{new / min(sampler.cpu_s):>14,.0f}"
        )


if __name__ == "__main__":
    main()
