"""Interface of rollout engines: parameters, completions, engine; texts, stop strings, records of conversations."""

from __future__ import annotations

import hashlib
import inspect
import math
import struct
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, UInt32

from posttrain.config import RolloutSection
from posttrain.config.locator import callable_of
from posttrain.data.chat import Renderer
from posttrain.data.grammar import Grammar, packed
from posttrain.data.prompt_images import PromptImages
from posttrain.data.thoughts import Thought, marks_of, thinks
from posttrain.data.tokenizer import Tokenizer
from posttrain.errors import ConfigError
from posttrain.rollout.trajectory import Turn

StopReason = Literal["stop", "length", "abort"]

MAX_LOGIT_BIAS = 300
"""Tokens with a bias of their own, per request."""
MAX_TOP_LOGPS = 20


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one completion. ValueError for a value outside its range.

    Order, that of Hugging Face: allowed tokens, bias, penalties (repetition, frequency, presence), temperature, top-k,
    top-p, min-p. Several samples of one prompt are several requests under keys of their own, see `samples_of`.
    """

    max_tokens: int
    temperature: float
    """0: greedy."""
    top_k: int = 0
    """0: off."""
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    """Strings that end the sample: its last token is the one that completes a string, and may hold text beyond it."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end the sample; they are its last token."""
    key: tuple[int, int]
    """Two uint32 words, see `sample_key`. The token at position p is drawn with fold_in(key, p) and nothing else."""
    sample: tuple[int, int] | None = None
    """Key of the sample whose request this is; None: its only one, with that key. See `Requests`."""
    repetition_penalty: float = 1.0
    """Divides the positive and multiplies the negative logits of tokens in prompt and sample, arXiv:1909.05858."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the sample."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens in the sample, times their count in it."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Token id -> number added to its logit; -inf forbids the token."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that may be drawn; None: all."""
    grammar: Grammar | None = None
    """Language of the text. Each token is drawn among those that go on in it, and `stop_token_ids` where it may end."""
    ignore_eos: bool = False
    """Continue after `stop_token_ids`, which may be drawn like any other token."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text, and of the text in which stop strings are looked for."""
    top_logps: int = 0
    """Number of most probable tokens returned with each sampled one, and with `prompt_logps` each of the prompt."""
    prompt_logps: bool = False
    """Return the log-probabilities of the prompt."""
    adapter: str | None = None
    """Name of a loaded adapter; None: the base."""

    def __post_init__(self) -> None:
        rules = {
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "temperature": (math.isfinite(self.temperature) and self.temperature >= 0, "finite and not negative"),
            "top_k": (self.top_k >= 0, "0 (off) or positive"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p < 1, "at least 0 and below 1"),
            "stop": (all(self.stop), "strings that are not empty"),
            "stop_token_ids": (all(token >= 0 for token in self.stop_token_ids), "token ids, not negative"),
            "key": (all(0 <= word < 2**32 for word in self.key), "two words of 32 bits"),
            "repetition_penalty": (0 < self.repetition_penalty < math.inf, "finite and positive; 1 is off"),
            "presence_penalty": (math.isfinite(self.presence_penalty), "finite; 0 is off"),
            "frequency_penalty": (math.isfinite(self.frequency_penalty), "finite; 0 is off"),
            "logit_bias": (
                len(self.logit_bias) <= MAX_LOGIT_BIAS
                and all(token >= 0 and bias < math.inf for token, bias in self.logit_bias.items()),
                f"at most {MAX_LOGIT_BIAS} token ids, each with a number or -inf",
            ),
            "allowed_token_ids": (
                self.allowed_token_ids is None
                or any(self.logit_bias.get(token, 0.0) > -math.inf for token in self.allowed_token_ids),
                "None, or hold at least one token that logit_bias does not forbid",
            ),
            "grammar": (self.grammar is None or bool(self.ends), "None, or come with stop tokens, without ignore_eos"),
            "top_logps": (0 <= self.top_logps <= MAX_TOP_LOGPS, f"from 0 (off) to {MAX_TOP_LOGPS}"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise ValueError(f"sampling.{name}={getattr(self, name)!r}: must be {rule}")

    def stopped_at(self, stops: Sequence[str], tokenizer: Tokenizer) -> SamplingParams:
        """Copy that also stops at these strings. One that is a special token becomes a stop token; ValueError for one
        that text without special tokens never has."""
        strings, tokens = tokenizer.split_stops(stops, self.skip_special_tokens)
        return replace(self, stop=(*self.stop, *strings), stop_token_ids=(*self.stop_token_ids, *tokens))

    @property
    def sample_key(self) -> tuple[int, int]:
        """Key of the sample, the same for all of its requests."""
        return self.key if self.sample is None else self.sample

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end the sample, with `ignore_eos` applied."""
        return () if self.ignore_eos else self.stop_token_ids

    @property
    def is_plain(self) -> bool:
        """True if tokens are drawn from the model's own logits and nothing else is returned: the fast program."""
        narrowed = self.allowed_token_ids is not None or self.grammar is not None
        return not (narrowed or self.has_penalties or self.logit_bias or self.top_logps)

    @property
    def scores_top(self) -> bool:
        """True if the most probable tokens at the places of the prompt are returned."""
        return self.prompt_logps and self.top_logps > 0

    @property
    def has_penalties(self) -> bool:
        """True if logits depend on the tokens before."""
        return bool(self.repetition_penalty - 1 or self.presence_penalty or self.frequency_penalty)

    def choices(self, vocab_size: int) -> UInt32[np.ndarray, " W"] | None:
        """Tokens in bits that `allowed_token_ids` and `logit_bias` leave; None: all."""
        forbidden = [token for token, bias in self.logit_bias.items() if bias == -math.inf]
        if self.allowed_token_ids is None and not forbidden:
            return None
        tokens = range(vocab_size) if self.allowed_token_ids is None else self.allowed_token_ids
        return packed(tokens, vocab_size) & ~packed(forbidden, vocab_size)

    def check_vocabulary(self, size: int) -> None:
        """ValueError for a token of `logit_bias` or `allowed_token_ids` that a model of `size` tokens does not have."""
        for name, tokens in {"logit_bias": self.logit_bias, "allowed_token_ids": self.allowed_token_ids or ()}.items():
            if tokens and not 0 <= min(tokens) <= max(tokens) < size:
                raise ValueError(
                    f"sampling.{name}: token ids from {min(tokens)} to {max(tokens)}; "
                    f"the model's go from 0 to {size - 1}"
                )


class TokenLogp(NamedTuple):
    token: int
    logp: float


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Sampled tokens after a prompt; arrays have one entry per sampled token unless noted.

    Log-probabilities are those of the model, whatever the request did to its logits: float32, of the temperature-scaled
    distribution (at temperature 0 of the unscaled one) before penalties, bias, allowed tokens and truncation. That is
    what a trainer scores. The token was drawn with probability exp(logp - kept_logp).
    """

    tokens: tuple[int, ...]
    """Sampled tokens, including the stop token if there is one."""
    logps: tuple[float, ...]
    kept_logps: tuple[float, ...]
    """logp minus the log of the probability with which the token was drawn. With nothing but allowed tokens, a grammar,
    top-k, top-p and min-p it is the log of the mass that they kept; 0 where nothing is cut, and at temperature 0."""
    truncation_logps: tuple[float, ...]
    """Log of the mass that top-k, top-p and min-p kept of what penalties, bias, allowed tokens and a grammar leave; 0
    where they cut nothing, and at temperature 0."""
    stop: StopReason
    weights_versions: tuple[int, ...]
    experts: Int[np.ndarray, "T M k"] | None = None
    """Recorded experts of each token of prompt and sample in each MoE layer; -1 for the last token, which the model has
    not read. None without recording."""
    top_logps: tuple[tuple[TokenLogp, ...], ...] | None = None
    """Most probable tokens at each position, in falling order; None unless requested."""
    prompt_logps: tuple[float, ...] | None = None
    """Log-probability of each prompt token given those before it, 0 for the first; None unless requested."""
    prompt_top_logps: tuple[tuple[TokenLogp, ...], ...] | None = None
    """Most probable tokens at each place of the prompt, none at the first; None unless both are requested."""
    num_cached: int = field(default=0, compare=False)
    """Prompt tokens found in the prefix cache."""


class NewTokens(NamedTuple):
    """Tokens of a sample under way that came with one dispatch; those of all make its completion."""

    tokens: tuple[int, ...]
    logps: tuple[float, ...]
    top_logps: tuple[tuple[TokenLogp, ...], ...] | None
    num_cached: int
    """Tokens of the prompt that were found in the cache, as in `Completion`."""


class Call(NamedTuple):
    """Request for one completion."""

    prompt: Sequence[int]
    params: SamplingParams
    partial: Completion | None = None
    """Aborted completion of the same request to resume: the result begins with it."""
    images: PromptImages | None = None
    """Pictures of the prompt; None: text."""


@runtime_checkable
class RolloutEngine(Protocol):
    """Engine that samples. One of text has no `images` in `generate`, and is never called with it, see `sampled`."""

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, *, images: PromptImages | None = None
    ) -> Completion: ...

    def update_weights(self, model: Any, version: int) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class PausableEngine(RolloutEngine, Protocol):
    """Engine that can stand still between two dispatches, with samples under way that can be read and continued."""

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        images: PromptImages | None = None,
        partial: Completion | None = None,
    ) -> Completion: ...

    async def pause(self) -> None:
        """Start no more dispatches; on return none runs."""
        ...

    def resume(self) -> None:
        """Continue after `pause`."""
        ...

    def under_way(self) -> Sequence[Call]:
        """Requests that are not finished, with what is sampled of them; None where nothing is."""
        ...


EngineFactory = Callable[[Any, Tokenizer, RolloutSection], Any]
"""Maker of a rollout engine that users write, from the model, its tokenizer and the section."""


def engine_factory(section: RolloutSection) -> EngineFactory | None:
    """Import the section's factory of engines; None: the built-in engine. ConfigError for an object that is none."""
    if section.engine is None:
        return None
    factory: EngineFactory = callable_of(section.engine, "rollout.engine")
    methods = ("generate", "update_weights", "close")
    # A function may be a factory too; its result is checked when it is made.
    if isinstance(factory, type) and (lacks := [name for name in methods if not hasattr(factory, name)]):
        raise ConfigError(f"rollout.engine: {section.engine} has no method {', '.join(lacks)}; implement it")
    return factory


@runtime_checkable
class PreparingEngine(RolloutEngine, Protocol):
    """Engine that can make what a request needs before it is submitted, see `NativeEngine.prepare`."""

    async def prepare(
        self, prompt: Sequence[int], params: SamplingParams, *, images: PromptImages | None = None
    ) -> None: ...


async def sampled(
    engine: RolloutEngine, prompt: Sequence[int], params: SamplingParams, images: PromptImages | None
) -> Completion:
    """Completion of a prompt by any engine. ConfigError for pictures that it cannot take."""
    if images is None:
        return await engine.generate(prompt, params)
    if "images" not in inspect.signature(engine.generate).parameters:
        raise ConfigError(
            f"rollout.engine: the prompt has pictures, and {type(engine).__name__}.generate has no parameter images; "
            "use the built-in engine, or remove the pictures"
        )
    return await engine.generate(prompt, params, images=images)


def sample_key(seed: int, stream: int, group: int, sample: int) -> tuple[int, int]:
    """Random key of a sample: 64 bits of BLAKE2b over four 64-bit integers, the same on every platform.

    `stream`: training or evaluation. `group`: number of the group among all of the stream.

    >>> sample_key(0, 0, 0, 0) != sample_key(0, 0, 0, 1)
    True
    """
    digest = hashlib.blake2b(struct.pack("<4q", seed, stream, group, sample), digest_size=8).digest()
    first, second = struct.unpack("<2I", digest)
    return first, second


class Requests:
    """Requests of one sample: settings of each, under a random key of its own.

    The key holds the sample, a digest of the prompt, and the number of the request among those of this prompt: it does
    not depend on when a request comes beside others, and is the same after a restart.
    """

    def __init__(self, params_of: Callable[[int], SamplingParams]):
        """`params_of`: settings of the n-th request of a prompt."""
        self._params_of, self._sample = params_of, params_of(0).sample_key
        self._asked: Counter[bytes] = Counter()

    def __call__(self, prompt: Sequence[int], images: PromptImages | None = None) -> SamplingParams:
        """Settings of the next request of this prompt."""
        content = np.asarray(prompt, "<i4") if images is None else np.asarray(images.keys(prompt), "<i8")
        digest = hashlib.blake2b(content.tobytes(), digest_size=16).digest()
        params = self._params_of(self._asked[digest])
        self._asked[digest] += 1
        first, second = struct.unpack(
            "<2I", hashlib.blake2b(digest + struct.pack("<2I", *params.key), digest_size=8).digest()
        )
        return replace(params, key=(first, second), sample=self._sample)


def samples_of(params: SamplingParams, *, n: int, seed: int, prompt: int = 0) -> list[SamplingParams]:
    """`n` different samples of one prompt: the same request under `n` keys.

    >>> params = SamplingParams(max_tokens=4, temperature=1.0, stop_token_ids=(), key=(0, 0))
    >>> len({request.key for request in samples_of(params, n=3, seed=7)})
    3
    """
    return [replace(params, key=sample_key(seed, 0, prompt, sample)) for sample in range(n)]


NOT_A_CHARACTER = "\ufffd"
"""Replacement character that a tokenizer decodes an incomplete character to."""


@runtime_checkable
class Decode(Protocol):
    """Text of tokens that stand after others, see `Tokenizer.decode`."""

    def __call__(
        self, tokens: Sequence[int], skip_special_tokens: bool = True, *, after: Sequence[int] = ()
    ) -> str: ...


def text_of(decode: Decode, prompt: Sequence[int], tokens: Sequence[int], params: SamplingParams) -> str:
    """Text of a sample after its prompt, without its stop token, cut before the first stop string."""
    sampled = tokens[:-1] if tokens and tokens[-1] in params.ends else tokens
    return before_stop(decode(sampled, params.skip_special_tokens, after=prompt), params.stop)


def reply_of(renderer: Renderer, prompt: Sequence[int], tokens: Sequence[int], params: SamplingParams) -> str:
    """Content of the message that a sample is, see `text_of` and `Renderer.reply`."""
    return renderer.reply(text_of(renderer.tokenizer.decode, prompt, tokens, params))


def grammar_of(renderer: Renderer, grammar: Grammar | None) -> Grammar | None:
    """Grammar of the text of a sample whose content is in a grammar, see `reply_of`: what the chat template lets stand
    before the content may come first. Without a template that is only the rest of a thought that the prompt opens."""
    if grammar is None:
        return None
    tokenizer = renderer.tokenizer
    may_begin = renderer.chat and thinks(tokenizer)
    thought = Thought.of(tokenizer, marks_of(tokenizer), may_begin=may_begin, head=renderer.chat)
    return grammar.after(renderer.spaces_before_content if renderer.chat else "", thought)


def before_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string in it.

    >>> before_stop("one. two; three", (";", "."))
    'one'
    """
    ends = [text.find(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text


def first_completed(
    decode: Decode, tokens: Sequence[int], num_prompt: int, num_new: int, params: SamplingParams
) -> int | None:
    """Number of sampled tokens after which the text first contains a stop string; None if it does not.

    `tokens`: those of the prompt, and of the sample, of which all but the `num_new` last ones contain no stop string.
    Only their tail is decoded again: at least as many complete characters as the longest stop string has.
    """
    old = len(tokens) - num_new
    longest = max(map(len, params.stop))
    start = old
    # A token has some four characters; each try decodes all of them again.
    back = max(1, longest // 4)

    def text(end: int) -> str:
        return decode(tokens[start:end], params.skip_special_tokens, after=tokens[:start])

    while start > num_prompt and len(text(old).replace(NOT_A_CHARACTER, "")) < longest:
        start = max(num_prompt, old - back)
        back *= 2

    def complete(end: int) -> bool:
        return any(stop in text(end) for stop in params.stop)

    if not complete(len(tokens)):
        return None
    return next(end for end in range(old + 1, len(tokens) + 1) if complete(end)) - num_prompt


class Transcript:
    """Tokens of prompt, sampled turns and replies, with the records of the sampled ones."""

    PER_TOKEN = ("tokens", "sampled", "logps", "kept_logps", "truncation_logps", "versions")

    def __init__(self, prompt: Sequence[int], images: PromptImages | None = None):
        # Arrays: a list of numbers takes up to ten times their memory.
        self.tokens = array("i")
        self.sampled: list[bool] = []
        self.logps, self.kept_logps, self.truncation_logps = array("f"), array("f"), array("f")
        self.versions = array("i")
        self.turns: list[Turn] = []
        self.experts: Int[np.ndarray, "T M k"] | None = None
        self.images: PromptImages | None = None
        self.add(prompt, images)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, tokens: Sequence[int], images: PromptImages | None = None) -> None:
        """Append tokens that were not sampled, with their pictures."""
        count = len(tokens)
        if images is not None:
            before = self.images
            self.images = images.after(len(self)) if before is None else before.extended(len(self), images)
        zeros = [0.0] * count
        self._append(tokens, False, logps=zeros, kept_logps=zeros, truncation_logps=zeros, versions=[-1] * count)

    def add_turn(self, completion: Completion, time: int) -> None:
        """Append a completion of all tokens so far. `time`: number of its request in the sample."""
        start = len(self)
        self._append(
            completion.tokens,
            True,
            logps=completion.logps,
            kept_logps=completion.kept_logps,
            truncation_logps=completion.truncation_logps,
            versions=completion.weights_versions,
        )
        self.turns.append(Turn(start, len(self), None, time))
        if completion.experts is not None:
            self._record(completion.experts)

    def cut(self, length: int) -> None:
        """Drop what was added after the first `length` tokens, which hold all turns."""
        for name in self.PER_TOKEN:
            del getattr(self, name)[length:]
        self.images = None if self.images is None else self.images.cut(length)

    def reward(self, value: float | None) -> None:
        """Set the reward of the last turn."""
        self.turns[-1] = self.turns[-1]._replace(reward=value)

    def columns(self) -> dict[str, Any]:
        """Fields of a `Trajectory`."""
        return {name: getattr(self, name) for name in (*self.PER_TOKEN, "experts", "turns", "images")}

    def _append(
        self,
        tokens: Sequence[int],
        sampled: bool,
        *,
        logps: Sequence[float],
        kept_logps: Sequence[float],
        truncation_logps: Sequence[float],
        versions: Sequence[int],
    ) -> None:
        self.tokens.extend(tokens)
        self.sampled += [sampled] * len(tokens)
        self.logps.extend(logps)
        self.kept_logps.extend(kept_logps)
        self.truncation_logps.extend(truncation_logps)
        self.versions.extend(versions)

    def _record(self, experts: Int[np.ndarray, "T M k"]) -> None:
        """Add the experts of new positions; earlier records stay."""
        if self.experts is not None:
            before = self.experts
            experts = experts.copy()
            experts[: len(before)] = np.where(before < 0, experts[: len(before)], before)
        self.experts = experts
