"""Preference stages as whole runs: references, kinds of losses and data, resuming, evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from posttrain.batch import Batch, TokenStats
from posttrain.cluster import reference_cache
from posttrain.cluster.reference import Reference
from posttrain.cluster.reference_cache import check_scored, with_reference
from posttrain.config import PreferenceSection
from posttrain.config.yaml_file import load_config
from posttrain.data.pair_examples import ComparisonBatches, PairExamples
from posttrain.data.unit_cache import UnitCache, UnitValues, unit_key
from posttrain.errors import ConfigError
from posttrain.evaluation.pairs import PairEvaluation, calibration_error
from posttrain.losses.preference import PreferenceLoss
from posttrain.losses.reference_free import CPOLoss
from posttrain.metrics import CompileCounter
from posttrain.runs.prepare import prepare
from posttrain.stages.preference import PairInputs, shares_prompts
from posttrain.train.objective import TrainSettings
from posttrain.train.trainer import Trainer
from posttrain.weights.load import init_model
from tests.runs.test_resume import finish, kill_at
from tests.stages.runs import INIT, check_data_wait, lines, posttrain, steps, weights, write_run

PAIRS = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": f"{i}no", "margin": i % 3} for i in range(12)]
JUDGED = [{"prompt": f"{i}+1=", "completion": str(i + 1 + i % 2), "label": i % 2 == 0} for i in range(12)]


def preference_stage(**changes: Any) -> dict[str, Any]:
    stage = {
        "kind": "preference",
        "dataset": {"path": "pairs.jsonl", "chat": False},
        "num_steps": 3,
        "batch_rows": 4,
        "row_tokens": 48,
        "optimizer": {"learning_rate": 1e-2, "schedule": "constant"},
    }
    return {**stage, **changes}


def write_pairs(folder: Path, stage: dict[str, Any], **changes: Any) -> Path:
    file = write_run(folder, stage, **changes)
    for name, rows in (("pairs", PAIRS), ("judged", JUDGED)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for what is kept between runs, the same for all tests of this file."""
    folder = tmp_path_factory.getbasetemp() / "preference_cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "posttrain" / "reference"


def losses(folder: Path, **changes: Any) -> list[float]:
    changes = {**changes}
    model = {"init": INIT, "tokenizer": "bytes", **changes.pop("model", {})}
    done = posttrain("run", write_pairs(folder, preference_stage(**changes), model=model))
    assert done.code == 0, done.err
    return [line["loss"] for line in lines(folder / "out") if "grad_norm" in line]


@pytest.mark.thorough
def test_cached_and_live_reference_are_the_same(tmp_path: Path, own_cache: Path) -> None:
    held_out = {"path": "pairs.jsonl", "chat": False, "limit": 5}
    cached = losses(tmp_path / "a", eval_dataset=held_out)
    assert abs(cached[0] - np.log(2)) < 1e-5 and cached[-1] < cached[0] - 1e-3
    assert len(list(own_cache.iterdir())) == 1, "one model"
    np.testing.assert_allclose(losses(tmp_path / "b", reference="live"), cached, rtol=1e-5)
    assert len(list(own_cache.iterdir())) == 1, "one model"
    check_data_wait(tmp_path / "a" / "out")
    told = lines(tmp_path / "a" / "out")
    result = json.loads((tmp_path / "a" / "out" / "0-preference" / "result.json").read_text())
    assert len(result["after"]["preferred"]) == 5
    for name in ("eval/rewards/accuracies", "eval/preferred_ratio"):
        assert 0 <= told[-1][f"{name}_low"] <= told[-1][name] <= told[-1][f"{name}_high"] <= 1
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected", "loss"):
        low, mean, high = (told[-1][f"eval/{name}{end}"] for end in ("_low", "", "_high"))
        assert low < mean < high, name
    assert told[0]["eval/rewards/margins"] == 0


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "loss"), [("preference", "sigmoid"), ("preference", "kto"), ("reward_model", None)])
def test_shared_prompts_change_no_loss(tmp_path: Path, kind: str, loss: str | None) -> None:
    """Three steps, so that gradients are the same too; over micro-batches and a window that does not hold a prompt."""
    init = INIT | {"use_sliding_window": True, "sliding_window": 3, "layer_types": ["sliding_attention"] * 2}
    loss = loss or "bradley_terry"

    def found(name: str, share: bool) -> list[float]:
        model = {"init": init | {"num_hidden_layers": 2}}
        changes = {"share_prompts": share, "packing": False, "kind": kind, "loss": loss, "micro_batch_rows": 2}
        return losses(tmp_path / name, model=model, **changes)

    np.testing.assert_allclose(found("once", True), apart := found("twice", False), rtol=2e-6)
    assert apart[-1] < apart[0] - 1e-3


