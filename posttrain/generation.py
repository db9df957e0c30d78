"""Text generation outside of a run: `pt.generate`, `pt.complete`."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack

from posttrain.config import Drafts, ImageSection
from posttrain.data.chat import Renderer
from posttrain.data.format import with_default_system
from posttrain.data.grammar import Grammar, GrammarError
from posttrain.data.messages import Message, checked_messages
from posttrain.data.prompt_images import PromptImages
from posttrain.data.tokenizer import Tokenizer
from posttrain.errors import ConfigError, placed
from posttrain.models.decoder import Decoder
from posttrain.rollout.drafting import Speculation
from posttrain.rollout.engine import NativeEngine
from posttrain.rollout.types import Completion, Decode, SamplingParams, grammar_of, reply_of, samples_of
from posttrain.weights.load import with_tokens
from posttrain.weights.state import ModelWeights

MAX_SLOTS = 64
DEFAULT_NEW_TOKENS = 128

Prompts = str | Sequence[Mapping[str, Any]] | Sequence[str | Sequence[Mapping[str, Any]]]
"""One prompt or several: each a string, or a conversation of messages with role and content."""


class Settings(TypedDict, total=False):
    """Keywords of `generate` and `complete`; for those without a description see `pt.SamplingParams`."""

    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int] | None
    grammar: Grammar | None
    """Structured output, such as `pt.Grammar.json_schema({...})`."""
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    """Stop token ids in addition to the tokenizer's."""
    skip_special_tokens: bool
    ignore_eos: bool
    """Continue after the tokenizer's end-of-sequence tokens."""
    n: int
    """Number of completions per prompt."""
    seed: int | None
    """Random seed; by default drawn from the system."""
    chat: bool | None
    """Wrap string prompts as user turns in the chat template; by default if the tokenizer has one."""
    chat_template_args: Mapping[str, Any]
    """Variables of the chat template, such as `{"enable_thinking": False}`."""
    speculative: Drafts | None
    """Speculative decoding, `pt.LookupDrafts()` or `pt.ModelDrafts(path=...)`: the same tokens, up to rounding."""


@dataclass(frozen=True, kw_only=True)
class Generated:
    """Completion as text and tokens, with log-probabilities as requested."""

    text: str
    """Text without stop token or stop string."""
    prompt_tokens: tuple[int, ...]
    completion: Completion

    def record(self, decode: Decode) -> dict[str, Any]:
        """Convert to JSON: each token with its text, log-probability, and the most probable alternatives."""
        done, tokens = self.completion, (*self.prompt_tokens, *self.completion.tokens)

        def entry(at: int, token: int, logp: float) -> dict[str, Any]:
            return {"id": token, "text": decode([token], after=tokens[:at]), "logp": logp}

        record: dict[str, Any] = {"text": self.text, "stop": done.stop, "tokens": []}
        for at, one in enumerate(zip(done.tokens, done.logps, strict=True), len(self.prompt_tokens)):
            record["tokens"].append(entry(at, *one))
            if done.top_logps and (most := done.top_logps[at - len(self.prompt_tokens)]):
                record["tokens"][-1]["top"] = [entry(at, *other) for other in most]
        if done.prompt_logps is not None:
            pairs = zip(self.prompt_tokens, done.prompt_logps, strict=True)
            record["prompt_tokens"] = [entry(at, *pair) for at, pair in enumerate(pairs)]
        return record


def generate(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Prompts,
    *,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    **settings: Unpack[Settings],
) -> list[str]:
    """Generate text, see `complete`: a list with one string per prompt and sample, also for a single prompt."""
    done = complete(model, tokenizer, prompts, max_new_tokens=max_new_tokens, temperature=temperature, **settings)
    return [generated.text for generated in done]


