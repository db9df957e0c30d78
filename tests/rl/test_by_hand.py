"""Loop by hand from public names: it learns, and its first update is on policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import optax
import pytest

import posttrain as pt
from posttrain.errors import ConfigError, RunError
from tests.rl.helpers import example, trajectory
from tests.tiny import tiny_model

ROWS = [{"question": f"{n}+1", "answer": str(n + 1)} for n in range(4)]


def low(completion_tokens: Any, **_: Any) -> list[float]:
    return [float(np.mean([token < 128 for token in tokens])) for tokens in completion_tokens]


def test_examples_take_a_template() -> None:
    tokenizer = pt.load_tokenizer("bytes")
    made = pt.rl.make_examples(ROWS, tokenizer, prompt="{question}=", chat=False)
    assert [one.prompt_tokens for one in made] == [example(0, f"{n}+1=").prompt_tokens for n in range(4)]
    assert made[2].row["answer"] == "3" and made[0].plain


@pytest.mark.thorough
def test_grpo_by_hand_learns() -> None:
    """Red if the batch lost the advantages, or the engine kept the weights of the start."""
    tokenizer, model = pt.load_tokenizer("bytes"), tiny_model(vocab_size=261)
    loss = pt.PolicyLoss(clip_low=0.2, clip_high=0.28, reduce=pt.losses.token_mean)
    trainer = pt.Trainer(model, loss, optax.adam(1e-2), pt.TrainSettings(temperature=1.0, max_grad_norm=1.0))
    engine = pt.NativeEngine(model, slots=16, max_length=16, decode_steps=4, tokenizer_decode=tokenizer.decode)
    sampler, rubric = pt.rl.make_sampler(engine, tokenizer, max_tokens=4), pt.rl.make_rubric(low)
    examples = pt.rl.make_examples(ROWS, tokenizer, prompt="{question}=", chat=False)
    means = []
    for step in range(8):
        groups = pt.rl.sample(sampler, examples, 4, step)
        rewards = pt.rl.score(rubric, groups, step).total_PG
        batch = pt.rl.make_batch(groups, pt.rl.standardized(rewards), row_tokens=16)
        before = trainer.params
        metrics = pt.to_host(trainer.step(batch))
        assert all(array.is_deleted() for array in before.values()), "a step donates what it replaces"
        engine.update_weights(model, step + 1)
        means.append(float(rewards.mean()))
        assert metrics["ratio/mean"] == pytest.approx(1.0, abs=1e-6)
    assert groups[0][0].versions[-1] == 7 and trainer.num_programs == 1
    assert np.mean(means[-2:]) > np.mean(means[:2]) + 0.1, means


def test_samples_without_a_reward_are_dropped() -> None:
    groups = [[trajectory(tokens=range(2 + p + g), sample=g) for g in range(4)] for p in range(4)]
    advantages = np.ones((4, 4), np.float32)
    whole = pt.rl.make_batch(groups, advantages, row_tokens=16)
    advantages[1] = np.nan
    part = pt.rl.make_batch(groups, advantages, row_tokens=16)
    assert whole.loss_weight.shape == part.loss_weight.shape
    dropped = sum(one.num_sampled for one in groups[1])
    assert (whole.loss_weight > 0).sum() - (part.loss_weight > 0).sum() == dropped


def test_a_sampler_of_another_temperature_is_refused() -> None:
    tokenizer, model = pt.load_tokenizer("bytes"), tiny_model(vocab_size=261)
    engine = pt.NativeEngine(model, slots=8, max_length=16, decode_steps=4, tokenizer_decode=tokenizer.decode)
    examples = pt.rl.make_examples(ROWS, tokenizer, prompt="{question}=", chat=False)

    def batch_at(*temperatures: float) -> pt.Batch:
        groups = []
        for temperature in temperatures:
            sampler = pt.rl.make_sampler(engine, tokenizer, max_tokens=4, temperature=temperature)
            groups += pt.rl.sample(sampler, examples[:1], 4, 0)
        return pt.rl.make_batch(groups, np.ones((len(groups), 4), np.float32), row_tokens=16)

    settings = pt.TrainSettings(temperature=1.0, max_grad_norm=1.0, skip_update=pt.rl.SamplerGate(rounding=pt.rl.EXACT))
    trainer = pt.Trainer(model, replace(pt.losses.GRPO, kl_coef=0.0), optax.adam(1e-3), settings)
    with pytest.raises(ConfigError, match=r"sampled at temperature 0.3, .*TrainSettings\(temperature=1\)"):
        trainer.step(batch_at(0.3))
    with pytest.raises(ConfigError, match="samples were drawn at temperatures"):
        batch_at(0.3, 1.0)
    assert trainer.step_number == 0
    # The gate of a run, on samples of weights that are not the trainer's.
    good = batch_at(1.0)
    pt.rl.check_agreement(trainer.step(good), 1)
    stale = replace(good, sampler_logps=good.sampler_logps + 0.5 * (good.loss_weight > 0))
    metrics = trainer.step(stale)
    assert pt.to_host(metrics)["update_skipped"] == 1
    with pytest.raises(RunError, match="step 2: sampler and trainer disagree by"):
        pt.rl.check_agreement(metrics, 2)
    engine.close()
