"""Text from a model, without a run around it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from posttrain.config import ConfigError
from posttrain.data.chat import Renderer
from posttrain.data.tokenizer import Tokenizer
from posttrain.models.decoder import Decoder
from posttrain.rollout.native import NativeEngine
from posttrain.rollout.stopping import text_of
from posttrain.rollout.types import SamplingParams, samples_of
from posttrain.weights.load import with_tokens
from posttrain.weights.state import ModelWeights

MAX_SLOTS = 64
DEFAULT_NEW_TOKENS = 128


def generate(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    max_new_tokens: int | None,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    stop: Sequence[str] = (),
    ignore_eos: bool = False,
    n: int = 1,
    seed: int | None = None,
    chat: bool | None = None,
) -> list[str]:
    """`n` completions of each prompt, those of a prompt side by side, without stop token or stop string.

    `max_new_tokens`: None for 128, or for what the longest prompt leaves of the model's context. `chat`: wrap each
    prompt as a user's turn in the tokenizer's template; by default if it has one. `ignore_eos`: only stop strings and
    `max_new_tokens` end a text. Rows of the embedding beyond the tokenizer's ids are never sampled. `seed`: by default
    drawn from the system. ConfigError for settings out of range, and for prompts that are empty or too long.
    """
    if n < 1:
        raise ConfigError(f"generate: n={n}: must be at least 1")
    if not prompts:
        return []
    renderer = Renderer(tokenizer, tokenizer.chat_template is not None if chat is None else chat)
    rendered = [renderer.prompt([{"role": "user", "content": prompt}]) for prompt in prompts]
    seed = secrets.randbits(31) if seed is None else seed
    if max_new_tokens is None:
        max_new_tokens = max(1, min(DEFAULT_NEW_TOKENS, model.config.max_positions - max(map(len, rendered))))
    _check_lengths(model, rendered, max_new_tokens)
    try:
        common = SamplingParams(
            max_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            stop=tuple(stop),
            stop_token_ids=tokenizer.stop_ids,
            ignore_eos=ignore_eos,
            key=(0, 0),
        )
    except ValueError as error:
        raise ConfigError(f"generate: {str(error).removeprefix('sampling.')}") from error
    params = [p for index in range(len(prompts)) for p in samples_of(common, n=n, seed=seed, prompt=index)]
    engine = NativeEngine(
        _without_padding(model, tokenizer),
        slots=min(len(params), MAX_SLOTS),
        max_length=max(map(len, rendered)) + max_new_tokens,
        decode_steps=32,
        tokenizer_decode=tokenizer.decode,
        version=0,
    )
    try:
        completions = engine.generate_all([prompt for prompt in rendered for _ in range(n)], params)
    finally:
        engine.close()
    return [text_of(tokenizer.decode, completion.tokens, common.ends, stop) for completion in completions]


def _without_padding(model: Decoder, tokenizer: Tokenizer) -> Decoder:
    """The model, over the same weights, with probability 0 for rows of the embedding that stand for no token."""
    config = model.config
    if config.num_tokens is not None or tokenizer.num_ids >= config.vocab_size:
        return model
    weights = ModelWeights(model)
    copy = weights.bind(weights.read())
    copy.config = with_tokens(config, tokenizer.num_ids)
    return copy


def _check_lengths(model: Decoder, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    longest = model.config.max_positions
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ConfigError(f"generate: prompt {index} is empty; give at least one character")
        if len(prompt) + max_new_tokens > longest:
            raise ConfigError(
                f"generate: prompt {index} has {len(prompt)} tokens; with max_new_tokens={max_new_tokens} that is more "
                f"than the model's max_position_embeddings={longest}; shorten the prompt, or ask for fewer new tokens"
            )
