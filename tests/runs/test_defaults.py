"""Defaults: one set for YAML and Python, lengths that fit the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import posttrain as pt
from posttrain.config import OnlinePreferenceSection, OnlineSection, RLSection, RunConfig, SamplingSection
from posttrain.config.yaml_file import dump_config, load_config
from posttrain.runs.prepare import fit_lengths

PYTHON: dict[str, Any] = {
    "sft": pt.SFT,
    "distill": pt.Distill,
    "preference": pt.Preference,
    "reward_model": pt.RewardModel,
    "drafter": pt.Drafter,
    "rl": pt.RL,
    "online_preference": pt.OnlinePreference,
}
NEEDED: dict[str, dict[str, Any]] = {
    "distill": {"teachers": [{"path": "teacher"}]},
    "rl": {"rewards": [{"fn": "a.py:b"}]},
    "online_preference": {"rewards": [{"fn": "a.py:b"}]},
}


def both(kind: str, tmp_path: Path, model: dict[str, Any], **fields: Any) -> tuple[RunConfig, RunConfig]:
    """The same keys as YAML and as Python keywords."""
    stage = {"dataset": {"path": "rows.jsonl"}, **NEEDED.get(kind, {}), **fields}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"output": "out", "seed": 3, "model": model, "kind": kind, **stage}))
    return load_config(file), PYTHON[kind](model=model, output="out", seed=3, **stage).config


@pytest.mark.parametrize("kind", PYTHON)
@pytest.mark.parametrize("lora", [False, True])
def test_yaml_and_python_have_the_same_defaults(kind: str, lora: bool, tmp_path: Path) -> None:
    model = {"path": "student", **({"lora": {"rank": 4}} if lora else {})}
    written, called = both(kind, tmp_path, model)
    assert written == called
    rate = written.stages[0].optimizer.learning_rate
    assert rate == pytest.approx(
        {"sft": 2e-5, "distill": 2e-5, "reward_model": 1e-5, "drafter": 1e-3}.get(kind, 1e-6) * 10**lora
    )
    more: dict[str, Any] = {"optimizer": {"warmup_steps": 1}}
    more |= {"sampling": {"max_tokens": 30}} if isinstance(written.stages[0], OnlineSection) else {"num_epochs": 2.5}
    changed, called = both(kind, tmp_path, model, **more)
    assert changed == called != written
    assert changed.stages[0].optimizer.learning_rate == rate


def lengths(kind: str, context: int, tmp_path: Path, **fields: Any) -> tuple[int, int]:
    config, _ = both(kind, tmp_path, {"path": "student"}, **fields)
    stage = fit_lengths(config, context).stages[0]
    return stage.row_tokens, stage.sampling.max_tokens if isinstance(stage, OnlineSection) else 0


def test_default_lengths_fit_the_model(tmp_path: Path) -> None:
    def rl(context: int, **fields: Any) -> tuple[int, int]:
        return lengths("rl", context, tmp_path, **fields)

    assert rl(40_000) == (1024, 512)
    assert rl(40_000, sampling={"max_tokens": 2000}) == (2512, 2000)
    assert rl(2048, sampling={"max_tokens": 2000}) == (2048, 2000)
    assert rl(512) == rl(512, sampling={"temperature": 0.5}) == (512, 256)
    assert rl(512, sampling={"max_tokens": 100}) == (512, 100)
    assert rl(512, row_tokens=128) == (128, 64)
    assert rl(512, row_tokens=600) == (600, 300), "what is given is an error later, and not lowered"
    assert lengths("online_preference", 40_000, tmp_path) == (2048, 512)
    assert lengths("online_preference", 512, tmp_path) == (512, 128)
    assert lengths("sft", 512, tmp_path)[0] == 512 and lengths("sft", 40_000, tmp_path)[0] == 1024
    with pytest.raises(pt.ConfigError, match="max_position_embeddings=512 of the model, which does not hold"):
        rl(512, sampling={"max_tokens": 600})
    config, _ = both("rl", tmp_path, {"path": "student"}, eval_sampling={"temperature": 0.5})
    evaluation = fit_lengths(config, 512).stages[0]
    assert isinstance(evaluation, OnlineSection) and evaluation.eval_sampling is not None
    assert (evaluation.eval_sampling.max_tokens, evaluation.eval_sampling.temperature) == (256, 0.5)


SAMPLING: dict[str, Any] = {
    "max_tokens": 24,
    "temperature": 0.7,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "logit_bias": {5: -1.0},
    "allowed_token_ids": [1, 2, 5],
    "grammar": {"choice": ["yes", "no"]},
    "stop": ["</answer>"],
    "stop_token_ids": [9],
    "ignore_eos": True,
    "skip_special_tokens": False,
}
EVALUATED = SAMPLING | {
    "max_tokens": 12,
    "temperature": 1.0,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.2,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "allowed_token_ids": None,
    "grammar": {"json_object": True},
    "stop": [],
    "stop_token_ids": [],
    "ignore_eos": False,
}
"""Other values of each field that an evaluation may have otherwise."""


@pytest.mark.parametrize("kind", ["rl", "online_preference", "distilling"])
def test_eval_sampling_changes_the_fields_that_it_sets(kind: str, tmp_path: Path) -> None:
    assert SAMPLING.keys() == SamplingSection.model_fields.keys() == EVALUATED.keys()
    taught = {"rewards": [], "algorithm": "distill", "teachers": [{"path": "teacher"}]}
    kind, stage = ("rl", taught) if kind == "distilling" else (kind, {})
    greedy = {} if stage else {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}

    def evaluation(patch: Any) -> SamplingSection:
        written, called = both(kind, tmp_path, {"path": "student"}, **stage, sampling=SAMPLING, eval_sampling=patch)
        recorded = tmp_path / "config.yaml"
        recorded.write_text(dump_config(written))
        assert written == called == load_config(recorded) == fit_lengths(written, 4096)
        section = written.stages[0]
        assert isinstance(section, OnlineSection) and section.eval_sampling is not None
        return section.eval_sampling

    default = SamplingSection(**{**SAMPLING, **greedy})
    assert evaluation(None) == evaluation({}) == default
    for name, value in EVALUATED.items():
        if not (stage and name == "temperature"):  # the KL from teachers has the temperature of training
            assert evaluation({name: value}) == SamplingSection(**{**SAMPLING, **greedy, name: value}), name
    several = {"max_tokens": 6, "stop": ["."]}
    assert evaluation(several) == SamplingSection(**{**SAMPLING, **greedy, **several})
    fields = {**stage, "rewards": NEEDED[kind]["rewards"], **stage, "dataset": {"path": "rows.jsonl"}}
    made = (RLSection if kind == "rl" else OnlinePreferenceSection)(
        **fields, sampling=SamplingSection(**SAMPLING), eval_sampling=SamplingSection(max_tokens=6)
    )
    assert made.held_out_sampling == SamplingSection(**{**SAMPLING, **greedy, "max_tokens": 6})


def test_mistakes_of_eval_sampling_are_told_once(tmp_path: Path) -> None:
    for fields, told in (
        ({"sampling": {"top_p": 2.0}, "eval_sampling": {"max_tokens": 4}}, ["sampling.top_p"]),
        ({"eval_sampling": {"temprature": 1.0}}, ["eval_sampling.temprature"]),
        ({"eval_sampling": 3}, ["eval_sampling"]),
    ):
        with pytest.raises(pt.ConfigError) as error:
            both("rl", tmp_path, {"path": "student"}, **fields)
        lines = str(error.value).splitlines()
        assert len(lines) == 1 and all(f" {name}: " in lines[0] for name in told), lines


def test_mistakes(tmp_path: Path) -> None:
    for kind, fields, words in (
        ("sft", {"num_steps": 3, "num_epochs": 2}, "num_steps=3 and num_epochs=2 both set the length"),
        ("distill", {"on_policy": 0.5, "sampling": {}}, "give num_steps"),
        ("distill", {"teachers": [{"path": "t", "tokenizer": "align"}]}, "give num_steps"),
        ("rl", {"num_epochs": 2}, "num_epochs: unknown field"),
    ):
        with pytest.raises(pt.ConfigError, match=words):
            both(kind, tmp_path, {"path": "student"}, **fields)
