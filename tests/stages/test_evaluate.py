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
from posttrain.stages.context import BestModel
from posttrain.statistics import paired_difference
from posttrain.weights.state import ModelWeights
from tests.stages.runs import INIT, lines, posttrain, rl_stage, weights, write_run
from tests.tiny import tiny_model

HELD_OUT = {"path": "rows.jsonl", "chat": False, "limit": 6}
OTHER = {"path": "rows.jsonl", "chat": False, "skip": 20, "name": "late"}
LOGGED = """
def low(completion_tokens, log_extra, log_metric, **_):
    log_metric("first", len(completion_tokens[0]))
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
        eval_sampling={"max_tokens": 6, "temperature": 1.0},
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


def test_records_have_what_rewards_log(evaluated: Path) -> None:
    read = read_record(evaluated / "0-rl" / "trajectories", 2)
    logged = [line for line in lines(evaluated, "0-rl") if "loss" in line][-1]
    assert read.rewards.metrics["rewards/low/first"].value() == logged["rewards/low/first"]
    assert_allclose(np.mean(read.rewards.total_PG), logged["reward"], rtol=1e-6)


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
        "p_below": 0.025,
        "evaluations": 2,
    }
    assert not (evaluated / "0-rl" / "best").exists()
    assert "0-rl: no best model: no evidence" in (evaluated / "said.txt").read_text()


def record(values: list[float]) -> dict[str, Any]:
    return {"values": {"avg@1": values}, "prompts": [f"p{n}" for n in range(len(values))]}


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


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["whole", "ahead"])
def test_training_is_bitwise_as_without_evaluation(tmp_path: Path, mode: str) -> None:
    """The same samples with the same log-probabilities, and the same weights: prompts share their first 70 tokens with
    held-out ones, whose keys and values an evaluation leaves in the prefix cache."""
    ends = {"max_tokens": 6, "stop_token_ids": [*range(0, 260, 4)]}
    dataset = {"path": "long.jsonl", "chat": False}
    plain = {
        "num_steps": 3,
        "prompts_per_step": 4,
        "row_tokens": 96,
        "algorithm": {"kind": "grpo", "kl_coef": 0.1},
        "sampling": ends,
        "dataset": dataset,
    }
    if mode == "ahead":
        plain |= {"asynchronous": {"max_staleness": 1}, "rollout": {"decode_steps": 2}}
    section = {"samples": 3, "sets": [{**dataset, "limit": 2, "name": "few"}]}
    several = {
        "eval_dataset": dataset,
        "eval_every": 1,
        "eval_sampling": {**ends, "temperature": 1.0},
        "evaluate": section,
    }
    model = {"init": {**INIT, "max_position_embeddings": 128}, "tokenizer": "bytes"}
    folders = []
    for name, changes in {"without": {}, "with": several}.items():
        file = write_run(tmp_path / name, rl_stage(**plain, **changes), model=model)
        prompts = [{"prompt": f"{'0123456789' * 7}{i}+1="} for i in range(8)]
        (file.parent / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
        done = posttrain("run", file)
        assert done.code == 0, done.err
        folders.append(file.parent / "out")
    for step in range(1, 4):
        old, new = (read_record(folder / "0-rl" / "trajectories", step) for folder in folders)
        assert (old.groups_P, old.version) == (new.groups_P, new.version), step
        np.testing.assert_array_equal(old.advantages_PG, new.advantages_PG)
    assert weights(folders[0], "0-rl") == weights(folders[1], "0-rl")
    told = ("rollout/prefix_hit_rate", "rollout/cache_peak", "loss", "grad_norm")
    found = [[[line[name] for name in told] for line in lines(one, "0-rl") if "loss" in line] for one in folders]
    assert found[0] == found[1], "of training alone, in a cache without held-out prompts"


def test_a_run_that_learns_keeps_its_best_model(tmp_path: Path) -> None:
    """The model of the evaluation that `result.json` names; here the last one or that before."""
    section = {"samples": 4, "report": ["avg"], "keep_best": True}
    stage = rl_stage(
        num_steps=12,
        rewards=[{"fn": "rewards_of_test.py:low", "isolate": "thread"}],
        eval_dataset={**HELD_OUT, "limit": 24},
        eval_every=6,
        eval_sampling={"max_tokens": 6, "temperature": 1.0},
        evaluate=section,
        checkpoint_every=6,
    )
    file = write_run(tmp_path, stage)
    done = posttrain("run", file)
    assert done.code == 0, done.err
    folder = tmp_path / "out" / "0-rl"
    result = json.loads((folder / "result.json").read_text())
    best = result["best"]
    assert best["step"] in (6, 12) and best["against_start"]["p_value"] < best["p_below"] == 0.025
    found = {line["step"]: line["eval/avg@4"] for line in lines(tmp_path / "out", "0-rl") if "eval/avg@4" in line}
    assert_allclose(best["against_start"]["mean"], found[best["step"]] - found[0], rtol=1e-5)
    assert f"best/ has the model of step {best['step']}; difference of avg@4 from the start: +" in done.out
    same = (folder / "best" / "model.safetensors").read_bytes() == weights(tmp_path / "out", "0-rl")
    assert same == (best["step"] == 12)
    # Evaluated again after a stop before the model was saved: nothing changes.
    (folder / "model").rename(tmp_path / "model")
    (folder / "after.json").unlink()
    assert posttrain("run", file).code == 0
    assert json.loads((folder / "result.json").read_text())["best"] == best
