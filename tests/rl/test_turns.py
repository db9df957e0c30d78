"""Turns in learning: rewards where they were given, advantages of each turn, rows of split samples."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from posttrain.batch import Batch, TokenStats
from posttrain.cluster.reference import FrozenModel
from posttrain.config import MeshSection, SamplingSection
from posttrain.data.chat import Renderer
from posttrain.data.tokenizer import load_tokenizer
from posttrain.environments.conversation import Environments
from posttrain.environments.types import Reply
from posttrain.losses.policy import GRPO, PolicyLoss, dr_grpo
from posttrain.losses.reduce import sequence_mean
from posttrain.mesh import make_mesh
from posttrain.reward.function import env_rewards
from posttrain.reward.types import Rewards
from posttrain.rl.assemble import assemble
from posttrain.rl.collector import fields_of, trajectory_of
from posttrain.rl.returns import GAE, STD_EPS, rewards_at_ends, turn_advantages, with_returns
from posttrain.rl.sampler import IssuedGroup, Sampler, collect
from posttrain.rl.store import Recorded, read_record, write_record
from posttrain.rollout.engine import NativeEngine
from posttrain.rollout.trajectory import Example, Trajectory, Turn
from posttrain.runtime.user_calls import UserCalls
from posttrain.tree import Mean, added
from tests.rl.helpers import trajectory
from tests.tiny import tiny_model

pytestmark = pytest.mark.fast


def conversation(*rewards: float | None, sample: int = 0) -> Trajectory:
    """Prompt of one token; turns of two tokens with one token between."""
    sampled = [False, *[own for _ in rewards for own in (True, True, False)][:-1]]
    plain = trajectory(tokens=list(range(1, len(sampled) + 1)), sample=sample)
    turns = [Turn(1 + 3 * n, 3 + 3 * n, reward) for n, reward in enumerate(rewards)]
    values: dict[str, Any] = {
        "logps": [-0.5 * own for own in sampled],
        "kept_logps": [0.0] * len(sampled),
        "versions": [0 if own else -1 for own in sampled],
    }
    return replace(plain, sampled=sampled, turns=turns, **values)


def test_rewards_stand_at_the_ends_of_their_turns() -> None:
    """The environment's at its turn, other rewards at the end of the sample; their sum is the sample's reward."""
    group = [conversation(0.5, None, 1.0), conversation(None, sample=1)]
    (values,) = rewards_at_ends([group], np.asarray([[4.0, -1.0]], np.float32), {"env": 2.0, "other": 1.0})
    assert_allclose(values[0][0], [0, 0, 1.0, 0, 0, 0, 0, 0, 3.0])
    assert_allclose(values[1][0], [0, 0, -1.0])
    assert env_rewards(group) == [1.5, None]


def test_advantages_of_turns() -> None:
    """The return from the turn on, against the samples of the group that have this turn."""
    group = [conversation(0.0, 1.0), conversation(1.0, 0.0, sample=1), conversation(0.0, sample=2)]
    rewards = np.asarray([[1.0, 1.0, np.nan]], np.float32)
    (values,) = turn_advantages([group], rewards, {"env": 1.0})
    assert_allclose([values[0][0][1], values[1][0][1]], [0.0, 0.0], atol=1e-6)
    second = 0.5 / (np.std([1.0, 0.0], ddof=1) + STD_EPS)
    assert_allclose([values[0][0][4], values[1][0][4]], [second, -second], rtol=1e-5)
    assert not values[0][0][3] and np.isnan(values[2][0][1])


def in_rows(*rewards: float | None, sample: int = 0, mixed: bool = False) -> Trajectory:
    """`conversation` with a row for each turn; `mixed`: the first turn in one row with the last, after the others."""
    whole = conversation(*rewards, sample=sample)
    rows = [
        replace(conversation(reward, sample=sample), turns=[Turn(1, 3, reward, n)]) for n, reward in enumerate(rewards)
    ]
    if mixed:
        last = conversation(rewards[0], rewards[-1], sample=sample)
        turns = [last.turns[0], last.turns[1]._replace(time=len(rewards) - 1)]
        rows = [*rows[1:-1], replace(last, turns=turns)]
    made = replace(rows[0], more=rows[1:])
    assert made.num_sampled == whole.num_sampled
    return made


@pytest.mark.parametrize("mixed", [False, True])
def test_credit_does_not_depend_on_rows(mixed: bool) -> None:
    """Returns, GAE and advantages of turns go through a sample in order of time, wherever its rows lie in the batch."""
    given: list[tuple[float | None, ...]] = [(0.5, None, 1.0), (None, 0.0, 0.0, 2.0), (1.0, 1.0, None)]
    whole = [conversation(*rewards, sample=n) for n, rewards in enumerate(given)]
    apart = [in_rows(*rewards, sample=n, mixed=mixed) for n, rewards in enumerate(given)]
    rewards, valid = np.asarray([[2.5, 2.0, 1.0]], np.float32), np.ones((1, 3), bool)
    table = np.random.default_rng(0).normal(size=(4, 8))

    def in_time(group: list[Trajectory], values: Any) -> list[list[float]]:
        """Values of each sample's sampled tokens in order of time."""
        made = [np.full(sample.num_sampled, np.nan) for sample in group]
        for one, sample, of_rows in zip(made, group, values, strict=True):
            for times, row in zip(sample.times(), of_rows, strict=True):
                one[times[times >= 0]] = row[times >= 0]
        return [one.tolist() for one in made]

    found = {}
    for name, group in {"whole": whole, "apart": apart}.items():
        turns, ends = turn_advantages([group], rewards, {"env": 1.0}), rewards_at_ends([group], rewards, {"env": 1.0})
        found[name] = [in_time(group, turns[0]), in_time(group, ends[0])]
        batch = assemble(
            [group], rewards, valid, like=group[0], row_tokens=12, num_rows=12, turns_PG=ends, chained=True
        )
        values = table[batch.samples, batch.times]
        for level in ("token", "turn"):
            settings = GAE(gamma=0.9, lam=0.8, whiten=False, level=level)  # type: ignore[arg-type]
            (made,), _ = with_returns([batch], [values], settings, None)
            assert made.samples is None and made.times is None
            for one in (made.advantages, made.returns):
                by_time = np.zeros(table.shape)
                by_time[batch.samples, batch.times] = np.where(batch.samples > 0, one, 0.0)
                found[name].append(by_time[1:].tolist())
    for one, other in zip(found["whole"], found["apart"], strict=True):
        for of_one, of_other in zip(one, other, strict=True):
            assert_allclose(of_other, of_one, atol=1e-6)
    assert np.abs(found["whole"][1][0]).sum() == 2.5 and found["whole"][2][0][0] != 0


