"""Drafts on the host: where they come from, what the draft model has read, and for which calls they pay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array
from jaxtyping import Float

from posttrain.config import BlockDrafts, Drafts, ModelDrafts
from posttrain.data.tokenizer import Tokenizer, load_tokenizer
from posttrain.errors import ConfigError, placed
from posttrain.mesh import devices_of, replicated
from posttrain.models.config import ModelConfig
from posttrain.models.decoder import Decoder
from posttrain.rollout.blocks import BLOCK, BlockPool, blocks_for
from posttrain.rollout.decode_weights import LAYER_S, Loaded, PassCost, Placement
from posttrain.rollout.decoding import DecodedTokens, DecodeRows
from posttrain.rollout.paged import Pool
from posttrain.rollout.request import HiddenStates, Request
from posttrain.rollout.scheduler import MIN_SHARED, PROMPT_CHUNK, Plan, PromptPiece, Row
from posttrain.rollout.speculative import BlockRows, SpeculativeRows
from posttrain.runtime import processes
from posttrain.tree import replace
from posttrain.weights.drafter import StoredDrafter, check_drafter, read_drafter
from posttrain.weights.load import load_model
from posttrain.weights.locate import read_model_files
from posttrain.weights.state import ModelWeights, WeightShapes

OPTION = "rollout.speculative"

WINDOWS = (0.0, 0.06, 0.25)
"""Windows of `guess`. A draft model of a tenth of a story model's size agrees in 40 % of all tokens with the first, in
46 % with the last; its most probable token does in 43 %, and the best of all couplings would in 54 %. The better it
knows the model's distribution, the smaller the best window."""
WINDOW_CALLS = 16
"""Calls of the best window before another one is tried."""

PAYS = 1.1
"""Gain above which drafts pay: rows that draft end their texts at different times, and what is left of a batch runs
with few of them, which the gain of a call does not show."""
FIRST_ROUNDS = 64
"""Passes of rows with drafts before what they accept is judged."""
FIRST_WAIT, LONGEST_WAIT = 32, 512
"""Calls without drafts until they are tried again; twice as many each time that they do not pay still."""
PROMPTS = 256
"""Prompts whose last hidden states are kept for later samples of them; those read last."""
MEMORY = 0.7
"""Weight of earlier calls in a share of accepted tokens, for each later one."""


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """Source of drafted tokens."""

    tokens: int
    """Tokens drafted for each forward pass of the model."""
    model: Decoder | None = None
    """Draft model, on the model's devices; None: tokens are drafted from prompt and sample."""
    weights: WeightShapes | None = None
    """Its arrays as shapes, for a plan; None: it has them."""
    block: StoredDrafter | None = None
    """Block drafter."""
    option: str = OPTION
    """Name in messages."""

    @classmethod
    def of(
        cls, drafts: Drafts | None, target: Decoder, tokenizer: Tokenizer, option: str = OPTION
    ) -> Speculation | None:
        """Load what the section names. ConfigError where it cannot draft for the model. `option`: its name there."""
        if isinstance(drafts, BlockDrafts):
            if drafts.optimizer is not None and option != OPTION:
                raise ConfigError(f"{option}: optimizer: a drafter is trained in stages of kind rl; remove it here")
            found = find_drafter(drafts, target.config, option)
            return cls(tokens=drafts.tokens or found.config.tokens, block=found, option=option)
        if not isinstance(drafts, ModelDrafts):
            return None if drafts is None else cls(tokens=drafts.tokens, option=option)
        check_drafts(drafts, tokenizer, 1, option)
        compute = target.compute
        with placed(f"{option}.path={drafts.path}: the draft model: "):
            model = load_model(
                drafts.path.resolved,
                dtype=compute.dtype,
                compute_dtype=compute.dtype,
                mesh=compute.mesh,
                decode_attention=compute.decode_attention,
                grouped_matmul=compute.grouped_matmul,
                num_tokens=tokenizer.num_ids,
            )
        return cls(tokens=drafts.tokens, model=model, option=option)


