"""The JSON schema accepts what a run accepts, and refuses what has no such field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from posttrain.config.describe import json_schema
from posttrain.config.yaml_file import _parse, build_config, dump_config
from tests.stages.runs import posttrain

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").rglob("*.yaml"))


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configurations_are_valid(path: Path, validator: jsonschema.Draft202012Validator) -> None:
    data, _ = _parse(path.read_text(), path.name)
    validator.validate(data)
    # What a run writes is the long form with every field.
    validator.validate(_parse(dump_config(build_config(data)), "written")[0])


@pytest.mark.parametrize(
    "change",
    [{"num_stepz": 3}, {"num_steps": 0}, {"num_steps": "three"}, {"kind": "sftt"}, {"optimizer": {"lr": 1.0}},
     {"output": None}, {"model": {"path": "m", "dtype": "float16"}}, {"loss": 3}],
)  # fmt: skip
def test_mistakes_are_not(change: dict[str, Any], validator: jsonschema.Draft202012Validator) -> None:
    right = {
        "output": "o", "seed": 1, "model": {"path": "m"}, "kind": "sft", "dataset": {"path": "d"}, "num_steps": 1,
        "row_tokens": 8, "batch_rows": 1, "optimizer": {"learning_rate": 0.1},
    }  # fmt: skip
    assert validator.is_valid(right)
    assert not validator.is_valid({**right, **change})
    for name in ("output", "seed", "model", "kind", "dataset"):
        assert not validator.is_valid({key: value for key, value in right.items() if key != name}), name


def test_the_command_prints_it_with_the_names_of_trl() -> None:
    outcome = posttrain("schema")
    assert outcome.code == 0
    definitions = json.loads(outcome.out)["$defs"]
    assert definitions["RLSection"]["properties"]["group_size"]["description"].endswith("TRL: num_generations.")
    assert definitions["LoRA"]["properties"]["alpha"]["description"].endswith("TRL: lora_alpha.")
    assert definitions["SequenceOptimizer"]["properties"]["weight_decay"]["description"].endswith("TRL: weight_decay.")