def complete(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Prompts,
    *,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_logps: int = 0,
    prompt_logps: bool = False,
    **settings: Unpack[Settings],
) -> list[Generated]:
    """Generate completions with tokens and log-probabilities: `n` per prompt, consecutive.

    `prompts`: a string, a conversation (list of messages with role and content), or a list of these; for a model with
    its vision tower contents may have parts `{"type": "image", "path": ...}`. A conversation uses the chat template;
    for strings see `chat`. `max_new_tokens`: by default 128, or less if the longest prompt leaves less of the model's
    context. `temperature`: 0 is greedy and deterministic; sample with 1.0. `top_logps`: number of most probable tokens
    per position; `prompt_logps`: log-probabilities of the prompt. Embedding rows beyond the tokenizer's ids are never
    sampled, nor are tokens of images. Raises ConfigError for settings out of range, for `n` equal greedy completions,
    and for prompts that are empty or too long.
    """
    n, seed, chat = settings.pop("n", 1), settings.pop("seed", None), settings.pop("chat", None)
    drafts = settings.pop("speculative", None)
    if n < 1:
        raise ConfigError(f"generate: n={n}: must be at least 1")
    if n > 1 and temperature == 0:
        raise ConfigError(f"generate: n={n} at temperature 0 (greedy) gives equal completions; use temperature=1.0")
    named = _named(prompts)
    if not named:
        return []
    tokenizer = seeing(model, tokenizer)
    rendering = tokenizer.with_template_args(settings.pop("chat_template_args", {}))
    renderers, rendered, images = _render(rendering, named, chat)
    if max_new_tokens is None:
        max_new_tokens = max(1, min(DEFAULT_NEW_TOKENS, model.config.max_positions - max(map(len, rendered))))
    _check_lengths(model, [name for name, _ in named], rendered, max_new_tokens)
    common = request_params(
        model, tokenizer, settings, max_new_tokens, temperature, top_logps=top_logps, prompt_logps=prompt_logps
    )
    seed = secrets.randbits(31) if seed is None else seed
    own = [replace(common, grammar=grammar_of(renderer, common.grammar)) for renderer in renderers]
    params = [p for index, one in enumerate(own) for p in samples_of(one, n=n, seed=seed, prompt=index)]
    sampled = without_padding(model, tokenizer)
    engine = NativeEngine(
        sampled,
        slots=min(len(params), MAX_SLOTS),
        max_length=max(map(len, rendered)) + max_new_tokens,
        decode_steps=32,
        tokenizer_decode=tokenizer.decode,
        tokenizer=tokenizer,
        speculation=Speculation.of(drafts, sampled, tokenizer, "generate: speculative"),
    )
    several = [tuple(prompt) for prompt in rendered for _ in range(n)]
    try:
        completions = engine.generate_all(several, params, [one for one in images for _ in range(n)])
    except GrammarError as error:
        raise ConfigError(f"generate: {str(error).removeprefix('sampling.')}") from error
    finally:
        engine.close()
    return [
        Generated(
            text=reply_of(renderers[index // n], prompt, completion.tokens, common),
            prompt_tokens=prompt,
            completion=completion,
        )
        for index, (prompt, completion) in enumerate(zip(several, completions, strict=True))
    ]


def _render(
    tokenizer: Tokenizer, prompts: Sequence[tuple[str, Any]], chat: bool | None
) -> tuple[list[Renderer], list[list[int]], list[PromptImages | None]]:
    """Renderer of each prompt, its tokens, and its pictures."""
    renderers: dict[bool, Renderer] = {}
    used, rendered = [], []
    said: list[Message]
    for name, prompt in prompts:
        text = isinstance(prompt, str)
        templated = (tokenizer.chats or not text) if chat is None else chat
        said = [{"role": "user", "content": prompt}] if text else _conversation(prompt, name, tokenizer)
        if not text and (chat is False or tokenizer.chat_template is None):
            why = "chat is off" if chat is False else f"tokenizer {tokenizer.name} has none"
            raise ConfigError(
                f"generate: {name} is a conversation, which needs a chat template, and {why}; pass a string"
            )
        if text and templated:
            said = with_default_system(said, tokenizer)
        if templated not in renderers:
            renderers[templated] = Renderer(tokenizer, templated)
        used.append(renderers[templated])
        rendered.append(used[-1].prompt_with_images(said))
    return used, [one.tokens for one in rendered], [one.images for one in rendered]


def _named(prompts: Any) -> list[tuple[str, Any]]:
    """Prompts with their names for error messages; a single prompt becomes a list of one."""
    if isinstance(prompts, str):
        return [("the prompt", prompts)]
    if isinstance(prompts, Mapping):
        raise ConfigError("generate: the prompt is a single message; pass a conversation, a list of messages")
    several = list(prompts)
    if several and all(isinstance(one, Mapping) for one in several):
        return [("the prompt", several)]
    return [(f"prompt {index}", one) for index, one in enumerate(several)]


def with_pictures(prompts: Sequence[Any], images: Sequence[Any]) -> list[Any]:
    """Texts as messages with pictures before them. ConfigError for conversations, whose contents have parts."""
    if not images:
        return list(prompts)
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise ConfigError(
            'generate: images are for texts; write parts {"type": "image", "path": ...} into contents of messages'
        )
    parts = [{"type": "image", "image": image} for image in images]
    return [[{"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}] for prompt in prompts]


def seeing(model: Decoder, tokenizer: Tokenizer) -> Tokenizer:
    """Tokenizer of a model with its vision tower, for its images too."""
    if model.config.vision is None or tokenizer.vision is not None:
        return tokenizer
    return tokenizer.for_images(json.loads(model.config.hf_json), tokenizer.name, ImageSection())


def _conversation(prompt: Any, name: str, tokenizer: Tokenizer) -> list[Message]:
    if not isinstance(prompt, Sequence) or not all(isinstance(message, Mapping) for message in prompt) or not prompt:
        raise ConfigError(
            f"generate: {name} must be a string, or a list of messages with role and content; got {str(prompt)[:60]!r}"
        )
    with placed(f"generate: {name}: "):
        messages = checked_messages(prompt, "messages", tokenizer.picture_reader())
    if messages[-1]["role"] == "assistant":
        raise ConfigError(f"generate: {name} ends with an assistant message; end before the reply")
    return messages


def request_params(
    model: Decoder,
    tokenizer: Tokenizer,
    settings: Settings,
    max_tokens: int,
    temperature: float,
    *,
    top_logps: int,
    prompt_logps: bool,
) -> SamplingParams:
    fields: dict[str, Any] = {**settings}
    ends = () if fields.pop("ignore_eos", False) else tokenizer.stop_ids
    fields["stop_token_ids"] = (*ends, *fields.get("stop_token_ids", ()))
    stops = fields.pop("stop", ())
    if fields.get("allowed_token_ids") is not None:
        fields["allowed_token_ids"] = tuple(fields["allowed_token_ids"])
    fields |= {"max_tokens": max_tokens, "temperature": temperature}
    try:
        params = SamplingParams(**fields, top_logps=top_logps, prompt_logps=prompt_logps, key=(0, 0))
        params = params.stopped_at(stops, tokenizer)
        params.check_vocabulary(model.config.vocab_size)
    except ValueError as error:
        raise ConfigError(f"generate: {str(error).removeprefix('sampling.')}") from error
    return params


def without_padding(model: Decoder, tokenizer: Tokenizer) -> Decoder:
    """Model with the same weights that gives probability 0 to embedding rows without a token."""
    config = model.config
    if config.num_tokens is not None or tokenizer.num_ids >= config.vocab_size:
        return model
    weights = ModelWeights(model)
    copy = weights.bind(weights.read())
    copy.config = with_tokens(config, tokenizer.num_ids)
    return copy


def _check_lengths(model: Decoder, names: Sequence[str], prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    longest = model.config.max_positions
    for name, prompt in zip(names, prompts, strict=True):
        if not prompt:
            raise ConfigError(f"generate: {name} is empty; pass at least one character")
        if len(prompt) + max_new_tokens > longest:
            raise ConfigError(
                f"generate: {name} has {len(prompt)} tokens; with max_new_tokens={max_new_tokens} that is more "
                f"than the model's max_position_embeddings={longest}; shorten the prompt, or lower max_new_tokens"
            )
