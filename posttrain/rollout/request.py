"""Request state of the engine: a prompt and the tokens sampled so far."""

from __future__ import annotations

from array import array
from collections.abc import Callable, MutableSequence, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from posttrain.data.grammar import Constraint
from posttrain.data.prompt_images import PromptImages
from posttrain.rollout.adapters import LoadedAdapter
from posttrain.rollout.blocks import BLOCK
from posttrain.rollout.types import Completion, NewTokens, SamplingParams, StopReason, TokenLogp


class HiddenStates(NamedTuple):
    """Hidden states that a block drafter reads of a request, whose newest token is at `position`."""

    position: int
    hidden: Float[np.ndarray, "W D"]
    known: int


@dataclass(eq=False, kw_only=True)
class Request:
    """A request and its progress, kept across preemptions."""

    prompt: tuple[int, ...]
    params: SamplingParams
    number: int = 0
    """Arrival number."""
    adapter: LoadedAdapter | None = None
    future: Future[Completion] = field(default_factory=Future)
    tokens: MutableSequence[int] = field(default_factory=lambda: array("i"))
    logps: MutableSequence[float] = field(default_factory=lambda: array("f"))
    kept_logps: MutableSequence[float] = field(default_factory=lambda: array("f"))
    truncation_logps: MutableSequence[float] = field(default_factory=lambda: array("f"))
    versions: MutableSequence[int] = field(default_factory=lambda: array("i"))
    top_logps: list[tuple[TokenLogp, ...]] = field(default_factory=list)
    prompt_logps: list[float] = field(default_factory=lambda: [0.0])
    """Log-probabilities of the first prompt tokens, where requested."""
    routing: Int[np.ndarray, "T M k"] | None = None
    """Recorded experts of every position that was read; -1 elsewhere. None without recording."""
    on_tokens: Callable[[NewTokens], None] | None = None
    """Called with the tokens of each dispatch, before the completion is returned. It must not raise."""
    num_told: int = 0
    """Number of tokens that `on_tokens` has been told."""
    prompt_top_logps: list[tuple[TokenLogp, ...]] = field(default_factory=lambda: [()])
    """Most probable tokens at as many places as `prompt_logps` has; none without `top_logps`."""
    constraint: Constraint | None = None
    """Progress in the request's grammar."""
    num_cached: int = 0
    """Prompt tokens found in the prefix cache."""
    admitted: bool = False
    """True once the request has held a slot."""
    hidden: HiddenStates | None = None
    """Newest hidden states of the model for a block drafter, as far as they are known."""
    images: PromptImages | None = None
    """Pictures of the prompt."""
    whole: Sequence[tuple[int, int]] = ()
    """Places of images that must be read at once, see `ModelConfig.sees_ahead`."""
    _history: MutableSequence[int] = field(default_factory=lambda: array("i"))
    _keys: MutableSequence[int] = field(default_factory=lambda: array("q"))

    def __lt__(self, other: Request) -> bool:
        return self.number < other.number

    @property
    def space(self) -> int:
        """Prefix cache of its adapter."""
        return 0 if self.adapter is None else self.adapter.number

    @property
    def slot(self) -> int:
        """Slot of its adapter; -1: none."""
        return -1 if self.adapter is None else self.adapter.slot

    @property
    def end(self) -> int:
        """Maximum number of positions of prompt and sample."""
        return len(self.prompt) + self.params.max_tokens

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def position(self) -> int:
        """Position of the newest token, which is the next input of the model."""
        return self.length - 1

    def positions(self, steps: int) -> int:
        """Number of positions after so many more tokens; the last token of a sample is never computed."""
        return min(self.position + steps, self.end - 1)

    @property
    def newest(self) -> int:
        return self.tokens[-1] if self.tokens else self.prompt[-1]

    @property
    def history(self) -> MutableSequence[int]:
        """Prompt and sample as one read-only array."""
        known = len(self._history)
        if known < len(self.prompt):
            self._history = array("i", [*self.prompt, *self.tokens])
        elif known < self.length:
            self._history.extend(self.tokens[known - len(self.prompt) :])
        return self._history

    @property
    def keys(self) -> Sequence[int]:
        """Prompt and sample as the prefix cache knows them: tokens of images by their content."""
        if self.images is None:
            return self.history
        if not self._keys:
            self._keys = self.images.keys(self.prompt)
        self._keys.extend([*self.history[len(self._keys) :]])
        return self._keys

    @property
    def rope_delta(self) -> int:
        """Number added to positions for multimodal RoPE."""
        return 0 if self.images is None else self.images.rope_delta

    def piece_end(self, start: int, count: int) -> int:
        """End of a piece of prompt and sample from `start` on: at most `count` tokens later, unless an image must be
        read at once that begins before and ends after. It is at the start of a block, or before the newest token."""
        end = min(start + count, self.position)

        def cuts(place: int) -> bool:
            return any(first < place < last for first, last in self.whole)

        places = [*range(end, start, -BLOCK), *range(end, self.position, BLOCK)] if end < self.position else []
        return next((place for place in places if not cuts(place)), self.position)

    @property
    def started(self) -> bool:
        """True once a token was sampled."""
        return bool(self.tokens)

    def resume(self, partial: Completion) -> None:
        """Resume from an aborted completion of the same request. ValueError for a finished one."""
        if partial.stop != "abort" or len(partial.tokens) >= self.params.max_tokens:
            raise ValueError(
                f"generate: partial: a completion of {len(partial.tokens)} tokens with stop {partial.stop!r} cannot "
                f"be resumed to max_tokens={self.params.max_tokens}; it must be aborted, and shorter"
            )
        if not partial.tokens:
            return
        self.tokens, self.versions = array("i", partial.tokens), array("i", partial.weights_versions)
        self.logps, self.kept_logps = array("f", partial.logps), array("f", partial.kept_logps)
        self.truncation_logps = array("f", partial.truncation_logps)
        if self.constraint is not None:
            self.constraint.advance(partial.tokens)
        self.top_logps = list(partial.top_logps or ())
        self.prompt_logps = list(partial.prompt_logps or (0.0,))
        self.prompt_top_logps = list(partial.prompt_top_logps or [()] * len(self.prompt_logps))
        if partial.experts is not None:
            self.record_routing(0, partial.experts)

    @property
    def unscored(self) -> bool:
        """True if prompt log-probabilities are requested and missing: the prompt must be computed from the start."""
        return self.params.prompt_logps and len(self.prompt_logps) < len(self.prompt)

    def record_prompt_logps(
        self, start: int, logps: Sequence[float], top: Sequence[tuple[TokenLogp, ...]] | None
    ) -> None:
        """Store log-probabilities of the tokens after positions `start` and later, and the most probable tokens there;
        earlier records stay."""
        new = slice(len(self.prompt_logps) - 1 - start, len(self.prompt) - 1 - start)
        if self.images is not None:
            # No distribution predicts a picture.
            of_image = self.images.padded(len(self.prompt))[start + 1 :]
            logps = [0.0 if number else logp for logp, number in zip(logps, of_image, strict=False)]
        self.prompt_logps += logps[new]
        self.prompt_top_logps += [()] * len(logps[new]) if top is None else top[new]

    def record_routing(self, start: int, routing: Int[np.ndarray, "T M k"]) -> None:
        """Record experts of positions `start` and later; earlier records stay, also when positions are recomputed."""
        if self.routing is None:
            self.routing = np.full((self.end, *routing.shape[1:]), -1, routing.dtype)
        here = self.routing[start : start + len(routing)]
        here[...] = np.where(here < 0, routing[: len(here)], here)

    def forget_prompt(self) -> None:
        """Drop the prompt's records, computed with older weights."""
        if not self.started:
            self.prompt_logps, self.prompt_top_logps, self.routing = [0.0], [()], None

    def cut(self, length: int) -> None:
        """Drop the tokens after the first `length`."""
        del self.history[len(self.prompt) + length :]
        del self._keys[len(self.prompt) + length :]
        columns = (self.tokens, self.logps, self.kept_logps, self.truncation_logps, self.versions, self.top_logps)
        for values in columns:
            del values[length:]

    def tell(self) -> None:
        """Hand tokens that are new to `on_tokens`, if there is one."""
        told, self.num_told = self.num_told, len(self.tokens)
        if self.on_tokens is not None and told < self.num_told:
            new = slice(told, None)
            self.on_tokens(
                NewTokens(
                    tuple(self.tokens[new]),
                    tuple(self.logps[new]),
                    tuple(self.top_logps[new]) or None,
                    self.num_cached,
                )
            )

    def finish(self, stop: StopReason) -> None:
        """Return the completion to the caller, unless the caller has cancelled."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(self.completion(stop))

    def completion(self, stop: StopReason) -> Completion:
        """Completion of the tokens so far."""
        return Completion(
            tokens=tuple(self.tokens),
            logps=tuple(self.logps),
            kept_logps=tuple(self.kept_logps),
            truncation_logps=tuple(self.truncation_logps),
            stop=stop,
            weights_versions=tuple(self.versions),
            experts=self._experts(),
            top_logps=tuple(self.top_logps) if self.params.top_logps else None,
            prompt_logps=tuple(self.prompt_logps) if self.params.prompt_logps else None,
            prompt_top_logps=tuple(self.prompt_top_logps) if self.params.scores_top else None,
            num_cached=self.num_cached,
        )

    def fail(self, error: BaseException) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)

    def _experts(self) -> Int[np.ndarray, "T M k"] | None:
        """Recorded experts of prompt and sample; -1 for the last token, which was not computed."""
        if self.routing is None:
            return None
        experts = self.routing[: self.length].copy()
        experts[-1] = -1
        return experts
