"""Evaluation in the loop: several samples and datasets, the best model by evidence, training as if there were none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from posttrain import load_model, load_tokenizer
from posttrain.config.yaml_file import load_config
from posttrain.errors import ConfigError
from posttrain.evaluation.at_k import majority_at_k
from posttrain.rl.store import read_record
from posttrain.stages.best import BestModel
from posttrain.statistics import paired_difference
from posttrain.weights.state import ModelWeights
from tests.stages.runs import lines, posttrain, rl_stage, weights, write_run
from tests.tiny import tiny_model

HELD_OUT = {"path": "rows.jsonl", "chat": False, "limit": 6}
OTHER = {"path": "rows.jsonl", "chat": False, "skip": 20, "name": "late"}
LOGGED = """
def low(completion_tokens, log_extra, **_):
    log_extra("first", [c[0] // 64 for c in completion_tokens])
    return [sum(t < 128 for t in c) / len(c) for c in completion_tokens]
def high(completion_tokens, **_):
    return [float(c[0] >= 64) for c in completion_tokens]
"""


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output of a run that is evaluated before, between and after its two steps."""
    folder = tmp_path_factory.mktemp("evaluated")
    section = {"samples": 4, "reward": "high", "report": ["avg", "pass", "majority"], "answer": "first"}
    section |= {"sets": [OTHER], "k": [1, 3], "keep_best": True}
    stage = rl_stage(
        num_steps=2,
        rewards=[{"fn": f"rewards_of_test.py:{name}", "isolate": "thread"} for name in ("low", "high")],
        eval_dataset=HELD_OUT,
        eval_every=1,
        eval_sampling={"max_tokens": 6},
        evaluate=section,
    )
    file = write_run(folder, stage)
    (folder / "rewards_of_test.py").write_text(LOGGED)
    outcome = posttrain("run", file)
    assert outcome.code == 0, outcome.err
    (folder / "out" / "said.txt").write_text(outcome.out)
    return folder / "out"


def test_metrics_of_each_dataset_in_each_evaluation(evaluated: Path) -> None:
    found = [line for line in lines(evaluated, "0-rl") if "eval/reward" in line]
    assert [line["step"] for line in found] == [0, 1, 2]
    for prefix, count in (("eval", 6), ("eval/late", 4)):
        for name in ("reward", "avg@4", "pass@1", "pass@3", "maj@1", "maj@3"):
            for line in found:
                low, mean, high = (line[f"{prefix}/{name}{end}"] for end in ("_low", "", "_high"))
                assert low <= mean <= high and (low < high), (prefix, name)
        result = json.loads((evaluated / "0-rl" / "result.json").read_text())
        after = result["after"] if prefix == "eval" else result["after"]["sets"]["late"]
        assert after["n"] == len(after["values"]["pass@3"]) == count
        assert_allclose(np.mean(after["values"]["avg@4"]), after_metric(result, f"{prefix}/avg@4"), rtol=1e-6)
        # Of 0/1 rewards avg@k, pass@1 and maj@1 are the same number.
        assert_allclose(after["values"]["pass@1"], after["values"]["avg@4"], rtol=1e-6)
        assert_allclose(after["values"]["maj@1"], after["values"]["avg@4"], rtol=1e-6)


def after_metric(result: dict[str, Any], name: str) -> float:
    return float(result["after"]["metrics"][name])


def test_result_compares_the_same_prompts(evaluated: Path) -> None:
    result = json.loads((evaluated / "0-rl" / "result.json").read_text())
    for name, found in result["difference"].items():
        values = [result[when] if "late" not in name else result[when]["sets"]["late"] for when in ("before", "after")]
        metric = name.split("/")[-1]
        expected = paired_difference(*(one["values"][metric] for one in values))
        assert_allclose((found["mean"], found["p_value"]), (expected.mean, expected.p_value))
    assert {"eval/reward", "eval/avg@4", "eval/late/maj@3"} <= result["difference"].keys()
    said = (evaluated / "said.txt").read_text()
    assert "0-rl: held-out late/pass@3 " in said and "0-rl: held-out avg@4 " in said


def test_two_steps_are_no_evidence(evaluated: Path) -> None:
    result = json.loads((evaluated / "0-rl" / "result.json").read_text())
    assert result["best"] == {
        "step": None,
        "evidence": "no evidence: no evaluation is significantly better than the start",
        "p_below": pytest.approx(0.025),
        "evaluations": 2,
    }
    assert not (evaluated / "0-rl" / "best").exists()
    assert "0-rl: no best model: no evidence" in (evaluated / "said.txt").read_text()


def record(values: list[float]) -> dict[str, Any]:
    return {"values": {"avg@1": values}}


def test_the_best_model_needs_evidence_against_start_and_best(tmp_path: Path) -> None:
    models = [tiny_model(num_layers=1, windows=(None,), vocab_size=261, seed=seed) for seed in range(3)]
    best = BestModel(tmp_path, "avg@1", 4, load_tokenizer("bytes"))
    start = [1.0] * 49 + [0.0] * 51
    best.consider(1, record(start), record([1.0] * 53 + [0.0] * 47), models[0])
    assert best.result()["step"] is None and not (tmp_path / "best").exists(), "p = 0.125"
    best.consider(2, record(start), record([1.0] * 56 + [0.0] * 44), models[0])
    assert best.result()["step"] is None, "p = 0.016: enough for one evaluation, not for four"
    best.consider(3, record(start), record([1.0] * 70 + [0.0] * 30), models[1])
    found = best.result()
    assert (found["step"], found["against_step"]) == (3, None)
    assert found["against_start"]["mean"] == pytest.approx(0.21)
    best.consider(4, record(start), record([1.0] * 72 + [0.0] * 28), models[2])
    best.consider(3, record(start), record([1.0] * 70 + [0.0] * 30), models[2])
    assert best.result() == found, "two prompts more than the best are none, nor is the same step again"
    saved = ModelWeights(load_model(tmp_path / "best")).read()
    for path, array in ModelWeights(models[1]).read().items():
        np.testing.assert_array_equal(array, saved[path])
    best.consider(5, record(start), record([1.0] * 100), models[2])
    assert (best.result()["step"], best.result()["against_step"]) == (5, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 2}, "evaluate.samples=2 of a prompt would be equal at temperature 0; set eval_sampling"),
        ({"k": [2]}, "k=2 is more than samples=1"),
        ({"answer": "x"}, "answer=x is for maj@k; add majority to report"),
        ({"keep_best": True, "report": ["pass"]}, "keep_best compares avg@k; add avg to report"),
        ({"sets": [OTHER, OTHER]}, "sets: the name late is used twice"),
        ({"sets": [{**OTHER, "weight": 2.0}]}, "weight=2.0 has no effect on held-out data"),
    ],
)
@pytest.mark.fast
def test_settings_without_effect_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    file = write_run(tmp_path, rl_stage(eval_dataset=HELD_OUT, evaluate=changes))
    with pytest.raises(ConfigError, match=message):
        load_config(file)


