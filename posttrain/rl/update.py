"""Updates of the actor from the batches of a step."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posttrain.batch import Batch
from posttrain.cluster.cluster import Cluster
from posttrain.metrics import Metrics, Timer
from posttrain.rl.metrics import sampler_disagrees
from posttrain.tracking.console import progress_bar
from posttrain.tree import Metric, added, replace

SUMMED = ("num_tokens",)
"""Metrics of an update that add up over several."""


def update(
    cluster: Cluster, parts: Sequence[Batch], learns: Sequence[bool], epochs: int, seed: int, timer: Timer
) -> Metrics:
    """One update for each part and epoch, skipped where not `learns`.

    If sampler and trainer disagree in the first update, there are no others: it changed no weights.
    """
    title, done, several = f"step {cluster.actor.step_number + 1}", list[Metrics](), len(parts) * epochs > 1
    with timer("update"), cluster.updating(), progress_bar(f"{title}: update", closing=False):
        for number in _order(len(parts), epochs, [seed, cluster.version]):
            part = _aged(parts[number], len(done)) if several else parts[number]
            told = cluster.update_actor(part, update=learns[number] and not cluster.warming_up)
            done.append({**told, **cluster.update_critic(part)})
            # One read of the device, where other updates would follow.
            if several and len(done) == 1 and bool(sampler_disagrees(told)):
                break
        jax.block_until_ready(done)
    return merged(done)


def _order(num_parts: int, epochs: int, seed: Sequence[int]) -> Iterator[int]:
    """Numbers of the parts: in order in the first epoch, then in a random one."""
    yield from range(num_parts)
    draw = np.random.default_rng(seed)
    for _ in range(epochs - 1):
        yield from map(int, draw.permutation(num_parts))


def _aged(batch: Batch, updates: int) -> Batch:
    """Batch before which there were updates on other parts: its tokens are so much older."""
    assert batch.staleness is not None, "batches of several updates carry their staleness"
    sampled = np.asarray(batch.loss_weight) > 0
    return replace(batch, staleness=np.where(sampled, np.asarray(batch.staleness) + updates, 0).astype(np.int32))


def merged(updates: Sequence[Mapping[str, Any]]) -> Metrics:
    """Metrics over several updates: means, maxima and quantiles over all tokens, the sum of `SUMMED`, the mean of other
    numbers over the updates that have them."""
    if len(updates) == 1:
        return dict(updates[0])
    found: Metrics = {}
    for name in dict.fromkeys(name for one in updates for name in one):
        values = [one[name] for one in updates if name in one]
        if isinstance(values[0], Metric):
            found[name] = functools.reduce(added, values)
        else:
            stacked = jnp.stack([jnp.asarray(value) for value in values])
            found[name] = stacked.sum(axis=0) if name in SUMMED else stacked.mean(axis=0)
    return found