def check_drafts(
    drafts: Drafts | None,
    tokenizer: Tokenizer,
    max_length: int,
    option: str = OPTION,
    target: ModelConfig | None = None,
) -> None:
    """ConfigError for a draft model that is no decoder, has other tokens or a shorter context, and for a block drafter
    of another model than `target`. Of a model on the hub only its `config.json` is read."""
    if isinstance(drafts, BlockDrafts) and target is not None:
        find_drafter(drafts, target, option)
    if not isinstance(drafts, ModelDrafts):
        return
    where = f"{option}.path={drafts.path}"
    try:
        files = read_model_files(drafts.path.resolved)
    except ConfigError as error:
        raise ConfigError(f"{option}.path: {str(error).removeprefix('model.path: ')}") from error
    if files.config is not None:
        if files.config.scalar_head:
            raise ConfigError(f"{where} is a reward model, which cannot draft tokens; name a language model")
        _check_length(files.config, max_length, option)
    if files.local is None:
        return
    with placed(f"{where}: a draft model needs its tokenizer beside it: "):
        theirs = load_tokenizer(files.local).hf.get_vocab()
    ours = tokenizer.hf.get_vocab()
    other = sorted((index, text) for text, index in ours.items() if theirs.get(text) != index)
    if other:
        index, text = other[0]
        raise ConfigError(
            f"{where}: {len(other):,} of the model's {len(ours):,} tokens are others there, as {text!r}, id {index}; "
            "draft with a model that has the same tokenizer"
        )


def find_drafter(drafts: BlockDrafts, target: ModelConfig, option: str = OPTION) -> StoredDrafter:
    """Block drafter of a section. ConfigError where it is none of the model's, or has shorter blocks."""
    with placed(f"{option}.path: "):
        found = read_drafter(drafts.path.resolved)
    check_drafter(found, target, f"{option}.path={drafts.path}")
    if drafts.tokens is not None and drafts.tokens > found.config.tokens:
        raise ConfigError(
            f"{option}.tokens={drafts.tokens}: the drafter's blocks have {found.config.tokens}; use as many at most"
        )
    if target.vision is not None:
        raise ConfigError(f"{option}: a block drafter is for models of text; use ngram with this one, or none")
    return found


class Pace:
    """Chooses for each call whether tokens are drafted, by the tokens that passes with drafts gave before.

    `worth`: cost of a pass without drafts as a share of that of one with them, by the rows of a call; `longest`: most
    tokens of a pass. What was sampled decides, and costs that are fixed: never a measured time, so that a run that is
    repeated or resumed drafts in the same calls, whose rounding is another one than that of calls without drafts.
    """

    def __init__(self, worth: Callable[[int], float], longest: int):
        self._worth, self._longest = worth, longest
        self.forget()

    def forget(self) -> None:
        """Begin anew, as an engine that has sampled nothing."""
        self._tokens = self._rounds = 0.0
        """Tokens and passes of rows with drafts, later ones with more weight."""
        self._since, self._wait = 0, FIRST_WAIT

    def gain(self, rows: int) -> float | None:
        """Speed with drafts as a multiple of that without, by the fixed costs; None before the first drafts."""
        return self._tokens / self._rounds * self._worth(rows) if self._rounds else None

    def choose(self, rows: int) -> bool:
        """Return True if the next call of as many rows shall draft."""
        if self._longest * self._worth(rows) <= PAYS:
            return False
        gain = self.gain(rows)
        if gain is None or self._rounds < FIRST_ROUNDS:
            return True
        if gain > PAYS:
            self._since, self._wait = 0, FIRST_WAIT
            return True
        self._since += 1
        if self._since <= self._wait:
            return False
        # Judged anew: what was accepted long ago tells nothing.
        self._tokens = self._rounds = 0.0
        self._since, self._wait = 0, min(2 * self._wait, LONGEST_WAIT)
        return True

    def record(self, tokens: int, rounds: int) -> None:
        """Note the tokens of a call with drafts, and the passes of its rows."""
        # What is known fades with new passes, and not with their number in a call.
        kept = 0.5 ** (rounds / (8 * FIRST_ROUNDS))
        self._tokens = kept * self._tokens + tokens
        self._rounds = kept * self._rounds + rounds


