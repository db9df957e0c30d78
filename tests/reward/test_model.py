"""A reward model as a reward: the scores of transformers, however many at once; what raises it is learned."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from posttrain import Batch, Trainer, TrainSettings, save_model
from posttrain.data.chat import Renderer
from posttrain.data.tokenizer import load_tokenizer
from posttrain.losses.reward_model import BradleyTerryLoss
from posttrain.mesh import single_device_mesh
from posttrain.reward.model import ModelReward
from posttrain.rollout.trajectory import Trajectory
from posttrain.weights.load import init_model
from posttrain.weights.scalar_head import add_scalar_head, with_padding
from tests.rl.helpers import trajectory
from tests.stages.runs import INIT, lines, posttrain, rl_stage, write_run

BYTES = load_tokenizer("bytes")
PLAIN = Renderer(BYTES, chat=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model with random weights that are large enough to tell texts apart."""
    path = tmp_path_factory.mktemp("rewards") / "rm"
    fields = {**INIT, "vocab_size": BYTES.vocab_size, "initializer_range": 0.3}
    model = init_model(fields, dtype=jnp.float32, seed=5)
    add_scalar_head(model, seed=6)
    model.config = with_padding(model.config, BYTES.hf.pad_token_id, BYTES.stop_ids)
    save_model(model, path, tokenizer=BYTES)
    return path


def sampled(prompt: str, text: str) -> Trajectory:
    """Its last token is one that no tokenizer would write: what was sampled counts."""
    before = PLAIN.prompt([{"role": "user", "content": prompt}])
    tokens = [*before, *BYTES.encode(text), 7]
    return trajectory(text, prompt=prompt, tokens=tokens, num_prompt=len(before))


SAMPLES = [sampled("1+1=", "2"), sampled("what?", "a long\nanswer\nin lines"), sampled("x", "yz")]


def loaded(folder: Path, reduce: Any = "last", rows: int = 2) -> ModelReward:
    reward = ModelReward(str(folder), reduce, "reward_model")
    reward.load(single_device_mesh(), PLAIN, rows)
    return reward


def theirs(folder: Path, rows: list[list[int]]) -> list[np.ndarray]:
    """Of transformers, the score after every prefix."""
    torch = pytest.importorskip("torch", reason="needs torch, which the extra [test] installs on Python 3.11")
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        return [
            np.asarray([float(model(torch.tensor([row[: end + 1]])).logits[0, 0]) for end in range(len(row))])
            for row in rows
        ]


def test_scores_are_those_of_transformers(folder: Path) -> None:
    expected = theirs(folder, [list(sample.tokens) for sample in SAMPLES])
    last = [scores[-1] for scores in expected]
    assert np.ptp(last) > 1e-2
    np.testing.assert_allclose(loaded(folder)(SAMPLES), last, rtol=1e-4, atol=1e-5)


def test_every_step_counts_whatever_follows_it(folder: Path) -> None:
    """Also the last, which gets the newline that ended each step in training."""
    before = PLAIN.prompt([{"role": "user", "content": "what?"}])
    text, newline = "a long\nanswer\nin lines", ord("\n")
    tokens = [*before, *BYTES.encode(text)]
    samples = [
        trajectory(text, prompt="what?", tokens=[*tokens, *end], num_prompt=len(before))
        for end in ((), (BYTES.end_id,), (newline, BYTES.end_id), (ord(" "), newline))
    ]
    (expected,) = theirs(folder, [[*tokens, newline]])
    ends = [at for at, token in enumerate([*tokens, newline]) if token == newline]
    assert len(ends) == 3
    for reduce, value in (("min", expected[ends].min()), ("mean", expected[ends].mean())):
        np.testing.assert_allclose(loaded(folder, reduce)(samples), [value] * 4, rtol=1e-4, atol=1e-5)


