"""Blocks and chains: what is shared, copied, kept and forgotten, without a device."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from posttrain.rollout.blocks import BLOCK, BlockPool, Chain, Window

pytestmark = pytest.mark.fast

WORDS = tuple(range(100, 100 + 4 * BLOCK))


def written(blocks: BlockPool, tokens: Sequence[int], *, partial: bool = True) -> Chain:
    """A chain that holds these tokens, after what it could share."""
    chain = blocks.start(blocks.match(tokens, len(tokens)))
    assert blocks.extend(chain, len(tokens))
    blocks.widen(chain, len(chain.blocks))
    blocks.drop_source(chain)
    blocks.record(chain, tokens, len(tokens), partial=partial)
    return chain


def test_equal_beginnings_share_full_blocks_and_copy_the_last() -> None:
    blocks = BlockPool(12)
    first = written(blocks, WORDS[:40])
    match = blocks.match(WORDS[:40], 40)
    assert ([node.block for node in match.full], match.length) == (list(first.blocks[:2]), 40)
    assert match.partial is not None and match.partial.block == first.blocks[2]
    second = blocks.start(match)
    assert blocks.extend(second, 50)
    assert second.blocks[:2] == first.blocks[:2]
    assert not {*second.blocks[2:]} & {*first.blocks}
    assert second.source is match.partial
    assert blocks.used == 5
    blocks.drop_source(second)
    blocks.leave(first)
    blocks.leave(second)
    assert (blocks.used, blocks.available) == (0, 12)
    assert blocks.match(WORDS, len(WORDS)).length == 40


@pytest.mark.parametrize("length", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 40])
def test_a_match_ends_where_tokens_differ(length: int) -> None:
    blocks = BlockPool(12)
    written(blocks, WORDS[:40])
    match = blocks.match([*WORDS[:length], 7, 7, 7], length + 3)
    assert match.length == length
    assert len(match.full) == length // BLOCK
    assert blocks.match(WORDS, length).length == length


def test_an_owner_goes_on_in_the_block_that_others_found() -> None:
    """Its content grows; who copies it reads the beginning only."""
    blocks = BlockPool(12)
    owner = written(blocks, WORDS[:20])
    follower = blocks.start(blocks.match(WORDS[:20], 20))
    blocks.record(owner, WORDS, 28, partial=False)
    assert blocks.match(WORDS, 30).length == 28
    assert blocks.extend(owner, 40)
    blocks.record(owner, WORDS, 40, partial=False)
    assert blocks.match(WORDS, 60).length == 32
    assert follower.source is not None and follower.source.block == owner.blocks[1]


def test_equal_blocks_become_one() -> None:
    """Two that sampled the same tokens side by side."""
    blocks = BlockPool(12)
    one, other = Chain(), Chain()
    for chain in (one, other):
        assert blocks.extend(chain, 40)
    assert blocks.used == 6
    for chain in (one, other):
        blocks.record(chain, WORDS, 40, partial=False)
    assert one.blocks[:2] == other.blocks[:2] and one.blocks[2] != other.blocks[2]
    assert blocks.used == 4


def test_the_least_recently_used_is_forgotten_first_and_ends_before_beginnings() -> None:
    blocks = BlockPool(6)
    for start in (0, 1):
        blocks.leave(written(blocks, WORDS[start : start + 40]))
    assert blocks.available == 6
    blocks.leave(written(blocks, WORDS[:40]))  # used again
    new = Chain()
    assert blocks.extend(new, BLOCK)
    assert blocks.match(WORDS[:40], 40).length == 40
    assert blocks.match(WORDS[1:41], 40).length == 32
    assert blocks.extend(new, 4 * BLOCK)
    assert blocks.match(WORDS[:40], 40).length == 32
    assert blocks.match(WORDS[1:41], 40).length == 0
    assert not blocks.extend(new, 7 * BLOCK)
    assert len(new.blocks) == 4
    blocks.leave(new)
    assert blocks.available == 6


def test_new_weights_make_everything_unknown_but_take_nothing_away() -> None:
    blocks = BlockPool(8)
    gone, old = written(blocks, WORDS[:40]), written(blocks, WORDS[5:45])
    blocks.leave(gone)
    blocks.forget()
    assert blocks.available == 5
    assert blocks.match(WORDS[5:], 40).length == 0
    blocks.record(old, WORDS[5:], 45, partial=True)
    assert blocks.match(WORDS[5:], 40).length == 0
    new = written(blocks, WORDS[5:45])
    assert not {*new.blocks} & {*old.blocks}
    blocks.leave(old)
    blocks.leave(new)
    assert blocks.available == 8
    assert blocks.match(WORDS[5:], 40).length == 40


def test_blocks_of_one_space_serve_no_other() -> None:
    blocks, tokens = BlockPool(8), WORDS[:40]
    for space in (0, 1):
        chain = blocks.start(blocks.match(tokens, 40, space), space)
        assert not chain.blocks and blocks.extend(chain, 40)
        blocks.record(chain, tokens, 40, partial=True)
        assert blocks.match(tokens, 40, space).length == 40
        blocks.leave(chain)
    chain = blocks.start(blocks.match(tokens, 40, 1), 1)
    assert blocks.extend(chain, 7 * BLOCK)  # takes all of the other space
    assert [blocks.match(tokens, 40, space).length for space in (0, 1)] == [0, 40]


def test_layers_with_a_window_keep_what_is_still_read() -> None:
    """A prefix is shared while they have its end; else it is read again, and what others then read waits for that."""
    blocks = BlockPool(20, Window(BLOCK + 1, 4))
    assert blocks.windows is not None
    first = written(blocks, WORDS[:48], partial=False)
    assert list(first.windowed) == [0, 1, 2] and first.first == 0
    blocks.narrow(first, 48)
    (_, _), (table, _) = first.tables
    assert first.first == 2 and list(table) == [2, 2, 2]
    blocks.leave(first)
    assert blocks.match(WORDS, 48).length == 48
    other = written(blocks, WORDS[5:37])
    assert list(other.windowed) == [3, 1], "the free number, then that of what was passed last"
    assert blocks.match(WORDS, 48).length == 48
    third = written(blocks, WORDS[7:39])
    assert blocks.match(WORDS, 48).length == 0, "no number is left of its end"
    blocks.leave(other)
    blocks.leave(third)
    again = blocks.start(blocks.match(WORDS, 48))
    assert blocks.extend(again, 48)
    blocks.widen(again, 3)
    blocks.record(again, WORDS, 48, partial=False, level=1)
    assert list(again.blocks) == [node.block for node in again.nodes] and again.nodes[2].level == 1
    assert [blocks.windows.numbers[block] for block in again.blocks] == list(again.windowed)
    assert len(blocks.match(WORDS, 48).full) == 3
    blocks.settle()
    assert again.nodes[2].level == 0
    blocks.leave(again)
    blocks.forget()
    assert blocks.available == 20 and len(blocks.windows._free) == 4
