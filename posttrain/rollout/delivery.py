"""Delivery of a dispatch's tokens, log-probabilities and routing to their requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool

from posttrain.rollout.blocks import BLOCK, Node
from posttrain.rollout.programs import DecodedTokens, Prefilled
from posttrain.rollout.request import Request
from posttrain.rollout.runner import Dispatch, Outcome, PromptCall
from posttrain.rollout.sampling import TopLogps
from posttrain.rollout.scheduler import Row
from posttrain.rollout.types import Decode, StopReason, TokenLogp, first_completed


@dataclass(frozen=True)
class Ended:
    """Rows whose requests are finished or failed."""

    done: list[tuple[Row, StopReason]] = field(default_factory=list)
    failed: list[tuple[Row, Exception]] = field(default_factory=list)
    """FloatingPointError for log-probabilities that are not finite; other exceptions are raised by `decode_text`."""


def deliver(dispatch: Dispatch, outcome: Outcome, holds: Callable[[Row], bool], decode_text: Decode | None) -> Ended:
    """Append the new tokens to every request; returns the rows that ended. Rows that `holds` refuses are skipped."""
    for call, found in zip(dispatch.prompts, outcome.prefilled, strict=True):
        _deliver_prompts(call, found, holds)
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
        except Exception as error:
            # The tokenizer is not ours, and the other requests may have better tokens.
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
            row.request.record_prompt_logps(piece.start, np.asarray(found.logps[index, :length]).tolist())


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
    request.versions.extend([version] * count)
    if chunk.top is not None:
        request.top_logps += _top_logps(chunk.top, count, index, request.params.top_logps)
    return count


def _top_logps(top: TopLogps, count: int, index: int, number: int) -> list[tuple[TokenLogp, ...]]:
    """The `number` most probable tokens at each of a row's first `count` tokens."""
    tokens, logps = np.asarray(top.tokens[:count, index]), np.asarray(top.logps[:count, index])
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