@pytest.mark.thorough
def test_a_new_adapter_is_the_base_for_the_reference(tmp_path: Path) -> None:
    found = losses(tmp_path, reference="live", model={"lora": {"rank": 2}}, num_steps=2)
    assert abs(found[0] - np.log(2)) < 1e-5 and found[1] < found[0] - 1e-4


@pytest.mark.thorough
@pytest.mark.parametrize(("loss", "data"), [("kto", "judged"), ("orpo", "pairs")])
def test_other_losses(tmp_path: Path, loss: Any, data: str) -> None:
    """Single answers, and a loss without a reference; both over two micro-batches."""
    path = {"path": f"{data}.jsonl", "chat": False}
    found = losses(tmp_path, loss=loss, dataset=path, batch_rows=16, micro_batch_rows=8, eval_dataset=path)
    assert found[-1] < found[0]
    record = json.loads((tmp_path / "out" / "0-preference" / "after.json").read_text())
    assert ("preferred" in record) == (loss == "orpo")
    names = set(lines(tmp_path / "out")[1])
    assert {"rewards/chosen", "rewards/rejected", "logps/chosen"} < names and ("kl" in names) == (loss == "kto")
    metrics = record["metrics"]
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected"):
        low, mean, high = (metrics[f"eval/{name}{end}"] for end in ("_low", "", "_high"))
        assert low < mean < high and high - low < 10 * abs(mean), name
    assert not {"eval/loss_low", "eval/kl_low"} & metrics.keys(), "of a whole batch, so of no sum over its answers"


@pytest.mark.thorough
def test_pairs_weigh_as_much_as_the_policy_would_write_them(tmp_path: Path) -> None:
    """In training and in evaluation: at first a loss of log 2 times the weights, which are near 1 where all tokens are
    nearly equally probable."""
    found = losses(
        tmp_path,
        loss={"kind": "sigmoid", "use_weighting": True},
        num_steps=1,
        eval_dataset={"path": "pairs.jsonl", "chat": False, "limit": 5},
    )
    for loss in (found[0], lines(tmp_path / "out")[0]["eval/loss"]):
        assert 1e-5 < abs(loss / np.log(2) - 1) < 0.3


@pytest.mark.thorough
def test_killed_ends_as_never_stopped(tmp_path: Path) -> None:
    """The second run reads the reference of the first."""
    stage = preference_stage(num_steps=24, checkpoint_every=1)
    whole, halves = (write_pairs(tmp_path / name, stage) for name in ("whole", "halves"))
    finish(whole)
    output = tmp_path / "halves" / "out"
    kill_at(halves, output, "0-preference", 8)
    out = finish(halves)
    assert "resuming after step" in out and "log-probabilities: read from" in out, out
    assert steps(output, "0-preference") == list(range(1, 25))
    assert weights(output, "0-preference") == weights(tmp_path / "whole" / "out", "0-preference")


def inputs_of(folder: Path, **changes: Any) -> PairInputs:
    loaded = load_config(write_pairs(folder, preference_stage(**changes)))
    made = prepare(loaded, offline_ok=False).stages[0]
    assert isinstance(made, PairInputs)
    return made


