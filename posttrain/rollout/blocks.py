"""Block manager of the paged KV cache: free list, reference counts and prefix cache. Host only."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

BLOCK = 16
"""Positions in a block."""

Tokens = tuple[int, ...]


@dataclass(eq=False)
class Node:
    """Prefix-cache entry: a block with the keys and values of `tokens`, after those of its parents."""

    block: int
    tokens: Tokens
    """At most a block of tokens; later positions of the block are private to its owner."""
    parent: Node | None
    space: int = 0
    """See `Chain.space`."""
    children: dict[int, list[Node]] = field(default_factory=dict)
    """Child entries by first token; only full blocks have any."""
    routing: Int[np.ndarray, "T M k"] | None = None
    """Recorded experts of each token; None without recording."""
    level: int = 0
    """Number of prefill calls of the present plan that must run before the block can be read."""


class Match(NamedTuple):
    """Longest cached prefix of some tokens: in `full` blocks, and in the first positions of `partial`."""

    full: list[Node]
    partial: Node | None
    length: int


@dataclass(frozen=True)
class Window:
    """Blocks of the layers that read the newest positions of a sequence only."""

    positions: int
    """Positions that a query reads at most, its own among them."""
    blocks: int
    """Blocks in each lane."""

    def first(self, position: int) -> int:
        """Index of the first block that a query at a position or after it reads.

        >>> Window(20, 9).first(19), Window(20, 9).first(34), Window(20, 9).first(35)
        (0, 0, 1)
        """
        return max(0, position - self.positions + 1) // BLOCK


class WindowPool:
    """Blocks of one lane in layers with a window, each under a number of its own. A block of the other layers has one
    while a running sequence may read it, and afterwards until another needs it."""

    def __init__(self, window: Window, number: int):
        """`number`: blocks of the other layers."""
        self.first = window.first
        self.numbers = [-1] * number
        """Number of each block; -1: it has none."""
        self._free = list(range(window.blocks - 1, -1, -1))
        self._users = [0] * number
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Blocks that have a number and no users, the first to lose it first."""

    def hold(self, block: int) -> int:
        """Number of a block, a new one if it has none. There always is one: `window_blocks` counts them."""
        self._idle.pop(block, None)
        if self.numbers[block] < 0:
            if not self._free:
                self.drop(next(iter(self._idle)))
            self.numbers[block] = self._free.pop()
        self._users[block] += 1
        return self.numbers[block]

    def release(self, block: int, *, passed: bool) -> None:
        """`passed`: the sequence goes on, so that hardly any other will end here."""
        self._users[block] -= 1
        assert self._users[block] >= 0, block
        if self._users[block] == 0:
            self._idle[block] = None
            if passed:
                self._idle.move_to_end(block, last=False)

    def hand_over(self, block: int, twin: int) -> tuple[int, bool]:
        """Exchange a block of one user for its twin: the number from now on, and whether it is the block's own, since
        the twin had none."""
        if moved := self.numbers[twin] < 0:
            self.numbers[twin], self.numbers[block] = self.numbers[block], -1
            self._users[twin], self._users[block] = self._users[block], 0
        else:
            self.hold(twin)
            self.release(block, passed=False)
        return self.numbers[twin], moved

    def drop(self, block: int) -> None:
        """Free the number of a block without users, if it has one."""
        if self.numbers[block] >= 0:
            del self._idle[block]
            self._free.append(self.numbers[block])
            self.numbers[block] = -1


@dataclass(eq=False)
class Chain:
    """The blocks that hold one sequence from its first position on.

    A block that is not full belongs to a single chain, which appends to it; full blocks are immutable and may be shared
    (copy on write). A chain that continues after a `partial` match copies that block: it reads `source` once, in place
    of its own block, and writes the whole block to its own.
    """

    blocks: MutableSequence[int] = field(default_factory=lambda: array("i"))
    """Block numbers, as an array so that block tables are filled quickly."""
    source: Node | None = None
    nodes: list[Node] = field(default_factory=list)
    """Prefix-cache entries of the first blocks, which other requests can share."""
    generation: int = 0
    """Version of the weights that computed it; only blocks of the current version are shared."""
    space: int = 0
    """Prefix cache that it shares blocks with: equal tokens of different spaces have different keys and values."""
    windowed: MutableSequence[int] = field(default_factory=lambda: array("i"))
    """Numbers of the first blocks in layers with a window; those before `first` are given up."""
    first: int = 0
    source_windowed: int = 0
    """Number of the source."""

    @property
    def tables(self) -> Sequence[tuple[Sequence[int], int | None]]:
        """Numbers of the blocks and of the source, in each table of `Pool`. In that of windows the places that no
        query reads have a block of its own."""
        first, source = self.first, self.source
        windowed = array("i", [*list(self.windowed[first : first + 1]) * first, *self.windowed[first:]])
        return (
            (self.blocks, None if source is None else source.block),
            (windowed, None if source is None else self.source_windowed),
        )


