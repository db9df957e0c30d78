"""TRL's names: each leads to a field that there is, in errors and in the reference alike."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.config.messages import config_fields
from posttrain.config.other_names import PAIRS, TRL_NAMES, find_trl_name, trl_names_of
from posttrain.config.yaml_file import build_config
from posttrain.errors import ConfigError
from tests.documents import STAGES


def refusal(kind: str, *, short: bool, **fields: Any) -> str:
    """The error of a configuration that is right but for the given fields of its stage."""
    stage = {"kind": kind, **STAGES[kind], **fields}
    run = {"output": "o", "seed": 1, "model": {"path": "m"}}
    with pytest.raises(ConfigError) as error:
        build_config({**run, **stage} if short else {**run, "stages": [stage]})
    return str(error.value)


def test_every_entry_has_a_field() -> None:
    known = [".".join(map(str, key)) for key, _ in config_fields()]
    used = {entry for field in known for entry in trl_names_of(field)}
    assert [entry for entry in TRL_NAMES if entry not in used] == []
    assert len({(entry.trl, entry.field, entry.kinds) for entry in TRL_NAMES}) == len(TRL_NAMES)
    assert {kind for entry in TRL_NAMES for kind in entry.kinds} <= STAGES.keys()


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize(
    ("kind", "name", "field"),
    [
        ("sft", "max_length", "row_tokens"),
        ("sft", "per_device_train_batch_size", "micro_batch_rows"),
        ("sft", "num_train_epochs", "num_epochs"),
        ("sft", "gradient_accumulation_steps", "batch_rows"),
        ("sft", "learning_rate", "optimizer.learning_rate"),
        ("sft", "neftune_noise_alpha", "noise_alpha"),
        ("sft", "lora_alpha", "model.lora.alpha"),
        ("sft", "output_dir", "output"),
        ("preference", "beta", "loss"),
        ("online_preference", "max_new_tokens", "sampling.max_tokens"),
        ("reward_model", "center_rewards_coefficient", "loss"),
        ("distill", "lmbda", "on_policy"),
        ("rl", "beta", "algorithm.kl_coef"),
        ("rl", "max_completion_length", "sampling.max_tokens"),
        ("rl", "num_generations", "group_size"),
        ("rl", "num_train_epochs", "num_steps"),
        ("rl", "epsilon", "algorithm.clip_low"),
        ("rl", "epsilon_high", "algorithm.clip_high"),
        ("rl", "gradient_accumulation_steps", "prompts_per_step"),
        ("rl", "loss_type", "algorithm"),
    ],
)
def test_names_of_trl_lead_the_hint(kind: str, name: str, field: str, short: bool) -> None:
    message = refusal(kind, short=short, **{name: 1})
    assert f"{name}: unknown field; did you mean {field!r}?" in message
    assert len(message.splitlines()) == 1


def test_a_note_says_where_the_meaning_differs() -> None:
    assert refusal("preference", short=True, beta=0.1).endswith(
        "did you mean 'loss'? (write loss: {kind: sigmoid, beta: 0.1})"
    )


def test_a_field_that_was_meant_is_not_missing_as_well() -> None:
    stage = {name: value for name, value in STAGES["sft"].items() if name != "row_tokens"}
    with pytest.raises(ConfigError) as error:
        build_config({"output": "o", "seed": 1, "model": {"path": "m"}, "kind": "sft", **stage, "max_length": 8})
    assert len(str(error.value).splitlines()) == 1


def test_names_are_those_of_the_kind_of_stage() -> None:
    assert find_trl_name("beta", ["loss"], "preference") is not None
    assert find_trl_name("beta", ["loss"], "sft") is None
    assert find_trl_name("num_generations", ["stages.rl.group_size"]) is None
    assert [entry.trl for entry in trl_names_of("stages.reward_model.loss")] == [
        "loss_type",
        "center_rewards_coefficient",
    ]
    assert all("beta" in [e.trl for e in trl_names_of(f"stages.{kind}.loss")] for kind in PAIRS)
