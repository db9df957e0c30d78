"""Dispatches: their calls of programs, the results, and the delivery of these to requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool

from posttrain.rollout.blocks import BLOCK, Node
from posttrain.rollout.decode_weights import Loaded
from posttrain.rollout.decoding import DecodedTokens, DecodeRows
from posttrain.rollout.programs import Prefilled, PromptPieces
from posttrain.rollout.request import Request
from posttrain.rollout.sampling import TopLogps
from posttrain.rollout.scheduler import PromptPiece, Row
from posttrain.rollout.speculative import SpeculativeRows
from posttrain.rollout.types import Decode, StopReason, TokenLogp, first_completed
from posttrain.rollout.vision import Features, PicturedPiece, prompt_features
from posttrain.tree import replace

HOST_S = 2e-3
"""Seconds of a dispatch beside the passes of the model: plans, transfers and grammars."""


@dataclass(frozen=True, kw_only=True)
class PromptCall:
    prompts: PromptPieces
    pieces: dict[int, PromptPiece]
    """By row of the call."""
    images: Mapping[int, PicturedPiece] = field(default_factory=dict)
    """Pieces whose images the call reads, by row."""

    def with_features(self, loaded: Loaded, found: Features) -> PromptPieces:
        """Inputs with the features of their images."""
        if not self.images:
            return self.prompts
        rows, tokens = self.prompts.tokens.shape
        features = prompt_features(loaded.source.model, (rows, tokens), self.images, found)
        return replace(self.prompts, images=features)


@dataclass(frozen=True, kw_only=True)
class DecodeCall:
    rows: DecodeRows | SpeculativeRows
    stop_at: np.int32
    places: dict[int, Row]
    """By row of the call; the others are idle."""
    size: int
    """Rows of the call in each lane."""


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """A plan as calls of programs."""

    loaded: Loaded
    prompts: list[PromptCall]
    drafting: list[PromptCall]
    """Calls in which the draft model reads tokens."""
    decode: DecodeCall | None


@dataclass(frozen=True, kw_only=True)
class DispatchOutcome:
    """Results of a dispatch's calls, on the host."""

    prefilled: list[Prefilled]
    chunk: DecodedTokens | None


def fair_length(*, plain: int, constrained: int, longest: int, token_s: float) -> int:
    """Number of tokens that plain rows draw in a dispatch beside rows under a grammar, which draw one.

    A dispatch takes `HOST_S` and `token_s` for each token. n tokens for each of P rows beside C constrained ones
    maximize the sum of all rows' log speeds at n = P HOST_S / (C token_s). Both are fixed, so that a run that is
    repeated pauses where it did: what is read from the cache is rounded otherwise than what is new.

    >>> fair_length(plain=31, constrained=1, longest=8, token_s=0.02)
    3
    """
    best = plain * HOST_S / (constrained * token_s)
    return round(min(max(best, 1), longest))


@dataclass(frozen=True)
class Ended:
    """Rows whose requests are finished or failed."""

    done: list[tuple[Row, StopReason]] = field(default_factory=list)
    failed: list[tuple[Row, Exception]] = field(default_factory=list)
    """FloatingPointError for log-probabilities that are not finite; other exceptions are raised by `decode_text`."""


def deliver(
    dispatch: Dispatch, outcome: DispatchOutcome, holds: Callable[[Row], bool], decode_text: Decode | None
) -> Ended:
    """Append the new tokens to every request; returns the rows that ended. Rows that `holds` refuses are skipped."""
    for call, prefilled in zip(dispatch.prompts, outcome.prefilled, strict=True):
        _deliver_prompts(call, prefilled, holds)
    ended = Ended()
    if dispatch.decode is None or outcome.chunk is None:
        return ended
    version, finite = dispatch.loaded.version, _finite(outcome.chunk)
    for index, row in dispatch.decode.places.items():
        if not holds(row):
            continue
        if not finite[index]:
            message = f"generate: the weights of version {version} give log-probabilities that are not finite"
            ended.failed.append((row, FloatingPointError(message)))
            continue
        _inherit_routing(row)
        count = _deliver_tokens(outcome.chunk, index, row.request, version)
        try:
            reason = _stop_reason(row.request, count, decode_text)
            if reason is None and row.request.constraint is not None:
                row.request.constraint.advance(row.request.tokens[len(row.request.tokens) - count :])
        except Exception as error:
            # The tokenizer and the grammar are not ours, and the other requests may have better tokens.
            ended.failed.append((row, error))
            continue
        if reason is not None:
            ended.done.append((row, reason))
    return ended


