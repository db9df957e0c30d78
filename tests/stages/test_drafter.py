"""Block drafters: their statistics beside a naive twin, the stage that trains them, its files, and refusals."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from posttrain.batch import Batch, DraftStats
from posttrain.cluster.cluster import DrafterLearner
from posttrain.config import BlockDrafts, MeshSection, RLSection
from posttrain.config.rollout import OnlineDrafterOptimizer, drafts_of
from posttrain.config.yaml_file import load_config
from posttrain.data.tokenizer import load_tokenizer
from posttrain.errors import ConfigError
from posttrain.losses.distill import PLACE_DECAY, BlockDraftLoss
from posttrain.mesh import make_mesh
from posttrain.models.decoder import Decoder
from posttrain.models.drafter import SHORTENED, DrafterConfig, block_stats, propose
from posttrain.rollout.drafting import Speculation
from posttrain.rollout.engine import NativeEngine
from posttrain.stages.online import one_process
from posttrain.train.objective import TrainSettings
from posttrain.train.trainer import Trainer
from posttrain.train.transformations import make_optimizer
from posttrain.tree import replace
from posttrain.weights.drafter import (
    StoredDrafter,
    attach_drafter,
    check_drafter,
    described,
    read_drafter,
    save_drafter,
)
from posttrain.weights.load import init_model
from posttrain.weights.state import DRAFTER, ModelWeights
from tests.plan.test_plan import COUNTERS, beside_of, stage_of, weights_on
from tests.stages.runs import INIT, lines, posttrain, rl_stage, sft_stage, write_run
from tests.tiny import tiny_config, tiny_model

TOKENS, WINDOW = 3, 2


def drafted(**changes: Any) -> Decoder:
    model = tiny_model(num_layers=1, windows=(None,), vocab_size=16)
    sizes: dict[str, Any] = {"tokens": TOKENS, "window": WINDOW, "layers": 1} | changes
    attach_drafter(model, DrafterConfig(embed_dim=32, vocab_size=16, **sizes), seed=0)
    assert model.drafter is not None
    out = model.drafter.weights["follows_out"]
    out[...] = 0.3 * jax.random.normal(jax.random.key(1), out[...].shape)
    return model


def packed(rows: int = 2, seed: int = 0) -> Batch:
    """Sequences of 9, 5 and 6 tokens beside padding, the loss on all but their first token."""
    draw, lengths = np.random.default_rng(seed), (9, 5, 6)
    segments = np.concatenate([np.full(n, i + 1) for i, n in enumerate(lengths)] + [np.zeros(4)]).astype(np.int32)
    positions = np.concatenate([np.arange(n) for n in (*lengths, 4)]).astype(np.int32)
    weight = ((positions > 0) & (segments > 0)).astype(np.float32)
    tokens = draw.integers(0, 16, (rows, len(segments))).astype(np.int32)
    tile = (rows, 1)
    return Batch(
        tokens=tokens,
        positions=np.tile(positions, tile),
        segments=np.tile(segments, tile),
        loss_weight=np.tile(weight, tile),
    )


@jax.jit
def statistics(model: Decoder, batch: Batch) -> tuple[jax.Array, DraftStats]:
    assert model.drafter is not None
    tokens, *others = map(jnp.asarray, (batch.tokens, batch.positions, batch.segments))
    hidden = model(tokens, *others)[0]
    embedded = model.embed(tokens, jnp.dtype(jnp.float32), None)
    return hidden, block_stats(model.drafter, batch, hidden, embedded, model.logits)


def naive(model: Decoder, batch: Batch, hidden: np.ndarray) -> list[dict[str, np.ndarray]]:
    """Block by block, token by token, of each row."""
    assert model.drafter is not None
    config, arrays = model.drafter.config, model.drafter.arrays()
    table, found, proposed = np.asarray(model.embed.embedding[...]), [], jax.jit(partial(propose, config))
    probabilities, inner = jax.jit(lambda x: jax.nn.softmax(model.logits(x))), np.asarray(arrays["follows_in"])
    for tokens, segments, states in zip(batch.tokens, batch.segments, hidden, strict=True):
        length = len(tokens)
        row = {name: np.zeros(length) for name in ("order", "divergence", "overlap", "reached")}
        targets = np.asarray(probabilities(states[None])[0])
        for number, start in enumerate(range(int(tokens.sum()) % config.tokens, length, config.tokens)):
            if segments[start] == 0:
                continue
            most = number // SHORTENED % (config.window + 1) if number % SHORTENED == 0 else config.window
            before = [i for i in range(max(start - config.window, 0), start) if segments[i] == segments[start]]
            before = before[len(before) - min(most, len(before)) :]
            window = np.zeros((1, config.window, states.shape[-1]), np.float32)
            window[0, config.window - len(before) :] = states[before]
            newest = model.embed.scale * table[tokens[start]][None]
            known = jnp.asarray([len(before)], jnp.int32)
            drafts, reached = np.asarray(probabilities(proposed(arrays, window, known, newest))[0]), 1.0
            for place in range(config.tokens):
                at = start + 1 + place
                if at >= length or segments[at] != segments[start]:
                    break
                last = model.embed.scale * table[tokens[at - 1]]
                low = last / np.sqrt(np.mean(last**2) + 1e-6) @ inner
                q, p = drafts[place] * np.exp(low @ np.asarray(arrays["follows_out"])), targets[at - 1]
                q = q / q.sum()
                reached *= np.minimum(p, q).sum()
                row["order"][at], row["divergence"][at] = place + 1, (p * np.log(p / q)).sum()
                row["overlap"][at], row["reached"][at] = np.minimum(p, q).sum(), reached
        found.append(row)
    return found


def test_statistics_are_those_of_a_naive_twin() -> None:
    """Hidden states are those before the newest token and of its sequence alone, targets those behind it."""
    model, batch = drafted(), packed(rows=1)
    assert model.drafter is not None
    hidden, stats = statistics(model, batch)
    for row, expected in enumerate(naive(model, batch, np.asarray(hidden))):
        for name, values in expected.items():
            np.testing.assert_allclose(getattr(stats, name)[row], values, rtol=2e-4, atol=2e-5, err_msg=name)
    output = BlockDraftLoss()(stats, batch)
    order, kl = np.asarray(stats.order), np.asarray(stats.divergence)
    weight = np.where((order > 0) & (np.asarray(batch.loss_weight) > 0), PLACE_DECAY ** (order - 1.0), 0.0)
    assert output.loss.value() == pytest.approx((weight * kl).sum() / weight.sum(), rel=1e-5)
    assert 1 < output.metrics["drafter/length"].value() < 1 + TOKENS


def trainer_of(model: Decoder) -> Trainer:
    """Trainer of a drafter, whose program all tests share."""
    settings = TrainSettings(temperature=1.0, max_grad_norm=1.0, micro_batch_rows=2)
    optimizer = make_optimizer(OnlineDrafterOptimizer(learning_rate=1e-2), 12, 0, model=model)
    return Trainer(model, BlockDraftLoss(), optimizer, settings)


def test_the_model_stays_as_it_is_and_the_drafter_learns(tmp_path: Path) -> None:
    """Micro-batches change nothing; the files hold what was trained."""
    model, batch = drafted(), packed(rows=4)
    before = {path: np.asarray(x) for path, x in ModelWeights(model).read().items()}
    trainer = trainer_of(model)
    losses = [float(trainer.step(batch)["loss"].value()) for _ in range(12)]
    assert losses[-1] < 0.7 * losses[0]
    for path, x in ModelWeights(model).read().items():
        assert np.array_equal(x, before[path]) != path.startswith(DRAFTER) or path.endswith("norm"), path
    save_drafter(model, tmp_path / "drafter")
    stored = read_drafter(tmp_path / "drafter")
    assert model.drafter is not None and stored.config == model.drafter.config
    assert all(np.array_equal(x, stored.arrays[name]) for name, x in model.drafter.arrays().items())
    again = tiny_model(num_layers=1, windows=(None,), vocab_size=16)
    attach_drafter(again, stored.config, seed=1, arrays=stored.arrays)
    assert again.drafter is not None and list(again.drafter.arrays()) == list(model.drafter.arrays())
    assert all(np.array_equal(x, stored.arrays[name]) for name, x in again.drafter.arrays().items())
    check_drafter(stored, model.config, "here")
    for others in ({"num_layers": 2}, {"vocab_size": 32}):
        other = tiny_config(**{"num_layers": 1, "windows": (None,), "vocab_size": 16} | others)
        with pytest.raises(ConfigError, match="trained with a qwen3 of 1 layers"):
            check_drafter(stored, other, "here")
    weights = tmp_path / "drafter" / "drafter.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ConfigError, match="damaged"):
        read_drafter(tmp_path / "drafter")


def test_beside_an_actor() -> None:
    """A drafter learns from the actor's weights of now, which stay as they are; the engine drafts with a copy; and a
    restored drafter goes on as if it had never stopped."""
    actor, batch = tiny_model(num_layers=1, windows=(None,), vocab_size=16), packed(rows=4)
    trained = Trainer(actor, BlockDraftLoss(), optax.sgd(0.1), TrainSettings(temperature=1.0, max_grad_norm=1.0))
    learner = DrafterLearner(trainer_of(drafted()), trained)
    moved = {path: 1.2 * x for path, x in ModelWeights(actor).read().items()}
    ModelWeights(actor).write(moved)
    beside = drafted()
    ModelWeights(beside).write(moved)
    found, expected = learner.step(replace(batch, advantages=batch.loss_weight)), trainer_of(beside).step(batch)
    assert found["drafter/kl"].value() == expected["drafter/kl"].value()
    assert found.keys() == {f"drafter/{name}" for name in ("kl", "overlap", "length", "grad_norm", "update_skipped")}
    assert all(np.array_equal(x, moved[path]) for path, x in ModelWeights(actor).read().items())

    config = DrafterConfig(embed_dim=32, vocab_size=16, tokens=TOKENS, window=WINDOW, layers=1)
    arrays = {name: np.asarray(x) for name, x in learner.weights.items()}
    stored = StoredDrafter(config=config, target=described(actor.config), arrays=arrays)
    speculation = Speculation(tokens=TOKENS, block=stored)
    engine = NativeEngine(actor, slots=2, max_length=16, decode_steps=4, tokenizer_decode=None, speculation=speculation)
    learner.step(batch)
    engine.update_drafter(given := {name: jnp.array(x) for name, x in learner.weights.items()})
    handed = {name: np.asarray(x) for name, x in learner.weights.items()}
    for x in given.values():
        x.delete()  # as an update may, to which they are donated
    state = {name: jax.tree.map(np.asarray, x) for name, x in learner.state().items()}
    third = learner.step(batch)["drafter/kl"].value()
    drafting = engine._runner.drafter
    assert drafting is not None and all(np.array_equal(x, handed[name]) for name, x in drafting.weights.items())
    resumed = DrafterLearner(trainer_of(drafted()), trained)
    resumed.restore(jax.tree.map(jnp.asarray, state))
    assert resumed.trainer.step_number == 2 and resumed.step(batch)["drafter/kl"].value() == third


def test_drafts_in_one_word() -> None:
    assert drafts_of("block=some/run") == BlockDrafts(path="some/run")  # type: ignore[arg-type]
    assert drafts_of("block=run:3").tokens == 3
    with pytest.raises(ConfigError, match="drafter.json"):
        read_drafter("/nowhere")


def test_a_drafter_is_trained_where_the_model_samples_for_its_updates(tmp_path: Path) -> None:
    rollout = {"speculative": {"kind": "block", "path": "nowhere", "optimizer": {}}}
    common = {"dataset": {"path": "rows.jsonl"}, "sampling": {"max_tokens": 6}, "row_tokens": 32, "rollout": rollout}
    for kind, more in (("online_preference", {"rewards": [{"fn": "a.py:b"}]}), ("distill", {"on_policy": 1.0})):
        teachers = {"teachers": [{"path": "teacher"}]} if kind == "distill" else {}
        file = write_run(tmp_path, {"kind": kind, "num_steps": 2, **common, **more, **teachers})
        with pytest.raises(ConfigError, match="drafters are trained in stages of kind rl"):
            load_config(file)
    section = load_config(write_run(tmp_path, rl_stage(rollout=rollout))).stages[0]
    assert isinstance(section, RLSection) and "speculative.optimizer" in str(one_process(section))
    drafts = section.rollout.speculative
    with pytest.raises(ConfigError, match="generate: speculative: optimizer"):
        Speculation.of(drafts, drafted(), load_tokenizer("bytes"), "generate: speculative")
    for name in ("ema", "qk_clip"):
        bad = {"speculative": {**rollout["speculative"], "optimizer": {name: {"decay": 0.9} if name == "ema" else 9.0}}}
        with pytest.raises(ConfigError, match=f"optimizer.{name}: a drafter"):
            load_config(write_run(tmp_path, rl_stage(rollout=bad)))


@pytest.mark.thorough
def test_on_a_mesh() -> None:
    """Eight devices give the loss of one."""
    batch, found = packed(rows=8), []
    for section in (None, MeshSection(data=2, fsdp=2, tensor=2)):
        model = drafted()
        trainer = Trainer(
            model,
            BlockDraftLoss(),
            optax.sgd(0.1),
            TrainSettings(temperature=1.0, max_grad_norm=1.0),
            mesh=None if section is None else make_mesh(section),
        )
        found.append([float(trainer.step(batch)[name].value()) for name in ("loss", "drafter/length") for _ in "12"])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)


def stage(**changes: Any) -> dict[str, Any]:
    return {
        "kind": "drafter",
        "dataset": {"path": "rows.jsonl", "chat": False},
        "num_steps": 4,
        "batch_rows": 4,
        "row_tokens": 16,
        "tokens": 2,
        "window": 3,
        "optimizer": {"learning_rate": 1e-2, "schedule": "constant"},
    } | changes


def drafts_in(folder: Path) -> dict[str, Any]:
    return {"kind": "block", "path": str(folder)}


@pytest.mark.thorough
def test_the_stage_resumes_and_drafts_for_its_model(tmp_path: Path) -> None:
    model, trained = tmp_path / "base" / "out" / "0-sft" / "model", tmp_path / "whole" / "out"
    base = write_run(tmp_path / "base", sft_stage(num_steps=1))
    assert posttrain("run", base).code == 0
    source = {"model": {"path": str(model)}}
    held_out = {"path": "rows.jsonl", "chat": False}
    whole = write_run(tmp_path / "whole", stage(eval_dataset=held_out, checkpoint_every=2), **source)
    assert posttrain("check", whole).code == 0
    assert posttrain("run", whole).code == 0
    halves = write_run(tmp_path / "halves", stage(num_steps=2, eval_dataset=held_out, checkpoint_every=2), **source)
    assert posttrain("run", halves).code == 0
    assert posttrain("run", halves, "stages.0.num_steps=4").code == 0
    files = [tmp_path / name / "out" / "0-drafter" / "model" / "drafter.safetensors" for name in ("whole", "halves")]
    assert files[0].read_bytes() == files[1].read_bytes()
    result = json.loads((trained / "0-drafter" / "result.json").read_text())
    assert result["after"]["eval/drafter/kl"] < result["before"]["eval/drafter/kl"]
    plain = posttrain("generate", model, "1 + 1 =", "--max-tokens", "8", "--temperature", "0")
    drafts = ("--speculative", f"block={trained}")
    again = posttrain("generate", model, "1 + 1 =", "--max-tokens", "8", "--temperature", "0", *drafts)
    assert plain.code == 0 and again.code == 0, again.error
    assert plain.out == again.out
    rl = rl_stage(num_steps=2, rollout={"slots": 4, "speculative": drafts_in(trained)})
    sampled = write_run(tmp_path / "rl", rl, **source)
    assert posttrain("run", sampled, "stages.0.num_steps=1").code == 0 and posttrain("run", sampled).code == 0
    found = lines(tmp_path / "rl" / "out", "0-rl")
    assert sum(line.get("rollout/speculative/share", 0.0) for line in found) > 0
    together = rl_stage(num_steps=2, rollout={"slots": 4, "speculative": {**drafts_in(trained), "optimizer": {}}})
    whole_rl = write_run(tmp_path / "learns", together, **source)
    assert posttrain("run", whole_rl).code == 0
    for left, right in zip(found, lines(tmp_path / "learns" / "out", "0-rl"), strict=True):
        assert all(left[name] == right[name] for name in ("loss", "reward", "grad_norm") if name in left)
        assert "loss" not in right or right["drafter/length"] > 1
    halves_rl = write_run(tmp_path / "resumed", together, **source)
    assert posttrain("run", halves_rl, "stages.0.num_steps=1").code == 0 and posttrain("run", halves_rl).code == 0
    learned = [tmp_path / name / "out" / "0-rl" / "drafter" / "drafter.safetensors" for name in ("learns", "resumed")]
    assert learned[0].read_bytes() == learned[1].read_bytes() != files[0].read_bytes()
    drafts = ("--speculative", f"block={tmp_path / 'resumed' / 'out'}")
    again = posttrain("generate", model, "1 + 1 =", "--max-tokens", "8", "--temperature", "0", *drafts)
    assert again.code == 0 and again.out == plain.out
    planned = posttrain("plan", whole_rl, "--devices", "cpu-1")
    assert planned.code == 0 and "drafter: update" in planned.out, planned.out
    refused = posttrain("generate", trained, "1 + 1 =")
    assert refused.code == 2 and "trained a drafter" in refused.error
    planned = posttrain("plan", whole, "--devices", "cpu-1")
    assert planned.code == 0 and "update" in planned.out, planned.error


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("stages", "changes", "text"),
    [
        ([stage(router={"z_coef": 0.1})], {}, "router: the model stays"),
        ([stage(optimizer={"qk_clip": 50.0})], {}, "qk_clip: the model stays"),
        ([stage(), stage()], {}, "alone in its run"),
        ([stage()], {"lora": {"rank": 2}}, "model.lora"),
    ],
)
def test_refusals(tmp_path: Path, stages: list[dict[str, Any]], changes: dict[str, Any], text: str) -> None:
    file = write_run(tmp_path, *stages, model={"init": INIT, "tokenizer": "bytes", **changes})
    outcome = posttrain("check", file)
    assert outcome.code != 0 and re.search(text, outcome.error), outcome.error


def test_the_plan_counts_a_drafter_that_learns(tmp_path: Path) -> None:
    """Beside all programs, and in an update of its own on the batch of the policy's, whose weights it reads."""
    model = init_model({**INIT, "vocab_size": 261}, dtype="float32", seed=0)
    sizes = DrafterConfig(embed_dim=16, vocab_size=261, tokens=2, window=3, layers=1)
    attach_drafter(model, sizes, seed=0)
    save_drafter(model, tmp_path / "drafter")
    drafts: dict[str, Any] = {"kind": "block", "path": str(tmp_path / "drafter")}
    plain, stage = (stage_of(tmp_path, rollout={"speculative": drafts | more}) for more in ({}, {"optimizer": {}}))
    *others, update = stage.phases
    before, own = beside_of(plain), dict(update.own)
    assert (update.role, update.name) == ("drafter", "update") and own["weights of the actor"] == weights_on(8)
    drafter = own["drafter"]
    assert sizes.num_parameters * 4 / 8 <= drafter <= sizes.num_parameters * 4
    learned = {"drafter": drafter, "optimizer state of the drafter": 2 * drafter + COUNTERS}
    assert own == {"weights of the actor": weights_on(8)} | learned and update.own.keys().isdisjoint(update.beside)
    assert all(dict(one.beside) == before[f"{one.role}: {one.name}"] | learned for one in others)
    assert stage.state == plain.state + sum(learned.values()) and stage.elsewhere == plain.elsewhere
    shapes = [x for x in jax.tree.leaves(update.lower().in_avals) if x.dtype == np.float32]
    assert max(x.size for x in shapes) == 261 * 16 and update.runs == others[-1].runs
    assert "rollout.speculative.optimizer" not in " ".join(stage.not_counted)
