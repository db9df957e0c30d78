"""Groups that are ahead, as data of a checkpoint and back."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from posttrain.data.tokenizer import load_tokenizer
from posttrain.reward.types import RewardError, Rewards
from posttrain.rl.collector import QueuedGroup, QueuedWave, new_wave, packed, unpacked
from posttrain.rl.sampler import IssuedGroup
from posttrain.rollout.trajectory import Trajectory, Turn
from posttrain.train.checkpoint import Checkpointer
from posttrain.tree import Mean
from tests.rl.helpers import example, trajectory


def same(one: Any, other: Any) -> None:
    if isinstance(one, np.ndarray):
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, Trajectory):
        for field in fields(one):
            same(getattr(one, field.name), getattr(other, field.name))
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            same(*pair)
    else:
        assert one == other


def test_a_queue_survives_a_checkpoint(tmp_path: Path) -> None:
    """With every field of a trajectory. Turned red by: a field that is left out, rows in another order."""
    asked = [example(n, text) for n, text in enumerate(("a", "bc", "d"))]
    experts = np.arange(12, dtype=np.int16).reshape(3, 2, 2)
    plain = replace(trajectory("b"), group=4, example=asked[0], experts=experts)
    own = replace(asked[0], messages=[{"role": "user", "content": "of the environment"}], prompt_tokens=[7, 8])
    row = replace(plain, example=own, tokens=[4, 5, 6], turns=[Turn(1, 3, 0.25)], experts=experts + 1)
    told = [*own.messages, {"role": "assistant", "content": "b"}]
    talk = replace(row, messages=told, error="it broke", stop="env_error", metrics={"moves": 2.0}, sample=1)
    talk = replace(talk, more=[replace(row, messages=told, tokens=[9, 8, 7])])
    other = replace(plain, example=asked[1], group=5, messages=[*asked[1].messages, told[-1]])
    rewards = Rewards(
        total_PG=np.asarray([[np.nan, 1 / 3]], np.float32),
        parts_PG={"low": np.asarray([[np.nan, 1 / 3]], np.float32)},
        errors=[RewardError(function="low", prompt=0, sample=0, kind="timeout", error="no answer")],
        metrics={"rewards/low/size": Mean(total=2.0, weight=3.0)},
        extras={"note": [None, "fine"]},
        notes=["took long"],
    )
    issued = [IssuedGroup(number=4 + n, example=asked[n], version=2) for n in range(3)]
    ahead = [
        QueuedGroup(issued=issued[0], group=[plain, talk]),
        QueuedGroup(issued=issued[1], group=[other]),
        QueuedGroup(issued=issued[2], group=None),
    ]
    waves = [QueuedWave(groups=ahead[:1], rewards=rewards, observed=True), QueuedWave(groups=ahead[1:])]
    queue = {2: waves, 3: [new_wave(issued[:1])]}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": jnp.ones(1)}, {"queue": packed(queue)})
        _, host = checkpointer.restore(1, {"w": jnp.ones(1)})
    found = unpacked(host["queue"], asked.__getitem__, load_tokenizer("bytes"))
    assert list(found) == [2, 3] and found[3] == queue[3]
    groups = [one for wave in found[2] for one in wave.groups]
    assert [one.issued for one in groups] == issued and groups[2].group is None
    for one, again in zip(ahead[:2], groups[:2], strict=True):
        same(list(one.group or ()), list(again.group or ()))
    (first, second), scored = found[2], found[2][0].rewards
    assert scored is not None and second.rewards is None and first.observed and not second.observed
    np.testing.assert_array_equal(scored.total_PG, rewards.total_PG)
    assert scored.total_PG.dtype == np.float32
    for name in ("errors", "metrics", "extras", "notes"):
        assert getattr(scored, name) == getattr(rewards, name)


def test_an_empty_queue() -> None:
    assert unpacked(packed({}), lambda row: example(row, ""), load_tokenizer("bytes")) == {}