def _finite(chunk: DecodedTokens) -> Bool[np.ndarray, " R"]:
    """True for rows whose sampled log-probabilities are all finite."""
    sampled = np.arange(len(chunk.logps))[:, None] < np.asarray(chunk.counts)
    return (np.isfinite(np.asarray(chunk.logps)) | ~sampled).all(axis=0)


def _deliver_prompts(call: PromptCall, found: Prefilled, holds: Callable[[Row], bool]) -> None:
    for index, piece in call.pieces.items():
        row, length = piece.row, piece.end - piece.start
        if found.experts is not None:
            # Also for removed rows: other requests may share their blocks.
            _record_routing(piece.nodes, np.asarray(found.experts[index, :length]))
        if not holds(row):
            continue
        if found.experts is not None:
            row.request.record_routing(piece.start, np.asarray(found.experts[index, :length]))
        if found.logps is not None and row.request.unscored:
            top, number = None, row.request.params.top_logps
            if found.top is not None and number:
                top = _top_logps(found.top, np.s_[index, :length], number)
            row.request.record_prompt_logps(piece.start, np.asarray(found.logps[index, :length]).tolist(), top)


def _record_routing(nodes: Sequence[Node], experts: np.ndarray) -> None:
    for index, node in enumerate(nodes):
        if node.routing is None:
            start = index * BLOCK
            node.routing = experts[start : start + len(node.tokens)].copy()


def _inherit_routing(row: Row) -> None:
    """Copy the recorded experts of shared prefix blocks to the request, once."""
    if not row.fresh:
        return
    row.fresh = False
    for index, node in enumerate(row.chain.nodes):
        if node.routing is not None:
            row.request.record_routing(index * BLOCK, node.routing)
    source = row.chain.source
    if source is not None and source.routing is not None:
        start = len(row.chain.nodes) * BLOCK
        row.request.record_routing(start, source.routing[: row.computed - start])


def _deliver_tokens(chunk: DecodedTokens, index: int, request: Request, version: int) -> int:
    """Append the new tokens of a row to its request, and return their number."""
    count = int(chunk.counts[index])
    if chunk.experts is not None:
        request.record_routing(request.position, np.asarray(chunk.experts[:count, index]))
    request.tokens.extend(np.asarray(chunk.tokens[:count, index]).tolist())
    request.logps.extend(np.asarray(chunk.logps[:count, index]).tolist())
    request.kept_logps.extend(np.asarray(chunk.kept_logps[:count, index]).tolist())
    request.truncation_logps.extend(np.asarray(chunk.truncation_logps[:count, index]).tolist())
    request.versions.extend([version] * count)
    if chunk.top is not None:
        request.top_logps += _top_logps(chunk.top, np.s_[:count, index], request.params.top_logps)
    return count


def _top_logps(top: TopLogps, places: tuple[Any, Any], number: int) -> list[tuple[TokenLogp, ...]]:
    """The `number` most probable tokens at each of these places."""
    tokens, logps = np.asarray(top.tokens[places]), np.asarray(top.logps[places])
    return [
        tuple(map(TokenLogp, *pair))
        for pair in zip(tokens[:, :number].tolist(), logps[:, :number].tolist(), strict=True)
    ]


def _stop_reason(request: Request, num_new: int, decode_text: Decode | None) -> StopReason | None:
    """Return the stop reason of a finished request, else None; tokens after a stop string are cut."""
    params = request.params
    if params.stop and decode_text is not None:
        end = first_completed(decode_text, request.history, len(request.prompt), num_new, params)
        if end is not None:
            request.cut(end)
            return "stop"
    if request.tokens[-1] in params.ends:
        return "stop"
    return "length" if len(request.tokens) == params.max_tokens else None
