"""Driver of posttrain's own engine, for `bench/rollout.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version

import jax.numpy as jnp
from work import VOCABULARY, Draw, Work, serve

from posttrain.rollout.engine import NativeEngine
from posttrain.rollout.types import Completion, SamplingParams, sample_key
from posttrain.weights.load import init_model

FIELDS = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 768,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


def build(work: Work) -> Callable[[int], Draw]:
    model = init_model(FIELDS, dtype=jnp.float32, seed=0)
    engine = NativeEngine(
        model,
        slots=work.samples,
        max_length=work.prompt_tokens + work.longest,
        decode_steps=32,
        tokenizer_decode=None,
    )

    def prepare(step: int) -> Draw:
        prompts = [prompt for prompt in work.prompt_batch(step) for _ in range(work.group)]
        common = SamplingParams(max_tokens=work.longest, temperature=1.0, stop_token_ids=(), key=(0, 0))
        params = [replace(common, key=sample_key(0, step, 0, sample)) for sample in range(work.samples)]
        if len(set(work.lengths)) > 1:
            # The same keys give the same samples, which now end where the engine cannot foresee it.
            whole = engine.generate_all(prompts, params)
            params = [
                replace(p, stop_token_ids=(new_token(completion, length),))
                for p, completion, length in zip(params, whole, work.lengths, strict=True)
            ]
        engine.update_weights(model, step + 1)  # as in training: no prefix of an earlier batch is of use

        def draw() -> int:
            drawn = [len(completion.tokens) for completion in engine.generate_all(prompts, params)]
            assert all(0 <= length - got < 9 for got, length in zip(drawn, work.lengths, strict=True)), drawn
            return sum(drawn)

        return draw

    return prepare


def new_token(completion: Completion, length: int) -> int:
    """The last of the first `length` tokens that is not among those before it."""
    tokens = completion.tokens
    return next(tokens[i] for i in reversed(range(length)) if tokens[i] not in tokens[:i])


if __name__ == "__main__":
    serve(build, lambda: {name: version(name) for name in ("jax", "flax", "numpy")})