def test_settings_of_losses(tmp_path: Path) -> None:
    assert inputs_of(tmp_path).loss == inputs_of(tmp_path, loss="dpo").loss == PreferenceLoss()
    several = {"kind": ["dpo", "sft"], "weights": [1.0, 0.1], "beta": 0.2}
    assert inputs_of(tmp_path, loss=several).loss == PreferenceLoss(
        kinds=("sigmoid", "sft"), weights=(1.0, 0.1), beta=0.2
    )
    assert inputs_of(tmp_path, loss={"kind": "cpo_hinge", "nll_coef": 0.5}).loss == CPOLoss(kind="hinge", nll_coef=0.5)
    for word, on in (("off", False), ("no", False), ("on", True), (True, True)):
        made = inputs_of(tmp_path, loss={"kind": "sigmoid", "use_weighting": word, "beta": "1e-1"}).loss
        assert made == PreferenceLoss(use_weighting=on) and made.use_weighting is on
    own = inputs_of(tmp_path, loss={"fn": "posttrain.losses.preference:PreferenceLoss", "beta": 0.3}).loss
    assert own == PreferenceLoss(beta=0.3)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("sigmiod", "kind 'sigmiod' is unknown; did you mean 'sigmoid'?"),
        ({"kind": "ipo", "betta": 1}, "'betta' is no setting of ipo; did you mean 'beta'?"),
        ({"kind": ["sigmoid", "kto"]}, "several are only possible of sigmoid"),
        ({"kind": "hinge", "label_smoothing": 0.1}, "has no effect on hinge"),
        ({"kind": "exo_pair"}, "exo_pair needs label_smoothing > 0"),
        ({"beta": 0.1}, "must have kind, a name of the package's own, or fn"),
        ({"kind": "own.py:Hinge"}, "write fn: 'own.py:Hinge' in place of it"),
        (
            {"fn": "posttrain.losses.pairs:Needs"},
            "pairs:Needs needs rows, reference; write {fn:",
        ),
        ({"kind": "ipo", "beta": -1}, "beta=-1.0 must be positive"),
        ({"kind": "ipo", "beta": "much"}, "beta='much': Input should be a valid number"),
        ({"kind": "sigmoid", "use_weighting": "maybe"}, "use_weighting='maybe': Input should be a valid boolean"),
        ({"kind": ["sigmoid", "ipo"], "weights": [1, -1]}, "weights=(1.0, -1.0) must be one number for each"),
        ({"kind": "aot", "divergence": "js_divergence"}, "divergence=js_divergence has no effect on aot"),
        ({"kind": "sft", "use_weighting": True}, "has no effect on sft, a mean over tokens"),
        ("posttrain.losses.sft:SFTLoss", "does not declare its needs"),
    ],
)
def test_what_is_wrong_with_a_loss(tmp_path: Path, loss: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        inputs_of(tmp_path, loss=loss)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "orpo", "reference": "cached"}, "reference: cached has no effect: the loss orpo needs no reference"),
        ({"dataset": {"path": "pairs.jsonl", "completion": "{chosen}"}}, "the answers are the columns chosen and"),
        ({"dataset": {"path": "pairs.jsonl", "weight": 2.0}}, "dataset.weight=2.0 has no effect"),
        ({"loss": "apo_zero_unpaired", "share_prompts": True}, "has no effect: the loss takes one answer to a prompt"),
        (
            {"loss": "orpo", "share_prompts": True},
            "share_prompts: true has no effect: the loss has a weight on prompts",
        ),
    ],
)
def test_what_has_no_effect_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        inputs_of(tmp_path, **changes)
    assert message in str(caught.value)


def test_prompts_are_shared_where_the_kernel_knows_it() -> None:
    section, needs = PreferenceSection(**preference_stage()), PreferenceLoss(kinds=("sigmoid",)).needs

    def found(platform: str, attention: AttentionKernel = "auto", mixture: bool = False, **changes: Any) -> bool:
        return shares_prompts(section.model_copy(update=changes), needs, attention, platform, mixture=mixture)

    assert found("cpu") and found("gpu") and found("tpu", "blockwise") and found("tpu", share_prompts=True)
    assert not found("tpu") and not found("cpu", "splash") and not found("cpu", mixture=True)
    assert not found("cpu", share_prompts=False) and found("cpu", mixture=True, share_prompts=True)
    with pytest.raises(ConfigError, match="the kernel of model.attention=splash does not support shared prompts"):
        found("tpu", "splash", share_prompts=True)


