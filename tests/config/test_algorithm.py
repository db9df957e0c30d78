"""Algorithms in a configuration: words, sections of each kind, old fields of the stage, and what is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import posttrain as pt
from posttrain.config import ALGORITHMS, RLSection, RunConfig
from posttrain.config.describe import field_table, json_schema
from posttrain.config.yaml_file import build_config, dump_config, load_config, load_recorded
from posttrain.errors import ConfigError
from tests.documents import STAGES
from tests.stages.runs import posttrain, rl_stage, write_run

pytestmark = pytest.mark.fast

EVERY = sorted({name for section in ALGORITHMS.values() for name in section.model_fields} - {"kind"})
TAUGHT = {"teachers": [{"path": "t"}]}


def built(*overrides: str, python: bool = False, **fields: Any) -> RunConfig:
    run = {"output": "o", "seed": 1, "model": {"path": "m"}, "kind": "rl", **STAGES["rl"], **fields}
    return build_config(run, overrides, name="pt.RL" if python else "run.yaml", python=python)


def algorithm_of(config: RunConfig) -> Any:
    stage = config.stages[0]
    assert isinstance(stage, RLSection)
    return stage.algorithm


def refusal(*overrides: str, python: bool = False, **fields: Any) -> str:
    with pytest.raises(ConfigError) as error:
        built(*overrides, python=python, **fields)
    return str(error.value)


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_a_word_is_the_section_of_its_kind(kind: str) -> None:
    more = TAUGHT if kind == "distill" else {}
    word, section = built(algorithm=kind, **more), built(algorithm={"kind": kind}, **more)
    assert word == section and type(algorithm_of(word)) is ALGORITHMS[kind]
    again = build_config(yaml.safe_load(dump_config(word)))
    assert again == word and dump_config(again) == dump_config(word)
    public = getattr(pt, ALGORITHMS[kind].__name__)
    assert public is ALGORITHMS[kind] and algorithm_of(built(algorithm=public(entropy_coef=0.5), **more)).kind == kind
    run = pt.RL("m", "d", rewards=["a:b"], algorithm=public(entropy_coef=0.5), output="o", seed=1, num_steps=1, **more)
    assert algorithm_of(run.config) == public(entropy_coef=0.5)


def test_overrides_change_a_word() -> None:
    changed = algorithm_of(built("algorithm.kl_coef=0", "algorithm.clip_high=0.3", algorithm="grpo"))
    assert changed == pt.GRPO(kl_coef=0.0, clip_high=0.3)
    assert algorithm_of(built("algorithm.kl_coef=0")) == pt.GRPO(kl_coef=0.0), "of the kind by default"
    other = algorithm_of(built("algorithm=ppo", "algorithm.critic.warmup=2", algorithm={"kind": "grpo", "kl_coef": 0}))
    assert (other.kind, other.critic.warmup) == ("ppo", 2)
    soft = algorithm_of(built("algorithm.surrogate=sapo", "algorithm.surrogate.temperature_positive=2"))
    assert soft.surrogate.temperature_positive == 2.0


@pytest.mark.parametrize("name", EVERY)
def test_an_old_field_of_the_stage_is_answered_by_its_place(name: str) -> None:
    having = [kind for kind, section in ALGORITHMS.items() if name in section.model_fields]
    for kind in ("grpo", "ppo"):
        message = refusal(algorithm=kind, **{name: 1})
        if kind in having:
            assert f"{name}: is now algorithm.{name}: write algorithm: {{kind: {kind}, {name}: 1}}" in message
        else:
            assert f"{name}: is a field of the algorithm, but {kind} has none; " in message and having[0] in message


def test_all_old_fields_are_written_together() -> None:
    message = refusal(kl_coef=0, clip_high=0.28, algorithm={"kind": "dapo", "entropy_coef": 0.1})
    written = "write algorithm: {kind: dapo, entropy_coef: 0.1, kl_coef: 0, clip_high: 0.28}"
    assert [line.endswith(written) for line in message.splitlines()] == [True, True]
    assert refusal("kl_coef=0.5").endswith("kl_coef: is now algorithm.kl_coef: write algorithm.kl_coef=0.5")
    message = refusal(python=True, kl_coef=0, critic={"warmup": 1}, algorithm="ppo")
    assert "write algorithm=pt.PPO(kl_coef=0, critic=...)" in message


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ("grop", "algorithm: 'grop' is unknown; did you mean 'grpo'?; there are grpo, dr_grpo"),
        ({"kind": "grop"}, "algorithm.kind: must be 'grpo' or 'dr_grpo'"),
        ({"kl_coef": 0.1}, "algorithm.kind: required, but missing: 'grpo' or 'dr_grpo'"),
        ({"kind": "grpo", "gamma": 0.9}, "algorithm.gamma: unknown field; a field of 'ppo', not of 'grpo'"),
        ({"kind": "cispo", "clip_hi": 0.9}, "algorithm.clip_hi: unknown field; did you mean 'clip_high'?"),
        ({"kind": "grpo", "epsilon": 0.2}, "algorithm.epsilon: unknown field; did you mean 'clip_low'?"),
        ({"kind": "grpo", "zzzz": 0.2}, "algorithm.zzzz: unknown field; known here: loss, filter, kl_coef"),
        ({"kind": "grpo", "entropy_step": 0.1}, "algorithm: entropy_step=0.1 has no effect without entropy_target"),
        ({"kind": "rloo", "advantage_scale": "group"}, "advantage_scale: must be 'batch' or 'none'; got 'group'"),
    ],
)
def test_mistakes(algorithm: Any, words: str) -> None:
    message = refusal(algorithm=algorithm)
    assert words in message and len(message.splitlines()) == 1


def test_the_schema_takes_words_and_sections() -> None:
    validator = jsonschema.Draft202012Validator(json_schema())
    run = {"output": "o", "seed": 1, "model": {"path": "m"}, "kind": "rl", **STAGES["rl"]}
    right = ("grpo", {"kind": "ppo", "critic": {"warmup": 1}}, {"kind": "grpo", "surrogate": "sapo"})
    wrong = ("grop", {"kind": "grpo", "gamma": 0.9}, {"kl_coef": 0}, {"kind": "grpo", "kl_coef": -1})
    assert [validator.is_valid({**run, "algorithm": value}) for value in right] == [True] * 3
    assert [validator.is_valid({**run, "algorithm": value}) for value in wrong] == [False] * 4


def test_fields_are_told_once_with_the_values_of_each_kind() -> None:
    rows = {row.name: row for row in field_table(RLSection, "algorithm")}
    assert rows["algorithm"].choices == tuple(ALGORITHMS)
    assert rows["algorithm.kl_coef"].default == "0.04 (grpo, gdpo), 0.0"
    assert rows["algorithm.gamma"].description.endswith("Kinds: ppo.")
    assert rows["algorithm.advantage"].description.endswith("Kinds: all but ppo.")


def test_a_run_of_an_earlier_version_is_refused_by_name(tmp_path: Path) -> None:
    file = write_run(tmp_path, rl_stage())
    recorded = yaml.safe_load(dump_config(load_config(file)))
    stage = recorded["stages"][0]
    stage |= {"algorithm": "grpo", "kl_coef": 0.04}
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.yaml").write_text(yaml.safe_dump(recorded))
    (tmp_path / "out" / "metrics.jsonl").write_text("{}\n")
    words = f"{tmp_path / 'out'} holds a run of another version of posttrain"
    with pytest.raises(ConfigError, match=words):
        load_recorded(tmp_path / "out" / "config.yaml")
    error = posttrain("run", file).error
    assert words in error and "kl_coef: is now algorithm.kl_coef" in error and "give another output" in error