def test_it_is_read_where_it_was_trained(tmp_path: Path) -> None:
    """The template writes a newline behind the token that stops: so ends every answer that it was trained on."""
    fields = {**INIT, "vocab_size": BYTES.vocab_size, "initializer_range": 0.3}
    model = init_model(fields, dtype=jnp.float32, seed=5)
    add_scalar_head(model, seed=6)
    model.config = with_padding(model.config, BYTES.hf.pad_token_id, BYTES.stop_ids)
    save_model(model, tmp_path / "rm", tokenizer=BYTES)
    chat = Renderer(BYTES, chat=True)
    question, answer = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}
    whole, before = chat.conversation([question, answer], first=1).tokens, chat.prompt([question])
    stop = max(at for at, token in enumerate(whole) if token in BYTES.stop_ids)
    assert len(whole) > stop + 1, "something follows"
    sample = trajectory("2", prompt="1+1=", tokens=list(whole[: stop + 1]), num_prompt=len(before))
    reward = ModelReward(str(tmp_path / "rm"), "last", "reward_model")
    reward.load(single_device_mesh(), chat, 2)
    trainer = Trainer(model, BradleyTerryLoss(), optax.sgd(0.0), TrainSettings(temperature=1.0, max_grad_norm=1.0))
    ids = np.asarray([whole], np.int32)
    ones = np.ones_like(ids)
    trained = Batch(
        tokens=ids, positions=np.arange(len(whole))[None].astype(np.int32), segments=ones, loss_weight=ones * 1.0
    )
    np.testing.assert_allclose(reward([sample]), trainer.scores(trained)[0, -1:], rtol=1e-5)
    cut = trajectory("2", prompt="1+1=", tokens=list(whole[:stop]), num_prompt=len(before))
    assert abs(reward([cut])[0] - reward([sample])[0]) > 1e-4


def test_another_tokenizer_sees_the_messages(folder: Path, tmp_path: Path) -> None:
    """The text rendered anew, and so without the odd last token."""
    other = tmp_path / "other"
    other.mkdir()
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    hf = load_tokenizer(str(folder)).hf
    hf.chat_template = "{{ messages[0].content }}"
    hf.save_pretrained(other)
    written = [PLAIN.completion(s.messages[0]["content"], s.text).tokens for s in SAMPLES]
    assert all(tokens != list(s.tokens) for tokens, s in zip(written, SAMPLES, strict=True))
    expected = [scores[-1] for scores in theirs(folder, written)]
    np.testing.assert_allclose(loaded(other)(SAMPLES), expected, rtol=1e-4, atol=1e-5)


def test_arguments_of_the_policys_template_are_not_the_reward_models(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = "{% if quiet %}quiet: {% endif %}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    policy = replace(BYTES, hf=copy.copy(BYTES.hf))._with_templates(template).with_template_args({"quiet": True})
    reward = ModelReward(str(folder), "last", "judge")
    reward.load(single_device_mesh(), Renderer(policy, chat=True), 2)
    told = " ".join(capsys.readouterr().out.split())
    assert "judge: " in told and "model.chat_template_args are not for it" in told
    tokens = reward._sequence(trajectory("2", prompt="1+1=")).tokens
    assert "quiet" not in BYTES.decode(tokens)


@pytest.mark.thorough
def test_reinforcement_learning_raises_the_score(folder: Path, tmp_path: Path) -> None:
    size = {"num_steps": 40, "prompts_per_step": 4, "group_size": 8}
    stage = rl_stage(rewards=[{"model": str(folder)}], **size, optimizer={"learning_rate": 5e-2})
    done = posttrain("run", write_run(tmp_path, stage))
    assert done.code == 0, done.err
    told = [line for line in lines(tmp_path / "out") if "grad_norm" in line]
    rewards = [line["reward"] for line in told]
    # A mean of four steps, 128 samples with a deviation of 1, has one of 0.09. Other seeds: it rose by 1.3 to 2.4.
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.5
    assert told[0]["rewards/reward_model/mean"] == pytest.approx(told[0]["reward"])


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"model": "plain"}, "plain is no reward model; set a ForSequenceClassification with one label"),
        ({"model": "nowhere/at/all"}, "nowhere/at/all"),
        ({}, "is a function (fn) or a reward model (model)"),
        ({"fn": "rewards_of_test.py:low", "reduce": "min"}, "reduce=min has no effect on a function"),
        ({"model": "plain", "args": {"a": 1}}, "a reward model (model) takes none"),
    ],
)
def test_what_is_wrong_with_a_reward_model(tmp_path: Path, reward: dict[str, Any], message: str) -> None:
    save_model(init_model({**INIT, "vocab_size": BYTES.vocab_size}, dtype=jnp.float32, seed=0), tmp_path / "plain")
    done = posttrain("check", write_run(tmp_path, rl_stage(rewards=[reward])))
    assert done.code != 0 and message in done.error, done.error