def test_check_and_overrides(tmp_path: Path) -> None:
    file = write_pairs(tmp_path, preference_stage())
    assert "12 dataset rows, loss sigmoid, 3 steps of 4 x 48 tokens" in posttrain("check", file).out
    assert "is unknown; did you mean 'hinge'" in posttrain("check", file, "stages.preference.loss=hing").error
    assert "must share row_tokens=12" in posttrain("check", file, "stages.preference.row_tokens=12").error
    dropped = posttrain("check", file, "stages.preference.row_tokens=13", "stages.preference.overlong=drop")
    assert dropped.code == 0 and "are dropped" in dropped.out, dropped.err
    wrong = posttrain("check", file, "stages.preference.dataset.path=rows.jsonl").error
    assert "rows.jsonl row 0: the row has columns prompt, completion, answer" in wrong


def test_what_is_wrong_with_rows_is_said_once(tmp_path: Path) -> None:
    file = write_pairs(tmp_path, preference_stage(loss="kto", dataset={"path": "judged.jsonl", "chat": False}))
    (tmp_path / "judged.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b", "label": "good"}) + "\n")
    error = posttrain("check", file).error
    assert error.count("row 0") == 1 and "'label' must be true or false, got 'good'" in error
    same = [{"prompt": f"{i}+1=", "chosen": "1", "rejected": "1"} for i in range(4)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in same))
    error = posttrain(
        "check", file, "stages.preference.loss=sigmoid", "stages.preference.dataset.path=pairs.jsonl"
    ).error
    assert "use different answers" in error


def test_a_reward_model_writes_nothing(tmp_path: Path) -> None:
    reward = preference_stage(kind="reward_model")
    write_pairs(tmp_path, reward)
    file = write_run(tmp_path, reward, preference_stage())
    assert "a reward_model stage must be the last" in posttrain("check", file).error


def scored_units(folder: Path) -> list[bytes]:
    """Keys of the units in the shards of a cache, as often as they stand there."""
    return sorted(key.tobytes() for file in folder.glob("*/shard-*/index.npz") for key in np.load(file)["keys"])


def test_only_what_a_run_sees_is_scored_and_in_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a killed run has scored stays; the rest is scored by the next one, and nothing twice."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(reference_cache, "SHARD_BATCHES", 1)
    made = inputs_of(tmp_path, batch_rows=2, packing=False)
    model = init_model({**INIT, "vocab_size": 261}, dtype=jnp.float32, seed=0)
    trainer = Trainer(model, made.loss, optax.sgd(0.0), TrainSettings(temperature=1.0, max_grad_norm=1.0))
    cache = tmp_path / "cache" / "posttrain" / "reference"

    def referenced(num_steps: int) -> PairExamples:
        return with_reference(made.units, trainer, {"model": "a"}, tmp_path, seed=3, num_steps=num_steps)

    calls: list[int] = []
    scored = trainer.stats

    def killed(batch: Batch) -> TokenStats:
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(1)
        return scored(batch)

    monkeypatch.setattr(trainer, "stats", killed)
    with pytest.raises(KeyboardInterrupt):
        referenced(3)
    assert len(scored_units(cache)) == 4
    monkeypatch.setattr(trainer, "stats", scored)
    units = referenced(3)
    assert len(scored_units(cache)) == 6 == len(set(scored_units(cache)))
    stream = ComparisonBatches(units, seed=3)
    reference = Reference(trainer)
    for _ in range(3):
        batch = check_scored(next(stream))
        expected = reference.logps(batch) * batch.loss_weight
        np.testing.assert_allclose(batch.ref_logps, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match="did not score all"):
        check_scored(next(stream))
    assert "read from" not in capsys.readouterr().out
    monkeypatch.setattr(trainer, "stats", None)
    referenced(3)
    assert "log-probabilities: read from" in capsys.readouterr().out
    monkeypatch.setattr(trainer, "stats", scored)
    referenced(99)
    every = [unit for unit in map(made.units, range(12)) if unit is not None]
    assert scored_units(cache) == sorted(map(unit_key, every)) and len(every) == 12
    for name in ("a", "b"):
        with_reference(made.units, trainer, {"model": name}, tmp_path, seed=3, num_steps=1)
    assert len(list(cache.iterdir())) == 2


