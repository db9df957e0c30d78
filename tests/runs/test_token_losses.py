"""Loss of a recorded step token by token: shares add up to the logged loss, and the browser shows them."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.batch import Batch
from posttrain.losses.reduce import ConstantLength, Reduction, sequence_mean, sequence_total, token_mean
from posttrain.runs.replay import shares

REDUCTIONS = {"token": token_mean, "sequence": sequence_mean, "total": sequence_total, "constant": ConstantLength(7)}


@pytest.mark.fast
@pytest.mark.parametrize("reduce", REDUCTIONS.values(), ids=REDUCTIONS)
def test_shares_are_the_total(reduce: Reduction) -> None:
    """Red if a token's value counts without the weight that its sequence gives it."""
    draw = np.random.default_rng(0)
    weight = (draw.random((2, 8)) > 0.4).astype(np.float32)
    segments = np.asarray([[1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 2, 2, 2, 3, 3, 3]], np.int32)
    weight *= segments > 0
    batch = Batch(tokens=segments, positions=segments, segments=segments, loss_weight=weight)
    values = draw.normal(size=(2, 8)).astype(np.float32)
    found, total = shares(reduce, values, batch)
    whole = reduce(jnp.asarray(values), jnp.asarray(weight), jnp.asarray(segments))
    assert math.isclose(found.sum(), float(whole.total), rel_tol=1e-5) and total == float(whole.weight)
    assert (found[weight == 0] == 0).all() and (found[weight > 0] != 0).all()