class Windows:
    """Chooses the window of `guess` by the share of tokens accepted in recent calls."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew, as an engine that has sampled nothing."""
        self._accepted = dict.fromkeys(WINDOWS, (0.0, 0.0))
        """Accepted and drafted tokens."""
        self._calls = 0
        self.latest = WINDOWS[0]

    def choose(self) -> float:
        self._calls += 1
        new = [window for window, (_, drafted) in self._accepted.items() if not drafted]
        if self._calls % WINDOW_CALLS == 0:
            new = [WINDOWS[self._calls // WINDOW_CALLS % len(WINDOWS)]]
        self.latest = new[0] if new else max(WINDOWS, key=self.share)
        return self.latest

    def share(self, window: float) -> float:
        accepted, drafted = self._accepted[window]
        return accepted / max(drafted, 1.0)

    def record(self, accepted: int, drafted: int) -> None:
        """Note the tokens of a call with the latest window."""
        old = self._accepted[self.latest]
        self._accepted[self.latest] = MEMORY * old[0] + accepted, MEMORY * old[1] + drafted


@dataclass(kw_only=True)
class DraftTotals:
    """Counts of tokens, drafts and passes of the model."""

    tokens: int = 0
    """Sampled tokens of all calls."""
    speculated: int = 0
    """Those of calls with drafts."""
    rounds: int = 0
    drafted: int = 0

    @property
    def accepted(self) -> int:
        """Drafted tokens that were sampled: all but one of each round."""
        return self.speculated - self.rounds


class Drafter:
    """Drafts of a runner: their source, the pool of the draft model, the pace, and counts.

    The draft model's pool has the blocks of the model's, under the same numbers. What it holds of them is noted in
    `BlockPool.drafted`; what is missing, such as tokens sampled without drafts, is read before drafts are made.
    """

    def __init__(self, speculation: Speculation, target: Loaded, max_length: int, cost: PassCost):
        self.tokens, self.block = speculation.tokens, speculation.block
        self.window = 0 if self.block is None else self.block.config.window
        """Hidden states that a block drafter reads; 0: none."""
        self.weights = {} if self.block is None else _placed(self.block, target)
        self._dtype = target.source.model.compute.dtype
        self._prompts: dict[tuple[int, bytes], HiddenStates] = {}
        self.loaded = None if speculation.model is None else _loaded(speculation, target, max_length)
        self.pool: Pool | None = None
        self._cost = cost
        self._draft_cost = None if self.loaded is None else PassCost.of(self.loaded)
        self.pace, self.windows = Pace(self._worth, speculation.tokens + 1), Windows()
        self._totals = DraftTotals()
        self._rows = 0

    def update(self, weights: Mapping[str, Array]) -> None:
        """Draft with copies of these arrays from now on."""
        cast = {name: x.astype(self._dtype) for name, x in weights.items()}
        self.weights = processes.copied(cast, {name: x.sharding for name, x in self.weights.items()})

    def forget(self) -> None:
        """Begin anew, as a drafter of an engine that has sampled nothing: which calls draft, and what, depends on
        nothing before."""
        self.pace.forget()
        self.windows.forget()
        self._prompts.clear()

    def _worth(self, rows: int) -> float:
        """Cost of a pass of the model over the newest tokens of rows, as a share of that over drafts too, with what the
        drafts cost."""
        cost, drafts = self._cost, 0.0
        if self._draft_cost is not None:
            drafts = self.tokens * self._draft_cost.seconds(rows)
        elif self.block is not None:
            config = self.block.config
            size = config.num_parameters + config.embed_dim * config.vocab_size
            read = size * self._dtype.itemsize / cost.bandwidth
            drafts = max(read, 2 * size * rows * self.tokens / cost.flops) + config.layers * LAYER_S
        return cost.seconds(rows) / (cost.seconds(rows * (self.tokens + 1)) + drafts)

    def catch_up(self, plan: Plan) -> list[PromptPiece]:
        """Return the pieces that the draft model has to read before it can draft for the plan's rows."""
        if self.loaded is None:
            return []
        if self.pool is None:
            for blocks in plan.lanes:
                blocks.drafted[:] = 0
        levels: dict[tuple[int, int], int] = {}
        return [piece for row in plan.decode for piece in self._missing(row, plan.lanes[row.lane], levels)]

    def _missing(self, row: Row, pool: BlockPool, levels: dict[tuple[int, int], int]) -> Iterator[PromptPiece]:
        """Pieces from the first block on that is not whole; `levels`: of blocks that pieces before write. The newest
        two tokens are read when tokens are drafted."""
        end = max(row.prefix - 1, 0)
        blocks = np.asarray(row.chain.blocks, np.int64)[: blocks_for(end)]
        wanted = np.clip(end - BLOCK * np.arange(len(blocks)), 0, BLOCK)
        lacking = np.flatnonzero(pool.drafted[blocks] < wanted)
        if not lacking.size:
            return
        start = BLOCK * int(lacking[0])
        # A program that reads the middle of a sequence is compiled for `MIN_SHARED` positions before it, at least.
        start = start if start >= MIN_SHARED else 0
        while start < end:
            stop = min(start + PROMPT_CHUNK, end)
            first, after = start // BLOCK, blocks_for(stop)
            level = 1 + max((levels.get((row.lane, block), 0) for block in blocks[:first].tolist()), default=0)
            new = pool.drafted[blocks[first:after]] < wanted[first:after]
            written = blocks[first:after].tolist()
            yield PromptPiece(
                row=row,
                start=start,
                end=stop,
                level=level,
                reads=tuple(blocks[:first].tolist()),
                writes=tuple(block if lacks else None for block, lacks in zip(written, new, strict=True)),
                nodes=(),
            )
            levels |= {(row.lane, block): level for block, lacks in zip(written, new, strict=True) if lacks}
            pool.drafted[blocks[first:after]] = np.maximum(pool.drafted[blocks[first:after]], wanted[first:after])
            start = stop

    def note(self, places: Mapping[int, Row], lanes: Sequence[BlockPool], chunk: DecodedTokens, size: int) -> None:
        """Count a call with as many rows as `size`, and note what the drafter has read of those that still run, by
        their places in it."""
        counts = np.asarray(chunk.counts)
        self._totals.tokens += int(counts.sum())
        if chunk.drafts is None:
            return
        rounds, drafted = (int(np.sum(each)) for each in (chunk.drafts.rounds, chunk.drafts.drafted))
        self._totals.speculated += int(counts.sum())
        self._totals.rounds += rounds
        self._totals.drafted += drafted
        self._rows = size
        self.pace.record(int(counts.sum()), rounds)
        if self.loaded is None and self.block is None:
            return
        self.windows.record(int(counts.sum()) - rounds, drafted)
        if chunk.drafts.hidden is not None:
            hidden, known = np.asarray(chunk.drafts.hidden), np.asarray(chunk.drafts.known)
            for index, row in places.items():
                row.request.hidden = HiddenStates(row.request.position, hidden[index], int(known[index]))
            return
        for row in places.values():
            end = row.request.position - 1
            first = row.computed // BLOCK
            blocks = np.asarray(row.chain.blocks, np.int64)[first : blocks_for(end)]
            lanes[row.lane].drafted[blocks] = np.clip(end - BLOCK * (first + np.arange(len(blocks))), 0, BLOCK)

    def rows(self, rows: DecodeRows, places: Mapping[int, Row], width: int) -> SpeculativeRows:
        """Rows of a call of up to `width` positions, with what tokens are drafted from."""
        count = rows.tokens.shape[0]
        if self.block is None and self.loaded is None:
            tokens = np.full((count, width), -1, np.int32)
            for index, row in places.items():
                tokens[index, : len(row.request.history)] = row.request.history
            return SpeculativeRows(rows=rows, history=jax.device_put(tokens))
        windows = np.full(count, self.windows.choose(), np.float32)
        if self.block is not None:
            return SpeculativeRows(rows=rows, window=jax.device_put(windows), block=self._block_rows(places, count))
        blocks, newest = np.zeros((count, width // BLOCK), np.int32), np.zeros(count, np.int32)
        for index, row in places.items():
            blocks[index, : len(row.chain.blocks)] = row.chain.blocks
            newest[index] = row.request.history[-2:][0]
        context, before, window = jax.device_put((blocks.reshape(*rows.context.shape[:2], 1, -1), newest, windows))
        return SpeculativeRows(rows=rows, context=context, before=before, window=window)

    def with_states(self, call: SpeculativeRows, places: Mapping[int, Row]) -> SpeculativeRows:
        """The rows of a call with the hidden states that are known by now."""
        return call if call.block is None else replace(call, block=self._block_rows(places, call.block.known.shape[0]))

    def note_prompts(self, pieces: Mapping[int, PromptPiece], hidden: Float[np.ndarray, "N W D"]) -> None:
        """Note the hidden states of the last tokens of pieces, for their requests and others of the same prompt."""
        for index, piece in pieces.items():
            request, known, states = piece.row.request, min(piece.end - piece.start, self.window), hidden[index]
            before = request.hidden
            if before is not None and before.position == piece.start and known < self.window:
                # The last piece of a long prompt may be shorter than the window.
                states = np.concatenate([before.hidden[known:], states[self.window - known :]])
                known = min(before.known + known, self.window)
            request.hidden = HiddenStates(piece.end, states, known)
            if piece.end == request.position:
                key = _of_prompt(request)
                self._prompts.pop(key, None)
                self._prompts[key] = request.hidden
                if len(self._prompts) > PROMPTS:
                    del self._prompts[next(iter(self._prompts))]

    def _states_of(self, request: Request) -> HiddenStates | None:
        """Newest hidden states of a request; None where it went on without drafts, or its prompt was in the cache and
        is no longer known here."""
        if request.hidden is not None and request.hidden.position == request.position:
            return request.hidden
        return self._prompts.get(_of_prompt(request))

    def _block_rows(self, places: Mapping[int, Row], rows: int) -> BlockRows:
        """Hidden states of a call's rows."""
        assert self.block is not None
        config, known = self.block.config, np.zeros(rows, np.int32)
        hidden = np.zeros((rows, config.window, config.embed_dim), self._dtype)
        for index, row in places.items():
            if (state := self._states_of(row.request)) is not None:
                hidden[index], known[index] = state.hidden, state.known
        arrays = jax.device_put({"hidden": hidden, "known": known})
        return BlockRows(weights=self.weights, config=config, **arrays)

    def take_totals(self) -> DraftTotals:
        """Counts since the last call."""
        totals, self._totals = self._totals, DraftTotals()
        return totals

    def metrics(self, totals: DraftTotals) -> dict[str, float]:
        """Shares of counts; `speedup` that is expected of calls with the latest number of rows."""
        gain = self.pace.gain(self._rows)
        return {
            "rollout/speculative/share": totals.speculated / max(totals.tokens, 1),
            "rollout/speculative/accepted": totals.accepted / max(totals.drafted, 1),
            "rollout/speculative/length": totals.speculated / max(totals.rounds, 1),
        } | ({} if gain is None else {"rollout/speculative/speedup": gain})


def _of_prompt(request: Request) -> tuple[int, bytes]:
    """Key of what a request has read before its newest token."""
    return request.space, np.asarray(request.history[: request.position], np.int32).tobytes()


def _placed(block: StoredDrafter, target: Loaded) -> dict[str, Any]:
    """Arrays of a block drafter on all devices of the rows, as shapes beside weights that are shapes."""
    dtype, mesh = target.source.model.compute.dtype, target.placement.mesh or devices_of(target.sharding)
    place = target.sharding if mesh is None else replicated(mesh)
    first = next(iter(target.arrays.values()))
    if isinstance(first, jax.ShapeDtypeStruct):
        shapes: Any = {name: jax.ShapeDtypeStruct(x.shape, dtype, sharding=place) for name, x in block.arrays.items()}
        return shapes
    arrays: dict[str, Array] = jax.device_put({name: x.astype(dtype) for name, x in block.arrays.items()}, place)
    return arrays


def _loaded(speculation: Speculation, target: Loaded, max_length: int) -> Loaded:
    """The draft model where the model's rows are. ConfigError where it cannot be."""
    model, option = speculation.model, speculation.option
    assert model is not None
    config, placement = model.config, target.placement
    _check_length(config, max_length, option)
    shards = _head_shards(placement)
    if any(block.attention.num_kv_heads % shards for block in config.blocks):
        least = min(block.attention.num_kv_heads for block in config.blocks)
        raise ConfigError(
            f"{option}: {shards} devices split each weight, which must divide num_kv_heads={least} of the "
            "draft model; set rollout.tensor, or use another one"
        )
    source = ModelWeights(model)
    with placed(f"{option}: the draft model: "):
        return Loaded.of(source, source.read() if speculation.weights is None else speculation.weights, 0, placement)


def _check_length(config: ModelConfig, max_length: int, option: str) -> None:
    if max_length > config.max_positions:
        raise ConfigError(
            f"{option}: samples of up to {max_length} tokens are longer than the draft model's "
            f"max_positions={config.max_positions}; use one with a longer context"
        )


def _head_shards(placement: Placement) -> int:
    return 1 if placement.mesh is None else placement.mesh.shape["tensor"]
