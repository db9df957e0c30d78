"""Groups to rows: nothing lost, nothing moved, alignment kept."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from posttrain.rl.assemble import assemble
from tests.rl.helpers import trajectory

pytestmark = pytest.mark.fast

ONE = np.ones((1, 1), np.float32)


def test_trajectories_are_packed_with_their_arrays_and_invalid_ones_left_out() -> None:
    group = [
        trajectory(tokens=[1, 2, 3], num_prompt=1),
        trajectory(tokens=[4, 5], num_prompt=1, sample=1),
        trajectory(tokens=[6, 7, 8, 9], num_prompt=2, sample=2),
    ]
    advantages = np.asarray([[0.5, 9.0, -1.0]], np.float32)
    batch = assemble([group], advantages, np.asarray([[True, False, True]]), like=group[0], row_tokens=8, num_rows=3)
    assert_array_equal(batch.tokens[0], [1, 2, 3, 6, 7, 8, 9, 0])
    assert_array_equal(batch.positions[0], [0, 1, 2, 0, 1, 2, 3, 0])
    assert_array_equal(batch.segments[0], [1, 1, 1, 2, 2, 2, 2, 0])
    assert_array_equal(batch.loss_weight[0], [0, 1, 1, 0, 0, 1, 1, 0])
    assert_allclose(batch.advantages[0], [0, 0.5, 0.5, 0, 0, -1, -1, 0])
    assert_allclose(batch.sampler_logps[0], [0, -0.5, -0.5, 0, 0, -0.5, -0.5, 0])
    assert not batch.segments[1:].any()
    assert batch.ref_logps is None


def test_where_a_token_was_drawn_stands_beside_it() -> None:
    """Its probability there, and how many updates ago that was; of the prompt nothing."""
    sample = replace(trajectory(tokens=[1, 2, 3], num_prompt=1), kept_logps=[0.0, -0.2, 0.0], versions=[-1, 3, 5])
    made = {
        version: assemble([[sample]], ONE, ONE > 0, like=sample, row_tokens=4, num_rows=1, version=version)
        for version in (None, 5)
    }
    for batch in made.values():
        assert_allclose(batch.sampler_logps[0], [0, -0.5, -0.5, 0])
        assert_allclose(batch.behaviour_logps[0], [0, -0.3, -0.5, 0])
    assert made[None].staleness is None
    assert_array_equal(made[5].staleness[0], [0, 2, 0, 0])


@pytest.mark.parametrize(("rows", "expected"), [(1, 2), (2, 2), (3, 4), (5, 8), (9, 16), (16, 16)])
def test_recorded_experts_take_no_more_rows_than_an_eighth_a_quarter_a_half_or_all(rows: int, expected: int) -> None:
    sample = replace(trajectory(tokens=[1, 2, 3]), experts=np.zeros((3, 2, 3), np.int16))
    group, advantages = [[sample] * rows], np.ones((1, rows), np.float32)
    batch = assemble(group, advantages, advantages > 0, like=group[0][0], row_tokens=4, num_rows=16)
    assert {len(array) for array in vars(batch).values() if array is not None} == {expected}
    plain = [[replace(sample, experts=None)] * rows]
    batch = assemble(plain, advantages, advantages > 0, like=plain[0][0], row_tokens=4, num_rows=16)
    assert len(batch.tokens) == 16


def test_every_valid_token_stands_exactly_once() -> None:
    draw = np.random.default_rng(0)
    number = iter(range(1, 10_000))
    groups = [
        [trajectory(tokens=[next(number) for _ in range(draw.integers(2, 17))], sample=g) for g in range(5)]
        for _ in range(7)
    ]
    valid = draw.random((7, 5)) < 0.8
    batch = assemble(groups, np.ones((7, 5), np.float32), valid, like=groups[0][0], row_tokens=16, num_rows=35)
    expected = sorted(t for p, group in enumerate(groups) for g, s in enumerate(group) if valid[p, g] for t in s.tokens)
    assert sorted(batch.tokens[batch.segments > 0].tolist()) == expected
    starts = (batch.positions == 0) & (batch.segments > 0)
    assert starts.sum() == valid.sum()
    assert not batch.loss_weight[starts].any()