@pytest.mark.parametrize("loss", [replace(GRPO, kl_coef=0.0), dr_grpo(10)], ids=["grpo", "dr_grpo"])
def test_a_sample_weighs_the_same_in_any_rows(loss: PolicyLoss) -> None:
    """A conversation of four turns beside one of one turn: value and gradient, also in micro-batches of a row each."""

    @jax.jit
    def gradient(logps: Any, batch: Batch) -> tuple[Any, Mean]:
        return jax.grad(lambda x: (lambda out: (out.total, out))(loss(TokenStats(logps=x), batch).loss), has_aux=True)(
            logps
        )

    advantages, valid = np.asarray([[1.0, 3.0]], np.float32), np.ones((1, 2), bool)
    means, gradients = [], []
    for long in (conversation(1.0, 1.0, 1.0, 1.0), in_rows(1.0, 1.0, 1.0, 1.0)):
        group = [long, conversation(1.0, sample=1)]
        batch = assemble([group], advantages, valid, like=long, row_tokens=14, num_rows=8, chained=True)
        logps = np.full(batch.shape, -0.5, np.float32)
        rows = [gradient(*jax.tree.map(lambda x, n=n: x[n : n + 1], (logps, batch))) for n in range(len(logps))]
        slope, whole = gradient(logps, batch)
        means += [whole.value(), functools.reduce(added, [mean for _, mean in rows]).value()]
        for one in (slope, np.concatenate([of_row for of_row, _ in rows])):
            gradients.append(np.zeros((3, 8)))
            np.add.at(gradients[-1], (batch.samples, batch.times), one)
    assert_allclose(means, means[0], rtol=1e-6)
    for one in gradients:
        assert_allclose(one[1:], gradients[0][1:], rtol=1e-5)
    if loss.reduce is sequence_mean:
        assert_allclose(means[0], -(0.5 * 1.0 + 0.5 * 3.0), rtol=1e-6)


