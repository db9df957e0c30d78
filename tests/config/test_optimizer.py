"""Optimisers of a configuration: AdamW, a function of optax or of the user, a transformation in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
import pytest

import posttrain as pt
from posttrain.config import RunConfig, UserOptimizer
from posttrain.config.yaml_file import build_config, dump_config, load_config
from posttrain.errors import ConfigError
from posttrain.runs.code_identity import code_digests
from posttrain.train.optimizers import Trained
from posttrain.train.transformations import make_schedule, optimizer_of
from posttrain.weights.state import Parameter
from tests.tiny import tiny_config

pytestmark = pytest.mark.fast

RUN: dict[str, Any] = {"output": "out", "seed": 0, "kind": "sft", "dataset": {"path": "rows.jsonl"}, "num_steps": 8}
LION = {"fn": "optax:lion", "learning_rate": 1e-3}


def config(optimizer: Any, **model: Any) -> RunConfig:
    return build_config({**RUN, "model": {"path": "m", **model}, "optimizer": optimizer}, python=True)


def moved(optimizer: Any) -> Any:
    """Parameter after two updates with gradients of 1."""
    declared = Trained(w=Parameter("kernel", ("embed", "mlp")))
    made = optimizer_of(config(optimizer).stages[0].optimizer, declared, tiny_config(), 8, seed=0)
    params = {"w": jnp.zeros((2, 2))}
    state = made.init(params)
    for _ in range(2):
        params, state = made.update({"w": jnp.ones((2, 2))}, state, params, lambda g: g, None)
    return float(params["w"][0, 0])


def test_each_form_builds_its_optimizer(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import optax\n\n\ndef make(learning_rate, num_steps, scale: float):\n"
        "    return optax.sgd(lambda step: scale * num_steps * learning_rate(step))\n"
    )
    assert moved("adamw") < 0 and moved(pt.AdamW(learning_rate=1e-3)) == pytest.approx(moved({"learning_rate": 1e-3}))
    assert moved({"kind": "lion", "learning_rate": 1e-3}) == pytest.approx(-2e-3)
    assert moved({**LION, "args": {"weight_decay": 0.0}}) == pytest.approx(-2e-3)
    assert moved(optax.sgd(0.1)) == pytest.approx(-0.2)
    assert moved({"fn": optax.sgd, "learning_rate": 0.1, "warmup_steps": 2}) == pytest.approx(-0.05)
    mine = {"fn": f"{tmp_path}/mine.py:make", "learning_rate": 0.1, "args": {"scale": 0.5}}
    assert moved(mine) == pytest.approx(-2 * 0.5 * 8 * 0.1)
    assert make_schedule(config(optax.sgd(0.1)).stages[0].optimizer, 8) is None


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        ({"fn": "optax:lion"}, "learning_rate is required beside fn: optax:lion"),
        (
            {**LION, "beta1": 0.9},
            "beta1: unknown field; a field of 'adamw', 'lion' and 'muon', not of 'user'",
        ),
        ({"kind": "adam"}, "did you mean 'adamw'"),
        ("muon", "optimizer.learning_rate: required, but missing: .* is 10 times higher. Other kinds have none.$"),
        ({"kind": "lion", "learning_rate": 0.1, "momentum": 0.9}, "a field of 'adafactor' and 'muon', not of 'lion'"),
        (
            {"learning_rate": 0.1, "groups": [{"match": "a", "momentum": 0.9}]},
            "is a field of adafactor and muon",
        ),
        ({"fn": optax.sgd(0.1), "learning_rate": 0.1}, "a transformation has its own"),
        ({**LION, "args": {"b11": 1}}, "optimizer.fn: 'b11' is no setting of optax:lion; did you mean 'b1'"),
        ({**LION, "fn": "optax:lionn"}, "optax has no 'lionn'; did you mean 'lion'"),
        ({**LION, "fn": "optax:constant_schedule"}, "optimizer.fn: "),
        ({**LION, "fn": lambda learning_rate: 3}, "returned a int; return an optax.GradientTransformation"),
    ],
)
def test_mistakes_are_named(optimizer: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("(", "\\(")):
        moved(optimizer)


def test_the_default_rate_of_adapters_is_for_adamw() -> None:
    lora = {"lora": {"rank": 4}}
    assert config("adamw", **lora).stages[0].optimizer.learning_rate == pytest.approx(2e-4)
    assert config({}, **lora).stages[0].optimizer.learning_rate == pytest.approx(2e-4)
    assert config(LION, **lora).stages[0].optimizer.learning_rate == 1e-3


def test_what_it_is_made_of_is_part_of_the_run(tmp_path: Path) -> None:
    digests = [code_digests(config(optax.lion(rate))) for rate in (1e-3, 1e-3, 1e-4)]
    assert digests[0] == digests[1] != digests[2]
    (tmp_path / "run.yaml").write_text(dump_config(config({**LION, "args": {"b1": 0.8}})))
    read = load_config(tmp_path / "run.yaml").stages[0].optimizer
    assert isinstance(read, UserOptimizer) and read.args == {"b1": 0.8} and str(read.fn) == "optax:lion"