class BlockPool:
    """Blocks of one lane (data shard). Sequences with equal prefixes share blocks.

    Blocks are reference-counted. A block without users stays in the prefix cache until it is evicted, least recently
    used first.
    """

    def __init__(self, number: int, window: Window | None = None):
        self.number = number
        self.windows = None if window is None else WindowPool(window, number)
        self.generation = 0
        self.drafted = np.zeros(number, np.int8)
        """Number of leading positions of each block that the draft model's pool holds too."""
        self._free = list(range(number - 1, -1, -1))
        self._users = [0] * number
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Without users, the least recently used first. A node stands before its parent: whoever uses it uses both."""
        self._nodes: dict[int, Node] = {}
        self._roots: dict[int, dict[int, list[Node]]] = {}
        """First entries of each space by first token."""
        self._pending: list[Node] = []

    @property
    def available(self) -> int:
        """Number of free and evictable blocks."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        return self.number - self.available

    def match(self, tokens: Sequence[int], limit: int, space: int = 0) -> Match:
        """Longest cached prefix of the first `limit` tokens in a space, of which all layers have what the next query
        reads."""
        full: list[Node] = []
        children = self._roots.get(space, {})
        length = 0
        while length < limit:
            rest = tuple(tokens[length : min(length + BLOCK, limit)])
            best, common = None, 0
            for child in children.get(rest[0], ()):
                here = common_length(child.tokens, rest)
                if here > common:
                    best, common = child, here
            if best is None:
                break
            length += common
            if common < BLOCK:
                return self._readable(Match(full, best, length))
            full.append(best)
            children = best.children
        return self._readable(Match(full, None, length))

    def _readable(self, match: Match) -> Match:
        if self.windows is None:
            return match
        numbers, count, lacking = self.windows.numbers, 0, -1
        for index, node in enumerate(match.full):
            if numbers[node.block] < 0:
                lacking = index
            if lacking < self.windows.first((index + 1) * BLOCK):
                count = index + 1
        last = match.partial
        if last is not None and numbers[last.block] >= 0 and lacking < self.windows.first(match.length):
            return match
        return Match(match.full[:count], None, count * BLOCK)

    def cost(self, match: Match, positions: int) -> int:
        """Number of available blocks that a chain of so many positions takes, shared ones included."""
        unused = sum(self._users[node.block] == 0 for node in match.full) if match.full else 0
        if match.partial is not None and self._users[match.partial.block] == 0:
            unused += 1
        return blocks_for(positions) - len(match.full) + unused

    def start(self, match: Match, space: int = 0) -> Chain:
        """Start a chain with the prefix that was matched in its space."""
        for node in match.full:
            self._use(node.block)
        if match.partial is not None:
            self._use(match.partial.block)
        chain = Chain(
            blocks=array("i", [node.block for node in match.full]),
            source=match.partial,
            nodes=list(match.full),
            generation=self.generation,
            space=space,
        )
        if self.windows is not None:
            chain.first = self.windows.first(match.length)
            chain.windowed = array("i", [-1] * chain.first)
            self.widen(chain, len(chain.blocks))
            if match.partial is not None:
                chain.source_windowed = self.windows.hold(match.partial.block)
        return chain

    def widen(self, chain: Chain, count: int) -> None:
        """Have numbers for the first so many blocks in layers with a window."""
        if self.windows is not None:
            chain.windowed.extend(map(self.windows.hold, chain.blocks[len(chain.windowed) : count]))

    def narrow(self, chain: Chain, position: int) -> None:
        """Give up what no query at a position or after it reads in layers with a window."""
        if self.windows is None:
            return
        first = self.windows.first(position)
        for block in chain.blocks[chain.first : first]:
            self.windows.release(block, passed=True)
        chain.first = max(chain.first, first)

    def extend(self, chain: Chain, positions: int) -> bool:
        """Allocate blocks for the first so many positions. Returns False, unchanged, if too few are available."""
        wanted = blocks_for(positions) - len(chain.blocks)
        if wanted > self.available:
            return False
        for _ in range(wanted):
            if not self._free:
                self._forget_oldest()
            block = self._free.pop()
            self._users[block] = 1
            self.drafted[block] = 0
            chain.blocks.append(block)
        return True

    def record(
        self,
        chain: Chain,
        tokens: Sequence[int],
        length: int,
        *,
        partial: bool,
        routing: Int[np.ndarray, "T M k"] | None = None,
        level: int = 0,
    ) -> None:
        """Add the first `length` positions of a chain, which hold `tokens`, to the prefix cache.

        A last block that is not full is added only with `partial`. A full block with a cached duplicate is replaced by
        it.
        """
        if chain.generation != self.generation:
            return
        nodes, growing = chain.nodes, None
        if nodes and len(nodes[-1].tokens) < BLOCK:
            # Its own block, in which there is more now.
            level = max(level, nodes[-1].level)
            self._unlink(nodes.pop())
            growing = len(nodes)
        while (start := len(nodes) * BLOCK) < length:
            end = min(start + BLOCK, length)
            if end - start < BLOCK and not partial and len(nodes) != growing:
                return
            if not self._add(chain, tuple(tokens[start:end]), None if routing is None else routing[start:end], level):
                return

    def has_more(self, chain: Chain, length: int) -> bool:
        """Return whether recording the full blocks of `length` positions would add an entry."""
        nodes = chain.nodes
        return length >= (len(nodes) + 1) * BLOCK or bool(nodes and len(nodes[-1].tokens) < BLOCK)

    def leave(self, chain: Chain) -> None:
        """Release the blocks of a chain."""
        self.drop_source(chain)
        # The last first: what comes later in a sequence is forgotten earlier.
        if self.windows is not None:
            for block in reversed(chain.blocks[chain.first : len(chain.windowed)]):
                self.windows.release(block, passed=False)
        for block in reversed(chain.blocks):
            self._drop(block)
        chain.blocks, chain.nodes, chain.windowed, chain.first = array("i"), [], array("i"), 0

    def drop_source(self, chain: Chain) -> None:
        """Release the copy source after it was read."""
        if chain.source is not None:
            if self.windows is not None:
                self.windows.release(chain.source.block, passed=False)
            self._drop(chain.source.block)
            chain.source = None

    def forget(self) -> None:
        """Clear the prefix cache, as after a weight update; running requests keep their blocks."""
        self.generation += 1
        for block in self._cached:
            self._free_block(block)
        self._cached.clear()
        self._nodes.clear()
        self._roots = {}

    def settle(self) -> None:
        """Mark recorded blocks as readable once the plan has run."""
        for node in self._pending:
            node.level = 0
        self._pending.clear()

    def _children(self, parent: Node | None, space: int) -> dict[int, list[Node]]:
        return self._roots.setdefault(space, {}) if parent is None else parent.children

    def _add(self, chain: Chain, part: Tokens, routing: np.ndarray | None, level: int) -> bool:
        """Add or reuse the cache entry of the first block without one. Returns False after the last block."""
        parent = chain.nodes[-1] if chain.nodes else None
        siblings = self._children(parent, chain.space).setdefault(part[0], [])
        index = len(chain.nodes)
        twin = next((node for node in siblings if node.tokens[: len(part)] == part), None)
        if twin is not None:
            if len(part) < BLOCK:
                return False
            self._use(twin.block)
            if self.windows is not None and chain.first <= index < len(chain.windowed):
                chain.windowed[index], moved = self.windows.hand_over(chain.blocks[index], twin.block)
                if moved and level > twin.level:
                    twin.level = level
                    self._pending.append(twin)
            self._drop(chain.blocks[index])
            chain.blocks[index] = twin.block
            chain.nodes.append(twin)
            return True
        own_routing = None if routing is None else routing.copy()
        node = Node(chain.blocks[index], part, parent, chain.space, routing=own_routing, level=level)
        if level:
            self._pending.append(node)
        siblings.append(node)
        self._nodes[node.block] = node
        chain.nodes.append(node)
        return len(part) == BLOCK

    def _use(self, block: int) -> None:
        self._cached.pop(block, None)
        self._users[block] += 1

    def _drop(self, block: int) -> None:
        self._users[block] -= 1
        assert self._users[block] >= 0, block
        if self._users[block] == 0:
            if block in self._nodes:
                self._cached[block] = None
            else:
                self._free_block(block)

    def _free_block(self, block: int) -> None:
        if self.windows is not None:
            self.windows.drop(block)
        self._free.append(block)

    def _forget_oldest(self) -> None:
        block, _ = self._cached.popitem(last=False)
        node = self._nodes[block]
        assert not node.children, "a parent is forgotten before its child"
        self._unlink(node)
        self._free_block(block)

    def _unlink(self, node: Node) -> None:
        children = self._children(node.parent, node.space)
        siblings = children[node.tokens[0]]
        siblings.remove(node)
        if not siblings:
            del children[node.tokens[0]]
        if node.parent is None and not children:
            del self._roots[node.space]
        del self._nodes[node.block]


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """
    >>> common_length((1, 2, 3), (1, 2, 4, 5))
    2
    """
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)


def blocks_for(positions: int) -> int:
    """
    >>> blocks_for(0), blocks_for(16), blocks_for(17)
    (0, 1, 2)
    """
    return -(-positions // BLOCK)


def window_blocks(positions: int, *, rows: int, steps: int, read_at_once: int) -> int:
    """Blocks that a lane needs at most in layers with a window: each row those of a window and of a dispatch, begun
    anywhere in a block, with the source of a copy, and all rows together what is read of prompts at once.

    >>> window_blocks(1024, rows=8, steps=32, read_at_once=2560)
    704
    """
    return rows * (blocks_for(positions + steps) + 2) + blocks_for(read_at_once)


def least_cache(max_length: int) -> int:
    """Positions that a lane must have for sequences of up to so many: one block more for the source of a copy, which
    its reader holds for one dispatch.

    >>> least_cache(64), least_cache(65)
    (80, 96)
    """
    return BLOCK * (blocks_for(max_length) + 1)