def test_rows_of_a_sample_share_its_advantage() -> None:
    """A sample of two rows is two sequences of the batch; one that is left out is left out in both."""
    split = replace(conversation(1.0), more=[conversation(0.5)])
    group = [split, replace(conversation(1.0, sample=1), more=[conversation(1.0)])]
    advantages, valid = np.asarray([[2.0, 3.0]], np.float32), np.asarray([[True, False]])
    batch = assemble([group], advantages, valid, like=split, row_tokens=4, num_rows=4)
    assert_array_equal(batch.loss_weight.sum(axis=1), [2, 2, 0, 0])
    assert_array_equal(np.unique(batch.advantages), [0, 2])
    assert_array_equal(batch.sample_shares[:, 1], [0.5, 0.5, 0, 0])
    assert split.num_sampled == 4 and split.completion_tokens == [2, 3, 2, 3]


def test_the_record_keeps_turns_and_rows(tmp_path: Path) -> None:
    group = [replace(conversation(0.25, None), more=[conversation(1.0)]), conversation(None, sample=1)]
    total = np.asarray([[1.25, 0.0]], np.float32)
    rewards = Rewards(total_PG=total, parts_PG={"env": total}, errors=[], metrics={}, extras={})
    made = Recorded(before=0, step=1, version=0, groups_P=[group], rewards=rewards, advantages_PG=total, roles_PG=None)
    write_record(made, tmp_path / "00000001.parquet")
    back = read_record(tmp_path, 1)
    assert_array_equal(back.rewards.total_PG, total)
    for one, other in zip(group, back.groups_P[0], strict=True):
        assert len(one.rows) == len(other.rows)
        for row, read in zip(one.rows, other.rows, strict=True):
            assert (list(row.tokens), list(row.turns)) == (list(read.tokens), list(read.turns))


def test_other_processes_get_all_rows() -> None:
    one = replace(conversation(0.25, None), more=[conversation(1.0)])
    back = trajectory_of(fields_of(one), {0: one.example})
    assert back == replace(one, example=back.example, more=back.more) and len(back.rows) == 2
    assert list(back.more[0].turns) == list(one.more[0].turns)


class Echo:
    """Environment that answers every turn with the same word, three times."""

    def __init__(self) -> None:
        self.count = 0

    def reply(self, message: Any) -> Reply:
        self.count += 1
        return Reply(messages=[{"role": "user", "content": "+"}], done=self.count == 4, reward=1.0)


def test_conversations_with_the_engine() -> None:
    """Log-probabilities are those of one forward pass over the whole conversation; later turns read their history from
    the cache."""
    tokenizer = load_tokenizer("bytes")
    model = tiny_model(num_layers=2, windows=(None,), vocab_size=tokenizer.vocab_size, initializer_range=0.1)
    engine = NativeEngine(model, slots=8, max_length=256, decode_steps=8, tokenizer_decode=tokenizer.decode)
    renderer = Renderer(tokenizer, True)
    held = Environments(
        make=Echo, args={}, max_turns=8, row_tokens=256, split_turns=False,
        unfinished=0.0, calls=UserCalls("env.fn", timeout_s=20.0, concurrency=8), tool_format=None,
    )  # fmt: skip
    sampling = SamplingSection(max_tokens=40, stop_token_ids=tuple(range(0, 250, 5)))
    sampler = Sampler(
        engine=engine, renderer=renderer, sampling=sampling, max_prompt_tokens=200, seed=3,
        conversations=held,
    )  # fmt: skip
    messages: Any = [{"role": "user", "content": "Tell me something long enough. " * 5}]
    prompt = Example(index=0, row={}, messages=messages, prompt_tokens=renderer.prompt(messages), plain=False)
    groups = [IssuedGroup(number=n, example=prompt, version=0) for n in range(2)]
    (first, _) = found = asyncio.run(collect(sampler, groups, 3))
    hits = engine.metrics()["rollout/prefix_hit_rate"]
    again = asyncio.run(collect(sampler, groups, 3))
    assert [t.tokens for group in found for t in group] == [t.tokens for group in again for t in group]
    assert first[0].tokens != first[1].tokens and sum(len(one.turns) for one in first) > 6
    batch = assemble(
        [first], np.ones((1, 3), np.float32), np.ones((1, 3), bool), like=first[0], row_tokens=256, num_rows=3
    )
    model_logps = FrozenModel(model, make_mesh(MeshSection(), jax.devices()[:1]), temperature=1.0, rows=3).logps(batch)
    sampled = np.asarray(batch.loss_weight) > 0
    assert sampled.sum() == sum(one.num_sampled for one in first)
    assert_allclose(np.asarray(batch.sampler_logps)[sampled], model_logps[sampled], atol=2e-5)
    # Of a later turn's prompt all but the newest message is read from the cache.
    assert hits > 0.8