def test_another_unit_is_not_taken_for_the_known_one(tmp_path: Path) -> None:
    """Tokens, masks, places and pictures each make another key; the number of a unit does not."""
    made = inputs_of(tmp_path)
    unit = made.units(0)
    assert unit is not None
    (tmp_path / "cache").mkdir()
    values = np.zeros(int((unit["loss_weight"] > 0).sum()), np.float32)
    cache = UnitCache(tmp_path / "cache")
    cache.write([UnitValues(unit_key(unit), values)])
    known = reference_cache.CachedLogps(UnitCache(tmp_path / "cache"))
    np.testing.assert_array_equal(known(7, {**unit, "unit": unit["unit"] + 7}), values)
    for name in ("tokens", "loss_weight", "positions", "part", "parent"):
        assert np.isnan(known(0, {**unit, name: unit[name] + 1})).all(), name
    assert np.isnan(known(0, {**unit, "files": np.asarray([1])})).all()


def test_a_corrected_row_alone_is_scored_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a new run on the corrected data: it is not refused, and begins at log 2."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cache = tmp_path / "cache" / "posttrain" / "reference"
    rows = [{"prompt": f"Q{i}: ", "chosen": f"hi {i}", "rejected": "no"} for i in range(80)]
    stage = preference_stage(num_steps=20, batch_rows=8, row_tokens=64, dataset={"path": "many.jsonl", "chat": False})
    for name in ("first", "second"):
        folder = tmp_path / name
        file = write_pairs(folder, stage)
        (folder / "many.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        done = posttrain("run", file)
        assert done.code == 0, done.err
        assert abs(lines(folder / "out")[0]["loss"] - np.log(2)) < 1e-5
        rows[1] = {**rows[1], "chosen": "hello"}
    assert len(scored_units(cache)) == 81 == len(set(scored_units(cache)))


@pytest.mark.thorough
def test_held_out_losses_do_not_depend_on_batch_rows(tmp_path: Path) -> None:
    """Of a loss over the whole batch; what evaluation compiles is compiled once."""
    model = init_model({**INIT, "vocab_size": 261}, dtype=jnp.float32, seed=0)
    found = []
    for rows in (2, 8):
        made = inputs_of(tmp_path, loss="orpo", batch_rows=rows, packing=False)
        trainer = Trainer(model, made.loss, optax.sgd(0.0), TrainSettings(temperature=1.0, max_grad_norm=1.0))
        evaluate = PairEvaluation(trainer, made.loss, made.units, lambda batch: batch)
        found.append(evaluate()["metrics"])
        counter = CompileCounter()
        assert evaluate()["metrics"] == found[-1]
        assert counter.metrics()["perf/compilations"] == 0
        counter.close()
    assert found[0].keys() == found[1].keys() and found[0]["eval/loss"] > 0
    for name, value in found[0].items():
        np.testing.assert_allclose(found[1][name], value, rtol=1e-5, atol=1e-7, err_msg=name)


def test_prompts_are_what_is_independent(tmp_path: Path) -> None:
    """Both answers of a row, and rows with the same prompt."""
    rows = [{"prompt": f"{i % 5}+1=", "chosen": str(i), "rejected": f"{i}no"} for i in range(10)]
    for loss, per_row in (("sigmoid", 1), ("kto", 2)):
        made = inputs_of(tmp_path, loss=loss)
        (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        made = prepare(load_config(tmp_path / "run.yaml"), offline_ok=False).stages[0]
        assert isinstance(made, PairInputs)
        model = init_model({**INIT, "vocab_size": 261}, dtype=jnp.float32, seed=0)
        trainer = Trainer(model, made.loss, optax.sgd(0.0), TrainSettings(temperature=1.0, max_grad_norm=1.0))
        found = PairEvaluation(trainer, made.loss, made.units, lambda batch: batch)._prompts(np.arange(len(made.units)))
        np.testing.assert_array_equal(found, np.repeat(np.arange(10) % 5, per_row))


def test_calibration_error() -> None:
    """Of ten margins of one confidence, eight right: |0.8 - confidence|; a margin of 0 is wrong with 1/2."""
    margins = np.asarray([2.0] * 8 + [-2.0] * 2)
    assert calibration_error(margins) == pytest.approx(abs(1 / (1 + np.exp(-2.0)) - 0.8))
    assert calibration_error(np.zeros(3)) == pytest.approx(0.5)
    assert calibration_error(np.asarray([2.0, -0.1])) == pytest.approx(
        (1 - 1 / (1 + np.exp(-2.0)) + 1 / (1 + np.exp(-0.1))) / 2
    )