@pytest.mark.fast
def test_evaluate_needs_prompts_and_a_known_reward(tmp_path: Path) -> None:
    file = write_run(tmp_path, rl_stage(evaluate={}))
    with pytest.raises(ConfigError, match="evaluate needs eval_dataset and rewards"):
        load_config(file)
    wrong = write_run(tmp_path, rl_stage(eval_dataset=HELD_OUT, evaluate={"reward": "lou"}))
    assert (
        posttrain("check", wrong).error
        == "evaluate.reward: no reward is called 'lou'; did you mean 'low'?; there are low"
    )


def test_answers_that_nobody_logs_are_refused(tmp_path: Path) -> None:
    section = {"report": ["majority"], "answer": "number"}
    rewards = [{"fn": "rewards_of_test.py:low", "isolate": "thread"}]
    file = write_run(tmp_path, rl_stage(rewards=rewards, num_steps=1, eval_dataset=HELD_OUT, evaluate=section))
    assert posttrain("run", file).error.startswith("evaluate.answer: no reward function has called log_extra('number'")


@pytest.mark.fast
def test_votes_are_for_what_is_logged() -> None:
    assert majority_at_k([1, 1, None], [True, True, False], 3) == 1.0


def test_training_is_bitwise_as_without_evaluation(tmp_path: Path) -> None:
    """The same samples with the same log-probabilities, and the same weights: also of prompts that are held out and
    trained on, whose keys and values an evaluation leaves in the prefix cache."""
    cached = {"max_tokens": 6, "stop_token_ids": [*range(0, 260, 4)]}
    plain = {"num_steps": 5, "prompts_per_step": 8, "sampling": cached, "kl_coef": 0.1}
    held_out = {"eval_dataset": {"path": "rows.jsonl", "chat": False}, "eval_every": 1}
    several = held_out | {"eval_sampling": cached, "evaluate": {"samples": 3, "sets": [OTHER]}}
    ahead = {"oversample_prompts": 4, "rollout": {"decode_steps": 2}}
    for mode, more in {"whole": {}, "ahead": ahead}.items():
        folders = []
        for name, changes in {"without": {}, "with": several}.items():
            file = write_run(tmp_path / mode / name, rl_stage(**plain, **more, **changes))
            assert posttrain("run", file).code == 0
            folders.append(file.parent / "out")
        assert weights(folders[0], "0-rl") == weights(folders[1], "0-rl"), mode
        for step in range(1, 6):
            old, new = (read_record(folder / "0-rl" / "trajectories", step, str) for folder in folders)
            assert (old.groups_P, old.version) == (new.groups_P, new.version), (mode, step)
            np.testing.assert_array_equal(old.advantages_PG, new.advantages_PG)
