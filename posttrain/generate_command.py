"""Command `posttrain generate`: completions of prompts by a model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.errors import ConfigError

if TYPE_CHECKING:
    from posttrain.data.tokenizer import Tokenizer
    from posttrain.models.decoder import Decoder

MaxTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Maximum number of new tokens; by default 128, or what the context allows."),
]
FrequencyPenalty = Annotated[float, typer.Option(help="Subtracted from logits, times the token's count in the text.")]
LogitBias = Annotated[list[str] | None, typer.Option(help="TOKEN=NUMBER, such as 13=-inf; may be repeated.")]
AllowedToken = Annotated[list[int] | None, typer.Option(help="Token id that may be sampled; may be repeated.")]
Chat = Annotated[bool | None, typer.Option(help="Use the chat template; by default if the tokenizer has one.")]
TemplateArgs = Annotated[
    str | None, typer.Option(help="Variables of the chat template as JSON, such as '{\"enable_thinking\": false}'.")
]
Messages = Annotated[
    bool, typer.Option("--messages", help="Prompts are conversations: JSON lists of role and content.")
]
Logprobs = Annotated[int | None, typer.Option(min=0, help="Print JSON with this number of most probable tokens.")]
PromptLogprobs = Annotated[
    bool, typer.Option("--prompt-logprobs", help="Print JSON with the prompt's log-probabilities.")
]


def generate(
    model: Annotated[str, typer.Argument(help="A folder in Hugging Face layout or a hub id.")],
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; without any, one per line of stdin.")] = None,
    adapter: Annotated[str | None, typer.Option(help="PEFT's adapter of the model: a folder or a hub id.")] = None,
    family: Annotated[str | None, typer.Option(help="A Python file with the model's family, as model.family.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="0: off.")] = 0,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0,
    min_p: Annotated[float, typer.Option(min=0, max=1)] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: tokens in the text become less likely.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Subtracted from the logits of tokens in the text.")] = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")] = None,
    stop_token: Annotated[list[int] | None, typer.Option(help="Stop token id; may be repeated.")] = None,
    special_tokens: Annotated[bool, typer.Option("--special-tokens", help="Keep special tokens in the text.")] = False,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue after end-of-sequence tokens.")] = False,
    logit_bias: LogitBias = None,
    allowed_token: AllowedToken = None,
    n: Annotated[int, typer.Option("-n", "--samples", min=1, help="Completions per prompt.")] = 1,
    seed: Annotated[int | None, typer.Option(help="By default drawn from the system.")] = None,
    chat: Chat = None,
    chat_template_args: TemplateArgs = None,
    messages: Messages = False,
    logprobs: Logprobs = None,
    prompt_logprobs: PromptLogprobs = False,
) -> None:
    """Print completions of each prompt; without a chat template (or with `--no-chat`) after the prompt itself."""
    loaded, tokenizer = _load(model, adapter, family)
    from posttrain.generation import complete

    texts = prompts or [line.rstrip("\n") for line in sys.stdin]
    answers = complete(
        loaded,
        tokenizer,
        _conversations(texts) if messages else texts,
        max_new_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=_biases(logit_bias or []),
        allowed_token_ids=allowed_token or None,
        stop=stop or [],
        stop_token_ids=stop_token or [],
        skip_special_tokens=not special_tokens,
        ignore_eos=ignore_eos,
        n=n,
        seed=seed,
        chat=chat,
        chat_template_args=_template_args(chat_template_args),
        top_logps=logprobs or 0,
        prompt_logps=prompt_logprobs,
    )
    plain = not messages and (chat is False or tokenizer.chat_template is None)
    recorded = logprobs is not None or prompt_logprobs
    for prompt, answer in zip([text for text in texts for _ in range(n)], answers, strict=True):
        text = f"{prompt}{answer.text}" if plain else answer.text
        print(json.dumps(answer.record(tokenizer.decode)) if recorded else text)


def _load(model: str, adapter: str | None, family: str | None) -> tuple[Decoder, Tokenizer]:
    """Load model and tokenizer. ConfigError also for a path without a folder."""
    if not Path(model).expanduser().exists() and model.startswith(("/", ".", "~")):
        from posttrain.config.locator import Locator

        raise ConfigError(f"model {model}: no such folder{Locator(model).suggestion}")
    from posttrain.data.tokenizer import load_tokenizer, model_end_ids
    from posttrain.models.hf import add_family
    from posttrain.weights.load import load_model, vocabulary_of
    from posttrain.weights.locate import check_added_tokens, own_tokenizer

    if family is not None:
        add_family(family)
    own = None if adapter is None else own_tokenizer(adapter)
    tokenizer = load_tokenizer(own or model)
    if own is not None:
        tokenizer = tokenizer.with_stop_ids(model_end_ids(model))
    loaded = load_model(model, adapter=adapter)
    if adapter is not None and loaded.config.resized:
        check_added_tokens(tokenizer, adapter, vocabulary_of(model), loaded.config.vocab_size, named=False)
    return loaded, tokenizer


def _template_args(text: str | None) -> dict[str, Any]:
    """Parse the arguments of the chat template. ConfigError unless they are a JSON object."""
    try:
        found = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ConfigError(f"--chat-template-args: {text!r} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--chat-template-args: {text!r} must be a JSON object")
    return found


def _conversations(texts: list[str]) -> list[Any]:
    """Parse conversations. ConfigError for invalid JSON."""
    found = []
    for text in texts:
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError as error:
            example = '[{"role": "user", "content": "Hello"}]'
            raise ConfigError(f"--messages: {text[:60]!r} is not JSON ({error}); write {example}") from error
    return found


def _biases(texts: list[str]) -> dict[int, float]:
    """Parse logit biases. ConfigError unless written as TOKEN=NUMBER."""
    try:
        return {int(token): float(bias) for token, bias in (text.split("=") for text in texts)}
    except ValueError as error:
        raise ConfigError(f"generate: --logit-bias: {error}; write it as TOKEN=NUMBER, such as 13=-5") from error
